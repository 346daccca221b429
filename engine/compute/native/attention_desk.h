// Where one thread attends, tile after tile.

#pragma once

#include "page_kinds.h"

namespace {

template <class Pages>
class Desk {
 public:
  Desk(const Attention& a, const Tiles& tiles)
      : a_(a), tiles_(tiles), group_(a.heads / a.kv_heads), tile_records_(tiles.most_rows() * record_size(a.dim)),
        memory_(room<float>(2 * tile_records_)), whole_(memory_.get()), part_(whole_ + tile_records_),
        seen_(tiles.most_rows()), pages_(a, tiles.most_rows()) {}

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
      const bool is_last = start + KEYS >= span.stop;
      const Index later = is_last ? next.start / KEYS * KEYS : start + KEYS;
      pages_.upcoming().turn(next_, place(is_last ? next : span, later, next_));
      for (Index t = 0; t < span.tile.count; t++)
        std::fill_n(seen_.begin() + t * group_, group_, tiles_.seen(span.tile, t, start));
      if (tiles_.branches(span.tile, start + KEYS) || hides_broken(span, start))
        attend_apart(span, start, records);
      else
        attend_positions(span, start, ALL, 0, rows, records);
    }
  }

 private:
  static constexpr Index ALL = -1;  // in place of a token: what is the same for all of the tile

  // Of the tile's rows `count` from `first` on, against the positions from `start` on that `token` sees.
  void attend_positions(const Span& span, Index start, Index token, Index first, Index count, float* records) {
    const Index positions = place(span, start, places_, token);
    for_runs(span, start, token, [&](Index at, Index head, Index offset, Index run) {
      pages_.take_scales(head, offset, run, at);
    });
    pages_.attend(places_, positions, first, count, seen_.data() + first, records + first * record_size(a_.dim));
  }

  // Whether a value that some of the tile's tokens see and others do not is no finite number: times a weight of nothing
  // it is none either, and would show where it is not seen.
  bool hides_broken(const Span& span, Index start) {
    uint64_t by_some = 0, by_all = ~0ull;
    for (Index t = 0; t < span.tile.count; t++) by_some |= seen_[t * group_], by_all &= seen_[t * group_];
    uint64_t hidden = by_some & ~by_all;
    if (!hidden) return false;
    place(span, start, places_);
    for (; hidden; hidden &= hidden - 1)
      if (pages_.is_broken(places_[__builtin_ctzll(hidden)])) return true;
    return false;
  }

  // Each token by itself, as if what it does not see were not there: where drafts form a tree its branch in order, so
  // that a draft's result has the bits that it has in a chain.
  void attend_apart(const Span& span, Index start, float* records) {
    for (Index t = 0; t < span.tile.count; t++)
      if (seen_[t * group_]) attend_positions(span, start, t, t * group_, group_, records);
  }

  // The queries of the tile's rows, one after another.
  void take(const Span& span) {
    const Element* query = a_.query + (span.tile.row * a_.heads + span.head * group_) * a_.dim;
    for (Index i = 0; i < span.tile.count * group_; i++)
      pages_.take_query(i, query + (i / group_ * a_.heads + i % group_) * a_.dim);
  }

  // Where in the pages a block's positions lie, -1 for those outside the span. Returns their number, or more
  // to make it a multiple of 32.
  Index place(const Span& span, Index start, Index* places, Index token = ALL) const {
    std::fill_n(places, KEYS, -1);
    for_runs(span, start, token, [&](Index at, Index head, Index offset, Index run) {
      const Index first = pages_.place(head, offset);
      for (Index i = 0; i < run; i++) places[at + i] = first + i * a_.dim;
    });
    return parts_of(std::min(span.stop, start + KEYS) - start, 32) * 32;
  }

  // Calls `work(at, head, offset, run)` for the span's positions from `start` on that `token` sees and that lie side
  // by side in one head of one block: where they begin among the KEYS, the head's number among those of all blocks,
  // the first's row there, and how many they are.
  template <class Work>
  SLIP_INLINE void for_runs(const Span& span, Index start, Index token, Work work) const {
    const int32_t* table = a_.tables + span.tile.sequence * a_.max_blocks;
    const Index first = token == ALL ? span.start : std::max(span.start, tiles_.first_of(span.tile, token));
    const Index end = token == ALL ? span.stop : std::min(span.stop, tiles_.end_of(span.tile, token));
    const Index stop = std::min(end, start + KEYS);
    for (Index p = std::max(first, start); p < stop;) {
      Index run = stop - p;
      const Index slot = token == ALL ? p : tiles_.slot(span.tile, token, p, run), offset = slot % a_.block_size;
      run = std::min(a_.block_size - offset, run);
      work(p - start, table[slot / a_.block_size] * a_.kv_heads + span.head, offset, run);
      p += run;
    }
  }

  void write(const Span& span, const float* records) {
    for (Index i = 0; i < span.tile.count * group_; i++) {
      const Index head = span.head * group_ + i % group_, row = (span.tile.row + i / group_) * a_.heads + head;
      const float* record = records + i * record_size(a_.dim);
      Element* output = a_.output + row * a_.dim;
      if (a_.sinks)
        finish(record, output, a_.dim, a_.sinks[head]);
      else
        finish(record, output, a_.dim);
    }
  }

  const Attention& a_;
  const Tiles& tiles_;
  Index group_, tile_records_;
  std::unique_ptr<float, Free> memory_;
  float *whole_, *part_;        // records of a tile's rows
  std::vector<uint64_t> seen_;  // by each row
  Index places_[KEYS], next_[KEYS];
  Pages pages_;
};

}  // namespace
