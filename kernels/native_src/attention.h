// Causal attention over paged keys and values, and the writes into the pages.
//
// A block of the cache holds what the reference's [block_size, dim] holds, in the order that the products read it:
// keys [dim / PAIR][block_size][PAIR], so 16 keys' scores are one vector, and values [block_size / PAIR][dim][PAIR].
#pragma once
#include <vector>

#include "simd.h"
#include "team.h"

struct CacheShape {
    int64_t heads, kv_heads, dim, block_size;
};

template <class T>
void write_key(const T* key, T* block, int64_t at, const CacheShape& s) {
    constexpr int64_t P = Elem<T>::PAIR;
    for (int64_t d = 0; d < s.dim; d++) block[(d / P * s.block_size + at) * P + d % P] = key[d];
}
// `last`: no later token of the request is in the cache. What stands beside it in its pair is then cleared: it is read
// with weight 0, which would not silence a NaN that a former owner of the block left there.
template <class T>
void write_value(const T* value, T* block, int64_t at, bool last, const CacheShape& s) {
    constexpr int64_t P = Elem<T>::PAIR;
    T* to = block + at / P * s.dim * P;
    for (int64_t d = 0; d < s.dim; d++) to[d * P + at % P] = value[d];
    if (last && at % P == 0 && P == 2)
        for (int64_t d = 0; d < s.dim; d++) to[d * P + P - 1] = T{};
}

// Root-mean-square norm of one row; a null weight is a row of ones.
template <class T>
void rms_norm_row(const T* x, const T* w, T* out, int64_t n, float eps) {
    Float16 squares{};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) squares += load16(x + i) * load16(x + i);
    float sum = sum_lanes(squares);
    for (int64_t j = i; j < n; j++) sum += to_float(x[j]) * to_float(x[j]);
    const float scale = 1.0f / std::sqrt(sum / float(n) + eps);
    for (i = 0; i + 16 <= n; i += 16) put16(out + i, rounded<T>(load16(x + i) * scale) * load16(w + i));
    for (; i < n; i++) {
        T normed;
        put(&normed, to_float(x[i]) * scale);
        put(out + i, to_float(normed) * to_float(w[i]));
    }
}

template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const Float16 a = load16(x + i), b = load16(x + i + half), c = load16(cos + i), s = load16(sin + i);
        put16(out + i, a * c - b * s);
        put16(out + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[i + half]);
        put(out + i, a * cos[i] - b * sin[i]);
        put(out + i + half, b * cos[i] + a * sin[i]);
    }
}

// One token: q and k normed (if the model norms heads) and rotated, q in place, k and v to the cache.
template <class T>
void rope_and_write(T* row, const float* cos_sin, const T* q_norm, const T* k_norm, float eps, T* k_cache, T* v_cache,
                    int64_t slot, bool last, const CacheShape& s, T* scratch) {
    const float *cos = cos_sin, *sin = cos_sin + s.dim / 2;
    const int64_t block = slot / s.block_size, at = slot % s.block_size;
    for (int64_t h = 0; h < s.heads + s.kv_heads; h++) {
        T* head = row + h * s.dim;
        const T* norm = h < s.heads ? q_norm : k_norm;
        if (norm != nullptr) rms_norm_row(head, norm, head, s.dim, eps);
        std::memcpy(scratch, head, s.dim * sizeof(T));
        rotate(scratch, cos, sin, head, s.dim / 2);
    }
    for (int64_t h = 0; h < s.kv_heads; h++) {
        const int64_t to = (block * s.kv_heads + h) * s.block_size * s.dim;
        write_key(row + (s.heads + h) * s.dim, k_cache + to, at, s);
        write_value(row + (s.heads + s.kv_heads + h) * s.dim, v_cache + to, at, last, s);
    }
}

// A piece of attention work: queries [first, last) of a request, one key-value head.
struct Tile {
    int32_t request, kv_head, first, last;
};

template <class T>
struct Attention {
    CacheShape shape;
    const T* q;  // row t's heads start at q + t * q_stride
    int64_t q_stride;
    const T *k_cache, *v_cache;
    const int32_t *block_tables, *query_start, *context_lens;
    T* out;  // [tokens, heads, dim]
    int64_t max_blocks, window;
    float scale;

    static constexpr int64_t kKeys = 64;  // keys per softmax step
    static constexpr int kRows = 4;       // query rows multiplied together

