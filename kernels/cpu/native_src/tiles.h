// Products of bf16 through the processor's matrix unit (Intel AMX): 16 rows x 32 inputs times 32 inputs x 16 columns per
// instruction. A panel of gemm.h already has the order that the unit reads, pairs of inputs beside each other.
#pragma once
#include <atomic>

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define LORAPLEX_TILES 1
#endif

constexpr int64_t kUnitRows = 16, kUnitInputs = 32;  // rows and inputs of a tile register
constexpr int64_t kPanelRows = 2 * kUnitRows;        // rows that share a pass over a panel

#if LORAPLEX_TILES

// Linux saves the tile registers of a process only after it has asked for that, once.
inline bool has_matrix_unit() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool is_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_allowed;
}

// GCC does not know which memory the tile instructions read, so it must finish its writes before them.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// A thread's use of the matrix unit. Registers: 0 to 3 sums (two of rows x two of columns), 4 and 5 rows of x, 6 and 7
// columns of the panel.
class MatrixUnit {
  public:
    ~MatrixUnit() {
        if (rows_) _tile_release();  // a thread without tiles is switched faster
    }

    // sums [rows, 32] = x [rows, inputs] times a panel; rows: 1 to 32. The sums of a row depend on that row alone.
    void multiply(const bf16* x, int64_t x_stride, const bf16* panel, int64_t rows, int64_t inputs, float* sums) {
        configure(rows);
        finish_writes();
        _tile_zero(0);
        _tile_zero(1);
        if (rows > kUnitRows) {
            _tile_zero(2);
            _tile_zero(3);
        }
        int64_t k = 0;
        for (; k + kUnitInputs <= inputs; k += kUnitInputs) step(x + k, x_stride, panel + k * kColumns, rows);
        if (k < inputs) {  // the rest, filled up with zeros
            bf16 last_x[kPanelRows * kUnitInputs] = {}, last_panel[kUnitInputs * kColumns] = {};
            for (int64_t row = 0; row < rows; row++)
                std::memcpy(last_x + row * kUnitInputs, x + row * x_stride + k, (inputs - k) * sizeof(bf16));
            std::memcpy(last_panel, panel + k * kColumns, (inputs - k + 1) / 2 * 2 * kColumns * sizeof(bf16));
            finish_writes();
            step(last_x, kUnitInputs, last_panel, rows);
        }
        constexpr int64_t bytes = kColumns * sizeof(float);
        _tile_stored(0, sums, bytes);
        _tile_stored(1, sums + 16, bytes);
        if (rows > kUnitRows) {
            _tile_stored(2, sums + kUnitRows * kColumns, bytes);
            _tile_stored(3, sums + kUnitRows * kColumns + 16, bytes);
        }
    }

  private:
    static constexpr int64_t kColumns = 32;

    static void step(const bf16* x, int64_t x_stride, const bf16* panel, int64_t rows) {
        constexpr int64_t panel_bytes = 2 * kColumns * sizeof(bf16);
        const int64_t x_bytes = x_stride * sizeof(bf16);
        _tile_loadd(6, panel, panel_bytes);
        _tile_loadd(7, panel + kColumns, panel_bytes);
        _tile_loadd(4, x, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > kUnitRows) {
            _tile_loadd(5, x + kUnitRows * x_stride, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    void configure(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const int64_t first = std::min(rows, kUnitRows), second = std::max<int64_t>(rows - kUnitRows, 1);
        for (int i = 0; i < 8; i++) {
            config.bytes[i] = 64;
            config.rows[i] = uint8_t(i >= 6 ? kUnitInputs / 2 : i == 2 || i == 3 || i == 5 ? second : first);
        }
        finish_writes();
        _tile_loadconfig(&config);
    }

    int64_t rows_ = 0;
};

#else

inline bool has_matrix_unit() { return false; }
class MatrixUnit {
  public:
    void multiply(const bf16*, int64_t, const bf16*, int64_t, int64_t, float*) {}
};

#endif

// Off only in tests, which compare both ways.
inline std::atomic<bool> matrix_unit_is_on{true};

template <class T>
bool uses_matrix_unit() {
    return std::is_same_v<T, bf16> && has_matrix_unit() && matrix_unit_is_on.load(std::memory_order_relaxed);
}
