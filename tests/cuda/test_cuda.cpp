// What only calls on a GPU can get wrong. Skipped, by name, where there is none.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <thread>

#include "exp2_sweep.hpp"
#include "streams.hpp"
#include "support/check.hpp"
#include "support/fill.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kProblems[] = {
    "attention b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal align=bottom_right lse",
    "attention b=3 hq=4 hk=1 sq=90 sk=120 d=40 ragged_q=200 ragged_k=250 lse",
    "attention b=6 hq=8 hk=2 sq=70 sk=912 d=64 ragged_q=90 page=16 seqlens causal align=bottom_right lse",
    "attention b=2 hq=6 hk=2 sq=3 sk=320 d=128 page=16 seqlens causal align=bottom_right lse",
    "attention b=1 hq=4 hk=2 sq=90 sk=200 d=256 dv=192 window=80,-1 align=bottom_right lse",
    "attention b=2 hq=6 hk=2 sq=3 sk=720 d=64 page=16 seqlens kv=i8 groups=2 zeros causal align=bottom_right lse",
    "attention b=2 hq=16 hk=1 sq=1 sk=4480 d=576 dv=512 latent page=64 seqlens lse"};

// Calls test(entry, case) for every entry that runs on a GPU, every problem and type; of quantised caches queries have
// it.
void each_case(const std::function<void(const std::string&, Case&)>& test,
               std::span<const char* const> problems = kProblems) {
  bool any = false;
  for (const char* text : problems)
    for (DType dtype : kFloatTypes) {
      AttentionProblem problem = typed(text, dtype);
      if (const DType kv = AttentionProblem::parse(text).kv_dtype; kv != DType::f32) problem.kv_dtype = kv;
      for (const std::string& entry : every_entry(problem)) {
        if (device_of(entry) != DeviceType::cuda) continue;
        any = true;
        INFO(entry << ": " << problem.to_string());
        Case c(problem);
        test(entry, c);
      }
    }
  for (const EntryInfo& entry : entries())
    if (!any && entry.backend == "cuda") WARN("skipped: " << entry.name << ": " << entry.unusable);
}

struct Bytes {
  explicit Bytes(const Case& c) : out(copy(c.out)), lse(copy(c.lse)) {}
  static std::vector<std::byte> copy(const Tensor& t) {
    return {t.buffer().data(), t.buffer().data() + t.buffer().size()};
  }
  friend bool operator==(const Bytes&, const Bytes&) = default;
  std::vector<std::byte> out, lse;
};

Bytes expected(const std::string& entry, Case& c) {
  c.poison_outputs();
  run(c.args(), entry);
  return Bytes(c);
}

}  // namespace

TEST_CASE("cuda: a thousand calls beside other work give the same bits", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    const Stream stream, other;
    const Context context = on(stream, entry), load = on(other, entry);
    Case busy(typed("attention hq=16 sq=60 sk=2000 d=64", c.problem.q_dtype));
    const DeviceCall call(c.args()), beside(busy.args());
    for (int i = 0; i < 1000; ++i) {
      if (i % 10 == 0) attention(beside.args(), load);
      attention(call.args(), context);
      if (i % 100 != 99) continue;
      c.poison_outputs();
      call.finish();
      REQUIRE(Bytes(c) == once);
    }
  });
}

TEST_CASE("cuda: a call can be captured in a graph and replayed", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    const Stream stream;
    const DeviceCall call(c.args());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
    attention(call.args(), on(stream, entry));
    check(cudaStreamEndCapture(stream.handle, &graph));
    check(cudaGraphInstantiate(&program, graph, 0));
    call.finish();
    CHECK_FALSE(Bytes(c) == once);  // captured, not run
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(program, stream.handle));
    call.finish();
    CHECK(Bytes(c) == once);
    check(cudaGraphExecDestroy(program));
    check(cudaGraphDestroy(graph));
  });
}

TEST_CASE("cuda: calls on two streams at once do not meet", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    Case second(c.problem, 2);
    const Bytes first_once = expected(entry, c), second_once = expected(entry, second);
    const Stream streams[2];
    const DeviceCall calls[] = {DeviceCall(c.args()), DeviceCall(second.args())};
    const Context contexts[] = {on(streams[0], entry), on(streams[1], entry)};
    for (int i = 0; i < 50; ++i)
      for (const int n : {0, 1}) attention(calls[n].args(), contexts[n]);
    c.poison_outputs(), second.poison_outputs();
    calls[0].finish(), calls[1].finish();
    CHECK(Bytes(c) == first_once);
    CHECK(Bytes(second) == second_once);
  });
}

