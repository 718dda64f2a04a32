// What delta_rule refuses, and its problem's text.
#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>

#include "operations/delta_rule/case.hpp"
#include "rapt/plan.hpp"
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using A = DeltaRuleArgs;
using Spoil = std::function<void(DeltaRuleArgs&)>;

constexpr const char* kSmall = "b=2 hq=4 hk=2 hv=4 t=6 d=8 dv=5 decay=head beta state";
constexpr const char* kGated = "b=2 hq=4 hk=2 hv=4 t=6 d=8 dv=5 decay=channel gate beta state";
constexpr const char* kRagged = "b=3 hq=4 hk=2 hv=4 t=6 d=8 dv=5 ragged=13 decay=channel beta state";
constexpr const char* kSlots = "b=2 hq=4 hk=2 hv=4 t=3 d=8 dv=5 decay=head beta state slots steps=3";

DeltaRuleProblem problem_of(const std::string& words) {
  return DeltaRuleProblem::parse("delta_rule " + words);
}

/// With every tensor that the problem may have.
DeltaRuleCase whole(const std::string& words, Placement placement = Placement::heap) {
  for (std::uint64_t seed = 1;; ++seed) {
    DeltaRuleCase c(problem_of(words), seed, placement);
    const bool has_states = !c.problem.state || (c.initial && c.final && !c.in_place);
    const bool has_gate = !c.problem.gate || (c.a_log && c.dt_bias && c.gate_lower_bound);
    if (has_states && has_gate && (c.problem.steps == 0 || c.accepted)) return c;
  }
}

void refuses(const std::string& argument, const Spoil& spoil, const std::string& words = kSmall) {
  check_refusal(argument, whole(words, Placement::front), delta_rule, spoil);
}
void accepts(const Spoil& change, const std::string& words = kSmall) {
  check_accepted(whole(words), delta_rule, change);
}

void say_on_device(DeltaRuleArgs& args) {
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.initial_state, &args.cu_seqlens,
                        &args.state_slots, &args.accepted})
    t->device.type = DeviceType::cuda;
  args.out.device.type = args.final_state.device.type = DeviceType::cuda;
}

using Field = TensorField<A>;
constexpr Field kFields[] = {tensor_field<A, &A::q>("q", kSmall),
                             tensor_field<A, &A::k>("k", kSmall),
                             tensor_field<A, &A::v>("v", kSmall),
                             tensor_field<A, &A::g>("g", kSmall),
                             tensor_field<A, &A::g>("g", kGated),
                             tensor_field<A, &A::beta>("beta", kSmall),
                             tensor_field<A, &A::out>("out", kSmall),
                             tensor_field<A, &A::initial_state>("initial_state", kSmall),
                             tensor_field<A, &A::final_state>("final_state", kSmall),
                             tensor_field<A, &A::cu_seqlens>("cu_seqlens", kRagged),
                             tensor_field<A, &A::state_slots>("state_slots", kSlots),
                             tensor_field<A, &A::accepted>("accepted", kSlots),
                             tensor_field<A, &A::a_log>("a_log", kGated),
                             tensor_field<A, &A::dt_bias>("dt_bias", kGated)};

}  // namespace

TEST_CASE("validation of delta_rule: sizes and strides of every tensor", "[unit]") {
  for (const Field& m : kFields)
    for (const auto spoil : kBadLayouts)
      refuses(
          m.name, [&](A& a) { spoil(m.layout(a)); }, m.words);
}

TEST_CASE("validation of delta_rule: null, misaligned, of another type and on another device", "[unit]") {
  for (const Field& m : kFields) {
    const auto spoils = [&](const Spoil& spoil) { refuses(m.name, spoil, m.words); };
    spoils([&](A& a) { m.data(a) = nullptr; });
    spoils([&](A& a) { m.data(a) = static_cast<const std::byte*>(m.data(a)) + 1; });
    if (m.name != std::string("q")) {  // which has the say
      spoils([&](A& a) { m.device(a).type = DeviceType::cuda; });
      spoils([&](A& a) { m.device(a).index = 1; });
    }
    const bool is_integer = is_one_of(m.name, {"cu_seqlens", "state_slots", "accepted"});
    const bool is_state = is_one_of(m.name, {"initial_state", "final_state"}),
               is_f32 = is_one_of(m.name, {"a_log", "dt_bias"});
    for (const DType dtype : {DType::boolean, DType::i8, DType::f8e4m3, DType::i4x2})
      spoils([&](A& a) { m.dtype(a) = dtype; });
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      if (is_integer || (is_f32 && dtype != DType::f32) || (is_state && dtype == DType::f16))
        spoils([&](A& a) { m.dtype(a) = dtype; });
    if (!is_integer) spoils([&](A& a) { m.dtype(a) = DType::i32; });
  }
  // The state that is updated in place, too.
  const auto in_place = [](A& a) { a.initial_state = a.final_state; };
  accepts(in_place);
  refuses("final_state", [&](A& a) { in_place(a), a.initial_state.dtype = DType::bf16; });
  refuses("initial_state", [&](A& a) { in_place(a), a.initial_state.device.type = DeviceType::cuda; });
  refuses("k", [](A& a) { a.q.device.type = DeviceType::cuda; });
}

