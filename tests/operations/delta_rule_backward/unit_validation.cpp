// What delta_rule_backward refuses, and its problem's text.
#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include "operations/delta_rule_backward/case.hpp"
#include "rapt/plan.hpp"
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using A = DeltaRuleBackwardArgs;
using C = DeltaRuleBackwardCase;
using Spoil = std::function<void(A&)>;

constexpr const char* kSmall = "b=2 hq=4 hk=2 hv=4 t=6 d=8 dv=5 decay=head beta state";
constexpr const char* kGated = "b=2 hq=4 hk=2 hv=4 t=6 d=8 dv=5 decay=channel gate beta state";
constexpr const char* kRagged = "b=3 hq=4 hk=2 hv=4 t=6 d=8 dv=5 ragged=13 decay=channel beta state";

DeltaRuleBackwardProblem problem_of(const std::string& words) {
  return DeltaRuleBackwardProblem::parse("delta_rule_backward " + words);
}

/// With every tensor that the problem may have.
C whole(const std::string& words, Placement placement = Placement::heap) {
  for (std::uint64_t seed = 1;; ++seed) {
    C c(problem_of(words), seed, placement);
    const bool has_states = !c.problem.state || (c.dinitial_state && c.dfinal_state);
    if (has_states && (!c.problem.gate || (c.da_log && c.ddt_bias && c.inputs.gate_lower_bound))) return c;
  }
}

bool is_untouched(C& c) {
  const std::vector<Tensor*> outputs = c.outputs();
  return std::all_of(outputs.begin(), outputs.end(),
                     [](const Tensor* t) { return same_bits(*t, Tensor(t->dtype(), t->layout())); });
}

void refuses(const std::string& argument, const Spoil& spoil, const std::string& words = kSmall) {
  check_refusal(argument, whole(words, Placement::front), delta_rule_backward, spoil);
}
void accepts(const Spoil& change, const std::string& words = kSmall) {
  check_accepted(whole(words), delta_rule_backward, change);
}

using Field = TensorField<A>;
using F = DeltaRuleArgs;
constexpr Field kFields[] = {tensor_field<A, &A::forward, &F::q>("q", kSmall),
                             tensor_field<A, &A::forward, &F::k>("k", kSmall),
                             tensor_field<A, &A::forward, &F::v>("v", kSmall),
                             tensor_field<A, &A::forward, &F::g>("g", kSmall),
                             tensor_field<A, &A::forward, &F::g>("g", kGated),
                             tensor_field<A, &A::forward, &F::beta>("beta", kSmall),
                             tensor_field<A, &A::forward, &F::initial_state>("initial_state", kSmall),
                             tensor_field<A, &A::forward, &F::cu_seqlens>("cu_seqlens", kRagged),
                             tensor_field<A, &A::forward, &F::a_log>("a_log", kGated),
                             tensor_field<A, &A::forward, &F::dt_bias>("dt_bias", kGated),
                             tensor_field<A, &A::dout>("dout", kSmall),
                             tensor_field<A, &A::dfinal_state>("dfinal_state", kSmall),
                             tensor_field<A, &A::dq>("dq", kSmall),
                             tensor_field<A, &A::dk>("dk", kRagged),
                             tensor_field<A, &A::dv>("dv", kSmall),
                             tensor_field<A, &A::dg>("dg", kSmall),
                             tensor_field<A, &A::dg>("dg", kGated),
                             tensor_field<A, &A::dbeta>("dbeta", kRagged),
                             tensor_field<A, &A::dinitial_state>("dinitial_state", kSmall),
                             tensor_field<A, &A::da_log>("da_log", kGated),
                             tensor_field<A, &A::ddt_bias>("ddt_bias", kGated)};
constexpr MutableTensorView A::*kGradients[] = {&A::dq,     &A::dk,      &A::dv, &A::dg, &A::dbeta, &A::dinitial_state,
                                                &A::da_log, &A::ddt_bias};

bool is_gradient(const Field& m) {
  return m.name[0] == 'd' && !is_one_of(m.name, {"dt_bias", "dout", "dfinal_state"});
}

}  // namespace

