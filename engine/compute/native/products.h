// Rows times packed weights.

#pragma once

#include "block_products.h"
#include "float_panels.h"
#include "quantize.h"
#include "team.h"

namespace {

constexpr Index SOON = 64;        // inputs between what is summed for few rows and what is asked for
constexpr Index ROW_BLOCK = 96;   // rows that one thread takes at once when there are many
constexpr Index PANEL_BLOCK = 6;  // panels likewise

// What a product's weights are: elements; or panels of formats, which are multiplied with rows in blocks, with rows of
// numbers (elements and floats of 8 bits), or some with these and some with those.
enum Kind : Index { ELEMENTS = 0, BLOCKS = 1, MIXED = 2, NUMBERS = 3 };

}  // namespace

extern "C" {

struct FormatPanel {   // records.py mirrors it
  Index format;        // a Format
  const void* at;
};

struct Product {       // a linear layer; records.py mirrors it
  Index kind;          // a Kind: what `packed` is, and how it is multiplied
  const void* packed;  // out / PANEL panels, one after the other; of all but ELEMENTS a FormatPanel for each
  const Element* bias;    // [out], null for none
  Index out, k;
};

}  // extern "C"

namespace {

// Where a panel's 32 columns of the product go: y [n, stride], plus `residual` [n, stride] if any, which may be y.
// The product is rounded before that is added.
struct Target {
  Element* y;
  const Element* residual;
  Index stride;

  Target at(Index row, Index column = 0) const {
    const Index by = row * stride + column;
    return {y + by, residual ? residual + by : nullptr, stride};
  }
};

// The panel to be read next, asked for while there is time: without it, computing and reading take turns.
struct NextPanel {
  const char* at;
  Index step;  // for each pair of inputs

  SLIP_INLINE void operator()(Index pair) const {
    ask_for_later(at + pair * step);
    ask_for_later(at + pair * step + 64);
  }
};

// One panel of weights, what is added to its 32 outputs (null for none), and the panel behind it.
struct Columns {
  ElementPanel panel;
  const Element* bias;
  Index k;
  const char* next;
  Index pair_bytes;  // what a pair of inputs takes there

