// Which entries and kernels calls on GPUs get, and how these divide them, without a GPU.
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fake_cuda.hpp"
#include "operations/attention_backward/cuda_choice.hpp"
#include "operations/delta_rule/cuda_choice.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

float* somewhere(std::uintptr_t at) {
  return reinterpret_cast<float*>(at << 32);
}

// Of this build: without 90a among the architectures it has fewer.
bool has_entry(const std::string& name) {
  const std::vector<EntryInfo> all = entries();
  return std::any_of(all.begin(), all.end(), [&](const EntryInfo& entry) { return entry.name == name; });
}

}  // namespace

TEST_CASE("cuda host: entries say what they multiply in, which GPUs they need and what they take", "[unit]") {
  struct Expected {
    std::string name, arithmetic, isa;
    Phase phase;
    std::vector<DType> dtypes;
    std::int64_t min_head_dim = 1, max_head_dim = 8192, max_value_head_dim = 8192;
    Operation operation = Operation::attention;
  };
  constexpr DType kF32 = DType::f32, kF16 = DType::f16, kBf16 = DType::bf16;
  const auto and_quantised = [](std::vector<DType> types) {
    types.insert(types.end(), {DType::i8, DType::f8e4m3, DType::f8e5m2, DType::i4x2});
    return types;
  };
  const std::vector<DType> caches = and_quantised({kF32, kBf16, kF16});
  const std::vector<Expected> all = {
      {"attention_decode.bf16.cuda.sm90a", "bf16", "sm90a", Phase::decode, and_quantised({kBf16}), 1, 256, 256},
      {"attention_decode.f16.cuda.sm90a", "f16", "sm90a", Phase::decode, and_quantised({kF16}), 1, 256, 256},
      {"attention_decode.f32.cuda.sm90a", "f32", "sm90a", Phase::decode, and_quantised({kF32}), 1, 256, 256},
      {"attention_prefill.bf16.cuda.sm90a", "bf16", "sm90a", Phase::prefill, and_quantised({kBf16}), 1, 256, 256},
      {"attention_prefill.f16.cuda.sm90a", "f16", "sm90a", Phase::prefill, and_quantised({kF16}), 1, 256, 256},
      {"attention_prefill.f8e4m3.cuda.sm90a", "f8e4m3", "sm90a", Phase::prefill, {DType::f8e4m3}, 64, 128, 128},
      {"attention_prefill.f32.cuda.sm90a", "f16x3", "sm90a", Phase::prefill, {kF32}, 16, 256, 256},
      {"attention_latent.bf16.cuda.sm90a", "bf16", "sm90a", Phase::all, {kBf16}, 1, 576, 512},
      {"attention_latent.f16.cuda.sm90a", "f16", "sm90a", Phase::all, {kF16}, 1, 576, 512},
      {"attention_simt.f32.cuda.q64k64", "f32", "cuda", Phase::prefill, caches, 1, 8192, 576},
      {"attention_naive.f32.cuda", "f32", "cuda", Phase::naive, caches},
      {"attention_backward.bf16.cuda.sm90a",
       "bf16",
       "sm90a",
       Phase::all,
       {kBf16},
       1,
       128,
       128,
       Operation::attention_backward},
      {"attention_backward.f16.cuda.sm90a",
       "f16",
       "sm90a",
       Phase::all,
       {kF16},
       1,
       128,
       128,
       Operation::attention_backward},
      {"attention_backward_naive.f32.cuda",
       "f32",
       "cuda",
       Phase::naive,
       {kF32, kBf16, kF16},
       1,
       2048,
       2048,
       Operation::attention_backward},
      {"append_kv.f64.cuda", "f64", "cuda", Phase::all, caches, 1, 8192, 8192, Operation::append_kv},
      {"rotary_append_kv.f32.cuda", "f32", "cuda", Phase::all, caches, 1, 8192, 8192, Operation::rotary_append_kv},
      {"delta_rule_decode.f32.cuda.sm90a",
       "f32",
       "sm90a",
       Phase::decode,
       {kF32, kBf16, kF16},
       1,
       128,
       128,
       Operation::delta_rule},
      {"delta_rule_prefill.bf16.cuda.sm90a",
       "bf16",
       "sm90a",
       Phase::prefill,
       {kBf16},
       1,
       128,
       128,
       Operation::delta_rule},
      {"delta_rule.f32.cuda", "f32", "cuda", Phase::all, {kF32, kBf16, kF16}, 1, 256, 256, Operation::delta_rule},
      {"index_scores.bf16.cuda.sm90a",
       "bf16",
       "sm90a",
       Phase::all,
       {kBf16, DType::i8, DType::f8e4m3, DType::f8e5m2},
       1,
       128,
       128,
       Operation::index_scores},
      {"index_scores.f32.cuda",
       "f32",
       "cuda",
       Phase::all,
       {kF32, kBf16, kF16, DType::i8, DType::f8e4m3, DType::f8e5m2},
       1,
       8192,
       8192,
       Operation::index_scores},
      {"merge_states.f32.cuda", "f32", "cuda", Phase::all, {kF32, kBf16, kF16}, 1, 8192, 8192, Operation::merge_states},
      {"select_topk.f32.cuda", "f32", "cuda", Phase::all, {kF32}, 1, 8192, 8192, Operation::select_topk}};
  std::size_t found = 0;
  for (const EntryInfo& info : entries()) {
    if (info.backend != "cuda") continue;
    const auto expected = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == info.name; });
    INFO(info.name);
    REQUIRE(expected != all.end());
    ++found;
    CHECK(info.operation == expected->operation);
    CHECK(info.phase == expected->phase);
    CHECK(info.arithmetic == expected->arithmetic);
    CHECK(info.isa == expected->isa);
    CHECK(info.dtypes == expected->dtypes);
    CHECK(info.min_head_dim == expected->min_head_dim);
    CHECK(info.max_head_dim == expected->max_head_dim);
    CHECK(info.max_value_head_dim == expected->max_value_head_dim);
    CHECK(info.unusable.empty());
    if (info.operation != Operation::attention) continue;

    ContextOptions options;
    options.kernel = info.name;
    const Context context(options);
    for (const DType dtype : {kF32, kBf16, kF16})
      for (const std::int64_t size : {std::int64_t{1}, info.min_head_dim - 1, info.min_head_dim, info.max_head_dim,
                                      info.max_head_dim + 1, info.max_value_head_dim, info.max_value_head_dim + 1})
        for (const bool of_values : {false, true}) {
          AttentionProblem problem = AttentionProblem::parse("attention sq=40 d=64 dv=64");
          if (size < 1 || size > 8192) continue;
          problem.device = DeviceType::cuda;
          problem.q_dtype = problem.kv_dtype = problem.out_dtype = dtype;
          (of_values ? problem.dv : problem.d) = size;
          const auto& types = expected->dtypes;
          const bool taken = std::find(types.begin(), types.end(), dtype) != types.end() &&
                             size >= expected->min_head_dim &&
                             size <= (of_values ? expected->max_value_head_dim : expected->max_head_dim);
          INFO(problem.to_string());
          if (taken) CHECK(Plan(problem, context).entry() == info.name);
          else CHECK_THROWS_AS(Plan(problem, context), Error);
        }
  }
  const auto of_all_gpus = std::count_if(all.begin(), all.end(), [](const auto& e) { return e.isa == "cuda"; });
  // Without 90a among the architectures there are those.
  CHECK((found == all.size() || found == static_cast<std::size_t>(of_all_gpus)));
}

