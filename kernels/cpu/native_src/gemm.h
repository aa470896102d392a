// y = x W^T + b (+ LoRA) over weights packed once: panels of 32 output columns, [panel][in / PAIR][32][PAIR], so that a
// panel is read sequentially and each step multiplies two vectors of outputs by a broadcast element (or bf16 pair) of
// x.
#pragma once
#include <omp.h>

#include <vector>

#include "avx2.h"
#include "lora.h"
#include "quantised.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

constexpr int64_t kPanel = 32;
// Rows of x per pass over a panel. The registers would hold 12, but with more than 9 row pointers the compiler keeps
// some in vector registers and extracts them at each step: 385 GFLOP/s against 428.
constexpr int kTileRows = 8;

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

template <class T>
int64_t padded(int64_t n) {
    return (n + Elem<T>::PAIR - 1) / Elem<T>::PAIR * Elem<T>::PAIR;
}

// data: elements of T, or quantised.h's blocks.
template <class T>
struct Packed {
    const void* data;
    const T* bias;  // [out_features] or null
    int64_t in_features, out_features;
    Groups groups;

    bool in_groups() const { return groups.bits != 0; }
    // Whether products read rows of x in 8 bits. In fp32 the panel is widened instead, so that x is not rounded.
    bool reads_rounded() const { return in_groups() && std::is_same_v<T, bf16>; }
};
static_assert(kQuantisedColumns == kPanel);

template <class T>
void pack(const T* w, T* packed, int64_t out_features, int64_t in_features, int64_t threads) {
    constexpr int64_t P = Elem<T>::PAIR;
    const int64_t k_padded = padded<T>(in_features);
#pragma omp parallel for schedule(static) num_threads(int(threads))
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

// Rows that share a pass over a panel. slot: their adapter, or -1 if they belong to several adapters or the base.
struct RowTile {
    int64_t first, rows, slot;
};

// Tiles for a product's rows. kTileRows consecutive rows of an adapter form their own tiles. slots: the slot of each
// row, or null. reads_rounded: whether the weights' products read rows in 8 bits.
template <class T>
std::vector<RowTile> cut_rows(int64_t rows, const int32_t* slots, bool reads_rounded) {
    const int64_t most = reads_rounded ? kQuantisedRows : uses_matrix_unit<T>() ? kPanelRows : kTileRows;
    std::vector<RowTile> tiles;
    const auto add = [&](int64_t first, int64_t last, int64_t slot) {
        // In equal shares, so that no pass over the panel has few rows.
        for (int64_t left = last - first, n; left > 0; left -= n) {
            const int64_t passes = (left + most - 1) / most;
            n = (left + passes - 1) / passes;
            tiles.push_back({last - left, n, slot});
        }
    };
    if (slots == nullptr) {
        add(0, rows, -1);
        return tiles;
    }
    int64_t mixed = 0;  // the first row that is not in a tile yet
    for (int64_t row = 0, end; row < rows; row = end) {
        for (end = row + 1; end < rows && slots[end] == slots[row];) end++;
        if (slots[row] < 0 || end - row < kTileRows) continue;
        add(mixed, row, -1);
        add(row, end, slots[row]);
        mixed = end;
    }
    add(mixed, rows, -1);
    return tiles;
}

// LoRA for one tile and panel: rows of h, and B packed like the panel.
template <class T>
struct PanelDelta {
    const T *h, *b;
    int64_t h_stride, steps;
};

// sums += ROWS rows of x times `steps` steps of a panel.
template <class T, int ROWS>
inline void multiply_add_rows(Float16 (&sums)[ROWS][2], const T* x, int64_t x_stride, const T* panel, int64_t steps) {
#if LORAPLEX_AVX2
    static_assert(sizeof sums == ROWS * kPanel * sizeof(float));
    return multiply_add_avx2<T, ROWS>(reinterpret_cast<float*>(sums), x, x_stride, panel, steps);
#endif
    typedef Elem<T> E;
    Float16 acc[ROWS][2];  // the compiler keeps these in registers, unlike the caller's
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < 2; v++) acc[row][v] = sums[row][v];
    for (int64_t k = 0; k < steps; k++) {
        const T* w = panel + k * kPanel * E::PAIR;
        const auto w0 = load_vector<typename E::Vector>(w), w1 = load_vector<typename E::Vector>(w + 16 * E::PAIR);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const auto element = E::broadcast(x + row * x_stride + k * E::PAIR);
            acc[row][0] = E::multiply_add(acc[row][0], element, w0);
            acc[row][1] = E::multiply_add(acc[row][1], element, w1);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < 2; v++) sums[row][v] = acc[row][v];
}

// sums = ROWS rows of x times one panel. The sums of a row depend on that row alone.
template <class T, int ROWS>
inline void multiply_rows(Float16 (&sums)[ROWS][2], const T* x, int64_t x_stride, const T* panel, int64_t in_features) {
    typedef Elem<T> E;
    const int64_t whole = in_features / E::PAIR;
    multiply_add_rows<T>(sums, x, x_stride, panel, whole);
    if (whole * E::PAIR < in_features) {  // an odd last element has no partner
        const T* w = panel + whole * kPanel * E::PAIR;
        for (int row = 0; row < ROWS; row++) {
            const float element = to_float(x[row * x_stride + in_features - 1]);
            for (int64_t j = 0; j < kPanel; j++) sums[row][j / 16][j % 16] += element * to_float(w[j * E::PAIR]);
        }
    }
}

