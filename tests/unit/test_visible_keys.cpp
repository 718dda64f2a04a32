// What kernels of a GPU know of a row in 32 bits: the keys that it sees, and its token.
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/tile/divisor.hpp"
#include "semantics/score.hpp"
#include "support/catch.hpp"

using namespace rapt;

TEST_CASE("visible keys: 32 bits say what 64 do") {
  std::mt19937 random(7);
  const auto pick = [&](std::vector<std::int64_t> from) { return from[random() % from.size()]; };
  for (int i = 0; i < 20000; ++i) {
    CAPTURE(i);
    ScoreParams s{};
    s.left = pick({kOpen, 0, 1, 100, std::int64_t{1} << 40});
    s.right = pick({kOpen, 0, 3, 5000, std::int64_t{1} << 40});
    s.offset = pick({0, 1, -1, 700, -700, std::int64_t{1} << 45, -(std::int64_t{1} << 45)});
    s.bottom_right = random() % 2 == 0;
    s.modifier_rows = pick({kNoLimit, 0, 1, 50}), s.modifier_keys = pick({kNoLimit, 0, 64, 1000});
    Sequence q{};
    q.len_q = pick({1, 60, 3000}), q.len_k = pick({0, 1, 129, 4096});
    if (random() % 4 == 0) q.oldest = std::int64_t{1} << 40, q.len_k += q.oldest;  // a ring
    const std::int64_t base = q.oldest / 128 * 128;
    KeyBounds32 window(s, q, base);
    const auto start = static_cast<std::int32_t>(pick({0, 128}));
    window.start_at(start);
    for (const std::int64_t token : {std::int64_t{0}, std::int64_t{49}, std::int64_t{50}, q.len_q - 1}) {
      const KeyRange wanted = visible_keys(s, token, token + row_offset(s, q), q.oldest, q.len_k);
      const auto t = static_cast<std::int32_t>(token);
      const std::int64_t first = base + start + window.first_of(t), last = base + start + window.last_of(t);
      if (wanted.first >= wanted.last) {
        CHECK(first >= last);
      } else {
        CHECK(first == wanted.first);
        CHECK(last == wanted.last);
      }
    }
  }
}

TEST_CASE("divisors: quotients and remainders of numbers below 2^31") {
  std::mt19937 random(7);
  constexpr std::uint32_t kEnd = std::uint32_t{1} << 31;
  for (std::uint32_t by : {1u, 2u, 3u, 5u, 7u, 12u, 64u, 127u, 65537u, kEnd / 2, kEnd / 2 + 1, kEnd - 1}) {
    CAPTURE(by);
    const cuda::Divisor divisor(by);
    std::vector<std::uint32_t> numbers = {0, 1, by - 1, by, by + 1, kEnd - 1, (kEnd - 1) / by * by};
    if (by > 1) numbers.push_back((kEnd - 1) / by * by - 1);
    for (int i = 0; i < 1000; ++i) numbers.push_back(random() % kEnd);
    for (const std::uint32_t n : numbers) {
      if (n >= kEnd) continue;
      CAPTURE(n);
      CHECK(divisor.quotient(n) == n / by);
      CHECK(divisor.remainder(n) == n % by);
    }
  }
}

TEST_CASE("visible keys: of a sequence, those of the rows that bias and mask have") {
  ScoreParams s{};
  s.left = s.right = kOpen;
  s.modifier_keys = kNoLimit;
  Sequence q{};
  q.len_q = 3, q.len_k = 4;
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, kNoLimit}) {
    s.modifier_rows = rows;
    CHECK(visible_keys(s, q).first == 0);
    CHECK(visible_keys(s, q).last == 4);
  }
  s.modifier_rows = 0;
  CHECK(visible_keys(s, q).last == 0);
}
