// Weights of few bits as they lie in memory: panels of 32 outputs, in the order in which products read them.
//
// All formats lie alike. A panel is a row of blocks of 32 inputs, or of 256 for formats with scales of scales: first the
// scales, then for each 32 inputs the codes. Four inputs of 32 outputs make 128 bytes, one byte for each input; those of
// fewer bits share bytes with the inputs behind them. Bits above the first four or two have bytes of their own.

#pragma once

#include "row_blocks.h"

namespace {

constexpr Index BLOCK_PANEL = 32;                 // outputs in a panel
constexpr int PANEL_PARTS = BLOCK_PANEL / WIDTH;  // registers of their sums
constexpr Index FOURS = 4 * BLOCK_PANEL;          // bytes of four inputs of each

// What a code stands for: itself less half of their number, itself times a scale plus a least value, or an entry of a
// table, that of IQ4_NL or that of floats of four bits.
enum class Value { CENTRED, FROM_LEAST, LISTED, FLOATS };

// Scales are one half-precision float for 32 inputs, or one for 256 and an integer for 32 or 16 of these; or a power of
// two for 32, whose exponent is a byte.
enum class Scale { HALVES, BYTES_OF_32, BYTES_OF_16, NIBBLES_OF_16, EXPONENTS };

// IQ4_NL's and IQ4_XS's numbers, and twice those of E2M1.
struct ListedValues {
  int8_t of[16];
};
constexpr ListedValues IQ4_VALUES{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
constexpr ListedValues E2M1_VALUES{{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

struct ListedCodes {
  alignas(16) uint8_t codes[16];
  constexpr explicit ListedCodes(const ListedValues& values) : codes() {
    for (int i = 0; i < 16; i++) codes[i] = (uint8_t)(values.of[i] + (MULTIPLIES_UNSIGNED ? UNSIGNED_ZERO : 0));
  }
};

// `LOW` bits of a code lie together and `HIGH` more elsewhere.
template <int LOW_BITS, int HIGH_BITS, Value VALUE, Scale SCALE>
struct Layout {
  static constexpr int LOW = LOW_BITS, HIGH = HIGH_BITS;
  static constexpr bool IS_CENTRED = VALUE == Value::CENTRED, HAS_LEAST = VALUE == Value::FROM_LEAST;
  static constexpr bool IS_LISTED = !IS_CENTRED && !HAS_LEAST, HAS_EXPONENTS = SCALE == Scale::EXPONENTS;
  static constexpr bool HAS_BYTES = SCALE != Scale::HALVES && !HAS_EXPONENTS, HAS_NIBBLES = SCALE == Scale::NIBBLES_OF_16;
  static constexpr ListedValues LISTED = VALUE == Value::FLOATS ? E2M1_VALUES : IQ4_VALUES;
  static constexpr ListedCodes LISTED_CODES{LISTED};
  static constexpr int PER_SCALE = SCALE == Scale::BYTES_OF_16 || HAS_NIBBLES ? 16 : 32;  // inputs
  static constexpr Index SPAN = HAS_BYTES ? 256 : 32;                                    // inputs of a block
  static constexpr Index NUM_SCALES = SPAN / PER_SCALE;

  static constexpr Index HALVES = 2 * BLOCK_PANEL;  // bytes of one for each output
  static constexpr Index SCALES_AT = HAS_EXPONENTS ? BLOCK_PANEL : HALVES * (HAS_LEAST ? 2 : 1);
  static constexpr Index LEASTS_AT = SCALES_AT + (HAS_BYTES ? NUM_SCALES * BLOCK_PANEL : 0);
  static constexpr Index CODES_AT = LEASTS_AT + (HAS_BYTES && HAS_LEAST && !HAS_NIBBLES ? NUM_SCALES * BLOCK_PANEL : 0);
  static constexpr Index CODE_BYTES = FOURS * (LOW + HIGH);  // of 32 inputs
  static constexpr Index BYTES = CODES_AT + SPAN / BLOCK * CODE_BYTES;

  // Codes are moved to the upper end of a byte where their middle must be UNSIGNED_ZERO.
  static constexpr bool IS_ABOVE_ZERO = MULTIPLIES_UNSIGNED && !HAS_LEAST;
  static constexpr int RAISED = IS_ABOVE_ZERO && IS_CENTRED ? 8 - LOW - HIGH : 0;

  static constexpr Index panel_bytes(Index k) { return (k / SPAN * BYTES + 63) / 64 * 64; }  // whole cache lines
};

// Four inputs, those from 4 * j on of 32, of the outputs in register `r`, as `dot` takes them.
template <class L>
SLIP_INLINE NativeBytes codes_of(const uint8_t* codes, unsigned j, int r) {
  const auto part = [&](unsigned plane, unsigned from, int bits, unsigned to) __attribute__((always_inline)) {
    const NativeBits words = (NativeBits)load_bytes(codes + FOURS * plane + 4 * WIDTH * r);
    const NativeBits moved = from >= to ? words >> (from - to) : words << (to - from);
    return moved & (((1u << bits) - 1) << to) * 0x01010101u;
  };
  NativeBits found = part(j * L::LOW / 8, j * L::LOW % 8, L::LOW, L::RAISED);
  if constexpr (L::HIGH > 0)
    found |= part(L::LOW + j * L::HIGH / 8, j * L::HIGH % 8, L::HIGH, L::LOW + L::RAISED);
  if constexpr (L::IS_LISTED) return look_up(L::LISTED_CODES.codes, (NativeBytes)found);
  if constexpr (L::IS_CENTRED && !MULTIPLIES_UNSIGNED)
    return (NativeBytes)found - (uint8_t)(1 << (L::LOW + L::HIGH - 1));
  return (NativeBytes)found;
}

// A panel's block, seen from the outputs of `R` registers, from register `first` on.
template <class L, int R>
class PanelBlock {
 public:
  SLIP_INLINE PanelBlock(const uint8_t* at, int first) : at_(at), first_(first) {
    repeat<R>(SLIP_EACH_OF(r) {
      if constexpr (L::HAS_EXPONENTS)  // of numbers that are twice as large
        scales_[r] = load_powers(at + WIDTH * (first + r)) * broadcast_part(.5f);
      else
        scales_[r] = load_half(at + 2 * WIDTH * (first + r));
      if constexpr (L::RAISED > 0) scales_[r] *= broadcast_part(1.f / (1 << L::RAISED));
      if constexpr (L::HAS_LEAST) leasts_[r] = load_half(at + L::HALVES + 2 * WIDTH * (first + r));
    });
  }

  // Four inputs, those from 4 * j on of its 32 inputs `within`.
  SLIP_INLINE NativeBytes codes(int within, unsigned j, int r) const {
    return codes_of<L>(at_ + L::CODES_AT + within * L::CODE_BYTES, j, first_ + r);
  }

  // What one is worth; `half` counts scales within the 32 inputs.
  SLIP_INLINE Native scale(int within, int half, int r) const {
    if constexpr (!L::HAS_BYTES) return scales_[r];
    return scales_[r] * integers<L::HAS_NIBBLES ? 15 : 0>(L::SCALES_AT, within, half, r);
  }

  // What a code of zero stands for.
  SLIP_INLINE Native least(int within, int half, int r) const {
    if constexpr (!L::HAS_BYTES) return leasts_[r];
    constexpr Index WHERE = L::HAS_NIBBLES ? L::SCALES_AT : L::LEASTS_AT;
    return -leasts_[r] * integers<L::HAS_NIBBLES ? 240 : 0>(WHERE, within, half, r);
  }

 private:
  // Integers of 8 bits, or the nibble that `MASK` covers.
  template <int MASK>
  SLIP_INLINE Native integers(Index where, int within, int half, int r) const {
    const int number = within * (BLOCK / L::PER_SCALE) + half;
    const int8_t* found = (const int8_t*)at_ + where + number * BLOCK_PANEL + WIDTH * (first_ + r);
    if constexpr (MASK == 0) return load_int8_part(found);
    int8_t nibbles[WIDTH];
    for (int i = 0; i < WIDTH; i++) nibbles[i] = (int8_t)(MASK == 15 ? found[i] & 15 : (uint8_t)found[i] >> 4);
    return load_int8_part(nibbles);
  }

  const uint8_t* const at_;
  const int first_;
  Native scales_[R], leasts_[L::HAS_LEAST ? R : 1];
};

// A span of one output's weights, in no layout: value = scale * number[i] * (code - zero) + least, as its format says.
struct StoredSpan {
  uint16_t scale, least;  // half-precision; of a power of two its exponent
  int8_t scales[16], leasts[16];
  uint8_t codes[256];
};

// Puts a span into output `o` of a block, which is zero there.
template <class L>
void put_span(const StoredSpan& from, uint8_t* block, Index o) {
  if (L::HAS_EXPONENTS) block[o] = (uint8_t)from.scale;
  else memcpy(block + 2 * o, &from.scale, 2);
  if (L::HAS_LEAST) memcpy(block + L::HALVES + 2 * o, &from.least, 2);
  for (Index i = 0; L::HAS_BYTES && i < L::NUM_SCALES; i++) {
    uint8_t* scale = block + L::SCALES_AT + i * BLOCK_PANEL + o;
    *scale = (uint8_t)from.scales[i];
    if (L::HAS_NIBBLES) *scale |= (uint8_t)(from.leasts[i] << 4);
    else if (L::HAS_LEAST) block[L::LEASTS_AT + i * BLOCK_PANEL + o] = (uint8_t)from.leasts[i];
  }
  for (Index i = 0; i < L::SPAN; i++) {
    uint8_t* codes = block + L::CODES_AT + i / BLOCK * L::CODE_BYTES + 4 * o + i % 4;
    const Index four = i % BLOCK / 4;
    codes[FOURS * (four * L::LOW / 8)] |= (uint8_t)((from.codes[i] & ((1 << L::LOW) - 1)) << four * L::LOW % 8);
    if (L::HIGH > 0)
      codes[FOURS * (L::LOW + four * L::HIGH / 8)] |= (uint8_t)((from.codes[i] >> L::LOW) << four * L::HIGH % 8);
  }
}

// The numbers [k] of output `o` of a panel.
template <class L>
void read_output(const uint8_t* panel, Index o, Element* to, Index k) {
  constexpr int SCALES = BLOCK / L::PER_SCALE;
  const int lane = (int)(o % WIDTH);
  alignas(64) float numbers[BLOCK];
  for (Index b = 0; b < k / BLOCK; b++) {
    const PanelBlock<L, 1> block(panel + b * BLOCK / L::SPAN * L::BYTES, (int)(o / WIDTH));
    const int within = (int)(b * BLOCK % L::SPAN / BLOCK);
    repeat<SCALES>(SLIP_EACH_OF(half) {
      const float scale = block.scale(within, half, 0)[lane];
      float least = 0;
      if constexpr (L::HAS_LEAST) least = block.least(within, half, 0)[lane];
      repeat<8 / SCALES>(SLIP_EACH_OF(j) {
        constexpr int J = half * (8 / SCALES) + j;
        const NativeBytes codes = block.codes(within, J, 0);
        for (int i = 0; i < 4; i++) {
          const int code = codes[4 * lane + i];
          const int number = L::IS_ABOVE_ZERO ? code - UNSIGNED_ZERO : L::HAS_LEAST ? code : (int8_t)code;
          numbers[4 * J + i] = scale * number + least;
        }
      });
    });
    store(to + b * BLOCK, load_floats(numbers));
    store(to + b * BLOCK + LANES, load_floats(numbers + LANES));
  }
}

}  // namespace
