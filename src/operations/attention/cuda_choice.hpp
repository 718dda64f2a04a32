// Which kernel of an entry does a call: pure functions of the problem's sizes and features, and of how many
// multiprocessors the GPU has. Entries launch what these name, and plans show it.
#pragma once

#include <string>

#include "cuda/kernels/decode_config.hpp"
#include "cuda/kernels/prefill_config.hpp"
#include "operations/attention/params.hpp"
#include "rapt/attention_problem.hpp"

namespace rapt::cuda {

// What a choice depends on. A call's parameters and its problem give the same.
struct AttentionShape {
  std::int64_t b, hk, group, sq, sk, d, dv;
  DType q_type, kv_type, out_type;
  bool ragged_q;        // sequences have as many query tokens as lengths on the device say
  bool equal_lengths;   // all sequences have sq tokens and sk keys
  bool paged;           // keys lie in pages or a ring
  bool sees_left_end;   // no window hides a row's first keys
  bool sees_right_end;  // neither causal nor a window hides a row's last keys
  bool modified;        // scores need more than a scale, or weights are dropped

  std::int64_t rows() const { return sq * group; }  // of a sequence and kv head
  bool quantized() const { return (set_of(kv_type) & kFloatTypes) == 0; }
};
AttentionShape shape_of(const AttentionParams& params);
AttentionShape shape_of(const AttentionProblem& problem);

// Of entries whose phase is prefill, in 16-bit types. No bit depends on the choice but for the blocks of keys, which
// depend on head dimension, causal or right window, and modifiers alone: so a row has the same bits in every layout.
// Values that are not finite and hidden count for a tile: so tiles depend on the sequences' sizes alone, or, where no
// key is hidden, on the batch too.
PrefillConfig prefill_config(const AttentionShape& shape, int multiprocessors);

// Of entries whose phase is decode, and of the short sequences of ragged calls.
enum class DecodeKernel : std::uint8_t {
  decode,  // attention_decode, with decode_config(): quantized caches, and up to kFewRows rows in 16-bit types
  m64,     // attention_decode_m64, with decode_m64_config(); of a ragged call also attention_decode
  f32,     // attention_decode_f32
};
DecodeKernel decode_kernel(const AttentionShape& shape);
DecodeConfig decode_config(const AttentionShape& shape);
PrefillConfig decode_m64_config(const AttentionShape& shape);

// Names the kernel and its blocks, for explain().
std::string describe_prefill(const AttentionShape& shape, int multiprocessors);
std::string describe_decode(const AttentionShape& shape);

}  // namespace rapt::cuda
