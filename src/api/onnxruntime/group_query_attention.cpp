// com.microsoft's GroupQueryAttention, with caches of the type of the queries.
#include <algorithm>
#include <numeric>

#include "api/onnxruntime/cache.hpp"
#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {
namespace {

enum : std::size_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kLastKey,
  kTotal,
  kCos,
  kSin,
  kPositions,
  kBias,
  kSinks,
  kKeyScale,
  kValueScale,
  kQueryNorm,
  kKeyNorm
};
enum : std::size_t { kOut, kPresentKey, kPresentValue, kScores };

class GroupQueryAttention final : public Kernel {
 public:
  explicit GroupQueryAttention(const Attributes& attributes)
      : heads_(attributes.integer("num_heads", 0)),
        kv_heads_(attributes.integer("kv_num_heads", 0)),
        window_(attributes.integer("local_window_size", -1)),
        causal_(attributes.integer("causal", 1) == 1),
        rotary_(attributes.integer("do_rotary", 0) == 1),
        interleaved_(attributes.integer("rotary_interleaved", 0) == 1),
        scale_(attributes.real("scale", 0)),
        softcap_(attributes.real("softcap", 0)),
        norm_eps_(attributes.real("qk_norm_epsilon", 1e-6f)) {
    if (heads_ <= 0 || kv_heads_ <= 0) throw Refusal{"num_heads or kv_num_heads is not positive"};
    check_softcap(softcap_);
    if (window_ != -1 && (window_ < 1 || !causal_)) throw Refusal{"local_window_size below 1, or without causal"};
    if (attributes.integer("qk_output", 0) != 0) throw Refusal{"qk_output is asked for"};
    if (attributes.integer("sliding_window_cache", 0) != 0) throw Refusal{"sliding_window_cache"};
    if (attributes.text("k_quant_type", "NONE") != "NONE" || attributes.text("v_quant_type", "NONE") != "NONE")
      throw Refusal{"a quantised cache"};
    if (attributes.integer("smooth_softmax", 0) == 1) smooth_.assign(static_cast<std::size_t>(heads_), 0.0f);
  }

  void check(const Node& node) const override {
    need_one_float_type(node,
                        {kQuery, kKey, kValue, kPastKey, kPastValue, kCos, kSin, kBias, kSinks, kQueryNorm, kKeyNorm});
    if (node.has_output(kScores)) throw Refusal{"output_qk is asked for"};
    if (node.has_input(kKeyScale) || node.has_input(kValueScale)) throw Refusal{"a quantised cache"};
    if (rotary_ && !(node.has_input(kCos) && node.has_input(kSin)))
      throw Refusal{"do_rotary without cos_cache and sin_cache"};
    if (!rotary_ && (node.has_input(kQueryNorm) || node.has_input(kKeyNorm))) throw Refusal{"norms without do_rotary"};
    if (node.has_input(kQueryNorm) != node.has_input(kKeyNorm))
      throw Refusal{"one norm of q_norm_weight and k_norm_weight"};
  }

