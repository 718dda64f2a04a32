// Queries of f8e4m3 over keys of the same type, mostly, on a GPU: on tensor cores, in bf16, and on ordinary cores.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "float8.hpp"
#include "support/fill.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using Test = std::function<void(Case&)>;

/// Scales where a case has none, for one that chooses the lengths itself.
void fill_scales(Case& c) {
  for (Tensor* scale : {&c.k_scale, &c.v_scale})
    for (std::int64_t i = 0; i < scale->size(); ++i)
      if (std::isnan(scale->flat(i))) scale->flat(i) = 1.5f;
}

}  // namespace

TEST_CASE("cuda: which entries take f8e4m3 queries, and what the others say", "[kernel]") {
  struct Call {
    const char* words;
    bool prefill, decode;   // whether the entries of bf16 take it
    bool products = false;  // and that of f8e4m3
  };
  constexpr Call kCalls[] = {{"kv=f8e4m3", true, true, true},
                             {"kv=f8e4m3 groups=1 head_scales q_scale out=bf16", true, true, true},
                             {"kv=f8e4m3 q_scale sinks causal align=bottom_right", true, true},
                             {"kv=f8e4m3 groups=1 q_scale", true, true},
                             {"kv=f8e4m3 groups=1 head_scales zeros", false, true},
                             {"kv=f8e4m3 groups=2 head_scales", false, true},
                             {"kv=f8e4m3 tail=16 tail_dtype=bf16 dv=48", false, false},
                             {"kv=f8e4m3 softcap=20", true, true},
                             {"kv=f8e4m3 mask=qk", true, true},
                             {"kv=f8e4m3 gathered", true, true},
                             {"kv=f8e4m3 scale=0", true, true, true},
                             {"kv=f8e5m2 q_scale", true, true},
                             {"kv=i8 groups=1 head_scales q_scale", true, true},
                             {"kv=i4x2 groups=1", true, true},
                             {"kv=f32", false, false},
                             {"kv=bf16 q_scale", false, false},
                             {"kv=f16 out=f16", false, false}};
  for (const EntryInfo& info : entries()) {
    if (info.operation != Operation::attention || info.backend != "cuda" || !info.unusable.empty()) continue;
    const std::string name(info.name);
    INFO(name);
    const bool ordinary = name == kSimt || name == "attention_naive.f32.cuda";
    for (const Call& call : kCalls) {
      const std::string refused = refusal(
          AttentionProblem::parse("attention q=f8e4m3 hq=4 hk=2 sq=3 sk=200 d=64 " + std::string(call.words)), name);
      INFO(call.words << ": " << refused);
      const bool takes = name == kPrefill    ? call.prefill
                         : name == kDecode   ? call.decode
                         : name == kProducts ? call.products
                                             : ordinary;
      CHECK((refused == "") == takes);
    }
    CHECK(refusal(AttentionProblem::parse("attention q=f8e4m3 kv=f8e4m3 sk=200 d=64 dropout=0.5"), name) != "");
  }
  const auto says = [](const std::string& entry, const char* words, const char* text) {
    if (!is_usable(entry)) return;
    const std::string refused =
        refusal(AttentionProblem::parse("attention q=f8e4m3 sk=200 d=64 " + std::string(words)), entry);
    INFO(entry << ": " << words << ": " << refused);
    CHECK(refused.find(text) != std::string::npos);
  };
  for (const char* entry : {kPrefill, kDecode})
    for (const char* words : {"kv=bf16", "kv=bf16 q_scale out=bf16"})
      says(entry, words, "takes f8e4m3 queries over quantised keys only");
  for (const char* entry : {"attention_prefill.f16.cuda.sm90a", "attention_decode.f16.cuda.sm90a"})
    for (const char* words : {"kv=f8e4m3", "kv=f16 q_scale"}) says(entry, words, "takes no f8e4m3 queries");
  says("attention_latent.bf16.cuda.sm90a", "kv=bf16", "takes other element types");
}