TEST_CASE("cuda host: quantised caches and queries of 8 bits go to the kernels that are made for them", "[unit]") {
  const std::string decode = "attention_decode.", prefill = "attention_prefill.", sm90a = ".cuda.sm90a",
                    simt = "attention_simt.f32.cuda.q64k64", naive = "attention_naive.f32.cuda";
  const std::vector<std::pair<std::string, std::string>> wanted = {
      {"sq=1 q=bf16 kv=i8 groups=4 zeros", decode + "bf16" + sm90a},
      {"sq=64 q=f16 kv=i4x2 groups=1", decode + "f16" + sm90a},
      {"sq=65 q=bf16 kv=i8 groups=1", prefill + "bf16" + sm90a},
      {"sq=65 q=bf16 kv=i4x2 groups=1 page=16 seqlens", prefill + "bf16" + sm90a},
      {"sq=5 ragged_q=9 b=2 q=bf16 kv=f8e4m3", prefill + "bf16" + sm90a},
      {"sq=65 q=f16 kv=f8e5m2", prefill + "f16" + sm90a},
      {"sq=65 q=f16 kv=f8e4m3 k_groups=1", prefill + "f16" + sm90a},
      {"sq=65 q=f16 kv=f8e4m3 v_groups=1", simt},
      {"sq=65 q=f16 kv=i8 groups=1", simt},
      {"sq=65 q=bf16 kv=i8 groups=1 zeros", simt},
      {"sq=65 q=bf16 kv=i8 groups=4", simt},
      {"sq=65 q=bf16 kv=i8 k_groups=1 v_groups=4", simt},
      {"sq=65 kv=i8 groups=1", simt},
      {"sq=5 ragged_q=9 b=2 kv=f8e4m3", simt},
      {"sq=5 q=bf16 kv=i8 groups=1 tail=8", simt},
      {"sq=5 q=bf16 kv=f8e4m3 d=320 dv=576", simt},
      {"sq=5 q=bf16 kv=f8e4m3 d=320 dv=580", naive},
      {"sq=1 q=f8e4m3 q_scale kv=i8 groups=4 zeros", decode + "bf16" + sm90a},
      {"sq=65 q=f8e4m3 q_scale kv=f8e4m3 groups=1 head_scales", prefill + "bf16" + sm90a},
      {"sq=5 ragged_q=9 b=2 q=f8e4m3 kv=f8e4m3", prefill + "bf16" + sm90a},
      {"sq=65 q=f8e4m3 kv=i8 groups=4", simt},
      {"sq=5 q=f8e4m3 q_scale", simt},
      {"sq=65 q=f8e4m3 kv=bf16", simt},
      {"sq=5 q=f8e4m3 kv=f8e4m3 d=320 dv=580", naive}};
  for (const auto& [words, entry] : wanted) {
    AttentionProblem problem = AttentionProblem::parse("attention hq=2 sk=256 " + words);
    if (words.find("d=320") == std::string::npos) problem.d = problem.dv = 128;
    problem.device = DeviceType::cuda;
    INFO(problem.to_string());
    const std::string without = entry == naive ? naive : simt;  // where 90a is not among the architectures
    CHECK(Plan(problem, Context()).entry() == (has_entry(entry) ? entry : without));
  }
}