TEST_CASE("validation of delta_rule: starts and slots in a device's memory are not read", "[unit]") {
  for (const auto& [words, longest] : {std::pair{kRagged, 13}, {kSlots, 3}}) {
    DeltaRuleCase c = whole(words);
    DeltaRuleArgs args = c.args();
    say_on_device(args);
    int unreadable[64];  // values that would be refused
    std::fill(std::begin(unreadable), std::end(unreadable), 1 << 30);
    for (TensorView* t : {&args.cu_seqlens, &args.state_slots, &args.accepted})
      if (*t) t->data = unreadable;
    const DeltaRuleProblem problem = DeltaRuleProblem::of(args);
    CHECK(problem.device == DeviceType::cuda);
    CHECK(problem.t == longest);
    CHECK(DeltaRuleProblem::parse(problem.to_string()) == problem);
  }
  // Of ragged tokens no more than each sequence has slots.
  DeltaRuleCase c = whole("b=3 hq=2 t=4 d=8 dv=5 ragged=9 decay=head beta state slots steps=4");
  DeltaRuleArgs args = c.args();
  say_on_device(args);
  CHECK(DeltaRuleProblem::of(args).t == 4);
}

TEST_CASE("validation of delta_rule: shapes agree", "[unit]") {
  for (const Field& m : kFields) {
    if (is_one_of(m.name, {"q", "cu_seqlens"})) continue;  // q has the say
    const auto dims = static_cast<std::size_t>(m.name == std::string("g") && m.words == kSmall ? 3 : 4);
    for (std::size_t dim = 0; dim < dims; ++dim) {
      // Of v dv may be another one, which out and the states then do not have.
      const bool is_dv = m.name == std::string("v") && dim == 3;
      if (m.name == std::string("k") && dim == 2) continue;  // one head serves four as well
      refuses(
          is_dv ? "out" : m.name,
          [&](A& a) {
            Layout& l = m.layout(a);
            const std::size_t last = static_cast<std::size_t>(l.ndim) - 1;
            --l.shape[std::min(dim, last)];
          },
          m.words);
    }
    refuses(
        m.name,
        [&](A& a) {
          Layout& l = m.layout(a);
          if (l.ndim == 1) l.shape = {1, l.shape[0]}, l.strides = {4, 1}, l.ndim = 2;
          else if (m.name == std::string("state_slots")) l.ndim = 3, l.shape[2] = 1, l.strides[2] = 1;
          else if (m.name == std::string("g") && l.ndim == 4) l.ndim = 2;  // [b, t, h] has three
          else --l.ndim;
        },
        m.words);
  }
  refuses("q", [](A& a) { a.q.ndim = 3; });
  refuses("k", [](A& a) { --a.q.shape[1]; });
  refuses("k", [](A& a) { a.q.shape[3] = 7; });
  for (const std::int64_t size : {0, 257}) {
    refuses("q", [&](A& a) { a.q.shape[3] = a.k.shape[3] = size; });
    refuses("v", [&](A& a) { a.v.shape[3] = size; });
  }
  // Heads: [4, 2, 4] of q, k and v.
  refuses("v", [](A& a) { a.v.shape[2] = 3; });
  refuses("q", [](A& a) { a.q.shape[2] = 3; });
  refuses("v", [](A& a) { a.k.shape[2] = 0; });
  // [h] is a decay for all tokens.
  accepts([](A& a) { a.g = TensorView(static_cast<const float*>(a.q.data), {4}); });
  refuses("g", [](A& a) { a.g = TensorView(static_cast<const float*>(a.q.data), {2}); });
  refuses("g", [](A& a) { a.g = TensorView(static_cast<const std::int32_t*>(a.q.data), {4}); });
}

