// attention_backward_naive: the gradients as docs/contract.md writes them, in sums of fp64: a check of all other
// kernels, and what attention_backward's tiles leave to it, the rows and keys whose gradients were not finite there.
//
// The entry attention_backward_naive.f32 calls it. One warp prepares a row; then a thread block has a row of dq, a key
// of dk and dv, or 128 keys of the bias.
#include <algorithm>

#include "cuda/kernels/backward_rows.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128;

__device__ float number(const void* base, DType type, const Strides& s, std::int64_t at, std::int64_t column) {
  return load(base, type, at + column * s.d);
}

// Eight neighbouring lanes prepare a row.
constexpr int kRowLanes = 8;
__device__ int lane_of_row() {
  return threadIdx.x % kRowLanes;
}
__device__ unsigned lanes_of_row() {
  return 0xffu << (threadIdx.x % 32 / kRowLanes * kRowLanes);
}
template <class X>
__device__ X sum_of_lanes(X x) {
#pragma unroll
  for (int bit = kRowLanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(lanes_of_row(), x, bit);
  return x;
}

// Whether the row sees one key and no sink, and its out is that key's value but for fp32's rounding. Then dP is equal
// to dout . out, and their difference would be nothing but the rounding of two sums in different orders.
__device__ bool attends_one_value(const AttentionBackwardParams& p, const Head& head, const Row& row) {
  if (row.last - row.first != 1 || p.score.sinks || p.out_type != p.kv_type) return false;
  const std::int64_t v = head.key_at(p.v_stride, row.first), out = row_at(p.out_stride, head, row);
  bool alike = true;
  for (std::int64_t c = lane_of_row(); c < p.dv; c += kRowLanes) {
    const float want = number(p.v, p.kv_type, p.v_stride, v, c);
    alike &= fabsf(number(p.out, p.out_type, p.out_stride, out, c) - want) <= 0x1p-22f * fabsf(want);
  }
  return __all_sync(lanes_of_row(), alike);
}

// Whether some key of the row's is hidden by neither mask nor bias.
__device__ bool sees_a_key(const AttentionBackwardParams& p, const Head& head, const Row& row) {
  if (!p.score.mask && !p.score.bias) return row.first < row.last;
  for (std::int64_t j = row.first; j < row.last; j += kRowLanes) {
    const std::int64_t key = j + lane_of_row();
    if (__any_sync(lanes_of_row(), key < row.last && finish_score(head, row, key, 0) != -kInfinity)) return true;
  }
  return false;
}

// dout . out of a row. `whole`: rows of bf16 or fp16, whose products are exact in fp32, come in multiples of 16 bytes.
__device__ double dot_of_row(const AttentionBackwardParams& p, const Head& head, const Row& row, bool whole) {
  const std::int64_t dout = row_at(p.dout_stride, head, row), out = row_at(p.out_stride, head, row);
  if (whole) {
    float sum = 0;
#pragma unroll 2
    for (int c = lane_of_row() * 8; c < p.dv; c += kRowLanes * 8) {
      const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.dout) + dout + c),
                  y = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.out) + out + c);
      const auto add = [&](std::uint32_t a, std::uint32_t b) {
        const float2 of_dout = two_of(p.dout_type, a), of_out = two_of(p.out_type, b);
        sum = fmaf(of_dout.x, of_out.x, sum), sum = fmaf(of_dout.y, of_out.y, sum);
      };
      add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w);
    }
    return static_cast<double>(sum_of_lanes(sum));
  }
  double sum = 0;
  for (std::int64_t c = lane_of_row(); c < p.dv; c += kRowLanes)
    sum += static_cast<double>(number(p.dout, p.dout_type, p.dout_stride, dout, c)) *
           static_cast<double>(number(p.out, p.out_type, p.out_stride, out, c));
  return sum_of_lanes(sum);
}

