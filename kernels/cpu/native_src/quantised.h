// Weights of 8 or 4 bits in groups of inputs that share a scale (kernels/weights.py), in panels of 32 outputs.
//
// A block holds one group of one panel: values, then 32 scales, then 32 minimums or zero points if the scheme has them.
// Values of 8 bits are [group / 4][32][4] bytes, stored plus 128. Values of 4 bits are [group / 8][32][4] bytes: the
// low halves hold inputs 0 to group / 2 - 1, the high halves the rest. Rows of x are rounded to 8 bits, with a scale
// for each 32 inputs, so that sums within a group are exact integers.
#pragma once
#include <vector>

#include "avx2.h"
#include "simd.h"
#include "team.h"

constexpr int64_t kQuantisedColumns = 32;
constexpr int64_t kRowGroup = 32;      // inputs of a row of x that share a scale
// Rows of x per pass over a panel: as many as the registers hold. 8 rows are a tenth slower.
constexpr int kQuantisedRows = 6;
constexpr int64_t kRowsAlone = 4;      // most rows that each thread rounds for itself, which saves a barrier

enum ScaleKind : int64_t { kScaleFloat = 0, kScaleHalf = 1, kScaleBf16 = 2 };
// A weight is scale * (value - zero()) without offsets, scale * value + minimum with minimums, or scale * (value - zero
// point) with zero points, which are bytes.
enum OffsetKind : int64_t { kNoOffsets = 0, kMinimums = 1, kZeroPoints = 2 };

// bits: 8 or 4; 0 for dense weights, which use no other field.
struct Groups {
    int64_t bits, group, scale_kind, offset_kind;

    int64_t count(int64_t in_features) const { return (in_features + group - 1) / group; }
    int64_t value_bytes() const { return bits * group * kQuantisedColumns / 8; }
    int64_t scale_bytes() const { return kQuantisedColumns * (scale_kind == kScaleFloat ? 4 : 2); }
    int64_t offset_bytes() const {
        return offset_kind == kMinimums ? scale_bytes() : offset_kind == kZeroPoints ? kQuantisedColumns : 0;
    }
    int64_t block_bytes() const { return value_bytes() + scale_bytes() + offset_bytes(); }
    int64_t panel_bytes(int64_t in_features) const { return bits ? count(in_features) * block_bytes() : 0; }
    // The stored value that means 0.
    int64_t zero() const { return bits == 8 ? 128 : offset_kind ? 0 : 8; }
};

inline Float16 half_to_float(Word16 bits) {
    // The factor corrects the exponent's bias, also for subnormal numbers.
    const Float16 magnitude = cast<Float16>((bits & 0x7fffu) << 13) * 0x1p112f;
    return cast<Float16>(cast<Word16>(magnitude) | (bits & 0x8000u) << 16);
}

inline void load_scales(const uint8_t* from, int64_t kind, Float16 (&scales)[2]) {
    for (int v = 0; v < 2; v++) {
        if (kind == kScaleFloat) {
            scales[v] = load_vector<Float16>(from + v * 64);
            continue;
        }
#if defined(__AVX512F__)
        if (kind == kScaleHalf) {
            scales[v] = (Float16)_mm512_cvtph_ps(load_vector<__m256i>(from + v * 32));
            continue;
        }
#elif defined(__F16C__)
        if (kind == kScaleHalf) {
            for (int half = 0; half < 2; half++)
                store_vector(reinterpret_cast<float*>(scales + v) + half * 8,
                             _mm256_cvtph_ps(load_vector<__m128i>(from + v * 32 + half * 16)));
            continue;
        }
#endif
        const Word16 bits = __builtin_convertvector(load_vector<Half16>(from + v * 32), Word16);
        scales[v] = kind == kScaleHalf ? half_to_float(bits) : cast<Float16>(bits << 16);
    }
}

