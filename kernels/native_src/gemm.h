// y = x W^T + b over weights packed once: panels of 32 output columns, [panel][in / PAIR][32][PAIR], so that a panel is
// read in one sweep and each step multiplies two vectors of outputs by a broadcast element (or bf16 pair) of x.
#pragma once
#include <omp.h>

#include "simd.h"
#include "team.h"

constexpr int64_t kPanel = 32;
// Rows of x that pass over a panel together. The registers would hold 12, but with more than 9 pointers to rows the
// compiler keeps some in vector registers and fetches them at each step: 385 GFLOP/s against 428.
constexpr int kTileRows = 8;

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

template <class T>
int64_t padded(int64_t n) {
    return (n + Elem<T>::PAIR - 1) / Elem<T>::PAIR * Elem<T>::PAIR;
}

template <class T>
struct Packed {
    const T* data;
    const T* bias;  // [out_features] or null
    int64_t in_features, out_features;
};

template <class T>
void pack(const T* w, T* packed, int64_t out_features, int64_t in_features) {
    constexpr int64_t P = Elem<T>::PAIR;
    const int64_t k_padded = padded<T>(in_features);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < num_panels(out_features); panel++) {
        T* to = packed + panel * kPanel * k_padded;
        for (int64_t k = 0; k < k_padded; k++)
            for (int64_t j = 0; j < kPanel; j++) {
                const int64_t n = panel * kPanel + j;
                T value{};
                if (n < out_features && k < in_features) value = w[n * in_features + k];
                to[(k / P * kPanel + j) * P + k % P] = value;
            }
    }
}

// ROWS rows of x against one panel. The sums of a row depend on that row alone.
template <class T, class Out, int ROWS>
inline void multiply_rows(const T* x, int64_t x_stride, const T* panel, const T* bias, Out* y, int64_t y_stride,
                          int64_t in_features, int64_t columns) {
    typedef Elem<T> E;
    Float16 sums[ROWS][2] = {};
    const int64_t whole = in_features / E::PAIR;
    for (int64_t k = 0; k < whole; k++) {
        const T* w = panel + k * kPanel * E::PAIR;
        const auto w0 = load_vector<typename E::Vector>(w), w1 = load_vector<typename E::Vector>(w + 16 * E::PAIR);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const auto element = E::broadcast(x + row * x_stride + k * E::PAIR);
            sums[row][0] = E::multiply_add(sums[row][0], element, w0);
            sums[row][1] = E::multiply_add(sums[row][1], element, w1);
        }
    }
    if (whole * E::PAIR < in_features) {  // an odd last element has no partner
        const T* w = panel + whole * kPanel * E::PAIR;
        for (int row = 0; row < ROWS; row++) {
            const float element = to_float(x[row * x_stride + in_features - 1]);
            for (int64_t j = 0; j < kPanel; j++) sums[row][j / 16][j % 16] += element * to_float(w[j * E::PAIR]);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        Out* to = y + row * y_stride;
        if (bias != nullptr)
            for (int64_t j = 0; j < columns; j++) sums[row][j / 16][j % 16] += to_float(bias[j]);
        if (columns == kPanel) {
            put16(to, sums[row][0]);
            put16(to + 16, sums[row][1]);
        } else {
            for (int64_t j = 0; j < columns; j++) put(to + j, sums[row][j / 16][j % 16]);
        }
    }
}

// x [rows, in_features], y [rows, out_features]; the team's threads share the panels.
template <class T, class Out>
void gemm(const T* x, const Packed<T>& w, Out* y, int64_t rows, Team& team) {
    const int thread = omp_get_thread_num();
    const int64_t k_padded = padded<T>(w.in_features), panels = num_panels(w.out_features);
    for (int64_t p = team.take_near(panels, thread); p < panels; p = team.take_near(panels, thread)) {
        const T* panel = w.data + p * kPanel * k_padded;
        const int64_t first = p * kPanel, columns = std::min(kPanel, w.out_features - first);
        const T* bias = w.bias == nullptr ? nullptr : w.bias + first;
        for (int64_t row = 0; row < rows;) {
            const T* in = x + row * w.in_features;
            Out* out = y + row * w.out_features + first;
            // In even shares, so that no pass over the panel is thin.
            const int64_t left = rows - row, passes = (left + kTileRows - 1) / kTileRows, n = (left + passes - 1) / passes;
            dispatch<kTileRows>(n, [&](auto rows_at_once) {
                constexpr int N = decltype(rows_at_once)::value;
                multiply_rows<T, Out, N>(in, w.in_features, panel, bias, out, w.out_features, w.in_features, columns);
            });
            row += n;
        }
    }
}
