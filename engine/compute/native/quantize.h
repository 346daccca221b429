// Weights of few bits from elements: of each 32 inputs the scale that leaves the least error.

#pragma once

#include "float_panels.h"

namespace {

constexpr int TRIES = 12;  // ranges of codes that are tried: the whole of the numbers, and smaller ones

// Thirty-two numbers as codes from 0 to `most`, each worth scale * code + least, and by how much they differ.
struct Fit {
  Floats codes[2];
  float scale, least, error;
};

inline float nearest_half(float number) { return half_value(half_of(number)); }

// The codes for a scale and a least value, as they will be stored.
SLIP_INLINE Fit fitted(const Floats (&x)[2], float scale, float least, float most) {
  Fit fit{{}, nearest_half(scale), nearest_half(least), 0};
  const float inverse = fit.scale != 0 ? 1 / fit.scale : 0;
  Floats squares = zeros();
  repeat<2>(SLIP_EACH_OF(i) {
    const Floats code = nearest_whole((x[i] - broadcast(fit.least)) * broadcast(inverse));
    fit.codes[i] = minimum(maximum(code, zeros()), broadcast(most));
    const Floats wrong = fma(fit.codes[i], broadcast(fit.scale), broadcast(fit.least)) - x[i];
    squares = fma(wrong, wrong, squares);
  });
  fit.error = sum(squares);
  return fit;
}

// The scale and the least value that suit these codes best.
SLIP_INLINE Fit refitted(const Floats (&x)[2], const Fit& by, float most) {
  const Floats* c = by.codes;
  const float n = 2 * LANES, codes = sum(c[0] + c[1]), numbers = sum(x[0] + x[1]);
  const float squares = sum(c[0] * c[0] + c[1] * c[1]), products = sum(c[0] * x[0] + c[1] * x[1]);
  const float spread = n * squares - codes * codes;
  if (!(spread > 0)) return by;
  const float scale = (n * products - codes * numbers) / spread;
  return fitted(x, scale, (numbers - scale * codes) / n, most);
}

inline Fit best_fit(const Floats (&x)[2], float most) {
  const float low = std::min(least(x[0]), least(x[1])), high = std::max(greatest(x[0]), greatest(x[1]));
  Fit best = fitted(x, half_value(half_not_below((high - low) / most)), low, most);
  for (int i = 0; i < TRIES; i++) {
    const float part = 1 - 0.025f * i, scale = part * (high - low) / most;
    const Fit first = fitted(x, scale, (low + high - scale * most) / 2, most), second = refitted(x, first, most);
    for (const Fit& fit : {first, second})
      if (fit.error < best.error) best = fit;
  }
  return best;
}

inline void quantize_span(OfQ4_1, const Floats (&x)[2], StoredSpan& to) {
  const Fit fit = best_fit(x, 15);
  to.scale = half_of(fit.scale);
  to.least = half_of(fit.least);
  for (int i = 0; i < 2; i++) store_int8((int8_t*)to.codes + LANES * i, fit.codes[i]);
}

// With eight bits the largest number decides. Its scale is rounded up: a smaller one would cut it off, by much where
// scales are so small that few half-precision numbers are near.
inline void quantize_span(OfQ8_0, const Floats (&x)[2], StoredSpan& to) {
  to.scale = half_not_below(greatest(maximum(absolute(x[0]), absolute(x[1]))) / 127);
  const float scale = half_value(to.scale), inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < 2; i++) {
    const Floats code = nearest_whole(x[i] * broadcast(inverse));
    store_int8((int8_t*)to.codes + LANES * i, minimum(maximum(code, broadcast(-127.f)), broadcast(127.f)));
  }
  for (int i = 0; i < 2 * LANES; i++) to.codes[i] ^= 0x80;
}

template <class F>
void quantize_panel(const Element* from, uint8_t* panel, Index k) {
  memset(panel, 0, F::panel_bytes(k));
  for (Index o = 0; o < PANEL; o++)
    for (Index b = 0; b < k / BLOCK; b++) {
      alignas(64) float numbers[BLOCK];
      for (Index i = 0; i < BLOCK; i++) numbers[i] = value(from[place_in_panel(o, b * BLOCK + i)]);
      const Floats x[2] = {load_floats(numbers), load_floats(numbers + LANES)};
      StoredSpan span{};
      quantize_span(F(), x, span);
      put_span<F>(span, panel + b * F::BYTES, o);
    }
}

}  // namespace

extern "C" {

// What slip_pack made [out, k] in panels of Q4_1 or Q8_0; k a multiple of 32.
void slip_quantize(Team* team, Index format, const Element* packed, uint8_t* panels, Index out, Index k) {
  const Index bytes = slip_panel_bytes(format, k);
  const auto quantize = [&](Index p) {
    const Element* from = packed + p * PANEL * k;
    if (format == Q4_1) quantize_panel<OfQ4_1>(from, panels + p * bytes, k);
    if (format == Q8_0) quantize_panel<OfQ8_0>(from, panels + p * bytes, k);
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, quantize); });
}

}  // extern "C"
