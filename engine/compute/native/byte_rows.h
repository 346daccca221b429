// Rows of integers of 8 bits with a scale each, as pages of bytes keep keys and values; and how they are multiplied.
//
// Products are taken of pairs of 16-bit integers and summed as integers, which is exact: so every form of the kernels
// gives the same sums, and what is lost is lost in rounding to integers alone.

#pragma once

#include "pages.h"

namespace {

constexpr float MOST_BYTE = 127, MOST_SHORT = 32767;
constexpr float LEAST_ROW = 1e-30f;  // a row whose largest is less counts as zeros: its inverse would be no number

typedef int16_t NativeShorts __attribute__((vector_size(4 * WIDTH)));

// Sixteen sums of whole numbers.
struct Ints {
  NativeInts part[PARTS];
};

SLIP_INLINE Floats to_floats(Ints a) {
  Floats v;
  SLIP_PARTS(v.part[i] = __builtin_convertvector(a.part[i], Native));
  return v;
}

// Where in pages of bytes a row of one head of one block lies, and where its scale.
inline Index byte_row(Index head, Index offset, Index block_size, Index dim) {
  return head * block_size * (dim + 4) + offset * dim;
}
inline Index row_scale(Index head, Index offset, Index block_size, Index dim) {
  return byte_row(head, block_size, block_size, dim) + 4 * offset;
}

// Rows [.., dim] of pairs of integers, each with its scale behind it.
inline Index scaled_size(Index dim) { return dim + 2; }
SLIP_INLINE float scale_behind(const int16_t* row, Index dim) {
  float scale;
  memcpy(&scale, row + dim, 4);
  return scale;
}

// The largest size of a row's numbers, NaN where one is not finite.
inline float largest_of(const Element* row, Index dim) {
  Floats top = zeros(), broken = zeros();
  for (Index j = 0; j < dim; j += LANES) {
    const Floats size = absolute(load(row + j));
    top = maximum(size, top);
    broken = fma(size, zeros(), broken);
  }
  return greatest(top) + sum(broken);
}

// What a row is multiplied with to make its largest `most`, 0 where it has none.
inline float inverse_of(float largest, float most) { return largest > LEAST_ROW ? most / largest : 0.f; }

// `to` [dim] and its scale: the nearest whole multiples of a 127th of the row's largest.
inline void store_byte_row(const Element* row, Index dim, int8_t* to, int8_t* scale_to) {
  const float largest = largest_of(row, dim), inverse = inverse_of(largest, MOST_BYTE);
  const float scale = largest / MOST_BYTE;
  memcpy(scale_to, &scale, 4);
  if (inverse == 0) return (void)std::fill_n(to, dim, 0);
  for (Index j = 0; j < dim; j += LANES) store_int8(to + j, nearest_whole(load(row + j) * broadcast(inverse)));
}

// The same in 16 bits, as packed keys take it: of four numbers the first and the third come first.
inline void take_integers(const Element* row, Index dim, int16_t* to) {
  const float largest = largest_of(row, dim), inverse = inverse_of(largest, MOST_SHORT);
  const float scale = largest / MOST_SHORT;
  memcpy(to + dim, &scale, 4);
  for (Index j = 0; j < dim; j += LANES) {
    float whole[LANES];
    store_floats(whole, inverse ? nearest_whole(load(row + j) * broadcast(inverse)) : zeros());
    for (Index i = 0; i < LANES; i += 4) {
      to[j + i] = (int16_t)whole[i], to[j + i + 1] = (int16_t)whole[i + 2];
      to[j + i + 2] = (int16_t)whole[i + 1], to[j + i + 3] = (int16_t)whole[i + 3];
    }
  }
}

// A register of a row's bytes from column j on, zeros behind the row's end.
SLIP_INLINE NativeInts words_of(const int8_t* row, Index j, Index d) {
  if (!row) return NativeInts{};
#if defined(__AVX512F__)
  return (NativeInts)_mm512_maskz_loadu_epi32(d - j >= 64 ? 0xFFFF : 0xFF, row + j);
#else
  return (NativeInts)load_bytes(row + j);
#endif
}

// `count` rows of d, a multiple of 32, at `places`, as [d / 2][KEYS] pairs.
void pack_keys(const int8_t* rows, const Index* places, Index count, Index d, int16_t* packed,
               Upcoming<int8_t>& upcoming) {
  for (Index p = 0; p < count; p += WIDTH)
    for (Index j = 0; j < d; j += 4 * WIDTH) {
      NativeInts r[WIDTH];
      upcoming.some(12);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) r[i] = words_of(row_of(rows, places[p + i]), j, d);
      transpose(r);
      const auto put = [&](int i) __attribute__((always_inline)) {
        int16_t* to = packed + ((j / 4 + i) * 2 * KEYS + p) * 2;
        store_native(to, (Native)((NativeShorts)r[i] << 8 >> 8));
        store_native(to + 2 * KEYS, (Native)((NativeShorts)r[i] >> 8));
      };
      repeat<WIDTH / 2>(SLIP_EACH_OF(i) { put(i); });
      if (WIDTH < 16 || d - j >= 64) repeat<WIDTH / 2>(SLIP_EACH_OF(i) { put(WIDTH / 2 + i); });
    }
}

