// NaN, Inf, very large and very small numbers: what is attended propagates, what is masked never leaks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

std::size_t finite_count(const Case& c) {
  std::size_t count = 0;
  for (float x : c.out.values()) count += std::isfinite(x);
  return count;
}

/// Rows that the reference calls finite must have the bits they had without the intruder. (The finite elements of the
/// others may be computed another way.)
void check_unharmed(const Case& before, const Case& after, const Reference& reference) {
  const std::vector<float> x = before.out.values(), y = after.out.values();
  const auto dv = static_cast<std::size_t>(after.problem.dv);
  for (std::size_t i = 0; i < x.size(); i += dv) {
    const auto row = reference.out.begin() + static_cast<std::ptrdiff_t>(i);
    const bool finite =
        std::all_of(row, row + static_cast<std::ptrdiff_t>(dv), [](double e) { return std::isfinite(e); });
    if (finite && std::memcmp(&x[i], &y[i], dv * sizeof(float)) != 0) FAIL("row " << i / dv << " has other bits");
  }
}

}  // namespace

TEST_CASE("NaN in a key or value reaches the rows that attend it and no other", "[kernel][numbers]") {
  const DType dtype = each_type();
  auto turn = static_cast<std::size_t>(dtype);
  for (const char* what : {"", "causal", "causal align=-9", "window=6,3", "causal window=20,-1 align=30", "mask=hqk",
                           "bias=hqk", "mask=bk", "bias=bk mask=qk", "softcap=20 causal", "alibi causal",
                           "sinks causal", "causal layout=bshd", "causal layout=bhds", "mask=qk layout=other"}) {
    const AttentionProblem problem = typed("attention b=2 hq=4 hk=2 sq=70 d=24 lse " + std::string(what), dtype);
    const std::vector<std::string> names = every_entry(problem);
    std::map<std::string, Case> before;
    std::map<std::string, std::size_t> harmed;
    for (const std::string& entry : names) run(before.try_emplace(entry, problem).first->second.args(), entry);
    for (std::int64_t key : {0, 1, 33, 68, 69}) {
      for (bool in_key : {true, false}) {
        if (!is_sampled(turn, 3)) continue;
        Case after(problem);
        (in_key ? after.k : after.v).at({1, 0, key, 5}) = kNan;
        const Reference reference = oracle(after.args());
        for (const std::string& entry : names) {
          const Errors errors = run_and_compare(after, entry, reference);
          INFO(entry << ": " << problem.to_string() << (in_key ? ": key " : ": value ") << key << ": "
                     << describe(errors));
          CHECK(errors.ok());
          harmed[entry] += finite_count(before.at(entry)) - finite_count(after);
          if (in_key || ignores_hidden_values(entry)) check_unharmed(before.at(entry), after, reference);
        }
      }
    }
    for (const std::string& entry : names) CHECK(harmed[entry] > 0);
  }
}

TEST_CASE("Inf in a key or value propagates and never hides", "[kernel]") {
  const DType dtype = each_type();
  for (const char* what : {"", "causal", "window=6,3", "mask=hqk", "bias=hqk"}) {
    for (float value : {kInf, -kInf}) {
      for (std::int64_t key : {0, 40, 69}) {
        Case in_value(typed("attention b=1 hq=2 sq=70 d=24 lse " + std::string(what), dtype));
        in_value.v.at({0, 1, key, 23}) = value;
        check_every_entry(in_value);
        // A score of +inf is no number afterwards, one of -inf weighs nothing.
        Case in_key(in_value.problem);
        in_key.k.at({0, 1, key, 0}) = value;
        check_every_entry(in_key);
      }
    }
  }
}

TEST_CASE("NaN or Inf in any column of a large head", "[kernel]") {
  const DType dtype = each_type();
  for (std::int64_t column : {0, 63, 64, 130, 191}) {
    for (float value : {kNan, kInf}) {
      Case c(typed("attention b=1 hq=2 sq=70 d=192 causal lse", dtype));
      c.v.at({0, 1, 33, column}) = value;
      c.k.at({0, 0, 50, column}) = value;
      check_every_entry(c);
    }
  }
}

TEST_CASE("NaN or Inf or a denormal in any column of a head that is no whole vector", "[kernel]") {
  const DType dtype = each_type();
  for (std::int64_t column : {0, 31, 32, 39}) {
    for (float value : {kNan, kInf, 0x1p-130f}) {
      const AttentionProblem problem = typed("attention b=1 hq=2 sq=41 sk=50 d=40 dv=72 lse", dtype);
      Case in_value(problem), in_key(problem), in_query(problem);
      in_value.v.at({0, 1, 49, column}) = value;
      check_every_entry(in_value);
      in_key.k.at({0, 0, 49, column}) = value;
      check_every_entry(in_key);
      in_query.q.at({0, 0, 40, column}) = value;
      check_every_entry(in_query);
    }
  }
}

