#include "operations/delta_rule/cuda_choice.hpp"

#include <cstdint>

#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

bool can_copy_states(const DeltaRuleParams& p) {
  constexpr std::int64_t kMaxBlocks = 65535;  // of a grid's y: sequences
  const StateRows& any = p.final ? p.final : p.initial;
  const bool keys_first = any.dv_stride == 1;
  const auto is_whole = [&](const StateRows& rows) {
    if (!rows) return true;
    const std::int64_t size = rows.type == DType::bf16 ? 2 : 4;
    const auto is_aligned = [&](std::int64_t elements) { return elements * size % 16 == 0; };
    return rows.type == any.type &&
           (keys_first ? rows.dv_stride == 1 && rows.d_stride == p.dv : rows.d_stride == 1 && rows.dv_stride == p.d) &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && is_aligned(rows.slot_stride) &&
           is_aligned(rows.head_stride);
  };
  return p.b <= kMaxBlocks && p.h <= INT32_MAX && is_whole(p.initial) && is_whole(p.final);
}

bool can_multiply_chunks(const DeltaRuleParams& p) {
  constexpr std::int64_t kMax = INT32_MAX / 2;  // the kernel counts states and tokens in 32 bits
  return p.q.type == DType::bf16 && p.k.type == DType::bf16 && p.v.type == DType::bf16 && p.b * p.h <= kMax &&
         p.t <= kMax;
}

}  // namespace rapt::cuda
