// What attention_backward refuses, and its problem's text.
#include <functional>
#include <random>
#include <string>

#include "operations/attention/sampler.hpp"
#include "operations/attention_backward/case.hpp"
#include "rapt/plan.hpp"
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using Spoil = std::function<void(AttentionBackwardArgs&, BackwardCase&)>;

constexpr const char* kSmall = "b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4 ";
constexpr const char* kWhole =
    "b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4 align=top_left seqlens bias=bhqk mask=bhqk alibi sinks dlse dbias dsinks dalibi";

AttentionBackwardProblem problem_of(const std::string& words) {
  return AttentionBackwardProblem::parse("attention_backward " + words);
}

void refuses(const std::string& argument, const Spoil& spoil, const std::string& words = kSmall) {
  check_refusal(argument, BackwardCase(problem_of(words), 1, Placement::front), attention_backward, spoil);
}

using A = AttentionBackwardArgs;
using Field = TensorField<A>;
/// What the forward does not have as such.
constexpr Field kFields[] = {
    tensor_field<A, &A::q>("q", kWhole),          tensor_field<A, &A::out>("out", kWhole),
    tensor_field<A, &A::lse>("lse", kWhole),      tensor_field<A, &A::dout>("dout", kWhole),
    tensor_field<A, &A::dlse>("dlse", kWhole),    tensor_field<A, &A::dq>("dq", kWhole),
    tensor_field<A, &A::dk>("dk", kWhole),        tensor_field<A, &A::dv>("dv", kWhole),
    tensor_field<A, &A::dbias>("dbias", kWhole),  tensor_field<A, &A::dsinks>("dsinks", kWhole),
    tensor_field<A, &A::dalibi>("dalibi", kWhole)};

}  // namespace

TEST_CASE("validation of gradients: sizes and strides of every tensor", "[unit]") {
  for (const Field& m : kFields)
    for (const auto spoil : kBadLayouts)
      refuses(
          m.name, [&](AttentionBackwardArgs& a, BackwardCase&) { spoil(m.layout(a)); }, kWhole);
}

TEST_CASE("validation of gradients: null, misaligned and on another device", "[unit]") {
  for (const Field& m : kFields) {
    refuses(
        m.name, [&](AttentionBackwardArgs& a, BackwardCase&) { m.data(a) = nullptr; }, kWhole);
    refuses(
        m.name,
        [&](AttentionBackwardArgs& a, BackwardCase&) { m.data(a) = static_cast<const std::byte*>(m.data(a)) + 1; },
        kWhole);
  }
  for (MutableTensorView AttentionBackwardArgs::*gradient : {&A::dq, &A::dk, &A::dv, &A::dbias, &A::dsinks, &A::dalibi})
    for (const Field& m : kFields) {
      AttentionBackwardArgs none;
      if (&m.layout(none) != &(none.*gradient)) continue;
      refuses(
          m.name, [&](AttentionBackwardArgs& a, BackwardCase&) { (a.*gradient).device.type = DeviceType::cuda; },
          kWhole);
    }
  refuses("dout", [](AttentionBackwardArgs& a, BackwardCase&) { a.dout.device.type = DeviceType::cuda; });
}

TEST_CASE("validation of gradients: types", "[unit]") {
  for (const Field& m : kFields) {
    const bool f32_only = std::string(m.name) == "lse" || std::string(m.name) == "dlse";
    for (const DType dtype : {DType::boolean, DType::i32, DType::i64, DType::i8, DType::f8e4m3, DType::bf16})
      if (dtype != DType::bf16 || f32_only)
        refuses(
            m.name, [&](AttentionBackwardArgs& a, BackwardCase&) { m.dtype(a) = dtype; }, kWhole);
  }
  refuses("v", [](AttentionBackwardArgs& a, BackwardCase&) { a.kv.v.dtype = DType::bf16; });
}