// A thread block has a tile of rows.
__global__ void __launch_bounds__(kThreads)
    prepare_rows(const __grid_constant__ AttentionBackwardParams p, BackwardRows rows, bool whole) {
  launch_dependent_grids();
  const int tile = static_cast<int>(blockIdx.x), tiles = static_cast<int>(BackwardTiling::tiles(p));
  for (std::int64_t i = tile; i < key_tiles(p); i += gridDim.x)
    if (threadIdx.x == 0) rows.key_masks[i] = 0;
  for (std::int64_t i = tile; i < BackwardBlocking::heads(p); i += gridDim.x)
    if (threadIdx.x == 0) rows.progress[i] = {0, 0};
  if (threadIdx.x == 0) rows.row_masks[tile] = 0;
  const auto place = BackwardTiling::find(p, tile / tiles, tile % tiles);
  const Head head(p, place.b, place.head / p.group);
  RowsOfTile& to = rows.tiles[tile];
  bool has_one_value = false;
  for (int i = threadIdx.x / kRowLanes; i < kBackwardTile; i += kThreads / kRowLanes) {
    if (place.row + i >= head.len_q) {
      to.lse_log2[i] = kInfinity, to.minus_delta[i] = 0, to.dp_factor[i] = 1;
      continue;
    }
    const Row row(head, place.row + i, place.head);
    const float lse = p.lse[row_at(p.lse_stride, head, row)];
    const double dlse = p.dlse ? static_cast<double>(p.dlse[row_at(p.dlse_stride, head, row)]) : 0;
    double delta = -dlse;
    float dp_factor = 1;
    if (sees_a_key(p, head, row)) delta += dot_of_row(p, head, row, whole);
    if (delta - delta == 0 && attends_one_value(p, head, row)) dp_factor = 0, delta = -dlse, has_one_value = true;
    if (lane_of_row() != 0) continue;
    // A row without keys has weights of 0; those of one that saw +inf are NaN, as the forward's.
    const double shifted = static_cast<double>(lse) * rapt::kLog2e + static_cast<double>(alibi_shift_log2(head, row)) -
                           static_cast<double>(kept_log2(p.score));
    to.lse_log2[i] = fabsf(lse) < kInfinity ? static_cast<float>(shifted) : lse < 0 ? kInfinity : not_a_number();
    const double kept = p.score.dropout.given && p.score.dropout.scale != 0 ? p.score.dropout.scale : 1;
    to.minus_delta[i] = static_cast<float>(-delta / kept), to.dp_factor[i] = dp_factor;
    if (!p.grad_sinks) continue;
    const float sink = load(p.score.sinks, p.score.sinks_type, row.q_head * p.score.sinks_stride);
    const double exponent = static_cast<double>(sink) - static_cast<double>(lse);
    const double weight = sink == -kInfinity ? 0 : exp(exponent > 0 ? 0 : exponent);
    rows.sink_share[std::int64_t{tile} * kBackwardTile + i] = weight == 0 ? 0.f : static_cast<float>(-weight * delta);
  }
  has_one_value = __syncthreads_or(has_one_value);
  if (threadIdx.x == 0) to.has_one_value = has_one_value ? 1 : 0;
}

// The derivatives of a pair of a row and a key.
struct Pair {
  bool hidden = true, dropped = true;
  double p = 0;  // the weight after dropout
  double ds = 0, dx = 0;
};
__device__ Pair differentiate(const AttentionBackwardParams& p, const BackwardRows& rows, const Head& head,
                              const Row& row, std::int64_t j) {
  const std::int64_t q = row_at(p.q_stride, head, row), k = head.key_at(p.k_stride, j);
  double dot = 0;
  for (std::int64_t c = 0; c < p.d; ++c)
    dot += static_cast<double>(number(p.q, p.q_type, p.q_stride, q, c)) *
           static_cast<double>(number(p.k, p.kv_type, p.k_stride, k, c));
  const auto x = static_cast<float>(dot * static_cast<double>(p.score.scale_log2));
  const float score = finish_score(head, row, j, x);
  if (score == -kInfinity) return {};
  const RowsOfTile& tile = rows.tiles[BackwardTiling::number(p, head.b, row.q_head, row.token)];
  const std::int64_t in_tile = row.token % kBackwardTile;
  // Clamped, because no weight is above the largest whatever rounding errors the score and lse have.
  const double exponent = static_cast<double>(score) - static_cast<double>(tile.lse_log2[in_tile]);
  const auto largest = static_cast<double>(kept_log2(p.score));
  const double weight = exp2(exponent > largest ? largest : exponent);
  const bool dropped = is_dropped(p.score, {head.b, row.q_head, row.token, j});
  double dp = 0;
  if (!dropped && tile.dp_factor[in_tile] != 0) {
    const std::int64_t dout = row_at(p.dout_stride, head, row), v = head.key_at(p.v_stride, j);
    for (std::int64_t c = 0; c < p.dv; ++c)
      dp += static_cast<double>(number(p.dout, p.dout_type, p.dout_stride, dout, c)) *
            static_cast<double>(number(p.v, p.kv_type, p.v_stride, v, c));
  }
  const double ds = weight * (dp + static_cast<double>(tile.minus_delta[in_tile]));
  return {false, dropped, dropped ? 0 : weight, ds, ds * score_derivative(p.score, static_cast<double>(x))};
}

