// Draws one token a row: what engine/compute/sampling computes with tensors, one row at a time and without temporaries.
//
// Tokens are ordered by gap (how far below the greatest logit) and then by id; top-k, top-p and min-p each keep a
// prefix of that order, and of what is left the greatest sum of score and Gumbel noise wins. Masses are whole
// numbers, exact in any order. Only tokens that can matter are ever compared: see `reach` and `near_enough`.

#pragma once

#include <limits>

#include "team.h"

namespace {

constexpr double UNIT_MASS = 4294967296.;  // the likeliest token's; others are floored to whole numbers
constexpr int GAP_SHIFT = 20;              // gaps fall into bins by their exponent and three bits of fraction
constexpr Index NUM_BINS = (0x7F800000 >> GAP_SHIFT) + 1;
constexpr Index GAP_BLOCK = 64;  // gaps of which the smallest is noted
constexpr float SLACK = 1e-3f;   // far above what rounding does to a gap over a temperature

struct Draw {  // of slip_draw; kernels.py mirrors it
  const void* logits;              // [.., vocab] float, or bfloat16 where is_bf16
  const Index* rows;               // [n] whose logits
  const float* temperature;        // [n] above 0
  const int32_t* top_k;            // [n] 0: off
  const double *top_p, *log_min_p;  // [n] from 1 on, -inf: off
  const int32_t* keys;             // [n, 2] of the noise
  Index* token_ids;                // [n]
  Index n, vocab, is_bf16;
};

struct Row {  // scratch
  std::vector<float> gaps, smallest, mass;
  std::vector<int32_t> ids, order;
  std::vector<double> bins;
  Index count;  // of the ids listed
};

// 16 logits from place j on of the row that begins at `first`; -inf behind its end.
inline __m512 logits_at(const void* logits, bool is_bf16, Index first, Index j, Index vocab) {
  const Index left = std::max<Index>(0, vocab - j);
  const __mmask16 real = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
  const __m512 least = _mm512_set1_ps(-INFINITY);
  if (!is_bf16) return _mm512_mask_loadu_ps(least, real, (const float*)logits + first + j);
  const __m256i raw = _mm256_maskz_loadu_epi16(real, (const bf16*)logits + first + j);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
  return _mm512_mask_mov_ps(least, real, _mm512_castsi512_ps(bits));
}

// Gaps of the whole row, infinite behind its end, and the smallest of each block.
inline void find_gaps(const Draw* d, Index i, Row& row) {
  const Index vocab = d->vocab, padded = (vocab + GAP_BLOCK - 1) / GAP_BLOCK * GAP_BLOCK, first = d->rows[i] * vocab;
  row.gaps.resize(padded + 16);
  row.smallest.resize(padded / GAP_BLOCK);
  const __m512 least = _mm512_set1_ps(-INFINITY);
  __m512 top = least;
  for (Index j = 0; j < padded; j += 16) {
    const __m512 v = logits_at(d->logits, d->is_bf16, first, j, vocab);
    _mm512_storeu_ps(&row.gaps[j], v);
    top = _mm512_max_ps(top, v);
  }
  const __m512 greatest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (Index j = 0; j < padded; j += GAP_BLOCK) {
    __m512 smallest = _mm512_set1_ps(INFINITY);
    for (Index k = j; k < j + GAP_BLOCK; k += 16) {
      const __m512 gap = _mm512_abs_ps(_mm512_sub_ps(_mm512_loadu_ps(&row.gaps[k]), greatest));
      _mm512_storeu_ps(&row.gaps[k], gap);
      smallest = _mm512_min_ps(smallest, gap);
    }
    row.smallest[j / GAP_BLOCK] = _mm512_reduce_min_ps(smallest);
  }
}

inline __m512 mass_of(__m512 gap, float temperature) {
  const __m512 share = exponential(_mm512_div_ps(gap, _mm512_set1_ps(-temperature)));
  return _mm512_roundscale_ps(_mm512_mul_ps(share, _mm512_set1_ps((float)UNIT_MASS)),
                              _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

inline double total_mass(const Row& row, float temperature) {
  __m512d low = _mm512_setzero_pd(), high = low;
  for (size_t j = 0; j < row.smallest.size() * GAP_BLOCK; j += 16) {
    const __m512 mass = mass_of(_mm512_loadu_ps(&row.gaps[j]), temperature);
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(mass)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(mass, 1)));
  }
  return _mm512_reduce_add_pd(low) + _mm512_reduce_add_pd(high);
}

// List the tokens that `wanted` marks, 16 at a time, in ascending order; blocks that are all too far are skipped.
template <class Wanted>
inline void list_tokens(Row& row, float farthest, Wanted wanted) {
  row.count = 0;
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (size_t block = 0; block < row.smallest.size(); block++) {
    if (!(row.smallest[block] <= farthest)) continue;
    for (Index j = block * GAP_BLOCK; j < (Index)(block + 1) * GAP_BLOCK; j += 16) {
      const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32((int)j), steps);
      const __mmask16 marks = wanted(ids, _mm512_loadu_ps(&row.gaps[j]));
      if (!marks) continue;
      if (row.ids.size() < (size_t)row.count + 16) row.ids.resize(2 * row.ids.size() + 16);
      _mm512_storeu_si512(&row.ids[row.count], _mm512_maskz_compress_epi32(marks, ids));
      row.count += __builtin_popcount(marks);
    }
  }
}

inline __m512i folded(__m512i v, int shift) { return _mm512_xor_si512(v, _mm512_srli_epi32(v, shift)); }

