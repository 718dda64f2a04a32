#include "rapt/merge.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "dtypes.hpp"
#include "float_environment.hpp"
#include "float_rows.hpp"
#include "span.hpp"

namespace rapt {
namespace {

using std::int64_t;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class Merge {
 public:
  Merge(std::span<const TensorView> outs, std::span<const TensorView> lses, const MutableTensorView& out,
        const MutableTensorView& lse)
      : outs_(outs), lses_(lses), out_(out), lse_(lse) {
    check();
  }

  void run() {
    if (all_.front().bytes == 0) return;
    int64_t rows = 1;
    for (std::size_t i = 0; i < dims_; ++i) rows *= out_.shape[i];
    weights_.resize(outs_.size());
    part_.resize(static_cast<std::size_t>(size_));
    sum_.resize(part_.size());
    for (int64_t row = 0; row < rows; ++row) merge(row);
  }

 private:
  void take_out(const std::string& name, const TensorView& t, bool written = false) {
    take(all_, name, t, written);
    if (!is_float(t.dtype)) throw Error(name, "dtype " + std::string(to_string(t.dtype)), kFloats);
    const Layout& first = outs_.front();
    if (t.ndim != first.ndim || !std::equal(t.shape.begin(), t.shape.begin() + t.ndim, first.shape.begin()))
      throw Error(name, "shape " + shape_text(t), "that of outs[0], " + shape_text(first));
  }
  void take_lse(const std::string& name, const TensorView& t, bool written = false) {
    take(all_, name, t, written);
    if (t.dtype != DType::f32) throw Error(name, "dtype " + std::string(to_string(t.dtype)), "f32");
    Layout wanted = outs_.front();
    --wanted.ndim;
    if (t.ndim != wanted.ndim || !std::equal(t.shape.begin(), t.shape.begin() + t.ndim, wanted.shape.begin()))
      throw Error(name, "shape " + shape_text(t), shape_text(wanted) + ", that of outs[0] without its last dimension");
  }

  void check() {
    if (outs_.empty()) throw Error("outs", "no tensors", "one or more");
    const Layout& first = outs_.front();
    if (first.ndim < 2 || first.ndim > kMaxDims)
      throw Error("outs[0]", std::to_string(first.ndim) + " dimensions", "2 to " + std::to_string(kMaxDims));
    dims_ = static_cast<std::size_t>(first.ndim) - 1;
    size_ = first.shape[dims_];
    if (size_ < 1 || size_ > kMaxHeadSize) throw Error("outs[0]", "dv = " + std::to_string(size_), "1 to 8192");
    if (outs_.size() != lses_.size())
      throw Error("lses", std::to_string(lses_.size()) + " tensors",
                  "as many as outs, " + std::to_string(outs_.size()));
    for (std::size_t i = 0; i < outs_.size(); ++i) {
      take_out("outs[" + std::to_string(i) + "]", outs_[i]);
      take_lse("lses[" + std::to_string(i) + "]", lses_[i]);
    }
    take_out("out", out_, true);
    if (lse_) take_lse("lse", lse_, true);
    check_overlaps(all_);
  }

  // Offset in elements of a row, in row-major order of all dimensions but the last of out.
  int64_t offset(const Layout& t, int64_t row) const {
    int64_t result = 0;
    for (std::size_t i = dims_; i-- > 0;) {
      result += row % out_.shape[i] * t.strides[i];
      row /= out_.shape[i];
    }
    return result;
  }

  // weights_ of a row's parts; returns its lse.
  float weigh(int64_t row) {
    float largest = -kInf;
    for (std::size_t i = 0; i < lses_.size(); ++i) {
      weights_[i] = static_cast<const float*>(lses_[i].data)[offset(lses_[i], row)];
      if (!(weights_[i] <= largest)) largest = static_cast<float>(weights_[i]);  // a NaN too, and it stays
      if (std::isnan(largest)) return largest;
    }
    if (std::isinf(largest)) return largest;
    double sum = 0;
    for (const double lse : weights_) sum += std::exp(lse - largest);
    const double total = largest + std::log(sum);
    for (double& weight : weights_) weight = std::exp(weight - total);
    return static_cast<float>(total);
  }

  void merge(int64_t row) {
    const float lse = weigh(row);
    std::fill(sum_.begin(), sum_.end(), lse < kInf ? 0.f : kNan);
    for (std::size_t i = 0; std::isfinite(lse) && i < outs_.size(); ++i) {
      const TensorView& part = outs_[i];
      if (static_cast<const float*>(lses_[i].data)[offset(lses_[i], row)] == -kInf) continue;
      load_row(element(part.data, part.dtype, offset(part, row)), part.dtype, part.strides[dims_], size_, part_.data());
      const auto weight = static_cast<float>(weights_[i]);
      for (std::size_t c = 0; c < sum_.size(); ++c) {
        const float x = part_[c], weighted = weight * x;
        sum_[c] += std::fabs(x) == kInf ? x : weighted;  // no weight is 0, but it may be too small for a float
      }
    }
    store_row(sum_.data(), size_, element(out_.data, out_.dtype, offset(out_, row)), out_.dtype, out_.strides[dims_]);
    if (lse_) static_cast<float*>(lse_.data)[offset(lse_, row)] = lse;
  }

  std::span<const TensorView> outs_, lses_;
  const MutableTensorView &out_, &lse_;
  std::vector<Checked> all_;
  std::size_t dims_ = 0;  // of a row's position
  int64_t size_ = 0;      // dv
  std::vector<double> weights_;
  std::vector<float> part_, sum_;
};

}  // namespace

void merge_states(std::span<const TensorView> outs, std::span<const TensorView> lses, const MutableTensorView& out,
                  const MutableTensorView& lse) {
  const FloatEnvironment environment;
  Merge(outs, lses, out, lse).run();
}

}  // namespace rapt
