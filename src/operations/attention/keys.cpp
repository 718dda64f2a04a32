#include "operations/attention/keys.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/attention/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

// Throws Error for keys of two kinds. `P` is the problem of a cache, or of any keys.
template <class P>
void check_one_kind(const P& p, const char* argument) {
  unsigned first = 0;
  KeyKinds::for_each([&]<class K>(K) {
    if constexpr (K::bit != KvFeatures::strided && KeyKinds::can_be<K, P>) {
      if (!K::is(p)) return;
      if (first != 0)
        throw Error(argument, std::string(KvFeatures::name_of(first)) + " and " + KvFeatures::name_of(K::bit),
                    "one of them");
      first = K::bit;
    }
  });
}

}  // namespace

int64_t longest_sequence(const char* name, const TensorView& starts, const Bound& bound, int64_t total) {
  return bound.device.type == DeviceType::cpu ? check_starts(name, integers_of(starts), starts.shape[0], total) : total;
}

void AttentionFeatures::refuse(unsigned kind, const char* argument) {
  KeyKinds::visit(kind, [&]<class K>(K) {
    if constexpr (K::refusal.got != nullptr) throw Error(argument, K::refusal.got, K::refusal.wanted);
    else throw Error(argument, std::string("one for ") + name_of(kind), K::refusal.wanted);
  });
  __builtin_unreachable();
}

void check_modifiers(const AttentionProblem& p) {
  const unsigned kind = AttentionFeatures::of(p);
  Modifiers::for_each([&]<class M>(M) {
    if (!(M::keys & kind) && M::is_given(p)) AttentionFeatures::refuse(kind, M::name);
  });
}

void check_kind(const AttentionProblem& p) {
  check_one_kind(p, "kv");
  KeyKinds::visit(AttentionFeatures::of(p), [&]<class K>(K) { K::check(p); });
}

void check_cache(const CacheProblem& p, int64_t sk, const char* k, const char* kind) {
  KeyKinds::for_each([&]<class K>(K) { K::check_blocks(p, sk, k); });
  check_one_kind(p, kind);
}

void check_key_lengths(const AttentionProblem& p) {
  check_cache(p, p.sk, "k", "kv");
  if (const unsigned kind = AttentionFeatures::of(p); kind & KvFeatures::needs_lengths && !p.kv_lengths)
    throw Error("kv.seqlens", "no tensor", std::string("[b] lengths for ") + KvFeatures::name_of(kind));
}

void check_key_shapes(const KvSource& kv, const Bound& bound) {
  const int64_t q_size = bound[attention_dimension("d")], per_byte = kv.k.dtype == DType::i4x2 ? 2 : 1;  // elements
  const int64_t tail = kv.k_tail ? bound[attention_dimension("tail")] : 0;
  if (kv.k_tail) {
    if (tail < 1) throw Error("kv.k_tail", "shape " + shape_text(kv.k_tail), "1 column or more");
    check_tail("kv.k_tail", kv.k.dtype, q_size, tail, kv.k_tail.dtype);
  }
  const int64_t d = q_size - tail;
  if (d % per_byte != 0) throw Error("q", "head dimension " + std::to_string(q_size), "an even one for keys of i4x2");
  if (bound[attention_dimension("dk")] != d)
    throw Error(
        "k", "shape " + shape_text(kv.k),
        std::string(per_byte == 1 ? tail > 0 ? "q's head dimension d less k_tail's columns" : "q's head dimension d"
                                  : "half of q's head dimension d, less k_tail's columns, in bytes,") +
            " = " + std::to_string(d / per_byte));
  KeyKinds::visit(bound.features, [&]<class K>(K) { K::check_batch(kv, bound); });
  check_heads(bound[attention_dimension("hq")], bound[attention_dimension("hk")]);
}

void check_scale_shapes(const KvSource& kv, const Bound& bound) {
  for (const auto& [name, scale, groups, zero_name, zero] :
       {std::tuple{"kv.k_scale", &kv.k_scale, attention_dimension("k_groups"), "kv.k_zero", &kv.k_zero},
        std::tuple{"kv.v_scale", &kv.v_scale, attention_dimension("v_groups"), "kv.v_zero", &kv.v_zero}}) {
    if (*scale && bound[groups] < 1) throw Error(name, "shape " + shape_text(*scale), "1 group of a row or more");
    if (*zero && !*scale) throw Error(zero_name, "zero points without scales", "scales too");
  }
}

void check_lengths(const TensorView& cu_seqlens_q, const KvSource& kv, Bound& bound) {
  if (bound.features & AttentionFeatures::ragged_q)
    bound.derive(attention_dimension("sq"),
                 longest_sequence("cu_seqlens_q", cu_seqlens_q, bound, bound[attention_dimension("total_q")]));
  int64_t max_keys = 0;
  KeyKinds::visit(bound.features, [&]<class K>(K) {
    K::check_shapes(kv, bound);
    max_keys = K::max_keys(bound[attention_dimension("sk")]);
  });
  if (!kv.seqlens || bound.device.type != DeviceType::cpu) return;
  const Integers lengths = integers_of(kv.seqlens);
  for (int64_t i = 0; i < bound[attention_dimension("b")]; ++i)
    if (const int64_t n = lengths[i]; n < 0 || n > max_keys)
      throw Error("kv.seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                  max_keys == kMaxSize ? "0 to 2^48" : "0 to sk = " + std::to_string(max_keys));
}

void fill_cache(unsigned features, int64_t rows, CacheProblem& p) {
  KeyKinds::visit(features, [&]<class K>(K) { K::fill(rows, p); });
}
void fill_layout(const CacheProblem& p, int64_t sk, KvLayout& f) {
  KeyKinds::visit(KvFeatures::of(p), [&]<class K>(K) {
    if constexpr (KeyKinds::can_be<K, CacheProblem>) K::fill(p, sk, f);
  });
}

void fill_kind(unsigned features, const Bound& bound, AttentionProblem& p) {
  fill_cache(features, bound[attention_dimension("page_size")], p);
  KeyKinds::visit(features, [&]<class K>(K) { K::fill(bound, p); });
}
void fill_layout(const AttentionProblem& p, KvLayout& f) {
  KeyKinds::visit(AttentionFeatures::of(p), [&]<class K>(K) { K::fill(p, p.sk, f); });
}

void fill_keys(const AttentionArgs& args, const AttentionProblem& p, AttentionParams& f) {
  const KvSource& kv = args.kv;
  if (args.cu_seqlens_q) f.q_begin = integers_of(args.cu_seqlens_q);
  if (kv.cu_seqlens) f.k_begin = integers_of(kv.cu_seqlens);
  if (kv.seqlens) f.k_len = integers_of(kv.seqlens);
  KeyKinds::visit(AttentionFeatures::of(p), [&]<class K>(K) { K::fill_tensors(kv, f); });
}

void check_visible_keys(const AttentionProblem& p, const AttentionParams& params) {
  KeyKinds::visit(AttentionFeatures::of(p), [&]<class K>(K) { K::check_visible(p, params); });
}

}  // namespace rapt
