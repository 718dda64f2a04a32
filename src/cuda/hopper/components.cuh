// fp32 numbers as sums of two fp16 components, hi + lo, of 22 bits together, scaled by powers of two into fp16's range.
// A kernel writes the components of K and V to the workspace, laid out as in shared memory; the warps that multiply
// write those of Q themselves.
#pragma once

#include "cuda/hopper/schedule.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// Operands are scaled so that the largest number is in [2^kTop, 2^(kTop + 1)), and weights up to 2^kWeightShift.
constexpr int kTop = 14, kWeightShift = 15;
constexpr float kWeightOne = 1 << kWeightShift;  // what a weight of 1 becomes
// lo is then off by up to 2^-25, which matters only for numbers below 2^-3.
constexpr float kLoError = 0x1p-25f;

// Numbers that components cannot hold: their scale becomes NaN, which makes rows fall back.
constexpr int kMaxExponent = 100;  // the largest number of a row of Q or K is above 2^100 or below 2^-100
constexpr int kSpan = 16;          // the maxima of rows or of columns of a block of V differ by so many powers of two

constexpr int kPrepareThreads = 256;

struct ComponentParams : TileGrid {
  // For each block, in the order of Blocking: hi, then lo, in panels of 64 columns as matrix_at() describes.
  std::uint8_t *k, *v;
  float* scales;                      // of blocks, C::kScales each: factors on products
  bool q_vector, k_vector, v_vector;  // rows are aligned to 16 bytes, and contiguous
};

// The power of two that brings the largest of some numbers into fp16's range, and its inverse.
struct Scale {
  float factor, output_scale;
};
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}
// For a row of Q or K, from the bits of its largest number. NaN, Inf and numbers out of range make all scores of the
// row NaN.
__device__ inline Scale scale_of_row(unsigned largest, float of_zeros) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  if (largest == 0) return {1, of_zeros};
  if (exponent < -kMaxExponent || exponent > kMaxExponent) return {1, not_a_number()};
  return {power_of_two(kTop - exponent), power_of_two(exponent - kTop)};
}
// For a block of V. The inverse also undoes the scale of weights.
__device__ inline Scale scale_of_values(unsigned largest) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  if (largest == 0) return {1, 0};
  if (exponent == 128) return {1, not_a_number()};
  const int kept = max(exponent, kTop - kMaxExponent);
  return {power_of_two(kTop - kept), power_of_two(kept - kTop - kWeightShift)};
}

// hi and lo of two numbers, packed.
__device__ __forceinline__ void split_f16(float a, float b, std::uint32_t& hi, std::uint32_t& lo) {
  hi = pack<__half>(a, b);
  const float2 back = __half22float2(reinterpret_cast<const __half2&>(hi));
  lo = pack<__half>(a - back.x, b - back.y);
}
__device__ __forceinline__ void split_f16(const float4& x, float by, uint2& hi, uint2& lo) {
  split_f16(x.x * by, x.y * by, hi.x, lo.x);
  split_f16(x.z * by, x.w * by, hi.y, lo.y);
}

// The offset in bytes of a row's column in a component of `rows` rows.
__device__ inline int component_place(int rows, int row, int column) {
  return column / 64 * (rows * 128) + row * 128 + (column / 8 % 8 ^ row % 8) * 16 + column % 8 * 2;
}

// How a row is spread over lanes: each has kFours groups of four columns, kStep columns apart.
template <int kSize>
struct RowFours {
  static constexpr int kLanes = kSize % 128 == 0 ? 32 : 16, kStep = 4 * kLanes, kFours = kSize / kStep;
};
// Magnitudes are compared as integers: the bits without the sign. NaN is the largest.
__device__ inline unsigned magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}
template <int kFours>
__device__ __forceinline__ unsigned largest_of(const float4 (&x)[kFours]) {
  unsigned largest = 0;
#pragma unroll
  for (const float4& four : x)
    largest = max(largest, max(max(magnitude_bits(four.x), magnitude_bits(four.y)),
                               max(magnitude_bits(four.z), magnitude_bits(four.w))));
  return largest;
}
// The maximum over kLanes neighbouring lanes of x[lane % kCount]: neighbours exchange halves of their numbers until
// each has one.
template <int kLanes, int kCount>
__device__ __forceinline__ unsigned largest_over_lanes(unsigned (&x)[kCount], int lane = 0) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool upper = (lane & half) != 0;
      const unsigned kept = upper ? x[i + half] : x[i], sent = upper ? x[i] : x[i + half];
      x[i] = max(kept, __shfl_xor_sync(~0u, sent, half));
    }
