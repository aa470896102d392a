// Causal attention over paged keys and values, and the writes into the pages.
//
// A cache block holds the elements of the reference's [block_size, dim] in the order in which the products read them:
// keys [dim / PAIR][block_size][PAIR], so 16 keys' scores are one vector, and values [block_size / PAIR][dim][PAIR].
// The elements are T, or int8 with a scale for each token and head. Products widen int8 to T, which is exact, and apply
// the scales to scores and probabilities.
#pragma once
#include <vector>

#include "quantised.h"
#include "simd.h"
#include "team.h"

struct CacheShape {
    int64_t heads, kv_heads, dim, block_size;
};

// Caches of one layer. scales [num_blocks, kv_heads, block_size]: null if the elements are T.
struct Cache {
    void *k, *v;
    float *k_scales, *v_scales;

    bool is_int8() const { return k_scales != nullptr; }
};

// P: PAIR of the dtype in which the products read the cache.
template <int64_t P, class E>
void write_key(const E* key, E* block, int64_t at, const CacheShape& s) {
    for (int64_t d = 0; d < s.dim; d += P) std::memcpy(block + (d * s.block_size + at * P), key + d, P * sizeof(E));
}
// `last`: no later token of the request is in the cache. Then the other element of the value's pair is cleared: it is
// read with weight 0, which would not hide a NaN left there by a former owner of the block.
template <int64_t P, class E>
void write_value(const E* value, E* block, int64_t at, bool last, const CacheShape& s) {
    E* to = block + at / P * s.dim * P;
    for (int64_t d = 0; d < s.dim; d++) to[d * P + at % P] = value[d];
    if (last && at % P == 0 && P == 2)
        for (int64_t d = 0; d < s.dim; d++) to[d * P + P - 1] = E{};
}

// kernels.reference.quantize_rows: rounds a row to int8 and returns its scale, NaN if an element is not finite.
template <class T>
float round_row(const T* x, int8_t* to, int64_t n) {
    Float16 most = splat(kSmallestAmax), not_finite{};
    for (int64_t i = 0; i < n; i += 16) {
        const Float16 found = absolute(load16(x + i));
        most = found > most ? found : most;
        not_finite += found * 0.0f;
    }
    const float amax = max_lanes(most), factor = 1.0f / amax * kLargestInt8;
    for (int64_t i = 0; i < n; i += 16) store_rounded(load16(x + i) * factor, to + i);
    return amax * (1.0f / kLargestInt8) + sum_lanes(not_finite);
}

// Root-mean-square norm of one row. A weight in another type than x multiplies it before rounding.
template <class T, class W>
void rms_norm_row(const T* x, const W* w, T* out, int64_t n, float eps) {
    constexpr bool same = std::is_same_v<T, W>;
    Float16 squares{};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) squares += load16(x + i) * load16(x + i);
    float sum = sum_lanes(squares);
    for (int64_t j = i; j < n; j++) sum += to_float(x[j]) * to_float(x[j]);
    const float scale = 1.0f / std::sqrt(sum / float(n) + eps);
    for (i = 0; i + 16 <= n; i += 16) {
        const Float16 normed = load16(x + i) * scale;
        put16(out + i, (same ? rounded<T>(normed) : normed) * load16(w + i));
    }
    for (; i < n; i++) {
        T normed;
        put(&normed, to_float(x[i]) * scale);
        put(out + i, (same ? to_float(normed) : to_float(x[i]) * scale) * to_float(w[i]));
    }
}

// Weight of a norm: T, or float if `is_float`.
struct Norm {
    const void* weight;
    int64_t is_float;

    template <class T>
    void row(const T* x, T* out, int64_t n, float eps) const {
        if (is_float)
            rms_norm_row(x, static_cast<const float*>(weight), out, n, eps);
        else
            rms_norm_row(x, static_cast<const T*>(weight), out, n, eps);
    }
};

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