TEST_CASE("validation of delta_rule: what is missing, and what goes with nothing", "[unit]") {
  refuses("q", [](A& a) { a.q = {}; });
  refuses("k", [](A& a) { a.k = {}; });
  refuses("v", [](A& a) { a.v = {}; });
  refuses("out", [](A& a) { a.out = {}; });
  refuses("rule", [](A& a) { a.rule = static_cast<UpdateRule>(4); });
  refuses("g", [](A& a) { a.rule = UpdateRule::delta; });
  refuses("g", [](A& a) { a.rule = UpdateRule::linear, a.beta = {}; });
  refuses("beta", [](A& a) { a.rule = UpdateRule::gated, a.beta_sigmoid = a.beta_double = false; });
  refuses("beta", [](A& a) { a.beta = {}, a.beta_sigmoid = true; });
  refuses("beta", [](A& a) { a.beta = {}, a.beta_sigmoid = false, a.beta_double = true; });
  refuses("g", [](A& a) { a.gate = true, a.g = {}; });
  refuses(
      "a_log", [](A& a) { a.gate = false; }, kGated);
  refuses(
      "dt_bias", [](A& a) { a.gate = false, a.a_log = {}; }, kGated);
  refuses(
      "gate_lower_bound", [](A& a) { a.gate = false, a.a_log = a.dt_bias = {}; }, kGated);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bound : {0.001f, 5.f, nan, kInf, -kInf})
    refuses(
        "gate_lower_bound", [&](A& a) { a.gate_lower_bound = bound; }, kGated);
  for (const float scale : {nan, kInf, -kInf}) refuses("scale", [&](A& a) { a.scale = scale; });
  for (const float scale : {0.f, -1.f}) accepts([&](A& a) { a.scale = scale; });
  // A bias for each channel, where the decay has channels.
  refuses(
      "dt_bias", [](A& a) { a.dt_bias = TensorView(static_cast<const float*>(a.q.data), {4}); }, kGated);
  DeltaRuleCase flat = whole(kGated);
  A args = flat.args();
  args.dt_bias.ndim = 1;
  CHECK(refused_text([&] { delta_rule(args); }) == "dt_bias: shape [4]; wanted [h, d] = [4, 8]");
  refuses("dt_bias", [](A& a) {
    a.gate = true;
    a.dt_bias = TensorView(static_cast<const float*>(a.q.data), {4, 8});
  });
}

TEST_CASE("validation of delta_rule: ragged sequences", "[unit]") {
  for (const std::vector<std::int32_t>& starts : std::vector<std::vector<std::int32_t>>{
           {0, 6, 12, 14}, {0, 6, 12, 12}, {1, 6, 12, 13}, {0, 7, 6, 13}, {0, -1, 6, 13}})
    refuses(
        "cu_seqlens", [&](A& a) { a.cu_seqlens = TensorView(starts.data(), {4}); }, kRagged);
  const std::int32_t none = 0;
  refuses(
      "cu_seqlens", [&](A& a) { a.cu_seqlens = TensorView(&none, {0}); }, kRagged);
  const std::int32_t two[] = {0, 6, 13};
  refuses(
      "final_state", [&](A& a) { a.cu_seqlens = TensorView(two, {3}); }, kRagged);
  refuses("q", [&](A& a) { a.cu_seqlens = TensorView(two, {3}); });
  refuses(
      "q", [](A& a) { a.cu_seqlens = {}; }, kRagged);
}

TEST_CASE("validation of delta_rule: pools of states", "[unit]") {
  const std::string one = "b=2 hq=2 t=3 d=8 state slots";
  const auto with = [](const std::int32_t* slots) {
    return [slots](A& a) { a.state_slots = TensorView(slots, {2}), a.accepted = {}; };
  };
  const std::int32_t good[] = {4, 0}, negative[] = {-1, -1}, past[] = {5, 0}, twice[] = {2, 2};
  accepts(with(good), one);
  accepts(with(negative), one);
  refuses("state_slots", with(past), one);
  refuses("state_slots", with(twice), one);
  refuses(
      "state_slots", [](A& a) { a.initial_state = {}, a.final_state = {}; }, one);
  refuses(
      "initial_state", [](A& a) { --a.initial_state.shape[0]; }, one);
  refuses(
      "final_state", [](A& a) { a.state_slots = {}; }, one);
  const std::int32_t of_steps[] = {0, 1, 2, 3, 4, 5, 6, 7}, again[] = {0, 1, 2, 3, 2, 5};
  refuses(
      "state_slots",
      [&](A& a) {
        a.state_slots = TensorView(of_steps, {2, 2});
      },
      kSlots);  // for three tokens
  refuses(
      "state_slots",
      [&](A& a) {
        a.state_slots = TensorView(of_steps, {2, 0});
      },
      kSlots);
  refuses(
      "state_slots",
      [&](A& a) {
        a.state_slots = TensorView(again, {2, 3});
      },
      kSlots);
  accepts([&](A& a) { a.state_slots = TensorView(of_steps, {2, 4}); }, kSlots);
  for (const std::int32_t count : {0, 4, -1}) {
    const std::int32_t counts[] = {1, count};
    refuses(
        "accepted", [&](A& a) { a.accepted = TensorView(counts, {2}); }, kSlots);
  }
  refuses(
      "accepted", [&](A& a) { a.state_slots = TensorView(of_steps, {2}); }, kSlots);
  refuses("accepted", [&](A& a) { a.accepted = TensorView(good, {2}); });
}

