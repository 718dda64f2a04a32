// index_scores on every entry: against float64, and what its bits may not depend on.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/index_scores/case.hpp"
#include "operations/select_topk/case.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

IndexScoresProblem problem_of(const std::string& words) {
  return IndexScoresProblem::parse("index_scores " + words);
}

/// Every entry, each into fresh poison, within the bounds of float64, and all scores together within `limit`: what is
/// likely is far less than the bounds, which the worst of all inputs may come to.
void check_every_entry(IndexScoresCase& c, double limit = kInf) {
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    const Verdict verdict = c.verdict();
    INFO(describe(verdict.errors));
    REQUIRE(verdict.violation == "");
    REQUIRE(verdict.errors.rel_frobenius <= limit);
  }
}

/// The bits of the outputs.
struct Bits {
  std::vector<std::uint32_t> scores;
  std::vector<std::int32_t> indices;
  friend bool operator==(const Bits&, const Bits&) = default;
};
Bits bits_of(const IndexScoresCase& c) {
  Bits bits;
  for (int64_t i = 0; i < c.scores.size(); ++i) bits.scores.push_back(c.scores.flat<std::uint32_t>(i));
  for (int64_t i = 0; i < c.indices.size(); ++i) bits.indices.push_back(c.indices.flat<std::int32_t>(i));
  return bits;
}
template <class Where>
Bits bits_on(IndexScoresCase& c, const Where& context) {
  c.clear();
  c.run(context);
  return bits_of(c);
}

const char* const kFeatures[] = {
    "sq=5 sk=70 h=3 d=24 full",
    "sq=5 sk=70 h=3 d=24 full linear",
    "sq=70 h=3 d=24",
    "sq=9 sk=70 h=3 d=24 align=top_left",
    "sq=9 sk=70 h=3 d=24 align=bottom_right",
    "sq=70 sk=20 h=3 d=24 align=bottom_right",
    "sq=9 sk=70 h=3 d=24 align=40",
    "sq=9 sk=70 h=3 d=24 align=-5",
    "sq=9 sk=70 h=3 d=24 full align=bottom_right",
    "sq=5 sk=70 h=3 d=24 full topk=1",
    "sq=5 sk=70 h=3 d=24 full topk=20",
    "sq=5 sk=70 h=3 d=24 full topk=70 scores",
    "sq=5 sk=70 h=3 d=24 full topk=100 scores",
    "sq=9 sk=2000 h=2 d=7 full topk=33",
    "b=3 sq=9 sk=70 h=3 d=24 align=bottom_right topk=20 scores",
    "b=3 sq=9 sk=70 h=3 d=24 align=bottom_right topk=20",
    "b=5 sq=9 sk=70 h=3 d=24 align=bottom_right seqlens topk=20 scores",
    "b=5 sq=9 sk=70 h=3 d=24 full seqlens topk=20",
    "b=5 sq=9 sk=70 h=3 d=24 seqlens",
    "b=5 sq=9 sk=96 h=3 d=24 align=bottom_right seqlens page=16 topk=20 scores",
    "b=5 sq=3 sk=70 h=3 d=24 full seqlens page=1 topk=20",
    "b=3 sq=9 sk=70 h=3 d=24 full ranges topk=20 scores",
    "b=3 sq=9 sk=70 h=3 d=24 align=bottom_right ranges topk=20",
    "b=5 sq=9 sk=96 h=3 d=24 align=12 seqlens ranges page=48 topk=20 scores",
    "dtype=bf16 b=2 sq=9 sk=200 h=32 d=128 align=bottom_right topk=64 scores",
    "dtype=bf16 b=2 sq=9 sk=200 h=64 d=128 align=bottom_right topk=64",
    "dtype=bf16 b=2 sq=9 sk=200 h=64 d=64 full linear topk=300 scores",
    "dtype=bf16 b=5 sq=9 sk=192 h=5 d=32 align=bottom_right seqlens page=64 topk=30 scores",
    "dtype=bf16 b=5 sq=9 sk=192 h=40 d=33 align=bottom_right seqlens ranges page=16 topk=30",
    "dtype=f16 b=2 sq=9 sk=100 h=5 d=40 full topk=64 scores",
    "q=bf16 k=i8 b=5 sq=9 sk=192 h=33 d=40 align=bottom_right scales seqlens page=64 topk=30 scores",
    "q=bf16 k=f8e4m3 b=2 sq=9 sk=100 h=64 d=128 align=bottom_right scales topk=30 scores",
    "q=bf16 k=f8e4m3 b=5 sq=9 sk=192 h=64 d=128 full seqlens page=64 topk=30 scores",
    "q=bf16 k=f8e5m2 b=2 sq=9 sk=100 h=7 d=96 full linear scales topk=30",
    "q=bf16 k=f16 b=2 sq=9 sk=100 h=7 d=24 full topk=30 scores",
    "q=f32 k=i8 b=3 sq=9 sk=100 h=7 d=24 full scales seqlens ranges topk=30 scores",
    "q=f16 k=f8e4m3 b=2 sq=9 sk=100 h=7 d=24 full scales",
    "q=f32 k=f8e5m2 b=2 sq=9 sk=100 h=7 d=24 full",
    "q=f32 k=bf16 b=2 sq=9 sk=100 h=7 d=24 full topk=30",
    "q=f16 k=f32 b=2 sq=9 sk=100 h=7 d=24 full topk=30",
    "b=0 sq=9 sk=70 h=3 d=24 full topk=20 scores",
    "b=2 sq=0 sk=70 h=3 d=24 full topk=20 scores",
    "b=2 sq=3 sk=0 h=3 d=24 full topk=20 scores",
    "dtype=bf16 b=2 sq=3 sk=0 h=3 d=24 full topk=20",
};

