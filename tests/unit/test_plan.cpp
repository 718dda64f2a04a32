// Plans: pure, small, and chosen as asked.
#include <random>

#include "operations/attention/sampler.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

Plan plan_of(const std::string& text, const Context& context) {
  return Plan(AttentionProblem::parse(text), context);
}

bool tiled(const std::string& entry) {
  return info_of(entry).phase != Phase::naive;
}

/// Whether this machine has AMX, or the build a model of it; says so where it has not.
bool has_amx() {
  for (const std::string& entry : usable_entries(AttentionProblem::parse("attention dtype=bf16 sq=64 d=32")))
    if (info_of(entry).isa == "amx") return true;
  WARN("skipped: neither AMX here nor its model");
  return false;
}

/// Whether the problem goes to attention on AMX with this arithmetic.
bool runs_on_amx(const std::string& text, std::string_view arithmetic) {
  const EntryInfo entry = info_of(plan_of(text, Context()).entry());
  return entry.isa == "amx" && entry.arithmetic == arithmetic;
}

/// What every entry of those types takes.
AttentionProblem sampled(std::mt19937_64& random) {
  AttentionProblem problem = sample(random, kEverything);
  problem.dropout = 0;
  return problem;
}

}  // namespace

TEST_CASE("plan: the same problem gives the same plan, with or without tensors", "[unit]") {
  std::mt19937_64 random(401);
  for (const std::string& entry : usable_entries()) {
    const Context context = forced(entry, tbb_executor(), 2);
    for (int i = 0; i < 20; ++i) {
      const AttentionProblem p = sampled(random);
      Case c(p, 5);
      const Plan first(p, context), second(p, context), from_tensors(c.args(), context);
      INFO(entry << ": " << p.to_string());
      CHECK(first.explain() == second.explain());
      CHECK(first.entry() == entry);
      CHECK(first.backend() == "cpu");
      CHECK(first.threads() >= 1);
      CHECK(first.threads() <= 2);
      CHECK(first.work_items() >= 1);
      CHECK(from_tensors.entry() == entry);
      CHECK(from_tensors.workspace_bytes() == first.workspace_bytes());
      CHECK(from_tensors.threads() == first.threads());
      CHECK(from_tensors.work_items() == first.work_items());
    }
  }
}

TEST_CASE("plan: a workspace for the largest problem is enough for smaller ones", "[unit]") {
  std::mt19937_64 random(402);
  for (int i = 0; i < 400; ++i) {
    AttentionProblem largest = sample(random, kEverythingCached);
    if (i % 2 == 0) largest.b *= 5, largest.sq *= 9, largest.sk *= 30;  // several items, parts of keys
    if (largest.ragged_q >= 0) largest.ragged_q = largest.b * largest.sq;
    if (largest.ragged_k >= 0) largest.ragged_k = largest.b * largest.sk;
    if (largest.page_size > 0)
      largest.sk = (largest.sk + largest.page_size - 1) / largest.page_size * largest.page_size;
    if (largest.align == AttentionProblem::Align::none && !largest.gathered)
      largest.align = AttentionProblem::Align::bottom_right;
    ContextOptions options;
    options.executor = std::make_shared<ThreadExecutor>(i % 3 == 0 ? 1 : 5);
    const Context context(options);
    const std::size_t bytes = max_workspace_bytes(largest, context);
    std::size_t most = Plan(largest, context).workspace_bytes();
    for (int j = 0; j < 20; ++j) {
      AttentionProblem p = largest;
      const auto smaller = [&random](std::int64_t x) {
        return std::uniform_int_distribution<std::int64_t>(std::min<std::int64_t>(x, 1), x)(random);
      };
      p.b = smaller(p.b), p.sq = smaller(p.sq), p.sk = smaller(p.sk);
      if (p.page_size > 0) p.sk = (p.sk + p.page_size - 1) / p.page_size * p.page_size;
      if (p.ragged_q >= 0) p.ragged_q = p.sq > 0 ? p.sq + (p.b - 1) * smaller(p.sq) : 0;
      if (p.ragged_k >= 0) p.ragged_k = p.sk > 0 ? p.sk + (p.b - 1) * smaller(p.sk) : 0;
      INFO(largest.to_string() << "\n" << p.to_string());
      const std::size_t needed = Plan(p, context).workspace_bytes();
      CHECK(needed <= bytes);
      most = std::max(most, needed);
    }
    INFO(largest.to_string());
    CHECK(bytes < 64 * most + (std::size_t{1} << 23));  // and no wild guess
  }
}

