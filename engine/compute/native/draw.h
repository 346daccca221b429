// Draws one token a row: what engine/compute/sampling computes with tensors, one row at a time and without temporaries.
//
// Tokens are ordered by gap (how far below the greatest logit) and then by id; top-k, top-p and min-p each keep a
// prefix of that order, and of what is left the greatest sum of score and Gumbel noise wins. Masses are whole
// numbers, exact in any order. Only tokens that can matter are ever compared: see `reach` and `near_enough`.

#pragma once

#include <limits>

#include "numbers.h"
#include "team.h"

extern "C" {

struct Draw {  // of slip_draw; records.py mirrors it
  const void* logits;              // [.., vocab] float, or bfloat16 where is_bf16
  const Index* rows;               // [n] whose logits
  const float* temperature;        // [n] above 0
  const int32_t* top_k;            // [n] 0: off
  const double *top_p, *log_min_p;  // [n] from 1 on, -inf: off
  const int32_t* keys;             // [n, 2] of the noise
  Index* token_ids;                // [n]
  Index n, vocab, is_bf16;
  const int32_t* names;            // [vocab and GAP_BLOCK more] whose noise each has; null: its own number's
};

}  // extern "C"

namespace {

constexpr double UNIT_MASS = 4294967296.;  // the likeliest token's; others are floored to whole numbers
constexpr int GAP_SHIFT = 20;              // gaps fall into bins by their exponent and three bits of fraction
constexpr Index NUM_BINS = (0x7F800000 >> GAP_SHIFT) + 1;
constexpr Index GAP_BLOCK = 64;  // gaps of which the smallest is noted
constexpr Index MOST_WINNERS = 4;
constexpr float SLACK = 1e-3f;   // far above what rounding does to a gap over a temperature

struct Row {  // scratch
  std::vector<float> gaps, smallest, mass;
  std::vector<int32_t> ids, order;
  std::vector<double> bins;
  Index count;  // of the ids listed
};

// 16 logits from place j on of the row that begins at `first`; -inf behind its end.
SLIP_INLINE Floats logits_at(const void* logits, bool is_bf16, Index first, Index j, Index vocab) {
  const Index left = std::max<Index>(0, vocab - j);
  if (!is_bf16) return load_some((const float*)logits + first + j, left, -INFINITY);
  const uint16_t* p = (const uint16_t*)logits + first + j;
  if (left >= LANES) return load_bfloat16(p);
  uint16_t row[LANES];
  for (Index i = 0; i < LANES; i++) row[i] = i < left ? p[i] : 0xFF80;
  return load_bfloat16(row);
}

// Gaps of the whole row, infinite behind its end, and the smallest of each block.
inline void find_gaps(const Draw* d, Index i, Row& row) {
  const Index vocab = d->vocab, padded = (vocab + GAP_BLOCK - 1) / GAP_BLOCK * GAP_BLOCK, first = d->rows[i] * vocab;
  row.gaps.resize(padded + LANES);
  row.smallest.resize(padded / GAP_BLOCK);
  Floats top = broadcast(-INFINITY);
  for (Index j = 0; j < padded; j += LANES) {
    const Floats v = logits_at(d->logits, d->is_bf16, first, j, vocab);
    store_floats(&row.gaps[j], v);
    top = maximum(top, v);
  }
  const Floats highest = broadcast(greatest(top));
  for (Index j = 0; j < padded; j += GAP_BLOCK) {
    Floats smallest = broadcast(INFINITY);
    for (Index k = j; k < j + GAP_BLOCK; k += LANES) {
      const Floats gap = absolute(load_floats(&row.gaps[k]) - highest);
      store_floats(&row.gaps[k], gap);
      smallest = minimum(smallest, gap);
    }
    row.smallest[j / GAP_BLOCK] = least(smallest);
  }
}

SLIP_INLINE Floats mass_of(Floats gap, float temperature) {
  return whole_below(exponential(gap / broadcast(-temperature)) * broadcast((float)UNIT_MASS));
}

inline double total_mass(const Row& row, float temperature) {
  WideSum all;
  for (size_t j = 0; j < row.smallest.size() * GAP_BLOCK; j += LANES)
    all.add(mass_of(load_floats(&row.gaps[j]), temperature));
  return all.total();
}

// List the tokens that `wanted` marks, 16 at a time, in ascending order; blocks that are all too far are skipped.
template <class Wanted>
inline void list_tokens(Row& row, float farthest, Wanted wanted) {
  row.count = 0;
  for (size_t block = 0; block < row.smallest.size(); block++) {
    if (!(row.smallest[block] <= farthest)) continue;
    for (Index j = block * GAP_BLOCK; j < (Index)(block + 1) * GAP_BLOCK; j += LANES) {
      uint32_t marks = wanted(j, load_floats(&row.gaps[j]));
      if (!marks) continue;
      if (row.ids.size() < (size_t)row.count + LANES) row.ids.resize(2 * row.ids.size() + LANES);
      for (; marks; marks &= marks - 1) row.ids[row.count++] = (int32_t)j + __builtin_ctz(marks);
    }
  }
}

SLIP_INLINE Words folded(Words v, int shift) { return v ^ (v >> shift); }

SLIP_INLINE Words mixed(Words v) {
  v = folded(v, 16) * broadcast(0x7FEB352Du);
  return folded(v, 15) * broadcast(0x846CA68Bu);
}

// 32 noise bits of each token, as engine/compute/sampling/noise.py makes them, shifted to be unsigned.
SLIP_INLINE Words noise_bits(Words ids, const int32_t* key) {
  const Words half = mixed(ids ^ broadcast((uint32_t)key[0])) + broadcast((uint32_t)key[1]);
  return folded(mixed(half), 16) ^ broadcast(0x80000000u);
}

// Whose noise 16 tokens from place j on have.
SLIP_INLINE Words names_at(const Draw* d, Index j) {
  return d->names ? bits_of(load_floats((const float*)d->names + j)) : broadcast((uint32_t)j) + lanes();
}

inline int32_t name_of(const Draw* d, Index token_id) { return d->names ? d->names[token_id] : (int32_t)token_id; }

inline double gumbel(int32_t token_id, const int32_t* key) {
  const uint32_t bits = noise_bits(broadcast((uint32_t)token_id), key).part[0][0];
  return -std::log(-std::log((bits + .5) / 4294967296.));
}

// Keep the shortest prefix that weighs `needed`, at least one token: of the border's bin, the first by gap and id.
inline void keep_prefix(Row& row, const float* weight, double needed) {
  const auto bin = [&](Index i) {
    int32_t bits;
    memcpy(&bits, &row.gaps[row.ids[i]], 4);
    return bits >> GAP_SHIFT;
  };
  row.bins.assign(NUM_BINS, 0.);
  for (Index i = 0; i < row.count; i++) row.bins[bin(i)] += weight ? weight[i] : 1.;
  Index border = 0;
  double before = 0;
  while (border < NUM_BINS && before + row.bins[border] < needed) before += row.bins[border++];
  if (border == NUM_BINS) return;
  row.order.clear();
  for (Index i = 0; i < row.count; i++)
    if (bin(i) == border) row.order.push_back((int32_t)i);
  const auto nearer = [&](int32_t a, int32_t b) {
    const float x = row.gaps[row.ids[a]], y = row.gaps[row.ids[b]];
    return x < y || (x == y && a < b);
  };
  std::sort(row.order.begin(), row.order.end(), nearer);
  size_t kept = 0;
  do before += weight ? weight[row.order[kept]] : 1.;
  while (++kept < row.order.size() && before < needed);
  std::sort(row.order.begin(), row.order.begin() + kept);
  Index to = 0;
  size_t next = 0;
  for (Index i = 0; i < row.count; i++) {
    const Index place = bin(i);
    bool stays = place < border;
    if (place == border && next < kept && row.order[next] == i) stays = true, next++;
    if (!stays) continue;
    if (weight) row.mass[to] = row.mass[i];
    row.ids[to++] = row.ids[i];
  }
  row.count = to;
}

inline void weigh_tokens(Row& row, float temperature) {
  row.mass.resize(row.count + LANES);
  for (Index i = 0; i < row.count; i += LANES) {
    float gaps[LANES] = {};
    for (Index j = i; j < std::min(i + LANES, row.count); j++) gaps[j - i] = row.gaps[row.ids[j]];
    store_floats(&row.mass[i], mass_of(load_floats(gaps), temperature));
  }
}

// A gap that at least k tokens are not beyond.
inline float kth_gap(const Row& row, Index k) {
  if (k > (Index)row.smallest.size()) return std::numeric_limits<float>::max();
  std::vector<float> smallest(row.smallest);
  std::nth_element(smallest.begin(), smallest.begin() + (k - 1), smallest.end());
  return std::min(smallest[k - 1], std::numeric_limits<float>::max());
}

// What top-k and then top-p leave.
inline void filter(const Draw* d, Index i, Row& row) {
  const float temperature = d->temperature[i];
  const bool by_count = d->top_k[i] > 0 && d->top_k[i] < d->vocab, by_share = d->top_p[i] < 1;
  double total = 0;
  float near_enough = std::numeric_limits<float>::max();  // infinite gaps are out in any case
  if (by_count) {
    near_enough = kth_gap(row, d->top_k[i]);
  } else {  // beyond it there is less than the share that is cut off, even if all the vocabulary lay there
    total = total_mass(row, temperature);
    const double reach = std::log(d->vocab * UNIT_MASS / ((1 - d->top_p[i]) * total)) + SLACK;
    near_enough = (float)std::min<double>(near_enough, temperature * std::max(0., reach));
  }
  const Floats limit = broadcast(near_enough);
  list_tokens(row, near_enough, [&](Index, Floats gap) { return at_most(gap, limit); });
  if (by_count) keep_prefix(row, nullptr, d->top_k[i]);
  if (!by_share) return;
  weigh_tokens(row, temperature);
  if (by_count) {
    for (Index j = 0; j < row.count; j++) total += row.mass[j];
  }
  keep_prefix(row, row.mass.data(), d->top_p[i] * total);
}

// Every token whose noise could carry it past the likeliest, or to less than `behind` from it. Gumbel noise of bits b
// is below ln(2^32 / (2^32 - b)), which the exponent of the divisor bounds.
inline void list_hopeful(const Draw* d, Index i, Row& row, float behind) {
  const int32_t* key = d->keys + 2 * i;
  const Index best = std::find(row.gaps.begin(), row.gaps.end(), 0.f) - row.gaps.begin();
  const float least_score = (float)gumbel(name_of(d, best), key) - SLACK - behind;
  const Floats bar = broadcast(least_score), temperature = broadcast(d->temperature[i]), half = broadcast(.5f);
  const Floats all = broadcast(32.f + 127.f), doubling = broadcast(0.693148f);
  const float farthest = (24.f - least_score) * d->temperature[i];  // noise never exceeds 23
  list_tokens(row, std::min(farthest, std::numeric_limits<float>::max()), [&](Index j, Floats gap) {
    const Floats rest = maximum(to_floats(noise_bits(names_at(d, j), key) ^ broadcast(0xFFFFFFFFu)), half);
    const Floats most = (all - to_floats(bits_of(rest) >> 23)) * doubling;
    return at_most(gap / temperature + bar, most);
  });
}

// The `most` listed tokens with the greatest scores, greatest first; -1 behind the last.
inline void find_winners(const Draw* d, Index i, const Row& row, Index* winners, double* scores, Index most) {
  std::fill_n(winners, most, -1);
  for (Index j = 0; j < row.count; j++) {
    const float scaled = row.gaps[row.ids[j]] / -d->temperature[i];
    if ((double)scaled < d->log_min_p[i]) continue;
    const double score = scaled + gumbel(name_of(d, row.ids[j]), d->keys + 2 * i);
    Index place = most;
    while (place > 0 && (winners[place - 1] < 0 || score > scores[place - 1])) place--;
    if (place == most) continue;
    std::copy_backward(winners + place, winners + most - 1, winners + most);
    std::copy_backward(scores + place, scores + most - 1, scores + most);
    winners[place] = row.ids[j], scores[place] = score;
  }
}

// The first of row i's greatest logits; -1 for a row with NaN, or whose greatest is infinite.
inline Index best_token(const void* logits, bool is_bf16, Index i, Index vocab) {
  Floats top = broadcast(-INFINITY);
  uint32_t bad = 0;
  for (Index j = 0; j < vocab; j += LANES) {
    const Floats v = logits_at(logits, is_bf16, i * vocab, j, vocab);
    bad |= are_nan(v);
    top = maximum(top, v);
  }
  const float highest = greatest(top);
  if (bad || std::isinf(highest)) return -1;
  for (Index j = 0; j < vocab; j += LANES) {
    const uint32_t marks = equal(logits_at(logits, is_bf16, i * vocab, j, vocab), broadcast(highest));
    if (marks) return j + __builtin_ctz(marks);
  }
  return -1;
}

// Scratch of the calling thread; its memory serves the next step too.
inline Row& own_row() {
  static thread_local Row row;
  return row;
}

// The `most` likeliest tokens of row i, likeliest first and of equals the first one, and how likely each is at
// temperature 1. Its greatest logit is finite.
inline void find_likeliest(const Draw* d, Index i, Index* ids, float* chances, Index most) {
  Row& row = own_row();
  find_gaps(d, i, row);
  const double total = total_mass(row, 1);
  for (Index k = 0; k < most; k++) {
    const Index block = std::min_element(row.smallest.begin(), row.smallest.end()) - row.smallest.begin();
    float* gaps = &row.gaps[block * GAP_BLOCK];
    float* nearest = std::min_element(gaps, gaps + GAP_BLOCK);
    ids[k] = *nearest < INFINITY ? block * GAP_BLOCK + (nearest - gaps) : -1;
    chances[k] = (float)(std::exp(-*nearest) * UNIT_MASS / total);
    *nearest = INFINITY;
    row.smallest[block] = *std::min_element(gaps, gaps + GAP_BLOCK);
  }
}

// What row i draws at its temperature: the `most` tokens with the greatest scores, as far as they could be the
// greatest or are less than `behind` from it, and these scores.
inline void draw_tokens(const Draw* d, Index i, Index* winners, double* scores, Index most, float behind) {
  Row& row = own_row();
  find_gaps(d, i, row);
  if ((d->top_k[i] > 0 && d->top_k[i] < d->vocab) || d->top_p[i] < 1)
    filter(d, i, row);
  else
    list_hopeful(d, i, row, behind);
  find_winners(d, i, row, winners, scores, most);
}

inline Index draw_token(const Draw* d, Index i) {
  Index winner;
  double score;
  draw_tokens(d, i, &winner, &score, 1, 0);
  return winner;
}

}  // namespace

extern "C" {

// See best_token.
void slip_best(Team* team, const void* logits, Index is_bf16, Index n, Index vocab, Index* token_ids) {
  const auto find = [&](Index i) { token_ids[i] = best_token(logits, is_bf16, i, vocab); };
  team->run(n > 1, [&](Worker& me) { me.each(n, find); });
}

// See draw_token.
void slip_draw(Team* team, const Draw* d) {
  team->run(d->n > 1, [&](Worker& me) { me.each(d->n, [&](Index i) { d->token_ids[i] = draw_token(d, i); }); });
}

}  // extern "C"
