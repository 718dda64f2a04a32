// attention_prefill_f8: attention whose q, k and v are f8e4m3, multiplied as they are on Hopper's tensor cores.
//
// The opt-in entry attention_prefill.f8e4m3 calls it. The first kernel transposes V into the workspace (2 b hk sk dv
// bytes read and written); the second (prefill_f8_kernel.cuh) does 2 b hq sq sk (d + dv) flops, half of that if causal.
#include <cuda_runtime.h>

#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/prefill_f8_kernel.cuh"

namespace rapt::cuda {
namespace {

constexpr int kBlockKeys = 128, kTransposeThreads = 256;

std::int64_t padded_keys(const AttentionParams& p) {
  return ceil_div(p.sk, kBlockKeys) * kBlockKeys;
}

// Writes V as [b][hk][column][key], a block of keys at a time, with zeros past the last key. Keys of each 16 are in the
// order of the weights in a lane's registers: place 4 t + n holds key 2 t + n % 2 + n / 2 * 8.
template <int kSize>
__global__ void __launch_bounds__(kTransposeThreads)
    prefill_f8_transpose_values(const __grid_constant__ AttentionParams p, std::uint8_t* to, std::int64_t row_keys,
                                unsigned head_blocks) {
  constexpr int kWords = kSize / 4, kKeyTiles = kBlockKeys / 16;  // words of a key; groups of 16 keys in a block
  __shared__ uint4 columns[kSize][kKeyTiles];
  launch_dependent_grids();
  const unsigned head = blockIdx.x / head_blocks;
  const std::int64_t first = std::int64_t{blockIdx.x - head * head_blocks} * kBlockKeys, b = head / p.hk,
                     hk = head - b * p.hk;
  const auto* const from = static_cast<const std::uint8_t*>(p.v) + b * p.v_stride.b + hk * p.v_stride.h;
  for (int i = static_cast<int>(threadIdx.x); i < kWords * kKeyTiles; i += kTransposeThreads) {
    const int word = i % kWords, sixteen = i / kWords;
    std::uint32_t x[16];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const std::int64_t key = first + sixteen * 16 + n;
      x[n] = key < p.sk ? *reinterpret_cast<const std::uint32_t*>(from + key * p.v_stride.s + 4 * word) : 0;
    }
    std::uint32_t y[4][4];  // [column][four keys]
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const std::uint32_t low_a = __byte_perm(x[2 * t], x[2 * t + 1], 0x5140),
                          high_a = __byte_perm(x[2 * t], x[2 * t + 1], 0x7362),
                          low_b = __byte_perm(x[2 * t + 8], x[2 * t + 9], 0x5140),
                          high_b = __byte_perm(x[2 * t + 8], x[2 * t + 9], 0x7362);
      y[0][t] = __byte_perm(low_a, low_b, 0x5410), y[1][t] = __byte_perm(low_a, low_b, 0x7632);
      y[2][t] = __byte_perm(high_a, high_b, 0x5410), y[3][t] = __byte_perm(high_a, high_b, 0x7632);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
      columns[4 * word + n][sixteen ^ word % kKeyTiles] = make_uint4(y[n][0], y[n][1], y[n][2], y[n][3]);
  }
  __syncthreads();
  std::uint8_t* const rows = to + std::int64_t{head} * kSize * row_keys + first;
  for (int i = static_cast<int>(threadIdx.x); i < kSize * kKeyTiles; i += kTransposeThreads) {
    const int column = i / kKeyTiles, sixteen = i % kKeyTiles;
    *reinterpret_cast<uint4*>(rows + column * row_keys + 16 * sixteen) =
        columns[column][sixteen ^ column / 4 % kKeyTiles];
  }
}

template <class C>
bool make_maps(PrefillF8Params& params, const std::byte* transposed) {
  const AttentionParams& p = params.p;
  constexpr DType kType = DType::f8e4m3;
  const std::int64_t keys = padded_keys(p), heads = p.hk * p.group;
  return make_map(
             params.q, kType, p.q,
             {{p.d, 1, C::kSize}, {p.sq, p.q_stride.s, C::kRows}, {heads, p.q_stride.h, 1}, {p.b, p.q_stride.b, 1}}) &&
         make_map(
             params.k, kType, p.k,
             {{p.d, 1, C::kSize}, {p.sk, p.k_stride.s, C::kKeys}, {p.hk, p.k_stride.h, 1}, {p.b, p.k_stride.b, 1}}) &&
         make_map(params.v, kType, transposed,
                  {{keys, 1, C::kKeys}, {p.dv, keys, C::kSize}, {p.hk, p.dv * keys, 1}, {p.b, p.hk * p.dv * keys, 1}});
}

template <int kSize>
std::optional<cudaError_t> launch(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  using C = F8Config<kSize>;
  PrefillF8Params params{.p = p};
  if (!make_maps<C>(params, workspace)) return std::nullopt;
  const std::int64_t tiles = ceil_div(p.sq, C::kRows), all_tiles = tiles * p.b * p.hk * p.group;
  params.tiles = static_cast<int>(tiles), params.all_tiles = static_cast<int>(all_tiles);
  const Sequence sequence{0, 0, p.sq, p.sk, 0};
  constexpr std::int64_t kFar = 1 << 30;
  const std::int64_t limit = std::min(p.sk + p.sq, kFar);  // further than all keys from any row
  params.window = static_cast<int>(
      p.score.right == kOpen ? limit : clamp_to(row_offset(p.score, sequence) + p.score.right + 1, -limit, limit));
  // Causal: the longest tiles of all heads first, or the last tiles to begin would be the last to end. Also if the keys
  // of all heads fit in L2.
  params.heads_first = params.window < p.sk || p.b * p.hk * p.sk * p.d < 18'000'000;
  const Strides& s = p.out_stride;
  params.pairs = p.out_type == DType::bf16 && s.d == 1 && reinterpret_cast<std::uintptr_t>(p.out) % 4 == 0 &&
                 (s.b | s.h | s.s) % 2 == 0;
  const auto head_blocks = static_cast<unsigned>(padded_keys(p) / kBlockKeys);
  const cudaError_t status = launch_kernel(
      false, prefill_f8_transpose_values<kSize>, static_cast<unsigned>(p.b * p.hk) * head_blocks, kTransposeThreads, 0,
      stream, p, reinterpret_cast<std::uint8_t*>(workspace), padded_keys(p), head_blocks);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(multiprocessors(), all_tiles));
  return launch_kernel(true, attention_prefill_f8<C>, blocks, C::kThreads, C::kSharedBytes, stream, params);
}

// Whether rows of q, k and v are aligned to 16 bytes, and a head's queries have one scale.
bool can_load(const AttentionParams& p) {
  return p.sk > 0 && is_vector(p.q, p.q_stride, 1) && is_vector(p.k, p.k_stride, 1) && is_vector(p.v, p.v_stride, 1) &&
         (!p.q_scale || p.q_scale_stride.s == 0);
}

}  // namespace

std::size_t prefill_f8_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(p.b * p.hk * p.dv * padded_keys(p));
}

std::optional<cudaError_t> launch_attention_prefill_f8(const AttentionParams& p, std::byte* workspace,
                                                       cudaStream_t stream) {
  if (!can_load(p)) return std::nullopt;
  return p.d == 64 ? launch<64>(p, workspace, stream) : launch<128>(p, workspace, stream);
}

}  // namespace rapt::cuda
