// Products of one warp on tensor cores (mma.sync): D[16 x 8] += A[16 x 16] B[16 x 8]. Lane i has of D, in rows
// i / 4 and i / 4 + 8, columns 2 (i % 4) and the next. Matrices come from shared memory in tiles of 8 x 8, a row of 16
// bytes at the address that one lane gives: lanes 0 to 7 those of the first tile, and so on.
#pragma once

#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// Four tiles: A, or B of two products whose k is along the rows.
__device__ inline void load_tiles(std::uint32_t (&x)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// Each tile transposed: B of two products whose k is along the columns.
__device__ inline void load_tiles_transposed(std::uint32_t (&x)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

template <class T>
__device__ __forceinline__ void mma(float* d, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
#define RAPT_MMA(type)                                                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                            \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>) RAPT_MMA("f16");
  else RAPT_MMA("bf16");
#undef RAPT_MMA
}

__device__ inline float4 load16(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

}  // namespace rapt::cuda
