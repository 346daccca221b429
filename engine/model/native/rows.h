// What is done to each row by itself: norm, gate, rotation.

#pragma once

#include "numbers.h"

extern "C" {

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

struct Rotation {  // of slip_rotate_and_write; records.py mirrors it
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

}  // extern "C"