TEST_CASE("cuda: a call returns while its stream is still busy", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    const Stream stream;
    const DeviceCall call(c.args());
    std::atomic<bool> go = false;
    check(cudaLaunchHostFunc(
        stream.handle,
        [](void* flag) {
          while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
        },
        &go));
    attention(call.args(), on(stream, entry));
    CHECK(cudaStreamQuery(stream.handle) == cudaErrorNotReady);
    go = true;
    call.finish();
    CHECK(Bytes(c) == once);
  });
}

TEST_CASE("cuda: a plan runs in the caller's workspace", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    const Stream stream;
    const DeviceCall call(c.args());
    const Plan plan(call.args(), on(stream, entry));
    void* workspace = nullptr;
    check(cudaMalloc(&workspace, plan.workspace_bytes() + 64));
    plan.run(call.args(), {static_cast<std::byte*>(workspace), plan.workspace_bytes() + 64});
    call.finish();
    CHECK(Bytes(c) == once);
    check(cudaFree(workspace));
  });
}

TEST_CASE("cuda: decoding of up to 512 keys without modifiers is one launch, and takes no memory", "[kernel]") {
  constexpr std::pair<const char*, bool> kCalls[] = {
      {"attention hq=4 hk=2 sq=3 sk=512 d=64", true},
      {"attention hq=4 hk=2 sq=3 sk=77 d=128 causal align=bottom_right", true},
      {"attention hq=4 hk=2 sq=3 sk=1024 d=64", false},
      {"attention hq=4 hk=2 sq=3 sk=512 d=64 softcap=2", false},
      {"attention hq=4 hk=2 sq=3 sk=512 d=64 sinks", false}};
  for (const DType type : {DType::bf16, DType::f16}) {
    const std::string entry = "attention_decode." + std::string(to_string(type)) + ".cuda.sm90a";
    for (const auto& [text, at_once] : kCalls) {
      Case c(typed(text, type));
      const std::vector<std::string> names = every_entry(c.problem);
      if (std::find(names.begin(), names.end(), entry) == names.end() || !selected(entry)) continue;
      const Bytes once = expected(entry, c);
      c.poison_outputs();
      const Stream stream;
      const DeviceCall call(c.args());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t program = nullptr;
      std::size_t nodes = 0;
      check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
      attention(call.args(), on(stream, entry));
      check(cudaStreamEndCapture(stream.handle, &graph));
      check(cudaGraphGetNodes(graph, nullptr, &nodes));
      INFO(c.problem.to_string());
      CHECK((nodes == 1) == at_once);
      check(cudaGraphInstantiate(&program, graph, 0));
      check(cudaGraphLaunch(program, stream.handle));
      call.finish();
      CHECK(Bytes(c) == once);
      check(cudaGraphExecDestroy(program));
      check(cudaGraphDestroy(graph));
    }
  }
}

TEST_CASE("cuda: exact fp32 on tensor cores takes heads of 16 to 256 columns", "[kernel]") {
  const std::string entry = "attention_wgmma.f32.cuda.sm90a";
  for (const EntryInfo& info : entries()) {
    if (info.name != entry || !info.unusable.empty() || !selected(entry)) continue;
    for (std::int64_t size : {15, 16, 64, 65, 128, 129, 192, 193, 256, 257})
      for (bool of_values : {false, true}) {
        AttentionProblem problem = AttentionProblem::parse("attention sq=40 d=64 dv=64");
        (of_values ? problem.dv : problem.d) = size;
        const std::vector<std::string> names = every_entry(problem);
        INFO(problem.to_string());
        CHECK((std::find(names.begin(), names.end(), entry) != names.end()) == (size >= 16 && size <= 256));
      }
  }
}

