// How calls are queued on a GPU: on streams, in graphs, beside other work.
#include <atomic>
#include <map>
#include <string>
#include <thread>

#include "cases.hpp"

using namespace rapt;
using namespace rapt::testing;

TEST_CASE("cuda: a thousand calls beside other work give the same bits", "[kernel]") {
  std::map<std::string, Case> loads;
  each_case(kEveryWay, [&](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    const Stream stream, other;
    const Context context = on(stream, entry), load = on(other, entry);
    const DType given = c.problem.q_dtype;
    const bool of_codes = info_of(entry).arithmetic == "f8e4m3";
    AttentionProblem work =
        typed("attention hq=16 sq=60 sk=2000 d=64", given != DType::f8e4m3 || of_codes ? given : operands_of(entry));
    if (of_codes) work.out_dtype = DType::bf16;
    Case& busy = loads.try_emplace(work.to_string(), work).first->second;
    const DeviceCall call(c.args()), beside(busy.args());
    const int times = info_of(entry).phase == Phase::naive ? 20 : 1000;  // rows share nothing there
    for (int i = 0; i < times; ++i) {
      if (i % 10 == 0) attention(beside.args(), load);
      attention(call.args(), context);
      if ((i + 1) % (times / 10) != 0) continue;
      c.poison_outputs();
      call.finish();
      REQUIRE(Bytes(c) == once);
    }
  });
}

TEST_CASE("cuda: a call can be captured in a graph and replayed", "[kernel]") {
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    const Stream stream;
    const DeviceCall call(c.args());
    const Graph graph(stream, [&] { attention(call.args(), on(stream, entry)); });
    call.finish();
    CHECK_FALSE(Bytes(c) == once);  // captured, not run
    for (int i = 0; i < 3; ++i) graph.replay();
    call.finish();
    CHECK(Bytes(c) == once);
  });
}

TEST_CASE("cuda: calls on two streams at once do not meet", "[kernel]") {
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
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
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
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
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
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

TEST_CASE("cuda: decoding of up to 512 keys is one launch, and takes no memory", "[kernel]") {
  struct Call {
    const char* text;
    bool few_keys, modified;
  };
  constexpr Call kCalls[] = {{"hq=4 hk=2 sq=3 sk=512 d=64", true, false},
                             {"hq=4 hk=2 sq=3 sk=77 d=128 causal align=bottom_right", true, false},
                             {"hq=4 hk=1 sq=16 sk=40 d=256 dv=72 lse", true, false},
                             {"hq=4 hk=2 sq=3 sk=1024 d=64", false, false},
                             {"hq=4 hk=2 sq=3 sk=512 d=64 softcap=2 lse", true, true},
                             {"hq=4 hk=2 sq=3 sk=512 d=64 sinks alibi align=bottom_right", true, true},
                             {"hq=8 hk=2 sq=5 sk=300 d=64 sinks lse", true, true}};
  constexpr std::pair<const char*, const char*> kTypes[] = {{"bf16", "dtype=bf16"},
                                                            {"f16", "dtype=f16"},
                                                            {"f32", "dtype=f32"},
                                                            {"bf16", "q=bf16 kv=i8 groups=1"},
                                                            {"f32", "q=f32 kv=f8e4m3 groups=1"}};
  for (const auto& [type, types] : kTypes) {
    const std::string entry = "attention_decode." + std::string(type) + ".cuda.sm90a";
    if (!is_usable(entry)) continue;
    for (const auto& [text, few_keys, modified] : kCalls) {
      Case c(AttentionProblem::parse("attention " + std::string(types) + " " + text));
      INFO(entry << ": " << c.problem.to_string());
      // Over keys of 16 bits, what has modifiers is left to attention_combine where there are more than 16 rows.
      const AttentionProblem& p = c.problem;
      const bool many_rows = p.sq * (p.hq / p.hk) > 16, halves = p.kv_dtype == p.q_dtype && p.q_dtype != DType::f32;
      const bool at_once = few_keys && !(modified && halves && many_rows);
      const Bytes once = expected(entry, c);
      c.poison_outputs();
      const Stream stream;
      const DeviceCall call(c.args());
      const Graph graph(stream, [&] { attention(call.args(), on(stream, entry)); });
      CHECK((graph.nodes() == 1) == at_once);
      graph.replay();
      call.finish();
      CHECK(Bytes(c) == once);
    }
  }
}

TEST_CASE("cuda: a device that is not there is an error", "[kernel]") {
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
    const DeviceCall call(c.args());
    AttentionArgs args = call.args();
    for (TensorView* t :
         {&args.q, &args.q_scale, &args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale, &args.kv.k_zero,
          &args.kv.v_zero, &args.kv.seqlens, &args.kv.cu_seqlens, &args.kv.block_table, &args.cu_seqlens_q})
      t->device.index = 99;
    args.out.device.index = args.lse.device.index = 99;
    CHECK_THROWS_AS(attention(args, forced(entry)), std::runtime_error);
    attention(call.args(), forced(entry));
    call.finish();
  });
}

// The last one: everything on the GPU is lost.
TEST_CASE("cuda: after cudaDeviceReset() a first call can be captured, in the strictest mode", "[kernel]") {
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
    const Bytes once = expected(entry, c);
    c.poison_outputs();
    check(cudaDeviceReset());
    const Stream stream;
    const DeviceCall call(c.args());
    const Graph graph(
        stream, [&] { attention(call.args(), on(stream, entry)); }, cudaStreamCaptureModeGlobal);
    graph.replay();
    call.finish();
    CHECK(Bytes(c) == once);
  });
}
