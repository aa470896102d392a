// y[t] += scale (x[t] A^T) B, where t's adapter has rank pages of A and B (kernels/reference.py). `shrink` computes h =
// x A^T for segments of tokens that use one adapter. h B is added where it costs least: in the product's own loop for
// eight tokens of one adapter (gemm.h), by `expand` for the others, i.e. for decoding. Both add to the rounded y in the
// same order, so a row does not depend on which of them processed it. h is rounded to the model's type, as in PEFT.
#pragma once
#include <omp.h>

#include <vector>

#include "simd.h"
#include "team.h"

struct Routing {
    const int32_t *adapter_index;  // [tokens], -1: base
    const int32_t *order, *items;  // items: [num_items, 3] of (slot, first, last) into order
    const int32_t *page_table, *ranks;
    int64_t num_items, max_pages, page_rank, width;  // width: rank rows of the batch's largest adapter, in whole pages
};

constexpr int64_t kRanks = 4;  // rank rows processed together, within one page; rows beyond an adapter's rank are 0

template <class T>
struct LoraGroup {
    const T *a_pages, *b_pages;
    const float* scales;
    int64_t slices, in_features, out_features;
    int64_t a_stride, b_stride, scale_stride;  // from page to page, from slot to slot
    int64_t offsets[4];

    // h: [tokens, slices, width]; base rows and slices that an adapter does not target stay unchanged. May share a
    // phase with a product.
    void shrink(const T* x, T* h, const Routing& r, Team& team) const {
        const int64_t units = r.num_items * slices;
        const int thread = omp_get_thread_num();
        for (int64_t unit = team.take_near(units, thread, 1); unit < units; unit = team.take_near(units, thread, 1)) {
            const int32_t* item = r.items + unit / slices * 3;
            const int64_t slice = unit % slices;
            if (!targets(item[0], slice)) continue;
            for (int64_t row = item[1]; row < item[2];) {
                const bool four = item[2] - row >= 4;
                if (four) shrink_rows<4>(x, h, r.order + row, item[0], slice, r);
                else shrink_rows<1>(x, h, r.order + row, item[0], slice, r);
                row += four ? 4 : 1;
            }
        }
    }

    // y += h B for these tokens, all of which use an adapter.
    void expand(const T* h, T* y, const std::vector<int32_t>& tokens, const Routing& r, Team& team) const {
        int64_t runs[4] = {};  // runs of columns before each slice
        for (int64_t s = 0; s < slices; s++) runs[s + 1] = runs[s] + (offsets[s + 1] - offsets[s] + kColumns - 1) / kColumns;
        const int64_t units = int64_t(tokens.size()) * runs[slices];
        const int thread = omp_get_thread_num();
        for (int64_t unit = team.take_near(units, thread); unit < units; unit = team.take_near(units, thread)) {
            const int64_t token = tokens[unit / runs[slices]], run = unit % runs[slices];
            int64_t slice = 0;
            while (run >= runs[slice + 1]) slice++;
            if (!targets(r.adapter_index[token], slice)) continue;
            const int64_t first = offsets[slice] + (run - runs[slice]) * kColumns;
            add_columns(h + (token * slices + slice) * r.width, y + token * out_features, r.adapter_index[token], first,
                        std::min(kColumns, offsets[slice + 1] - first), r);
        }
    }

    float scale(int64_t slot, int64_t slice) const { return scales[slot * scale_stride + slice]; }

    bool targets(int64_t slot, int64_t slice) const { return scale(slot, slice) != 0.0f; }

    // Packs `columns` columns of an adapter's B, from `first`, like a panel of the product: [rank /
    // PAIR][columns][PAIR]. Returns the number of steps.
    int64_t pack_b(int64_t slot, int64_t first, int64_t columns, T* panel, const Routing& r) const {
        constexpr int64_t P = Elem<T>::PAIR;
        const int64_t rank = (r.ranks[slot] + kRanks - 1) / kRanks * kRanks;
        for (int64_t k = 0; k < rank; k += kRanks) {
            const T* b = b_row(slot, k, r) + first;
            for (int64_t j = 0; j < kRanks; j += P)
                for (int64_t c = 0; c < columns; c += 16)
                    store_vector(panel + (k + j) * columns + c * P, Elem<T>::pair(b + j * out_features + c, out_features));
        }
        return rank / P;
    }

