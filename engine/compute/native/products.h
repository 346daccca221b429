// Rows times packed weights.

#pragma once

#include "panels.h"
#include "team.h"

namespace {

constexpr int TILE = 8;            // rows of x in one tile at most: 16 sums keep both multipliers busy
constexpr Index ROW_BLOCK = 96;   // rows that one thread takes at once when there are many
constexpr Index PANEL_BLOCK = 6;  // panels likewise

enum Kind : Index { BFLOAT16 = 0, INT8 = 1 };

}  // namespace

extern "C" {

struct Product {       // a linear layer; records.py mirrors it
  Index kind;          // a Kind: what `packed` is, and how it is multiplied
  const void* packed;  // out / PANEL panels, one after the other
  const void* scales;  // null where the kind has none
  const bf16* bias;    // [out], null for none
  Index out, k;
};

}  // extern "C"

namespace {

// Where a panel's 32 columns of the product go: y [n, stride], plus `residual` [n, stride] if any, which may be y.
// The product is rounded before that is added.
struct Target {
  bf16* y;
  const bf16* residual;
  Index stride;

  Target at(Index row, Index column = 0) const {
    const Index by = row * stride + column;
    return {y + by, residual ? residual + by : nullptr, stride};
  }
};

// The panel to be read next, asked for while there is time: without it, computing and reading take turns.
struct NextPanel {
  const char* at;
  Index step;  // for each pair of inputs

  void operator()(Index pair) const {
    _mm_prefetch(at + pair * step, _MM_HINT_T1);
    _mm_prefetch(at + pair * step + 64, _MM_HINT_T1);
  }
};

// One panel of weights, what is added to its 32 outputs (null for none), and the panel behind it.
template <class Panel>
struct Columns {
  Panel panel;
  const bf16* bias;
  Index k;
  const char* next;
  Index pair_bytes;  // what a pair of inputs takes there

  NextPanel next_panel(Index part, Index parts) const {
    return {next + part * (k / 2) * pair_bytes / parts, pair_bytes / parts};
  }
};

// x[M, k] times the columns.
template <int M, class Panel>
void tile(const bf16* x, const Columns<Panel>& w, NextPanel next_panel, Target to) {
  __m512 sums[M][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (Index j = 0; j < w.k / 2; j++) {
    const __m512bh left = w.panel.pair(j, 0), right = w.panel.pair(j, 1);
    next_panel(j);
    for (int i = 0; i < M; i++) {
      int32_t both;
      memcpy(&both, x + i * w.k + 2 * j, 4);
      const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], left, v);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], right, v);
    }
  }
  for (int i = 0; i < M; i++)
    for (int half = 0; half < 2; half++) {
      const Index by = 16 * half;
      const float* scales = w.panel.scales ? w.panel.scales + by : nullptr;
      __m512 v = finished(sums[i][half], scales, w.bias ? w.bias + by : nullptr);
      const Target here = to.at(i, by);
      if (here.residual) v = _mm512_add_ps(rounded(v), load(here.residual));
      store(here.y, v);
    }
}

template <int M, class Panel>
void tile_of(Index rows, const bf16* x, const Columns<Panel>& w, NextPanel next_panel, Target to) {
  if (rows == M)
    tile<M>(x, w, next_panel, to);
  else if constexpr (M > 1)
    tile_of<M - 1>(rows, x, w, next_panel, to);
}

// x[n, k] times the columns, in tiles of about the same size, each of which asks for its part of what comes next.
template <class Panel>
void tiles(const bf16* x, Index n, const Columns<Panel>& w, Target to) {
  const Index parts = (n + TILE - 1) / TILE, size = (n + parts - 1) / std::max<Index>(1, parts);
  for (Index part = 0; part * size < n; part++) {
    const Index first = part * size;
    tile_of<TILE>(std::min(size, n - first), x + first * w.k, w, w.next_panel(part, parts), to.at(first));
  }
}

// Rows x [n, k] times panel `p`. The one place that knows kinds of weights apart.
void times_panel(const Product& w, Index p, const bf16* x, Index n, Target to) {
  const Index k = w.k, first = p * PANEL;
  const bf16* bias = w.bias ? w.bias + first : nullptr;
  if (w.kind == BFLOAT16) {
    const bf16* panel = (const bf16*)w.packed + first * k;
    tiles<Bf16Panel>(x, n, {{panel, nullptr}, bias, k, (const char*)(panel + PANEL * k), 4 * PANEL}, to);
    return;
  }
  const Int8Panel panel{(const int8_t*)w.packed + first * k, (const float*)w.scales + first};
  const char* next = (const char*)(panel.at + PANEL * k);
  if (n <= TILE) {
    tiles<Int8Panel>(x, n, {panel, bias, k, next, 2 * PANEL}, to);
    return;
  }
  static thread_local std::vector<bf16> space;
  space.resize(PANEL * k);
  tiles<Bf16Panel>(x, n, {panel.expanded(space.data(), k), bias, k, next, 2 * PANEL}, to);
}

// Calls `work(first row, stop row, panel)` until all rows and panels are done, shared out among the team.
template <class Work>
void for_panels(Worker& me, Index n, Index panels, Work work) {
  if (n <= ROW_BLOCK) {
    me.each(panels, [&](Index p) { work(0, n, p); });
    return;
  }
  const Index row_blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, panel_blocks = (panels + PANEL_BLOCK - 1) / PANEL_BLOCK;
  me.each(row_blocks * panel_blocks, [&](Index block) {
    const Index b = block / panel_blocks, q = block % panel_blocks;
    for (Index p = q * PANEL_BLOCK; p < std::min(panels, (q + 1) * PANEL_BLOCK); p++)
      work(b * ROW_BLOCK, std::min(n, (b + 1) * ROW_BLOCK), p);
  });
}

// y [n, out] = x [n, k] times the product's weights, plus its bias and `residual`, which may be y; null for none.
// For every thread of a team, with a barrier behind it.
void product_in_team(Worker& me, const Product& w, const bf16* x, bf16* y, Index n, const bf16* residual = nullptr) {
  const Target to{y, residual, w.out};
  for_panels(me, n, w.out / PANEL, [&](Index first, Index stop, Index p) {
    times_panel(w, p, x + first * w.k, stop - first, to.at(first, p * PANEL));
  });
}

}  // namespace

extern "C" {

// y [n, out] = x [n, k] times the product's weights, plus its bias.
void slip_linear(Team* team, const Product* w, const bf16* x, bf16* y, Index n) {
  team->run(true, [&](Worker& me) { product_in_team(me, *w, x, y, n); });
}

}  // extern "C"