#pragma unroll
  for (int bit = kCount; bit < kLanes; bit *= 2) x[0] = max(x[0], __shfl_xor_sync(~0u, x[0], bit));
  return x[0];
}

// Prefetches a tile's rows of Q into L2, by C::kProducers threads.
template <class C>
__device__ void prefetch_queries(const ComponentParams& params, const Tile<C>& tile) {
  if (!params.q_vector) return;
  constexpr int kLines = C::kSize / 32;
  for (int i = static_cast<int>(threadIdx.x) - (128 - C::kProducers); i < C::kRows * kLines; i += C::kProducers) {
    const std::int64_t at = tile.row_info[i / kLines].q;
    const int column = i % kLines * 32;
    if (at >= 0 && column < params.p.d)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const float*>(params.p.q) + at + column));
  }
}
// Writes the components of a warp's 16 rows of Q, from `warp_row` on, to its warpgroup's place in shared memory, and
// the rows' factors on products to `scales`. In a loop over a few rows: this code runs once for a tile and is in no
// instruction cache, so a short loop is faster than unrolled loads.
template <class C>
__device__ __forceinline__ void write_queries(const ComponentParams& params, const Tile<C>& tile, int warp_row,
                                              std::uint32_t to, float* scales) {
  using Fours = RowFours<C::kSize>;
  constexpr int kAtOnce = 32 / Fours::kLanes, kLoads = C::kSize == 192 ? 1 : 4 / (kAtOnce * Fours::kFours);
  const AttentionParams& p = params.p;
  const auto* const q = static_cast<const float*>(p.q);
  const std::int64_t stride = p.q_stride.d;
  const int size = static_cast<int>(p.d);
  const bool vector = params.q_vector && size % 4 == 0;
  const float sign = p.score.scale_log2 < 0 ? -1 : 1;
  int lane = static_cast<int>(threadIdx.x) % 32;
  asm volatile("" : "+r"(lane));  // or the compiler computes addresses early, and spills them
  const int lane_column = lane % Fours::kLanes * 4, lane_load = lane % kLoads;
#pragma unroll 1
  for (int row = warp_row + lane / Fours::kLanes; row < warp_row + 16; row += kLoads * kAtOnce) {
    float4 x[kLoads][Fours::kFours];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t at = tile.row_info[row + i * kAtOnce].q;
#pragma unroll
      for (int four = 0; four < Fours::kFours; ++four) {
        const int column = lane_column + four * Fours::kStep, left = at < 0 ? 0 : size - column;
        float4& numbers = x[i][four];
        numbers = make_float4(0, 0, 0, 0);
        if (vector) {
          if (left > 0) numbers = __ldcs(reinterpret_cast<const float4*>(q + at + column));
        } else {  // like load4(), but without trying a vector load
          const float* const from = q + at + column * stride;
          if (left > 0) numbers.x = from[0];
          if (left > 1) numbers.y = from[stride];
          if (left > 2) numbers.z = from[2 * stride];
          if (left > 3) numbers.w = from[3 * stride];
        }
      }
    }
    unsigned largest[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) largest[i] = largest_of(x[i]);
    const Scale scale =
        scale_of_row(largest_over_lanes<Fours::kLanes>(largest, lane), 0x1p-100f);  // of load `lane_load`
    if (lane % Fours::kLanes < kLoads) scales[row + lane_load * kAtOnce] = scale.output_scale;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float factor = __shfl_sync(~0u, scale.factor * sign, lane / Fours::kLanes * Fours::kLanes + i);
#pragma unroll
      for (int four = 0; four < Fours::kFours; ++four) {
        uint2 hi, lo;
        split_f16(x[i][four], factor, hi, lo);
        const std::uint32_t place =
            to + component_place(kGroupRows, row % kGroupRows + i * kAtOnce, lane_column + four * Fours::kStep);
        store8(place, hi), store8(place + kGroupRows * C::kSize * 2, lo);
      }
    }
  }
}

