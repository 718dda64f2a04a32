// select_topk on every entry: equal to a sort, on rows of every kind. No entry of it is for a matrix unit: under
// RAPT_TEST_ENTRIES=amx nothing is left to try.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "operations/select_topk/case.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

SelectTopkProblem problem_of(const std::string& words) {
  return SelectTopkProblem::parse("select_topk " + words);
}

void check_every_entry(SelectTopkCase& c) {
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    REQUIRE(c.verdict().violation == "");
  }
}

}  // namespace

TEST_CASE("select_topk: the sort that it is held to", "[kernel]") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  CHECK((sorted_topk({3, 1, 2}, 3) == std::vector<std::int32_t>{0, 2, 1}));
  CHECK((sorted_topk({1, 3, 1, 3, 1}, 4) == std::vector<std::int32_t>{1, 3, 0, 2}));
  CHECK((sorted_topk({-1, -0.f, 0, -0.f}, 3) == std::vector<std::int32_t>{1, 2, 3}));
  CHECK((sorted_topk({inf, nan, -inf, -nan, 5}, 6) == std::vector<std::int32_t>{1, 3, 0, 4, -1, -1}));
}

TEST_CASE("select_topk: every n of every number of scores", "[kernel]") {
  for (const int64_t sk : {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50, 63, 64, 65, 100, 129}) {
    for (int64_t n = 1; n <= sk + 3; n += n < 20 || n > sk - 3 ? 1 : 7) {
      const SelectTopkProblem problem{DeviceType::cpu, static_cast<int64_t>(kScoreRows), sk, n};
      SelectTopkCase c(problem, static_cast<std::uint64_t>(sk + n), Placement::back,
                       n % 2 ? Spacing::gaps : Spacing::dense);
      c.protect_inputs();
      check_every_entry(c);
    }
  }
}

TEST_CASE("select_topk: long rows of every kind", "[kernel]") {
  for (const int64_t sk : {1000, 2047, 5000, 30000})
    for (const int64_t n : {1, 2, 48, 49, 500, 2048, 4999, 30000, 30001}) {
      SelectTopkCase c({DeviceType::cpu, static_cast<int64_t>(kScoreRows), sk, n}, static_cast<std::uint64_t>(n));
      check_every_entry(c);
    }
}

TEST_CASE("select_topk: rows without scores may have any strides", "[kernel]") {
  const float nothing = 0;
  std::vector<std::int32_t> indices(6);
  SelectTopkArgs args;
  args.scores = TensorView(&nothing, {3, 0}, {std::numeric_limits<int64_t>::max(), 1});
  args.indices = MutableTensorView(indices.data(), {3, 2});
  for (const std::string& entry : every_entry(problem_of("rows=3 sk=0 n=2"))) {
    std::fill(indices.begin(), indices.end(), 7);
    run(args, forced(entry));
    CHECK(indices == std::vector<std::int32_t>(6, -1));
  }
}

TEST_CASE("select_topk: sampled problems, and nothing outside of the tensors is touched", "[kernel][long]") {
  std::mt19937_64 random(603);
  for (int i = 0; i < 150; ++i) {
    SelectTopkCase c(sample_select_topk(random), random() % 1000, i % 2 ? Placement::front : Placement::back,
                     i % 3 ? Spacing::gaps : Spacing::dense);
    c.protect_inputs();
    check_every_entry(c);
  }
}

// The largest come last, in every number around a pass of selection, so that each is thrown away once.
TEST_CASE("select_topk: floats next to each other, in any order", "[kernel]") {
  for (const char* words : {"rows=4 sk=9000 n=1", "rows=4 sk=9000 n=100", "rows=4 sk=9000 n=2000"}) {
    SelectTopkCase c(problem_of(words));
    std::mt19937_64 random(604);
    for (int64_t row = 0; row < 4; ++row) {
      std::vector<float> values;
      float x = row % 2 ? -1.f : 1.f;  // and numbers of which only the last bits differ
      for (int64_t j = 0; j < 9000; ++j) {
        values.push_back(x);
        if (j % 3) x = std::nextafter(x, 2.f);
      }
      if (row >= 2) std::shuffle(values.begin(), values.end(), random);
      for (int64_t j = 0; j < 9000; ++j) c.scores.flat<float>(row * 9000 + j) = values[static_cast<std::size_t>(j)];
    }
    check_every_entry(c);
  }
}

TEST_CASE("select_topk: 1 to 16 threads write the same indices", "[kernel][long]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words : {"rows=40 sk=5000 n=300", "rows=3 sk=60000 n=2048"}) {
    SelectTopkCase c(problem_of(words), 5);
    for (const std::string& entry : threaded_entries(c.problem))
      for (int threads = 1; threads <= 16; ++threads) {
        INFO(entry << " on " << threads << ": " << words);
        c.clear();
        c.run(forced(entry, executor, threads));
        REQUIRE(c.verdict().violation == "");
      }
  }
}

TEST_CASE("select_topk: verdicts see what is wrong", "[kernel]") {
  for (std::uint64_t seed = 0; seed < kScoreRows; ++seed) {
    SelectTopkCase c(problem_of("rows=3 sk=40 n=9"), seed, Placement::heap, Spacing::gaps);
    const auto violation = [&](const auto& spoil) {
      c.clear();
      c.run(Context());
      REQUIRE(c.verdict().violation == "");
      spoil();
      return c.verdict().violation;
    };
    const auto index = [&](int64_t i) -> std::int32_t& { return c.indices.flat<std::int32_t>(i); };
    CHECK(violation([&] { index(8) = index(8) == 39 ? 38 : 39; }) != "");
    CHECK(violation([&] { index(0) ^= 1; }) != "");
    CHECK(violation([&] { REQUIRE(c.indices.spoil_gap()); }) != "");
  }
}
