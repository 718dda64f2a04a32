// attention_backward: arguments -> Call, or an Error that names the argument; and its problem's text.
#include "rapt/attention_backward.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/fields.hpp"
#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "operations/attention_check.hpp"
#include "operations/call.hpp"

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
       if (p.pool != (p.gathered ? p.sk : 0)) print_word(text, key, std::to_string(p.pool));
     },
     [](P& p, const Word& word) { p.pool = word.integer(); }},
};

class Validator {
 public:
  explicit Validator(const AttentionBackwardArgs& args) : args_(args) {}

  Call run(std::span<const std::byte> workspace) {
    const AttentionArgs forward{args_.q,           args_.kv, read_only(args_.out), args_.score, read_only(args_.lse),
                                args_.cu_seqlens_q};
    if (!args_.lse) throw Error("lse", "no tensor", "the forward's");
    check_float("q", args_.q.dtype);
    check_float("k", args_.kv.k.dtype);  // else scales would be asked for
    std::shared_ptr<const void> lists;
    static_cast<AttentionProblem&>(p_) = check_forward(forward, f_, all_, lists);
    if (p_.gathered) f_.pools = args_.kv.k.shape[0], p_.pool = args_.kv.k.shape[2];
    ragged_q_ = p_.ragged_q >= 0, ragged_k_ = p_.ragged_k >= 0;
    f_.dout = input("dout", args_.dout, args_.out, f_.dout_type, f_.dout_stride);
    p_.dout_dtype = args_.dout.dtype;
    f_.hq = p_.hq, f_.scale = args_.score.scale.value_or(1.f / std::sqrt(static_cast<float>(p_.d)));
    if (args_.dlse) {
      check_f32("dlse", args_.dlse.dtype);
      DType f32{};
      f_.dlse = static_cast<const float*>(input("dlse", args_.dlse, args_.lse, f32, f_.dlse_stride));
      p_.dlse = true;
    }
    f_.grad_q = rows("dq", args_.dq, args_.q, "q", ragged_q_);
    f_.grad_k = rows("dk", args_.dk, args_.kv.k, "k", ragged_k_);
    f_.grad_v = rows("dv", args_.dv, args_.kv.v, "v", ragged_k_);
    p_.grads = static_cast<std::uint8_t>((args_.dq ? P::kDq : 0) | (args_.dk ? P::kDk : 0) | (args_.dv ? P::kDv : 0));
    bias();
    per_head("dsinks", args_.dsinks, args_.score.sinks, "score.sinks", f_.grad_sinks);
    per_head("dalibi", args_.dalibi, args_.score.alibi, "score.alibi", f_.grad_alibi);
    p_.dbias = static_cast<bool>(args_.dbias), p_.dsinks = static_cast<bool>(args_.dsinks);
    p_.dalibi = static_cast<bool>(args_.dalibi);
    check(p_);
    check_overlaps(all_);
    check_apart(workspace, all_);
    // There may be no row, and yet gradients to fill with zeros.
    return {p_, f_, args_.q.device, writes_nothing(all_), std::move(lists)};
  }

 private:
  static MutableTensorView read_only(const TensorView& t) {  // check_forward() takes it as an input
    return {const_cast<void*>(t.data), t.dtype, t, t.device};
  }
  void take_like(const char* name, const TensorView& t, const TensorView& like, const char* of, bool written) {
    take(all_, name, t, written);
    if (t.device != args_.q.device) throw Error(name, "a tensor on another device than q", "all tensors on one device");
    check_float(name, t.dtype);
    if (!same_shape(t, like)) throw Error(name, "shape " + shape_text(t), std::string(of) + "'s, " + shape_text(like));
  }
  const void* input(const char* name, const TensorView& t, const TensorView& like, DType& type, Strides& stride) {
    if (!t) throw Error(name, "no tensor", "the gradient of " + std::string(name + 1));
    take_like(name, t, like, name + 1, false);
    type = t.dtype, stride = row_strides(t, ragged_q_, t.ndim == args_.out.ndim);
    return t.data;
  }
  Gradient rows(const char* name, const MutableTensorView& t, const TensorView& like, const char* of, bool ragged) {
    if (!t) return {};
    take_like(name, t, like, of, true);
    return {t.data, t.dtype, row_strides(t, ragged, true)};
  }
  void bias() {
    const MutableTensorView& t = args_.dbias;
    if (!t) return;
    if (!args_.score.bias) throw Error("dbias", "a tensor", "none without score.bias");
    take_like("dbias", t, args_.score.bias, "score.bias", true);
    int64_t size[4] = {1, 1, 1, 1}, step[4] = {};
    const auto rank = static_cast<std::size_t>(t.ndim);
    for (std::size_t from = 0; from < rank; ++from) {
      const std::size_t to = 4 - rank + from;
      size[to] = t.shape[from], step[to] = size[to] > 1 ? t.strides[from] : 0;
    }
    f_.grad_bias = {t.data, t.dtype, {step[0], step[1], step[2], size[3] > 1 ? step[3] : 1}};
    f_.grad_bias_b = size[0], f_.grad_bias_h = size[1], f_.grad_bias_q = size[2], f_.grad_bias_k = size[3];
  }
  void per_head(const char* name, const MutableTensorView& t, const TensorView& like, const char* of, Gradient& to) {
    if (!t) return;
    if (!like) throw Error(name, "a tensor", "none without " + std::string(of));
    take_like(name, t, like, of, true);
    if (all_.back().bytes == 0) return;
    to = {t.data, t.dtype, {t.ndim == 2 && t.shape[0] > 1 ? t.strides[0] : 0, t.strides[t.ndim == 2 ? 1 : 0], 0, 0}};
  }

  const AttentionBackwardArgs& args_;
  P p_{};
  AttentionBackwardParams f_{};
  std::vector<Checked> all_;
  bool ragged_q_ = false, ragged_k_ = false;
};

}  // namespace

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
  if (p.gathered && !words.has("pool")) p.pool = p.sk;
  return p;
}

AttentionBackwardProblem AttentionBackwardProblem::of(const AttentionBackwardArgs& args) {
  return std::get<AttentionBackwardProblem>(validate(args).problem);
}

void check(const AttentionBackwardProblem& p) {
  if (p.page_size > 0 || p.ring) throw Error("kv", "pages or a ring", "KvSource::strided, ragged or gathered");
  check_float("q", p.q_dtype), check_float("k", p.kv_dtype);
  check(static_cast<const AttentionProblem&>(p));
  check_float("dout", p.dout_dtype);
  if (!p.gathered && p.pool != 0) throw Error("pool", std::to_string(p.pool) + " rows", "none without gathered keys");
  if (p.pool < 0 || p.pool > kMaxSize) throw Error("pool", std::to_string(p.pool) + " rows", "0 to 2^48");
  if (p.grads > P::kAll) throw Error("problem", "unknown gradients", "dq, dk and dv");
  if (p.grads == 0 && !p.dbias && !p.dsinks && !p.dalibi)
    throw Error("dq", "no gradient at all", "one or more of dq, dk, dv, dbias, dsinks and dalibi");
  for (const auto& [name, wanted, of, given] : {std::tuple{"dbias", p.dbias, "bias", p.bias != P::kNone},
                                                {"dsinks", p.dsinks, "sinks", p.sinks},
                                                {"dalibi", p.dalibi, "alibi", p.alibi}})
    if (wanted && !given) throw Error(name, "a gradient without " + std::string(of), std::string(of) + ", too");
}

Call validate(const AttentionBackwardArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  return Validator(args).run(workspace);
}

}  // namespace rapt
