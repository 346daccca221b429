// What is done to each row by itself: norm, gate, rotation.

#pragma once

#include "byte_rows.h"
#include "team.h"

extern "C" {

struct Norm {  // records.py mirrors it
  const Element* weight;  // null for no norm
  float eps;
  Index kind;             // a NormKind
  const Element* bias;    // of a CENTRED one, null for none
};

struct Heads {  // how queries and keys become what is attended with; records.py mirrors it
  Index heads, kv_heads, dim;  // no KV heads where keys and values are another layer's
  Index rotary;      // how many numbers at the front of each head are rotated, a multiple of 32
  Index in_pairs;    // neighbours are rotated together, not the halves
  Index at_once;     // rounded once, not after each product
  Index norms_rows;  // norms are of all heads of a token together, not of single ones
  Index keys_twice;  // keys as they were projected are the values as well, which have no place of their own
};

struct Rotation {  // of slip_rotate_and_write; records.py mirrors it
  Heads form;
  Element* qkv;                       // [n, numbers_each(form)]; its contents are lost
  const float *cos, *sin;             // [.., rotary], those of the second half behind the first's; null for no rotation
  Norm query_norm, key_norm;          // weight [dim], or that of all heads
  Element* query;                     // [n, heads, dim]
  void *keys, *values;                // a layer's pages, as pages.h has them
  const Index* slots;                 // [n], block * block_size + offset
  Index n, block_size;
  Index of_bytes;                     // what the pages are of
  Norm value_norm;                    // of single heads, weight [dim]
  const Index* places;                // [n], of each token's row of cos and sin; null where they have [n, rotary]
};

}  // extern "C"

