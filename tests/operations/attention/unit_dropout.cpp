// dropout_mask(): the mapping that docs/contract.md documents, how random it looks, and what is refused.
#include <cmath>
#include <limits>
#include <vector>

#include "operations/attention/oracle.hpp"
#include "rapt/dropout.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// [b, hq, sq, sk], 1 where a weight is kept.
struct Mask {
  std::int64_t b, hq, sq, sk;
  std::vector<char> kept;

  Mask(const Dropout& dropout, std::int64_t b_, std::int64_t hq_, std::int64_t sq_, std::int64_t sk_)
      : b(b_), hq(hq_), sq(sq_), sk(sk_), kept(static_cast<std::size_t>(b * hq * sq * sk)) {
    dropout_mask(dropout, MutableTensorView(kept.data(), DType::boolean, {b, hq, sq, sk}));
  }
  bool at(std::int64_t n, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return kept[static_cast<std::size_t>(((n * hq + h) * sq + i) * sk + j)];
  }
};

/// How many standard deviations `count` of n draws with probability p is off.
double sigmas(double count, double n, double p) {
  return std::abs(count - n * p) / std::sqrt(n * p * (1 - p));
}

}  // namespace

TEST_CASE("dropout_mask is the documented function of seed, offset and place", "[unit]") {
  constexpr std::uint64_t high = 0x123456789abcdef0;
  for (const Dropout& dropout : {Dropout{0.1f, 0, 0}, Dropout{0.5f, 7, 0}, Dropout{0.5f, high, 3},
                                 Dropout{0.3f, 7, high}, Dropout{0.9f, ~0ull, ~0ull}, Dropout{1e-4f, 1, 1},
                                 Dropout{1.f - 0x1p-16f, 5, 5}, Dropout{1, 2, 3}, Dropout{0, 2, 3}}) {
    const Mask mask(dropout, 2, 3, 11, 37);
    bool same = true;
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t h = 0; h < 3; ++h)
        for (std::int64_t i = 0; i < 11; ++i)
          for (std::int64_t j = 0; j < 37; ++j)
            same = same && mask.at(n, h, i, j) == (dropout_factor(dropout, 3, n, h, i, j) != 0);
    INFO(dropout.p);
    CHECK(same);
  }
}

TEST_CASE("dropout_mask draws from Philox's known words", "[unit]") {
  // Of counter and key 0: Random123's first known answer, two keys to a word.
  const float numbers[] = {0xe8d5, 0x6627, 0xc58d, 0xe169, 0xac4c, 0xbc57, 0xdbd8, 0x9b00};
  for (std::int64_t j = 0; j < 8; ++j) {
    const auto kept = [&](float threshold) { return Mask({threshold / 65536, 0, 0}, 1, 1, 1, 8).at(0, 0, 0, j); };
    CHECK(kept(numbers[j]));
    CHECK_FALSE(kept(numbers[j] + 1));
  }
}