// Of fp32 they are attention_simt's; of 16-bit types a warp computes them, whatever its other rows are.
TEST_CASE("cuda: fallback rows have bits of their own", "[kernel]") {
  constexpr const char* kWithFallback[] = {"attention hq=2 sq=300 d=64 causal lse", "attention hq=2 sq=300 d=128 dv=40",
                                           "attention hq=2 sq=300 d=64 dv=80 layout=bhds",
                                           "attention hq=2 sq=300 d=250 window=70,20 lse"};
  const auto test = [](const std::string& entry, Case& c) {
    const std::vector<EntryInfo> all = entries();
    const auto info = std::find_if(all.begin(), all.end(), [&](const EntryInfo& e) { return e.name == entry; });
    if (info->isa != "sm90a") return;
    const bool by_simt = entry.find("wgmma.f32") != entry.npos;
    // Scores too large for tensor cores: of one row of a tile, of 5, of 8 (the most that attention_simt takes at once
    // in a short way), of 9, of all.
    const auto is_large = [](std::int64_t row) {
      return row == 3 || (row >= 70 && row < 75) || (row >= 130 && row < 138) || (row >= 200 && row < 209) ||
             row >= 256;
    };
    Case other(c.problem);
    for (Case* of : {&c, &other})
      for (std::int64_t head = 0; head < 2; ++head)
        for (std::int64_t i = 0; i < 300; ++i) {
          const bool large = is_large(i) || (of == &other && !by_simt);
          of->k.at({0, head, i, 5}) = 4096;
          of->q.at({0, head, i, 5}) = !large ? 0.f : c.problem.q_dtype == DType::f16 ? 6e4f : 1e9f;
        }
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
    run(other.args(), by_simt ? "attention_simt.f32.cuda.q64k64" : entry);
    for (std::int64_t head = 0; head < 2; ++head)
      for (std::int64_t row = 0; row < 300; ++row)
        for (std::int64_t i = 0; is_large(row) && i < c.problem.dv; ++i)
          REQUIRE(c.out.at({0, head, row, i}) == other.out.at({0, head, row, i}));
  };
  each_case(test, kWithFallback);
}

// More than there are multiprocessors, so that each goes from one to the next: with one, two and three warpgroups, and
// heads that tensor maps of rows take and do not take.
TEST_CASE("cuda: several tiles for each thread block", "[kernel]") {
  constexpr const char* kMany[] = {
      "attention hq=150 sq=40 sk=70 d=40 causal align=bottom_right lse",
      "attention hq=150 sq=40 sk=70 d=128 lse",
      "attention hq=150 sq=40 sk=70 d=192 causal align=bottom_right lse",
      "attention hq=150 sq=40 sk=70 d=256 causal align=bottom_right lse",
      "attention hq=600 hk=150 sq=45 sk=130 d=64 lse",
      "attention hq=450 hk=150 sq=60 sk=90 d=56 causal align=bottom_right lse",
      "attention hq=160 hk=20 sq=100 sk=1300 d=24 dv=40 window=90,0 align=bottom_right lse",
      "attention hq=200 sq=80 sk=70 d=33 dv=41 lse",
      "attention hq=9000 sq=5 sk=20 d=64 lse",
      "attention b=90 hq=4 sq=200 sk=150 d=64 ragged_q=7000 ragged_k=5000 lse"};
  const auto test = [](const std::string& entry, Case& c) {
    // Fallback rows in some tiles, and none in those between.
    const float huge = c.problem.q_dtype == DType::f16 ? 6e4f : 1e9f;
    for (std::int64_t head = 0; c.problem.ragged_q < 0 && head < c.problem.hq; head += 7)
      for (const std::int64_t row : {3, 39})
        if (row < c.problem.sq) c.q.at({0, head, row, 5}) = huge;
    for (std::int64_t row = 0; row < c.problem.ragged_q; row += 301) c.q.at({row, 1, 5}) = huge;
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
  };
  each_case(test, kMany);
}