/// A problem of each kind of kernel and way to keep keys, for what must hold of all.
const char* const kSome[] = {
    "b=2 sq=11 sk=150 h=5 d=40 align=bottom_right topk=40 scores",
    "b=3 sq=3 sk=192 h=9 d=24 full seqlens ranges page=32 topk=40 scores",
    "dtype=bf16 b=2 sq=11 sk=150 h=40 d=64 align=bottom_right topk=40 scores",
    "dtype=bf16 b=3 sq=3 sk=192 h=9 d=24 full linear seqlens page=16 topk=40 scores",
    "q=bf16 k=i8 b=2 sq=11 sk=150 h=32 d=128 full scales topk=40 scores",
    "q=bf16 k=f8e4m3 b=2 sq=11 sk=150 h=3 d=33 full scales topk=40 scores",
};

}  // namespace

TEST_CASE("index_scores: worked out by hand", "[kernel]") {
  const float q[] = {1, 2, 3, -1, 0, 1, -1, 0}, k[] = {1, 0, 0, 1, -1, 2}, weights[] = {1, 0.5f, -2, 4};
  // Products: 1 2 3 and 3 -1 -5 of the first query's heads, 0 1 2 and -1 0 1 of the second's.
  const std::vector<float> with_relu = {1.25f, 1, 1.5f, 0, -1, 0}, linear = {1.25f, 0.75f, 0.25f, -2, -1, 0};
  struct Wanted {
    const char* words;
    std::vector<float> scores;
    std::vector<std::int32_t> indices;
  };
  const Wanted all[] = {
      {"full", with_relu, {2, 0, 1, 0, 2, 1}},
      {"full linear", linear, {0, 1, 2, 2, 1, 0}},
      {"align=top_left", {1.25f, -kInf, -kInf, 0, -1, -kInf}, {0, -1, -1, 0, 1, -1}},
      {"align=bottom_right", {1.25f, 1, -kInf, 0, -1, 0}, {0, 1, -1, 0, 2, 1}},
      {"align=-1", {-kInf, -kInf, -kInf, 0, -kInf, -kInf}, {-1, -1, -1, 0, -1, -1}},
  };
  for (const DType dtype : kFloatTypes)
    for (const auto& [words, scores, indices] : all) {
      IndexScoresProblem problem = problem_of("sq=2 sk=3 h=2 d=2 topk=3 scores " + std::string(words));
      problem.q_dtype = problem.k_dtype = dtype;
      IndexScoresCase c(problem);
      c.scale = 0.5f;
      for (int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = q[i];
      for (int64_t i = 0; i < c.k.size(); ++i) c.k.flat(i) = k[i];
      for (int64_t i = 0; i < c.weights.size(); ++i) c.weights.flat(i) = weights[i];
      for (const std::string& entry : every_entry(problem)) {
        INFO(entry << ": " << problem.to_string());
        CHECK((bits_on(c, forced(entry)).indices == indices));
        CHECK(c.scores.values() == scores);
      }
    }
}

TEST_CASE("index_scores: each feature alone, within the bounds of float64", "[kernel][long]") {
  const Spacing spacing = GENERATE(Spacing::dense, Spacing::gaps);
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      INFO("seed " << seed);
      IndexScoresCase c(problem_of(words), seed, Placement::heap, spacing);
      check_every_entry(c);
    }
}

