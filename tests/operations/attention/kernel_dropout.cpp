// Dropout on every entry that takes it: the mask is the documented one, and everything else is as without it.
#include <cmath>
#include <vector>

#include "rapt/dropout.hpp"
#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

// Of few rows and of many, of whole blocks of keys and of parts, of split keys.
const char* const kProblems[] = {
    "attention b=2 hq=6 hk=2 sq=80 sk=120 d=40 dv=24 causal align=bottom_right bias=bk sinks lse",
    "attention b=4 hq=2 sq=60 sk=110 d=64 lse ragged_q=130 ragged_k=260 layout=bshd",
    "attention b=5 hq=10 hk=2 sq=1 sk=700 d=64 lse seqlens",
    "attention b=1 hq=3 sq=160 sk=300 d=33 window=40,25 align=70 lse",
    "attention b=1 hq=8 hk=1 sq=2 sk=3000 d=32 causal align=bottom_right lse",
    "attention b=2 hq=2 sq=5 sk=40 d=16 mask=bqk softcap=9 lse",
};

AttentionProblem with_dropout(const std::string& text, DType dtype, float p) {
  AttentionProblem problem = typed(text, dtype);
  problem.dropout = p;
  return problem;
}

// Whether lse is that of the call without dropout: its bits on a CPU. On a GPU another kernel may compute that, whose
// blocks of keys are others.
bool is_lse(const std::string& entry, Case& with, Case& without) {
  if (device_of(entry) == DeviceType::cpu) return same_bits(with.lse, without.lse);
  bool alike = true;
  for (std::int64_t i = 0; i < with.lse.size(); ++i) {
    const auto a = static_cast<float>(with.lse.flat(i)), b = static_cast<float>(without.lse.flat(i));
    alike &= a == b || std::abs(a - b) <= 1e-5f * (1 + std::abs(b));
  }
  return alike;
}

}  // namespace

TEST_CASE("dropout meets its definition with every type and feature", "[kernel][numbers]") {
  const DType dtype = each_type();
  for (const char* text : kProblems)
    for (const float p : {0.1f, 0.5f, 0.97f})
      for (const std::uint64_t seed : {1, 2}) check_every_entry(with_dropout(text, dtype, p), seed);
}

TEST_CASE("dropout meets its definition over caches", "[kernel][numbers]") {
  for (const char* text :
       {"attention kv=i8 b=3 hq=8 hk=2 sq=1 sk=480 d=64 causal align=bottom_right seqlens page=16 groups=1",
        "attention kv=f8e4m3 b=2 hq=2 sq=40 sk=96 d=32 seqlens",
        "attention b=3 hq=4 hk=2 sq=3 sk=96 d=32 causal align=bottom_right window=60,0 seqlens ring",
        "attention kv=i4x2 b=2 hq=2 sq=33 sk=70 d=32 seqlens k_groups=2 v_groups=4 zeros"})
    check_every_entry(AttentionProblem::parse(std::string(text) + " dropout=0.3"));
}

