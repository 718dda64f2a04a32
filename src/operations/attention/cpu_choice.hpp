// Which CPU kernels run a call of attention, decided in one place: pure functions of the problem, of what the kernels
// declare (AttentionKernel), and of what the context allows. Entries refuse by it, plans keep it, explain() shows it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/context.hpp"
#include "cpu/machine.hpp"
#include "rapt/attention.hpp"

namespace rapt::cpu {

// A kernel of one ISA.
struct AttentionCandidate {
  const AttentionKernel* kernel;
  const IsaSupport* support;
};
using AttentionCandidates = std::span<const AttentionCandidate>;  // in the order that dispatch tries them

// What decides which kernel is the fastest for a sequence.
struct SequenceSize {
  std::int64_t rows;          // of each kv head: tokens x group
  std::int64_t key_elements;  // keys x (d + dv)
};

// The kernels of a call. If its sequences have different lengths, each sequence goes to the kernel that it would get
// alone.
struct AttentionChoice {
  const AttentionCandidate* chosen =
      nullptr;  // the entry that dispatch chose, for all sequences that the others do not take
  const AttentionCandidate* few_rows = nullptr;  // attention_decode; null: the others take sequences of few rows
  const AttentionCandidate* short_keys =
      nullptr;                     // where the setup of `chosen` is not repaid; null: `chosen` takes these
  std::int64_t head_elements = 0;  // d + dv
  bool quantised = false;          // keys and values

  const AttentionKernel& kernel_for(std::int64_t rows, std::int64_t keys) const;
  // From which rows and keys on each kernel runs; empty if one kernel runs all.
  std::string rule() const;
};

// Query rows of a kv head of a sequence: tokens x group. Where keys are gathered, a sequence is a single token.
std::int64_t rows_of_head(const AttentionProblem& problem);

// Why dispatch must not give the problem to `candidate`, as lasting text; empty if it may.
std::string_view refuse(const AttentionCandidate& candidate, const AttentionProblem& problem, AttentionCandidates all,
                        const Context::Impl& context);
// The kernels of a call that dispatch gives to `candidate`.
AttentionChoice choose(const AttentionCandidate& candidate, const AttentionProblem& problem, AttentionCandidates all,
                       const Context::Impl& context);

}  // namespace rapt::cpu
