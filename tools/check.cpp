#include "check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>

#include "bench/entry.hpp"
#include "common.hpp"
#include "progress.hpp"
#include "support/entries.hpp"
#include "support/hard_inputs.hpp"

namespace rapt::tools {
namespace {

/// The full comparison takes a float64 product of sq x sk x (d + dv) per head; past this many scores in all, rows are
/// sampled.
constexpr std::int64_t kMaxScores = 8 << 20;
constexpr std::int64_t kSampledRows = 16;
/// Gradients take about ten such products.
constexpr std::int64_t kMaxGradientScores = 1 << 20;
/// Past this many elements of keys and values, each counted for all the heads that read it, heads are sampled as well:
/// few rows of long caches.
constexpr std::int64_t kMaxElements = 32 << 20;
/// Elements of states, each counted for every token, past which columns of them are sampled.
constexpr std::int64_t kMaxUpdates = 64 << 20;
/// Of their gradients, past which heads are.
constexpr std::int64_t kMaxGradientUpdates = 16 << 20;

/// Multiplications of index_scores, past which queries are.
constexpr double kMaxIndexProducts = 256 << 20;

/// Every feature at least once, at sizes that leave remainders in every block.
constexpr const char* kDefaultProblems[] = {
    "b=1 hq=8 sq=128 d=64",
    "b=1 hq=8 sq=128 d=64 causal",
    "b=2 hq=4 sq=197 d=64 lse",
    "b=1 hq=4 sq=257 d=128 causal lse",
    "b=1 hq=2 sq=512 d=128 layout=bshd",
    "b=1 hq=2 sq=130 d=64 layout=bhds",
    "b=2 hq=3 sq=33 sk=65 d=40 dv=24 layout=other lse",
    "b=1 hq=2 sq=100 sk=77 d=80",
    "b=1 hq=2 sq=65 d=1",
    "b=1 hq=2 sq=65 d=7 dv=5",
    "b=1 hq=1 sq=70 d=576 dv=512 causal",
    "b=1 hq=2 sq=96 d=256",
    "b=2 hq=8 hk=2 sq=128 d=64 causal layout=bshd",
    "b=2 hq=4 hk=1 sq=1 sk=300 d=64 lse",
    "b=1 hq=4 sq=7 sk=1024 d=64 causal align=bottom_right lse",
    "b=1 hq=2 sq=90 sk=60 d=32 causal align=bottom_right lse",
    "b=1 hq=2 sq=90 sk=60 d=32 causal align=top_left",
    "b=1 hq=2 sq=64 sk=64 d=32 causal align=-20 lse",
    "b=1 hq=4 sq=300 d=64 window=32,0",
    "b=1 hq=4 sq=300 d=64 window=-1,16",
    "b=1 hq=2 sq=140 sk=200 d=48 causal window=50,10 align=bottom_right lse",
    "b=1 hq=4 sq=128 d=64 softcap=30",
    "b=1 hq=4 sq=128 d=64 dropout=0.1",
    "b=1 hq=4 sq=128 d=64 scale=0",
    "b=1 hq=4 sq=128 d=64 scale=-0.25",
    "b=2 hq=4 sq=120 d=64 bias=bhqk lse",
    "b=2 hq=4 sq=120 d=64 bias=hk",
    "b=2 hq=4 sq=120 d=64 mask=bqk lse",
    "b=2 hq=4 sq=120 sk=90 d=64 mask=bk",
    "b=2 hq=4 sq=150 d=64 causal alibi",
    "b=1 hq=8 sq=700 d=64 causal alibi lse",
    "b=2 hq=4 sq=150 d=64 causal sinks lse",
    "b=6 hq=2 sq=100 d=64 seqlens lse",
    "b=5 hq=2 sq=60 sk=140 d=64 ragged_q=160 ragged_k=400 lse",
    "b=5 hq=4 hk=2 sq=60 d=64 causal ragged_q=160 ragged_k=160 layout=bshd",
    "b=2 hq=2 sq=20 sk=0 d=16 lse",
    "dtype=bf16 b=1 hq=8 sq=128 d=64 causal lse",
    "dtype=f16 b=1 hq=8 sq=128 d=64 causal lse",
    "dtype=bf16 b=2 hq=4 hk=2 sq=257 d=128 layout=bshd lse",
    "dtype=f16 b=2 hq=4 hk=1 sq=33 sk=513 d=80 causal align=bottom_right layout=other lse",
    "dtype=bf16 out=f32 b=5 hq=4 hk=2 sq=60 d=64 causal ragged_q=160 ragged_k=160 layout=bshd lse",
    "dtype=f16 out=f32 b=6 hq=2 sq=100 d=72 seqlens lse",
    "kv=bf16 b=1 hq=2 sq=65 sk=130 d=64 lse",
    "q=bf16 kv=f16 out=f16 b=1 hq=2 sq=65 sk=130 d=40 dv=24 lse",
    ("b=2 hq=8 hk=2 sq=128 sk=512 d=64 dv=32 causal window=64,-1 align=bottom_right softcap=30 bias=hqk mask=bk alibi "
     "sinks lse"),
    // Caches: every layout and type.
    "b=4 hq=4 hk=2 sq=1 sk=300 d=64 seqlens lse",
    "dtype=bf16 b=3 hq=6 hk=2 sq=3 sk=700 d=128 causal align=bottom_right seqlens page=1 lse",
    "dtype=f16 b=5 hq=8 hk=1 sq=1 sk=1200 d=80 seqlens page=16 layout=bshd",
    "b=3 hq=4 hk=4 sq=2 sk=96 d=40 dv=24 causal window=50,0 align=bottom_right seqlens page=24 layout=other sinks lse",
    "dtype=bf16 b=4 hq=4 hk=2 sq=1 sk=200 d=64 causal align=bottom_right seqlens ring lse",
    "dtype=bf16 kv=i8 groups=1 b=2 hq=10 hk=2 sq=1 sk=1100 d=128 lse",
    "kv=i8 groups=4 zeros b=3 hq=4 hk=2 sq=5 sk=160 d=64 causal align=bottom_right seqlens page=16 alibi",
    "kv=f8e4m3 b=2 hq=4 hk=2 sq=1 sk=333 d=64 softcap=30 lse",
    "dtype=f16 kv=f8e5m2 groups=1 b=4 hq=6 hk=2 sq=1 sk=128 d=64 seqlens ring lse",
    "dtype=bf16 kv=i4x2 groups=4 b=2 hq=8 hk=2 sq=1 sk=1025 d=128",
    "kv=i4x2 groups=2 zeros b=3 hq=4 hk=2 sq=40 sk=240 d=64 dv=32 causal align=bottom_right seqlens page=8 lse",
    "kv=bf16 b=4 hq=4 hk=2 sq=64 sk=320 d=64 causal align=bottom_right ragged_q=75 seqlens page=32 lse",
    // Values that are what keys begin with.
    "dtype=bf16 b=1 hq=128 hk=1 sq=2 sk=1500 d=576 dv=512 causal align=bottom_right latent lse",
    "dtype=bf16 b=2 hq=16 hk=1 sq=1 sk=1152 d=576 dv=512 seqlens page=64 latent sinks lse",
    "dtype=f16 b=1 hq=4 hk=2 sq=100 sk=300 d=80 dv=64 causal align=bottom_right window=70,0 latent softcap=30",
    "b=2 hq=4 hk=1 sq=40 sk=333 d=72 dv=64 mask=bhqk latent lse",
    // Rows of codes, and columns of keys that are not quantised.
    "dtype=bf16 kv=f8e4m3 groups=4 tail=64 tail_dtype=bf16 b=1 hq=128 hk=1 sq=1 sk=1100 d=576 dv=512 latent lse",
    "kv=f8e4m3 groups=4 tail=64 tail_dtype=bf16 b=2 hq=16 hk=1 sq=2 sk=640 d=576 dv=512 seqlens page=64 latent lse",
    "dtype=f16 kv=i8 groups=2 zeros tail=9 b=2 hq=4 hk=2 sq=40 sk=90 d=49 dv=24 gathered lse",
    "q=f8e4m3 kv=f8e4m3 out=bf16 groups=1 head_scales q_scale b=2 hq=8 hk=2 sq=70 sk=300 d=128 causal "
    "align=bottom_right lse",
    "q=f8e4m3 kv=f8e4m3 out=bf16 groups=1 head_scales q_scale b=3 hq=8 hk=2 sq=2 sk=320 d=64 seqlens page=16 lse",
    "q=f8e4m3 kv=bf16 out=f32 b=2 hq=4 sq=65 d=40 lse",
    // A list of keys for each token.
    "b=2 hq=4 hk=2 sq=9 sk=70 d=40 dv=24 gathered sinks lse",
    "dtype=bf16 b=1 hq=128 hk=1 sq=3 sk=600 d=576 dv=512 gathered lse",
    "dtype=bf16 b=2 hq=16 hk=1 sq=1 sk=1500 d=576 dv=512 gathered latent softcap=30 lse",
    "dtype=f16 b=1 hq=6 hk=2 sq=130 sk=40 d=64 gathered layout=other lse",
    "dtype=bf16 kv=i8 groups=1 b=2 hq=8 hk=2 sq=3 sk=200 d=64 gathered lse",
    // What writes caches: the same layouts and types.
    "append_kv b=3 hk=2 n=5 sk=40 d=33 dv=17",
    "append_kv dtype=bf16 b=4 hk=2 n=9 sk=64 d=64 ragged=20 page=16",
    "append_kv kv=f16 b=3 hk=2 n=17 sk=12 d=80 ring",
    "append_kv dtype=f16 b=2 hk=1 n=8 sk=32 d=576 dv=512 values_are_keys",
    "append_kv new=bf16 kv=i8 b=4 hk=2 n=9 sk=64 d=128 page=16 groups=1",
    "append_kv kv=i8 b=3 hk=2 n=5 sk=30 d=64 groups=4 zeros given_scales",
    "append_kv kv=i4x2 b=3 hk=2 n=7 sk=30 d=128 groups=4 zeros",
    "append_kv new=f16 kv=f8e4m3 b=3 hk=2 n=7 sk=30 d=64",
    "append_kv kv=f8e5m2 b=3 hk=2 n=7 sk=5 d=64 ring groups=2",
    "append_kv new=bf16 kv=f8e4m3 b=3 hk=1 n=9 sk=128 d=576 dv=512 page=64 groups=4 tail=64 tail_dtype=bf16 "
    "values_are_keys",
    // Partial results merged.
    "merge_states rows=60 dv=128 count=2 lse",
    "merge_states dtype=bf16 out=f32 rows=77 dv=40 count=9",
    "merge_states dtype=f16 rows=12 dv=512 count=64 lse",
    // Linear attention: every rule, decay and feature.
    "delta_rule b=1 hq=4 t=130 d=64 beta",
    "delta_rule b=2 hq=3 t=65 d=33 dv=17 decay=channel beta state",
    "delta_rule b=1 hq=4 t=300 d=128 decay=channel gate beta l2norm state",
    "delta_rule b=2 hq=2 hv=6 t=70 d=100 decay=head gate beta l2norm state",
    "delta_rule b=1 hq=6 hk=2 t=64 d=40 decay=constant rule=gated state",
    "delta_rule b=2 hq=2 t=90 d=7 dv=5 rule=delta beta state",
    "delta_rule b=2 hq=2 t=90 d=16 dv=100 rule=linear",
    "delta_rule b=2 hq=2 t=90 d=64 dv=200 rule=gated decay=channel",
    "delta_rule b=5 hq=4 t=60 d=64 ragged=160 decay=head beta state slots",
    "delta_rule b=16 hq=2 hv=4 t=1 d=128 decay=head gate beta l2norm state slots",
    "delta_rule b=3 hq=2 t=4 d=48 decay=channel beta state slots steps=4",
    "delta_rule state_dtype=bf16 b=16 hq=2 hv=4 t=1 d=128 decay=head gate beta l2norm state slots",
    "delta_rule dtype=bf16 state_dtype=bf16 b=3 hq=2 t=70 d=100 decay=channel beta state",
    "delta_rule b=1 hq=1 t=1000 d=256 decay=head beta",
    "delta_rule dtype=bf16 b=2 hq=4 hv=8 t=130 d=64 decay=channel gate beta l2norm state",
    "delta_rule dtype=f16 out=f32 b=1 hq=2 t=257 d=80 decay=head beta state",
    // Its gradients: likewise, and heads that share others in every way.
    "delta_rule_backward b=1 hq=4 t=130 d=64 beta",
    "delta_rule_backward b=2 hq=3 t=65 d=33 dv=17 decay=channel beta state",
    "delta_rule_backward b=1 hq=2 t=300 d=128 decay=channel gate beta l2norm state",
    "delta_rule_backward b=2 hq=2 hv=6 t=70 d=100 decay=head gate beta l2norm state",
    "delta_rule_backward b=1 hq=6 hk=2 t=64 d=40 decay=constant rule=gated state",
    "delta_rule_backward b=2 hq=2 hk=3 hv=6 t=49 d=24 decay=constant gate beta",
    "delta_rule_backward b=2 hq=2 t=90 d=7 dv=5 rule=delta beta state",
    "delta_rule_backward b=2 hq=2 t=90 d=16 dv=100 rule=linear",
    "delta_rule_backward b=2 hq=2 t=48 d=64 dv=200 rule=gated decay=channel",
    "delta_rule_backward b=5 hq=4 t=60 d=64 ragged=160 decay=head beta state",
    "delta_rule_backward dtype=bf16 b=2 hq=4 hv=8 t=130 d=64 decay=channel gate beta l2norm state",
    "delta_rule_backward dtype=f16 out=f32 b=1 hq=2 t=257 d=80 decay=head beta state",
    "delta_rule_backward dtype=bf16 state_dtype=bf16 b=2 hq=2 t=70 d=64 decay=channel beta state",
    // Which keys to attend to: every type and way to keep keys and to hide them.
    "index_scores b=2 sq=40 sk=300 h=8 d=64 full",
    "index_scores b=1 sq=70 h=32 d=128 topk=20 scores",
    "index_scores b=2 sq=33 sk=500 h=5 d=40 align=bottom_right linear topk=64 scores",
    "index_scores b=4 sq=1 sk=3000 h=32 d=128 align=bottom_right seqlens topk=512",
    "index_scores b=2 sq=50 sk=200 h=3 d=7 align=-20 ranges topk=300 scores",
    "index_scores dtype=bf16 b=1 sq=64 sk=2100 h=64 d=128 align=bottom_right topk=512 scores",
    "index_scores dtype=bf16 b=3 sq=20 sk=960 h=33 d=100 full seqlens page=64 topk=100",
    "index_scores q=bf16 k=f8e4m3 b=3 sq=20 sk=960 h=64 d=128 align=bottom_right scales seqlens page=64 topk=100 "
    "scores",
    "index_scores q=bf16 k=i8 b=2 sq=20 sk=300 h=8 d=64 full scales ranges topk=50",
    "index_scores q=f16 k=f8e5m2 b=2 sq=20 sk=300 h=8 d=33 full seqlens scores topk=50",
    "index_scores dtype=f16 b=2 sq=20 sk=300 h=8 d=64 align=7",
    "select_topk rows=60 sk=3000 n=500",
    "select_topk rows=20 sk=100 n=2048",
    // Gradients of attention: every feature, type and layout.
    "attention_backward b=1 hq=8 sq=128 d=64",
    "attention_backward b=2 hq=4 hk=2 sq=257 d=128 causal",
    "attention_backward b=2 hq=3 sq=33 sk=65 d=40 dv=24 layout=other dlse",
    "attention_backward b=1 hq=2 sq=65 sk=130 d=7 dv=5 causal align=bottom_right",
    "attention_backward b=1 hq=4 hk=1 sq=300 d=64 window=32,0 dlse",
    "attention_backward b=1 hq=4 sq=128 d=64 softcap=30 scale=0.3",
    "attention_backward b=2 hq=4 sq=120 d=64 bias=bhqk dbias",
    "attention_backward b=2 hq=4 sq=120 sk=90 d=64 bias=hk mask=bqk dbias",
    "attention_backward b=2 hq=4 sq=150 d=64 causal alibi sinks dsinks dalibi",
    "attention_backward b=6 hq=2 sq=100 d=64 seqlens",
    "attention_backward b=5 hq=4 hk=2 sq=60 d=64 causal ragged_q=160 ragged_k=160 layout=bshd dlse",
    "attention_backward b=2 hq=4 hk=2 sq=9 sk=70 d=40 dv=24 gathered sinks dsinks dlse",
    "attention_backward dtype=bf16 b=1 hq=128 hk=1 sq=3 sk=150 d=576 dv=512 gathered pool=700",
    "attention_backward dtype=f16 b=3 hq=6 hk=2 sq=30 sk=40 d=64 gathered pool=60 layout=other",
    "attention_backward dtype=bf16 b=2 hq=4 hk=2 sq=257 d=128 causal layout=bshd",
    "attention_backward dtype=f16 b=1 hq=4 sq=200 sk=130 d=80 dlse",
    "attention_backward dtype=bf16 dout=f32 b=1 hq=2 sq=150 d=64 grads=kv",
    "attention_backward q=f16 kv=bf16 b=1 hq=2 sq=150 d=64 dv=40 sinks dsinks",
};

/// The part of `t` at `index` of dimension `dim`.
template <class View>
View slice(View t, int dim, std::int64_t index) {
  if (!t) return t;
  const auto at = static_cast<std::size_t>(dim);
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(t.data)>>, const std::byte, std::byte>;
  const std::int64_t offset = index * t.strides[at] * static_cast<std::int64_t>(size_of(t.dtype));
  t.data = static_cast<Byte*>(t.data) + offset;
  t.shape[at] = 1;
  return t;
}

/// The call for query head h alone.
AttentionArgs one_head(AttentionArgs args, std::int64_t h) {
  const std::int64_t group = args.q.shape[1] / args.kv.k.shape[1];
  KvSource& kv = args.kv;
  for (TensorView* t : {&kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero, &kv.k_tail})
    *t = slice(*t, 1, h / group);
  args.q = slice(args.q, 1, h), args.q_scale = slice(args.q_scale, 1, h);
  args.out = slice(args.out, 1, h);
  args.lse = slice(args.lse, 1, h);
  for (TensorView* t : {&args.score.bias, &args.score.mask}) {
    const int dim = t->ndim - 3;
    if (dim >= 0 && t->shape[static_cast<std::size_t>(dim)] != 1) *t = slice(*t, dim, h);
  }
  args.score.alibi = slice(args.score.alibi, args.score.alibi.ndim - 1, h);
  args.score.sinks = slice(args.score.sinks, 0, h);
  return args;
}

/// From one of `rows` rows to the next, of `all`. An odd step meets every position within a tile of even size.
std::int64_t step_over(std::int64_t all, std::int64_t rows) {
  return rows == 0 || all <= 4 * rows ? 1 : (all / rows) | 1;
}

void take_worst(testing::Errors& all, const testing::Errors& errors) {
  for (double testing::Errors::*member :
       {&testing::Errors::rel_frobenius, &testing::Errors::max_abs, &testing::Errors::max_bound,
        &testing::Errors::lse_max, &testing::Errors::lse_max_bound})
    all.*member = std::max(all.*member, errors.*member);
}

testing::Spacing spacing_of(std::uint64_t seed) {
  return seed % 2 ? testing::Spacing::dense : testing::Spacing::gaps;
}

testing::Verdict verify_new(const AttentionProblem& p, std::uint64_t seed, const Context& context) {
  testing::Case inputs(p, seed);
  return verify(inputs, context, p.b * p.hq * p.sq * p.sk > kMaxScores ? kSampledRows : 0);
}
// Every second seed leaves gaps in the tensors.
testing::Verdict verify_new(const AppendKvProblem& p, std::uint64_t seed, const Context& context) {
  testing::AppendCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  return verify(inputs, context, 0);
}
testing::Verdict verify_new(const MergeStatesProblem& p, std::uint64_t seed, const Context& context) {
  testing::MergeCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  return verify(inputs, context, 0);
}

testing::Verdict verify_new(const IndexScoresProblem& p, std::uint64_t seed, const Context& context) {
  testing::IndexScoresCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  const double products = static_cast<double>(p.b * p.sq) * static_cast<double>(p.h * p.d) * static_cast<double>(p.sk);
  return verify(inputs, context, products > kMaxIndexProducts ? kSampledRows : 0);
}
testing::Verdict verify_new(const SelectTopkProblem& p, std::uint64_t seed, const Context& context) {
  testing::SelectTopkCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  return verify(inputs, context, 0);
}

double updates_of(const DeltaRuleProblem& p) {
  return static_cast<double>(p.ragged >= 0 ? p.ragged : p.b * p.t) * static_cast<double>(p.state_heads() * p.d * p.dv);
}
testing::Verdict verify_new(const DeltaRuleProblem& p, std::uint64_t seed, const Context& context) {
  testing::DeltaRuleCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  return verify(inputs, context, updates_of(p) > kMaxUpdates ? kSampledRows : 0);
}

testing::Verdict verify_new(const DeltaRuleBackwardProblem& p, std::uint64_t seed, const Context& context) {
  testing::DeltaRuleBackwardCase inputs(p, seed, testing::Placement::heap, spacing_of(seed));
  return verify(inputs, context, updates_of(p) > kMaxGradientUpdates ? kSampledRows : 0);
}

testing::Verdict verify_new(const AttentionBackwardProblem& p, std::uint64_t seed, const Context& context) {
  using Forward = testing::BackwardCase::Forward;
  const bool large = p.b * p.hq * p.sq * p.sk > kMaxGradientScores;
  testing::BackwardCase inputs(p, seed, testing::Placement::heap, {}, large ? Forward::library : Forward::oracle);
  return verify(inputs, context, large ? kSampledRows : 0);
}

bool wants_lse(const Problem& problem) {
  if (const auto* attention = std::get_if<AttentionProblem>(&problem)) return attention->lse;
  const auto* merge = std::get_if<MergeStatesProblem>(&problem);
  return merge && merge->lse;
}

std::vector<Problem> problems_of(const CheckOptions& options) {
  std::vector<Problem> problems;
  for (const std::string& text : options.problems) problems.push_back(parse_problem(text));
  for (const Problem& problem : problems) make_plan(problem, make_context(options.threads, {}));
  if (problems.empty()) {
    for (const char* text : kDefaultProblems) problems.push_back(parse_problem(text));
  }
  return problems;
}

/// A context, and the operation that it forces an entry of.
struct Forcing {
  Context context;
  std::optional<Operation> operation;
  bool concerns(Operation other) const { return operation.value_or(other) == other; }
};

/// Prints the verdicts of all contexts over all problems, counts and keeps them.
class Report {
 public:
  Report(const std::vector<Problem>& problems, std::size_t total) : progress_(total) {
    for (const Problem& problem : problems) width_ = std::max(width_, std::min(short_text(problem).size(), kMaxWidth));
    fmt::print("{:<{}}  seed  rel. Frobenius  max error  of bound  lse error\n", "problem", width_);
  }