// Loads the minimums of a block at `panel`, or computes them from its zero points and scales.
inline void load_minimums(const uint8_t* panel, const Groups& w, const Float16 (&scales)[2], Float16 (&minimums)[2]) {
    const uint8_t* from = panel + w.value_bytes() + w.scale_bytes();
    if (w.offset_kind == kMinimums) return load_scales(from, w.scale_kind, minimums);
    for (int v = 0; v < 2; v++) minimums[v] = -scales[v] * __builtin_convertvector(load16(from + v * 16), Float16);
}

// Adds to each lane of sum the products of its four unsigned bytes of `a` and signed bytes of `b`.
inline Int16 dot_bytes(Int16 sum, Word16 a, Word16 b) {
#if defined(__AVX512VNNI__)
    return (Int16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int byte = 0; byte < 4; byte++)
        sum += cast<Int16>((a >> (8 * byte)) & 0xffu) * (cast<Int16>(b << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}

// Multiplies and adds with one rounding if the processor can. Explicit, so that every instantiation rounds alike.
inline Float16 fused(Float16 a, Float16 b, Float16 sum) {
#if defined(__AVX512F__)
    return (Float16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return sum + a * b;
#endif
}

inline Float16 absolute(Float16 x) { return cast<Float16>(cast<Word16>(x) & 0x7fffffffu); }

// Returns a NaN if there is one, so that the products of a row with a NaN are NaN. Magnitudes are ordered like their bits,
// and a NaN's exceed infinity's.
inline float largest_magnitude(Float16 a, Float16 b) {
    const Word16 x = cast<Word16>(absolute(a)), y = cast<Word16>(absolute(b)), most = x > y ? x : y;
#if defined(__AVX512F__)
    const uint32_t bits = _mm512_reduce_max_epu32((__m512i)most);
#else
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits = std::max(bits, uint32_t(most[i]));
#endif
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

// Rounds to nearest even; returns the sum of the values.
inline int32_t store_rounded(Float16 x, int8_t* to) {
#if defined(__AVX512F__)
    const __m512i whole = _mm512_cvtps_epi32((__m512)x);
    store_vector(to, _mm512_cvtepi32_epi8(whole));
    return _mm512_reduce_add_epi32(whole);
#elif defined(LORAPLEX_AVX2)
    const float* from = reinterpret_cast<const float*>(&x);
    const __m256i low = _mm256_cvtps_epi32(_mm256_loadu_ps(from)), high = _mm256_cvtps_epi32(_mm256_loadu_ps(from + 8));
    // Packing works within halves of 128 bits: [low 0-3, high 0-3, low 4-7, high 4-7].
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0b11011000);
    store_vector(to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    const __m256i both = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01001110));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10110001)));
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        to[i] = int8_t(std::nearbyint(x[i]));
        sum += to[i];
    }
    return sum;
#endif
}

// kernels.reference.quantize_rows' constants for int8.
constexpr float kLargestInt8 = 127.0f, kSmallestAmax = 1e-20f;

// Rows of x in 8 bits. A row has values [inputs, padded to kRowGroup], scales [row groups], and for each group of the
// weights: firsts, the initial value of its sum of products (-zero() times the sum of the values), and totals, the sum of
// the values times the scale.
struct RoundedRows {
    uint8_t* memory = nullptr;
    int64_t inputs = 0, group = kRowGroup;

    int64_t padded() const { return (inputs + kRowGroup - 1) / kRowGroup * kRowGroup; }
    int64_t groups() const { return padded() / group; }
    int64_t stride() const { return (padded() + padded() / kRowGroup * 4 + groups() * 8 + 63) / 64 * 64; }
    int8_t* values(int64_t row) const { return reinterpret_cast<int8_t*>(memory + row * stride()); }
    float* scales(int64_t row) const { return reinterpret_cast<float*>(memory + row * stride() + padded()); }
    int32_t* firsts(int64_t row) const { return reinterpret_cast<int32_t*>(scales(row) + padded() / kRowGroup); }
    float* totals(int64_t row) const { return reinterpret_cast<float*>(firsts(row) + groups()); }

