// One tile of attention against one block of positions, in registers.

#pragma once

#include "byte_rows.h"

namespace {

constexpr Index ROWS_AT_ONCE = 16;  // rows of the next block that are asked for between two parts of the work
constexpr float LOG2_E = 1.44269504f;
constexpr float NOTHING = -3e38f;   // the largest score of a row that has seen none; differences stay numbers

// 2^x for x <= 0, and 1 for 0: within 5e-5 of its value, or 2e-7 where elements are that fine. NaN stays NaN.
SLIP_INLINE Floats power(Floats x) {
  x = maximum(broadcast(-200.f), x);  // the second of the two where either is NaN
  const Floats n = nearest_whole(x), f = x - n;
#if SLIP_ELEMENT == SLIP_FLOAT32
  Floats y = fma(broadcast(1.5403530e-4f), f, broadcast(1.3333558e-3f));
  y = fma(y, f, broadcast(9.6181291e-3f));
#else
  Floats y = broadcast(9.6181291e-3f);
#endif
  for (float c : {5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) y = fma(y, f, broadcast(c));
  return scaled(y, n);
}

// A row's record while it attends: sums [dim], total [16] of its weights by lane, largest [16] score, all equal.
inline Index record_size(Index dim) { return dim + 2 * LANES; }

// From products of query and key to exponents of 2.
class Scores {
 public:
  Scores(float scale, float softcap)
      : scale_(softcap > 0 ? scale / softcap : scale * LOG2_E), limit_(softcap > 0 ? softcap * LOG2_E : 0) {}

  SLIP_INLINE Floats operator()(Floats products) const {
    const Floats s = products * broadcast(scale_);
    return limit_ > 0 ? tanh(s) * broadcast(limit_) : s;
  }

 private:
  static SLIP_INLINE Floats tanh(Floats x) {
    const Floats one = broadcast(1.f), e = exponential(absolute(x) * broadcast(-2.f)), size = (one - e) / (one + e);
    return where_negative(x, zeros() - size, size);
  }

  float scale_, limit_;
};

// Which of the vector's sixteen keys are seen.
SLIP_INLINE uint32_t seen_of(uint64_t seen, int vector) { return (uint32_t)(seen >> (LANES * vector)) & 0xFFFF; }

// One row's products with V * 16 keys as scores, and the largest score, which brings the row's own up to date.
template <int V>
SLIP_INLINE Floats score(const Floats* products, uint64_t seen, const Scores& scores, float* largest, Floats* s) {
  const Floats hidden = broadcast(-INFINITY);
  Floats top = load_floats(largest);
  repeat<V>(SLIP_EACH_OF(v) {
    s[v] = where_bit(seen_of(seen, v), scores(products[v]), hidden);
    top = maximum(s[v], top);  // passes over NaN, which its weight will show
  });
  top = broadcast(greatest(top));
  store_floats(largest, top);
  return top;
}

// Turns one row's products with V * 16 keys into weights, and brings its total and largest score, which lie one
// behind the other, up to date. Returns by what its sums are to be multiplied. `seen` has a bit for each key.
template <int V>
SLIP_INLINE Floats weigh(const Floats* products, uint64_t seen, const Scores& scores, float* total, Number* weights) {
  const Floats before = load_floats(total + LANES);
  Floats s[V];
  const Floats top = score<V>(products, seen, scores, total + LANES, s);
  const Floats factor = power(before - top);
  Floats sum = load_floats(total);
  repeat<V>(SLIP_EACH_OF(v) {
    const Floats weight = power(s[v] - top), used = rounded(weight);  // values take it rounded
    put_numbers(weights + LANES * v, weight);
    sum = v ? sum + used : fma(sum, factor, used);
  });
  store_floats(total, sum);
  return factor;
}

// The same for values with scales: the weights are integers, of which each stands for `unit`. That depends on what
// the row sees alone.
template <int V>
SLIP_INLINE Floats weigh(const Floats* products, uint64_t seen, const Scores& scores, float* total,
                         const float* value_scales, int16_t* weights, float& unit) {
  const Floats before = load_floats(total + LANES);
  Floats s[V], most = zeros();
  const Floats top = score<V>(products, seen, scores, total + LANES, s);
  const Floats factor = power(before - top);
  Floats sum = load_floats(total);
  uint32_t broken = 0;
  repeat<V>(SLIP_EACH_OF(v) {
    const Floats weight = power(s[v] - top);
    sum = v ? sum + weight : fma(sum, factor, weight);
    s[v] = where_bit(seen_of(seen, v), weight * load_floats(value_scales + LANES * v), zeros());
    most = maximum(s[v], most);
    broken |= are_nan(s[v]);
  });
  store_floats(total, sum);
  const float largest = greatest(most), inverse = inverse_of(largest, MOST_SHORT);
  unit = broken ? NAN : largest / MOST_SHORT;
  repeat<V>(SLIP_EACH_OF(v) { store_int16(weights + LANES * v, nearest_whole(s[v] * broadcast(inverse))); });
  return factor;
}

// Two neighbours of what rows are multiplied with, in vectors of sixteen from the first on: lines of `packed`, each
// `line` numbers behind the one before, or both in one line by pairs.
struct Lines {
  const Number* packed;
  Index line;

#if SLIP_PAIRED
  SLIP_INLINE Pair both(int v) const { return pair_at(packed + 2 * LANES * v); }
#else
  SLIP_INLINE Floats one(int v, int odd) const { return load_floats(packed + odd * line + LANES * v); }
#endif
};

// The sums of M rows over 16 * D dimensions: times its factor, plus each row's weights [.., KEYS] times the values
// of V * 16 positions.
template <int M, int V, int D>
SLIP_INLINE void add_values(const Number* weights, const Floats* factors, const Number* values, Index dim,
                            float* records) {
  Floats sums[M][D];
  const Index size = record_size(dim);
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<D>(SLIP_EACH_OF(d) { sums[i][d] = load_floats(records + i * size + LANES * d) * factors[i]; });
  });
  for (Index p = 0; p < V * LANES; p += 2, values += 2 * dim) multiply(sums, weights + p, KEYS, Lines{values, dim});
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<D>(SLIP_EACH_OF(d) { store_floats(records + i * size + LANES * d, sums[i][d]); });
  });
}

