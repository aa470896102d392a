// Fast path of the CPU, called through ctypes (kernels/cpu/native.py): single ops, and a whole forward pass in one
// parallel region. Semantics: kernels/reference.py. The summation order depends only on shapes, so a result depends
// neither on timing nor on the number of threads.
#include <omp.h>

#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "gemm.h"
#include "lora.h"
#include "quantised.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace {

template <class T>
struct Layer {
    Norm input_norm, q_norm, k_norm, mlp_norm;
    Norm attention_output_norm, mlp_output_norm;  // of a sublayer's output; null weight: no norm
    Packed<T> qkv, o, gate_up, down;
    const float* cos_sin;
    Cache cache;
    int64_t window;
    LoraGroup<T> lora[4];  // qkv, o, gate_up, down
};

template <class T>
struct Model {
    Packed<T> embedding;  // dense: [vocab, hidden], not in panels
    const Layer<T>* layers;
    Norm norm;
    Packed<T> lm_head;
    int64_t num_layers, hidden, intermediate, threads, is_gelu;
    CacheShape cache;
    float eps, scale, softcap, embedding_scale;
};

template <class T>
struct Step {
    const int64_t *token_ids, *positions, *slots, *logits_rows;
    const int32_t *block_tables, *query_start, *context_lens;
    int64_t tokens, requests, max_blocks, num_logits;
    const Routing *routing, *logits_routing;  // null: no LoRA in this step; logits_routing: only of logits_rows
    T *residual, *normed, *wide, *narrow;
    uint8_t* rounded;  // rows in 8 bits, if any weights are in groups
    T* h;
    float* logits;
};

template <class T>
void add_row(const T* x, T* residual, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) put16(residual + i, load16(residual + i) + load16(x + i));
    for (; i < n; i++) put(residual + i, to_float(residual[i]) + to_float(x[i]));
}

template <class T>
void silu_and_mul_row(const T* gate_up, T* out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Float16 gate = load16(gate_up + i);
        put16(out + i, gate / (1.0f + exp2_16(gate * -kLog2e)) * load16(gate_up + n + i));
    }
    for (; i < n; i++) {
        const float gate = to_float(gate_up[i]);
        put(out + i, gate / (1.0f + std::exp(-gate)) * to_float(gate_up[n + i]));
    }
}

// gelu in its tanh form: 0.5 * (1 + tanh(y)) is the sigmoid of 2y, with y = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
template <class T>
void gelu_and_mul_row(const T* gate_up, T* out, int64_t n) {
    constexpr float k = 1.5957691216057308f, cubic = 0.044715f;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Float16 gate = load16(gate_up + i);
        const Float16 power = gate * (1.0f + cubic * gate * gate) * (-k * kLog2e);
        put16(out + i, gate / (1.0f + exp2_16(power)) * load16(gate_up + n + i));
    }
    for (; i < n; i++) {
        const float gate = to_float(gate_up[i]);
        put(out + i, gate / (1.0f + std::exp(-k * gate * (1.0f + cubic * gate * gate))) * to_float(gate_up[n + i]));
    }
}

bool is_last_of_request(const int64_t* slots, int64_t t, int64_t tokens) {
    return t + 1 == tokens || slots[t + 1] != slots[t] + 1;
}

// Reads one row of an embedding.
template <class T>
void embed_row(const Packed<T>& embedding, int64_t token, T* to) {
    const int64_t n = embedding.in_features;
    if (embedding.in_groups())
        dequantise_row(static_cast<const uint8_t*>(embedding.data), token, n, embedding.groups, to);
    else
        std::memcpy(to, static_cast<const T*>(embedding.data) + token * n, n * sizeof(T));
}

// A thread's rows in 8 bits, for products of few rows.
typedef std::vector<uint8_t> OwnRows;

// Rounds the rows of x to 8 bits if the product reads them so. All threads share the rounding of many rows into `shared`,
// followed by a barrier. With few rows, each thread rounds all of them into `own`, which is faster than a barrier.
template <class T>
RoundedRows round_rows(const T* x, const Packed<T>& w, int64_t rows, uint8_t* shared, OwnRows& own, Team& team) {
    if (!w.reads_rounded()) return {};
    RoundedRows rounded{shared, w.in_features, w.groups.group};
    Range range{0, rows};
    if (rows <= kRowsAlone) {
        own.resize(rows * rounded.stride());
        rounded.memory = own.data();
    } else {
        range = share(rows, omp_get_thread_num(), team.size());
    }
    for (int64_t row = range.begin; row < range.end; row++) rounded.round(x + row * w.in_features, row, w.groups.zero());
    if (rows > kRowsAlone) team.barrier();
    return rounded;
}

