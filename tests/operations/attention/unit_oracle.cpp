// The oracle against results worked out by hand, and compare() against wrong results: a judge that lets everything pass
// would make every other test worthless.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/attention/oracle.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Rounds the reference into the outputs of `c`.
void write_reference(Case& c, const Reference& reference) {
  for (std::int64_t i = 0; i < c.out.size(); ++i) {
    c.out.flat(i) = static_cast<float>(reference.out[static_cast<std::size_t>(i)]);
  }
  for (std::int64_t i = 0; i < c.lse.size(); ++i) {
    c.lse.flat(i) = static_cast<float>(reference.lse[static_cast<std::size_t>(i)]);
  }
}

/// q = 1, k = 0, 1, 2, ..., v = 1, 10, 100, ...: scores are 0, 1, 2, ... times scale.
Case counting_case(const char* words) {
  Case c(AttentionProblem::parse("attention d=1 lse scale=1 " + std::string(words)));
  for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 1;
  for (std::int64_t j = 0; j < c.k.size(); ++j) {
    c.k.flat(j) = static_cast<float>(j);
    c.v.flat(j) = static_cast<float>(std::pow(10, j));
  }
  return c;
}

/// Attention of a dense case of codes, whose scales are those of heads, with weights that are rounded for their
/// products with values and not for their sum. The largest is 2^shift.
struct RoundedWeights {
  DType type = DType::bf16;
  double shift = 0;
  std::int64_t keys = std::numeric_limits<std::int64_t>::max();  ///< as many as it sees

  /// Writes the results of `from` to the outputs of `to`.
  void run(const Case& from, Case& to) const {
    const AttentionProblem& p = from.problem;
    for (std::int64_t row = 0; row < p.b * p.hq * p.sq; ++row) run_row(from, row, to);
  }

 private:
  static double scale_of(const Tensor& scale, std::int64_t n, std::int64_t h, std::int64_t i) {
    if (!scale) return 1;
    const auto& shape = scale.layout().shape;
    return scale.at({shape[0] == 1 ? 0 : n, h, shape[2] == 1 ? 0 : i, 0});
  }

  void run_row(const Case& c, std::int64_t row, Case& to) const {
    const AttentionProblem& p = c.problem;
    const std::int64_t n = row / (p.hq * p.sq), h = row / p.sq % p.hq, i = row % p.sq, of_keys = h / (p.hq / p.hk);
    const std::int64_t first = (n * p.hk + of_keys) * p.sk;
    const double scale = (p.has_scale ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(p.d))) *
                         scale_of(c.q_scale, n, h, i) * scale_of(c.k_scale, n, of_keys, 0);
    std::vector<double> weights(static_cast<std::size_t>(std::min(p.causal ? i + p.sk - p.sq + 1 : p.sk, keys)));
    for (std::size_t j = 0; j < weights.size(); ++j) {
      double dot = 0;
      for (std::int64_t e = 0; e < p.d; ++e)
        dot += static_cast<double>(c.q.flat(row * p.d + e)) *
               static_cast<double>(c.k.flat((first + static_cast<std::int64_t>(j)) * p.d + e));
      weights[j] = scale * dot;
    }
    const double at = *std::max_element(weights.begin(), weights.end()) - shift * std::log(2);
    double sum = 0;
    for (double& w : weights) {
      w = std::exp(w - at), sum += w;
      w = rounded(static_cast<float>(w), type);
    }
    for (std::int64_t e = 0; e < p.dv; ++e) {
      double total = 0;
      for (std::size_t j = 0; j < weights.size(); ++j)
        total += weights[j] * static_cast<double>(c.v.flat((first + static_cast<std::int64_t>(j)) * p.dv + e));
      to.out.flat(row * p.dv + e) = static_cast<float>(total / sum * scale_of(c.v_scale, n, of_keys, 0));
    }
    to.lse.flat(row) = static_cast<float>(std::log(sum) + at);
  }
};

}  // namespace

TEST_CASE("oracle: softmax of two keys", "[unit][numbers]") {
  Case c = counting_case("sq=1 sk=2");
  const Reference r = oracle(c.args());
  const double e = std::exp(1.0);
  CHECK(r.out[0] == Approx((1 + 10 * e) / (1 + e)).epsilon(1e-14));
  CHECK(r.lse[0] == Approx(std::log(1 + e)).epsilon(1e-14));
  CHECK(r.magnitude[0] == Approx(r.out[0]).epsilon(1e-14));
}

