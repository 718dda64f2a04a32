#include "operations/attention/guards_row.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "operations/attention/modifiers.hpp"

namespace rapt {
namespace {

using std::int64_t;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kMaxValue = 0x1p100;    // of v
constexpr double kMaxNumber = 2.3e38;    // of scale and sinks
constexpr double kMaxCode = 0x1p60;      // of codes times scales, and of these; 1 / kMaxCode is the least
constexpr double kSmallValue = 0x1p-80;  // below it values of small weight may count as 0

// Where `index`, of a tensor's full shape, lies in one whose dimensions may be missing, in front, or of size 1.
std::vector<int64_t> broadcast_index(const TensorView& t, std::vector<int64_t> index) {
  index.erase(index.begin(), index.end() - t.ndim);
  for (std::size_t i = 0; i < index.size(); ++i)
    if (t.shape[i] == 1) index[i] = 0;
  return index;
}
bool is_in_range_of_codes(double magnitude) {
  return magnitude == 0 || (magnitude >= 1 / kMaxCode && magnitude <= kMaxCode);
}
constexpr auto kNumberAt = [](const void* data, DType dtype, int64_t index) {
  return element_of(data, dtype, 1, index);
};

}  // namespace

AttentionRow::AttentionRow(const KvSource& kv, const ScoreSpec& score, const AttentionProblem& problem,
                           const AttentionParams& params)
    : kv_(kv),
      spec_(score),
      problem_(problem),
      p_(params),
      scale_(problem.has_scale ? static_cast<double>(problem.scale) : 1 / std::sqrt(static_cast<double>(p_.d))),
      input_eps_(std::max(eps_of(p_.q_type), eps_of(p_.kv_type))),
      eps_(std::max(input_eps_, eps_of(p_.out_type))),
      tokens_(p_.q_begin ? p_.total_q : p_.b * p_.sq) {}

void AttentionRow::compute(int64_t token, int64_t q_head) {
  begin(token, q_head);
  score_keys();
  weigh_keys();
  sum_values();
}

std::optional<AttentionRow::Result> AttentionRow::first_off(double tolerance) const {
  const void* const row = row_of(p_.out, p_.out_type, p_.out_stride);
  for (int64_t c = 0; c < p_.dv; ++c) {
    const auto at = static_cast<std::size_t>(c);
    const auto value = static_cast<double>(element_of(row, p_.out_type, p_.out_stride.d, c));
    if (is_off(value, out_[at], tolerance * out_bound_[at]))
      return Result{"out", index(c), value, out_[at], tolerance * out_bound_[at]};
  }
  if (!p_.lse) return {};
  const auto value = static_cast<double>(*static_cast<const float*>(row_of(p_.lse, DType::f32, p_.lse_stride)));
  if (!is_off(value, lse_, tolerance * lse_bound_)) return {};
  return Result{"lse", index(), value, lse_, tolerance * lse_bound_};
}

void AttentionRow::begin(int64_t token, int64_t q_head) {
  find_row(token, q_head);
  first = {};
  is_bounded = std::abs(scale_) <= kMaxNumber;
  read_query();
}

void AttentionRow::find_row(int64_t token, int64_t q_head) {
  sequence_ = 0, token_ = token, q_head_ = q_head;
  if (p_.q_begin) {
    while (sequence_ + 1 < p_.b && p_.q_begin[sequence_ + 1] <= token) ++sequence_;
    token_ -= p_.q_begin[sequence_];
  } else {
    sequence_ = token / p_.sq, token_ = token % p_.sq;
  }
  s_ = sequence_of(p_, p_, sequence_);
  entry_ = entry_of(p_, sequence_, s_);
  position_ = row_offset(p_.score, s_) + token_;
  seen_ = visible_keys(p_.score, token_, position_, s_.oldest, s_.len_k);
  nearest_ = nearest_key(position_, s_.len_k);
}

const void* AttentionRow::row_of(const void* data, DType type, const Strides& stride) const {
  // Packed tensors have no stride b; of gathered keys the row is the one of the token.
  const int64_t at = entry_ * stride.b + q_head_ * stride.h + (s_.q_first + token_) * stride.s;
  return static_cast<const std::byte*>(data) + at * static_cast<int64_t>(size_of(type));
}

std::vector<int64_t> AttentionRow::index() const {
  if (p_.q_begin) return {s_.q_first + token_, q_head_};
  return {entry_, q_head_, call_token()};
}

std::vector<int64_t> AttentionRow::index(int64_t c) const {
  std::vector<int64_t> at = index();
  at.push_back(c);
  return at;
}

std::vector<int64_t> AttentionRow::kv_index(int64_t j, int64_t c) const {
  const int64_t head = q_head_ / p_.group;
  if (p_.k_begin) return {s_.k_first + j, head, c};
  if (p_.tokens > 0) return {p_.k_stride.b == 0 ? 0 : entry_, head, listed_row(p_, entry_, s_.k_first, j), c};
  return {block_of(p_, entry_, j), head, row_in_block(p_, j), c};
}

void AttentionRow::note_not_finite(Stage stage, double value, std::vector<int64_t> index) {
  if (stage < first.stage) first = {stage, std::move(index), value};
}

void AttentionRow::read_query() {
  const void* row = row_of(p_.q, p_.q_type, p_.q_stride);
  q_.resize(static_cast<std::size_t>(p_.d));
  for (int64_t i = 0; i < p_.d; ++i)
    q_[static_cast<std::size_t>(i)] = static_cast<double>(element_of(row, p_.q_type, p_.q_stride.d, i));
  for (std::size_t i = 0; i < q_.size(); ++i) {
    if (std::isfinite(q_[i])) continue;
    note_not_finite(Stage::q, q_[i], index(static_cast<int64_t>(i)));
    break;
  }
  if (!p_.q_scale) return;
  const auto scale = static_cast<double>(*static_cast<const float*>(row_of(p_.q_scale, DType::f32, p_.q_scale_stride)));
  if (!std::isfinite(scale)) {
    const Strides& s = p_.q_scale_stride;  // 0 where it broadcasts
    std::vector<int64_t> at = index(0);
    if ((p_.q_begin ? s.s : s.b) == 0) at[0] = 0;
    if (!p_.q_begin && s.s == 0) at[2] = 0;
    note_not_finite(Stage::q_scale, scale, at);
  }
  is_bounded = is_bounded && is_in_range_of_codes(std::abs(scale));
  for (double& x : q_) x *= scale, is_bounded = is_bounded && is_in_range_of_codes(std::abs(x));
}

// Row j of k or v: its numbers, and what their roundings are relative to.
void AttentionRow::read_row(const Side& side, int64_t j) {
  const auto start = [&](const void* data, DType type, const Strides& stride) {
    const int64_t at = key_index(p_, stride, entry_, q_head_ / p_.group, s_.k_first, j);
    return static_cast<const std::byte*>(data) + at * static_cast<int64_t>(size_of(type));
  };
  row_.resize(static_cast<std::size_t>(side.size)), magnitude_.resize(row_.size());
  const int64_t coded = side.size - side.tail.size;
  const void* const codes = start(side.data, p_.kv_type, side.stride);
  with_constant(p_.kv_type, [&](auto dtype) {
    for (int64_t i = 0; i < coded; ++i) {
      const auto x = static_cast<double>(element_of(codes, dtype, side.stride.d, i));
      const auto at = static_cast<std::size_t>(i);
      row_[at] = x, magnitude_[at] = std::abs(x);
      if (!std::isfinite(x)) note_not_finite(side.stage, x, kv_index(j, i));
    }
  });
  if (side.quant.scale) {
    const auto next = [&](int by) { return static_cast<Stage>(static_cast<int>(side.stage) + by); };
    const void* const scales = start(side.quant.scale, DType::f32, side.quant.scale_stride);
    const void* const zeros = side.quant.zero ? start(side.quant.zero, DType::f32, side.quant.zero_stride) : nullptr;
    double scale = 1, zero = 0;
    for (int64_t i = 0; i < coded; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (const int64_t group = i / side.quant.group; i % side.quant.group == 0) {
        scale = static_cast<double>(element_of(scales, DType::f32, side.quant.scale_stride.d, group));
        if (zeros) zero = static_cast<double>(element_of(zeros, DType::f32, side.quant.zero_stride.d, group));
        if (!std::isfinite(scale)) note_not_finite(next(1), scale, broadcast_index(side.scale, kv_index(j, group)));
        if (!std::isfinite(zero)) note_not_finite(next(2), zero, broadcast_index(side.zero, kv_index(j, group)));
        is_bounded = is_bounded && is_in_range_of_codes(std::abs(scale));
      }
      row_[at] = (row_[at] - zero) * scale;
      magnitude_[at] = (magnitude_[at] + std::abs(zero)) * std::abs(scale);
      is_bounded = is_bounded && is_in_range_of_codes(magnitude_[at]);
    }
  }
  const KeyTail& tail = side.tail;
  const void* const last = tail.size > 0 ? start(tail.data, tail.type, tail.stride) : nullptr;
  for (int64_t i = 0; i < tail.size; ++i) {
    const auto x = static_cast<double>(element_of(last, tail.type, tail.stride.d, i));
    const auto at = static_cast<std::size_t>(coded + i);
    row_[at] = x, magnitude_[at] = std::abs(x);
    if (!std::isfinite(x)) note_not_finite(Stage::k_tail, x, kv_index(j, i));
  }
}

// Scores, in the order that docs/contract.md has, and what each may be off by.
void AttentionRow::score_keys() {
  const Side side = keys();
  // In units of kUnit, relative to the sum of the products' magnitudes.
  const double rounding_units = static_cast<double>(p_.d) + (p_.k_quant.scale ? 8 : 6) + (p_.q_scale ? 1 : 0);
  const double slope =
      p_.score.alibi ? static_cast<double>(alibi_slope_log2(p_.score, entry_, q_head_, kNumberAt)) * kLn2 : 0;
  shift_ = static_cast<double>(alibi_shift_log2(p_.score, entry_, q_head_, position_, nearest_, kNumberAt)) * kLn2;
  keys_.clear();
  for (int64_t j = seen_.first; j < seen_.last; ++j) {
    const ScorePlace place{entry_, q_head_, token_, j};
    const double bias = p_.score.bias ? static_cast<double>(kNumberAt(p_.score.bias, p_.score.bias_type,
                                                                      modifier_index(p_.score.bias_stride, place)))
                                      : 0;
    if (is_masked(p_.score, place) || bias == -kInf) continue;
    if (!std::isfinite(bias))
      note_not_finite(Stage::bias, bias, broadcast_index(spec_.bias, {entry_, q_head_, token_, j}));
    read_row(side, j);
    double dot = 0, sum = 0, flushed = 0;  // of products; of their magnitudes; of those that may count as 0
    for (std::size_t i = 0; i < q_.size(); ++i) {
      const double product = std::abs(q_[i]) * magnitude_[i];
      dot += q_[i] * row_[i], sum += product;
      if (product < kSmallest || std::abs(q_[i]) < kSmallest || magnitude_[i] < kSmallest) flushed += product;
    }
    const double x = dot * scale_, error = std::abs(scale_) * (kUnit * rounding_units * sum + flushed);
    const double final = finish_score(p_.score, place, nearest_, x * kLog2e, kNumberAt) * kLn2;
    // Past fp32's range a score is infinite, or a NaN, whatever becomes of it in float64.
    const bool overflows = !(sum <= kMaxFp32) || !(std::abs(final) * kLog2e <= kMaxFp32);
    if (overflows)
      is_bounded = false, note_not_finite(Stage::scores, std::isfinite(final) ? std::copysign(kInf, final) : final,
                                          {entry_, q_head_, call_token(), j});
    const double alibi = std::abs(slope * static_cast<double>(position_ - j));
    Modifier::Score score{x, error};
    Modifiers::for_each([&]<class M>(M) { M::transform(problem_, kUnit, score); });
    const double addends = std::abs(score.x) + std::min(std::abs(bias), kMaxNumber) + alibi;
    keys_.push_back({j, final, score.error + 8 * kUnit * addends, score.derivative, score.derivative_error});
  }
  if (!keys_.empty() && !std::isfinite(slope))
    note_not_finite(Stage::alibi, slope, broadcast_index(spec_.alibi, {entry_, q_head_}));
}

void AttentionRow::weigh_keys() {
  sink_ = -kInf;
  if (p_.score.sinks) {
    sink_ = static_cast<double>(kNumberAt(p_.score.sinks, p_.score.sinks_type, q_head_ * p_.score.sinks_stride));
    if (!std::isfinite(sink_) && sink_ != -kInf) note_not_finite(Stage::sinks, sink_, {q_head_});
    is_bounded = is_bounded && (sink_ == -kInf || std::abs(sink_) <= kMaxNumber);
  }
  const double sink = sink_ + shift_;
  double top = sink;
  bool broken = std::isnan(sink);
  for (const Key& key : keys_) broken = broken || std::isnan(key.x), top = std::max(top, key.x);
  if (broken || top == kInf) {
    for (Key& key : keys_) key.weight = kNan;
    lse_ = kNan;
    return;
  }
  if (top == -kInf) {
    lse_ = -kInf, lse_bound_ = 0;
    return;
  }
  double sum = std::exp(sink - top),
         largest_sum =
             sink == -kInf
                 ? 0
                 : std::exp(std::min(sink - top + 8 * kUnit * (std::abs(sink_) + std::abs(shift_)), kMaxExponent));
  for (Key& key : keys_) {
    key.weight = std::exp(key.x - top), key.delta += 2 * kUnit * (top - key.x + 6);
    sum += key.weight, largest_sum += key.weight * std::exp(std::min(key.delta, kMaxExponent));
  }
  const double delta_sum = std::log(largest_sum / sum);
  for (Key& key : keys_) {
    key.weight /= sum;
    key.growth = key.weight == 0 ? 0 : key.weight * std::expm1(std::min(key.delta + delta_sum, kMaxExponent));
  }
  lse_ = top + std::log(sum) - shift_;
  const double rounding = delta_sum + 40 * kUnit * (std::abs(lse_) + std::abs(shift_) + 1);
  lse_bound_ = eps_ > 0 ? 4 * rounding + 2 * input_eps_ : rounding;
}

// out and its bounds. What is masked or dropped is not read.
void AttentionRow::sum_values() {
  const Side side = values();
  const auto dv = static_cast<std::size_t>(p_.dv);
  const double rounding_units =
      (p_.score.dropout.given ? 152 : 150) + (p_.v_quant.scale ? 4 : 0) + static_cast<double>(p_.sk) / 512;
  struct Sum {
    double out = 0, magnitude = 0, growth = 0, largest = 0, flushed = 0;
  };
  std::vector<Sum> sums(dv);
  for (const Key& key : keys_) {
    if (key.x == -kInf || !is_kept(key)) continue;
    read_row(side, key.j);
    for (std::size_t c = 0; c < dv; ++c) {
      Sum& sum = sums[c];
      const double magnitude = std::abs(row_[c]) * kept();
      if (!(magnitude <= kMaxValue)) is_bounded = false;
      sum.out += key.weight * kept() * row_[c];
      sum.magnitude += key.weight * kept() * magnitude_[c], sum.growth += key.growth * magnitude;
      sum.largest = std::max(sum.largest, magnitude);
      if (key.weight < kSmallWeight || magnitude < kSmallValue) sum.flushed += key.weight * magnitude;
    }
  }
  out_.resize(dv), out_bound_.resize(dv);
  for (std::size_t c = 0; c < dv; ++c) {
    const Sum& sum = sums[c];
    out_[c] = sum.out;
    out_bound_[c] = std::min(sum.growth, sum.largest + std::abs(sum.out)) + rounding_units * kUnit * sum.magnitude +
                    8 * eps_ * sum.magnitude + sum.flushed + tiny_of(p_.out_type);
    if (!(std::abs(sum.out) + out_bound_[c] <= largest_of(p_.out_type))) out_[c] = kNan;  // it may be infinite
  }
}

}  // namespace rapt