// The same for values of integers, and weights that are a number of `units` each.
template <int M, int V, int D>
SLIP_INLINE void add_values(const int16_t* weights, const float* units, const Floats* factors, const int16_t* values,
                            Index dim, float* records) {
  Ints sums[M][D] = {};
  const Index size = record_size(dim);
  for (Index p = 0; p < V * LANES; p += 2, values += 2 * dim) multiply(sums, weights + p, KEYS, values);
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<D>(SLIP_EACH_OF(d) {
      float* record = records + i * size + LANES * d;
      store_floats(record, fma(to_floats(sums[i][d]), broadcast(units[i]), load_floats(record) * factors[i]));
    });
  });
}

// What rows attend to together, and how.
struct Block {
  const Number *keys, *values;  // as pages.h packs them
  Scores scores;
  Index dim;
  Upcoming<Element>& upcoming;

  Index query_size() const { return dim; }
};

// The same of integers, as byte_rows.h packs them. Their scales are in the order of positions.
struct ByteBlock {
  const int16_t *keys, *values;
  Scores scores;
  Index dim;
  Upcoming<int8_t>& upcoming;
  const float *key_scales, *value_scales;

  Index query_size() const { return scaled_size(dim); }
};

// products[i][..] of M rows with C vectors of keys.
template <int M, int V, int C>
SLIP_INLINE void take_products(const Block& b, const Number* query, const Number* keys, Floats (*products)[V]) {
  Floats sums[M][C];
  clear(sums);
  for (Index j = 0; j < b.dim / 2; j++) multiply(sums, query + 2 * j, b.dim, Lines{keys + j * 2 * KEYS, KEYS});
  repeat<M>(SLIP_EACH_OF(i) { repeat<C>(SLIP_EACH_OF(v) { products[i][v] = sums[i][v]; }); });
}

// M rows of `query` [.., dim] against the first V * 16 positions of a block.
template <int M, int V>
void attend_rows(const Block& b, const Number* query, const uint64_t* seen, float* records) {
  constexpr int C = std::min(V, MOST_VECTORS), D = std::min(4, MOST_VECTORS);
  const Index dim = b.dim, size = record_size(dim);
  Floats products[M][V];
  for (int v = 0; v < V; v += C)
    take_products<M, V, C>(b, query, b.keys + PER_WORD * LANES * v, (Floats(*)[V])&products[0][v]);
  b.upcoming.some(ROWS_AT_ONCE);
  alignas(64) Number weights[M * KEYS];
  Floats factors[M];
  for (int i = 0; i < M; i++)
    factors[i] = weigh<V>(products[i], seen[i], b.scores, records + i * size + dim, weights + i * KEYS);
  b.upcoming.some(ROWS_AT_ONCE);
  Index d = 0;
  for (; d + LANES * D <= dim; d += LANES * D)
    add_values<M, V, D>(weights, factors, b.values + PER_WORD * d, dim, records + d);
  if constexpr (D > 2)
    if (d < dim) add_values<M, V, 2>(weights, factors, b.values + PER_WORD * d, dim, records + d);
}