  void check(const Problem& problem, const Context& context, int seeds) {
    if (!begin(short_text(problem), problem, context)) return;
    for (int seed = 1; seed <= seeds; ++seed) {
      print(short_text(problem), problem, seed, with_memory(problem, context, [&] {
              return std::visit([&](const auto& p) { return verify_new(p, static_cast<std::uint64_t>(seed), context); },
                                problem);
            }));
    }
  }

  void check(const testing::HardInputs& inputs, const Context& context) {
    const AttentionProblem problem = AttentionProblem::parse(inputs.problem);
    if (!begin(inputs.name, problem, context)) return;
    testing::Case c = testing::make_case(inputs);
    print(inputs.name, problem, 0, verify(c, context, 0));
  }

  void skip(const std::string& text, const Problem& problem, const std::string& why) {
    progress_.clear();
    fmt::print("{:<{}}     -  skipped: {}\n", text, width_, why);
    rows_.push_back({{"name", text}, {"problem", to_string(problem)}, {"skipped", why}});
    ++skipped_;
  }

  int finish(const std::string& json_path) {
    progress_.clear();
    fmt::print("{} checked, {} wrong, {} skipped; largest share of a bound {:.2f}\n", checked_, wrong_, skipped_,
               worst_);
    if (!json_path.empty()) {
      Json context = run_context(read_machine());
      context.update({{"checked", checked_}, {"wrong", wrong_}, {"skipped", skipped_}});
      write_json(json_path, {{"context", context}, {"checks", rows_}});
    }
    if (checked_ == 0) throw UsageError("nothing was checked: every problem was skipped");
    return wrong_ == 0 ? kSuccess : kFailure;
  }

