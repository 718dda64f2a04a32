// The known answers of Random123 (tests/kat_vectors, philox4x32 10).
#include "semantics/dropout.hpp"
#include "support/catch.hpp"

using namespace rapt;

TEST_CASE("Philox4x32-10 gives Random123's known answers", "[unit]") {
  struct Answer {
    PhiloxWords counter;
    std::uint32_t key[2];
    PhiloxWords random;
  };
  const Answer answers[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {0xffffffff, 0xffffffff},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Answer& answer : answers) {
    const PhiloxWords random = philox(answer.counter, answer.key[0], answer.key[1]);
    for (int i = 0; i < 4; ++i) CHECK(random.word[i] == answer.random.word[i]);
  }
}

TEST_CASE("a weight is dropped where its 16 bits are below the threshold", "[unit]") {
  // Those of counter and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8, the lower half of a word first.
  const std::uint32_t numbers[] = {0xe8d5, 0x6627, 0xc58d, 0xe169, 0xac4c, 0xbc57, 0xdbd8, 0x9b00};
  for (std::int64_t j = 0; j < 8; ++j) {
    DropoutParams dropout = dropout_params(0.5f, 0, 0, 1);
    CHECK(dropout.threshold == 32768);
    CHECK(dropout.scale == 2);
    CHECK(is_dropped(dropout, 0, 0, 0, j) == (numbers[j] < 32768));
    dropout.threshold = numbers[j];
    CHECK_FALSE(is_dropped(dropout, 0, 0, 0, j));
    dropout.threshold = numbers[j] + 1;
    CHECK(is_dropped(dropout, 0, 0, 0, j));
  }
}