TEST_CASE("cuda: f8e4m3 prompts in every layout", "[kernel][long]") {
  constexpr const char* kLayouts[] = {
      "b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal align=bottom_right",
      "b=2 hq=4 hk=1 sq=90 sk=200 d=128 layout=bshd",
      "b=2 hq=6 hk=3 sq=70 sk=130 d=128 layout=bshd causal align=bottom_right",
      "b=2 hq=2 sq=70 sk=130 d=40 dv=72 layout=other",
      "hq=2 sq=70 sk=130 d=96 dv=16 layout=bhds",
      "b=3 hq=4 hk=1 sq=90 sk=120 d=40 ragged_q=200 ragged_k=250",
      "b=3 hq=4 hk=2 sq=150 sk=150 d=128 ragged_q=300 ragged_k=300 causal",
      "b=6 hq=8 hk=2 sq=70 sk=912 d=64 ragged_q=90 page=16 seqlens causal align=bottom_right",
      "b=2 hq=6 hk=2 sq=30 sk=320 d=128 page=64 seqlens causal align=bottom_right",
      "b=3 hq=2 sq=70 sk=120 d=80 page=1 seqlens",
      "b=3 hq=2 sq=70 sk=300 d=64 page=20 seqlens",
      "b=3 hq=2 sq=70 sk=312 d=192 dv=128 page=24 seqlens",
      "b=3 hq=4 hk=2 sq=70 sk=300 d=64 seqlens",
      "b=3 hq=3 sq=40 sk=300 d=80 ring seqlens window=200,0 align=bottom_right",
      "hq=4 hk=2 sq=90 sk=200 d=256 dv=192 window=80,-1 align=bottom_right",
      "hq=2 sq=300 sk=1301 d=64 window=600,0 align=bottom_right",
      "hq=2 sq=130 sk=140 d=48 causal align=-20"};
  each(kLayouts, kScales, [](Case& c) {
    for (const std::uint64_t seed : {2, 3, 4, 5}) {  // each way to broadcast
      if (!c.q_scale && seed > 3) continue;
      Case other(c.problem, seed);
      INFO("seed " << seed);
      check_on_gpu(other);
    }
  });
}

TEST_CASE("cuda: few rows over f8e4m3 keys in splits", "[kernel][long]") {
  constexpr const char* kFew[] = {
      "b=2 hq=8 hk=2 sq=1 sk=3008 d=128 page=16 seqlens sinks",
      "b=2 hq=4 sq=5 sk=2500 d=64 causal align=bottom_right alibi",
      "hq=16 hk=1 sq=4 sk=7000 d=40 dv=72",
      "b=2 hq=12 hk=2 sq=2 sk=1500 d=200 window=900,0 align=bottom_right bias=hqk softcap=20",
      "b=3 hq=3 sq=1 sk=2000 d=96 ring seqlens",
      "hq=4 hk=2 sq=1 sk=4097 d=64 window=4095,-1 align=bottom_right",
      "hq=4 hk=2 sq=1 sk=513 d=80 window=511,0 align=bottom_right",
      "b=2 hq=6 hk=2 sq=3 sk=900 d=256 dv=16 mask=bqk layout=bshd scale=-0.1",
      "b=2 hq=2 sq=3 sk=900 d=128 layout=other",
      "b=2 hq=64 hk=1 sq=1 sk=600 d=128",
      "b=2 hq=16 hk=2 sq=8 sk=1100 d=64 dv=128 causal align=bottom_right",
      "hq=7 hk=1 sq=9 sk=1000 d=34 dv=18",
      "b=20 hq=8 hk=1 sq=1 sk=40 d=80 seqlens",
      "b=2 hq=4 hk=2 sq=3 sk=77 d=128 causal align=bottom_right",
      "b=2 hq=8 hk=8 sq=1 sk=1536 d=192 dv=128 page=64 seqlens"};
  each(kFew, kScales, [](Case& c) {
    for (const std::uint64_t seed : {2, 3, 4, 5}) {
      if (!c.q_scale && seed > 3) continue;
      Case other(c.problem, seed);
      INFO("seed " << seed);
      check_on_gpu(other);
    }
  });
}