TEST_CASE("index_scores: of() describes what a case was made from", "[kernel]") {
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const IndexScoresProblem problem = problem_of(words);
      IndexScoresCase c(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
      CHECK(IndexScoresProblem::of(c.args()).to_string() == problem.to_string());
    }
}

TEST_CASE("index_scores: sampled problems, and nothing outside of the tensors is touched", "[kernel][long]") {
  std::mt19937_64 random(601);
  for (int i = 0; i < 100; ++i) {
    const IndexScoresProblem problem = sample_index_scores(random);
    IndexScoresCase c(problem, random() % 1000, i % 2 ? Placement::front : Placement::back,
                      i % 3 ? Spacing::gaps : Spacing::dense);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("index_scores: every size of d and h", "[kernel]") {
  for (const int64_t d : {1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 160, 200})
    for (const int64_t h : {1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 65, 70})
      for (const char* words : {"sq=3 sk=70 d=1 full", "dtype=bf16 sq=3 sk=70 d=1 full topk=10 scores",
                                "q=bf16 k=i8 sq=3 sk=70 d=1 full scales"}) {
        IndexScoresProblem problem = problem_of(words);
        problem.d = d, problem.h = h;
        IndexScoresCase c(problem, static_cast<std::uint64_t>(d + 3 * h), Placement::back);
        c.protect_inputs();
        check_every_entry(c, 6e-7);
      }
}

TEST_CASE("index_scores: every number of queries and keys around blocks of them", "[kernel]") {
  for (const int64_t sk : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 97, 128, 129, 200})
    for (const int64_t sq : {1, 2, 7, 8, 9, 16, 17})
      for (const char* words :
           {"h=3 d=9 align=bottom_right topk=20 scores", "dtype=bf16 h=33 d=32 align=bottom_right topk=20 scores",
            "dtype=bf16 h=3 d=64 align=bottom_right ranges topk=20", "q=bf16 k=f8e4m3 h=3 d=64 align=7 topk=100"}) {
        IndexScoresProblem problem = problem_of(words);
        problem.sq = sq, problem.sk = sk;
        IndexScoresCase c(problem, static_cast<std::uint64_t>(sq + 3 * sk), Placement::back);
        c.protect_inputs();
        check_every_entry(c);
      }
}

// An empty range has its ends somewhere, on a border of keys that a kernel takes together as well as between two.
TEST_CASE("index_scores: queries that see nothing, between others", "[kernel]") {
  for (const char* words : {"sq=9 sk=150 h=5 d=20 full ranges topk=150 scores",
                            "dtype=bf16 sq=9 sk=150 h=5 d=64 full ranges topk=150 scores",
                            "dtype=bf16 sq=9 sk=150 h=40 d=33 full ranges topk=20",
                            "q=bf16 k=i8 sq=9 sk=150 h=33 d=32 full ranges scales topk=20 scores"}) {
    IndexScoresCase c(problem_of(words), 2);
    Tensor begin(DType::i64, Layout(Dims{1, 9})), end(DType::i32, Layout(Dims{1, 9}));
    c.key_begin = std::move(begin), c.key_end = std::move(end);
    for (int64_t place = 0; place <= 150; ++place) {
      for (int64_t token = 0; token < 9; ++token) {
        const bool sees = token % 3 == 0;
        c.key_begin.flat<int64_t>(token) = sees ? 0 : place;
        c.key_end.flat<std::int32_t>(token) = static_cast<std::int32_t>(sees ? 150 : token % 3 == 1 ? place : 0);
      }
      INFO("ranges that end at " << place);
      check_every_entry(c);
    }
  }
}

TEST_CASE("index_scores: hundreds of equal scores", "[kernel]") {
  for (const char* words : {"sq=5 sk=3000 h=5 d=20 full topk=1 scores", "sq=5 sk=3000 h=5 d=20 full topk=700 scores",
                            "b=2 sq=5 sk=3000 h=1 d=20 align=bottom_right topk=2048 scores",
                            "dtype=bf16 sq=5 sk=3000 h=5 d=64 full topk=700 scores",
                            "dtype=bf16 sq=5 sk=3000 h=33 d=40 align=bottom_right topk=2048 scores",
                            "q=bf16 k=i8 b=2 sq=2 sk=3008 h=3 d=40 full scales seqlens page=32 topk=700 scores"})
    for (const int64_t period : {1, 7, 40}) {
      IndexScoresCase c(problem_of(words), 2);
      c.repeat_keys(period);
      for (const std::string& entry : every_entry(c.problem)) {
        INFO(entry << ": " << words << ", every " << period);
        const Bits bits = bits_on(c, forced(entry));
        REQUIRE(c.verdict().violation == "");
        // Equal keys have equal scores, wherever they lie: else there would be no ties.
        for (int64_t i = 0; i < c.problem.b; ++i)
          for (int64_t token = 0; token < c.problem.sq; ++token) {
            int64_t equal = 0, visible = 0;
            for (int64_t j = period; j < c.length(i); ++j) {
              if (c.scores.at<float>({i, token, j}) == -kInf) continue;
              ++visible;
              equal += c.scores.at<float>({i, token, j}) == c.scores.at<float>({i, token, j - period});
            }
            REQUIRE(equal == visible);
          }
      }
    }
}

TEST_CASE("index_scores: the ReLU's zeros are ties, of either sign", "[kernel]") {
  for (const char* words :
       {"sq=9 sk=2000 h=1 d=20 full topk=1500 scores", "dtype=bf16 sq=9 sk=2000 h=1 d=64 full topk=1500 scores",
        "q=bf16 k=f8e4m3 sq=9 sk=2000 h=1 d=64 full scales topk=1500 scores"}) {
    IndexScoresCase c(problem_of(words), 3);
    for (int64_t token = 0; token < 9; ++token) c.weights.at({0, token, 0}) = token % 2 ? -1.f : 1.f;
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << words);
      c.clear();
      c.run(forced(entry));
      REQUIRE(c.verdict().violation == "");
      for (int64_t token = 0; token < 9; ++token) {
        int64_t zeros = 0;
        for (int64_t j = 0; j < 2000; ++j) zeros += c.scores.at<float>({0, token, j}) == 0;
        CHECK(zeros > 500);
        CHECK(zeros < 1500);
      }
    }
  }
}