// Of these products cover the columns that there are, in tiles for one to four warpgroups and blocks of keys of several
// sizes; tensor maps take all of them but the last two, whose rows are not whole 16 bytes.
TEST_CASE("cuda: heads of 33 to 48 and of 65 to 96 columns", "[kernel]") {
  constexpr const char* kSizes[] = {"d=40",       "d=48", "d=40 dv=16", "d=8 dv=48",  "d=64",       "d=72",      "d=80",
                                    "d=64 dv=72", "d=88", "d=96",       "d=96 dv=40", "d=37 dv=45", "d=75 dv=78"};
  constexpr const char* kShapes[] = {
      "hq=2 sq=257 lse",
      "hq=1 sq=400 sk=500 lse",
      "hq=1 sq=1300 sk=77 lse",
      "b=2 hq=2 sq=64 sk=193 causal align=bottom_right lse",
      "hq=2 hk=1 sq=300 sk=1301 window=600,0 align=bottom_right",
      "hq=6 hk=2 sq=70 sk=130 window=40,9 align=30 lse",
      "hq=3 sq=90 sk=150 scale=-0.3 lse",
      "b=2 hq=2 sq=130 sk=140 layout=bshd causal align=-20 lse",
      "hq=2 sq=129 sk=100 layout=other",
      "b=4 hq=4 hk=2 sq=90 sk=150 ragged_q=200 ragged_k=400 causal align=bottom_right lse",
      "b=3 hq=2 sq=70 sk=300 seqlens lse"};
  const auto test = [](const std::string& entry, Case& c) {
    if (entry.rfind("attention_wgmma", 0) != 0 || c.problem.q_dtype == DType::f32) return;
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
  };
  for (const char* sizes : kSizes)
    for (const char* shape : kShapes) {
      const std::string text = "attention " + std::string(sizes) + " " + shape;
      const char* const one[] = {text.c_str()};
      each_case(test, one);
    }
  // Several tiles for each thread block.
  constexpr const char* kMany[] = {
      "attention hq=300 sq=40 sk=70 d=80 causal align=bottom_right lse",
      "attention hq=450 hk=150 sq=60 sk=90 d=72 dv=96 lse",
      "attention hq=200 sq=130 sk=100 d=48 window=30,0 align=bottom_right lse",
      "attention hq=40 sq=1300 sk=77 d=48 lse",
      "attention hq=40 sq=300 sk=70 d=64 lse",
      "attention hq=160 hk=20 sq=100 sk=1300 d=96 dv=88 window=90,0 align=bottom_right lse"};
  each_case(test, kMany);
}

// Keys whose rows are not whole 16 bytes are loaded by threads: in the same blocks, whatever the head size.
TEST_CASE("cuda: keys that no tensor map takes give the bits of those that one takes", "[kernel]") {
  constexpr const char* kSizes[] = {"d=40", "d=64", "d=72", "d=80", "d=80 dv=64", "d=96", "d=128", "d=192"};
  constexpr const char* kShapes[] = {"hq=2 sq=100 sk=250 lse", "hq=2 sq=100 sk=77 lse", "hq=1 sq=1300 sk=70 lse",
                                     "hq=4 hk=2 sq=330 causal lse", "hq=2 sq=90 sk=400 window=120,-1 align=200 lse"};
  const auto test = [](const std::string& entry, Case& c) {
    if (entry.rfind("attention_wgmma", 0) != 0 || c.problem.q_dtype == DType::f32) return;
    const Bytes by_map = expected(entry, c);
    for (Tensor* t : {&c.k, &c.v}) {
      const auto& shape = t->layout().shape;
      const std::int64_t row = shape[3] + 1;
      Tensor apart(t->dtype(), Layout(Dims(shape.begin(), shape.begin() + 4),
                                      Dims{shape[1] * shape[2] * row, shape[2] * row, row, 1}));
      for (std::int64_t i = 0; i < t->size(); ++i) apart.flat(i) = t->flat(i);
      *t = std::move(apart);
    }
    CHECK(expected(entry, c) == by_map);
  };
  for (const char* sizes : kSizes)
    for (const char* shape : kShapes) {
      const std::string text = "attention " + std::string(sizes) + " " + shape;
      const char* const one[] = {text.c_str()};
      each_case(test, one);
    }
}

// Of 16-bit types every row begins where a tensor map of rows may begin one, and ends where none may be written.
TEST_CASE("cuda: what lies between rows is neither read nor written", "[kernel]") {
  constexpr const char* kRows[] = {"attention b=2 hq=4 hk=2 sq=150 sk=300 d=33 dv=41 causal align=bottom_right lse",
                                   "attention b=2 hq=2 sq=40 sk=70 d=100 dv=97 lse",
                                   "attention hq=3 sq=70 sk=1400 d=17 dv=25 lse",
                                   "attention b=2 hq=8 hk=2 sq=150 sk=100 d=35 dv=46 lse",
                                   "attention b=2 hq=6 hk=2 sq=60 sk=200 d=65 dv=79 lse",
                                   "attention hq=2 sq=300 sk=1400 d=83 dv=95 causal align=bottom_right lse",
                                   "attention b=2 hq=8 hk=2 sq=1 sk=900 d=121 dv=63 lse",
                                   "attention hq=2 sq=90 sk=130 d=161 dv=199 lse"};
  const auto test = [](const std::string& entry, Case& c) {
    for (Tensor* t : {&c.q, &c.k, &c.v, &c.out}) {
      const auto& shape = t->layout().shape;
      const std::int64_t row = shape[3] / 8 * 8 + 8;
      Tensor apart(t->dtype(), Layout(Dims(shape.begin(), shape.begin() + 4),
                                      Dims{shape[1] * shape[2] * row, shape[2] * row, row, 1}));
      if (t != &c.out)
        for (std::int64_t i = 0; i < t->size(); ++i) apart.flat(i) = t->flat(i);
      *t = std::move(apart);
    }
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
    CHECK(c.out.gaps_intact());
  };
  each_case(test, kRows);
}

