// Threads that share one parallel region for a whole forward pass. A barrier costs a fraction of a microsecond; leaving
// and entering a region would put threads to sleep and wake them.
#pragma once
#include <atomic>
#include <cstdint>
#include <omp.h>
#include <optional>
#include <sched.h>

#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct Range {
    int64_t begin, end;
};
// This thread's contiguous share of n pieces.
inline Range share(int64_t n, int thread, int threads) { return {n * thread / threads, n * (thread + 1) / threads}; }

class Team {
  public:
    explicit Team(int size) : size_(size), taken_(kKinds * size) {}
    int size() const { return size_; }

    // Every thread calls it; the last thread to arrive releases the others.
    void barrier() {
        const uint64_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            for (auto& count : taken_) count.at.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
#if defined(__x86_64__)
            _mm_pause();
#endif
            // The missing thread may have lost its core to another program; yield ours to it.
            if (spins > 1000) sched_yield();
        }
    }

    // The next piece of work of this phase; barrier() resets the counts. Any free thread takes it, so a thread that
    // lost its core to another program delays one piece, not half of the phase.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // The next of n pieces that are consecutive in memory; n if none are left. A thread processes its own run first, so
    // that the processor's prefetchers see one stream across pieces, then helps with the others' runs. A phase may have
    // two kinds of pieces.
    int64_t take_near(int64_t n, int thread, int kind = 0) {
        for (int i = 0; i < size_; i++) {
            const int owner = (thread + i) % size_;
            const Range run = share(n, owner, size_);
            const int64_t at = run.begin + taken_[kind * size_ + owner].at.fetch_add(1, std::memory_order_relaxed);
            if (at < run.end) return at;
        }
        return n;
    }

  private:
    static constexpr int kKinds = 2;
    struct alignas(64) Count {
        std::atomic<int64_t> at{0};
    };
    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint64_t> round_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::vector<Count> taken_;
};

// Runs `work` on a team of at most `threads`. OpenMP may start fewer (OMP_DYNAMIC, OMP_THREAD_LIMIT). The team has
// exactly as many as it started, because a barrier would wait for missing threads for ever.
template <class Work>
void in_parallel(int64_t threads, Work work) {
    std::optional<Team> team;
#pragma omp parallel num_threads(int(threads))
    {
#pragma omp single
        team.emplace(omp_get_num_threads());
        work(*team);
    }
}
