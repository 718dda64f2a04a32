// Sizes and numbers at which kernels that work in 16 bits, or split fp32 into pieces of 16 bits, go wrong first: edges
// of panels, blocks and key ranges, moving maxima, denormals, overflow, Inf and NaN.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

DType each_half() {
  return GENERATE(DType::bf16, DType::f16);
}

std::string words(std::initializer_list<std::pair<const char*, std::int64_t>> sizes) {
  std::string text = "attention";
  for (const auto& [key, value] : sizes) text += std::string(" ") + key + "=" + std::to_string(value);
  return text;
}

void scale_by(Tensor& tensor, float factor) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) *= factor;
}

void fill(Tensor& tensor, float value) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = value;
}

/// Runs `problem` as it is and with `intrude` done to its inputs; rows that `harmed` does not name keep their bits. Not
/// on entries that mind hidden values, where `values` says that these are what was done.
void check_others_keep_their_bits(const AttentionProblem& problem, const std::function<void(Case&)>& intrude,
                                  const std::function<bool(std::int64_t row)>& harmed, bool values = false) {
  Case before(problem), after(problem);
  intrude(after);
  const Reference reference = oracle(after.args());
  for (const std::string& entry : every_entry(problem)) {
    before.poison_outputs();
    run(before.args(), entry);
    const Errors errors = run_and_compare(after, entry, reference);
    INFO(entry << ": " << problem.to_string() << ": " << describe(errors));
    CHECK(errors.ok());
    const std::vector<float> x = before.out.values(), y = after.out.values();
    std::int64_t changed = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / problem.dv % problem.sq;
      if (!harmed(row)) changed += std::memcmp(&x[i], &y[i], sizeof(float)) != 0;
    }
    if (!values || ignores_hidden_values(entry)) CHECK(changed == 0);
  }
}

}  // namespace

TEST_CASE("halves: lengths on both sides of every edge", "[kernel][long]") {
  const DType dtype = each_half();
  const std::int64_t lengths[] = {1, 2, 31, 33, 63, 65, 127, 129, 257};
  const std::int64_t heads[] = {64, 40, 128, 31, 80};
  std::size_t turn = 0;
  for (std::int64_t sq : lengths) {
    for (std::int64_t sk : lengths) {
      const std::int64_t d = heads[turn++ % std::size(heads)];
      const char* causal = turn % 2 ? " causal align=bottom_right lse" : " lse";
      check_every_entry(typed(words({{"hq", 2}, {"hk", 1}, {"sq", sq}, {"sk", sk}, {"d", d}}) + causal, dtype));
    }
  }
}

TEST_CASE("halves: key ranges end anywhere", "[kernel][long]") {
  const DType dtype = each_half();
  for (std::int64_t sk : {255, 256, 257, 511, 513, 768, 1023, 1025, 2049}) {
    for (const char* what : {" lse", " causal align=bottom_right lse", " window=300,20 align=bottom_right lse"}) {
      check_every_entry(typed(words({{"sq", 33}, {"sk", sk}, {"d", 64}}) + what, dtype));
    }
    check_every_entry(typed(words({{"sq", 65}, {"sk", sk}, {"d", 128}}) + " causal align=bottom_right", dtype));
  }
}

TEST_CASE("halves: head dimensions", "[kernel]") {
  const DType dtype = each_half();
  for (std::int64_t d : {1, 8, 31, 40, 72, 80, 96, 100, 160, 256}) {
    for (std::int64_t dv : {d, std::int64_t{257} - d, std::int64_t{8}}) {
      check_every_entry(
          typed(words({{"hq", 2}, {"sq", 35}, {"sk", 131}, {"d", d}, {"dv", dv}}) + " causal align=9 lse", dtype));
    }
  }
  check_every_entry(typed("attention hq=3 hk=1 sq=33 sk=129 d=576 dv=512 causal align=bottom_right lse", dtype));
}