// Of one kv head, of several, in every way to keep keys, with every score modifier; up to as many rows as decoding
// takes.
TEST_CASE("cuda: few rows over keys in many splits", "[kernel]") {
  constexpr const char* kSplitKeys[] = {
      "attention b=2 hq=8 hk=2 sq=1 sk=3008 d=128 page=16 seqlens sinks lse",
      "attention b=2 hq=4 sq=5 sk=2500 d=64 causal align=bottom_right alibi lse",
      "attention b=1 hq=16 hk=1 sq=4 sk=70000 d=40 dv=72 lse",
      "attention b=2 hq=12 hk=2 sq=2 sk=1500 d=200 window=900,0 align=bottom_right bias=hqk softcap=20 lse",
      "attention b=3 hq=3 sq=1 sk=2000 d=96 ring seqlens lse",
      "attention b=1 hq=4 hk=2 sq=1 sk=4097 d=64 window=4095,-1 align=bottom_right lse",
      "attention b=1 hq=4 hk=2 sq=1 sk=513 d=80 window=511,0 align=bottom_right lse",
      "attention b=2 hq=4 hk=2 sq=2 sk=2247 d=128 window=2047,0 align=bottom_right lse",
      "attention b=5 hq=4 hk=2 sq=1 sk=1500 d=64 ring seqlens window=1111,0 align=bottom_right lse",
      "attention b=2 hq=6 hk=2 sq=3 sk=900 d=256 dv=16 mask=bqk layout=bshd scale=-0.1 lse",
      "attention b=2 hq=2 sq=3 sk=900 d=128 layout=other lse"};
  const auto test = [](const std::string& entry, Case& c) {
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
  };
  each_case(test, kSplitKeys);
}

// Of one token of many heads to many tokens, with keys of a thread block, a cluster or several, wherever they lie; and
// values that have memory of their own.
TEST_CASE("cuda: latent attention, and other heads of up to 576 columns", "[kernel]") {
  constexpr const char* kLatent[] = {
      "attention b=2 hq=16 hk=1 sq=1 sk=3008 d=576 dv=512 latent page=64 seqlens lse",
      "attention b=2 hq=128 hk=1 sq=1 sk=700 d=576 dv=512 latent page=20 seqlens sinks lse",
      "attention b=1 hq=32 hk=1 sq=4 sk=640 d=576 dv=512 latent page=16 seqlens causal align=bottom_right lse",
      "attention b=2 hq=6 hk=2 sq=3 sk=9000 d=576 dv=512 latent causal align=bottom_right scale=-0.1 lse",
      "attention b=3 hq=16 hk=1 sq=1 sk=1000 d=512 dv=512 latent ring seqlens window=770,0 align=bottom_right lse",
      "attention b=2 hq=40 hk=2 sq=2 sk=600 d=320 dv=256 page=24 seqlens sinks lse",
      "attention b=20 hq=16 hk=1 sq=2 sk=192 d=576 dv=512 latent page=32 seqlens causal align=bottom_right lse",
      "attention b=20 hq=16 hk=1 sq=1 sk=210 d=576 dv=512 latent page=1 seqlens lse",
      "attention b=1 hq=20 hk=1 sq=5 sk=2100 d=570 dv=500 latent bias=hqk softcap=20 mask=bqk layout=bshd lse",
      "attention b=2 hq=3 hk=1 sq=3 sk=1100 d=290 dv=300 alibi causal align=bottom_right layout=other lse",
      "attention b=1 hq=16 hk=1 sq=70 sk=130 d=576 dv=512 latent causal align=bottom_right lse"};
  const auto test = [](const std::string& entry, Case& c) {
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
  };
  each_case(test, kLatent);
}

