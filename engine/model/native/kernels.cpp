// What a bfloat16 model does most, for x86 CPUs with AVX-512 BF16. Plain C, called from Python by address.
//
// Every output row is computed in one order whatever the other rows are: a token's result does not depend on
// the batch. Numbers are rounded to bfloat16 where the model's own modules round them. Sizes are in elements;
// what they must be multiples of is checked by the caller (kernels.py).

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;
using Index = int64_t;

namespace {

constexpr Index PANEL = 32;       // output columns in one panel of packed weights: two vectors
constexpr int TILE = 12;          // rows of x in one tile: 24 sums fill the registers, beside two weights
constexpr Index ROW_BLOCK = 96;   // rows that one thread takes at once when there are many
constexpr Index PANEL_BLOCK = 6;  // panels likewise
constexpr Index SERIAL = 16384;   // elements below which waking the other threads costs more than it saves

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline void store(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }

inline __m512 rounded(__m512 v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}

inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// e^x for x <= 0 within 2e-7 of its value: 2^n by the exponent, 2^f by its series on [-1/2, 1/2]. NaN stays NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  x = _mm512_max_ps(_mm512_set1_ps(-126.f), x);  // the second of the two where either is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// y[M, 32] = x[M, k] times one panel, plus bias.
template <int M>
void tile(const bf16* x, const bf16* panel, const bf16* bias, bf16* y, Index k, Index out) {
  __m512 sums[M][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (Index j = 0; j < k / 2; j++) {
    const __m512bh left = pairs(panel + j * 2 * PANEL), right = pairs(panel + j * 2 * PANEL + PANEL);
    for (int i = 0; i < M; i++) {
      int32_t both;
      memcpy(&both, x + i * k + 2 * j, 4);
      const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], left, v);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], right, v);
    }
  }
  for (int i = 0; i < M; i++)
    for (int half = 0; half < 2; half++) {
      __m512 v = sums[i][half];
      if (bias) v = _mm512_add_ps(v, load(bias + 16 * half));
      store(y + i * out + 16 * half, v);
    }
}

template <int M>
void tile_of(Index rows, const bf16* x, const bf16* panel, const bf16* bias, bf16* y, Index k, Index out) {
  if (rows == M)
    tile<M>(x, panel, bias, y, k, out);
  else if constexpr (M > 1)
    tile_of<M - 1>(rows, x, panel, bias, y, k, out);
}

void times_panel(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, Index first, Index stop, Index p,
                 Index k, Index out) {
  for (Index i = first; i < stop; i += TILE)
    tile_of<TILE>(std::min<Index>(TILE, stop - i), x + i * k, weight + p * PANEL * k,
                  bias ? bias + p * PANEL : nullptr, y + i * out + p * PANEL, k, out);
}

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

// How many threads a parallel loop on this thread gets.
int64_t slip_num_threads() { return omp_get_max_threads(); }

// weight [out, k] as panels of 32 outputs: [out / 32][k / 2][32][2], what one multiply takes lying together.
void slip_pack(const bf16* weight, bf16* packed, Index out, Index k) {
#pragma omp parallel for
  for (Index p = 0; p < out / PANEL; p++)
    for (Index j = 0; j < k / 2; j++)
      for (Index r = 0; r < PANEL; r++)
        memcpy(packed + p * PANEL * k + j * 2 * PANEL + 2 * r, weight + (p * PANEL + r) * k + 2 * j, 4);
}

// y [n, out] = x [n, k] times packed weights, plus bias [out], null for none.
void slip_linear(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, Index n, Index out, Index k) {
  const Index panels = out / PANEL;
  if (n <= ROW_BLOCK) {
#pragma omp parallel for schedule(static)
    for (Index p = 0; p < panels; p++) times_panel(x, packed, bias, y, 0, n, p, k, out);
    return;
  }
  const Index row_blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, panel_blocks = (panels + PANEL_BLOCK - 1) / PANEL_BLOCK;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
  for (Index b = 0; b < row_blocks; b++)
    for (Index q = 0; q < panel_blocks; q++)
      for (Index p = q * PANEL_BLOCK; p < std::min(panels, (q + 1) * PANEL_BLOCK); p++)
        times_panel(x, packed, bias, y, b * ROW_BLOCK, std::min(n, (b + 1) * ROW_BLOCK), p, k, out);
}

