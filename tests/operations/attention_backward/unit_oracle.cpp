// The oracle of the gradients against central differences of the forward's, and its verdicts against wrong results.
#include <cmath>
#include <functional>

#include "operations/attention_backward/case.hpp"
#include "operations/attention_backward/central_differences.hpp"
#include "operations/attention_backward/oracle.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr float kStep = 0x1p-8f;

double loss(BackwardCase& c) {
  const Reference r = oracle(c.inputs.args());
  double sum = 0;
  for (std::int64_t i = 0; i < c.dout.size(); ++i)
    sum += static_cast<double>(c.dout.flat(i)) * r.out[static_cast<std::size_t>(i)];
  for (std::int64_t i = 0; i < c.dlse.size(); ++i)
    if (std::isfinite(r.lse[static_cast<std::size_t>(i)]))
      sum += static_cast<double>(c.dlse.flat(i)) * r.lse[static_cast<std::size_t>(i)];
  return sum;
}

void check_slopes(const std::string& words, std::uint64_t seed = 1) {
  BackwardCase c(AttentionBackwardProblem::parse("attention_backward " + words), seed);
  for (Tensor* t : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.bias, &c.inputs.sinks, &c.inputs.alibi})
    coarsen(*t, kStep);
  const AttentionBackwardArgs args = c.args();
  const BackwardReference r = oracle_backward(args);
  const auto check = [&](const char* name, Tensor& of, const GradientReference& gradient) {
    REQUIRE(gradient.value.size() == static_cast<std::size_t>(of.size()));
    const std::int64_t stride = 1 + of.size() / 40;
    for (std::int64_t i = 0; i < of.size(); i += stride) {
      INFO(words << ": " << name << " " << i);
      const auto at = static_cast<std::size_t>(i);
      CHECK(gradient.magnitude[at] >= std::abs(gradient.value[at]) * (1 - 1e-12));
      CHECK(gradient.bound[at] < 1e-4 * (1 + gradient.magnitude[at]));
      if (!std::isfinite(of.flat(i))) {  // padding, or a bias of -inf
        CHECK(gradient.value[at] == 0);
        continue;
      }
      CHECK(gradient.value[at] == Approx(slope(loss, c, of.flat(i), kStep)).epsilon(1e-7).margin(1e-7));
    }
  };
  check("dq", c.inputs.q, r.dq);
  check("dk", c.inputs.k, r.dk);
  check("dv", c.inputs.v, r.dv);
  if (c.dbias) check("dbias", c.inputs.bias, r.dbias);
  if (c.dsinks) check("dsinks", c.inputs.sinks, r.dsinks);
  if (c.dalibi) check("dalibi", c.inputs.alibi, r.dalibi);
}

}  // namespace

TEST_CASE("oracle of gradients: central differences of every input under every feature", "[unit][numbers]") {
  for (const char* words : {"sq=5 d=4",
                            "sq=3 sk=7 d=5 dv=2 dlse",
                            "sq=1 sk=1 d=2",
                            "b=2 hq=4 hk=2 sq=4 sk=6 d=3 dlse",
                            "sq=6 d=4 causal dlse",
                            "sq=6 sk=4 d=4 causal align=bottom_right",
                            "sq=4 sk=6 d=4 causal align=1",
                            "sq=7 d=3 window=2,1",
                            "sq=4 sk=6 d=4 window=-1,1 align=bottom_right dlse",
                            "sq=5 d=4 scale=0.3",
                            "sq=5 d=4 scale=-0.7",
                            "sq=5 d=4 softcap=2 scale=1 dlse",
                            "b=2 hq=2 sq=4 sk=5 d=3 bias=bhqk dbias dlse",
                            "b=2 hq=2 sq=4 d=3 bias=k dbias",
                            "b=2 hq=2 sq=4 sk=5 d=3 bias=hk dbias",
                            "b=2 hq=2 sq=4 sk=5 d=3 bias=bqk softcap=3 dbias dlse",
                            "b=2 hq=2 sq=4 d=3 mask=bqk",
                            "hq=4 hk=2 sq=5 d=3 alibi causal dalibi dlse",
                            "b=2 hq=2 sq=5 sk=3 d=3 alibi align=-1 dalibi",
                            "b=2 hq=3 sq=4 d=3 sinks dsinks dlse",
                            "hq=2 sq=5 sk=3 d=3 causal align=bottom_right sinks dsinks dlse",
                            "b=4 hq=2 sq=3 sk=6 d=3 seqlens dlse",
                            "b=3 hq=2 hk=1 sq=5 sk=4 d=3 ragged_q=9 dlse",
                            "b=3 hq=2 sq=3 sk=5 d=3 ragged_k=9",
                            "b=3 hq=2 sq=4 sk=4 d=3 ragged_q=8 ragged_k=8 causal bias=bhqk dbias alibi dalibi",
                            "b=2 hq=2 hk=1 sq=4 sk=5 d=3 dv=2 layout=other dlse",
                            "b=2 hq=4 hk=2 sq=5 sk=17 d=3 dropout=0.25 dlse",
                            "b=2 hq=2 sq=5 d=3 causal softcap=2 bias=qk alibi sinks dropout=0.5 dbias dalibi dsinks",
                            "sq=4 d=3 layout=bhds",
                            "b=2 hq=4 hk=2 sq=4 sk=5 d=3 dv=2 gathered dlse",
                            "b=3 hq=3 hk=1 sq=5 sk=3 d=4 gathered pool=7 softcap=2 sinks dsinks dlse",
                            ("b=2 hq=4 hk=2 sq=6 sk=8 d=4 dv=3 causal window=4,-1 align=bottom_right softcap=3 "
                             "bias=hqk mask=bk alibi sinks "
                             "dlse dbias dsinks dalibi")})
    for (const std::uint64_t seed : {1, 2}) check_slopes(words, seed);
}

