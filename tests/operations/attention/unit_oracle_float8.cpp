// The oracle's bounds of entries that multiply codes of f8e4m3, held against an emulation of the tensor cores, and
// against wrong results.
#include <cmath>
#include <stdexcept>
#include <utility>

#include "operations/attention/case.hpp"
#include "operations/attention/oracle.hpp"
#include "operations/attention/tensor_core.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

Case case_of(const std::string& words) {
  return Case(AttentionProblem::parse("attention q=f8e4m3 kv=f8e4m3 lse " + words));
}
void make_positive(Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = std::abs(tensor.flat(i));
}

/// Holds the emulation to its bounds. Its share of the norm's limit.
double check_emulation(Case& c) {
  OnTensorCores().run(c);
  const Errors errors = compare(c.args(), oracle(c.args()), Weights::f8e4m3);
  INFO(c.problem.to_string() << ": " << describe(errors));
  CHECK(errors.ok());
  return errors.rel_frobenius / errors.frobenius_limit;
}

}  // namespace

TEST_CASE("tensor cores cut the addends of f8e4m3 products", "[unit][numbers]") {
  const double ones[40] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const double small[] = {1, 0x1p-13, -0x1.fp-13, 0x1p-14, -0x1p-14};
  CHECK(tensor_core_sum(ones, small, 5) == 1);
  CHECK(tensor_core_sum(ones, small + 1, 4) == 0x1p-13 - 0x1.fp-13);
  CHECK(tensor_core_sum(ones, small, 5, -2) == -1);  // whose unit is 2^-12
  CHECK(tensor_core_sum(ones, ones, 40) == 40);
}

TEST_CASE("compare accepts what tensor cores make of f8e4m3, from entries that say so", "[unit]") {
  for (const char* words :
       {"b=2 hq=4 hk=2 sq=20 sk=300 d=64 groups=1 head_scales q_scale", "hq=2 sq=30 sk=256 d=128 out=bf16",
        "hq=2 sq=70 sk=90 d=64 causal align=bottom_right q_scale out=f16", "hq=2 sq=40 sk=3 d=64", "sq=1 sk=1 d=64",
        "sq=20 sk=3000 d=64", "hq=2 sq=30 sk=200 d=64 scale=1.5", "hq=2 sq=30 sk=200 d=64 scale=-0.002",
        "hq=2 sq=30 sk=200 d=64 scale=1e4 q_scale", "hq=2 sq=30 sk=200 d=128 scale=12", "sq=20 sk=200 d=64 scale=150",
        "sq=20 sk=200 d=64 scale=1e-9", "b=3 hq=8 hk=1 sq=1 sk=700 d=128"})
    for (const bool positive : {false, true}) {
      Case c = case_of(words);
      if (positive) make_positive(c.v);
      check_emulation(c);
    }
}

TEST_CASE("compare accepts f8e4m3 arithmetic on inputs that are hard for it", "[unit][numbers]") {
  // Equal scores, whose roundings are all the same; and values that are all the same, too.
  Case c = case_of("hq=2 sq=3 sk=2500 d=64");
  for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 0;
  check_emulation(c);
  make_positive(c.v);
  check_emulation(c);
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = 1.375f;
  check_emulation(c);
  // One key above the others, or several, whose weights are denormals of f8e4m3, or are cut, or nothing.
  for (const bool positive : {false, true})
    for (const std::int64_t step : {1500, 1300, 20, 2})
      for (const float score : {0.3125f, 0.46875f, 0.5625f, 0.625f, 0.75f, 0.875f, 1.f, 1.25f, 2.f, 4.f, 5.f, 6.f, 7.f,
                                8.f, 9.f, 10.f, 11.f, 14.f, 30.f}) {
        Case peak = case_of("sq=2 sk=1500 d=64 scale=1");
        for (Tensor* t : {&peak.q, &peak.k})
          for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = 0;
        for (std::int64_t i = 0; i < peak.q.size(); i += 64) peak.q.flat(i) = 1;
        for (std::int64_t key = step == 1300 ? step : 0; key < 1500; key += step) peak.k.flat(key * 64) = score;
        if (positive) make_positive(peak.v);
        INFO("every " << step << " score " << score << (positive ? " positive" : ""));
        check_emulation(peak);
      }
  // Queries that are divided lest their scores leave fp16, and have denormals then.
  for (const char* words : {"hq=2 sq=20 sk=300 d=64 scale=1e-5", "hq=2 sq=20 sk=300 d=128 scale=-2e-6 q_scale"}) {
    Case large = case_of(words);
    for (std::int64_t i = 0; i < large.q.size(); ++i)
      large.q.flat(i) *= i % 7 == 0 ? 0.03f : std::ldexp(1.f, static_cast<int>(i / large.problem.d % 8));
    for (std::int64_t i = 0; i < large.k.size(); ++i) large.k.flat(i) *= i % 7 == 0 ? 100.f : 30.f;
    check_emulation(large);
  }
  // Scores that rise or fall along the keys: the shift is moved by little and much, or not at all.
  for (const bool falling : {false, true})
    for (const std::int64_t keys : {1, 16, 64, 128, 600})
      for (const float step : {0.04f, 0.4f, 0.75f, 1.f, 2.f, 5.f, 9.f, 40.f}) {
        Case rising = case_of("sq=5 sk=1700 d=64 scale=1");
        for (Tensor* t : {&rising.q, &rising.k})
          for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = 0;
        for (std::int64_t row = 0; row < 5; ++row) rising.q.flat(row * 64) = static_cast<float>(row - 1);
        for (std::int64_t key = 0; key < 1700; ++key) {
          const std::int64_t at = (falling ? 1699 - key : key) / keys;
          rising.k.flat(key * 64) = std::min(step * static_cast<float>(at % 32), 448.f);
        }
        INFO("step " << step << " of " << keys << " keys" << (falling ? ", falling" : ""));
        check_emulation(rising);
      }
}

