// All layers of a decoder of Llama's kind, in one go.

#pragma once

#include "attention.h"
#include "products.h"
#include "rows.h"

extern "C" {

struct DecoderLayer {  // records.py mirrors it
  Norm attention_norm, query_norm, key_norm, mlp_norm;  // those of single heads may have no weight
  Product qkv, output, gate_up, down;                   // gate before up
  Index window;                                         // as in Attention, as are these
  float scale, softcap;
};

struct Decoder {  // what stays from step to step; records.py mirrors it
  const DecoderLayer* layers;
  Norm last_norm;
  Index num_layers, hidden, heads, kv_heads, dim, width;  // width of the gate
};

struct DecoderStep {  // records.py mirrors it
  Element* hidden;                  // [n, hidden], the embedded tokens; in the end what the head reads
  const Element *cos, *sin;         // [n, dim]
  const Index* slots;            // [n], as in Rotation
  void* const *keys, *const *values;  // each layer's pages
  const Attention* attention;    // what is the same in all layers; it gets its tensors here
  Element* scratch;                 // [n, slip_decoder_scratch()]
  Index n;
  const Index* taps;                // [num_taps] layers whose input is wanted
  Element* tapped;                  // [n, num_taps, hidden], what enters them
  Index num_taps;
};

}  // extern "C"

namespace {

// act [n, width] = silu(gate) * up of x [n, k]. For every thread of a team, with a barrier behind it.
void gated_product_in_team(Worker& me, const Product& gate_and_up, const Element* x, Element* act, Index n,
                           RowBlock* shared) {
  const Index panels = gate_and_up.out / PANEL / 2, width = panels * PANEL;
  Input input(me, gate_and_up, x, n, shared);
  for_panels(me, n, panels, [&](Index first, Index stop, Index panel, Index last) {
    alignas(64) Element gate[ROW_BLOCK * PANEL], up[ROW_BLOCK * PANEL];
    const Rows rows = input.rows(first, stop);
    for (; panel < last; panel++) {
      times_panel(gate_and_up, panel, rows, stop - first, {gate, nullptr, PANEL});
      times_panel(gate_and_up, panels + panel, rows, stop - first, {up, nullptr, PANEL});
      for (Index i = 0; i < stop - first; i++)
        apply_gate(gate + i * PANEL, up + i * PANEL, act + (first + i) * width + panel * PANEL, PANEL);
    }
  });
}

// Where a step's intermediate results lie: those of a layer's two halves in one place.
struct Scratch {
  RowBlock* blocks;  // of the product at hand
  Element *normed, *qkv, *query, *attended, *act;

  Scratch(const Decoder& d, const DecoderStep& s)
      : blocks(row_block_space<1>(most_row_blocks(d, s.n))), normed(s.scratch), qkv(normed + s.n * d.hidden), query(qkv + s.n * (d.heads + 2 * d.kv_heads) * d.dim),
        attended(query + s.n * d.heads * d.dim), act(qkv) {}

  static Index most_row_blocks(const Decoder& d, Index n) {
    Index most = 0;
    for (Index i = 0; i < d.num_layers; i++)
      for (const Product* w : {&d.layers[i].qkv, &d.layers[i].output, &d.layers[i].gate_up, &d.layers[i].down})
        most = std::max(most, num_row_blocks(*w, n));
    return most;
  }

  static Index width(const Decoder& d) {
    return d.hidden + std::max((3 * d.heads + 2 * d.kv_heads) * d.dim, d.width);
  }
};

// hidden += attention(norm(hidden)). As all below, for every thread of a team.
void attend_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index, const Scratch& at) {
  const DecoderLayer& layer = d.layers[index];
  normalize_in_team(me, s.hidden, layer.attention_norm, at.normed, s.n, d.hidden);
  product_in_team(me, layer.qkv, at.normed, at.qkv, s.n, at.blocks);
  Attention attention = *s.attention;
  rotate_and_write_in_team(me, {at.qkv, s.cos, s.sin, layer.query_norm, layer.key_norm, at.query, s.keys[index],
                                s.values[index], s.slots, s.n, d.heads, d.kv_heads, d.dim, attention.block_size,
                                attention.of_bytes});
  attention.query = at.query;
  attention.keys = s.keys[index];
  attention.values = s.values[index];
  attention.output = at.attended;
  attention.window = layer.window;
  attention.scale = layer.scale;
  attention.softcap = layer.softcap;
  attend_in_team(me, attention);
  product_in_team(me, layer.output, at.attended, s.hidden, s.n, at.blocks, s.hidden);
}

// Copies what enters a layer to where it is wanted.
void tap_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index) {
  for (Index tap = 0; tap < s.num_taps; tap++)
    if (s.taps[tap] == index)
      me.each(s.n, [&](Index i) {
        memcpy(s.tapped + (i * s.num_taps + tap) * d.hidden, s.hidden + i * d.hidden, d.hidden * sizeof(Element));
      });
}

// hidden += mlp(norm(hidden)).
void transform_layer(Worker& me, const Decoder& d, const DecoderStep& s, Index index, const Scratch& at) {
  const DecoderLayer& layer = d.layers[index];
  normalize_in_team(me, s.hidden, layer.mlp_norm, at.normed, s.n, d.hidden);
  gated_product_in_team(me, layer.gate_up, at.normed, at.act, s.n, at.blocks);
  product_in_team(me, layer.down, at.act, s.hidden, s.n, at.blocks, s.hidden);
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
    normalize_in_team(me, s->hidden, d->last_norm, s->hidden, s->n, d->hidden);
  });
}

}  // extern "C"
