// Attention as three steps, each a pass over the S x S matrix of scores in memory: what a fused kernel is held against.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "rapt/rapt.hpp"
#include "step_kernels.hpp"

namespace rapt::bench {

/// Why a problem has no three steps: they are written for contiguous fp32, without other features than `causal`, and
/// for scores of up to 2 GiB. Empty if it has.
std::string why_no_three_steps(const Problem& problem);

/// The steps of a call. Each goes over all heads before the next begins, on workers of oneTBB that share heads and
/// blocks of rows. Products are of all pairs, also where `causal` hides some, as products of matrices are.
class ThreeSteps {
 public:
  /// `args` outlive this, and their problem has three steps. `isa` is one of vectors, and usable.
  ThreeSteps(const AttentionArgs& args, Isa isa, int threads);

  struct Step {
    const char* name;
    Cost cost;  ///< by formula: each matrix moved once, and in the softmax five operations for each visible score
  };
  /// "scores", "softmax", "values".
  const std::array<Step, 3>& steps() const { return steps_; }
  /// Does step 0, 1 or 2 on what the one before has left. (A softmax of a softmax takes as long as one of scores.)
  void run(int step);
  /// [b, hq, sq, dv], contiguous; of the last step.
  const std::vector<float>& out() const { return out_; }

 private:
  void run_block(int step, std::int64_t head, std::int64_t first, std::int64_t rows);

  const AttentionArgs& args_;
  AttentionProblem p_;
  const StepKernels& kernels_;
  int threads_;
  std::shared_ptr<Executor> executor_;
  std::array<Step, 3> steps_;
  std::vector<float> scores_, out_;
};

}  // namespace rapt::bench