// Random123's known answers (tests/kat_vectors).
TEST_CASE("oracle: Philox4x32-10", "[unit][numbers]") {
  using Words = std::array<std::uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("oracle: dropout", "[unit][numbers]") {
  // The numbers of seed 0 and row 0 are, of 65536: 0xe8d5, 0x6627, 0xc58d, ...; scores are 0, 1 and 2.
  Case c = counting_case("sq=1 sk=3");
  AttentionArgs args = c.args();
  args.score.dropout = Dropout{0.75f, 0, 0};
  const double e = std::exp(1.0), sum = 1 + e + e * e;
  const Reference some = oracle(args);  // 0xc58d and 0xe8d5 are 0.77 and 0.91
  CHECK(some.out[0] == Approx(4 * (1 + 100 * e * e) / sum).epsilon(1e-14));
  CHECK(some.lse[0] == Approx(std::log(sum)).epsilon(1e-14));
  args.score.dropout->p = 1;
  CHECK(oracle(args).out[0] == 0);
  args.score.dropout->p = 0;
  CHECK(oracle(args).out[0] == Approx((1 + 10 * e + 100 * e * e) / sum).epsilon(1e-14));
}

TEST_CASE("oracle: causal, windows and align", "[unit][numbers]") {
  // With scale 0 a row is the mean of the values it sees, which names them.
  const auto sees = [](const std::string& words, std::vector<double> expected) {
    Case c = counting_case(words.c_str());
    AttentionArgs args = c.args();
    args.score.scale = 0.f;
    const std::vector<double> out = oracle(args).out;
    INFO(words);
    REQUIRE(out.size() == expected.size());
    for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i] == Approx(expected[i]).epsilon(1e-14));
  };
  sees("sq=3 causal", {1, 11 / 2.0, 111 / 3.0});
  sees("sq=2 sk=3 causal align=bottom_right", {11 / 2.0, 111 / 3.0});
  sees("sq=2 sk=3 causal align=top_left", {1, 11 / 2.0});
  sees("sq=3 causal align=-1", {0, 1, 11 / 2.0});
  sees("sq=3 window=0,0", {1, 10, 100});
  sees("sq=3 window=1,0", {1, 11 / 2.0, 110 / 2.0});
  sees("sq=3 window=-1,1", {11 / 2.0, 111 / 3.0, 111 / 3.0});
  sees("sq=3 window=0,-1 causal", {1, 10, 100});
}

TEST_CASE("oracle: score terms in their order", "[unit][numbers]") {
  Case c = counting_case("sq=1 sk=3 softcap=2 bias=k mask=k alibi align=1 sinks");
  c.bias.flat(0) = 0.5f;
  c.bias.flat(1) = -0.25f;
  c.bias.flat(2) = 7;
  c.mask.flat<bool>(0) = c.mask.flat<bool>(1) = true;
  c.mask.flat<bool>(2) = false;
  c.alibi.flat(0) = 0.125f;
  c.sinks.flat(0) = 0.75f;
  const double first = 2 * std::tanh(0.0) + 0.5 - 0.125, second = 2 * std::tanh(0.5) - 0.25;
  const double sum = std::exp(first) + std::exp(second) + std::exp(0.75);
  const Reference r = oracle(c.args());
  CHECK(r.lse[0] == Approx(std::log(sum)).epsilon(1e-14));
  CHECK(r.out[0] == Approx((std::exp(first) + 10 * std::exp(second)) / sum).epsilon(1e-14));
}

TEST_CASE("oracle: rows without keys", "[unit][numbers]") {
  for (const char* words : {"sq=2 sk=0", "sq=2 sk=3 causal align=-5", "b=2 sq=1 sk=0 seqlens"}) {
    const Reference r = oracle(counting_case(words).args());
    CHECK(r.out == std::vector<double>{0, 0});
    CHECK(r.lse == std::vector<double>{-kInfinity, -kInfinity});
  }
}

TEST_CASE("oracle: a NaN reaches the rows that attend it only", "[unit][numbers]") {
  Case c = counting_case("sq=3 causal");
  c.v.flat(1) = std::numeric_limits<float>::quiet_NaN();
  const Reference in_value = oracle(c.args());
  CHECK(in_value.out[0] == 1);
  CHECK(std::isnan(in_value.out[1]));
  CHECK(std::isfinite(in_value.lse[2]));
  Case d = counting_case("sq=3 causal");
  d.k.flat(1) = std::numeric_limits<float>::quiet_NaN();
  const Reference in_key = oracle(d.args());
  CHECK(in_key.out[0] == 1);
  CHECK(std::isnan(in_key.out[1]));
  CHECK(std::isnan(in_key.lse[2]));
}

TEST_CASE("oracle: layouts and ragged sequences hold the same numbers", "[unit][numbers]") {
  AttentionProblem problem =
      AttentionProblem::parse("attention b=3 hq=4 hk=2 sq=20 sk=30 d=9 dv=5 lse ragged_q=41 ragged_k=60");
  Case first(problem);
  const Reference reference = oracle(first.args());
  for (auto layout :
       {AttentionProblem::Layout::bshd, AttentionProblem::Layout::bhds, AttentionProblem::Layout::other}) {
    problem.layout = layout;
    CHECK(oracle(Case(problem).args()).out == reference.out);
  }
  // Sequence 1 (with seed 1 the longest) by itself.
  const std::int64_t q_begin = first.cu_seqlens_q.at<std::int32_t>({1});
  const std::int64_t k_begin = first.cu_seqlens_k.at<std::int64_t>({1});
  AttentionArgs args = first.args();
  const auto dense = [](TensorView t, std::int64_t begin, std::int64_t rows) {
    TensorView result = t;
    result.data = static_cast<const float*>(t.data) + begin * t.strides[0];
    result.ndim = 4;
    result.shape = {1, t.shape[1], rows, t.shape[2]};
    result.strides = {0, t.strides[1], t.strides[0], t.strides[2]};
    return result;
  };
  args.q = dense(args.q, q_begin, 20);
  args.kv = KvSource::strided(dense(args.kv.k, k_begin, 30), dense(args.kv.v, k_begin, 30));
  args.cu_seqlens_q = {};
  const Reference alone = oracle(args);
  for (std::int64_t i = 0; i < 20; ++i) {
    for (std::int64_t h = 0; h < 4; ++h) {
      CHECK(alone.lse[static_cast<std::size_t>(h * 20 + i)] ==
            Approx(reference.lse[static_cast<std::size_t>((q_begin + i) * 4 + h)]).epsilon(1e-13));
    }
  }
}

