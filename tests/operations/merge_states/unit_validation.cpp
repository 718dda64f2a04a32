// merge_states() against attention over all keys at once, and its corners.
#include <cmath>
#include <vector>

#include "operations/attention/case.hpp"
#include "rapt/attention.hpp"
#include "rapt/merge_states.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// One row of two elements and its lse.
struct Part {
  float out[2];
  float lse;
};
Part merged(const std::vector<Part>& parts) {
  std::vector<TensorView> outs, lses;
  for (const Part& part : parts) {
    outs.push_back(TensorView(part.out, {1, 2}));
    lses.push_back(TensorView(&part.lse, {1}));
  }
  Part result{{-1, -1}, -1};
  merge_states(outs, lses, MutableTensorView(result.out, {1, 2}), MutableTensorView(&result.lse, {1}));
  return result;
}

}  // namespace

TEST_CASE("merge: disjoint sets of keys give what all of them give", "[unit]") {
  constexpr std::int64_t sk = 50;
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const std::vector<std::int64_t>& borders :
       {std::vector<std::int64_t>{0, 50}, {0, 1, 50}, {0, 20, 20, 33, 50}, {0, 7, 14, 21, 28, 35, 42, 50}}) {
    Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 sk=50 d=16 dv=8 lse"), 7);
    attention(c.args());
    std::vector<Tensor> outs, lses;
    std::vector<TensorView> out_views, lse_views;
    for (std::size_t i = 1; i < borders.size(); ++i) {
      AttentionArgs args = c.args();
      args.kv.k = slice(args.kv.k, 2, borders[i - 1], borders[i] - borders[i - 1]);
      args.kv.v = slice(args.kv.v, 2, borders[i - 1], borders[i] - borders[i - 1]);
      outs.emplace_back(i == 1 ? DType::f32 : dtype, c.out.layout());
      lses.emplace_back(DType::f32, c.lse.layout());
      args.out = outs.back().mutable_view(), args.lse = lses.back().mutable_view();
      attention(args);
      out_views.push_back(outs.back().view()), lse_views.push_back(lses.back().view());
    }
    // Rows of 8 in 20, heads innermost but for them.
    Tensor out(dtype, Layout(std::vector<std::int64_t>{2, 4, 3, 8}, std::vector<std::int64_t>{240, 20, 80, 2}));
    Tensor lse(DType::f32, c.lse.layout());
    merge_states(out_views, lse_views, out.mutable_view(), lse.mutable_view());
    const double eps = dtype == DType::f32 ? 2e-6 : dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
    for (std::int64_t i = 0; i < out.size(); ++i) REQUIRE(std::fabs(out.flat(i) - c.out.flat(i)) <= 3 * eps);
    for (std::int64_t i = 0; i < lse.size(); ++i) REQUIRE(std::fabs(lse.flat(i) - c.lse.flat(i)) <= 2e-6);
    CHECK(out.gaps_intact());
    REQUIRE(sk == borders.back());
  }
}

TEST_CASE("merge: weights", "[unit]") {
  const Part half = merged({{{1, 2}, 5}, {{3, -2}, 5}});
  CHECK(half.out[0] == 2);
  CHECK(half.out[1] == 0);
  CHECK(half.lse == Approx(5 + std::log(2.)));
  const Part one_to_three = merged({{{0, 8}, 0}, {{4, 0}, std::log(3.f)}});
  CHECK(one_to_three.out[0] == Approx(3).epsilon(3e-7));
  CHECK(one_to_three.out[1] == Approx(2).epsilon(3e-7));
  const Part alone = merged({{{0.1f, -0.3f}, -12.34f}});
  CHECK((alone.out[0] == 0.1f && alone.out[1] == -0.3f && alone.lse == -12.34f));
  const Part huge = merged({{{1, 2}, 1e6f}, {{5, 6}, -1e6f}, {{3, 4}, 1e6f}});
  CHECK((huge.out[0] == 2 && huge.out[1] == 3));
  CHECK(huge.lse == 1e6f + std::log(2.f));
}

TEST_CASE("merge: empty parts have no weight, whatever their output holds", "[unit]") {
  for (const float junk : {kNan, kInf, 1e38f}) {
    const Part part = merged({{{junk, junk}, -kInf}, {{1, 2}, 3}, {{junk, -junk}, -kInf}});
    CHECK((part.out[0] == 1 && part.out[1] == 2 && part.lse == 3));
    const Part none = merged({{{junk, junk}, -kInf}, {{junk, junk}, -kInf}});
    CHECK((none.out[0] == 0 && none.out[1] == 0 && none.lse == -kInf));
  }
}