TEST_CASE("validation of delta_rule: overlaps", "[unit]") {
  for (const char* words : {kSmall, kGated, kRagged, kSlots}) {
    for (const Field& m : kFields)
      for (MutableTensorView A::*written : {&A::out, &A::final_state}) {
        DeltaRuleCase c = whole(words);
        DeltaRuleArgs args = c.args();
        const void* const to = (args.*written).data;
        if (m.data(args) == nullptr || m.data(args) == to || is_one_of(m.name, {"initial_state", "state_slots"}))
          continue;
        m.data(args) = to;
        INFO(m.name << " where " << (written == &A::out ? "out" : "final_state") << " lies: " << words);
        CHECK(refused_argument([&] { delta_rule(args); }) != "");
        for (const Tensor* t : c.outputs()) CHECK(same_bits(*t, Tensor(t->dtype(), t->layout())));
      }
  }
  // A state that lies another way, or a little further on, is not updated in place.
  const auto refused = [](const Spoil& spoil) {
    DeltaRuleCase c = whole("b=2 hq=2 t=3 d=6 state");
    std::vector<float> memory(2 * 2 * 6 * 6 + 1);
    DeltaRuleArgs args = c.args();
    args.final_state = MutableTensorView(memory.data(), {2, 2, 6, 6}), args.initial_state = args.final_state;
    spoil(args);
    return refused_argument([&] { delta_rule(args); });
  };
  CHECK(refused([](A&) {}) == "");
  CHECK(refused([](A& a) { std::swap(a.initial_state.strides[2], a.initial_state.strides[3]); }) != "");
  CHECK(refused([](A& a) { a.initial_state.data = static_cast<const float*>(a.initial_state.data) + 1; }) != "");
  CHECK(refused([](A& a) { a.final_state.strides[3] = 0; }) == "final_state");
  refuses("out", [](A& a) { a.out.strides[3] = 0; });
  accepts([](A& a) { a.g.strides = a.beta.strides = {0, 0, 0, 0}; });  // inputs may repeat
}

TEST_CASE("validation of delta_rule: tensors without elements have no address", "[unit]") {
  for (const char* words : {"b=0 hq=2 t=4 d=8 decay=head beta state", "b=2 hq=2 t=0 d=8 decay=head beta"}) {
    DeltaRuleCase c = whole(words);
    DeltaRuleArgs args = c.args();
    args.q.data = args.k.data = args.v.data = args.g.data = args.beta.data = nullptr, args.out.data = nullptr;
    if (c.problem.state) args.initial_state.data = nullptr, args.final_state.data = nullptr;
    INFO(words);
    CHECK(refused_text([&] { delta_rule(args); }) == "");
    CHECK(DeltaRuleProblem::of(args).to_string() == c.problem.to_string());
  }
  // Without tokens the state is handed on.
  DeltaRuleCase c = whole("b=2 hq=2 t=0 d=8 dv=3 decay=head beta state");
  c.run(Context());
  CHECK(same_bits(c.final, c.initial));
}

