#include "operations/attention/cuda_choice.hpp"

#include <algorithm>

#include "cuda/hopper/decode_limits.hpp"
#include "operations/attention/modifiers.hpp"

namespace rapt::cuda {
namespace {

constexpr int kGroupRows = 64;  // of a warpgroup

// Rows that the busiest multiprocessor does, in tiles of `tile_rows`.
std::int64_t busiest_rows(const AttentionShape& s, std::int64_t tile_rows, int multiprocessors) {
  const std::int64_t tiles = s.b * s.hk * ceil_div(s.rows(), tile_rows);
  return ceil_div(tiles, multiprocessors) * tile_rows;
}

// Whether heads of up to 64 columns are faster without a loading warpgroup, in tiles of 128 rows, than with one, in
// tiles of 192. The longer keys are, the more time goes to exponentials beside products, which the latter overlaps, and
// the less to a tile's begin and end. But 128 rows are better where tiles of 192 leave much of the last one empty, or
// some multiprocessors without one. (Measured on an H100: docs/internals/cuda_kernels.md.)
bool prefers_unspecialized(const AttentionShape& s, int multiprocessors) {
  constexpr std::int64_t kShort = 512, kLong = 2048, kLongCausal = 8192, kFewTileRows = 1024;
  if (!s.sees_right_end) return s.sk <= kLongCausal || s.rows() <= kFewTileRows;
  if (s.sk > kLong) return s.rows() <= kFewTileRows;
  if (s.sk <= kShort || !s.sees_left_end) return true;
  // A row takes about a tenth longer without a loading warpgroup.
  return 8 * busiest_rows(s, 3 * kGroupRows, multiprocessors) >= 9 * busiest_rows(s, 2 * kGroupRows, multiprocessors);
}

// Whether tiles of 64 rows are faster than of 192, in heads of 65 to 80 columns: where the last of three warpgroups
// would have little to do, or tiles share no keys.
bool prefers_short_tiles(const AttentionShape& s, int block_k) {
  return s.equal_lengths && (s.rows() <= 5 * kGroupRows || s.sk <= block_k);
}

DType element_of(const AttentionShape& s) {
  return s.q_type == DType::f16 ? DType::f16 : DType::bf16;
}

std::string describe(const PrefillConfig& c) {
  const auto number = [](int n) { return std::to_string(n); };
  const char* const name = c.split_kv            ? "attention_decode_m64"
                           : !c.dense            ? "attention_prefill"
                           : !c.warp_specialized ? "attention_prefill_unspecialized"
                                                 : "attention_prefill_dense";
  return std::string(name) + " (" + number(kGroupRows * c.math_warpgroups) + " rows x " + number(c.block_k) +
         " keys, heads of " + number(c.columns) +
         (c.quantized ? ", widens codes"
          : c.tma     ? ", TMA"
                      : "") +
         (c.modified ? ", modifies scores)" : ")");
}
std::string describe(const DecodeConfig& c) {
  return "attention_decode (" + std::to_string(8 * c.row_tiles) + " rows, heads of " + std::to_string(c.head_dim) +
         (c.query_components > 1 ? ", exact queries)" : ")");
}

}  // namespace

AttentionShape shape_of(const AttentionParams& p) {
  return {.b = p.b,
          .hk = p.hk,
          .group = p.group,
          .sq = p.sq,
          .sk = p.sk,
          .d = p.d,
          .dv = p.dv,
          .q_type = p.q_type,
          .kv_type = p.kv_type,
          .out_type = p.out_type,
          .ragged_q = p.total_q >= 0,
          .equal_lengths = are_alike(p),
          .paged = p.page_size > 0,
          .sees_left_end = p.score.left == kOpen,
          .sees_right_end = p.score.right == kOpen,
          // Without a scale, masked scores would be -inf * 0.
          .modified = has_modifiers(p.score) || p.score.dropout.given || p.score.scale_log2 == 0};
}

AttentionShape shape_of(const AttentionProblem& problem) {
  const AttentionProblem p = in_sequences(problem);
  return {.b = p.b,
          .hk = p.hk,
          .group = p.hk > 0 ? p.hq / p.hk : 0,
          .sq = p.sq,
          .sk = p.sk,
          .d = p.d,
          .dv = p.dv,
          .q_type = p.q_dtype,
          .kv_type = p.kv_dtype,
          .out_type = p.out_dtype,
          .ragged_q = p.ragged_q >= 0,
          .equal_lengths = !has_lengths(problem),
          .paged = !(AttentionFeatures::of(p) & AttentionFeatures::consecutive),
          .sees_left_end = p.window_left < 0,
          .sees_right_end = !p.causal && p.window_right < 0,
          .modified = has_modifiers(p) || p.dropout != 0 || (p.has_scale && p.scale == 0)};
}

PrefillConfig prefill_config(const AttentionShape& s, int multiprocessors) {
  const std::int64_t columns = std::max(s.d, s.dv);
  PrefillConfig c{.element = element_of(s), .modified = s.modified, .quantized = s.quantized()};
  c.head_dim = c.columns = columns <= 64 ? 64 : columns <= 128 ? 128 : columns <= 192 ? 192 : 256;
  c.block_k = c.head_dim > 128 || c.modified ? 64 : 128;  // registers must have room for the modifiers
  c.tma = !c.quantized;
  if (c.quantized || c.modified) return c;
  const bool dense = s.equal_lengths && !s.paged && s.out_type == s.q_type;
  if (c.head_dim == 64) {
    constexpr std::int64_t kFewKeys = 80;  // image models' captions have 77
    c.columns = columns <= 48 ? 48 : 64, c.dense = dense;
    if (!s.equal_lengths || !prefers_unspecialized(s, multiprocessors)) {
      c.math_warpgroups = 3;
    } else if (dense) {
      c.warp_specialized = false;
      if (s.sk > 64 && s.sk <= kFewKeys) c.block_k = kFewKeys;
    }
  } else if (c.head_dim == 128) {
    c.dense = dense;
    if (columns <= 80 && s.sees_right_end) {
      c.head_dim = 96, c.columns = 80, c.block_k = 96;
      c.math_warpgroups = prefers_short_tiles(s, c.block_k) ? 1 : 3;
    } else if (columns <= 96 && s.d % 16 == 0 && s.dv % 16 == 0) {
      // Panels of 32 columns read half a line at a time: as fast only where rows are whole sectors of L2.
      c.head_dim = 96, c.columns = columns <= 80 ? 80 : 96;
    }
  }
  return c;
}

DecodeKernel decode_kernel(const AttentionShape& s) {
  if (s.quantized()) return DecodeKernel::decode;
  if (s.q_type == DType::f32) return DecodeKernel::f32;
  return !s.ragged_q && s.rows() <= kFewRows ? DecodeKernel::decode : DecodeKernel::m64;
}

DecodeConfig decode_config(const AttentionShape& s) {
  const std::int64_t columns = std::max(s.d, s.dv);
  DecodeConfig c{.kv_type = s.kv_type, .head_dim = columns <= 64 ? 64 : columns <= 128 ? 128 : 256};
  // The host does not know how many rows a ragged sequence has. No bit depends on how many a thread block takes.
  const std::int64_t rows = s.ragged_q ? kFewRows : s.rows();
  c.row_tiles = rows > 8 ? 2 : 1;
  if (!s.quantized()) return c;
  if (s.q_type == DType::f32 || s.q_type == DType::f16) {
    c.row_tiles = 1, c.query_components = 3;  // as many as are exact; registers are for 8 rows then
  } else if (rows > 16 && c.head_dim < 256) {
    c.row_tiles = 4;
  }
  return c;
}

PrefillConfig decode_m64_config(const AttentionShape& s) {
  const std::int64_t columns = std::max(s.d, s.dv);
  const int size = columns <= 64 ? 64 : columns <= 128 ? 128 : columns <= 192 ? 192 : 256;
  return {.element = element_of(s),
          .head_dim = size,
          .columns = size,
          .block_k = 64,
          .math_warpgroups = 1,
          .tma = !s.modified,
          .modified = s.modified,
          .split_kv = true};
}

std::string describe_prefill(const AttentionShape& s, int multiprocessors) {
  const std::string tiles = describe(prefill_config(s, multiprocessors));
  return s.ragged_q ? tiles + ", sequences of few rows by " + describe_decode(s) : tiles;
}

std::string describe_decode(const AttentionShape& s) {
  switch (decode_kernel(s)) {
    case DecodeKernel::decode:
      return describe(decode_config(s));
    case DecodeKernel::f32:
      return "attention_decode_f32";
    default:
      return describe(decode_m64_config(s)) + (s.ragged_q ? " and " + describe(decode_config(s)) : "");
  }
}

}  // namespace rapt::cuda
