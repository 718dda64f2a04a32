// Blocks of K and V as the vector kernels read them.
#pragma once

#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {

// Rows of packed K and V blocks: one line more than needed, so that V's column strips spread over the L1 sets.
inline std::int64_t packed_stride(std::int64_t n) {
  return round_up(n, 16) + 16;
}

// A block of K or V: rows of contiguous elements, in place or packed.
struct KvBlock {
  const float* data;
  std::int64_t stride;
};

// K's rows are read along d, a few at a time: in place is best at any row stride. V is read in column strips, whose
// rows fall into few cache sets when they lie far apart (61 % of peak in place). Other elements than fp32 are packed to
// widen them, and a block that spans pages to lie in one piece.
inline bool must_pack_keys(const AttentionParams& p) {
  return p.kv_type != DType::f32 || p.k_stride.d != 1;
}
inline bool must_pack_values(const AttentionParams& p) {
  const Strides& s = p.v_stride;
  return p.kv_type != DType::f32 || s.d != 1 || (s.s >= 512 && s.s != p.dv);
}

// Keys [from, end) of the block at k0 of k or v: in place, or packed into `packed`. Earlier rows of the block
// must not be read, since their pages may not exist.
inline KvBlock kv_block(const Head& head, const KeyRows& rows, std::int64_t k0, std::int64_t from, std::int64_t end,
                        bool pack, float* packed) {
  const Strides& s = rows.strides;
  const std::int64_t stride = packed_stride(rows.n), skipped = from - k0;
  if (!pack && head.is_contiguous(from, end - from))
    return {static_cast<const float*>(rows.base) + (head.key_at(s, from) - skipped * s.s), s.s};
  if (s.s == 1 && s.d != 1 && head.p.page_size == 0 && (only(head.p.kv_type) & kFloatTypes)) {
    with_float_type(head.p.kv_type, [&](auto element) {
      const auto* src = static_cast<const decltype(element)*>(rows.base) + head.key_at(s, from);
      pack_columns(src, s.d, end - from, rows.n, packed + skipped * stride, stride);
    });
  } else {
    pack_keys(head, rows, from, end - from, packed + skipped * stride, stride);
  }
  return {packed, stride};
}

}  // namespace rapt::cpu::RAPT_ISA
