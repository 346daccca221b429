// What attends to what: the tiles of a step, and the positions that each of their tokens sees.

#pragma once

#include "numbers.h"

extern "C" {

struct Attention {  // of slip_attend; records.py mirrors it
  const Element* query;                  // [tokens, heads, dim]
  const void *keys, *values;             // pages of elements or of bytes, as pages.h has them
  const int32_t *counts, *lengths;    // [sequences]: tokens in this step, and positions in the pages with these
  const int32_t* tables;              // [sequences, max_blocks]
  const int32_t *trees, *gaps;        // as PagedRows has them; null where all sequences are chains
  Element* output;                       // [tokens, heads, dim]
  const float* sinks;                 // [heads]: scores that take part in a softmax and bring no value; or null
  float* records;                     // memory that no other call uses meanwhile; see attention.h
  Index sequences, max_blocks, heads, kv_heads, dim, block_size, window;  // window 0: all positions
  Index chunk;                        // not 0: a token sees its own chunk of so many positions alone
  Index room;                         // numbers that fit `records`; 0: chunks are not shared out
  Index of_bytes;                     // what the pages are of
  float scale, softcap;               // softcap 0: none
};

}  // extern "C"

namespace {

constexpr Index KEYS = 64;       // positions in a block: a bit each in a token's mask
constexpr Index CHUNK = 512;     // positions that are summed by themselves; a multiple of KEYS
constexpr Index TILE_ROWS = 96;  // rows of a tile: beside a block they stay in the nearest caches

inline Index parts_of(Index whole, Index size) { return (whole + size - 1) / size; }

// Tokens of one sequence, and the positions they see: from `first` on, up to `stop`.
struct Tile {
  Index sequence, row, place, count;  // the first token's place among the sequence's, and its row among all
  Index first, stop;

  Index chunks() const { return parts_of(stop, CHUNK) - first / CHUNK; }
};

// Positions that a tile's rows attend to with the query heads of one KV head.
struct Span {
  Tile tile;
  Index head, start, stop;

  // Of these, those in one of the tile's chunks.
  Span chunk(Index number) const {
    const Index begin = (tile.first / CHUNK + number) * CHUNK;
    return {tile, head, std::max(start, begin), std::min(stop, begin + CHUNK)};
  }
};

// Every tile of a step by number. Those that see most come first, so that threads end together.
class Tiles {
 public:
  explicit Tiles(const Attention& a) : a_(a), tokens_(std::max<Index>(1, TILE_ROWS / (a.heads / a.kv_heads))) {
    begins_.reserve(a.sequences + 1);
    rows_.reserve(a.sequences + 1);
    Index tiles = 0, row = 0;
    for (Index s = 0; s < a.sequences; s++) {
      begins_.push_back(tiles);
      rows_.push_back(row);
      tiles += parts_of(a.counts[s], tokens_);
      row += a.counts[s];
      longest_ = std::max<Index>(longest_, a.lengths[s]);
      widest_ = std::max(widest_, std::min<Index>(tokens_, a.counts[s]));
      positions_ += (Index)a.counts[s] * a.lengths[s];
    }
    begins_.push_back(tiles);
  }

  Index count() const { return begins_.back(); }
  Index most_rows() const { return widest_ * (a_.heads / a_.kv_heads); }
  Index most_chunks() const { return parts_of(longest_, CHUNK); }
  Index positions() const { return positions_; }  // what all tokens see together, or some more

  Tile operator[](Index number) const {
    number = count() - 1 - number;  // long chunks are behind decodes in a step, and see most where they end
    const Index s = std::upper_bound(begins_.begin(), begins_.end(), number) - begins_.begin() - 1;
    Tile tile{s, 0, (number - begins_[s]) * tokens_, 0, 0, 0};
    tile.row = rows_[s] + tile.place;
    tile.count = std::min(tokens_, a_.counts[s] - tile.place);
    tile.first = a_.lengths[s], tile.stop = 0;
    for (Index t = 0; t < tile.count; t++) {
      tile.first = std::min(tile.first, first_of(tile, t));
      tile.stop = std::max(tile.stop, end_of(tile, t));
    }
    return tile;
  }

  // All that one KV head has to do with one tile; nothing for a number that is too large.
  Span span(Index number) const {
    if (number >= count() * a_.kv_heads) return {};
    const Tile tile = (*this)[number / a_.kv_heads];
    return {tile, number % a_.kv_heads, tile.first, tile.stop};
  }

  // Which of the KEYS positions from `start` on token `t` of the tile sees.
  uint64_t seen(const Tile& tile, Index t, Index start) const {
    return bits(first_of(tile, t) - start, end_of(tile, t) - start);
  }

  // The first position that token `t` sees, where its window or chunk begins, and behind the last. Those of a draft in
  // a tree are counted along its own branch.
  Index first_of(const Tile& tile, Index t) const {
    if (a_.chunk) return depth_of(tile, t) / a_.chunk * a_.chunk;
    return a_.window ? std::max<Index>(0, depth_of(tile, t) + 1 - a_.window) : 0;
  }
  Index end_of(const Tile& tile, Index t) const { return depth_of(tile, t) + 1; }

  // Whether positions before `stop` may be other slots for each of the tile's tokens.
  bool branches(const Tile& tile, Index stop) const { return gaps_of(tile, 0) && stop > before(tile); }

  // The slot of a position that token `t` sees, and up to `most` that follow it and lie side by side.
  Index slot(const Tile& tile, Index t, Index position, Index& most) const {
    const Index from = before(tile), gap = depth_of(tile, t) - position;
    const int32_t* gaps = gaps_of(tile, t);
    if (!gaps) return position;
    if (position < from) return most = std::min(most, from - position), position;
    most = 1;
    Index place = position - from;  // parents lie before their children
    while (gaps[place] != gap) place++;
    return from + place;
  }

 private:
  // Bits from `first` up to `stop`, of those from 0 up to KEYS.
  static uint64_t bits(Index first, Index stop) { return below(stop) & ~below(first); }
  static uint64_t below(Index stop) { return stop <= 0 ? 0 : stop >= KEYS ? ~0ull : (1ull << stop) - 1; }

  // Positions before those of this step.
  Index before(const Tile& tile) const { return a_.lengths[tile.sequence] - a_.counts[tile.sequence]; }

  // Of a draft in a tree, its row of gaps: how much deeper it is than each that it sees. Null for what sees all
  // that is before it.
  const int32_t* gaps_of(const Tile& tile, Index t) const {
    const Index begin = a_.trees ? a_.trees[tile.sequence] : -1;
    return begin < 0 ? nullptr : a_.gaps + begin + (tile.place + t) * a_.counts[tile.sequence];
  }

  // The token's position: in a tree, its depth behind the tokens before.
  Index depth_of(const Tile& tile, Index t) const {
    const int32_t* gaps = gaps_of(tile, t);
    return before(tile) + (gaps ? gaps[0] : tile.place + t);
  }

  const Attention& a_;
  Index tokens_, widest_ = 0, longest_ = 0, positions_ = 0;
  std::vector<Index> begins_, rows_;  // of each sequence the first tile and the first row
};

}  // namespace
