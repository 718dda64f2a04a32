// attention_backward: arguments -> Call, or an Error that names the argument; and its problem's text.
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention_backward/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = AttentionBackwardProblem;

constexpr std::pair<char, std::uint8_t> kGrads[] = {{'q', P::kDq}, {'k', P::kDk}, {'v', P::kDv}};

// Beside the forward's.
constexpr Field<P> kFields[] = {
    dtype_field_like<P, &P::dout_dtype, &P::out_dtype>("dout"),
    {"grads", false,
     [](const P& p, std::string_view key, std::string& text) {
       std::string letters;
       for (const auto& [letter, bit] : kGrads)
         if (p.grads & bit) letters += letter;
       if (p.grads != P::kAll) print_word(text, key, letters);
     },
     [](P& p, const Word& word) {
       std::size_t at = 0;
       p.grads = 0;
       for (const auto& [letter, bit] : kGrads)
         if (at < word.value.size() && word.value[at] == letter) p.grads |= bit, ++at;
       if (at != word.value.size()) word.refuse("letters out of q, k and v, in this order");
     }},
    flag_field<P, &P::dlse>("dlse"),
    flag_field<P, &P::dbias>("dbias"),
    flag_field<P, &P::dsinks>("dsinks"),
    flag_field<P, &P::dalibi>("dalibi"),
    {"pool", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.pool != (has_positions(p) ? 0 : p.sk)) print_word(text, key, std::to_string(p.pool));
     },
     [](P& p, const Word& word) { p.pool = word.integer(); }},
};

// A row of dq, dk or dv for each of the tensor that it is the gradient of.
Gradient gradient_rows(const MutableTensorView& t, bool ragged) {
  if (!t) return {};
  return {t.data, t.dtype, row_strides(t, ragged, true)};
}

// Of dsinks or dalibi: [hq] or [b, hq].
Gradient gradient_of_heads(const MutableTensorView& t) {
  if (!t || t.shape[0] == 0 || (t.ndim == 2 && t.shape[1] == 0)) return {};
  return {t.data, t.dtype, {t.ndim == 2 && t.shape[0] > 1 ? t.strides[0] : 0, t.strides[t.ndim == 2 ? 1 : 0], 0, 0}};
}

void fill_bias(const MutableTensorView& t, AttentionBackwardParams& f) {
  if (!t) return;
  const auto& [size, step] = Pairs(t);
  f.grad_bias = {t.data, t.dtype, {step[0], step[1], step[2], size[3] > 1 ? step[3] : 1}};
  f.grad_bias_b = size[0], f.grad_bias_h = size[1], f.grad_bias_q = size[2], f.grad_bias_k = size[3];
}

// "KvSource::strided, ragged or gathered".
std::string kinds_with_gradients() {
  std::vector<std::string> names;
#define RAPT_KV_KIND(name, NAME, value, text, positions) \
  if (KeyKind<KvSource::Kind::name>::has_gradients) names.emplace_back(#name);
#include "rapt/kv_kinds.def"
  std::string all = "KvSource::";
  for (std::size_t i = 0; i < names.size(); ++i) all += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  return all;
}

// What has no gradients.
void check_kinds(const P& p) {
  const unsigned kind = AttentionFeatures::of(p);
  KeyKinds::visit(kind, [&]<class K>(K) {
    if (!K::has_gradients) throw Error("kv", AttentionFeatures::name_of(kind), kinds_with_gradients());
  });
  check_type("q", p.q_dtype, kFloatTypes), check_type("k", p.kv_dtype, kFloatTypes);
}

// Beside the forward.
void check_gradients(const P& p) {
  check_type("dout", p.dout_dtype, kFloatTypes);
  if (has_positions(p) && p.pool != 0)
    throw Error("pool", std::to_string(p.pool) + " rows",
                std::string("none without ") + AttentionFeatures::name_of(AttentionFeatures::lists));
  if (p.pool < 0 || p.pool > kMaxSize) throw Error("pool", std::to_string(p.pool) + " rows", "0 to 2^48");
  if (p.grads > P::kAll) throw Error("problem", "unknown gradients", "dq, dk and dv");
  if (p.grads == 0 && !p.dbias && !p.dsinks && !p.dalibi)
    throw Error("dq", "no gradient at all", "one or more of dq, dk, dv, dbias, dsinks and dalibi");
  for (const auto& [name, wanted, of, given] : {std::tuple{"dbias", p.dbias, "bias", p.bias != P::kNone},
                                                {"dsinks", p.dsinks, "sinks", p.sinks},
                                                {"dalibi", p.dalibi, "alibi", p.alibi}})
    if (wanted && !given) throw Error(name, "a gradient without " + std::string(of), std::string(of) + ", too");
}

}  // namespace