TEST_CASE("validation of gradients: shapes are those of what they are of", "[unit]") {
  for (const Field& m : kFields) {
    if (std::string(m.name) == "q") continue;  // has the say
    // One less of any dimension, and one dimension less.
    for (std::size_t dim = 0; dim < 4; ++dim)
      refuses(
          m.name,
          [&](AttentionBackwardArgs& a, BackwardCase&) {
            Layout& l = m.layout(a);
            --l.shape[std::min<std::size_t>(dim, static_cast<std::size_t>(l.ndim) - 1)];
          },
          kWhole);
    refuses(
        m.name,
        [&](AttentionBackwardArgs& a, BackwardCase&) {
          Layout& l = m.layout(a);
          if (l.ndim == 1) l.shape = {1, l.shape[0]}, l.strides = {4, 1}, l.ndim = 2;
          else --l.ndim;
        },
        kWhole);
  }
  // A bias that broadcasts has a gradient that does.
  refuses(
      "dbias", [](AttentionBackwardArgs& a, BackwardCase&) { a.dbias.shape[0] = 2; },
      kSmall + std::string("bias=hk dbias"));
}

TEST_CASE("validation of gradients: what is missing", "[unit]") {
  refuses("lse", [](AttentionBackwardArgs& a, BackwardCase&) { a.lse = {}; });
  refuses("out", [](AttentionBackwardArgs& a, BackwardCase&) { a.out = {}; });
  refuses("dout", [](AttentionBackwardArgs& a, BackwardCase&) { a.dout = {}; });
  refuses("q", [](AttentionBackwardArgs& a, BackwardCase&) { a.q = {}; });
  refuses("k", [](AttentionBackwardArgs& a, BackwardCase&) { a.kv.k = {}; });
  refuses("v", [](AttentionBackwardArgs& a, BackwardCase&) { a.kv.v = {}; });
  refuses("dq", [](AttentionBackwardArgs& a, BackwardCase&) { a.dq = a.dk = a.dv = {}; });
  refuses(
      "dbias", [](AttentionBackwardArgs& a, BackwardCase&) { a.score.bias = {}; }, kWhole);
  refuses(
      "dsinks", [](AttentionBackwardArgs& a, BackwardCase&) { a.score.sinks = {}; }, kWhole);
  refuses(
      "dalibi", [](AttentionBackwardArgs& a, BackwardCase&) { a.score.alibi = {}; }, kWhole);
  refuses("score.align", [](AttentionBackwardArgs& a, BackwardCase&) { a.score.causal = true; });
}

TEST_CASE("validation of gradients: overlaps", "[unit]") {
  using Pointer = MutableTensorView AttentionBackwardArgs::*;
  const std::pair<const char*, Pointer> gradients[] = {{"dq", &A::dq},         {"dk", &A::dk},
                                                       {"dv", &A::dv},         {"dbias", &A::dbias},
                                                       {"dsinks", &A::dsinks}, {"dalibi", &A::dalibi}};
  for (const auto& [name, gradient] : gradients) {
    INFO(name);
    // With an input or another gradient: one of the two is named; and with itself.
    BackwardCase c(problem_of(kWhole), 1);
    const auto refused = [&](const std::function<void(AttentionBackwardArgs&)>& spoil) {
      AttentionBackwardArgs args = c.args();
      spoil(args);
      return refused_argument([&] { attention_backward(args); });
    };
    const Pointer to = gradient;
    for (const Tensor* t : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.out, &c.inputs.lse, &c.dout, &c.dlse,
                            &c.inputs.bias, &c.inputs.mask, &c.inputs.sinks, &c.inputs.alibi})
      CHECK(refused([&](AttentionBackwardArgs& a) { (a.*to).data = const_cast<std::byte*>(t->buffer().data()); }) !=
            "");
    for (const auto& [other_name, other] : gradients) {
      const Pointer from = other;
      if (from != to) CHECK(refused([&](AttentionBackwardArgs& a) { (a.*to).data = (a.*from).data; }) != "");
    }
    CHECK(refused([&](AttentionBackwardArgs& a) {
            const auto last = static_cast<std::size_t>((a.*to).ndim - 1);
            (a.*to).strides[last] = 0;
          }) == name);
    for (const Tensor* t : c.outputs()) CHECK(same_bits(*t, Tensor(t->dtype(), t->layout())));
  }
}

