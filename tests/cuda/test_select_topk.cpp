// select_topk on a GPU, beyond what tests of every entry ask: rows for each way to select, ties, graphs.
#include <string>
#include <vector>

#include "streams.hpp"
#include "support/cases.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

// Calls test(entry) for the operation's entries on a GPU.
template <class Test>
void each_entry(const SelectTopkProblem& problem, const Test& test) {
  for (const std::string& entry : every_entry(problem)) {
    INFO(entry << ": " << problem.to_string());
    if (device_of(entry) == DeviceType::cuda) test(entry);
  }
}

SelectTopkProblem problem_of(const std::string& words) {
  return SelectTopkProblem::parse("select_topk " + words);
}

// Replays a call of the case 25 times.
void check_replays(SelectTopkCase& c, const std::string& entry) {
  const DeviceCallOf<SelectTopkArgs> there(c.args());
  const Stream stream;
  const Graph graph(stream, [&] { select_topk(there.args(), on(stream, entry)); });
  for (int i = 0; i < 25; ++i) {
    graph.replay();
    check(cudaStreamSynchronize(stream.handle));
    c.clear();
    there.finish();
    REQUIRE(c.verdict().violation == "");
  }
}

}  // namespace

// Of few rows, of more than there are multiprocessors, split rows of every kind, and n too large for shared memory.
TEST_CASE("cuda: select_topk gives the indices of the sort, also by a graph", "[kernel]") {
  for (const char* words :
       {"rows=700 sk=256 n=8", "rows=33 sk=513 n=512", "rows=10 sk=4097 n=64", "rows=300 sk=9000 n=2048",
        "rows=10 sk=65537 n=2048", "rows=1 sk=300000 n=2048", "rows=10 sk=200000 n=16", "rows=10 sk=40000 n=16384",
        "rows=10 sk=20000 n=16385", "rows=2 sk=100000 n=100000"}) {
    const SelectTopkProblem problem = problem_of(words);
    each_entry(problem, [&](const std::string& entry) {
      for (const Spacing spacing : {Spacing::dense, Spacing::gaps}) {
        SelectTopkCase c(problem, 3, Placement::heap, spacing);
        c.clear();
        c.run(forced(entry));
        CHECK(c.verdict().violation == "");
        c.clear();
        const Stream stream;
        const DeviceCallOf<SelectTopkArgs> there(c.args());
        const Graph graph(stream, [&] { select_topk(there.args(), on(stream, entry)); });
        graph.replay(), graph.replay();
        check(cudaStreamSynchronize(stream.handle));
        there.finish();
        CHECK(c.verdict().violation == "");
      }
    });
  }
}

// Hundreds of zeros on both sides of the n-th score.
TEST_CASE("cuda: select_topk chooses the same of a ReLU's zeros in 25 replays", "[kernel]") {
  for (const char* words : {"rows=40 sk=3000 n=1800", "rows=300 sk=9000 n=5000", "rows=3 sk=70000 n=2048"}) {
    const SelectTopkProblem problem = problem_of(words);
    each_entry(problem, [&](const std::string& entry) {
      SelectTopkCase c(problem);
      std::mt19937_64 random(605);
      std::normal_distribution<float> normal;
      const float shift = problem.sk > 10000 ? 2.f : 0.f;
      for (std::int64_t i = 0; i < c.scores.size(); ++i)
        c.scores.flat<float>(i) = std::max(normal(random) - shift, 0.f);
      check_replays(c, entry);
    });
  }
}

// The best of many equal scores begin far behind the first, so that warps at different steps offer them out of order.
TEST_CASE("cuda: select_topk chooses the first of equal scores that begin late, in 25 replays", "[kernel]") {
  for (const char* words :
       {"rows=300 sk=65536 n=512", "rows=300 sk=4096 n=512", "rows=300 sk=8000 n=64", "rows=3 sk=70000 n=2048"}) {
    const SelectTopkProblem problem = problem_of(words);
    each_entry(problem, [&](const std::string& entry) {
      SelectTopkCase c(problem);
      for (std::int64_t i = 0; i < c.scores.size(); ++i) {
        const std::int64_t row = i / problem.sk, position = i % problem.sk;
        const std::int64_t steps[] = {0, position >= std::min<std::int64_t>(10000, problem.sk / 4), position / 100};
        c.scores.flat<float>(i) = static_cast<float>(steps[row % 3]);
      }
      check_replays(c, entry);
    });
  }
}
