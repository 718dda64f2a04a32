// Gathered keys: a list of keys for each query token, on every entry that takes them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "support/bits.hpp"
#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// Without what makes lists shorter: fills all of them with rows that some list has.
void fill_lists(Case& c) {
  const std::int64_t n = c.problem.sk;
  c.counts = Tensor();
  for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, i % n * 7 % n);
  for (Tensor* t : {&c.k, &c.v})
    for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = std::sin(static_cast<float>(i));
}

/// Keys whose first dv elements are the values.
AttentionArgs with_values_in_keys(Case& c) {
  AttentionArgs args = c.args();
  args.kv.v = args.kv.k;
  args.kv.v.shape[3] = c.problem.dv;
  return args;
}

constexpr const char* kSizes[] = {
    "b=2 hq=2 sq=1 sk=9 d=32",         "b=3 hq=6 hk=2 sq=5 sk=70 d=40 dv=24", "hq=5 hk=1 sq=7 sk=33 d=7 dv=5",
    "b=2 hq=40 hk=2 sq=3 sk=129 d=64", "hq=2 sq=66 sk=20 d=16 dv=80",         "b=2 hq=36 hk=1 sq=2 sk=600 d=24",
    "b=4 hq=3 hk=3 sq=1 sk=530 d=33",  "hq=100 hk=1 sq=1 sk=70 d=128",        "b=2 hq=64 hk=2 sq=20 sk=65 d=64"};

}  // namespace

TEST_CASE("gathered keys: every kind of list", "[kernel][long]") {
  for (const char* sizes : kSizes) {
    for (const char* words : {"", "sinks softcap=3", "scale=-0.3 layout=other", "layout=bshd", "layout=bhds sinks"}) {
      for (std::uint64_t seed : {1, 2, 3, 4, 5, 6})  // gaps, counts, pools, types of indices
        check_every_entry(
            AttentionProblem::parse("attention gathered lse " + std::string(sizes) + " " + std::string(words)), seed);
    }
  }
}

TEST_CASE("gathered keys: every type", "[kernel][long]") {
  for (const char* sizes : kSizes) {
    for (DType dtype : {DType::bf16, DType::f16})
      for (std::uint64_t seed : {1, 2, 3})
        check_every_entry(typed("attention gathered lse sinks " + std::string(sizes), dtype), seed);
  }
  for (const char* type :
       {"kv=i8 groups=1", "kv=i8 groups=4 zeros", "kv=i4x2 groups=2 zeros", "kv=f8e4m3", "kv=f8e5m2 groups=1",
        "q=bf16 out=bf16 kv=i8 groups=1", "q=f16 kv=bf16", "kv=f16 out=bf16"}) {
    for (const char* sizes : {"b=3 hq=6 hk=2 sq=5 sk=70 d=32 dv=16", "b=2 hq=40 hk=2 sq=3 sk=129 d=64"}) {
      for (std::uint64_t seed : {1, 2, 3, 4, 5, 6})
        check_every_entry(
            AttentionProblem::parse("attention gathered lse " + std::string(sizes) + " " + std::string(type)), seed);
    }
  }
}

TEST_CASE("gathered keys: latent attention, whose values are columns of the keys", "[kernel][long]") {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const char* sizes : {"hq=16 hk=1 sq=2 sk=70", "b=2 hq=16 hk=1 sq=1 sk=1100", "hq=128 hk=1 sq=3 sk=65",
                              "hq=128 hk=1 sq=1 sk=600"}) {
      Case c(typed("attention gathered d=576 dv=512 lse sinks " + std::string(sizes), dtype), 2);
      check_every_entry(c, with_values_in_keys(c));
    }
  }
}

