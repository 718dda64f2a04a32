// com.microsoft's MultiHeadAttention.
#include "api/onnxruntime/cache.hpp"
#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {
namespace {

enum : std::size_t { kQuery, kKey, kValue, kBias, kPadding, kScoreBias, kPastKey, kPastValue, kPastLength, kBeams };
enum : std::size_t { kOut, kPresentKey, kPresentValue, kScores };

// Component `i` of q, k and v that lie side by side in each head: [b, s, heads, n, d].
TensorView component(const Input& packed, const char* name, std::int64_t n, std::int64_t i) {
  const auto [b, s, heads, count, d] = packed.shape;
  if (count != n) throw Error(name, "a dimension 3 of " + std::to_string(count), std::to_string(n));
  const auto* data =
      static_cast<const std::byte*>(packed.data) + static_cast<std::size_t>(i * d) * size_of(packed.dtype);
  return TensorView(data, packed.dtype, {b, heads, s, d}, {s * heads * n * d, n * d, heads * n * d, 1});
}

void need_size(const TensorView& x, std::size_t dimension, const char* name, const char* what, std::int64_t wanted) {
  const std::int64_t size = x.shape[dimension];
  if (size != wanted) throw Error(name, std::to_string(size) + " " + what, std::to_string(wanted));
}

class MultiHeadAttention final : public Kernel {
 public:
  explicit MultiHeadAttention(const Attributes& attributes)
      : heads_(attributes.integer("num_heads", 0)),
        causal_(attributes.integer("unidirectional", 0) == 1),
        scale_(attributes.real("scale", 0)),
        masked_(attributes.real("mask_filter_value", -10000.0f)) {}

  void check(const Node& node) const override {
    need_one_float_type(node, {kQuery, kKey, kValue, kScoreBias, kPastKey, kPastValue});
    if (node.has_input(kBias) && node.type(kBias) != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
      throw Refusal{"a bias of queries, keys and values that is not float"};
    if (node.has_input(kPadding) && node.rank(kPadding) != 2 && node.rank(kPadding) != 3)
      throw Refusal{"key_padding_mask has neither 2 nor 3 dimensions, or they are unknown"};
    if (node.has_input(kPadding) && node.has_input(kScoreBias))
      throw Refusal{"key_padding_mask together with attention_bias"};
    if (node.has_input(kPastLength)) throw Refusal{"past_sequence_length is given"};
    if (node.has_input(kBeams)) throw Refusal{"cache_indirection is given"};
    if (node.has_output(kScores)) throw Refusal{"qk is asked for"};
  }

  void compute(Call& call) const override {
    const Input query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    const Input past_k = call.input(kPastKey), past_v = call.input(kPastValue);
    TensorView q, k, v;
    if (!key) {
      need_rank(query, "query", {5});
      if (value) throw Error("value", "given without key", "both or neither");
      q = component(query, "query", 3, 0);
      k = component(query, "query", 3, 1), v = component(query, "query", 3, 2);
    } else if (!value) {
      need_rank(key, "key", {5});
      k = component(key, "key", 2, 0), v = component(key, "key", 2, 1);
    } else {
      need_rank(key, "key", {3, 4});
      need_rank(value, "value", {key.rank});
      k = key.rank == 4 ? key.view() : heads_of(key, "key", heads_);
      v = value.rank == 4 ? value.view() : heads_of(value, "value", heads_);
    }
    if (key) q = heads_of(query, "query", heads_);
    const auto [b, heads, sq, d] = q.shape;
    const std::int64_t dv = v.shape[3];
    need_size(q, 1, "query", "heads", heads_), need_size(k, 1, "key", "heads", heads_);
    need_size(v, 1, "value", "heads", heads_), need_size(k, 3, "key", "elements per head", d);
    if (const Input bias = call.input(kBias)) {
      need_rank(bias, "bias", {1});
      const std::int64_t row = heads * d;
      if (bias.shape[0] != 2 * row + heads * dv)
        throw Error("bias", std::to_string(bias.shape[0]) + " elements", std::to_string(2 * row + heads * dv));
      const auto* values = bias.values<float>();
      q = plus(call, q, values);
      if (key.rank != 4) k = plus(call, k, values + row), v = plus(call, v, values + 2 * row);
    }

    AttentionArgs args;
    args.q = q;
    args.kv = KvSource::strided(k, v);
    const std::int64_t past = append(call, past_k, past_v, args.kv, kPresentKey, kPresentValue);
    args.out = call.output_rows(kOut, q.dtype, b, heads, sq, dv);
    if (const Input padding = call.input(kPadding)) args.score.bias = bias_of(call, padding, b, sq, args.kv.k.shape[2]);
    if (const Input bias = call.input(kScoreBias)) {
      need_rank(bias, "attention_bias", {4});
      args.score.bias = bias.view();
    }
    args.score.causal = causal_;
    args.score.align = Align::offset(past);
    if (scale_ != 0) args.score.scale = scale_;
    call.attention(args);
  }

 private:
  // x + bias, contiguous as [b, s, heads, d].
  static TensorView plus(Call& call, const TensorView& x, const float* bias) {
    const auto [b, heads, s, d] = x.shape;
    const auto elements = static_cast<std::size_t>(b * heads * s * d);
    auto* const sum = static_cast<float*>(call.scratch(elements * sizeof(float)));
    call.for_each(static_cast<std::size_t>(b * s), elements * sizeof(float), [&, heads = heads, s = s, d = d](auto i) {
      const std::int64_t sequence = static_cast<std::int64_t>(i) / s, t = static_cast<std::int64_t>(i) % s;
      const auto* from = static_cast<const float*>(x.data) + sequence * x.strides[0] + t * x.strides[2];
      float* to = sum + static_cast<std::int64_t>(i) * heads * d;
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t c = 0; c < d; ++c) to[h * d + c] = from[h * x.strides[1] + c] + bias[h * d + c];
    });
    return TensorView(sum, {b, heads, s, d}, {s * heads * d, d, heads * d, 1});
  }

  // The operator adds mask_filter_value to the scores of padding: a row of padding alone still attends.
  TensorView bias_of(Call& call, const Input& padding, std::int64_t b, std::int64_t rows, std::int64_t sk) const {
    need_rank(padding, "key_padding_mask", {2, 3});
    const std::int64_t sq = padding.rank == 3 ? rows : 1;
    if (padding.shape[0] != b || padding.last() != sk || (padding.rank == 3 && padding.shape[1] != sq))
      throw Error("key_padding_mask", "another shape",
                  std::to_string(b) + " sequences of " + std::to_string(sk) + " keys, past included");
    auto* const bias = static_cast<float*>(call.scratch(static_cast<std::size_t>(b * sq * sk) * sizeof(float)));
    const auto* mask = padding.values<std::int32_t>();
    for (std::int64_t i = 0; i < b * sq * sk; ++i) bias[i] = mask[i] > 0 ? 0.0f : masked_;
    return TensorView(bias, {b, std::int64_t{1}, sq, sk});
  }

  std::int64_t heads_;
  bool causal_;
  float scale_, masked_;
};

}  // namespace

const Operator kMultiHeadAttention{"com.microsoft", "MultiHeadAttention", 1, 1, "T", make<MultiHeadAttention>};

}  // namespace rapt::onnx
