// Attention of every row of a step over pages, with a running softmax (Dao et al. 2022, FlashAttention).
//
// A tile is a run of neighbouring tokens of one sequence with the query heads of one KV head, so that keys and
// values are brought into order once for all of them. Positions are taken in blocks of KEYS and chunks of CHUNK
// that are counted from position 0: a row's result has the same bits whatever else is in its tile or in the step,
// however its sequence was cut into steps, and on any number of threads.

#pragma once

#include "attention_desk.h"
#include "team.h"

namespace {

constexpr Index ENOUGH_TILES = 4;  // tiles for each thread: where there are fewer, chunks are shared out

// With chunks shared out as well, `together` of each tile at a time. Their records are folded in the order of
// positions into those of the whole tile, which lie before them.
template <class Pages>
void attend_chunks_in_team(Worker& me, const Tiles& tiles, Index spans, Index together, float* records,
                           Desk<Pages>& desk) {
  const Index size = desk.tile_records(), stride = (together + 1) * size;
  for (Index first = 0; first < tiles.most_chunks(); first += together) {
    const auto part = [&](Index i) { return tiles.span(i / together).chunk(first + i % together); };
    me.each(spans * together, [&](Index i) {
      desk.attend_chunk(part(i), part(i + 1), records + i / together * stride + (1 + i % together) * size);
    });
    me.each(spans, [&](Index i) { desk.gather(tiles.span(i), first, together, records + i * stride); });
  }
}

template <class Pages>
void attend_to(Worker& me, const Attention& a) {
  const Tiles tiles(a);
  const Index spans = tiles.count() * a.kv_heads, threads = me.team_size();
  Desk<Pages> desk(a, tiles);
  if (threads > 1 && spans < ENOUGH_TILES * threads && tiles.most_chunks() > 1) {
    const Index together = std::min(tiles.most_chunks(), a.room / (spans * desk.tile_records()) - 1);
    if (together > 0) return attend_chunks_in_team(me, tiles, spans, together, a.records, desk);
  }
  me.each(spans, [&](Index i) { desk.attend(tiles.span(i), tiles.span(i + 1)); });
}

// softmax(q k^T * scale) v of every token, for every thread of a team, with a barrier behind it.
void attend_in_team(Worker& me, const Attention& a) {
#if defined(SLIP_FORMATS)
  if (a.of_bytes) return attend_to<BytePages>(me, a);
#endif
  attend_to<ElementPages>(me, a);
}

}  // namespace

extern "C" {

// As attend_in_team, with a team of its own.
void slip_attend(Team* team, const Attention* a) {
  team->run(Tiles(*a).positions() * a->heads > 2048, [&](Worker& me) { attend_in_team(me, *a); });
}

}  // extern "C"