// products[i][..] of M rows with C vectors of keys.
template <int M, int V, int C>
SLIP_INLINE void take_products(const ByteBlock& b, const int16_t* query, Index first, Floats (*products)[V]) {
  Ints sums[M][C] = {};
  const Index size = b.query_size();
  for (Index j = 0; j < b.dim / 2; j++) multiply(sums, query + 2 * j, size, b.keys + (j * KEYS + first) * 2);
  repeat<M>(SLIP_EACH_OF(i) {
    const Floats scale = broadcast(scale_behind(query + i * size, b.dim));
    repeat<C>(SLIP_EACH_OF(v) {
      products[i][v] = to_floats(sums[i][v]) * scale * load_floats(b.key_scales + first + LANES * v);
    });
  });
}

// M rows of `query`, each with its scale, against the first V * 16 positions of a block of integers.
template <int M, int V>
void attend_rows(const ByteBlock& b, const int16_t* query, const uint64_t* seen, float* records) {
  constexpr int C = std::min(V, MOST_VECTORS), D = std::min(4, MOST_VECTORS);
  const Index dim = b.dim, size = record_size(dim);
  Floats products[M][V];
  for (int v = 0; v < V; v += C) take_products<M, V, C>(b, query, LANES * v, (Floats(*)[V])&products[0][v]);
  b.upcoming.some(ROWS_AT_ONCE);
  alignas(64) int16_t weights[M * KEYS];
  Floats factors[M];
  float units[M];
  for (int i = 0; i < M; i++)
    factors[i] = weigh<V>(products[i], seen[i], b.scores, records + i * size + dim, b.value_scales,
                          weights + i * KEYS, units[i]);
  b.upcoming.some(ROWS_AT_ONCE);
  Index d = 0;
  for (; d + LANES * D <= dim; d += LANES * D)
    add_values<M, V, D>(weights, units, factors, b.values + 2 * d, dim, records + d);
  if constexpr (D > 2)
    if (d < dim) add_values<M, V, 2>(weights, units, factors, b.values + 2 * d, dim, records + d);
}

// The same for as many rows and vectors of positions as there are.
template <int M = TOGETHER, int V = KEYS / LANES, class AnyBlock, class Query>
void attend_some(Index rows, Index vectors, const AnyBlock& b, const Query* query, const uint64_t* seen,
                 float* records) {
  if constexpr (M > 1)
    if (rows < M) return attend_some<M - 1, V>(rows, vectors, b, query, seen, records);
  if constexpr (V > 2)
    if (vectors <= V / 2) return attend_some<M, V / 2>(rows, vectors, b, query, seen, records);
  attend_rows<M, V>(b, query, seen, records);
}

// Any number of rows, each with its mask. Positions behind the last that a few of them see are not looked at.
template <class AnyBlock, class Query>
void attend_block(const AnyBlock& b, Index rows, const Query* query, const uint64_t* seen, float* records) {
  for (Index i = 0; i < rows; i += TOGETHER) {
    const Index together = std::min<Index>(TOGETHER, rows - i);
    uint64_t any = 0;
    for (Index r = i; r < i + together; r++) any |= seen[r];
    if (any)
      attend_some(together, parts_of(64 - __builtin_clzll(any), LANES), b, query + i * b.query_size(),
                  seen + i, records + i * record_size(b.dim));
  }
}

// Begins `rows` records anew.
inline void clear(float* records, Index rows, Index dim) {
  for (Index i = 0; i < rows; i++) {
    float* record = records + i * record_size(dim);
    std::fill(record, record + dim + LANES, 0.f);
    std::fill(record + dim + LANES, record + dim + 2 * LANES, NOTHING);
  }
}

// Adds to each of `whole` what the same row has seen in later positions; exact where either has seen nothing.
void fold(float* whole, const float* part, Index rows, Index dim) {
  for (Index i = 0; i < rows; i++, whole += record_size(dim), part += record_size(dim)) {
    const Floats before = load_floats(whole + dim + LANES), later = load_floats(part + dim + LANES);
    const Floats top = maximum(before, later);
    const Floats a = power(before - top), b = power(later - top);
    for (Index j = 0; j < dim + LANES; j += LANES)
      store_floats(whole + j, fma(load_floats(part + j), b, load_floats(whole + j) * a));
    store_floats(whole + dim + LANES, top);
  }
}

// What a row has attended to: its sums over its total.
inline void finish(const float* record, Element* output, Index dim) {
  const Floats total = broadcast(sum(load_floats(record + dim)));
  for (Index j = 0; j < dim; j += LANES) store(output + j, load_floats(record + j) / total);
}

// The same where its head's sink, a score, has a share of the total.
inline void finish(const float* record, Element* output, Index dim, float sink) {
  const Floats score = broadcast(sink * LOG2_E), largest = load_floats(record + dim + LANES);
  const Floats top = maximum(score, largest), factor = power(largest - top);
  const Floats total = fma(broadcast(sum(load_floats(record + dim))), factor, power(score - top));
  for (Index j = 0; j < dim; j += LANES) store(output + j, load_floats(record + j) * factor / total);
}

}  // namespace