TEST_CASE("NaN or Inf in a query stays in its row", "[kernel]") {
  const AttentionProblem problem = typed("attention b=2 hq=6 hk=2 sq=41 sk=50 d=24 lse", each_type());
  const float value = GENERATE(kNan, kInf);
  for (const std::string& entry : every_entry(problem)) {
    Case before(problem), after(problem);
    run(before.args(), entry);
    after.q.at({1, 3, 17, 0}) = value;
    const Reference reference = oracle(after.args());
    INFO(entry << ": " << problem.to_string());
    CHECK(run_and_compare(after, entry, reference).ok());
    CHECK(finite_count(after) + 24 == finite_count(before));
    check_unharmed(before, after, reference);
  }
}

TEST_CASE("a row without keys ignores a NaN in its query", "[kernel]") {
  Case c(typed("attention sq=9 sk=3 d=8 causal align=bottom_right lse", each_type()));
  c.q.at({0, 0, 2, 3}) = kNan;
  check_every_entry(c);
}

TEST_CASE("one sequence's NaN does not reach its neighbours", "[kernel]") {
  const DType dtype = each_type();
  for (const char* what : {"ragged_q=90 ragged_k=120", "ragged_k=120", "", "seqlens"}) {
    for (std::uint64_t seed : {1, 2, 3}) {
      Case c(typed("attention b=3 hq=2 sq=50 sk=60 d=24 lse " + std::string(what), dtype), seed);
      const bool ragged = c.problem.ragged_k >= 0;
      const AttentionArgs args = c.args();
      std::int64_t begin = 60, end = 120;
      if (ragged) {
        const bool wide = args.kv.cu_seqlens.dtype == DType::i64;
        begin = wide ? c.cu_seqlens_k.at<std::int64_t>({1}) : c.cu_seqlens_k.at<std::int32_t>({1});
        end = wide ? c.cu_seqlens_k.at<std::int64_t>({2}) : c.cu_seqlens_k.at<std::int32_t>({2});
      }
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t e = 0; e < 24; ++e) {
          (ragged ? c.k.at({row, 0, e}) : c.k.at({1, 0, row - 60, e})) = kNan;
          (ragged ? c.v.at({row, 1, e}) : c.v.at({1, 1, row - 60, e})) = kNan;
        }
      }
      check_every_entry(c);
    }
  }
}

TEST_CASE("NaN and +inf in bias are scores like any other", "[kernel]") {
  const DType dtype = each_type();
  for (float value : {kNan, kInf}) {
    Case c(typed("attention sq=9 sk=40 d=8 bias=qk lse", dtype));
    c.bias.flat(3 * 40 + 17) = value;
    check_every_entry(c);
    Case masked(typed("attention sq=40 d=8 bias=qk causal lse", dtype));
    masked.bias.flat(3 * 40 + 17) = value;
    check_every_entry(masked);
  }
}

TEST_CASE("a value outside the causal range may be anything", "[kernel]") {
  Case c(typed("attention b=1 hq=2 sq=5 sk=300 d=16 causal align=20 lse", each_type()));
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t j = 25; j < 300; ++j) {
      for (std::int64_t e = 0; e < 16; ++e) {
        c.k.at({0, h, j, e}) = j % 2 ? kNan : kInf;
        c.v.at({0, h, j, e}) = j % 3 ? kNan : -kInf;
      }
    }
  }
  check_every_entry(c);
}

TEST_CASE("very large scores work", "[kernel]") {
  for (const char* scale : {"1e4", "-1e4", "1e6", "-1e6"}) {
    for (const char* what : {"", " causal", " mask=qk", " bias=qk", " softcap=30", " window=9,9 alibi", " sinks"}) {
      check_every_type("attention hq=2 sq=65 d=16 lse scale=" + std::string(scale) + what);
    }
  }
}

// As a score of NaN or +inf does, so does a sink: also beside rows without keys, and where splits are combined.
TEST_CASE("a sink of NaN or +Inf makes all rows of its head NaN, and no others", "[kernel]") {
  const DType dtype = each_type();
  for (const float sink : {kNan, -kNan, kInf})
    for (const char* words : {"sq=1 sk=70", "sq=1 sk=5000", "sq=3 sk=1", "sq=70",
                              "sq=70 sk=40 causal align=bottom_right", "sq=70 sk=90 mask=qk", "sq=70 alibi causal"}) {
      Case c(typed("attention b=2 hq=4 hk=2 d=24 sinks lse " + std::string(words), dtype));
      c.sinks.flat(1) = sink;
      INFO("sink " << sink);
      check_every_entry(c);
    }
}

