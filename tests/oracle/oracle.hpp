// Attention in float64 as docs/contract.md words it, and how far a result may be from it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "rapt/attention.hpp"

namespace rapt::testing {

/// Results in row-major order: [b, hq, sq, dv], ragged [total_q, hq, dv]; lse and computed without the last dimension.
///
/// How the bounds come about, with u = 2^-24. The roundings of an fp32 dot product of d terms have either sign, so that
/// sqrt(d) u sum|q_i k_i| bounds what d u sum|q_i k_i| bounds in the worst case; those behind it (scale, softcap, bias,
/// alibi, the change to base 2) are some units of the operands, and exponents are rounded relative to a reference m up
/// to 8 powers of two off the row's maximum, sink included:
///
///     delta_j = (sqrt(d) + 6) u |scale| sum_i |q_i k_ji|  through softcap (+ 4 u c)  + 8 u (|x_j| + |bias| + |alibi|)
///             + 2 u (max_j x_j - x_j + 8 ln 2)
///
/// Scores that are off by at most delta_j change p_j by a factor within exp(+-(delta_j + D)), where
/// D = log sum_j p_j exp(delta_j) bounds the change of the denominator. Hence
///
///     |error| <= sum_j p_j (exp(delta_j + D) - 1) |v_j|  +  16 u sum_j p_j |v_j|  +  1e-37
///
/// where the second term is for exp, the sums and the division, less than the contract's, and the whole is never more
/// than the largest |v_j| plus |out|, as an average cannot be further off. The error of lse is bounded by D likewise,
/// and 40 u (|lse| + 1).
///
/// That is `bound`, all of it for fp32. 16-bit types add 8 eps sum_j p_j |v_j|, where eps is the largest unit roundoff
/// among the types of q, kv and out (2^-8 for bf16, 2^-11 for f16), and one denormal of out's type. To lse they add the
/// eps of q and kv alone: row sums may be of rounded probabilities.
///
/// Quantised keys and values count as (x - zero) * scale, exactly. A kernel rounds that twice, or takes scale and zero
/// out of its sums; either way its roundings are relative to (|x| + |zero|) |scale|, which stands for |k_ji| in delta_j
/// and for |v_j| in the second term, with sqrt(d) + 8 in place of sqrt(d) + 6 in front of the dot product, and 20 in
/// place of 16 in front of u. Then the bounds are those of fp32.
///
/// f8e4m3 queries count as x * q_scale, exactly. A kernel rounds that once: sqrt(d) + 7 in front of the dot product.
///
/// With dropout every p_j is multiplied by 0 or 1 / (1 - p), rounded twice: 18 in place of 16 in front of u. What is
/// not finite in a dropped value stays out.
///
/// `spread` is what errors of the usual size, independent from key to key, add up to: the roundings of partial sums
/// that grow from 0 to the score, sqrt(d / 3) u |scale| (sqrt(sum (q_i k_i)^2) + 2 |q k|), those of modifiers and
/// exponents, and the sink's.
///
/// Where queries are f8e4m3 and keys quantised, all codes, kernels may multiply in bf16, which has each code exactly:
/// EntryInfo::arithmetic says so. Their bounds are those of bf16 queries, which are loose for many keys, as the
/// roundings of weights cancel: hence a limit on the norm of all errors. `bf16_spread` is what these are likely to
/// change, the root of
///
///     sum_c (sum_{j of number c} 2^-8 p_j v_j)^2
///
/// Weights that become the same bf16 number round alike, and their errors add up; those of different numbers are as
/// good as independent. 2^-8 is the most that a rounding changes, 2^-9 nearly what it usually does: where all weights
/// of all rows are equal, all have the same one.
///
/// Where q, k and v all are f8e4m3, entries may multiply them as they are: EntryInfo::arithmetic says f8e4m3, and
/// `f8e4m3` has their bounds, with what CodeProducts says of them. Hopper's tensor cores add 32 products to a sum at a
/// time. They align the 33 to the largest one's exponent and cut what is behind 13 more bits, so that none loses more
/// than 2^-13 of the largest. With M_s for the largest magnitude of step s, the sums before and behind it included,
/// scores lose
///
///     lost_j = 2^-13 |scale| sum_s 33 M_s      usually  2^-13 |scale| sqrt(sum_s 11 M_s^2)
///
/// Exponents and weights are fp16, so that delta_j has lost_j and
///
///     2^-11 (max_j x_j - x_j + 9 ln 2)  +  2^-9.8
///
/// more. D follows. With g_j for the most that p_j may so become, and g for the largest of a row, the rounding to
/// f8e4m3 changes a weight by up to
///
///     r_j = max(2^-4 g_j, min(g_j, 2^-(10 + least_top) g))      rho = sum_j r_j
///
/// The second is for what f8e4m3 has only denormals for, or nothing. Products with values lose as those of scores do:
/// a step's M_s is at most all that the step's part has added up, so that a share of
/// lambda = 33 * 2^-13 min(n / 32 + 1, part / 32) is lost where a row sees n keys. Then, beside what fp32 may be off by
/// and one rounding of out,
///
///     |error| <= G + R + lambda (A + R)      G = sum_j p_j (exp(delta_j + D) - 1) |v_j|,  R = sum_j r_j |v_j|,
///                                            A = sum_j g_j |v_j|
///
/// where row sums are of weights in fp32. Sums of rounded weights, by tensor cores, turn with the weights:
///
///     |error| <= G + (sum_j r_j |v_j - out| + rho G + lambda (A + R + |out| + G)) / ((1 - rho) (1 - lambda))
///
/// Neither is ever more than the largest |v_j| may be off from out. lse is off by D, and by -log((1 - rho) (1 -
/// lambda)) where sums are of rounded weights.
///
/// That is loose for many keys, whose roundings cancel: hence a limit on the norm of all errors. What is likely is the
/// root of
///
///     sum_c (sum_{j of code c} e_j u_j)^2  +  the scores'  +  max(L, L_1 |out|)^2
///
/// where e_j is r_j with p_j for g_j, and u_j is v_j, or v_j - out where the sums turn with the weights. Weights that
/// become the same code round alike, and their errors add up; those of different codes are as good as independent. L is
/// what p . v is likely to lose, product by product: all of one below 2^-13 of the sum M of its part, 3 * 2^-16 M of
/// one below 2^-5 M (half of a unit of a sum that grows on its way to M), else nothing, as products of two codes have
/// eight bits. L_1 is the same of the sum of weights, of tensor cores; the two cancel in part. An emulation of all this
/// stays at 0.1 to 0.5 of the limit on random inputs of 1 to 8000 keys, with values of either sign or of one, and below
/// 0.85 where weights are equal, or one key is far above the others.
struct Reference {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<double> magnitude;  ///< sum_j p_j |v_j| of every element of out
  std::vector<double> bound;      ///< largest permitted |error| of every element of out
  std::vector<double> spread;     ///< error that rounded scores alone are likely to cause
  std::vector<double>
      bf16_spread;  ///< error that rounding weights to bf16 is likely to cause; empty: not all are codes
  std::vector<double> lse_bound;
  std::vector<char> computed;  ///< 0 for rows left out by `row_step`
  std::int64_t dv = 0;
  /// bound, spread and lse_bound of entries that multiply codes of f8e4m3; empty where q, k and v are not all of that
  /// type, and where scores have modifiers, sinks or dropout, which no such entry takes.
  struct Bounds {
    std::vector<double> bound, spread, lse_bound;
  } f8e4m3;
  /// Largest error of the plain three steps in the precision of the inputs: scores rounded to the coarser type of q and
  /// kv, softmax in fp32, probabilities rounded to that type, p.v accumulated in fp32, out rounded to out's type.
  double plain_error = 0;
  /// Largest over out of what one rounding of out, one of every p_j (four standard deviations) and fp32 can do: where
  /// there are few results, the plain three steps may by chance be better than that.
  double rounding_error = 0;
};

/// Philox4x32-10, and what dropout multiplies the weight of sequence n, query head h, row i and key j by.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);
double dropout_factor(const Dropout& dropout, std::int64_t hq, std::int64_t n, std::int64_t h, std::int64_t i,
                      std::int64_t j);

/// How an entry multiplies codes of f8e4m3, as far as its bounds depend on it.
struct CodeProducts {
  std::int64_t part = 1024;  ///< keys whose products with values are one sum of the tensor cores; fp32 adds these up
  double least_top = 4;      ///< log2 of the least that a row's largest weight becomes; the most is 448
  bool rounded_sums = true;  ///< rows are divided by sums of rounded weights, of the tensor cores; else by fp32's
};

/// Independent of the library: uses the argument types only and trusts them to be valid, those of every KvSource among
/// them; inputs count as given. Keys that no row sees are not read, nor are their table entries. With row_step n only
/// every n-th row of each head and the last one are computed, for lengths that would take too long otherwise.
Reference oracle(const AttentionArgs& args, std::int64_t row_step = 1, const CodeProducts& products = {});

/// What an entry rounds weights to for their products with values, if it does. `bf16`: where q, k and v are codes,
/// bounds are those of bf16 queries, and the norm of all errors has a limit. `f8e4m3`: bounds are Reference::f8e4m3's;
/// lse may also be off as sums of weights of bf16 are.
enum class Weights : std::uint8_t { of_inputs, bf16, f8e4m3 };

struct Errors {
  double rel_frobenius = 0;     ///< |out - reference| / |reference| in the Frobenius norm, finite elements
  double frobenius_limit = 0;   ///< f32 throughout: 1e-6 and an eighth of `spread` in the same norm; weights of
                                ///< bf16 over codes: `bf16_spread`, an eighth of `spread` and a rounding of out; of
                                ///< f8e4m3: its own `spread` and a rounding of out; else infinite
  double max_abs = 0;           ///< largest |error|
  double max_abs_limit = 0;     ///< a 16-bit type, but weights of bf16 or f8e4m3 over codes:
                                ///< max(2 plain_error, rounding_error) + 1e-5; else infinite
  double max_bound = 0;         ///< largest share of what one element may be off by
  double lse_max = 0;           ///< largest |error| of lse; 0 when lse was not asked for
  double lse_max_bound = 0;     ///< largest share of what one lse may be off by
  bool nonfinite_agree = true;  ///< NaN or Inf where and only where the reference has one; -inf of lse exactly
  bool ok() const {
    return nonfinite_agree && rel_frobenius <= frobenius_limit && max_abs <= max_abs_limit && max_bound <= 1 &&
           lse_max_bound <= 1;
  }
};

/// Reads args.out and args.lse back, whatever their strides and types. A result past the end of out's type must be Inf.
Errors compare(const AttentionArgs& args, const Reference& reference, Weights weights = Weights::of_inputs);

}  // namespace rapt::testing