TEST_CASE("cuda host: one row over many latents goes to kernels for that on Hopper alone", "[unit]") {
  // rapt.transformers asks before it leaves keys and values of all heads unmade.
  const std::vector<std::pair<std::string, std::string>> wanted = {
      {"dtype=bf16 d=576 dv=512", "attention_latent.bf16.cuda.sm90a"},
      {"dtype=f16 d=320 dv=256", "attention_latent.f16.cuda.sm90a"},
      {"dtype=f32 d=40 dv=32", "attention_decode.f32.cuda.sm90a"},
      {"dtype=f32 d=576 dv=512", "attention_simt.f32.cuda.q64k64"}};
  for (const auto& [words, entry] : wanted) {
    const AttentionProblem problem =
        AttentionProblem::parse("attention device=cuda hq=16 hk=1 sq=1 sk=4096 latent " + words);
    INFO(problem.to_string());
    CHECK(Plan(problem, Context()).entry() == (has_entry(entry) ? entry : "attention_simt.f32.cuda.q64k64"));
  }
}

TEST_CASE("cuda host: explain names the kernel that an entry chooses", "[unit]") {
  const std::vector<EntryInfo> all = entries();
  if (std::none_of(all.begin(), all.end(), [](const EntryInfo& entry) { return entry.isa == "sm90a"; })) return;
  const std::vector<std::pair<std::string, std::string>> wanted = {
      // A GPU of 132 multiprocessors.
      {"b=64 hq=12 sq=197 d=64", "attention_prefill_unspecialized (128 rows x 128 keys, heads of 64, TMA)"},
      {"b=2 hq=8 sq=4096 sk=77 d=40", "attention_prefill_unspecialized (128 rows x 80 keys, heads of 48, TMA)"},
      {"b=2 hq=8 sq=4096 d=64", "attention_prefill_dense (192 rows x 128 keys, heads of 64, TMA)"},
      {"b=2 hq=8 sq=4096 d=64 causal", "attention_prefill_unspecialized (128 rows x 128 keys, heads of 64, TMA)"},
      {"b=2 hq=8 sq=4096 d=64 out=f32", "attention_prefill (192 rows x 128 keys, heads of 64, TMA)"},
      {"b=1 hq=8 sq=1024 d=64", "attention_prefill_unspecialized (128 rows x 128 keys, heads of 64, TMA)"},
      {"b=2 hq=8 sq=320 d=80", "attention_prefill_dense (64 rows x 96 keys, heads of 80, TMA)"},
      {"b=2 hq=8 sq=321 d=80", "attention_prefill_dense (192 rows x 96 keys, heads of 80, TMA)"},
      {"b=2 hq=8 sq=321 d=80 causal", "attention_prefill_dense (128 rows x 128 keys, heads of 80, TMA)"},
      {"b=2 hq=8 sq=321 d=88", "attention_prefill_dense (128 rows x 128 keys, heads of 128, TMA)"},
      {"b=2 hq=8 sq=321 d=96 seqlens", "attention_prefill (128 rows x 128 keys, heads of 96, TMA)"},
      {"b=2 hq=8 sq=321 d=192", "attention_prefill (128 rows x 64 keys, heads of 192, TMA)"},
      {"b=2 hq=8 sq=321 d=128 alibi align=bottom_right",
       "attention_prefill (128 rows x 64 keys, heads of 128, TMA, modifies scores)"},
      {"b=2 hq=8 hk=1 sq=2 sk=300 d=64 dropout=0.1",
       "attention_prefill (128 rows x 64 keys, heads of 64, TMA, modifies scores)"},
      {"b=2 hq=8 sq=321 d=256 kv=i8 groups=1", "attention_prefill (128 rows x 64 keys, heads of 256, widens codes)"},
      {"b=2 hq=8 hk=1 sq=2 sk=300 d=64", "attention_decode (16 rows, heads of 64)"},
      {"b=2 hq=8 hk=1 sq=2 sk=300 d=64 alibi align=bottom_right", "attention_decode (16 rows, heads of 64)"},
      {"b=2 hq=8 hk=1 sq=3 sk=300 d=64", "attention_decode_m64 (64 rows x 64 keys, heads of 64, TMA)"},
      {"b=2 hq=8 hk=1 sq=3 sk=300 d=64 kv=i8 groups=1", "attention_decode (32 rows, heads of 64)"},
      {"b=2 hq=8 hk=1 sq=3 sk=300 d=256 kv=i8 groups=1", "attention_decode (16 rows, heads of 256)"},
      {"b=2 hq=8 hk=1 sq=3 sk=300 d=64 q=f16 out=f16 kv=i8 groups=1",
       "attention_decode (8 rows, heads of 64, exact queries)"},
      {"b=2 hq=8 hk=1 sq=5 ragged_q=9 sk=300 d=64",
       "attention_prefill (192 rows x 128 keys, heads of 64, TMA), sequences of few rows by attention_decode_m64 (64 "
       "rows x 64 keys, heads of 64, TMA) and attention_decode (16 rows, heads of 64)"}};
  for (const auto& [words, kernel] : wanted) {
    AttentionProblem problem = AttentionProblem::parse("attention dtype=bf16 " + words);
    problem.device = DeviceType::cuda;
    INFO(problem.to_string());
    INFO(Plan(problem, Context()).explain());
    CHECK(Plan(problem, Context()).explain().find(" by " + kernel + "\n") != std::string::npos);
  }
}