// Processes one token: norms (if the model norms heads) and rotates q and k, q in place; writes k and v to the cache.
template <class T>
void rope_and_write(T* row, const float* cos_sin, const Norm& q_norm, const Norm& k_norm, float eps,
                    const Cache& cache, int64_t slot, bool last, const CacheShape& s, T* scratch) {
    constexpr int64_t P = Elem<T>::PAIR;
    const float *cos = cos_sin, *sin = cos_sin + s.dim / 2;
    const int64_t block = slot / s.block_size, at = slot % s.block_size;
    for (int64_t h = 0; h < s.heads + s.kv_heads; h++) {
        T* head = row + h * s.dim;
        const Norm& norm = h < s.heads ? q_norm : k_norm;
        if (norm.weight != nullptr) norm.row(head, head, s.dim, eps);
        std::memcpy(scratch, head, s.dim * sizeof(T));
        rotate(scratch, cos, sin, head, s.dim / 2);
    }
    for (int64_t h = 0; h < s.kv_heads; h++) {
        const int64_t slab = block * s.kv_heads + h, to = slab * s.block_size * s.dim;
        const T *key = row + (s.heads + h) * s.dim, *value = key + s.kv_heads * s.dim;
        if (cache.is_int8()) {
            int8_t* rounded = reinterpret_cast<int8_t*>(scratch);
            cache.k_scales[slab * s.block_size + at] = round_row(key, rounded, s.dim);
            write_key<P>(rounded, static_cast<int8_t*>(cache.k) + to, at, s);
            cache.v_scales[slab * s.block_size + at] = round_row(value, rounded, s.dim);
            write_value<P>(rounded, static_cast<int8_t*>(cache.v) + to, at, last, s);
        } else {
            write_key<P>(key, static_cast<T*>(cache.k) + to, at, s);
            write_value<P>(value, static_cast<T*>(cache.v) + to, at, last, s);
        }
    }
}

constexpr int64_t kSpanKeys = 512;  // keys per partial result

// Queries [first, last) of a request for one key-value head.
struct Tile {
    int32_t request, kv_head, first, last;
};

// Softmax-weighted values of some rows over some keys: sums [rows, dim] with weights 2^(score - top), and their totals.
// Scores are multiplied by log2(e), so that the exponential is a power of 2, which saves a multiplication.
struct Partial {
    float *sums, *totals, *tops;
    Partial(float* memory, int64_t rows, int64_t dim) : sums(memory), totals(sums + rows * dim), tops(totals + rows) {}
    static int64_t size(int64_t rows, int64_t dim) { return rows * (dim + 2); }
};

template <class T>
struct Attention {
    CacheShape shape;
    const T* q;  // row t's heads start at q + t * q_stride
    int64_t q_stride;
    Cache cache;
    const int32_t *block_tables, *query_start, *context_lens;
    T* out;  // [tokens, heads, dim]
    int64_t max_blocks, window;
    float scale, softcap;  // softcap: 0 for none

    static constexpr int64_t kKeys = 64;   // keys per softmax step
    static constexpr int kRows = 6;        // maximum number of query rows multiplied together
    static constexpr int64_t kGroup = 16;  // keys in a vector of scores; a group never straddles a block
    static constexpr int64_t kGroups = kKeys / kGroup;
    static constexpr float kSlack = 8.0f;  // how far, in powers of two, a score may exceed its row's top

    int64_t num_rows(const Tile& tile) const { return (tile.last - tile.first) * (shape.heads / shape.kv_heads); }

    // Spans of kSpanKeys keys, aligned to kSpanKeys, that the tile sees. A row's spans depend only on its position, so
    // its summation order does not depend on the division of the work.
    Range spans(const Tile& tile) const {
        const int64_t first = position(tile), last = first + (tile.last - tile.first) - 1;
        return {window ? std::max<int64_t>(0, first - window + 1) / kSpanKeys : 0, last / kSpanKeys + 1};
    }