TEST_CASE("plan: workspace does not grow with the lengths", "[unit]") {
  for (const std::string& entry : usable_entries()) {
    if (!tiled(entry)) continue;
    for (int threads : {1, 4}) {
      const Context context = forced(entry, std::make_shared<ThreadExecutor>(4), threads);
      for (const char* heads : {"", " hq=8", " hq=32 hk=4 b=4"}) {
        const auto bytes = [&](const char* lengths) {
          return plan_of("attention d=128 causal align=bottom_right" + std::string(heads) + lengths, context)
              .workspace_bytes();
        };
        // Long enough for every worker to get items of the largest size.
        const std::size_t base = bytes(" sq=32768");
        INFO(entry << heads << " on " << threads << " threads: " << base);
        CHECK(bytes(" sq=65536") == base);
        CHECK(bytes(" sq=65536 sk=1048576") == base);
        CHECK(bytes(" sq=32768 sk=65536") == base);
        CHECK(bytes(" sq=1048576") == base);
        CHECK(base <= static_cast<std::size_t>(threads) * (4u << 20));
      }
    }
  }
}

TEST_CASE("plan: gathered keys take 112 bytes of workspace for each token, and partial results of few", "[unit]") {
  for (const std::string& entry : usable_entries()) {
    if (!tiled(entry)) continue;
    const Context context = forced(entry, serial_executor(), 1);  // whose items have all rows, split or not
    const auto bytes = [&](const char* tokens) {
      return plan_of("attention hq=128 hk=1 sk=8192 d=64 gathered " + std::string(tokens), context).workspace_bytes();
    };
    INFO(entry);
    CHECK(bytes("sq=8192") - bytes("sq=4096") == 4096 * 112);
    CHECK(bytes("b=64 sq=128") == bytes("sq=8192"));
    // 2048 rows have 2 splits, more have one.
    CHECK(bytes("sq=16") - bytes("sq=17") >= 64 * 64 * (64 + 2) * sizeof(float) - 4096);
    CHECK(bytes("sq=16") <= bytes("sq=17") + 64 * 64 * (64 + 17) * sizeof(float) + 16384);
  }
}

TEST_CASE("plan: workspace grows with the threads at most", "[unit]") {
  for (const std::string& entry : usable_entries()) {
    if (!tiled(entry)) continue;
    const auto plan = [&](int threads) {
      return plan_of("attention hq=8 sq=2048 d=64", forced(entry, std::make_shared<ThreadExecutor>(16), threads));
    };
    const std::size_t one = plan(1).workspace_bytes();
    for (int threads : {2, 3, 8, 16}) {
      INFO(entry << " on " << threads);
      CHECK(plan(threads).threads() == threads);
      CHECK(plan(threads).work_items() >= threads);
      CHECK(plan(threads).workspace_bytes() <= static_cast<std::size_t>(threads) * one);
    }
  }
}

TEST_CASE("plan: small problems stay on one thread", "[unit]") {
  const Plan plan = plan_of("attention sq=4 d=16", forced(usable_entries().front(), tbb_executor(), 2));
  CHECK(plan.threads() == 1);
}

TEST_CASE("plan: workspace_bytes is what the allocator sees", "[unit]") {
  std::mt19937_64 random(402);
  for (const std::string& entry : usable_entries()) {
    for (int i = 0; i < 10; ++i) {
      CountingAllocator allocator;
      ContextOptions options;
      options.kernel = entry;
      options.allocator = allocator.get();
      options.threads = 2;
      {
        const Context context(options);
        Case c(sampled(random), 5);
        const Plan plan(c.args(), context);
        INFO(entry << ": " << c.problem.to_string());
        CHECK(allocator.allocations == 0);
        attention(c.args(), context);
        CHECK(allocator.peak_bytes == plan.workspace_bytes());
        attention(c.args(), context);
        plan.run(c.args());
        CHECK(allocator.allocations == (plan.workspace_bytes() ? 1 : 0));  // kept for the next call
      }
      CHECK(allocator.live_bytes == 0);
    }
  }
}

