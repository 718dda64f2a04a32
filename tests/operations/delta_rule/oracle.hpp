// delta_rule() in float64, token by token as include/rapt/delta_rule.hpp words it, and how far a result may be from it.
#pragma once

#include <cstdint>
#include <vector>

#include "rapt/delta_rule.hpp"

namespace rapt::testing {

/// Of out in row-major order, and of the states [b, states, h, d, dv]: one after each of state_slots' n tokens, or one
/// after the last.
///
/// How far fp32 is likely to be off, with u = 2^-24. An element of the state has an error of its own variance, and
/// those of a column count as independent, so that a token makes of them
///
///     Var(S)  ->  e^2g Var(S)                                         the decay
///             ->  (1 - beta k_c^2)^2 Var(S_c) + beta^2 k_c^2 sum_i!=c k_i^2 Var(S_i)      the delta rule
///
/// and adds its own roundings: of the decay, relative to S; of the prediction, a dot product of d terms, as in
/// oracle.hpp; of u, and of k u^T. out has those of its column by q, and of its own dot product. Rounding one decay
/// for all tokens (Decay::constant) always errs in the same direction: `drift` has what a unit of it makes of S.
///
/// Kernels that multiply in bf16 round operands of products, and take tokens in blocks: a token reads the
/// state before its block, and what each token since wrote, by the product of their rows. Operands are those rows,
/// their products, the state and what was written.
struct DeltaRuleReference {
  std::vector<double> out, out_sigma, out_drift;
  std::vector<double> state, state_sigma, state_drift;
  std::vector<char> computed;        ///< of out: 0 for what the subset left out
  std::vector<char> state_computed;  ///< of the states: likewise, and past a sequence's last token
};

/// What to compute where all would take too long: every so many state heads, counted over the sequences, and columns of
/// v; the last ones always.
struct DeltaRuleSubset {
  std::int64_t heads = 1, columns = 1;
};

/// Independent of the library; trusts the arguments to be valid. Does not read the final state, even where it is the
/// initial one: `initial` stands for args.initial_state then. `operands` is the type that kernels round the operands of
/// products to: f32 or bf16.
DeltaRuleReference oracle_delta_rule(const DeltaRuleArgs& args, const TensorView& initial,
                                     const DeltaRuleSubset& subset = {}, DType operands = DType::f32);
inline DeltaRuleReference oracle_delta_rule(const DeltaRuleArgs& args) {
  return oracle_delta_rule(args, args.initial_state);
}

/// What an element that should be `want` may be off by, of a tensor of `dtype`: eight standard deviations, four of the
/// drift, and one rounding to the type.
double delta_rule_bound(double want, double sigma, double drift, DType dtype);

}  // namespace rapt::testing
