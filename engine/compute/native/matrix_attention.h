// Attention of rows to one block of positions by a CPU's matrix unit.

#pragma once

#include "attention_tile.h"
#include "matrix_unit.h"

#if SLIP_MATRIX_UNIT

namespace {

// to [rows][KEYS], of which V * 16 columns are set = rows [.., stride] times columns [count / 2][line][2]; `count` is a
// multiple of STEP.
template <int V>
SLIP_INLINE void put_sums(const Number* rows, Index stride, const Number* columns, Index line, Index count,
                          float* to) {
  constexpr Index WORD = 2 * sizeof(Number), TO_BYTES = KEYS * sizeof(float);
  fence_compiler();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (V > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (Index j = 0; j < count; j += STEP, columns += STEP * line) {
    _tile_loadd(4, rows + j, stride * sizeof(Number));
    _tile_loadd(5, columns, line * WORD);
    _tile_loadd(6, columns + 2 * LANES, line * WORD);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (V > 2) {
      _tile_loadd(7, columns + 4 * LANES, line * WORD);
      _tile_loadd(5, columns + 6 * LANES, line * WORD);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, to, TO_BYTES);
  _tile_stored(1, to + LANES, TO_BYTES);
  if constexpr (V > 2) {
    _tile_stored(2, to + 2 * LANES, TO_BYTES);
    _tile_stored(3, to + 3 * LANES, TO_BYTES);
  }
  fence_compiler();
}

// records [rows, 16 * D of dim] = themselves times the rows' factors, plus weights [rows, KEYS] times the values of
// V * 16 positions.
template <int V, int D>
SLIP_INLINE void add_values_of(Index rows, const Number* weights, const Floats* factors, const Number* values,
                               Index dim, float* records) {
  alignas(64) float sums[UNIT_ROWS][KEYS];
  put_sums<D>(weights, KEYS, values, dim, V * LANES, sums[0]);
  for (Index i = 0; i < rows; i++)
    repeat<D>(SLIP_EACH_OF(d) {
      float* record = records + i * record_size(dim) + LANES * d;
      store_floats(record, fma(load_floats(record), factors[i], load_floats(sums[i] + LANES * d)));
    });
}

// At most UNIT_ROWS of `query` [.., dim] against the first V * 16 positions of a block.
template <int V>
void attend_by_unit(const Block& b, Index rows, const Number* query, const uint64_t* seen, float* records) {
  const Index dim = b.dim, size = record_size(dim);
  alignas(64) float products[UNIT_ROWS][KEYS];
  alignas(64) Number weights[UNIT_ROWS * KEYS];
  Floats factors[UNIT_ROWS];
  put_sums<V>(query, dim, b.keys, KEYS, dim, products[0]);
  b.upcoming.some(ROWS_AT_ONCE);
  for (Index i = 0; i < rows; i++) {
    Floats row[V];
    repeat<V>(SLIP_EACH_OF(v) { row[v] = load_floats(products[i] + LANES * v); });
    factors[i] = weigh<V>(row, seen[i], b.scores, records + i * size + dim, weights + i * KEYS);
  }
  b.upcoming.some(ROWS_AT_ONCE);
  Index d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES)
    add_values_of<V, 4>(rows, weights, factors, b.values + PER_WORD * d, dim, records + d);
  if (d < dim) add_values_of<V, 2>(rows, weights, factors, b.values + PER_WORD * d, dim, records + d);
}

// As the one for blocks of every kind; few rows have no other way, so that a row's bits are the same in any crowd.
inline void attend_block(const Block& b, Index rows, const Number* query, const uint64_t* seen, float* records) {
  for (Index i = 0; i < rows;) {
    const Index each = std::min(UNIT_ROWS, rows - i);
    const MatrixUnit unit({each, each, each, each, each, STEP / 2, STEP / 2, STEP / 2});  // sums, rows, columns
    for (; i + each <= rows; i += each) {
      uint64_t any = 0;
      for (Index r = i; r < i + each; r++) any |= seen[r];
      if (!any) continue;
      const auto attend = (any >> 2 * LANES) ? attend_by_unit<4> : attend_by_unit<2>;
      attend(b, each, query + i * b.dim, seen + i, records + i * record_size(b.dim));
    }
  }
}

}  // namespace

#endif
