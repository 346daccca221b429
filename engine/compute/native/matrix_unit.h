// A CPU's matrix unit (AMX), which multiplies 16 rows by 16 columns of 32 inputs at a time.
//
// What it adds to a sum, and in which order, does not depend on other rows, nor on how many there are: in each step of
// 32 inputs the products of even and of odd ones apart, then both together.

#pragma once

#include "sums.h"

#if defined(__AMX_BF16__) && SLIP_ELEMENT == SLIP_BFLOAT16
#define SLIP_MATRIX_UNIT 1
#else
#define SLIP_MATRIX_UNIT 0
#endif

#if SLIP_MATRIX_UNIT

namespace {

constexpr Index UNIT_ROWS = 16;  // of one tile register
constexpr Index STEP = 32;       // inputs of one instruction

// The matrix unit, set up for as long as this lives: so many rows in each of its eight tile registers, none in those
// that are not used.
class MatrixUnit {
 public:
  explicit MatrixUnit(const Index (&rows)[8]) {
    struct alignas(64) {  // as the CPU reads it
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof(shapes) == 64);
    for (int tile = 0; tile < 8; tile++) {
      shapes.rows[tile] = (uint8_t)rows[tile];
      shapes.row_bytes[tile] = rows[tile] ? 64 : 0;
    }
    _tile_loadconfig(&shapes);
  }

  ~MatrixUnit() { _tile_release(); }  // so that a thread that gives way has less to keep

  MatrixUnit(const MatrixUnit&) = delete;
};

// Tiles are read and written behind the compiler's back: what it has yet to store, or thinks it knows.
SLIP_INLINE void fence_compiler() { asm volatile("" ::: "memory"); }

}  // namespace

#endif