TEST_CASE("gathered keys: values that are not finite reach the tokens that list them", "[kernel][long]") {
  for (const char* sizes : {"b=2 hq=2 sq=9 sk=40 d=16", "hq=40 hk=1 sq=5 sk=150 d=64", "hq=4 hk=1 sq=3 sk=600 d=32"}) {
    for (DType dtype : kFloatTypes) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (bool in_v : {false, true}) {
          Case c(typed("attention gathered lse " + std::string(sizes), dtype), 3);
          fill_lists(c);
          for (std::int64_t i = 0; i < c.indices.size(); i += c.problem.sk)  // of every second token
            for (std::int64_t j = 0; j < c.problem.sk && i / c.problem.sk % 2; ++j)
              if (index_at(c.indices, i + j) == 3) set_index(c.indices, i + j, -1);
          (in_v ? c.v : c.k).at({0, 0, 3, 5}) = bad;
          const Reference reference = oracle(c.args());
          REQUIRE(std::any_of(reference.out.begin(), reference.out.end(), [](double x) { return !std::isfinite(x); }));
          REQUIRE(std::any_of(reference.out.begin(), reference.out.end(), [](double x) { return std::isfinite(x); }));
          check_every_entry(c);
        }
      }
    }
  }
}

TEST_CASE("gathered keys: lists of all keys give what dense keys give", "[kernel][long]") {
  for (DType dtype : kFloatTypes) {
    for (const char* sizes :
         {"b=2 hq=4 hk=2 sq=9 sk=70 d=32", "hq=36 hk=1 sq=3 sk=530 d=64", "hq=2 sq=130 sk=40 d=16"}) {
      Case c(typed("attention gathered lse " + std::string(sizes), dtype), 1);
      const std::int64_t n = c.problem.sk;
      fill_lists(c);
      std::mt19937_64 random(611);
      std::vector<std::int64_t> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      for (std::int64_t i = 0; i < c.indices.size(); ++i) {
        if (i % n == 0) std::shuffle(order.begin(), order.end(), random);
        set_index(c.indices, i, order[static_cast<std::size_t>(i % n)]);
      }
      const AttentionArgs args = c.args();
      AttentionArgs dense = args;
      dense.kv = KvSource::strided(slice(args.kv.k, 2, 0, n), slice(args.kv.v, 2, 0, n));
      const Reference reference = oracle(dense);
      for (const std::string& entry : every_entry(c.problem)) {
        run(c, args, forced(entry));
        const Errors errors = compare(args, reference);
        INFO(entry << ": " << c.problem.to_string() << ": " << describe(errors));
        CHECK(errors.ok());
      }
    }
  }
}

TEST_CASE("gathered keys: one token gives the bits of the same keys in one piece", "[kernel]") {
  for (DType dtype : kFloatTypes) {
    for (const char* sizes :
         {"b=3 hq=4 hk=2 sq=1 sk=70 d=32", "hq=36 hk=1 sq=1 sk=1100 d=64", "hq=2 sq=1 sk=600 d=40"}) {
      Case c(typed("attention gathered lse " + std::string(sizes), dtype), 1);
      fill_lists(c);
      for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, i % c.problem.sk);
      const AttentionArgs args = c.args();
      AttentionArgs dense = args;
      dense.kv = KvSource::strided(slice(args.kv.k, 2, 0, c.problem.sk), slice(args.kv.v, 2, 0, c.problem.sk));
      for (const std::string& entry : every_entry(c.problem)) {
        INFO(entry << ": " << c.problem.to_string());
        const Forced context = forced(entry);
        CHECK(run(c, args, context) == run(c, dense, context));
      }
    }
  }
}

TEST_CASE("gathered keys: entries that stand for no key change no bit", "[kernel]") {
  for (const char* sizes : kSizes) {
    Case c(typed("attention gathered lse " + std::string(sizes), DType::bf16), 2);
    const std::int64_t n = c.problem.sk, tokens = c.indices.size() / n;
    // The same lists with all gaps at their ends.
    Tensor packed(DType::i64, Layout(std::vector<std::int64_t>{c.problem.b, c.problem.sq, n}));
    std::int64_t gaps = 0;
    for (std::int64_t token = 0; token < tokens; ++token) {
      std::int64_t at = token * n;
      const std::int64_t count = c.counts ? index_at(c.counts, token) : n;
      for (std::int64_t j = 0; j < count; ++j) {
        if (const std::int64_t row = index_at(c.indices, token * n + j); row >= 0) {
          gaps += at != token * n + j;
          packed.flat<std::int64_t>(at++) = row;
        }
      }
      while (at < (token + 1) * n) packed.flat<std::int64_t>(at++) = -1;
    }
    if (tokens > 4) REQUIRE(gaps > 0);
    const AttentionArgs args = c.args();
    AttentionArgs without = args;
    without.kv.indices = packed.view(), without.kv.counts = {};
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      const Forced context = forced(entry);
      CHECK(run(c, args, context) == run(c, without, context));
    }
  }
}

