// The tensors of a Problem, filled with reproducible values.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "operations/attention/case_modifiers.hpp"
#include "rapt/attention.hpp"
#include "rapt/problem.hpp"
#include "support/cache.hpp"
#include "support/case_of.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// The problem of `text` with q, k, v and out of `dtype`.
AttentionProblem typed(const std::string& text, DType dtype);

/// Owns every tensor that a Problem speaks of.
///
/// q, k, v and sinks are standard normal, bias likewise with about 4 % of -inf; the boolean mask has 80 % true; one row
/// in sixteen of bias and mask is masked entirely, never all of them. Slopes of alibi are 2^(-8(h+1)/hq). Key lengths
/// cover 0 and sk, those of rings the capacity and what is far past it. Of ragged sequences one is the longest and the
/// others share the rest evenly; ragged tensors are contiguous with layout=bhsd and bshd, the order projections give.
/// With layout=other, q, k, v and out have an inner stride of 2 and unused elements between rows and heads, bias and
/// mask between rows.
///
/// f8e4m3 queries are standard normal but for their scales, whose magnitudes are from 1/2 to 2, some of them negative;
/// they broadcast over the batch, over rows, over both or neither.
///
/// Quantised k and v are standard normal before they are rounded to their codes; support/cache.hpp says how. Latent
/// values share the scales of k in every second case in which they can. Their scales may be those of whole heads
/// where the given problem does not ask for it; `problem` says whether they are. Pages lie in random order, three of
/// them are nobody's, and every second sequence shares the full pages that it has in common with the first.
///
/// Lists of gathered keys are of random rows, some of them twice, without gaps or with, full, shorter or empty; about
/// every second case has counts, and every third a pool of rows that all sequences share. There are `pool` rows, by
/// default a few more than a list has entries; the last two are on no list.
///
/// Nothing that may not be read holds a number: gaps, rows past a key length or on no list, pages and scales nobody
/// uses, and all outputs are poisoned, and table entries past a length and list entries past a count are no pages or
/// keys. (An integer can be no NaN: i8 and i4x2 hold 0xb5.) Logical element n of a tensor depends on (seed, tensor, n)
/// only, shared pages apart, whatever the layout, and but for its rounding not on the type.
struct Case : Modifiers {
  /// Throws Error for types that a call would refuse, for a bias other than f32, and for ragged totals that
  /// b sequences with that longest one cannot have.
  explicit Case(const AttentionProblem& problem, std::uint64_t seed = 1, Placement placement = Placement::heap,
                std::optional<std::int64_t> pool = {});

  /// Views of the tensors below, and the scalars of `problem`.
  AttentionArgs args();
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the outputs again.
  void poison_outputs();
  /// Where key j of sequence n lies, which has it. Of keys that are neither ragged nor gathered.
  Slot slot(std::int64_t n, std::int64_t j) const;
  // As the cases of other operations have them.
  void run(const Context& context) { attention(args(), context); }
  void clear() { poison_outputs(); }
  std::vector<Tensor*> outputs() { return {&out, &lse}; }

  AttentionProblem problem;
  Tensor q, k, v, out, lse, seqlens, cu_seqlens_q, cu_seqlens_k;  // latent: v is not read
  Tensor q_scale, block_table, indices, counts, k_scale, v_scale, k_zero, v_zero, k_tail;
  bool shares_coding = false;  ///< latent: v's scales and zeros are those of its groups of k

  /// Whether v's groups are groups of k, so that it may.
  static bool can_share_coding(const AttentionProblem& problem);

 private:
  void scale_queries(std::uint64_t seed, Placement placement);
  void make_keys(std::uint64_t seed, Placement placement, std::optional<std::int64_t> pool);
};

/// A Case, but for caches (paged, ring, gathered or quantised keys in the layout bhsd): so that their bytes are what
/// they seem, all sequences have sk keys, pages have one owner, in random order, and every row has its own scales and
/// zeros. Lists of gathered keys are full, of different rows of a pool: by default of so many rows that neighbours are
/// seldom on one list.
Case timed_case(const AttentionProblem& problem, std::uint64_t seed, std::optional<std::int64_t> pool = {});

template <>
struct CaseOf<AttentionProblem> : CaseTraits<AttentionProblem, Case> {
  static std::vector<DType> types(const AttentionProblem& problem);  ///< inputs first
  static double tensor_bytes(const AttentionProblem& problem);
  static Sizes sizes(const AttentionProblem& problem);
  static Case fresh(const AttentionProblem& problem, std::uint64_t seed) { return Case(problem, seed); }
  static Case timed(const AttentionProblem& problem, std::uint64_t seed) { return timed_case(problem, seed); }
  /// The oracle takes a float64 product of sq x sk x (d + dv) for each head.
  static bool is_large(const AttentionProblem& problem);
  /// About `rows` rows of each head, or of some heads.
  static Verdict verify(Case& inputs, const Context& context, std::int64_t rows);
};

class DeviceTensors;
/// For DeviceCallOf.
void move_tensors(AttentionArgs& args, DeviceTensors& tensors);
/// Of these, all but the results.
void move_inputs(AttentionArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
