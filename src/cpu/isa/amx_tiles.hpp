// The tile instructions. The compiler's own intrinsics carry no memory clobber and would move across the vector code
// that writes what they read.
#pragma once

#include <cstdint>

namespace rapt::cpu::RAPT_ISA {

// The tile registers of the thread, configured while it lives; contents are undefined until loaded or zeroed.
class Tiles {
 public:
  Tiles() {
    alignas(64) std::uint8_t config[64] = {1};  // palette 1; bytes per row from 16 on, rows from 48 on
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // 16 rows of 64 bytes, `stride` bytes apart.
  template <int kTile>
  [[gnu::always_inline]] void load(const void* p, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // Likewise, for data that is read once and should not displace other data in L1.
  template <int kTile>
  [[gnu::always_inline]] void load_once(const void* p, std::int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] void store(void* p, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // c[m][n] += sum over k < 16 of a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]: a and b bf16, c fp32.
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  // c[m][n] += sum over k < 16 and i < 4 of a[m][4k + i] b[k][4n + i]: a of bytes without a sign, b with, c int32.
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] void int8_dot() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace rapt::cpu::RAPT_ISA