    // Computes the tile's rows over one span, by online softmax over kKeys at a time (Milakov and Gimelshein, 2018; Dao
    // et al., FlashAttention, 2022).
    void attend_span(const Tile& tile, int64_t span, const Partial& result, std::vector<float>& scratch) const {
        constexpr int64_t P = Elem<T>::PAIR;
        const CacheShape& s = shape;
        const int64_t group = s.heads / s.kv_heads, rows = num_rows(tile), first_position = position(tile);
        const int64_t last_position = first_position + (tile.last - tile.first) - 1;
        scratch.resize(kRows * 2 * kKeys + rows * (kGroup + s.dim) + 2 * kKeys * s.dim);
        float* scores = scratch.data();
        T* probabilities = reinterpret_cast<T*>(scores + kRows * kKeys);
        float* masses = scores + 2 * kRows * kKeys;  // each row's total, in 16 lanes
        T* queries = reinterpret_cast<T*>(masses + rows * kGroup);
        T* widened = queries + rows * s.dim;  // a step's keys and values, if the cache holds int8
        std::fill(result.sums, result.sums + rows * s.dim, 0.0f);
        std::fill(masses, masses + rows * kGroup, 0.0f);
        std::fill(result.tops, result.tops + rows, -INFINITY);
        for (int64_t t = tile.first; t < tile.last; t++)  // a token's heads of this group are adjacent
            std::memcpy(queries + (t - tile.first) * group * s.dim, q + t * q_stride + tile.kv_head * group * s.dim,
                        group * s.dim * sizeof(T));
        const int64_t oldest = window ? std::max<int64_t>(0, first_position - window + 1) / kKeys * kKeys : 0;
        const int64_t end = std::min((span + 1) * kSpanKeys, last_position + 1);
        for (int64_t key = std::max(span * kSpanKeys, oldest); key < end; key += kKeys) {
            const int64_t count = std::min(kKeys, end - key), groups = (count + kGroup - 1) / kGroup;
            const int64_t steps = (count + P - 1) / P;
            const KeyGroups step = find_groups(tile, key, end, widened);
            for (int64_t row = 0; row < rows;) {
                const int64_t left = rows - row, passes = (left + kRows - 1) / kRows, n = (left + passes - 1) / passes;
                dispatch<kRows>(n, [&](auto rows_at_once) {
                    constexpr int N = decltype(rows_at_once)::value;
                    dispatch<kGroups>(groups, [&](auto num_groups) {
                        constexpr int GROUPS = decltype(num_groups)::value;
                        multiply_keys<N, GROUPS>(queries + row * s.dim, step, scores);
                        for (int64_t r = 0; r < N; r++)
                            soften<GROUPS>(scores + r * kKeys, probabilities + r * kKeys, result.sums + (row + r) * s.dim,
                                           masses + (row + r) * kGroup, result.tops[row + r], key,
                                           first_position + (row + r) / group, step);
                    });
                    float* sums = result.sums + row * s.dim;
                    int64_t d = 0;
                    for (; d + 64 <= s.dim; d += 64)
                        multiply_values<N, 4>(probabilities, step, steps, d, sums + d);
                    for (; d < s.dim; d += 16)
                        multiply_values<N, 1>(probabilities, step, steps, d, sums + d);
                });
                row += n;
            }
        }
        for (int64_t row = 0; row < rows; row++) result.totals[row] = sum_lanes(load16(masses + row * kGroup));
    }

