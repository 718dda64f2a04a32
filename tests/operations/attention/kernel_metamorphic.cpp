// Changes of the input whose effect on the result is known without computing it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

TEST_CASE("keys may come in any order", "[kernel]") {
  const AttentionProblem problem = typed("attention b=2 hq=4 hk=2 sq=30 sk=170 d=32 bias=qk mask=qk lse", each_type());
  Case c(problem), permuted(problem);
  const Reference reference = oracle(c.args());
  std::vector<std::int64_t> order(170);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(5));
  for (std::int64_t j = 0; j < 170; ++j) {
    const std::int64_t from = order[static_cast<std::size_t>(j)];
    for (std::int64_t nh = 0; nh < 4; ++nh) {
      for (std::int64_t e = 0; e < 32; ++e) {
        permuted.k.at({nh / 2, nh % 2, j, e}) = c.k.at({nh / 2, nh % 2, from, e});
        permuted.v.at({nh / 2, nh % 2, j, e}) = c.v.at({nh / 2, nh % 2, from, e});
      }
    }
    for (std::int64_t i = 0; i < 30; ++i) {
      permuted.bias.flat(i * 170 + j) = c.bias.flat(i * 170 + from);
      permuted.mask.flat<bool>(i * 170 + j) = c.mask.flat<bool>(i * 170 + from);
    }
  }
  for (const std::string& entry : every_entry(problem)) {
    const Errors errors = run_and_compare(permuted, entry, reference);
    INFO(entry << ": " << describe(errors));
    CHECK(errors.ok());
  }
}

TEST_CASE("a constant added to all scores shifts lse and nothing else", "[kernel]") {
  const DType dtype = each_type();
  Case plain(typed("attention hq=2 sq=40 sk=90 d=32 lse", dtype));
  Case shifted(typed("attention hq=2 sq=40 sk=90 d=32 bias=k lse", dtype));
  for (std::int64_t j = 0; j < 90; ++j) shifted.bias.flat(j) = 3.25f;
  Reference reference = oracle(plain.args());
  for (double& lse : reference.lse) lse += 3.25;
  for (double& bound : reference.lse_bound) bound += 1e-6;  // the larger sum rounds more coarsely
  for (const std::string& entry : every_entry(shifted.problem)) {
    const Errors errors = run_and_compare(shifted, entry, reference);
    INFO(entry << ": " << describe(errors));
    CHECK(errors.ok());
  }
}

// On a GPU a call with a mask may have another kernel than one without, whose blocks of keys are others: calls with
// masks are compared with each other there.
TEST_CASE("masked keys behind the others do not change a bit", "[kernel]") {
  const DType dtype = each_type();
  const AttentionProblem shorter = typed("attention b=1 hq=4 hk=2 sq=50 sk=77 d=40 dv=20 lse", dtype);
  AttentionProblem masked = shorter;
  masked.mask = AttentionProblem::kFullK;
  for (std::int64_t extra : {1, 7, 64, 300}) {
    AttentionProblem longer = masked;
    longer.sk += extra;
    Case c(shorter), seen(masked), padded(longer);
    for (std::int64_t j = 0; j < 77; ++j) seen.mask.flat<bool>(j) = true;
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t j = 0; j < 77; ++j) {
        for (std::int64_t e = 0; e < 40; ++e) padded.k.at({0, h, j, e}) = c.k.at({0, h, j, e});
        for (std::int64_t e = 0; e < 20; ++e) padded.v.at({0, h, j, e}) = c.v.at({0, h, j, e});
      }
    }
    for (std::int64_t j = 0; j < longer.sk; ++j) padded.mask.flat<bool>(j) = j < 77;
    for (const std::string& entry : every_entry(longer)) {
      Case& other = device_of(entry) == DeviceType::cpu ? c : seen;
      run(other.args(), entry);
      run(padded.args(), entry);
      INFO(entry << " with " << extra << " masked keys");
      CHECK(same_bits(other.out, padded.out));
      CHECK(same_bits(other.lse, padded.lse));
    }
  }
}