TEST_CASE("cuda host: f8e4m3 products are opt-in, and say what they do not take", "[unit]") {
  const std::string products = "attention_prefill.f8e4m3.cuda.sm90a";
  const std::vector<EntryInfo> all = entries();
  if (std::none_of(all.begin(), all.end(), [&](const EntryInfo& entry) { return entry.name == products; })) return;
  const auto of = [](const std::string& words) {
    const std::string kv = words.find("kv=") == std::string::npos ? "kv=f8e4m3 " : "";
    AttentionProblem problem = AttentionProblem::parse("attention q=f8e4m3 hq=4 hk=2 sk=300 " + kv + words);
    problem.device = DeviceType::cuda;
    return problem;
  };
  const auto refusal = [&](const std::string& words) -> std::string {
    ContextOptions options;
    options.kernel = products;
    try {
      return Plan(of(words), Context(options)).entry() == products ? "" : "another entry runs";
    } catch (const Error& error) {
      return error.what();
    }
  };
  const Plan unforced(of("sq=300 d=128"), Context());
  CHECK(unforced.entry() != products);
  CHECK(unforced.explain().find(products +
                                ": only if forced: its weights are rounded to f8e4m3, which has bounds of its own") !=
        std::string::npos);
  for (const char* words :
       {"sq=300 d=64", "sq=1 d=128", "sq=70 d=128 causal align=bottom_right out=bf16", "sq=70 d=64 causal align=-30",
        "sq=70 d=64 window=-1,20 align=bottom_right", "b=3 sq=70 d=128 groups=1 head_scales q_scale lse",
        "sq=70 d=64 k_groups=1 head_scales", "sq=70 d=64 scale=-0.1", "sq=70 d=64 scale=0", "sq=70 d=64 layout=bshd",
        "sq=70 d=64 latent"}) {
    INFO(words);
    CHECK(refusal(words).empty());
  }
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"sq=70 d=72", "takes heads of 64 or 128 columns, of values as of keys"},
      {"sq=70 d=64 dv=128", "takes heads of 64 or 128 columns, of values as of keys"},
      {"sq=70 d=256", "takes other head dimensions"},
      {"sq=70 d=32", "takes other head dimensions"},
      {"sq=70 d=64 kv=bf16", "takes other element types"},
      {"sq=70 d=64 kv=f8e5m2", "takes other element types"},
      {"b=2 sq=70 d=64 ragged_q=90", "takes dense sequences of one length, which the host knows"},
      {"b=2 sq=70 d=64 ragged_k=400", "takes dense sequences of one length, which the host knows"},
      {"sq=70 d=64 seqlens", "takes dense sequences of one length, which the host knows"},
      {"sq=70 d=64 seqlens page=100", "takes dense sequences of one length, which the host knows"},
      {"sq=70 d=64 seqlens ring", "takes dense sequences of one length, which the host knows"},
      {"sq=70 d=64 gathered", "takes dense sequences of one length, which the host knows"},
      {"sq=70 d=64 softcap=20", "takes scores without modifiers and sinks"},
      {"sq=70 d=64 bias=hqk", "takes scores without modifiers and sinks"},
      {"sq=70 d=64 mask=qk", "takes scores without modifiers and sinks"},
      {"sq=70 d=64 alibi align=bottom_right", "takes scores without modifiers and sinks"},
      {"sq=70 d=64 sinks", "takes scores without modifiers and sinks"},
      {"sq=70 d=64 window=100,0 align=bottom_right", "takes no window to the left"},
      {"sq=70 d=64 groups=1", "takes scales of heads, without zeros"},
      {"sq=70 d=64 groups=2 head_scales", "takes scales of heads, without zeros"},
      {"sq=70 d=64 groups=1 head_scales zeros", "takes scales of heads, without zeros"}};
  for (const auto& [words, reason] : refused) {
    INFO(words << ": " << refusal(words));
    CHECK(refusal(words).find(reason) != std::string::npos);
  }
}

