// Every registry entry against the oracle on sampled problems.
#include <algorithm>
#include <random>

#include "operations/attention/sampler.hpp"
#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

void check_samples(std::uint64_t seed, int count, const SampleOptions& options) {
  std::mt19937_64 random(seed);
  for (int i = 0; i < count; ++i) {
    Case c(sample(random, options), random() % 1000);
    check_every_entry(c);
  }
}

}  // namespace

TEST_CASE("entries are usable here or say why not", "[kernel]") {
  std::size_t usable = 0;
  for (const EntryInfo& entry : entries()) {
    CHECK_FALSE(entry.name.empty());
    CHECK_FALSE(entry.backend.empty());
    if (entry.unusable.empty()) ++usable;
    else WARN("skipped: " << entry.name << ": " << entry.unusable);
  }
  // At least the tiled and the naive kernel of the lowest instruction set.
  CHECK(usable >= 2);
}

// An entry that refused too much would be left out of every test in silence.
TEST_CASE("vector entries take every mix of types, matrix entries those of their arithmetic", "[kernel]") {
  for (DType q : kFloatTypes) {
    for (DType kv : kFloatTypes) {
      for (DType out : kFloatTypes) {
        AttentionProblem problem = AttentionProblem::parse("attention b=1 hq=4 hk=2 sq=32 sk=70 d=24 dv=17 lse");
        problem.q_dtype = q, problem.kv_dtype = kv, problem.out_dtype = out;
        const std::vector<std::string> names = every_entry(problem);
        for (const EntryInfo& entry : entries()) {
          if (entry.operation != Operation::attention || !entry.unusable.empty() || !selected(entry.name)) continue;
          const auto both_are = [&](DType type) { return q == type && kv == type; };
          const auto takes = [&](const std::string& arithmetic) {
            if (arithmetic == "f8e4m3") return false;  // codes only
            if (arithmetic == "bf16") return both_are(DType::bf16);
            if (arithmetic == "f16") return both_are(DType::f16);
            if (entry.isa == "sm90a") return both_are(DType::f32);  // by f16x3, too
            if (arithmetic == "f16x3") return q != DType::f32 && kv != DType::f32;
            return true;
          };
          INFO(entry.name << ": " << problem.to_string());
          CHECK((std::find(names.begin(), names.end(), entry.name) != names.end()) == takes(entry.arithmetic));
        }
        check_every_entry(problem);
      }
    }
  }
}

TEST_CASE("sampled sizes and heads", "[kernel][long]") {
  check_samples(101, 50, {});
}
TEST_CASE("sampled positions", "[kernel][long]") {
  check_samples(102, 50, {.positions = true});
}
TEST_CASE("sampled scores", "[kernel][long]") {
  check_samples(103, 50, {.scores = true});
}
TEST_CASE("sampled lengths", "[kernel][long]") {
  check_samples(104, 50, {.lengths = true});
}
TEST_CASE("sampled layouts", "[kernel][long]") {
  check_samples(105, 40, {.layouts = true});
}
TEST_CASE("sampled types", "[kernel][long]") {
  check_samples(107, 80, {.types = true});
}
TEST_CASE("sampled problems of every kind", "[kernel][slow]") {
  check_samples(106, 200, kEverything);
}

TEST_CASE("every head dimension from 1 to 576 in steps", "[kernel]") {
  for (std::int64_t d = 1; d <= 576; d += d < 40 ? 1 : d < 160 ? 13 : 83) {
    AttentionProblem p;
    p.sq = 9;
    p.sk = 33;
    p.d = d;
    p.dv = 577 - d;
    p.lse = true;
    for (DType dtype : kFloatTypes) {
      p.q_dtype = p.kv_dtype = p.out_dtype = dtype;
      check_every_entry(p, static_cast<std::uint64_t>(d));
    }
  }
}

