// attention_backward with NaN, Inf and very large numbers: what is seen propagates, what is hidden never leaks.
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "operations/attention_backward/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

using Gradients = std::vector<std::vector<float>>;

Gradients values_of(BackwardCase& c) {
  Gradients values;
  for (const Tensor* t : c.outputs()) values.push_back(t->values());
  return values;
}
std::size_t finite_count(const Gradients& gradients) {
  std::size_t count = 0;
  for (const auto& values : gradients)
    for (const float x : values) count += std::isfinite(x);
  return count;
}

/// Matrix units leave what has such numbers to vector units, which gives other rows of the sequence other last bits.
bool is_vector(const std::string& entry) {
  for (const EntryInfo& info : entries())
    if (info.name == entry) return info.arithmetic == "f32";
  return false;
}

/// The gradients of a problem's usual numbers: the oracle's, and those of every entry.
struct Before {
  explicit Before(const AttentionBackwardProblem& given) : problem(given) {
    BackwardCase c(problem);
    reference = oracle_backward(c.args());
    for (const std::string& entry : every_entry(problem)) {
      c.clear();
      c.run(forced(entry));
      values[entry] = values_of(c);
    }
  }

  AttentionBackwardProblem problem;
  BackwardReference reference;
  std::map<std::string, Gradients> values;
};

/// What another value of a tensor, of the last sequence, does on every entry: within the oracle's bounds, and rows of
/// gradients that it does not reach keep their bits; on matrix units those of other sequences.
void check_intruder(const Before& before, const std::function<void(BackwardCase&)>& intrude, bool harms = true) {
  BackwardCase after(before.problem, 1, Placement::heap, {}, BackwardCase::Forward::later);
  intrude(after);
  after.run_forward();
  const BackwardReference &was = before.reference, reference = oracle_backward(after.args());
  for (const auto& values : before.values) {
    const std::string& entry = values.first;
    const Gradients& x = values.second;
    INFO(entry << ": " << before.problem.to_string());
    after.clear();
    after.run(forced(entry));
    const Verdict verdict = after.verdict(reference);
    INFO(describe(verdict.errors));
    CHECK(verdict.violation == "");
    const Gradients y = values_of(after);
    CHECK((finite_count(y) < finite_count(x)) == harms);
    std::size_t at = 0;
    for_each_gradient(
        after.args(), reference, [&](const char* name, const TensorView& view, const GradientReference& g) {
          const auto width = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(view.ndim - 1)]);
          const GradientReference& g_before = *std::map<std::string, const GradientReference*>{
              {"dq", &was.dq},       {"dk", &was.dk},         {"dv", &was.dv},
              {"dbias", &was.dbias}, {"dsinks", &was.dsinks}, {"dalibi", &was.dalibi}}[name];
          const bool has_others = view.ndim == 4 && view.shape[0] > 1;
          const std::size_t end = is_vector(entry) ? g.value.size()
                                  : has_others     ? g.value.size() / static_cast<std::size_t>(view.shape[0])
                                                   : 0;
          for (std::size_t row = 0; row < end; row += width) {
            // The same in float64: nothing that the row depends on has changed.
            if (std::memcmp(&g.value[row], &g_before.value[row], width * sizeof(double)) != 0) continue;
            if (std::memcmp(&x[at][row], &y[at][row], width * sizeof(float)) == 0) continue;
            FAIL_CHECK(name << ": row " << row / width << " has other bits");
            break;
          }
          ++at;
        });
  }
}

}  // namespace

TEST_CASE("backward: NaN reaches what sees it and nothing else", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  int n = static_cast<int>(dtype);  // one place for each feature and type
  for (const char* what :
       {"", "causal", "causal align=-9", "window=6,3", "causal window=20,-1 align=30", "mask=hqk", "bias=hqk dbias",
        "mask=bk", "bias=bk mask=qk dbias", "softcap=20 causal", "alibi causal dalibi", "sinks causal dsinks",
        "causal layout=bshd dlse", "causal layout=bhds", "mask=qk layout=other"}) {
    const Before before(typed_backward("b=2 hq=4 hk=2 sq=70 d=24 dv=20 " + std::string(what), dtype));
    INFO(what);
    {
      const int64_t at = std::array{0, 33, 69}[static_cast<std::size_t>(n++ % 3)];
      // Somebody sees every key here, but for the last ones under an alignment of -9 and those a mask hides.
      const std::string words = what;
      const bool late = words.find("align=30") != std::string::npos;  // rows past 59 see no key, nobody keys below 10
      const bool seen = (words != "causal align=-9" || at < 60) && !(late && at == 0);
      if (std::string(what).find("mask=bk") == std::string::npos) {
        check_intruder(
            before,
            [&](BackwardCase& c) {
              c.inputs.k.at({1, 0, at, 5}) = kNan;
            },
            seen);
        check_intruder(
            before,
            [&](BackwardCase& c) {
              c.inputs.v.at({1, 0, at, 5}) = kNan;
            },
            seen);
      }
      if (std::string(what).find("align=-9") == std::string::npos && std::string(what).find('q') == std::string::npos) {
        check_intruder(
            before,
            [&](BackwardCase& c) {
              c.inputs.q.at({1, 2, at, 5}) = kNan;
            },
            !(late && at == 69));
        check_intruder(
            before,
            [&](BackwardCase& c) {
              c.dout.at({1, 2, at, 5}) = kNan;
            },
            !(late && at == 69));
      }
    }
  }
}

