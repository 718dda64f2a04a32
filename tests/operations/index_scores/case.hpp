// The tensors of an IndexScoresProblem, filled with reproducible values, and what index_scores() must make of them.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "operations/index_scores/oracle.hpp"
#include "rapt/index_scores.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// q, weights and k are standard normal, or codes that use all of i8, with scales around 1/40, or around 1 for 8-bit
/// floats. Lengths cover 0 and sk; with causal and no align they are sq. Key ranges have a begin, an end or both,
/// depending on the seed, which may be past the keys on either side, and ends before their begins; so do the types of
/// integers depend on it, and whether a scale is given.
///
/// Pages lie in random order, and two of them are nobody's; table entries past a length are no pages. Nothing that may
/// not be read holds a number: gaps, outputs, rows past a length or in nobody's page, and their scales. With gaps,
/// elements are one or two apart and dimensions in any order.
struct IndexScoresCase {
  /// `full`: every length is sk.
  enum class LengthsAre : std::uint8_t { any, full };
  explicit IndexScoresCase(const IndexScoresProblem& problem, std::uint64_t seed = 1,
                           Placement placement = Placement::heap, Spacing spacing = Spacing::dense,
                           LengthsAre lengths = LengthsAre::any);

  IndexScoresArgs args();
  void run(const Context& context) { index_scores(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the outputs again.
  void clear();
  std::vector<Tensor*> outputs();
  /// Compares every row_step-th query, counted over the sequences, and the last. Scores are held to the oracle's
  /// bounds. With scores, the indices must be those of a stable sort of them; without, they must be the best ones, and
  /// in order, of some scores within the bounds.
  Verdict verdict(std::int64_t row_step = 1);

  std::int64_t length(std::int64_t sequence) const { return lengths_[static_cast<std::size_t>(sequence)]; }
  /// Gives key j of every sequence, which has its own scale, the row of key j % period.
  void repeat_keys(std::int64_t period);
  /// Where key j of a sequence lies in k.
  std::int64_t entry(std::int64_t sequence, std::int64_t j) const;
  std::int64_t row(std::int64_t j) const { return problem.page_size > 0 ? j % problem.page_size : j; }

  IndexScoresProblem problem;
  Tensor q, k, weights, k_scale, seqlens, block_table, key_begin, key_end, scores, indices;
  std::optional<float> scale;

 private:
  void make_keys(std::uint64_t seed, Placement placement, Spacing spacing);
  void make_ranges(std::uint64_t seed, Placement placement, Spacing spacing);

  Dims lengths_, pages_;  // pages: [b, m], those of keys
};

template <>
struct CaseOf<IndexScoresProblem> : CaseTraits<IndexScoresProblem, IndexScoresCase> {
  static std::vector<DType> types(const IndexScoresProblem& problem);  ///< inputs first
  static double tensor_bytes(const IndexScoresProblem& problem);
  static Sizes sizes(const IndexScoresProblem& problem);
  static std::int64_t rows(const IndexScoresProblem& problem) { return problem.b * problem.sq; }
  static bool is_large(const IndexScoresProblem& problem);
  /// All sequences have sk keys.
  static IndexScoresCase timed(const IndexScoresProblem& problem, std::uint64_t seed) {
    return IndexScoresCase(problem, seed, Placement::heap, Spacing::dense, IndexScoresCase::LengthsAre::full);
  }
};

/// For DeviceCallOf.
void move_tensors(IndexScoresArgs& args, DeviceTensors& tensors);

/// Of every type, with every way to hide keys and to keep them; d reaches 200, h 70, sk 3000 and n 2100.
IndexScoresProblem sample_index_scores(std::mt19937_64& random);

}  // namespace rapt::testing
