// Rows of integers times weights of few bits.
//
// A row's sums of integers are exact, and what they are worth is added up block after block: a row's bits do not depend
// on how many rows there are, nor on how they share tiles.

#pragma once

#include "block_formats.h"

namespace {

// Where sums of registers are kept: as many rows and registers of outputs as fit beside what they are computed from.
constexpr int BLOCK_TILE = WIDTH == 8 ? 4 : 6;
constexpr int tile_parts(int rows) { return WIDTH == 8 ? (rows == 1 ? 4 : rows == 2 ? 2 : 1) : 2; }

constexpr Index AHEAD = 3072;  // bytes between what is computed and what is asked for

// Asks for what lies behind the 32 inputs `b` of a panel: it is read in several places at a time, which no CPU foresees.
// Behind the last panel nothing needs to be.
template <class L>
SLIP_INLINE void ask_behind(const uint8_t* panel, Index b) {
  constexpr Index BYTES = L::BYTES / (L::SPAN / BLOCK);  // of 32 inputs on average
  const uint8_t* at = panel + b * BYTES + AHEAD;
  for (Index by = 0; by < BYTES; by += 64) ask_for(at + by);
}

// What matters of a format once its codes are unpacked.
template <int PER, bool LEAST>
struct UnpackedForm {
  static constexpr int PER_SCALE = PER;
  static constexpr bool HAS_LEAST = LEAST, IS_ABOVE_ZERO = MULTIPLIES_UNSIGNED && !LEAST;
  static constexpr Index SPAN = 256;
};

// A span of a panel's inputs, a byte each, and floats: as large as stays in the nearest cache.
template <class F>
struct UnpackedSpan {
  static constexpr int BLOCKS_EACH = F::SPAN / BLOCK, SCALES = BLOCK / F::PER_SCALE;
  alignas(64) uint8_t codes[BLOCKS_EACH][8 * FOURS];
  alignas(64) float scales[BLOCKS_EACH][SCALES][BLOCK_PANEL], leasts[F::HAS_LEAST ? BLOCKS_EACH : 1][SCALES][BLOCK_PANEL];

  // Takes over block `b` of those here.
  template <class L>
  SLIP_INLINE void put(const PanelBlock<L, 1>& from, int within, int b, int r) {
    repeat<8>(SLIP_EACH_OF(j) { store_bytes(codes[b] + FOURS * j + 4 * WIDTH * r, from.codes(within, j, 0)); });
    repeat<SCALES>(SLIP_EACH_OF(half) {
      store_native(scales[b][half] + WIDTH * r, from.scale(within, half, 0));
      if constexpr (F::HAS_LEAST) store_native(leasts[b][half] + WIDTH * r, from.least(within, half, 0));
    });
  }

  // `count` blocks of 32 inputs of a panel, whose first block is at `panel`.
  template <class L>
  void fill(const uint8_t* panel, Index count) {
    constexpr Index EACH = L::SPAN / BLOCK;
    for (int r = 0; r < PANEL_PARTS; r++)
      for (Index span = 0; span < count / EACH; span++) {
        const PanelBlock<L, 1> from(panel + span * L::BYTES, r);
        for (int within = 0; within < EACH; within++) put<L>(from, within, (int)(span * EACH) + within, r);
      }
  }
};

// The same seen from the outputs of some registers.
template <class F>
struct UnpackedView {
  const UnpackedSpan<F>* at;
  int first;

