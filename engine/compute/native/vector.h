// Sixteen numbers at a time, on any CPU: one vector of AVX-512, two of AVX2, four of NEON.
//
// The library is compiled once for each set of instructions and each type of a model's numbers; what the compiler says
// it may use decides here. Beside numbers.h, sums.h and the matrix unit's headers nothing names an instruction.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using Index = int64_t;

namespace {

constexpr Index LANES = 16;

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // lanes of one register
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int WIDTH = 8;
#elif defined(__aarch64__)
constexpr int WIDTH = 4;
#else
#error "no vector instructions to compute with"
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Native __attribute__((vector_size(4 * WIDTH)));
typedef int32_t NativeInts __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t NativeBits __attribute__((vector_size(4 * WIDTH)));

#define SLIP_INLINE inline __attribute__((always_inline))
#define SLIP_PART(at, ...)   \
  {                          \
    constexpr int i = at;    \
    __VA_ARGS__;             \
  }

// A statement for each register `i`. Written out, as `repeat` below does it: what loops index stays in memory.
#if defined(__AVX512F__)
#define SLIP_PARTS(...) SLIP_PART(0, __VA_ARGS__)
#elif defined(__AVX2__)
#define SLIP_PARTS(...) SLIP_PART(0, __VA_ARGS__) SLIP_PART(1, __VA_ARGS__)
#else
#define SLIP_PARTS(...) \
  SLIP_PART(0, __VA_ARGS__) SLIP_PART(1, __VA_ARGS__) SLIP_PART(2, __VA_ARGS__) SLIP_PART(3, __VA_ARGS__)
#endif

#define SLIP_ALWAYS __attribute__((always_inline))
#define SLIP_EACH_OF(name) [&](auto name) __attribute__((always_inline))

template <class Work, int... I>
SLIP_INLINE void repeat_over(Work work, std::integer_sequence<int, I...>) {
  (work(std::integral_constant<int, I>()), ...);
}

// Calls `work(0)` to `work(N - 1)`, each with its number as a constant.
template <int N, class Work>
SLIP_INLINE void repeat(Work work) {
  repeat_over(work, std::make_integer_sequence<int, N>());
}

// Sixteen floats.
struct Floats {
  Native part[PARTS];
};

// Sixteen integers, without a sign where that matters.
struct Words {
  NativeBits part[PARTS];
};

SLIP_INLINE Floats broadcast(float number) {
  Floats v;
  SLIP_PARTS(v.part[i] = number - Native{});
  return v;
}

SLIP_INLINE Words broadcast(uint32_t number) {
  Words v;
  SLIP_PARTS(v.part[i] = number - NativeBits{});
  return v;
}

SLIP_INLINE Floats zeros() { return Floats{}; }

#define SLIP_EACH(Type, op)                                      \
  SLIP_INLINE Type operator op(Type a, Type b) {                 \
    Type v;                                                      \
    SLIP_PARTS(v.part[i] = a.part[i] op b.part[i]);               \
    return v;                                                    \
  }
SLIP_EACH(Floats, +)
SLIP_EACH(Floats, -)
SLIP_EACH(Floats, *)
SLIP_EACH(Floats, /)
SLIP_EACH(Words, +)
SLIP_EACH(Words, *)
SLIP_EACH(Words, ^)
SLIP_EACH(Words, &)
SLIP_EACH(Words, |)
#undef SLIP_EACH

SLIP_INLINE Words operator>>(Words a, int by) {
  Words v;
  SLIP_PARTS(v.part[i] = a.part[i] >> by);
  return v;
}

SLIP_INLINE Words operator<<(Words a, int by) {
  Words v;
  SLIP_PARTS(v.part[i] = a.part[i] << by);
  return v;
}

// a * b + c, rounded once.
SLIP_INLINE Floats fma(Floats a, Floats b, Floats c) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]));
#else
  SLIP_PARTS(v.part[i] = (Native)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]));
#endif
  return v;
}

// The greater of each two, and the second where either is NaN.
SLIP_INLINE Floats maximum(Floats a, Floats b) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]));
#else
  SLIP_PARTS(v.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i]);
#endif
  return v;
}

// The lesser of each two, and the second where either is NaN.
SLIP_INLINE Floats minimum(Floats a, Floats b) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]));
#else
  SLIP_PARTS(v.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i]);
#endif
  return v;
}

SLIP_INLINE Floats absolute(Floats a) {
  Floats v;
  SLIP_PARTS(v.part[i] = (Native)((NativeBits)a.part[i] & 0x7FFFFFFFu));
  return v;
}

