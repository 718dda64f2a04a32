// index_scores on a GPU, beyond what tests of every entry ask.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/index_scores/case.hpp"
#include "streams.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

IndexScoresProblem problem_of(const std::string& words) {
  return IndexScoresProblem::parse("index_scores " + words);
}

// Calls test(entry, case) for the entries on a GPU.
void each_entry(const std::string& words, const std::function<void(const std::string&, IndexScoresCase&)>& test) {
  for (const std::string& entry : every_entry(problem_of(words))) {
    if (device_of(entry) != DeviceType::cuda) continue;
    INFO(entry << ": " << words);
    IndexScoresCase c(problem_of(words), 5);
    c.clear();
    test(entry, c);
  }
}

}  // namespace

TEST_CASE("cuda: index_scores has the bits of one query among many, whatever thread block has it", "[kernel]") {
  for (const char* words : {"dtype=bf16 b=2 sq=700 sk=1500 h=9 d=32 align=bottom_right",
                            "dtype=bf16 b=3 sq=301 sk=2100 h=64 d=128 align=bottom_right",
                            "q=bf16 k=f8e4m3 b=2 sq=150 sk=1920 h=48 d=64 full scales seqlens page=64",
                            "b=2 sq=70 sk=300 h=5 d=20 align=bottom_right"})
    each_entry(words, [&](const std::string& entry, IndexScoresCase& c) {
      const IndexScoresProblem& p = c.problem;
      c.run(forced(entry));
      REQUIRE(c.verdict(41).violation == "");
      for (int64_t i = 0; i < p.b; ++i)
        for (int64_t token = i; token < p.sq; token += 67) {
          IndexScoresArgs args = c.args();
          for (TensorView* t : {&args.q, &args.weights}) *t = slice(slice(*t, 0, i, 1), 1, token, 1);
          for (TensorView* t : {&args.seqlens, &args.block_table})
            if (*t) *t = slice(*t, 0, i, 1);
          if (!args.block_table)
            for (TensorView* t : {&args.k, &args.k_scale})
              if (*t) *t = slice(*t, 0, i, 1);
          if (args.align) args.align = Align::offset(c.length(i) - p.sq + token);
          Tensor row(DType::f32, Layout(Dims{1, 1, p.sk}));
          args.scores = row.mutable_view();
          run(args, forced(entry));
          bool same = true;
          for (int64_t j = 0; j < p.sk; ++j)
            same = same && row.flat<std::uint32_t>(j) == c.scores.flat<std::uint32_t>((i * p.sq + token) * p.sk + j);
          INFO("query " << token << " of sequence " << i);
          REQUIRE(same);
        }
    });
}

TEST_CASE("cuda: index_scores has the same bits of rows that lie as bulk copies need it, and of others", "[kernel]") {
  for (const char* words : {"dtype=bf16 b=2 sq=70 sk=900 h=40 d=80 align=bottom_right",
                            "dtype=bf16 b=2 sq=5 sk=960 h=64 d=64 full seqlens page=64",
                            "q=bf16 k=i8 b=2 sq=70 sk=900 h=9 d=128 align=bottom_right scales"})
    each_entry(words, [&](const std::string& entry, IndexScoresCase& c) {
      c.run(forced(entry));
      const std::vector<float> wanted = c.scores.values();
      const auto spread = [](Tensor& t) {
        const auto& shape = t.layout().shape;
        Tensor other(t.dtype(), spaced(Dims(shape.begin(), shape.begin() + t.layout().ndim), Spacing::gaps));
        for (int64_t i = 0; i < t.size(); ++i)
          if (t.dtype() == DType::bf16) other.flat<std::uint16_t>(i) = t.flat<std::uint16_t>(i);
          else other.flat<std::int8_t>(i) = t.flat<std::int8_t>(i);
        std::swap(t, other);
        return other;
      };
      for (const bool of_q : {true, false}) {
        Tensor& t = of_q ? c.q : c.k;
        Tensor dense = spread(t);
        c.clear();
        c.run(forced(entry));
        INFO((of_q ? "q" : "k"));
        CHECK(c.scores.values() == wanted);
        std::swap(t, dense);
      }
    });
}

TEST_CASE("cuda: index_scores selects from scores of a portion of the queries at a time", "[kernel]") {
  for (const char* words :
       {"dtype=bf16 sq=1100 sk=65536 h=1 d=16 full topk=40", "b=3 sq=400 sk=65536 h=1 d=1 align=bottom_right topk=40"})
    each_entry(words, [&](const std::string& entry, IndexScoresCase& c) {
      c.run(forced(entry));
      IndexScoresArgs args = c.args();
      Tensor scores(DType::f32, Layout(Dims{c.problem.b, c.problem.sq, c.problem.sk})),
          indices(DType::i32, Layout(Dims{c.problem.b, c.problem.sq, c.problem.topk}));
      args.scores = scores.mutable_view(), args.indices = indices.mutable_view();
      run(args, forced(entry));
      for (int64_t i = 0; i < indices.size(); ++i)
        REQUIRE(c.indices.flat<std::int32_t>(i) == indices.flat<std::int32_t>(i));
    });
}

TEST_CASE("cuda: index_scores by a graph", "[kernel]") {
  for (const char* words : {"dtype=bf16 b=2 sq=1 sk=4096 h=64 d=128 align=bottom_right seqlens page=64 topk=100 scores",
                            "b=2 sq=9 sk=500 h=5 d=20 align=bottom_right topk=30 scores"})
    each_entry(words, [&](const std::string& entry, IndexScoresCase& c) {
      const Stream stream;
      const DeviceCallOf<IndexScoresArgs> there(c.args());
      {
        const Graph graph(stream, [&] { index_scores(there.args(), on(stream, entry)); });
        for (int i = 0; i < 3; ++i) graph.replay();
        check(cudaStreamSynchronize(stream.handle));
      }
      there.finish();
      CHECK(c.verdict().violation == "");
    });
}

TEST_CASE("cuda: index_scores touches no memory that lengths and pages out of range name", "[kernel]") {
  for (const char* words : {"dtype=bf16 b=3 sq=5 sk=320 h=9 d=64 align=bottom_right seqlens page=32 topk=20 scores",
                            "q=bf16 k=i8 b=3 sq=5 sk=320 h=9 d=64 full scales seqlens page=32 topk=20 scores",
                            "b=3 sq=5 sk=320 h=9 d=20 full seqlens ranges page=32 topk=20"})
    each_entry(words, [&](const std::string& entry, IndexScoresCase& c) {
      const auto set = [](Tensor& t, const std::vector<int64_t>& values) {
        for (int64_t i = 0; i < t.size(); ++i) {
          const int64_t x = values[static_cast<std::size_t>(i) % values.size()];
          if (t.dtype() == DType::i64) t.flat<int64_t>(i) = x;
          else t.flat<std::int32_t>(i) = static_cast<std::int32_t>(x);
        }
      };
      set(c.seqlens, {1 << 30, -7, 200}), set(c.block_table, {-1, 1 << 30, 3, 5});
      run(c.args(), forced(entry));  // which looks at the memory around the tensors
      if (!c.scores) return;
      for (int64_t j = 0; j < 320; ++j) CHECK(c.scores.at<float>({1, 2, j}) == -kInf);
    });
}
