// The checks of attention that several files or operations make.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/attention_params.hpp"
#include "rapt/attention.hpp"

namespace rapt {

// The fields of an attention problem's text, and what they leave open: operations that differentiate it have more.
std::span<const Field<AttentionProblem>> attention_fields();
void complete(const Words& words, AttentionProblem& problem);

// The tensors of a call, each checked as it is taken.
class AttentionTensors {
 public:
  using CheckType = void (*)(std::string_view name, DType dtype);

  explicit AttentionTensors(const Device& device);  // all are to be there
  AttentionTensors(const AttentionTensors&) = delete;
  AttentionTensors& operator=(const AttentionTensors&) = delete;

  void take(const char* name, const TensorView& view, bool written = false);
  // take() of one that has to be given, with that rank; `shape` says what it should be.
  void need(const char* name, const TensorView& view, int ndim, const char* shape, CheckType check_type,
            bool written = false);
  std::span<const Checked> all() const { return all_; }

 private:
  Device device_;
  // On the stack, as every call comes here: more tensors than a call has.
  alignas(Checked) std::array<std::byte, 20 * sizeof(Checked)> memory_;
  std::pmr::monotonic_buffer_resource resource_{memory_.data(), memory_.size()};
  std::pmr::vector<Checked> all_{&resource_};
};

// Checks what scores become, and fills it into `p` and `params`, which have the sizes and lengths already.
void check_score(const ScoreSpec& score, AttentionTensors& tensors, AttentionProblem& p, AttentionParams& params);

// Throws Error for more rows than offsets can reach.
void check_rows(const AttentionProblem& problem);
// Throws Error for what gathered keys do not go with.
void check_gathered(const AttentionProblem& problem);

// Throws Error unless hq is a multiple of hk.
void check_heads(std::int64_t hq, std::int64_t hk);

// Whether positions matter and the call does not say how queries and keys line up.
bool needs_align(const AttentionProblem& problem);
[[noreturn]] void refuse_align(std::int64_t q, std::int64_t k, const std::string& where = "");

// Whether sequences of a call may differ in length.
inline bool has_lengths(const AttentionProblem& p) {
  return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths || p.gathered;
}

// The problem as plans and kernels see it: of gathered keys, each query token is a sequence of its own.
inline AttentionProblem in_sequences(AttentionProblem p) {
  if (p.gathered) p.b *= p.sq, p.sq = std::min<std::int64_t>(p.sq, 1);
  return p;
}

// The strides of b, h, s and d of [b, h, s, d] or ragged [total, h, d]; without `has_elements` of tensors like lse,
// that have no d.
Strides row_strides(const Layout& t, bool ragged, bool has_elements);

// validate() of a forward whose out and lse are inputs, but for overlaps: fills `params` and adds every tensor to
// `all`. `lists` becomes what `params` has of gathered keys beyond the tensors.
AttentionProblem check_forward(const AttentionArgs& args, AttentionParams& params, std::vector<Checked>& all,
                               std::shared_ptr<const void>& lists);
// Throws Error for what is no share of weights to drop.
void check_dropout(const char* name, float p);

// Throws Error for a tail of keys of size d, columns in a tensor of their own, that no cache of the type has.
void check_tail(std::string_view name, DType dtype, std::int64_t d, std::int64_t tail, DType tail_dtype);

// Throws Error for scales or zeros that no cache of the type and head sizes has.
void check_scales(std::string_view name, DType dtype, std::int64_t size, std::int64_t groups);

}  // namespace rapt
