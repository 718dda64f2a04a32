// Dropout: which weights are dropped. This depends only on the seed, the offset and a weight's place, so that any
// kernel can evaluate it again in any order; docs/contract.md has the mapping. Kernels that work on whole vectors
// compute the same.
#pragma once

#include "core/pod.hpp"

namespace rapt {

struct DropoutParams {
  bool given;
  std::uint32_t threshold;  // a weight is dropped where its 16 random bits are below it; 65536: everywhere
  float scale;              // factor of kept weights: 1 / (1 - p); 0 if all are dropped
  std::uint32_t key[2], offset;
  std::uint32_t heads;  // hq
};

// `p` from 0 to 1.
RAPT_HOST_DEVICE DropoutParams dropout_params(float p, std::uint64_t seed, std::uint64_t offset, std::int64_t hq) {
  const auto exact = static_cast<double>(p);
  const auto whole = static_cast<std::uint32_t>(exact * 65536);
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  return {true,
          whole + (exact * 65536 - whole >= 0.5 ? 1 : 0),
          p < 1 ? static_cast<float>(1 / (1 - exact)) : 0.f,
          {low(seed), low(seed >> 32) ^ low(offset >> 32)},
          low(offset),
          static_cast<std::uint32_t>(hq)};
}

// Philox4x32-10 (Salmon et al., 2011): in each round, words 0 and 2 are multiplied, and the key takes a step.
inline constexpr int kPhiloxRounds = 10;
inline constexpr std::uint64_t kPhiloxMultiplier[2] = {0xd2511f53, 0xcd9e8d57};
inline constexpr std::uint32_t kPhiloxStep[2] = {0x9e3779b9, 0xbb67ae85};

struct PhiloxWords {
  std::uint32_t word[4];
};
RAPT_HOST_DEVICE PhiloxWords philox(PhiloxWords x, std::uint32_t key_0, std::uint32_t key_1) {
  constexpr std::uint32_t step_0 = kPhiloxStep[0], step_1 = kPhiloxStep[1];  // device code has no address of the array
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t p = kPhiloxMultiplier[0] * x.word[0], q = kPhiloxMultiplier[1] * x.word[2];
    x = {{static_cast<std::uint32_t>(q >> 32) ^ x.word[1] ^ key_0, static_cast<std::uint32_t>(q),
          static_cast<std::uint32_t>(p >> 32) ^ x.word[3] ^ key_1, static_cast<std::uint32_t>(p)}};
    key_0 += step_0, key_1 += step_1;
  }
  return x;
}

// The keys of one draw, which begins at a multiple of this number. Two keys share a word, the first in its lower half.
inline constexpr std::int64_t kKeysPerDraw = 8;

// Word 2 of Philox's counter, for a head.
RAPT_HOST_DEVICE std::uint32_t dropout_head(const DropoutParams& d, std::int64_t b, std::int64_t q_head) {
  return static_cast<std::uint32_t>(b) * d.heads + static_cast<std::uint32_t>(q_head);
}

RAPT_HOST_DEVICE bool is_dropped(const DropoutParams& d, std::int64_t b, std::int64_t q_head, std::int64_t row,
                                 std::int64_t key) {
  if (!d.given) return false;
  const PhiloxWords random = philox({{static_cast<std::uint32_t>(key / kKeysPerDraw), static_cast<std::uint32_t>(row),
                                      dropout_head(d, b, q_head), d.offset}},
                                    d.key[0], d.key[1]);
  const std::int64_t at = key % kKeysPerDraw;
  return (random.word[at / 2] >> (at % 2 * 16) & 0xffff) < d.threshold;
}

}  // namespace rapt