// Adds up over the thread block's threads, in a fixed order.
__device__ double sum_of_block(double x) {
  __shared__ double parts[kThreads];
  parts[threadIdx.x] = x;
  for (int n = kThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) parts[threadIdx.x] += parts[threadIdx.x + n];
  }
  __syncthreads();
  x = parts[0];
  __syncthreads();
  return x;
}

// Calls f(tile, i) for the rows or keys i of tiles whose bits are set in masks.
template <class F>
__device__ void for_each_marked(std::int64_t tiles, const std::uint64_t* masks, F f) {
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    for (std::uint64_t mask = masks[tile]; mask != 0; mask &= mask - 1)
      f(tile, __ffsll(static_cast<long long>(mask)) - 1);
}

// One row of dq.
__device__ void differentiate_row(const AttentionBackwardParams& p, const BackwardRows& rows, const Head& head,
                                  const Row& row, double* dq) {
  __shared__ Pair pairs[kThreads];
  for (std::int64_t c = threadIdx.x; c < p.d; c += kThreads) dq[c] = 0;
  double slope = 0;
  for (std::int64_t first = row.first; first < row.last; first += kThreads) {
    const std::int64_t j = first + threadIdx.x;
    __syncthreads();
    pairs[threadIdx.x] = j < row.last ? differentiate(p, rows, head, row, j) : Pair();
    slope -= pairs[threadIdx.x].ds * fabs(static_cast<double>(row.token + head.offset - j));
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < p.d; c += kThreads)
      for (std::int64_t i = 0; i < min(row.last - first, std::int64_t{kThreads}); ++i) {
        if (pairs[i].hidden) continue;
        const std::int64_t k = head.key_at(p.k_stride, first + i);
        dq[c] += pairs[i].dx * static_cast<double>(number(p.k, p.kv_type, p.k_stride, k, c));
      }
  }
  const Gradient& to = p.grad_q;
  for (std::int64_t c = threadIdx.x; to && c < p.d; c += kThreads)
    store(to.data, to.type, row_at(to.stride, head, row) + c * to.stride.d,
          static_cast<float>(dq[c] * static_cast<double>(p.scale)));
  if (!p.grad_alibi) return;
  slope = sum_of_block(slope);
  if (threadIdx.x == 0) rows.slope_share[row_number(head, row.q_head, row.token)] = static_cast<float>(slope);
}

// Row i of a tile, which may not exist.
__device__ void differentiate_row_of(const AttentionBackwardParams& p, const BackwardRows& rows, std::int64_t tile,
                                     std::int64_t i, double* sums) {
  const std::int64_t tiles = BackwardTiling::tiles(p);
  const auto place = BackwardTiling::find(p, static_cast<int>(tile / tiles), static_cast<int>(tile % tiles));
  const Head head(p, place.b, place.head / p.group);
  if (place.row + i < head.len_q) differentiate_row(p, rows, head, Row(head, place.row + i, place.head), sums);
}
__global__ void differentiate_rows(const __grid_constant__ AttentionBackwardParams p, BackwardRows rows) {
  extern __shared__ double sums[];
  differentiate_row_of(p, rows, blockIdx.x / kBackwardTile, blockIdx.x % kBackwardTile, sums);
}

// One key's rows of dk and dv.
__device__ void differentiate_key(const AttentionBackwardParams& p, const BackwardRows& rows, const Head& head,
                                  std::int64_t j, double* dk) {
  __shared__ Pair pairs[kThreads];
  double* const dv = dk + p.d;
  for (std::int64_t c = threadIdx.x; c < p.d + p.dv; c += kThreads) dk[c] = 0;
  const std::int64_t count = head.len_q * p.group;
  for (std::int64_t first = 0; first < count; first += kThreads) {
    const std::int64_t r = first + threadIdx.x;
    bool sees = r < count;
    Row row;
    if (sees) row = Row(head, r), sees = j >= row.first && j < row.last;
    if (!__syncthreads_or(sees)) continue;
    pairs[threadIdx.x] = sees ? differentiate(p, rows, head, row, j) : Pair();
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < p.d + p.dv; c += kThreads)
      for (std::int64_t i = 0; i < kThreads; ++i) {
        if (pairs[i].hidden || (c >= p.d && pairs[i].dropped)) continue;
        const Row other(head, first + i);
        if (c < p.d)
          dk[c] +=
              pairs[i].dx * static_cast<double>(number(p.q, p.q_type, p.q_stride, row_at(p.q_stride, head, other), c));
        else
          dk[c] += pairs[i].p * static_cast<double>(number(p.dout, p.dout_type, p.dout_stride,
                                                           row_at(p.dout_stride, head, other), c - p.d));
      }
  }
  const auto put = [&](const Gradient& to, const double* x, double scale, std::int64_t n) {
    for (std::int64_t c = threadIdx.x; to && c < n; c += kThreads)
      store(to.data, to.type, head.key_at(to.stride, j) + c * to.stride.d, static_cast<float>(x[c] * scale));
  };
  __syncthreads();
  put(p.grad_k, dk, static_cast<double>(p.scale), p.d), put(p.grad_v, dv, 1, p.dv);
  __syncthreads();
}