TEST_CASE("cuda host: dropout goes to tensor cores, or nowhere", "[unit]") {
  const auto plan = [](const std::string& words) {
    return Plan(AttentionProblem::parse("attention device=cuda b=2 hq=4 sq=300 d=64 dropout=0.1 " + words));
  };
  if (has_entry("attention_prefill.bf16.cuda.sm90a")) {
    CHECK(plan("dtype=bf16 mask=qk").entry() == "attention_prefill.bf16.cuda.sm90a");
    CHECK(plan("dtype=f16 sk=3 seqlens").entry() == "attention_prefill.f16.cuda.sm90a");
  } else {
    CHECK_THROWS_AS(plan("dtype=bf16"), Error);
  }
  for (const char* words : {"", "dtype=bf16 ragged_q=500", "dtype=bf16 kv=i8 groups=1", "dtype=bf16 kv=f16"})
    CHECK_THROWS_AS(plan(words), Error);
}

TEST_CASE("cuda host: gradients go to tensor cores where these take the call", "[unit]") {
  const auto entry = [](const std::string& words, const std::string& sizes = "d=64") {
    const std::string text = "attention_backward device=cuda b=2 hq=4 sq=300 " + sizes + " " + words;
    return Plan(AttentionBackwardProblem::parse(text)).entry();
  };
  const std::string naive = "attention_backward_naive.f32.cuda";
  if (!has_entry("attention_backward.bf16.cuda.sm90a")) {
    CHECK(entry("dtype=bf16") == naive);
    return;
  }
  for (const std::string type : {"bf16", "f16"}) {
    for (const char* words : {"", "hk=2 causal dlse", "window=10,-1 align=0 sinks dsinks", "seqlens", "grads=k",
                              "mask=qk bias=hqk", "softcap=9 alibi align=0", "dropout=0.1"})
      CHECK(entry("dtype=" + type + " " + words) == "attention_backward." + type + ".cuda.sm90a");
    CHECK(entry("dtype=" + type, "d=128 dv=40") == "attention_backward." + type + ".cuda.sm90a");
  }
  for (const char* words : {"", "dtype=bf16 bias=hqk dbias", "dtype=f16 alibi dalibi align=0", "mask=qk dropout=0.1",
                            "dtype=bf16 dout=f32"})
    CHECK(entry(words) == naive);
  for (const char* sizes : {"d=136", "d=64 dv=136"}) CHECK(entry("dtype=bf16", sizes) == naive);
  CHECK_THROWS_AS(entry("hk=1 gathered pool=500 sk=20"), Error);
}