// x86 makes NaN with the sign bit set.
TEST_CASE("a NaN of either sign is a NaN, whatever the rows beside it", "[kernel]") {
  const DType dtype = each_type();
  for (float nan : {kNan, -kNan}) {
    for (float beside : {0.f, 80.f}) {
      Case c(typed("attention sq=40 sk=70 d=16 bias=qk lse", dtype));
      for (std::int64_t i = 0; i < c.bias.size(); ++i) c.bias.flat(i) = 0;
      c.bias.at({0, 0, 4, 9}) = nan;
      c.bias.at({0, 0, 5, 9}) = beside;
      check_every_entry(c);
    }
  }
  for (float slope : {kInf, -kNan}) {
    Case c(typed("attention sq=40 sk=40 d=16 causal alibi lse", dtype));
    c.alibi.flat(0) = slope;
    check_every_entry(c);
  }
}

TEST_CASE("products that overflow both ways do not drop a key", "[kernel]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c(typed("attention sq=2 sk=64 d=32 scale=1 lse", dtype));
    for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 0;
    for (std::int64_t j = 0; j < c.k.size(); ++j) c.k.flat(j) = 0;
    c.q.flat(0) = c.q.flat(1) = 0x1p70f;
    c.k.flat(0) = 0x1p70f;
    c.k.flat(1) = -0x1p70f;
    for (const std::string& entry : every_entry(c.problem)) {
      c.poison_outputs();
      run(c.args(), entry);
      INFO(entry);
      // In fp32 it is Inf - Inf; units that sum products exactly have 0.
      if (std::isfinite(c.lse.flat(0))) CHECK(c.lse.flat(0) == Approx(std::log(64.0)).epsilon(1e-5));
      CHECK(c.lse.flat(1) == Approx(std::log(64.0)).epsilon(1e-5));
    }
  }
}

