// A mask and a bias that are the same for all rows of a sequence, as a step of decoding needs them: a number for each
// key in place of one for each score, loaded a step ahead.
#pragma once

#include "cuda/tile/score.cuh"

namespace rapt::cuda {

// Whether mask and bias are the same for all rows of a sequence, and are the only modifiers.
inline bool rows_share_modifiers(const AttentionParams& p) {
  const ScoreParams& s = p.score;
  ScoreParams others = s;
  others.mask = nullptr, others.bias = nullptr;
  const bool same = (!s.mask || s.mask_stride.h == 0) && (!s.bias || s.bias_stride.h == 0);
  return has_modifiers(s) && !has_modifiers(others) && same && p.sq == 1 && p.total_q < 0;
}

// The modifiers of a warp's steps of kStepKeys keys: lane i holds the one of key i % kStepKeys of the next step.
template <int kStepKeys>
class KeyModifiers {
 public:
  // Of sequence b: keys before `end`, counted from `first_key`; the first step begins with key `key`.
  __device__ KeyModifiers(const ScoreParams& s, std::int64_t b, std::int64_t first_key, int key, int end)
      : s_(s),
        b_(static_cast<int>(b)),
        first_(first_key),
        key_(key + static_cast<int>(threadIdx.x) % kStepKeys),
        end_(end) {
    load();
  }
  // The lane's modifier of the next step, -inf where the key is masked; steps are `stride` keys apart.
  __device__ float next(int stride) {
    const float x = modifier();
    key_ += stride;
    load();
    return x;
  }

 private:
  __device__ void load() {
    if (key_ >= end_) return;
    const std::int64_t key = first_ + key_;
    if (s_.mask) seen_ = s_.mask[b_ * s_.mask_stride.b + key * s_.mask_stride.d];
    if (!s_.bias) return;
    const std::int64_t at = b_ * s_.bias_stride.b + key * s_.bias_stride.d;
    if (s_.bias_type == DType::f32) bias_ = static_cast<const std::uint32_t*>(s_.bias)[at];
    else bias_ = static_cast<const std::uint16_t*>(s_.bias)[at];
  }
  __device__ float modifier() const {
    if (seen_ == 0) return -kInfinity;
    if (!s_.bias) return 0;
    ScoreParams bias_alone = s_;
    bias_alone.mask = nullptr;
    return rapt::finish_score(bias_alone, {}, 0, 0.f,
                              [&](const void*, DType type, std::int64_t) { return load_bits(type); });
  }
  __device__ float load_bits(DType type) const {
    return type == DType::f32 ? __uint_as_float(bias_) : two_of(type, bias_).x;
  }

  const ScoreParams& s_;
  const int b_;
  const std::int64_t first_;
  int key_;
  const int end_;
  std::uint32_t bias_ = 0;  // bits, as they lie in memory
  std::uint8_t seen_ = 1;
};

// In kernels whose scores have none.
struct NoModifiers {
  template <class... Any>
  __device__ explicit NoModifiers(const Any&...) {}
  __device__ float next(int) { return 0; }
};

// Score x of a key with this modifier, rounded as in finish_score(). A NaN under a mask does not stay.
__device__ inline float with_modifier(float x, float modifier) {
  return modifier == -kInfinity ? modifier : __fadd_rn(x, modifier);
}

}  // namespace rapt::cuda
