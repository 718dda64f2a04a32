#include "operations/attention/captured.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace rapt::testing {
namespace {

const float* floats(const TensorView& view) {
  return static_cast<const float*>(view.data);
}
std::size_t index_of(Padding padding) {
  return static_cast<std::size_t>(padding);
}

const std::string& metadata(const SafeTensors& file, const std::string& path, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) throw std::runtime_error(path + ": no " + key + " in its metadata");
  return found->second;
}

}  // namespace

const char* to_string(Padding padding) noexcept {
  switch (padding) {
    case Padding::key_lengths:
      return "key lengths";
    case Padding::ragged:
      return "ragged rows";
    case Padding::boolean_mask:
      return "boolean mask";
  }
  return "";
}

Captured::Captured(const std::filesystem::path& path) : name_(path.stem().string()), file_(SafeTensors::load(path)) {
  const auto require = [&](bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error(path.string() + ": wanted " + what);
  };
  const TensorView& q = file_.view("q");
  require(q.ndim == 4, "q of 4 dimensions");
  b_ = q.shape[0], h_ = q.shape[1], s_ = q.shape[2], d_ = q.shape[3];
  for (const char* name : {"q", "k", "v", "out"}) {
    const TensorView& view = file_.view(name);
    require(view.dtype == DType::f32 && view.shape == q.shape && view.ndim == 4, std::string(name) + " f32 like q");
  }
  const TensorView& lengths = file_.view("lengths");
  require(lengths.dtype == DType::i64 && lengths.ndim == 1 && lengths.shape[0] == b_, "lengths i64 [b]");

  layer_ = std::stoi(metadata(file_, path.string(), "layer"));
  model_error_ = std::stod(metadata(file_, path.string(), "out_relative_error"));
  texts_ = nlohmann::json::parse(metadata(file_, path.string(), "text")).get<std::vector<std::string>>();

  mask_ = std::make_unique<bool[]>(static_cast<std::size_t>(b_ * s_));
  cu_seqlens_.push_back(0);
  for (std::int64_t n = 0; n < b_; ++n) {
    const std::int64_t length = static_cast<const std::int64_t*>(lengths.data)[n];
    require(length >= 1 && length <= s_, "lengths from 1 to s");
    cu_seqlens_.push_back(cu_seqlens_.back() + length);
    std::fill_n(mask_.get() + n * s_, length, true);
  }
  q_rows_ = gather(q);
  k_rows_ = gather(file_.view("k"));
  v_rows_ = gather(file_.view("v"));
}

std::vector<std::int64_t> Captured::lengths() const {
  const auto* data = static_cast<const std::int64_t*>(file_.view("lengths").data);
  return {data, data + b_};
}

template <class Visit>
void Captured::for_each_row(const Visit& visit) const {
  for (std::int64_t n = 0; n < b_; ++n)
    for (std::int64_t i = 0;
         i < cu_seqlens_[static_cast<std::size_t>(n) + 1] - cu_seqlens_[static_cast<std::size_t>(n)]; ++i)
      for (std::int64_t h = 0; h < h_; ++h) visit(n, h, i);
}

std::vector<float> Captured::gather(const TensorView& padded) const {
  std::vector<float> rows;
  for_each_row([&](std::int64_t n, std::int64_t h, std::int64_t i) {
    const float* row = floats(padded) + ((n * h_ + h) * s_ + i) * d_;
    rows.insert(rows.end(), row, row + d_);
  });
  return rows;
}

AttentionArgs Captured::args(Padding padding) {
  const std::int64_t total = cu_seqlens_.back();
  std::vector<float>& out = out_[index_of(padding)];
  out.assign(static_cast<std::size_t>((padding == Padding::ragged ? total : b_ * s_) * h_ * d_),
             std::numeric_limits<float>::quiet_NaN());
  AttentionArgs args;
  if (padding == Padding::ragged) {
    const TensorView cu_seqlens(cu_seqlens_.data(), {b_ + 1});
    const auto rows = [&](const std::vector<float>& data) { return TensorView(data.data(), {total, h_, d_}); };
    args.q = rows(q_rows_);
    args.kv = KvSource::ragged(rows(k_rows_), rows(v_rows_), cu_seqlens);
    args.cu_seqlens_q = cu_seqlens;
    args.out = MutableTensorView(out.data(), {total, h_, d_});
    return args;
  }
  const bool by_length = padding == Padding::key_lengths;
  args.q = file_.view("q");
  args.kv = KvSource::strided(file_.view("k"), file_.view("v"), by_length ? file_.view("lengths") : TensorView());
  if (!by_length) args.score.mask = TensorView(mask_.get(), {b_, 1, 1, s_});
  args.out = MutableTensorView(out.data(), {b_, h_, s_, d_});
  return args;
}

const float* Captured::out_row(Padding padding, std::int64_t n, std::int64_t h, std::int64_t i) const {
  const std::int64_t row =
      padding == Padding::ragged ? (cu_seqlens_[static_cast<std::size_t>(n)] + i) * h_ + h : (n * h_ + h) * s_ + i;
  return out_[index_of(padding)].data() + row * d_;
}

Difference Captured::difference(Padding padding) const {
  const float* model = floats(file_.view("out"));
  Difference result;
  double error = 0, norm = 0;
  for_each_row([&](std::int64_t n, std::int64_t h, std::int64_t i) {
    const float* got = out_row(padding, n, h, i);
    const float* wanted = model + ((n * h_ + h) * s_ + i) * d_;
    for (std::int64_t j = 0; j < d_; ++j) {
      const double difference = std::abs(static_cast<double>(got[j]) - wanted[j]);
      result.max_abs = std::max(result.max_abs, std::isfinite(difference) ? difference : HUGE_VAL);
      error += difference * difference;
      norm += static_cast<double>(wanted[j]) * wanted[j];
    }
  });
  double largest_v = 0;
  for (const float v : v_rows_) largest_v = std::max(largest_v, std::abs(static_cast<double>(v)));
  result.max_abs_bound = 2 * 8 * static_cast<double>(std::numeric_limits<float>::epsilon()) * largest_v;
  result.relative = std::sqrt(error / norm);
  result.relative_bound = 1e-6 + model_error_;
  return result;
}

bool Captured::same_bits(Padding a, Padding b) const {
  bool same = true;
  for_each_row([&](std::int64_t n, std::int64_t h, std::int64_t i) {
    const std::size_t bytes = static_cast<std::size_t>(d_) * sizeof(float);
    same = same && std::memcmp(out_row(a, n, h, i), out_row(b, n, h, i), bytes) == 0;
  });
  return same;
}

std::vector<Captured> load_captured(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  if (std::filesystem::is_directory(folder))
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
  if (paths.empty()) throw std::runtime_error(folder.string() + ": no such folder, or no *.safetensors in it");
  std::sort(paths.begin(), paths.end());
  std::vector<Captured> captured;
  for (const auto& path : paths) captured.emplace_back(path);
  return captured;
}

}  // namespace rapt::testing
