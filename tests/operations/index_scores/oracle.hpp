// index_scores() in float64, as include/rapt/index_scores.hpp words it, and how far a result may be from it.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/attention/oracle_inputs.hpp"
#include "rapt/index_scores.hpp"

namespace rapt::testing {

/// The scores of one query, -inf for keys that it does not see, and what each may be off by. With u = 2^-24 and every
/// head's product x_h = sum_c q_c k_c, of codes where k is quantised, fp32 is off by no more than
///
///     |scale k_scale| (sum_h |w_h| (d + 2) u sum_c |q_c k_c| + (h + 5) u sum_h |w_h relu(x_h)|)
///
/// in whatever order it adds: d roundings of a product, and of a score h of its sum, two of the scale that is the
/// default, and one each of the scaled weight and of k_scale. Where a product rounds to the other side of 0, it passes
/// the ReLU by no more than it was off. Products below 2^-126 may count as 0. A score that is no finite number has no
/// room for error, nor has a head whose product is none.
struct IndexScoresRow {
  std::vector<double> scores, bounds;  // [sk]
};

/// Independent of the library; trusts the arguments to be valid. Reads no key that no query of the sequence sees.
class IndexScoresOracle {
 public:
  explicit IndexScoresOracle(const IndexScoresArgs& args) : args_(args) {}

  /// Of query `token` of sequence i; cheapest in the order of the sequences.
  IndexScoresRow row(std::int64_t i, std::int64_t token);

 private:
  inputs::Range seen(std::int64_t i, std::int64_t token) const;
  std::int64_t length(std::int64_t i) const;
  void read_keys(std::int64_t i);

  IndexScoresArgs args_;
  std::int64_t sequence_ = -1;  // whose keys these are: those that some query of it sees, from `first_` on
  std::int64_t first_ = 0;
  inputs::Matrix keys_, sizes_;  // transposed, and their magnitudes
  std::vector<double> key_scales_;
  std::vector<double> key_sums_;  // of the magnitudes of a key
};

}  // namespace rapt::testing
