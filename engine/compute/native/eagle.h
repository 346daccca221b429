// A drafter's one layer over a target's features: reads new rows of many sequences, then draws a chain for each, and
// what else might follow each of its tokens.
// See engine/compute/drafters/eagle_layer.py for what it computes.

#pragma once

#include "decoder.h"
#include "draw.h"

extern "C" {

struct Eagle {  // what stays from round to round; records.py mirrors it
  Norm hidden_norm, input_norm, mlp_norm, last_norm;
  Product fuse, qkv, output, gate_up, down, head;  // gate before up
  const Element* embedding;  // [head.out, hidden] of the tokens that it can guess
  void *keys, *values;       // a slab for each sequence, as pages.h has a block
  Index hidden, heads, kv_heads, dim, width, norms_residual;
};

struct EagleRound {  // records.py mirrors it. J sequences, those with most drafts first; N rows to read; D most drafts
  const Element* features;           // [N, fuse.k]
  const Element* embedded;           // [N, hidden] of the tokens behind the rows
  const float *cos, *sin;            // [rows of all passes, dim]: the first has N, each further one `drawing`
  const Index* slots;                // [rows of all passes]
  const int32_t* lengths;            // [D, J], or [1, J] without drafts, as Attention has them
  const Index* last;                 // [J] the last row of each sequence
  const Index* drawing;              // [D] how many sequences want so many drafts
  const Attention* attention;        // what is the same in all passes
  const Draw* draw;                  // of J rows; keys are [D, J, 2]
  const Index* wanted;               // [J] drafts
  Index* token_ids;                  // [D, J, GUESSES] the chain's, by its place in the embedding, then others
  float* chances;                    // [D, J, GUESSES] of each guess and all drafts before it
  Element* scratch;                  // slip_eagle_scratch() numbers
  Index n, sequences, most;
  float least_chance;                // that a chain must have, for another draft behind it
};

}  // extern "C"

namespace {

constexpr Index GUESSES = 3;  // for each position of a chain; eagle_round.py has it too
// Of drawn tokens, as eagle_round.py has them: the chance of what is none of the guesses, and how far behind the first
// a score does not count any longer.
constexpr double OTHERS = .1;
constexpr float FAR_BEHIND = 3;

// How likely the target is to draw each token that won by such scores, -1 behind the last: the smaller its lead, the
// less. As if what the layer's logits are wrong by were noise like the position's own.
inline void chances_of(Index* winners, const double* scores, float* chances) {
  double total = 0;
  for (Index k = 0; k < GUESSES && winners[k] >= 0; k++) {
    if (scores[k] <= scores[0] - FAR_BEHIND)
      winners[k] = -1;
    else
      total += std::exp(scores[k] - scores[0]);
  }
  for (Index k = 0; k < GUESSES && winners[k] >= 0; k++)
    chances[k] = (float)((1 - OTHERS) * std::exp(scores[k] - scores[0]) / total);
}

// Where a round's intermediate results lie.
struct EagleSpace {
  RowBlock* blocks;
  Element *hidden, *both, *qkv, *query, *asked, *attended, *act, *normed, *newest, *embedded, *logits;

  EagleSpace(const Eagle& e, Index n, Index sequences, Element* at) : blocks(row_block_space<1>(most_row_blocks(e, n))) {
    const auto take = [&](Index numbers) {
      Element* taken = at;
      at += numbers;
      return taken;
    };
    hidden = take(n * e.hidden), both = take(n * 2 * e.hidden), qkv = take(n * e.qkv.out);
    query = take(n * e.heads * e.dim);
    asked = take(sequences * e.heads * e.dim), attended = take(sequences * e.heads * e.dim);
    act = take(sequences * e.width), normed = take(sequences * e.hidden), newest = take(sequences * e.hidden);
    embedded = take(sequences * e.hidden), logits = take(sequences * e.head.out);
  }

  static Index numbers(const Eagle& e, Index n, Index sequences) {
    const Index heads = e.heads * e.dim;
    return n * (3 * e.hidden + e.qkv.out + heads) + sequences * (2 * heads + e.width + 3 * e.hidden + e.head.out);
  }

