// Sums of products by a CPU's matrix unit: up to 32 rows times a panel's 32 columns at a time.

#pragma once

#include "matrix_unit.h"
#include "panels.h"

#if SLIP_MATRIX_UNIT

namespace {

constexpr Index MATRIX_ROWS = 2 * UNIT_ROWS;  // of sums that the unit holds beside what they are taken of

// Adds the products of STEP inputs of rows [.., stride] and pairs [STEP / 2][2] of blocks; `SECOND` for over UNIT_ROWS.
template <bool SECOND>
SLIP_INLINE void multiply_tiles(const Number* rows, Index stride, const Element* pairs) {
  constexpr Index PAIR_BYTES = 2 * PANEL * sizeof(Element);
  const Index row_bytes = stride * sizeof(Number);
  _tile_loadd(6, pairs, PAIR_BYTES);
  _tile_loadd(4, rows, row_bytes);
  _tile_loadd(7, pairs + PANEL, PAIR_BYTES);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (SECOND) {
    _tile_loadd(5, rows + UNIT_ROWS * stride, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The same for the last `count` inputs, fewer than STEP, beside zeros.
template <bool SECOND>
void multiply_rest(const Number* rows, Index n, Index stride, const Element* pairs, Index count) {
  alignas(64) Number some[MATRIX_ROWS][STEP] = {};
  alignas(64) Element others[STEP * PANEL] = {};
  for (Index i = 0; i < n; i++) memcpy(some[i], rows + i * stride, count * sizeof(Number));
  memcpy(others, pairs, count * PANEL * sizeof(Element));
  fence_compiler();
  multiply_tiles<SECOND>(some[0], STEP, others);
}

// What `matrix_sums` gives for M rows [.., stride], by vectors in the unit's own order: the inputs of a step that are
// even and those that are odd, then both together. So few rows are done before the unit has read their weights. They
// are floats, from where a multiplication takes one for all columns.
template <int M, class Panel, class Next>
SLIP_INLINE void vector_sums(const float* rows, Index stride, Index k, const Panel& columns, Next next,
                             float (*sums)[PANEL]) {
  Floats total[M][2];
  clear(total);
  for (Index step = 0; step < k; step += STEP) {
    Floats part[2][M][2];
    repeat<2>(SLIP_EACH_OF(odd) { clear(part[odd]); });
    for (Index j = step; j < std::min(step + STEP, k); j += 2) {
      next(j / 2);
      repeat<2>(SLIP_EACH_OF(half) {
        repeat<2>(SLIP_EACH_OF(odd) {
          const Floats column = columns.one(j / 2, half, odd);
          repeat<M>(SLIP_EACH_OF(i) {
            part[odd][i][half] = fma(column, broadcast(rows[i * stride + j + odd]), part[odd][i][half]);
          });
        });
      });
    }
    repeat<M>(SLIP_EACH_OF(i) {
      repeat<2>(SLIP_EACH_OF(half) { total[i][half] = total[i][half] + (part[0][i][half] + part[1][i][half]); });
    });
  }
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<2>(SLIP_EACH_OF(half) { store_floats(sums[i] + LANES * half, total[i][half]); });
  });
}

// By the unit; `SECOND` for over UNIT_ROWS.
template <bool SECOND, class Next>
void unit_sums(const Number* x, Index n, Index stride, Index k, const Element* panel, Next next, float (*sums)[PANEL]) {
  const Index first = std::min(n, UNIT_ROWS), second = n - first;
  // Sums, by rows and then by half of the columns; two of rows, two of columns.
  const MatrixUnit unit({first, first, second, second, first, second, STEP / 2, STEP / 2});
  fence_compiler();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (SECOND) {
    _tile_zero(2);
    _tile_zero(3);
  }
  Index j = 0;
  for (; j + STEP <= k; j += STEP) {
    for (Index pair = j / 2; pair < (j + STEP) / 2; pair++) next(pair);
    if constexpr (SECOND)  // rows lie far apart, which no CPU foresees
      for (Index i = 0; i < n; i++) ask_for(x + j + STEP + i * stride);
    multiply_tiles<SECOND>(x + j, stride, panel + j * PANEL);
  }
  if (j < k) multiply_rest<SECOND>(x + j, n, stride, panel + j * PANEL, k - j);
  constexpr Index SUM_BYTES = PANEL * sizeof(float);
  _tile_stored(0, sums[0], SUM_BYTES);
  _tile_stored(1, sums[0] + LANES, SUM_BYTES);
  if constexpr (SECOND) {
    _tile_stored(2, sums[UNIT_ROWS], SUM_BYTES);
    _tile_stored(3, sums[UNIT_ROWS] + LANES, SUM_BYTES);
  }
  fence_compiler();
}

// sums [n][32] = x [n, stride] times k inputs of a panel, n at most MATRIX_ROWS; `next(pair)` is called for each pair of
// inputs.
template <class Next>
void matrix_sums(const Number* x, Index n, Index stride, Index k, const Element* panel, Next next, float (*sums)[PANEL]) {
  return n > UNIT_ROWS ? unit_sums<true>(x, n, stride, k, panel, next, sums)
                       : unit_sums<false>(x, n, stride, k, panel, next, sums);
}

}  // namespace

#endif