TEST_CASE("validation of delta_rule_backward: sizes and strides of every tensor", "[unit]") {
  for (const Field& m : kFields)
    for (const auto spoil : kBadLayouts)
      refuses(
          m.name, [&](A& a) { spoil(m.layout(a)); }, m.words);
}

TEST_CASE("validation of delta_rule_backward: null, misaligned, of another type and on another device", "[unit]") {
  for (const Field& m : kFields) {
    const auto spoils = [&](const Spoil& spoil) { refuses(m.name, spoil, m.words); };
    spoils([&](A& a) { m.data(a) = nullptr; });
    spoils([&](A& a) { m.data(a) = static_cast<const std::byte*>(m.data(a)) + 1; });
    spoils([&](A& a) { m.device(a).type = DeviceType::cuda; });
    if (m.name != std::string("q")) spoils([&](A& a) { m.device(a).index = 1; });  // the first has the say
    const bool is_integer = is_one_of(m.name, {"cu_seqlens"});
    const bool is_state = is_one_of(m.name, {"initial_state", "dfinal_state", "dinitial_state"}),
               is_f32 = is_one_of(m.name, {"a_log", "dt_bias", "da_log", "ddt_bias"});
    for (const DType dtype : {DType::boolean, DType::i8, DType::f8e4m3, DType::i4x2})
      spoils([&](A& a) { m.dtype(a) = dtype; });
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      if (is_integer || (is_f32 && dtype != DType::f32) || (is_state && dtype == DType::f16))
        spoils([&](A& a) { m.dtype(a) = dtype; });
    if (!is_integer) spoils([&](A& a) { m.dtype(a) = DType::i32; });
  }
}

TEST_CASE("validation of delta_rule_backward: shapes are those of what they are of", "[unit]") {
  for (const Field& m : kFields) {
    if (is_one_of(m.name, {"q", "k", "v", "g", "cu_seqlens"})) continue;  // as delta_rule refuses them
    for (std::size_t dim = 0; dim < 4; ++dim)
      refuses(
          m.name,
          [&](A& a) {
            Layout& l = m.layout(a);
            --l.shape[std::min(dim, static_cast<std::size_t>(l.ndim) - 1)];
          },
          m.words);
    refuses(
        m.name,
        [&](A& a) {
          Layout& l = m.layout(a);
          if (l.ndim == 1) l.shape = {1, l.shape[0]}, l.strides = {4, 1}, l.ndim = 2;
          else --l.ndim;
        },
        m.words);
  }
  // A gradient of another head count's shape: one head of k serves two states, and dk has as many as k.
  refuses("dk", [](A& a) { a.dk = a.dq; });
  refuses("dk", [](A& a) { --a.forward.k.shape[2]; });  // one head serves four as well
  refuses("k", [](A& a) { --a.forward.q.shape[1]; });
  refuses("v", [](A& a) { --a.forward.v.shape[2]; });
  refuses("dout", [](A& a) { --a.forward.v.shape[3]; });
}

TEST_CASE("validation of delta_rule_backward: what is missing, and what goes with nothing", "[unit]") {
  refuses("q", [](A& a) { a.forward.q = {}; });
  refuses("k", [](A& a) { a.forward.k = {}; });
  refuses("v", [](A& a) { a.forward.v = {}; });
  refuses("dg", [](A& a) { a.forward.g = {}; });
  refuses("dbeta", [](A& a) { a.forward.beta = {}, a.forward.beta_sigmoid = a.forward.beta_double = false; });
  refuses("dinitial_state", [](A& a) { a.forward.initial_state = {}; });
  refuses(
      "da_log", [](A& a) { a.forward.a_log = {}; }, kGated);
  refuses(
      "ddt_bias", [](A& a) { a.forward.dt_bias = {}; }, kGated);
  refuses("rule", [](A& a) { a.forward.rule = static_cast<UpdateRule>(4); });
  refuses("g", [](A& a) { a.forward.rule = UpdateRule::delta; });
  refuses("beta",
          [](A& a) { a.forward.rule = UpdateRule::gated, a.forward.beta_sigmoid = a.forward.beta_double = false; });
  refuses("scale", [](A& a) { a.forward.scale = std::numeric_limits<float>::infinity(); });
  refuses(
      "gate_lower_bound", [](A& a) { a.forward.gate_lower_bound = 1.f; }, kGated);
  accepts([](A& a) { a.dout = {}; });
  accepts([](A& a) { a.dfinal_state = {}; });
  accepts([](A& a) { a.dout = {}, a.dfinal_state = {}; });
  accepts([](A& a) {
    for (MutableTensorView A::*gradient : kGradients) a.*gradient = {};
  });
  // Results of the forward are not looked at, whatever they are.
  accepts([](A& a) { a.forward.out = {}, a.forward.final_state = {}; });
  accepts([](A& a) { a.forward.out.ndim = 7, a.forward.final_state.dtype = DType::i8; });
}