TEST_CASE("gathered keys: without any key", "[kernel]") {
  for (const char* words : {"", " sinks"}) {
    check_every_entry(AttentionProblem::parse("attention b=2 hq=4 sq=3 sk=0 d=16 gathered lse" + std::string(words)));
    Case c(AttentionProblem::parse("attention b=2 hq=40 hk=2 sq=3 sk=9 d=16 gathered lse" + std::string(words)), 1);
    for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, -1 - i % 2);
    check_every_entry(c);
    AttentionArgs args = c.args();
    args.kv.k.shape[2] = args.kv.v.shape[2] = 0;  // no rows at all
    check_every_entry(c, args);
  }
}

TEST_CASE("gathered keys: between guard pages", "[kernel][long]") {
  for (const char* sizes : kSizes) {
    for (const char* type : {"", "dtype=bf16", "dtype=bf16 layout=other", "dtype=f16 layout=bhds"}) {
      for (Placement placement : {Placement::front, Placement::back}) {
        Case c(AttentionProblem::parse("attention gathered lse " + std::string(sizes) + " " + std::string(type)), 3,
               placement);
        c.protect_inputs();
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("gathered keys: a sequence alone gives the bits it gives in a batch", "[kernel]") {
  for (const char* sizes : {"hq=6 hk=2 sq=3 sk=1100", "hq=40 hk=1 sq=4 sk=130", "hq=128 hk=1 sq=1 sk=700"}) {
    const AttentionProblem problem = typed("attention b=5 d=32 gathered lse " + std::string(sizes), DType::bf16);
    Case batch(problem, 3), single(problem, 3);
    REQUIRE(batch.k.layout().shape[0] == 5);
    for (const std::string& entry : every_entry(problem)) {
      const Forced context = forced(entry);
      batch.poison_outputs(), single.poison_outputs();
      run(batch.args(), context);
      for (std::int64_t n = 0; n < problem.b; ++n) {
        AttentionArgs args = batch.args();
        for (TensorView* view : {&args.q, &args.kv.k, &args.kv.v, &args.kv.indices, &args.kv.counts})
          if (*view) *view = slice(*view, 0, n, 1);
        args.out = slice(single.out.mutable_view(), 0, n, 1);
        args.lse = slice(single.lse.mutable_view(), 0, n, 1);
        run(args, context);
      }
      INFO(entry << ": " << problem.to_string());
      CHECK(same_bits(batch.out, single.out));
      CHECK(same_bits(batch.lse, single.lse));
    }
  }
}

TEST_CASE("gathered keys: executors and thread counts do not change a bit", "[kernel][threads][numbers]") {
  for (const char* words :
       {"hq=1 sq=1 sk=2064 d=64", "hq=16 hk=1 sq=1 sk=1600 d=576 dv=512", "hq=128 hk=1 sq=2 sk=1100 d=64",
        "b=2 hq=4 hk=2 sq=90 sk=70 d=32", "b=2 hq=40 hk=1 sq=30 sk=140 d=64"}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const AttentionProblem problem = typed("attention gathered lse " + std::string(words), dtype);
      Case c(problem, 3);
      for (const std::string& entry : threaded_entries(problem)) {
        const Result serial = run(c, c.args(), forced(entry));
        for (const auto& executor : all_executors()) {
          for (int threads : {2, 4}) {
            INFO(entry << " on " << executor->name() << " with " << threads << ": " << problem.to_string());
            CHECK(run(c, c.args(), forced(entry, executor, threads)) == serial);
          }
        }
      }
    }
  }
}
