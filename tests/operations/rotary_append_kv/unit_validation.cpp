// rotary_append_kv(): what is refused, by its name and before anything is written; its problem's text; its cost.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "rapt/cost.hpp"
#include "rapt/plan.hpp"
#include "rapt/rotary_append_kv.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/small_tensors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

/// A call with everything, of two sequences that have 1 and 4 keys.
struct Call {
  Tensor q = make(DType::f32, {2, 4, 3, 8}), q_out = make(DType::f32, {2, 4, 3, 8}),
         k_new = make(DType::f32, {2, 2, 3, 8}), v_new = make(DType::f32, {2, 2, 3, 6}),
         k = make(DType::f32, {2, 2, 9, 8}), v = make(DType::f32, {2, 2, 9, 6}), cos = make(DType::f32, {7, 8}),
         sin = make(DType::f32, {7, 8}), norm = make(DType::f32, {8}), k_out = make(DType::f32, {2, 2, 3, 8}),
         seqlens = ints({1, 4}), rows = make(DType::f32, {1, 3, 8}), positions = make(DType::i32, {2, 3});
  RotaryAppendKvArgs args;

  Call() {
    for (Tensor* t : {&q, &k_new, &v_new, &cos, &sin, &norm, &rows})
      for (int64_t i = 0; i < t->size(); ++i) t->flat(i) = static_cast<float>(i % 5) - 2;
    for (int64_t i = 0; i < 6; ++i) set_index(positions, i, i);
    args.append = {
        k_new.view(), v_new.view(), KvCache::strided(k.mutable_view(), v.mutable_view()), seqlens.view(), {}};
    args.q = q.view(), args.q_out = q_out.mutable_view(), args.cos = cos.view(), args.sin = sin.view();
  }
};

/// The argument that a call is refused for, and that nothing was written.
std::string refused(const std::function<void(Call&)>& change) {
  Call call;
  change(call);
  const std::string argument = refused_argument([&] { rotary_append_kv(call.args); });
  if (!argument.empty())
    for (const Tensor* t : {&call.q_out, &call.k, &call.v, &call.k_out})
      for (int64_t i = 0; i < t->size(); ++i) REQUIRE(std::isnan(t->flat(i)));
  return argument;
}

}  // namespace

