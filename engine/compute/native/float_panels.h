// Weights of 8-bit floats (E4M3: a sign, four bits of exponent, three of fraction) as they lie in memory, and rows of
// numbers times them.
//
// A panel is a row of spans of 128 inputs: first a scale for each of 32 outputs, then a byte for each input of each,
// where slip_pack would put a bfloat16. What a byte stands for is exact in every type of elements, so that many rows
// are multiplied with a span turned into elements and few with the bytes themselves, and both give the same bits: a
// row's sum of each span is taken by itself and multiplied with the span's scale.

#pragma once

#include "block_formats.h"
#include "matrix_products.h"

namespace {

constexpr Index FLOAT_SPAN = 128;  // inputs with one scale
constexpr Index FLOAT_SCALES = PANEL * sizeof(float);

// Moved by seven bits such a float is half-precision, subnormal or not, that is so much smaller.
constexpr float FLOAT_UNIT = 256;

constexpr Index float_panel_bytes(Index k) { return (k + FLOAT_SPAN - 1) / FLOAT_SPAN * FLOAT_SCALES + k * PANEL; }

// One register of the even or of the odd ones of bytes that take turns, as floats of a FLOAT_UNIT.
SLIP_INLINE Native load_e4m3_part(const uint8_t* p, int odd) {
  typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));
  typedef Shorts ShortsAnywhere __attribute__((aligned(1), may_alias));
  const Shorts both = *(const ShortsAnywhere*)p;
  const Shorts half = odd ? (both & 0x8000) | (both & 0x7F00) >> 1 : (both & 0x80) << 8 | (both & 0x7F) << 7;
  return load_half(&half);
}

SLIP_INLINE Floats load_e4m3(const uint8_t* p, int odd) {
  Floats v;
  SLIP_PARTS(v.part[i] = load_e4m3_part(p + 2 * WIDTH * i, odd));
  return v;
}

// The same as an ElementPanel: [inputs / 2][2] blocks, by pair of inputs and half of the outputs.
struct BytePanel {
  const uint8_t* at;

  const uint8_t* block(Index j, int half) const { return at + (2 * j + half) * PANEL; }
#if SLIP_PAIRED
  SLIP_INLINE Pair both(Index j, int half) const { return paired(one(j, half, 0), one(j, half, 1)); }
#endif
  SLIP_INLINE Floats one(Index j, int half, int odd) const { return load_e4m3(block(j, half), odd); }
};

// Asks for what lies behind the bytes of a pair of inputs.
struct AskBehind {
  const uint8_t* at;

  SLIP_INLINE void operator()(Index pair) const { ask_for(at + pair * 2 * PANEL + AHEAD); }
};

// `inputs` of a panel's bytes as elements; an ElementPanel.
inline void turn_into_elements(const uint8_t* bytes, Index inputs, Element* to) {
  const BytePanel from{bytes};
  const AskBehind ask{bytes};
  for (Index j = 0; j < inputs / 2; j++) {
    ask(j);
    for (int half = 0; half < 2; half++, to += PANEL) {
      const Floats even = from.one(j, half, 0), odd = from.one(j, half, 1);
#if SLIP_ELEMENT == SLIP_BFLOAT16
      store_floats((float*)to, as_floats((bits_of(odd) & broadcast(0xFFFF0000u)) | bits_of(even) >> 16));
#else
      store(to, even);
      store(to + LANES, odd);
#endif
    }
  }
}

// A span of a panel: `inputs` of it, and the scales of its outputs.
struct FloatSpan {
  const float* scales;
  const uint8_t* bytes;
  Index inputs;
};

// sums [n][32] += part [n][32] * scales [32].
inline void add_scaled(const float (*part)[PANEL], Index n, const float* scales, float (*sums)[PANEL]) {
  for (Index i = 0; i < n; i++)
    for (Index by = 0; by < PANEL; by += LANES)
      store_floats(sums[i] + by, fma(load_floats(part[i] + by), load_floats(scales + by), load_floats(sums[i] + by)));
}

#if SLIP_MATRIX_UNIT

// sums [M][32] += rows [M, stride] times a span, by vectors.
template <int M>
__attribute__((noinline)) void add_span(const float* rows, Index stride, const FloatSpan& span, float (*sums)[PANEL]) {
  alignas(64) float part[M][PANEL];
  vector_sums<M>(rows, stride, span.inputs, BytePanel{span.bytes}, AskBehind{span.bytes}, part);
  add_scaled(part, M, span.scales, sums);
}

// sums [n][32] += rows [n, stride] times a span, which `elements` are, by the unit.
inline void add_elements(const Number* rows, Index n, Index stride, const FloatSpan& span, const Element* elements,
                         float (*sums)[PANEL]) {
  const Index parts = (n + MATRIX_ROWS - 1) / MATRIX_ROWS;
  alignas(64) float some[MATRIX_ROWS][PANEL];
  for (Index part = 0; part < parts; part++) {
    const Index first = part * n / parts, count = (part + 1) * n / parts - first;
    matrix_sums(rows + first * stride, count, stride, span.inputs, elements, [](Index) {}, some);
    add_scaled(some, count, span.scales, sums + first);
  }
}

// What vectors multiply few rows of x as.
inline const float* few_numbers(const Number* x, Index count) { return floats_of(x, count); }

