// Numbers in fp32 as sums of two fp16 components, hi + lo with 22 bits, scaled by powers of two so that the range of
// fp16 is none; and the kernel that writes the components of Q, K and V as shared memory is to hold them.
#pragma once

#include "cuda/hopper/schedule.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// Operands are scaled so that the largest number is in [2^kTop, 2^(kTop + 1)), and weights up to 2^kWeightShift.
constexpr int kTop = 14, kWeightShift = 15;
constexpr float kWeightOne = 1 << kWeightShift;  // a weight of 1
// Then lo has errors of up to 2^-25, which only numbers below 2^-3 notice.
constexpr float kLoError = 0x1p-25f;

// What is out of reach, so that its scale back is NaN:
constexpr int kMaxExponent = 100;  // a row of Q or K has its maximum past 2^100 or below 2^-100
constexpr int kSpan = 16;          // rows or columns of a block of V are this many powers of two apart in their maxima

constexpr int kPrepareThreads = 256;

struct ComponentParams : Grid {
  // For 64 rows of Q and for each block both components one after the other, in panels of 64 columns as matrix_at() has
  // them; the rows of Q in the order of tiles, blocks in that of Blocking.
  std::uint8_t *q, *k, *v;
  float *q_scale, *scales;            // to multiply products by: of rows of Q, and of blocks as C::kScales has them
  bool q_vector, k_vector, v_vector;  // 16 bytes at a time
};

// What brings the largest of some numbers, given by its bits, into the range of fp16, and back.
struct Scale {
  float factor, inverse;
};
__device__ inline float power(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}
// Of a row of Q or K. NaN and Inf make all its scores NaN, as do numbers out of range.
__device__ inline Scale scale_of_row(unsigned largest, float of_zeros) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  if (largest == 0) return {1, of_zeros};
  if (exponent < -kMaxExponent || exponent > kMaxExponent) return {1, not_a_number()};
  return {power(kTop - exponent), power(exponent - kTop)};
}
// Of a block of V; takes the scale of weights back, too.
__device__ inline Scale scale_of_values(unsigned largest) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  if (largest == 0) return {1, 0};
  if (exponent == 128) return {1, not_a_number()};
  const int kept = max(exponent, kTop - kMaxExponent);
  return {power(kTop - kept), power(kept - kTop - kWeightShift)};
}

// hi and lo of two numbers.
__device__ __forceinline__ void split(float a, float b, std::uint32_t& hi, std::uint32_t& lo) {
  hi = pack<__half>(a, b);
  const float2 back = __half22float2(reinterpret_cast<const __half2&>(hi));
  lo = pack<__half>(a - back.x, b - back.y);
}

// kKeys rows of Q, or a block of K or V. Units are numbered: first Q's, then K's, then V's.
template <class C>
struct ComponentUnit {
  bool is_q, is_v;
  unsigned number;                      // among those of its kind
  std::int64_t b, hk, first, from, to;  // its first row or key; those outside of [from, to) are 0: rows that do not
                                        // exist, or keys that no row sees

  // Unit i. False: nobody reads it.
  __device__ bool find(const ComponentParams& params, unsigned i) {
    constexpr unsigned kParts = C::kRows / C::kKeys;
    const AttentionParams& p = params.p;
    const unsigned q_units = static_cast<unsigned>(params.heads) * params.tiles * kParts;
    const auto blocks = static_cast<unsigned>(C::Blocks::heads(p) * C::Blocks::blocks(p));
    is_q = i < q_units, is_v = !is_q && i - q_units >= blocks;
    number = i - (is_q ? 0 : is_v ? q_units + blocks : q_units);
    if (is_q) {
      const unsigned tile = number / kParts, tiles = params.tiles;
      const auto found = C::Tiles::find(p, static_cast<int>(tile / tiles), static_cast<int>(tile % tiles));
      const Head head(p, found.b, found.hk);
      b = found.b, hk = found.hk, first = found.row + number % kParts * C::kKeys;
      from = 0, to = head.len_q * p.group;
      return found.row < to && !is_split_apart(head);
    }
    const auto found = C::Blocks::find(p, number);
    const Head head(p, found.b, found.hk);
    const std::int64_t last = min(head.len_q, p.score.modifier_rows) - 1;
    b = found.b, hk = found.hk, first = found.key;
    from = Row(head, 0, 0).first, to = last < 0 ? 0 : Row(head, last, 0).last;
    // Tiles that see no key multiply zeros with the first block.
    return !is_split_apart(head) && (first == C::Blocks::origin(head) || (first < to && first + C::kKeys > from));
  }
};

