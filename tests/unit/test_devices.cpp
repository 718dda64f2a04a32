// Calls on a GPU's memory, as far as the host has a say in them: none of this needs a GPU, and nothing is dereferenced.
#include <limits>

#include "rapt/append_kv.hpp"
#include "rapt/merge_states.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

// Memory that would fault here.
template <class T = float>
T* somewhere(std::uintptr_t at) {
  return reinterpret_cast<T*>(at << 32);
}
MutableTensorView on_gpu(MutableTensorView view, int index = 0) {
  view.device = {DeviceType::cuda, index};
  return view;
}

// b = 2, hq = 4, hk = 2, sq = 5, sk = 7, d = 16.
AttentionArgs dense() {
  AttentionArgs args;
  args.q = on_gpu({somewhere(1), {2, 4, 5, 16}});
  args.kv = KvSource::strided(on_gpu({somewhere(2), {2, 2, 7, 16}}), on_gpu({somewhere(3), {2, 2, 7, 16}}));
  args.out = on_gpu({somewhere(4), {2, 4, 5, 16}});
  return args;
}
AttentionArgs ragged() {
  AttentionArgs args;
  args.q = on_gpu({somewhere(1), {9, 4, 16}});
  args.kv = KvSource::ragged(on_gpu({somewhere(2), {11, 2, 16}}), on_gpu({somewhere(3), {11, 2, 16}}),
                             on_gpu({somewhere<std::int32_t>(5), {4}}));
  args.cu_seqlens_q = on_gpu({somewhere<std::int64_t>(6), {4}});
  args.out = on_gpu({somewhere(4), {9, 4, 16}});
  return args;
}
std::string refused(const AttentionArgs& args) {
  return refused_argument([&] { AttentionProblem::of(args); });
}

}  // namespace

TEST_CASE("devices: a call on a GPU is described without a look at its memory", "[unit]") {
  CHECK(AttentionProblem::of(dense()).device == DeviceType::cuda);
  CHECK(AttentionProblem::parse(AttentionProblem::of(dense()).to_string()) == AttentionProblem::of(dense()));

  // Nobody knows the longest sequence, but it cannot be longer than all together.
  const AttentionProblem packed = AttentionProblem::of(ragged());
  CHECK(packed.b == 3);
  CHECK(packed.sq == 9);
  CHECK(packed.sk == 11);

  AttentionArgs paged = dense();
  paged.kv = KvSource::paged(on_gpu({somewhere(2), {20, 2, 16, 16}}), on_gpu({somewhere(3), {20, 2, 16, 16}}),
                             on_gpu({somewhere<std::int32_t>(5), {2, 6}}), on_gpu({somewhere<std::int32_t>(6), {2}}));
  CHECK(AttentionProblem::of(paged).sk == 96);
}

TEST_CASE("devices: what can be checked on a GPU's tensors is", "[unit]") {
  AttentionArgs args = dense();
  args.kv.v = on_gpu({somewhere(3), {2, 2, 7, 16}}, 1);
  CHECK(refused(args) == "v");
  args = dense();
  args.score.sinks = TensorView(somewhere(7), {4});  // in host memory
  CHECK(refused(args) == "score.sinks");
  args = ragged();
  args.cu_seqlens_q = TensorView(somewhere<std::int64_t>(6), {4});
  CHECK(refused(args) == "cu_seqlens_q");
  args = ragged();
  args.kv.cu_seqlens = on_gpu({somewhere<std::int32_t>(5), {3}});
  CHECK(refused(args) == "kv.cu_seqlens");
  args = ragged();
  args.cu_seqlens_q = on_gpu({somewhere(6), {4}});
  CHECK(refused(args) == "cu_seqlens_q");
  args = ragged();
  args.cu_seqlens_q = on_gpu({somewhere<std::int32_t>(6), {0}});
  CHECK(refused(args) == "cu_seqlens_q");
  args = dense();
  args.out = on_gpu({somewhere(1), {2, 4, 5, 16}});
  CHECK(refused(args) == "out");

  // Lengths of a ring may be anything: it has room for the window of the first of the new rows.
  args = dense();
  args.kv = KvSource::ring(args.kv.k, args.kv.v, on_gpu({somewhere<std::int32_t>(6), {2}}));
  args.score.causal = true;
  args.score.align = Align::bottom_right();
  CHECK(refused(args).empty());
  args.score.window = Window{2, -1};
  CHECK(refused(args).empty());
  args.score.window = Window{3, -1};
  CHECK(refused(args) == "k");
  args.score.window = Window{std::numeric_limits<std::int64_t>::max(), -1};
  CHECK(refused(args) == "k");

  // Lengths that nobody can compare have to be aligned by somebody.
  args = ragged();
  args.score.causal = true;
  CHECK(refused(args) == "score.align");
  args.score.align = Align::bottom_right();
  CHECK(refused(args).empty());
}

