// rotary_append_kv: rows of q and k, normalised and rotated, to q_out and to the cache, there with v. The entry
// rotary_append_kv.f32 calls it. Aligned rows of one type go in pieces of 16 bytes (rotary_append_kv_rows.cuh). Of
// others, and with a quantised cache, a warp does one head of a new row, in place or out, and reads each element once
// for its output and once for its pair's, and with a norm once more; tables are read per head, from L2.
#include <algorithm>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/append_row.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/rotary_append_kv_rows.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// New row t of sequence i, and its row of cos and sin.
struct NewRow {
  std::int64_t i, t, first;
  AngleRows angles;

  __device__ std::int64_t in(const Strides& s, std::int64_t h) const { return i * s.b + h * s.h + (first + t) * s.s; }
};

// A head of a row before it is stored: the numbers that come out.
struct RotaryRow {
  const RotaryAppendKvParams& p;
  const RotarySide& s;
  const AngleRows& angles;
  std::int64_t from;
  float factor;  // of the norm

  __device__ RotaryRow(const RotaryAppendKvParams& params, const RotarySide& side, const NewRow& row, std::int64_t h)
      : p(params), s(side), angles(row.angles), from(row.in(side.from_stride, h)), factor(1) {
    if (!s.norm) return;
    float squares = 0;
    for (std::int64_t c = threadIdx.x % 32 * 8; c < p.d; c += 32 * 8) {
      squares += squares_of_block([&](int i) { return given(c + i); }, static_cast<int>(min(p.d - c, std::int64_t{8})));
    }
    factor = norm_factor(p, over_lanes(squares, Sum()));
  }
  __device__ float given(std::int64_t c) const { return load(s.from, s.from_type, from + c * s.from_stride.d); }
  __device__ float normed(std::int64_t c) const {
    const float x = given(c);
    if (!s.norm) return x;
    const float w = load(s.norm, s.norm_type, c * s.norm_stride);
    return x * factor * (p.norm_plus_one ? 1 + w : w);
  }
  __device__ float cos(std::int64_t n) const { return load(p.cos, p.table_type, angles.cos + n * p.cos_stride.d); }
  __device__ float sin(std::int64_t n) const { return load(p.sin, p.table_type, angles.sin + n * p.sin_stride.d); }
  // Both channels of pair n, rotated.
  __device__ float2 rotated(const Pair& pair) const {
    const float x1 = normed(pair.channel[0]), x2 = normed(pair.channel[1]);
    return {fmaf(-x2, sin(pair.angle[0]), x1 * cos(pair.angle[0])),
            fmaf(x1, sin(pair.angle[1]), x2 * cos(pair.angle[1]))};
  }
  // Channel c.
  __device__ float operator()(std::int64_t c) const {
    const std::int64_t at = c - p.rotary_offset, half = p.rotary / 2;
    if (at < 0 || at >= p.rotary) return normed(c);
    const bool second = p.interleaved ? at % 2 == 1 : at >= half;
    const float2 both = rotated(pair_of(p, p.interleaved ? at / 2 : second ? at - half : at));
    return second ? both.y : both.x;
  }
};

// To a tensor that may be the row itself: a lane reads both channels of a pair before it writes them.
__device__ void store_row(const RotaryRow& row, std::int64_t to) {
  const RotaryAppendKvParams& p = row.p;
  const auto put = [&](std::int64_t c, float x) { store(row.s.to, row.s.to_type, to + c * row.s.to_stride.d, x); };
  for (std::int64_t n = threadIdx.x % 32; n < p.rotary / 2; n += 32) {
    const Pair pair = pair_of(p, n);
    const float2 both = row.rotated(pair);
    put(pair.channel[0], both.x), put(pair.channel[1], both.y);
  }
  for (std::int64_t n = threadIdx.x % 32; n < p.d - p.rotary; n += 32) {
    const std::int64_t c = n < p.rotary_offset ? n : n + p.rotary;
    put(c, row.normed(c));
  }
}

__global__ void __launch_bounds__(kThreads) rotary_append_kv(const __grid_constant__ RotaryAppendKvParams p) {
  const std::int64_t heads = p.q.heads + p.k.heads, items = p.total * heads, step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < items; item += step) {
    const std::int64_t r = item / heads, h = item % heads - p.q.heads, i = sequence_with(p, r);
    NewRow row{i, 0, p.from_begin ? p.from_begin[i] : 0, {}};
    row.t = r - (p.from_begin ? row.first : i * p.n);
    // Starts may be anything: what they leave out is skipped, and no row beyond the tensors is read.
    if (row.t < 0 || row.first + row.t >= (p.from_begin ? p.total : p.n)) continue;
    if (p.from_begin && row.t >= p.from_begin[i + 1] - row.first) continue;
    row.angles = angle_rows(p, i, row.t, row.first);
    if (h < 0) {
      store_row(RotaryRow(p, p.q, row, h + p.q.heads), row.in(p.q.to_stride, h + p.q.heads));
      continue;
    }
    const RotaryRow key(p, p.k, row, h);
    if (p.k.to) {
      store_row(key, row.in(p.k.to_stride, h));
      continue;
    }
    for (int part = 0; part < p.sides; ++part) {
      const AppendKvSide& s = p.side[part];
      const std::int64_t column = p.key_column[part];
      RowPlace at;
      if (!find_row(p, s, r, h, at)) continue;
      if (column < 0) write_row(s, at);
      else write_numbers(s, at, [&](std::int64_t c) { return key(column + c); });
    }
  }
}

}  // namespace

cudaError_t launch_rotary_append_kv(const RotaryAppendKvParams& p, cudaStream_t stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 20, kManyRows = 256;  // kManyRows: which are worth a launch of their own
  if (has_vector_rows(p))
    return with_row_type(row_type(p), [&](auto element) {
      using T = decltype(element);
      const bool norms = p.q.norm || p.k.norm;
      const auto launch = [&](auto turn) {
        constexpr Turn kTurn = decltype(turn)::value;
        return (norms ? launch_vector_rows<T, kTurn, true> : launch_vector_rows<T, kTurn, false>)(p, stream);
      };
      return p.interleaved ? launch(std::integral_constant<Turn, Turn::neighbours>())
                           : launch(std::integral_constant<Turn, Turn::halves>());
    });
  RotaryAppendKvParams queries = p, keys = p;
  queries.k.heads = keys.q.heads = 0;
  const bool one_is_faster = has_vector_rows(queries) || has_vector_rows(keys);  // beside a quantised cache, say
  if (p.q.heads > 0 && p.k.heads > 0 && p.total >= kManyRows && one_is_faster) {
    const cudaError_t status = launch_rotary_append_kv(queries, stream);
    return status == cudaSuccess ? launch_rotary_append_kv(keys, stream) : status;
  }
  const std::int64_t blocks = ceil_div(p.total * (p.q.heads + p.k.heads), kWarps);
  return launch_kernel(false, rotary_append_kv, static_cast<unsigned>(std::min(blocks, kMaxBlocks)), kThreads, 0,
                       stream, p);
}

}  // namespace rapt::cuda