// A block of K or V, of which a thread block writes the components. Units are numbered: those of K, then those of V.
template <class C>
struct ComponentUnit {
  bool is_v;
  unsigned number;                      // among the blocks of K, or of V
  std::int64_t b, hk, first, from, to;  // its first key; keys outside [from, to) become 0, as no row sees them

  // Finds unit i. False: no tile reads it.
  __device__ bool find(const ComponentParams& params, unsigned i) {
    const AttentionParams& p = params.p;
    const auto blocks = static_cast<unsigned>(C::Blocks::heads(p) * C::Blocks::blocks(p));
    is_v = i >= blocks, number = is_v ? i - blocks : i;
    const auto found = C::Blocks::find(p, number);
    const Head head(p, found.b, found.hk);
    const std::int64_t last = min(head.len_q, p.score.modifier_rows) - 1;
    b = found.b, hk = found.hk, first = found.key;
    from = Row(head, 0, 0).first, to = last < 0 ? 0 : Row(head, last, 0).last;
    // Tiles whose rows see no key multiply the first block, of zeros.
    return !is_decode_sequence(head) && (first == C::Blocks::origin(head) || (first < to && first + C::kKeys > from));
  }
};

// Writes the components of unit i, if a tile reads it, by a thread block.
template <class C>
__device__ __forceinline__ void write_components(const ComponentParams& params, unsigned i) {
  using Fours = RowFours<C::kSize>;
  constexpr int kLanes = Fours::kLanes, kFours = Fours::kFours;
  constexpr int kRowStep = kPrepareThreads / kLanes, kRowsPerThread = C::kKeys / kRowStep;
  __shared__ std::int64_t row_starts[C::kKeys];  // offsets of rows; negative: the row is 0
  __shared__ unsigned columns[C::kSize], max_bits, min_bits;
  const AttentionParams& p = params.p;
  ComponentUnit<C> found;
  if (!found.find(params, i)) return;
  const auto [is_v, unit, b, hk, first, from_key, to_key] = found;
  const int thread = threadIdx.x;
  if (const std::int64_t key = first + thread; thread < C::kKeys)
    row_starts[thread] =
        key < from_key || key >= to_key ? -1 : Head(p, b, hk).key_at(is_v ? p.v_stride : p.k_stride, key);
  if (thread < C::kSize) columns[thread] = 0;
  if (thread == 0) max_bits = 0, min_bits = ~0u;
  __syncthreads();

  const void* from = is_v ? p.v : p.k;
  const std::int64_t stride = is_v ? p.v_stride.d : p.k_stride.d;
  const bool vector = is_v ? params.v_vector : params.k_vector;
  const int row = thread / kLanes, column = thread % kLanes * 4;
  const int size = static_cast<int>(is_v ? p.dv : p.d);
  float4 x[kRowsPerThread][kFours];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const std::int64_t at = row_starts[row + i * kRowStep];
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int c = column + four * Fours::kStep, left = size - c;
      if (vector && left >= 4 && at >= 0)
        x[i][four] = __ldcs(reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + c));
      else x[i][four] = load4(from, DType::f32, at + c * stride, stride, at < 0 ? 0 : left);
    }
  }
  unsigned largest[kRowsPerThread];  // of a row
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    unsigned of_lane[] = {largest_of(x[i])};
    largest[i] = largest_over_lanes<kLanes>(of_lane);
  }
  if (is_v) {  // one scale for the whole block, if it suits all rows and columns
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (column > 0) continue;
      atomicMax(&max_bits, largest[i]);
      if (largest[i] > 0) atomicMin(&min_bits, largest[i]);
    }
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      unsigned of_column[4] = {};
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const float numbers[4] = {x[i][four].x, x[i][four].y, x[i][four].z, x[i][four].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) of_column[n] = max(of_column[n], magnitude_bits(numbers[n]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) atomicMax(&columns[column + four * Fours::kStep + n], of_column[n]);
    }
    __syncthreads();
    if (thread < C::kSize && columns[thread] > 0) atomicMin(&min_bits, columns[thread]);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) largest[i] = max_bits;
  }

  std::uint8_t* const block = (is_v ? params.v : params.k) + std::int64_t{unit} * C::kBlockBytes;
  float* const scales = params.scales + std::int64_t{unit} * C::kScales;
  bool any_underflow = false;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int r = row + i * kRowStep;
    const Scale scale = is_v ? scale_of_values(largest[i]) : scale_of_row(largest[i], 0);
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const float4& numbers = x[i][four];
      uint2 hi, lo;
      split_f16(numbers, scale.factor, hi, lo);
      const auto underflowed = [](float number, std::uint32_t components) {
        return number != 0 && components == 0;
      };  // apart from their signs
      const uint2 both = make_uint2(hi.x | lo.x, hi.y | lo.y);
      any_underflow |= underflowed(numbers.x, both.x & 0x7fff) || underflowed(numbers.y, both.x & 0x7fff0000) ||
                       underflowed(numbers.z, both.y & 0x7fff) || underflowed(numbers.w, both.y & 0x7fff0000);
      std::uint8_t* const to = block + component_place(C::kKeys, r, column + four * Fours::kStep);
      *reinterpret_cast<uint2*>(to) = hi;
      *reinterpret_cast<uint2*>(to + C::kBlockBytes / 2) = lo;
    }
    if (column == 0 && !is_v) scales[r] = scale.output_scale;
  }
  if (is_v) {
    any_underflow = __syncthreads_or(any_underflow);
    const bool too_wide = max_bits > 0 && (max_bits >> 23) - (min_bits >> 23) >= kSpan;
    const float output_scale = any_underflow || too_wide ? not_a_number() : scale_of_values(max_bits).output_scale;
    if (thread == 0) *reinterpret_cast<float4*>(scales + C::kKeys) = make_float4(output_scale, 0, 0, 0);
  }
}