TEST_CASE("halves: groups, lengths, windows and layouts", "[kernel][long]") {
  const DType dtype = each_half();
  for (const char* text :
       {"attention b=2 hq=8 hk=8 sq=67 sk=130 d=64 lse", "attention b=2 hq=8 hk=1 sq=67 sk=130 d=64 lse",
        "attention hq=9 hk=3 sq=33 sk=257 d=72 causal align=bottom_right lse",
        "attention hq=8 hk=1 sq=1 sk=700 d=128 lse", "attention b=5 hq=4 hk=2 sq=70 sk=190 d=64 seqlens lse",
        "attention b=4 hq=3 hk=1 sq=90 sk=150 d=64 ragged_q=200 ragged_k=400 lse",
        "attention b=3 hq=2 sq=130 d=64 causal ragged_q=261 ragged_k=261 layout=bshd lse",
        "attention hq=2 sq=257 d=64 window=0,0 lse", "attention hq=2 sq=257 d=64 window=31,33 lse",
        "attention hq=2 sq=257 d=64 causal window=64,-1 lse", "attention hq=2 sq=129 d=64 layout=bhds causal lse",
        "attention hq=2 sq=129 d=40 layout=other causal lse",
        "attention b=2 hq=4 hk=2 sq=97 sk=161 d=80 bias=hqk mask=bk alibi sinks softcap=20 causal align=11 lse"}) {
    check_every_entry(typed(text, dtype));
  }
}

TEST_CASE("halves: fp32 results and fp32 queries", "[kernel]") {
  for (const char* types : {"q=bf16 kv=bf16", "q=f16 kv=f16", "kv=bf16", "kv=f16", "kv=bf16 out=bf16", "kv=f16 out=f16",
                            "q=bf16 kv=f16", "q=f16 kv=bf16 out=f16", "out=bf16", "out=f16"}) {
    for (const char* sizes : {" hq=4 hk=2 sq=33 sk=129 d=64 causal align=bottom_right lse",
                              " b=2 sq=70 sk=65 d=40 dv=72 mask=qk layout=other lse"}) {
      check_every_entry(AttentionProblem::parse("attention " + std::string(types) + sizes));
    }
  }
}

TEST_CASE("halves: denormals of f16 are numbers", "[kernel]") {
  for (const char* types : {"dtype=f16", "q=f16 kv=f16", "kv=f16"}) {
    const std::string text = "attention " + std::string(types);
    Case values(AttentionProblem::parse(text + " hq=2 sq=40 sk=130 d=64 lse"));
    scale_by(values.v, 1e-6f);
    check_every_entry(values);
    Case keys(AttentionProblem::parse(text + " hq=2 sq=40 sk=130 d=64 scale=100000 lse"));
    scale_by(keys.k, 1e-6f);
    check_every_entry(keys);
    Case queries(AttentionProblem::parse(text + " hq=2 sq=40 sk=130 d=64 scale=100000 lse"));
    scale_by(queries.q, 1e-6f);
    check_every_entry(queries);
  }
}

// Those of bf16 and fp32 may be flushed; what is beside them may not.
TEST_CASE("halves: denormals of bf16 and fp32 beside normal numbers", "[kernel]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  for (int which : {0, 1, 2}) {
    Case c(typed("attention hq=2 sq=67 sk=131 d=64 lse", dtype));
    Tensor& tensor = which == 0 ? c.q : which == 1 ? c.k : c.v;
    for (std::int64_t i = 0; i < tensor.size(); i += 5) tensor.flat(i) *= 1e-39f;
    check_every_entry(c);
    scale_by(tensor, 1e-39f);
    check_every_entry(c);
  }
}

