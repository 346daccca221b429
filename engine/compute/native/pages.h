// Positions of paged keys and values, brought into the order in which they are multiplied.
//
// Pages of elements are [blocks, kv_heads, block_size, dim]. In those of bytes each head of a block has its rows
// [block_size, dim] of integers, and behind them a float for each row, by which its integers are to be multiplied.

#pragma once

#include "sums.h"
#include "tiles.h"

namespace {

// Row `place` of what is stored, null for -1: what nobody sees may hold anything.
template <class Stored>
SLIP_INLINE const Stored* row_of(const Stored* rows, Index place) {
  return place < 0 ? nullptr : rows + place;
}

// Asks for the rows of a block that is needed next, a few at a time between other work: so memory is never waited
// for, nor ever idle.
template <class Stored>
class Upcoming {
 public:
  Upcoming(const Stored* keys, const Stored* values, Index d) : keys_(keys), values_(values), d_(d) {}

  // Turns to the block at `places`, which must stay until the next.
  void turn(const Index* places, Index count) { places_ = places, count_ = count, at_ = 0; }

  void some(Index rows) {
    for (Index stop = std::min(at_ + rows, 2 * count_); at_ < stop; at_++) {
      const Index place = places_[at_ < count_ ? at_ : at_ - count_];
      const Stored* row = (at_ < count_ ? keys_ : values_) + place;
      for (Index j = 0; place >= 0 && j < d_; j += 64 / sizeof(Stored)) ask_for(row + j);
    }
  }

 private:
  const Stored *keys_, *values_;
  Index d_, count_ = 0, at_ = 0;
  const Index* places_ = nullptr;
};

// A register of a row's numbers, or of its pairs of them, from column j on.
SLIP_INLINE NativeInts words_of(const Element* row, Index j) {
  NativeInts words{};
#if SLIP_PAIRED
  if (row) words = (NativeInts)load_native(row + j);
#else
  if (row) words = (NativeInts)load_part(row + j);
#endif
  return words;
}

constexpr Index PER_WORD = SLIP_PAIRED ? 2 : 1;  // numbers

// `count` rows of d, a multiple of 32, at `places`, as [d / PER_WORD][KEYS][PER_WORD].
void pack_keys(const Element* rows, const Index* places, Index count, Index d, Number* packed,
               Upcoming<Element>& upcoming) {
  for (Index p = 0; p < count; p += WIDTH)
    for (Index j = 0; j < d; j += WIDTH * PER_WORD) {
      NativeInts r[WIDTH];
      upcoming.some(6);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) r[i] = words_of(row_of(rows, places[p + i]), j);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) store_native(packed + ((j / PER_WORD + i) * KEYS + p) * PER_WORD, (Native)r[i]);
    }
}

// `count` rows of d, an even number, at `places`, as [count / PER_WORD][d][PER_WORD].
void pack_values(const Element* rows, const Index* places, Index count, Index d, Number* packed,
                 Upcoming<Element>& upcoming) {
  for (Index p = 0; p < count; p += 2) {
    const Element *even = row_of(rows, places[p]), *odd = row_of(rows, places[p + 1]);
    for (Index j = 0; j < d; j += 32) {
      upcoming.some(1);
#if SLIP_PAIRED
      put_pairs(packed + p * d + 2 * j, even ? even + j : nullptr, odd ? odd + j : nullptr);
#else
      for (Index c = j; c < j + 32; c += LANES) {
        store_floats(packed + p * d + c, even ? load(even + c) : zeros());
        store_floats(packed + (p + 1) * d + c, odd ? load(odd + c) : zeros());
      }
#endif
    }
  }
}

}  // namespace
