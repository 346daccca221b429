// One tile of attention against one block of positions, in registers.

#pragma once

#include "pages.h"

namespace {

constexpr int TOGETHER = 6;         // rows that are multiplied at once: 6 * 4 sums, beside the keys
constexpr Index ROWS_AT_ONCE = 16;  // rows of the next block that are asked for between two parts of the work
constexpr float NOTHING = -3e38f;   // the largest score of a row that has seen none; differences stay numbers

// 2^x for x <= 0 within 5e-5 of its value, and 1 for 0. NaN stays NaN.
inline __m512 power(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.f), x);  // the second of the two where either is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(9.6181291e-3f);
  for (float c : {5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// A row's record while it attends: sums [dim], total [16] of its weights by lane, largest [16] score, all equal.
inline Index record_size(Index dim) { return dim + 32; }

// From products of query and key to exponents of 2.
class Scores {
 public:
  Scores(float scale, float softcap)
      : scale_(softcap > 0 ? scale / softcap : scale * LOG2_E), limit_(softcap > 0 ? softcap * LOG2_E : 0) {}

  __m512 operator()(__m512 products) const {
    const __m512 s = _mm512_mul_ps(products, _mm512_set1_ps(scale_));
    return limit_ > 0 ? _mm512_mul_ps(tanh(s), _mm512_set1_ps(limit_)) : s;
  }

 private:
  static constexpr float LOG2_E = 1.44269504f;

  static __m512 tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.f), e = exponential(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.f)));
    const __m512 size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(size, negative, _mm512_setzero_ps(), size);
  }

  float scale_, limit_;
};

// Turns one row's products with V * 16 keys into weights, and brings its total and largest score, which lie one
// behind the other, up to date. Returns by what its sums are to be multiplied. `seen` has a bit for each key.
template <int V>
inline __m512 weigh(const __m512* products, uint64_t seen, const Scores& scores, float* total, bf16* weights) {
  float* largest = total + 16;
  const __m512 before = _mm512_load_ps(largest), hidden = _mm512_set1_ps(-INFINITY);
  __m512 s[V], top = before;
  for (int v = 0; v < V; v++) {
    s[v] = _mm512_mask_blend_ps((__mmask16)(seen >> 16 * v), hidden, scores(products[v]));
    top = _mm512_max_ps(s[v], top);  // passes over NaN, which its weight will show
  }
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  const __m512 factor = power(_mm512_sub_ps(before, top));
  __m512 sum = _mm512_load_ps(total);
  for (int v = 0; v < V; v++) {
    const __m512 weight = power(_mm512_sub_ps(s[v], top)), used = rounded(weight);  // values take it rounded
    store(weights + 16 * v, weight);
    sum = v ? _mm512_add_ps(sum, used) : _mm512_fmadd_ps(sum, factor, used);
  }
  _mm512_store_ps(total, sum);
  _mm512_store_ps(largest, top);
  return factor;
}

