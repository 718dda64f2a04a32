// Rotary embedding of queries and keys, with optional RMS norms, and appending to a KV cache, in one call.
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

/// Arguments of rotary_append_kv(). Symbols: b sequences, hq query heads, hk KV heads, n new rows per sequence, d and
/// dv head dimension of keys and of values. Float tensors are f32, bf16 or f16, each independently, with any
/// non-negative strides.
struct RotaryAppendKvArgs {
  AppendKvArgs append{};  ///< keys before rotation, values, and the cache that they go to. Without a cache: only k_new,
                          ///< cu_seqlens and, if positions follow from it, seqlens
  TensorView q{};         ///< optional [b, hq, n, d]; with cu_seqlens [total, hq, d]
  MutableTensorView q_out{};  ///< with q: shape of q. May be q itself
  MutableTensorView k_out{};  ///< without a cache: shape of k_new. May be k_new itself
  TensorView cos{}, sin{};    ///< tables [positions, r], or one row for each new row: [b or 1, n, r], ragged [1, total,
                              ///< r]. r is rotary_dim, or half of it if both channels of a pair have one angle
  TensorView positions{};     ///< optional, tables only: i32 or i64 [b or 1, n], ragged [1, total]: rows of the tables.
                              ///< Default: append.seqlens[i] + t for new row t of sequence i
  TensorView q_norm{};        ///< optional [d]: q is divided by its root mean square and multiplied by these weights
  TensorView k_norm{};        ///< optional [d]: the same for k_new
  float norm_eps = 1e-6f;     ///< added to the mean of squares; 0 or more
  bool norm_plus_one = false;      ///< norms multiply by 1 + weight
  bool interleaved = false;        ///< pairs are channels 2i and 2i + 1; otherwise i and i + rotary_dim / 2
  std::int64_t rotary_dim = 0;     ///< number of rotated channels, even; 0: the last size of cos
  std::int64_t rotary_offset = 0;  ///< the first rotated channel
};

/// Normalises (if norm weights are given) and rotates each row of each head of q and k_new (Su et al., RoFormer, 2021;
/// Zhang and Sennrich, RMSNorm, 2019). Writes q to q_out, and appends k_new and v_new to the cache as append_kv() does,
/// or without a cache writes k_new to k_out:
///
///     x = x / sqrt(mean(x^2) + norm_eps) * weight, or (1 + weight)
///     (x1, x2) = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)     of every pair of channels; cos2 = cos1 in tables of r / 2
///
/// Other channels, and v_new, are copied. Arithmetic is fp32. Results are rounded once to the type of their
/// destination, or quantised as by append_kv(), whose rules for the cache hold for the rotated keys. cos and sin
/// include any scaling of the embedding. With u = 2^-24, a channel's value before rounding has an error of at most
///
///     4 u (|x1 cos1| + |x2 sin1|)                    without norms
///     (d / 8 + 16) u (|x1 cos1| + |x2 sin1|)         with norms, of rotated channels
///     (d / 8 + 12) u |x|                             with norms, of other channels
///
/// as long as the squares of a row sum to less than 2^128, and products are 0 or above 2^-126. A NaN or Inf in a
/// channel reaches its pair, and with norms the row of that head. In cos or sin it reaches the channels that they
/// rotate. If values are columns of the keys (latent attention), these columns may be neither rotated nor normalised.
///
/// Throws Error, before anything is written, for everything that append_kv() refuses and for a position that the tables
/// lack. Quantising to integers with given scales also refuses a cos or sin that is not finite, a k_norm that is not
/// finite or exceeds 2^60, and with k_norm a norm_eps of 0. Reentrant. The bits depend on the row, its angles, the
/// weights and the ISA, not on threads or other rows. `workspace` as for attention(). On a GPU, positions are clamped
/// to the tables. FLOPs (cost.hpp): 3 for each rotated channel, 4 for each normalised channel.
RAPT_API void rotary_append_kv(const RotaryAppendKvArgs& args, const Context& context = default_context(),
                               std::span<std::byte> workspace = {});

/// The problem of a rotary_append_kv call: all that dispatch and planning use. Text form: "rotary_append_kv", the words
/// of append_kv's problem, and the words of the fields below. Words at their default are omitted.
///
///     rotary_append_kv dtype=bf16 b=8 hk=8 n=1 sk=4096 d=128 hq=32 rotary=128
///     rotary_append_kv new=bf16 kv=i8 b=8 hk=8 n=64 sk=4096 d=128 page=16 groups=1 hq=32 rotary=64 norm
///
/// max_workspace_bytes() covers problems with smaller b, n and ragged.
struct RotaryAppendKvProblem : AppendKvProblem {
  std::int64_t hq = 0;             ///< 0: no q
  std::int64_t rotary = 0;         ///< number of rotated channels
  std::int64_t rotary_offset = 0;  ///< text: offset=; the first rotated channel
  DType q_dtype = DType::f32;      ///< text: q=; default: k_new's
  DType out_dtype = DType::f32;    ///< text: out=, of q_out and, without a cache, k_out; default: k_new's
  DType table_dtype = DType::f32;  ///< text: table=
  bool interleaved = false;
  bool norm = false;         ///< q, k or both have norm weights
  bool plus_one = false;     ///< text: plus_one
  bool half_tables = false;  ///< text: half; cos has one angle per pair
  bool rows = false;         ///< cos has a row for each new row
  bool positions = false;
  bool no_cache = false;  ///< keys go to k_out; sk is n, dv is d, and the cache's type k_new's

  friend bool operator==(const RotaryAppendKvProblem&, const RotaryAppendKvProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static RotaryAppendKvProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static RotaryAppendKvProblem of(const RotaryAppendKvArgs& args);
};

}  // namespace rapt
