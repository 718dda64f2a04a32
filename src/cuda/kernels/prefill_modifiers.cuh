// Modifiers of scores in attention_prefill: a warpgroup's 64 rows by a block of keys, as fragments have them.
#pragma once

#include "cuda/kernels/prefill_config.cuh"

namespace rapt::cuda {

// A lane's modifiers of a block, and what dropout leaves of its weights: those of its two rows and, in every eight
// keys, of two neighbours.
template <class C>
class BlockModifiers {
 public:
  static constexpr int kScores = C::kKeys / 2;

  // `row`: the lane's first row in the tile, 8 before the other; `key`: its first key, counted from the tile's first.
  __device__ BlockModifiers(const PrefillParams& params, const Tile<C>& tile, int row, int key)
      : params_(params), s_(params.p.score), tile_(tile), row_(row), key_(tile.key + key) {}

  // finish_score() of q.k, of keys that the row sees; of others any number.
  __device__ __forceinline__ void finish(float (&s)[kScores], const float (&inner)[2]) const {
    if (changes_derivative(s_)) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = capped(s_, s[i] * inner[i / 2 % 2]);
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= inner[i / 2 % 2];
    }
    if (s_.bias) {
      if (s_.bias_type == DType::f32) add_bias<float, float2>(s);
      else add_bias<std::uint16_t, std::uint32_t>(s);
    }
    if (s_.alibi) add_distances(s);
    if (s_.mask) {
      for_each_pair<std::uint8_t, std::uint16_t>(s_.mask, s_.mask_stride, params_.mask_pairs,
                                                 [&](int i, std::uint16_t two) {
                                                   if ((two & 0xff) == 0) s[i] = -kInfinity;
                                                   if ((two & 0xff00) == 0) s[i + 1] = -kInfinity;
                                                 });
    }
  }

  // Bit i: the weight of score i is dropped. Four lanes share a row, and each makes draws for the others.
  __device__ std::uint32_t dropped() const {
    static_assert(kScores <= 32);
    const DropoutParams& d = s_.dropout;
    const int lane = static_cast<int>(threadIdx.x) % 4;
    const auto draw = static_cast<std::uint32_t>(key_ / kKeysPerDraw);
    std::uint32_t bits = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile_.of(params_, row_ + 8 * h);
#pragma unroll
      for (int first = 0; first < C::kKeys / 8; first += 4) {
        const PhiloxWords random = philox({{draw + first + lane, static_cast<std::uint32_t>(row.token),
                                            dropout_head(d, tile_.b, row.q_head), d.offset}},
                                          d.key[0], d.key[1]);
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // a lane needs word `lane` of every draw
          const int other = lane ^ step;
          const std::uint32_t low = other & 1 ? random.word[1] : random.word[0],
                              high = other & 1 ? random.word[3] : random.word[2];
          const std::uint32_t two = __shfl_xor_sync(~0u, other & 2 ? high : low, step);
          const std::uint32_t drops = ((two & 0xffff) < d.threshold ? 1 : 0) | ((two >> 16) < d.threshold ? 2 : 0);
          bits |= drops << 4 * (first + other) + 2 * h;
        }
      }
    }
    return bits;
  }

 private:
  // Calls use(i, elements i and i + 1) of a mask or bias, for all of the lane's. `in_pairs`: these are aligned.
  template <class Element, class Pair, class Use>
  __device__ __forceinline__ void for_each_pair(const void* data, const Strides& strides, bool in_pairs,
                                                const Use& use) const {
    const auto at = [&](int h) {
      const auto& row = tile_.of(params_, row_ + 8 * h);
      // A row past the tensor's last sees no key.
      const std::int64_t token = min(static_cast<std::int64_t>(row.token), s_.modifier_rows - 1);
      return static_cast<const Element*>(data) + modifier_index(strides, {tile_.b, row.q_head, token, 0});
    };
    const std::int64_t end = s_.modifier_keys;
    if (end == 0 || s_.modifier_rows == 0) return;  // all are hidden
    if (in_pairs && key_ + C::kKeys - 6 <= end) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Element* const from = at(h) + key_;
#pragma unroll
        for (int j = 0; j < C::kKeys; j += 8) use(j / 2 + 2 * h, __ldg(reinterpret_cast<const Pair*>(from + j)));
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Element* const from = at(h);
#pragma unroll
      for (int j = 0; j < C::kKeys; j += 8) {
        asm volatile("" ::: "memory");  // or the addresses of all loads would be live at once
        const auto one = [&](int i) { return from[min(key_ + j + i, end - 1) * strides.d]; };
        if constexpr (std::is_same_v<Element, float>) use(j / 2 + 2 * h, make_float2(one(0), one(1)));
        else use(j / 2 + 2 * h, static_cast<Pair>(one(0) | one(1) << 8 * sizeof(Element)));
      }
    }
  }
  template <class Element, class Pair>
  __device__ __forceinline__ void add_bias(float (&s)[kScores]) const {
    const DType type = s_.bias_type;
    for_each_pair<Element, Pair>(s_.bias, s_.bias_stride, params_.bias_pairs, [&](int i, Pair pair) {
      float2 two;
      if constexpr (std::is_same_v<Pair, float2>) two = pair;
      else two = two_of(type, pair);
      s[i] = with_bias(s[i], two.x), s[i + 1] = with_bias(s[i + 1], two.y);
    });
  }
  __device__ void add_distances(float (&s)[kScores]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile_.of(params_, row_ + 8 * h);
      const float slope = alibi_slope_log2(s_, tile_.b, row.q_head, NumberAt());
      const auto distance = static_cast<float>(row.nearest - key_);
#pragma unroll
      for (int j = 0; j < C::kKeys; j += 8)
#pragma unroll
        for (int i = 0; i < 2; ++i) s[j / 2 + 2 * h + i] -= slope * fabsf(distance - static_cast<float>(j + i));
    }
  }

  const PrefillParams& params_;
  const ScoreParams& s_;
  const Tile<C>& tile_;
  const int row_;
  const std::int64_t key_;  // of the sequence
};

}  // namespace rapt::cuda
