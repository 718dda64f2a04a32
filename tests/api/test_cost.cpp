// cost_of() against numbers that were counted by hand.
#include <limits>
#include <string>

#include "operations/attention/case.hpp"
#include "operations/delta_rule/case.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// (row, key) pairs of all heads: d and dv are 8.
double pairs(Case& c, const AttentionArgs& args) {
  REQUIRE(c.problem.d == 8);
  return cost_of(args).flops / (2 * (8 + 8));
}
double pairs(const std::string& words) {
  Case c(AttentionProblem::parse("attention d=8 " + words));
  return pairs(c, c.args());
}

}  // namespace

TEST_CASE("cost: pairs that causal, windows and alignment leave", "[api]") {
  CHECK(pairs("sq=4") == 16);
  CHECK(pairs("b=2 hq=6 hk=2 sq=4 causal") == 2 * 6 * 10);
  CHECK(pairs("sq=2 sk=5 causal align=bottom_right") == 4 + 5);
  CHECK(pairs("sq=2 sk=5 causal align=top_left") == 1 + 2);
  CHECK(pairs("sq=4 window=1,0") == 1 + 2 + 2 + 2);
  CHECK(pairs("sq=4 window=-1,9223372036854775807") == 16);
  CHECK(pairs("sq=3 sk=4 window=0,0 align=-2") == 1);
}

TEST_CASE("cost: bytes of what some row sees", "[api]") {
  Case c(AttentionProblem::parse("attention dtype=bf16 hq=4 hk=2 sq=2 sk=10 d=8 window=2,0 align=bottom_right"));
  // Queries and results; of the keys the last four.
  CHECK(cost_of(c.args()).bytes == 2 * (2 * 4 * 2 * 8) + 2 * (2 * 2 * 4 * 8));
}

TEST_CASE("cost: values in the memory of keys are read once; latent are those that are a part of the keys", "[api]") {
  Case c(AttentionProblem::parse("attention hq=2 sq=10 d=8"));
  AttentionArgs args = c.args();
  const double queries_and_results = 4 * (2 * 2 * 10 * 8), keys = 4 * (2 * 10 * 8);
  CHECK(cost_of(args).bytes == queries_and_results + 2 * keys);
  // Self-attention over one tensor.
  args.kv.k = args.kv.v = args.q;
  CHECK(cost_of(args).bytes == queries_and_results + keys);
  CHECK_FALSE(AttentionProblem::of(args).latent);
  CHECK(AttentionProblem::of(args) == c.problem);
  args.kv.v.shape[3] = args.out.shape[3] = 6;
  CHECK(AttentionProblem::of(args).latent);
  CHECK(cost_of(args).bytes == 4 * (2 * 10 * (8 + 6)) + keys);
  // Whatever the stride along dimensions of one element is.
  args.kv.v.strides[0] = 12345;
  CHECK(AttentionProblem::of(args).latent);
}

TEST_CASE("cost: scales of queries are read where they are, once for a row or fewer times", "[api]") {
  const std::string words = "attention q=f8e4m3 b=2 hq=4 hk=2 sq=3 sk=10 d=8";
  Case none(AttentionProblem::parse(words)), of_rows(AttentionProblem::parse(words + " q_scale"), 3),
      of_heads(AttentionProblem::parse(words + " q_scale"), 4);
  const double bytes = cost_of(none.args()).bytes;
  CHECK(bytes == 1 * (2 * 4 * 3 * 8) + 4 * (2 * 2 * 10 * 16) + 4 * (2 * 4 * 3 * 8));
  CHECK(cost_of(of_rows.args()).bytes == bytes + 4 * (2 * 4 * 3));
  CHECK(cost_of(of_heads.args()).bytes == bytes + 4 * 4);
}

TEST_CASE("cost: gathered keys count once for each row that lists them, and are read once", "[api]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 hk=1 sq=2 sk=3 d=8 gathered"), 1);
  const std::int64_t rows[] = {4, 4, -1, 0, 4, 2};
  AttentionArgs args = c.args();
  args.kv.indices = TensorView(rows, DType::i64, {1, 2, 3});
  args.kv.counts = {};
  CHECK(pairs(c, args) == 2 * 5);
  CHECK(cost_of(args).bytes == 4 * (2 * (2 * 2 * 8) + 2 * (3 * 8)));
}

TEST_CASE("cost: nothing is read for calls that write nothing", "[api]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 hk=1 sq=1 sk=1 d=8 gathered"), 1);
  const std::int64_t far = std::numeric_limits<std::int32_t>::max();
  AttentionArgs args = c.args();
  args.q.shape[1] = args.out.shape[1] = 0;
  args.kv.indices = TensorView(&far, DType::i64, {1, 1, 1});
  args.kv.counts = {};
  CHECK(pairs(c, args) == 0);
  args.kv.k.shape[2] = args.kv.v.shape[2] = 0;  // no row that a list could name
  CHECK(pairs(c, args) == 0);
}

TEST_CASE("cost: of pools of states, those that slots name", "[api]") {
  DeltaRuleCase c(DeltaRuleProblem::parse("delta_rule b=3 hq=2 t=1 d=8 state slots"));
  REQUIRE((c.initial && c.final));
  DeltaRuleArgs args = c.args();
  const std::int32_t all[] = {0, 1, 2}, one[] = {-1, 2, -1};
  args.state_slots = TensorView(all, {3});
  const double bytes = cost_of(args).bytes;
  args.state_slots = TensorView(one, {3});
  CHECK(bytes - cost_of(args).bytes == 2 * 2 * (2 * 8 * 8 * 4));  // two sequences' states, read and written
}