// Products of a step's rows, with LoRA for rows that use an adapter. All products share one division into row tiles.
template <class T>
class Product {
  public:
    // like: weights of the scheme of those that will be multiplied; the scheme decides the height of a tile.
    Product(int64_t rows, const Routing* routing, const Packed<T>& like)
        : rows_(rows),
          routing_(routing),
          tiles_(cut_rows<T>(rows, routing != nullptr ? routing->adapter_index : nullptr, like.reads_rounded())) {
        if (routing == nullptr) return;
        for (const RowTile& tile : tiles_)
            for (int64_t row = tile.first; row < tile.first + tile.rows; row++) {
                if (routing->adapter_index[row] < 0) continue;
                all_.push_back(int32_t(row));
                if (tile.slot < 0) mixed_.push_back(int32_t(row));
            }
    }

    // y = x W^T + b, with LoRA through h [rows, slices, width]. shared, own: see round_rows.
    void run(const T* x, const Packed<T>& w, const LoraGroup<T>* lora, T* y, T* h, uint8_t* shared, OwnRows& own,
             Team& team) const {
        const RoundedRows rounded = round_rows(x, w, rows_, shared, own, team);
        if (routing_ == nullptr) return gemm<T, T>(x, rounded, w, nullptr, y, tiles_, team);
        const Delta<T> delta{*lora, *routing_, h};
        const bool in_product = mixed_.size() < all_.size() && delta.fits_panels();
        lora->shrink(x, h, *routing_, team);
        if (in_product) team.barrier();
        gemm(x, rounded, w, in_product ? &delta : nullptr, y, tiles_, team);
        const std::vector<int32_t>& others = in_product ? mixed_ : all_;
        if (others.empty()) return;
        team.barrier();
        lora->expand(h, y, others, *routing_, team);
    }

  private:
    const int64_t rows_;
    const Routing* routing_;
    const std::vector<RowTile> tiles_;
    std::vector<int32_t> all_, mixed_;  // rows that use an adapter; mixed_: only those in tiles of several adapters
};

template <class T>
class Forward {
  public:
    Forward(const Model<T>& model, const Step<T>& step)
        : m_(model),
          s_(step),
          attention_(step.query_start, step.context_lens, step.requests, model.cache, model.threads),
          product_(step.tokens, step.routing, model.layers[0].down),
          logits_product_(step.num_logits, step.logits_routing, model.layers[0].down),
          logits_tiles_(cut_rows<T>(step.num_logits, nullptr, model.lm_head.reads_rounded())) {}

    void run() {
        in_parallel(m_.threads, [&](Team& team) { run_thread(team, omp_get_thread_num()); });
    }

  private:
    void run_thread(Team& team, int thread) {
        std::vector<float> scratch, results;
        OwnRows own;
        const Range rows = share(s_.tokens, thread, team.size());
        for (int64_t t = rows.begin; t < rows.end; t++) {
            embed_token(s_.token_ids[t], s_.residual + t * m_.hidden);
            norm_row(t, m_.layers[0].input_norm, s_.normed);
        }
        for (int64_t i = 0; i < m_.num_layers; i++) {
            const Layer<T>& layer = m_.layers[i];
            linear(product_, s_.normed, layer.qkv, layer.lora[0], s_.wide, own, team);
            team.barrier();
            write_cache(layer, rows);
            team.barrier();
            attend(layer, team, scratch, results);
            if (i + 1 < m_.num_layers) {
                finish_layer(product_, layer, m_.layers[i + 1].input_norm, s_.normed, rows, own, team);
                continue;
            }
            // The last layer's outputs are needed only for rows whose logits are needed.
            team.barrier();
            if (thread == 0) keep_logits_rows();
            team.barrier();
            finish_layer(logits_product_, layer, m_.norm, s_.narrow, share(s_.num_logits, thread, team.size()), own, team);
        }
        team.barrier();
        const RoundedRows rounded = round_rows(s_.narrow, m_.lm_head, s_.num_logits, s_.rounded, own, team);
        gemm<T, float>(s_.narrow, rounded, m_.lm_head, nullptr, s_.logits, logits_tiles_, team);
    }

    void embed_token(int64_t token, T* to) {
        embed_row(m_.embedding, token, to);
        if (m_.embedding_scale != 1.0f)
            for (int64_t i = 0; i < m_.hidden; i++) put(to + i, to_float(to[i]) * m_.embedding_scale);
    }

