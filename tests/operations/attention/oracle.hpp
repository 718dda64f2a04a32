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
/// `f8e4m3` has their bounds. Hopper's tensor cores add 32 products to a sum at a time. They align the 33 to the
/// largest one's exponent and cut what is behind 13 more bits, so that none loses more than 2^-13 of the largest. Sums
/// of scores are fp16 after each step. With M_s for the largest magnitude of step s, the sums before and behind it
/// included, scores lose
///
///     lost_j = |scale| sum_s (33 * 2^-13 + 2^-11) M_s      usually  |scale| sqrt(sum_s (33 * 2^-26 + 2^-22) M_s^2 / 3)
///
/// A row of codes is divided by the least power of two 2^k, 1 or more, that keeps all scores in fp16, by its length:
/// |q| 448 sqrt(d) / 2^k <= 65000. That changes nothing but numbers that become denormals of f8e4m3, below 2^(k - 6),
/// by up to 2^(k - 10): lost_j has the sum of these changes times |k_ji| more. What scores are multiplied by is one
/// number of fp16 for a row, so that delta_j has lost_j and
///
///     2^-11 (max_j x_j - x_j + 4 ln 2)
///
/// more. D follows. Let g_j be the most that p_j may so become, and g the largest of a row.
///
/// Weights are not computed: their codes are scores, scaled, shifted and rounded to integers. The number with the code
/// c, which is (1 + c % 8 / 8) 2^(floor(c / 8) - 7), stands for 2^(c / 8 - 7), which is up to 6.15 % less and never
/// more; the rounding is one by up to 2^(1 / 16). So weights are 0.9576 to 1.1085 of what they should be. A common
/// factor does not matter to out, so that this counts as 7.4 % about 1.033. What is below the least code becomes 0, and
/// codes below 8 are denormals: both are off by up to 2^-6.9, while the largest weight of a row is 2^4 at least, and
/// about 2^6 where its score counts up to a hundred octaves. Hence a weight may be off by up to
///
///     r_j = max(0.074 g_j, min(g_j, 2^-10.9 g))      rho = sum_j r_j
///
/// Products with values lose as those of scores do, but for the fp16; 256 keys are one sum, and fp32 adds these up. A
/// step's M_s is at most all that the step's part has added up, so that a share of
/// lambda = 33 * 2^-13 min(n / 32 + 1, 8) is lost where a row sees n keys. Sums are of the same weights, by tensor
/// cores as well, and turn with them. So, beside what fp32 may be off by and one rounding of out,
///
///     |error| <= G + (sum_j r_j |v_j - out| + rho G + lambda (A + R + |out| + G)) / ((1 - rho) (1 - lambda))
///
/// with G = sum_j p_j (exp(delta_j + D) - 1) |v_j|, A = sum_j g_j |v_j|, R = sum_j r_j |v_j|, and never more than the
/// largest |v_j| may be off from out. lse is off by D, by -log((1 - rho) (1 - lambda)), and by what is left of
/// log 1.033 when 0.02 is taken off.
///
/// That is loose for many keys, whose roundings cancel: hence a limit on the norm of all errors. What is likely is the
/// root of
///
///     sum_c (sum_{j of code c} e_j (v_j - out))^2 / (1 - e)^2  +  the scores'  +  max(L, L_1 |out|)^2
///
/// where e_j is r_j with p_j for g_j, and e the sum of what exceeds 0.074 p_j. Weights that become the same code round
/// alike, and their errors add up; those of different codes are as good as independent. Codes are relative to the
/// largest score of a block of 128 keys, until a later block has one that they have no room for. L is what p . v is
/// likely to lose, product by product: all of one below 2^-13 of the sum M of its part, 3 * 2^-16 M of one below 2^-5 M
/// (half of a unit of a sum that grows on its way to M), else nothing, as products of two codes have eight bits. L_1 is
/// the same of the sum of weights; the two cancel in part. An emulation of all this stays at 0.1 to 0.6 of the limit on
/// random inputs of 3 to 3000 keys, with values of either sign or of one, and below 0.9 where all scores are one of two
/// numbers.
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
  /// type or are ragged, and where scores have modifiers, sinks or dropout, which no such entry takes.
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

/// Independent of the library: uses the argument types only and trusts them to be valid, those of every KvSource among
/// them; inputs count as given. Keys that no row sees are not read, nor are their table entries. With row_step n only
/// every n-th row of each head and the last one are computed, for lengths that would take too long otherwise.
Reference oracle(const AttentionArgs& args, std::int64_t row_step = 1);

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
