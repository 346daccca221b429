// How the tokens of recurrent layers meet: token after token, over states that a slot keeps for each sequence.
//
// A part of a head's state needs no other part, so that threads share out parts, and a token's result depends on those
// before it alone, however many come in one step. All numbers are floats, whatever the model's are.

#pragma once

#include "numbers.h"
#include "team.h"

extern "C" {

struct Runs {                   // records.py mirrors it, as it does all below. Of S sequences and M rows
  const Index *slots, *firsts;  // [S] where a sequence's state is, and which row is its first
  const Index *counts, *taken;  // [S] its rows, and how many of them its state takes in; the others are drafts
  Index sequences;
};

struct DeltaScan {
  Runs runs;
  const float *query, *key;  // [M, key_heads, keys]
  const float* value;        // [M, heads, values]
  const float* decays;       // [M, heads], or with `decays_channels` [M, heads, keys]
  const float* beta;         // [M, heads]
  float* state;              // [slots, heads, keys, values]
  float* output;             // [M, heads, values]
  Index heads, key_heads, keys, values, decays_channels;
};

struct StructuredScan {
  Runs runs;
  const float* inputs;    // [M, heads, dim]
  const float* decays;    // [M, heads]
  const float *b, *c;     // [M, groups, size], each for the heads of a group
  float* state;           // [slots, heads, dim, size]
  float* output;          // [M, heads, dim]
  Index heads, groups, dim, size;
};

struct SelectiveScan {
  Runs runs;
  const float *inputs, *steps;  // [M, channels]
  const float* rates;           // [channels, size], negative
  const float *b, *c;           // [M, size]
  float* state;                 // [slots, channels, size], a slot's `stride` numbers behind the one before
  float* output;                // [M, channels]
  Index channels, size, stride;
};

}  // extern "C"

namespace {

// What lies apart in memory: `rows` pieces of `width` numbers.
struct Pieces {
  float* first;
  Index rows, stride, width;
};

// Calls `advance(row)` for each row of a sequence, in which `own`, a copy of `stored`, may be changed. What it is behind
// the last row that the state takes in is put back.
template <class Advance>
void run_through(const Runs& runs, Index sequence, Pieces stored, float* own, Advance advance) {
  const auto copy = [&](bool back) {
    for (Index i = 0; i < stored.rows; i++) {
      float *const theirs = stored.first + i * stored.stride, *const ours = own + i * stored.width;
      memcpy(back ? theirs : ours, back ? ours : theirs, sizeof(float) * stored.width);
    }
  };
  const Index first = runs.firsts[sequence], count = runs.counts[sequence], taken = runs.taken[sequence];
  copy(false);
  for (Index i = 0; i < count; i++) {
    if (i == taken) copy(true);
    advance(first + i);
  }
  if (taken == count) copy(true);
}

// --- The gated delta rule: what a state recalls wrong of a key is corrected. Yang et al., "Gated Delta Networks", 2024;
// with a decay for each channel of a key, "Kimi Linear", 2025.

constexpr int DELTA_VECTORS = 2;                    // columns that are computed together
constexpr Index DELTA_COLUMNS = DELTA_VECTORS * LANES;
constexpr int DELTA_SUMS = WIDTH == LANES ? 4 : 2;  // that keys are added up in: as many as registers hold
constexpr Index DELTA_MOST_KEYS = 256;

SLIP_INLINE Floats total(const Floats (&sums)[DELTA_SUMS][DELTA_VECTORS], int v) {
  Floats all = sums[0][v];
  repeat<DELTA_SUMS - 1>(SLIP_EACH_OF(s) { all = all + sums[s + 1][v]; });
  return all;
}

// Takes a token's key into the columns `state` [keys, DELTA_COLUMNS], and writes what its query recalls to `output`.
template <class Decay>
SLIP_INLINE void delta_token(float* state, Index keys, const float* key, const float* query, const float* value,
                             float beta, Decay decay, float* output) {
  Floats sums[DELTA_SUMS][DELTA_VECTORS] = {};
  for (Index k = 0; k < keys; k += DELTA_SUMS)
    repeat<DELTA_SUMS>(SLIP_EACH_OF(s) {
      const Floats part = broadcast(key[k + s] * decay(k + s));
      repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
        sums[s][v] = fma(part, load_floats(state + (k + s) * DELTA_COLUMNS + v * LANES), sums[s][v]);
      });
    });
  Floats corrections[DELTA_VECTORS];
  repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
    corrections[v] = broadcast(beta) * (load_floats(value + v * LANES) - total(sums, v));
  });
  repeat<DELTA_SUMS>(SLIP_EACH_OF(s) { repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) { sums[s][v] = zeros(); }); });
  for (Index k = 0; k < keys; k += DELTA_SUMS)
    repeat<DELTA_SUMS>(SLIP_EACH_OF(s) {
      const Floats left = broadcast(decay(k + s)), part = broadcast(key[k + s]), asked = broadcast(query[k + s]);
      repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) {
        float* const numbers = state + (k + s) * DELTA_COLUMNS + v * LANES;
        const Floats now = fma(part, corrections[v], load_floats(numbers) * left);
        store_floats(numbers, now);
        sums[s][v] = fma(asked, now, sums[s][v]);
      });
    });
  repeat<DELTA_VECTORS>(SLIP_EACH_OF(v) { store_floats(output + v * LANES, total(sums, v)); });
}

