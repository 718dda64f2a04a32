// The tensors of a problem of any operation, and the bits of its results.
#pragma once

#include <cstddef>
#include <vector>

#include "support/append_case.hpp"
#include "support/backward_case.hpp"
#include "support/case.hpp"
#include "support/delta_rule_backward_case.hpp"
#include "support/delta_rule_case.hpp"
#include "support/index_case.hpp"
#include "support/merge_case.hpp"
#include "support/topk_case.hpp"

namespace rapt::testing {

template <class P>
struct InputsOf;
template <>
struct InputsOf<AttentionProblem> {
  using type = Case;
};
template <>
struct InputsOf<AppendKvProblem> {
  using type = AppendCase;
};
template <>
struct InputsOf<MergeStatesProblem> {
  using type = MergeCase;
};
template <>
struct InputsOf<AttentionBackwardProblem> {
  using type = BackwardCase;
};
template <>
struct InputsOf<DeltaRuleProblem> {
  using type = DeltaRuleCase;
};
template <>
struct InputsOf<DeltaRuleBackwardProblem> {
  using type = DeltaRuleBackwardCase;
};
template <>
struct InputsOf<IndexScoresProblem> {
  using type = IndexScoresCase;
};
template <>
struct InputsOf<SelectTopkProblem> {
  using type = SelectTopkCase;
};

/// Every byte of the outputs.
template <class Inputs>
std::vector<std::byte> bits_of(Inputs& inputs) {
  std::vector<std::byte> bits;
  for (const Tensor* tensor : inputs.outputs())
    bits.insert(bits.end(), tensor->buffer().data(), tensor->buffer().data() + tensor->buffer().size());
  return bits;
}

/// Of a call, which writes to poisoned outputs.
template <class Inputs>
std::vector<std::byte> bits_on(Inputs& inputs, const Context& context) {
  inputs.clear();
  inputs.run(context);
  return bits_of(inputs);
}

}  // namespace rapt::testing