inline __m512bh pair_of(const bf16* p) {
  int32_t both;
  memcpy(&both, p, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

// The sums of M rows over 16 * D dimensions: times its factor, plus each row's weights [.., KEYS] times the values
// of V * 16 positions.
template <int M, int V, int D>
inline void add_values(const bf16* weights, const __m512* factors, const bf16* values, Index dim, float* records) {
  __m512 sums[M][D];
  for (int i = 0; i < M; i++)
    for (int d = 0; d < D; d++)
      sums[i][d] = _mm512_mul_ps(_mm512_load_ps(records + i * record_size(dim) + 16 * d), factors[i]);
  for (Index p = 0; p < V * 16; p += 2, values += 2 * dim) {
    __m512bh of[D];
    for (int d = 0; d < D; d++) of[d] = pairs(values + 32 * d);
    for (int i = 0; i < M; i++) {
      const __m512bh weight = pair_of(weights + i * KEYS + p);
      for (int d = 0; d < D; d++) sums[i][d] = _mm512_dpbf16_ps(sums[i][d], weight, of[d]);
    }
  }
  for (int i = 0; i < M; i++)
    for (int d = 0; d < D; d++) _mm512_store_ps(records + i * record_size(dim) + 16 * d, sums[i][d]);
}

// What rows attend to together, and how.
struct Block {
  const bf16 *keys, *values;  // as pages.h packs them
  Scores scores;
  Index dim;
  Upcoming& upcoming;
};

// M rows of `query` [.., dim] against the first V * 16 positions of a block.
template <int M, int V>
void attend_rows(const Block& b, const bf16* query, const uint64_t* seen, float* records) {
  const Index dim = b.dim, size = record_size(dim);
  __m512 products[M][V];
  for (auto& row : products)
    for (auto& part : row) part = _mm512_setzero_ps();
  for (Index j = 0; j < dim / 2; j++) {
    __m512bh of[V];
    for (int v = 0; v < V; v++) of[v] = pairs(b.keys + (j * KEYS + 16 * v) * 2);
    for (int i = 0; i < M; i++) {
      const __m512bh asked = pair_of(query + i * dim + 2 * j);
      for (int v = 0; v < V; v++) products[i][v] = _mm512_dpbf16_ps(products[i][v], asked, of[v]);
    }
  }
  b.upcoming.some(ROWS_AT_ONCE);
  alignas(64) bf16 weights[M * KEYS];
  __m512 factors[M];
  for (int i = 0; i < M; i++)
    factors[i] = weigh<V>(products[i], seen[i], b.scores, records + i * size + dim, weights + i * KEYS);
  b.upcoming.some(ROWS_AT_ONCE);
  Index d = 0;
  for (; d + 64 <= dim; d += 64) add_values<M, V, 4>(weights, factors, b.values + 2 * d, dim, records + d);
  if (d < dim) add_values<M, V, 2>(weights, factors, b.values + 2 * d, dim, records + d);
}

// The same for as many rows and vectors of positions as there are.
template <int M = TOGETHER, int V = KEYS / 16>
void attend_some(Index rows, Index vectors, const Block& b, const bf16* query, const uint64_t* seen,
                 float* records) {
  if constexpr (M > 1)
    if (rows < M) return attend_some<M - 1, V>(rows, vectors, b, query, seen, records);
  if constexpr (V > 2)
    if (vectors <= V / 2) return attend_some<M, V / 2>(rows, vectors, b, query, seen, records);
  attend_rows<M, V>(b, query, seen, records);
}

// Any number of rows, each with its mask. Positions behind the last that a few of them see are not looked at.
void attend_block(const Block& b, Index rows, const bf16* query, const uint64_t* seen, float* records) {
  for (Index i = 0; i < rows; i += TOGETHER) {
    const Index together = std::min<Index>(TOGETHER, rows - i);
    uint64_t any = 0;
    for (Index r = i; r < i + together; r++) any |= seen[r];
    if (any)
      attend_some(together, parts_of(64 - __builtin_clzll(any), 16), b, query + i * b.dim, seen + i,
                  records + i * record_size(b.dim));
  }
}

// Begins `rows` records anew.
inline void clear(float* records, Index rows, Index dim) {
  for (Index i = 0; i < rows; i++) {
    float* record = records + i * record_size(dim);
    std::fill(record, record + dim + 16, 0.f);
    std::fill(record + dim + 16, record + dim + 32, NOTHING);
  }
}

// Adds to each of `whole` what the same row has seen in later positions; exact where either has seen nothing.
void fold(float* whole, const float* part, Index rows, Index dim) {
  for (Index i = 0; i < rows; i++, whole += record_size(dim), part += record_size(dim)) {
    const __m512 before = _mm512_load_ps(whole + dim + 16), later = _mm512_load_ps(part + dim + 16);
    const __m512 top = _mm512_max_ps(before, later);
    const __m512 a = power(_mm512_sub_ps(before, top)), b = power(_mm512_sub_ps(later, top));
    for (Index j = 0; j < dim + 16; j += 16)
      _mm512_store_ps(whole + j, _mm512_fmadd_ps(_mm512_load_ps(part + j), b,
                                                 _mm512_mul_ps(_mm512_load_ps(whole + j), a)));
    _mm512_store_ps(whole + dim + 16, top);
  }
}

// What a row has attended to: its sums over its total.
inline void finish(const float* record, bf16* output, Index dim) {
  const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(record + dim)));
  for (Index j = 0; j < dim; j += 16) store(output + j, _mm512_div_ps(_mm512_load_ps(record + j), total));
}

}  // namespace
