// Packed weights: panels of 32 outputs, in the order in which products read them.

#pragma once

#include "sums.h"
#include "team.h"

namespace {

constexpr Index PANEL = 32;  // output columns in one panel: two halves of sixteen

// What becomes of the sums of 16 outputs: each times its scale, plus its bias; null for none. Rounded once where there
// is a scale, whatever loop it ends.
SLIP_INLINE Floats finished(Floats sums, const float* scales, const Element* bias) {
  if (scales && bias) return fma(sums, load_floats(scales), load(bias));
  if (scales) return sums * load_floats(scales);
  return bias ? sums + load(bias) : sums;
}

// A block has two inputs of 16 outputs. bfloat16 lie beside each other by output, for one multiplication of both;
// others input after input. Where that of an output (below 16) lies:
constexpr Index place_in_block(Index output, Index odd) {
  return SLIP_ELEMENT == SLIP_BFLOAT16 ? 2 * output + odd : LANES * odd + output;
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

// Writes a block of what elements hold exactly.
SLIP_INLINE void put_block(Element* block, Floats even, Floats odd) {
#if SLIP_ELEMENT == SLIP_BFLOAT16
  store_floats((float*)block, as_floats(bits_of(odd) | bits_of(even) >> 16));
#else
  store(block, even);
  store(block + LANES, odd);
#endif
}

// As slip_pack leaves it: [k / 2][2] blocks, by pair of inputs and half of the outputs.
struct ElementPanel {
  const Element* at;
  const float* scales;  // [32] or null

#if SLIP_PAIRED
  SLIP_INLINE Pair both(Index j, int half) const { return pair_at(at + (2 * j + half) * PANEL); }
#endif
  SLIP_INLINE Floats one(Index j, int half, int odd) const { return input_of(at + (2 * j + half) * PANEL, odd); }
};

// As slip_quantize leaves it: [k / 2][2][2][16], by pair of inputs, half of the outputs, input and output. Such an
// integer is the same number as an element: products are taken of integers, and rounded no more than others are.
struct Int8Panel {
  const int8_t* at;
  const float* scales;  // what one is worth in each output, [32]

#if SLIP_PAIRED
  SLIP_INLINE Pair both(Index j, int half) const { return paired(one(j, half, 0), one(j, half, 1)); }
#endif
  SLIP_INLINE Floats one(Index j, int half, int odd) const { return load_int8(at + (2 * j + half) * PANEL + LANES * odd); }

  // The same numbers written out in `space` [32 * k], for many rows to read.
  ElementPanel expanded(Element* space, Index k) const {
    for (Index j = 0; j < k / 2; j++)
      for (int half = 0; half < 2; half++)
        put_block(space + (2 * j + half) * PANEL, one(j, half, 0), one(j, half, 1));
    return {space, scales};
  }
};

}  // namespace

extern "C" {

// weight [out, k] as panels [out / 32][k / 2][2] of blocks.
void slip_pack(Team* team, const Element* weight, Element* packed, Index out, Index k) {
  const auto pack = [&](Index p) {
    for (Index j = 0; j < k / 2; j++)
      for (Index r = 0; r < PANEL; r++)
        for (Index odd = 0; odd < 2; odd++)
          packed[p * PANEL * k + (2 * j + r / LANES) * PANEL + place_in_block(r % LANES, odd)] =
              weight[(p * PANEL + r) * k + 2 * j + odd];
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, pack); });
}

// What slip_pack made as integers from -127 to 127, the largest weight of each output being one of the two, and
// what one of them is worth in each output, scales [out].
void slip_quantize(Team* team, const Element* packed, int8_t* integers, float* scales, Index out, Index k) {
  const auto quantize = [&](Index p) {
    const Element* from = packed + p * PANEL * k;
    int8_t* to = integers + p * PANEL * k;
    float largest[PANEL] = {}, inverse[PANEL];
    const auto each = [&](auto work) {
      for (Index block = 0; block < k; block++)
        for (Index output = 0; output < LANES; output++)
          for (Index odd = 0; odd < 2; odd++)
            work(block % 2 * LANES + output, value(from[block * PANEL + place_in_block(output, odd)]),
                 block * PANEL + LANES * odd + output);
    };
    each([&](Index r, float weight, Index) { largest[r] = std::max(largest[r], std::abs(weight)); });
    for (Index r = 0; r < PANEL; r++) {
      scales[p * PANEL + r] = largest[r] / 127;
      inverse[r] = largest[r] > 0 ? 127 / largest[r] : 0;
    }
    each([&](Index r, float weight, Index at) { to[at] = (int8_t)std::nearbyint(weight * inverse[r]); });
  };
  team->run(true, [&](Worker& me) { me.each(out / PANEL, quantize); });
}

}  // extern "C"