TEST_CASE("keys beyond a length do not change a bit", "[kernel]") {
  Case c(typed("attention b=1 hq=4 hk=2 sq=50 sk=177 d=40 lse", each_type()));
  const std::int64_t length = 77;
  for (const std::string& entry : every_entry(c.problem)) {
    Case shorter(c.problem), limited(c.problem);
    AttentionArgs args = shorter.args();
    args.kv.k = slice(args.kv.k, 2, 0, length);
    args.kv.v = slice(args.kv.v, 2, 0, length);
    run(args, entry);
    args = limited.args();
    args.kv.seqlens = TensorView(&length, {1});
    run(args, entry);
    INFO(entry);
    CHECK(same_bits(shorter.out, limited.out));
    CHECK(same_bits(shorter.lse, limited.lse));
  }
}

TEST_CASE("grouped heads give the bits of repeated keys and values", "[kernel]") {
  const DType dtype = each_type();
  for (std::int64_t group : {2, 3, 5, 7, 8}) {
    AttentionProblem grouped = typed("attention b=2 hk=2 sq=37 sk=90 d=40 dv=24 causal align=bottom_right lse", dtype);
    grouped.hq = 2 * group;
    AttentionProblem repeated = grouped;
    repeated.hk = grouped.hq;
    Case c(grouped), copy(repeated);
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t h = 0; h < repeated.hk; ++h) {
        for (std::int64_t j = 0; j < 90; ++j) {
          for (std::int64_t e = 0; e < 40; ++e) copy.k.at({n, h, j, e}) = c.k.at({n, h / group, j, e});
          for (std::int64_t e = 0; e < 24; ++e) copy.v.at({n, h, j, e}) = c.v.at({n, h / group, j, e});
        }
      }
    }
    for (const std::string& entry : every_entry(grouped)) {
      run(c.args(), entry);
      run(copy.args(), entry);
      INFO(entry << " with groups of " << group);
      CHECK(same_bits(c.out, copy.out));
      CHECK(same_bits(c.lse, copy.lse));
    }
  }
}

TEST_CASE("two halves of the keys merge by their lse", "[kernel]") {
  const DType dtype = each_type();
  Case c(typed("attention b=1 hq=2 sq=30 sk=150 d=32 lse", dtype));
  const Reference reference = oracle(c.args());
  for (const std::string& entry : every_entry(c.problem)) {
    Case left(c.problem), right(c.problem);
    const auto run_part = [&](Case& part, std::int64_t begin, std::int64_t count) {
      AttentionArgs args = part.args();
      args.kv.k = slice(args.kv.k, 2, begin, count);
      args.kv.v = slice(args.kv.v, 2, begin, count);
      run(args, entry);
    };
    run_part(left, 0, 67);
    run_part(right, 67, 83);
    double worst = 0;
    for (std::int64_t row = 0; row < left.lse.size(); ++row) {
      const double a = left.lse.flat(row), b = right.lse.flat(row);
      const double top = std::max(a, b), whole = top + std::log(std::exp(a - top) + std::exp(b - top));
      for (std::int64_t e = 0; e < 32; ++e) {
        const std::int64_t at = row * 32 + e;
        const double merged = std::exp(a - whole) * left.out.flat(at) + std::exp(b - whole) * right.out.flat(at);
        worst = std::max(worst, std::abs(merged - reference.out[static_cast<std::size_t>(at)]));
      }
    }
    // Each part of 16 bits is rounded by itself.
    const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
    INFO(entry);
    CHECK(worst <= 2e-6 + 2 * unit);
  }
}

TEST_CASE("scaling the values scales the result", "[kernel]") {
  // Not f16: what is scaled must stay clear of the denormals.
  const AttentionProblem problem =
      typed("attention hq=2 sq=40 sk=90 d=32 causal align=bottom_right", GENERATE(DType::f32, DType::bf16));
  Case c(problem), scaled(problem);
  for (std::int64_t i = 0; i < scaled.v.size(); ++i) scaled.v.flat(i) *= 0.25f;
  for (const std::string& entry : every_entry(problem)) {
    run(c.args(), entry);
    run(scaled.args(), entry);
    INFO(entry);
    for (std::int64_t i = 0; i < c.out.size(); ++i) REQUIRE(c.out.flat(i) * 0.25f == scaled.out.flat(i));
  }
}
