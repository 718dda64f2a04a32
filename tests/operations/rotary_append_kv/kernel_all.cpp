// rotary_append_kv on every entry: against float64, on threads, and beside append_kv.
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "rapt/plan.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

// Every way to rotate, every kind of cache and every type, sizes that leave remainders.
const std::vector<std::string> kProblems = {
    "rotary_append_kv b=2 hk=2 n=3 sk=9 d=8 hq=4",
    "rotary_append_kv b=3 hk=2 n=5 sk=40 d=33 dv=17 hq=3 rotary=22",
    "rotary_append_kv b=3 hk=2 n=5 sk=40 d=70 hq=3 rotary=46 offset=24 interleaved norm",
    "rotary_append_kv b=3 hk=1 n=7 sk=20 d=64 ragged=11 hq=2 half rows",
    "rotary_append_kv b=3 hk=2 n=9 sk=64 d=40 page=16 hq=2 interleaved half positions",
    "rotary_append_kv b=4 hk=2 n=6 sk=24 d=20 dv=12 ragged=13 page=1 hq=2 positions norm plus_one",
    "rotary_append_kv b=2 hk=2 n=17 sk=5 d=24 ring hq=2 rows interleaved",
    "rotary_append_kv b=3 hk=2 n=4 sk=6 d=16 hq=2 table=f16 norm",
    "rotary_append_kv b=3 hk=2 n=4 sk=6 d=2 rotary=2",
    "rotary_append_kv b=2 hk=1 n=3 sk=9 d=576 dv=130 hq=1 rotary=2 offset=574 norm",
    "rotary_append_kv b=0 hk=2 n=3 sk=9 d=8 hq=2",
    "rotary_append_kv b=2 hk=0 n=3 sk=9 d=8 hq=2",
    "rotary_append_kv b=2 hk=2 n=0 sk=9 d=8 hq=2",
    "rotary_append_kv b=2 hk=2 n=5 sk=0 d=40 hq=3 rotary=24 no_cache norm plus_one",
    "rotary_append_kv b=3 hk=1 n=5 sk=0 d=40 ragged=9 hq=3 rotary=24 no_cache positions interleaved",
};
const std::vector<std::string> kQuantized = {
    "rotary_append_kv kv=i8 b=2 hk=2 n=5 sk=20 d=24 page=4 k_groups=3 v_groups=1 zeros hq=2 norm",
    "rotary_append_kv kv=i8 b=3 hk=2 n=5 sk=11 d=24 groups=4 given_scales hq=2",
    "rotary_append_kv kv=i4x2 b=3 hk=1 n=5 sk=16 d=68 ragged=9 page=8 groups=2 zeros rotary=20 interleaved",
    "rotary_append_kv kv=f8e4m3 b=2 hk=2 n=5 sk=11 d=38 dv=5 hq=2 half",
    "rotary_append_kv kv=f8e5m2 b=2 hk=2 n=9 sk=4 d=36 ring groups=2 hq=1 rows norm",
    "rotary_append_kv kv=f8e4m3 b=2 hk=1 n=5 sk=16 d=45 dv=40 page=4 k_groups=5 v_groups=5 tail=5 tail_dtype=bf16 "
    "values_are_keys hq=2 rotary=4 offset=41",
    "rotary_append_kv kv=i8 b=3 hk=2 n=5 sk=11 d=29 dv=12 ragged=9 groups=3 tail=17 tail_dtype=f16 hq=2 rotary=28",
};

std::vector<RotaryAppendKvProblem> problems() {
  std::vector<RotaryAppendKvProblem> all;
  for (const DType dtype : kFloatTypes)
    for (const auto* texts : {&kProblems, &kQuantized})
      for (const std::string& text : *texts) {
        RotaryAppendKvProblem& p = all.emplace_back(RotaryAppendKvProblem::parse(text));
        p.new_dtype = p.q_dtype = p.out_dtype = dtype;
        if (texts == &kProblems) p.kv_dtype = dtype;
        all.push_back(p);  // and results of another type
        all.back().out_dtype = dtype == DType::f32 ? DType::bf16 : DType::f32;
        if (texts == &kProblems && !p.no_cache) all.back().kv_dtype = all.back().out_dtype;
      }
  return all;
}

}  // namespace

TEST_CASE("rotary_append_kv: against float64, and nothing outside of the tensors is touched", "[kernel]") {
  std::uint64_t seed = 0;
  for (const RotaryAppendKvProblem& problem : problems()) {
    ++seed;
    for (const std::string& entry : every_entry(problem)) {
      INFO(entry << ": " << problem.to_string() << ", seed " << seed);
      RotaryCase c(problem, seed, seed % 2 ? Placement::front : Placement::back,
                   seed % 5 < 2 ? Spacing::gaps : Spacing::dense);
      REQUIRE(RotaryAppendKvProblem::of(c.args()).to_string() == [&] {
        RotaryAppendKvProblem p = problem;
        p.norm = c.q_norm || c.k_norm;
        if (p.hq == 0) p.q_dtype = p.new_dtype;
        if (p.hq == 0 && !p.no_cache) p.out_dtype = p.new_dtype;
        return p.to_string();
      }());
      c.protect_inputs();
      c.clear();
      c.run(forced(entry));
      REQUIRE(c.verdict().violation == "");
    }
  }
}

