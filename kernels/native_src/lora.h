// y[t] += scale (x[t] A^T) B by segments of tokens that use one adapter, over rank pages (kernels/reference.py).
// Two phases with a barrier between: shrink into h, expand into y. Every sum is made by one thread in a fixed order.
// Where each adapter has one row (decoding), the pages are the traffic: threads then walk their own runs of adapters from
// front to back and ask for the next four rank rows while they use these.
#pragma once
#include <omp.h>

#include "simd.h"
#include "team.h"

struct Routing {
    const int32_t *order, *items;  // items: [num_items, 3] of (slot, first, last) into order
    const int32_t *page_table, *ranks;
    int64_t num_items, max_pages, page_rank, pages_in_use;  // pages_in_use: the most that an adapter of the batch has
};

template <class T>
struct LoraGroup {
    const T *a_pages, *b_pages;
    const float* scales;
    int64_t slices, in_features, out_features;
    int64_t offsets[4];

    // h: [rows of the batch that use an adapter, slices, page_rank * pages_in_use]. May share a phase with a product.
    void shrink(const T* x, float* h, const Routing& r, Team& team) const {
        const int64_t units = r.num_items * slices;
        const int thread = omp_get_thread_num();
        for (int64_t unit = team.take_near(units, thread, 1); unit < units; unit = team.take_near(units, thread, 1)) {
            const int32_t* item = r.items + unit / slices * 3;
            const int64_t slice = unit % slices, rank = r.ranks[item[0]];
            const float scale = scales[item[0] * slices + slice];
            if (scale == 0.0f) continue;
            for (int64_t row = item[1]; row < item[2]; row += 4) {
                const int64_t rows = std::min<int64_t>(4, item[2] - row);
                const T* inputs[4];
                for (int64_t i = 0; i < 4; i++) inputs[i] = x + int64_t(r.order[row + std::min(i, rows - 1)]) * in_features;
                if (rows == 1) {
                    float* to = h + (row * slices + slice) * r.page_rank * r.pages_in_use;
                    for (int64_t j = 0; j < rank; j += 4) {  // four rank rows never straddle a page
                        float dot[1][4];
                        dot_rows<1, 4>(inputs, a_row(item[0], slice, j, r), dot);
                        for (int i = 0; i < 4; i++) to[j + i] = scale * dot[0][i];
                    }
                    continue;
                }
                for (int64_t first = 0; first < rank; first += 4) {
                    float dots[4][4];
                    dot_rows<4, 4>(inputs, a_row(item[0], slice, first, r), dots);
                    for (int64_t i = 0; i < rows; i++)
                        for (int64_t j = 0; j < 4; j++)
                            h[((row + i) * slices + slice) * r.page_rank * r.pages_in_use + first + j] = scale * dots[i][j];
                }
            }
        }
    }

    void expand(const float* h, T* y, const Routing& r, Team& team) const {
        int64_t chunks[4] = {};  // column chunks before each slice
        for (int64_t s = 0; s < slices; s++) chunks[s + 1] = chunks[s] + (offsets[s + 1] - offsets[s] + kColumns - 1) / kColumns;
        const int64_t units = r.num_items * chunks[slices], stride = slices * r.page_rank * r.pages_in_use;
        const int thread = omp_get_thread_num();
        for (int64_t unit = team.take_near(units, thread); unit < units; unit = team.take_near(units, thread)) {
            const int32_t* item = r.items + unit / chunks[slices] * 3;
            const int64_t chunk = unit % chunks[slices];
            int64_t slice = 0;
            while (chunk >= chunks[slice + 1]) slice++;
            if (scales[item[0] * slices + slice] == 0.0f) continue;
            const int64_t first = offsets[slice] + (chunk - chunks[slice]) * kColumns;
            const int64_t columns = std::min(kColumns, offsets[slice + 1] - first);
            for (int64_t row = item[1]; row < item[2];) {
                const float* from = h + row * stride + slice * r.page_rank * r.pages_in_use;
                if (item[2] - row >= 4) {
                    add_columns<4>(from, stride, y, first, columns, item[0], row, r);
                    row += 4;
                } else {
                    add_columns<1>(from, stride, y, first, columns, item[0], row, r);
                    row += 1;
                }
            }
        }
    }