TEST_CASE("index_scores: fused or apart, the same bits and indices", "[kernel]") {
  std::mt19937_64 random(602);
  for (int i = 0; i < 60; ++i) {
    IndexScoresProblem problem = sample_index_scores(random);
    problem.scores = true, problem.topk = std::max<int64_t>(problem.topk, 1);
    IndexScoresCase c(problem, random() % 1000, Placement::heap, i % 2 ? Spacing::gaps : Spacing::dense);
    if (i % 3 == 0) c.repeat_keys(11);
    for (const std::string& entry : every_entry(problem)) {
      INFO(entry << ": " << problem.to_string());
      const Forced context = forced(entry);
      const Bits both = bits_on(c, context);
      IndexScoresArgs args = c.args();
      args.indices = {};
      c.clear();
      run(args, context);
      CHECK((bits_of(c).scores == both.scores));
      select_topk({c.scores.view(), c.indices.mutable_view()});
      CHECK((bits_of(c).indices == both.indices));
      args = c.args(), args.scores = {};
      c.clear();
      run(args, context);
      CHECK((bits_of(c).indices == both.indices));
    }
  }
}

TEST_CASE("index_scores: bits depend on the query and the key alone", "[kernel]") {
  for (const char* words : kSome) {
    const IndexScoresProblem problem = problem_of(words);
    IndexScoresCase c(problem, 4);
    c.indices = {};
    for (const std::string& entry : every_entry(problem)) {
      INFO(entry << ": " << words);
      const Bits all = bits_on(c, forced(entry));
      for (int64_t i = 0; i < problem.b; ++i)
        for (int64_t token = 0; token < problem.sq; ++token)
          for (const int64_t first : {0, 1, 37}) {
            // One query, and of its keys only those from `first` on.
            IndexScoresArgs args = c.args();
            for (TensorView* t : {&args.q, &args.weights}) *t = slice(slice(*t, 0, i, 1), 1, token, 1);
            for (TensorView* t : {&args.key_begin, &args.key_end})
              if (*t) *t = slice(slice(*t, 0, i, 1), 1, token, 1);
            for (TensorView* t : {&args.seqlens, &args.block_table})
              if (*t) *t = slice(*t, 0, i, 1);
            if (!args.block_table)
              for (TensorView* t : {&args.k, &args.k_scale})
                if (*t) *t = slice(*t, 0, i, 1);
            Tensor begin(DType::i64, Layout(Dims{1, 1}));
            begin.flat<int64_t>(0) = first;
            if (!args.key_begin) args.key_begin = begin.view();
            if (args.align) args.align = Align::offset(c.length(i) - problem.sq + token);
            Tensor row(DType::f32, Layout(Dims{1, 1, problem.sk}));
            args.scores = row.mutable_view();
            run(args, forced(entry));
            for (int64_t j = 0; j < problem.sk; ++j) {
              const std::uint32_t wanted =
                  all.scores[static_cast<std::size_t>((i * problem.sq + token) * problem.sk + j)];
              const bool hidden = !c.key_begin && j < first;
              REQUIRE((hidden ? row.flat<float>(j) == -kInf : row.flat<std::uint32_t>(j) == wanted));
            }
          }
    }
  }
}