    // Computes the rest of a layer after attention: from attention's output in `narrow` to the next layer's input `to`,
    // normalised by `next_norm`. `rows` is this thread's share.
    void finish_layer(const Product<T>& product, const Layer<T>& layer, const Norm& next_norm, T* to, Range rows,
                      OwnRows& own, Team& team) {
        linear(product, s_.narrow, layer.o, layer.lora[1], s_.normed, own, team);
        team.barrier();
        for (int64_t t = rows.begin; t < rows.end; t++)
            add_and_norm(t, layer.attention_output_norm, layer.mlp_norm, s_.normed);
        linear(product, s_.normed, layer.gate_up, layer.lora[2], s_.wide, own, team);
        team.barrier();
        for (int64_t t = rows.begin; t < rows.end; t++) {
            const T* gate_up = s_.wide + t * 2 * m_.intermediate;
            T* out = s_.narrow + t * m_.intermediate;
            m_.is_gelu ? gelu_and_mul_row(gate_up, out, m_.intermediate) : silu_and_mul_row(gate_up, out, m_.intermediate);
        }
        linear(product, s_.narrow, layer.down, layer.lora[3], s_.normed, own, team);
        team.barrier();
        for (int64_t t = rows.begin; t < rows.end; t++) add_and_norm(t, layer.mlp_output_norm, next_norm, to);
    }

    // The rows are ascending, so no row is overwritten before it is read.
    void keep_logits_rows() {
        const int64_t width = m_.cache.heads * m_.cache.dim;
        for (int64_t n = 0; n < s_.num_logits; n++) {
            const int64_t t = s_.logits_rows[n];
            if (t == n) continue;
            std::memcpy(s_.narrow + n * width, s_.narrow + t * width, width * sizeof(T));
            std::memcpy(s_.residual + n * m_.hidden, s_.residual + t * m_.hidden, m_.hidden * sizeof(T));
        }
    }

    // Starts with a barrier, because another phase writes the input and may still read y.
    void linear(const Product<T>& product, const T* x, const Packed<T>& w, const LoraGroup<T>& lora, T* y, OwnRows& own,
                Team& team) {
        team.barrier();
        product.run(x, w, &lora, y, s_.h, s_.rounded, own, team);
    }

    void norm_row(int64_t t, const Norm& norm, T* to) {
        norm.row(s_.residual + t * m_.hidden, to + t * m_.hidden, m_.hidden, m_.eps);
    }

    // Adds a sublayer's output, in `normed`, to the residual, and normalises the sum.
    void add_and_norm(int64_t t, const Norm& output_norm, const Norm& norm, T* to) {
        T* output = s_.normed + t * m_.hidden;
        if (output_norm.weight != nullptr) output_norm.row(output, output, m_.hidden, m_.eps);
        add_row(output, s_.residual + t * m_.hidden, m_.hidden);
        norm_row(t, norm, to);
    }

    void write_cache(const Layer<T>& layer, Range rows) {
        T head[1024];
        for (int64_t t = rows.begin; t < rows.end; t++)
            rope_and_write(s_.wide + t * layer.qkv.out_features, layer.cos_sin + s_.positions[t] * m_.cache.dim,
                           layer.q_norm, layer.k_norm, m_.eps, layer.cache, s_.slots[t],
                           is_last_of_request(s_.slots, t, s_.tokens), m_.cache, head);
    }

    void attend(const Layer<T>& layer, Team& team, std::vector<float>& scratch, std::vector<float>& results) {
        const Attention<T> attention{m_.cache,        s_.wide,          layer.qkv.out_features, layer.cache,
                                     s_.block_tables, s_.query_start,   s_.context_lens,        s_.narrow,
                                     s_.max_blocks,   layer.window,     m_.scale,               m_.softcap};
        attention_.run(attention, team, scratch, results);
    }

    const Model<T>& m_;
    const Step<T>& s_;
    AttentionPlan attention_;
    const Product<T> product_, logits_product_;
    const std::vector<RowTile> logits_tiles_;
};

template <class T>
void add_rms_norm(const T* x, T* residual, const Norm& norm, T* out, int64_t rows, int64_t n, float eps) {
    for (int64_t t = 0; t < rows; t++) {
        if (x != nullptr) add_row(x + t * n, residual + t * n, n);
        norm.row(residual + t * n, out + t * n, n, eps);
    }
}

