// All layers of a decoder in one go. What families do differently is said in the records, not here.

#pragma once

#include "attention.h"
#include "gated_products.h"

extern "C" {

struct DecoderLayer {  // records.py mirrors it
  Norm attention_norm, attended_norm;  // before attention and behind it
  Norm mlp_norm, transformed_norm;     // before the MLP and behind it
  Norm query_norm, key_norm;           // as in Rotation
  Product qkv, output, gate_up, down;  // gate before up
  Index table;                         // of the step's angles; below 0 for none
  Index window;                        // as in Attention, as are these
  float scale, softcap;
};

struct Decoder {  // what stays from step to step, and is the same in all layers; records.py mirrors it
  const DecoderLayer* layers;
  Norm last_norm;
  Heads form;
  Index num_layers, hidden;
  Index width;                // of the gate
  Index activation;           // an Activation
  Index is_gated;
  Index is_parallel;          // the MLP reads what attention read: then nothing is normed behind them, or multiplied
  float residual_multiplier;  // of what is added to hidden
};

struct DecoderStep {  // records.py mirrors it
  Element* hidden;                  // [n, hidden], the embedded tokens; in the end what the head reads
  const float* const *cos, *const *sin;  // of each table, [n, rotary]
  const Index* slots;            // [n], as in Rotation
  void* const *keys, *const *values;  // each layer's pages
  const Attention* attention;    // what is the same in all layers; it gets its tensors here
  Element* scratch;                 // [n, slip_decoder_scratch()]
  Index n;
  const Index* taps;                // [num_taps] layers whose input is wanted; num_layers stands for the last norm
  Element* tapped;                  // [n, num_taps, hidden], what enters them
  Index num_taps;
};

}  // extern "C"

namespace {

// Where a step's intermediate results lie: those of a layer's two halves in one place.
struct Scratch {
  RowBlock* blocks;  // of the product at hand
  Element *normed, *qkv, *query, *attended, *act;

  Scratch(const Decoder& d, const DecoderStep& s)
      : blocks(row_block_space<1>(most_row_blocks(d, s.n))),
        normed(s.scratch),
        qkv(normed + s.n * d.hidden),
        query(qkv + s.n * (d.form.heads + 2 * d.form.kv_heads) * d.form.dim),
        attended(query + s.n * d.form.heads * d.form.dim),
        act(qkv) {}

  static Index most_row_blocks(const Decoder& d, Index n) {
    Index most = 0;
    for (Index i = 0; i < d.num_layers; i++)
      for (const Product* w : {&d.layers[i].qkv, &d.layers[i].output, &d.layers[i].gate_up, &d.layers[i].down})
        most = std::max(most, num_row_blocks(*w, n));
    return most;
  }

  static Index width(const Decoder& d) {
    return d.hidden + std::max((3 * d.form.heads + 2 * d.form.kv_heads) * d.form.dim, d.width);
  }
};

// What a half of a layer reads: hidden, normed where there is a norm. As all below, for every thread of a team.
const Element* read_in_team(Worker& me, const Decoder& d, const DecoderStep& s, const Norm& norm, const Scratch& at) {
  if (!norm.weight) return s.hidden;
  normalize_in_team(me, s.hidden, norm, at.normed, s.n, d.hidden);
  return at.normed;
}

// hidden [width] += added, rounded after it was multiplied.
void add_scaled(const Element* added, float by, Element* hidden, Index width) {
  for (Index j = 0; j < width; j += LANES)
    store(hidden + j, rounded(load(added + j) * broadcast(by)) + load(hidden + j));
}

// hidden += x times the product's weights, by way of the norm behind it and the multiplier.
void add_product_in_team(Worker& me, const Decoder& d, const DecoderStep& s, const Product& w, const Element* x,
                         const Norm& norm, const Scratch& at) {
  if (!norm.weight && d.residual_multiplier == 1)
    return product_in_team(me, w, x, s.hidden, s.n, at.blocks, s.hidden);
  product_in_team(me, w, x, at.normed, s.n, at.blocks);
  me.each(s.n, [&](Index i) {
    Element* row = at.normed + i * d.hidden;
    if (norm.weight) normalize(row, norm, row, d.hidden);
    add_scaled(row, d.residual_multiplier, s.hidden + i * d.hidden, d.hidden);
  });
}

// hidden += attention(hidden).
void attend_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index, const Scratch& at) {
  const DecoderLayer& layer = d.layers[index];
  const Element* read = read_in_team(me, d, s, layer.attention_norm, at);
  product_in_team(me, layer.qkv, read, at.qkv, s.n, at.blocks);
  Attention attention = *s.attention;
  const bool is_rotated = layer.table >= 0;
  rotate_and_write_in_team(me, {d.form, at.qkv, is_rotated ? s.cos[layer.table] : nullptr,
                                is_rotated ? s.sin[layer.table] : nullptr, layer.query_norm, layer.key_norm, at.query,
                                s.keys[index], s.values[index], s.slots, s.n, attention.block_size,
                                attention.of_bytes});
  attention.query = at.query;
  attention.keys = s.keys[index];
  attention.values = s.values[index];
  attention.output = at.attended;
  attention.window = layer.window;
  attention.scale = layer.scale;
  attention.softcap = layer.softcap;
  attend_in_team(me, attention);
  add_product_in_team(me, d, s, layer.output, at.attended, layer.attended_norm, at);
}

// Copies what enters a layer to where it is wanted.
void tap_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index) {
  for (Index tap = 0; tap < s.num_taps; tap++)
    if (s.taps[tap] == index)
      me.each(s.n, [&](Index i) {
        memcpy(s.tapped + (i * s.num_taps + tap) * d.hidden, s.hidden + i * d.hidden, d.hidden * sizeof(Element));
      });
}

// hidden += mlp(hidden).
void transform_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index, const Scratch& at) {
  const DecoderLayer& layer = d.layers[index];
  const Element* read = d.is_parallel ? at.normed : read_in_team(me, d, s, layer.mlp_norm, at);
  gated_product_in_team(me, layer.gate_up, {d.activation, d.is_gated}, read, at.act, s.n, at.blocks);
  add_product_in_team(me, d, s, layer.down, at.act, layer.transformed_norm, at);
}

}  // namespace

extern "C" {

// How many numbers of scratch each token needs.
Index slip_decoder_scratch(const Decoder* d) { return Scratch::width(*d); }

// Every layer and the last norm, in one region: threads meet where one reads what another wrote.
void slip_decode(Team* team, const Decoder* d, const DecoderStep* s) {
  const Scratch at(*d, *s);
  team->run(true, [&](Worker& me) {
    for (Index index = 0; index < d->num_layers; index++) {
      tap_layer(me, *d, *s, index);
      attend_layer(me, *d, *s, index, at);
      transform_layer(me, *d, *s, index, at);
    }
    tap_layer(me, *d, *s, d->num_layers);
    normalize_in_team(me, s->hidden, d->last_norm, s->hidden, s->n, d->hidden);
  });
}

}  // extern "C"
