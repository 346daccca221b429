// bfloat16 numbers in vectors of 16, and what every kernel needs.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;
using Index = int64_t;

namespace {

constexpr Index SERIAL = 16384;   // elements below which waking the other threads costs more than it saves

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline void store(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }

inline __m512 rounded(__m512 v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}

inline float value(bf16 number) {
  const uint32_t bits = (uint32_t)number << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// e^x for x <= 0 within 2e-7 of its value: 2^n by the exponent, 2^f by its series on [-1/2, 1/2]. NaN stays NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  x = _mm512_max_ps(_mm512_set1_ps(-126.f), x);  // the second of the two where either is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

}  // namespace