inline __m512i mixed(__m512i v) {
  v = _mm512_mullo_epi32(folded(v, 16), _mm512_set1_epi32(0x7FEB352D));
  return _mm512_mullo_epi32(folded(v, 15), _mm512_set1_epi32((int)0x846CA68B));
}

// 32 noise bits of each token, as engine/compute/sampling/noise.py makes them, shifted to be unsigned.
inline __m512i noise_bits(__m512i ids, const int32_t* key) {
  const __m512i half = _mm512_add_epi32(mixed(_mm512_xor_si512(ids, _mm512_set1_epi32(key[0]))),
                                        _mm512_set1_epi32(key[1]));
  return _mm512_xor_si512(folded(mixed(half), 16), _mm512_set1_epi32((int)0x80000000u));
}

inline double gumbel(int32_t token_id, const int32_t* key) {
  const uint32_t bits = (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(noise_bits(_mm512_set1_epi32(token_id), key)));
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
  row.mass.resize(row.count + 16);
  for (Index i = 0; i < row.count; i += 16) {
    const __mmask16 real = row.count - i >= 16 ? 0xFFFF : (__mmask16)((1u << (row.count - i)) - 1);
    const __m512i ids = _mm512_maskz_loadu_epi32(real, &row.ids[i]);
    _mm512_storeu_ps(&row.mass[i], mass_of(_mm512_i32gather_ps(ids, row.gaps.data(), 4), temperature));
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
  const __m512 limit = _mm512_set1_ps(near_enough);
  list_tokens(row, near_enough, [&](__m512i, __m512 gap) { return _mm512_cmp_ps_mask(gap, limit, _CMP_LE_OQ); });
  if (by_count) keep_prefix(row, nullptr, d->top_k[i]);
  if (!by_share) return;
  weigh_tokens(row, temperature);
  if (by_count) {
    for (Index j = 0; j < row.count; j++) total += row.mass[j];
  }
  keep_prefix(row, row.mass.data(), d->top_p[i] * total);
}

// Every token whose noise could carry it past the likeliest. Gumbel noise of bits b is below ln(2^32 / (2^32 - b)),
// which the exponent of the divisor bounds.
inline void list_hopeful(const Draw* d, Index i, Row& row) {
  const int32_t* key = d->keys + 2 * i;
  const Index best = std::find(row.gaps.begin(), row.gaps.end(), 0.f) - row.gaps.begin();
  const __m512 bar = _mm512_set1_ps((float)gumbel((int32_t)best, key) - SLACK);
  const __m512 temperature = _mm512_set1_ps(d->temperature[i]), all = _mm512_set1_ps(32.f);
  const __m512 doubling = _mm512_set1_ps(0.693148f);
  const float farthest = (24.f - _mm512_cvtss_f32(bar)) * d->temperature[i];  // noise never exceeds 23
  list_tokens(row, std::min(farthest, std::numeric_limits<float>::max()), [&](__m512i ids, __m512 gap) {
    const __m512 rest = _mm512_cvtepu32_ps(_mm512_xor_si512(noise_bits(ids, key), _mm512_set1_epi32(-1)));
    const __m512 floor = _mm512_getexp_ps(_mm512_max_ps(rest, _mm512_set1_ps(.5f)));
    const __m512 most = _mm512_mul_ps(_mm512_sub_ps(all, floor), doubling);
    return _mm512_cmp_ps_mask(_mm512_add_ps(_mm512_div_ps(gap, temperature), bar), most, _CMP_LE_OQ);
  });
}

inline Index winner(const Draw* d, Index i, const Row& row) {
  Index best = -1;
  double greatest = -INFINITY;
  for (Index j = 0; j < row.count; j++) {
    const float scaled = row.gaps[row.ids[j]] / -d->temperature[i];
    if ((double)scaled < d->log_min_p[i]) continue;
    const double score = scaled + gumbel(row.ids[j], d->keys + 2 * i);
    if (score > greatest) greatest = score, best = row.ids[j];
  }
  return best;
}

}  // namespace

extern "C" {

// The first of each row's greatest logits; -1 for a row with NaN, or whose greatest is infinite.
void slip_best(Team* team, const void* logits, Index is_bf16, Index n, Index vocab, Index* token_ids) {
  const auto find = [&](Index i) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 bad = 0;
    for (Index j = 0; j < vocab; j += 16) {
      const __m512 v = logits_at(logits, is_bf16, i * vocab, j, vocab);
      bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      top = _mm512_max_ps(top, v);
    }
    const float greatest = _mm512_reduce_max_ps(top);
    token_ids[i] = -1;
    if (bad || std::isinf(greatest)) return;
    const __m512 wanted = _mm512_set1_ps(greatest);
    for (Index j = 0; j < vocab; j += 16) {
      const __m512 v = logits_at(logits, is_bf16, i * vocab, j, vocab);
      const __mmask16 equal = _mm512_cmp_ps_mask(v, wanted, _CMP_EQ_OQ);
      if (!equal) continue;
      token_ids[i] = j + __builtin_ctz(equal);
      break;
    }
  };
  team->run(n > 1, [&](Worker& me) { me.each(n, find); });
}

void slip_draw(Team* team, const Draw* d) {
  const auto draw = [&](Index i) {
    static thread_local Row row;  // its memory serves the next step too
    find_gaps(d, i, row);
    if ((d->top_k[i] > 0 && d->top_k[i] < d->vocab) || d->top_p[i] < 1)
      filter(d, i, row);
    else
      list_hopeful(d, i, row);
    d->token_ids[i] = winner(d, i, row);
  };
  team->run(d->n > 1, [&](Worker& me) { me.each(d->n, draw); });
}

}  // extern "C"
