// The formats of GGUF files: how each stores an output's weights, and how we lay them out.
//
// Read as ggml writes them (ggml-quants.c); little-endian. A format is known by ggml's number for it.

#pragma once

#include "block_layout.h"

namespace {

enum Format : Index {
  PLAIN = 0,  // elements, as slip_pack leaves them
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
  Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
  F8_E4M3 = 1000,  // of safetensors files; see float_panels.h
};

inline uint16_t half_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Sixteen bytes of two codes each: the low ones come first.
inline void put_nibbles(const uint8_t* from, uint8_t* codes, Index count = 16) {
  for (Index i = 0; i < count; i++) {
    codes[i] = from[i] & 15;
    codes[count + i] = from[i] >> 4;
  }
}

// Adds a fifth bit to 32 codes.
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (Index i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits[i / 8] >> i % 8 & 1) << 4);
}

// Of Q4_K and Q5_K: eight scales and leasts of six bits in twelve bytes.
inline void put_six_bits(const uint8_t* from, StoredSpan& to) {
  for (int i = 0; i < 8; i++) {
    const bool is_low = i < 4;
    to.scales[i] = (int8_t)(is_low ? from[i] & 63 : (from[i + 4] & 15) | from[i - 4] >> 6 << 4);
    to.leasts[i] = (int8_t)(is_low ? from[i + 4] & 63 : from[i + 4] >> 4 | from[i] >> 6 << 4);
  }
}

struct OfQ4_0 : Layout<4, 0, Value::CENTRED, Scale::HALVES> {
  static constexpr Index STORED = 18;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    put_nibbles(p + 2, to.codes);
  }
};

struct OfQ4_1 : Layout<4, 0, Value::FROM_LEAST, Scale::HALVES> {
  static constexpr Index STORED = 20;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    to.least = half_at(p + 2);
    put_nibbles(p + 4, to.codes);
  }
};

struct OfQ5_0 : Layout<4, 1, Value::CENTRED, Scale::HALVES> {
  static constexpr Index STORED = 22;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    put_nibbles(p + 6, to.codes);
    add_fifth_bits(p + 2, to.codes);
  }
};

struct OfQ5_1 : Layout<4, 1, Value::FROM_LEAST, Scale::HALVES> {
  static constexpr Index STORED = 24;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    to.least = half_at(p + 2);
    put_nibbles(p + 8, to.codes);
    add_fifth_bits(p + 4, to.codes);
  }
};

struct OfQ8_0 : Layout<8, 0, Value::CENTRED, Scale::HALVES> {
  static constexpr Index STORED = 34;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    for (Index i = 0; i < 32; i++) to.codes[i] = p[2 + i] ^ 0x80;
  }
};

struct OfQ2_K : Layout<2, 0, Value::FROM_LEAST, Scale::NIBBLES_OF_16> {
  static constexpr Index STORED = 84;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p + 80);
    to.least = half_at(p + 82);
    for (Index i = 0; i < 16; i++) {
      to.scales[i] = p[i] & 15;
      to.leasts[i] = (int8_t)(p[i] >> 4);
    }
    for (Index i = 0; i < 256; i++) to.codes[i] = p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
  }
};

struct OfQ3_K : Layout<2, 1, Value::CENTRED, Scale::BYTES_OF_16> {
  static constexpr Index STORED = 110;
  static void read(const uint8_t* p, StoredSpan& to) {
    const uint8_t* scales = p + 96;
    to.scale = half_at(p + 108);
    for (Index i = 0; i < 16; i++) {
      const int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
      to.scales[i] = (int8_t)((low | high << 4) - 32);
    }
    for (Index i = 0; i < 256; i++) {
      const int low = p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3, high = p[i % 32] >> i / 32 & 1;
      to.codes[i] = (uint8_t)(low | high << 2);
    }
  }
};

struct OfQ4_K : Layout<4, 0, Value::FROM_LEAST, Scale::BYTES_OF_32> {
  static constexpr Index STORED = 144;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    to.least = half_at(p + 2);
    put_six_bits(p + 4, to);
    for (Index i = 0; i < 4; i++) put_nibbles(p + 16 + 32 * i, to.codes + 64 * i, 32);
  }
};

