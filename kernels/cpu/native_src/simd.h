// Vectors of 16 floats or 16 pairs of bf16, in the compiler's own vector extension: any CPU compiles it, and AVX-512
// BF16 runs the pair product as one instruction. `Elem<T>` describes an element type to the templates.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct bf16 {
    uint16_t bits;
};

typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef uint32_t Word16 __attribute__((vector_size(64)));
typedef uint16_t Half16 __attribute__((vector_size(32)));
typedef int16_t Short16 __attribute__((vector_size(32)));
typedef int8_t Byte16 __attribute__((vector_size(16)));
typedef uint8_t UnsignedByte16 __attribute__((vector_size(16)));

template <class V>
inline V load_vector(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline void store_vector(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
template <class To, class From>
inline To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline Float16 splat(float x) { return Float16{} + x; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return cast<float>(uint32_t(x.bits) << 16); }

// Rounds to nearest even, as torch does; NaN stays NaN.
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    const uint32_t u = cast<uint32_t>(x);
    p->bits = x != x ? uint16_t(0x7fc0) : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline Float16 load16(const float* p) { return load_vector<Float16>(p); }
inline Float16 load16(const bf16* p) {
    return cast<Float16>(__builtin_convertvector(load_vector<Half16>(p), Word16) << 16);
}
// By way of 16 bits or the processor's own instruction: GCC 12 converts to 32 bits byte by byte, ten times as slowly.
inline Int16 load16(const int8_t* p) {
#if defined(__AVX512F__)
    return (Int16)_mm512_cvtepi8_epi32(load_vector<__m128i>(p));
#elif defined(__AVX2__)
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_vector<int64_t>(p))),
                               _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_vector<int64_t>(p + 8)))};
    return load_vector<Int16>(halves);
#else
    return __builtin_convertvector(__builtin_convertvector(load_vector<Byte16>(p), Short16), Int16);
#endif
}
inline Int16 load16(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Int16)_mm512_cvtepu8_epi32(load_vector<__m128i>(p));
#else
    return __builtin_convertvector(__builtin_convertvector(load_vector<UnsignedByte16>(p), Half16), Int16);
#endif
}
inline void put16(float* p, Float16 x) { store_vector(p, x); }
inline void put16(bf16* p, Float16 x) {
#if defined(__AVX512BF16__)
    store_vector(p, _mm512_cvtneps_pbh((__m512)x));
#else
    const Word16 u = cast<Word16>(x);
    Word16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    rounded = (x != x) ? Word16{} + 0x7fc0u : rounded;
    store_vector(p, __builtin_convertvector(rounded, Half16));
#endif
}
// The numbers must need no rounding, like whole numbers of 8 bits.
inline void put16_exact(float* p, Float16 x) { put16(p, x); }
inline void put16_exact(bf16* p, Float16 x) {
#if defined(__AVX512BF16__)
    put16(p, x);
#else
    store_vector(p, __builtin_convertvector(cast<Word16>(x) >> 16, Half16));
#endif
}
template <class T>
inline Float16 rounded(Float16 x) {
    T buffer[16];
    put16(buffer, x);
    return load16(buffer);
}
template <>
inline Float16 rounded<float>(Float16 x) {
    return x;
}

// PAIR elements of one lane are multiplied together: 2 for bf16 (a 32-bit word), 1 for float.
template <class T>
struct Elem;
template <>
struct Elem<float> {
    static constexpr int64_t PAIR = 1;
    typedef Float16 Vector;
    static Vector broadcast(const float* p) { return splat(*p); }
    static Vector pair(const float* p, int64_t) { return load16(p); }
    static Float16 multiply_add(Float16 sum, Vector a, Vector b) { return sum + a * b; }
};
template <>
struct Elem<bf16> {
    static constexpr int64_t PAIR = 2;
    typedef Word16 Vector;
    static Vector broadcast(const bf16* p) {
        uint32_t word;
        std::memcpy(&word, p, 4);
        return Vector{} + word;
    }
    // 16 columns of two rows, interleaved.
    static Vector pair(const bf16* p, int64_t stride) {
        return __builtin_convertvector(load_vector<Half16>(p), Word16) |
               __builtin_convertvector(load_vector<Half16>(p + stride), Word16) << 16;
    }
    static Float16 multiply_add(Float16 sum, Vector a, Vector b) {
#if defined(__AVX512BF16__)
        return (Float16)_mm512_dpbf16_ps((__m512)sum, cast<__m512bh>(a), cast<__m512bh>(b));
#else
        sum += cast<Float16>(a & 0xffff0000u) * cast<Float16>(b & 0xffff0000u);
        return sum + cast<Float16>(a << 16) * cast<Float16>(b << 16);
#endif
    }
};

// Fixed order: the same lanes are always added in the same way.
inline float sum_lanes(Float16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float lanes[16];
    put16(lanes, x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
inline float max_lanes(Float16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float lanes[16];
    put16(lanes, x);
    return *std::max_element(lanes, lanes + 16);
}

// 2^x by separating the nearest whole number and a degree-6 polynomial (Cephes exp2f), about 2 ulp; 0 below -150.
inline Float16 exp2_16(Float16 x) {
#if defined(__AVX512F__)
    const Float16 clamped = (Float16)_mm512_max_ps((__m512)splat(-160.0f), (__m512)x);  // a NaN stays NaN
    const Float16 whole = (Float16)_mm512_roundscale_ps((__m512)clamped, 0);
#else
    const Float16 clamped = x < -126.0f ? splat(-126.0f) : x > 127.0f ? splat(127.0f) : x;
    const Int16 n = __builtin_convertvector(clamped + (clamped < 0.0f ? splat(-0.5f) : splat(0.5f)), Int16);
    const Float16 whole = __builtin_convertvector(n, Float16);
#endif
    const Float16 r = clamped - whole;
    Float16 p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (Float16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const Float16 result = p * cast<Float16>((n + 127) << 23);
    return x < -126.0f ? Float16{} : result;
#endif
}
constexpr float kLog2e = 1.44269504088896341f;

// Calls f with n (1 to MOST) as a compile-time constant.
template <int MOST, class F>
inline void dispatch(int64_t n, F&& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return dispatch<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>{});
}