TEST_CASE("devices: appending and merging on a GPU are described without a look at its memory", "[unit]") {
  const auto append = [] {
    AppendKvArgs args;
    args.k_new = on_gpu({somewhere(1), {9, 2, 16}});
    args.v_new = on_gpu({somewhere(2), {9, 2, 16}});
    args.cu_seqlens = on_gpu({somewhere<std::int32_t>(3), {4}});
    args.seqlens = on_gpu({somewhere<std::int32_t>(4), {3}});
    args.cache = KvCache::strided(on_gpu({somewhere(5), {3, 2, 7, 16}}), on_gpu({somewhere(6), {3, 2, 7, 16}}));
    return args;
  };
  const AppendKvProblem problem = AppendKvProblem::of(append());
  CHECK(problem.device == DeviceType::cuda);
  CHECK(problem.n == 7);  // as many as there is room for
  CHECK(AppendKvProblem::parse(problem.to_string()) == problem);
  AppendKvArgs elsewhere = append();
  elsewhere.seqlens.device = {};
  CHECK(refused_argument([&] { AppendKvProblem::of(elsewhere); }) == "seqlens");
  elsewhere = append();
  elsewhere.cache.v.device.index = 1;
  CHECK(refused_argument([&] { AppendKvProblem::of(elsewhere); }) == "cache.v");

  TensorView outs[] = {on_gpu({somewhere(1), {6, 8}}), on_gpu({somewhere(2), {6, 8}})};
  TensorView lses[] = {on_gpu({somewhere(3), {6}}), on_gpu({somewhere(4), {6}})};
  MergeStatesArgs merge{outs, lses, on_gpu({somewhere(5), {6, 8}}), {}};
  CHECK(MergeStatesProblem::of(merge).device == DeviceType::cuda);
  lses[1].device = {};
  CHECK(refused_argument([&] { MergeStatesProblem::of(merge); }) == "lses[1]");
}

TEST_CASE("devices: where no GPU can be used a call says why", "[unit]") {
  bool built = false, usable = false;
  for (const EntryInfo& entry : entries()) {
    if (entry.backend != "cuda") continue;
    built = true;
    usable |= entry.unusable.empty();
    CHECK(device_of(entry.name) == DeviceType::cuda);
  }
  const std::vector<BackendInfo> all = backends();
  REQUIRE(all.size() == 2);
  CHECK((all[0].name == "cpu" && all[0].library.empty() && all[0].version == version() && all[0].missing.empty()));
  CHECK(all[1].name == "cuda");
  CHECK(all[1].missing.empty() == built);
  CHECK(all[1].version == (built ? version() : ""));
  CHECK(all[1].library.empty() == !built);
  const AttentionProblem problem = AttentionProblem::of(dense());
  if (usable) {
    CHECK(Plan(problem).backend() == "cuda");
    return;
  }
  try {
    attention(dense());
    FAIL("a call on a GPU that is not there went through");
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.argument() == (built ? "problem" : "device"));
    const std::string text = error.what(), reason = built ? "no CUDA device" : "RAPT_CUDA_LIBRARY";
    CHECK(text.find(reason) != std::string::npos);
    CHECK(text.find(reason) == text.rfind(reason));  // once for all entries
  }
}

TEST_CASE("devices: a plan on the host knows the host's entries only", "[unit]") {
  const Plan plan(AttentionProblem::parse("attention sq=4 d=8"));
  for (const Candidate& candidate : plan.candidates()) CHECK(device_of(candidate.entry) == DeviceType::cpu);
}
