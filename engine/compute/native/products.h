// Rows times packed weights.

#pragma once

#include "panels.h"
#include "team.h"

namespace {

constexpr Index ROW_BLOCK = 96;   // rows that one thread takes at once when there are many
constexpr Index PANEL_BLOCK = 6;  // panels likewise

enum Kind : Index { ELEMENTS = 0, INT8 = 1 };

}  // namespace

extern "C" {

struct Product {       // a linear layer; records.py mirrors it
  Index kind;          // a Kind: what `packed` is, and how it is multiplied
  const void* packed;  // out / PANEL panels, one after the other
  const void* scales;  // null where the kind has none
  const Element* bias;    // [out], null for none
  Index out, k;
};

}  // extern "C"

namespace {

// Where a panel's 32 columns of the product go: y [n, stride], plus `residual` [n, stride] if any, which may be y.
// The product is rounded before that is added.
struct Target {
  Element* y;
  const Element* residual;
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

  SLIP_INLINE void operator()(Index pair) const {
    ask_for_later(at + pair * step);
    ask_for_later(at + pair * step + 64);
  }
};

// One panel of weights, what is added to its 32 outputs (null for none), and the panel behind it.
template <class Panel>
struct Columns {
  Panel panel;
  const Element* bias;
  Index k;
  const char* next;
  Index pair_bytes;  // what a pair of inputs takes there

  NextPanel next_panel(Index part, Index parts) const {
    return {next + part * (k / 2) * pair_bytes / parts, pair_bytes / parts};
  }
};

// A pair of inputs of the halves from `half` on.
template <class Panel>
struct PairOfInputs {
  const Panel& panel;
  Index j;
  int half;

#if SLIP_PAIRED
  SLIP_INLINE Pair both(int v) const { return panel.both(j, half + v); }
#endif
  SLIP_INLINE Floats one(int v, int odd) const { return panel.one(j, half + v, odd); }
};

// x[M, k] times TILE_VECTORS halves of the columns, from `half` on.
template <int M, class Panel>
void tile(const Number* x, const Columns<Panel>& w, int half, NextPanel next_panel, Target to) {
  Floats sums[M][TILE_VECTORS];
  clear(sums);
  for (Index j = 0; j < w.k / 2; j++) {
    next_panel(j);
    multiply(sums, x + 2 * j, w.k, PairOfInputs<Panel>{w.panel, j, half});
  }
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<TILE_VECTORS>(SLIP_EACH_OF(v) {
      const Index by = LANES * (half + v);
      const float* scales = w.panel.scales ? w.panel.scales + by : nullptr;
      Floats result = finished(sums[i][v], scales, w.bias ? w.bias + by : nullptr);
      const Target here = to.at(i, by);
      if (here.residual) result = rounded(result) + load(here.residual);
      store(here.y, result);
    });
  });
}

template <int M, class Panel>
void tile_of(Index rows, const Number* x, const Columns<Panel>& w, NextPanel next_panel, Target to) {
  if (rows == M)
    for (int half = 0; half < 2; half += TILE_VECTORS) tile<M>(x, w, half, next_panel, to);
  else if constexpr (M > 1)
    tile_of<M - 1>(rows, x, w, next_panel, to);
}

// x[n, k] times the columns, in tiles of about the same size, each of which asks for its part of what comes next.
template <class Panel>
void tiles(const Number* x, Index n, const Columns<Panel>& w, Target to) {
  const Index parts = (n + TILE - 1) / TILE, size = (n + parts - 1) / std::max<Index>(1, parts);
  for (Index part = 0; part * size < n; part++) {
    const Index first = part * size;
    tile_of<TILE>(std::min(size, n - first), x + first * w.k, w, w.next_panel(part, parts), to.at(first));
  }
}

// Rows x [n, k] times panel `p`. The one place that knows kinds of weights apart.
void times_panel(const Product& w, Index p, const Number* x, Index n, Target to) {
  const Index k = w.k, first = p * PANEL, pair_bytes = 2 * PANEL * sizeof(Element);
  const Element* bias = w.bias ? w.bias + first : nullptr;
  if (w.kind == ELEMENTS) {
    const Element* panel = (const Element*)w.packed + first * k;
    tiles<ElementPanel>(x, n, {{panel, nullptr}, bias, k, (const char*)(panel + PANEL * k), pair_bytes}, to);
    return;
  }
  const Int8Panel panel{(const int8_t*)w.packed + first * k, (const float*)w.scales + first};
  const char* next = (const char*)(panel.at + PANEL * k);
  if (n <= TILE) {
    tiles<Int8Panel>(x, n, {panel, bias, k, next, 2 * PANEL}, to);
    return;
  }
  static thread_local std::vector<Element> space;
  space.resize(PANEL * k);
  tiles<ElementPanel>(x, n, {panel.expanded(space.data(), k), bias, k, next, 2 * PANEL}, to);
}

// Calls `work(first row, stop row, first panel, stop panel)` until all rows and panels are done, shared out among
// the team.
template <class Work>
void for_panels(Worker& me, Index n, Index panels, Work work) {
  if (n <= ROW_BLOCK) {
    me.each(panels, [&](Index p) { work(0, n, p, p + 1); });
    return;
  }
  const Index row_blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, panel_blocks = (panels + PANEL_BLOCK - 1) / PANEL_BLOCK;
  me.each(row_blocks * panel_blocks, [&](Index block) {
    const Index b = block / panel_blocks, q = block % panel_blocks;
    work(b * ROW_BLOCK, std::min(n, (b + 1) * ROW_BLOCK), q * PANEL_BLOCK, std::min(panels, (q + 1) * PANEL_BLOCK));
  });
}

// y [n, out] = x [n, k] times the product's weights, plus its bias and `residual`, which may be y; null for none.
// For every thread of a team, with a barrier behind it.
void product_in_team(Worker& me, const Product& w, const Element* x, Element* y, Index n,
                     const Element* residual = nullptr) {
  const Target to{y, residual, w.out};
  for_panels(me, n, w.out / PANEL, [&](Index first, Index stop, Index panel, Index last) {
    const Number* rows = as_numbers(x + first * w.k, (stop - first) * w.k);
    for (; panel < last; panel++) times_panel(w, panel, rows, stop - first, to.at(first, panel * PANEL));
  });
}

}  // namespace

extern "C" {

// y [n, out] = x [n, k] times the product's weights, plus its bias.
void slip_linear(Team* team, const Product* w, const Element* x, Element* y, Index n) {
  team->run(true, [&](Worker& me) { product_in_team(me, *w, x, y, n); });
}

}  // extern "C"
