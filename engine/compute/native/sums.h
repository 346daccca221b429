// Sums of products: what they are taken of, and how many are kept in registers.
//
// With AVX-512 BF16 two inputs are multiplied by one instruction, as bfloat16. Elsewhere inputs are floats and come
// one after the other. In both, what is added to a sum, and in which order, does not depend on other rows.

#pragma once

#include "numbers.h"

#if defined(__AVX512BF16__) && SLIP_ELEMENT == SLIP_BFLOAT16
#define SLIP_PAIRED 1
#else
#define SLIP_PAIRED 0
#endif

namespace {

#if SLIP_PAIRED

using Number = Element;                 // what products are taken of
constexpr int TILE = 8;                 // rows of x in one tile at most: 16 sums keep both multipliers busy
constexpr int TOGETHER = 6;             // rows that attend together
constexpr int MOST_VECTORS = 4;         // vectors of their sums at once: 6 * 4, beside what they are multiplied with

#else

using Number = float;
constexpr int TILE = WIDTH == 16 ? 8 : 6;
constexpr int TOGETHER = 6;
constexpr int MOST_VECTORS = WIDTH == 16 ? 4 : 1;

#endif

// Vectors of sums for each of M rows in a tile of products: as many as there are registers for. One or two rows have
// both halves of a panel's columns, since a sum waits for the one before it and weights are read in their order then.
template <int M>
constexpr int tile_vectors() { return WIDTH == 16 || M <= 2 ? 2 : 1; }

#if defined(__AVX512F__)

// The 16 bits of `even` and of `odd` by turns.
SLIP_INLINE void store_pairs(void* to, __m512i even, __m512i odd) {
  alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512((char*)to + 64, _mm512_permutex2var_epi16(even, high, odd));
}

#endif

#if SLIP_PAIRED

// Numbers of two inputs in sixteen columns.
using Pair = __m512bh;

SLIP_INLINE Pair pair_at(const Number* p) { return (Pair)_mm512_loadu_si512(p); }

// Numbers of two inputs as floats in one pair; they are bfloat16 exactly.
SLIP_INLINE Pair paired(Floats even, Floats odd) {
  return (Pair)_mm512_or_si512((__m512i)odd.part[0], _mm512_srli_epi32((__m512i)even.part[0], 16));
}

// Pairs of 32 columns of two rows, null for a row of zeros.
SLIP_INLINE void put_pairs(Number* to, const Element* even, const Element* odd) {
  const __m512i a = even ? _mm512_loadu_si512(even) : _mm512_setzero_si512();
  const __m512i b = odd ? _mm512_loadu_si512(odd) : _mm512_setzero_si512();
  store_pairs(to, a, b);
}

SLIP_INLINE Pair spread(const Number* two) {
  int32_t both;
  memcpy(&both, two, 4);
  return (Pair)_mm512_set1_epi32(both);
}

// Adds to sums[i][v] rows [.., stride] times what `of(v)` has of two inputs.
template <int M, int V, class Of>
SLIP_INLINE void multiply(Floats (&sums)[M][V], const Number* rows, Index stride, Of of) {
  Pair columns[V];
  repeat<V>(SLIP_EACH_OF(v) { columns[v] = of.both(v); });
  repeat<M>(SLIP_EACH_OF(i) {
    const Pair row = spread(rows + i * stride);
    repeat<V>(SLIP_EACH_OF(v) {
      sums[i][v].part[0] = (Native)_mm512_dpbf16_ps((__m512)sums[i][v].part[0], columns[v], row);
    });
  });
}

#else

template <int M, int V, class Of>
SLIP_INLINE void multiply(Floats (&sums)[M][V], const Number* rows, Index stride, Of of) {
  repeat<2>(SLIP_EACH_OF(which) {
    if constexpr (WIDTH == 8) asm volatile("" ::: "memory");  // both inputs at once need more registers than there are
    Floats columns[V];
    repeat<V>(SLIP_EACH_OF(v) { columns[v] = of.one(v, which); });
    repeat<M>(SLIP_EACH_OF(i) {
      const Floats row = broadcast(rows[i * stride + which]);
      repeat<V>(SLIP_EACH_OF(v) { sums[i][v] = fma(columns[v], row, sums[i][v]); });
    });
  });
}

#endif

template <int M, int V>
SLIP_INLINE void clear(Floats (&sums)[M][V]) {
  repeat<M>(SLIP_EACH_OF(i) { repeat<V>(SLIP_EACH_OF(v) { sums[i][v] = zeros(); }); });
}

inline void copy_floats(float* to, const Element* from, Index count) {
  Index i = 0;
  for (; i + LANES <= count; i += LANES) store_floats(to + i, load(from + i));
  for (; i < count; i++) to[i] = value(from[i]);
}

// `count` elements as floats, in memory of this thread that serves the next call.
inline const float* floats_of(const Element* x, Index count) {
  static thread_local std::vector<float> space;
  if ((Index)space.size() < count) space.resize(count);
  copy_floats(space.data(), x, count);
  return space.data();
}

#if SLIP_PAIRED || SLIP_ELEMENT == SLIP_FLOAT32

// Elements are numbers.
inline void copy_numbers(Number* to, const Element* from, Index count) { memcpy(to, from, count * sizeof(Element)); }
inline const Number* as_numbers(const Element* x, Index) { return x; }

// Sixteen numbers as products take them, rounded to elements.
SLIP_INLINE void put_numbers(Number* to, Floats v) { store(to, v); }

#else

inline void copy_numbers(Number* to, const Element* from, Index count) { copy_floats(to, from, count); }
inline const Number* as_numbers(const Element* x, Index count) { return floats_of(x, count); }

SLIP_INLINE void put_numbers(Number* to, Floats v) { store_floats(to, rounded(v)); }

#endif

}  // namespace