TEST_CASE("oracle: a step over rows leaves the others out", "[unit][numbers]") {
  Case c(AttentionProblem::parse("attention hq=2 sq=10 sk=30 d=8 lse"));
  const Reference all = oracle(c.args()), some = oracle(c.args(), 4);
  std::size_t computed = 0;
  for (std::size_t row = 0; row < 20; ++row) {
    if (!some.computed[row]) continue;
    ++computed;
    CHECK(some.lse[row] == Approx(all.lse[row]).epsilon(1e-14));
    CHECK(some.out[row * 8 + 7] == Approx(all.out[row * 8 + 7]).epsilon(1e-12));
  }
  CHECK(computed == 8);  // rows 0, 4, 8 and 9 of either head
}

TEST_CASE("compare accepts the rounded reference", "[unit]") {
  for (const char* text : {"attention b=2 hq=4 hk=2 sq=20 sk=30 d=64 causal align=-3 lse",
                           "attention b=3 hq=2 sq=20 sk=30 d=8 lse ragged_q=41 ragged_k=60 layout=other",
                           "attention sq=20 sk=30 d=8 scale=1e6 lse sinks mask=qk"}) {
    Case c(AttentionProblem::parse(text));
    const Reference reference = oracle(c.args());
    write_reference(c, reference);
    const Errors errors = compare(c.args(), reference);
    CHECK(errors.ok());
    CHECK(errors.rel_frobenius < 1e-7);
  }
}

TEST_CASE("compare refuses wrong results", "[unit]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=64 sk=256 d=64 causal align=bottom_right lse"));
  const Reference reference = oracle(c.args());
  const auto verdict = [&](auto spoil) {
    write_reference(c, reference);
    spoil();
    return compare(c.args(), reference).ok();
  };
  CHECK(verdict([] {}));
  CHECK_FALSE(verdict([&] { c.out.flat(4000) += 5e-5f; }));  // one element
  CHECK_FALSE(verdict([&] {                                  // all by 3e-6, as with an exp that is too coarse
    for (std::int64_t i = 0; i < c.out.size(); ++i) c.out.flat(i) *= 1 + 3e-6f;
  }));
  CHECK_FALSE(verdict([&] { c.out.flat(17) = std::nanf(""); }));
  CHECK_FALSE(verdict([&] { c.lse.flat(17) = std::nanf(""); }));
  CHECK_FALSE(verdict([&] { c.lse.flat(17) += 1e-4f; }));
  CHECK_FALSE(verdict([&] { std::swap(c.out.flat<float>(0), c.out.flat<float>(64)); }));
  c.poison_outputs();
  CHECK_FALSE(compare(c.args(), reference).ok());

  // One key too many or too few on the diagonal.
  AttentionArgs shifted = c.args();
  for (std::int64_t offset : {191, 193}) {
    shifted.score.align = Align::offset(offset);
    write_reference(c, oracle(shifted));
    CHECK_FALSE(compare(c.args(), reference).ok());
  }
}

TEST_CASE("compare refuses a number where zero, -inf or NaN is due", "[unit]") {
  Case c(AttentionProblem::parse("attention sq=4 sk=2 d=8 causal align=bottom_right lse"));
  const Reference reference = oracle(c.args());
  write_reference(c, reference);
  CHECK(compare(c.args(), reference).ok());
  c.out.flat(3) = 1e-30f;
  CHECK_FALSE(compare(c.args(), reference).ok());
  write_reference(c, reference);
  c.lse.flat(0) = -1e30f;
  CHECK_FALSE(compare(c.args(), reference).ok());

  c.k.flat(0) = std::nanf("");
  const Reference broken = oracle(c.args());
  write_reference(c, broken);
  CHECK(compare(c.args(), broken).ok());
  c.out.flat(2 * 8) = 0;
  CHECK_FALSE(compare(c.args(), broken).ok());
}