TEST_CASE("validation of delta_rule_backward: states in pools and in place", "[unit]") {
  const std::int32_t slots[] = {0, 1};
  refuses("state_slots", [&](A& a) { a.forward.state_slots = TensorView(slots, {2}); });
  refuses("accepted", [&](A& a) { a.forward.accepted = TensorView(slots, {2}); });
  refuses("initial_state", [](A& a) { a.forward.final_state.data = const_cast<void*>(a.forward.initial_state.data); });
}

TEST_CASE("validation of delta_rule_backward: ragged sequences", "[unit]") {
  for (const std::vector<std::int32_t>& starts : std::vector<std::vector<std::int32_t>>{
           {0, 6, 12, 14}, {0, 6, 12, 12}, {1, 6, 12, 13}, {0, 7, 6, 13}, {0, -1, 6, 13}})
    refuses(
        "cu_seqlens", [&](A& a) { a.forward.cu_seqlens = TensorView(starts.data(), {4}); }, kRagged);
  const std::int32_t two[] = {0, 6, 13};
  refuses(
      "initial_state", [&](A& a) { a.forward.cu_seqlens = TensorView(two, {3}); }, kRagged);
  refuses(
      "q", [](A& a) { a.forward.cu_seqlens = {}; }, kRagged);
}

TEST_CASE("validation of delta_rule_backward: overlaps", "[unit]") {
  for (const char* words : {kSmall, kGated, kRagged})
    for (MutableTensorView A::*written : kGradients) {
      for (const Field& m : kFields) {
        C c = whole(words);
        A args = c.args();
        const void* const to = (args.*written).data;
        if (to == nullptr || m.data(args) == nullptr || m.data(args) == to) continue;
        m.data(args) = to;
        INFO(m.name << " where a gradient lies: " << words);
        CHECK(refused_argument([&] { delta_rule_backward(args); }) != "");
        CHECK(is_untouched(c));
      }
      // Nor with itself.
      C c = whole(words);
      A args = c.args();
      if (!(args.*written)) continue;
      (args.*written).strides[static_cast<std::size_t>((args.*written).ndim - 1)] = 0;
      const auto named = std::find_if(std::begin(kFields), std::end(kFields), [&](const Field& m) {
        return is_gradient(m) && m.data(args) == (args.*written).data;
      });
      CHECK(refused_argument([&] { delta_rule_backward(args); }) == named->name);
    }
  accepts([](A& a) {
    a.dout.strides = a.forward.g.strides = a.forward.beta.strides = {0, 0, 0, 0};
  });  // inputs may repeat
}

