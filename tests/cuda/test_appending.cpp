// append_kv, rotary_append_kv and merge_states on a GPU, beyond what tests of every entry ask.
#include <cmath>
#include <functional>

#include "streams.hpp"
#include "support/cases.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kAppends[] = {
    "append_kv new=bf16 kv=i8 b=3 hk=2 n=3 sk=96 d=128 page=16 groups=1",
    "append_kv new=f16 kv=i8 b=2 hk=2 n=5 sk=40 d=96 dv=64 k_groups=3 v_groups=2 zeros",
    "append_kv kv=i4x2 b=3 hk=1 n=7 sk=5 d=68 dv=40 ring groups=2 zeros",
    "append_kv new=bf16 kv=i4x2 b=3 hk=2 n=5 sk=64 d=64 ragged=9 page=8 groups=2",
    "append_kv new=bf16 kv=f8e4m3 b=2 hk=2 n=5 sk=11 d=37 dv=5",
    "append_kv kv=f8e5m2 b=2 hk=2 n=9 sk=40 d=36 page=4 groups=2 tail=12 dv=24 values_are_keys",
    "append_kv new=f16 kv=f8e4m3 b=2 hk=2 n=5 sk=11 d=24 groups=3 given_scales",
    "append_kv kv=i8 b=3 hk=2 n=5 sk=11 d=24 groups=4 zeros given_scales",
    "append_kv kv=bf16 b=3 hk=2 n=9 sk=64 d=40",
    "append_kv dtype=bf16 b=3 hk=2 n=9 sk=64 d=64 dv=40",
    "append_kv dtype=f16 b=3 hk=3 n=7 sk=5 d=48 dv=128 ring",
    "append_kv b=3 hk=2 n=5 sk=64 d=32 ragged=9 page=8"};

// Calls test(entry) for the operation's entries on a GPU.
template <class Test>
void each_entry(const Problem& problem, const Test& test) {
  for (const std::string& entry : every_entry(problem)) {
    INFO(entry << ": " << to_string(problem));
    if (device_of(entry) == DeviceType::cuda) test(entry);
  }
}

// Captures `call`, which is on the stream, in a graph, and runs that twice.
void replay(const Stream& stream, const std::function<void()>& call) {
  const Graph graph(stream, call);
  for (int i = 0; i < 2; ++i) graph.replay();
  check(cudaStreamSynchronize(stream.handle));
}

}  // namespace