TEST_CASE("cuda: f8e4m3 heads of 1 to 256 columns", "[kernel][long]") {
  constexpr const char* kSizes[] = {
      "d=1",         "d=8",         "d=15",       "d=16",       "d=31",         "d=32",       "d=33",      "d=34",
      "d=40",        "d=63",        "d=64",       "d=65",       "d=72",         "d=80",       "d=96",      "d=100",
      "d=127",       "d=128",       "d=129",      "d=160",      "d=192",        "d=200",      "d=255",     "d=256",
      "d=64 dv=128", "d=128 dv=64", "d=256 dv=1", "d=1 dv=256", "d=192 dv=128", "d=37 dv=45", "d=96 dv=40"};
  constexpr const char* kMany = " hq=2 hk=1 sq=90 sk=210 causal align=bottom_right";
  constexpr const char* kFew = " b=2 hq=6 hk=2 sq=3 sk=700";
  for (const char* sizes : kSizes) {
    const std::string many = std::string(sizes) + kMany, few = std::string(sizes) + kFew;
    each(std::array{many.c_str()}, check_on_gpu);
    each(std::array{few.c_str()}, check_on_gpu);
  }
}

// Of which a thread block does one after another.
TEST_CASE("cuda: several tiles of f8e4m3 for each thread block", "[kernel][long]") {
  constexpr const char* kMany[] = {"hq=150 sq=40 sk=70 d=128",
                                   "hq=150 sq=40 sk=70 d=256 causal align=bottom_right",
                                   "hq=600 hk=150 sq=45 sk=130 d=64",
                                   "hq=450 hk=150 sq=60 sk=90 d=56",
                                   "b=90 hq=4 sq=200 sk=150 d=64 ragged_q=7000 ragged_k=5000",
                                   "b=300 hq=8 hk=1 sq=2 sk=300 d=64 seqlens"};
  each(kMany, [](Case& c) {
    // Fallback rows in some tiles, and none in those between.
    for (std::int64_t i = 5; i < c.q.size(); i += 97 * c.problem.d) c.q.flat<std::uint8_t>(i) = 0x7f;
    check_on_gpu(c);
  });
}

TEST_CASE("cuda: f8e4m3 over any number of keys, with NaN past them", "[kernel]") {
  static constexpr std::int64_t kLengths[] = {0,   1,   2,   31,  32,  33,  63,  64,  65,   127,  128, 129,
                                              223, 255, 256, 257, 383, 511, 512, 513, 1023, 1025, 1500};
  constexpr const char* kCounted[] = {"b=23 hq=2 hk=1 sq=70 sk=1500 d=64 seqlens",
                                      "b=23 hq=2 sq=40 sk=1500 d=128 seqlens causal align=bottom_right",
                                      "b=23 hq=8 hk=2 sq=1 sk=1500 d=128 seqlens",
                                      "b=23 hq=4 hk=1 sq=3 sk=1500 d=40 seqlens causal align=bottom_right"};
  each(kCounted, [](Case& c) {
    AttentionProblem without_lengths = c.problem;
    without_lengths.kv_lengths = false;
    const Case plain(without_lengths);
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      set_index(c.seqlens, n, kLengths[n]);
      for (Tensor Case::*t : {&Case::k, &Case::v}) {
        const std::int64_t size = (c.*t).size() / c.problem.b, row = t == &Case::k ? c.problem.d : c.problem.dv;
        for (std::int64_t i = 0; i < size; ++i)
          (c.*t).flat<std::uint8_t>(n * size + i) =
              i / row % c.problem.sk < kLengths[n] ? (plain.*t).flat<std::uint8_t>(n * size + i) : std::uint8_t(0x7f);
      }
    }
    fill_scales(c);
    check_on_gpu(c);
  });
}

