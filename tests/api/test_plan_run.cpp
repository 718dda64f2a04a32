// Plan::run: reuse, other tensors of the same problem, a workspace from the user.
#include <limits>
#include <span>

#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kText = "attention b=2 hq=4 hk=2 sq=50 sk=70 d=40 causal align=bottom_right mask=bk lse";

}  // namespace

TEST_CASE("a plan runs on any tensors of its problem", "[api]") {
  Case first(AttentionProblem::parse(kText), 1), second(AttentionProblem::parse(kText), 2);
  const Plan plan(first.args());
  for (Case* c : {&first, &second, &first}) {
    c->poison_outputs();
    plan.run(c->args());
    CHECK(compare(c->args(), oracle(c->args())).ok());
  }
}

TEST_CASE("a plan from the problem alone runs too", "[api]") {
  Case c(AttentionProblem::parse(kText));
  const Plan plan(AttentionProblem::parse(kText));
  plan.run(c.args());
  CHECK(compare(c.args(), oracle(c.args())).ok());
}

TEST_CASE("a plan gives the bits of attention()", "[api]") {
  Case first(AttentionProblem::parse(kText)), second(AttentionProblem::parse(kText));
  attention(first.args());
  Plan(second.args()).run(second.args());
  CHECK(same_bits(first.out, second.out));
  CHECK(same_bits(first.lse, second.lse));
}

TEST_CASE("a plan refuses the arguments of another problem and writes nothing", "[api]") {
  const Plan plan(AttentionProblem::parse(kText));
  const std::string text = kText;
  for (const char* change : {"b=3",        "hq=8",         "sq=49",      "sk=71", "d=41",        "dv=41",  "align=3",
                             "scale=0.5",  "softcap=9",    "alibi",      "sinks", "dropout=0.5", "bias=k", "seqlens",
                             "window=5,5", "ragged_k=100", "dtype=bf16", "q=f16", "kv=bf16",     "out=f16"}) {
    // In the place of the word with that key, if there is one.
    const std::string key = " " + std::string(change).substr(0, std::string(change).find('=') + 1);
    const std::size_t begin = text.find(key), end = text.find(' ', begin + 1);
    Case c(AttentionProblem::parse(begin == std::string::npos ? text + " " + change
                                                              : text.substr(0, begin + 1) + change + text.substr(end)));
    const Tensor untouched(c.out.dtype(), c.out.layout());
    INFO(change);
    CHECK_FALSE(refused_argument([&] { plan.run(c.args()); }).empty());
    CHECK(same_bits(c.out, untouched));
  }
}

TEST_CASE("a user's workspace is used and nothing is allocated", "[api]") {
  CountingAllocator allocator;
  ContextOptions options;
  options.allocator = allocator.get();
  const Context context(options);
  Case c(AttentionProblem::parse(kText));
  const Plan plan(c.args(), context);
  REQUIRE(plan.workspace_bytes() > 0);
  const Buffer workspace(plan.workspace_bytes() + 64);
  plan.run(c.args(), std::span(workspace.data(), plan.workspace_bytes()));
  CHECK(compare(c.args(), oracle(c.args())).ok());
  CHECK(allocator.allocations == 0);

  c.poison_outputs();
  const Tensor untouched(DType::f32, c.out.layout());
  CHECK(refused_argument([&] { plan.run(c.args(), std::span(workspace.data(), plan.workspace_bytes() - 1)); }) ==
        "workspace");
  CHECK(refused_argument([&] { plan.run(c.args(), std::span(workspace.data() + 4, plan.workspace_bytes())); }) ==
        "workspace");
  CHECK(same_bits(c.out, untouched));
}

TEST_CASE("attention() runs in a workspace for the largest problem", "[api]") {
  CountingAllocator allocator;
  ContextOptions options;
  options.allocator = allocator.get();
  const Context context(options);
  const std::string text = "attention hq=4 hk=2 d=40 causal align=bottom_right lse seqlens page=16 ";
  const std::size_t bytes = max_workspace_bytes(AttentionProblem::parse(text + "b=3 sq=50 sk=1600"), context);
  const Buffer workspace(bytes);
  for (const char* sizes : {"b=3 sq=50 sk=1600", "b=3 sq=1 sk=1600", "b=1 sq=7 sk=160", "b=2 sq=0 sk=16"}) {
    Case c(AttentionProblem::parse(text + sizes));
    attention(c.args(), context, std::span(workspace.data(), bytes));
    INFO(sizes);
    CHECK(compare(c.args(), oracle(c.args())).ok());
  }
  CHECK(allocator.allocations == 0);
  Case c(AttentionProblem::parse(text + "b=3 sq=50 sk=1600"));
  CHECK(refused_argument([&] { attention(c.args(), context, std::span(workspace.data(), 64)); }) == "workspace");
  CHECK(refused_argument([&] { attention(c.args(), context, std::span(workspace.data() + 8, bytes - 8)); }) ==
        "workspace");
  const std::span<std::byte> none(static_cast<std::byte*>(nullptr), bytes);
  CHECK(refused_argument([&] { attention(c.args(), context, none); }) == "workspace");
  CHECK(refused_argument([&] { Plan(c.args(), context).run(c.args(), none); }) == "workspace");
  const std::span endless(workspace.data(), std::numeric_limits<std::size_t>::max());
  CHECK(refused_argument([&] { attention(c.args(), context, endless); }) == "workspace");
  const std::span own(reinterpret_cast<std::byte*>(c.out.buffer().data()), bytes);
  CHECK(refused_argument([&] { attention(c.args(), context, own); }) == "workspace");
}

TEST_CASE("what the workspace held before does not matter", "[api]") {
  for (const std::string& entry : usable_entries()) {
    Case first(AttentionProblem::parse(kText)), second(AttentionProblem::parse(kText));
    attention(first.args(), forced(entry));
    const Plan plan(second.args(), forced(entry));
    const Tensor workspace(
        DType::f32,
        Layout(std::vector<std::int64_t>{static_cast<std::int64_t>(plan.workspace_bytes() / sizeof(float))}));
    plan.run(second.args(), std::span(workspace.buffer().data(), workspace.buffer().size()));  // full of NaN
    INFO(entry);
    CHECK(same_bits(first.out, second.out));
    CHECK(same_bits(first.lse, second.lse));
  }
}