namespace {

// What is done to a number that has been divided by its row's size: rounded and multiplied with its weight; multiplied
// before it is rounded; multiplied with one more than its weight; or multiplied and moved by the bias, where the row's
// mean is taken off before all else.
enum NormKind : Index { ROUNDED = 0, AT_ONCE = 1, ONE_MORE = 2, CENTRED = 3 };

// y [width] = what `weigh` makes of x less `mean`, over its root mean square.
template <class Weigh>
SLIP_INLINE void normalize_with(const Element* x, Floats mean, float eps, Element* y, Index width, Weigh weigh) {
  Floats squares = zeros();
  for (Index j = 0; j < width; j += LANES) {
    const Floats v = load(x + j) - mean;
    squares = fma(v, v, squares);
  }
  const Floats scale = broadcast(1.f / std::sqrt(sum(squares) / width + eps));
  for (Index j = 0; j < width; j += LANES) store(y + j, weigh((load(x + j) - mean) * scale, j));
}

inline Floats mean_of(const Element* x, Index width) {
  Floats total = zeros();
  for (Index j = 0; j < width; j += LANES) total = total + load(x + j);
  return broadcast(sum(total) / width);
}

// y [width] = x, normalized; y may be x.
void normalize(const Element* x, Norm norm, Element* y, Index width) {
  const Floats none = zeros(), one = broadcast(1.f);
  const auto weight = [&](Index j) SLIP_ALWAYS { return load(norm.weight + j); };
  if (norm.kind == ROUNDED)
    return normalize_with(x, none, norm.eps, y, width, [&](Floats v, Index j) SLIP_ALWAYS { return rounded(v) * weight(j); });
  if (norm.kind == ONE_MORE)
    return normalize_with(x, none, norm.eps, y, width, [&](Floats v, Index j) SLIP_ALWAYS { return v * (one + weight(j)); });
  if (norm.kind == AT_ONCE || !norm.bias)
    return normalize_with(x, norm.kind == CENTRED ? mean_of(x, width) : none, norm.eps, y, width,
                          [&](Floats v, Index j) SLIP_ALWAYS { return v * weight(j); });
  normalize_with(x, mean_of(x, width), norm.eps, y, width,
                 [&](Floats v, Index j) SLIP_ALWAYS { return fma(v, weight(j), load(norm.bias + j)); });
}

// What a layer's gate goes through.
enum Activation : Index { SILU = 0, GELU_TANH = 1, GELU = 2, SWIGLU_LIMITED = 3, RELU_SQUARED = 4 };

// x over 1 + e^-z.
SLIP_INLINE Floats times_sigmoid(Floats x, Floats z) {
  const Floats one = broadcast(1.f), e = exponential(zeros() - absolute(z));
  return x * (where_negative(z, e, one) / (one + e));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x over 1 + e to the -2 of what is in tanh.
SLIP_INLINE Floats gelu_tanh(Floats x) {
  return times_sigmoid(x, x * fma(x * x, broadcast(0.0713548163f), broadcast(1.5957691216f)));
}

// x (1 + erf(x / sqrt(2))) / 2, by a polynomial for erf that is at most 1.5e-7 off (Abramowitz and Stegun 7.1.26).
SLIP_INLINE Floats gelu(Floats x) {
  const Floats one = broadcast(1.f), z = absolute(x) * broadcast(0.7071067812f);
  const Floats t = one / fma(z, broadcast(0.3275911f), one);
  Floats y = broadcast(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = fma(y, t, broadcast(c));
  const Floats beyond = y * t * exponential(zeros() - z * z) * broadcast(0.5f);  // the normal distribution beyond |x|
  return x * where_negative(x, beyond, one - beyond);
}

// The square of what of x is above 0 (So et al. 2021, "Primer"); a NaN stays one.
SLIP_INLINE Floats relu_squared(Floats x) {
  const Floats above = maximum(zeros(), x);
  return above * above;
}

// y [width] = activation(gate) * up, or without `up` where that is null.
template <class Activate>
void gate_with(Activate activate, const Element* gate, const Element* up, Element* y, Index width) {
  for (Index j = 0; j < width; j += LANES) {
    const Floats x = activate(load(gate + j));
    store(y + j, up ? rounded(x) * load(up + j) : x);
  }
}

// y [width] = gate * sigmoid(1.702 gate) * (up + 1), both limited to 7 first and the gate from above alone, rounded
// after each.
void gate_limited(const Element* gate, const Element* up, Element* y, Index width) {
  const Floats most = broadcast(7.f), one = broadcast(1.f);
  for (Index j = 0; j < width; j += LANES) {
    const Floats g = minimum(most, load(gate + j)), u = maximum(zeros() - most, minimum(most, load(up + j)));
    const Floats open = rounded(times_sigmoid(one, rounded(g * broadcast(1.702f))));
    store(y + j, rounded(g * open) * rounded(u + one));
  }
}

void apply_gate(Index activation, const Element* gate, const Element* up, Element* y, Index width) {
  if (activation == SWIGLU_LIMITED) return gate_limited(gate, up, y, width);
  if (activation == SILU)
    return gate_with([](Floats x) SLIP_ALWAYS { return times_sigmoid(x, x); }, gate, up, y, width);
  if (activation == GELU_TANH) return gate_with([](Floats x) SLIP_ALWAYS { return gelu_tanh(x); }, gate, up, y, width);
  if (activation == RELU_SQUARED)
    return gate_with([](Floats x) SLIP_ALWAYS { return relu_squared(x); }, gate, up, y, width);
  gate_with([](Floats x) SLIP_ALWAYS { return gelu(x); }, gate, up, y, width);
}

// to [size] = `from`, its halves rotated by angles whose cosines and sines are given.
template <class Round>
SLIP_INLINE void rotate_halves(const Element* from, const float* cos, const float* sin, Element* to, Index size, Round round) {
  const Index half = size / 2;
  for (Index j = 0; j < half; j += LANES) {
    const Floats a = load(from + j), b = load(from + half + j);
    const Floats cos_a = load_floats(cos + j), sin_a = load_floats(sin + j);
    const Floats cos_b = load_floats(cos + half + j), sin_b = load_floats(sin + half + j);
    store(to + j, round(a * cos_a) - round(b * sin_a));
    store(to + half + j, round(b * cos_b) + round(a * sin_b));
  }
}

void rotate_halves(const Heads& form, const Element* from, const float* cos, const float* sin, Element* to) {
  if (form.at_once)
    return rotate_halves(from, cos, sin, to, form.rotary, [](Floats v) SLIP_ALWAYS { return v; });
  rotate_halves(from, cos, sin, to, form.rotary, [](Floats v) SLIP_ALWAYS { return rounded(v); });
}

constexpr Index MAX_HEAD_DIM = 512;

// How many numbers of queries, keys and values each token has.
Index numbers_each(const Heads& form) {
  return (form.heads + (form.keys_twice ? 1 : 2) * form.kv_heads) * form.dim;
}

// to [dim] = the head `from`, rotated as far as it is. Null angles copy it.
void rotate(const Heads& form, const Element* from, const float* cos, const float* sin, Element* to) {
  const Index rotary = cos ? form.rotary : 0, half = rotary / 2;
  memcpy(to + rotary, from + rotary, (form.dim - rotary) * sizeof(Element));
  if (!rotary) return;
  if (!form.in_pairs) return rotate_halves(form, from, cos, sin, to);
  alignas(64) Element apart[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
  for (Index j = 0; j < half; j++) apart[j] = from[2 * j], apart[half + j] = from[2 * j + 1];
  rotate_halves(form, apart, cos, sin, rotated);
  for (Index j = 0; j < half; j++) to[2 * j] = rotated[j], to[2 * j + 1] = rotated[half + j];
}

// Puts the keys or values of one token's heads into a layer's pages.
class PageWriter {
 public:
  PageWriter(const Rotation& r, Index slot)
      : r_(r), block_(slot / r.block_size), offset_(slot % r.block_size) {}

  void write(void* pages, Index head, const Element* numbers) const {
    const Index dim = r_.form.dim, size = r_.block_size;
    head += block_ * r_.form.kv_heads;
    int8_t* bytes = (int8_t*)pages;
    if (r_.of_bytes)
      return store_byte_row(numbers, dim, bytes + byte_row(head, offset_, size, dim),
                            bytes + row_scale(head, offset_, size, dim));
    memcpy((Element*)pages + (head * size + offset_) * dim, numbers, dim * sizeof(Element));
  }

 private:
  const Rotation& r_;
  const Index block_, offset_;
};

// One token's row of `r`.
void rotate_and_write(const Rotation& r, Index i) {
  const Heads& form = r.form;
  const Index dim = form.dim, heads = form.heads, kv_heads = form.kv_heads;
  const PageWriter pages(r, r.slots[i]);
  Element* row = r.qkv + i * numbers_each(form);
  const Element* values = row + (heads + (form.keys_twice ? 0 : kv_heads)) * dim;
  alignas(64) Element normed[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
  const auto norm_head = [&](const Norm& norm, const Element* head) {
    if (norm.weight) normalize(head, norm, normed, dim);
    return norm.weight ? normed : head;
  };
  // First the values: keys that are these, too, may be normed where they lie.
  for (Index h = 0; h < kv_heads; h++) pages.write(r.values, h, norm_head(r.value_norm, values + h * dim));
  if (form.norms_rows) {
    normalize(row, r.query_norm, row, heads * dim);
    normalize(row + heads * dim, r.key_norm, row + heads * dim, kv_heads * dim);
  }
  const Index place = r.places ? r.places[i] : i;
  const float* cos = r.cos ? r.cos + place * form.rotary : nullptr;
  const float* sin = r.cos ? r.sin + place * form.rotary : nullptr;
  const Norm none{};
  for (Index h = 0; h < heads + kv_heads; h++) {
    const bool is_query = h < heads;
    const Norm& norm = form.norms_rows ? none : is_query ? r.query_norm : r.key_norm;
    const Element* from = norm_head(norm, row + h * dim);
    Element* to = is_query ? r.query + (i * heads + h) * dim : rotated;
    rotate(form, from, cos, sin, to);
    if (!is_query) pages.write(r.keys, h - heads, rotated);
  }
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

// y [n, width] = the rows of x, normalized.
void slip_normalize(Team* team, const Element* x, const Norm* norm, Element* y, Index n, Index width) {
  team->run(n * width > SERIAL, [&](Worker& me) { normalize_in_team(me, x, *norm, y, n, width); });
}

// y [n, width] = activation(gate) * up, which lie in x [n, 2 * width] one after the other; or activation(x), where
// x [n, width] is not gated.
void slip_activate(Team* team, const Element* x, Element* y, Index n, Index width, Index activation, Index is_gated) {
  const auto activate = [&](Index i) {
    const Element* row = x + i * width * (is_gated ? 2 : 1);
    apply_gate(activation, row, is_gated ? row + width : nullptr, y + i * width, width);
  };
  team->run(n * width > SERIAL, [&](Worker& me) { me.each(n, activate); });
}

// See rotate_and_write_in_team.
void slip_rotate_and_write(Team* team, const Rotation* r) {
  team->run(r->n * numbers_each(r->form) > SERIAL, [&](Worker& me) { rotate_and_write_in_team(me, *r); });
}

}  // extern "C"
