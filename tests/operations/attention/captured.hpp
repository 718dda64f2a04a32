// An attention call that a real language model made, from tests/data, to be made again with rapt.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "rapt/attention.hpp"
#include "support/safetensors.hpp"

namespace rapt::testing {

/// The three ways to say which positions of a padded batch are real. All have to give the same result.
enum class Padding : std::uint8_t {
  key_lengths,   ///< KvSource::strided with seqlens
  ragged,        ///< real rows gathered end to end, cu_seqlens on both sides
  boolean_mask,  ///< ScoreSpec::mask [b, 1, 1, s]
};
inline constexpr std::array kPaddings = {Padding::key_lengths, Padding::ragged, Padding::boolean_mask};
const char* to_string(Padding padding) noexcept;

/// How far a result is from the model's own, over the rows of real tokens.
struct Difference {
  double max_abs = 0;         ///< largest |rapt - model|; infinite when rapt gave NaN or Inf
  double max_abs_bound = 0;   ///< 8 eps32 of the largest |v| for each of the two
  double relative = 0;        ///< |rapt - model| / |model| in the Frobenius norm
  double relative_bound = 0;  ///< the contract's 1e-6 for rapt plus the model's own distance from float64 attention
  bool ok() const { return max_abs <= max_abs_bound && relative <= relative_bound; }
};

class Captured {
 public:
  /// A file as tests/data/README.md describes it. Throws std::runtime_error.
  explicit Captured(const std::filesystem::path& path);

  std::string name() const { return name_; }  ///< file name without extension
  int layer() const { return layer_; }
  const std::vector<std::string>& texts() const { return texts_; }
  std::vector<std::int64_t> lengths() const;  ///< tokens of each text
  double model_error() const { return model_error_; }

  /// Arguments whose tensors live in this object. The output, one per Padding, is filled with NaN first.
  AttentionArgs args(Padding padding);
  /// Of what the call made with args(padding) wrote.
  Difference difference(Padding padding) const;
  /// Whether two calls wrote the same bits into the rows of real tokens.
  bool same_bits(Padding a, Padding b) const;

 private:
  const float* out_row(Padding padding, std::int64_t n, std::int64_t h, std::int64_t i) const;
  std::vector<float> gather(const TensorView& padded) const;
  /// Calls visit(n, h, i) for every row of a real token.
  template <class Visit>
  void for_each_row(const Visit& visit) const;

  std::string name_;
  SafeTensors file_;
  int layer_ = 0;
  double model_error_ = 0;
  std::vector<std::string> texts_;
  std::int64_t b_ = 0, h_ = 0, s_ = 0, d_ = 0;
  std::vector<std::int64_t> cu_seqlens_;                  // [b + 1]
  std::vector<float> q_rows_, k_rows_, v_rows_;           // [total, h, d]
  std::unique_ptr<bool[]> mask_;                          // [b, s]
  std::array<std::vector<float>, kPaddings.size()> out_;  // [b, h, s, d]; ragged [total, h, d]
};

/// Every *.safetensors in `folder`, by name. Throws std::runtime_error when there is none.
std::vector<Captured> load_captured(const std::filesystem::path& folder);

}  // namespace rapt::testing
