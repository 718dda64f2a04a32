// Nothing is read or written that does not belong to a tensor, and extra memory stays small.
#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "operations/attention/sampler.hpp"
#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

void check_guarded(const AttentionProblem& problem, std::uint64_t seed) {
  for (Placement placement : {Placement::front, Placement::back}) {
    Case c(problem, seed, placement);
    c.protect_inputs();
    check_every_entry(c);
  }
}

}  // namespace

TEST_CASE("sampled problems between guard pages", "[kernel][long]") {
  std::mt19937_64 random(201);
  for (int i = 0; i < 25; ++i) {
    const AttentionProblem problem = sample(random, kEverything);
    check_guarded(problem, random() % 1000);
  }
}

TEST_CASE("odd sizes between guard pages", "[kernel]") {
  for (std::int64_t d : {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 65, 577}) {
    for (std::int64_t s : {1, 2, 5, 23, 24, 25, 63, 65, 129}) {
      if (d * s > 17000) continue;
      AttentionProblem problem;
      problem.sq = s;
      problem.sk = s + 3;
      problem.d = std::min<std::int64_t>(d, 576);
      problem.dv = d % 40 + 1;
      problem.mask = AttentionProblem::kFullQ | AttentionProblem::kFullK;
      problem.bias = AttentionProblem::kFullK;
      problem.lse = true;
      problem.layout = static_cast<AttentionProblem::Layout>((d + s) % 4);
      for (DType dtype : kFloatTypes) {
        problem.q_dtype = problem.kv_dtype = problem.out_dtype = dtype;
        check_guarded(problem, static_cast<std::uint64_t>(d * s));
      }
    }
  }
}

// Rows of whole cache lines, which a kernel may read in place, up to a last block that is not whole.
TEST_CASE("bf16 keys of 64 or 128 bytes between guard pages", "[kernel][long]") {
  for (const char* keys :
       {"sk=31", "sk=32", "sk=64", "sk=65", "sk=95", "sk=128", "sk=161 causal align=bottom_right",
        "sk=161 causal align=20", "sk=160 window=50,-1 align=40", "sk=160 window=30,30 align=bottom_right",
        "b=5 sk=96 seqlens", "b=5 sk=100 seqlens mask=qk", "b=3 sk=97 ragged_k=191", "b=4 sk=160 page=16 seqlens",
        "b=4 sk=160 page=32 seqlens", "b=4 sk=192 page=48 seqlens causal align=bottom_right",
        "b=4 sk=192 page=64 seqlens window=40,-1 align=bottom_right", "b=4 sk=64 ring seqlens",
        "b=4 sk=100 ring seqlens"}) {
    // ... or in parts of 16 bytes.
    for (const char* sizes : {" hq=1 sq=70 d=64 lse", " hq=6 hk=3 sq=40 d=32 lse", " hq=2 sq=41 d=40 dv=72 lse"})
      check_guarded(typed("attention " + std::string(keys) + sizes, DType::bf16), 4);
  }
}

TEST_CASE("where in a cache line keys begin does not change a bit", "[kernel]") {
  const AttentionProblem problem = typed("attention b=1 hq=2 sq=70 sk=100 d=64 lse", DType::bf16);
  Case c(problem), moved(problem);
  for (std::int64_t shift : {1, 8, 31, 32}) {
    Tensor keys(DType::bf16, Layout(std::vector{c.k.size() + shift}));
    for (std::int64_t i = 0; i < c.k.size(); ++i) keys.flat(shift + i) = c.k.flat(i);
    for (const std::string& entry : every_entry(problem)) {
      run(c.args(), entry);
      AttentionArgs args = moved.args();
      args.kv.k.data = keys.buffer().data() + shift * 2;
      moved.poison_outputs();
      run(args, entry);
      INFO(entry << ", " << shift);
      CHECK(same_bits(c.out, moved.out));
      CHECK(same_bits(c.lse, moved.lse));
    }
  }
}

TEST_CASE("sequences that are empty or one row long between guard pages", "[kernel]") {
  for (const char* text : {"attention b=6 hq=2 sq=9 sk=70 d=24 ragged_q=11 ragged_k=72 lse",
                           "attention b=6 hq=2 sq=1 sk=1 d=24 ragged_q=1 ragged_k=1 lse",
                           "attention b=6 hq=3 sq=5 sk=65 d=20 seqlens lse layout=bhds"}) {
    for (std::uint64_t seed : {1, 2, 3, 4, 5}) {
      for (DType dtype : kFloatTypes) check_guarded(typed(text, dtype), seed);
    }
  }
}

TEST_CASE("a workspace of exactly the planned size is enough", "[kernel][threads][long]") {
  std::mt19937_64 random(202);
  for (int i = 0; i < 10; ++i) {
    Case c(sample(random, kEverything), 5);
    const Reference reference = oracle(c.args());
    for (const std::string& entry : threaded_entries(c.problem)) {
      const Plan plan(c.args(), forced(entry, std::make_shared<ThreadExecutor>(3), 3));
      const Buffer workspace(plan.workspace_bytes(), Placement::back);
      c.poison_outputs();
      plan.run(c.args(), std::span<std::byte>(workspace.data(), workspace.size()));
      const Errors errors = compare(c.args(), reference);
      INFO(entry << ": " << c.problem.to_string() << ": " << describe(errors));
      CHECK(plan.workspace_bytes() % 64 == 0);
      CHECK(errors.ok());
    }
  }
}

// Masked tiles are skipped, so that this takes a moment although the full scores would be 4e9.
TEST_CASE("65536 rows in a sliding window need little memory", "[kernel][slow]") {
  CountingAllocator allocator;
  Case c(typed("attention sq=65536 d=64 causal window=100,-1 lse", each_type()));
  const Reference reference = oracle(c.args(), 7919);
  for (const std::string& entry : usable_entries(c.problem)) {
    if (info_of(entry).phase == Phase::naive) continue;
    ContextOptions options;
    options.kernel = entry;
    options.threads = 2;
    options.allocator = allocator.get();
    allocator.peak_bytes = 0;
    c.poison_outputs();
    attention(c.args(), Context(options));
    const Errors errors = compare(c.args(), reference);
    INFO(entry << ": " << describe(errors));
    CHECK(errors.ok());
    CHECK(allocator.peak_bytes <= 16u << 20);
  }
}