TEST_CASE("validation of delta_rule: problems that no arguments could give", "[unit]") {
  const auto refused = [](const std::string& words) {
    return refused_argument([&] { Plan(Problem(problem_of(words))); });
  };
  for (const char* words : {kSmall, kGated, kRagged, kSlots}) CHECK(refused(words) == "");
  CHECK(refused("t=4 d=8 b=-1") == "b");
  CHECK(refused("t=-4 d=8") == "t");
  CHECK(refused("t=4 d=8 hq=-1") == "hq");
  CHECK(refused("t=4 d=8 hk=281474976710657") == "hk");
  CHECK(refused("t=4 d=8 hv=-3") == "hv");
  for (const char* d : {"0", "-1", "257"}) CHECK(refused("t=4 dv=8 d=" + std::string(d)) == "q");
  for (const char* dv : {"0", "-1", "257"}) CHECK(refused("t=4 d=8 dv=" + std::string(dv)) == "v");
  CHECK(refused("t=4 d=256 dv=256") == "");
  CHECK(refused("t=4 d=8 hq=2 hk=2 hv=3") == "v");
  CHECK(refused("t=4 d=8 hq=2 hk=2 hv=0") == "v");
  CHECK(refused("t=4 d=8 hq=3 hk=2") == "q");
  CHECK(refused("t=4 d=8 hq=0 hk=2") == "q");
  CHECK(refused("t=4 d=8 hq=0") == "");
  CHECK(refused("t=4 d=8 dtype=i8") == "q");
  CHECK(refused("t=4 d=8 out=f8e4m3") == "out");
  CHECK(refused("b=281474976710656 hq=281474976710656 t=281474976710656 d=256") == "q");
  CHECK(refused("b=0 hq=281474976710656 t=281474976710656 d=256") == "q");
  CHECK(refused("t=4 d=8 b=2 ragged=-2") == "cu_seqlens");
  CHECK(refused("t=4 d=8 b=2 ragged=3") == "cu_seqlens");
  CHECK(refused("t=4 d=8 b=2 ragged=9") == "cu_seqlens");
  CHECK(refused("t=4 d=8 b=2 ragged=8") == "");
  CHECK(refused("t=0 d=8 b=2 ragged=1") == "cu_seqlens");
  CHECK(refused("t=0 d=8 b=2 ragged=0") == "");
  CHECK(refused("t=4 d=8 slots") == "slots");
  CHECK(refused("t=4 d=8 state steps=4") == "steps");
  CHECK(refused("t=4 d=8 state slots steps=3") == "steps");
  CHECK(refused("t=4 d=8 state slots steps=-1") == "steps");
  CHECK(refused("t=4 d=8 state state_dtype=bf16") == "");
  CHECK(refused("t=4 d=8 state state_dtype=f16") == "state_dtype");
  CHECK(refused("t=4 d=8 state_dtype=bf16") == "state_dtype");
  CHECK(refused("t=4 d=8 decay=head rule=delta") == "decay");
  CHECK(refused("t=4 d=8 beta rule=gated") == "beta");
  CHECK(refused("t=4 d=8 gate") == "gate");
}

TEST_CASE("problem of delta_rule: its text reads back", "[unit]") {
  std::mt19937_64 random(502);
  for (int i = 0; i < 500; ++i) {
    const DeltaRuleProblem p = sample_delta_rule(random);
    INFO(p.to_string());
    CHECK((DeltaRuleProblem::parse(p.to_string()) == p));
    CHECK((std::get<DeltaRuleProblem>(parse_problem(p.to_string())) == p));
    CHECK(refused_text([&] { Plan{Problem(p)}; }) == "");
  }
  const DeltaRuleProblem plain = problem_of("t=4 d=8");
  std::vector<DeltaRuleProblem> seen = {plain};
  for (const char* words :
       {"dtype=bf16",     "out=bf16",   "dtype=f16 out=f32", "rule=linear", "rule=gated", "rule=delta",
        "decay=constant", "decay=head", "decay=channel",     "b=2",         "hq=3",       "hk=3",
        "hv=3",           "dv=9",       "ragged=0",          "ragged=9",    "beta",       "gate",
        "l2norm",         "state",      "state_dtype=bf16",  "slots",       "steps=4"}) {
    const DeltaRuleProblem p = problem_of(std::string("t=4 d=8 ") + words);
    INFO(p.to_string());
    CHECK((DeltaRuleProblem::parse(p.to_string()) == p));
    CHECK((std::find(seen.begin(), seen.end(), p) == seen.end()));
    seen.push_back(p);
  }
  CHECK(plain.to_string() == "delta_rule b=1 hq=1 t=4 d=8");
  CHECK(problem_of("rule=gated_delta decay=none hv=2 hk=2 hq=2 t=4 d=8 dv=8 out=f32").to_string() ==
        "delta_rule b=1 hq=2 t=4 d=8");
  const DeltaRuleProblem heads = problem_of("hq=4 hv=16 t=1 d=128");
  CHECK((heads.hk == 4 && heads.hv == 16 && heads.dv == 128 && heads.state_heads() == 16));
  for (const auto& [text, named] : {std::pair{"sq=4", "\"sq=4\""},
                                    {"t=4 t=4", "\"t=4\""},
                                    {"rule=adaptive", "\"rule=adaptive\""},
                                    {"decay", "\"decay\""},
                                    {"decay=row", "wanted one of none, constant, head, channel"},
                                    {"beta=1", "\"beta=1\""},
                                    {"steps", "\"steps\""},
                                    {"d=x", "\"d=x\""}}) {
    INFO(text);
    CHECK(refused_text([text = text] { problem_of(text); }).find(named) != std::string::npos);
  }
}