TEST_CASE("rotary_append_kv: arguments that do not fit are refused by name", "[unit]") {
  CHECK(refused([](Call&) {}) == "");
  CHECK(refused([](Call& c) { c.args.q = {}, c.args.q_out = {}; }) == "");
  CHECK(refused([](Call& c) { c.args.q_out = {}; }) == "q_out");
  CHECK(refused([](Call& c) { c.args.q = {}; }) == "q_out");
  CHECK(refused([](Call& c) { c.args.cos = {}; }) == "cos");
  CHECK(refused([](Call& c) { c.args.cos = c.norm.view(); }) == "cos");
  CHECK(refused([](Call& c) { c.args.sin = {}; }) == "sin");
  CHECK(refused([](Call& c) { c.args.sin = slice(c.args.sin, 0, 0, 6); }) == "sin");
  CHECK(refused([](Call& c) { c.args.q = slice(c.args.q, 2, 0, 2); }) == "q");
  CHECK(refused([](Call& c) { c.args.q = slice(c.args.q, 3, 0, 6); }) == "q");
  CHECK(refused([](Call& c) { c.args.append.k_new = {}; }) == "k_new");
  CHECK(refused([](Call& c) { c.args.append.v_new = {}; }) == "v_new");
  CHECK(refused([](Call& c) { c.args.append.seqlens = {}; }) == "seqlens");
  CHECK(refused([](Call& c) { c.args.k_out = c.k_out.mutable_view(); }) == "k_out");
  CHECK(refused([](Call& c) { c.args.append.cache = {}; }) == "v_new");
  CHECK(refused([](Call& c) { c.args.append.cache = {}, c.args.append.v_new = {}; }) == "k_out");
  CHECK(refused([](Call& c) { c.args.q_norm = slice(c.norm.view(), 0, 0, 7); }) == "q_norm");
  CHECK(refused([](Call& c) { c.args.k_norm = c.rows.view(); }) == "k_norm");
  CHECK(refused([](Call& c) { c.args.q = c.args.q_out = {}, c.args.q_norm = c.norm.view(); }) == "q_norm");
  CHECK(refused([](Call& c) { c.args.norm_eps = -1; }) == "norm_eps");
  CHECK(refused([](Call& c) { c.args.norm_eps = NAN; }) == "norm_eps");
  CHECK(refused([](Call& c) { c.args.norm_plus_one = true; }) == "norm_plus_one");
  CHECK(refused([](Call& c) { c.args.rotary_dim = 3; }) == "rotary_dim");
  CHECK(refused([](Call& c) { c.args.rotary_dim = -2; }) == "rotary_dim");
  CHECK(refused([](Call& c) { c.args.rotary_dim = 10; }) == "rotary_dim");
  CHECK(refused([](Call& c) { c.args.rotary_dim = 6; }) == "cos");
  CHECK(refused([](Call& c) { c.args.rotary_offset = 1; }) == "rotary_offset");
  CHECK(refused([](Call& c) { c.args.rotary_offset = -1; }) == "rotary_offset");
  // Tables of 7 positions, of which 1 to 3 and 4 to 6 are used.
  CHECK(refused([](Call& c) { c.args.cos = slice(c.args.cos, 0, 0, 6), c.args.sin = slice(c.args.sin, 0, 0, 6); }) ==
        "cos");
  CHECK(refused([](Call& c) { c.args.positions = c.positions.view(); }) == "");
  CHECK(refused([](Call& c) { c.args.positions = c.positions.view(), set_index(c.positions, 5, 7); }) == "positions");
  CHECK(refused([](Call& c) { c.args.positions = c.positions.view(), set_index(c.positions, 0, -1); }) == "positions");
  CHECK(refused([](Call& c) { c.args.positions = slice(c.positions.view(), 1, 0, 2); }) == "positions");
  CHECK(refused([](Call& c) { c.args.cos = c.args.sin = c.rows.view(); }) == "");
  CHECK(refused([](Call& c) { c.args.cos = c.args.sin = c.rows.view(), c.args.positions = c.positions.view(); }) ==
        "positions");
  CHECK(refused([](Call& c) {
          c.args.append.cache = {}, c.args.append.v_new = {}, c.args.append.seqlens = {};
          c.args.k_out = c.k_out.mutable_view();
        }) == "positions");
  // Parts of a cache without its keys.
  CHECK(refused([](Call& c) {
          c.args.append.cache.k = {}, c.args.append.v_new = {}, c.args.k_out = c.k_out.mutable_view();
        }) == "cache.v");
  for (const auto kind : {KvSource::Kind::paged, KvSource::Kind::ring})
    CHECK(refused([&](Call& c) {
            c.args.append.cache = {}, c.args.append.v_new = {}, c.args.k_out = c.k_out.mutable_view();
            c.args.append.cache.kind = kind;
          }) == "cache.k");
  // Memory that is shared; what append_kv refuses.
  CHECK(refused([](Call& c) {
          c.args.q_out = slice(c.k.mutable_view(), 2, 0, 3), c.args.q = slice(c.args.q, 1, 0, 2);
        }) != "");
  CHECK(refused([](Call& c) { c.args.k_norm = slice(slice(slice(c.k.view(), 0, 0, 1), 1, 0, 1), 2, 0, 1); }) != "");
  CHECK(refused([](Call& c) { set_index(c.seqlens, 1, 7); }) == "seqlens");
  CHECK(refused([](Call& c) { c.args.append.cache.kind = KvSource::Kind::ragged; }) == "cache.kind");
}

TEST_CASE("rotary_append_kv: in place, and given integers", "[unit]") {
  Call call, in_place;
  call.args.append.cache = {}, call.args.append.v_new = {}, call.args.k_out = call.k_out.mutable_view();
  in_place.args.append.cache = {}, in_place.args.append.v_new = {};
  in_place.args.q_out = in_place.q.mutable_view(), in_place.args.k_out = in_place.k_new.mutable_view();
  rotary_append_kv(call.args), rotary_append_kv(in_place.args);
  CHECK(same_bits(call.q_out, in_place.q));
  CHECK(same_bits(call.k_out, in_place.k_new));
  // One row off is no longer the same memory.
  in_place.args.q_out = slice(in_place.q.mutable_view(), 1, 1, 2), in_place.args.q = slice(in_place.args.q, 1, 0, 2);
  CHECK(refused_argument([&] { rotary_append_kv(in_place.args); }) == "q_out");

  // Scales of integers that are given: what turns the keys is finite, where a row uses it.
  Call given;
  Tensor k = make(DType::i8, {2, 2, 9, 8}), v = make(DType::i8, {2, 2, 9, 6});
  Tensor scale = filled(DType::f32, {1, 2, 1, 1}, [](int64_t) { return 1.f; });
  given.args.append.cache =
      KvCache::strided(k.mutable_view(), v.mutable_view()).quantized(scale.mutable_view(), scale.mutable_view());
  given.sin.at({0, 3}) = NAN;
  CHECK(refused_argument([&] { rotary_append_kv(given.args); }) == "");
  given.sin.at({5, 3}) = NAN;
  CHECK(refused_argument([&] { rotary_append_kv(given.args); }) == "sin");
  // So is what norms make of them.
  given.sin.at({5, 3}) = 0;
  given.args.k_norm = given.norm.view();
  CHECK(refused_argument([&] { rotary_append_kv(given.args); }) == "");
  given.args.norm_eps = 0;
  CHECK(refused_argument([&] { rotary_append_kv(given.args); }) == "norm_eps");
  given.args.norm_eps = 1e-6f;
  for (const float bad : {NAN, INFINITY, 0x1p61f}) {
    given.norm.at({5}) = bad;
    CHECK(refused_argument([&] { rotary_append_kv(given.args); }) == "k_norm");
  }
}

