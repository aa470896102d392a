// Products for processors with AVX2 and without AVX-512, which have 16 registers of 8 floats: the compiler keeps vectors
// of 16 floats in memory there (docs/lab-notes.md, 2026-11-27).
#pragma once
#include "simd.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define LORAPLEX_AVX2 1
#include <immintrin.h>

// 8 columns of weights, or an element of x for all of them. A bf16 pair is multiplied in PARTS, the high half first, as in
// simd.h. ROWS share a pass over a panel: three have 12 registers of sums, one for each row's element and one for weights;
// with bf16, whose two halves the compiler keeps, two rows are faster (182 to 211 tokens/s against 166 to 182).
template <class T>
struct Avx2;
template <>
struct Avx2<float> {
    static constexpr int PARTS = 1, ROWS = 3;
    static __m256 load(const float* w, int) { return _mm256_loadu_ps(w); }
    static __m256 broadcast(const float* x, int) { return _mm256_broadcast_ss(x); }
};
template <>
struct Avx2<bf16> {
    static constexpr int PARTS = 2, ROWS = 2;
    static __m256 load(const bf16* w, int part) {
        return half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)), part);
    }
    static __m256 broadcast(const bf16* x, int part) {
        int32_t word;
        std::memcpy(&word, x, 4);
        return half(_mm256_set1_epi32(word), part);
    }

  private:
    static __m256 half(__m256i words, int part) {
        return _mm256_castsi256_ps(part == 0 ? _mm256_and_si256(words, _mm256_set1_epi32(int32_t(0xffff0000u)))
                                             : _mm256_slli_epi32(words, 16));
    }
};

// Calls f with 0 to N - 1 as compile-time constants, so that arrays indexed by them become registers.
template <int N, class F>
inline __attribute__((always_inline)) void unrolled(const F& f) {
    if constexpr (N > 0) {
        unrolled<N - 1>(f);
        f(std::integral_constant<int, N - 1>{});
    }
}

// sums [ROWS][32] += ROWS rows of x times `steps` steps of a panel of 32 columns.
template <class T, int ROWS>
inline void multiply_add_few(float* sums, const T* x, int64_t x_stride, const T* panel, int64_t steps) {
#define LAMBDA(i) [&](auto i) __attribute__((always_inline))
    constexpr int64_t P = Elem<T>::PAIR;
    __m256 acc[ROWS][4];
    unrolled<ROWS>(LAMBDA(row) { unrolled<4>(LAMBDA(v) { acc[row][v] = _mm256_loadu_ps(sums + row * 32 + v * 8); }); });
    for (int64_t k = 0; k < steps; k++)
        unrolled<Avx2<T>::PARTS>(LAMBDA(part) {
            __m256 element[ROWS];
            unrolled<ROWS>(LAMBDA(row) { element[row] = Avx2<T>::broadcast(x + row * x_stride + k * P, part); });
            unrolled<4>(LAMBDA(v) {
                const __m256 w = Avx2<T>::load(panel + (k * 32 + v * 8) * P, part);
                unrolled<ROWS>(LAMBDA(row) { acc[row][v] = _mm256_fmadd_ps(element[row], w, acc[row][v]); });
            });
        });
    unrolled<ROWS>(LAMBDA(row) { unrolled<4>(LAMBDA(v) { _mm256_storeu_ps(sums + row * 32 + v * 8, acc[row][v]); }); });
#undef LAMBDA
}

// The same for any number of rows. Each pass after the first reads the panel from the second cache.
template <class T, int ROWS>
inline void multiply_add_avx2(float* sums, const T* x, int64_t x_stride, const T* panel, int64_t steps) {
    constexpr int AT_ONCE = std::min(ROWS, Avx2<T>::ROWS);
    multiply_add_few<T, AT_ONCE>(sums, x, x_stride, panel, steps);
    if constexpr (ROWS > AT_ONCE)
        multiply_add_avx2<T, ROWS - AT_ONCE>(sums + AT_ONCE * 32, x + AT_ONCE * x_stride, x_stride, panel, steps);
}
#endif
