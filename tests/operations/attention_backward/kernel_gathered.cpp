// Gradients of gathered keys, on every entry that takes them.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "operations/attention_backward/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// Lists that name row_of(token, entry).
template <class RowOf>
void fill_lists(BackwardCase& c, const RowOf& row_of) {
  c.inputs.counts = Tensor();
  for (std::int64_t i = 0; i < c.inputs.indices.size(); ++i)
    set_index(c.inputs.indices, i, row_of(i / c.problem.sk, i % c.problem.sk));
  for (Tensor* t : {&c.inputs.k, &c.inputs.v})
    for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = std::sin(static_cast<float>(i));
  c.run_forward();
}

/// Keys whose first dv elements are the values.
void share_memory(BackwardCase& c, AttentionBackwardArgs& args) {
  args.kv.v = args.kv.k;
  args.kv.v.shape[3] = c.problem.dv;
}

constexpr const char* kSizes[] = {"b=2 hq=2 sq=1 sk=9 d=32",
                                  "b=3 hq=6 hk=2 sq=5 sk=70 d=40 dv=24",
                                  "hq=5 hk=1 sq=7 sk=33 d=7 dv=5 pool=20",
                                  "b=2 hq=40 hk=2 sq=3 sk=129 d=64 pool=1000",
                                  "hq=2 sq=66 sk=20 d=16 dv=80",
                                  "b=2 hq=36 hk=1 sq=2 sk=600 d=24 pool=9000",
                                  "b=4 hq=3 hk=3 sq=1 sk=530 d=33",
                                  "hq=100 hk=1 sq=1 sk=70 d=128",
                                  "b=2 hq=200 hk=1 sq=4 sk=65 d=64"};

}  // namespace

TEST_CASE("gradients of gathered keys: every kind of list", "[kernel][numbers]") {
  std::size_t n = 0;
  for (const char* sizes : kSizes) {
    for (const char* words : {"dlse", "sinks dsinks softcap=3", "scale=-0.3 layout=other", "layout=bshd",
                              "layout=bhds sinks dsinks dlse", "grads=q", "grads=k", "grads=v", "grads=qk softcap=9"}) {
      constexpr std::uint64_t kSeeds[] = {1, 2, 3, 5};  // gaps, counts, pools, types of indices: in turn
      check_backward(AttentionBackwardProblem::parse("attention_backward gathered " + std::string(sizes) + " " +
                                                     std::string(words)),
                     kSeeds[n++ % 4]);
    }
  }
}

TEST_CASE("gradients of gathered keys: every type", "[kernel][numbers]") {
  std::uint64_t n = 0;
  for (const char* sizes : kSizes) {
    for (DType dtype : {DType::bf16, DType::f16})
      for (const bool all : {true, false}) {
        const std::uint64_t seed = 1 + n++ % 3;
        if (all) check_backward(typed_backward("gathered dlse sinks dsinks " + std::string(sizes), dtype), seed);
        else check_backward(typed_backward("gathered " + std::string(sizes), dtype), seed, DType::f32);
      }
  }
  for (const char* words : {"q=f16 kv=bf16", "kv=f16 out=bf16", "dtype=bf16 dout=f32"})
    check_backward(AttentionBackwardProblem::parse("attention_backward gathered b=3 hq=6 hk=2 sq=5 sk=70 d=32 dv=16 " +
                                                   std::string(words)));
}

TEST_CASE("gradients of gathered keys: latent attention, whose values are columns of the keys", "[kernel][long]") {
  for (DType dtype : kFloatTypes) {
    for (const char* sizes :
         {"hq=16 hk=1 sq=3 sk=70", "b=2 hq=16 hk=1 sq=2 sk=300 pool=500", "hq=128 hk=1 sq=3 sk=65"}) {
      BackwardCase c(typed_backward("gathered d=576 dv=512 sinks dsinks " + std::string(sizes), dtype), 2);
      // The values' memory is that of the keys, in the forward too.
      c.inputs.v = Tensor();
      AttentionArgs forward = c.inputs.args();
      forward.kv.v = forward.kv.k, forward.kv.v.shape[3] = c.problem.dv;
      const Reference reference = oracle(forward);
      for (std::int64_t i = 0; i < c.inputs.out.size(); ++i)
        c.inputs.out.flat(i) = static_cast<float>(reference.out[static_cast<std::size_t>(i)]);
      for (std::int64_t i = 0; i < c.inputs.lse.size(); ++i)
        c.inputs.lse.flat(i) = static_cast<float>(reference.lse[static_cast<std::size_t>(i)]);
      AttentionBackwardArgs args = c.args();
      share_memory(c, args);
      const BackwardReference wanted = oracle_backward(args);
      for (const std::string& entry : every_entry(c.problem)) {
        INFO(entry << ": " << c.problem.to_string());
        c.clear();
        run(args, forced(entry));
        const Verdict verdict = verdict_of(args, wanted);
        INFO(describe(verdict.errors));
        CHECK(verdict.violation == "");
      }
    }
  }
}

