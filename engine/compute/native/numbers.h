// The numbers of a model: what type they are, how they become floats and are rounded again, and what products are
// taken of. SLIP_ELEMENT is BFLOAT16, FLOAT16 or FLOAT32.

#pragma once

#include "vector.h"

#define SLIP_BFLOAT16 0
#define SLIP_FLOAT16 1
#define SLIP_FLOAT32 2
#ifndef SLIP_ELEMENT
#define SLIP_ELEMENT SLIP_BFLOAT16
#endif

#if SLIP_ELEMENT == SLIP_FLOAT32
using Element = float;
#else
using Element = uint16_t;
#endif

namespace {

constexpr Index SERIAL = 16384;  // elements below which waking the other threads costs more than it saves

// One register of bfloat16 as floats.
SLIP_INLINE Native load_bfloat16_part(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Native)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Native)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (Native)vshll_n_u16(vld1_u16(p), 16);
#endif
}

SLIP_INLINE Floats load_bfloat16(const uint16_t* p) {
  Floats v;
  SLIP_PARTS(v.part[i] = load_bfloat16_part(p + WIDTH * i));
  return v;
}

// Floats whose upper halves are the nearest bfloat16, ties to even; NaN stays NaN. The lower halves are zero.
SLIP_INLINE Words nearest_bfloat16(Floats v) {
  const Words bits = bits_of(v);
  Words near = (bits + broadcast(0x7FFFu) + ((bits >> 16) & broadcast(1u))) & broadcast(0xFFFF0000u);
  SLIP_PARTS(near.part[i] = v.part[i] == v.part[i] ? near.part[i] : (bits.part[i] & 0xFFFF0000u) | 0x400000u);
  return near;
}

#if SLIP_ELEMENT == SLIP_FLOAT32

SLIP_INLINE Native load_part(const Element* p) { return load_native(p); }

SLIP_INLINE void store(Element* p, Floats v) { store_floats(p, v); }
SLIP_INLINE Floats rounded(Floats v) { return v; }
SLIP_INLINE float value(Element number) { return number; }

#elif SLIP_ELEMENT == SLIP_FLOAT16

SLIP_INLINE Native load_part(const Element* p) { return load_half(p); }

SLIP_INLINE void store(Element* p, Floats v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  SLIP_PARTS(_mm_storeu_si128((__m128i*)(p + WIDTH * i), _mm256_cvtps_ph((__m256)v.part[i], _MM_FROUND_TO_NEAREST_INT)));
#else
  SLIP_PARTS(vst1_u16(p + WIDTH * i, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v.part[i]))));
#endif
}

SLIP_INLINE Floats rounded(Floats v) {
  Element near[LANES];
  store(near, v);
  Floats back;
  SLIP_PARTS(back.part[i] = load_part(near + WIDTH * i));
  return back;
}

SLIP_INLINE float value(Element number) {
  const Element row[WIDTH] = {number};
  return load_part(row)[0];
}

#else

SLIP_INLINE Native load_part(const Element* p) { return load_bfloat16_part(p); }

SLIP_INLINE void store(Element* p, Floats v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v.part[0]));
#else
  const Words near = nearest_bfloat16(v) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)near.part[0]));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)near.part[0], (__m256i)near.part[1]);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
#else
  SLIP_PARTS(vst1_u16(p + WIDTH * i, vmovn_u32((uint32x4_t)near.part[i])));
#endif
#endif
}

SLIP_INLINE Floats rounded(Floats v) {
#if defined(__AVX512BF16__)
  v.part[0] = (Native)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v.part[0])), 16);
  return v;
#else
  return as_floats(nearest_bfloat16(v));
#endif
}

SLIP_INLINE float value(Element number) {
  const uint32_t bits = (uint32_t)number << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

#endif

// Sixteen elements as floats.
SLIP_INLINE Floats load(const Element* p) {
  Floats v;
  SLIP_PARTS(v.part[i] = load_part(p + WIDTH * i));
  return v;
}

// The element nearest to a number.
SLIP_INLINE Element nearest(float number) {
  Element row[LANES];
  store(row, broadcast(number));
  return row[0];
}

// e^x for x <= 0 within 2e-7 of its value: 2^n by the exponent, 2^f by its series on [-1/2, 1/2]. NaN stays NaN.
SLIP_INLINE Floats exponential(Floats x) {
  x = x * broadcast(1.44269504f);
  x = maximum(broadcast(-126.f), x);  // the second of the two where either is NaN
  const Floats n = nearest_whole(x), f = x - n;
  Floats y = broadcast(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    y = fma(y, f, broadcast(c));
  return scaled(y, n);
}

}  // namespace
