// ONNX's Attention, versions 23 to 25.
#include <array>
#include <cmath>
#include <limits>

#include "api/onnxruntime/cache.hpp"
#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {
namespace {

enum : std::size_t { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths };
enum : std::size_t { kOut, kPresentKey, kPresentValue, kScores };

class Attention final : public Kernel {
 public:
  explicit Attention(const Attributes& attributes)
      : q_heads_(attributes.integer("q_num_heads", 0)),
        kv_heads_(attributes.integer("kv_num_heads", 0)),
        causal_(attributes.integer("is_causal", 0) != 0),
        window_{attributes.integer("left_window_size", -1), attributes.integer("right_window_size", -1)},
        scale_(attributes.real("scale", std::numeric_limits<float>::quiet_NaN())),
        softcap_(attributes.real("softcap", 0)) {
    check_softcap(softcap_);
    if (attributes.integer("softmax_precision", 0) == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE)
      throw Refusal{"softmax_precision is double"};
  }

  void check(const Node& node) const override {
    need_one_float_type(node, {kQ, kK, kV, kPastKey, kPastValue});
    if (node.has_input(kMask) && !is_float(node.type(kMask)) && node.type(kMask) != ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL)
      throw Refusal{"attn_mask holds integers"};
    if (node.has_output(kScores)) throw Refusal{"qk_matmul_output is asked for"};
    if (node.rank(kQ) == 3 && (q_heads_ <= 0 || kv_heads_ <= 0))
      throw Refusal{"3D inputs without q_num_heads and kv_num_heads"};
  }

  void compute(Call& call) const override {
    const Input q = call.input(kQ), k = call.input(kK), v = call.input(kV), mask = call.input(kMask);
    const Input past_k = call.input(kPastKey), past_v = call.input(kPastValue), lengths = call.input(kLengths);
    need_rank(q, "Q", {3, 4});
    need_rank(k, "K", {q.rank});
    need_rank(v, "V", {q.rank});
    if (mask) need_rank(mask, "attn_mask", {1, 2, 3, 4});
    if (lengths) need_rank(lengths, "nonpad_kv_seqlen", {1});
    if (lengths && (past_k || past_v)) throw Error("nonpad_kv_seqlen", "together with a past", "one of both");
    AttentionArgs args;
    if (q.rank == 4) {
      args.q = q.view(), args.kv = KvSource::strided(k.view(), v.view());
    } else {
      args.q = heads_of(q, "Q", q_heads_);
      args.kv = KvSource::strided(heads_of(k, "K", kv_heads_), heads_of(v, "V", kv_heads_));
    }
    const std::int64_t b = args.q.shape[0], heads = args.q.shape[1], sq = args.q.shape[2];
    const std::int64_t dv = args.kv.v.shape[3];
    args.out = q.rank == 4 ? call.output_or_scratch(kOut, q.dtype, std::array{b, heads, sq, dv})
                           : call.output_rows(kOut, q.dtype, b, heads, sq, dv);

    const std::int64_t past = append(call, past_k, past_v, args.kv, kPresentKey, kPresentValue);
    if (lengths) args.kv.seqlens = lengths.view();
    if (mask) {
      (mask.dtype == DType::boolean ? args.score.mask : args.score.bias) = mask.view();
      // A mask may end early: it hides the keys after it.
      if (mask.last() < args.kv.k.shape[2]) args.kv.k.shape[2] = args.kv.v.shape[2] = mask.last();
    }
    args.score.causal = causal_;
    if (window_.left >= 0 || window_.right >= 0) args.score.window = window_;
    args.score.align = lengths ? Align::bottom_right() : Align::offset(past);
    if (!std::isnan(scale_)) args.score.scale = scale_;
    if (softcap_ != 0) args.score.softcap = softcap_;
    call.attention(args);
  }

 private:
  std::int64_t q_heads_, kv_heads_;
  bool causal_;
  Window window_;
  float scale_, softcap_;
};

}  // namespace

const Operator kAttention{"", "Attention", 23, 25, "T1", make<Attention>};

}  // namespace rapt::onnx
