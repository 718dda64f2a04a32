// PTX of Hopper (sm_90a) as thin functions: mbarriers, bulk and tensor copies (TMA), cp.async, wgmma, clusters, and the
// fences that order them. Shared memory is addressed by 32-bit addresses.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace rapt::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// A number that is the same in all lanes, made known as such to the compiler, which then uses uniform registers.
__device__ inline int uniform(int x) {
  return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(x)));
}

// mbarriers: a phase completes after `count` arrivals and all announced bytes; waiters name the phase by its parity.
__device__ inline void barrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nRETRY:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra RETRY;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers, for some of the warps of a block: `threads` threads sync or arrive in all.
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Clusters. cluster_sync(): for all threads that have not exited; their writes are visible afterwards.
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline unsigned cluster_size() {
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same address in the shared memory of the cluster's block `rank`, and loads from there.
__device__ inline std::uint32_t in_cluster(std::uint32_t address, unsigned rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ inline float cluster_load4(std::uint32_t from) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
__device__ inline float4 cluster_load16(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Orders the thread's ordinary accesses to shared memory so far before later ones by TMA and wgmma, together with a
// barrier between them.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Changes the warpgroup's registers per thread.
template <int kCount>
__device__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// L2 cache hints.
constexpr std::uint64_t kEvictLast = 0x14F0000000000000u, kEvictFirst = 0x12F0000000000000u;

// Loads a box of a tensor map to shared memory, with zeros where it leaves the tensor.
__device__ inline void tma_load(std::uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}
__device__ inline void tma_load(std::uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                std::uint32_t barrier, bool keep_in_l2) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(keep_in_l2 ? kEvictLast : kEvictFirst)
      : "memory");
}

// Stores a box from shared memory, except rows outside the tensor, and columns beyond its end rounded up to 16 bytes.
// Stores of a thread form groups. tma_store_wait_read(): all have read shared memory; tma_store_wait(): all are
// complete.
__device__ inline void tma_store(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(from)
               : "memory");
}
__device__ inline void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Copies `bytes` contiguous bytes, a multiple of 16.
__device__ inline void bulk_load(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier,
                                 bool keep_in_l2) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(keep_in_l2 ? kEvictLast : kEvictFirst)
      : "memory");
}

// The other way; forms groups as tma_store() does.
__device__ inline void bulk_store(void* to, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// cp.async of `bytes` of 16 bytes, with zeros for the rest, which is not read. Both addresses are multiples of 16.
__device__ inline void copy16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// cp.async of 4 bytes.
__device__ inline void copy4(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for the thread's copies, except those of its kPending last groups.
template <int kPending>
__device__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Arrives at a barrier once all of the thread's copies so far are done; counts as one of the barrier's arrivals.
__device__ inline void barrier_arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Loads 16 bytes of read-only data. The compiler does not move it, so that later code need not wait for it.
__device__ inline uint4 load16_ahead(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
__device__ inline void store1(std::uint32_t to, std::uint8_t x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(static_cast<std::uint32_t>(x)) : "memory");
}
__device__ inline void store2(std::uint32_t to, std::uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}
__device__ inline void store4(std::uint32_t to, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
// Stores what is soon read again, to stay in L2.
__device__ inline void keep16(float* to, const float4& x) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w), "l"(policy)
               : "memory");
}
__device__ inline void store8(std::uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ inline void store8(std::uint32_t to, const uint2& x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
}
__device__ inline void store16(std::uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ inline float load4(std::uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
__device__ inline float2 load8(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}
__device__ inline float4 load16(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Stores four matrices of 8 x 8 16-bit elements, a word of each in every lane, as in wgmma fragments; lane i gives the
// address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(std::uint32_t row, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                      std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// fminf() would drop a NaN.
__device__ inline float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

// Two fp32 numbers rounded to nearest even, the first in the lower half.
template <class T>
__device__ std::uint32_t pack(float low, float high) {
  std::uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// wgmma: D[64 x N] (+)= A[64 x 16] B[16 x N], by 128 threads, asynchronously. wgmma_fence(): before the first, and
// after registers were written. wgmma_commit() closes a group; wgmma_wait() leaves at most kPending groups running.
// pin() keeps the compiler from moving accesses to accumulators across these.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void pin(std::uint32_t& x) {
  asm volatile("" : "+r"(x)::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(d[i]);
}

// Matrices lie in shared memory in panels of rows of 128 bytes with the 128-byte swizzle: 16-byte chunk c of row r is
// stored at c ^ (r % 8). Or in rows of 64 bytes with the 64-byte swizzle: at c ^ (r / 2 % 4).
template <int kRowBytes>
__device__ inline int chunk_place(int row, int chunk) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return kRowBytes == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
}

// The half of a descriptor in which such matrices differ. Groups of 8 rows are contiguous; panel_stride is the distance
// to the next panel, where a product spans several (B read by columns). Adding n moves the start by 16 n bytes.
__device__ inline std::uint32_t matrix_at(std::uint32_t address, int panel_stride = 16) {
  return (address & 0x3ffff) >> 4 | static_cast<std::uint32_t>(panel_stride >> 4) << 16;
}
// The whole descriptor.
template <int kRowBytes>
__device__ inline std::uint64_t descriptor(std::uint32_t matrix) {
  constexpr std::uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2, kEightRows = 8 * kRowBytes;
  return (kEightRows >> 4 << 32 | kSwizzle << 62) + matrix;
}

// Operands of a product: accumulators first, as %0 to %(N / 2 - 1).
#define RAPT_TEN(tens)                                                                                      \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens \
  "8,%" #tens "9,"
#define RAPT_NAMES_32 RAPT_TEN() "%10,%11,%12,%13,%14,%15"
#define RAPT_NAMES_48 RAPT_TEN() RAPT_TEN(1) "%20,%21,%22,%23"
#define RAPT_NAMES_64 RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) "%30,%31"
#define RAPT_NAMES_80 RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define RAPT_NAMES_96 RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) RAPT_TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define RAPT_NAMES_128 RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) RAPT_TEN(3) RAPT_TEN(4) RAPT_TEN(5) "%60,%61,%62,%63"
// clang-format off
#define RAPT_NAMES_192                                                                                      \
  RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) RAPT_TEN(3) RAPT_TEN(4) RAPT_TEN(5) RAPT_TEN(6) RAPT_TEN(7)            \
  RAPT_TEN(8) "%90,%91,%92,%93,%94,%95"
#define RAPT_NAMES_256                                                                                      \
  RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) RAPT_TEN(3) RAPT_TEN(4) RAPT_TEN(5) RAPT_TEN(6) RAPT_TEN(7)            \
  RAPT_TEN(8) RAPT_TEN(9) RAPT_TEN(10) RAPT_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127"
// clang-format on
#define RAPT_FOUR(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define RAPT_SIXTEEN(i) RAPT_FOUR(i), RAPT_FOUR((i) + 4), RAPT_FOUR((i) + 8), RAPT_FOUR((i) + 12)
#define RAPT_SUMS_32 RAPT_SIXTEEN(0)
#define RAPT_EIGHT(i) RAPT_FOUR(i), RAPT_FOUR((i) + 4)
#define RAPT_SUMS_48 RAPT_SUMS_32, RAPT_EIGHT(16)
#define RAPT_SUMS_64 RAPT_SUMS_32, RAPT_SIXTEEN(16)
#define RAPT_SUMS_80 RAPT_SUMS_64, RAPT_EIGHT(32)
#define RAPT_SUMS_96 RAPT_SUMS_64, RAPT_SIXTEEN(32)
#define RAPT_SUMS_128 RAPT_SUMS_64, RAPT_SIXTEEN(32), RAPT_SIXTEEN(48)
#define RAPT_SUMS_192 RAPT_SUMS_128, RAPT_SIXTEEN(64), RAPT_SIXTEEN(80)
#define RAPT_SUMS_256 RAPT_SUMS_192, RAPT_SIXTEEN(96), RAPT_SIXTEEN(112)

#define RAPT_WGMMA(n, type, operands, flag, ...)                                                                  \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #flag                                                     \
               ", 0;\n"                                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" RAPT_NAMES_##n "}, " operands \
                                                                                                   ";\n}"         \
               : RAPT_SUMS_##n                                                                                    \
               : __VA_ARGS__, "r"(add))
