// Attention's kernels on a GPU, where only a GPU can get them wrong: in tiles, head dimensions, layouts and splits of
// keys.
#include <algorithm>
#include <array>
#include <cmath>

#include "cases.hpp"
#include "exp2_sweep.hpp"
#include "support/fill.hpp"

using namespace rapt;
using namespace rapt::testing;

static constexpr DType kHalves[] = {DType::bf16, DType::f16};
static const Choice kPrefillOfHalves{.named = "attention_prefill", .types = kHalves};

TEST_CASE("cuda: exact fp32 on tensor cores takes heads of 16 to 256 columns", "[kernel]") {
  const std::string entry = "attention_prefill.f32.cuda.sm90a";
  if (!is_usable(entry)) return;
  for (std::int64_t size : {15, 16, 64, 65, 128, 129, 192, 193, 256, 257})
    for (bool of_values : {false, true}) {
      AttentionProblem problem = AttentionProblem::parse("attention sq=40 d=64 dv=64");
      (of_values ? problem.dv : problem.d) = size;
      const std::vector<std::string> names = every_entry(problem);
      INFO(problem.to_string());
      CHECK((std::find(names.begin(), names.end(), entry) != names.end()) == (size >= 16 && size <= 256));
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
    const bool by_simt = entry.find("prefill.f32") != entry.npos;
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
    check_on({entry}, c);
    run(other.args(), by_simt ? "attention_simt.f32.cuda.q64k64" : entry);
    for (std::int64_t head = 0; head < 2; ++head)
      for (std::int64_t row = 0; row < 300; ++row)
        for (std::int64_t i = 0; is_large(row) && i < c.problem.dv; ++i)
          REQUIRE(c.out.at({0, head, row, i}) == other.out.at({0, head, row, i}));
  };
  each_case(kWithFallback, test);
}

// More than there are multiprocessors, so that each goes from one to the next: with two and three warpgroups, heads
// that tensor maps of rows take and do not take, and fewer and more blocks of keys from tile to tile.
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
      "attention hq=100 sq=300 sk=300 d=64 causal align=top_left lse",
      "attention hq=60 sq=300 sk=300 d=128 causal align=top_left lse",
      "attention hq=150 sq=192 sk=520 d=64 lse",
      "attention hq=100 sq=257 sk=257 d=72 lse",
      "attention hq=50 sq=400 sk=200 d=80 lse",
      "attention b=90 hq=4 sq=200 sk=150 d=64 ragged_q=7000 ragged_k=5000 lse"};
  const auto make = [](const AttentionProblem& problem) {
    Case c(problem);
    // Fallback rows in some tiles, and none in those between.
    const float huge = c.problem.q_dtype == DType::f16 ? 6e4f : 1e9f;
    for (std::int64_t head = 0; c.problem.ragged_q < 0 && head < c.problem.hq; head += 7)
      for (const std::int64_t row : {3, 39, 70})
        if (row < c.problem.sq) c.q.at({0, head, row, 5}) = huge;
    for (std::int64_t row = 0; row < c.problem.ragged_q; row += 301) c.q.at({row, 1, 5}) = huge;
    return c;
  };
  check_each(kMany, {.make = make});
}

// Kernels go from the last block of keys to the first, and a row's shift may follow the blocks before: scores that
// rise, fall and stay from one to the next, by what weights can carry and by more.
TEST_CASE("cuda: scores may rise by any amount from a block of keys to the next", "[kernel]") {
  constexpr const char* kRising[] = {
      "attention sq=70 sk=600 d=64 scale=1 lse", "attention sq=300 sk=700 d=40 scale=1 causal align=bottom_right lse",
      "attention hq=2 sq=1400 sk=1400 d=64 scale=1 window=300,0 lse", "attention sq=100 sk=500 d=128 scale=1 lse"};
  const auto test = [](Case& c, const std::vector<std::string>& names) {
    const AttentionProblem& p = c.problem;
    for (const float step : {0.5f, 5.f, 9.f, 40.f, 80.f, 200.f}) {
      for (std::int64_t head = 0; head < p.hq; ++head)
        for (std::int64_t row = 0; row < p.sq; ++row)
          c.q.at({0, head, row, 0}) = static_cast<float>(row % 5 - 1);  // -1 to 3
      for (std::int64_t key = 0; key < p.sk; ++key)
        c.k.at({0, 0, key, 0}) = step * static_cast<float>(p.sk / 128 - key / 128);
      INFO("step " << step);
      check_on(names, c);
    }
  };
  each_problem(kRising, test);
}

