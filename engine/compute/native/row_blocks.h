// Rows of a product's input as integers of 8 bits, for products with integer weights.
//
// Each 32 numbers of a row have a scale of their own: the largest of them becomes 127. What a row becomes depends on
// that row alone.

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
  float unused;
};
static_assert(sizeof(RowBlock) == 64);

// NaN and infinity make a block of NaN: what goes wrong must show in the result.
inline void put_row_block(const Element* x, RowBlock* to) {
  const Floats a = load(x), b = load(x + LANES);
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
  to->unused = 0;
}

inline void put_row_blocks(const Element* x, Index k, RowBlock* to) {
  for (Index b = 0; b < k / BLOCK; b++) put_row_block(x + b * BLOCK, to + b);
}

// Memory of the calling thread for `count` blocks, which serves until its next call with the same `Use`.
template <int Use>
inline RowBlock* row_block_space(Index count) {
  static thread_local std::vector<RowBlock> space;
  if ((Index)space.size() < count) space.resize(count);
  return space.data();
}

// x [n, k] in blocks. Few numbers each thread turns for itself, which takes less time than to meet the others; else all
// of them fill `shared` [n, k / BLOCK] and meet. For every thread of a team.
class InputBlocks {
 public:
  InputBlocks(Worker& me, const Element* x, Index n, Index k, RowBlock* shared)
      : x_(x), count_(n * (k / BLOCK)), found_(n * k > FEW ? shared : nullptr) {
    if (found_) me.each(n, [&](Index i) { put_row_blocks(x + i * k, k, shared + i * (k / BLOCK)); });
  }

  // Only while this thread has a piece of the work that reads x: who comes too late must not look at it any more.
  const RowBlock* get() {
    if (!found_) {
      RowBlock* own = row_block_space<0>(count_);
      put_row_blocks(x_, count_ * BLOCK, own);
      found_ = own;
    }
    return found_;
  }

 private:
  static constexpr Index FEW = 4096;
  const Element* const x_;
  const Index count_;
  const RowBlock* found_;
};

}  // namespace