TEST_CASE("test tensors round as IEEE does", "[unit]") {
  CHECK(rounded(1 + 0x1p-8f, DType::bf16) == 1);  // ties to even
  CHECK(rounded(1 + 0x1.8p-7f, DType::bf16) == 1 + 0x1p-6f);
  CHECK(rounded(1 + 0x1p-11f, DType::f16) == 1);
  CHECK(rounded(65519, DType::f16) == 65504);
  CHECK(rounded(65520, DType::f16) == kInfinity);
  CHECK(rounded(-3.4e38f, DType::bf16) == -kInfinity);
  CHECK(rounded(0x1.4p-24f, DType::f16) == 0x1p-24f);  // a denormal
  CHECK(rounded(0x1p-130f, DType::bf16) == 0x1p-130f);
  CHECK(std::isnan(rounded(std::nanf(""), DType::bf16)));
  CHECK(std::isnan(rounded(std::nanf(""), DType::f16)));
}

TEST_CASE("oracle: inputs of 16 bits count as given", "[unit][numbers]") {
  Case wide(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=9 sk=20 d=6 dv=5 causal align=4 lse"));
  for (DType dtype : {DType::bf16, DType::f16}) {
    AttentionProblem problem = wide.problem;
    problem.q_dtype = problem.kv_dtype = problem.out_dtype = dtype;
    Case half(problem);
    for (Tensor Case::*tensor : {&Case::q, &Case::k, &Case::v}) {
      for (std::int64_t i = 0; i < (half.*tensor).size(); ++i) {
        CHECK((half.*tensor).flat(i) == rounded((Case(wide.problem).*tensor).flat(i), dtype));
        (wide.*tensor).flat(i) = (half.*tensor).flat(i);
      }
    }
    const Reference a = oracle(wide.args()), b = oracle(half.args());
    CHECK(a.out == b.out);
    CHECK(a.lse == b.lse);
    CHECK(a.plain_error == 0);
    CHECK(b.plain_error > 0);
  }
}

TEST_CASE("oracle: the plain three steps, by hand", "[unit][numbers]") {
  // Scores 0 and 1/512 + 1/8, which bf16 rounds to 1/8; probabilities and the result are rounded as well.
  Case c(typed("attention sq=1 sk=2 d=2 dv=1 scale=1", DType::bf16));
  for (std::int64_t i = 0; i < 4; ++i) c.k.flat(i) = 0;
  c.q.flat(0) = 1;
  c.q.flat(1) = 1;
  c.k.flat(2) = 0.125f;
  c.k.flat(3) = 0x1p-9f;
  c.v.flat(0) = 0;
  c.v.flat(1) = 1;
  const double exact = 1 / (1 + std::exp(-(0.125 + 0x1p-9)));
  const float plain = rounded(static_cast<float>(1 / (1 + std::exp(-0.125))), DType::bf16);
  CHECK(oracle(c.args()).plain_error == Approx(std::abs(plain - exact)).epsilon(1e-6));
}

TEST_CASE("compare accepts 16-bit results that are rounded once", "[unit]") {
  for (const char* types :
       {"dtype=bf16", "dtype=f16", "q=bf16 kv=bf16", "kv=f16 out=f16", "out=bf16", "q=f16 kv=bf16"}) {
    for (const char* sizes : {" b=2 hq=4 hk=2 sq=20 sk=300 d=64 causal align=-3 lse", " sq=1 sk=1 d=1 dv=1 lse",
                              " b=3 hq=2 sq=20 sk=30 d=8 lse ragged_q=41 ragged_k=60 layout=other"}) {
      Case c(AttentionProblem::parse("attention " + std::string(types) + sizes));
      const Reference reference = oracle(c.args());
      write_reference(c, reference);
      const Errors errors = compare(c.args(), reference);
      INFO(c.problem.to_string());
      CHECK(errors.ok());
      CHECK(errors.max_bound < 0.5);
    }
  }
}

TEST_CASE("compare refuses wrong 16-bit results", "[unit]") {
  for (DType dtype : {DType::bf16, DType::f16}) {
    Case c(typed("attention b=1 hq=2 sq=64 sk=256 d=64 causal align=bottom_right lse", dtype));
    const Reference reference = oracle(c.args());
    const float eps = dtype == DType::bf16 ? 0x1p-8f : 0x1p-11f;
    const auto verdict = [&](auto spoil) {
      write_reference(c, reference);
      spoil();
      return compare(c.args(), reference).ok();
    };
    CHECK(verdict([] {}));
    CHECK(verdict([&] { c.lse.flat(17) += 1.9f * eps; }));  // a sum of probabilities that are a unit off
    CHECK_FALSE(verdict([&] { c.lse.flat(17) += 2.2f * eps; }));
    CHECK_FALSE(verdict([&] { c.out.flat(4000) += 8 * eps; }));  // one element
    CHECK_FALSE(verdict([&] {                                    // all of them, as by a sum that lost some keys
      for (std::int64_t i = 0; i < c.out.size(); ++i) c.out.flat(i) *= 1 + 16 * eps;
    }));
    CHECK_FALSE(verdict([&] { c.out.flat(17) = std::nanf(""); }));
    CHECK_FALSE(verdict([&] { c.out.flat(17) = static_cast<float>(kInfinity); }));
    // Another query's row.
    CHECK_FALSE(verdict([&] {
      for (std::int64_t e = 0; e < 64; ++e) c.out.flat(e) = c.out.flat(64 * 9 + e);
    }));
    c.poison_outputs();
    CHECK_FALSE(compare(c.args(), reference).ok());
  }
}

// The plain three steps round large scores away; a kernel may not.
TEST_CASE("compare refuses scores that were rounded to 16 bits", "[unit]") {
  for (DType dtype : {DType::bf16, DType::f16}) {
    Case c(typed("attention sq=64 sk=256 d=64 lse scale=4", dtype)), coarse(c.problem);
    const Reference reference = oracle(c.args());
    Case bias(typed("attention sq=64 sk=256 d=64 lse scale=0 bias=qk", dtype));
    for (std::int64_t i = 0; i < 64; ++i) {
      for (std::int64_t j = 0; j < 256; ++j) {
        float dot = 0;
        for (std::int64_t e = 0; e < 64; ++e) dot += c.q.at({0, 0, i, e}) * c.k.at({0, 0, j, e});
        bias.bias.flat(i * 256 + j) = rounded(4 * dot, dtype);
      }
    }
    const Reference wrong = oracle(bias.args());
    write_reference(c, wrong);
    CHECK(compare(c.args(), reference).max_abs <= compare(c.args(), reference).max_abs_limit);
    CHECK_FALSE(compare(c.args(), reference).ok());
  }
}

TEST_CASE("compare wants Inf where a result overflows its type, and nowhere else", "[unit]") {
  Case c(AttentionProblem::parse("attention out=f16 sq=1 sk=3 d=2 dv=3"));
  const float column[] = {1e6f, -1e6f, 60000};
  for (std::int64_t i = 0; i < 9; ++i) c.v.flat(i) = column[i % 3];
  const Reference reference = oracle(c.args());
  write_reference(c, reference);
  CHECK(c.out.flat(0) == static_cast<float>(kInfinity));
  CHECK(compare(c.args(), reference).ok());
  c.out.flat(0) = 65504;
  CHECK_FALSE(compare(c.args(), reference).ok());
  c.out.flat(0) = static_cast<float>(-kInfinity);
  CHECK_FALSE(compare(c.args(), reference).ok());
  write_reference(c, reference);
  c.out.flat(2) = static_cast<float>(kInfinity);
  // 60000 may be off by 8 units, which is not enough to overflow f16 ...
  CHECK_FALSE(compare(c.args(), reference).ok());
}

TEST_CASE("compare refuses a result that is off everywhere by little", "[unit]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=64 sk=256 d=64 causal align=bottom_right lse"));
  const Reference reference = oracle(c.args());
  const auto verdict = [&](float factor) {
    write_reference(c, reference);
    for (std::int64_t i = 0; i < c.out.size(); ++i) c.out.flat(i) *= 1 + factor;
    return compare(c.args(), reference).ok();
  };
  CHECK(verdict(0));
  CHECK_FALSE(verdict(6e-6f));
}