TEST_CASE("gradients of gathered keys: many tokens list the same row, often", "[kernel][long]") {
  // Equal terms: a sum that were rounded token by token would be off by too much.
  for (const char* sizes : {"hq=1 sq=700 sk=9 d=8 pool=4", "hq=4 hk=2 sq=400 sk=40 d=16 pool=6",
                            "b=3 hq=2 hk=1 sq=150 sk=3 d=24 pool=5 dlse"}) {
    for (DType dtype : kFloatTypes) {
      BackwardCase c(typed_backward("gathered " + std::string(sizes), dtype), 2);
      fill_lists(c, [](std::int64_t token, std::int64_t j) { return j % 3 == 2 ? token % 3 : 1; });
      INFO(c.problem.to_string());
      check_backward(c);
      for (Tensor* t : {&c.inputs.q, &c.dout})
        for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = 0.7f;
      c.run_forward();
      check_backward(c, false);
    }
  }
}

TEST_CASE("gradients of gathered keys: values that are not finite reach the tokens that list them", "[kernel][long]") {
  for (const char* sizes : {"b=2 hq=2 sq=9 sk=40 d=16", "hq=40 hk=1 sq=5 sk=150 d=64", "hq=4 hk=1 sq=3 sk=600 d=32"}) {
    for (DType dtype : kFloatTypes) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const char where : {'k', 'v', 'q', 'd'}) {
          if (std::isinf(bad) && (where == 'k' || where == 'q')) continue;  // half of their scores would be -inf
          BackwardCase c(typed_backward("gathered " + std::string(sizes), dtype), 3);
          fill_lists(c, [&](std::int64_t token, std::int64_t j) {  // every second token does not list row 3
            const std::int64_t row = j * 7 % c.problem.sk;
            return token % 2 == 1 && row == 3 ? -1 : row;
          });
          Tensor& t = where == 'k' ? c.inputs.k : where == 'v' ? c.inputs.v : where == 'q' ? c.inputs.q : c.dout;
          t.at({0, 0, where == 'k' || where == 'v' ? 3 : 1, 5}) = bad;
          c.run_forward();
          INFO(where << " " << bad << ": " << c.problem.to_string());
          check_backward(c);
        }
      }
    }
  }
}

TEST_CASE("gradients of gathered keys: lists of all keys give what dense keys give", "[kernel][long]") {
  for (DType dtype : kFloatTypes) {
    for (const char* sizes :
         {"b=2 hq=4 hk=2 sq=9 sk=70 d=32", "hq=36 hk=1 sq=3 sk=530 d=64", "hq=2 sq=130 sk=40 d=16"}) {
      BackwardCase c(typed_backward("gathered dlse " + std::string(sizes), dtype), 1);
      const std::int64_t n = c.problem.sk;
      std::mt19937_64 random(611);
      std::vector<std::int64_t> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      fill_lists(c, [&](std::int64_t, std::int64_t j) {
        if (j == 0) std::shuffle(order.begin(), order.end(), random);
        return order[static_cast<std::size_t>(j)];
      });
      const AttentionBackwardArgs args = c.args();
      AttentionBackwardArgs dense = args;
      dense.kv = KvSource::strided(args.kv.k, args.kv.v);
      const BackwardReference reference = oracle_backward(dense);
      for (const std::string& entry : every_entry(c.problem)) {
        c.clear();
        run(args, forced(entry));
        const Verdict verdict = verdict_of(args, reference);
        INFO(entry << ": " << c.problem.to_string() << ": " << describe(verdict.errors));
        CHECK(verdict.violation == "");
      }
    }
  }
}

TEST_CASE("gradients of gathered keys: without any key", "[kernel]") {
  for (const char* words : {"", " sinks dsinks dlse"}) {
    check_backward(AttentionBackwardProblem::parse("attention_backward b=2 hq=4 sq=3 sk=0 d=16 gathered pool=5" +
                                                   std::string(words)));
    check_backward(
        AttentionBackwardProblem::parse("attention_backward b=2 hq=4 sq=3 sk=0 d=16 gathered" + std::string(words)));
    BackwardCase c(AttentionBackwardProblem::parse("attention_backward b=2 hq=40 hk=2 sq=3 sk=9 d=16 gathered" +
                                                   std::string(words)));
    fill_lists(c, [](std::int64_t, std::int64_t j) { return -1 - j % 2; });
    check_backward(c);
  }
  // No token, but rows whose gradients are 0.
  for (const char* sizes : {"b=2 hq=4 hk=2 sq=0 sk=7 d=16 pool=9", "b=0 hq=4 hk=2 sq=3 sk=7 d=16 pool=9",
                            "hq=0 hk=2 sq=2 sk=7 d=16 pool=200"})
    for (const std::uint64_t seed : {1, 2})
      check_backward(AttentionBackwardProblem::parse("attention_backward gathered " + std::string(sizes)), seed);
}