TEST_CASE("dropout_mask drops the share that was asked for, everywhere alike", "[unit]") {
  const std::int64_t b = 2, hq = 4, sq = 96, sk = 128;
  for (const float p : {0.1f, 0.5f, 0.75f}) {
    for (const std::uint64_t seed : {1ull, 2ull, 1ull << 40}) {
      const Dropout dropout{p, seed, 17};
      const Mask mask(dropout, b, hq, sq, sk), other({p, seed + 1, 17}, b, hq, sq, sk),
          later({p, seed, 18}, b, hq, sq, sk);
      const double drop = std::round(static_cast<double>(p) * 65536) / 65536,
                   same = drop * drop + (1 - drop) * (1 - drop);
      std::vector<double> heads(static_cast<std::size_t>(b * hq)), rows(static_cast<std::size_t>(sq)),
          keys(static_cast<std::size_t>(sk));
      double all = 0, like_other = 0, like_later = 0, like_next_key = 0, like_next_row = 0, like_next_head = 0;
      for (std::int64_t n = 0; n < b; ++n)
        for (std::int64_t h = 0; h < hq; ++h)
          for (std::int64_t i = 0; i < sq; ++i)
            for (std::int64_t j = 0; j < sk; ++j) {
              const bool kept = mask.at(n, h, i, j);
              all += !kept, heads[static_cast<std::size_t>(n * hq + h)] += !kept;
              rows[static_cast<std::size_t>(i)] += !kept, keys[static_cast<std::size_t>(j)] += !kept;
              like_other += kept == other.at(n, h, i, j), like_later += kept == later.at(n, h, i, j);
              like_next_key += kept == mask.at(n, h, i, (j + 1) % sk);
              like_next_row += kept == mask.at(n, h, (i + 1) % sq, j);
              like_next_head += kept == mask.at(n, (h + 1) % hq, i, j);
            }
      INFO("p " << p << " seed " << seed);
      const auto total = static_cast<double>(b * hq * sq * sk);
      CHECK(sigmas(all, total, drop) < 4);
      for (const double count : {like_other, like_later, like_next_key, like_next_row, like_next_head})
        CHECK(sigmas(count, total, same) < 4);
      for (const auto* counts : {&heads, &rows, &keys}) {
        const auto size = static_cast<double>(counts->size());
        double chi_square = 0;
        for (const double count : *counts) chi_square += std::pow(sigmas(count, total / size, drop), 2);
        CHECK(std::abs(chi_square - size) < 4 * std::sqrt(2 * size));
      }
    }
  }
}

TEST_CASE("dropout_mask writes any strides and nothing else", "[unit]") {
  const Dropout dropout{0.4f, 3, 4};
  const Mask mask(dropout, 2, 3, 5, 9);
  std::vector<signed char> room(2 * 3 * 5 * 9 * 2, 5);
  // [sq, hq, b, sk] in memory, every second byte.
  dropout_mask(dropout, MutableTensorView(room.data(), DType::boolean, {2, 3, 5, 9}, {18, 36, 108, 2}));
  for (std::size_t i = 1; i < room.size(); i += 2) CHECK(room[i] == 5);
  for (std::int64_t n = 0; n < 2; ++n)
    for (std::int64_t h = 0; h < 3; ++h)
      for (std::int64_t i = 0; i < 5; ++i)
        for (std::int64_t j = 0; j < 9; ++j)
          CHECK(room[static_cast<std::size_t>(n * 18 + h * 36 + i * 108 + j * 2)] == mask.at(n, h, i, j));
}

TEST_CASE("dropout_mask refuses what is no mask or no share", "[unit]") {
  std::vector<signed char> room(24, 5);
  const MutableTensorView good(room.data(), DType::boolean, {1, 2, 3, 4});
  const auto refused = [&](const Dropout& dropout, const MutableTensorView& mask) {
    return refused_argument([&] { dropout_mask(dropout, mask); });
  };
  for (const float p : {-0.1f, 1.1f, std::nanf(""), std::numeric_limits<float>::infinity()})
    CHECK(refused({p, 1, 1}, good) == "dropout");
  CHECK(refused({0.5f}, {}) == "mask");
  CHECK(refused({0.5f}, {room.data(), DType::boolean, {2, 3, 4}}) == "mask");
  CHECK(refused({0.5f}, {room.data(), DType::i8, {1, 2, 3, 4}}) == "mask");
  CHECK(refused({0.5f}, {room.data(), DType::boolean, {1, 2, 3, 4}, {0, 0, 4, 1}}) == "mask");
  CHECK(refused({0.5f}, {nullptr, DType::boolean, {1, 2, 3, 4}}) == "mask");
  MutableTensorView elsewhere = good;
  elsewhere.device = {DeviceType::cuda, 0};
  CHECK(refused({0.5f}, elsewhere) == "mask");
  for (const signed char byte : room) CHECK(byte == 5);
}