TEST_CASE("test tensors know 8-bit numbers", "[unit]") {
  const auto value = [](DType dtype, int code) {
    const auto byte = static_cast<std::uint8_t>(code);
    return read_element(&byte, dtype, 0);
  };
  const auto code = [](DType dtype, float x) {
    std::uint8_t byte = 0x55;
    write_element(&byte, dtype, 0, x);
    return static_cast<int>(byte);
  };
  CHECK(value(DType::f8e4m3, 0x01) == 0x1p-9f);
  CHECK(value(DType::f8e4m3, 0x08) == 0x1p-6f);
  CHECK(value(DType::f8e4m3, 0xb8) == -1);
  CHECK(value(DType::f8e4m3, 0x7e) == 448);
  CHECK(std::isnan(value(DType::f8e4m3, 0xff)));
  CHECK(value(DType::f8e5m2, 0x01) == 0x1p-16f);
  CHECK(value(DType::f8e5m2, 0x3d) == 1.25f);
  CHECK(value(DType::f8e5m2, 0xfb) == -57344);
  CHECK(value(DType::f8e5m2, 0xfc) == -kInfinity);
  CHECK(std::isnan(value(DType::f8e5m2, 0x7d)));
  CHECK(value(DType::i8, 0x80) == -128);
  for (DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
    for (int i = 0; i < 256; ++i) {
      if (std::isfinite(value(dtype, i))) CHECK(code(dtype, value(dtype, i)) == i);
    }
  }
  CHECK(code(DType::f8e4m3, 1.0625f) == 0x38);  // ties to even
  CHECK(code(DType::f8e4m3, 1.1875f) == 0x3a);
  CHECK(code(DType::f8e4m3, 1.07f) == 0x39);
  CHECK(code(DType::f8e4m3, -1e9f) == 0xfe);
  CHECK(code(DType::f8e5m2, 1.125f) == 0x3c);
  CHECK(code(DType::f8e5m2, 1e9f) == 0x7b);
  CHECK(code(DType::i8, 2.5f) == 2);
  CHECK(code(DType::i8, -1000) == 0x80);
  CHECK((std::isnan(value(DType::f8e4m3, code(DType::f8e4m3, NAN)))));
}