// Weights that add up to nearly all that fp32 has, beside a sink or the keys before: none is lost.
TEST_CASE("cuda: weights near the largest float are not lost", "[kernel]") {
  const auto fill = [](Tensor& tensor, float value) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = value;
  };
  const auto sinks = [&](Case& c, const std::vector<std::string>& names) {
    fill(c.q, 0), fill(c.v, 0.5f);
    for (const float sink : {-80.f, -83.f, -86.f, -90.f, -1e4f, -1e30f}) {
      fill(c.sinks, sink);
      INFO("sink " << sink);
      check_on(names, c);
    }
  };
  constexpr const char* kSinks[] = {"attention sq=100 sk=100 d=64 sinks lse", "attention sq=70 sk=300 d=40 sinks lse"};
  each_problem(kSinks, sinks);
  const auto peak = [&](Case& c, const std::vector<std::string>& names) {
    fill(c.q, 0), fill(c.k, 0), fill(c.v, 0.5f);
    for (std::int64_t row = 0; row < c.problem.sq; ++row) c.q.at({0, 0, row, 0}) = 1;
    for (const float score : {80.f, 83.f, 86.f, 87.5f, 88.5f, 90.f, 200.f}) {
      c.k.at({0, 0, 200, 0}) = score;
      INFO("score " << score);
      check_on(names, c);
    }
  };
  constexpr const char* kPeaks[] = {"attention sq=100 sk=384 d=64 scale=1 lse",
                                    "attention sq=100 sk=256 d=64 scale=1 lse"};
  each_problem(kPeaks, peak);
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
  for (const char* sizes : kSizes)
    for (const char* shape : kShapes) {
      const std::string text = "attention " + std::string(sizes) + " " + shape;
      check_each(std::array{text.c_str()}, kPrefillOfHalves);
    }
  // Several tiles for each thread block.
  constexpr const char* kMany[] = {
      "attention hq=300 sq=40 sk=70 d=80 causal align=bottom_right lse",
      "attention hq=450 hk=150 sq=60 sk=90 d=72 dv=96 lse",
      "attention hq=200 sq=130 sk=100 d=48 window=30,0 align=bottom_right lse",
      "attention hq=40 sq=1300 sk=77 d=48 lse",
      "attention hq=40 sq=300 sk=70 d=64 lse",
      "attention hq=160 hk=20 sq=100 sk=1300 d=96 dv=88 window=90,0 align=bottom_right lse"};
  check_each(kMany, kPrefillOfHalves);
}

// Rows that are not whole 16 bytes are loaded by threads: in the same blocks of keys, whatever the head dimension.
TEST_CASE("cuda: rows that no tensor map takes give the bits of those that one takes", "[kernel]") {
  constexpr const char* kSizes[] = {"d=40", "d=64", "d=72", "d=80", "d=80 dv=64", "d=96", "d=128", "d=192"};
  constexpr const char* kShapes[] = {"hq=2 sq=100 sk=250 lse", "hq=2 sq=100 sk=77 lse", "hq=1 sq=1300 sk=70 lse",
                                     "hq=4 hk=2 sq=330 causal lse", "hq=2 sq=90 sk=400 window=120,-1 align=200 lse"};
  const auto test = [](const std::string& entry, Case& c) {
    const Bytes by_map = expected(entry, c);
    const auto apart = [](Tensor& t) { t = with_rows_apart(t, t.layout().shape[3] + 1); };
    apart(c.q);
    CHECK(expected(entry, c) == by_map);
    apart(c.k), apart(c.v);
    CHECK(expected(entry, c) == by_map);
  };
  for (const char* sizes : kSizes)
    for (const char* shape : kShapes) {
      const std::string text = "attention " + std::string(sizes) + " " + shape;
      each_case(std::array{text.c_str()}, test, kPrefillOfHalves);
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
  const auto make = [](const AttentionProblem& problem) {
    Case c(problem);
    for (Tensor* t : {&c.q, &c.k, &c.v, &c.out}) *t = with_rows_apart(*t, t->layout().shape[3] / 8 * 8 + 8);
    return c;
  };
  check_each(kRows, {.make = make});
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
      "attention b=2 hq=2 sq=3 sk=900 d=128 layout=other lse",
      "attention b=2 hq=32 hk=1 sq=1 sk=2000 d=64 dv=37 lse",
      "attention b=3 hq=8 hk=2 sq=1 sk=3000 d=64 mask=bk sinks lse",
      "attention b=2 hq=24 hk=2 sq=1 sk=1200 d=128 bias=k window=700,0 align=bottom_right lse",
      "attention b=3 hq=8 hk=2 sq=1 sk=1008 d=128 page=16 seqlens mask=bk bias=bk lse",
      "attention kv=i8 b=2 hq=4 hk=2 sq=1 sk=900 d=64 mask=k bias=bk groups=2 lse"};
  check_each(kSplitKeys);
}