TEST_CASE("oracle of gradients: a step computes some rows as all are computed", "[unit][numbers]") {
  BackwardCase c(AttentionBackwardProblem::parse(
      "attention_backward b=2 hq=4 hk=2 sq=70 sk=90 d=8 dv=5 causal align=bottom_right dlse sinks dsinks"));
  const BackwardReference all = oracle_backward(c.args()), some = oracle_backward(c.args(), {13, 1, -1});
  for (const auto& [whole, part] : {std::pair{&all.dq, &some.dq}, {&all.dk, &some.dk}, {&all.dv, &some.dv}}) {
    std::size_t computed = 0;
    for (std::size_t i = 0; i < whole->value.size(); ++i) {
      CHECK(whole->computed[i]);
      if (!part->computed[i]) continue;
      ++computed;
      CHECK(part->value[i] == Approx(whole->value[i]).epsilon(1e-12).margin(1e-14));
      CHECK(part->bound[i] == Approx(whole->bound[i]).epsilon(1e-9));
    }
    CHECK(computed > 0);
    CHECK(computed < whole->value.size() / 16);
  }
}

TEST_CASE("oracle of gradients: rows without keys and hidden keys give and get nothing", "[unit][numbers]") {
  BackwardCase c(AttentionBackwardProblem::parse("attention_backward sq=5 sk=3 d=4 causal align=bottom_right dlse"));
  for (std::int64_t e = 0; e < 4; ++e)
    for (const std::int64_t row : {0, 1}) c.inputs.q.at({0, 0, row, e}) = NAN, c.dout.at({0, 0, row, e}) = INFINITY;
  c.dlse.at({0, 0, 1}) = NAN;
  const BackwardReference r = oracle_backward(c.args());
  for (const GradientReference* gradient : {&r.dq, &r.dk, &r.dv})
    for (std::size_t i = 0; i < gradient->value.size(); ++i) {
      CHECK(std::isfinite(gradient->value[i]));
      CHECK(std::isfinite(gradient->bound[i]));
      CHECK((gradient != &r.dq || i >= 8 || gradient->value[i] == 0));
    }
}

TEST_CASE("oracle of gradients: NaN reaches what sees it", "[unit][numbers]") {
  const auto count = [](const GradientReference& gradient) {
    std::size_t nans = 0;
    for (const double x : gradient.value) nans += !std::isfinite(x);
    return nans;
  };
  BackwardCase key(AttentionBackwardProblem::parse("attention_backward sq=6 d=4 causal"));
  key.inputs.k.at({0, 0, 4, 1}) = NAN;  // rows 4 and 5, and through them every key
  BackwardReference r = oracle_backward(key.args());
  CHECK(count(r.dq) == 2 * 4);
  CHECK(count(r.dk) == 6 * 4);
  CHECK(count(r.dv) == 6 * 4);
  BackwardCase gradient(AttentionBackwardProblem::parse("attention_backward sq=6 d=4 causal"));
  gradient.dout.at({0, 0, 2, 1}) = NAN;  // row 2, and keys 0 to 2, of dv in its column
  r = oracle_backward(gradient.args());
  CHECK(count(r.dq) == 4);
  CHECK(count(r.dk) == 3 * 4);
  CHECK(count(r.dv) == 3);
}

TEST_CASE("oracle of gradients: verdicts see what is wrong", "[unit][numbers]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    AttentionBackwardProblem p = AttentionBackwardProblem::parse(
        "attention_backward b=2 hq=2 hk=1 sq=30 sk=40 d=16 bias=hqk alibi align=0 sinks dlse dbias dsinks dalibi "
        "layout=other");
    p.q_dtype = p.kv_dtype = p.out_dtype = p.dout_dtype = dtype;
    BackwardCase c(p);
    const BackwardReference r = oracle_backward(c.args());
    const auto write = [&] {
      for_each_gradient(c.args(), r, [&](const char*, const TensorView& view, const GradientReference& wanted) {
        for (Tensor* t : c.outputs())
          for (std::int64_t i = 0; t->view().data == view.data && i < t->size(); ++i)
            t->flat(i) = static_cast<float>(wanted.value[static_cast<std::size_t>(i)]);
      });
    };
    write();
    INFO(p.to_string());
    REQUIRE(c.verdict(r).violation == "");
    for (Tensor* t : c.outputs()) {
      const std::int64_t middle = t->size() / 2;
      for (const double wrong : {0.5, static_cast<double>(NAN)}) {
        t->flat(middle) = static_cast<float>(1.2 * static_cast<double>(t->flat(middle)) + wrong);
        CHECK(c.verdict(r).violation != "");
        write();
      }
    }
    // Of a whole gradient a little is too much.
    for (Tensor* t : {&c.dq, &c.dk, &c.dv}) {
      const float wrong = dtype == DType::f32 ? 1 + 4e-6f : dtype == DType::f16 ? 1.03f : 1.2f;
      for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) *= wrong;
      CHECK(c.verdict(r).violation != "");
      write();
    }
    c.dq.buffer().data()[size_of(dtype)] = std::byte{0};  // between two elements
    CHECK(c.verdict(r).violation != "");
  }
}