TEST_CASE("oracle: quantised values by hand", "[unit][numbers]") {
  // With scale 0 a row is the mean of the values.
  const auto mean = [](const KvSource& kv, std::int64_t dv) {
    const float q[2] = {};
    float out[4] = {};
    AttentionArgs args;
    args.q = TensorView(q, {1, 1, 1, 2});
    args.kv = kv;
    args.out = MutableTensorView(out, {1, 1, 1, dv});
    args.score.scale = 0.f;
    return oracle(args).out;
  };
  const std::uint8_t k[8] = {}, bytes[8] = {3, 0x80, 0x7f, 1, 0x0f, 0x70, 0x98, 0x21};
  const float one[] = {1}, scale[] = {0.5f, 2, 4, 1}, zero[] = {1, -1};
  const auto codes = [](const std::uint8_t* data, DType dtype, std::int64_t rows, std::int64_t width) {
    return TensorView(data, dtype, {1, 1, rows, width});
  };
  const TensorView ones(one, {1, 1, 1, 1});
  // [[3, -128], [127, 1]] with a scale for each row and a zero for each element.
  const KvSource i8 = KvSource::strided(codes(k, DType::i8, 2, 2), codes(bytes, DType::i8, 2, 2))
                          .quantized(ones, TensorView(scale, {1, 1, 2, 1}), {}, {});
  CHECK(mean(i8, 2) == std::vector<double>{(3 * 0.5 + 127 * 2) / 2, (-128 * 0.5 + 1 * 2) / 2});
  KvSource grouped = i8;
  grouped.v_scale = TensorView(scale, {1, 1, 2, 2});
  grouped.v_zero = TensorView(zero, {1, 1, 1, 2});
  CHECK(mean(grouped, 2) == std::vector<double>{(2 * 0.5 + 126 * 4) / 2, (-127 * 2 + 2 * 1) / 2.});
  // The lower half of a byte comes first: [[-1, 0, 0, 7], [-8, -7, 1, 2]], two groups of two.
  const KvSource i4 = KvSource::strided(codes(k, DType::i4x2, 2, 1), codes(bytes + 4, DType::i4x2, 2, 2))
                          .quantized(ones, TensorView(scale, {1, 1, 1, 2}));
  CHECK(mean(i4, 4) == std::vector<double>{-9 * 0.5 / 2, -7 * 0.5 / 2, 1 * 2 / 2., 9 * 2 / 2.});
  const KvSource e5m2 = KvSource::strided(codes(k, DType::f8e5m2, 1, 2), codes(bytes, DType::f8e5m2, 1, 2));
  CHECK(mean(e5m2, 2) == std::vector<double>{0x1.8p-15, -0.0});
}

TEST_CASE("oracle: pages and rings by hand", "[unit][numbers]") {
  // Values are 1, 10, 100, ...; with scale 0 a row is the mean of what it sees.
  const auto sees = [](Case& c, std::vector<double> expected) {
    AttentionArgs args = c.args();
    args.score.scale = 0.f;
    const std::vector<double> out = oracle(args).out;
    REQUIRE(out.size() == expected.size());
    for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i] == Approx(expected[i]).epsilon(1e-14));
  };
  const auto powers = [](Tensor& v) {
    for (std::int64_t i = 0; i < v.size(); ++i) v.flat(i) = static_cast<float>(std::pow(10, i));
  };
  Case pages(
      AttentionProblem::parse("attention b=2 sq=1 sk=6 page=2 seqlens d=1 causal window=2,-1 align=bottom_right"), 2);
  pages.v = Tensor(DType::f32, Layout(std::array<std::int64_t, 4>{3, 1, 2, 1}));
  pages.k = Tensor(DType::f32, pages.v.layout());
  for (std::int64_t i = 0; i < 6; ++i) pages.k.flat(i) = 0;
  powers(pages.v);
  pages.seqlens.at<std::int64_t>({0}) = 5, pages.seqlens.at<std::int64_t>({1}) = 2;
  const std::int32_t table[] = {-1, 2, 0, 1, 1 << 30, -1};  // sees keys 2, 3 and 4: rows 4, 5 and 0; then 2 and 3
  for (std::int64_t i = 0; i < 6; ++i) pages.block_table.at<std::int32_t>({i / 3, i % 3}) = table[i];
  sees(pages, {110001 / 3., 1100 / 2.});

  Case ring(AttentionProblem::parse("attention b=2 sq=2 sk=4 ring seqlens d=1 causal window=2,-1 align=bottom_right"),
            2);
  powers(ring.v);
  for (std::int64_t i = 0; i < 8; ++i) ring.k.flat(i) = 0;
  ring.seqlens.at<std::int64_t>({0}) = 6, ring.seqlens.at<std::int64_t>({1}) = 3;
  // Keys 2, 3, 4 and 5 in rows 2, 3, 0 and 1; the first row of queries sits at key 4.
  CHECK_NOTHROW(AttentionProblem::of(ring.args()));
  sees(ring, {1101 / 3., 1011 / 3., 110000 / 2., 1110000 / 3.});
}