 private:
  static constexpr std::size_t kMaxWidth = 70;

  /// False if the context has nothing for the problem: then says so.
  bool begin(const std::string& text, const Problem& problem, const Context& context) {
    progress_.clear();
    std::string entry;
    try {
      entry = Plan(problem, context).entry();
    } catch (const Error& refusal) {
      skip(text, problem, refusal.what());
      progress_.begin(text);
      return false;
    }
    if (entry != entry_) fmt::print("{}\n", entry);
    entry_ = entry;
    progress_.begin(text);
    return true;
  }

  void print(const std::string& text, const Problem& problem, int seed, const testing::Verdict& verdict) {
    const testing::Errors& errors = verdict.errors;
    const bool has_lse = wants_lse(problem);
    rows_.push_back({{"name", text},
                     {"problem", to_string(problem)},
                     {"entry", entry_},
                     {"seed", seed},
                     {"rel_frobenius", number(errors.rel_frobenius)},
                     {"max_error", number(errors.max_abs)},
                     {"of_bound", number(errors.max_bound)},
                     {"lse_error", has_lse ? number(errors.lse_max) : Json(nullptr)},
                     {"lse_of_bound", has_lse ? number(errors.lse_max_bound) : Json(nullptr)},
                     {"violation", verdict.violation}});
    const std::string lse = has_lse ? fmt::format("{:.2e}", errors.lse_max) : "-";
    progress_.clear();
    fmt::print("{:<{}}  {:>4}  {:>14.2e}  {:>9.2e}  {:>8.3f}  {:>9}", text, width_, seed, errors.rel_frobenius,
               errors.max_abs, errors.max_bound, lse);
    fmt::print("{}\n", verdict.violation.empty() ? "" : "  WRONG: " + verdict.violation);
    progress_.show();
    ++checked_;
    wrong_ += verdict.violation.empty() ? 0 : 1;
    worst_ = std::max({worst_, errors.max_bound, errors.lse_max_bound});
  }