    // kernels.reference.quantize_rows over groups of 32.
    template <class T>
    void round(const T* x, int64_t row, int64_t zero) const {
        for (int64_t k = 0; k < padded(); k += kRowGroup) {
            Float16 parts[2];
            if (k + kRowGroup <= inputs) {
                parts[0] = load16(x + k);
                parts[1] = load16(x + k + 16);
            } else {
                float rest[kRowGroup] = {};
                for (int64_t i = k; i < inputs; i++) rest[i - k] = to_float(x[i]);
                parts[0] = load16(rest);
                parts[1] = load16(rest + 16);
            }
            const float amax = std::max(largest_magnitude(parts[0], parts[1]), kSmallestAmax);
            const float factor = 1.0f / amax * kLargestInt8;
            const float scale = amax * (1.0f / kLargestInt8);
            scales(row)[k / kRowGroup] = scale;
            int32_t sums[2];
            for (int v = 0; v < 2; v++) sums[v] = store_rounded(parts[v] * factor, values(row) + k + v * 16);
            for (int64_t g = k / group, part = 0; g < (k + kRowGroup) / group; g++, part++) {
                const int32_t sum = group == 16 ? sums[part] : sums[0] + sums[1];
                firsts(row)[g] = -int32_t(zero) * sum;
                totals(row)[g] = scale * float(sum);
            }
        }
    }
};

#if defined(LORAPLEX_AVX2)
// Adds to dots [ROWS] the products of one group's values with `values`, ROWS rows of x, for 8 columns at `panel`. AVX2 adds
// two products of an unsigned and a signed byte in 16 bits: enough for |weight| * x of 8 bits (2 * 128 * 127), and with
// weights of 4 bits for all products of a group (2 * STEPS * 15 * 127).
template <int BITS, int STEPS, int ROWS>
inline __attribute__((always_inline)) void dot_group(__m256i (&dots)[ROWS], const int8_t* values, int64_t stride,
                                                     const uint8_t* panel) {
    static_assert(2 * STEPS * 15 * 127 <= INT16_MAX);
    constexpr int64_t step_bytes = kQuantisedColumns * 4;
    const __m256i ones = _mm256_set1_epi16(1);
    const auto element = [&](int row, int64_t k) __attribute__((always_inline)) {
        int32_t four;
        std::memcpy(&four, values + row * stride + k * 4, 4);
        return _mm256_set1_epi32(four);
    };
    if constexpr (BITS == 8) {
#pragma GCC unroll 8
        for (int64_t k = 0; k < STEPS; k++) {
            const __m256i w = _mm256_xor_si256(load_vector<__m256i>(panel + k * step_bytes), _mm256_set1_epi8(-128));
            const __m256i magnitude = _mm256_abs_epi8(w);
            unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(element(i, k), w));
                dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(pairs, ones));
            });
        }
    } else {
        __m256i pairs[ROWS] = {};
#pragma GCC unroll 4
        for (int64_t k = 0; k < STEPS / 2; k++) {
            const __m256i w = load_vector<__m256i>(panel + k * step_bytes), mask = _mm256_set1_epi8(15);
            const __m256i low = _mm256_and_si256(w, mask), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
            unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
                pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(low, element(i, k)));
                pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(high, element(i, k + STEPS / 2)));
            });
        }
        unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
            dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(pairs[i], ones));
        });
    }
}