struct OfQ5_K : Layout<4, 1, Value::FROM_LEAST, Scale::BYTES_OF_32> {
  static constexpr Index STORED = 176;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    to.least = half_at(p + 2);
    put_six_bits(p + 4, to);
    for (Index i = 0; i < 4; i++) put_nibbles(p + 48 + 32 * i, to.codes + 64 * i, 32);
    for (Index i = 0; i < 256; i++) to.codes[i] |= (uint8_t)((p[16 + i % 32] >> i / 32 & 1) << 4);
  }
};

struct OfQ6_K : Layout<4, 2, Value::CENTRED, Scale::BYTES_OF_16> {
  static constexpr Index STORED = 210;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p + 208);
    memcpy(to.scales, p + 192, 16);
    for (Index i = 0; i < 256; i++) {
      const Index half = i / 128, within = i % 128;
      const int low = p[64 * half + within % 64] >> within / 64 * 4 & 15;
      const int high = p[128 + 32 * half + within % 32] >> within / 32 * 2 & 3;
      to.codes[i] = (uint8_t)(low | high << 4);
    }
  }
};

struct OfIQ4_NL : Layout<4, 0, Value::LISTED, Scale::HALVES> {
  static constexpr Index STORED = 18;
  static void read(const uint8_t* p, StoredSpan& to) { OfQ4_0::read(p, to); }
};

struct OfIQ4_XS : Layout<4, 0, Value::LISTED, Scale::BYTES_OF_32> {
  static constexpr Index STORED = 136;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = half_at(p);
    for (Index i = 0; i < 8; i++) {
      const int low = p[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(p + 2) >> 2 * i & 3;
      to.scales[i] = (int8_t)((low | high << 4) - 32);
      put_nibbles(p + 8 + 16 * i, to.codes + 32 * i);
    }
  }
};

struct OfMXFP4 : Layout<4, 0, Value::FLOATS, Scale::EXPONENTS> {
  static constexpr Index STORED = 17;
  static void read(const uint8_t* p, StoredSpan& to) {
    to.scale = p[0];
    put_nibbles(p + 1, to.codes);
  }
};

// Calls `work` with an object of the format's type; false for an unknown format, which is every one but Q8_0 in a library
// that is compiled without SLIP_FORMATS: most models have none, and all that is made for each takes most of the time.
// Drafters are kept in Q8_0 in any case.
template <class Work>
inline bool with_format(Index format, Work work) {
#if defined(SLIP_FORMATS)
  switch (format) {
    case Q4_0: work(OfQ4_0()); return true;
    case Q4_1: work(OfQ4_1()); return true;
    case Q5_0: work(OfQ5_0()); return true;
    case Q5_1: work(OfQ5_1()); return true;
    case Q8_0: work(OfQ8_0()); return true;
    case Q2_K: work(OfQ2_K()); return true;
    case Q3_K: work(OfQ3_K()); return true;
    case Q4_K: work(OfQ4_K()); return true;
    case Q5_K: work(OfQ5_K()); return true;
    case Q6_K: work(OfQ6_K()); return true;
    case IQ4_NL: work(OfIQ4_NL()); return true;
    case IQ4_XS: work(OfIQ4_XS()); return true;
    case MXFP4: work(OfMXFP4()); return true;
    default: return false;
  }
#else
  if (format != Q8_0) return false;
  work(OfQ8_0());
  return true;
#endif
}

}  // namespace

extern "C" {

// Rows [out, k] as a GGUF file stores them, as panels; output i is the stored row order[i] (null: i). Outputs that are
// missing in the last panel are zero.
void slip_pack_blocks(Team* team, Index format, const uint8_t* stored, const Index* order, uint8_t* panels, Index out,
                      Index k) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    const Index row_bytes = k / F::SPAN * F::STORED, panel_bytes = F::panel_bytes(k);
    const auto pack = [&](Index p) {
      uint8_t* panel = panels + p * panel_bytes;
      memset(panel, 0, panel_bytes);
      for (Index o = 0; o < BLOCK_PANEL && p * BLOCK_PANEL + o < out; o++) {
        const Index output = p * BLOCK_PANEL + o;
        const uint8_t* row = stored + (order ? order[output] : output) * row_bytes;
        for (Index b = 0; b < k / F::SPAN; b++) {
          StoredSpan span{};
          F::read(row + b * F::STORED, span);
          put_span<F>(span, panel + b * F::BYTES, o);
        }
      }
    };
    team->run(true, [&](Worker& me) { me.each((out + BLOCK_PANEL - 1) / BLOCK_PANEL, pack); });
  });
}

}  // extern "C"