TEST_CASE("gradients of gathered keys: between guard pages", "[kernel][long]") {
  std::size_t turn = 0;
  for (const char* sizes : kSizes) {
    for (const char* type : {"", "dtype=bf16", "dtype=bf16 layout=other", "dtype=f16 layout=bhds sinks dsinks"}) {
      for (Placement placement : {Placement::front, Placement::back}) {
        if (turn++ % 3 != 0) continue;
        BackwardCase c(AttentionBackwardProblem::parse("attention_backward gathered " + std::string(sizes) + " " +
                                                       std::string(type)),
                       3, placement);
        c.protect_inputs();
        check_backward(c);
      }
    }
  }
}

TEST_CASE("gradients of gathered keys: a sequence alone gives the bits it gives in a batch", "[kernel]") {
  for (const char* sizes : {"hq=6 hk=2 sq=3 sk=600", "hq=40 hk=1 sq=4 sk=130 pool=700"}) {
    const AttentionBackwardProblem problem = typed_backward("b=3 d=32 gathered " + std::string(sizes), DType::bf16);
    BackwardCase batch(problem, 3), single(problem, 3);
    REQUIRE(batch.inputs.k.layout().shape[0] == 3);
    for (const std::string& entry : every_entry(problem)) {
      const Forced context = forced(entry);
      batch.clear(), single.clear();
      batch.run(context);
      for (std::int64_t n = 0; n < problem.b; ++n) {
        AttentionBackwardArgs args = single.args();
        for (TensorView* view :
             {&args.q, &args.kv.k, &args.kv.v, &args.kv.indices, &args.kv.counts, &args.out, &args.lse, &args.dout})
          if (*view) *view = slice(*view, 0, n, 1);
        for (MutableTensorView* view : {&args.dq, &args.dk, &args.dv}) *view = slice(*view, 0, n, 1);
        attention_backward(args, context);
      }
      INFO(entry << ": " << problem.to_string());
      CHECK(bits_of(batch) == bits_of(single));
    }
  }
}

TEST_CASE("gradients of gathered keys: executors and thread counts do not change a bit", "[kernel][numbers]") {
  std::uint64_t seed = 2;  // a pool of all sequences, or, with 3, pools of their own
  int runs = 0;            // executors take turns at each number of threads
  for (const char* words : {"hq=1 sq=1 sk=2064 d=64", "hq=16 hk=1 sq=9 sk=400 d=576 dv=512 pool=3000",
                            "b=2 hq=4 hk=2 sq=90 sk=70 d=32", "b=3 hq=4 hk=2 sq=12 sk=600 d=40 pool=40 sinks dsinks"}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      BackwardCase c(typed_backward("gathered " + std::string(words), dtype), seed = 5 - seed, Placement::heap, {},
                     BackwardCase::Forward::library);
      for (const std::string& entry : threaded_entries(c.problem)) {
        const auto bits = [&](const Context& context) {
          c.clear();
          c.run(context);
          return bits_of(c);
        };
        const auto serial = bits(forced(entry, serial_executor(), 1));
        for (const auto& executor : all_executors()) {
          const int threads = std::array{2, 3, 5}[static_cast<std::size_t>(runs++ % 3)];
          INFO(entry << " on " << executor->name() << " with " << threads << ": " << c.problem.to_string());
          CHECK(bits(forced(entry, executor, threads)) == serial);
        }
      }
    }
  }
}

TEST_CASE("gradients of gathered keys: tokens do not overtake each other where one skips a part of the pool",
          "[kernel][threads][numbers]") {
  // Steps of 128 keys end far from where the next ones begin, in the first and the last rows of the pool; other tokens
  // have the rows between.
  BackwardCase c(typed_backward("gathered hq=4 hk=1 sq=40 sk=256 d=576 dv=512 pool=4000", DType::f32), 1,
                 Placement::heap, {}, BackwardCase::Forward::library);
  fill_lists(c, [](std::int64_t token, std::int64_t j) {
    if (token % 2 == 0) return j < 128 ? j % 60 : 3900 + j % 60;
    return 1000 + j % 128 * 15;
  });
  for (const std::string& entry : threaded_entries(c.problem)) {
    c.clear();
    c.run(forced(entry, serial_executor(), 1));
    const auto serial = bits_of(c);
    const auto threads = std::make_shared<ThreadExecutor>(5);
    for (int run = 0; run < 3; ++run) {
      INFO(entry);
      c.clear();
      c.run(forced(entry, threads, 5));
      CHECK(bits_of(c) == serial);
    }
  }
}
