// The program of docs/tutorials/engine.md.
#include "support/catch.hpp"
#define main tutorial_main
#include "../../docs/tutorials/engine.cpp"
#undef main

#include <functional>
#include <sstream>
#include <string>

namespace rapt::testing {
namespace {

/// Prompts of several lengths: together they need more pages than there are.
std::deque<Sequence> requests() {
  std::deque<Sequence> made;
  for (int i = 0; i < 14; ++i) {
    Sequence sequence;
    for (int t = 0; t < 3 + 11 * i % 37; ++t) sequence.tokens.push_back((i * 5 + t * 3) % 40);
    sequence.wanted = 6 + i % 5 * 4;
    made.push_back(sequence);
  }
  return made;
}

}  // namespace

TEST_CASE("tutorial: every sequence of the engine gets the tokens that it gets alone", "[examples]") {
  const ToyModel model;
  std::vector<std::vector<int>> alone, together;
  for (const Sequence& request : requests()) alone.push_back(serve({request}, model).at(0).tokens);
  for (const Sequence& sequence : serve(requests(), model)) together.push_back(sequence.tokens);
  std::sort(alone.begin(), alone.end());
  std::sort(together.begin(), together.end());
  CHECK(together == alone);
  CHECK(std::any_of(together.begin(), together.end(), [](const std::vector<int>& tokens) {
    return std::adjacent_find(tokens.end() - 6, tokens.end(), std::not_equal_to<>()) != tokens.end();
  }));
}

TEST_CASE("tutorial: a step of the engine is attention over all tokens before it, with shared pages too",
          "[examples]") {
  // The model hands out what it gets, and the test computes the same in double from what it gave.
  struct Watched : ToyModel {
    mutable std::vector<std::vector<float>> last;
    int next_token(const float* row) const {
      last.emplace_back(row, row + hq * d);
      return ToyModel::next_token(row);
    }
  } model;
  PagedCache memory;
  Pages pages;
  const std::vector<int> prompt = {3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6};
  std::vector<Sequence> running{{prompt, 14, 0, {}}};
  REQUIRE(pages.admit(running[0]));
  CHECK(pages.free() == page_count - 4);
  step(running, memory, model);
  // The second sequence shares both whole pages, and computes one token. The third shares one page.
  running.push_back({{prompt.begin(), prompt.begin() + 17}, 14, 0, {}});
  running.push_back({{prompt.begin(), prompt.begin() + 16}, 14, 0, {}});
  for (std::size_t i : {1, 2}) REQUIRE(pages.admit(running[i]));
  CHECK(running[1].cached == 16);
  CHECK(running[2].cached == 8);
  CHECK(pages.free() == page_count - 4 - 2 - 3);
  while (running[0].wanted > 0) {
    std::vector<std::vector<int>> tokens;
    for (const Sequence& sequence : running) tokens.push_back(sequence.tokens);
    model.last.clear();
    step(running, memory, model);
    for (std::size_t i = 0; i < running.size(); ++i) {
      const auto all = model.project(tokens[i]);
      const std::int64_t keys = std::ssize(tokens[i]);
      for (std::int64_t h = 0; h < hq; ++h) {
        const auto row = [&](const std::vector<float>& x, std::int64_t heads, std::int64_t head, std::int64_t j) {
          return x.data() + (j * heads + head) * d;
        };
        const float* q = row(all.q, hq, h, keys - 1);
        std::vector<double> wanted(d, 0.0);
        double sum = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          double x = 0;
          for (std::int64_t c = 0; c < d; ++c) x += double(q[c]) * row(all.k, hk, h / (hq / hk), j)[c];
          const double p = std::exp(x / std::sqrt(double(d)));
          sum += p;
          for (std::int64_t c = 0; c < d; ++c) wanted[std::size_t(c)] += p * row(all.v, hk, h / (hq / hk), j)[c];
        }
        // Elements of up to 1 are off by up to 1 / 254, and scores of |q| up to 16^1/2 by up to 16 / 254.
        for (std::int64_t c = 0; c < d; ++c)
          REQUIRE(std::abs(model.last[i][std::size_t(h * d + c)] - wanted[std::size_t(c)] / sum) < 0.07);
      }
    }
  }
  // A page is free when its last sequence has left, and then no prompt finds it.
  pages.release(running[0]);
  CHECK(pages.free() == page_count - 4 - 2 - 3 + 2);
  pages.release(running[1]);
  pages.release(running[2]);
  CHECK(pages.free() == page_count);
  Sequence again{prompt, 14, 0, {}};
  REQUIRE(pages.admit(again));
  CHECK(again.cached == 0);
}

TEST_CASE("tutorial: a sequence that the cache can never hold is refused", "[examples]") {
  CHECK_THROWS_AS(serve({Sequence{{1, 2, 3}, most * page_size - 2, 0, {}}}, ToyModel()), std::invalid_argument);
}

TEST_CASE("tutorial: the engine's program prints the tokens of its three requests", "[examples]") {
  std::ostringstream printed;
  std::streambuf* const before = std::cout.rdbuf(printed.rdbuf());
  const int status = tutorial_main();
  std::cout.rdbuf(before);
  CHECK(status == 0);
  std::istringstream lines(printed.str());
  int requests = 0;
  for (std::string line; std::getline(lines, line); ++requests)
    CHECK(std::count(line.begin(), line.end(), ' ') == 20 + 1 + 8);
  CHECK(requests == 3);
}

}  // namespace rapt::testing