TEST_CASE("rotary_append_kv: 1 to 16 threads write the same bits", "[kernel]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words :
       {"new=bf16 kv=i8 b=5 hk=2 n=60 sk=100 d=64 page=10 groups=2 hq=4 norm",
        "b=3 hk=1 n=150 sk=200 d=64 ragged=200 hq=3", "b=2 hk=2 n=90 sk=0 d=64 no_cache hq=4 rows"}) {
    RotaryCase c(RotaryAppendKvProblem::parse("rotary_append_kv " + std::string(words)), 4);
    for (const std::string& entry : threaded_entries(c.problem)) {
      const std::vector<std::byte> wanted = bits_on(c, forced(entry));
      for (const int threads : {1, 2, 3, 7, 16}) {
        INFO(entry << " on " << threads << ": " << words);
        CHECK((bits_on(c, forced(entry, executor, threads)) == wanted));
      }
    }
  }
}

// What is appended is what append_kv makes of keys that were rotated before, in fp32.
TEST_CASE("rotary_append_kv: the cache is that of append_kv", "[kernel]") {
  for (const char* words :
       {"kv=i8 b=3 hk=2 n=9 sk=64 d=40 page=16 groups=4 zeros", "kv=bf16 b=3 hk=2 n=9 sk=5 d=40 ring",
        "kv=i4x2 b=3 hk=2 n=5 sk=20 d=64 groups=2", "kv=f8e4m3 b=4 hk=2 n=5 sk=20 d=64 ragged=11 groups=1"}) {
    const RotaryAppendKvProblem p =
        RotaryAppendKvProblem::parse("rotary_append_kv norm rotary=32 " + std::string(words));
    for (const std::string& entry : every_entry(p)) {
      if (device_of(entry) != DeviceType::cpu) continue;
      INFO(entry << ": " << words);
      RotaryCase c(p, 7);
      const std::vector<std::byte> wanted = bits_on(c, forced(entry));
      RotaryAppendKvArgs rotated = c.args();
      Tensor k(DType::f32, c.append.k.fresh.layout());
      rotated.append.cache = {}, rotated.append.v_new = {}, rotated.k_out = k.mutable_view();
      rotary_append_kv(rotated, forced(entry));
      c.clear();
      AppendKvArgs append = c.append.args();
      append.k_new = k.view();
      append_kv(append);
      CHECK((bits_of(c.append) == wanted));
    }
  }
}

TEST_CASE("rotary_append_kv: NaN and Inf reach their pairs, with norms their rows", "[kernel]") {
  for (const bool interleaved : {false, true})
    for (const bool norm : {false, true})
      for (const float bad : {NAN, INFINITY}) {
        RotaryAppendKvProblem p =
            RotaryAppendKvProblem::parse("rotary_append_kv b=1 hk=1 n=2 sk=0 d=40 rotary=32 no_cache hq=2");
        p.interleaved = interleaved, p.norm = norm;
        for (const std::string& entry : every_entry(p)) {
          RotaryCase c(p, 4);
          c.clear();
          c.q.at({0, 1, 1, 3}) = bad;
          c.run(forced(entry));
          for (int64_t h = 0; h < 2; ++h)
            for (int64_t t = 0; t < 2; ++t)
              for (int64_t channel = 0; channel < 40; ++channel) {
                const bool is_pair = channel == 3 || channel == (interleaved ? 2 : 19);
                INFO(entry << " " << interleaved << norm << bad << ": " << h << " " << t << " " << channel);
                const float x = c.q_out.at({0, h, t, channel});
                const bool reached = h == 1 && t == 1 && (norm ? std::isnan(bad) || is_pair : is_pair);
                CHECK(std::isfinite(x) == !reached);
              }
          CHECK(std::isfinite(c.k_out.flat(0)));
        }
      }
}

TEST_CASE("rotary_append_kv: verdicts see what is wrong", "[kernel]") {
  RotaryCase c(RotaryAppendKvProblem::parse("rotary_append_kv b=2 hk=2 n=3 sk=9 d=16 hq=2 norm"), 4, Placement::heap,
               Spacing::gaps);
  const auto violation = [&](const auto& spoil) {
    c.clear();
    c.run(Context());
    REQUIRE(c.verdict().violation == "");
    spoil();
    return c.verdict().violation;
  };
  CHECK(violation([&] { c.q_out.flat(5) *= 1.00001f; }) != "");
  CHECK(violation([&] {
          for (int64_t i = 0; i < c.append.k.cache.size(); ++i)
            if (std::isfinite(c.append.k.cache.flat(i))) c.append.k.cache.flat(i) *= 1.00001f;
        }) != "");
  CHECK(violation([&] { REQUIRE(c.q_out.spoil_gap()); }) != "");
}