// Whose errors would add up.
TEST_CASE("cuda: long f8e4m3 keys with values of one sign", "[kernel][long]") {
  constexpr const char* kLong[] = {"hq=2 sq=70 sk=4096 d=128", "hq=1 sq=66 sk=33000 d=64",
                                   "hq=2 hk=1 sq=200 sk=4096 d=64 causal align=bottom_right"};
  constexpr const char* kFew[] = {"hq=8 hk=1 sq=1 sk=4096 d=128", "b=2 hq=4 hk=1 sq=1 sk=33000 d=64",
                                  "hq=4 hk=1 sq=1 sk=40000 d=64 dv=32"};
  const Test test = [](Case& c) {
    check_on_gpu(c);
    make_positive(c.v);
    check_on_gpu(c);
    fill(c.v, 1.375f);
    check_on_gpu(c);
    make_positive(c.q), make_positive(c.k);
    check_on_gpu(c);
  };
  each(kLong, test);
  each(kFew, test);
}

TEST_CASE("cuda: f8e4m3 scores may rise by any amount from a block of keys to the next", "[kernel]") {
  constexpr const char* kRising[] = {"sq=70 sk=600 d=64 scale=1",
                                     "sq=300 sk=700 d=40 scale=1 causal align=bottom_right",
                                     "sq=100 sk=500 d=128 scale=1", "hq=4 hk=1 sq=5 sk=1500 d=64 scale=1"};
  each(kRising, std::array{kScales[0]}, [](Case& c) {
    const AttentionProblem& p = c.problem;
    for (const float step : {0.04f, 0.4f, 0.5f, 0.8f, 5.f, 9.f, 40.f, 80.f}) {
      for (std::int64_t head = 0; head < p.hq; ++head)
        for (std::int64_t row = 0; row < p.sq; ++row)
          c.q.at({0, head, row, 0}) = static_cast<float>(row % 5 - 1);  // -1 to 3
      for (std::int64_t key = 0; key < p.sk; ++key)
        c.k.at({0, 0, key, 0}) = step * static_cast<float>(p.sk / 64 - key / 64);
      INFO("step " << step);
      check_on_gpu(c);
    }
  });
}

TEST_CASE("cuda: sinks beside f8e4m3 keys", "[kernel]") {
  constexpr const char* kSinks[] = {"hq=2 sq=100 sk=300 d=64 sinks", "b=2 hq=8 hk=2 sq=2 sk=1100 d=128 sinks"};
  each(kSinks, [](Case& c) {
    for (const float sink : {-kInf, -1e30f, -1e4f, -20.f, 0.f, 2.f, 4.f, 6.f, 8.f, 9.f, 10.f, 11.f, 12.f, 14.f, 16.f,
                             20.f, 40.f, 100.f, 1e4f}) {
      fill(c.sinks, sink);
      INFO("sink " << sink);
      check_on_gpu(c);
    }
  });
}

// Whose weights are small, and then nothing.
TEST_CASE("cuda: a key far above many f8e4m3 keys", "[kernel]") {
  constexpr const char* kPeaks[] = {"hq=2 sq=80 sk=2000 d=64 scale=1", "hq=4 hk=2 sq=3 sk=5000 d=64 scale=1"};
  each(kPeaks, std::array{kScales[0]}, [](Case& c) {
    fill(c.q, 0), fill(c.k, 0);
    for (std::int64_t row = 0; row < c.q.size(); row += c.problem.d) c.q.flat(row) = 1;
    for (const float score : {0.f, 2.f, 4.f, 6.f, 8.f, 9.f, 10.f, 11.f, 12.f, 13.f, 14.f, 26.f, 88.f, 208.f, 448.f})
      for (const bool positive : {false, true}) {
        Case values(c.problem);
        for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = values.v.flat(i);
        if (positive) make_positive(c.v);
        for (std::int64_t i = 0; i < c.k.size(); ++i)
          if (i / c.problem.d % c.problem.sk == 777) c.k.flat(i) = i % c.problem.d == 0 ? score : 0;
        INFO("score " << score);
        check_on_gpu(c);
      }
  });
}

