// How the math warpgroups of attention_backward leave gradients.
#pragma once

#include "cuda/hopper/fragment.cuh"
#include "cuda/kernels/backward_block.cuh"

namespace rapt::cuda {

// The gradients of 64 own rows or keys, as accumulators of a warpgroup.
template <class C>
struct GradientRows {
  const BackwardBlock<C>& block;
  const int first;                                                                // of the 64
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // row: and row + 8
  bool broken[2] = {};                                                            // not finite

  template <int kCount>
  __device__ void put(const Gradient& to, const float (&x)[kCount], float scale, int size) {
    const bool odd = lane % 2, whole = to.type != DType::f32 && size == 2 * kCount && is_vector(to.data, to.stride, 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int number = first + row + 8 * h;
      const bool exists = to && number < block.store_end();
      const auto low = [&](int column) { return x[column / 2 + 2 * h] * scale; };
      const auto high = [&](int column) { return x[column / 2 + 2 * h + 1] * scale; };
      bool finite = true;
#pragma unroll
      for (int column = 0; column < 2 * kCount; column += 8)
        finite &= is_finite(low(column)) && is_finite(high(column));
      broken[h] |= exists && !finite;
      std::int64_t at = 0;
      if (exists) {
        if constexpr (C::kOfKeys) at = block.head.key_at(to.stride, number);
        else at = row_at(to.stride, block.head, block.q_head, number);
      }
      if (whole) {
        // Neighbouring lanes exchange pairs, as in store_rows().
        const auto word = [&](int column) {
          return to.type == DType::f16 ? pack<__half>(low(column), high(column))
                                       : pack<__nv_bfloat16>(low(column), high(column));
        };
        auto* const start = static_cast<std::uint16_t*>(to.data) + at + lane % 4 * 2;
#pragma unroll
        for (int column = 0; column < 2 * kCount; column += 16) {
          const std::uint32_t here = word(column), there = word(column + 8);
          const std::uint32_t got = __shfl_xor_sync(~0u, odd ? here : there, 1);
          const uint2 four = odd ? make_uint2(got, there) : make_uint2(here, got);
          if (exists) *reinterpret_cast<uint2*>(start + column + (odd ? 6 : 0)) = four;
        }
      } else if (exists) {
#pragma unroll
        for (int column = 0; column < 2 * kCount; column += 8) {
          const int c = column + lane % 4 * 2;
          if (c < size) cuda::store(to.data, to.type, at + c * to.stride.d, low(column));
          if (c + 1 < size) cuda::store(to.data, to.type, at + (c + 1) * to.stride.d, high(column));
        }
      }
    }
  }

  // Marks those that are not finite.
  __device__ void mark(const BackwardRows& rows) const {
    const unsigned marked = rows_of_warp(broken);
    if (lane != 0 || first >= block.store_end()) return;
    const std::int64_t tile = C::kOfKeys ? BackwardBlocking::number(block.head, first)
                                         : BackwardTiling::number(block.p, block.head.b, block.q_head, first);
    auto* const masks = reinterpret_cast<std::uint16_t*>(C::kOfKeys ? rows.key_masks : rows.row_masks);
    masks[tile * 4 + threadIdx.x / 32 % 4] = static_cast<std::uint16_t>(marked);
  }
};

}  // namespace rapt::cuda
