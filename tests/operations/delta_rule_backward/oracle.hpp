// Gradients of delta_rule() in float64, token by token, and how far a result may be from them.
#pragma once

#include <cstdint>
#include <vector>

#include "rapt/delta_rule_backward.hpp"

namespace rapt::testing {

/// One gradient, in row-major order of the tensor it is of; all empty where there is no such tensor.
///
/// With alpha = exp(g), S~ = diag(alpha) S, e = v - S~^T k and G the gradient of the state, which is dfinal_state after
/// the last token, tokens are gone through from the last to the first:
///
///     G  += scale sum_r q_r dout_r^T       dq_r = scale S dout_r
///     dd  = G^T k                          dbeta = dd . e           dv = de = beta dd
///     dk  = G (beta e) - S~ de             dg = rowsum((G - k de^T) S~)
///     G   = diag(alpha) (G - k de^T)       dinitial_state = G, before the first
///
/// Rules without a delta have v for beta e, and no de but in dv. Then come the norms, the gate and the sigmoid.
///
/// How far fp32 is likely to be off, with u = 2^-24. A token rounds S and G, and what it does to them makes neither
/// larger: their errors are random walks, after n tokens sqrt(n) u of the largest numbers on the way. A gradient is a
/// sum of products of the two and of inputs; its terms are off as they are. Hence
///
///     sigma = u sqrt(N) M,      N = (d + dv) / 12 + r tokens
///
/// for every element of dq, dk, dv, dbeta and dinitial_state, as it is before norms and sigmoids. The first part is
/// what dot products round, r the squares of what a token does: 1; 2 more with l2norm, 4 with a gate, 1 with a sigmoid.
/// M is the largest m over all tokens and elements of the head in the same sequence, with m the root of the sum of an
/// element's squared terms, + |sum|; e in a term counts with its own m.
///
/// dg may be summed up from later tokens, as dg_t = dg_t+1 + q dq - k (G (beta e) + S~ de), over 24 of them at most
/// before a sum starts anew from rowsum((G - k de^T) S~), or from both ends of so many, without what is in neither
/// sum. What S and G are off by changes terms that cancel alike, so
/// that each counts with what it is rounded by:
///
///     sigma = u sqrt(N) M + u sqrt((d + dv) / 12 + r) sqrt(sum of the squared m of dg_i - dg_i+1, i from t to t + 23)
///
/// where M is of what sums start from. A decay of nearly 0, whose gradient is nearly 0, may have what a sum is off by.
///
/// One decay for all tokens (Decay::constant) always errs in the same direction: 1.5 u tokens M / 8 more, and 4 u M
/// with a gate. What follows from a gradient has its error times the derivative, and what both are rounded by. Sums
/// over state heads add up what each is off by; of those over tokens, whose terms are independent but within the sums
/// that they come from, it is sqrt(min(24, tokens)) times the root of the sum of squares.
struct DeltaRuleGradient {
  std::vector<double> value, sigma;
  std::vector<char> computed;  ///< 0 for what a step left out
};

struct DeltaRuleBackwardReference {
  DeltaRuleGradient dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias;
};

/// Independent of the library; trusts the arguments to be valid. Does not look at which gradients are wanted. Where all
/// would take too long: of the sets of state heads that share heads of q, k or v, counted over the sequences, every
/// step-th and the last one, and of sums over sequences what is then complete.
DeltaRuleBackwardReference oracle_delta_rule_backward(const DeltaRuleBackwardArgs& args, std::int64_t step = 1);

}  // namespace rapt::testing
