// Rows times packed weights.

#pragma once

#include "numbers.h"

namespace {

constexpr Index PANEL = 32;       // output columns in one panel of packed weights: two vectors
constexpr int TILE = 12;          // rows of x in one tile: 24 sums fill the registers, beside two weights
constexpr Index ROW_BLOCK = 96;   // rows that one thread takes at once when there are many
constexpr Index PANEL_BLOCK = 6;  // panels likewise

// y[M, 32] = x[M, k] times one panel, plus bias.
template <int M>
void tile(const bf16* x, const bf16* panel, const bf16* bias, bf16* y, Index k, Index out) {
  __m512 sums[M][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (Index j = 0; j < k / 2; j++) {
    const __m512bh left = pairs(panel + j * 2 * PANEL), right = pairs(panel + j * 2 * PANEL + PANEL);
    for (int i = 0; i < M; i++) {
      int32_t both;
      memcpy(&both, x + i * k + 2 * j, 4);
      const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], left, v);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], right, v);
    }
  }
  for (int i = 0; i < M; i++)
    for (int half = 0; half < 2; half++) {
      __m512 v = sums[i][half];
      if (bias) v = _mm512_add_ps(v, load(bias + 16 * half));
      store(y + i * out + 16 * half, v);
    }
}

template <int M>
void tile_of(Index rows, const bf16* x, const bf16* panel, const bf16* bias, bf16* y, Index k, Index out) {
  if (rows == M)
    tile<M>(x, panel, bias, y, k, out);
  else if constexpr (M > 1)
    tile_of<M - 1>(rows, x, panel, bias, y, k, out);
}

void times_panel(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, Index first, Index stop, Index p,
                 Index k, Index out) {
  for (Index i = first; i < stop; i += TILE)
    tile_of<TILE>(std::min<Index>(TILE, stop - i), x + i * k, weight + p * PANEL * k,
                  bias ? bias + p * PANEL : nullptr, y + i * out + p * PANEL, k, out);
}

}  // namespace

extern "C" {

// weight [out, k] as panels of 32 outputs: [out / 32][k / 2][32][2], what one multiply takes lying together.
void slip_pack(const bf16* weight, bf16* packed, Index out, Index k) {
#pragma omp parallel for
  for (Index p = 0; p < out / PANEL; p++)
    for (Index j = 0; j < k / 2; j++)
      for (Index r = 0; r < PANEL; r++)
        memcpy(packed + p * PANEL * k + j * 2 * PANEL + 2 * r, weight + (p * PANEL + r) * k + 2 * j, 4);
}

// y [n, out] = x [n, k] times packed weights, plus bias [out], null for none.
void slip_linear(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, Index n, Index out, Index k) {
  const Index panels = out / PANEL;
  if (n <= ROW_BLOCK) {
#pragma omp parallel for schedule(static)
    for (Index p = 0; p < panels; p++) times_panel(x, packed, bias, y, 0, n, p, k, out);
    return;
  }
  const Index row_blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, panel_blocks = (panels + PANEL_BLOCK - 1) / PANEL_BLOCK;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
  for (Index b = 0; b < row_blocks; b++)
    for (Index q = 0; q < panel_blocks; q++)
      for (Index p = q * PANEL_BLOCK; p < std::min(panels, (q + 1) * PANEL_BLOCK); p++)
        times_panel(x, packed, bias, y, b * ROW_BLOCK, std::min(n, (b + 1) * ROW_BLOCK), p, k, out);
}

}  // extern "C"