#else

// sums [M][32] += rows [M, stride] times `inputs` of a panel, each output's times its scale.
template <int M, class Panel, class Next>
__attribute__((noinline)) void add_panel(const Number* rows, Index stride, const FloatSpan& span, const Panel& panel,
                                         Next next, float (*sums)[PANEL]) {
  constexpr int V = tile_vectors<M>();
  for (int half = 0; half < 2; half += V) {
    Floats part[M][V];
    clear(part);
    for (Index j = 0; j < span.inputs / 2; j++) {
      next(j);
      multiply(part, rows + 2 * j, stride, PairOf<Panel>{panel, j, half});
    }
    repeat<M>(SLIP_EACH_OF(i) {
      repeat<V>(SLIP_EACH_OF(v) {
        float* const sum = sums[i] + LANES * (half + v);
        store_floats(sum, fma(part[i][v], load_floats(span.scales + LANES * (half + v)), load_floats(sum)));
      });
    });
  }
}

template <int M>
void add_span(const Number* rows, Index stride, const FloatSpan& span, float (*sums)[PANEL]) {
  add_panel<M>(rows, stride, span, BytePanel{span.bytes}, AskBehind{span.bytes}, sums);
}

template <int M>
void add_tile(Index n, const Number* rows, Index stride, const FloatSpan& span, const ElementPanel& panel,
              float (*sums)[PANEL]) {
  if (n == M) add_panel<M>(rows, stride, span, panel, [](Index) {}, sums);
  else if constexpr (M > 1) add_tile<M - 1>(n, rows, stride, span, panel, sums);
}

inline void add_elements(const Number* rows, Index n, Index stride, const FloatSpan& span, const Element* elements,
                         float (*sums)[PANEL]) {
  const Index parts = (n + TILE - 1) / TILE;
  for (Index part = 0; part < parts; part++) {
    const Index first = part * n / parts, count = (part + 1) * n / parts - first;
    add_tile<TILE>(count, rows + first * stride, stride, span, {elements}, sums + first);
  }
}

inline const Number* few_numbers(const Number* x, Index) { return x; }

#endif

// Calls `work(span, first input)` for each span of a panel.
template <class Work>
SLIP_INLINE void for_spans(const uint8_t* panel, Index k, Work work) {
  for (Index first = 0; first < k; first += FLOAT_SPAN, panel += FLOAT_SCALES + FLOAT_SPAN * PANEL)
    work(FloatSpan{(const float*)panel, panel + FLOAT_SCALES, std::min(FLOAT_SPAN, k - first)}, first);
}

// sums [n][32] = x [n, k] times a panel.
__attribute__((noinline)) void times_float_panel(const uint8_t* panel, const Number* x, Index n, Index k,
                                                 float (*sums)[PANEL]) {
  memset(sums, 0, n * sizeof(*sums));
  if (n <= 2) {
    const auto rows = few_numbers(x, n * k);
    for_spans(panel, k, [&](const FloatSpan& span, Index first) {
      if (n == 1) add_span<1>(rows + first, k, span, sums);
      else if (n == 2) add_span<2>(rows + first, k, span, sums);
    });
    return;
  }
  alignas(64) Element elements[FLOAT_SPAN * PANEL];
  for_spans(panel, k, [&](const FloatSpan& span, Index first) {
    turn_into_elements(span.bytes, span.inputs, elements);
    add_elements(x + first, n, k, span, elements, sums);
  });
}

}  // namespace

extern "C" {

// How many bytes a panel of `k` inputs takes, a multiple of 64; 0 for a format that is not laid out, or not for `k`.
Index slip_panel_bytes(Index format, Index k) {
  if (format == F8_E4M3) return k % 2 ? 0 : float_panel_bytes(k);
  Index bytes = 0;
  with_format(format, [&](auto f) {
    using F = decltype(f);
    if (k % F::SPAN == 0) bytes = F::panel_bytes(k);
  });
  return bytes;
}

// Bytes [out, k], and a scale for each output and span, [out, spans], as panels of F8_E4M3. Outputs that are missing in
// the last panel are zero.
void slip_pack_floats(Team* team, const uint8_t* stored, const float* scales, uint8_t* panels, Index out, Index k) {
  const Index spans = (k + FLOAT_SPAN - 1) / FLOAT_SPAN;
  const auto pack = [&](Index p) {
    uint8_t* panel = panels + p * float_panel_bytes(k);
    memset(panel, 0, float_panel_bytes(k));
    for (Index o = 0; o < std::min(PANEL, out - p * PANEL); o++) {
      const Index output = p * PANEL + o;
      for (Index input = 0; input < k; input++) {
        const Index span = input / FLOAT_SPAN, within = input % FLOAT_SPAN;
        uint8_t* at = panel + span * (FLOAT_SCALES + FLOAT_SPAN * PANEL);
        if (within == 0) ((float*)at)[o] = scales[output * spans + span] * FLOAT_UNIT;
        at[FLOAT_SCALES + (within / 2 * 2 + o / LANES) * PANEL + o % LANES * 2 + within % 2] = stored[output * k + input];
      }
    }
  };
  team->run(true, [&](Worker& me) { me.each((out + PANEL - 1) / PANEL, pack); });
}

}  // extern "C"