// dv needs neither delta nor dP, which a NaN reaches, too.
TEST_CASE("backward: NaN reaches dv where that alone is wanted", "[kernel]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const Before before(typed_backward("b=2 hq=4 hk=2 sq=70 d=24 dv=20 causal grads=v", dtype));
  check_intruder(before, [](BackwardCase& c) { c.inputs.q.at({1, 2, 33, 5}) = kNan; });
  check_intruder(before, [](BackwardCase& c) { c.inputs.k.at({1, 1, 33, 5}) = kNan; });
}

TEST_CASE("backward: Inf in a value or in a gradient propagates", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const char* what : {"", "causal", "window=6,3", "mask=hqk", "softcap=9"}) {
    const Before before(typed_backward("hq=2 sq=70 d=24 " + std::string(what), dtype));
    for (const float value : {kInf, -kInf}) {
      for (const int64_t at : {0, 40, 69}) {
        check_intruder(before, [&](BackwardCase& c) { c.inputs.v.at({0, 1, at, 23}) = value; });
        if (std::string(what) != "mask=hqk")
          check_intruder(before, [&](BackwardCase& c) { c.dout.at({0, 1, at, 23}) = value; });
      }
    }
  }
}

TEST_CASE("backward: NaN and Inf among few rows", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const int64_t sq : {1, 3, 50}) {
    const Before before(typed_backward("b=2 hq=2 sq=" + std::to_string(sq) + " sk=150 d=24 dv=40", dtype));
    check_intruder(before, [&](BackwardCase& c) { c.inputs.q.at({1, 1, sq - 1, 3}) = kNan; });
    check_intruder(before, [](BackwardCase& c) { c.inputs.k.at({1, 0, 149, 23}) = kNan; });
    for (const float value : {kNan, kInf}) {
      check_intruder(before, [&](BackwardCase& c) { c.inputs.v.at({1, 0, 140, 39}) = value; });
      check_intruder(before, [&](BackwardCase& c) { c.dout.at({1, 1, sq - 1, 39}) = value; });
    }
  }
}

TEST_CASE("backward: hidden keys and values may hold anything", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const float value = GENERATE(kNan, kInf);
  for (const char* what : {"mask=k", "bias=k dbias", "mask=k softcap=9", "bias=k causal alibi dalibi dbias"}) {
    const Before before(typed_backward("hq=2 sq=70 sk=70 d=24 dv=20 " + std::string(what), dtype));
    // The masked keys, of which there are some.
    const auto hide = [&](BackwardCase& c, bool in_keys) {
      int64_t hidden = 0;
      for (int64_t j = 0; j < 70; ++j) {
        if (c.inputs.mask ? c.inputs.mask.flat<bool>(j) : c.inputs.bias.flat(j) != -kInf) continue;
        ++hidden;
        for (int64_t e = 0; e < 20; ++e) (in_keys ? c.inputs.k : c.inputs.v).at({0, 1, j, e}) = value;
      }
      REQUIRE(hidden > 0);
    };
    for (const bool in_keys : {true, false})
      check_intruder(
          before, [&](BackwardCase& c) { hide(c, in_keys); }, false);
  }
}

TEST_CASE("backward: rows without keys give and get nothing", "[kernel][long]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const float value = GENERATE(kNan, kInf);
  for (const char* what : {"", "dlse", "softcap=9", "alibi dalibi", "sinks dsinks"}) {
    // Rows 0 to 39 see none.
    const Before before(
        typed_backward("hq=2 sq=70 sk=30 d=24 dv=20 causal align=bottom_right " + std::string(what), dtype));
    const AttentionBackwardProblem& problem = before.problem;
    for (const int64_t head : {0, 1})  // of which one has a sink, where there are any
      for (const int64_t row : {0, 17, 39})
        for (const bool in_q : {true, false})
          check_intruder(
              before,
              [&](BackwardCase& c) {
                (in_q ? c.inputs.q : c.dout).at({0, head, row, 3}) = value;
              },
              false);
    if (problem.dlse)
      check_intruder(
          before,
          [&](BackwardCase& c) {
            c.dlse.at({0, 1, 17}) = value;
          },
          false);
    for (const std::string& entry : every_entry(problem)) {
      BackwardCase c(problem);
      c.run(forced(entry));
      for (int64_t row = 0; row < 40; ++row)
        for (int64_t e = 0; e < 24; ++e) CHECK(c.dq.at({0, 1, row, e}) == 0);
    }
  }
}

