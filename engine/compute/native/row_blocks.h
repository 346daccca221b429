// Rows of a product's input as integers of 8 bits, for products with integer weights.
//
// Each 32 numbers of a row have a scale of their own: the largest of them becomes 127. Beside a row's largest number its
// neighbours would be lost, as half of what rounding changes was: the four inputs that it is among, the row's peak, have
// a scale of their own and are zero in their block. What a row becomes depends on that row alone.

#pragma once

#include "numbers.h"
#include "team.h"

namespace {

constexpr Index BLOCK = 32;  // inputs with one scale

// What weights are stored above the numbers they stand for, where they are multiplied without a sign.
constexpr int UNSIGNED_ZERO = 128;

// Thirty-two numbers of a row: scale * codes. Sums are of the first half, the second half and all of them.
struct alignas(64) RowBlock {
  int8_t codes[BLOCK];
  float scale;
  int32_t zeros[3];  // -UNSIGNED_ZERO * the sum of the codes: what that much too large weights add too much
  float sums[3];     // scale * the sum of the codes
  uint32_t four;     // of a peak, whose other codes are zero: how many fours of the row lie before
};
static_assert(sizeof(RowBlock) == 64);

// How many a row of k numbers takes: its blocks, and behind them its peak.
inline Index row_blocks(Index k) { return k / BLOCK + 1; }

// NaN and infinity make a block of NaN: what goes wrong must show in the result.
inline void put_row_block(Floats a, Floats b, RowBlock* to) {
  const float largest = greatest(maximum(absolute(a), absolute(b)));
  const bool is_finite = !are_nan((a - a) + (b - b));
  const bool is_something = is_finite && largest > 1e-30f;  // whose inverse is a number
  const Floats inverse = broadcast(is_something ? 127 / largest : 0);
  const Floats first = is_finite ? nearest_whole(a * inverse) : zeros();
  const Floats second = is_finite ? nearest_whole(b * inverse) : zeros();
  store_int8(to->codes, first);
  store_int8(to->codes + LANES, second);
  to->scale = is_finite ? largest / 127 : NAN;
  const float sums[2] = {sum(first), sum(second)};  // whole numbers, exactly
  for (int half = 0; half < 3; half++) {
    const float codes = half < 2 ? sums[half] : sums[0] + sums[1];
    to->zeros[half] = -UNSIGNED_ZERO * (int32_t)codes;
    to->sums[half] = to->scale * codes;
  }
  to->four = 0;
}

// Takes the largest of block `b` out of it, with the four that it is in.
inline void take_peak(const Element* x, Index b, RowBlock* blocks, RowBlock* peak) {
  alignas(64) float rest[BLOCK], apart[BLOCK] = {};
  const Floats halves[2] = {load(x + b * BLOCK), load(x + b * BLOCK + LANES)};
  const Floats sizes[2] = {absolute(halves[0]), absolute(halves[1])};
  const Floats largest = broadcast(greatest(maximum(sizes[0], sizes[1])));
  const uint32_t marks = equal(sizes[0], largest) | equal(sizes[1], largest) << LANES;
  const Index first = __builtin_ctz(marks) / 4 * 4;
  for (int i = 0; i < 2; i++) store_floats(rest + LANES * i, halves[i]);
  memcpy(apart + first, rest + first, 4 * sizeof(float));
  memset(rest + first, 0, 4 * sizeof(float));
  put_row_block(load_floats(apart), load_floats(apart + LANES), peak);
  peak->four = (uint32_t)((b * BLOCK + first) / 4);
  put_row_block(load_floats(rest), load_floats(rest + LANES), blocks + b);
}

// A row [k]. Blocks of NaN have no peak.
inline void put_row(const Element* x, Index k, RowBlock* to) {
  RowBlock* const peak = to + k / BLOCK;
  Index found = -1;
  float largest = 0;
  for (Index b = 0; b < k / BLOCK; b++) {
    put_row_block(load(x + b * BLOCK), load(x + b * BLOCK + LANES), to + b);
    if (to[b].scale > largest) found = b, largest = to[b].scale;
  }
  if (found < 0) *peak = RowBlock{};
  else take_peak(x, found, to, peak);
}

// Memory of the calling thread for `count` blocks, which serves until its next call with the same `Use`.
template <int Use>
inline RowBlock* row_block_space(Index count) {
  static thread_local std::vector<RowBlock> space;
  if ((Index)space.size() < count) space.resize(count);
  return space.data();
}

// x [n, k] in blocks. Few numbers each thread turns for itself, which takes less time than to meet the others; else all
// of them fill `shared` [n, row_blocks(k)] and meet. For every thread of a team.
class InputBlocks {
 public:
  InputBlocks(Worker& me, const Element* x, Index n, Index k, RowBlock* shared)
      : x_(x), n_(n), k_(k), found_(n * k > FEW ? shared : nullptr) {
    if (found_) me.each(n, [&](Index i) { put_row(x + i * k, k, shared + i * row_blocks(k)); });
  }

  // Only while this thread has a piece of the work that reads x: who comes too late must not look at it any more.
  const RowBlock* get() {
    if (!found_) {
      RowBlock* own = row_block_space<0>(n_ * row_blocks(k_));
      for (Index i = 0; i < n_; i++) put_row(x_ + i * k_, k_, own + i * row_blocks(k_));
      found_ = own;
    }
    return found_;
  }

 private:
  static constexpr Index FEW = 4096;
  const Element* const x_;
  const Index n_, k_;
  const RowBlock* found_;
};

}  // namespace