TEST_CASE("cuda: every modifier of f8e4m3 scores", "[kernel][long]") {
  constexpr const char* kModified[] = {"hq=4 hk=2 sq=130 sk=220 d=64", "b=2 hq=4 hk=1 sq=3 sk=900 d=80"};
  for (const char* shape : kModified)
    for (const char* words :
         {"softcap=20", "softcap=0.5", "alibi causal align=bottom_right", "bias=bhqk", "bias=k", "mask=qk", "mask=bhqk",
          "sinks causal align=bottom_right", "scale=0", "scale=-0.3", "scale=4", "scale=1e4", "window=30,9 align=100",
          "softcap=5 bias=hqk mask=qk alibi sinks window=90,0 align=bottom_right"}) {
      const std::string text = std::string(shape) + " " + words;
      each(std::array{text.c_str()}, check_on_gpu);
    }
}

TEST_CASE("cuda: NaN codes of f8e4m3 reach the rows that see them and no other", "[kernel]") {
  constexpr const char* kShapes[] = {
      "b=2 hq=4 hk=2 sq=70 sk=70 d=24 causal", "b=2 hq=4 hk=2 sq=70 sk=70 d=64 window=6,3",
      "b=2 hq=4 hk=2 sq=70 sk=70 d=128 mask=hqk", "b=2 hq=4 hk=2 sq=2 sk=700 d=64 causal align=500",
      "b=2 hq=8 hk=2 sq=1 sk=700 d=128 window=300,0 align=600"};
  each(kShapes, [](Case& plain) {
    std::map<std::string, std::vector<float>> before;
    for (const std::string& entry : on_gpu(plain.problem)) {
      run(plain.args(), entry);
      before[entry] = plain.out.values();
    }
    for (const std::int64_t key : {0, 1, 33, 68, 69})
      for (const bool in_key : {true, false}) {
        Case c(plain.problem);
        (in_key ? c.k : c.v).at<std::uint8_t>({1, 0, key, 5}) = key % 2 ? 0x7f : 0xff;
        const Reference reference = oracle(c.args());
        for (const auto& [entry, expected] : before) {
          const Errors errors = run_and_compare(c, entry, reference);
          INFO(entry << (in_key ? ": key " : ": value ") << key << ": " << describe(errors));
          CHECK(errors.ok());
          if (!in_key && !ignores_hidden_values(entry)) continue;
          // Rows that see no NaN have the bits that they had.
          const std::vector<float> out = c.out.values();
          const auto dv = static_cast<std::size_t>(c.problem.dv);
          for (std::size_t row = 0; row < out.size(); row += dv) {
            const auto first = reference.out.begin() + static_cast<std::ptrdiff_t>(row);
            if (std::any_of(first, first + static_cast<std::ptrdiff_t>(dv), [](double x) { return std::isnan(x); }))
              continue;
            for (std::size_t i = row; i < row + dv; ++i) REQUIRE(out[i] == expected[i]);
          }
        }
      }
    Case query(plain.problem);
    query.q.at<std::uint8_t>({1, 2, 0, 3}) = 0x7f;
    check_on_gpu(query);
    // The largest numbers, and denormals, of either sign.
    Case extreme(plain.problem);
    for (Tensor* t : {&extreme.q, &extreme.k, &extreme.v})
      for (const auto& [at, code] : {std::pair{0, 0x7e}, {1, 0xfe}, {2, 0x01}, {3, 0x87}, {4, 0x80}})
        t->at<std::uint8_t>({0, 1, 0, at}) = static_cast<std::uint8_t>(code);
    check_on_gpu(extreme);
  });
}

