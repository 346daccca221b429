// Attention over pages.

#pragma once

#include "numbers.h"

namespace {

// Scores of `count` keys, rows of d, against one query; returns the largest.
inline float score(const bf16* query, const bf16* keys, float* scores, Index count, Index d, float scale,
                   float softcap) {
  float largest = -INFINITY;
  for (Index p = 0; p < count; p++) {
    __m512 sum = _mm512_setzero_ps();
    for (Index j = 0; j < d; j += 32) sum = _mm512_dpbf16_ps(sum, pairs(query + j), pairs(keys + p * d + j));
    float s = _mm512_reduce_add_ps(sum) * scale;
    if (softcap > 0) s = softcap * std::tanh(s / softcap);
    scores[p] = s;
    largest = std::max(largest, s);
  }
  return largest;
}

// Turns scores into weights that are not yet divided by their sum, which it returns.
inline float weigh(float* scores, Index count, float largest) {
  const __m512 top = _mm512_set1_ps(largest);
  __m512 total = _mm512_setzero_ps();
  for (Index p = 0; p < count; p += 16) {
    const __mmask16 real = count - p >= 16 ? 0xFFFF : (__mmask16)((1u << (count - p)) - 1);
    const __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(real, scores + p), top));
    _mm512_mask_storeu_ps(scores + p, real, e);
    total = _mm512_mask_add_ps(total, real, total, e);
  }
  return _mm512_reduce_add_ps(total);
}

}  // namespace

extern "C" {

struct Attention {  // of slip_attend; kernels.py mirrors it
  const bf16 *query, *keys, *values;  // as above
  const Index *rows, *sequences, *lengths;  // [n]: a token's row in query and output, its sequence, what it sees
  const int32_t* tables;              // [sequences, max_blocks]
  bf16* output;                       // [tokens, heads, dim]
  Index n, max_blocks, heads, kv_heads, dim, block_size, longest, window;  // window 0: all positions
  float scale, softcap;               // softcap 0: none
};

// Attention of single tokens over pages, each token and KV head by itself: softmax(q k^T * scale) v.
// For all threads of a running team together, all with the same arguments; all are done when one returns.
void attend_in_team(const Attention* a) {
  const Index group = a->heads / a->kv_heads, dim = a->dim, size = a->block_size, room = a->longest;
  std::vector<float> scores(group * room);
#pragma omp for schedule(dynamic, 1)
  for (Index work = 0; work < a->n * a->kv_heads; work++) {
    const Index token = work / a->kv_heads, head = work % a->kv_heads, length = a->lengths[token];
    const Index first = a->window ? std::max<Index>(0, length - a->window) : 0;
    const int32_t* table = a->tables + a->sequences[token] * a->max_blocks;
    const bf16* query = a->query + (a->rows[token] * a->heads + head * group) * dim;
    bf16* output = a->output + (a->rows[token] * a->heads + head * group) * dim;
    float largest[64], total[64];
    std::fill(largest, largest + group, -INFINITY);
    for (Index at = first; at < length;) {
      const Index offset = at % size, count = std::min(size - offset, length - at);
      const bf16* keys = a->keys + ((table[at / size] * a->kv_heads + head) * size + offset) * dim;
      for (Index g = 0; g < group; g++)
        largest[g] = std::max(largest[g], score(query + g * dim, keys, &scores[g * room + at - first], count, dim,
                                                a->scale, a->softcap));
      at += count;
    }
    for (Index g = 0; g < group; g++) total[g] = weigh(&scores[g * room], length - first, largest[g]);
    for (Index g = 0; g < group; g++)
      for (Index j = 0; j < dim; j += 64) {
        __m512 sums[4];
        const Index parts = std::min<Index>(4, (dim - j) / 16);
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        for (Index at = first; at < length;) {
          const Index offset = at % size, count = std::min(size - offset, length - at);
          const bf16* values = a->values + ((table[at / size] * a->kv_heads + head) * size + offset) * dim + j;
          for (Index p = 0; p < count; p++) {
            const __m512 weight = _mm512_set1_ps(scores[g * room + at - first + p]);
            for (Index part = 0; part < parts; part++)
              sums[part] = _mm512_fmadd_ps(weight, load(values + p * dim + 16 * part), sums[part]);
          }
          at += count;
        }
        for (Index part = 0; part < parts; part++)
          store(output + g * dim + j + 16 * part, _mm512_div_ps(sums[part], _mm512_set1_ps(total[g])));
      }
  }
}

// As attend_in_team, with a team of its own.
void slip_attend(const Attention* a) {
#pragma omp parallel if (a->n * a->longest * a->heads > 2048)
  attend_in_team(a);
}

}  // extern "C"