  NextPanel next_panel(Index part, Index parts) const {
    return {next + part * (k / 2) * pair_bytes / parts, pair_bytes / parts};
  }
};

// A row's sums of one panel, rounded, with the bias and the residual.
SLIP_INLINE void put_outputs(const float* sums, const Element* bias, Target to) {
  for (Index by = 0; by < PANEL; by += LANES) {
    Floats result = load_floats(sums + by);
    if (bias) result = result + load(bias + by);
    if (to.residual) result = rounded(result) + load(to.residual + by);
    store(to.y + by, result);
  }
}

// The same for the first `count` outputs of the last panel.
void put_some_outputs(const float* sums, const Element* bias, Index count, Target to) {
  if (count >= PANEL) return put_outputs(sums, bias, to);
  alignas(64) Element y[PANEL], biases[PANEL] = {}, residual[PANEL] = {};
  if (bias) memcpy(biases, bias, count * sizeof(Element));
  if (to.residual) memcpy(residual, to.residual, count * sizeof(Element));
  put_outputs(sums, bias ? biases : nullptr, {y, to.residual ? residual : nullptr, PANEL});
  memcpy(to.y, y, count * sizeof(Element));
}

#if SLIP_MATRIX_UNIT

// x[M, k] times the columns, by vectors. Apart from what the unit does, which a pass of one row waits for by a
// twentieth where one function does both.
template <int M>
__attribute__((noinline)) void few_rows(const Number* x, const Columns& w, Target to) {
  alignas(64) float sums[M][PANEL];
  const auto next = [at = w.panel.at, next_panel = w.next_panel(0, 1)](Index pair) SLIP_ALWAYS {
    next_panel(pair);
    repeat<2>(SLIP_EACH_OF(half) { ask_for(at + (2 * pair + SOON + half) * PANEL); });
  };
  vector_sums<M>(floats_of(x, M * w.k), w.k, w.k, w.panel, next, sums);
  for (Index i = 0; i < M; i++) put_outputs(sums[i], w.bias, to.at(i));
}

// x[n, k] times the columns.
inline void tiles(const Number* x, Index n, const Columns& w, Target to) {
  if (n == 1) return few_rows<1>(x, w, to);
  if (n == 2) return few_rows<2>(x, w, to);
  const Index parts = (n + MATRIX_ROWS - 1) / MATRIX_ROWS;
  alignas(64) float sums[MATRIX_ROWS][PANEL];
  for (Index part = 0; part < parts; part++) {
    const Index first = part * n / parts, count = (part + 1) * n / parts - first;
    matrix_sums(x + first * w.k, count, w.k, w.k, w.panel.at, w.next_panel(part, parts), sums);
    for (Index i = 0; i < count; i++) put_outputs(sums[i], w.bias, to.at(first + i));
  }
}

#else

// x[M, k] times as many halves of the columns as a tile has vectors, from `half` on. Within another function its sums
// would not all stay in registers.
template <int M>
__attribute__((noinline)) void tile(const Number* x, const Columns& w, int half, NextPanel next_panel, Target to) {
  Floats sums[M][tile_vectors<M>()];
  clear(sums);
  for (Index j = 0; j < w.k / 2; j++) {
    next_panel(j);
    multiply(sums, x + 2 * j, w.k, PairOf<ElementPanel>{w.panel, j, half});
  }
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<tile_vectors<M>()>(SLIP_EACH_OF(v) {
      const Index by = LANES * (half + v);
      Floats result = w.bias ? sums[i][v] + load(w.bias + by) : sums[i][v];
      const Target here = to.at(i, by);
      if (here.residual) result = rounded(result) + load(here.residual);
      store(here.y, result);
    });
  });
}

template <int M>
void tile_of(Index rows, const Number* x, const Columns& w, NextPanel next_panel, Target to) {
  if (rows == M)
    for (int half = 0; half < 2; half += tile_vectors<M>()) tile<M>(x, w, half, next_panel, to);
  else if constexpr (M > 1)
    tile_of<M - 1>(rows, x, w, next_panel, to);
}

// x[n, k] times the columns, in tiles of about the same size, each of which asks for its part of what comes next.
inline void tiles(const Number* x, Index n, const Columns& w, Target to) {
  const Index parts = (n + TILE - 1) / TILE, size = (n + parts - 1) / std::max<Index>(1, parts);
  for (Index part = 0; part * size < n; part++) {
    const Index first = part * size;
    tile_of<TILE>(std::min(size, n - first), x + first * w.k, w, w.next_panel(part, parts), to.at(first));
  }
}

#endif

inline bool takes_blocks(const Product& w) { return w.kind == BLOCKS || w.kind == MIXED; }

// Rows of x as products take them; null what the product's kind has no use for.
struct Rows {
  const Number* numbers;
  const RowBlock* blocks;
};

// The input x [n, k] of a product in the form that it takes; `shared` is memory for blocks. For every thread of a team.
class Input {
 public:
  Input(Worker& me, const Product& w, const Element* x, Index n, RowBlock* shared)
      : w_(w), x_(x), blocks_(me, x, takes_blocks(w) ? n : 0, w.k, shared) {}

  // The rows from `first` up to `stop`, for a piece of the work.
  Rows rows(Index first, Index stop) {
    return {w_.kind == BLOCKS ? nullptr : as_numbers(x_ + first * w_.k, (stop - first) * w_.k),
            takes_blocks(w_) ? blocks_.get() + first * row_blocks(w_.k) : nullptr};
  }

 private:
  const Product& w_;
  const Element* const x_;
  InputBlocks blocks_;
};

// How many blocks n rows are; 0 where the product takes none.
inline Index num_row_blocks(const Product& w, Index n) { return takes_blocks(w) ? n * row_blocks(w.k) : 0; }