  SLIP_INLINE NativeBytes codes(int within, unsigned j, int r) const {
    return load_bytes(at->codes[within] + FOURS * j + 4 * WIDTH * (first + r));
  }
  SLIP_INLINE Native scale(int within, int half, int r) const {
    return load_native(at->scales[within][half] + WIDTH * (first + r));
  }
  SLIP_INLINE Native least(int within, int half, int r) const {
    return load_native(at->leasts[within][half] + WIDTH * (first + r));
  }
};

// sums + a * b in each four bytes, of weights `a` of a form and inputs `b`.
template <class F>
SLIP_INLINE NativeInts dot_of(NativeInts sums, NativeBytes a, NativeInts b) {
  if constexpr (F::HAS_LEAST || F::IS_ABOVE_ZERO) return dot(sums, a, b);
  return dot_signed(sums, a, b);
}

// Adds to total[i][r] what the rows' 32 inputs are worth with those `within` of a panel's block.
template <int M, int R, class F, class Block>
SLIP_INLINE void add_block(Native (&total)[M][R], const RowBlock* rows, Index stride, const Block& block, int within) {
  constexpr int SCALES = BLOCK / F::PER_SCALE, FOURS_EACH = 8 / SCALES;
  repeat<SCALES>(SLIP_EACH_OF(half) {
    constexpr int SUM = SCALES == 1 ? 2 : half;  // which of a row's sums
    NativeInts dots[M][R];
    repeat<M>(SLIP_EACH_OF(i) {
      const NativeInts start = F::IS_ABOVE_ZERO ? broadcast_int(rows[i * stride].zeros[SUM]) : NativeInts{};
      repeat<R>(SLIP_EACH_OF(r) { dots[i][r] = start; });
    });
    repeat<FOURS_EACH>(SLIP_EACH_OF(four) {
      constexpr int J = half * FOURS_EACH + four;
      NativeBytes codes[R];
      repeat<R>(SLIP_EACH_OF(r) { codes[r] = block.codes(within, J, r); });
      repeat<M>(SLIP_EACH_OF(i) {
        const NativeInts inputs = load_four(rows[i * stride].codes + 4 * J);
        repeat<R>(SLIP_EACH_OF(r) {
          dots[i][r] = dot_of<F>(dots[i][r], codes[r], inputs);
        });
      });
    });
    repeat<R>(SLIP_EACH_OF(r) {
      const Native scale = block.scale(within, half, r);
      repeat<M>(SLIP_EACH_OF(i) {
        const Native worth = __builtin_convertvector(dots[i][r], Native) * broadcast_part(rows[i * stride].scale);
        total[i][r] = fma_part(worth, scale, total[i][r]);
      });
      if constexpr (F::HAS_LEAST) {
        const Native least = block.least(within, half, r);
        repeat<M>(SLIP_EACH_OF(i) {
          total[i][r] = fma_part(least, broadcast_part(rows[i * stride].sums[SUM]), total[i][r]);
        });
      }
    });
  });
}

// Adds to sums [M][32] R registers of the panel's outputs: `work(total)` does it.
template <int M, int R, class Work>
SLIP_INLINE void with_totals(float (*sums)[BLOCK_PANEL], int first, Work work) {
  Native total[M][R];
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<R>(SLIP_EACH_OF(r) { total[i][r] = load_native(sums[i] + WIDTH * (first + r)); });
  });
  work(total);
  repeat<M>(SLIP_EACH_OF(i) {
    repeat<R>(SLIP_EACH_OF(r) { store_native(sums[i] + WIDTH * (first + r), total[i][r]); });
  });
}

// sums [M][32] += rows [M, k] times a panel, unpacked in registers.
template <class L, int M>
__attribute__((noinline)) void packed_tile(const RowBlock* rows, Index k, const uint8_t* panel, float (*sums)[BLOCK_PANEL]) {
  constexpr int R = tile_parts(M), EACH = L::SPAN / BLOCK;
  for (int first = 0; first < PANEL_PARTS; first += R)
    with_totals<M, R>(sums, first, [&](auto& total) SLIP_ALWAYS {
      for (Index span = 0; span < k / L::SPAN; span++) {
        const PanelBlock<L, R> block(panel + span * L::BYTES, first);
        for (int within = 0; within < EACH; within++) {
          if (first == 0) ask_behind<L>(panel, span * EACH + within);
          add_block<M, R, L>(total, rows + span * EACH + within, row_blocks(k), block, within);
        }
      }
    });
}