TEST_CASE("cuda: scales of f8e4m3 of any kind", "[kernel]") {
  constexpr const char* kShapes[] = {"b=2 hq=4 hk=2 sq=80 sk=150 d=40",
                                     "b=2 hq=4 hk=2 sq=80 sk=150 d=64 causal align=-9",
                                     "b=2 hq=8 hk=2 sq=2 sk=700 d=64"};
  each(kShapes, std::array{kScales[3]}, [](Case& plain) {
    for (Tensor Case::*of : {&Case::q_scale, &Case::k_scale, &Case::v_scale})
      for (const float scale : {0.f, -0.f, -3.f, 0x1p-60f, 0x1p60f, -0x1p60f, kNan, kInf, -kInf})
        for (const bool all : {false, true}) {
          Case c(plain.problem, 3);
          if (all) fill(c.*of, scale);
          else (c.*of).flat((c.*of).size() - 1) = scale;
          INFO((of == &Case::q_scale ? "q" : of == &Case::k_scale ? "k" : "v") << "_scale " << scale << " all " << all);
          if (c.problem.out_dtype == DType::f16 && of == &Case::v_scale && std::abs(scale) == 0x1p60f) continue;
          check_on_gpu(c);
        }
    // Of one size together, however large and small each is.
    Case c(plain.problem, 3);
    for (std::int64_t i = 0; i < c.q_scale.size(); ++i) c.q_scale.flat(i) *= 0x1p50f;
    for (std::int64_t i = 0; i < c.k_scale.size(); ++i) c.k_scale.flat(i) *= -0x1p-50f;
    check_on_gpu(c);
  });
}

TEST_CASE("cuda: f8e4m3 scores that are all alike, or all huge", "[kernel]") {
  constexpr const char* kShapes[] = {"hq=2 sq=100 sk=300 d=64", "b=2 hq=8 hk=2 sq=2 sk=1000 d=128",
                                     "hq=2 sq=300 d=128 causal sk=300"};
  each(kShapes, [](Case& plain) {
    for (const float value : {0.f, 0.25f, 448.f, -448.f})
      for (const bool of_values : {false, true}) {
        Case c(plain.problem);
        fill(c.q, value), fill(c.k, std::abs(value));
        if (of_values) fill(c.v, 0.6875f);
        INFO("value " << value);
        check_on_gpu(c);
      }
    // Of one row of a tile, of 5, of 9, of all.
    Case c(plain.problem);
    for (std::int64_t i = 0; i < c.k.size(); i += c.problem.d) c.k.flat(i) = 448;
    for (std::int64_t i = 0; i < c.q.size(); i += c.problem.d) {
      const std::int64_t row = i / c.problem.d % c.problem.sq;
      c.q.flat(i) = row == 3 || (row >= 70 && row < 75) || (row >= 200 && row < 209) || row >= 256 ? 448.f : 0.f;
    }
    c.problem.has_scale = true, c.problem.scale = 64;
    check_on_gpu(c);
  });
}

TEST_CASE("cuda: f8e4m3 keys that are read one by one give the bits of those that come in sixteens", "[kernel]") {
  constexpr const char* kRows[] = {"hq=2 sq=100 sk=250 d=64",
                                   "hq=2 sq=100 sk=77 d=128",
                                   "hq=4 hk=2 sq=330 sk=330 d=96 causal",
                                   "hq=2 sq=90 sk=400 d=192 window=120,-1 align=200",
                                   "b=2 hq=8 hk=2 sq=2 sk=900 d=128",
                                   "b=2 hq=8 hk=2 sq=1 sk=300 d=256"};
  each(kRows, [](Case& c) {
    std::vector<std::string> names = on_gpu(c.problem);
    std::erase(names, kProducts);  // leaves such keys to products of bf16
    std::vector<Bytes> in_sixteens;
    for (const std::string& entry : names) in_sixteens.push_back(expected(entry, c));
    for (Tensor* t : {&c.k, &c.v}) *t = with_rows_apart(*t, t->layout().shape[3] + 1);
    for (std::size_t i = 0; i < names.size(); ++i) {
      INFO(names[i]);
      CHECK(expected(names[i], c) == in_sixteens[i]);
    }
    for (Tensor* t : {&c.q, &c.out}) *t = with_rows_apart(*t, t->layout().shape[3] + 3);
    check_on_gpu(c);
    CHECK(c.out.gaps_intact());
  });
}