#define RAPT_WGMMA_TYPED(n, operands, flag, ...)                                              \
  if constexpr (std::is_same_v<T, __half>) RAPT_WGMMA(n, "f16", operands, flag, __VA_ARGS__); \
  else RAPT_WGMMA(n, "bf16", operands, flag, __VA_ARGS__)

// d (+)= a b^T with A and B in shared memory, both with k innermost.
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[16], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(32, "%16, %17, add, 1, 1, 0, 0", 18, "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[32], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(64, "%32, %33, add, 1, 1, 0, 0", 34, "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[40], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(80, "%40, %41, add, 1, 1, 0, 0", 42, "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[48], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(96, "%48, %49, add, 1, 1, 0, 0", 50, "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[64], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(128, "%64, %65, add, 1, 1, 0, 0", 66, "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)));
}
// The same with A in registers.
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_abt(float (&d)[16], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(32, "{%16, %17, %18, %19}, %20, add, 1, 1, 0", 21, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
// d (+)= a b with A in registers, and B in shared memory with k outermost.
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[24], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(48, "{%24, %25, %26, %27}, %28, add, 1, 1, 1", 29, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[32], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(64, "{%32, %33, %34, %35}, %36, add, 1, 1, 1", 37, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[40], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(80, "{%40, %41, %42, %43}, %44, add, 1, 1, 1", 45, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[48], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(96, "{%48, %49, %50, %51}, %52, add, 1, 1, 1", 53, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[64], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(128, "{%64, %65, %66, %67}, %68, add, 1, 1, 1", 69, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[96], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(192, "{%96, %97, %98, %99}, %100, add, 1, 1, 1", 101, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[128], const std::uint32_t* a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(256, "{%128, %129, %130, %131}, %132, add, 1, 1, 1", 133, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(descriptor<kRowBytes>(b)));
}

// d (+)= a b with both in shared memory.
template <class T, int kRowBytes = 128>
__device__ __forceinline__ void wgmma_ab(float (&d)[128], std::uint32_t a, std::uint32_t b, int add) {
  RAPT_WGMMA_TYPED(256, "%128, %129, add, 1, 1, 0, 1", 130, "l"(descriptor<kRowBytes>(a)),
                   "l"(descriptor<kRowBytes>(b)));
}

#undef RAPT_TEN
#undef RAPT_NAMES_32
#undef RAPT_NAMES_48
#undef RAPT_NAMES_64
#undef RAPT_NAMES_80
#undef RAPT_NAMES_96
#undef RAPT_NAMES_128
#undef RAPT_NAMES_192
#undef RAPT_NAMES_256
#undef RAPT_FOUR
#undef RAPT_EIGHT
#undef RAPT_SIXTEEN
#undef RAPT_SUMS_32
#undef RAPT_SUMS_48
#undef RAPT_SUMS_64
#undef RAPT_SUMS_80
#undef RAPT_SUMS_96
#undef RAPT_SUMS_128
#undef RAPT_SUMS_192
#undef RAPT_SUMS_256
#undef RAPT_WGMMA
#undef RAPT_WGMMA_TYPED

}  // namespace rapt::cuda
