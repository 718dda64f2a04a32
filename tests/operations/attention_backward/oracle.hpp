// Gradients of attention in float64 as docs/contract.md words them, and how far a result may be from them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "operations/attention/oracle.hpp"
#include "rapt/attention_backward.hpp"

namespace rapt::testing {

/// One gradient, in row-major order of the tensor it is of.
///
/// With P the softmax's weights, x the final scores, f the slope of the softcap (1 - tanh^2) and
///
///     dP_ij = sum_c dout_ic v_jc    delta_i = sum_c dout_ic out_ic - dlse_i    dS = P (dP - delta)    dX = dS f
///
///     dv_j = sum_i P_ij dout_i                dbias = dS, summed where the bias broadcasts
///     dq_i = scale sum_j dX_ij k_j            dsinks = -sum_i p_sink,i delta_i
///     dk_j = scale sum_i dX_ij q_i            dalibi = -sum_ij dS_ij |i + offset - j|
///
/// With dropout out_i, dP_ij and the P_ij of dv_j are multiplied by what it multiplies the weight by. Sums over i go
/// over the query heads of a group, too. How the bounds come about, with u = 2^-24: out and lse are inputs, correctly
/// rounded ones, so that
///
///     P is off by a factor within exp(+-e),  e_ij = delta_ij + 40 u (|lse_i| + 1) + 2 u (|x_ij - lse_i| + 6)
///
/// with delta_ij, the error of a score, as in oracle.hpp; and a weight below 2^-100 may count as 0. dP and the dot
/// product in delta are off by (sqrt(dv) + 6) u times the sums of their terms' magnitudes, and delta by eps_out times
/// that sum, too: out was rounded to its type. Hence the error of dS,
///
///     E_ij = P_ij ((exp(e_ij) - 1) |dP - delta| + exp(e_ij) (E(dP) + E(delta) + 4 u (|dP| + |delta| + |dlse|)))
///
/// that of dX, E f + |dS| E(f), where tanh was rounded, and the same for P. Each gradient is a sum of terms, a product
/// of one of these and an input; its bound is the sum of E(term), and (24 + n / 64) u sum |term| for rounding n partial
/// sums, which is less than the contract's.
///
/// That is `bound`, all of it for fp32. With 16-bit q, k, v or dout 8 eps sum |term| are added to dq, dk and dv, for P
/// and dX may be rounded to the type of the inputs: eps is the largest unit roundoff among them. Then the gradient is
/// rounded once to its own type.
///
/// `spread` is what errors of the usual size, independent but where they are a row's, add up to; a rounding of every P
/// or dX to a 16-bit type among them.
struct GradientReference {
  std::vector<double> value;      ///< empty: not asked for
  std::vector<double> magnitude;  ///< sum |term|
  std::vector<double> bound;      ///< largest permitted |error| of fp32, before the gradient is rounded
  std::vector<double> spread;     ///< |error| that is likely
  std::vector<char> computed;     ///< 0 for what a step left out
  double eps = 0;                 ///< of the inputs' 16-bit types, for dq, dk and dv; 0: fp32
  /// Largest error of the plain steps in the precision of the inputs: scores, P and dS rounded to the coarsest type of
  /// q, kv and dout, sums in fp32, the result rounded to the gradient's. Infinite where it was not computed.
  double plain_error = 0;
  /// Largest of what one rounding of the gradient, one of every P or dS (four standard deviations), and fp32 can do.
  double rounding_error = 0;
};

struct BackwardReference {
  GradientReference dq, dk, dv, dbias, dsinks, dalibi;
};

/// What to compute where all would take too long: of dq, dk and dv every step-th row of each head and the last one, of
/// one sequence and one head of keys, or of all (-1). Of the other gradients nothing then.
struct Subset {
  std::int64_t step = 1;
  std::int64_t sequence = -1, kv_head = -1;
  bool whole() const { return step == 1 && sequence < 0 && kv_head < 0; }
};

/// Independent of the library, and of args.out and args.lse: both follow from the other inputs. Trusts the arguments to
/// be valid; inputs count as given. What no row sees is not read. Of gradients that are not wanted `value` is empty.
BackwardReference oracle_backward(const AttentionBackwardArgs& args, const Subset& subset = {});

/// Reads a gradient back, whatever its strides and type.
Errors compare(const TensorView& gradient, const GradientReference& reference);

/// The gradients of `args` that are wanted with their names and references, as `visit(name, view, reference)`.
template <class Visit>
void for_each_gradient(const AttentionBackwardArgs& args, const BackwardReference& r, const Visit& visit) {
  const std::pair<const MutableTensorView*, const GradientReference*> all[] = {
      {&args.dq, &r.dq},       {&args.dk, &r.dk},         {&args.dv, &r.dv},
      {&args.dbias, &r.dbias}, {&args.dsinks, &r.dsinks}, {&args.dalibi, &r.dalibi}};
  const char* const names[] = {"dq", "dk", "dv", "dbias", "dsinks", "dalibi"};
  for (std::size_t i = 0; i < std::size(all); ++i)
    if (*all[i].first) visit(names[i], TensorView(*all[i].first), *all[i].second);
}

}  // namespace rapt::testing