TEST_CASE("validation of gradients: gathered keys", "[unit]") {
  BackwardCase c(problem_of("b=2 hq=2 sq=3 sk=4 d=8 gathered pool=9"), 3);
  REQUIRE(c.inputs.k.layout().shape[0] == 2);
  const auto refused = [&](auto spoil) {
    AttentionBackwardArgs args = c.args();
    spoil(args);
    return refused_argument([&] { attention_backward(args); });
  };
  using Args = AttentionBackwardArgs;
  CHECK(refused([](Args& a) { a.dk.shape[2] = 4; }) == "dk");  // the lists' length, not the pool's
  CHECK(refused([](Args& a) { a.dv.shape[0] = 1; }) == "dv");
  CHECK(refused([](Args& a) { a.kv.indices = {}; }) == "kv.indices");
  CHECK(refused([](Args& a) { a.score.causal = true; }) == "score.causal");
  CHECK(refused([](Args& a) { a.score.dropout = Dropout{0.5f, 1, 2}; }) == "score.dropout");
  CHECK(refused([](Args& a) { a.kv.k.shape[2] = a.kv.v.shape[2] = a.dk.shape[2] = a.dv.shape[2] = 1; }) ==
        "kv.indices");  // which names rows past the pool's end
  CHECK(refused([](Args& a) { a.lse = {}; }) == "lse");
  for (const Tensor* t : c.outputs()) CHECK(same_bits(*t, Tensor(t->dtype(), t->layout())));
  CHECK(AttentionBackwardProblem::of(c.args()).pool == 9);
  CHECK_NOTHROW(Plan(Problem(c.problem)).run(c.args()));
  CHECK(refused_argument([&] { Plan(Problem(problem_of("b=2 hq=2 sq=3 sk=4 d=8 gathered pool=8"))).run(c.args()); }) ==
        "args");
  for (const char* words :
       {"sq=3 d=8 pool=9", "sq=3 sk=4 d=8 gathered pool=-1", "sq=3 sk=4 d=8 gathered pool=281474976710657"})
    CHECK(refused_argument([&] { Plan(Problem(problem_of(words))); }) == "pool");
  CHECK(refused_argument([&] { Plan(Problem(problem_of("sq=3 sk=4 d=8000 gathered pool=281474976710656"))); }) ==
        "problem");
}

TEST_CASE("validation of gradients: caches have none", "[unit]") {
  for (const char* words : {"b=2 hq=2 sq=3 sk=32 d=8 page=16 seqlens", "b=2 hq=2 sq=3 sk=32 d=8 ring seqlens"}) {
    CHECK(refused_argument([&] { Plan(Problem(problem_of(words))); }) == "kv");
    BackwardCase fits(problem_of("b=2 hq=2 sq=3 sk=32 d=8"));
    Case cached(AttentionProblem::parse("attention lse " + std::string(words)));
    AttentionBackwardArgs args = fits.args();
    args.kv = cached.args().kv;
    CHECK(refused_argument([&] { attention_backward(args); }) != "");
    if (args.kv.kind != KvSource::Kind::paged) CHECK(refused_argument([&] { attention_backward(args); }) == "kv");
  }
  for (const char* words :
       {"kv=i8 groups=1 sq=3 sk=32 d=8", "kv=f8e4m3 sq=3 sk=32 d=8", "kv=i4x2 groups=2 sq=3 sk=32 d=8"}) {
    CHECK(refused_argument([&] { Plan(Problem(problem_of(words))); }) == "k");
    BackwardCase fits(problem_of("sq=3 sk=32 d=8 grads=q"));
    Case cached(AttentionProblem::parse("attention lse " + std::string(words)));
    AttentionBackwardArgs args = fits.args();
    args.kv = cached.args().kv;
    CHECK(refused_argument([&] { attention_backward(args); }) == "k");
  }
}

TEST_CASE("validation of gradients: problems that no arguments could give", "[unit]") {
  const auto refused = [](const std::string& words) {
    return refused_argument([&] { Plan(Problem(problem_of(words))); });
  };
  CHECK(refused(kSmall) == "");
  CHECK(refused("sq=4 d=0") == "q");
  CHECK(refused("hq=3 hk=2 sq=4 d=8") != "");
  CHECK(refused("sq=4 d=8 grads=") == "dq");
  CHECK(refused("sq=4 d=8 dbias") == "dbias");
  CHECK(refused("sq=4 d=8 dsinks") == "dsinks");
  CHECK(refused("sq=4 d=8 dalibi") == "dalibi");
  CHECK(refused("sq=4 d=8 dout=i8") == "dout");
  CHECK(refused("sq=4 d=8 sinks dsinks grads=") == "");
  CHECK(refused("sq=4 sk=5 d=8 causal") == "score.align");
}