TEST_CASE("cuda: f8e4m3 bits depend on the sequence alone", "[kernel]") {
  constexpr const char* kBatches[] = {"b=4 hq=8 hk=2 sq=2 sk=9000 d=128 seqlens causal align=bottom_right",
                                      "b=4 hq=8 hk=2 sq=1 sk=9000 d=64 seqlens",
                                      "b=4 hq=4 hk=2 sq=150 sk=9000 d=128 seqlens causal align=bottom_right",
                                      "b=4 hq=4 hk=1 sq=70 sk=9000 d=40 dv=72 seqlens"};
  each(kBatches, [](Case& c) {
    constexpr std::int64_t kLengths[] = {9000, 700, 1600, 40};
    c = with_all_keys(c.problem);
    for (std::int64_t n = 0; n < c.problem.b; ++n) set_index(c.seqlens, n, kLengths[n]);
    // Fallback rows, too.
    c.q.at<std::uint8_t>({2, 3, 0, 5}) = 0x7f, c.k.at<std::uint8_t>({3, 0, 20, 5}) = 0x7f;
    for (const std::string& entry : on_gpu(c.problem)) {
      INFO(entry);
      const Bytes batch = expected(entry, c);
      for (int i = 0; i < 3; ++i) REQUIRE(expected(entry, c) == batch);
      c.poison_outputs();
      const DeviceCall call(c.args());
      for (std::int64_t n = 0; n < c.problem.b; ++n) attention(sequence(call.args(), n, kLengths[n]), forced(entry));
      call.finish();
      CHECK(Bytes(c) == batch);
    }
    check_on_gpu(c);
  });
}

// As a server does it: one graph for every step of decoding.
TEST_CASE("cuda: a captured f8e4m3 call follows lengths on the device", "[kernel]") {
  constexpr const char* kSteps[] = {"b=4 hq=8 hk=2 sq=1 sk=3000 d=128 seqlens",
                                    "b=4 hq=8 hk=2 sq=3 sk=3008 d=64 page=16 seqlens causal align=bottom_right",
                                    "b=4 hq=4 hk=2 sq=70 sk=3000 d=64 seqlens causal align=bottom_right"};
  each(kSteps, [](Case& c) {
    if (c.block_table) {
      for (std::int64_t i = 0; i < c.block_table.size(); ++i) set_index(c.block_table, i, i % c.k.layout().shape[0]);
      fill_normal(c.k, std::mt19937_64(1)), fill_normal(c.v, std::mt19937_64(2));
      fill_scales(c);
    } else {
      c = with_all_keys(c.problem);
    }
    for (const std::string& entry : on_gpu(c.problem)) {
      INFO(entry);
      const Stream stream;
      const DeviceCall call(c.args());
      const Graph graph(stream, [&] { attention(call.args(), on(stream, entry)); });
      for (const std::int64_t length : {3000, 1, 513, 64, 1600, 0}) {
        for (std::int64_t n = 0; n < c.problem.b; ++n)
          set_index(c.seqlens, n, n % 2 == 0 ? length : std::max<std::int64_t>(length - 7 * n, 0));
        const Bytes once = expected(entry, c);
        c.poison_outputs();
        check(cudaMemcpy(const_cast<void*>(call.args().kv.seqlens.data), c.seqlens.buffer().data(),
                         c.seqlens.buffer().size(), cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());
        graph.replay();
        call.finish();
        INFO("length " << length);
        CHECK(Bytes(c) == once);
      }
    }
  });
}