Call OperationOf<AttentionBackwardArgs>::bind(const Args& args, Bound& bound) {
  // So that attention_dimension() holds here, too.
  constexpr auto is_numbered_alike = [](std::string_view name) consteval {
    return arguments.id(name) == attention_dimension(name);
  };
  static_assert(is_numbered_alike("tail") && is_numbered_alike("dv") && is_numbered_alike("n"));
  const auto read_only = [](const TensorView& t) -> MutableTensorView {
    return {const_cast<void*>(t.data), t.dtype, t, t.device};
  };
  const AttentionArgs forward{args.q, args.kv, read_only(args.out), args.score, read_only(args.lse), args.cu_seqlens_q};
  P p;
  AttentionBackwardParams f{};
  std::shared_ptr<const void> lists;
  static_cast<AttentionProblem&>(p) = bind_forward(forward, bound, f, lists);
  if (!has_positions(p)) f.pools = args.kv.k.shape[0], p.pool = args.kv.k.shape[2];
  const bool ragged_q = p.ragged_q >= 0, ragged_k = p.ragged_k >= 0;
  f.hq = p.hq, f.scale = args.score.scale.value_or(1.f / std::sqrt(static_cast<float>(p.d)));
  f.dout = args.dout.data, f.dout_type = p.dout_dtype = args.dout.dtype;
  f.dout_stride = row_strides(args.dout, ragged_q, true);
  if (args.dlse) {
    p.dlse = true;
    f.dlse = static_cast<const float*>(args.dlse.data), f.dlse_stride = row_strides(args.dlse, ragged_q, false);
  }
  f.grad_q = gradient_rows(args.dq, ragged_q);
  f.grad_k = gradient_rows(args.dk, ragged_k), f.grad_v = gradient_rows(args.dv, ragged_k);
  p.grads = static_cast<std::uint8_t>((args.dq ? P::kDq : 0) | (args.dk ? P::kDk : 0) | (args.dv ? P::kDv : 0));
  fill_bias(args.dbias, f);
  f.grad_sinks = gradient_of_heads(args.dsinks), f.grad_alibi = gradient_of_heads(args.dalibi);
  p.dbias = static_cast<bool>(args.dbias), p.dsinks = static_cast<bool>(args.dsinks);
  p.dalibi = static_cast<bool>(args.dalibi);
  check_kinds(p), check_gradients(p);  // bind_forward() has checked the rest
  // There may be no row, and yet gradients to fill with zeros.
  return {p, f, bound.device, bound.writes_nothing(), std::move(lists)};
}

void OperationOf<AttentionBackwardArgs>::set_scalars(const C& c, Args& args) {
  const rapt_attention_args& forward = *c.forward;
  set_attention_scalars(forward, args.kv, args.score);
  if (forward.q_scale.ndim != 0 || forward.q_scale.data)
    throw Error("q_scale", "scales of queries", "queries of f32, bf16 or f16, which have none");
}

std::string AttentionBackwardProblem::to_string() const {
  P p = *this;
  p.lse = false;  // always there
  return print_fields("attention_backward", p, attention_fields(), kFields);
}

AttentionBackwardProblem AttentionBackwardProblem::parse(std::string_view text) {
  const Words words(text, "attention_backward");
  AttentionBackwardProblem p;
  words.read(p, attention_fields(), kFields);
  complete(words, p);
  p.lse = true;
  if (!words.has("dout")) p.dout_dtype = p.out_dtype;
  if (!has_positions(p) && !words.has("pool")) p.pool = p.sk;
  return p;
}

void check(const AttentionBackwardProblem& p) {
  check_kinds(p);
  check(static_cast<const AttentionProblem&>(p));
  check_gradients(p);
}

Needs needs_of(const AttentionBackwardProblem& p) {
  return {set_of(p.q_dtype) | set_of(p.kv_dtype) | set_of(p.dout_dtype), p.d, p.dv};
}

}  // namespace rapt