// sums += ROWS rows of x times one panel, 8 columns at a time, so that the sums of all rows fit in the registers. The sums
// of a row depend on that row alone.
template <int BITS, int STEPS, int ROWS>
inline void multiply_groups(Float16 (&sums)[ROWS][2], const RoundedRows& x, int64_t row, const uint8_t* panel,
                            const Groups& w) {
    constexpr int64_t group = STEPS * 4;
    const int8_t* values = x.values(row);
    const float* scales = x.scales(row);
    const int32_t* firsts = x.firsts(row);
    const float* totals = x.totals(row);
    const int64_t stride = x.stride(), groups = w.count(x.inputs), block = w.block_bytes();
    for (int64_t g = 0; g < groups; g++, panel += block) {
        if (ROWS <= 2)
            for (int64_t ahead = block; ahead < 2 * block; ahead += 64) __builtin_prefetch(panel + ahead, 0, 2);
        Float16 factors[2], mins[2];
        load_scales(panel + w.value_bytes(), w.scale_kind, factors);
        if (w.offset_kind) load_minimums(panel, w, factors, mins);
        for (int v = 0; v < 4; v++) {
            __m256i dots[ROWS];
            // Weights of 8 bits are signed here, so that their sums begin with 0.
            unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
                dots[i] = _mm256_set1_epi32(BITS == 8 ? 0 : firsts[i * stride / 4 + g]);
            });
            dot_group<BITS, STEPS, ROWS>(dots, values + g * group, stride, panel + v * 32);
            const __m256 factor = _mm256_loadu_ps(reinterpret_cast<const float*>(factors) + v * 8);
            unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
                float* sum = reinterpret_cast<float*>(sums[i]) + v * 8;
                const __m256 scale = _mm256_mul_ps(factor, _mm256_set1_ps(scales[i * stride / 4 + g * group / kRowGroup]));
                __m256 acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), scale, _mm256_loadu_ps(sum));
                if (w.offset_kind) {
                    const __m256 minimum = _mm256_loadu_ps(reinterpret_cast<const float*>(mins) + v * 8);
                    acc = _mm256_fmadd_ps(minimum, _mm256_set1_ps(totals[i * stride / 4 + g]), acc);
                }
                _mm256_storeu_ps(sum, acc);
            });
        }
    }
}
#else
// sums += ROWS rows of x times one panel. The sums of a row depend on that row alone.
template <int BITS, int STEPS, int ROWS>
inline void multiply_groups(Float16 (&sums)[ROWS][2], const RoundedRows& x, int64_t row, const uint8_t* panel,
                            const Groups& w) {
    constexpr int64_t group = STEPS * 4, step_bytes = kQuantisedColumns * 4;
    Float16 acc[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < 2; v++) acc[i][v] = sums[i][v];
    const int8_t* values = x.values(row);
    const float* scales = x.scales(row);
    const int32_t* firsts = x.firsts(row);
    const float* totals = x.totals(row);
    const int64_t stride = x.stride(), groups = w.count(x.inputs), block = w.block_bytes(), kind = w.scale_kind;
    const bool has_offsets = w.offset_kind;
    for (int64_t g = 0; g < groups; g++, panel += block) {
        // Products of one or two rows are bound by memory, and the processor's own prefetching is too late for them.
        if (ROWS <= 2)
            for (int64_t ahead = block; ahead < 2 * block; ahead += 64) __builtin_prefetch(panel + ahead, 0, 2);
        Int16 dots[ROWS][2];
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < 2; v++) dots[i][v] = Int16{} + firsts[i * stride / 4 + g];
        const auto step = [&](int64_t k, Word16 w0, Word16 w1) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                uint32_t four;
                std::memcpy(&four, values + i * stride + g * group + k * 4, 4);
                const Word16 element = Word16{} + four;
                dots[i][0] = dot_bytes(dots[i][0], w0, element);
                dots[i][1] = dot_bytes(dots[i][1], w1, element);
            }
        };
        if constexpr (BITS == 8) {
#pragma GCC unroll 8
            for (int64_t k = 0; k < STEPS; k++) {
                const uint8_t* at = panel + k * step_bytes;
                step(k, load_vector<Word16>(at), load_vector<Word16>(at + 64));
            }
        } else {
#pragma GCC unroll 4
            for (int64_t k = 0; k < STEPS / 2; k++) {
                const uint8_t* at = panel + k * step_bytes;
                const Word16 w0 = load_vector<Word16>(at), w1 = load_vector<Word16>(at + 64);
                step(k, w0 & 0x0f0f0f0fu, w1 & 0x0f0f0f0fu);
                step(k + STEPS / 2, w0 >> 4 & 0x0f0f0f0fu, w1 >> 4 & 0x0f0f0f0fu);
            }
        }
        Float16 factors[2];
        load_scales(panel + BITS * group * kQuantisedColumns / 8, kind, factors);
        for (int i = 0; i < ROWS; i++) {
            const Float16 scale = splat(scales[i * stride / 4 + g * group / kRowGroup]);
            for (int v = 0; v < 2; v++)
                acc[i][v] = fused(__builtin_convertvector(dots[i][v], Float16), factors[v] * scale, acc[i][v]);
        }
        if (has_offsets) {
            Float16 mins[2];
            load_minimums(panel, w, factors, mins);
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < 2; v++) acc[i][v] = fused(mins[v], splat(totals[i * stride / 4 + g]), acc[i][v]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < 2; v++) sums[i][v] = acc[i][v];
}
#endif

