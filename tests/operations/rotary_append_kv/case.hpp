// The tensors of a RotaryAppendKvProblem, filled with reproducible values, and what rotary_append_kv() must make of
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/append_kv/case.hpp"
#include "rapt/rotary_append_kv.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// New keys, values and the cache are those of an AppendCase. Both channels of a pair have angles of their own unless
/// tables are halved. Depending on the seed, norms are of q, of k or of both, rows of cos and sin and positions
/// broadcast over sequences, and q and k are written in place where their types are those of their results.
struct RotaryCase {
  explicit RotaryCase(const RotaryAppendKvProblem& problem, std::uint64_t seed = 1,
                      Placement placement = Placement::heap, Spacing spacing = Spacing::dense);

  RotaryAppendKvArgs args();
  void run(const Context& context) { rotary_append_kv(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons results again; puts back what is written in place.
  void clear();
  std::vector<Tensor*> outputs();
  /// Compares every row_step-th new row of each sequence, and the last, with float64, by the bounds that
  /// include/rapt/rotary_append_kv.hpp states, and what is written to the cache by those of append_kv beside them.
  Verdict verdict(std::int64_t row_step = 1) const;

  RotaryAppendKvProblem problem;
  AppendCase append;
  Tensor q, q_out, k_out;  ///< q is what is written to q_out before the call where it is in place
  Tensor cos, sin, positions, q_norm, k_norm;
  bool in_place = false;
  float eps = 1e-5f;

 private:
  /// A row of a head in float64, and what each channel may be off by.
  struct Wanted {
    std::vector<double> x, off;
  };
  Wanted wanted(const Tensor& from, const Tensor& norm, std::int64_t i, std::int64_t t, std::int64_t h) const;
  void compare(const Tensor& from, const Tensor& norm, const Tensor& out, std::int64_t row_step, Tally& tally) const;
};

template <>
struct CaseOf<RotaryAppendKvProblem> : CaseTraits<RotaryAppendKvProblem, RotaryCase> {
  static std::vector<DType> types(const RotaryAppendKvProblem& problem);  ///< inputs first
  static double tensor_bytes(const RotaryAppendKvProblem& problem);
  static Sizes sizes(const RotaryAppendKvProblem& problem);
  static std::int64_t rows(const RotaryAppendKvProblem& problem) { return problem.n; }
};

/// For DeviceCallOf.
void move_tensors(RotaryAppendKvArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
