// A mixture of experts: each row goes through the few that were chosen for it, and no other expert is read.
//
// Rows of one expert are multiplied together, since its weights are read once for all of them. What a row's experts
// make of it is summed in the order in which they were chosen: like all kernels' results, it depends on that row alone.

#pragma once

#include "gated_products.h"

extern "C" {

struct Experts {          // records.py mirrors it
  Product gate_up, down;  // all experts' outputs, one expert behind the other; of each, gate before up, or one alone
  Index count;
  Index activation;       // an Activation
};

struct ChosenExperts {   // of one call; records.py mirrors it
  const Element* x;      // [n, hidden]
  const Index* experts;  // [n, each]; a number that no expert has is one left out
  const float* shares;   // [n, each], what their outputs are multiplied with
  Element* y;            // [n, hidden]
  Element* scratch;      // [n * each, hidden + width]
  Index n, each;
};

}  // extern "C"

namespace {

// Which experts rows go through, and what their outputs are multiplied with: each [n, each].
struct Choices {
  const Index* experts;
  const float* shares;
  Index n, each;
};

// Rows that go through one expert together: `count` of the sorted ones from `first` on.
struct ExpertRows {
  Index expert, first, count;
};

// Every choice of every row, sorted by expert.
class SortedChoices {
 public:
  void sort(const Choices& c, Index num_experts) {
    places_.assign(c.n * c.each, LEFT_OUT);
    std::vector<Index> begins(num_experts + 1);
    const auto is_one = [&](Index choice) { return 0 <= c.experts[choice] && c.experts[choice] < num_experts; };
    for (Index choice = 0; choice < c.n * c.each; choice++)
      if (is_one(choice)) begins[c.experts[choice] + 1]++;
    together_.clear();
    for (Index e = 0; e < num_experts; e++) {
      begins[e + 1] += begins[e];
      for (Index first = begins[e]; first < begins[e + 1]; first += ROW_BLOCK)
        together_.push_back({e, first, std::min(ROW_BLOCK, begins[e + 1] - first)});
    }
    rows_.resize(begins[num_experts]);
    for (Index choice = 0; choice < c.n * c.each; choice++) {
      if (!is_one(choice)) continue;
      places_[choice] = begins[c.experts[choice]]++;
      rows_[places_[choice]] = choice / c.each;
    }
  }

  static constexpr Index LEFT_OUT = -1;
  Index count() const { return (Index)rows_.size(); }
  Index row(Index place) const { return rows_[place]; }         // which row the sorted one is
  Index place(Index choice) const { return places_[choice]; }   // where a choice is among the sorted, or LEFT_OUT
  const std::vector<ExpertRows>& together() const { return together_; }

 private:
  std::vector<Index> places_, rows_;
  std::vector<ExpertRows> together_;
};

// Calls `work(rows, panel)` for each panel of each expert's rows, shared out among the team.
template <class Work>
void for_expert_panels(Worker& me, const SortedChoices& sorted, Index panels, Work work) {
  me.each(sorted.together().size() * panels, [&](Index i) { work(sorted.together()[i / panels], i % panels); });
}

// y [hidden] = the shares of what row `i`'s experts made of it, summed.
void sum_shares(const Choices& c, const SortedChoices& sorted, const Element* outputs, Index i, Element* y,
                Index hidden) {
  for (Index j = 0; j < hidden; j += LANES) {
    Floats total = zeros();
    for (Index choice = i * c.each; choice < (i + 1) * c.each; choice++) {
      const Index place = sorted.place(choice);
      if (place != SortedChoices::LEFT_OUT)
        total = fma(load(outputs + place * hidden + j), broadcast(c.shares[choice]), total);
    }
    store(y + j, total);
  }
}

// rows [sorted choices, hidden] = those of x that they are of, in place of which `experts_in_team` puts its outputs.
void copy_row(const SortedChoices& sorted, const Element* x, Index i, Index hidden, Element* rows) {
  memcpy(rows + i * hidden, x + sorted.row(i) * hidden, hidden * sizeof(Element));
}

// rows [sorted choices, hidden] = what its expert makes of each; act is [sorted choices, width]. For every thread of a
// team, with a barrier behind it. `shared` has room for all sorted rows in blocks.
void experts_in_team(Worker& me, const Experts& e, const SortedChoices& sorted, Element* rows, Element* act,
                     RowBlock* shared) {
  const Index hidden = e.gate_up.k, width = e.down.k, n = sorted.count();
  const Index outs = e.gate_up.out / e.count;  // of an expert: `width`, or twice as many with a gate
  Input input(me, e.gate_up, rows, n, shared);
  for_expert_panels(me, sorted, width / PANEL, [&](const ExpertRows& r, Index panel) {
    const GatedPanels panels{e.gate_up, {e.activation, outs > width}, r.expert * outs / PANEL, width / PANEL};
    panels.multiply(panel, input.rows(r.first, r.first + r.count), r.count, act + r.first * width, width);
  });
  Input gated(me, e.down, act, n, shared);
  for_expert_panels(me, sorted, hidden / PANEL, [&](const ExpertRows& r, Index panel) {
    Element* const y = rows + r.first * hidden + panel * PANEL;
    times_panel(e.down, r.expert * hidden / PANEL + panel, gated.rows(r.first, r.first + r.count), r.count,
                {y, nullptr, hidden});
  });
}

// How many blocks the rows of so many choices are.
inline Index num_row_blocks(const Experts& e, Index choices) {
  return std::max(num_row_blocks(e.gate_up, choices), num_row_blocks(e.down, choices));
}

}  // namespace

extern "C" {

// y [n, hidden] = the shares of each row's experts, summed: down(activation(gate) * up), or down(activation(up)).
void slip_experts(Team* team, const Experts* e, const ChosenExperts* c) {
  const Choices choices{c->experts, c->shares, c->n, c->each};
  const Index hidden = e->gate_up.k;
  SortedChoices sorted;
  sorted.sort(choices, e->count);
  Element *const rows = c->scratch, *const act = rows + sorted.count() * hidden;
  RowBlock* shared = row_block_space<1>(num_row_blocks(*e, sorted.count()));
  team->run(true, [&](Worker& me) {
    me.each(sorted.count(), [&](Index i) { copy_row(sorted, c->x, i, hidden, rows); });
    experts_in_team(me, *e, sorted, rows, act, shared);
    me.each(c->n, [&](Index i) { sum_shares(choices, sorted, rows, i, c->y + i * hidden, hidden); });
  });
}

}  // extern "C"