// Kernels transpose such keys and values a block at a time.
TEST_CASE("few rows over keys and values whose columns are contiguous", "[kernel]") {
  const DType dtype = each_type();
  for (const char* words :
       {"hq=2 sq=1 sk=300 d=64", "hq=4 hk=2 sq=1 sk=77 d=5 dv=40 bias=bhk", "hq=2 sq=9 sk=130 d=40 dv=7",
        "hq=2 sq=3 sk=130 d=24 dv=17 causal align=bottom_right window=50,0",
        "b=2 hq=8 hk=1 sq=2 sk=65 d=80 bias=hqk mask=bk seqlens"})
    for (const Placement placement : {Placement::front, Placement::back}) {
      const std::string text = std::string("attention lse ") + words;
      Case rows(typed(text, dtype), 3, placement), columns(typed(text + " layout=bhds", dtype), 3, placement);
      for (Case* c : {&rows, &columns}) c->protect_inputs();
      AttentionArgs keys = rows.args(), values = rows.args();
      keys.kv.k = columns.args().kv.k, values.kv.v = columns.args().kv.v;
      check_every_entry(rows, keys);
      check_every_entry(rows, values);
      check_every_entry(columns);
    }
  // What pads the last column's vector multiplies no number.
  for (const float sign : {1.f, -1.f}) {
    Case c(typed("attention layout=bhds hq=2 sq=2 sk=70 d=5 dv=3 lse", dtype));
    for (const int64_t i : {0, 1}) c.q.at({0, 1, i, 4}) = 1;
    c.k.at({0, 1, 66, 4}) = sign * HUGE_VALF;
    check_every_entry(c);
  }
}

TEST_CASE("few rows under every modifier", "[kernel]") {
  const DType dtype = each_type();
  for (const char* rows : {"hq=2 sq=1", "hq=4 hk=2 sq=1", "hq=2 sq=3", "hq=3 hk=1 sq=2", "hq=1 sq=16"})
    for (const char* modifiers :
         {"bias=bhqk", "bias=q mask=q", "bias=q scale=-0.2", "mask=hq", "mask=qk scale=0", "bias=k softcap=4",
          "mask=bqk alibi align=bottom_right", "bias=hk causal window=40,0 align=bottom_right", "bias=hq mask=k sinks",
          "bias=qk dropout=0.3"})
      for (const char* keys : {" sk=150 d=8", " sk=70 d=40 dv=24"})
        check_every_entry(typed(std::string("attention lse ") + rows + keys + " " + modifiers, dtype), 5);
}

// Sizes for which tensor cores have kernels of their own, of several tiles and blocks of keys.
TEST_CASE("heads of 129 to 256 columns", "[kernel][long]") {
  for (const char* sizes :
       {"d=129", "d=160", "d=192", "d=200", "d=256", "d=192 dv=128", "d=64 dv=256", "d=256 dv=33", "d=16 dv=130"})
    check_every_type("attention hq=2 hk=1 sq=70 sk=150 causal align=bottom_right lse " + std::string(sizes));
  for (const char* what :
       {"sq=90 sk=170 hq=3 hk=1 alibi softcap=20 sinks align=bottom_right", "sq=150 window=40,9", "sq=40 scale=-0.05",
        "sq=70 sk=99 bias=qk mask=k", "sq=50 sk=80 layout=other", "b=3 hq=2 sq=60 sk=110 ragged_q=130 ragged_k=260",
        "b=2 hq=2 sq=9 sk=160 page=16 seqlens", "b=2 hq=2 sq=9 sk=64 ring seqlens"})
    for (const char* sizes : {" lse d=192", " lse d=250 dv=256"})
      check_every_entry(AttentionProblem::parse("attention " + std::string(what) + sizes));
}

TEST_CASE("entries of different instruction sets agree on long sequences", "[kernel][slow]") {
  Case first(AttentionProblem::parse("attention b=1 hq=2 hk=1 sq=1024 d=128 causal softcap=30 lse"), 7);
  const std::vector<std::string> names = every_entry(first.problem);
  if (names.empty()) return;  // RAPT_TEST_ENTRIES has others
  run(first.args(), names.front());
  for (std::size_t i = 1; i < names.size(); ++i) {
    Case other(first.problem, 7);
    run(other.args(), names[i]);
    double squares = 0, difference = 0;
    for (std::int64_t n = 0; n < first.out.size(); ++n) {
      const double a = first.out.flat(n), b = other.out.flat(n);
      squares += a * a;
      difference += (a - b) * (a - b);
    }
    INFO(names.front() << " against " << names[i]);
    CHECK(difference <= 4e-12 * squares);
  }
}
