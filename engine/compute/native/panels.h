// Packed weights: panels of 32 outputs, in the order in which products read them.

#pragma once

#include "sums.h"
#include "team.h"

namespace {

constexpr Index PANEL = 32;  // output columns in one panel: two halves of sixteen

// A block has two inputs of 16 outputs. bfloat16 lie beside each other by output, for one multiplication of both;
// others input after input. Where that of an output (below 16) lies:
constexpr Index place_in_block(Index output, Index odd) {
  return SLIP_ELEMENT == SLIP_BFLOAT16 ? 2 * output + odd : LANES * odd + output;
}

// Where in a panel the weight of an output (below 32) for an input lies.
constexpr Index place_in_panel(Index output, Index input) {
  return (input / 2 * 2 + output / LANES) * PANEL + place_in_block(output % LANES, input % 2);
}

// One of the inputs of a block.
SLIP_INLINE Floats input_of(const Element* block, int odd) {
#if SLIP_ELEMENT == SLIP_BFLOAT16
  const Words both = bits_of(load_floats((const float*)block));
  return as_floats(odd ? both & broadcast(0xFFFF0000u) : both << 16);
#else
  return load(block + LANES * odd);
#endif
}

// As slip_pack leaves it: [k / 2][2] blocks, by pair of inputs and half of the outputs.
struct ElementPanel {
  const Element* at;

#if SLIP_PAIRED
  SLIP_INLINE Pair both(Index j, int half) const { return pair_at(at + (2 * j + half) * PANEL); }
#endif
  SLIP_INLINE Floats one(Index j, int half, int odd) const { return input_of(at + (2 * j + half) * PANEL, odd); }
};

// A pair of inputs of the halves from `half` on, as sums are taken of them.
template <class Panel>
struct PairOf {
  const Panel& panel;
  Index j;
  int half;

#if SLIP_PAIRED
  SLIP_INLINE Pair both(int v) const { return panel.both(j, half + v); }
#endif
  SLIP_INLINE Floats one(int v, int odd) const { return panel.one(j, half + v, odd); }
};

}  // namespace

extern "C" {

// weight [out, k] as panels [out / 32][k / 2][2] of blocks.
void slip_pack(Team* team, const Element* weight, Element* packed, Index out, Index k) {
  const auto pack = [&](Index p) {
    for (Index j = 0; j < k; j += 2)
      for (Index r = 0; r < PANEL; r++)
        for (Index odd = 0; odd < 2; odd++)
          packed[p * PANEL * k + place_in_panel(r, j + odd)] = weight[(p * PANEL + r) * k + j + odd];
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, pack); });
}

}  // extern "C"