  private:
    static constexpr int64_t kColumns = 4096;

    const T* a_row(int64_t slot, int64_t slice, int64_t rank, const Routing& r) const {
        const int64_t page = r.page_table[slot * r.max_pages + rank / r.page_rank];
        return a_pages + ((page * slices + slice) * r.page_rank + rank % r.page_rank) * in_features;
    }

    // dots[i][j] = inputs[i] . a[j], for ROWS inputs and RANKS rank rows
    template <int ROWS, int RANKS>
    void dot_rows(const T* const* inputs, const T* a, float (*dots)[RANKS]) const {
        typedef Elem<T> E;
        constexpr int64_t step = 16 * E::PAIR;
        Float16 sums[ROWS][RANKS] = {};
        int64_t k = 0;
        for (; k + step <= in_features; k += step) {
            typename E::Vector ranks[RANKS];
            for (int j = 0; j < RANKS; j++) {
                ranks[j] = load_vector<typename E::Vector>(a + j * in_features + k);
                if (ROWS == 1) __builtin_prefetch(a + (j + 4) * in_features + k, 0, 2);
            }
            for (int i = 0; i < ROWS; i++) {
                const auto input = load_vector<typename E::Vector>(inputs[i] + k);
                for (int j = 0; j < RANKS; j++) sums[i][j] = E::multiply_add(sums[i][j], input, ranks[j]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < RANKS; j++) {
                dots[i][j] = sum_lanes(sums[i][j]);
                for (int64_t n = k; n < in_features; n++)
                    dots[i][j] += to_float(inputs[i][n]) * to_float(a[j * in_features + n]);
            }
    }

    const T* rank_row(int64_t slot, int64_t rank, const Routing& r) const {
        const int64_t page = r.page_table[slot * r.max_pages + rank / r.page_rank];
        return b_pages + (page * r.page_rank + rank % r.page_rank) * out_features;
    }

    // A run of columns stays in the first-level cache while the rank rows of B stream past it, four at a time.
    template <int ROWS>
    void add_columns(const float* h, int64_t stride, T* y, int64_t first, int64_t columns, int64_t slot, int64_t row,
                     const Routing& r) const {
        alignas(64) float sums[ROWS][kColumns];
        const int64_t whole = columns / 16 * 16, rank = r.ranks[slot];
        for (int i = 0; i < ROWS; i++) {
            const T* to = y + int64_t(r.order[row + i]) * out_features + first;
            for (int64_t c = 0; c < whole; c += 16) put16(sums[i] + c, load16(to + c));
            for (int64_t c = whole; c < columns; c++) sums[i][c] = to_float(to[c]);
        }
        for (int64_t k = 0; k < rank; k += 4) {  // rank rows beyond the adapter's own are zero
            const T* b = rank_row(slot, k, r) + first;
            for (int64_t c = 0; c < whole; c += 16) {
                Float16 rows[4];
                for (int j = 0; j < 4; j++) rows[j] = load16(b + j * out_features + c);
                if (ROWS == 1 && c % 32 == 0)
                    for (int j = 4; j < 8; j++) __builtin_prefetch(b + j * out_features + c, 0, 2);
                for (int i = 0; i < ROWS; i++) {
                    Float16 sum = load16(sums[i] + c);
                    for (int j = 0; j < 4; j++) sum += rows[j] * h[i * stride + k + j];
                    put16(sums[i] + c, sum);
                }
            }
            for (int64_t c = whole; c < columns; c++)
                for (int i = 0; i < ROWS; i++)
                    for (int j = 0; j < 4; j++) sums[i][c] += h[i * stride + k + j] * to_float(b[j * out_features + c]);
        }
        for (int i = 0; i < ROWS; i++) {
            T* to = y + int64_t(r.order[row + i]) * out_features + first;
            for (int64_t c = 0; c < whole; c += 16) put16(to + c, load16(sums[i] + c));
            for (int64_t c = whole; c < columns; c++) put(to + c, sums[i][c]);
        }
    }
};