// Around a block of keys, a thread block's and a cluster's; with NaN past each length.
TEST_CASE("cuda: latent attention over any number of keys", "[kernel]") {
  constexpr const char* kCounted[] = {
      "attention b=16 hq=16 hk=1 sq=1 sk=2100 d=576 dv=512 latent seqlens lse",
      "attention b=16 hq=24 hk=1 sq=3 sk=2100 d=576 dv=512 latent seqlens causal align=bottom_right lse"};
  const auto test = [](const std::string& entry, Case& c) {
    constexpr std::int64_t kLengths[] = {0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1025, 2100};
    AttentionProblem without_lengths = c.problem;
    without_lengths.kv_lengths = false;
    const Case plain(without_lengths);
    const std::int64_t size = c.k.size() / c.problem.b;
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      set_index(c.seqlens, n, kLengths[n]);
      for (std::int64_t i = 0; i < size; ++i)
        c.k.flat(n * size + i) =
            i < kLengths[n] * c.problem.d ? plain.k.flat(n * size + i) : std::numeric_limits<float>::quiet_NaN();
    }
    const Errors errors = run_and_compare(c, entry, oracle(c.args()));
    INFO(describe(errors));
    CHECK(errors.ok());
  };
  each_case(test, kCounted);
}

// One of few keys, whose splits one warp merges where it is alone; one of fewer, whose results are stored at once
// there; both with scores that are computed once more.
TEST_CASE("cuda: splits of a sequence's keys do not depend on the batch", "[kernel]") {
  constexpr const char* kBatches[] = {
      "attention b=4 hq=8 hk=2 sq=2 sk=9000 d=128 seqlens causal align=bottom_right lse",
      "attention b=4 hq=72 hk=1 sq=2 sk=9000 d=576 dv=512 latent seqlens causal align=bottom_right lse"};
  const auto test = [](const std::string& entry, Case& c) {
    constexpr std::int64_t kLengths[] = {9000, 700, 1600, 40};
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      if (c.seqlens.dtype() == DType::i64) c.seqlens.flat<std::int64_t>(n) = kLengths[n];
      else c.seqlens.flat<std::int32_t>(n) = static_cast<std::int32_t>(kLengths[n]);
    }
    AttentionProblem without_lengths = c.problem;
    without_lengths.kv_lengths = false;
    Case plain(without_lengths);  // numbers where `c` may have none
    for (std::int64_t i = 0; i < c.k.size(); ++i) c.k.flat(i) = plain.k.flat(i);
    for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = plain.v.flat(i);
    c.q.at({2, 3, 1, 5}) = 6e4f, c.k.at({2, 0, 77, 5}) = 6e4f;
    c.q.at({3, 1, 1, 5}) = 6e4f, c.k.at({3, 0, 20, 5}) = 6e4f;
    const Bytes batch = expected(entry, c);
    c.poison_outputs();
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      AttentionArgs args = c.args();
      for (TensorView* t : {&args.q, &args.kv.k, &args.kv.v}) *t = slice(*t, 0, n, 1);
      for (TensorView* t : {&args.kv.k, &args.kv.v}) *t = slice(*t, 2, 0, kLengths[n]);
      args.kv.seqlens = {};
      args.out = slice(args.out, 0, n, 1), args.lse = slice(args.lse, 0, n, 1);
      run(args, entry);
    }
    CHECK(Bytes(c) == batch);
  };
  each_case(test, kBatches);
}