template <int ROWS>
inline void multiply_rounded(Float16 (&sums)[ROWS][2], const RoundedRows& x, int64_t row, const uint8_t* panel,
                             const Groups& w) {
    if (w.bits == 8)
        w.group == 32 ? multiply_groups<8, 8, ROWS>(sums, x, row, panel, w) : multiply_groups<8, 4, ROWS>(sums, x, row, panel, w);
    else
        w.group == 32 ? multiply_groups<4, 8, ROWS>(sums, x, row, panel, w) : multiply_groups<4, 4, ROWS>(sums, x, row, panel, w);
}

// The value of input k and column `column` in a panel.
inline float dequantised(const uint8_t* panel, int64_t k, int64_t column, const Groups& w) {
    const uint8_t* block = panel + k / w.group * w.block_bytes();
    const int64_t in_group = k % w.group, half = w.group / 2;
    const int64_t at = w.bits == 8 ? in_group : in_group % half;
    const uint8_t byte = block[(at / 4 * kQuantisedColumns + column) * 4 + at % 4];
    const int64_t value = w.bits == 8 ? byte : in_group < half ? byte & 15 : byte >> 4;
    Float16 scales[2], mins[2] = {};
    load_scales(block + w.value_bytes(), w.scale_kind, scales);
    if (w.offset_kind) load_minimums(block, w, scales, mins);
    const float product = scales[column / 16][column % 16] * float(value - w.zero());
    return w.offset_kind ? product + mins[column / 16][column % 16] : product;
}

#ifdef LORAPLEX_AVX2
// Writes a group as fp32, [group][32]. rows: rows of bytes. Vectors of 8, because the compiler keeps those of 16 in memory:
// a row of 4-bit weights took 3.4 times as long as one of dense ones.
template <int BITS>
inline void dequantise_group(const uint8_t* values, int64_t rows, const Groups& w, const Float16* scales,
                             const Float16* mins, float* out) {
    const __m256i zero = _mm256_set1_epi32(int32_t(w.zero())), low = _mm256_set1_epi32(BITS == 8 ? 255 : 15);
    const float *scale = reinterpret_cast<const float*>(scales), *min = reinterpret_cast<const float*>(mins);
    for (int64_t k = 0; k < rows; k += 4)
        for (int64_t n = 0; n < kQuantisedColumns; n += 8) {
            const __m256i words = load_vector<__m256i>(values + k * kQuantisedColumns + n * 4);
            const __m256 by = _mm256_loadu_ps(scale + n);
            const auto write = [&](int64_t row, __m256i stored) __attribute__((always_inline)) {
                const __m256i value = _mm256_sub_epi32(_mm256_and_si256(stored, low), zero);
                const __m256 product = _mm256_mul_ps(by, _mm256_cvtepi32_ps(value));
                const __m256 sum = w.offset_kind ? _mm256_add_ps(product, _mm256_loadu_ps(min + n)) : product;
                _mm256_storeu_ps(out + row * kQuantisedColumns + n, sum);
            };
            for (int byte = 0; byte < 4; byte++) {
                write(k + byte, _mm256_srli_epi32(words, 8 * byte));
                if constexpr (BITS == 4) write(rows + k + byte, _mm256_srli_epi32(words, 8 * byte + 4));
            }
        }
}
#endif