SLIP_INLINE Floats nearest_whole(Floats a) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_roundscale_ps((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_round_ps((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  SLIP_PARTS(v.part[i] = (Native)vrndnq_f32((float32x4_t)a.part[i]));
#endif
  return v;
}

SLIP_INLINE Floats whole_below(Floats a) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_roundscale_ps((__m512)a.part[0], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_floor_ps((__m256)a.part[i]));
#else
  SLIP_PARTS(v.part[i] = (Native)vrndmq_f32((float32x4_t)a.part[i]));
#endif
  return v;
}

// In two steps, each of an exponent that a float has.
SLIP_INLINE Native scaled_part(Native v, NativeInts n) {
  const NativeInts half = n >> 1;
  return v * (Native)((half + 127) << 23) * (Native)((n - half + 127) << 23);
}

// v * 2^n for a whole n from -200 to 0, and v of 1 to 2. NaN stays NaN.
SLIP_INLINE Floats scaled(Floats v, Floats n) {
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_scalef_ps((__m512)v.part[0], (__m512)n.part[0]);
#else
  SLIP_PARTS(v.part[i] = scaled_part(v.part[i], __builtin_convertvector(n.part[i], NativeInts)));
#endif
  return v;
}

// `a` where `by` is negative, else `b`.
SLIP_INLINE Floats where_negative(Floats by, Floats a, Floats b) {
  Floats v;
  SLIP_PARTS(v.part[i] = by.part[i] < 0 ? a.part[i] : b.part[i]);
  return v;
}

SLIP_INLINE NativeInts lane_numbers(int part) {
  NativeInts lanes;
  for (int j = 0; j < WIDTH; j++) lanes[j] = WIDTH * part + j;
  return lanes;
}

// `a` in the lanes whose bit is set, else `b`.
SLIP_INLINE Floats where_bit(uint32_t bits, Floats a, Floats b) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_mask_blend_ps((__mmask16)bits, (__m512)b.part[0], (__m512)a.part[0]);
#else
  SLIP_PARTS(v.part[i] = (((int32_t)bits - NativeInts{}) >> lane_numbers(i) & 1) != 0 ? a.part[i] : b.part[i]);
#endif
  return v;
}

// A bit for each lane in which `marks` [PARTS] is all ones.
SLIP_INLINE uint32_t bits_of(const NativeInts* marks) {
  uint32_t bits = 0;
#if defined(__AVX512F__)
  bits = _mm512_movepi32_mask((__m512i)marks[0]);
#elif defined(__AVX2__)
  SLIP_PARTS(bits |= (uint32_t)_mm256_movemask_ps((__m256)marks[i]) << (WIDTH * i));
#else
  SLIP_PARTS(bits |= (uint32_t)vaddvq_s32((int32x4_t)(marks[i] & (NativeInts{1, 2, 4, 8} << (WIDTH * i)))));
#endif
  return bits;
}

#define SLIP_COMPARE(name, test)                                     \
  SLIP_INLINE uint32_t name(Floats a, Floats b) {                    \
    NativeInts marks[PARTS];                                         \
    SLIP_PARTS(marks[i] = a.part[i] test b.part[i]);                  \
    return bits_of(marks);                                           \
  }
SLIP_COMPARE(at_most, <=)
SLIP_COMPARE(equal, ==)
SLIP_COMPARE(unequal, !=)
#undef SLIP_COMPARE

SLIP_INLINE uint32_t are_nan(Floats a) { return unequal(a, a); }

SLIP_INLINE Floats to_floats(Words a) {
  Floats v;
  SLIP_PARTS(v.part[i] = __builtin_convertvector(a.part[i], Native));
  return v;
}

SLIP_INLINE Words bits_of(Floats a) {
  Words v;
  SLIP_PARTS(v.part[i] = (NativeBits)a.part[i]);
  return v;
}

SLIP_INLINE Floats as_floats(Words a) {
  Floats v;
  SLIP_PARTS(v.part[i] = (Native)a.part[i]);
  return v;
}

// 0 to 15.
SLIP_INLINE Words lanes() {
  Words v;
  SLIP_PARTS(v.part[i] = (NativeBits)lane_numbers(i));
  return v;
}

// The lanes brought together by `join`: those eight apart, then four, two and one.
template <class Join>
SLIP_INLINE float joined(Floats a, Join join) {
#if defined(__AVX512F__)
  const __m512 all = (__m512)a.part[0];
  const __m256 eight = join(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#elif defined(__AVX2__)
  const __m256 eight = join((__m256)a.part[0], (__m256)a.part[1]);
#else
  const float32x4_t eight[2] = {join((float32x4_t)a.part[0], (float32x4_t)a.part[2]),
                                join((float32x4_t)a.part[1], (float32x4_t)a.part[3])};
#endif
#if defined(__x86_64__)
  typedef float Four __attribute__((vector_size(16)));
  const Four four = (Four)join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
  typedef float Four __attribute__((vector_size(16)));
  const Four four = (Four)join(eight[0], eight[1]);
#endif
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

SLIP_INLINE float sum(Floats a) {
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}

SLIP_INLINE float greatest(Floats a) {
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}

SLIP_INLINE float least(Floats a) {
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x < y ? x : y; });
}

typedef Native NativeAnywhere __attribute__((aligned(2), may_alias));

SLIP_INLINE Native load_native(const void* p) { return *(const NativeAnywhere*)p; }
SLIP_INLINE void store_native(void* p, Native v) { *(NativeAnywhere*)p = v; }

SLIP_INLINE Floats load_floats(const float* p) {
  Floats v;
  SLIP_PARTS(v.part[i] = load_native(p + WIDTH * i));
  return v;
}

SLIP_INLINE void store_floats(float* p, Floats v) { SLIP_PARTS(store_native(p + WIDTH * i, v.part[i])); }

// The first `count` of sixteen, and `rest` in the others.
SLIP_INLINE Floats load_some(const float* p, Index count, float rest) {
  if (count >= LANES) return load_floats(p);
  float v[LANES];
  for (Index i = 0; i < LANES; i++) v[i] = i < count ? p[i] : rest;
  return load_floats(v);
}

// Sixteen small integers.
SLIP_INLINE Floats load_int8(const int8_t* p) {
  Floats v;
#if defined(__AVX512F__)
  v.part[0] = (Native)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  SLIP_PARTS(v.part[i] = (Native)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + WIDTH * i)))));
