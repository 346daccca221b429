// Packed weights: panels of 32 outputs, in the order in which products read them.

#pragma once

#include "team.h"

namespace {

constexpr Index PANEL = 32;  // output columns in one panel: two vectors

// What becomes of the sums of 16 outputs: each times its scale, plus its bias; null for none. Rounded once where there
// is a scale, whatever loop it ends.
inline __m512 finished(__m512 sums, const float* scales, const bf16* bias) {
  if (scales && bias) return _mm512_fmadd_ps(sums, _mm512_loadu_ps(scales), load(bias));
  if (scales) return _mm512_mul_ps(sums, _mm512_loadu_ps(scales));
  return bias ? _mm512_add_ps(sums, load(bias)) : sums;
}

// As slip_pack leaves it: [k / 2][32][2].
struct Bf16Panel {
  const bf16* at;
  const float* scales;  // [32] or null

  // Inputs 2j and 2j + 1 of 16 outputs, beside each other for one multiply.
  __m512bh pair(Index j, int half) const { return pairs(at + (2 * j + half) * PANEL); }
};

// As slip_quantize leaves it: [k / 2][2][2][16], by pair of inputs, half of the outputs, input and output. Such an
// integer is the same number in bfloat16: products are taken of integers, and rounded no more than others are.
struct Int8Panel {
  const int8_t* at;
  const float* scales;  // what one is worth in each output, [32]

  __m512bh pair(Index j, int half) const {
    const int8_t* even = at + (2 * j + half) * PANEL;
    const __m512i high = (__m512i)whole(even + 16), low = _mm512_srli_epi32((__m512i)whole(even), 16);
    return (__m512bh)_mm512_or_si512(high, low);
  }

  // The same numbers written out in `space` [32 * k], for many rows to read.
  Bf16Panel expanded(bf16* space, Index k) const {
    for (Index j = 0; j < k / 2; j++)
      for (int half = 0; half < 2; half++) _mm512_storeu_si512(space + (2 * j + half) * PANEL, (__m512i)pair(j, half));
    return {space, scales};
  }

 private:
  // 16 integers as floats, whose lower halves are zero: the upper ones are the bfloat16s.
  static __m512 whole(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
};

}  // namespace

extern "C" {

// weight [out, k] as panels [out / 32][k / 2][32][2].
void slip_pack(Team* team, const bf16* weight, bf16* packed, Index out, Index k) {
  const auto pack = [&](Index p) {
    for (Index j = 0; j < k / 2; j++)
      for (Index r = 0; r < PANEL; r++)
        memcpy(packed + p * PANEL * k + j * 2 * PANEL + 2 * r, weight + (p * PANEL + r) * k + 2 * j, 4);
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, pack); });
}

// What slip_pack made as integers from -127 to 127, the largest weight of each output being one of the two, and
// what one of them is worth in each output, scales [out].
void slip_quantize(Team* team, const bf16* packed, int8_t* integers, float* scales, Index out, Index k) {
  const auto quantize = [&](Index p) {
    const bf16* from = packed + p * PANEL * k;
    int8_t* to = integers + p * PANEL * k;
    float largest[PANEL] = {}, inverse[PANEL];
    for (Index at = 0; at < PANEL * k; at++) {
      float& so_far = largest[at / 2 % PANEL];
      so_far = std::max(so_far, std::abs(value(from[at])));
    }
    for (Index r = 0; r < PANEL; r++) {
      scales[p * PANEL + r] = largest[r] / 127;
      inverse[r] = largest[r] > 0 ? 127 / largest[r] : 0;
    }
    for (Index at = 0; at < PANEL * k; at++) {
      const Index j = at / (2 * PANEL), r = at / 2 % PANEL, odd = at % 2;
      to[(2 * j + r / 16) * PANEL + 16 * odd + r % 16] = (int8_t)std::nearbyint(value(from[at]) * inverse[r]);
    }
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, quantize); });
}

}  // extern "C"