    // into: the result of earlier spans; from: the next span's result.
    void merge(const Partial& into, const Partial& from, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            const float top = std::max(into.tops[row], from.tops[row]);
            if (top == -INFINITY) continue;  // the row has not seen a key yet
            const float keep = std::exp2(into.tops[row] - top), take = std::exp2(from.tops[row] - top);
            into.tops[row] = top;
            into.totals[row] = into.totals[row] * keep + from.totals[row] * take;
            float *to = into.sums + row * shape.dim, *sums = from.sums + row * shape.dim;
            for (int64_t d = 0; d < shape.dim; d += 16) put16(to + d, load16(to + d) * keep + load16(sums + d) * take);
        }
    }

    void write(const Tile& tile, const Partial& result) const {
        const int64_t group = shape.heads / shape.kv_heads, rows = num_rows(tile);
        for (int64_t row = 0; row < rows; row++) {
            T* to = out + ((tile.first + row / group) * shape.heads + tile.kv_head * group + row % group) * shape.dim;
            for (int64_t d = 0; d < shape.dim; d += 16)
                put16(to + d, load16(result.sums + row * shape.dim + d) * (1.0f / result.totals[row]));
        }
    }

  private:
    int64_t position(const Tile& tile) const {
        return context_lens[tile.request] - query_start[tile.request + 1] + tile.first;
    }

    // Groups of keys and values of a softmax step, and those of the next one. Blocks can be anywhere in memory, so the
    // next step's are prefetched while this step's are multiplied.
    struct KeyGroups {
        const T *keys[kGroups], *values[kGroups], *next_keys[kGroups], *next_values[kGroups];
        int64_t key_stride;                                // elements from PAIR elements of a key to the next ones
        Float16 key_scales[kGroups], value_scales[kGroups];  // only of int8; 0 for keys beyond the end
    };

    // Elements and scales from the beginning of a cache.
    struct Place {
        int64_t keys, values, scales;
    };

    Place place(const Tile& tile, int64_t key) const {
        const CacheShape& s = shape;
        const int64_t at = key % s.block_size, block = block_tables[tile.request * max_blocks + key / s.block_size];
        const int64_t token = (block * s.kv_heads + tile.kv_head) * s.block_size;
        return {token * s.dim + at * Elem<T>::PAIR, (token + at) * s.dim, token + at};
    }

    // key: the first of a group. widened [2 * kKeys * dim]: memory for elements of int8.
    KeyGroups find_groups(const Tile& tile, int64_t key, int64_t end, T* widened) const {
        KeyGroups found;
        const int64_t size = kGroup * shape.dim, last = (end - 1) / kGroup * kGroup;
        found.key_stride = (cache.is_int8() ? kGroup : shape.block_size) * Elem<T>::PAIR;
        for (int64_t g = 0; g < kGroups; g++, key += kGroup) {
            const Place here = place(tile, std::min(key, last)), next = place(tile, std::min(key + kKeys, last));
            if (!cache.is_int8()) {
                found.keys[g] = static_cast<const T*>(cache.k) + here.keys;
                found.values[g] = static_cast<const T*>(cache.v) + here.values;
                found.next_keys[g] = static_cast<const T*>(cache.k) + next.keys;
                found.next_values[g] = static_cast<const T*>(cache.v) + next.values;
                continue;
            }
            T *keys = widened + 2 * g * size, *values = keys + size;
            found.keys[g] = found.next_keys[g] = keys;
            found.values[g] = found.next_values[g] = values;
            if (key > last) continue;
            const Int16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const auto is_seen = lanes < int32_t(end - key);
            found.key_scales[g] = is_seen ? load16(cache.k_scales + here.scales) : Float16{};
            found.value_scales[g] = is_seen ? load16(cache.v_scales + here.scales) : Float16{};
            const int64_t stride = shape.block_size * Elem<T>::PAIR;
            for (int64_t d = 0; d < size; d += found.key_stride)
                widen(static_cast<const int8_t*>(cache.k), here.keys + d / found.key_stride * stride,
                      next.keys + d / found.key_stride * stride, keys + d, found.key_stride);
            widen(static_cast<const int8_t*>(cache.v), here.values, next.values, values, size);
        }
        return found;
    }

    // Converts n elements, a multiple of 16, and prefetches those of the next step.
    static void widen(const int8_t* from, int64_t at, int64_t next, T* to, int64_t n) {
        for (int64_t i = 0; i < n; i += 16) {
            if (i % 64 == 0) __builtin_prefetch(from + next + i, 0, 2);
            put16_exact(to + i, __builtin_convertvector(load16(from + at + i), Float16));
        }
    }

    // scores[row][0 : 16 * GROUPS] = queries[row] . keys, unscaled
    template <int ROWS, int GROUPS>
    void multiply_keys(const T* queries, const KeyGroups& step, float* scores) const {
        typedef Elem<T> E;
        const int64_t stride = step.key_stride;
        Float16 dots[ROWS][GROUPS] = {};
        for (int64_t d = 0; d < shape.dim / E::PAIR; d++) {
            typename E::Vector columns[GROUPS];
            for (int g = 0; g < GROUPS; g++) {
                columns[g] = load_vector<typename E::Vector>(step.keys[g] + d * stride);
                __builtin_prefetch(step.next_keys[g] + d * stride, 0, 2);
            }
            for (int r = 0; r < ROWS; r++) {
                const auto element = E::broadcast(queries + r * shape.dim + d * E::PAIR);
                for (int g = 0; g < GROUPS; g++) dots[r][g] = E::multiply_add(dots[r][g], element, columns[g]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int g = 0; g < GROUPS; g++) put16(scores + r * kKeys + g * kGroup, dots[r][g]);
    }

    // Turns a row's scores into probabilities and rescales its sums if the scores raise its top. The top is raised
    // late, when the weights have grown by kSlack powers of two, so most rows never rescale after their first keys.
    // Not inlined: inlined into its many callers, it made the compilation 1.5 times as long and no step faster.
    template <int GROUPS>
    __attribute__((noinline)) void soften(float* scores, T* probabilities, float* sums, float* mass, float& top, int64_t key,
                                          int64_t at, const KeyGroups& step) const {
        constexpr int64_t count = GROUPS * kGroup;
        Float16 x[GROUPS];
        if (cache.is_int8())
            for (int g = 0; g < GROUPS; g++) put16(scores + g * kGroup, load16(scores + g * kGroup) * step.key_scales[g]);
        if (softcap == 0.0f) {
            for (int g = 0; g < GROUPS; g++) x[g] = load16(scores + g * kGroup) * (scale * kLog2e);
        } else {  // softcap * tanh(score / softcap); tanh(y) = 1 - 2 / (e^2y + 1)
            const float doubled = 2.0f * kLog2e * scale / softcap, cap = softcap * kLog2e;
            for (int g = 0; g < GROUPS; g++)
                x[g] = cap - 2.0f * cap / (exp2_16(load16(scores + g * kGroup) * doubled) + 1.0f);
        }
        const int64_t from = window ? at - window + 1 - key : 0, to = at + 1 - key;
        if (from > 0 || to < count) {
            const Int16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const int32_t first = std::clamp<int64_t>(from, 0, count), last = std::clamp<int64_t>(to, 0, count);
            for (int g = 0; g < GROUPS; g++) {
                const Int16 j = lanes + int32_t(g * kGroup);
                x[g] = (j >= first) & (j < last) ? x[g] : splat(-INFINITY);
            }
        }
        Float16 best = x[0];
        for (int g = 1; g < GROUPS; g++) best = x[g] > best ? x[g] : best;
        const float highest = max_lanes(best);
        if (highest > top + kSlack) {
            const float shrink = top == -INFINITY ? 0.0f : std::exp2(top - highest);
            put16(mass, load16(mass) * shrink);
            for (int64_t d = 0; d < shape.dim; d += 16) put16(sums + d, load16(sums + d) * shrink);
            top = highest;
        }
        // A row that has not seen a key yet: any finite base turns all of its probabilities into zeros.
        const float base = top == -INFINITY ? 0.0f : top;
        Float16 total = load16(mass);
        for (int g = 0; g < GROUPS; g++) {
            const Float16 p = exp2_16(x[g] - base);
            total += p;
            put16(probabilities + g * kGroup, cache.is_int8() ? p * step.value_scales[g] : p);
        }
        put16(mass, total);
    }

    // sums[row][0 : 16 * WIDTH] += probabilities[row][0 : PAIR * steps] . values[:, d : d + 16 * WIDTH]
    template <int ROWS, int WIDTH>
    void multiply_values(const T* probabilities, const KeyGroups& step, int64_t steps, int64_t d, float* sums) const {
        typedef Elem<T> E;
        Float16 acc[ROWS][WIDTH];
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++) acc[r][w] = load16(sums + r * shape.dim + 16 * w);
        constexpr int64_t per_group = kGroup / E::PAIR;
        for (int64_t first = 0; first < steps; first += per_group)
            for (int64_t j = first; j < std::min(steps, first + per_group); j++) {
                const int64_t at = ((j - first) * shape.dim + d) * E::PAIR;
                const T* v = step.values[first / per_group] + at;
                for (int w = 0; w < WIDTH; w++)
                    __builtin_prefetch(step.next_values[first / per_group] + at + 16 * w * E::PAIR, 0, 2);
                typename E::Vector rows[WIDTH];
                for (int w = 0; w < WIDTH; w++) rows[w] = load_vector<typename E::Vector>(v + 16 * w * E::PAIR);
                for (int r = 0; r < ROWS; r++) {
                    const auto element = E::broadcast(probabilities + r * kKeys + j * E::PAIR);
                    for (int w = 0; w < WIDTH; w++) acc[r][w] = E::multiply_add(acc[r][w], element, rows[w]);
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++) put16(sums + r * shape.dim + 16 * w, acc[r][w]);
    }
};