// The columns of one head's state from `column` on, for one sequence.
void delta_columns(const DeltaScan& d, Index sequence, Index head, Index column) {
  alignas(64) float own[DELTA_MOST_KEYS * DELTA_COLUMNS];
  float* const stored = d.state + (d.runs.slots[sequence] * d.heads + head) * d.keys * d.values + column;
  run_through(d.runs, sequence, {stored, d.keys, d.values, DELTA_COLUMNS}, own, [&](Index row) {
    const Index of_head = row * d.heads + head, of_keys = row * d.key_heads + head * d.key_heads / d.heads;
    const float *const key = d.key + of_keys * d.keys, *const query = d.query + of_keys * d.keys;
    const float* const value = d.value + of_head * d.values + column;
    float* const output = d.output + of_head * d.values + column;
    if (d.decays_channels) {
      const float* const decays = d.decays + of_head * d.keys;
      delta_token(own, d.keys, key, query, value, d.beta[of_head], [=](Index k) { return decays[k]; }, output);
    } else {
      const float decay = d.decays[of_head];
      delta_token(own, d.keys, key, query, value, d.beta[of_head], [=](Index) { return decay; }, output);
    }
  });
}

// --- One decay for each head: h = decay h + input b, y = h c. Dao & Gu, "Transformers are SSMs", 2024.
// --- And one for each number of the state: h = exp(step rate) h + step input b. Gu & Dao, "Mamba", 2023.

constexpr Index SCAN_DIMS = 16;  // inputs that are computed together, each of which has `size` numbers of a state
constexpr Index SCAN_MOST = 256;

// h [size] = left(h) + input * b; gives h c.
template <class Left>
SLIP_INLINE float scan_token(float* h, Index size, float input, const float* b, const float* c, Left left) {
  Floats recalled = zeros();
  for (Index n = 0; n < size; n += LANES) {
    const Floats now = fma(broadcast(input), load_floats(b + n), left(load_floats(h + n), n));
    store_floats(h + n, now);
    recalled = fma(load_floats(c + n), now, recalled);
  }
  return sum(recalled);
}

// The state of inputs [first, first + dims) of one head, for one sequence.
void structured_dims(const StructuredScan& s, Index sequence, Index head, Index first, Index dims) {
  alignas(64) float own[SCAN_DIMS * SCAN_MOST];
  const Index width = dims * s.size;
  float* const stored = s.state + ((s.runs.slots[sequence] * s.heads + head) * s.dim + first) * s.size;
  run_through(s.runs, sequence, {stored, 1, width, width}, own, [&](Index row) {
    const Index of_head = row * s.heads + head, of_group = row * s.groups + head * s.groups / s.heads;
    const Floats decay = broadcast(s.decays[of_head]);
    for (Index i = 0; i < dims; i++) {
      const Index at = of_head * s.dim + first + i;
      s.output[at] = scan_token(own + i * s.size, s.size, s.inputs[at], s.b + of_group * s.size,
                                s.c + of_group * s.size, [=](Floats h, Index) { return decay * h; });
    }
  });
}

// The states of channels [first, first + count), for one sequence.
void selective_channels(const SelectiveScan& s, Index sequence, Index first, Index count) {
  alignas(64) float own[SCAN_DIMS * SCAN_MOST];
  const Index width = count * s.size;
  float* const stored = s.state + s.runs.slots[sequence] * s.stride + first * s.size;
  run_through(s.runs, sequence, {stored, 1, width, width}, own, [&](Index row) {
    for (Index i = 0; i < count; i++) {
      const Index at = row * s.channels + first + i;
      const float* const rates = s.rates + (first + i) * s.size;
      const Floats step = broadcast(s.steps[at]);
      s.output[at] = scan_token(own + i * s.size, s.size, s.steps[at] * s.inputs[at], s.b + row * s.size,
                                s.c + row * s.size, [=](Floats h, Index n) {
                                  return exponential(step * load_floats(rates + n)) * h;
                                });
    }
  });
}

// Calls `work(sequence, head, first, count)` for each piece of up to `most` of the `dim` of each head.
template <class Work>
void for_pieces(Team* team, const Runs& runs, Index heads, Index dim, Index most, Work work) {
  const Index pieces = (dim + most - 1) / most;
  team->run(true, [&](Worker& me) {
    me.each(runs.sequences * heads * pieces, [&](Index i) {
      const Index first = i % pieces * most;
      work(i / pieces / heads, i / pieces % heads, first, std::min(most, dim - first));
    });
  });
}

}  // namespace

extern "C" {

void slip_delta_scan(Team* team, const DeltaScan* d) {
  for_pieces(team, d->runs, d->heads, d->values, DELTA_COLUMNS,
             [&](Index sequence, Index head, Index column, Index) { delta_columns(*d, sequence, head, column); });
}

void slip_structured_scan(Team* team, const StructuredScan* s) {
  for_pieces(team, s->runs, s->heads, s->dim, SCAN_DIMS, [&](Index sequence, Index head, Index first, Index count) {
    structured_dims(*s, sequence, head, first, count);
  });
}

void slip_selective_scan(Team* team, const SelectiveScan* s) {
  for_pieces(team, s->runs, 1, s->channels, SCAN_DIMS, [&](Index sequence, Index, Index first, Index count) {
    selective_channels(*s, sequence, first, count);
  });
}

}  // extern "C"