__device__ void differentiate_key_of(const AttentionBackwardParams& p, const BackwardRows& rows, std::int64_t tile,
                                     std::int64_t i, double* sums) {
  const auto place = BackwardBlocking::find(p, tile);
  const Head head(p, place.b, place.hk);
  if (place.key + i < (p.total_k < 0 ? p.sk : head.len_k)) differentiate_key(p, rows, head, place.key + i, sums);
}
__global__ void differentiate_keys(const __grid_constant__ AttentionBackwardParams p, BackwardRows rows) {
  extern __shared__ double sums[];
  differentiate_key_of(p, rows, blockIdx.x / kBackwardTile, blockIdx.x % kBackwardTile, sums);
}

// The rows and keys in the masks.
__global__ void differentiate_marked(const __grid_constant__ AttentionBackwardParams p, BackwardRows rows) {
  extern __shared__ double sums[];
  wait_on_dependent_grids();
  for_each_marked(row_tiles(p), rows.row_masks,
                  [&](std::int64_t tile, std::int64_t i) { differentiate_row_of(p, rows, tile, i, sums); });
  for_each_marked(key_tiles(p), rows.key_masks,
                  [&](std::int64_t tile, std::int64_t i) { differentiate_key_of(p, rows, tile, i, sums); });
}

// dS of 128 neighbouring keys of a bias, summed over the dimensions that it broadcasts over.
__global__ void differentiate_bias(const __grid_constant__ AttentionBackwardParams p, BackwardRows rows) {
  const auto summed = [](std::int64_t size, std::int64_t index, std::int64_t all) {
    return size == 1 ? KeyRange{0, all} : KeyRange{index, min(index + 1, all)};
  };
  const std::int64_t pieces = ceil_div(p.grad_bias_k, std::int64_t{kThreads});
  std::int64_t item = blockIdx.x / pieces;
  const std::int64_t key = blockIdx.x % pieces * kThreads + threadIdx.x, row_index = item % p.grad_bias_q;
  item /= p.grad_bias_q;
  const std::int64_t b_index = item / p.grad_bias_h, h_index = item % p.grad_bias_h;
  const bool one_key = p.grad_bias_k == 1;
  const KeyRange batch = summed(p.grad_bias_b, b_index, p.b), heads = summed(p.grad_bias_h, h_index, p.hq);
  double sum = 0;
  for (std::int64_t b = batch.first; b < batch.last; ++b)
    for (std::int64_t h = heads.first; h < heads.last; ++h) {
      const Head head(p, b, h / p.group);
      const KeyRange tokens = summed(p.grad_bias_q, row_index, head.len_q);
      for (std::int64_t token = tokens.first; token < tokens.last; ++token) {
        const Row row(head, token, h);
        for (std::int64_t j = key; j < row.last; j += kThreads) {
          if (j >= row.first) sum += differentiate(p, rows, head, row, j).ds;
          if (!one_key) break;
        }
      }
    }
  if (one_key) sum = sum_of_block(sum);
  const Strides& to = p.grad_bias.stride;
  if (key < p.grad_bias_k)
    store(p.grad_bias.data, p.grad_bias.type, b_index * to.b + h_index * to.h + row_index * to.s + key * to.d,
          static_cast<float>(sum));
}

// A query head's gradient of its sink or slope: the sum of its rows' shares.
__global__ void add_up_head(const __grid_constant__ AttentionBackwardParams p, const float* shares, Gradient to) {
  const std::int64_t h = blockIdx.x;
  double total = 0;
  for (std::int64_t b = 0; b < p.b; ++b) {
    const Head head(p, b, h / p.group);
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < head.len_q; i += kThreads)
      sum += static_cast<double>(shares[row_number(head, h, i)]);
    sum = sum_of_block(sum);
    total += sum;
    if (to.stride.b != 0 && threadIdx.x == 0)
      store(to.data, to.type, b * to.stride.b + h * to.stride.h, static_cast<float>(sum));
  }
  if (to.stride.b == 0 && threadIdx.x == 0) store(to.data, to.type, h * to.stride.h, static_cast<float>(total));
}