TEST_CASE("rotary_append_kv: values that are columns of the keys are not rotated", "[unit]") {
  Call call;
  call.args.append.cache = KvCache::strided(call.k.mutable_view(), slice(call.k.mutable_view(), 3, 0, 4));
  call.args.append.v_new = slice(call.args.append.k_new, 3, 0, 4);
  Tensor cos = make(DType::f32, {7, 4});
  for (int64_t i = 0; i < cos.size(); ++i) cos.flat(i) = 2;
  call.args.cos = call.args.sin = cos.view();
  CHECK(refused_argument([&] { rotary_append_kv(call.args); }) == "rotary_offset");
  call.args.rotary_offset = 4;
  call.args.k_norm = call.norm.view();
  CHECK(refused_argument([&] { rotary_append_kv(call.args); }) == "k_norm");
  call.args.k_norm = {};
  rotary_append_kv(call.args);
  CHECK(call.k.at({0, 0, 1, 0}) == call.k_new.at({0, 0, 0, 0}));
  CHECK(call.k.at({0, 0, 1, 4}) == 2 * call.k_new.at({0, 0, 0, 4}) - 2 * call.k_new.at({0, 0, 0, 6}));
}

TEST_CASE("rotary_append_kv: every field of the problem survives and counts", "[unit]") {
  const std::string plain = "rotary_append_kv b=2 hk=2 n=5 sk=5 d=24 hq=6 rotary=12";
  const RotaryAppendKvProblem p = RotaryAppendKvProblem::parse(plain);
  CHECK(p.to_string() == plain);
  for (const char* word :
       {"offset=4", "q=bf16", "out=f16", "table=bf16", "interleaved", "norm", "norm plus_one", "half", "rows",
        "positions", "no_cache", "kv=i8 groups=2", "page=5", "ring", "device=cuda"}) {
    const RotaryAppendKvProblem other = RotaryAppendKvProblem::parse(plain + " " + word);
    CHECK(RotaryAppendKvProblem::parse(other.to_string()) == other);
    CHECK_FALSE(other == p);
    CHECK(other.to_string() != plain);
  }
  const auto refused_plan = [&](const std::string& words) {
    return refused_argument([&] { Plan{parse_problem("rotary_append_kv " + words)}; });
  };
  CHECK(refused_plan("n=2 sk=4 d=8") == "");
  CHECK(refused_plan("n=2 sk=4 d=8 rotary=10") == "rotary_dim");
  CHECK(refused_plan("n=2 sk=4 d=8 rotary=3") == "rotary_dim");
  CHECK(refused_plan("n=2 sk=4 d=8 rotary=6 offset=3") == "rotary_offset");
  CHECK(refused_plan("n=2 sk=4 d=8 hq=-1") == "q");
  CHECK(refused_plan("n=2 sk=4 d=8 q=i8") == "q");
  CHECK(refused_plan("n=2 sk=4 d=8 out=i8") == "q_out");
  CHECK(refused_plan("n=2 sk=4 d=8 table=i8") == "cos");
  CHECK(refused_plan("n=2 sk=4 d=8 rows positions") == "positions");
  CHECK(refused_plan("n=2 sk=4 d=8 plus_one") == "norm_plus_one");
  CHECK(refused_plan("n=2 sk=4 d=8 no_cache ring") == "no_cache");
  CHECK(refused_plan("n=5 sk=4 d=8") == "seqlens");
  CHECK(refused_plan("n=5 sk=0 d=8 no_cache") == "");
}

TEST_CASE("rotary_append_kv: bytes and FLOPs", "[unit]") {
  Call call;
  call.args.q_norm = call.norm.view();
  const Cost cost = cost_of(call.args);
  // Six rows: q in and out, k and v in and out, a row of both tables each; the norm's weights.
  CHECK(cost.bytes == 4 * (6 * (2 * 4 * 8 + 2 * 2 * (8 + 6) + 2 * 8) + 8));
  CHECK(cost.flops == 6 * (6 * 3 * 8 + 4 * 4 * 8));
}
