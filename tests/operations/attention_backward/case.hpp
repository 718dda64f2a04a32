// The tensors of an AttentionBackwardProblem, filled with reproducible values, and what attention_backward() must make
// of them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/attention_backward/oracle.hpp"
#include "rapt/context.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// Gradients against the oracle's, of those that `args` wants. The figures are the worst of all of them.
Verdict verdict_of(const AttentionBackwardArgs& args, const BackwardReference& reference);

/// A Case, whose out and lse are inputs here: the oracle's, rounded to their types. dout and dlse are standard normal;
/// dout lies in memory as out does. Gradients lie as what they are of does, have its type unless another one is given,
/// and are poisoned.
struct BackwardCase {
  /// Whose results out and lse are: those of the library, by products of fp32, where the oracle would take too long or
  /// nothing is compared with it. With `later` they are the oracle's, of run_forward().
  enum class Forward : std::uint8_t { oracle, library, later };

  /// Throws Error as Case does.
  explicit BackwardCase(const AttentionBackwardProblem& problem, std::uint64_t seed = 1,
                        Placement placement = Placement::heap, std::optional<DType> gradients = {},
                        Forward forward = Forward::oracle);

  /// With the forward's tensors as they are given.
  BackwardCase(const AttentionBackwardProblem& problem, Case inputs, std::uint64_t seed, Placement placement,
               std::optional<DType> gradients, Forward forward);

  /// Views of the tensors, and the scalars of `problem`.
  AttentionBackwardArgs args();
  void run(const Context& context) { attention_backward(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Fills out and lse again, after other inputs have changed.
  void run_forward();
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the gradients again.
  void clear();
  /// The gradients that are wanted.
  std::vector<Tensor*> outputs();
  /// Compares the gradients with the oracle's, or with `reference`; no gap may have changed.
  Verdict verdict(const Subset& subset = {}) { return verdict(oracle_backward(args(), subset)); }
  Verdict verdict(const BackwardReference& reference);

  AttentionBackwardProblem problem;
  Case inputs;  ///< and the forward's results
  Tensor dout, dlse, dq, dk, dv, dbias, dsinks, dalibi;

 private:
  Forward forward_;
};

template <>
struct CaseOf<AttentionBackwardProblem> : CaseTraits<AttentionBackwardProblem, BackwardCase> {
  static std::vector<DType> types(const AttentionBackwardProblem& problem);  ///< inputs first
  static double tensor_bytes(const AttentionBackwardProblem& problem);
  static Sizes sizes(const AttentionBackwardProblem& problem);
  static BackwardCase fresh(const AttentionBackwardProblem& problem, std::uint64_t seed);
  /// out and lse are the library's.
  static BackwardCase timed(const AttentionBackwardProblem& problem, std::uint64_t seed);
  /// The oracle takes about ten float64 products of a forward's.
  static bool is_large(const AttentionBackwardProblem& problem);
  /// If rows are sampled, of some heads only, and of dq, dk and dv.
  static Verdict verify(BackwardCase& inputs, const Context& context, std::int64_t rows);
};

/// For DeviceCallOf.
void move_tensors(AttentionBackwardArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