TEST_CASE("index_scores: NaN and infinities stay in the scores of their key, and nobody else's", "[kernel]") {
  for (const char* words : kSome) {
    const IndexScoresProblem problem = problem_of(words);
    if (problem.k_dtype == DType::i8) continue;  // has neither: its scales are next
    IndexScoresCase c(problem, 5);
    // Else infinities of both signs would meet in most sums, and hide a NaN that does not belong there.
    for (int64_t i = 0; i < c.weights.size(); ++i) c.weights.flat(i) = std::fabs(c.weights.flat(i));
    for (const std::string& entry : every_entry(problem)) {
      const Bits before = bits_on(c, forced(entry));
      for (const float value : {kNan, kInf, -kInf})
        for (const int64_t j : {0, 33, 63, 64, 149})
          for (int64_t i = 0; i < problem.b; ++i) {
            if (j >= c.length(i)) continue;
            if (problem.k_dtype == DType::f8e4m3 && value != kNan) continue;  // has no infinities
            Element element = c.k.at({c.entry(i, j), c.row(j), problem.d - 1});
            const float own = element;
            element = value;
            const Bits after = bits_on(c, forced(entry));
            const Verdict verdict = c.verdict();
            element = own;
            INFO(entry << ": " << words << ", " << value << " in key " << j << " of sequence " << i);
            REQUIRE(verdict.violation == "");
            for (std::size_t at = 0; at < before.scores.size(); ++at) {
              const auto row = static_cast<int64_t>(at) / problem.sk;
              if (static_cast<int64_t>(at) % problem.sk != j || row / problem.sq != i)
                REQUIRE(after.scores[at] == before.scores[at]);
            }
          }
    }
  }
}

TEST_CASE("index_scores: a scale, a weight or a query that is no number", "[kernel]") {
  for (const char* words : kSome)
    for (const float value : {kNan, kInf, -kInf}) {
      IndexScoresCase c(problem_of(words), 5);
      const auto with = [&](Element element) {
        const float own = element;
        element = value;
        check_every_entry(c);
        element = own;
      };
      INFO(value);
      with(c.weights.at({1, 2, 1}));
      with(c.q.at({1, 2, 1, 3}));
      if (c.k_scale && c.length(1) > 40) with(c.k_scale.at({c.entry(1, 40), c.row(40)}));
    }
}