TEST_CASE("attention drops what dropout_mask says", "[kernel]") {
  const DType dtype = each_type();
  // Values are rows of the identity: an element of out is one weight.
  for (const char* text :
       {"attention b=2 hq=4 hk=2 sq=37 sk=150 d=16 dv=150", "attention b=2 hq=4 hk=2 sq=3 sk=90 d=16 dv=90",
        "attention b=1 hq=2 sq=70 sk=301 d=8 dv=301"}) {
    Case c(with_dropout(text, dtype, 0.25f));
    const AttentionProblem& p = c.problem;
    for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 0.25f * c.q.flat(i);
    for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = i % p.dv == i / p.dv % p.sk ? 1.f : 0.f;
    std::vector<char> kept(static_cast<std::size_t>(p.b * p.hq * p.sq * p.sk));
    dropout_mask(c.dropout, MutableTensorView(kept.data(), DType::boolean, {p.b, p.hq, p.sq, p.sk}));
    for (const std::string& entry : every_entry(p)) {
      c.poison_outputs();
      run(c.args(), entry);
      std::size_t wrong = 0;
      for (std::int64_t i = 0; i < c.out.size(); ++i)
        wrong += (c.out.flat(i) != 0) != kept[static_cast<std::size_t>(i)];
      INFO(entry << ": " << p.to_string());
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("dropout of 0 is none, of 1 leaves zeros, and lse never changes", "[kernel][numbers]") {
  const DType dtype = each_type();
  for (const char* text : kProblems) {
    Case without(typed(text, dtype), 3), with(typed(text, dtype), 3);
    AttentionArgs none = with.args(), half = with.args(), all = with.args();
    none.score.dropout = Dropout{0, 5, 6}, half.score.dropout = Dropout{0.5f, 5, 6},
    all.score.dropout = Dropout{1, 5, 6};
    CHECK(AttentionProblem::of(none) == AttentionProblem::of(without.args()));
    for (const std::string& entry : every_entry(without.problem)) {
      INFO(entry << ": " << text);
      run(without.args(), entry);
      with.poison_outputs();
      run(none, entry);
      CHECK(same_bits(without.out, with.out));
      CHECK(same_bits(without.lse, with.lse));
    }
    for (const std::string& entry : every_entry(with_dropout(text, dtype, 0.5f))) {
      INFO(entry << ": " << text);
      run(without.args(), entry);
      with.poison_outputs();
      run(half, entry);
      CHECK_FALSE(same_bits(without.out, with.out));
      CHECK(is_lse(entry, with, without));
      with.poison_outputs();
      run(all, entry);
      std::int64_t zeros = 0;
      for (std::int64_t i = 0; i < with.out.size(); ++i) zeros += with.out.flat(i) == 0;
      CHECK(zeros == with.out.size());
      CHECK(is_lse(entry, with, without));
    }
  }
}

TEST_CASE("dropout: executors and thread counts do not change a bit", "[kernel][numbers]") {
  const DType dtype = each_type();
  for (const char* text : kProblems) {
    const AttentionProblem problem = with_dropout(text, dtype, 0.2f);
    Case first(problem, 3), second(problem, 3);
    for (const std::string& entry : threaded_entries(problem)) {
      run(first.args(), entry);
      for (int threads : {1, 2, 3, 4}) {
        second.poison_outputs();
        run(second.args(), forced(entry, std::make_shared<ThreadExecutor>(threads), threads));
        INFO(entry << " with " << threads << ": " << problem.to_string());
        CHECK(same_bits(first.out, second.out));
        CHECK(same_bits(first.lse, second.lse));
      }
    }
  }
}

// Its own number is what a sequence is drawn by, so that the first of a batch is the one that can be asked alone.
TEST_CASE("dropout: the first sequence gives the bits that it gives alone", "[kernel][numbers]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=4 hq=6 hk=2 sq=70 sk=111 d=48 causal align=bottom_right lse",
                           "attention b=5 hq=8 hk=2 sq=1 sk=2000 d=64 lse"}) {
    const AttentionProblem problem = with_dropout(text, dtype, 0.2f);
    Case batch(problem), single(problem);
    for (const std::string& entry : every_entry(problem)) {
      const Forced context = forced(entry, tbb_executor(), 2);
      run(batch.args(), context);
      single.poison_outputs();
      AttentionArgs one = batch.args();
      one.q = slice(one.q, 0, 0, 1), one.kv.k = slice(one.kv.k, 0, 0, 1), one.kv.v = slice(one.kv.v, 0, 0, 1);
      one.out = slice(single.out.mutable_view(), 0, 0, 1), one.lse = slice(single.lse.mutable_view(), 0, 0, 1);
      run(one, context);
      INFO(entry << ": " << text);
      bool same = true;
      for (std::int64_t i = 0; i < batch.out.size() / problem.b; ++i)
        same = same && batch.out.flat(i) == single.out.flat(i);
      for (std::int64_t i = 0; i < batch.lse.size() / problem.b; ++i)
        same = same && batch.lse.flat(i) == single.lse.flat(i);
      CHECK(same);
    }
  }
}

TEST_CASE("dropout: what is not finite stays out of rows that drop it, in a value; in a score it does not",
          "[kernel]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=1 hq=2 sq=70 sk=150 d=16 lse", "attention b=2 hq=4 hk=2 sq=2 sk=150 d=16 lse",
                           "attention b=1 hq=2 sq=90 d=24 causal lse", "attention b=1 hq=4 hk=2 sq=2 sk=2500 d=16 lse"})
    for (const float p : {0.5f, 1.f})
      for (const float bad : {kNan, kInf, -kInf}) {
        const AttentionProblem problem = with_dropout(text, dtype, p);
        Case value(problem), key(problem);
        value.v.at({0, 0, 33, 5}) = bad, value.v.at({0, 1, 70, 0}) = bad;
        check_every_entry(value, value.args());
        // Scores of NaN, or of +-Inf where the products of both signs do not meet.
        for (std::int64_t i = 0; i < key.q.size(); ++i)
          key.q.flat(i) = std::abs(static_cast<float>(key.q.flat(i))) + 0.1f;
        key.k.at({0, 0, 33, 5}) = bad;
        check_every_entry(key, key.args());
      }
}

TEST_CASE("entries without dropout say so, and dispatch passes them over", "[kernel]") {
  for (const EntryInfo& entry : entries()) {
    if (entry.operation != Operation::attention || !entry.unusable.empty() || !selected(entry.name)) continue;
    for (const DType dtype : kFloatTypes) {
      AttentionProblem problem = typed("attention b=1 hq=2 sq=16 sk=600 d=64", dtype);
      problem.device = device_of(entry.name);
      const auto refusal = [&] { return refused_text([&] { Plan(problem, forced(entry.name)); }); };
      if (!refusal().empty()) continue;  // other types
      problem.dropout = 0.1f;
      INFO(entry.name << ": " << problem.to_string());
      const bool vectors = entry.arithmetic == "f32" && entry.backend == "cpu";
      const bool drops = vectors || entry.name.find("attention_prefill.bf16.cuda") == 0 ||
                         entry.name.find("attention_prefill.f16.cuda") == 0;
      CHECK((refusal().empty() == drops && entry.dropout == drops));
      if (!drops) CHECK(refusal().find("takes no dropout") != std::string::npos);
    }
  }
  for (const DType dtype : kFloatTypes)
    CHECK(Plan(with_dropout("attention b=1 hq=8 sq=2048 d=64", dtype, 0.1f)).entry().find(".f32.") !=
          std::string::npos);
}