std::int64_t bias_items(const AttentionBackwardParams& p) {
  return p.grad_bias_b * p.grad_bias_h * p.grad_bias_q * ceil_div(p.grad_bias_k, std::int64_t{kThreads});
}

}  // namespace

BackwardRows backward_rows(const AttentionParams& p, std::byte* workspace) {
  BackwardRows made{};
  made.tiles = reinterpret_cast<RowsOfTile*>(workspace);
  made.row_masks = reinterpret_cast<std::uint64_t*>(made.tiles + row_tiles(p));
  made.key_masks = made.row_masks + row_tiles(p);
  made.sink_share = reinterpret_cast<float*>(made.key_masks + key_tiles(p));
  made.slope_share = made.sink_share + row_tiles(p) * kBackwardTile;
  made.progress = reinterpret_cast<DsProgress*>(made.slope_share + row_tiles(p) * kBackwardTile);
  return made;
}

std::size_t attention_backward_workspace(const AttentionParams& p) {
  constexpr std::size_t kRowTile = sizeof(RowsOfTile) + sizeof(std::uint64_t) + 2 * kBackwardTile * sizeof(float);
  return static_cast<std::size_t>(row_tiles(p)) * kRowTile +
         static_cast<std::size_t>(key_tiles(p)) * sizeof(std::uint64_t) +
         static_cast<std::size_t>(BackwardBlocking::heads(p)) * sizeof(DsProgress);
}
std::int64_t attention_backward_items(const AttentionParams& p) {
  return row_tiles(p) + key_tiles(p);
}

cudaError_t launch_backward_rows(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(row_tiles(p));
  if (blocks == 0)
    return cudaMemsetAsync(rows.key_masks, 0, static_cast<std::size_t>(key_tiles(p)) * sizeof(std::uint64_t), stream);
  const auto is_whole = [&](const void* data, DType type, const Strides& s) {
    return type != DType::f32 && is_vector(data, s, 2);
  };
  const bool whole =
      p.dv % 8 == 0 && is_whole(p.dout, p.dout_type, p.dout_stride) && is_whole(p.out, p.out_type, p.out_stride);
  return launch_kernel(false, prepare_rows, blocks, kThreads, 0, stream, p, rows, whole);
}

cudaError_t launch_backward_heads(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream) {
  for (const auto& [to, shares] : {std::pair{p.grad_sinks, rows.sink_share}, std::pair{p.grad_alibi, rows.slope_share}})
    if (to)
      if (const cudaError_t status = launch_kernel(false, add_up_head, static_cast<unsigned>(p.hq), kThreads, 0, stream,
                                                   p, static_cast<const float*>(shares), to);
          status != cudaSuccess)
        return status;
  return cudaSuccess;
}

cudaError_t launch_backward_marked(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream) {
  const std::int64_t tiles = std::max(row_tiles(p), key_tiles(p));
  if (tiles == 0) return cudaSuccess;
  return launch_kernel(true, differentiate_marked,
                       static_cast<unsigned>(std::min<std::int64_t>(tiles, 4 * multiprocessors())), kThreads,
                       (p.d + p.dv) * sizeof(double), stream, p, rows);
}

cudaError_t launch_attention_backward_naive(const AttentionBackwardParams& p, std::byte* workspace,
                                            cudaStream_t stream) {
  const BackwardRows rows = backward_rows(p, workspace);
  cudaError_t status = launch_backward_rows(p, rows, stream);
  const auto launch = [&](auto kernel, std::int64_t blocks, std::int64_t columns) {
    if (status == cudaSuccess && blocks > 0)
      status = launch_kernel(false, kernel, static_cast<unsigned>(blocks), kThreads, columns * sizeof(double), stream,
                             p, rows);
  };
  if (p.grad_q || p.grad_alibi) launch(differentiate_rows, row_tiles(p) * kBackwardTile, p.d);
  if (p.grad_k || p.grad_v) launch(differentiate_keys, key_tiles(p) * kBackwardTile, p.d + p.dv);
  if (p.grad_bias) launch(differentiate_bias, bias_items(p), 0);
  return status == cudaSuccess ? launch_backward_heads(p, rows, stream) : status;
}

}  // namespace rapt::cuda