#else
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  v.part[0] = (Native)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
  v.part[1] = (Native)vcvtq_f32_s32(vmovl_high_s16(low));
  v.part[2] = (Native)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
  v.part[3] = (Native)vcvtq_f32_s32(vmovl_high_s16(high));
#endif
  return v;
}

// One register of bytes, of small integers with or without a sign.
typedef uint8_t NativeBytes __attribute__((vector_size(4 * WIDTH)));
typedef NativeBytes NativeBytesAnywhere __attribute__((aligned(1), may_alias));

SLIP_INLINE NativeBytes load_bytes(const void* p) { return *(const NativeBytesAnywhere*)p; }
SLIP_INLINE void store_bytes(void* p, NativeBytes v) { *(NativeBytesAnywhere*)p = v; }

SLIP_INLINE NativeInts broadcast_int(int32_t number) { return number - NativeInts{}; }
SLIP_INLINE Native broadcast_part(float number) { return number - Native{}; }

SLIP_INLINE NativeInts load_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return broadcast_int(four);
}

// One register of half-precision floats.
SLIP_INLINE Native load_half(const void* p) {
#if defined(__AVX512F__)
  return (Native)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return (Native)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#endif
}

// One register of powers of two by their exponents, bytes that are 127 above them; 0 for the least.
SLIP_INLINE Native load_powers(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Native)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
#elif defined(__AVX2__)
  return (Native)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
#else
  return (Native)(NativeBits{p[0], p[1], p[2], p[3]} << 23);
#endif
}

// The half-precision number nearest to one, and what such a number is.
SLIP_INLINE uint16_t half_of(float number) {
#if defined(__x86_64__)
  return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(number), _MM_FROUND_TO_NEAREST_INT), 0);
#else
  return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(number))), 0);
#endif
}

SLIP_INLINE float half_value(uint16_t half) {
  const uint16_t row[WIDTH] = {half};
  return load_half(row)[0];
}

// The least half-precision number that is not below one from 0 on; the largest there is for those beyond.
SLIP_INLINE uint16_t half_not_below(float number) {
  const uint16_t near = half_of(number);
  return std::min<uint16_t>(half_value(near) < number ? near + 1 : near, 0x7BFF);
}

// One register of integers of 8 bits as floats.
SLIP_INLINE Native load_int8_part(const int8_t* p) {
#if defined(__AVX512F__)
  return (Native)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Native)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  const NativeInts four = {p[0], p[1], p[2], p[3]};
  return __builtin_convertvector(four, Native);