// y [n, width] = x over its root mean square, times weight [width].
void slip_rms_norm(const bf16* x, const bf16* weight, bf16* y, Index n, Index width, float eps) {
#pragma omp parallel for if (n * width > SERIAL)
  for (Index i = 0; i < n; i++) {
    const bf16* in = x + i * width;
    __m512 squares = _mm512_setzero_ps();
    for (Index j = 0; j < width; j += 16) {
      const __m512 v = load(in + j);
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (Index j = 0; j < width; j += 16)
      store(y + i * width + j, _mm512_mul_ps(rounded(_mm512_mul_ps(load(in + j), scale)), load(weight + j)));
  }
}

// y [n, width] = silu(gate) * up, which lie in x [n, 2 * width] one after the other.
void slip_silu_mul(const bf16* x, bf16* y, Index n, Index width) {
#pragma omp parallel for if (n * width > SERIAL)
  for (Index i = 0; i < n; i++)
    for (Index j = 0; j < width; j += 16) {
      const __m512 gate = load(x + i * 2 * width + j), one = _mm512_set1_ps(1.f);
      const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));  // e^-|gate|
      const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 top = _mm512_mask_blend_ps(negative, one, e);
      const __m512 silu = _mm512_mul_ps(gate, _mm512_div_ps(top, _mm512_add_ps(one, e)));
      store(y + i * width + j, _mm512_mul_ps(rounded(silu), load(x + (i * 2 + 1) * width + j)));
    }
}

struct Rotation {  // of slip_rotate_and_write; kernels.py mirrors it
  const bf16 *qkv, *cos, *sin;          // [n, (heads + 2 * kv_heads) * dim], [n, dim], [n, dim]
  const bf16 *query_norm, *key_norm;    // [dim], null for none
  bf16 *query, *keys, *values;          // [n, heads, dim], and a layer's pages [blocks, kv_heads, block_size, dim]
  const Index* slots;                   // [n], block * block_size + offset
  Index n, heads, kv_heads, dim, block_size;
  float eps;
};

// Norm each head where there is a norm, rotate queries and keys, put keys and values into their pages.
void slip_rotate_and_write(const Rotation* r) {
  const Index dim = r->dim, half = dim / 2, width = (r->heads + 2 * r->kv_heads) * dim;
#pragma omp parallel for if (r->n * width > SERIAL)
  for (Index i = 0; i < r->n; i++) {
    const bf16* row = r->qkv + i * width;
    const Index block = r->slots[i] / r->block_size, offset = r->slots[i] % r->block_size;
    alignas(64) bf16 normed[512];
    for (Index h = 0; h < r->heads + r->kv_heads; h++) {
      const bool is_query = h < r->heads;
      const bf16 *from = row + h * dim, *norm = is_query ? r->query_norm : r->key_norm;
      if (norm) {
        slip_rms_norm(from, norm, normed, 1, dim, r->eps);
        from = normed;
      }
      bf16* to = is_query ? r->query + (i * r->heads + h) * dim
                          : r->keys + ((block * r->kv_heads + h - r->heads) * r->block_size + offset) * dim;
      for (Index j = 0; j < half; j += 16) {
        const __m512 a = load(from + j), b = load(from + half + j);
        const __m512 cos_a = load(r->cos + i * dim + j), sin_a = load(r->sin + i * dim + j);
        const __m512 cos_b = load(r->cos + i * dim + half + j), sin_b = load(r->sin + i * dim + half + j);
        store(to + j, _mm512_sub_ps(rounded(_mm512_mul_ps(a, cos_a)), rounded(_mm512_mul_ps(b, sin_a))));
        store(to + half + j, _mm512_add_ps(rounded(_mm512_mul_ps(b, cos_b)), rounded(_mm512_mul_ps(a, sin_b))));
      }
    }
    for (Index h = 0; h < r->kv_heads; h++)
      memcpy(r->values + ((block * r->kv_heads + h) * r->block_size + offset) * dim,
             row + (r->heads + r->kv_heads + h) * dim, dim * sizeof(bf16));
  }
}

struct Attention {  // of slip_attend; kernels.py mirrors it
  const bf16 *query, *keys, *values;  // as above
  const Index *rows, *sequences, *lengths;  // [n]: a token's row in query and output, its sequence, what it sees
  const int32_t* tables;              // [sequences, max_blocks]
  bf16* output;                       // [tokens, heads, dim]
  Index n, max_blocks, heads, kv_heads, dim, block_size, longest, window;  // window 0: all positions
  float scale, softcap;               // softcap 0: none
};

// Attention of single tokens over pages, each token and KV head by itself: softmax(q k^T * scale) v.
void slip_attend(const Attention* a) {
  const Index group = a->heads / a->kv_heads, dim = a->dim, size = a->block_size, room = a->longest;
#pragma omp parallel if (a->n * a->longest * a->heads > 2048)
  {
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
}

}  // extern "C"
