// Positions of paged keys and values, brought into the order in which they are multiplied.

#pragma once

#include "tiles.h"

namespace {

// 16 rows of 16 pairs become 16 pairs of each row: what lies at [row][pair] gets to [pair][row].
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      t[i + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0x88);
      t[i + 8 * j + 4] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Row `place` of d elements, zeros for -1: what nobody sees may hold anything.
inline __m512i row_of(const bf16* rows, Index place) {
  return place < 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(rows + place);
}

// Asks for the rows of a block that is needed next, a few at a time between other work: so memory is never waited
// for, nor ever idle.
class Upcoming {
 public:
  Upcoming(const bf16* keys, const bf16* values, Index d) : keys_(keys), values_(values), d_(d) {}

  // Turns to the block at `places`, which must stay until the next.
  void turn(const Index* places, Index count) { places_ = places, count_ = count, at_ = 0; }

  void some(Index rows) {
    for (Index stop = std::min(at_ + rows, 2 * count_); at_ < stop; at_++) {
      const Index place = places_[at_ < count_ ? at_ : at_ - count_];
      const bf16* row = (at_ < count_ ? keys_ : values_) + place;
      for (Index j = 0; place >= 0 && j < d_; j += 32) _mm_prefetch((const char*)(row + j), _MM_HINT_T0);
    }
  }

 private:
  const bf16 *keys_, *values_;
  Index d_, count_ = 0, at_ = 0;
  const Index* places_ = nullptr;
};

// `count` rows of d, a multiple of 16, at `places`, as [d / 2][KEYS][2].
void pack_keys(const bf16* rows, const Index* places, Index count, Index d, bf16* packed, Upcoming& upcoming) {
  for (Index p = 0; p < count; p += 16)
    for (Index j = 0; j < d; j += 32) {
      __m512i r[16];
      upcoming.some(6);
      for (int i = 0; i < 16; i++) r[i] = row_of(rows + j, places[p + i]);
      transpose(r);
      for (int i = 0; i < 16; i++) _mm512_store_si512(packed + ((j / 2 + i) * KEYS + p) * 2, r[i]);
    }
}

// `count` rows of d, an even number, at `places`, as [count / 2][d][2].
void pack_values(const bf16* rows, const Index* places, Index count, Index d, bf16* packed, Upcoming& upcoming) {
  alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (Index p = 0; p < count; p += 2)
    for (Index j = 0; j < d; j += 32) {
      upcoming.some(1);
      const __m512i even = row_of(rows + j, places[p]), odd = row_of(rows + j, places[p + 1]);
      _mm512_store_si512(packed + (p * d) + 2 * j, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(packed + (p * d) + 2 * j + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
}

}  // namespace
