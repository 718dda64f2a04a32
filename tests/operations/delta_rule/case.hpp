// The tensors of a DeltaRuleProblem, filled with reproducible values, and what delta_rule() must make of them.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "operations/delta_rule/oracle.hpp"
#include "rapt/context.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// Log decays, by seed from 0 on: from -0.02 to 0; from -1 to 0; -5; weak but for one in twenty from -70 to -5; weak
/// but for one in twenty of -600.
enum class Decays : std::uint8_t { weak, some, strong, mostly_weak, resets };
inline constexpr std::uint64_t kDecays = 5;
inline constexpr Decays kAllDecays[] = {Decays::weak, Decays::some, Decays::strong, Decays::mostly_weak,
                                        Decays::resets};

/// Rows of q and k have a norm of about 1, v is standard normal, beta lies in (0, 1) once all is done to it, or in
/// (0, 2). What a problem does not say depends on the seed: its decays, whether beta is a sigmoid and doubled, whether
/// the gate has a bound, a_log and dt_bias, the scale, the order of dimensions in memory, the types of g and beta, and
/// of q, k and v if one is not f32; whether there is an initial state, a final one or both, in place or not, how a
/// state lies, whether one of two states is f32 where the problem's are not, whether accepted is given, and one
/// negative slot.
///
/// Pools have three slots more than sequences need, and slots are in random order. Nothing that may not be read holds a
/// number: gaps, outputs, and slots that no sequence starts from.
struct DeltaRuleCase {
  /// Throws Error for ragged totals that b sequences with that longest one cannot have.
  explicit DeltaRuleCase(const DeltaRuleProblem& problem, std::uint64_t seed = 1, Placement placement = Placement::heap,
                         Spacing spacing = Spacing::dense, std::optional<Decays> decays = {});

  DeltaRuleArgs args();
  void run(const Context& context);
  void run(const Forced& context);
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the outputs again; a state that is updated in place is the initial one again.
  void clear();
  std::vector<Tensor*> outputs();
  /// Of the last run. No slot but those that sequences leave a state in may have changed, nor a gap.
  Verdict verdict(const DeltaRuleSubset& subset = {});
  /// For an entry like that of the last run; before any, for one of fp32 arithmetic.
  DeltaRuleReference reference(const DeltaRuleSubset& subset = {});
  Verdict verdict(const DeltaRuleReference& reference) const;

  std::int64_t slot(std::int64_t sequence, std::int64_t step = 0) const;
  std::int64_t length(std::int64_t sequence) const;

  DeltaRuleProblem problem;
  Tensor q, k, v, g, beta, out, a_log, dt_bias, cu_seqlens, state_slots, accepted;
  Tensor initial;               ///< also what the state was before it is updated in place
  Tensor final;                 ///< empty: not wanted
  DType operands = DType::f32;  ///< what the entry that ran last rounds the operands of products to
  bool in_place = false, beta_sigmoid = false, beta_double = false;
  std::optional<float> scale, gate_lower_bound;

 private:
  void make_decay(std::uint64_t seed, Decays decays, Placement placement, Spacing spacing);
  void make_states(std::uint64_t seed, Placement placement, Spacing spacing);
  /// [b, t, ...] or, ragged, [total, ...].
  Layout layout(const Dims& rest, bool heads_first, Spacing spacing) const;

  Dims lengths_, slots_, accepted_;
};

/// A tensor of tokens [b, t, ...] or, ragged, [total, ...] as the part [1, count, ...] of it.
template <class View>
View tokens_of(const View& t, bool ragged, std::int64_t sequence, std::int64_t first, std::int64_t count) {
  if (!t) return t;
  if (!ragged) return slice(slice(t, 0, sequence, 1), 1, first, count);
  View part = slice(t, 0, first, count);
  part.ndim = t.ndim + 1;
  for (auto dim = static_cast<std::size_t>(t.ndim); dim > 0; --dim)
    part.shape[dim] = part.shape[dim - 1], part.strides[dim] = part.strides[dim - 1];
  part.shape[0] = 1, part.strides[0] = 0;
  return part;
}

template <>
struct CaseOf<DeltaRuleProblem> : CaseTraits<DeltaRuleProblem, DeltaRuleCase> {
  static std::vector<DType> types(const DeltaRuleProblem& problem);  ///< inputs first
  static double tensor_bytes(const DeltaRuleProblem& problem);
  static Sizes sizes(const DeltaRuleProblem& problem);
  static bool is_large(const DeltaRuleProblem& problem) { return updates(problem) > kMaxUpdates; }
  /// States are updated in place.
  static DeltaRuleCase timed(const DeltaRuleProblem& problem, std::uint64_t seed) {
    return DeltaRuleCase(problem, 25 * seed + 1, Placement::heap, Spacing::dense, Decays::some);
  }
  /// About `rows` columns of the first and last states.
  static Verdict verify(DeltaRuleCase& inputs, const Context& context, std::int64_t rows);
  /// Elements of states, each counted for every token.
  static double updates(const DeltaRuleProblem& problem);

 private:
  static constexpr double kMaxUpdates = 64 << 20;
};

/// Of every rule, decay and type, with every way to keep states; d and dv reach 256, t about 200.
DeltaRuleProblem sample_delta_rule(std::mt19937_64& random);

/// For DeviceCallOf.
void move_tensors(DeltaRuleArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
