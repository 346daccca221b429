// What one thread attends with, of pages of each kind: a block of positions and the queries of a tile.

#pragma once

#include <cstdlib>
#include <memory>

#include "attention_tile.h"
#include "matrix_attention.h"
#include "tiles.h"

namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory for `count` of a type, with anything in it.
template <class Type>
std::unique_ptr<Type, Free> room(Index count) {
  return std::unique_ptr<Type, Free>((Type*)std::aligned_alloc(64, parts_of(count * sizeof(Type), 64) * 64));
}

class ElementPages {
 public:
  ElementPages(const Attention& a, Index most_rows)
      : dim_(a.dim), block_size_(a.block_size), keys_((const Element*)a.keys), values_((const Element*)a.values),
        memory_(room<Number>((2 * KEYS + most_rows + most_rows % 2) * dim_)), query_(memory_.get() + 2 * KEYS * dim_),
        upcoming_(keys_, values_, dim_),
        block_{memory_.get(), memory_.get() + KEYS * dim_, Scores(a.scale, a.softcap), dim_, upcoming_} {}

  // Where a row of one head of one block lies, in elements.
  Index place(Index head, Index offset) const { return (head * block_size_ + offset) * dim_; }

  void take_query(Index row, const Element* query) { copy_numbers(query_ + row * dim_, query, dim_); }

  // Nothing: elements have no scales.
  void take_scales(Index, Index, Index, Index) {}

  // Whether the values at a place have one that is not finite.
  bool is_broken(Index place) const { return std::isnan(largest_of(values_ + place, dim_)); }

  // From `rows` of the queries, the `first` one on, to the positions at `places`.
  void attend(const Index* places, Index count, Index first, Index rows, const uint64_t* seen, float* records) {
    pack_keys(keys_, places, count, dim_, memory_.get(), upcoming_);
    pack_values(values_, places, count, dim_, memory_.get() + KEYS * dim_, upcoming_);
    attend_block(block_, rows, query_ + first * dim_, seen, records);
  }

  Upcoming<Element>& upcoming() { return upcoming_; }

 private:
  Index dim_, block_size_;
  const Element *keys_, *values_;
  std::unique_ptr<Number, Free> memory_;  // a block's keys and values as they are multiplied, and the queries
  Number* query_;
  Upcoming<Element> upcoming_;
  Block block_;
};

// The same where each row is of bytes and has a scale.
class BytePages {
 public:
  BytePages(const Attention& a, Index most_rows)
      : dim_(a.dim), block_size_(a.block_size), keys_((const int8_t*)a.keys), values_((const int8_t*)a.values),
        scales_(room<float>(2 * KEYS)), memory_(room<int16_t>(2 * KEYS * dim_ + most_rows * scaled_size(dim_))),
        query_(memory_.get() + 2 * KEYS * dim_), upcoming_(keys_, values_, dim_),
        block_{memory_.get(), memory_.get() + KEYS * dim_, Scores(a.scale, a.softcap), dim_, upcoming_,
               scales_.get(), scales_.get() + KEYS} {}

  Index place(Index head, Index offset) const { return byte_row(head, offset, block_size_, dim_); }

  void take_query(Index row, const Element* query) { take_integers(query, dim_, query_ + row * scaled_size(dim_)); }

  // The scales of a head's `run` rows from `offset` on, for the block's positions from `at` on.
  void take_scales(Index head, Index offset, Index run, Index at) {
    const Index first = row_scale(head, offset, block_size_, dim_);
    memcpy(scales_.get() + at, keys_ + first, 4 * run);
    memcpy(scales_.get() + KEYS + at, values_ + first, 4 * run);
  }

  // Never: bytes are finite, and scales of what is not seen are not looked at.
  bool is_broken(Index) const { return false; }

  void attend(const Index* places, Index count, Index first, Index rows, const uint64_t* seen, float* records) {
    pack_keys(keys_, places, count, dim_, memory_.get(), upcoming_);
    pack_values(values_, places, count, dim_, memory_.get() + KEYS * dim_, upcoming_);
    attend_block(block_, rows, query_ + first * scaled_size(dim_), seen, records);
  }

  Upcoming<int8_t>& upcoming() { return upcoming_; }

 private:
  Index dim_, block_size_;
  const int8_t *keys_, *values_;
  std::unique_ptr<float, Free> scales_;  // of a block's keys, and of its values
  std::unique_ptr<int16_t, Free> memory_;
  int16_t* query_;
  Upcoming<int8_t> upcoming_;
  ByteBlock block_;
};

}  // namespace