  private:
    static constexpr int64_t kColumns = 4096;

    static int64_t page(int64_t slot, int64_t rank, const Routing& r) {
        return r.page_table[slot * r.max_pages + rank / r.page_rank];
    }
    const T* a_row(int64_t slot, int64_t slice, int64_t rank, const Routing& r) const {
        return a_pages + page(slot, rank, r) * a_stride + (slice * r.page_rank + rank % r.page_rank) * in_features;
    }
    const T* b_row(int64_t slot, int64_t rank, const Routing& r) const {
        return b_pages + page(slot, rank, r) * b_stride + rank % r.page_rank * out_features;
    }

    template <int ROWS>
    void shrink_rows(const T* x, T* h, const int32_t* tokens, int64_t slot, int64_t slice, const Routing& r) const {
        typedef Elem<T> E;
        constexpr int64_t step = 16 * E::PAIR;
        const float scale = this->scale(slot, slice);
        const T* inputs[ROWS];
        for (int i = 0; i < ROWS; i++) inputs[i] = x + tokens[i] * in_features;
        for (int64_t first = 0; first < r.ranks[slot]; first += kRanks) {
            const T* a = a_row(slot, slice, first, r);
            Float16 sums[ROWS][kRanks] = {};
            int64_t k = 0;
            for (; k + step <= in_features; k += step) {
                typename E::Vector ranks[kRanks];
                for (int j = 0; j < kRanks; j++) {
                    ranks[j] = load_vector<typename E::Vector>(a + j * in_features + k);
                    if (ROWS == 1) __builtin_prefetch(a + (j + kRanks) * in_features + k, 0, 2);  // decoding reads A once
                }
                for (int i = 0; i < ROWS; i++) {
                    const auto input = load_vector<typename E::Vector>(inputs[i] + k);
                    for (int j = 0; j < kRanks; j++) sums[i][j] = E::multiply_add(sums[i][j], input, ranks[j]);
                }
            }
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < kRanks; j++) {
                    float dot = sum_lanes(sums[i][j]);
                    for (int64_t n = k; n < in_features; n++) dot += to_float(inputs[i][n]) * to_float(a[j * in_features + n]);
                    put(h + (tokens[i] * slices + slice) * r.width + first + j, scale * dot);
                }
        }
    }

    // The columns stay in the first-level cache while the rank rows of B are read.
    void add_columns(const T* h, T* y, int64_t slot, int64_t first, int64_t columns, const Routing& r) const {
        typedef Elem<T> E;
        alignas(64) float sums[kColumns];
        const int64_t whole = columns / 16 * 16;
        for (int64_t c = 0; c < whole; c += 16) put16(sums + c, load16(y + first + c));
        for (int64_t c = whole; c < columns; c++) sums[c] = to_float(y[first + c]);
        for (int64_t k = 0; k < r.ranks[slot]; k += kRanks) {
            const T* b = b_row(slot, k, r) + first;
            typename E::Vector weights[kRanks / E::PAIR];
            for (int64_t j = 0; j < kRanks; j += E::PAIR) weights[j / E::PAIR] = E::broadcast(h + k + j);
            for (int64_t c = 0; c < whole; c += 16) {
                if (c % 32 == 0)
                    for (int64_t j = 0; j < kRanks; j++) __builtin_prefetch(b + (j + kRanks) * out_features + c, 0, 2);
                Float16 sum = load16(sums + c);
                for (int64_t j = 0; j < kRanks; j += E::PAIR)
                    sum = E::multiply_add(sum, weights[j / E::PAIR], E::pair(b + j * out_features + c, out_features));
                put16(sums + c, sum);
            }
            for (int64_t c = whole; c < columns; c++)
                for (int64_t j = 0; j < kRanks; j++) sums[c] += to_float(h[k + j]) * to_float(b[j * out_features + c]);
        }
        for (int64_t c = 0; c < whole; c += 16) put16(y + first + c, load16(sums + c));
        for (int64_t c = whole; c < columns; c++) put(y + first + c, sums[c]);
    }
};