template <class T>
void linear(const T* x, const Packed<T>* w, const LoraGroup<T>* lora, const Routing* routing, T* y, T* h, int64_t rows,
            int64_t threads) {
    const Product<T> product(rows, routing, *w);
    OwnRows shared(w->reads_rounded() ? rows * RoundedRows{nullptr, w->in_features, w->groups.group}.stride() : 0);
    in_parallel(threads, [&](Team& team) {
        OwnRows own;
        product.run(x, *w, lora, y, h, shared.data(), own, team);
    });
}

template <class T>
void attend(const Attention<T>* attention, int64_t requests, int64_t threads) {
    AttentionPlan plan(attention->query_start, attention->context_lens, requests, attention->shape, threads);
    in_parallel(threads, [&](Team& team) {
        std::vector<float> scratch, results;
        plan.run(*attention, team, scratch, results);
    });
}

template <class T>
void rope_and_write_kv(T* qkv, const int64_t* positions, const float* cos_sin, const Cache* cache, const int64_t* slots,
                       int64_t tokens, const CacheShape* s) {
    T head[1024];
    for (int64_t t = 0; t < tokens; t++)
        rope_and_write<T>(qkv + t * (s->heads + 2 * s->kv_heads) * s->dim, cos_sin + positions[t] * s->dim, Norm{},
                          Norm{}, 0.0f, *cache, slots[t], is_last_of_request(slots, t, tokens), *s, head);
}

}  // namespace

#define EXPORT(T, suffix)                                                                                              \
    extern "C" {                                                                                                       \
    void forward_##suffix(const Model<T>* model, const Step<T>* step) { Forward<T>(*model, *step).run(); }             \
    int64_t packed_size_##suffix(int64_t out, int64_t in) { return num_panels(out) * kPanel * padded<T>(in); }         \
    void pack_##suffix(const T* w, T* packed, int64_t out, int64_t in, int64_t threads) {                              \
        pack(w, packed, out, in, threads);                                                                             \
    }                                                                                                                  \
    void linear_##suffix(const T* x, const Packed<T>* w, const LoraGroup<T>* lora, const Routing* routing, T* y,       \
                         T* h, int64_t rows, int64_t threads) {                                                        \
        linear(x, w, lora, routing, y, h, rows, threads);                                                              \
    }                                                                                                                  \
    void add_rms_norm_##suffix(const T* x, T* residual, const Norm* w, T* out, int64_t rows, int64_t n, float eps) {   \
        add_rms_norm(x, residual, *w, out, rows, n, eps);                                                              \
    }                                                                                                                  \
    void silu_and_mul_##suffix(const T* x, T* out, int64_t rows, int64_t n) {                                          \
        for (int64_t t = 0; t < rows; t++) silu_and_mul_row(x + t * 2 * n, out + t * n, n);                            \
    }                                                                                                                  \
    void gelu_and_mul_##suffix(const T* x, T* out, int64_t rows, int64_t n) {                                          \
        for (int64_t t = 0; t < rows; t++) gelu_and_mul_row(x + t * 2 * n, out + t * n, n);                            \
    }                                                                                                                  \
    void rope_and_write_kv_##suffix(T* qkv, const int64_t* positions, const float* cos_sin, const Cache* cache,        \
                                    const int64_t* slots, int64_t tokens, const CacheShape* shape) {                   \
        rope_and_write_kv(qkv, positions, cos_sin, cache, slots, tokens, shape);                                       \
    }                                                                                                                  \
    void embed_##suffix(const Packed<T>* embedding, const int64_t* token_ids, T* out, int64_t tokens) {                \
        for (int64_t t = 0; t < tokens; t++) embed_row(*embedding, token_ids[t], out + t * embedding->in_features);    \
    }                                                                                                                  \
    void attend_##suffix(const Attention<T>* attention, int64_t requests, int64_t threads) {                           \
        attend(attention, requests, threads);                                                                          \
    }                                                                                                                  \
    }

EXPORT(float, f32)
EXPORT(bf16, bf16)

// Returns whether products of bf16 use the matrix unit from now on.
extern "C" int64_t use_matrix_unit(int64_t is_on) {
    matrix_unit_is_on = is_on != 0;
    return uses_matrix_unit<bf16>();
}

extern "C" {
int64_t packed_size_groups(int64_t out, int64_t in, const Groups* w) { return num_panels(out) * w->panel_bytes(in); }
void pack_groups(const uint8_t* values, const uint8_t* scales, const uint8_t* offsets, uint8_t* packed, int64_t out, int64_t in,
                 const Groups* w, int64_t threads) {
    pack_in_groups(values, scales, offsets, packed, out, in, *w, threads);
}
int64_t rounded_bytes(int64_t in, const Groups* w) { return RoundedRows{nullptr, in, w->group}.stride(); }
}