    // Online softmax over tiles of keys (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
    void run(const Tile& tile, std::vector<float>& scratch) const {
        constexpr int64_t P = Elem<T>::PAIR;
        const CacheShape& s = shape;
        const int64_t group = s.heads / s.kv_heads, rows = (tile.last - tile.first) * group;
        const int64_t padded_rows = (rows + kRows - 1) / kRows * kRows;
        const int32_t* table = block_tables + tile.request * max_blocks;
        const int64_t position = context_lens[tile.request] - query_start[tile.request + 1] + tile.first;
        const int64_t last_position = position + (tile.last - tile.first) - 1;
        scratch.resize(padded_rows * (s.dim + 2 + 2 * kKeys) + padded_rows * s.dim);
        float *sums = scratch.data(), *totals = sums + padded_rows * s.dim, *tops = totals + padded_rows;
        float* scores = tops + padded_rows;
        T* probabilities = reinterpret_cast<T*>(scores + padded_rows * kKeys);
        T* queries = reinterpret_cast<T*>(scores + 2 * padded_rows * kKeys);
        std::fill(sums, tops, 0.0f);
        std::fill(tops, tops + padded_rows, -INFINITY);
        std::memset(queries, 0, padded_rows * s.dim * sizeof(T));
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(queries + row * s.dim,
                        q + (tile.first + row / group) * q_stride + (tile.kv_head * group + row % group) * s.dim,
                        s.dim * sizeof(T));
        const int64_t oldest = window ? std::max<int64_t>(0, position - window + 1) / kKeys * kKeys : 0;
        for (int64_t key = oldest; key <= last_position; key += kKeys) {
            const int64_t keys = std::min(kKeys, (last_position - key) / 16 * 16 + 16);
            const int64_t steps = (std::min(kKeys, last_position - key + 1) + P - 1) / P;
            for (int64_t row = 0; row < padded_rows; row += kRows) {
                multiply_keys(queries + row * s.dim, table, tile.kv_head, key, keys, scores + row * kKeys);
                for (int64_t r = row; r < row + kRows; r++)
                    soften(scores + r * kKeys, probabilities + r * kKeys, sums + r * s.dim, totals[r], tops[r], key,
                           keys, position + std::min(r, rows - 1) / group);
                multiply_values(probabilities + row * kKeys, table, tile.kv_head, key, steps, sums + row * s.dim);
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            T* to = out + ((tile.first + row / group) * s.heads + tile.kv_head * group + row % group) * s.dim;
            for (int64_t d = 0; d < s.dim; d += 16) put16(to + d, load16(sums + row * s.dim + d) * (1.0f / totals[row]));
        }
    }

  private:
    const T* block_of(const T* cache, const int32_t* table, int64_t kv_head, int64_t key) const {
        return cache + (int64_t(table[key / shape.block_size]) * shape.kv_heads + kv_head) * shape.block_size * shape.dim;
    }

    // scores[row][0:keys] = queries[row] . keys, unscaled; 16 keys at a time never straddle a block.
    void multiply_keys(const T* queries, const int32_t* table, int64_t kv_head, int64_t key, int64_t keys,
                       float* scores) const {
        typedef Elem<T> E;
        const CacheShape& s = shape;
        for (int64_t j = 0; j < keys; j += 16) {
            const T* k = block_of(k_cache, table, kv_head, key + j) + (key + j) % s.block_size * E::PAIR;
            Float16 dots[kRows] = {};
            for (int64_t d = 0; d < s.dim / E::PAIR; d++) {
                const auto column = load_vector<typename E::Vector>(k + d * s.block_size * E::PAIR);
                for (int r = 0; r < kRows; r++)
                    dots[r] = E::multiply_add(dots[r], E::broadcast(queries + r * s.dim + d * E::PAIR), column);
            }
            for (int r = 0; r < kRows; r++) put16(scores + r * kKeys + j, dots[r]);
        }
    }

    void soften(float* scores, T* probabilities, float* sums, float& total, float& top, int64_t key, int64_t keys,
                int64_t at) const {
        const int64_t from = window ? std::clamp<int64_t>(at - window + 1 - key, 0, keys) : 0;
        const int64_t to = std::clamp<int64_t>(at + 1 - key, 0, keys);
        for (int64_t j = 0; j < from; j++) scores[j] = -INFINITY;
        for (int64_t j = to; j < keys; j++) scores[j] = -INFINITY;
        Float16 best = splat(-INFINITY);
        for (int64_t j = 0; j < keys; j += 16) {
            const Float16 x = load16(scores + j) * scale;
            best = x > best ? x : best;
        }
        const float highest = std::max(top, max_lanes(best));
        if (highest == -INFINITY) {  // nothing of this tile is seen by this row
            std::memset(static_cast<void*>(probabilities), 0, keys * sizeof(T));
            return;
        }
        if (highest > top) {
            const float shrink = top == -INFINITY ? 0.0f : std::exp(top - highest);
            total *= shrink;
            for (int64_t d = 0; d < shape.dim; d += 16) put16(sums + d, load16(sums + d) * shrink);
            top = highest;
        }
        Float16 mass{};
        for (int64_t j = 0; j < keys; j += 16) {
            const Float16 p = rounded<T>(exp16(load16(scores + j) * scale - highest));
            mass += p;
            put16(probabilities + j, p);
        }
        total += sum_lanes(mass);
    }

    // sums[row][:] += probabilities[row][0 : PAIR * steps] . values
    void multiply_values(const T* probabilities, const int32_t* table, int64_t kv_head, int64_t key, int64_t steps,
                         float* sums) const {
        typedef Elem<T> E;
        const CacheShape& s = shape;
        for (int64_t d = 0; d < s.dim; d += 16) {
            Float16 acc[kRows];
            for (int r = 0; r < kRows; r++) acc[r] = load16(sums + r * s.dim + d);
            for (int64_t first = 0; first < steps;) {
                const int64_t at = key + first * E::PAIR;
                const T* v = block_of(v_cache, table, kv_head, at) + (at % s.block_size / E::PAIR * s.dim + d) * E::PAIR;
                const int64_t last = std::min(steps, first + (s.block_size - at % s.block_size) / E::PAIR);
                for (int64_t j = first; j < last; j++, v += s.dim * E::PAIR) {
                    const auto values = load_vector<typename E::Vector>(v);
                    for (int r = 0; r < kRows; r++)
                        acc[r] = E::multiply_add(acc[r], E::broadcast(probabilities + r * kKeys + j * E::PAIR), values);
                }
                first = last;
            }
            for (int r = 0; r < kRows; r++) put16(sums + r * s.dim + d, acc[r]);
        }
    }
};