TEST_CASE("oracle: lists of gathered keys by hand", "[unit][numbers]") {
  // Values are 1, 10, 100, ...; with scale 0 a token is the mean of what its list has.
  const auto view = [](const auto& values, std::initializer_list<std::int64_t> shape) {
    return TensorView(values, shape);
  };
  static const float zeros[8] = {}, powers[8] = {1, 10, 100, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};
  static const std::int32_t indices[] = {1, -1, 0, /**/ 2, 2, 3, /**/ -1, 3, 9, /**/ -1, -5, -1};
  static const std::int64_t counts[] = {3, 3, 2, 3};
  float results[8];
  AttentionArgs args;
  args.q = view(zeros, {2, 1, 2, 1});
  args.out = MutableTensorView(results, {2, 1, 2, 1});
  args.lse = MutableTensorView(results + 4, {2, 1, 2});
  args.score.scale = 0.f;
  const auto sees = [&](std::int64_t entries, std::vector<double> out) {
    const TensorView k = view(zeros, {entries, 1, 4, 1}), v = view(powers, {entries, 1, 4, 1});
    args.kv = KvSource::gathered(k, v, view(indices, {2, 2, 3}), view(counts, {2, 2}));
    CHECK_NOTHROW(AttentionProblem::of(args));
    const Reference reference = oracle(args);
    for (std::size_t i = 0; i < 4; ++i) CHECK(reference.out[i] == Approx(out[i]).epsilon(1e-14));
    CHECK(reference.lse[1] == Approx(std::log(3)).epsilon(1e-14));
    CHECK(reference.lse[3] == -std::numeric_limits<double>::infinity());
  };
  sees(2, {11 / 2., 1200 / 3., 1e7, 0});
  sees(1, {11 / 2., 1200 / 3., 1e3, 0});
}

TEST_CASE("oracle: the tail of a key by hand", "[unit][numbers]") {
  // Keys (2, 1, 3) and (2, 1, 0), of which the first column is quantised; the query asks for the last alone.
  static const std::int8_t codes[] = {1, 1}, values[] = {1, 5};
  static const float tail[] = {1, 3, 1, 0}, query[] = {0, 0, 1}, scale[] = {2}, one[] = {1};
  float result = 0;
  AttentionArgs args;
  args.q = TensorView(query, {1, 1, 1, 3});
  args.kv = KvSource::strided(TensorView(codes, {1, 1, 2, 1}), TensorView(values, {1, 1, 2, 1}))
                .quantized(TensorView(scale, {1, 1, 1, 1}), TensorView(one, {1, 1, 1, 1}))
                .with_tail(TensorView(tail, {1, 1, 2, 2}));
  args.out = MutableTensorView(&result, {1, 1, 1, 1});
  args.score.scale = 1.f;
  CHECK_NOTHROW(AttentionProblem::of(args));
  const double weight = std::exp(3);
  CHECK(oracle(args).out[0] == Approx((weight + 5) / (weight + 1)).epsilon(1e-14));
}

TEST_CASE("compare refuses keys and values that were dequantised wrongly", "[unit]") {
  for (const char* type : {"kv=i8 groups=2 zeros", "kv=i4x2 groups=2", "kv=f8e4m3 groups=2 zeros"}) {
    for (bool of_v : {false, true}) {
      Case right(AttentionProblem::parse("attention hq=2 sq=5 sk=40 d=16 lse " + std::string(type)), 3),
          wrong(right.problem, 3);
      Tensor& scale = of_v ? wrong.v_scale : wrong.k_scale;
      write_reference(right, oracle(right.args()));
      CHECK(compare(right.args(), oracle(right.args())).ok());
      for (std::int64_t i = 0; i < scale.size(); ++i) scale.flat(i) *= 1.0001f;
      CHECK_FALSE(compare(right.args(), oracle(wrong.args())).ok());
    }
  }
}

TEST_CASE("compare refuses a tail that was read wrongly", "[unit]") {
  Case right(AttentionProblem::parse("attention kv=i8 groups=2 tail=4 hq=2 sq=5 sk=40 d=20 dv=16 lse"), 3),
      wrong(right.problem, 3);
  write_reference(right, oracle(right.args()));
  CHECK(compare(right.args(), oracle(right.args())).ok());
  for (std::int64_t i = 0; i < wrong.k_tail.size(); ++i) wrong.k_tail.flat(i) *= 1.0001f;
  CHECK_FALSE(compare(right.args(), oracle(wrong.args())).ok());
}

