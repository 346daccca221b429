// What is done to each row by itself: norm, gate, rotation.

#pragma once

#include "byte_rows.h"
#include "team.h"

extern "C" {

struct Norm {  // a root-mean-square norm; records.py mirrors it
  const Element* weight;
  float eps;
};

struct Rotation {  // of slip_rotate_and_write; records.py mirrors it
  const Element *qkv, *cos, *sin;        // [n, (heads + 2 * kv_heads) * dim], [n, dim], [n, dim]
  Norm query_norm, key_norm;          // of single heads, weight [dim], null for none
  Element* query;                     // [n, heads, dim]
  void *keys, *values;                // a layer's pages, as pages.h has them
  const Index* slots;                 // [n], block * block_size + offset
  Index n, heads, kv_heads, dim, block_size;
  Index of_bytes;                     // what the pages are of
};

}  // extern "C"

namespace {

// y [width] = x over its root mean square, times the norm's weight.
void normalize(const Element* x, Norm norm, Element* y, Index width) {
  Floats squares = zeros();
  for (Index j = 0; j < width; j += LANES) {
    const Floats v = load(x + j);
    squares = fma(v, v, squares);
  }
  const Floats scale = broadcast(1.f / std::sqrt(sum(squares) / width + norm.eps));
  for (Index j = 0; j < width; j += LANES) store(y + j, rounded(load(x + j) * scale) * load(norm.weight + j));
}

// y [width] = silu(gate) * up.
void apply_gate(const Element* gate, const Element* up, Element* y, Index width) {
  const Floats one = broadcast(1.f);
  for (Index j = 0; j < width; j += LANES) {
    const Floats x = load(gate + j), e = exponential(zeros() - absolute(x));  // e^-|x|
    const Floats silu = x * (where_negative(x, e, one) / (one + e));
    store(y + j, rounded(silu) * load(up + j));
  }
}

// to [dim] = the head `from`, rotated by angles whose cosines and sines are given.
void rotate(const Element* from, const Element* cos, const Element* sin, Element* to, Index dim) {
  const Index half = dim / 2;
  for (Index j = 0; j < half; j += LANES) {
    const Floats a = load(from + j), b = load(from + half + j);
    const Floats cos_a = load(cos + j), sin_a = load(sin + j);
    const Floats cos_b = load(cos + half + j), sin_b = load(sin + half + j);
    store(to + j, rounded(a * cos_a) - rounded(b * sin_a));
    store(to + half + j, rounded(b * cos_b) + rounded(a * sin_b));
  }
}

// One token's row of `r`.
void rotate_and_write(const Rotation& r, Index i) {
  const Index dim = r.dim, block = r.slots[i] / r.block_size, offset = r.slots[i] % r.block_size;
  const Element* row = r.qkv + i * (r.heads + 2 * r.kv_heads) * dim;
  const auto write = [&](void* pages, Index head, const Element* numbers) {
    head += block * r.kv_heads;
    int8_t* bytes = (int8_t*)pages;
    if (r.of_bytes)
      return store_byte_row(numbers, dim, bytes + byte_row(head, offset, r.block_size, dim),
                            bytes + row_scale(head, offset, r.block_size, dim));
    memcpy((Element*)pages + (head * r.block_size + offset) * dim, numbers, dim * sizeof(Element));
  };
  alignas(64) Element normed[512], rotated[512];
  for (Index h = 0; h < r.heads + r.kv_heads; h++) {
    const bool is_query = h < r.heads;
    const Norm norm = is_query ? r.query_norm : r.key_norm;
    const Element* from = row + h * dim;
    if (norm.weight) {
      normalize(from, norm, normed, dim);
      from = normed;
    }
    Element* to = is_query ? r.query + (i * r.heads + h) * dim : rotated;
    rotate(from, r.cos + i * dim, r.sin + i * dim, to, dim);
    if (!is_query) write(r.keys, h - r.heads, rotated);
  }
  for (Index h = 0; h < r.kv_heads; h++) write(r.values, h, row + (r.heads + r.kv_heads + h) * dim);
}

// For every thread of a team, with a barrier behind it: y [n, width] = the rows of x, each normalized.
void normalize_in_team(Worker& me, const Element* x, Norm norm, Element* y, Index n, Index width) {
  me.each(n, [&](Index i) { normalize(x + i * width, norm, y + i * width, width); });
}

// Likewise: norm each head where there is a norm, rotate queries and keys, put keys and values into their pages.
void rotate_and_write_in_team(Worker& me, const Rotation& r) {
  me.each(r.n, [&](Index i) { rotate_and_write(r, i); });
}

}  // namespace

extern "C" {

// x [n, width] over the root mean square of each row, times the norm's weight [width].
void slip_rms_norm(Team* team, const Element* x, const Norm* norm, Element* y, Index n, Index width) {
  team->run(n * width > SERIAL, [&](Worker& me) { normalize_in_team(me, x, *norm, y, n, width); });
}

// y [n, width] = silu(gate) * up, which lie in x [n, 2 * width] one after the other.
void slip_silu_mul(Team* team, const Element* x, Element* y, Index n, Index width) {
  const auto gate = [&](Index i) { apply_gate(x + i * 2 * width, x + (i * 2 + 1) * width, y + i * width, width); };
  team->run(n * width > SERIAL, [&](Worker& me) { me.each(n, gate); });
}

// See rotate_and_write_in_team.
void slip_rotate_and_write(Team* team, const Rotation* r) {
  const Index numbers = r->n * (r->heads + 2 * r->kv_heads) * r->dim;
  team->run(numbers > SERIAL, [&](Worker& me) { rotate_and_write_in_team(me, *r); });
}

}  // extern "C"
