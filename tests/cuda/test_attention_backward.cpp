// attention_backward on a GPU, beyond what tests of every entry ask.
#include <string>
#include <vector>

#include "operations/attention_backward/check.hpp"
#include "streams.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr auto kLibrary = BackwardCase::Forward::library;

// Calls test(entry) for the entries on a GPU that take the problem.
template <class Test>
void each_entry(const AttentionBackwardProblem& problem, const Test& test) {
  for (const std::string& entry : every_entry(problem)) {
    if (device_of(entry) != DeviceType::cuda) continue;
    INFO(entry << ": " << problem.to_string());
    test(entry);
  }
}

// Each entry that is not naive gives the sequences of a batch the bits that they have alone.
void check_alone(BackwardCase& all) {
  each_entry(all.problem, [&](const std::string& entry) {
    if (info_of(entry).phase == Phase::naive) return;
    all.clear();
    all.run(forced(entry));
    const auto together = bits_of(all);
    all.clear();
    for (std::int64_t b = 0; b < all.problem.b; ++b) run(one_sequence(all.args(), b), forced(entry));
    CHECK((bits_of(all) == together));
  });
}

}  // namespace

// Warpgroups of 64 rows or keys, tiles of 64, thread blocks of 128 and 256, and what is hidden from a part of them.
TEST_CASE("cuda: gradients of sequences of some tiles", "[kernel][long]") {
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  for (const char* words :
       {"b=2 hq=3 sq=300 sk=333 d=128 causal align=bottom_right", "hq=2 sq=333 sk=200 d=64 causal align=bottom_right",
        "hq=2 sq=333 sk=200 d=128 causal align=top_left", "hq=6 hk=2 sq=190 d=64 window=70,20 align=0",
        "hq=4 hk=1 sq=130 sk=300 d=128 window=5,0 align=0 sinks dsinks dlse", "hq=5 hk=1 sq=100 d=96 dv=128 causal",
        "hq=70 hk=1 sq=9 sk=200 d=64 dlse", "b=3 hq=2 sq=260 d=64 dv=24 seqlens",
        "b=4 hq=4 hk=2 sq=300 sk=300 d=128 ragged_q=500 ragged_k=600 causal align=bottom_right",
        "b=3 hq=2 sq=20 sk=400 d=20 dv=30 ragged_q=40 ragged_k=900", "hq=2 sq=129 sk=513 d=128 layout=bshd",
        "hq=1 sq=1 sk=700 d=64", "hq=1 sq=700 sk=1 d=64", "b=2 hq=7 hk=1 sq=150 sk=200 d=128 causal align=bottom_right",
        "b=2 hq=6 hk=2 sq=140 sk=140 d=64 ragged_q=200 ragged_k=200 window=30,30 align=0"})
    for (const std::uint64_t seed : {1, 2}) check_backward(typed_backward(words, dtype), seed);
}

TEST_CASE("cuda: gradients by a graph, beside other calls, a thousand times", "[kernel]") {
  for (const char* words :
       {"b=2 hq=4 hk=2 sq=300 d=128 causal sinks dsinks dlse", "b=3 hq=2 sq=150 d=64 ragged_q=200 ragged_k=300"}) {
    BackwardCase c(typed_backward(words, DType::bf16), 3, Placement::heap, {}, kLibrary),
        busy(c.problem, 7, Placement::heap, {}, kLibrary);
    each_entry(c.problem, [&](const std::string& entry) {
      c.clear();
      c.run(forced(entry));
      const auto once = bits_of(c);
      const Stream stream, other;
      const Context context = on(stream, entry), load = on(other, entry);
      c.clear();
      const DeviceCallOf<AttentionBackwardArgs> there(c.args()), beside(busy.args());
      const Graph graph(stream, [&] { attention_backward(there.args(), context); });
      const int times = info_of(entry).phase == Phase::naive ? 20 : 1000;
      for (int i = 0; i < times; ++i) {
        if (i % 4 == 0) attention_backward(beside.args(), load);
        if (i % 2 == 0) attention_backward(there.args(), context);
        else graph.replay();
        if (i % (times / 4) != 0) continue;
        check(cudaStreamSynchronize(stream.handle));
        c.clear();
        there.finish();
        REQUIRE((bits_of(c) == once));
      }
      check(cudaStreamSynchronize(stream.handle));
      check(cudaStreamSynchronize(other.handle));
    });
  }
}