TEST_CASE("validation of delta_rule_backward: tensors without elements have no address", "[unit]") {
  for (const char* words : {"b=0 hq=2 t=4 d=8 decay=head beta state", "b=2 hq=2 t=0 d=8 decay=head beta"}) {
    C c = whole(words);
    A args = c.args();
    DeltaRuleArgs& f = args.forward;
    for (TensorView* t : {&f.q, &f.k, &f.v, &f.g, &f.beta, &args.dout}) t->data = nullptr;
    for (MutableTensorView* t : {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta}) t->data = nullptr;
    if (c.problem.state) f.initial_state.data = args.dfinal_state.data = nullptr, args.dinitial_state.data = nullptr;
    INFO(words);
    CHECK(refused_text([&] { delta_rule_backward(args); }) == "");
    f.final_state = {};
    CHECK(refused_text([&] { delta_rule_backward(args); }) == "");
    CHECK(DeltaRuleBackwardProblem::of(args).to_string() == c.problem.to_string());
  }
  // Without tokens the gradient of the state is handed on; sums are 0.
  C c = whole("b=2 hq=2 t=0 d=8 dv=3 decay=constant gate beta state");
  c.run(Context());
  CHECK(same_bits(c.dinitial_state, c.dfinal_state));
  for (const Tensor* t : {&c.dg, &c.da_log, &c.ddt_bias})
    for (const float x : t->values()) CHECK(x == 0);
  // Without sequences, too.
  C none = whole("b=0 hq=2 t=5 d=8 dv=3 decay=constant gate beta state");
  none.run(Context());
  for (const Tensor* t : {&none.dg, &none.da_log, &none.ddt_bias})
    for (const float x : t->values()) CHECK(x == 0);
}

TEST_CASE("validation of delta_rule_backward: problems that no arguments could give", "[unit]") {
  const auto refused = [](const std::string& words) {
    return refused_argument([&] { Plan(Problem(problem_of(words))); });
  };
  for (const char* words : {kSmall, kGated, kRagged}) CHECK(refused(words) == "");
  CHECK(refused("t=4 d=8 b=-1") == "b");
  CHECK(refused("t=-4 d=8") == "t");
  CHECK(refused("t=4 d=257") == "q");
  CHECK(refused("t=4 d=8 dv=0") == "v");
  CHECK(refused("t=4 d=256 dv=256") == "");
  CHECK(refused("t=4 d=8 hq=2 hk=2 hv=3") == "v");
  CHECK(refused("t=4 d=8 hq=2 hk=3 hv=6") == "");
  CHECK(refused("t=4 d=8 hq=3 hk=2") == "q");
  CHECK(refused("t=4 d=8 out=f8e4m3") == "out");
  CHECK(refused("b=281474976710656 hq=281474976710656 t=281474976710656 d=256") == "q");
  CHECK(refused("t=4 d=8 b=2 ragged=9") == "cu_seqlens");
  CHECK(refused("t=4 d=8 state slots") == "slots");
  CHECK(refused("t=4 d=8 state slots steps=4") == "slots");
  CHECK(refused("t=4 d=8 state steps=4") == "steps");
  CHECK(refused("t=4 d=8 decay=head rule=delta") == "decay");
  CHECK(refused("t=4 d=8 beta rule=gated") == "beta");
  CHECK(refused("t=4 d=8 gate") == "gate");
}

TEST_CASE("problem of delta_rule_backward: its text reads back, and is not the forward's", "[unit]") {
  std::mt19937_64 random(602);
  for (int i = 0; i < 300; ++i) {
    const DeltaRuleBackwardProblem p = sample_delta_rule_backward(random);
    INFO(p.to_string());
    CHECK((DeltaRuleBackwardProblem::parse(p.to_string()) == p));
    CHECK((std::get<DeltaRuleBackwardProblem>(parse_problem(p.to_string())) == p));
    CHECK(refused_text([&] { Plan{Problem(p)}; }) == "");
    const DeltaRuleProblem& forward = p;
    CHECK(p.to_string() == "delta_rule_backward" + forward.to_string().substr(std::string("delta_rule").size()));
    CHECK_FALSE((Problem(forward) == Problem(p)));
  }
  CHECK(problem_of("rule=gated_delta decay=none hv=2 hk=2 hq=2 t=4 d=8 dv=8 out=f32").to_string() ==
        "delta_rule_backward b=1 hq=2 t=4 d=8");
  for (const auto& [text, named] : {std::pair{"sq=4", "\"sq=4\""}, {"t=4 t=4", "\"t=4\""}, {"dq", "\"dq\""}}) {
    INFO(text);
    CHECK(refused_text([text = text] { problem_of(text); }).find(named) != std::string::npos);
  }
  CHECK(refused_text([] { DeltaRuleBackwardProblem::parse("delta_rule t=4 d=8"); }) != "");
  CHECK(refused_text([] { DeltaRuleProblem::parse("delta_rule_backward t=4 d=8"); }) != "");
}
