// What is done to each row by itself: norm, gate, rotation.

#pragma once

#include "team.h"

extern "C" {

struct Norm {  // a root-mean-square norm; records.py mirrors it
  const bf16* weight;
  float eps;
};

struct Rotation {  // of slip_rotate_and_write; records.py mirrors it
  const bf16 *qkv, *cos, *sin;        // [n, (heads + 2 * kv_heads) * dim], [n, dim], [n, dim]
  Norm query_norm, key_norm;          // of single heads, weight [dim], null for none
  bf16 *query, *keys, *values;        // [n, heads, dim], and a layer's pages [blocks, kv_heads, block_size, dim]
  const Index* slots;                 // [n], block * block_size + offset
  Index n, heads, kv_heads, dim, block_size;
};

}  // extern "C"

namespace {

// y [width] = x over its root mean square, times the norm's weight.
void normalize(const bf16* x, Norm norm, bf16* y, Index width) {
  __m512 squares = _mm512_setzero_ps();
  for (Index j = 0; j < width; j += 16) {
    const __m512 v = load(x + j);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / width + norm.eps));
  for (Index j = 0; j < width; j += 16)
    store(y + j, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + j), scale)), load(norm.weight + j)));
}

// y [width] = silu(gate) * up.
void apply_gate(const bf16* gate, const bf16* up, bf16* y, Index width) {
  for (Index j = 0; j < width; j += 16) {
    const __m512 x = load(gate + j), one = _mm512_set1_ps(1.f);
    const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));  // e^-|x|
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 top = _mm512_mask_blend_ps(negative, one, e);
    const __m512 silu = _mm512_mul_ps(x, _mm512_div_ps(top, _mm512_add_ps(one, e)));
    store(y + j, _mm512_mul_ps(rounded(silu), load(up + j)));
  }
}

// to [dim] = the head `from`, rotated by angles whose cosines and sines are given.
void rotate(const bf16* from, const bf16* cos, const bf16* sin, bf16* to, Index dim) {
  const Index half = dim / 2;
  for (Index j = 0; j < half; j += 16) {
    const __m512 a = load(from + j), b = load(from + half + j);
    const __m512 cos_a = load(cos + j), sin_a = load(sin + j);
    const __m512 cos_b = load(cos + half + j), sin_b = load(sin + half + j);
    store(to + j, _mm512_sub_ps(rounded(_mm512_mul_ps(a, cos_a)), rounded(_mm512_mul_ps(b, sin_a))));
    store(to + half + j, _mm512_add_ps(rounded(_mm512_mul_ps(b, cos_b)), rounded(_mm512_mul_ps(a, sin_b))));
  }
}

// One token's row of `r`.
void rotate_and_write(const Rotation& r, Index i) {
  const Index dim = r.dim, block = r.slots[i] / r.block_size, offset = r.slots[i] % r.block_size;
  const bf16* row = r.qkv + i * (r.heads + 2 * r.kv_heads) * dim;
  const auto place = [&](Index head) { return ((block * r.kv_heads + head) * r.block_size + offset) * dim; };
  alignas(64) bf16 normed[512];
  for (Index h = 0; h < r.heads + r.kv_heads; h++) {
    const bool is_query = h < r.heads;
    const Norm norm = is_query ? r.query_norm : r.key_norm;
    const bf16* from = row + h * dim;
    if (norm.weight) {
      normalize(from, norm, normed, dim);
      from = normed;
    }
    bf16* to = is_query ? r.query + (i * r.heads + h) * dim : r.keys + place(h - r.heads);
    rotate(from, r.cos + i * dim, r.sin + i * dim, to, dim);
  }
  for (Index h = 0; h < r.kv_heads; h++)
    memcpy(r.values + place(h), row + (r.heads + r.kv_heads + h) * dim, dim * sizeof(bf16));
}

// For every thread of a team, with a barrier behind it: y [n, width] = the rows of x, each normalized.
void normalize_in_team(Worker& me, const bf16* x, Norm norm, bf16* y, Index n, Index width) {
  me.each(n, [&](Index i) { normalize(x + i * width, norm, y + i * width, width); });
}

// Likewise: norm each head where there is a norm, rotate queries and keys, put keys and values into their pages.
void rotate_and_write_in_team(Worker& me, const Rotation& r) {
  me.each(r.n, [&](Index i) { rotate_and_write(r, i); });
}

}  // namespace

extern "C" {

// x [n, width] over the root mean square of each row, times the norm's weight [width].
void slip_rms_norm(Team* team, const bf16* x, const Norm* norm, bf16* y, Index n, Index width) {
  team->run(n * width > SERIAL, [&](Worker& me) { normalize_in_team(me, x, *norm, y, n, width); });
}

// y [n, width] = silu(gate) * up, which lie in x [n, 2 * width] one after the other.
void slip_silu_mul(Team* team, const bf16* x, bf16* y, Index n, Index width) {
  const auto gate = [&](Index i) { apply_gate(x + i * 2 * width, x + (i * 2 + 1) * width, y + i * width, width); };
  team->run(n * width > SERIAL, [&](Worker& me) { me.each(n, gate); });
}

// See rotate_and_write_in_team.
void slip_rotate_and_write(Team* team, const Rotation* r) {
  const Index numbers = r->n * (r->heads + 2 * r->kv_heads) * r->dim;
  team->run(numbers > SERIAL, [&](Worker& me) { rotate_and_write_in_team(me, *r); });
}

}  // extern "C"
