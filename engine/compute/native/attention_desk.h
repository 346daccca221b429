// Where one thread attends, tile after tile.

#pragma once

#include <cstdlib>
#include <memory>

#include "attention_tile.h"
#include "pages.h"
#include "tiles.h"

namespace {

inline float* room(Index numbers) { return (float*)std::aligned_alloc(64, parts_of(numbers, 16) * 64); }

class Desk {
 public:
  Desk(const Attention& a, const Tiles& tiles)
      : a_(a), tiles_(tiles), group_(a.heads / a.kv_heads), tile_records_(tiles.most_rows() * record_size(a.dim)),
        memory_(room(2 * tile_records_ + numbers(tiles, a) * sizeof(Number) / sizeof(float))),
        whole_(memory_.get()), part_(whole_ + tile_records_), keys_((Number*)(part_ + tile_records_)),
        values_(keys_ + KEYS * a.dim), query_(values_ + KEYS * a.dim), seen_(tiles.most_rows()),
        upcoming_(a.keys, a.values, a.dim), block_{keys_, values_, Scores(a.scale, a.softcap), a.dim, upcoming_} {}

  // How many numbers the records of the largest tile are.
  Index tile_records() const { return tile_records_; }

  // Writes what the span's rows attend to. `next` is what this thread will be asked for next, as far as one knows.
  void attend(const Span& span, const Span& next) {
    const Index rows = span.tile.count * group_, last = span.tile.chunks() - 1;
    clear(whole_, rows, a_.dim);
    for (Index i = 0; i <= last; i++) {
      attend_chunk(span.chunk(i), i < last ? span.chunk(i + 1) : next, part_);
      fold(whole_, part_, rows, a_.dim);
    }
    write(span, whole_);
  }

  // The same from the records of the tile's chunks, `count` of them from `first` on; they lie one after another
  // behind `whole`, where those of the chunks before are. Writes with the last.
  void gather(const Span& span, Index first, Index count, float* whole) {
    const Index rows = span.tile.count * group_, chunks = span.tile.chunks();
    if (first == 0) clear(whole, rows, a_.dim);
    for (Index i = 0; i < count && first + i < chunks; i++)
      fold(whole, whole + (1 + i) * tile_records_, rows, a_.dim);
    if (first < chunks && chunks <= first + count) write(span, whole);
  }

  // The `records` of a span that lies in one chunk.
  void attend_chunk(const Span& span, const Span& next, float* records) {
    const Index rows = span.tile.count * group_;
    take(span);
    clear(records, rows, a_.dim);
    for (Index start = span.start / KEYS * KEYS; start < span.stop; start += KEYS) {
      const Index count = place(span, start, places_);
      const bool is_last = start + KEYS >= span.stop;
      const Index later = is_last ? next.start / KEYS * KEYS : start + KEYS;
      upcoming_.turn(next_, place(is_last ? next : span, later, next_));
      pack_keys(a_.keys, places_, count, a_.dim, keys_, upcoming_);
      pack_values(a_.values, places_, count, a_.dim, values_, upcoming_);
      for (Index t = 0; t < span.tile.count; t++)
        std::fill_n(seen_.begin() + t * group_, group_, tiles_.seen(span.tile, t, start));
      attend_block(block_, rows, query_, seen_.data(), records);
    }
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };

  // What a block's keys and values and a tile's queries are together, an even number.
  static Index numbers(const Tiles& tiles, const Attention& a) {
    return (2 * KEYS + tiles.most_rows() + tiles.most_rows() % 2) * a.dim;
  }

  // The queries of the tile's rows, one after another.
  void take(const Span& span) {
    const Index size = group_ * a_.dim;
    const Element* query = a_.query + span.tile.row * a_.heads * a_.dim + span.head * size;
    for (Index t = 0; t < span.tile.count; t++)
      copy_numbers(query_ + t * size, query + t * a_.heads * a_.dim, size);
  }

  // Where in the pages a block's positions lie, -1 for those outside the span. Returns their number, or more
  // to make it a multiple of 32.
  Index place(const Span& span, Index start, Index* places) const {
    const int32_t* table = a_.tables + span.tile.sequence * a_.max_blocks;
    const Index stop = std::min(span.stop, start + KEYS), count = parts_of(stop - start, 32) * 32;
    std::fill_n(places, KEYS, -1);
    for (Index p = std::max(span.start, start); p < stop;) {
      const Index offset = p % a_.block_size, run = std::min(a_.block_size - offset, stop - p);
      const Index at = ((table[p / a_.block_size] * a_.kv_heads + span.head) * a_.block_size + offset) * a_.dim;
      for (Index i = 0; i < run; i++) places[p - start + i] = at + i * a_.dim;
      p += run;
    }
    return count;
  }

  void write(const Span& span, const float* records) {
    for (Index i = 0; i < span.tile.count * group_; i++) {
      const Index row = (span.tile.row + i / group_) * a_.heads + span.head * group_ + i % group_;
      finish(records + i * record_size(a_.dim), a_.output + row * a_.dim, a_.dim);
    }
  }

  const Attention& a_;
  const Tiles& tiles_;
  Index group_, tile_records_;
  std::unique_ptr<float, Free> memory_;
  float *whole_, *part_;           // records of a tile's rows
  Number *keys_, *values_, *query_;  // a block's, as they are multiplied, and the tile's
  std::vector<uint64_t> seen_;     // by each row
  Index places_[KEYS], next_[KEYS];
  Upcoming upcoming_;
  Block block_;
};

}  // namespace