// Groups of so many rows that thread blocks of a cluster share them: with 200 tokens two blocks, with 450 four.
TEST_CASE("cuda: gradients of groups whose rows are shared", "[kernel][long]") {
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  for (const char* words : {"b=2 hq=12 hk=1 sq=200 sk=150 d=64 causal align=bottom_right",
                            "b=2 hq=12 hk=1 sq=450 sk=70 d=128", "hq=12 hk=1 sq=450 sk=300 d=128 window=40,10 align=0",
                            "hq=12 hk=1 sq=450 d=60 causal", "hq=12 hk=1 sq=450 sk=1 d=64"}) {
    BackwardCase all(typed_backward(words, dtype), 4, Placement::heap, {}, kLibrary);
    check_backward(all.problem, 4);
    check_alone(all);
  }
}

// More heads than there are slots for their dS.
TEST_CASE("cuda: gradients whose dS takes the slots of other heads", "[kernel][long]") {
  for (const char* words :
       {"b=9 hq=16 sq=1024 d=64 causal", "b=10 hq=14 hk=2 sq=520 d=64 causal", "b=10 hq=14 hk=2 sq=520 d=64 seqlens",
        "b=40 hq=12 hk=2 sq=320 sk=512 d=128 window=100,0 align=0"}) {
    BackwardCase all(typed_backward(words, DType::bf16), 5, Placement::heap, {}, kLibrary);
    check_alone(all);
  }
}

// What the first warpgroup prepares of a tile: eight keys at a time where a row of the tensor lets it, one at a time
// elsewhere; of rows and keys that a tile has and the call has not.
TEST_CASE("cuda: gradients of tiles whose scores have modifiers", "[kernel][long]") {
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  for (const char* words :
       {"b=2 hq=3 sq=300 sk=328 d=128 mask=bhqk",
        "b=2 hq=3 sq=300 sk=333 d=64 mask=bhqk causal align=bottom_right",
        "b=2 hq=4 hk=2 sq=150 sk=270 d=128 mask=bk window=100,20 align=bottom_right dlse",
        "hq=3 sq=200 d=64 mask=q",
        "b=3 hq=2 sq=140 sk=200 d=64 mask=bhqk layout=other",
        "b=2 hq=4 hk=1 sq=200 sk=264 d=128 bias=bhqk",
        "b=2 hq=4 hk=1 sq=200 sk=264 d=64 bias=hqk mask=bk sinks dsinks",
        "hq=3 sq=190 sk=133 d=64 bias=qk",
        "b=2 hq=2 sq=300 sk=330 d=128 bias=bk mask=hqk softcap=5 causal align=bottom_right",
        "hq=3 sq=200 d=64 bias=h",
        "b=2 hq=6 hk=2 sq=260 d=64 alibi causal",
        "hq=4 hk=2 sq=130 sk=290 d=128 alibi bias=hqk align=-20",
        "b=2 hq=3 sq=200 sk=260 d=128 softcap=0.5",
        "hq=3 sq=200 sk=260 d=64 softcap=1000 window=50,50 align=0",
        "b=2 hq=4 hk=2 sq=270 sk=300 d=128 dropout=0.2",
        "b=2 hq=3 sq=140 d=64 dropout=0.5 causal mask=bk dlse",
        "b=2 hq=4 hk=1 sq=200 d=64 dropout=0.1 softcap=20 bias=hqk alibi sinks dsinks",
        "hq=2 sq=130 d=64 dropout=1",
        "b=4 hq=4 hk=2 sq=300 sk=300 d=64 ragged_q=500 ragged_k=600 mask=bqk causal align=bottom_right",
        "b=3 hq=2 sq=120 sk=400 d=128 ragged_q=240 ragged_k=900 bias=bhqk dropout=0.25",
        "b=3 hq=2 sq=260 d=64 dv=24 seqlens alibi dropout=0.3 mask=qk",
        "hq=12 hk=1 sq=450 sk=70 d=128 mask=hqk",
        "hq=12 hk=1 sq=450 sk=300 d=64 bias=hqk dropout=0.1 align=7 causal",
        "hq=2 sq=129 sk=513 d=100 layout=bshd mask=hqk"})
    for (const std::uint64_t seed : {1, 2}) check_backward(typed_backward(words, dtype), seed);
}

// More heads than there are slots for their dS, and each with the bits that it has alone.
TEST_CASE("cuda: gradients with modifiers whose dS takes the slots of other heads", "[kernel][long]") {
  for (const char* words : {"b=9 hq=16 sq=1024 d=64 causal mask=k", "b=10 hq=14 hk=2 sq=520 d=64 bias=hqk",
                            "b=40 hq=12 hk=2 sq=320 sk=512 d=128 window=100,0 align=0 alibi"}) {
    BackwardCase all(typed_backward(words, DType::bf16), 5, Placement::heap, {}, kLibrary);
    check_alone(all);
  }
}