// One thread block for each unit; as many on a multiprocessor as registers allow without spills.
template <class C>
__global__ void __launch_bounds__(kPrepareThreads, C::kSize == 192 ? 3 : 4)
    prefill_f32_components(const __grid_constant__ ComponentParams params) {
  launch_dependent_grids();
  write_components<C>(params, blockIdx.x);
}

// For ragged calls, in which most units may hold no keys: each thread checks another unit, and the thread block then
// writes the units that are read.
template <class C>
__global__ void __launch_bounds__(kPrepareThreads, C::kSize == 192 ? 2 : 3)
    prefill_f32_components_sparse(const __grid_constant__ ComponentParams params, const unsigned units) {
  launch_dependent_grids();
  __shared__ unsigned wanted[kPrepareThreads / 32];
  for (unsigned begin = blockIdx.x; begin < units; begin += kPrepareThreads * gridDim.x) {
    const unsigned lane_load = begin + threadIdx.x * gridDim.x;
    ComponentUnit<C> unit;
    const unsigned any = __ballot_sync(~0u, lane_load < units && unit.find(params, lane_load));
    if (threadIdx.x % 32 == 0) wanted[threadIdx.x / 32] = any;
    __syncthreads();
    for (unsigned warp = 0; warp < kPrepareThreads / 32; ++warp)
      for (unsigned left = wanted[warp]; left != 0; left &= left - 1) {
        write_components<C>(params, begin + (32 * warp + __ffs(static_cast<int>(left)) - 1) * gridDim.x);
        __syncthreads();
      }
    __syncthreads();
  }
}

}  // namespace rapt::cuda
