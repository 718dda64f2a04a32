// A row of attention in float64: what it should be, how far a kernel may be from it by docs/contract.md, and the first
// number on the way that is not finite. Written for clarity: keys one after another, each element by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "guards/tensors.hpp"

namespace rapt {

class AttentionRow {
 public:
  // Of a call, all parts of which outlive this.
  AttentionRow(const KvSource& kv, const ScoreSpec& score, const AttentionProblem& problem,
               const AttentionParams& params);

  // Rows are numbered by token, of all sequences, and head.
  std::int64_t tokens() const { return tokens_; }
  std::int64_t heads() const { return p_.hk * p_.group; }
  // Computes one. What follows is of that row.
  void compute(std::int64_t token, std::int64_t q_head);

  // Whether all numbers keep to the ranges for which the contract has bounds.
  bool is_bounded = true;
  // A result, and what it should be.
  struct Result {
    const char* tensor;
    std::vector<std::int64_t> index;
    double value, wanted, bound;
  };
  // The first one that is off by more than `tolerance` times its bound. Where float64 has no number, none is.
  std::optional<Result> first_off(double tolerance) const;

  // The first number that is not finite, in this order.
  enum class Stage : std::uint8_t {
    q,
    q_scale,
    k,
    k_scale,
    k_zero,
    k_tail,
    v,
    v_scale,
    v_zero,
    bias,
    alibi,
    sinks,
    scores,
    none
  };
  struct {
    Stage stage = Stage::none;
    std::vector<std::int64_t> index;  // in its tensor
    double value = 0;
  } first;  // number that is not finite

 protected:
  // A key that the row sees: its score x, without what is the same for all keys, and by how much a kernel's may be off
  // (delta); the same of the softcap's slope there; its weight, and by how much a kernel's may be larger (growth).
  struct Key {
    std::int64_t j;
    double x, delta;
    double slope, slope_delta;
    double weight = 0, growth = 0;
  };
  // k or v: its rows, their coding, and the columns behind them.
  struct Side {
    const void* data;
    const Strides& stride;
    const Quantization& quant;
    const TensorView &scale, &zero;
    std::int64_t size;  // of a whole row
    KeyTail tail;
    Stage stage;  // of its elements; those of scales and zeros follow
  };

  // The steps of compute().
  void begin(std::int64_t token, std::int64_t q_head);
  void score_keys();
  void weigh_keys();
  void sum_values();

  void find_row(std::int64_t token, std::int64_t q_head);
  void read_query();
  void read_row(const Side& side, std::int64_t j);
  Side keys() const { return {p_.k, p_.k_stride, p_.k_quant, kv_.k_scale, kv_.k_zero, p_.d, p_.k_tail, Stage::k}; }
  Side values() const { return {p_.v, p_.v_stride, p_.v_quant, kv_.v_scale, kv_.v_zero, p_.dv, {}, Stage::v}; }
  bool is_kept(const Key& key) const { return !is_dropped(p_.score, {entry_, q_head_, token_, key.j}); }
  double kept() const { return p_.score.dropout.given ? static_cast<double>(p_.score.dropout.scale) : 1; }
  // The row's index in q and out, or in lse; with c, of an element.
  std::vector<std::int64_t> index() const;
  std::vector<std::int64_t> index(std::int64_t c) const;
  // Keeps the first number of the earliest stage.
  void note_not_finite(Stage stage, double value, std::vector<std::int64_t> index);
  std::vector<std::int64_t> kv_index(std::int64_t j, std::int64_t c) const;
  std::int64_t call_token() const { return p_.tokens > 0 ? s_.q_first : token_; }
  const void* row_of(const void* data, DType type, const Strides& stride) const;

  const KvSource& kv_;
  const ScoreSpec& spec_;
  const AttentionProblem& problem_;
  const AttentionParams& p_;
  const double scale_, input_eps_, eps_;
  std::int64_t tokens_;

  std::int64_t sequence_ = 0, entry_ = 0, token_ = 0, q_head_ = 0, position_ = 0, nearest_ = 0;
  Sequence s_{};
  KeyRange seen_{};
  double sink_ = 0, shift_ = 0;              // of the row; what scores lack
  std::vector<double> q_, row_, magnitude_;  // of read_row(): numbers, and what their roundings are relative to
  std::vector<Key> keys_;
  std::vector<double> out_, out_bound_;  // [dv]; NaN where the contract has no number
  double lse_ = 0, lse_bound_ = 0;
};

// The constants of docs/contract.md.
inline constexpr double kUnit = 0x1p-24;          // u, the rounding of fp32
inline constexpr double kMaxExponent = 600;       // what e^x is taken of
inline constexpr double kSmallest = 0x1p-126;     // below it fp32 may count as 0
inline constexpr double kSmallWeight = 0x1p-100;  // a smaller one may count as 0
inline constexpr double kMaxFp32 = static_cast<double>(kMaxFloat);
// Unit roundoff of types that are less exact than fp32.
constexpr double eps_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
}
// What results close to 0 may be off by: sums that were not yet divided by the weights' may have been below kSmallest.
constexpr double tiny_of(DType dtype) {
  return dtype == DType::f16 ? 0x1p-24 : 1e-37;
}
// The largest number that does not round to infinity.
constexpr double largest_of(DType dtype) {
  return dtype == DType::f16 ? 65519 : dtype == DType::bf16 ? 0x1.feffffp127 : 0x1.fffffefffp127;
}
inline bool is_off(double value, double wanted, double bound) {
  return !std::isnan(wanted) && value != wanted && !(std::abs(value - wanted) <= bound);
}

}  // namespace rapt
