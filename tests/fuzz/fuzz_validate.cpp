// Argument validation of attention and of its gradients under arbitrary arguments; see call.hpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "call.hpp"
#include "operations/attention/case_modifiers.hpp"
#include "operations/attention/layouts.hpp"
#include "support/dtypes.hpp"

namespace rapt::testing {
namespace {

constexpr double kMaxOperations = 1 << 16;

struct Arguments : Given {
  AttentionArgs args;
  AttentionBackwardArgs backward;
};

DType some_cache_type(Choices& c) {
  return c.one_in(2) ? c.one_of(kQuantizedTypes) : some_type(c);
}

void choose_score(Arguments& g, Choices& c, std::int64_t b, std::int64_t hq, std::int64_t sq, std::int64_t sk) {
  ScoreSpec& score = g.args.score;
  if (c.one_in(4)) score.scale = some_float(c);
  Modifiers::choose_numbers(score, c, some_float);
  if (c.one_in(4)) score.dropout = Dropout{some_float(c), c.raw<std::uint64_t>(), c.raw<std::uint64_t>()};
  score.causal = c.one_in(3);
  if (c.one_in(4)) score.window = Window{c.below(8) - 2, c.below(8) - 2};
  if (c.below(2)) {
    score.align = Align{static_cast<Align::Kind>(c.below(c.one_in(8) ? 5 : 3)), c.below(16) - 8};
    if (c.one_in(16)) score.align->value = c.raw<std::int64_t>();
  }
  const auto maybe = [&](std::int64_t size) { return c.below(2) ? size : 1; };
  if (c.one_in(4)) score.bias = floats(g, c, {maybe(b), maybe(hq), maybe(sq), maybe(sk)});
  if (c.one_in(4)) score.alibi = c.below(2) ? floats(g, c, {hq}) : floats(g, c, {b, hq});
  if (c.one_in(4)) score.sinks = floats(g, c, {hq});
  if (c.one_in(4)) {
    score.mask = TensorView(static_cast<const bool*>(nullptr), {maybe(hq), maybe(sq), maybe(sk)});
    auto* data = g.take<std::uint8_t>(elements_of(score.mask));
    for (std::int64_t i = 0; i < elements_of(score.mask); ++i) data[i] = static_cast<std::uint8_t>(c.below(2));
    score.mask.data = data;
  }
}

/// Scales of k or v where the type may have them, and zeros.
void choose_scales(Given& g, Choices& c, const TensorView& rows, std::int64_t d, TensorView& scale, TensorView& zero) {
  const bool needed = is_integer(rows.dtype);
  if (!is_quantized(rows.dtype)) return;
  if (!needed && c.below(2)) return;
  const std::int64_t groups = d % 2 == 0 && c.below(2) ? std::max<std::int64_t>(d / 2, 1) : 1;
  const auto maybe = [&](std::size_t dim) { return c.below(2) ? rows.shape[dim] : 1; };
  const auto make = [&] {
    return rows.ndim == 3 ? floats(g, c, {maybe(0), rows.shape[1], groups})
                          : floats(g, c, {maybe(0), rows.shape[1], maybe(2), groups});
  };
  scale = make();
  if (c.one_in(3)) zero = make();
}

/// Keys of b sequences of sq rows in some layout; returns the sk that terms of scores must have.
std::int64_t choose_keys(Arguments& g, Choices& c, std::int64_t b, std::int64_t hk, std::int64_t sq, std::int64_t sk,
                         std::int64_t d, std::int64_t dv) {
  KvSource& kv = g.args.kv;
  const DType dtype = some_cache_type(c);
  const std::int64_t tail = is_quantized(dtype) && d > 1 && c.one_in(3) ? 1 + c.below(static_cast<int>(d) - 1) : 0;
  d -= tail;
  sk = choose_layout(g, c, kv, b, hk, sq, sk, d, dv, dtype);
  if (tail > 0) {
    const auto& shape = kv.k.shape;
    kv.k_tail = kv.k.ndim == 3 ? floats(g, c, {shape[0], hk, tail}, some_type(c))
                               : floats(g, c, {shape[0], hk, shape[2], tail}, some_type(c));
  }
  choose_scales(g, c, kv.k, d, kv.k_scale, kv.k_zero);
  choose_scales(g, c, kv.v, dv, kv.v_scale, kv.v_zero);
  return sk;
}

/// Arguments that are right but for what the choices of single values make of them.
void choose_args(Arguments& g, Choices& c) {
  const std::int64_t b = c.below(4), hk = c.below(3) + (c.one_in(16) ? 0 : 1), hq = hk * (1 + c.below(3));
  const std::int64_t d = c.one_in(4) ? c.below(40) : 1 + c.below(8), dv = c.below(2) ? d : 1 + c.below(9);
  std::int64_t sq = c.below(7), sk = c.one_in(3) ? sq : c.below(9);
  const DType q_type = c.one_in(6) ? DType::f8e4m3 : some_type(c), out_type = some_type(c);
  AttentionArgs& args = g.args;
  if (c.one_in(3)) {  // ragged queries
    const auto rows = borders(c, b);
    args.cu_seqlens_q = integers(g, c, rows);
    args.q = floats(g, c, {rows.back(), hq, d}, q_type);
    args.out = output(g, {rows.back(), hq, dv}, out_type);
    if (c.one_in(3)) args.lse = output(g, {rows.back(), hq});
    sq = 5;
  } else {
    args.q = floats(g, c, {b, hq, sq, d}, q_type);
    args.out = output(g, {b, hq, sq, dv}, out_type);
    if (c.one_in(3)) args.lse = output(g, {b, hq, sq});
  }
  if (q_type == DType::f8e4m3 && c.below(2)) {
    const auto maybe = [&](int dim) { return c.below(2) ? args.q.shape[static_cast<std::size_t>(dim)] : 1; };
    args.q_scale = args.q.ndim == 3 ? floats(g, c, {maybe(0), hq, 1}) : floats(g, c, {maybe(0), hq, maybe(2), 1});
  }
  sk = choose_keys(g, c, b, hk, sq, sk, d, dv);
  if (!has_positions(args.kv) && !c.one_in(8)) {  // else something is refused most of the time
    if (c.below(2)) args.score.scale = some_float(c);
    Modifiers::choose_numbers(args.score, c, some_float);
    if (c.one_in(4)) args.score.sinks = floats(g, c, {hq});
    return;
  }
  choose_score(g, c, b, hq, sq, sk);
}

/// The gradients of what `args` describes.
void choose_backward(Arguments& g, Choices& c) {
  const AttentionArgs& f = g.args;
  AttentionBackwardArgs& a = g.backward;
  a.q = f.q, a.kv = f.kv, a.out = f.out, a.lse = f.lse, a.score = f.score, a.cu_seqlens_q = f.cu_seqlens_q;
  const auto like = [&](const Layout& t, auto make) {
    const auto& s = t.shape;
    return t.ndim == 4 ? make({s[0], s[1], s[2], s[3]}) : t.ndim == 3 ? make({s[0], s[1], s[2]}) : make({s[0], s[1]});
  };
  const auto input = [&](DType dtype) {
    return [&g, &c, dtype](std::initializer_list<std::int64_t> shape) { return floats(g, c, shape, dtype); };
  };
  const auto gradient = [&](const TensorView& of, MutableTensorView& to) {
    const DType dtype = some_type(c);
    if (!of || c.one_in(3)) return;
    to = of.ndim == 1 ? output(g, {of.shape[0]}, dtype)
                      : like(of, [&](std::initializer_list<std::int64_t> shape) { return output(g, shape, dtype); });
  };
  a.dout = like(f.out, input(some_type(c)));
  if (f.out.ndim == 4) a.lse = floats(g, c, {f.out.shape[0], f.out.shape[1], f.out.shape[2]});
  else a.lse = floats(g, c, {f.out.shape[0], f.out.shape[1]});
  if (c.one_in(3)) a.dlse = like(a.lse, input(DType::f32));
  gradient(a.q, a.dq), gradient(a.kv.k, a.dk), gradient(a.kv.v, a.dv);
  gradient(a.score.bias, a.dbias), gradient(a.score.sinks, a.dsinks), gradient(a.score.alibi, a.dalibi);
}

/// Gives one dimension of all tensors another size, without memory behind it.
void resize_everywhere(const Call& call, Choices& c) {
  const auto n = static_cast<std::size_t>(c.below(kMaxDims));
  const std::int64_t size = c.one_of<std::int64_t>({0, 1, 5, 1 << 20, std::int64_t{1} << 47, kBig});
  for (TensorView* t : call.inputs) t->shape[n] = *t ? size : t->shape[n];
  for (MutableTensorView* t : call.outputs) t->shape[n] = *t ? size : t->shape[n];
}

void twist_something(const Call& call, KvSource& kv, Given& g, Choices& c) {
  switch (c.below(10)) {
    case 0:
      kv.kind = static_cast<KvSource::Kind>(c.below(6));
      break;
    case 1:
      resize_everywhere(call, c);
      break;
    default:
      twist_any(call, g, c);
  }
}

bool is_small(const TensorView& q, const KvSource& kv) {
  double operations = 1;
  for (const Layout& t : {Layout(q), Layout(kv.k)}) {
    for (const std::int64_t size : t.shape) operations *= std::max(1.0, static_cast<double>(size));
  }
  if (kv.indices) operations *= std::max(1.0, static_cast<double>(kv.indices.shape[2]));
  if (kv.block_table) operations *= std::max(1.0, static_cast<double>(kv.block_table.shape[1]));
  return operations <= kMaxOperations;
}

template <class Args>
Call call_of(Args& a) {
  Call call;
  call.indices = {&a.kv.seqlens, &a.kv.cu_seqlens, &a.cu_seqlens_q, &a.kv.block_table, &a.kv.indices, &a.kv.counts};
  call.inputs = {&a.q,           &a.kv.k,       &a.kv.v,       &a.score.bias, &a.score.mask, &a.score.alibi,
                 &a.score.sinks, &a.kv.k_scale, &a.kv.v_scale, &a.kv.k_zero,  &a.kv.v_zero,  &a.kv.k_tail};
  call.is_small = [&a] { return is_small(a.q, a.kv); };
  call.plan = [&a] { Plan(a, fuzz_context()); };
  return call;
}

/// Makes arguments of the bytes and checks them.
void check(Arguments& g, Choices c) {
  clear(g);
  g.args = {}, g.backward = {};
  choose_args(g, c);
  const bool backward = c.one_in(3);
  if (backward) choose_backward(g, c);
  AttentionBackwardArgs& b = g.backward;
  Call call = backward ? call_of(b) : call_of(g.args);
  if (backward) {
    for (TensorView* t : {&b.out, &b.lse, &b.dout, &b.dlse}) call.inputs.push_back(t);
    call.outputs = {&b.dq, &b.dk, &b.dv, &b.dbias, &b.dsinks, &b.dalibi};
    call.run = [&b] { attention_backward(b, fuzz_context()); };
  } else {
    call.inputs.push_back(&g.args.q_scale);
    call.outputs = {&g.args.out, &g.args.lse};
    call.run = [&g] { attention(g.args, fuzz_context()); };
  }
  for (int twists = c.below(4); twists > 0; --twists) twist_something(call, backward ? b.kv : g.args.kv, g, c);
  // Validation reads whole lists. One that repeats a single entry can be of any length, and take as long.
  const std::int64_t entries = (backward ? b.kv : g.args.kv).indices.shape[2];
  if (static_cast<double>(entries) > kMaxOperations) return;
  check_call(g, call);
}

}  // namespace
}  // namespace rapt::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static rapt::testing::Arguments given;
  rapt::testing::check(given, {data, size});
  return 0;
}