// sums [count][32] += `num_blocks` blocks of `count` rows, at most M, times a span.
template <class F, int M>
void unpacked_tile(Index count, const RowBlock* rows, Index stride, const UnpackedSpan<F>& span, int num_blocks,
                   const uint8_t* next, Index step, float (*sums)[BLOCK_PANEL]) {
  if (count == M) {
    constexpr int R = tile_parts(M);
    for (int first = 0; first < PANEL_PARTS; first += R)
      with_totals<M, R>(sums, first, [&](auto& total) SLIP_ALWAYS {
        const UnpackedView<F> block{&span, first};
        for (int within = 0; within < num_blocks; within++) {
          for (Index by = 0; by < step; by += 64, next += 64) ask_for_later(next);
          add_block<M, R, F>(total, rows + within, stride, block, within);
        }
      });
  } else if constexpr (M > 1) {
    unpacked_tile<F, M - 1>(count, rows, stride, span, num_blocks, next, step, sums);
  }
}

// sums [n][32] += rows [n, k] times a panel; each span of it is unpacked once for all rows.
template <class L>
__attribute__((noinline)) void times_unpacked(const uint8_t* panel, const RowBlock* rows, Index n, Index k, float (*sums)[BLOCK_PANEL]) {
  using F = UnpackedForm<L::PER_SCALE, L::HAS_LEAST>;
  UnpackedSpan<F> span;
  const Index stride = row_blocks(k), parts = (n + BLOCK_TILE - 1) / BLOCK_TILE;
  for (Index b = 0; b < k / BLOCK; b += F::SPAN / BLOCK) {
    const Index num_blocks = std::min(k / BLOCK - b, F::SPAN / BLOCK);
    const uint8_t* at = panel + b * BLOCK / L::SPAN * L::BYTES;
    span.template fill<L>(at, num_blocks);
    const uint8_t* next = at + num_blocks * BLOCK / L::SPAN * L::BYTES;
    // Each part asks for its share of what comes next: all at once would be more than memory takes note of.
    const Index loops = num_blocks * (PANEL_PARTS / tile_parts(BLOCK_TILE));
    const Index step = ((next - at) / (loops * parts) + 63) / 64 * 64;
    for (Index part = 0; part < parts; part++, next += loops * step) {
      const Index first = part * n / parts, stop = (part + 1) * n / parts;
      unpacked_tile<F, BLOCK_TILE>(stop - first, rows + first * stride + b, stride, span, (int)num_blocks, next, step,
                                   sums + first);
    }
  }
}

// sums [32] += a row's peak times a panel, which has been read just now.
template <class L>
SLIP_INLINE void add_peak(const uint8_t* panel, const RowBlock& peak, float* sums) {
  constexpr unsigned EACH = L::SPAN / BLOCK;
  const unsigned b = peak.four / 8, j = peak.four % 8, within = b % EACH, half = 4 * j / L::PER_SCALE;
  const PanelBlock<L, PANEL_PARTS> block(panel + b / EACH * L::BYTES, 0);
  const NativeInts start = L::IS_ABOVE_ZERO ? broadcast_int(peak.zeros[2]) : NativeInts{};
  const NativeInts inputs = load_four(peak.codes + 4 * j);
  repeat<PANEL_PARTS>(SLIP_EACH_OF(r) {
    const NativeInts dots = dot_of<L>(start, block.codes(within, j, r), inputs);
    const Native worth = __builtin_convertvector(dots, Native) * broadcast_part(peak.scale);
    Native total = fma_part(worth, block.scale(within, half, r), load_native(sums + WIDTH * r));
    if constexpr (L::HAS_LEAST) total = fma_part(block.least(within, half, r), broadcast_part(peak.sums[2]), total);
    store_native(sums + WIDTH * r, total);
  });
}

// sums [n][32] = rows [n, k] times a panel of a format.
__attribute__((noinline)) void times_block_panel(Index format, const uint8_t* panel, const RowBlock* rows, Index n, Index k,
                              float (*sums)[BLOCK_PANEL]) {
  memset(sums, 0, n * sizeof(*sums));
  with_format(format, [&](auto f) {
    using L = decltype(f);
    if (n == 1)
      packed_tile<L, 1>(rows, k, panel, sums);
    else if (n == 2)
      packed_tile<L, 2>(rows, k, panel, sums);
    else
      times_unpacked<L>(panel, rows, n, k, sums);
    for (Index i = 0; i < n; i++) add_peak<L>(panel, rows[i * row_blocks(k) + k / BLOCK], sums[i]);
  });
}

}  // namespace