  static Index most_row_blocks(const Eagle& e, Index n) {
    Index most = 0;
    for (const Product* w : {&e.fuse, &e.qkv, &e.output, &e.gate_up, &e.down, &e.head})
      most = std::max(most, num_row_blocks(*w, n));
    return most;
  }
};

// at.newest [count, hidden] becomes the layer's output for the rows `last` of hidden [n, hidden], null for all: only they
// are drafted behind, and of the others only keys and values are kept. As all below, for every thread of a team. `row` is
// the first among those of all passes.
void eagle_layer(Worker& me, const Eagle& e, const EagleRound& r, const EagleSpace& at, const Attention& attention,
                 Element* hidden, const Element* embedded, Index n, Index row, const Index* last) {
  const Index width = e.hidden, heads = e.heads * e.dim, count = attention.sequences;
  me.each(n, [&](Index i) {
    Element* both = at.both + i * 2 * width;
    normalize(embedded + i * width, e.input_norm, both, width);
    normalize(hidden + i * width, e.hidden_norm, both + width, width);
    if (e.norms_residual) memcpy(hidden + i * width, both + width, width * sizeof(Element));
  });
  product_in_team(me, e.qkv, at.both, at.qkv, n, at.blocks);
  const Heads form{e.heads, e.kv_heads, e.dim, e.dim};
  const Norm none{};
  rotate_and_write_in_team(me, {form, at.qkv, r.cos + row * e.dim, r.sin + row * e.dim, none, none, at.query, e.keys,
                                e.values, r.slots + row, n, attention.block_size, 0});
  me.each(count, [&](Index j) {
    const Index from = last ? last[j] : j;
    memcpy(at.asked + j * heads, at.query + from * heads, heads * sizeof(Element));
    if (last) memcpy(at.newest + j * width, hidden + from * width, width * sizeof(Element));
  });
  attend_in_team(me, attention);
  product_in_team(me, e.output, at.attended, at.newest, count, at.blocks, at.newest);
  normalize_in_team(me, at.newest, e.mlp_norm, at.normed, count, width);
  gated_product_in_team(me, e.gate_up, {SILU, true}, at.normed, at.act, count, at.blocks);
  product_in_team(me, e.down, at.act, at.newest, count, at.blocks, at.newest);
}

// Whether a guess behind a draft of such a chance could be among the best `wanted` of sequence `j`, which has `depths`.
bool may_matter(const EagleRound& r, Index depths, Index j, float chance) {
  if (chance < r.least_chance) return false;
  Index better = 0;
  for (Index depth = 0; depth < depths; depth++)
    for (Index k = 0; k < GUESSES; k++) better += r.chances[(depth * r.sequences + j) * GUESSES + k] >= chance;
  return better < r.wanted[j];
}

// One draft of sequence `j` from its logits, and others in its place. The chance of a chain that ends is -1.
void draw_draft(const Eagle& e, const EagleRound& r, const EagleSpace& at, const Draw& draw, Index depth, Index j) {
  const Index step = r.sequences * GUESSES;
  float* chances = r.chances + depth * step + j * GUESSES;
  Index* token_ids = r.token_ids + depth * step + j * GUESSES;
  const float before = depth ? chances[-step] : 1;
  std::fill_n(chances, GUESSES, -1.f);
  if (depth && !may_matter(r, depth, j, before)) return;
  if (best_token(draw.logits, draw.is_bf16, j, draw.vocab) < 0) return;
  Index guesses[GUESSES];
  float own[GUESSES];
  if (draw.temperature[j] > 0) {
    double scores[GUESSES];
    draw_tokens(&draw, j, guesses, scores, GUESSES, FAR_BEHIND);
    chances_of(guesses, scores, own);
  } else {
    find_likeliest(&draw, j, guesses, own, GUESSES);
  }
  for (Index k = 0; k < GUESSES && guesses[k] >= 0; k++) token_ids[k] = guesses[k], chances[k] = before * own[k];
  if (guesses[0] >= 0) memcpy(at.embedded + j * e.hidden, e.embedding + guesses[0] * e.hidden, e.hidden * sizeof(Element));
}

// Whether any sequence goes on behind the draft of this depth. What it looks at is not written again.
bool goes_on(const EagleRound& r, Index depth) {
  for (Index j = 0; depth + 1 < r.most && j < r.drawing[depth + 1]; j++)
    if (may_matter(r, depth + 1, j, r.chances[(depth * r.sequences + j) * GUESSES])) return true;
  return false;
}

}  // namespace

extern "C" {

Index slip_eagle_scratch(const Eagle* e, Index n, Index sequences) { return EagleSpace::numbers(*e, n, sequences); }

// A round in one region. Threads that come late must find nothing changed that decides how they go through it: each
// pass has records of its own.
void slip_eagle(Team* team, const Eagle* eagle, const EagleRound* round) {
  const Eagle& e = *eagle;
  const EagleRound& r = *round;
  const EagleSpace at(e, r.n, r.sequences, r.scratch);
  std::vector<Attention> attentions(std::max<Index>(1, r.most), *r.attention);
  std::vector<Draw> draws(r.most, *r.draw);
  for (Index depth = 0; depth < (Index)attentions.size(); depth++) {
    Attention& attention = attentions[depth];
    attention.query = at.asked, attention.output = at.attended, attention.keys = e.keys, attention.values = e.values;
    attention.lengths += depth * r.sequences;
    attention.sequences = depth ? r.drawing[depth] : r.sequences;
    if (depth < r.most) draws[depth].logits = at.logits, draws[depth].keys += depth * r.sequences * 2;
  }
  team->run(true, [&](Worker& me) {
    product_in_team(me, e.fuse, r.features, at.hidden, r.n, at.blocks);
    eagle_layer(me, e, r, at, attentions[0], at.hidden, r.embedded, r.n, 0, r.last);
    for (Index depth = 0, row = r.n; depth < r.most; depth++) {
      const Index count = r.drawing[depth];
      if (depth) {
        eagle_layer(me, e, r, at, attentions[depth], at.newest, at.embedded, count, row, nullptr);
        row += count;
      }
      me.each(count, [&](Index j) {
        normalize(at.newest + j * e.hidden, e.last_norm, at.normed + j * e.hidden, e.hidden);
      });
      product_in_team(me, e.head, at.normed, at.logits, count, at.blocks);
      me.each(count, [&](Index j) { draw_draft(e, r, at, draws[depth], depth, j); });
      if (!goes_on(r, depth)) return;
    }
  });
}

}  // extern "C"