// All rows of a sequence may share a mask and a bias, which are then loaded once for each key.
TEST_CASE("cuda: modifiers that heads share give the bits of those that each head has", "[kernel]") {
  constexpr const char* kShared[] = {"attention b=2 hq=8 hk=2 sq=1 sk=3000 d=64 mask=bk lse",
                                     "attention b=3 hq=12 hk=1 sq=1 sk=2100 d=128 bias=bk sinks lse",
                                     "attention b=2 hq=4 hk=2 sq=1 sk=700 d=80 mask=bk bias=bk lse",
                                     "attention b=2 hq=4 hk=2 sq=1 sk=900 d=256 bias=k scale=-0.1 lse",
                                     "attention b=2 hq=16 hk=1 sq=1 sk=900 d=40 bias=bk lse",
                                     "attention b=2 hq=4 hk=2 sq=1 sk=1520 d=64 page=16 seqlens mask=bk bias=bk lse"};
  const auto at_head = [](const Tensor& t, DType dtype, std::int64_t heads) {
    const auto [b, sk] = std::pair(t.layout().shape[0], t.layout().shape[3]);
    Tensor all(dtype, Dims{b, heads, 1, sk});
    for (std::int64_t i = 0; i < all.size(); ++i) {
      const std::int64_t at = i / (heads * sk) * sk + i % sk;
      if (dtype == DType::boolean) all.flat<bool>(i) = t.flat<bool>(at);
      else all.flat(i) = static_cast<float>(t.flat(at));
    }
    return all;
  };
  each_case(kShared, [&](const std::string& entry, Case& c) {
    const std::int64_t heads = c.problem.hq;
    const Tensor mask = std::move(c.mask);
    Tensor bias = std::move(c.bias);
    for (std::int64_t j = 0; bias && j < bias.size(); j += 37)
      bias.flat(j) = j % 2 ? -INFINITY : j % 4 ? 1000.f : -65000.f;
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      if (mask) c.mask = at_head(mask, DType::boolean, 1);
      if (bias) c.bias = at_head(bias, type, 1);
      const Bytes shared = expected(entry, c);
      if (mask) c.mask = at_head(mask, DType::boolean, heads);
      if (bias) c.bias = at_head(bias, type, heads);
      CHECK(expected(entry, c) == shared);
      if (!bias) break;
    }
  });
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
  check_each(kLatent);
}

// Around a block of keys, a thread block's and a cluster's; with NaN past each length.
TEST_CASE("cuda: latent attention over any number of keys", "[kernel]") {
  constexpr const char* kCounted[] = {
      "attention b=16 hq=16 hk=1 sq=1 sk=2100 d=576 dv=512 latent seqlens lse",
      "attention b=16 hq=24 hk=1 sq=3 sk=2100 d=576 dv=512 latent seqlens causal align=bottom_right lse"};
  const auto make = [](const AttentionProblem& problem) {
    constexpr std::int64_t kLengths[] = {0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1025, 2100};
    Case c = with_all_keys(problem);
    const std::int64_t size = c.k.size() / c.problem.b;
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      set_index(c.seqlens, n, kLengths[n]);
      for (std::int64_t i = kLengths[n] * c.problem.d; i < size; ++i) c.k.flat(n * size + i) = kNan;
    }
    return c;
  };
  check_each(kCounted, {.make = make});
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