TEST_CASE("halves: very large values", "[kernel]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  Case values(typed("attention hq=2 sq=40 sk=130 d=64 causal align=bottom_right lse", dtype));
  scale_by(values.v, 0x1p97f);
  check_every_entry(values);
  // Products stay small, but pieces of 16 bits of the largest float would be Inf.
  const float largest = dtype == DType::f32 ? kLargest : 0x1.fep127f;
  for (bool in_query : {true, false}) {
    Case c(typed("attention hq=2 sq=40 sk=130 d=16 lse", dtype));
    Tensor& large = in_query ? c.q : c.k;
    Tensor& small = in_query ? c.k : c.q;
    for (std::int64_t i = 0; i < large.size(); ++i) large.flat(i) = large.flat(i) < 0 ? -largest : largest;
    for (std::int64_t i = 0; i < small.size(); ++i) small.flat(i) = std::copysign(3e-38f, small.flat(i));
    check_every_entry(c);
  }
  Case half(typed("attention hq=2 sq=40 sk=130 d=64 scale=1e-9 lse", DType::f16));
  for (Tensor* tensor : {&half.q, &half.k, &half.v}) {
    for (std::int64_t i = 0; i < tensor->size(); ++i) tensor->flat(i) = std::copysign(65504.f, tensor->flat(i));
  }
  check_every_entry(half);
}

TEST_CASE("halves: results beyond the largest f16 are Inf", "[kernel]") {
  for (const char* types : {"q=bf16 kv=bf16 out=f16", "out=f16"}) {
    Case c(AttentionProblem::parse("attention " + std::string(types) + " sq=33 sk=70 d=8 dv=5 lse"));
    const float column[] = {1e5f, -1e5f, 59904, 1, 1e30f};
    for (std::int64_t j = 0; j < 70; ++j) {
      for (std::int64_t e = 0; e < 5; ++e) c.v.at({0, 0, j, e}) = column[e];
    }
    check_every_entry(c);
    for (const std::string& entry : every_entry(c.problem)) {
      c.poison_outputs();
      run(c.args(), entry);
      INFO(entry << ": " << c.problem.to_string());
      CHECK(c.out.flat(0) == kInf);
      CHECK(c.out.flat(1) == -kInf);
      CHECK(std::isfinite(c.out.flat(2)));
      CHECK(c.out.flat(4) == kInf);
    }
  }
}

// Row i asks for column i of the keys, so that every row of a panel has maxima of its own: a step up every `every` keys
// from a key of its own on, by factors of exp() from 1.3 over 2^10 and 2^100 to exp(1e6).
TEST_CASE("halves: maxima that move at other keys in every row", "[kernel][numbers]") {
  const DType dtype = each_type();
  constexpr std::int64_t kRows = 70, kKeys = 600, kSize = 64;
  for (const char* scale : {"0.25", "6.9314718", "69.314718", "1e4", "1e6"}) {
    for (std::int64_t every : {1, 13, 64, 100, 600}) {
      Case c(typed("attention sq=70 sk=600 d=64 lse scale=" + std::string(scale), dtype));
      const std::int64_t levels = std::min<std::int64_t>(40, kKeys / every);
      const auto level = [&](std::int64_t column, std::int64_t key) {
        const std::int64_t first = column * 37 % (kKeys - every * levels + 1);
        return std::clamp<std::int64_t>((key - first) / every, -1, levels - 1) + 1;
      };
      for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) += 1;  // means that are not small
      fill(c.q, 0);
      for (std::int64_t i = 0; i < kRows; ++i) c.q.at({0, 0, i, i % kSize}) = 1;
      for (std::int64_t j = 0; j < kKeys; ++j) {
        for (std::int64_t e = 0; e < kSize; ++e) c.k.at({0, 0, j, e}) = static_cast<float>(level(e, j));
      }
      check_every_entry(c);
      if (std::stof(scale) < 60) continue;
      // So far apart, only the highest keys count, all the same.
      for (const std::string& entry : every_entry(c.problem)) {
        c.poison_outputs();
        run(c.args(), entry);
        double worst = 0;
        for (std::int64_t i = 0; i < kRows; ++i) {
          const std::int64_t highest = level(i % kSize, kKeys - 1);
          double sum = 0, count = 0;
          for (std::int64_t j = 0; j < kKeys; ++j) {
            if (level(i % kSize, j) != highest) continue;
            sum += c.v.at({0, 0, j, 3});
            count += 1;
          }
          worst = std::max(worst, std::abs(sum / count - c.out.at({0, 0, i, 3})));
        }
        INFO(entry << ": " << c.problem.to_string() << " every " << every);
        CHECK(worst <= (dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 2e-3 : 1.6e-2));
      }
    }
  }
}