TEST_CASE("index_scores: what no query sees is not looked at", "[kernel]") {
  for (const char* words : {"b=2 sq=5 sk=150 h=5 d=40 full ranges topk=40 scores",
                            "dtype=bf16 b=2 sq=5 sk=150 h=5 d=64 full ranges topk=9 scores",
                            "q=bf16 k=f8e5m2 b=2 sq=5 sk=150 h=5 d=64 full ranges scales topk=40 scores",
                            "b=2 sq=5 sk=150 h=5 d=40 align=20 topk=40 scores",
                            "dtype=bf16 b=2 sq=5 sk=150 h=5 d=64 align=20 topk=40 scores"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      IndexScoresCase c(problem_of(words), 5);  // with both ends
      for (int64_t row = 0; c.key_begin && row < 10; ++row) {
        const auto set = [&](Tensor& t, int64_t value) {
          if (t.dtype() == DType::i64) t.flat<int64_t>(row) = value;
          else t.flat<std::int32_t>(row) = static_cast<std::int32_t>(value);
        };
        set(c.key_begin, 30 + row), set(c.key_end, 100 + row);
      }
      INFO(entry << ": " << words);
      const Bits before = bits_on(c, forced(entry));
      REQUIRE(c.verdict().violation == "");
      for (const float value : {kNan, kInf}) {
        for (int64_t b = 0; b < 2; ++b)
          for (int64_t j = 0; j < 150; ++j) {
            const bool seen = c.key_begin ? j >= 30 + 5 * b && j < 105 + 5 * b : j < 25;
            if (seen) continue;
            for (int64_t d = 0; d < c.problem.d; ++d) c.k.at({b, j, d}) = value;
            if (c.k_scale) c.k_scale.at({b, j}) = value;
          }
        CHECK((bits_on(c, forced(entry)) == before));
      }
    }
}

TEST_CASE("index_scores: scores of nothing but zeros and of nothing visible", "[kernel]") {
  for (const char* words :
       {"sq=9 sk=100 h=5 d=20 full topk=30 scores", "dtype=bf16 sq=9 sk=100 h=5 d=64 full topk=30 scores"}) {
    IndexScoresCase zeros(problem_of(words));
    for (int64_t i = 0; i < zeros.q.size(); ++i) zeros.q.flat(i) = 0;
    IndexScoresCase hidden(problem_of(words + std::string(" ranges")), 2);
    for (int64_t i = 0; i < 9; ++i) {
      if (hidden.key_end.dtype() == DType::i64) hidden.key_end.flat<int64_t>(i) = 0;
      else hidden.key_end.flat<std::int32_t>(i) = 0;
    }
    for (const std::string& entry : every_entry(zeros.problem)) {
      INFO(entry << ": " << words);
      bits_on(zeros, forced(entry)), bits_on(hidden, forced(entry));
      for (std::int32_t i = 0; i < 9 * 30; ++i) {
        CHECK(zeros.indices.flat<std::int32_t>(i) == i % 30);
        CHECK(hidden.indices.flat<std::int32_t>(i) == -1);
      }
      for (int64_t i = 0; i < 9 * 100; ++i) {
        CHECK(zeros.scores.flat<float>(i) == 0);
        CHECK(hidden.scores.flat<float>(i) == -kInf);
      }
    }
  }
}

TEST_CASE("index_scores: 25 replays on any threads write the same bits", "[kernel][numbers]") {
  for (const char* words :
       {"b=2 sq=50 sk=700 h=8 d=64 align=bottom_right topk=200 scores", "sq=1 sk=20000 h=8 d=64 full topk=300",
        "dtype=bf16 b=2 sq=50 sk=1500 h=32 d=128 align=bottom_right topk=200 scores",
        "dtype=bf16 b=2 sq=2 sk=16384 h=64 d=128 full seqlens page=64 topk=512 scores"}) {
    IndexScoresCase c(problem_of(words), 6);
    c.repeat_keys(300);  // ties on both sides of every border
    for (const std::string& entry : threaded_entries(c.problem)) {
      const Bits serial = bits_on(c, forced(entry));
      REQUIRE(c.verdict(17).violation == "");
      int replay = 0;
      const auto executors = all_executors();
      for (; replay < 25; ++replay) {
        const auto& executor = executors[static_cast<std::size_t>(replay) % executors.size()];
        const int threads = 1 + replay * 5 % 16;
        INFO(entry << " on " << executor->name() << ", " << threads << " threads: " << words);
        REQUIRE((bits_on(c, forced(entry, executor, threads)) == serial));
      }
    }
  }
}

TEST_CASE("index_scores: 1 to 16 threads write the same bits", "[kernel][long]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words : {"b=3 sq=3 sk=5000 h=8 d=64 align=bottom_right topk=100 scores",
                            "dtype=bf16 b=3 sq=3 sk=5000 h=64 d=128 align=bottom_right seqlens topk=100"}) {
    IndexScoresCase c(problem_of(words), 4);
    for (const std::string& entry : threaded_entries(c.problem)) {
      const Bits serial = bits_on(c, forced(entry));
      for (int threads = 1; threads <= 16; ++threads) {
        INFO(entry << " on " << threads << ": " << words);
        REQUIRE((bits_on(c, forced(entry, executor, threads)) == serial));
      }
    }
  }
}