// Writes a panel as fp32, [in_features, padded to whole groups][32].
inline void dequantise_panel(const uint8_t* panel, int64_t in_features, const Groups& w, float* out) {
    const int64_t rows = w.bits == 8 ? w.group : w.group / 2;
    for (int64_t g = 0; g < w.count(in_features); g++, panel += w.block_bytes(), out += w.group * kQuantisedColumns) {
        Float16 scales[2], mins[2] = {};
        load_scales(panel + w.value_bytes(), w.scale_kind, scales);
        if (w.offset_kind) load_minimums(panel, w, scales, mins);
#ifdef LORAPLEX_AVX2
        w.bits == 8 ? dequantise_group<8>(panel, rows, w, scales, mins, out)
                    : dequantise_group<4>(panel, rows, w, scales, mins, out);
#else
        const auto write = [&](int64_t k, int v, Word16 stored) __attribute__((always_inline)) {
            const Int16 values = cast<Int16>(stored) - int32_t(w.zero());
            const Float16 product = scales[v] * __builtin_convertvector(values, Float16);
            put16(out + k * kQuantisedColumns + v * 16, w.offset_kind ? product + mins[v] : product);
        };
        for (int64_t k = 0; k < rows; k += 4)
            for (int v = 0; v < 2; v++) {
                const Word16 words = load_vector<Word16>(panel + (k * kQuantisedColumns + v * 64));
                for (int byte = 0; byte < 4; byte++) {
                    const Word16 stored = words >> (8 * byte) & 0xffu;
                    write(k + byte, v, w.bits == 8 ? stored : stored & 15u);
                    if (w.bits == 4) write(rows + k + byte, v, stored >> 4);
                }
            }
#endif
    }
}

// Writes one output's weights, [in_features], as T.
template <class T>
void dequantise_row(const uint8_t* data, int64_t row, int64_t in_features, const Groups& w, T* out) {
    const uint8_t* panel = data + row / kQuantisedColumns * w.panel_bytes(in_features);
    for (int64_t k = 0; k < in_features; k++) put(out + k, dequantised(panel, k, row % kQuantisedColumns, w));
}

// values: int8 [out, in], or for 4 bits uint8 [out, in / 2] with even inputs in the low halves. scales and
// offsets: [out, groups] in the scheme's types.
inline void pack_in_groups(const uint8_t* values, const uint8_t* scales, const uint8_t* offsets, uint8_t* packed,
                           int64_t out_features, int64_t in_features, const Groups& w, int64_t threads) {
    const int64_t groups = w.count(in_features), size = w.scale_bytes() / kQuantisedColumns, half = w.group / 2;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t panel = 0; panel < (out_features + kQuantisedColumns - 1) / kQuantisedColumns; panel++)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t* block = packed + panel * w.panel_bytes(in_features) + g * w.block_bytes();
            std::memset(block, 0, w.block_bytes());
            for (int64_t j = 0; j < kQuantisedColumns && panel * kQuantisedColumns + j < out_features; j++) {
                const int64_t n = panel * kQuantisedColumns + j;
                for (int64_t i = 0; i < w.group; i++) {
                    const int64_t k = g * w.group + i;
                    uint8_t value = uint8_t(w.zero());
                    if (k < in_features && w.bits == 8) value = uint8_t(values[n * in_features + k] + 128);
                    if (k < in_features && w.bits == 4) value = values[(n * in_features + k) / 2] >> (k % 2 * 4) & 15;
                    const int64_t at = w.bits == 8 ? i : i % half;
                    uint8_t& to = block[(at / 4 * kQuantisedColumns + j) * 4 + at % 4];
                    to |= uint8_t(w.bits == 4 && i >= half ? value << 4 : value);
                }
                std::memcpy(block + w.value_bytes() + j * size, scales + (n * groups + g) * size, size);
                const int64_t offset = w.offset_bytes() / kQuantisedColumns;
                std::memcpy(block + w.value_bytes() + w.scale_bytes() + j * offset, offsets + (n * groups + g) * offset, offset);
            }
        }
}