TEST_CASE("cuda: append_kv writes the bits that CPUs write, also by a graph", "[kernel]") {
  for (const char* text : kAppends) {
    const AppendKvProblem problem = AppendKvProblem::parse(text);
    each_entry(problem, [&](const std::string& entry) {
      for (const std::uint64_t seed : {1, 2, 3}) {
        AppendCase c(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
        // Numbers that are not finite, where some scale is computed from them or 8 bits have them.
        if (!problem.given_scales) c.k.fresh.flat(c.k.fresh.size() / 2) = INFINITY;
        const std::vector<std::byte> wanted = bits_on(c, Context());
        c.clear();
        c.run(forced(entry));
        CHECK((bits_of(c) == wanted));
        c.clear();
        const Stream stream;
        const DeviceCallOf<AppendKvArgs> there(c.args());
        replay(stream, [&] { append_kv(there.args(), on(stream, entry)); });
        there.finish();
        CHECK((bits_of(c) == wanted));
      }
    });
  }
}

TEST_CASE("cuda: append_kv leaves out rows without a place", "[kernel]") {
  for (const char* text : {kAppends[0], kAppends[1], kAppends[2], kAppends[3]}) {
    const AppendKvProblem problem = AppendKvProblem::parse(text);
    each_entry(problem, [&](const std::string& entry) {
      AppendCase c(problem, 2);
      // The first sequence is past its room (a ring has none), and no page of the second is one.
      const std::vector<std::byte> before = (c.clear(), bits_of(c));
      for (const std::int64_t length : {problem.ring ? -1 : problem.sk, std::int64_t{1} << 30, std::int64_t{-1}}) {
        if (problem.ring && length > 0) continue;
        for (std::int64_t i = 0; i < problem.b; ++i) set_index(c.seqlens, i, length);
        c.run(forced(entry));
        CHECK((bits_of(c) == before));
      }
      if (!c.block_table) return;
      for (std::int64_t i = 0; i < problem.b; ++i) set_index(c.seqlens, i, 0);
      for (std::int64_t i = 0; i < c.block_table.size(); ++i) set_index(c.block_table, i, i % 2 ? -1 : 1 << 20);
      c.run(forced(entry));
      CHECK((bits_of(c) == before));
    });
  }
}

TEST_CASE("cuda: merge_states merges any number of states, also by a graph", "[kernel]") {
  for (const char* text :
       {"merge_states rows=30 dv=64 count=2 lse", "merge_states dtype=bf16 rows=60 dv=576 count=32",
        "merge_states dtype=f16 rows=5 dv=37 count=33 lse", "merge_states rows=3 dv=130 count=100 lse"}) {
    const MergeStatesProblem problem = MergeStatesProblem::parse(text);
    each_entry(problem, [&](const std::string& entry) {
      MergeCase c(problem, 2, Placement::heap, Spacing::gaps);
      c.clear();
      c.run(forced(entry));
      CHECK(c.verdict().violation == "");
      const std::vector<std::byte> once = bits_of(c);
      c.clear();
      const Stream stream;
      const DeviceCallOf<MergeStatesArgs> there(c.args());
      replay(stream, [&] { merge_states(there.args(), on(stream, entry)); });
      there.finish();
      CHECK((bits_of(c) == once));
    });
  }
}

// Aligned rows go in pieces of 16 bytes, others one number at a time.
TEST_CASE("cuda: rotary_append_kv writes the same bits wherever rows lie", "[kernel]") {
  for (const char* text :
       {"rotary_append_kv dtype=bf16 b=3 hk=2 n=5 sk=40 d=64 hq=4 norm",
        "rotary_append_kv dtype=f16 b=2 hk=3 n=70 sk=96 d=128 dv=72 page=16 hq=5 rows norm plus_one",
        "rotary_append_kv b=2 hk=2 n=9 sk=64 d=96 dv=40 hq=3 rotary=32 half",
        "rotary_append_kv dtype=bf16 b=3 hk=2 n=7 sk=5 d=80 ring hq=2 interleaved half positions",
        "rotary_append_kv dtype=bf16 b=3 hk=1 n=9 sk=0 d=256 ragged=20 no_cache hq=4 norm interleaved",
        "rotary_append_kv dtype=f16 b=2 hk=1 n=6 sk=9 d=512 hq=1 norm table=f32",
        "rotary_append_kv dtype=bf16 b=2 hk=5 n=2000 sk=2000 d=64 hq=27"}) {
    const RotaryAppendKvProblem problem = RotaryAppendKvProblem::parse(text);
    each_entry(problem, [&](const std::string& entry) {
      for (const std::uint64_t seed : {1, 2, 3}) {
        RotaryCase aligned(problem, seed), apart(problem, seed, Placement::heap, Spacing::gaps);
        for (RotaryCase* c : {&aligned, &apart}) {
          c->clear();
          c->run(forced(entry));
          CHECK(c->verdict(problem.n > 100 ? 97 : 1).violation == "");
        }
        const std::vector<Tensor*> got = aligned.outputs(), wanted = apart.outputs();
        for (std::size_t i = 0; i < got.size(); ++i) {
          std::int64_t differ = 0;
          for (std::int64_t j = 0; j < got[i]->size(); ++j) {
            const float x = got[i]->flat(j), y = wanted[i]->flat(j);
            differ += x != y && !(std::isnan(x) && std::isnan(y));
          }
          CHECK(differ == 0);
        }
      }
    });
  }
}

TEST_CASE("cuda: rotary_append_kv, also by a graph, with NaN where it belongs", "[kernel]") {
  for (const char* text :
       {"rotary_append_kv new=bf16 kv=i8 b=3 hk=2 n=3 sk=96 d=128 page=16 groups=1 hq=8 rotary=128 norm",
        "rotary_append_kv dtype=f16 b=3 hk=1 n=7 sk=5 d=68 dv=40 ring hq=3 rotary=34 offset=30 interleaved half",
        "rotary_append_kv new=bf16 kv=i4x2 b=3 hk=2 n=5 sk=64 d=64 ragged=9 page=8 groups=2 hq=4 rows norm plus_one",
        "rotary_append_kv kv=f8e5m2 b=2 hk=2 n=9 sk=40 d=36 page=4 groups=2 tail=12 dv=24 values_are_keys hq=1 "
        "rotary=12 offset=24 positions",
        "rotary_append_kv dtype=bf16 b=3 hk=2 n=9 sk=0 d=64 ragged=20 no_cache hq=4 norm",
        "rotary_append_kv new=bf16 kv=i8 b=2 hk=2 n=300 sk=320 d=64 groups=1 hq=3 norm"}) {
    const RotaryAppendKvProblem problem = RotaryAppendKvProblem::parse(text);
    each_entry(problem, [&](const std::string& entry) {
      for (const std::uint64_t seed : {1, 2, 3}) {  // of 3 in place
        RotaryCase c(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
        c.clear();
        c.run(forced(entry));
        CHECK(c.verdict().violation == "");
        const std::vector<std::byte> once = bits_of(c);
        c.clear();
        if (c.in_place) continue;  // a second run would rotate again
        const Stream stream;
        const DeviceCallOf<RotaryAppendKvArgs> there(c.args());
        replay(stream, [&] { rotary_append_kv(there.args(), on(stream, entry)); });
        there.finish();
        CHECK((bits_of(c) == once));
      }
    });
  }
}
