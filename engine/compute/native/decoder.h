// All layers of a decoder in one go. What families do differently is said in the records, not here.

#pragma once

#include "attention.h"
#include "mixture.h"

extern "C" {

struct DecoderLayer {  // records.py mirrors it
  Norm attention_norm, attended_norm;  // before attention and behind it
  Norm mlp_norm, transformed_norm;     // before the MLP and behind it
  Norm query_norm, key_norm, value_norm;  // as in Rotation
  Heads form;
  Index kv_heads;                      // of its pages, which may be another layer's
  Product qkv, output;
  Product gate_up, down;               // of the MLP; gate before up
  const Mixture* mixture;              // in place of the MLP, or beside it; null for none
  Norm mixture_norm;                   // beside an MLP: before the mixture, which routes what has no norm
  Norm aside_norm, mixed_norm;         // likewise behind the MLP and behind the mixture, before they are added
  Index activation;                    // an Activation, of the MLP's gate
  Index is_gated;
  Index is_parallel;          // the MLP reads what attention read: then nothing is normed behind them, or multiplied
  Index table;                         // of the step's angles; below 0 for none
  Index window;                        // as in Attention, as are these
  const float* sinks;
  float scale, softcap;
  float residual_multiplier;           // of what is added to hidden
  Product input_gate, input_projection;  // of what the step brings for this layer alone; no outputs for none
  Norm input_norm;                     // behind these
  float scalar;                        // what hidden is multiplied with in the end
};

struct Decoder {  // what stays from step to step; records.py mirrors it
  const DecoderLayer* layers;
  Norm last_norm;
  Index num_layers, hidden;
  const Element* embedding;  // [num_tokens, hidden]; null where a step brings its tokens embedded
  Index num_tokens;
  float multiplier;          // of what is read of it
  Product head;              // no outputs for none
};

struct DecoderStep {  // records.py mirrors it
  Element* hidden;                  // [n, hidden], the embedded tokens or room for them; in the end what the head reads
  const Index* token_ids;        // [n], where the decoder has the embedding
  const float* const *cos, *const *sin;  // of each table, [.., rotary]
  const Index* places;           // as in Rotation
  const Index* slots;            // [n], as in Rotation
  void* const *keys, *const *values;  // each layer's pages
  const Attention* attention;    // what is the same in all layers; it gets its tensors and heads here
  Element* scratch;                 // [n, slip_decoder_scratch()]
  Index n;
  const Index* taps;                // [num_taps] layers whose input is wanted; num_layers stands for the last norm
  Element* tapped;                  // [n, num_taps, hidden], what enters them
  Index num_taps;
  const Element* layer_inputs;      // [n, num_layers, outputs of a layer's input_gate]; null for none
  const Index* rows;                // [num_rows] of the tokens, in order, whose logits are wanted
  Index num_rows;
  Element* logits;                  // [num_rows, outputs of the head]; null for none
};

}  // extern "C"

namespace {

// Where a step's intermediate results lie: those of a layer's two halves in one place.
struct Scratch {
  RowBlock* blocks;  // of the product at hand
  Element *normed, *aside, *half;

  Scratch(const Decoder& d, const DecoderStep& s)
      : blocks(row_block_space<1>(most_row_blocks(d, s.n))), normed(s.scratch), aside(normed + s.n * d.hidden),
        half(aside + (has_both(d) ? s.n * d.hidden : 0)) {}

  // Whether there are mixtures beside MLPs.
  static bool has_both(const Decoder& d) {
    return std::any_of(d.layers, d.layers + d.num_layers, [](const DecoderLayer& l) { return l.mixture && l.down.out; });
  }

  static Index most_row_blocks(const Decoder& d, Index n) {
    Index most = num_row_blocks(d.head, n);
    for (Index i = 0; i < d.num_layers; i++) {
      const DecoderLayer& layer = d.layers[i];
      for (const Product* w : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.input_gate,
                               &layer.input_projection})
        most = std::max(most, num_row_blocks(*w, n));
      if (layer.mixture) most = std::max(most, num_row_blocks(*layer.mixture, n));
    }
    return most;
  }

  static Index width(const Decoder& d) {
    Index most = 0;
    for (Index i = 0; i < d.num_layers; i++) {
      const DecoderLayer& layer = d.layers[i];
      const Heads& form = layer.form;
      most = std::max({most, numbers_each(form) + 2 * form.heads * form.dim, layer.down.k, layer.input_gate.out});
      if (layer.mixture) most = std::max(most, MixtureSpace::width(*layer.mixture));
    }
    return (has_both(d) ? 2 : 1) * d.hidden + most;
  }
};