TEST_CASE("plan: candidates name every entry of the backend for the operation and why it was passed over", "[unit]") {
  const Plan plan = plan_of("attention sq=128 d=64", Context());
  std::vector<EntryInfo> all = entries();
  std::erase_if(all, [&](const EntryInfo& entry) {
    return entry.backend != plan.backend() || entry.operation != Operation::attention;
  });
  REQUIRE(plan.candidates().size() == all.size());
  bool chosen = false;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Candidate& candidate = plan.candidates()[i];
    CHECK(candidate.entry == all[i].name);
    CHECK(plan.explain().find(candidate.entry) != std::string::npos);
    if (!all[i].unusable.empty()) CHECK_FALSE(candidate.refusal.empty());
    if (candidate.entry != plan.entry()) continue;
    chosen = true;
    CHECK(candidate.refusal.empty());
  }
  CHECK(chosen);
  // The best usable one: whatever stands before it cannot run.
  for (const Candidate& candidate : plan.candidates()) {
    if (candidate.entry == plan.entry()) break;
    CHECK_FALSE(candidate.refusal.empty());
  }
}

TEST_CASE("plan: AMX takes bf16 from 2560 elements of keys and values on", "[unit]") {
  if (!has_amx()) return;
  const auto chosen = [](const std::string& sizes) {
    return runs_on_amx("attention dtype=bf16 hq=8 sq=64 d=32 " + sizes, "bf16");
  };
  CHECK(chosen("sk=40"));
  CHECK_FALSE(chosen("sk=39"));
  CHECK(chosen("sk=20 dv=96"));
  CHECK_FALSE(chosen("sk=20 dv=80"));
}

TEST_CASE("plan: AMX takes f16 from 144 rows of a key head and 8192 elements of keys and values on", "[unit]") {
  if (!has_amx()) return;
  const auto chosen = [](const std::string& sizes) {
    return runs_on_amx("attention dtype=f16 hq=8 d=32 " + sizes, "f16x3");
  };
  CHECK(chosen("sq=144 sk=128"));
  CHECK_FALSE(chosen("sq=143 sk=128"));
  CHECK(chosen("hk=4 sq=72 sk=128"));
  CHECK_FALSE(chosen("hk=4 sq=71 sk=128"));
  CHECK_FALSE(chosen("sq=144 sk=127"));
  CHECK(chosen("sq=144 sk=64 dv=96"));
  CHECK_FALSE(chosen("sq=144 sk=64 dv=95"));
}

TEST_CASE("plan: rows that fill a vector are decoding's over many keys only", "[unit]") {
  const auto phase = [](const std::string& text) {
    return info_of(plan_of("attention b=8 hq=12 d=64 " + text, Context()).entry()).phase;
  };
  CHECK(phase("sq=16 sk=128") == Phase::prefill);
  CHECK(phase("sq=16 sk=129") == Phase::decode);
  CHECK(phase("sq=1 sk=16") == Phase::decode);
  CHECK(phase("sq=16 sk=128 kv=i8 groups=1") == Phase::decode);
  CHECK(phase("sq=16 sk=4096 seqlens") == Phase::prefill);  // and decoding beside it, for sequences that have many
}

TEST_CASE("plan: problems that no arguments could give are refused", "[unit]") {
  for (const char* text :
       {"attention hq=3 hk=2 sq=4 d=8", "attention hq=2 hk=0 sq=4 d=8", "attention sq=4 d=0", "attention sq=4 d=8 dv=0",
        "attention sq=-4 d=8", "attention b=-1 sq=4 d=8", "attention sq=4 d=8 window=-2,0",
        "attention sq=4 d=8 softcap=-1", "attention b=9223372036854775807 hq=2 sq=4 d=8",
        "attention sq=4 d=8 dtype=i32", "attention sq=4 d=8 device=cuda", "attention sq=4 d=8 q=i64",
        "attention sq=4 d=8 kv=bool", "attention sq=4 d=8 out=i32", "attention sq=4 d=8 bias=k bias_dtype=i8",
        "attention sq=4 d=9223372036854775807", "attention sq=4 d=8 causal align=9223372036854775807",
        "attention b=84467709551614 sq=9 sk=18112271 d=576"}) {
    INFO(text);
    CHECK_THROWS_AS(plan_of(text, Context()), Error);
  }
}