TEST_CASE("oracle: bounds of scores that are further off than float64 has weights for", "[unit][numbers]") {
  // The second key weighs nothing beside the first, whose score is 2^40, and then 0; but its own may be off by more
  // than the difference of 2^16, and then 2^17, so that it may be the only one that counts.
  static const float ones[] = {1, 1}, values[] = {1, 3};
  static const float near[] = {0x1p40f, 0, 0x1.fffffep39f, 0}, cancelled[] = {0, 0, 0x1p40f, -0x1.000002p40f};
  for (const auto& keys : {near, cancelled}) {
    float results[2];
    AttentionArgs args;
    args.q = TensorView(ones, {1, 1, 1, 2});
    args.kv = KvSource::strided(TensorView(keys, {1, 1, 2, 2}), TensorView(values, {1, 1, 2, 1}));
    args.out = MutableTensorView(results, {1, 1, 1, 1});
    args.lse = MutableTensorView(results + 1, {1, 1, 1});
    args.score.scale = 1.f;
    const Reference reference = oracle(args);
    CHECK(reference.out[0] == 1);
    CHECK((reference.bound[0] >= 2 && reference.bound[0] <= 5));
    CHECK((reference.lse_bound[0] >= 0x7p16 && reference.lse_bound[0] < 0x1p24));
  }
}

TEST_CASE("compare accepts weights of bf16 over codes, from entries that say so", "[unit][numbers]") {
  for (const char* words :
       {"kv=f8e4m3 b=2 hq=4 hk=2 sq=40 sk=300 d=64 groups=1 head_scales q_scale",
        "kv=f8e4m3 hq=2 sq=64 sk=256 d=128 dv=40 out=bf16", "kv=i8 hq=2 sq=64 sk=3 d=16 groups=1 head_scales",
        "kv=f8e4m3 hq=2 sq=70 sk=90 d=34 causal align=bottom_right q_scale out=f16",
        "kv=f8e5m2 hq=2 sq=30 sk=1200 d=256 dv=32", "kv=f8e4m3 hq=2 sq=40 sk=200 d=64 scale=0",
        "kv=f8e4m3 hq=2 sq=40 sk=200 d=64 scale=1.5", "kv=f8e4m3 hq=2 sq=40 sk=200 d=64 scale=-0.002",
        "kv=f8e4m3 hq=2 sq=40 sk=200 d=64 scale=1e4 q_scale", "kv=f8e4m3 sq=1 sk=1 d=64",
        "kv=f8e4m3 b=3 hq=8 hk=1 sq=1 sk=700 d=96"}) {
    for (const bool positive : {false, true}) {
      Case c(AttentionProblem::parse("attention q=f8e4m3 lse " + std::string(words)));
      for (std::int64_t i = 0; positive && i < c.v.size(); ++i) c.v.flat(i) = std::abs(c.v.flat(i));
      const Reference reference = oracle(c.args());
      for (const double shift : {0.0, 0.0056, 0.1, 0.4, 7.7}) {
        RoundedWeights{.shift = shift}.run(c, c);
        const Errors errors = compare(c.args(), reference, Weights::bf16);
        INFO(c.problem.to_string() << " shift " << shift << (positive ? " positive: " : ": ") << describe(errors));
        CHECK(errors.ok());
        if (shift != 0.1 || c.problem.scale == 1e4f) continue;  // of so large scores fp32 leaves no more
        CHECK(errors.rel_frobenius > 0.05 * errors.frobenius_limit);
        if (c.problem.out_dtype == DType::f32) CHECK_FALSE(compare(c.args(), reference).ok());
      }
    }
  }
}

TEST_CASE("compare refuses wrong results of bf16 weights over codes", "[unit][numbers]") {
  const AttentionProblem problem = AttentionProblem::parse(
      "attention q=f8e4m3 kv=f8e4m3 b=2 hq=4 hk=2 sq=40 sk=256 d=64 groups=1 head_scales q_scale lse");
  Case c(problem);
  const Reference reference = oracle(c.args());
  const auto is_far_off = [&](auto spoil, const RoundedWeights& weights = {}) {
    Case wrong(problem);
    spoil(wrong);
    weights.run(wrong, c);
    const Errors e = compare(c.args(), reference, Weights::bf16);
    return e.rel_frobenius > e.frobenius_limit;
  };
  const auto nothing = [](Case&) {};
  CHECK_FALSE(is_far_off(nothing));
  CHECK(is_far_off(nothing, {.type = DType::f8e4m3}));
  CHECK(is_far_off(nothing, {.keys = 255}));
  for (Tensor Case::*t : {&Case::k, &Case::v})  // two keys of one head in another's place
    CHECK(is_far_off([&](Case& wrong) {
      for (std::int64_t e = 0; e < 64; ++e)
        std::swap((wrong.*t).at<std::uint8_t>({1, 1, 17, e}), (wrong.*t).at<std::uint8_t>({1, 1, 201, e}));
    }));
  for (Tensor Case::*scale : {&Case::q_scale, &Case::k_scale, &Case::v_scale})
    for (const float factor : {0.98f, 1.02f})
      CHECK(is_far_off([&](Case& wrong) {
        for (std::int64_t i = 0; i < (wrong.*scale).size(); ++i) (wrong.*scale).flat(i) *= factor;
      }));
  const auto refuses = [&](auto spoil) {
    RoundedWeights().run(c, c);
    spoil();
    CHECK_FALSE(compare(c.args(), reference, Weights::bf16).ok());
  };
  refuses([&] { c.lse.flat(17) += 0.05f; });
  refuses([&] { c.out.flat(17) += 0.1f; });
  refuses([&] { c.poison_outputs(); });
}