// hidden [width] += added, rounded after it was multiplied.
void add_scaled(const Element* added, float by, Element* hidden, Index width) {
  for (Index j = 0; j < width; j += LANES)
    store(hidden + j, rounded(load(added + j) * broadcast(by)) + load(hidden + j));
}

// A step's way through a decoder. All that takes a worker is for every thread of a team, with a barrier behind it.
class DecoderPass {
 public:
  DecoderPass(const Decoder& d, const DecoderStep& s) : d_(d), s_(s), at_(d, s) {
    for (Index i = 0; i < d.num_layers; i++) {
      const Mixture* mixture = d.layers[i].mixture;
      routings_.push_back(mixture ? std::make_unique<Routing>(mixture->router, s.n) : nullptr);
    }
  }

  void run(Worker& me) {
    embed(me);
    for (Index index = 0; index < d_.num_layers; index++) {
      tap(me, index);
      attend(me, index);
      transform(me, index);
      add_input(me, index);
    }
    tap(me, d_.num_layers);
    normalize_in_team(me, s_.hidden, d_.last_norm, s_.hidden, s_.n, d_.hidden);
    give_logits(me);
  }

 private:
  void embed(Worker& me) {
    if (!d_.embedding) return;
    me.each(s_.n, [&](Index i) {
      const Element* from = d_.embedding + s_.token_ids[i] * d_.hidden;
      if (d_.multiplier == 1) return (void)memcpy(hidden(i), from, d_.hidden * sizeof(Element));
      for (Index j = 0; j < d_.hidden; j += LANES) store(hidden(i) + j, load(from + j) * broadcast(d_.multiplier));
    });
  }

  void give_logits(Worker& me) {
    if (!s_.logits) return;
    const Element* x = s_.hidden;
    if (s_.num_rows < s_.n) {
      me.each(s_.num_rows, [&](Index i) {
        memcpy(at_.normed + i * d_.hidden, hidden(s_.rows[i]), d_.hidden * sizeof(Element));
      });
      x = at_.normed;
    }
    product_in_team(me, d_.head, x, s_.logits, s_.num_rows, at_.blocks);
  }

  // Copies what enters a layer to where it is wanted.
  void tap(Worker& me, Index index) {
    for (Index tap = 0; tap < s_.num_taps; tap++)
      if (s_.taps[tap] == index)
        me.each(s_.n, [&](Index i) {
          memcpy(s_.tapped + (i * s_.num_taps + tap) * d_.hidden, hidden(i), d_.hidden * sizeof(Element));
        });
  }

  // hidden += attention(hidden).
  void attend(Worker& me, Index index) {
    const DecoderLayer& layer = d_.layers[index];
    const Heads& form = layer.form;
    Element *const qkv = at_.half, *const query = qkv + s_.n * numbers_each(form),
                  *const attended = query + s_.n * form.heads * form.dim;
    product_in_team(me, layer.qkv, read(me, layer.attention_norm), qkv, s_.n, at_.blocks);
    Attention attention = *s_.attention;
    const bool is_rotated = layer.table >= 0;
    rotate_and_write_in_team(me, {form, qkv, is_rotated ? s_.cos[layer.table] : nullptr,
                                  is_rotated ? s_.sin[layer.table] : nullptr, layer.query_norm, layer.key_norm, query,
                                  s_.keys[index], s_.values[index], s_.slots, s_.n, attention.block_size,
                                  attention.of_bytes, layer.value_norm, s_.places});
    attention.heads = form.heads;
    attention.kv_heads = layer.kv_heads;
    attention.dim = form.dim;
    attention.query = query;
    attention.keys = s_.keys[index];
    attention.values = s_.values[index];
    attention.output = attended;
    attention.window = layer.window;
    attention.scale = layer.scale;
    attention.softcap = layer.softcap;
    attention.sinks = layer.sinks;
    attend_in_team(me, attention);
    add_product(me, layer, layer.output, attended, layer.attended_norm);
  }