#endif
}

// fma of one register.
SLIP_INLINE Native fma_part(Native a, Native b, Native c) {
#if defined(__AVX512F__)
  return (Native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Native)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

// What a table of 16 bytes has at each index of 0 to 15.
SLIP_INLINE NativeBytes look_up(const uint8_t* table, NativeBytes at) {
#if defined(__AVX512F__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (NativeBytes)_mm512_shuffle_epi8(all, (__m512i)at);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (NativeBytes)_mm256_shuffle_epi8(all, (__m256i)at);
#else
  return (NativeBytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)at);
#endif
}

// Whether bytes of all eight bits without a sign are multiplied by one instruction; those with a sign are elsewhere.
#if defined(__AVX512VNNI__)
constexpr bool MULTIPLIES_UNSIGNED = true;
#else
constexpr bool MULTIPLIES_UNSIGNED = false;
#endif

// sums + a * b in each four bytes: `a` without a sign, below 128 unless MULTIPLIES_UNSIGNED, `b` from -127 to 127.
SLIP_INLINE NativeInts dot(NativeInts sums, NativeBytes a, NativeInts b) {
#if defined(__AVX512VNNI__)
  return (NativeInts)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
  return sums + (NativeInts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return sums + (NativeInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (NativeInts)vdotq_s32((int32x4_t)sums, (int8x16_t)a, (int8x16_t)b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
  const int16x8_t high = vmull_high_s8((int8x16_t)a, (int8x16_t)b);
  return (NativeInts)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#endif
}

// The same for `a` with a sign; not for what MULTIPLIES_UNSIGNED.
SLIP_INLINE NativeInts dot_signed(NativeInts sums, NativeBytes a, NativeInts b) {
#if defined(__AVX512F__)
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)a);
  const __m512i turned = _mm512_mask_sub_epi8((__m512i)b, negative, _mm512_setzero_si512(), (__m512i)b);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)a), turned);
  return sums + (NativeInts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i turned = _mm256_sign_epi8((__m256i)b, (__m256i)a);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), turned);
  return sums + (NativeInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot(sums, a, b);
#endif
}

// Stores sixteen whole numbers from -128 to 127 as bytes.
SLIP_INLINE void store_int8(int8_t* p, Floats v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v.part[0])));
#else
  float numbers[LANES];
  memcpy(numbers, &v, sizeof(v));
  for (Index i = 0; i < LANES; i++) p[i] = (int8_t)numbers[i];
#endif
}

// Sums of floats that must not be rounded: eight doubles.
class WideSum {
 public:
  SLIP_INLINE void add(Floats v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof(v));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Few few;
      memcpy(&few, lanes + 8 * half, sizeof(few));
      sums_[half] += __builtin_convertvector(few, Many);
    }
  }

  double total() const {
    double all = 0;
    for (int i = 0; i < 8; i++) all += sums_[0][i] + sums_[1][i];
    return all;
  }

 private:
  typedef float Few __attribute__((vector_size(32)));
  typedef double Many __attribute__((vector_size(64)));
  Many sums_[2] = {};
};

SLIP_INLINE void ask_for(const void* p) { __builtin_prefetch(p, 0, 3); }
SLIP_INLINE void ask_for_later(const void* p) { __builtin_prefetch(p, 0, 2); }

// WIDTH rows of WIDTH words: what lies at [row][column] gets to [column][row].
SLIP_INLINE void transpose(NativeInts* r) {
  NativeInts low, high;
  for (int j = 0; j < WIDTH; j++) {
    low[j] = j / 2 + (j % 2) * WIDTH;
    high[j] = low[j] + WIDTH / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < WIDTH; round *= 2) {
    NativeInts t[WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; i++) {
#if defined(__clang__)
      for (int j = 0; j < WIDTH; j++) {
        t[2 * i][j] = j % 2 ? r[i + WIDTH / 2][j / 2] : r[i][j / 2];
        t[2 * i + 1][j] = j % 2 ? r[i + WIDTH / 2][WIDTH / 2 + j / 2] : r[i][WIDTH / 2 + j / 2];
      }
#else
      t[2 * i] = __builtin_shuffle(r[i], r[i + WIDTH / 2], low);
      t[2 * i + 1] = __builtin_shuffle(r[i], r[i + WIDTH / 2], high);
#endif
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) r[i] = t[i];
  }
}

}  // namespace
