// Division of a step's attention into pieces for a team. Most tiles are one piece. A tile that would delay the team is
// divided by spans of keys (split-KV: Dao et al., Flash-Decoding, 2023); the thread that finishes its last span merges
// them in order.
#pragma once
#include <atomic>
#include <vector>

#include "attention.h"
#include "team.h"

class AttentionPlan {
  public:
    AttentionPlan(const int32_t* query_start, const int32_t* context_lens, int64_t requests, const CacheShape& shape,
                  int64_t threads)
        : dim_(shape.dim), group_(shape.heads / shape.kv_heads) {
        std::vector<int64_t> spans;
        int64_t work = 0;
        for (int32_t i = 0; i < requests; i++)
            for (int32_t last = query_start[i + 1]; last > query_start[i]; last -= kQueries)  // the longest first
                for (int32_t h = 0; h < shape.kv_heads; h++) {
                    tiles_.push_back({i, h, std::max<int32_t>(query_start[i], last - kQueries), last});
                    const int64_t keys = context_lens[i] - (query_start[i + 1] - last);
                    spans.push_back((keys + kSpanKeys - 1) / kSpanKeys);
                    work += spans.back() * rows(tiles_.back());
                }
        left_ = std::vector<Left>(tiles_.size());
        partials_.resize(tiles_.size());
        int64_t used = 0;
        std::vector<Piece> whole;
        for (int64_t i = 0; i < int64_t(tiles_.size()); i++) {
            if (spans[i] == 1 || spans[i] * rows(tiles_[i]) * kPiecesPerThread * threads < work) {
                whole.push_back({i, -1});
                continue;
            }
            left_[i].spans = spans[i];
            partials_[i] = used;
            used += spans[i] * Partial::size(rows(tiles_[i]), dim_);
            for (int64_t span = 0; span < spans[i]; span++) pieces_.push_back({i, span});
        }
        pieces_.insert(pieces_.end(), whole.begin(), whole.end());
        memory_.resize(used);
    }

    // Every thread of the team calls it once per phase. scratch: the thread's own.
    template <class T>
    void run(const Attention<T>& attention, Team& team, std::vector<float>& scratch, std::vector<float>& results) {
        for (int64_t i = team.take(); i < int64_t(pieces_.size()); i = team.take()) {
            const Piece& piece = pieces_[i];
            const Tile& tile = tiles_[piece.tile];
            const Range spans = attention.spans(tile);
            if (piece.span < 0) {
                results.resize(2 * Partial::size(rows(tile), dim_));
                const Partial total(results.data(), rows(tile), dim_);
                const Partial next(results.data() + Partial::size(rows(tile), dim_), rows(tile), dim_);
                attention.attend_span(tile, spans.begin, total, scratch);
                for (int64_t span = spans.begin + 1; span < spans.end; span++) {
                    attention.attend_span(tile, span, next, scratch);
                    attention.merge(total, next, rows(tile));
                }
                attention.write(tile, total);
                continue;
            }
            if (piece.span >= spans.begin)
                attention.attend_span(tile, piece.span, partial(piece.tile, piece.span), scratch);
            Left& left = left_[piece.tile];
            if (left.done.fetch_add(1, std::memory_order_acq_rel) + 1 < left.spans) continue;
            left.done.store(0, std::memory_order_relaxed);  // for the next layer, which is behind a barrier
            const Partial total = partial(piece.tile, spans.begin);
            for (int64_t span = spans.begin + 1; span < spans.end; span++)
                attention.merge(total, partial(piece.tile, span), rows(tile));
            attention.write(tile, total);
        }
    }

  private:
    static constexpr int32_t kQueries = 16;  // query positions that share a pass over the keys
    static constexpr int64_t kPiecesPerThread = 4;

    struct Piece {
        int64_t tile, span;  // span -1: all of the tile
    };
    struct Left {
        std::atomic<int64_t> done{0};
        int64_t spans = 0;
    };

    int64_t rows(const Tile& tile) const { return (tile.last - tile.first) * group_; }
    Partial partial(int64_t tile, int64_t span) {
        const int64_t size = Partial::size(rows(tiles_[tile]), dim_);
        return Partial(memory_.data() + partials_[tile] + span * size, rows(tiles_[tile]), dim_);
    }

    const int64_t dim_, group_;
    std::vector<Tile> tiles_;
    std::vector<Piece> pieces_;
    std::vector<Left> left_;
    std::vector<int64_t> partials_;  // offset of each tile's partial results in memory_
    std::vector<float> memory_;
};
