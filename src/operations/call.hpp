// A validated call of any operation: what dispatch chooses a kernel for, and what the kernel gets.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "operations/all_params.hpp"
#include "rapt/attention.hpp"
#include "rapt/attention_backward.hpp"
#include "rapt/problem.hpp"

namespace rapt {

// In the order of Operation.
using Params = detail::WithoutFirst<void
#define RAPT_OPERATION(name, Name, NAME) , Name##Params
#include "rapt/operations.def"
                                    >::Variant;

struct Call {
  Problem problem;
  Params params;
  Device device{};
  bool is_empty = false;                // there is nothing to write
  std::shared_ptr<const void> storage;  // of what params point to, beside the tensors
};

// Check everything that contract.md lists under bad input. Throw Error; write nothing. `workspace` is the caller's, if
// any: it may share no memory with a tensor.
#define RAPT_OPERATION(name, Name, NAME) \
  Call validate(const Name##Args& args, std::span<const std::byte> workspace = {});
#include "rapt/operations.def"

// The checks that need no tensors: sizes, head counts, windows, scale, alignment.
#define RAPT_OPERATION(name, Name, NAME) void check(const Name##Problem& problem);
#include "rapt/operations.def"

// What a kernel's facts must cover, for dispatch. d = dv where an operation's rows have one size.
struct Needs {
  DTypeSet types;
  std::int64_t d, dv;
};
#define RAPT_OPERATION(name, Name, NAME) Needs needs_of(const Name##Problem& problem);
#include "rapt/operations.def"

// Fills the sizes in attention's parameters from the problem.
void fill_sizes(const AttentionProblem& problem, AttentionParams& params);

// The forward's problem, of attention and of its gradients; null for other operations.
const AttentionProblem* attention_of(const Problem& problem);

DeviceType device_of(const Problem& problem);

// Whether a plan made for `plan` runs `call`. Only what plans depend on is compared: a problem written by hand can
// spell the rest in several ways. Plans for scales of any rows run calls with scales of whole heads.
bool is_planned(const Problem& call, const Problem& plan);

// Problems no larger than `largest` that entries may be chosen for; of each entry one is among them.
std::vector<Problem> corner_problems(const Problem& largest);

}  // namespace rapt