TEST_CASE("limits on f8e4m3 arithmetic are not far above what it does", "[unit]") {
  for (const char* words : {"hq=2 sq=40 sk=300 d=64", "sq=20 sk=2000 d=128"})
    for (const bool positive : {false, true}) {
      Case c = case_of(words);
      if (positive) make_positive(c.v);
      INFO(words << (positive ? " positive" : ""));
      CHECK(check_emulation(c) > 0.1);
      const Reference reference = oracle(c.args());
      CHECK_FALSE(compare(c.args(), reference).ok());  // by the bounds of fp32
    }
}

TEST_CASE("the limit on f8e4m3 arithmetic has no room for bf16 where all weights and all values are equal", "[unit]") {
  Case c = case_of("hq=2 sq=3 sk=30 d=64");
  for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 0;
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = 1.375f;
  OnTensorCores().run(c);
  const Reference reference = oracle(c.args());
  const double limit = compare(c.args(), reference, Weights::f8e4m3).frobenius_limit;
  CHECK(limit < 0.002);
  CHECK(limit < compare(c.args(), reference, Weights::bf16).frobenius_limit);
}

TEST_CASE("calls that the entry of f8e4m3 products multiplies in bf16 are held to bounds of bf16", "[unit]") {
  const auto weights_of_case = [](const std::string& words) {
    Case c = case_of(words);
    return weights_of_f8_products(c.args());
  };
  CHECK(weights_of_case("b=2 hq=2 sq=20 d=64 layout=bshd causal") == Weights::f8e4m3);
  CHECK(weights_of_case("b=2 hq=2 sq=20 d=64 layout=bhds") == Weights::bf16);
  CHECK(weights_of_case("b=2 hq=2 sq=1 sk=20 d=64 q_scale") == Weights::f8e4m3);
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    Case c(case_of("b=2 hq=2 sq=20 d=64 q_scale").problem, seed);
    const bool of_rows = c.q_scale.layout().shape[2] == 20;
    CHECK(weights_of_f8_products(c.args()) == (of_rows ? Weights::bf16 : Weights::f8e4m3));
  }
  Case c = case_of("b=2 hq=2 sq=20 d=64");
  AttentionArgs args = c.args();
  CHECK(weights_of_f8_products(args) == Weights::f8e4m3);
  args.kv.v.strides[1] = 0;
  CHECK(weights_of_f8_products(args) == Weights::f8e4m3);
  args.kv.k.strides[1] = 0;
  CHECK(weights_of_f8_products(args) == Weights::bf16);
  args = c.args();
  args.q.data = static_cast<const std::byte*>(args.q.data) + 8;
  CHECK(weights_of_f8_products(args) == Weights::bf16);
}

