// A mixture whole: a router chooses each row's experts, and a shared expert, if there is one, is added to what they
// make of it.

#pragma once

#include "experts.h"

extern "C" {

struct Router {           // records.py mirrors it
  Product weights;        // of the logits of all experts, up to whole panels
  Index count, each;      // experts there are, and those chosen for a row
  Index is_normed;        // the shares of a row's experts are divided by their sum
  Index rounds_shares;
  Norm norm;              // of what is routed; if there is one, it is multiplied with these, too:
  const Element* scale;   // [hidden]
  float root;
  const float* expert_scales;  // [count], of shares; null for none
};

struct Routes {           // of one call; records.py mirrors it
  const Element* x;       // [n, hidden]
  Element* logits;        // [n, outputs of the router]
  Index* experts;         // [n, each]
  float* shares;          // [n, each]
  Index n;
};

struct Mixture {          // records.py mirrors it
  Router router;
  Experts experts;
  Product shared_gate_up, shared_down;  // of the shared expert; no outputs for none
  const Element* shared_gate;           // [hidden]: how much of that is added, by the sigmoid of the row's product
  Index shared_activation;
};

}  // extern "C"

namespace {

// The likeliest experts of a row by a softmax over all, and their chances; of two as likely the first. Logits that are
// no numbers give shares that are none.
class Chooser {
 public:
  explicit Chooser(const Router& router) : r_(router), chances_(round_up(router.count)) {}

  void choose(const Element* logits, Index* experts, float* shares) {
    const float total = put_chances(logits);
    float chosen = 0;
    for (Index c = 0; c < r_.each; c++) {
      experts[c] = likeliest();
      shares[c] = chances_[experts[c]] / total;
      chosen += shares[c];
      chances_[experts[c]] = TAKEN;
    }
    for (Index c = 0; c < r_.each; c++) {
      if (r_.is_normed) shares[c] /= chosen;
      if (r_.rounds_shares) shares[c] = value(nearest(shares[c]));
      if (r_.expert_scales) shares[c] *= r_.expert_scales[experts[c]];
    }
  }

 private:
  static constexpr float TAKEN = -1;  // less than any chance

  static Index round_up(Index count) { return (count + LANES - 1) / LANES * LANES; }

  // Puts e^(logit - largest) of each expert, and gives their sum.
  float put_chances(const Element* logits) {
    const Index count = r_.count;
    std::fill(chances_.begin(), chances_.end(), -INFINITY);
    float largest = -INFINITY;
    for (Index e = 0; e < count; e++) {
      chances_[e] = value(logits[e]);
      largest = std::max(largest, chances_[e]);
    }
    Floats total = zeros();
    for (Index e = 0; e < (Index)chances_.size(); e += LANES) {
      alignas(64) float part[LANES];
      store_floats(part, exponential(load_floats(chances_.data() + e) - broadcast(largest)));
      for (Index own = e; own < e + LANES; own++) chances_[own] = own < count ? part[own - e] : 0;
      total = total + load_floats(chances_.data() + e);
    }
    return sum(total);
  }

  Index likeliest() const {
    Index found = 0;
    float most = TAKEN;
    for (Index e = 0; e < r_.count; e++)
      if (!(chances_[e] <= most)) found = e, most = chances_[e];
    return found;
  }

  const Router& r_;
  std::vector<float> chances_;
};

// to [hidden] = what is routed of a row of x, where the router has a norm: rounded after each multiplication.
void put_routed(const Router& r, const Element* x, Element* to) {
  const Index hidden = r.weights.k;
  normalize(x, r.norm, to, hidden);
  for (Index j = 0; j < hidden; j += LANES)
    store(to + j, rounded(load(to + j) * load(r.scale + j)) * broadcast(r.root));
}

// Which experts a step's rows go through in one mixture. Nobody changes it before the step ends: a thread that comes
// late must find it as the others did.
class Routing {
 public:
  Routing(const Router& router, Index n)
      : router_(router), n_(n), experts_(n * router.each), shares_(n * router.each) {}

  Choices choices() const { return {experts_.data(), shares_.data(), n_, router_.each}; }
  const SortedChoices& sorted() const { return sorted_; }
  Index n() const { return n_; }

  // Chooses by logits and copies rows of x [n, hidden] to `rows`, as `experts_in_team` wants them. For every thread of
  // a team, with a barrier behind it.
  void route_in_team(Worker& me, const Element* logits, const Element* x, Index hidden, Element* rows) {
    if (n_ <= FEW) {  // one thread does it in less time than they take to meet
      me.each(1, [&](Index) {
        choose(logits, 0, n_);
        sorted_.sort(choices(), router_.count);
        for (Index i = 0; i < sorted_.count(); i++) copy_row(sorted_, x, i, hidden, rows);
      });
      return;
    }
    const Index pieces = (n_ + FEW - 1) / FEW;
    me.each(pieces, [&](Index piece) { choose(logits, piece * FEW, std::min(n_, (piece + 1) * FEW)); });
    me.each(1, [&](Index) { sorted_.sort(choices(), router_.count); });
    me.each(sorted_.count(), [&](Index i) { copy_row(sorted_, x, i, hidden, rows); });
  }

 private:
  static constexpr Index FEW = 8;