TEST_CASE("backward: padding and one sequence's NaN do not reach its neighbours", "[kernel][long]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const char* what : {"", "seqlens", "causal align=bottom_right", "seqlens causal align=bottom_right"})
    for (const std::uint64_t seed : {1, 2, 3}) {
      BackwardCase c(typed_backward("b=3 hq=2 sq=50 sk=60 d=24 dlse " + std::string(what), dtype), seed);
      for (int64_t j = 0; j < 60; ++j)
        for (int64_t e = 0; e < 24; ++e) c.inputs.k.at({1, 0, j, e}) = c.inputs.v.at({1, 1, j, e}) = kNan;
      c.run_forward();
      check_backward(c);
    }
}

TEST_CASE("backward: large scores and jumps between them", "[kernel]") {
  for (const float size : {1e2f, 1e4f, 1e6f})
    for (const char* what : {"", "causal", "softcap=30", "sinks dsinks", "bias=qk dbias"}) {
      BackwardCase c(typed_backward("hq=2 sq=70 sk=70 d=1 scale=1 " + std::string(what), DType::f32));
      for (int64_t j = 0; j < c.inputs.k.size(); ++j) c.inputs.k.flat(j) = j % 3 == 0 ? size : j % 3 == 1 ? -size : 1;
      c.run_forward();
      check_backward(c, false);
    }
}

TEST_CASE("backward: scores whose roundings are past the range of weights give finite gradients", "[kernel]") {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const char* scale : {"1e8", "1e10", "-1e20", "1e34"})
      for (const char* what : {"", "causal sinks dsinks", "alibi dalibi", "bias=qk dbias", "dropout=0.25"}) {
        BackwardCase c(typed_backward("hq=2 sq=70 sk=70 d=16 scale=" + std::string(scale) + " " + what, dtype), 5,
                       Placement::heap, DType::f32);
        for (const std::string& entry : every_entry(c.problem)) {
          INFO(entry << ": " << c.problem.to_string());
          c.clear();
          c.run(forced(entry));
          std::size_t all = 0;
          for (const auto& values : values_of(c)) all += values.size();
          CHECK(finite_count(values_of(c)) == all);
        }
      }
}

TEST_CASE("backward: constant inputs, where the roundings of a long sum all go one way", "[kernel][numbers]") {
  for (const DType dtype : kFloatTypes)
    for (const char* words :
         {"sq=64 sk=1024 d=16", "sq=1024 sk=64 d=16", "hq=8 hk=1 sq=300 sk=100 d=16", "sq=640 d=3 causal"})
      for (const float value : {0.1f, 0.3f, 1.1f}) {
        BackwardCase c(typed_backward(words, dtype));
        for (Tensor* t : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.dout})
          for (int64_t i = 0; i < t->size(); ++i) t->flat(i) = value;
        for (int64_t i = 0; i < c.inputs.v.size(); ++i)  // else dS is 0
          if (i / c.problem.dv % 2) c.inputs.v.flat(i) = 2 * value;
        c.run_forward();
        check_backward(c, false);
      }
}

TEST_CASE("backward: a sink of NaN or +Inf makes the gradients of its head NaN", "[kernel]") {
  for (const float sink : {kNan, kInf}) {
    BackwardCase c(typed_backward("hq=4 hk=2 sq=40 sk=30 d=16 causal align=bottom_right sinks dsinks", DType::f32));
    c.inputs.sinks.flat(1) = sink;
    c.run_forward();
    INFO("sink " << sink);
    check_backward(c);
  }
}

TEST_CASE("backward: sinks far from the scores", "[kernel]") {
  for (const float sink : {-1000.f, -30.f, 30.f, 85.f, 120.f, 1000.f, 1e10f, -1e10f, 2e38f, -kInf})
    for (const char* words :
         {"hq=2 sq=40 sk=70 d=16 sinks dsinks dlse", "hq=2 sq=9 sk=3 d=16 causal align=bottom_right sinks dsinks"}) {
      BackwardCase c(typed_backward(words, DType::f32));
      for (int64_t h = 0; h < 2; ++h) c.inputs.sinks.flat(h) = sink;
      c.run_forward();
      INFO("sink " << sink);
      check_backward(c);
    }
}
