// Products whose outputs are gated at once, while they are in the nearest cache.

#pragma once

#include "products.h"
#include "rows.h"

namespace {

// How a product's outputs become what the next one reads.
struct Gate {
  Index activation, is_gated;
};

// Panels of a product that are gated together: `count` of a gate from `first` on, and behind them as many of what it
// is multiplied with.
struct GatedPanels {
  const Product& w;
  Gate gate;
  Index first, count;

  // Panel `p` of act [n, stride] = activation(gate) * up of n rows, or activation of all.
  void multiply(Index p, const Rows& rows, Index n, Element* act, Index stride) const {
    alignas(64) Element gates[ROW_BLOCK * PANEL], ups[ROW_BLOCK * PANEL];
    times_panel(w, first + p, rows, n, {gates, nullptr, PANEL});
    if (gate.is_gated) times_panel(w, first + count + p, rows, n, {ups, nullptr, PANEL});
    for (Index i = 0; i < n; i++)
      apply_gate(gate.activation, gates + i * PANEL, gate.is_gated ? ups + i * PANEL : nullptr,
                 act + i * stride + p * PANEL, PANEL);
  }
};

// act [n, width] = activation(gate) * up of x [n, k], or activation of all. For every thread of a team, with a barrier
// behind it.
void gated_product_in_team(Worker& me, const Product& w, Gate gate, const Element* x, Element* act, Index n,
                           RowBlock* shared) {
  const GatedPanels panels{w, gate, 0, w.out / PANEL / (gate.is_gated ? 2 : 1)};
  const Index width = panels.count * PANEL;
  Input input(me, w, x, n, shared);
  for_panels(me, n, panels.count, [&](Index first, Index stop, Index panel, Index last) {
    const Rows rows = input.rows(first, stop);
    for (; panel < last; panel++) panels.multiply(panel, rows, stop - first, act + first * width, width);
  });
}

}  // namespace