// y = sums + bias (+ LoRA), for ROWS rows and one panel.
template <class T, class Out, int ROWS>
inline void finish_rows(Float16 (&sums)[ROWS][2], const T* bias, const PanelDelta<T>& delta, Out* y, int64_t y_stride,
                        int64_t columns) {
    if (bias != nullptr)
        for (int row = 0; row < ROWS; row++)
            for (int64_t j = 0; j < columns; j++) sums[row][j / 16][j % 16] += to_float(bias[j]);
    if (delta.steps) {
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < 2; v++) sums[row][v] = rounded<T>(sums[row][v]);
        multiply_add_rows<T>(sums, delta.h, delta.h_stride, delta.b, delta.steps);
    }
    for (int row = 0; row < ROWS; row++) {
        Out* to = y + row * y_stride;
        if (columns == kPanel) {
            put16(to, sums[row][0]);
            put16(to + 16, sums[row][1]);
        } else {
            for (int64_t j = 0; j < columns; j++) put(to + j, sums[row][j / 16][j % 16]);
        }
    }
}

// A product's LoRA; h is the output of shrink. The product adds it for tiles of one adapter if panels do not straddle
// projections.
template <class T>
struct Delta {
    const LoraGroup<T>& group;
    const Routing& routing;
    const T* h;

    bool fits_panels() const {
        bool fits = true;
        for (int64_t s = 0; s <= group.slices; s++) fits = fits && group.offsets[s] % kPanel == 0;
        return fits;
    }
};

// x [rows, in_features], y [rows, out_features]; the team's threads share the panels. delta: LoRA's, or null. rounded: x
// in 8 bits, read if `w.reads_rounded()`.
template <class T, class Out>
void gemm(const T* x, const RoundedRows& rounded, const Packed<T>& w, const Delta<T>* delta, Out* y,
          const std::vector<RowTile>& tiles, Team& team) {
    const int thread = omp_get_thread_num();
    const int64_t k_padded = padded<T>(w.in_features), panels = num_panels(w.out_features);
    std::vector<T> b(delta != nullptr ? delta->routing.width * kPanel : 0);
    MatrixUnit unit;
    alignas(64) float products[kPanelRows * kPanel];
    const bool reads_rounded = w.reads_rounded(), uses_unit = uses_matrix_unit<T>() && !reads_rounded;
    const bool widens = w.in_groups() && !reads_rounded;
    std::vector<float> widened(widens ? w.groups.count(w.in_features) * w.groups.group * kPanel : 0);
    for (int64_t p = team.take_near(panels, thread); p < panels; p = team.take_near(panels, thread)) {
        const T* panel = static_cast<const T*>(w.data) + p * kPanel * k_padded;
        const uint8_t* blocks = static_cast<const uint8_t*>(w.data) + p * w.groups.panel_bytes(w.in_features);
        if constexpr (std::is_same_v<T, float>)
            if (w.in_groups()) {
                dequantise_panel(blocks, w.in_features, w.groups, widened.data());
                panel = widened.data();
            }
        const int64_t first = p * kPanel, columns = std::min(kPanel, w.out_features - first);
        const T* bias = w.bias == nullptr ? nullptr : w.bias + first;
        int64_t slice = 0, packed_slot = -1, steps = 0;
        while (delta != nullptr && first >= delta->group.offsets[slice + 1]) slice++;
        for (const RowTile& tile : tiles) {
            PanelDelta<T> its{};
            if (delta != nullptr && tile.slot >= 0 && delta->group.targets(tile.slot, slice)) {
                if (tile.slot != packed_slot) steps = delta->group.pack_b(tile.slot, first, kPanel, b.data(), delta->routing);
                packed_slot = tile.slot;
                const int64_t stride = delta->group.slices * delta->routing.width;
                its = {delta->h + tile.first * stride + slice * delta->routing.width, b.data(), stride, steps};
            }
            const T* in = x + tile.first * w.in_features;
            Out* out = y + tile.first * w.out_features + first;
            if constexpr (std::is_same_v<T, bf16>)
                if (uses_unit) unit.multiply(in, w.in_features, panel, tile.rows, w.in_features, products);
            const int64_t most = reads_rounded ? kQuantisedRows : kTileRows;
            for (int64_t row = 0; row < tile.rows; row += most)
                dispatch<kTileRows>(std::min<int64_t>(most, tile.rows - row), [&](auto rows) {
                    constexpr int N = decltype(rows)::value;
                    Float16 sums[N][2] = {};
                    if (reads_rounded) {
                        if constexpr (N <= kQuantisedRows) multiply_rounded<N>(sums, rounded, tile.first + row, blocks, w.groups);
                    } else if (uses_unit)
                        for (int i = 0; i < N; i++)
                            for (int v = 0; v < 2; v++) sums[i][v] = load16(products + (row + i) * kPanel + v * 16);
                    else
                        multiply_rows<T, N>(sums, in + row * w.in_features, w.in_features, panel, w.in_features);
                    finish_rows<T, Out, N>(sums, bias, its, out + row * w.out_features, w.out_features, columns);
                    its.h += N * its.h_stride;
                });
        }
    }
}
