// Blocks of K and V in the layout that the vector kernels read: in place or packed.
#pragma once

#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {

// The row stride of packed blocks, in floats: one cache line more than the row, so that the rows of a column strip of
// V fall into different sets of L1.
inline std::int64_t packed_stride(std::int64_t n) {
  return round_up(n, 16) + 16;
}

// A block of K or V: rows of contiguous elements, in place or packed.
struct KvBlock {
  const float* data;
  std::int64_t stride;
};

// The kernels read a few rows of K at a time along d, which is fast in place at any row stride. They read V in column
// strips, whose rows fall into few cache sets if they are far apart (61 % of peak in place). Other types than fp32 are
// packed to be widened, and a block that spans pages to be contiguous.
inline bool must_pack_keys(const AttentionParams& p) {
  return p.kv_type != DType::f32 || p.k_stride.d != 1;
}
inline bool must_pack_values(const AttentionParams& p) {
  const Strides& s = p.v_stride;
  return p.kv_type != DType::f32 || s.d != 1 || (s.s >= 512 && s.s != p.dv);
}

// Keys [from, end) of the block at k0 of k or v, in place or packed into `packed`. It reads no earlier rows of the
// block: their pages may not exist.
inline KvBlock kv_block(const Head& head, const KeyRows& rows, std::int64_t k0, std::int64_t from, std::int64_t end,
                        bool pack, float* packed) {
  const Strides& s = rows.strides;
  const std::int64_t stride = packed_stride(rows.n), skipped = from - k0;
  if (!pack && head.is_contiguous(from, end - from))
    return {static_cast<const float*>(rows.base) + (head.key_at(s, from) - skipped * s.s), s.s};
  pack_keys(head, rows, from, end - from, packed + skipped * stride, stride);
  return {packed, stride};
}

}  // namespace rapt::cpu::RAPT_ISA