TEST_CASE("cuda host: dS is kept where enough heads fit, and the largest problem has room for all", "[unit]") {
  const auto problem = [](const std::string& words) {
    return AttentionBackwardProblem::parse("attention_backward device=cuda dtype=bf16 d=64 " + words);
  };
  const auto bytes = [&](const std::string& words) { return Plan(problem(words)).workspace_bytes(); };
  const bool keeps = has_entry("attention_backward.bf16.cuda.sm90a");
  // Of heads of 4096 rows and keys eight fit, of heads of 8192 two. A head of 16384 has too much.
  CHECK((bytes("b=2 hq=16 sq=4096") >= 256u << 20) == keeps);
  CHECK((bytes("b=1 hq=2 sq=8192") >= 256u << 20) == keeps);
  CHECK((bytes("b=1 hq=8 hk=2 sq=1024") >= 16u << 20) == keeps);
  for (const char* words :
       {"b=1 hq=1 sq=16384", "b=1 hq=3 sq=8192", "b=2 hq=8 hk=2 sq=4096", "b=2 hq=16 sq=4096 grads=q",
        "b=2 hq=16 sq=4096 grads=kv", "b=1 hq=4 sq=1024 ragged_q=1024 ragged_k=1024", "b=0 hq=4 sq=1024"})
    CHECK(bytes(words) < 1u << 20);
  for (const char* largest : {"b=2 hq=4 sq=16384", "b=3 hq=4 sq=8192", "b=9 hq=4 hk=2 sq=3000 sk=5000"})
    for (const std::int64_t b : {1, 2, 3})
      for (const std::int64_t sq : {1, 64, 1000, 2048, 3000, 5793, 8192, 16384}) {
        AttentionBackwardProblem smaller = problem(largest);
        if (b > smaller.b || sq > smaller.sq) continue;
        smaller.b = b, smaller.sq = sq, smaller.sk = std::min(smaller.sk, sq);
        INFO(smaller.to_string());
        CHECK(Plan(smaller).workspace_bytes() <= max_workspace_bytes(problem(largest)));
      }
}

// A GPU that starts the thread blocks of attention_backward in order, `running` at a time, and ends them in any.
void simulate(const cuda::BackwardOrder& order, std::int64_t slots, int running) {
  struct Progress {
    int written = 0, read = 0;
  };
  std::vector<Progress> of_heads(static_cast<std::size_t>(order.heads));
  const auto of = [&](std::int64_t head) -> Progress& { return of_heads[static_cast<std::size_t>(head)]; };
  const auto may_end = [&](const cuda::BackwardOrder::Item& item) {
    if (!item.is_of_keys) return of(item.head).written == order.of_keys;
    return item.head < slots || of(item.head - slots).read == order.row_blocks;
  };
  std::vector<cuda::BackwardOrder::Item> at_work;
  std::set<std::tuple<bool, int, int>> met;
  std::mt19937 random(7);
  for (int n = 0; n < order.size() || !at_work.empty();) {
    while (n < order.size() && static_cast<int>(at_work.size()) < running) at_work.push_back(order.at(n++));
    std::shuffle(at_work.begin(), at_work.end(), random);
    const auto ended = std::find_if(at_work.begin(), at_work.end(), may_end);
    REQUIRE(ended != at_work.end());  // else all wait for ever
    const auto [is_of_keys, head, number] = *ended;
    REQUIRE((head >= 0 && head < order.heads && number >= 0 && number < (is_of_keys ? order.of_keys : order.of_rows)));
    REQUIRE(met.insert({is_of_keys, head, number}).second);
    if (is_of_keys) ++of(head).written;
    else if (number < order.row_blocks) ++of(head).read;
    at_work.erase(ended);
  }
  REQUIRE(static_cast<std::int64_t>(met.size()) == order.size());
}