  Progress progress_;
  std::size_t width_ = 7;
  std::string entry_;
  int checked_ = 0, wrong_ = 0, skipped_ = 0;
  double worst_ = 0;
  Json rows_ = Json::array();
};

}  // namespace

testing::Verdict verify(testing::Case& inputs, const Context& context, std::int64_t rows) {
  inputs.poison_outputs();
  const AttentionArgs args = inputs.args();
  attention(args, context);
  const std::int64_t step = step_over(inputs.problem.sq, rows);
  const bool intact = inputs.out.gaps_intact() && inputs.lse.gaps_intact();
  const auto verdict_of = [&](const AttentionArgs& part) -> testing::Verdict {
    const testing::Errors errors = testing::compare(part, testing::oracle(part, step));
    const std::string violation = testing::violation_of(errors);
    const bool only_gaps = violation.empty() && !intact;
    return {errors, only_gaps ? "memory between the elements of an output was written" : violation};
  };
  const AttentionProblem& p = inputs.problem;
  const double of_head = static_cast<double>(p.b) * static_cast<double>(p.sk) * static_cast<double>(p.d + p.dv);
  const double heads = std::max(2.0, std::floor(kMaxElements / of_head));
  if (rows == 0 || static_cast<double>(p.hq) <= heads) return verdict_of(args);
  testing::Verdict verdict;
  const std::int64_t stride = (p.hq / static_cast<std::int64_t>(heads)) | 1;
  for (std::int64_t h = 0; h < p.hq && verdict.violation.empty(); h += stride) {
    const testing::Verdict head = verdict_of(one_head(args, h));
    take_worst(verdict.errors, head.errors);
    verdict.violation = head.violation.empty() ? "" : fmt::format("head {}: {}", h, head.violation);
  }
  return verdict;
}

testing::Verdict verify(testing::AppendCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  return inputs.verdict(step_over(inputs.problem.n, rows));
}

testing::Verdict verify(testing::MergeCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  return inputs.verdict(step_over(inputs.problem.rows, rows));
}

testing::Verdict verify(testing::IndexScoresCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  return inputs.verdict(step_over(inputs.problem.b * inputs.problem.sq, rows));
}

testing::Verdict verify(testing::SelectTopkCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  return inputs.verdict(step_over(inputs.problem.rows, rows));
}

testing::Verdict verify(testing::DeltaRuleCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  if (rows == 0) return inputs.verdict();
  const DeltaRuleProblem& p = inputs.problem;
  return inputs.verdict({std::max<std::int64_t>(p.b * p.state_heads() - 1, 1), step_over(p.dv, rows)});
}

testing::Verdict verify(testing::DeltaRuleBackwardCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  const DeltaRuleBackwardProblem& p = inputs.problem;
  return inputs.verdict(rows == 0 ? 1 : std::max<std::int64_t>(p.b * p.state_heads(), 1));
}

testing::Verdict verify(testing::BackwardCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  if (rows == 0) return inputs.verdict();
  const AttentionBackwardProblem& p = inputs.problem;
  testing::Verdict verdict;
  // The first head of the first sequence and the last of the last.
  for (const bool last : {false, true}) {
    const std::int64_t h = last ? p.hk - 1 : 0, n = last ? p.b - 1 : 0;
    if (!verdict.violation.empty() || (last && h == 0 && n == 0)) break;
    const testing::Verdict head = inputs.verdict({step_over(std::max(p.sq, p.sk), rows), n, h});
    take_worst(verdict.errors, head.errors);
    verdict.violation = head.violation.empty() ? "" : fmt::format("kv head {}: {}", h, head.violation);
  }
  return verdict;
}

int run_check(const CheckOptions& options) {
  require_writable({options.json_path});
  const std::vector<Problem> problems = problems_of(options);
  std::vector<Forcing> contexts;
  if (options.entry.empty()) contexts.push_back({make_context(options.threads, {}), {}});
  else
    for (const std::string& name : match_entries(options.entry))
      contexts.push_back({make_context(options.threads, name), bench::info_of(name).operation});
  std::span<const testing::HardInputs> hard;
  if (options.problems.empty()) hard = testing::hard_inputs();
  const auto contexts_for = [&](Operation operation) {
    const auto concerned = [&](const Forcing& forcing) { return forcing.concerns(operation); };
    return static_cast<std::size_t>(std::count_if(contexts.begin(), contexts.end(), concerned));
  };
  std::size_t total = contexts_for(Operation::attention) * hard.size();
  for (const Problem& problem : problems) total += contexts_for(operation_of(problem));
  if (total == 0) throw UsageError(fmt::format("--entry {}: no problem is of its operation", options.entry));
  Report report(problems, total);
  // --entry chooses among rapt's own list of problems; those that were given are not dropped without a word.
  for (const Problem& problem : problems)
    if (!options.problems.empty() && contexts_for(operation_of(problem)) == 0)
      report.skip(short_text(problem), problem, no_entry_of(options.entry, operation_of(problem)));
  for (const Forcing& forcing : contexts) {
    for (const Problem& problem : problems)
      if (forcing.concerns(operation_of(problem))) report.check(problem, forcing.context, options.seeds);
    for (const testing::HardInputs& inputs : hard)
      if (forcing.concerns(Operation::attention)) report.check(inputs, forcing.context);
  }
  return report.finish(options.json_path);
}

}  // namespace rapt::tools