  void compute(Call& call) const override {
    const Input query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    const Input past_k = call.input(kPastKey), past_v = call.input(kPastValue);
    need_rank(query, "query", {3});
    TensorView q, k, v;
    if (key) {
      q = heads_of(query, "query", heads_), k = heads_of(key, "key", kv_heads_);
      v = heads_of(value, "value", kv_heads_);
    } else {
      const std::int64_t d = heads_of(query, "query", heads_ + 2 * kv_heads_).shape[3];
      q = heads_of(query, "query", heads_, d, 0), k = heads_of(query, "query", kv_heads_, d, heads_ * d);
      v = heads_of(query, "query", kv_heads_, d, (heads_ + kv_heads_) * d);
    }
    const std::int64_t b = q.shape[0], s = q.shape[2], d = q.shape[3], added = k.shape[2];

    // seqlens_k has the position of each sequence's last key. In a prompt, shorter sequences end in padding.
    const Input last_key = call.input(kLastKey), total_length = call.input(kTotal);
    if (last_key.dtype != DType::i32 || count(last_key) != b)
      throw Error("seqlens_k", std::to_string(count(last_key)) + " elements", std::to_string(b));
    if (count(total_length) != 1)
      throw Error("total_sequence_length", std::to_string(count(total_length)), "1 element");
    const std::int64_t total = *total_length.values<std::int32_t>();
    if (total <= 0) throw Error("total_sequence_length", std::to_string(total), "a positive number");
    const std::int64_t rows = std::max(total, past_k ? past_k.shape[2] : 0);
    const bool prompt = s == total;
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(b)), first(lengths.size());  // first: position of row 0
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const std::int64_t last = last_key.values<std::int32_t>()[i],
                         least = prompt ? 0 : std::max<std::int64_t>(s - 1, 0);
      if (last < least || last >= rows)
        throw Error("seqlens_k", std::to_string(last), std::to_string(least) + " .. " + std::to_string(rows - 1));
      lengths[i] = static_cast<std::int32_t>(last + 1);
      first[i] = prompt ? 0 : static_cast<std::int32_t>(last + 1 - s);
    }
    if (added != s && added != 0)
      throw Error("key", std::to_string(added) + " rows", "0 or as many as query: " + std::to_string(s));
    if (v.shape[2] != added)
      throw Error("value", std::to_string(v.shape[2]) + " rows", "as many as key: " + std::to_string(added));

    const std::array shape{b, kv_heads_, rows, d};
    const KvCache cache = KvCache::strided(call.output_or_scratch(kPresentKey, k.dtype, shape),
                                           call.output_or_scratch(kPresentValue, v.dtype, shape));
    carry_over(call, past_k, past_v, cache, added == 0 ? lengths : first, added);
    if (b == 0 || s == 0) {
      call.output(kOut, std::array{b, s, heads_ * d});
      return;
    }

    AttentionArgs args;
    const TensorView starts(first.data(), {b});
    args.q = q;
    if (rotary_) args.q = rotate(call, q, k, v, cache, starts, prompt);
    else if (added > 0) call.append_kv({k, v, cache, starts, {}});
    args.kv = cache.source(TensorView(lengths.data(), {b}));
    args.out = call.output_rows(kOut, q.dtype, b, heads_, s, d);
    if (const Input bias = call.input(kBias)) {
      need_rank(bias, "attention_bias", {4});
      args.score.bias = bias.view();
      args.kv.k.shape[2] = args.kv.v.shape[2] = total;  // a bias has no columns for the rest of the cache
    }
    if (const Input sinks = call.input(kSinks)) {
      need_rank(sinks, "head_sink", {1});
      args.score.sinks = sinks.view();
    } else if (!smooth_.empty()) {
      args.score.sinks = TensorView(smooth_.data(), {heads_});
    }
    args.score.causal = causal_;
    if (window_ > 0) args.score.window = Window{window_ - 1, -1};
    args.score.align = prompt ? Align::top_left() : Align::bottom_right();
    if (scale_ != 0) args.score.scale = scale_;
    if (softcap_ != 0) args.score.softcap = softcap_;
    call.attention(args);
  }

 private:
  static std::int64_t count(const Input& input) {
    std::int64_t elements = input ? 1 : 0;
    for (int i = 0; i < input.rank; ++i) elements *= input.shape[static_cast<std::size_t>(i)];
    return elements;
  }

  // Rotates queries and new keys, and appends the keys and values to the cache. Returns the rotated queries.
  TensorView rotate(Call& call, const TensorView& q, const TensorView& k, const TensorView& v, const KvCache& cache,
                    const TensorView& starts, bool prompt) const {
    const auto [b, heads, s, d] = q.shape;
    RotaryAppendKvArgs args;
    const Input cos = call.input(kCos), sin = call.input(kSin);
    need_rank(cos, "cos_cache", {2}), need_rank(sin, "sin_cache", {2});
    args.cos = cos.view(), args.sin = sin.view();
    args.rotary_dim = 2 * args.cos.shape[1];
    args.interleaved = interleaved_;
    args.append.seqlens = starts;
    std::vector<std::int64_t> positions;
    if (const Input given = call.input(kPositions)) {
      need_rank(given, "position_ids", {2});
      if (given.shape[0] != b || given.shape[1] < s)
        throw Error("position_ids", std::to_string(given.shape[0]) + " sequences of " + std::to_string(given.shape[1]),
                    std::to_string(b) + " of at least " + std::to_string(s));
      if (prompt) {  // the first element alone counts
        const std::int64_t start = *given.values<std::int64_t>();
        if (start < 0 || start > cos.shape[0] - s)
          throw Error("position_ids", std::to_string(start), "0 .. " + std::to_string(cos.shape[0] - s));
        positions.resize(static_cast<std::size_t>(s));
        std::iota(positions.begin(), positions.end(), start);
        args.positions = TensorView(positions.data(), {std::int64_t{1}, s});
      } else {
        args.positions = TensorView(given.values<std::int64_t>(), {b, s}, {given.shape[1], std::int64_t{1}});
      }
    }
    const auto bytes = static_cast<std::size_t>(b * heads * s * d) * size_of(q.dtype);
    const MutableTensorView rotated(call.scratch(bytes), q.dtype, {b, heads, s, d}, {s * heads * d, d, heads * d, 1});
    const Input q_norm = call.input(kQueryNorm), k_norm = call.input(kKeyNorm);
    if (q_norm) need_rank(q_norm, "q_norm_weight", {1}), need_rank(k_norm, "k_norm_weight", {1});
    args.norm_eps = norm_eps_;
    if (k.shape[2] > 0) {
      args.append.k_new = k, args.append.v_new = v, args.append.cache = cache;
      args.q = q, args.q_out = rotated;
      if (q_norm) args.q_norm = q_norm.view();
      if (k_norm) args.k_norm = k_norm.view();
    } else {  // the cache has all keys: queries are rotated alone
      args.append.k_new = q, args.k_out = rotated;
      if (q_norm) args.k_norm = q_norm.view();
    }
    call.rotary_append_kv(args);
    return rotated;
  }

  std::int64_t heads_, kv_heads_, window_;
  bool causal_, rotary_, interleaved_;
  float scale_, softcap_, norm_eps_;
  std::vector<float> smooth_;  // sinks of 0 for smooth_softmax
};

}  // namespace

const Operator kGroupQueryAttention{"com.microsoft", "GroupQueryAttention", 1, 1, "T", make<GroupQueryAttention>};

}  // namespace rapt::onnx