TEST_CASE("values far below 1", "[kernel]") {
  const DType dtype = each_type();
  if (dtype == DType::f16) return;  // has none
  for (int exponent : {-70, -85, -95, -100}) {
    for (const char* scale : {"1", "0.1"}) {
      for (float bias : {0.f, -10.f}) {
        Case c(typed("attention sq=40 sk=1000 d=16 bias=k lse scale=" + std::string(scale), dtype));
        for (std::int64_t j = 0; j < 1000; ++j) c.bias.flat(j) = bias;
        for (std::int64_t j = 0; j < c.v.size(); ++j)
          c.v.flat(j) = std::ldexp(static_cast<float>(c.v.flat(j)), exponent);
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("a scale near the largest float", "[kernel]") {
  Case zero(typed("attention sq=2 sk=4 d=32 scale=3e38 lse", each_type()));
  for (std::int64_t i = 0; i < zero.q.size(); ++i) zero.q.flat(i) = 0;
  check_every_entry(zero);
}

// Far past what the contract names: a reference of the softmax that cannot be stored to the unit.
TEST_CASE("scores of any size take the largest", "[kernel]") {
  const DType dtype = each_type();
  for (float scale : {1e7f, 1e9f, 3e9f, 1e10f, 1e15f, 1e20f, 1e30f}) {
    for (float sign : {1.f, -1.f}) {
      Case c(typed("attention sq=3 sk=130 d=1 scale=1 lse", dtype));
      c.problem.has_scale = true;
      c.problem.scale = sign * scale;
      for (std::int64_t i = 0; i < 3; ++i) c.q.flat(i) = 1;
      for (std::int64_t j = 0; j < 130; ++j)
        c.k.flat(j) = sign * (j == 40 || j == 129 ? 5.f : static_cast<float>(j % 3));
      for (std::int64_t j = 0; j < 130; ++j) c.v.flat(j) = j == 40 || j == 129 ? 2.f : 1.f;
      for (const std::string& entry : every_entry(c.problem)) {
        c.poison_outputs();
        run(c.args(), entry);
        INFO(entry << " at " << sign * scale);
        CHECK(c.out.flat(1) == Approx(2).epsilon(1e-2));
        CHECK(c.lse.flat(1) == Approx(5 * scale).epsilon(1e-5));
      }
    }
  }
}

// Scores of exactly +-1e6 leave nothing to rounding: the largest take everything, in equal shares.
TEST_CASE("large scores pick the largest exactly", "[kernel]") {
  for (float size : {1e4f, 1e6f}) {
    Case c(AttentionProblem::parse("attention sq=2 sk=200 d=1 scale=1 lse"));
    for (std::int64_t j = 0; j < 200; ++j) c.k.flat(j) = j == 150 || j == 3 ? size : -size;
    c.q.flat(0) = 1;
    c.q.flat(1) = -1;
    for (std::int64_t j = 0; j < 200; ++j) c.v.flat(j) = j == 150 || j == 3 ? 2 : static_cast<float>(j % 2);
    for (const std::string& entry : every_entry(c.problem)) {
      c.poison_outputs();
      run(c.args(), entry);
      INFO(entry);
      CHECK(c.out.flat(0) == Approx(2).epsilon(1e-6));
      CHECK(c.out.flat(1) == Approx(99 / 198.0).epsilon(1e-6));
      CHECK(c.lse.flat(0) == Approx(size + std::log(2.0)).epsilon(3e-7));
      CHECK(c.lse.flat(1) == Approx(size + std::log(198.0)).epsilon(3e-7));
    }
  }
}

TEST_CASE("rows whose scores are all very negative are not masked", "[kernel]") {
  const DType dtype = each_type();
  for (float size : {-1e4f, -1e6f, -1e30f}) {
    Case c(typed("attention sq=3 sk=70 d=1 scale=1 bias=k", dtype), 1);
    for (std::int64_t j = 0; j < 70; ++j) {
      c.bias.flat(j) = size;
      c.k.flat(j) = 0;
      c.v.flat(j) = static_cast<float>(j);
    }
    for (const std::string& entry : every_entry(c.problem)) {
      run(c.args(), entry);
      INFO(entry << " at " << size);
      CHECK(c.out.flat(1) == Approx(34.5).epsilon(dtype == DType::f32 ? 1e-6 : 0x1p-7));
    }
  }
}

// Kernels may flush them, which the bounds' 1e-37 covers; normal numbers beside them must come out in full.
TEST_CASE("denormal inputs", "[kernel]") {
  Case c(AttentionProblem::parse("attention sq=9 sk=40 d=8 lse"));
  for (std::int64_t i = 0; i < c.k.size(); ++i) c.k.flat(i) *= 1e-39f;
  check_every_entry(c);
  for (std::int64_t i = 0; i < c.v.size(); i += 3) c.v.flat(i) *= 1e-39f;
  check_every_entry(c);
  for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) *= 1e-39f;
  check_every_entry(c);
}

TEST_CASE("values near the largest float do not overflow on their way to the mean", "[kernel]") {
  Case c(AttentionProblem::parse("attention sq=4 sk=9 d=8"));
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) *= 1e37f / 4;
  check_every_entry(c);
}

// No other row stands in the panel whose finite scores could show that the block is visible.
TEST_CASE("a row whose every score is NaN is not taken for a masked one", "[kernel]") {
  const DType dtype = each_type();
  for (const char* what : {"", " bias=k", " mask=k", " alibi", " softcap=5"}) {
    Case c(typed("attention sq=1 sk=1 d=1 lse" + std::string(what), dtype));
    for (std::int64_t i = 0; i < c.mask.size(); ++i) c.mask.flat<bool>(i) = true;
    if (c.bias.size() > 0) c.bias.flat(0) = 0;
    c.q.flat(0) = kNan;
    for (const std::string& entry : every_entry(c.problem)) {
      c.lse.flat(0) = 0;
      c.out.flat(0) = 0;
      run(c.args(), entry);
      INFO(entry << what);
      CHECK(std::isnan(c.out.flat(0)));
      CHECK(std::isnan(c.lse.flat(0)));
    }
  }
}

TEST_CASE("a score that overflows is not hidden", "[kernel]") {
  Case c(typed("attention sq=1 sk=2 d=1", GENERATE(DType::f32, DType::bf16)));  // f16 cannot overflow fp32
  c.q.flat(0) = 1e30f;
  c.k.flat(0) = 1e30f;
  c.k.flat(1) = 1;
  for (const std::string& entry : every_entry(c.problem)) {
    c.out.flat(0) = 0;
    run(c.args(), entry);
    INFO(entry);
    CHECK(!std::isfinite(c.out.flat(0)));
  }
}

TEST_CASE("the lowest finite bias does not mask", "[kernel]") {
  const DType dtype = each_type();
  Case c(typed("attention sq=1 sk=2 d=1 scale=0 bias=k", dtype));
  for (std::int64_t i = 0; i < 2; ++i) c.bias.flat(i) = std::numeric_limits<float>::lowest();
  c.v.flat(0) = 1;
  c.v.flat(1) = 3;
  for (const std::string& entry : every_entry(c.problem)) {
    c.out.flat(0) = 0;
    run(c.args(), entry);
    INFO(entry);
    CHECK(c.out.flat(0) == Approx(2).epsilon(dtype == DType::f32 ? 1e-6 : 0x1p-7));
  }
}