TEST_CASE("validation of gradients: tensors without elements have no address", "[unit]") {
  for (const char* words : {"b=0 hq=2 sq=4 d=8", "b=2 hq=2 sq=0 sk=4 d=8", "b=2 hq=2 sq=4 sk=0 d=8"}) {
    BackwardCase c(problem_of(words));
    AttentionBackwardArgs args = c.args();
    for (TensorView* t : {&args.q, &args.out, &args.lse, &args.dout, &args.kv.k, &args.kv.v})
      if (t->shape[0] * t->shape[2] == 0) t->data = nullptr;
    for (MutableTensorView* t : {&args.dq, &args.dk, &args.dv})
      if (t->shape[0] * t->shape[2] == 0) t->data = nullptr;
    INFO(words);
    CHECK(refused_text([&] { attention_backward(args); }) == "");
    CHECK(AttentionBackwardProblem::of(args).to_string() == c.problem.to_string());
    for (const Tensor* t : c.outputs())
      for (const float x : t->values()) CHECK(x == 0);
  }
}

TEST_CASE("problem of gradients: its text reads back", "[unit]") {
  std::mt19937_64 random(302);
  for (int i = 0; i < 300; ++i) {
    const AttentionBackwardProblem p = sample_backward(random, kEverything);
    INFO(p.to_string());
    CHECK((AttentionBackwardProblem::parse(p.to_string()) == p));
    CHECK((std::get<AttentionBackwardProblem>(parse_problem(p.to_string())) == p));
  }
  const AttentionBackwardProblem plain = problem_of(kSmall);
  for (const char* word : {"dout=bf16", "dtype=f16", "grads=q", "grads=kv", "grads=", "dlse", "dbias", "dsinks",
                           "dalibi", "causal", "softcap=3", "out=bf16"}) {
    const AttentionBackwardProblem p = problem_of(std::string(kSmall) + word);
    INFO(word);
    CHECK_FALSE((p == plain));
    CHECK((AttentionBackwardProblem::parse(p.to_string()) == p));
  }
  CHECK(problem_of("sq=4 d=8 dtype=bf16").dout_dtype == DType::bf16);
  CHECK(problem_of("sq=4 d=8 out=f16").dout_dtype == DType::f16);
  CHECK(problem_of("sq=4 d=8 dtype=bf16 dout=f32").to_string() ==
        "attention_backward dtype=bf16 b=1 hq=1 sq=4 d=8 dout=f32");
  CHECK(problem_of("sq=4 d=8").lse);
  for (const auto& [text, named] : {std::pair{"sq=4 grads=kq", "\"grads=kq\""},
                                    {"sq=4 grads=x", "\"grads=x\""},
                                    {"sq=4 dlse=1", "\"dlse=1\""},
                                    {"sq=4 dout", "\"dout\""},
                                    {"n=4", "\"n=4\""},
                                    {"sq=4 dq", "\"dq\""}}) {
    INFO(text);
    CHECK(refused_text([text = text] { problem_of(text); }).find(named) != std::string::npos);
  }
}

TEST_CASE("problem of gradients: of() describes what a case was made from", "[unit]") {
  BackwardCase whole(problem_of(kWhole));
  CHECK(AttentionBackwardProblem::of(whole.args()).to_string() == whole.problem.to_string());
  std::mt19937_64 random(303);
  for (int i = 0; i < 100; ++i) {
    SampleOptions options = kEverything;
    options.products = 1 << 12;
    BackwardCase c(sample_backward(random, options), random() % 100);
    AttentionBackwardProblem p = AttentionBackwardProblem::of(c.args());
    // Of sizes of 1 several describe a tensor.
    p.layout = c.problem.layout, p.bias = c.problem.bias, p.mask = c.problem.mask;
    AttentionBackwardProblem wanted = c.problem;
    wanted.latent = wanted.latent && wanted.dv < wanted.d;  // values that are whole keys are no part of a latent row
    CHECK(p.to_string() == wanted.to_string());
  }
}