// By the kernels that dispatch chooses for dense ones: some have few rows, and get their keys split. Partial results
// lie end to end in some batches; in others there is room for as many rows of each sequence as may be split, and in the
// last for those of half of the sequences at a time. One has many splits that do not exist, and one more sequences than
// thread blocks keep a list of.
TEST_CASE("cuda: a ragged sequence has the bits that it has dense", "[kernel]") {
  struct Batch {
    const char* text;
    std::vector<std::int64_t> tokens;
    std::int64_t pages = 0;  // of a sequence, in a table wider than the case's; 0: its own
  };
  std::vector<std::int64_t> in_parts(70, 1), many(1100);
  in_parts[40] = 1100;
  for (std::size_t n = 0; n < many.size(); ++n) many[n] = static_cast<std::int64_t>(n % 4);
  const Batch batches[] = {
      {"attention b=7 hq=8 hk=2 sq=220 sk=9024 d=128 ragged_q=257 page=64 seqlens causal align=bottom_right lse",
       {1, 3, 0, 16, 220, 16, 1}},
      {"attention b=6 hq=8 hk=2 sq=3 sk=5000 d=64 ragged_q=9 seqlens alibi sinks align=bottom_right lse",
       {1, 2, 0, 3, 1, 2}},
      {"attention b=5 hq=4 sq=100 sk=704 d=40 ragged_q=230 page=16 seqlens window=100,0 align=bottom_right lse",
       {64, 65, 1, 100, 0}},
      {"attention b=40 hq=4 hk=2 sq=1 sk=9024 d=16 ragged_q=40 page=64 seqlens lse", std::vector<std::int64_t>(40, 1)},
      {"attention b=1100 hq=2 hk=1 sq=3 sk=30 d=16 ragged_q=1650 seqlens lse", many},
      {"attention b=4 hq=8 hk=4 sq=300 sk=400 d=192 dv=128 ragged_q=340 seqlens causal align=bottom_right lse",
       {1, 300, 32, 7}},
      {"attention b=7 hq=8 hk=2 sq=130 sk=3008 d=128 ragged_q=167 page=16 seqlens kv=i8 groups=1 causal "
       "align=bottom_right lse",
       {1, 3, 0, 16, 130, 16, 1}},
      {"attention b=5 hq=4 sq=100 sk=704 d=256 dv=96 ragged_q=230 page=16 seqlens kv=f8e4m3 window=100,0 "
       "align=bottom_right lse",
       {64, 65, 1, 100, 0}},
      {"attention b=70 hq=32 hk=8 sq=1100 sk=64 d=128 ragged_q=1169 page=64 seqlens lse", in_parts, 2048}};
  std::vector<int> runs;
  for (const Batch& batch : batches) {
    runs.push_back(0);
    const auto test = [&](const std::string& entry, Case& c) {
      if (!entry.starts_with("attention_wgmma")) return;
      std::int64_t first = 0;
      for (std::size_t n = 0; n <= batch.tokens.size(); ++n) {
        if (c.cu_seqlens_q.dtype() == DType::i64)
          c.cu_seqlens_q.flat<std::int64_t>(static_cast<std::int64_t>(n)) = first;
        else c.cu_seqlens_q.flat<std::int32_t>(static_cast<std::int64_t>(n)) = static_cast<std::int32_t>(first);
        if (n < batch.tokens.size()) first += batch.tokens[n];
      }
      REQUIRE(first == c.problem.ragged_q);
      ++runs.back();
      std::vector<std::int32_t> table(static_cast<std::size_t>(c.problem.b * batch.pages));
      const auto in_wide_table = [&](AttentionArgs args) {
        if (batch.pages == 0) return args;
        for (std::int64_t n = 0; n < c.problem.b; ++n)
          table[static_cast<std::size_t>(n * batch.pages)] = static_cast<std::int32_t>(index_at(c.block_table, {n, 0}));
        args.kv.block_table = TensorView(table.data(), {c.problem.b, batch.pages});
        return args;
      };
      const AttentionArgs all = in_wide_table(c.args());
      c.poison_outputs();
      run(all, entry);
      const Bytes ragged(c);
      c.poison_outputs();
      first = 0;
      for (std::size_t n = 0; n < batch.tokens.size(); first += batch.tokens[n++]) {
        if (batch.tokens[n] == 0) continue;
        const auto number = static_cast<std::int64_t>(n);
        const auto dense = [&](auto view) {  // [total, heads, ...] to [1, heads, tokens, ...]
          auto part = slice(view, 0, first, batch.tokens[n]);
          part.ndim = view.ndim + 1;
          for (auto dim = static_cast<std::size_t>(part.ndim) - 1; dim > 0; --dim)
            part.shape[dim] = part.shape[dim - 1], part.strides[dim] = part.strides[dim - 1];
          part.shape[0] = 1, part.strides[0] = 0;
          std::swap(part.shape[1], part.shape[2]), std::swap(part.strides[1], part.strides[2]);
          return part;
        };
        AttentionArgs args = all;
        args.cu_seqlens_q = {};
        args.q = dense(args.q), args.out = dense(args.out), args.lse = dense(args.lse);
        args.kv.seqlens = slice(args.kv.seqlens, 0, number, 1);
        if (args.kv.block_table) args.kv.block_table = slice(args.kv.block_table, 0, number, 1);
        else args.kv.k = slice(args.kv.k, 0, number, 1), args.kv.v = slice(args.kv.v, 0, number, 1);
        const DeviceCall call(args);
        attention(call.args());
        call.finish();
      }
      CHECK(Bytes(c) == ragged);
    };
    each_case(test, std::array{batch.text});
  }
  const bool any = *std::max_element(runs.begin(), runs.end()) > 0;
  for (std::size_t n = 0; any && n < runs.size(); ++n) {
    INFO(batches[n].text);
    CHECK(runs[n] > 0);
  }
}

