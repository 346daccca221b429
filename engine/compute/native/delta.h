// The gated delta rule: what states recall wrong of keys is corrected, token after token.
// Yang et al., "Gated Delta Networks", 2024; with a decay for each channel of a key, "Kimi Linear", 2025.
//
// A column of a state is a sequence's own recurrence, so that threads share out heads and columns, and a token's result
// depends on those before it alone, however many come in one step. All numbers are floats, whatever the model's are.

#pragma once

#include "team.h"
#include "vector.h"

extern "C" {

struct DeltaScan {              // records.py mirrors it. M rows, S sequences
  const float *query, *key;     // [M, key_heads, keys]
  const float* value;           // [M, heads, values]
  const float* decays;          // [M, heads], or with `decays_channels` [M, heads, keys]
  const float* beta;            // [M, heads]
  float* state;                 // [slots, heads, keys, values]
  float* output;                // [M, heads, values]
  const Index *slots, *firsts;  // [S] where a sequence's state is, and which row is its first
  const Index *counts, *taken;  // [S] its rows, and how many of them its state takes in; the others are drafts
  Index sequences, heads, key_heads, keys, values, decays_channels;
};

}  // extern "C"

namespace {

constexpr int DELTA_VECTORS = 2;                        // columns that are computed together
constexpr Index DELTA_COLUMNS = DELTA_VECTORS * LANES;
constexpr int DELTA_SUMS = WIDTH == LANES ? 4 : 2;      // that keys are added up in: as many as registers hold
constexpr Index DELTA_KEYS = 256;                       // most of a head

// The columns of one head's state from `column` on, for one sequence.
class DeltaColumns {
 public:
  DeltaColumns(const DeltaScan& d, Index sequence, Index head, Index column)
      : d_(d), sequence_(sequence), head_(head), column_(column) {}

  void run() {
    float* const stored = d_.state + ((d_.slots[sequence_] * d_.heads + head_) * d_.keys) * d_.values + column_;
    for (Index k = 0; k < d_.keys; k++) memcpy(at(k), stored + k * d_.values, sizeof(float) * DELTA_COLUMNS);
    const Index first = d_.firsts[sequence_];
    for (Index i = 0; i < d_.counts[sequence_]; i++) {
      if (i == d_.taken[sequence_]) put_back(stored);
      advance(first + i);
    }
    if (d_.counts[sequence_] == d_.taken[sequence_]) put_back(stored);
  }

 private:
  float* at(Index k) { return state_ + k * DELTA_COLUMNS; }

  void put_back(float* stored) {
    for (Index k = 0; k < d_.keys; k++) memcpy(stored + k * d_.values, at(k), sizeof(float) * DELTA_COLUMNS);
  }

  // Takes in one token and says what its query recalls.
  void advance(Index row) {
    const Index key_head = head_ * d_.key_heads / d_.heads, of_row = row * d_.heads + head_;
    const float* const key = d_.key + (row * d_.key_heads + key_head) * d_.keys;
    const float* const query = d_.query + (row * d_.key_heads + key_head) * d_.keys;
    if (d_.decays_channels)
      advance_with(row, key, query, [decays = d_.decays + of_row * d_.keys](Index k) { return decays[k]; });
    else
      advance_with(row, key, query, [decay = d_.decays[of_row]](Index) { return decay; });
  }

  template <class Decay>
  SLIP_INLINE void advance_with(Index row, const float* key, const float* query, Decay decay) {
    const Index of_row = row * d_.heads + head_;
    Floats sums[DELTA_SUMS][DELTA_VECTORS] = {};
    for (Index k = 0; k < d_.keys; k += DELTA_SUMS)
      repeat<DELTA_SUMS>(SLIP_EACH_OF(s) {
        const Floats part = broadcast(key[k + s] * decay(k + s));
        repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
          sums[s][v] = fma(part, load_floats(at(k + s) + v * LANES), sums[s][v]);
        });
      });
    Floats corrections[DELTA_VECTORS];
    const Floats beta = broadcast(d_.beta[of_row]);
    repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
      const Floats value = load_floats(d_.value + of_row * d_.values + column_ + v * LANES);
      corrections[v] = beta * (value - total(sums, v));
    });
    repeat<DELTA_SUMS>(SLIP_EACH_OF(s) { repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) { sums[s][v] = zeros(); }); });
    for (Index k = 0; k < d_.keys; k += DELTA_SUMS)
      repeat<DELTA_SUMS>(SLIP_EACH_OF(s) {
        const Floats left = broadcast(decay(k + s)), part = broadcast(key[k + s]), asked = broadcast(query[k + s]);
        repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
          float* const numbers = at(k + s) + v * LANES;
          const Floats now = fma(part, corrections[v], load_floats(numbers) * left);
          store_floats(numbers, now);
          sums[s][v] = fma(asked, now, sums[s][v]);
        });
      });
    repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
      store_floats(d_.output + of_row * d_.values + column_ + v * LANES, total(sums, v));
    });
  }

  SLIP_INLINE static Floats total(const Floats (&sums)[DELTA_SUMS][DELTA_VECTORS], int v) {
    Floats all = sums[0][v];
    repeat<DELTA_SUMS - 1>(SLIP_EACH_OF(s) { all = all + sums[s + 1][v]; });
    return all;
  }

  const DeltaScan& d_;
  const Index sequence_, head_, column_;
  alignas(64) float state_[DELTA_KEYS * DELTA_COLUMNS];
};

}  // namespace

extern "C" {

// Every sequence's rows in their order; its state ends behind the last row that it takes in.
void slip_delta_scan(Team* team, const DeltaScan* d) {
  const Index blocks = d->values / DELTA_COLUMNS;
  team->run(true, [&](Worker& me) {
    me.each(d->sequences * d->heads * blocks, [&](Index i) {
      DeltaColumns(*d, i / (d->heads * blocks), i / blocks % d->heads, i % blocks * DELTA_COLUMNS).run();
    });
  });
}

}  // extern "C"
