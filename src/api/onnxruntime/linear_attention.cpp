// LinearAttention of com.microsoft, and of ONNX since version 27.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {
namespace {

enum : std::size_t { kQuery, kKey, kValue, kPastState, kDecay, kBeta };
enum : std::size_t { kOut, kPresentState };

UpdateRule rule_of(const std::string& name) {
  constexpr std::pair<const char*, UpdateRule> kRules[] = {{"linear", UpdateRule::linear},
                                                           {"gated", UpdateRule::gated},
                                                           {"delta", UpdateRule::delta},
                                                           {"gated_delta", UpdateRule::gated_delta}};
  for (const auto& [word, rule] : kRules)
    if (name == word) return rule;
  throw Refusal{"update_rule " + name};
}

// [b, t, heads * d] as [b, t, heads, d].
TensorView split(const Input& rows, const char* name, std::int64_t heads) {
  const auto [b, h, t, d] = heads_of(rows, name, heads).shape;
  return TensorView(rows.data, rows.dtype, {b, t, h, d});
}

class LinearAttention final : public Kernel {
 public:
  explicit LinearAttention(const Attributes& attributes)
      : q_heads_(attributes.integer("q_num_heads", 0)),
        kv_heads_(attributes.integer("kv_num_heads", 0)),
        rule_(rule_of(attributes.text("update_rule", "gated_delta"))),
        scale_(attributes.real("scale", 0)) {
    if (q_heads_ <= 0 || kv_heads_ <= 0) throw Refusal{"q_num_heads or kv_num_heads is missing"};
    if (attributes.integer("state_window", 0) != 0) throw Refusal{"state_window"};
  }

  void check(const Node& node) const override {
    need_one_float_type(node, {kQuery, kKey, kValue, kDecay, kBeta});
    if (node.has_input(kPastState) && node.type(kPastState) != node.output_type(kPresentState))
      throw Refusal{"past_state and present_state differ in type"};
    if (node.output_type(kPresentState) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) throw Refusal{"float16 states"};
    constexpr std::int64_t kLargestHead = 256;
    for (const auto& [input, heads] : {std::pair{kQuery, q_heads_}, std::pair{kValue, kv_heads_}}) {
      const std::int64_t row = node.last_size(input);
      if (row < 0) throw Refusal{"the size of heads is unknown before the model runs"};
      if (row > kLargestHead * heads) throw Refusal{"heads of more than " + std::to_string(kLargestHead)};
    }
  }

  void compute(Call& call) const override {
    const Input query = call.input(kQuery), past = call.input(kPastState);
    DeltaRuleArgs args;
    args.rule = rule_;
    args.q = split(query, "query", q_heads_);
    args.v = split(call.input(kValue), "value", kv_heads_);
    const std::int64_t b = args.q.shape[0], t = args.q.shape[1], d = args.q.shape[3], dv = args.v.shape[3];
    const Input key = call.input(kKey);
    need_rank(key, "key", {3});
    if (key.last() <= 0 || key.last() % d != 0)
      throw Error("key", "rows of " + std::to_string(key.last()),
                  "a multiple of query's heads of " + std::to_string(d));
    args.k = split(key, "key", key.last() / d);
    const bool gated = rule_ == UpdateRule::gated || rule_ == UpdateRule::gated_delta;
    const bool with_delta = rule_ == UpdateRule::delta || rule_ == UpdateRule::gated_delta;
    if (gated) {
      const Input decay = call.input(kDecay);
      need_rank(decay, "decay", {3});
      args.g = decay.last() == kv_heads_ ? decay.view() : split(decay, "decay", kv_heads_);
    }
    if (with_delta) {
      const Input beta = call.input(kBeta);
      need_rank(beta, "beta", {3});
      args.beta = beta.view();
      // One rate may serve all heads.
      if (beta.last() == 1) args.beta.shape[2] = kv_heads_, args.beta.strides[2] = 0;
    }
    const std::int64_t heads = std::max(q_heads_, kv_heads_);
    args.out = {call.output(kOut, std::array{b, t, heads * dv}).data, query.dtype, {b, t, heads, dv}};
    args.final_state = call.output(kPresentState, std::array{b, kv_heads_, d, dv});
    if (past) args.initial_state = past.view();
    if (scale_ != 0) args.scale = scale_;
    call.delta_rule(args);
  }

 private:
  std::int64_t q_heads_, kv_heads_;
  UpdateRule rule_;
  float scale_;
};

}  // namespace

const Operator kLinearAttention{"com.microsoft", "LinearAttention", 1, 1, "T", make<LinearAttention>};
const Operator kOnnxLinearAttention{"", "LinearAttention", 27, 27, "T", make<LinearAttention>};

}  // namespace rapt::onnx