// The components of a unit by a thread block, where somebody reads them.
template <class C>
__device__ __forceinline__ void write_components(const ComponentParams& params, unsigned i) {
  // Of a row a lane has kFours times four columns, kColumnStep from one four to the next.
  constexpr int kLanes = C::kSize % 128 == 0 ? 32 : 16, kColumnStep = 4 * kLanes, kFours = C::kSize / kColumnStep;
  constexpr int kStep = kPrepareThreads / kLanes, kRowsPerThread = C::kKeys / kStep;
  __shared__ std::int64_t places[C::kKeys];  // where rows begin; negative: they are 0
  __shared__ unsigned columns[C::kSize], max_bits, min_bits;
  const AttentionParams& p = params.p;
  ComponentUnit<C> found;
  if (!found.find(params, i)) return;
  const auto [is_q, is_v, unit, b, hk, first, from_row, to_row] = found;
  const int thread = threadIdx.x;
  if (const std::int64_t r = first + thread; thread < C::kKeys) {
    const Head head(p, b, hk);
    places[thread] = r < from_row || r >= to_row ? -1
                     : is_q                      ? row_at(p.q_stride, head, row_of(head, static_cast<int>(r)))
                                                 : head.key_at(is_v ? p.v_stride : p.k_stride, r);
  }
  if (thread < C::kSize) columns[thread] = 0;
  if (thread == 0) max_bits = 0, min_bits = ~0u;
  __syncthreads();

  // Numbers are compared by their bits without the sign; those of NaN are the largest.
  const auto bits = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
  const void* from = is_q ? p.q : is_v ? p.v : p.k;
  const std::int64_t step = is_q ? p.q_stride.d : is_v ? p.v_stride.d : p.k_stride.d;
  const bool vector = is_q ? params.q_vector : is_v ? params.v_vector : params.k_vector;
  const float sign = is_q && p.score.scale_log2 < 0 ? -1 : 1;
  const int row = thread / kLanes, column = thread % kLanes * 4;
  const int size = static_cast<int>(is_v ? p.dv : p.d);
  float4 x[kRowsPerThread][kFours];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const std::int64_t at = places[row + i * kStep];
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int c = column + four * kColumnStep, left = size - c;
      if (vector && left >= 4 && at >= 0)
        x[i][four] = __ldcs(reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + c));
      else x[i][four] = load4(from, DType::f32, at + c * step, step, at < 0 ? 0 : left);
    }
  }
  unsigned largest[kRowsPerThread] = {};  // of a row
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
    for (const float4& four : x[i])
      largest[i] = max(largest[i], max(max(bits(four.x), bits(four.y)), max(bits(four.z), bits(four.w))));
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], lane));
  }
  if (is_v) {  // one scale, if it does for all rows and columns
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
        for (int n = 0; n < 4; ++n) of_column[n] = max(of_column[n], bits(numbers[n]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) atomicMax(&columns[column + four * kColumnStep + n], of_column[n]);
    }
    __syncthreads();
    if (thread < C::kSize && columns[thread] > 0) atomicMin(&min_bits, columns[thread]);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) largest[i] = max_bits;
  }

  const int rows = is_q ? kGroupRows : C::kKeys, component = rows * C::kSize * 2;  // bytes
  bool lost = false;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int r = row + i * kStep;
    const Scale scale = is_v ? scale_of_values(largest[i]) : scale_of_row(largest[i], is_q ? 0x1p-100f : 0.f);
    const float by = scale.factor * sign;
    // Images of Q may be of several units, or a unit of several images.
    const std::int64_t number = std::int64_t{unit} * C::kKeys + r;
    const int in_image = static_cast<int>(number & (rows - 1));
    std::uint8_t* const image = (is_q ? params.q : is_v ? params.v : params.k) + (number - in_image) * (4 * C::kSize);
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const float4& numbers = x[i][four];
      uint2 hi, lo;
      split(numbers.x * by, numbers.y * by, hi.x, lo.x);
      split(numbers.z * by, numbers.w * by, hi.y, lo.y);
      const auto gone = [](float number, std::uint32_t components) {
        return number != 0 && components == 0;
      };  // but for signs
      const uint2 both = make_uint2(hi.x | lo.x, hi.y | lo.y);
      lost |= gone(numbers.x, both.x & 0x7fff) || gone(numbers.y, both.x & 0x7fff0000) ||
              gone(numbers.z, both.y & 0x7fff) || gone(numbers.w, both.y & 0x7fff0000);
      const int c = column + four * kColumnStep, chunk = c / 8 % 8;
      std::uint8_t* const to = image + c / 64 * (rows * 128) + in_image * 128 + (chunk ^ in_image % 8) * 16 + c % 8 * 2;
      *reinterpret_cast<uint2*>(to) = hi;
      *reinterpret_cast<uint2*>(to + component) = lo;
    }
    if (column == 0 && is_q) params.q_scale[number] = scale.inverse;
    if (column == 0 && !is_q && !is_v) params.scales[std::int64_t{unit} * C::kScales + r] = scale.inverse;
  }
  if (is_v) {
    lost = __syncthreads_or(lost);
    const bool too_wide = max_bits > 0 && (max_bits >> 23) - (min_bits >> 23) >= kSpan;
    const float inverse = lost || too_wide ? not_a_number() : scale_of_values(max_bits).inverse;
    if (thread == 0)
      *reinterpret_cast<float4*>(params.scales + std::int64_t{unit} * C::kScales + C::kKeys) =
          make_float4(inverse, 0, 0, 0);
  }
}

// A thread block to each unit. With as many on a multiprocessor as registers allow without spilling what is loaded.
template <class C>
__global__ void __launch_bounds__(kPrepareThreads, C::kSize == 192 ? 3 : 4)
    prepare(const __grid_constant__ ComponentParams params) {
  let_next_start();
  write_components<C>(params, blockIdx.x);
}

// Where it may be that most units are read by nobody, because sequences have room for far more rows or keys than there
// are: each thread finds out about another unit, and its thread block then writes those that are read.
template <class C>
__global__ void __launch_bounds__(kPrepareThreads, C::kSize == 192 ? 2 : 3)
    prepare_some(const __grid_constant__ ComponentParams params, const unsigned units) {
  let_next_start();
  __shared__ unsigned wanted[kPrepareThreads / 32];
  for (unsigned begin = blockIdx.x; begin < units; begin += kPrepareThreads * gridDim.x) {
    const unsigned own = begin + threadIdx.x * gridDim.x;
    ComponentUnit<C> unit;
    const unsigned any = __ballot_sync(~0u, own < units && unit.find(params, own));
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