  // hidden += mlp(hidden), or what the mixture in its place makes of it, or both.
  void transform(Worker& me, Index index) {
    const DecoderLayer& layer = d_.layers[index];
    const Element* x = layer.is_parallel ? at_.normed : read(me, layer.mlp_norm);
    if (!layer.down.out) {
      mix(me, index, x, x, [&](Index i, Element* mixed) { add(layer, mixed, layer.transformed_norm, i); });
      return;
    }
    gated_product_in_team(me, layer.gate_up, {layer.activation, layer.is_gated}, x, at_.half, s_.n, at_.blocks);
    if (!layer.mixture) return add_product(me, layer, layer.down, at_.half, layer.transformed_norm);
    product_in_team(me, layer.down, at_.half, at_.aside, s_.n, at_.blocks);
    mix(me, index, s_.hidden, read(me, layer.mixture_norm), [&](Index i, Element* mixed) {
      Element* const aside = at_.aside + i * d_.hidden;
      normalize(aside, layer.aside_norm, aside, d_.hidden);
      normalize(mixed, layer.mixed_norm, mixed, d_.hidden);
      add_scaled(aside, 1, mixed, d_.hidden);
      add(layer, mixed, layer.transformed_norm, i);
    });
  }

  // Calls `finish(row, what the layer's mixture makes of it)`; `asked` is what is routed.
  template <class Finish>
  void mix(Worker& me, Index index, const Element* asked, const Element* x, Finish finish) {
    const Mixture& mixture = *d_.layers[index].mixture;
    mixture_in_team(me, mixture, asked, x, *routings_[index], MixtureSpace(mixture, at_.half, s_.n), at_.blocks,
                    finish);
  }

  // hidden += what the step brings for the layer alone, as far as hidden opens its gate; then the layer's scalar.
  void add_input(Worker& me, Index index) {
    const DecoderLayer& layer = d_.layers[index];
    const Index width = layer.input_gate.out;
    if (width) {
      product_in_team(me, layer.input_gate, s_.hidden, at_.half, s_.n, at_.blocks);
      me.each(s_.n, [&](Index i) {
        Element* const gate = at_.half + i * width;
        apply_gate(layer.activation, gate, s_.layer_inputs + (i * d_.num_layers + index) * width, gate, width);
      });
      add_product(me, layer, layer.input_projection, at_.half, layer.input_norm);
    }
    if (layer.scalar == 1) return;
    me.each(s_.n, [&](Index i) {
      Element* const row = hidden(i);
      for (Index j = 0; j < d_.hidden; j += LANES) store(row + j, load(row + j) * broadcast(layer.scalar));
    });
  }

  // What a half of a layer reads: hidden, normed where there is a norm.
  const Element* read(Worker& me, const Norm& norm) {
    if (!norm.weight) return s_.hidden;
    normalize_in_team(me, s_.hidden, norm, at_.normed, s_.n, d_.hidden);
    return at_.normed;
  }

  // hidden += x times the product's weights, by way of the norm behind it and the multiplier.
  void add_product(Worker& me, const DecoderLayer& layer, const Product& w, const Element* x, const Norm& norm) {
    if (!norm.weight && layer.residual_multiplier == 1)
      return product_in_team(me, w, x, s_.hidden, s_.n, at_.blocks, s_.hidden);
    product_in_team(me, w, x, at_.normed, s_.n, at_.blocks);
    me.each(s_.n, [&](Index i) { add(layer, at_.normed + i * d_.hidden, norm, i); });
  }

  // One row of it, from what is to be added.
  void add(const DecoderLayer& layer, Element* row, const Norm& norm, Index i) {
    if (norm.weight) normalize(row, norm, row, d_.hidden);
    add_scaled(row, layer.residual_multiplier, hidden(i), d_.hidden);
  }

  Element* hidden(Index i) const { return s_.hidden + i * d_.hidden; }

  const Decoder& d_;
  const DecoderStep& s_;
  const Scratch at_;
  std::vector<std::unique_ptr<Routing>> routings_;  // of each layer
};

}  // namespace

extern "C" {

// How many numbers of scratch each token needs.
Index slip_decoder_scratch(const Decoder* d) { return Scratch::width(*d); }

// From tokens to logits, or what of that the records ask for, in one region: threads meet where one reads what another
// wrote. -1 when it is done; the place of the first token that the embedding does not have, where nothing was done.
Index slip_decode(Team* team, const Decoder* d, const DecoderStep* s) {
  for (Index i = 0; d->embedding && i < s->n; i++)
    if (s->token_ids[i] < 0 || s->token_ids[i] >= d->num_tokens) return i;
  DecoderPass pass(*d, *s);
  team->run(true, [&](Worker& me) { pass.run(me); });
  return -1;
}

}  // extern "C"