TEST_CASE("cuda host: thread blocks that keep dS never wait for ever", "[unit]") {
  int reused = 0;
  for (const std::int64_t b : {1, 3, 20})
    for (const std::int64_t hk : {1, 2, 8})
      for (const std::int64_t group : {1, 3, 7})
        for (const std::int64_t sq : {64, 520, 1280})
          for (const std::int64_t sk : {1, 520, 3000}) {
            AttentionParams p{};
            p.b = b, p.hk = hk, p.group = group, p.sq = sq, p.sk = sk, p.total_q = p.total_k = -1;
            const cuda::DsSlots kept = cuda::ds_slots(p);
            const int sharers = cuda::key_sharers(p);
            p.k_len.data = somewhere(1);  // lengths, which a plan does not see
            const cuda::DsSlots with_lengths = cuda::ds_slots(p);
            INFO("b=" << b << " hk=" << hk << " group=" << group << " sq=" << sq << " sk=" << sk);
            REQUIRE((kept.slots == with_lengths.slots && kept.lag == with_lengths.lag));
            if (kept.slots == 0) continue;
            reused += kept.slots < b * hk;
            for (const int in_cluster : {1, sharers}) {
              const int row_blocks = static_cast<int>(group * ((sq + 255) / 256));
              const cuda::BackwardOrder order{static_cast<int>(b * hk), static_cast<int>(kept.lag),
                                              static_cast<int>((sk + 127) / 128) * in_cluster,
                                              (row_blocks + in_cluster - 1) / in_cluster * in_cluster, row_blocks};
              for (const int running : {1, 5, 132}) simulate(order, kept.slots, running);
            }
          }
  CHECK(reused > 20);
}

TEST_CASE("cuda host: thread blocks share the keys of long groups on few kv heads, whatever the batch", "[unit]") {
  const auto sharers = [](std::int64_t b, std::int64_t hk, std::int64_t group, std::int64_t tokens,
                          const float* lengths = nullptr) {
    AttentionParams p{};
    p.b = b, p.hk = hk, p.group = group, p.sq = p.sk = tokens, p.total_q = p.total_k = -1, p.k_len.data = lengths;
    return cuda::key_sharers(p);
  };
  for (const std::int64_t b : {1, 2, 64}) {
    CHECK(sharers(b, 4, 7, 1024) == 4);
    CHECK(sharers(b, 4, 7, 4096) == 2);
    CHECK(sharers(b, 2, 8, 4096) == 4);
    CHECK(sharers(b, 8, 4, 4096) == 1);  // as many thread blocks as occupy a GPU
    CHECK(sharers(b, 1, 4, 256) == 1);   // too few rows
    CHECK(sharers(b, 1, 64, 64) == 1);   // one tile of each head
    CHECK(sharers(b, 2, 1, 8192) == 1);  // no group
    CHECK(sharers(b, 4, 7, 4096, somewhere(1)) == 1);
  }
}

TEST_CASE("cuda host: index scores go to tensor cores where these take the call", "[unit]") {
  const auto entry = [](const std::string& words, const std::string& sizes = "h=64 d=128") {
    return Plan(IndexScoresProblem::parse("index_scores device=cuda sq=300 full " + sizes + " " + words)).entry();
  };
  const std::string simt = "index_scores.f32.cuda";
  const std::string tiles = has_entry("index_scores.bf16.cuda.sm90a") ? "index_scores.bf16.cuda.sm90a" : simt;
  for (const char* words : {"dtype=bf16", "dtype=bf16 topk=9 scores", "q=bf16 k=i8 scales", "q=bf16 k=f8e4m3 linear",
                            "q=bf16 k=f8e5m2 seqlens page=100 ranges"})
    CHECK(entry(words) == tiles);
  for (const char* sizes : {"h=1 d=16", "h=128 d=112"}) CHECK(entry("dtype=bf16", sizes) == tiles);
  for (const char* words : {"", "dtype=f16", "q=f32 k=bf16", "q=bf16 k=f16", "q=f16 k=i8 scales"})
    CHECK(entry(words) == simt);
  for (const char* sizes : {"h=129 d=128", "h=64 d=144", "h=64 d=8", "h=64 d=100"})
    CHECK(entry("dtype=bf16", sizes) == simt);
}