inline Index num_panels(const Product& w) { return (w.out + PANEL - 1) / PANEL; }

// `n` rows times panel `p`. The one place that knows kinds of weights apart.
void times_panel(const Product& w, Index p, const Rows& rows, Index n, Target to) {
  const Index k = w.k, first = p * PANEL, pair_bytes = 2 * PANEL * sizeof(Element);
  const Element* bias = w.bias ? w.bias + first : nullptr;
  const Number* x = rows.numbers;
  const bool has_formats = w.kind != ELEMENTS;
  const FormatPanel format = has_formats ? ((const FormatPanel*)w.packed)[p] : FormatPanel{};
  if (format.format != PLAIN) {
    const Index count = std::min(PANEL, w.out - first);
    alignas(64) float sums[ROW_BLOCK][BLOCK_PANEL];
    if (format.format == F8_E4M3) times_float_panel((const uint8_t*)format.at, x, n, k, sums);
    else times_block_panel(format.format, (const uint8_t*)format.at, rows.blocks, n, k, sums);
    for (Index i = 0; i < n; i++) put_some_outputs(sums[i], bias, count, to.at(i));
    return;
  }
  const Element* panel = has_formats ? (const Element*)format.at : (const Element*)w.packed + first * k;
  tiles(x, n, {{panel}, bias, k, (const char*)(panel + PANEL * k), pair_bytes}, to);
}

// Calls `work(first row, stop row, first panel, stop panel)` until all rows and panels are done, shared out among
// the team.
template <class Work>
void for_panels(Worker& me, Index n, Index panels, Work work) {
  if (n <= ROW_BLOCK) {
    me.each(panels, [&](Index p) { work(0, n, p, p + 1); });
    return;
  }
  const Index row_blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, panel_blocks = (panels + PANEL_BLOCK - 1) / PANEL_BLOCK;
  me.each(row_blocks * panel_blocks, [&](Index block) {
    const Index b = block / panel_blocks, q = block % panel_blocks;
    work(b * ROW_BLOCK, std::min(n, (b + 1) * ROW_BLOCK), q * PANEL_BLOCK, std::min(panels, (q + 1) * PANEL_BLOCK));
  });
}

// y [n, out] = x [n, k] times the product's weights, plus its bias and `residual`, which may be y; null for none.
// `shared` has room for x in blocks. For every thread of a team, with a barrier behind it.
void product_in_team(Worker& me, const Product& w, const Element* x, Element* y, Index n, RowBlock* shared,
                     const Element* residual = nullptr) {
  const Target to{y, residual, w.out};
  Input input(me, w, x, n, shared);
  for_panels(me, n, num_panels(w), [&](Index first, Index stop, Index panel, Index last) {
    const Rows rows = input.rows(first, stop);
    for (; panel < last; panel++) times_panel(w, panel, rows, stop - first, to.at(first, panel * PANEL));
  });
}

}  // namespace

extern "C" {

// y [n, out] = x [n, k] times the product's weights, plus its bias.
void slip_linear(Team* team, const Product* w, const Element* x, Element* y, Index n) {
  RowBlock* shared = row_block_space<1>(num_row_blocks(*w, n));
  team->run(true, [&](Worker& me) { product_in_team(me, *w, x, y, n, shared); });
}

// y [n, k] = the weights of outputs `rows` [n] of a product of BLOCKS.
void slip_read_rows(Team* team, const Product* w, const Index* rows, Element* y, Index n) {
  const auto read = [&](Index i) {
    const FormatPanel panel = ((const FormatPanel*)w->packed)[rows[i] / PANEL];
    with_format(panel.format, [&](auto f) {
      read_output<decltype(f)>((const uint8_t*)panel.at, rows[i] % PANEL, y + i * w->k, w->k);
    });
  };
  team->run(n * w->k > SERIAL, [&](Worker& me) { me.each(n, read); });
}

}  // extern "C"