TEST_CASE("merge: NaN and Inf propagate", "[unit]") {
  for (const float other : {0.f, -kInf, kInf}) {
    for (const bool first : {false, true}) {
      const Part bad{{1, 2}, kNan}, fine{{3, 4}, other};
      const Part part = first ? merged({bad, fine}) : merged({fine, bad});
      CHECK((std::isnan(part.out[0]) && std::isnan(part.out[1]) && std::isnan(part.lse)));
    }
  }
  const Part infinite = merged({{{1, 2}, 0}, {{3, 4}, kInf}});
  CHECK((std::isnan(infinite.out[0]) && infinite.lse == kInf));
  const Part value = merged({{{1, kNan}, 0}, {{3, 4}, 1}});
  CHECK((std::isfinite(value.out[0]) && std::isnan(value.out[1]) && std::isfinite(value.lse)));
  // However small its weight.
  for (const float lse : {0.f, -100.f, -1e6f}) {
    const Part part = merged({{{kInf, kNan}, lse}, {{3, 4}, 1}, {{-1, -kInf}, 2}});
    CHECK((part.out[0] == kInf && std::isnan(part.out[1]) && std::isfinite(part.lse)));
    CHECK(merged({{{1, -kInf}, lse}, {{3, 4}, 1}}).out[1] == -kInf);
    CHECK(std::isnan(merged({{{1, -kInf}, lse}, {{3, kInf}, 1}}).out[1]));
  }
  CHECK(merged({{{1e38f, 1}, -1e6f}, {{3, 4}, 1}}).out[0] == 3);
}

TEST_CASE("merge: what is wrong is named, and nothing is written", "[unit]") {
  float a[6] = {}, b[6] = {}, la[3] = {}, lb[3] = {}, out[6], lse[3];
  const auto refused = [&](auto&& spoil) {
    std::vector<TensorView> outs = {{a, {3, 2}}, {b, {3, 2}}}, lses = {{la, {3}}, {lb, {3}}};
    MutableTensorView o(out, {3, 2}), l(lse, {3});
    std::fill(std::begin(out), std::end(out), 7.f);
    std::fill(std::begin(lse), std::end(lse), 7.f);
    spoil(outs, lses, o, l);
    const std::string argument = refused_argument([&] { merge_states(outs, lses, o, l); });
    if (!argument.empty())
      for (const float x : {out[0], out[5], lse[0], lse[2]}) CHECK(x == 7.f);
    return argument;
  };
  CHECK(refused([](auto&, auto&, auto&, auto&) {}).empty());
  CHECK(refused([](auto&, auto&, auto&, auto& l) { l = {}; }).empty());
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o = {}; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.ndim = 1; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.dtype = DType::i8; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.strides[0] = 0; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.shape[1] = 0; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.device.type = DeviceType::cuda; }) == "out");
  CHECK(refused([](auto&, auto&, auto& o, auto&) { o.device.index = 1; }) == "out");
  CHECK(refused([&](auto&, auto&, auto& o, auto&) { o.data = b; }) == "out");
  CHECK(refused([&](auto&, auto&, auto&, auto& l) { l.data = lb; }) == "lse");
  CHECK(refused([](auto&, auto&, auto&, auto& l) { l.dtype = DType::f16; }) == "lse");
  CHECK(refused([](auto&, auto&, auto&, auto& l) { l.shape[0] = 2; }) == "lse");
  CHECK(refused([](auto& outs, auto&, auto&, auto&) { outs[1].shape[0] = 2; }) == "outs[1]");
  CHECK(refused([](auto& outs, auto&, auto&, auto&) { outs[0].dtype = DType::i32; }) == "outs[0]");
  CHECK(refused([](auto& outs, auto&, auto&, auto&) { outs[0] = {}; }) == "outs[0]");
  CHECK(refused([](auto&, auto& lses, auto&, auto&) { lses[1].data = nullptr; }) == "lses[1]");
  CHECK(refused([](auto&, auto& lses, auto&, auto&) { lses.pop_back(); }) == "lses");
  CHECK(refused([](auto& outs, auto& lses, auto&, auto&) { outs.clear(), lses.clear(); }) == "outs");
  // The parts agree: it is out that does not.
  CHECK(refused([](auto&, auto&, auto& o, auto& l) { o.shape[0] = l.shape[0] = 2; }) == "out");
  CHECK(refused([](auto&, auto& lses, auto&, auto&) { lses[0].shape[0] = 2; }) == "lses[0]");
  CHECK(refused([](auto&, auto&, auto& o, auto& l) { l.data = o.data; }) == "lse");
  // Rows of nothing, however many their sizes would make.
  CHECK(refused([](auto& outs, auto& lses, auto& o, auto& l) {
          o = MutableTensorView(static_cast<float*>(nullptr), {0, std::int64_t{1} << 40, 1 << 13}, {0, 0, 0});
          l = {}, outs = {o}, lses = {TensorView(static_cast<float*>(nullptr), {0, std::int64_t{1} << 40}, {0, 0})};
        }).empty());
}