TEST_CASE("halves: one key far above or below the others", "[kernel]") {
  const DType dtype = each_type();
  for (std::int64_t key : {0, 1, 63, 64, 255, 256, 511, 512, 598, 599}) {
    for (const char* scale : {"1", "30", "1024", "-1024"}) {
      Case c(typed("attention sq=40 sk=600 d=8 lse scale=" + std::string(scale), dtype));
      fill(c.k, 0);
      for (std::int64_t i = 0; i < 40; ++i) c.q.at({0, 0, i, 0}) = i % 2 ? 1 : -1;
      c.k.at({0, 0, key, 0}) = 1;
      check_every_entry(c);
    }
  }
}

TEST_CASE("halves: scores of 1e4 pick the largest exactly", "[kernel]") {
  const DType dtype = each_half();
  constexpr float kSize = 9984;  // a number of either type
  Case c(typed("attention sq=2 sk=200 d=1 scale=1 lse", dtype));
  for (std::int64_t j = 0; j < 200; ++j) {
    const bool chosen = j == 150 || j == 3;
    c.k.flat(j) = chosen ? kSize : -kSize;
    c.v.flat(j) = chosen ? 2 : static_cast<float>(j % 2);
  }
  c.q.flat(0) = 1;
  c.q.flat(1) = -1;
  for (const std::string& entry : every_entry(c.problem)) {
    c.poison_outputs();
    run(c.args(), entry);
    INFO(entry << ": " << c.problem.to_string());
    CHECK(c.out.flat(0) == 2);
    CHECK(c.out.flat(1) == Approx(99 / 198.0).epsilon(0x1p-7));
    CHECK(c.lse.flat(0) == Approx(kSize + std::log(2.0)).margin(0x1p-7));
    CHECK(c.lse.flat(1) == Approx(kSize + std::log(198.0)).margin(0x1p-7));
  }
}

TEST_CASE("halves: what is wrong with a query stays in its row", "[kernel][numbers]") {
  const DType dtype = each_type();
  const AttentionProblem problem = typed("attention sq=97 sk=257 d=64 lse", dtype);
  const float denormal = dtype == DType::f16 ? 1e-7f : 1e-40f;
  for (std::int64_t row : {0, 15, 31, 32, 64, 96}) {
    for (float value : {kNan, kInf, -kInf, denormal}) {
      check_others_keep_their_bits(
          problem,
          [&](Case& c) {
            c.q.at({0, 0, row, 40}) = value;
          },
          [&](std::int64_t other) { return other == row; });
    }
  }
}

TEST_CASE("halves: what is wrong with a key or value stays with the rows that attend it", "[kernel][numbers]") {
  const DType dtype = each_type();
  const AttentionProblem problem = typed("attention sq=300 d=64 causal lse", dtype);
  auto turn = static_cast<std::size_t>(dtype);
  const float denormal = dtype == DType::f16 ? 1e-7f : 1e-40f;
  for (std::int64_t key : {0, 31, 63, 64, 127, 255, 256, 299}) {
    for (float value : {kNan, kInf, denormal}) {
      for (bool in_key : {true, false}) {
        if (!is_sampled(turn, 5)) continue;
        check_others_keep_their_bits(
            problem,
            [&](Case& c) {
              (in_key ? c.k : c.v).at({0, 0, key, 7}) = value;
            },
            [&](std::int64_t row) { return row >= key; }, !in_key && (dtype == DType::f32 || !std::isfinite(value)));
      }
    }
  }
}