TEST_CASE("compare refuses wrong results of f8e4m3 arithmetic", "[unit]") {
  const AttentionProblem problem = AttentionProblem::parse(
      "attention q=f8e4m3 kv=f8e4m3 b=2 hq=4 hk=2 sq=40 sk=256 d=64 groups=1 head_scales q_scale lse");
  Case c(problem);
  const Reference reference = oracle(c.args());
  const auto verdict = [&](auto spoil, std::int64_t keys = 256) {
    Case wrong(problem);
    spoil(wrong);
    OnTensorCores{.keys = keys}.run(wrong, c);
    return compare(c.args(), reference, Weights::f8e4m3);
  };
  const auto is_far_off = [](const Errors& e) { return e.rel_frobenius > e.frobenius_limit; };
  CHECK(verdict([](Case&) {}).ok());
  const auto swap_keys = [](Tensor& t) {
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t e = 0; e < 64; ++e)
          std::swap(t.at<std::uint8_t>({n, h, 17, e}), t.at<std::uint8_t>({n, h, 201, e}));
  };
  CHECK(is_far_off(verdict([&](Case& wrong) { swap_keys(wrong.v); })));
  CHECK(is_far_off(verdict([&](Case& wrong) { swap_keys(wrong.k); })));
  for (Tensor Case::*scale : {&Case::q_scale, &Case::k_scale, &Case::v_scale})
    for (const float factor : {0.9f, 1.1f})
      CHECK(is_far_off(verdict([&](Case& wrong) {
        for (std::int64_t i = 0; i < (wrong.*scale).size(); ++i) (wrong.*scale).flat(i) *= factor;
      })));
  CHECK(is_far_off(verdict([](Case&) {}, 252)));
  // One block's values by the weights of another.
  CHECK(is_far_off(verdict([](Case& wrong) {
    for (std::int64_t j = 0; j < 32; ++j)
      for (std::int64_t e = 0; e < 64; ++e) wrong.v.at({1, 1, j, e}) = wrong.v.at({1, 1, j + 32, e});
  })));
  const auto refuses = [&](auto spoil) {
    OnTensorCores().run(c);
    spoil();
    CHECK_FALSE(compare(c.args(), reference, Weights::f8e4m3).ok());
  };
  refuses([&] { c.lse.flat(17) += 0.2f; });
  refuses([&] { c.out.flat(17) += 0.5f; });
  refuses([&] { c.poison_outputs(); });
  // A bf16 entry's weights may not be f8e4m3's.
  OnTensorCores().run(c);
  CHECK(is_far_off(compare(c.args(), reference, Weights::bf16)));
}

TEST_CASE("oracle: bounds of f8e4m3 arithmetic are numbers beside NaN in hidden keys, and for rows without keys",
          "[unit]") {
  for (const char* words : {"sq=40 sk=20 d=64 causal align=bottom_right", "sq=9 sk=20 d=64 causal align=-4"}) {
    Case c = case_of(words);
    c.k.at<std::uint8_t>({0, 0, 5, 3}) = 0x7f, c.v.at<std::uint8_t>({0, 0, 4, 2}) = 0xff;
    const Reference r = oracle(c.args());
    REQUIRE(r.f8e4m3.bound.size() == r.out.size());
    for (std::size_t i = 0; i < r.out.size(); ++i) {
      if (!std::isfinite(r.out[i])) continue;
      CHECK((r.f8e4m3.bound[i] >= r.bound[i] && r.f8e4m3.bound[i] < 10));
      CHECK((r.f8e4m3.spread[i] >= 0 && r.f8e4m3.spread[i] < 1));
    }
    for (std::size_t i = 0; i < r.lse.size(); ++i)
      if (std::isfinite(r.lse[i])) CHECK((r.f8e4m3.lse_bound[i] >= r.lse_bound[i] && r.f8e4m3.lse_bound[i] < 0.3));
    CHECK(std::isnan(r.out.back()) == (c.problem.sq == 40));
    CHECK(r.out[0] == 0);
  }
  for (const char* words :
       {"kv=bf16 sq=2 sk=3 d=4", "kv=f8e4m3 sq=2 sk=3 d=4 softcap=20", "kv=f8e4m3 sq=2 sk=3 d=4 sinks"}) {
    Case other(AttentionProblem::parse("attention q=f8e4m3 " + std::string(words)));
    CHECK(oracle(other.args()).f8e4m3.bound.empty());
    CHECK_THROWS_AS(compare(other.args(), oracle(other.args()), Weights::f8e4m3), std::logic_error);
  }
}