// Pairs of 32 columns of two rows, null for a row of zeros.
SLIP_INLINE void put_byte_pairs(int16_t* to, const int8_t* even, const int8_t* odd) {
#if defined(__AVX512F__)
  const auto wide = [](const int8_t* row) {
    return row ? _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)row)) : _mm512_setzero_si512();
  };
  store_pairs(to, wide(even), wide(odd));
#else
  static constexpr int8_t NONE[32] = {};
  if (!even) even = NONE;
  if (!odd) odd = NONE;
  for (Index j = 0; j < 32; j++) to[2 * j] = even[j], to[2 * j + 1] = odd[j];
#endif
}

// `count` rows of d, an even number, at `places`, as [count / 2][d] pairs.
void pack_values(const int8_t* rows, const Index* places, Index count, Index d, int16_t* packed,
                 Upcoming<int8_t>& upcoming) {
  for (Index p = 0; p < count; p += 2) {
    const int8_t *even = row_of(rows, places[p]), *odd = row_of(rows, places[p + 1]);
    for (Index j = 0; j < d; j += 32) {
      upcoming.some(1);
      put_byte_pairs(packed + p * d + 2 * j, even ? even + j : nullptr, odd ? odd + j : nullptr);
    }
  }
}

// sums + the products of each two 16-bit integers in a word.
SLIP_INLINE NativeInts dot_pairs(NativeInts sums, NativeInts a, NativeInts b) {
#if defined(__AVX512VNNI__)
  return (NativeInts)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  return sums + (NativeInts)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sums + (NativeInts)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Adds to sums[i][v] a pair of rows [.., stride] times the pairs at `packed`.
template <int M, int V>
SLIP_INLINE void multiply(Ints (&sums)[M][V], const int16_t* rows, Index stride, const int16_t* packed) {
  Ints columns[V];
  repeat<V>(SLIP_EACH_OF(v) {
    SLIP_PARTS(columns[v].part[i] = (NativeInts)load_native(packed + 2 * (LANES * v + WIDTH * i)));
  });
  repeat<M>(SLIP_EACH_OF(m) {
    const NativeInts row = load_four((const int8_t*)(rows + m * stride));
    repeat<V>(SLIP_EACH_OF(v) {
      SLIP_PARTS(sums[m][v].part[i] = dot_pairs(sums[m][v].part[i], columns[v].part[i], row));
    });
  });
}

// Sixteen whole numbers from -32767 to 32767.
SLIP_INLINE void store_int16(int16_t* p, Floats v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)v.part[0])));
#else
  float numbers[LANES];
  store_floats(numbers, v);
  for (Index i = 0; i < LANES; i++) p[i] = (int16_t)numbers[i];
#endif
}

}  // namespace