TEST_CASE("cuda host: scores to select from are in the workspace, of a portion of the queries at a time", "[unit]") {
  const auto problem = [](const std::string& words) {
    return IndexScoresProblem::parse("index_scores device=cuda dtype=bf16 h=8 d=64 full " + words);
  };
  constexpr std::size_t kAll = std::size_t{256} << 20;
  const auto bytes = [&](const std::string& words) { return Plan(problem(words)).workspace_bytes(); };
  CHECK(bytes("sq=8192 topk=9") == kAll);
  CHECK(bytes("b=100 sq=1000 topk=9") <= kAll);
  CHECK(bytes("b=100 sq=1000 topk=9") > kAll - 4 * 1000 * 1000);
  CHECK(bytes("b=2 sq=3 sk=100 topk=9") == 2560);  // 2400, in whole lines
  CHECK(bytes("sq=8192") == 0);
  CHECK(bytes("sq=8192 topk=9 scores") == 0);
  CHECK(bytes("sq=3 sk=100000000 topk=9") == 400000000);  // one query
  for (const char* largest :
       {"b=3 sq=5000 sk=9000 topk=9", "b=1 sq=3 sk=100000000 topk=9", "b=70 sq=1 sk=65536 topk=9"})
    for (const std::int64_t b : {1, 2, 3, 70})
      for (const std::int64_t sq : {1, 3, 1000, 5000})
        for (const std::int64_t sk : {1, 1000, 8191, 9000, 65536, 100000000}) {
          IndexScoresProblem smaller = problem(largest);
          if (b > smaller.b || sq > smaller.sq || sk > smaller.sk) continue;
          smaller.b = b, smaller.sq = sq, smaller.sk = sk;
          INFO(smaller.to_string());
          CHECK(Plan(smaller).workspace_bytes() <= max_workspace_bytes(problem(largest)));
        }

  const auto launches = [](std::int64_t b, std::int64_t sq, std::int64_t sk) {
    const auto on_device = [](auto view) {
      view.device = {DeviceType::cuda, 0};
      return view;
    };
    IndexScoresArgs args;
    args.q = on_device(TensorView(somewhere(1), {b, sq, 2, 16}));
    args.k = on_device(TensorView(somewhere(2), {b, sk, 16}));
    args.weights = on_device(TensorView(somewhere(3), {b, sq, 2}));
    auto* const indices = reinterpret_cast<std::int32_t*>(somewhere(4));
    args.indices = on_device(MutableTensorView(indices, {b, sq, 9}));
    args.causal = false;
    fake = FakeCuda();
    index_scores(args);
    return fake.launches;
  };
  CHECK(launches(1, 8192, 8192) == 2);
  CHECK(launches(1, 8193, 8192) == 4);
  CHECK(launches(5, 1000, 32768) == 6);  // two sequences, two, and one
  CHECK(launches(2, 2048, 65536) == 8);
}

TEST_CASE("cuda host: states are copied as wholes where they lie so", "[unit]") {
  alignas(16) std::byte memory[16];
  const auto of = [&](DType type) {
    DeltaRuleParams p{};
    p.b = 2, p.h = 3, p.d = 64, p.dv = 100;
    p.final = {memory, type, 3 * 6400, 6400, 100, 1};
    p.initial = p.final;
    return p;
  };
  const auto takes = [](const DeltaRuleParams& p) { return cuda::can_copy_states(p); };
  for (const DType type : {DType::f32, DType::bf16}) {
    const DeltaRuleParams good = of(type);
    CHECK(takes(good));
    DeltaRuleParams p = good;
    p.initial = {};
    CHECK(takes(p));
    std::swap(p.initial, p.final);
    CHECK(takes(p));
    p = good, p.initial.d_stride = 1, p.initial.dv_stride = 64;  // [d, dv] to [dv, d]
    CHECK_FALSE(takes(p));
    p.final = p.initial;
    CHECK(takes(p));
    p = good, p.final.d_stride = 101;
    CHECK_FALSE(takes(p));
    p = good, p.final.slot_stride += 1;
    CHECK_FALSE(takes(p));
    p = good, p.initial.head_stride += 2;
    CHECK_FALSE(takes(p));
    p = good, p.initial.data = static_cast<std::byte*>(p.initial.data) + 8;
    CHECK_FALSE(takes(p));
    p = good, p.b = 65536;
    CHECK_FALSE(takes(p));
  }
  DeltaRuleParams mixed = of(DType::f32);
  mixed.initial = of(DType::bf16).initial;
  CHECK_FALSE(takes(mixed));
}

TEST_CASE("cuda host: delta_rule_prefill takes bf16", "[unit]") {
  DeltaRuleParams p{};
  p.b = 3, p.h = 22, p.d = p.dv = 128;
  p.q.type = p.k.type = p.v.type = DType::bf16;
  CHECK(cuda::can_multiply_chunks(p));
  for (TokenRows DeltaRuleParams::*const rows : {&DeltaRuleParams::q, &DeltaRuleParams::k, &DeltaRuleParams::v})
    for (const DType other : {DType::f32, DType::f16}) {
      DeltaRuleParams mixed = p;
      (mixed.*rows).type = other;
      CHECK_FALSE(cuda::can_multiply_chunks(mixed));
    }
  p.b = std::int64_t{1} << 30;
  CHECK_FALSE(cuda::can_multiply_chunks(p));
  p.b = 1, p.t = std::int64_t{1} << 30;
  CHECK_FALSE(cuda::can_multiply_chunks(p));
}