  void choose(const Element* logits, Index first, Index stop) {
    Chooser chooser(router_);
    for (Index i = first; i < stop; i++)
      chooser.choose(logits + i * router_.weights.out, experts_.data() + i * router_.each,
                     shares_.data() + i * router_.each);
  }

  const Router& router_;
  const Index n_;
  std::vector<Index> experts_;
  std::vector<float> shares_;
  SortedChoices sorted_;
};

// Where the numbers lie that a mixture computes on its way.
struct MixtureSpace {
  Element *logits, *rows, *act, *shared, *mixed, *routed;

  MixtureSpace(const Mixture& m, Element* scratch, Index n)
      : logits(scratch), rows(logits + n * m.router.weights.out), act(rows + n * m.router.each * m.experts.gate_up.k),
        shared(act + n * act_width(m)), mixed(shared + n * m.shared_down.out),
        routed(mixed + n * m.experts.gate_up.k) {}

  // Numbers for each row.
  static Index width(const Mixture& m) {
    const Index hidden = m.experts.gate_up.k;
    const Index routed_width = m.router.norm.weight ? hidden : 0;
    return m.router.weights.out + m.router.each * hidden + act_width(m) + m.shared_down.out + hidden + routed_width;
  }

  static Index act_width(const Mixture& m) { return std::max(m.router.each * m.experts.down.k, m.shared_down.k); }
};

inline Index num_row_blocks(const Mixture& m, Index n) {
  const Index shared = std::max(num_row_blocks(m.shared_gate_up, n), num_row_blocks(m.shared_down, n));
  return std::max({num_row_blocks(m.router.weights, n), num_row_blocks(m.experts, n * m.router.each), shared});
}

// y [hidden] += shared * the sigmoid of x * the gate's weights, rounded after each.
void add_shared(const Mixture& m, const Element* x, const Element* shared, Element* y) {
  const Index hidden = m.shared_down.out;
  Floats products = zeros();
  for (Index j = 0; j < hidden; j += LANES) products = fma(load(x + j), load(m.shared_gate + j), products);
  const Floats open = rounded(times_sigmoid(broadcast(1.f), rounded(broadcast(sum(products)))));
  for (Index j = 0; j < hidden; j += LANES) store(y + j, rounded(load(shared + j) * open) + load(y + j));
}

// Calls `finish(row, what the mixture makes of it)` for each row of x [n, hidden], which is routed by what stands in
// its place in `asked`, shared out among the team. For every thread of it, with a barrier behind it.
template <class Finish>
void mixture_in_team(Worker& me, const Mixture& m, const Element* asked, const Element* x, Routing& routing,
                     const MixtureSpace& at, RowBlock* blocks, Finish finish) {
  const Index n = routing.n(), hidden = m.experts.gate_up.k;
  const bool has_shared = m.shared_down.out > 0;
  if (has_shared) {
    gated_product_in_team(me, m.shared_gate_up, {m.shared_activation, true}, x, at.act, n, blocks);
    product_in_team(me, m.shared_down, at.act, at.shared, n, blocks);
  }
  if (m.router.norm.weight) {
    me.each(n, [&](Index i) { put_routed(m.router, asked + i * hidden, at.routed + i * hidden); });
    asked = at.routed;
  }
  product_in_team(me, m.router.weights, asked, at.logits, n, blocks);
  routing.route_in_team(me, at.logits, x, hidden, at.rows);
  experts_in_team(me, m.experts, routing.sorted(), at.rows, at.act, blocks);
  me.each(n, [&](Index i) {
    Element* const y = at.mixed + i * hidden;
    sum_shares(routing.choices(), routing.sorted(), at.rows, i, y, hidden);
    if (has_shared) add_shared(m, x + i * hidden, at.shared + i * hidden, y);
    finish(i, y);
  });
}

}  // namespace

extern "C" {

// The logits of rows, and the experts chosen by them.
void slip_route(Team* team, const Router* r, const Routes* routes) {
  const Index hidden = r->weights.k;
  std::vector<Element> routed(r->norm.weight ? routes->n * hidden : 0);
  if (r->norm.weight)
    for (Index i = 0; i < routes->n; i++) put_routed(*r, routes->x + i * hidden, routed.data() + i * hidden);
  slip_linear(team, &r->weights, r->norm.weight ? routed.data() : routes->x, routes->logits, routes->n);
  Chooser chooser(*r);
  for (Index i = 0; i < routes->n; i++)
    chooser.choose(routes->logits + i * r->weights.out, routes->experts + i * r->each, routes->shares + i * r->each);
}

// How many numbers of scratch slip_mixture needs for each row.
Index slip_mixture_scratch(const Mixture* m) { return MixtureSpace::width(*m); }

// y [n, hidden] = what a mixture makes of x [n, hidden].
void slip_mixture(Team* team, const Mixture* m, const Element* x, Element* y, Element* scratch, Index n) {
  const Index hidden = m->experts.gate_up.k;
  const MixtureSpace at(*m, scratch, n);
  Routing routing(m->router, n);
  RowBlock* blocks = row_block_space<1>(num_row_blocks(*m, n));
  team->run(true, [&](Worker& me) {
    mixture_in_team(me, *m, x, x, routing, at, blocks, [&](Index i, const Element* mixed) {
      memcpy(y + i * hidden, mixed, hidden * sizeof(Element));
    });
  });
}

}  // extern "C"
