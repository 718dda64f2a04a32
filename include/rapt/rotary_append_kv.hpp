// Rotary embedding of queries and keys, with their norms, and appending to a KV cache: one call for what stands
// before attention().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/append_kv.hpp"
#include "rapt/context.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// All floats are f32, bf16 or f16, of any strides, each tensor by itself.
struct RotaryAppendKvArgs {
  AppendKvArgs append{};        ///< new keys before their rotation, new values, and the cache that they go to. Without
                                ///< a cache: k_new, cu_seqlens and, where positions follow from it, seqlens alone
  TensorView q{};               ///< optional [b, hq, n, d]; with cu_seqlens [total, hq, d]
  MutableTensorView q_out{};    ///< with q: of its shape; f32, bf16 or f16. It may be q itself
  MutableTensorView k_out{};    ///< without a cache: of k_new's shape; f32, bf16 or f16. It may be k_new itself
  TensorView cos{}, sin{};      ///< tables [positions, r], or one row for each new row: [b or 1, n, r], ragged
                                ///< [1, total, r]. r is rotary_dim, or half of it where both of a pair have one angle
  TensorView positions{};       ///< optional, of tables: i32 or i64 [b or 1, n], ragged [1, total]: rows of the tables.
                                ///< Without them new row t of sequence i has position append.seqlens[i] + t
  TensorView q_norm{};          ///< optional [d]: q is divided by its root mean square and multiplied by this
  TensorView k_norm{};          ///< optional [d]: likewise of k_new
  float norm_eps = 1e-6f;       ///< 0 or more: what is added to the mean of squares
  bool norm_plus_one = false;   ///< what norms multiply by is 1 + weight
  bool interleaved = false;     ///< pairs are channels 2i and 2i + 1; else i and i + rotary_dim / 2
  std::int64_t rotary_dim = 0;  ///< channels that are rotated, an even number; 0: the last size of cos
  std::int64_t rotary_offset = 0;  ///< the first of them
};

/// q_out is q, and what is appended is k_new, each row of a head first normalised, then rotated:
///
///     x = x / sqrt(mean(x^2) + norm_eps) * weight, or (1 + weight)
///     (x1, x2) = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)     of every pair of channels; cos2 = cos1 in tables of r / 2
///
/// Other channels, and v_new, stay as they are. Arithmetic is fp32, and what goes out is rounded once, to its own type,
/// or quantised as append_kv() does it: everything that is said there of the cache holds, for rotated keys. Scalings of
/// a rotary embedding are in cos and sin. With u = 2^-24, what a channel has before it is rounded is off by at most
///
///     4 u (|x1 cos1| + |x2 sin1|)                       without norms
///     (d / 8 + 16) u (|x1 cos1| + |x2 sin1|)           with norms; (d / 8 + 12) u |x| of channels that only they
///     change
///
/// while squares of a row sum to less than 2^128, and products are 0 or above 2^-126. NaN or Inf in a channel reaches
/// its pair, and with norms its row of that head; in cos or sin the channels that they turn. Of v in a cache whose
/// values are columns of the keys (latent attention), no channel may be rotated or normalised.
///
/// Throws Error, before anything is written, for what append_kv() refuses, a position that the tables do not have, and,
/// where integers are made with given scales, a cos or sin that is not finite, a k_norm that is not or is above 2^60,
/// and with k_norm a norm_eps of 0. Reentrant. Bits depend on the row and the ISA, not on threads or other rows.
/// `workspace` as for attention(). On a GPU positions are clamped to the tables'. FLOPs (cost.hpp): 3 for each rotated
/// channel, 4 for each that is normalised.
RAPT_API void rotary_append_kv(const RotaryAppendKvArgs& args, const Context& context = default_context(),
                               std::span<std::byte> workspace = {});

/// What dispatch and planning see of a rotary_append_kv call. Text form: "rotary_append_kv", the words of append_kv's
/// problem, and those of the fields below; words at their default are left out.
///
///     rotary_append_kv dtype=bf16 b=8 hk=8 n=1 sk=4096 d=128 hq=32 rotary=128
///     rotary_append_kv new=bf16 kv=i8 b=8 hk=8 n=64 sk=4096 d=128 page=16 groups=1 hq=32 rotary=64 norm
///
/// max_workspace_bytes() holds for problems with smaller b, n, ragged.
struct RotaryAppendKvProblem : AppendKvProblem {
  std::int64_t hq = 0;             ///< 0: no q
  std::int64_t rotary = 0;         ///< channels that are rotated
  std::int64_t rotary_offset = 0;  ///< text: offset=; the first of them
  DType q_dtype = DType::f32;      ///< text: q=; default: k_new's
  DType out_dtype = DType::f32;    ///< text: out=, of q_out and, without a cache, k_out; default: k_new's
  DType table_dtype = DType::f32;  ///< text: table=
  bool interleaved = false;
  bool norm = false;         ///< of q, k or both
  bool plus_one = false;     ///< text: plus_one
  bool half_tables = false;  ///< text: half; cos has one angle for a pair
  bool rows = false;         ///< cos has a row for each new row
  bool positions = false;
  bool no_cache = false;  ///< keys go to k_out; sk is n, dv is d, and the cache's type k_new's

  friend bool operator==(const RotaryAppendKvProblem&, const RotaryAppendKvProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static RotaryAppendKvProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static RotaryAppendKvProblem of(const RotaryAppendKvArgs& args);
};

}  // namespace rapt