// The host cannot check them; guard bands and compute-sanitizer see what they lead to.
TEST_CASE("cuda: senseless lengths and tables in a GPU's memory lead nowhere", "[kernel]") {
  constexpr const char* kLists[] = {
      "attention b=3 hq=4 hk=1 sq=90 sk=120 d=40 ragged_q=200 ragged_k=250 lse alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=320 d=40 page=16 seqlens alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=32 d=40 ring seqlens alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=320 d=64 page=16 seqlens kv=f8e4m3 causal align=bottom_right",
      "attention b=6 hq=4 hk=1 sq=3 sk=720 d=64 ragged_q=9 page=16 seqlens causal align=bottom_right",
      "attention b=6 hq=4 hk=1 sq=3 sk=720 d=64 ragged_q=9 page=16 seqlens kv=i8 groups=1 causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=32 d=64 ring seqlens kv=i4x2 groups=1 causal align=bottom_right"};
  const auto test = [](const std::string& entry, Case& c) {
    // Numbers of every size and sign, also in front.
    std::mt19937_64 random(1);
    for (int round = 0; round < 4; ++round) {
      for (Tensor* list : {&c.cu_seqlens_q, &c.cu_seqlens_k, &c.seqlens, &c.block_table})
        for (std::int64_t i = 0; *list && i < list->size(); ++i) {
          const auto value = static_cast<std::int64_t>(random() >> random() % 64);
          if (list->dtype() == DType::i64) list->flat<std::int64_t>(i) = value;
          else list->flat<std::int32_t>(i) = static_cast<std::int32_t>(value);
        }
      const DeviceCall call(c.args(), DeviceCall::Lengths::senseless);
      attention(call.args(), forced(entry));
      call.finish();
    }
  };
  each_case(test, kLists);
}

TEST_CASE("cuda: tables without entries and caches without pages have no keys", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    if (!c.block_table) return;
    for (const bool pages : {false, true}) {
      DeviceCall call(c.args());
      AttentionArgs args = call.args();
      if (pages) {
        KvSource& kv = args.kv;
        const std::int64_t all = kv.k.shape[0];
        for (TensorView* t : {&kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero})
          if (t->shape[0] == all) t->shape[0] = 0;
      }
      if (!pages) args.kv.block_table.shape[1] = 0, args.kv.block_table.data = nullptr;
      attention(args, forced(entry));
      call.finish();
      for (const float x : c.out.values()) REQUIRE(x == 0);
    }
  });
}

TEST_CASE("cuda: a device that is not there is an error", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const DeviceCall call(c.args());
    AttentionArgs args = call.args();
    for (TensorView* t :
         {&args.q, &args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale, &args.kv.k_zero, &args.kv.v_zero,
          &args.kv.seqlens, &args.kv.cu_seqlens, &args.kv.block_table, &args.cu_seqlens_q})
      t->device.index = 99;
    args.out.device.index = args.lse.device.index = 99;
    CHECK_THROWS_AS(attention(args, forced(entry)), std::runtime_error);
    attention(call.args(), forced(entry));
    call.finish();
  });
}

TEST_CASE("cuda: 2^x is within 2^-22 of itself from -126 to 0", "[kernel]") {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    WARN("skipped: no CUDA device");
    return;
  }
  const double error = largest_error_of_exp2();
  CAPTURE(error);
  WARN("2^x is off by at most 2^" << std::log2(error));
  CHECK(error <= 0x1p-22);
}

// The last one: everything on the GPU is lost.
TEST_CASE("cuda: after cudaDeviceReset() a first call can be captured, in the strictest mode", "[kernel]") {
  each_case([](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    check(cudaDeviceReset());
    const Stream stream;
    const DeviceCall call(c.args());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal));
    attention(call.args(), on(stream, entry));
    check(cudaStreamEndCapture(stream.handle, &graph));
    check(cudaGraphInstantiate(&program, graph, 0));
    check(cudaGraphLaunch(program, stream.handle));
    call.finish();
    CHECK(Bytes(c) == once);
    check(cudaGraphExecDestroy(program));
    check(cudaGraphDestroy(graph));
  });
}