TEST_CASE("index_scores: keys that threads share in splits", "[kernel][threads][numbers]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words :
       {"b=3 sq=1 sk=20000 h=4 d=40 full topk=2048", "dtype=bf16 b=3 sq=1 sk=20000 h=16 d=128 full topk=2048",
        "dtype=bf16 b=3 sq=1 sk=20000 h=32 d=64 align=bottom_right seqlens topk=2048 scores",
        "q=bf16 k=f8e4m3 b=3 sq=1 sk=20032 h=9 d=32 full scales seqlens ranges page=64 topk=100"})
    for (const int64_t period : {0, 900}) {
      IndexScoresCase c(problem_of(words), 2);
      if (period > 0) c.repeat_keys(period);
      for (const std::string& entry : threaded_entries(c.problem)) {
        const Bits serial = bits_on(c, forced(entry));
        REQUIRE(c.verdict().violation == "");
        for (const int threads : {2, 3, 16}) {
          INFO(entry << " on " << threads << ": " << words << ", every " << period);
          const Context context = forced(entry, executor, threads);
          CHECK((Plan(c.problem, context).explain().find(" splits") != std::string::npos));
          REQUIRE((bits_on(c, context) == serial));
        }
      }
    }
}

TEST_CASE("index_scores: verdicts see what is wrong", "[kernel]") {
  for (const char* words : {"b=2 sq=3 sk=40 h=2 d=16 linear align=bottom_right topk=8 scores",
                            "b=2 sq=3 sk=40 h=2 d=16 linear align=bottom_right topk=8"}) {
    IndexScoresCase c(problem_of(words), 3, Placement::heap, Spacing::gaps);
    const auto violation = [&](const std::function<void()>& spoil) {
      c.clear();
      c.run(Context());
      REQUIRE(c.verdict().violation == "");
      spoil();
      return c.verdict().violation;
    };
    const auto index = [&](int64_t i) -> std::int32_t& { return c.indices.at<std::int32_t>({1, 2, i}); };
    INFO(words);
    CHECK(violation([&] { index(3) = index(2); }) != "");
    CHECK(violation([&] { std::swap(index(0), index(7)); }) != "");
    CHECK(violation([&] { index(7) = -1; }) != "");
    CHECK(violation([&] { index(0) = 40; }) != "");
    CHECK(violation([&] { c.indices.at<std::int32_t>({1, 0, 0}) = 39; }) != "");  // which only the last query sees
    CHECK(violation([&] {                                                         // the best one is left out
            for (int64_t i = 0; i < 7; ++i) index(i) = index(i + 1);
            for (std::int32_t j = 0;; ++j) {
              bool is_one = false;
              for (int64_t i = 0; i < 7; ++i) is_one = is_one || index(i) == j;
              if (!is_one) return void(index(7) = j);
            }
          }) != "");
    CHECK(violation([&] { REQUIRE(c.indices.spoil_gap()); }) != "");
    if (!c.scores) continue;
    CHECK(violation([&] { c.scores.at({1, 2, 5}) *= 1.0001f; }) != "");
    CHECK(violation([&] { c.scores.at({1, 2, 5}) = kNan; }) != "");
    CHECK(violation([&] { c.scores.at({1, 0, 39}) = -3e38f; }) != "");  // hidden
    CHECK(violation([&] { c.scores.at({1, 2, 5}) = -kInf; }) != "");
  }
}
