// Assertions about attention_backward that more than one test file makes.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "operations/attention_backward/case.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// The problem of these words with q, k, v, out and dout of `dtype`.
inline AttentionBackwardProblem typed_backward(const std::string& words, DType dtype) {
  AttentionBackwardProblem problem = AttentionBackwardProblem::parse("attention_backward " + words);
  problem.q_dtype = problem.kv_dtype = problem.out_dtype = problem.dout_dtype = dtype;
  return problem;
}

/// Runs the case on every usable entry, each into fresh poison, and holds the gradients to the reference.
inline void check_backward(BackwardCase& c, const BackwardReference& reference) {
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    const Verdict verdict = c.verdict(reference);
    INFO(describe(verdict.errors));
    CHECK(verdict.violation == "");
  }
}
/// To the oracle's: if errors are not `independent`, as of equal terms, to the bounds of elements alone.
inline void check_backward(BackwardCase& c, bool independent = true) {
  if (every_entry(c.problem).empty()) return;  // RAPT_TEST_ENTRIES has others
  BackwardReference reference = oracle_backward(c.args());
  for (GradientReference* gradient :
       {&reference.dq, &reference.dk, &reference.dv, &reference.dbias, &reference.dsinks, &reference.dalibi})
    if (!independent) std::fill(gradient->spread.begin(), gradient->spread.end(), HUGE_VAL);
  check_backward(c, reference);
}
inline void check_backward(const AttentionBackwardProblem& problem, std::uint64_t seed = 1,
                           std::optional<DType> gradients = {}) {
  if (every_entry(problem).empty()) return;
  BackwardCase c(problem, seed, Placement::heap, gradients);
  INFO("seed " << seed);
  check_backward(c);
}

/// The call for sequence n of a dense batch alone.
inline AttentionBackwardArgs one_sequence(AttentionBackwardArgs a, std::int64_t n) {
  const auto one = [n](auto& t) { t = slice(t, 0, n, 1); };
  for (TensorView* t : {&a.q, &a.kv.k, &a.kv.v, &a.out, &a.lse, &a.dout}) one(*t);
  if (a.dlse) one(a.dlse);
  if (a.kv.seqlens) one(a.kv.seqlens);
  for (MutableTensorView* t : {&a.dq, &a.dk, &a.dv}) one(*t);
  return a;
}

/// Every byte of the gradients, gaps included.
inline std::vector<std::byte> bits_of(BackwardCase& c) {
  std::vector<std::byte> bits;
  for (const Tensor* tensor : c.outputs())
    bits.insert(bits.end(), tensor->buffer().data(), tensor->buffer().data() + tensor->buffer().size());
  return bits;
}

}  // namespace rapt::testing
