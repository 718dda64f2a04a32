// The problem of an attention call: its shapes, types and features.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "rapt/kv_cache.hpp"
#include "rapt/score.hpp"
#include "rapt/types.hpp"

namespace rapt {

struct AttentionArgs;

/// The problem of an attention call: shapes, types and features, without pointers or values of tensors. A plain value
/// that can be compared and hashed. Text form: "attention", then `key=value` words in the order of the fields below.
/// The words of ScoreProblem follow `dv`, those of CacheProblem follow `ragged_k`. Words at their default are omitted,
/// so "attention b=1 hq=8 sq=512 d=64 causal" is complete. parse() takes the words in any order, each once.
///
///     attention b=2 hq=8 hk=2 sq=128 sk=512 d=64 dv=32 causal window=64,-1 align=bottom_right softcap=30
///               bias=hqk mask=bk alibi sinks dropout=0.1 lse ragged_q=200 ragged_k=700 layout=bshd
///     attention dtype=bf16 out=f32 b=1 hq=8 sq=512 d=64
///     attention kv=i8 b=4 hq=32 hk=8 sq=1 sk=4096 d=128 causal align=bottom_right seqlens page=16 groups=1
///     attention dtype=bf16 b=1 hq=128 hk=1 sq=512 sk=2048 d=576 dv=512 gathered
///     attention kv=f8e4m3 b=1 hq=128 hk=1 sq=1 sk=8192 d=576 dv=512 latent groups=4 tail=64 tail_dtype=bf16
///     attention q=f8e4m3 kv=f8e4m3 out=bf16 b=1 hq=8 sq=4096 d=128 causal groups=1 head_scales q_scale
///
/// max_workspace_bytes() covers problems with smaller b, sq, sk, ragged_q and ragged_k.
struct AttentionProblem : ScoreProblem, CacheProblem {
  /// Order of the dimensions in memory, of q, k, v and out alike. `bhsd` is contiguous, `bshd` is the order of
  /// projections, `bhds` has the rows innermost. `other` is any other order, or different orders.
  enum class Layout : std::uint8_t { bhsd, bshd, bhds, other };

  DType q_dtype = DType::f32;    ///< may be f8e4m3; text: q=, or dtype= for all types without a word
  DType kv_dtype = DType::f32;   ///< of k and v, may be quantised; text: kv=
  DType out_dtype = DType::f32;  ///< text: out=
  DeviceType device = DeviceType::cpu;
  std::int64_t b = 1;
  std::int64_t hq = 1;
  std::int64_t hk = 1;  ///< text default: hq
  std::int64_t sq = 0;  ///< ragged: the longest sequence
  std::int64_t sk = 0;  ///< text default: sq; ragged: the longest sequence; paged: the room of the block table;
                        ///< gathered: the entries of a token's list
  std::int64_t d = 0;
  std::int64_t dv = 0;  ///< text default: d
  bool lse = false;
  bool kv_lengths = false;     ///< text: seqlens; keys have a length per sequence (paged and ring: always)
  std::int64_t ragged_q = -1;  ///< total_q; -1: dense
  std::int64_t ragged_k = -1;  ///< total_k; -1: dense
  bool gathered = false;       ///< text: gathered; each query token has a list of keys
  bool latent = false;         ///< text: latent; rows of v are the first columns of longer keys, in one memory
  std::int64_t k_groups = 0;   ///< scales per row of k; text: k_groups=, or groups= for both; 0: none
  std::int64_t v_groups = 0;   ///< scales per row of v
  bool zeros = false;          ///< text: zeros; k or v has zero points
  bool head_scales = false;  ///< text: head_scales; all given scales of k and v have one element per group for all rows
                             ///< of a head of a sequence, and with pages for all pages
  std::int64_t k_tail = 0;   ///< the last columns of d, in a separate tensor beside a quantised k; text: tail=; 0: none
  DType k_tail_dtype = DType::f32;  ///< text: tail_dtype=
  bool q_scale = false;             ///< text: q_scale; f8e4m3 queries have scales
  Layout layout = Layout::bhsd;

  friend bool operator==(const AttentionProblem&, const AttentionProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word. Checks of sizes only that
  /// they are integers.
  RAPT_API static AttentionProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// A hash of all fields.
  RAPT_API std::size_t hash() const;
  /// Validates `args` in full (see attention()) and describes them. Throws Error.
  RAPT_API static AttentionProblem of(const AttentionArgs& args);
};

}  // namespace rapt
