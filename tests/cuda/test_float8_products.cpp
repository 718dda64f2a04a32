// The entry that multiplies codes of f8e4m3, with weights of that type: it runs only where it is forced, and has bounds
// of its own. Most tests of test_float8.cpp are its, too, and those of streams and graphs.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "float8.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// As each() in float8.hpp, of this entry.
void each_forced(std::span<const char* const> problems, std::span<const char* const> scales,
                 const std::function<void(Case&)>& test) {
  each(problems, scales, [&](Case& c) {
    if (is_usable(kProducts)) test(c);
  });
}

void check_products(Case& c, const Reference& reference) {
  const Errors errors = run_and_compare(c, kProducts, reference);
  INFO(c.problem.to_string() << ": " << describe(errors));
  CHECK(errors.ok());
  CHECK(c.out.gaps_intact());
}
void check_products(Case& c, std::int64_t row_step = 1) {
  check_products(c, oracle(c.args(), row_step));
}

}  // namespace

TEST_CASE("cuda: dispatch leaves f8e4m3 products to those who force them", "[kernel]") {
  if (!is_usable(kProducts)) return;
  AttentionProblem problem = AttentionProblem::parse("attention q=f8e4m3 kv=f8e4m3 hq=2 sq=500 d=128 causal");
  problem.device = DeviceType::cuda;
  CHECK(Plan(problem, Context()).entry() == kPrefill);
  CHECK(Plan(problem, forced(kProducts)).entry() == kProducts);
  CHECK(info_of(kProducts).opt_in.find("only if forced") == 0);
  const std::string text = Plan(problem, Context()).explain();
  CHECK(text.find(std::string(kProducts) + ": only if forced") != std::string::npos);
}

TEST_CASE("cuda: f8e4m3 products of any number of rows and keys", "[kernel][long]") {
  constexpr int kSizes[] = {1,   2,   15,  16,  31,  32,  33,  63,  64,  65,  127,  128,
                            129, 191, 192, 193, 255, 256, 257, 383, 385, 511, 1000, 2049};
  std::vector<std::string> words;
  for (const int size : kSizes)
    for (const char* rest : {" d=64", " d=128 causal"})
      words.push_back("b=2 hq=2 hk=1 sq=" + std::to_string(size) + rest);
  for (const int keys : kSizes) {
    words.push_back("hq=2 sq=70 d=128 sk=" + std::to_string(keys));
    words.push_back("hq=3 sq=130 d=64 causal align=bottom_right sk=" + std::to_string(keys));
    words.push_back("hq=2 sq=300 d=128 causal align=top_left sk=" + std::to_string(keys));
  }
  for (const std::string& problem : words)
    each_forced(std::array{problem.c_str()}, std::array{kScales[2]}, [](Case& c) { check_products(c); });
}

TEST_CASE("cuda: f8e4m3 products with every mask, group, layout and scale", "[kernel][long]") {
  constexpr const char* kProblems[] = {"b=2 hq=8 hk=2 sq=200 sk=333 d=128 causal align=bottom_right",
                                       "b=2 hq=8 hk=1 sq=150 sk=600 d=64 causal align=300",
                                       "b=3 hq=6 hk=3 sq=300 sk=200 d=64 causal align=-40",
                                       "hq=2 sq=260 sk=700 d=128 causal align=-1000",  // no row has a key
                                       "hq=2 sq=260 sk=700 d=64 causal align=100000",  // all rows have all
                                       "hq=4 hk=2 sq=200 sk=500 d=128 window=-1,0 align=bottom_right",
                                       "hq=4 hk=2 sq=200 sk=500 d=64 window=-1,30 align=bottom_right",
                                       "b=2 hq=4 hk=4 sq=130 sk=290 d=128 layout=bshd causal align=bottom_right",
                                       "b=2 hq=4 hk=1 sq=130 sk=290 d=64 layout=bshd",
                                       "b=2 hq=2 sq=130 sk=290 d=64 layout=other",
                                       "b=2 hq=2 sq=130 sk=290 d=128 layout=bhds",
                                       "b=2 hq=16 hk=2 sq=1 sk=900 d=128",
                                       "b=2 hq=2 sq=130 sk=290 d=64 latent",
                                       "hq=2 sq=100 sk=300 d=64 scale=-0.2",
                                       "hq=2 sq=100 sk=300 d=128 scale=1",
                                       "hq=2 sq=100 sk=300 d=128 scale=1e-9",
                                       "hq=2 sq=100 sk=300 d=64 scale=0",
                                       "hq=2 sq=100 sk=300 d=64 scale=1e4 causal align=bottom_right"};
  each_forced(kProblems, kScales, [](Case& c) {
    for (const std::uint64_t seed : {2, 3, 4, 5}) {  // each way to broadcast; some scales are negative
      Case other(c.problem, seed);
      INFO("seed " << seed);
      check_products(other);
    }
  });
}

TEST_CASE("cuda: f8e4m3 products over thousands of keys, of values of either sign and of one", "[kernel][long]") {
  constexpr const char* kLong[] = {"hq=2 sq=4096 d=128", "hq=2 sq=4096 d=64 causal", "hq=2 sq=200 sk=20000 d=128",
                                   "hq=1 sq=130 sk=70000 d=64"};
  each_forced(kLong, std::array{kScales[0], kScales[2]}, [](Case& c) {
    const std::int64_t step = 37;
    check_products(c, step);
    make_positive(c.v);
    check_products(c, step);
    fill(c.v, 1.375f);
    check_products(c, step);
    fill(c.q, 0);  // all weights are equal
    check_products(c, step);
  });
}

// The shift follows the row's largest score only where it must: by less, more and far more than weights have room for.
TEST_CASE("cuda: f8e4m3 products whose scores rise and fall along the keys", "[kernel]") {
  constexpr const char* kRising[] = {"hq=2 sq=200 sk=1700 d=64 scale=1",
                                     "hq=2 sq=300 sk=1500 d=128 scale=1 causal align=bottom_right"};
  each_forced(kRising, std::array{kScales[0]}, [](Case& c) {
    const AttentionProblem& p = c.problem;
    for (const bool falling : {false, true})
      for (const std::int64_t keys : {1, 16, 64, 128, 600})  // that have a score
        for (const float step : {0.04f, 0.4f, 0.75f, 1.f, 2.f, 5.f, 9.f, 40.f}) {
          fill(c.q, 0), fill(c.k, 0);
          for (std::int64_t row = 0; row < p.hq * p.sq; ++row)
            c.q.flat(row * p.d) = static_cast<float>(row % 5 - 1);  // -1 to 3
          for (std::int64_t head = 0; head < p.hk; ++head)
            for (std::int64_t key = 0; key < p.sk; ++key) {
              const std::int64_t at = (falling ? p.sk - 1 - key : key) / keys;
              c.k.at({0, head, key, 0}) = std::min(step * static_cast<float>(at % 32), 448.f);
            }
          INFO("step " << step << " of " << keys << " keys" << (falling ? ", falling" : ""));
          check_products(c, 7);
        }
  });
}

// As V is transposed with room for more keys, and blocks of keys end past the last.
TEST_CASE("cuda: NaN codes among f8e4m3 products reach the rows that see them and no other", "[kernel]") {
  constexpr const char* kShapes[] = {"b=2 hq=4 hk=2 sq=300 sk=300 d=64 causal",
                                     "b=2 hq=4 hk=2 sq=150 sk=400 d=128 causal align=bottom_right",
                                     "b=2 hq=2 sq=70 sk=301 d=64"};
  each_forced(kShapes, std::array{kScales[0], kScales[2]}, [](Case& plain) {
    const AttentionProblem& p = plain.problem;
    const Bytes before = expected(kProducts, plain);
    for (const std::int64_t key : {0, 1, 63, 64, 127, 128, 255, 256, 299})
      for (const bool in_key : {true, false}) {
        Case c(p);
        (in_key ? c.k : c.v).at<std::uint8_t>({1, 0, key, 5}) = key % 2 ? 0x7f : 0xff;
        INFO((in_key ? "key " : "value ") << key);
        const Reference reference = oracle(c.args());
        check_products(c, reference);
        // The sequence before it has the bits that it had; and so have, where only scores are NaN, all other rows.
        const Bytes after(c);
        const auto half = static_cast<std::ptrdiff_t>(before.out.size() / 2);
        CHECK(std::equal(before.out.begin(), before.out.begin() + half, after.out.begin()));
        if (!in_key) continue;
        const auto row_bytes = static_cast<std::ptrdiff_t>(before.out.size()) / (p.b * p.hq * p.sq);
        for (std::ptrdiff_t row = 0; row < p.b * p.hq * p.sq; ++row) {
          if (std::isnan(reference.out[static_cast<std::size_t>(row * p.dv)])) continue;
          const auto at = before.out.begin() + row * row_bytes;
          REQUIRE(std::equal(at, at + row_bytes, after.out.begin() + row * row_bytes));
        }
      }
    Case query(p);
    query.q.at<std::uint8_t>({1, 1, 17, 3}) = 0x7f;
    check_products(query);
    Case scale(p);
    for (Tensor Case::*of : {&Case::k_scale, &Case::v_scale})
      for (const float x : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 0.f, -2.f, 0x1p60f}) {
        if (!(scale.*of)) continue;
        Case other(p);
        if (p.out_dtype == DType::f16 && x == 0x1p60f) continue;
        (other.*of).flat(0) = x;
        INFO("scale " << x);
        check_products(other);
      }
  });
}

TEST_CASE("cuda: a sequence and a head of f8e4m3 products have their bits alone, in any batch and at any time",
          "[kernel]") {
  constexpr const char* kBatches[] = {"b=5 hq=8 hk=2 sq=300 sk=700 d=128 causal align=bottom_right",
                                      "b=3 hq=4 hk=4 sq=130 sk=1500 d=64", "b=70 hq=4 hk=2 sq=200 d=64 causal"};
  each_forced(kBatches, std::array{kScales[0], kScales[2]}, [](Case& c) {
    // Fallback rows, too.
    c.q.at<std::uint8_t>({1, 3, 0, 5}) = 0x7f, c.v.at<std::uint8_t>({2, 0, 20, 5}) = 0x7f;
    const Bytes batch = expected(kProducts, c);
    for (int i = 0; i < 20; ++i) REQUIRE(expected(kProducts, c) == batch);
    c.poison_outputs();
    const DeviceCall sequences(c.args());
    for (std::int64_t n = 0; n < c.problem.b; ++n)
      attention(sequence(sequences.args(), n, c.problem.sk), forced(kProducts));
    sequences.finish();
    CHECK(Bytes(c) == batch);
    // By kv head.
    const std::int64_t group = c.problem.hq / c.problem.hk;
    c.poison_outputs();
    const DeviceCall heads(c.args());
    for (std::int64_t h = 0; h < c.problem.hk; ++h) {
      AttentionArgs args = heads.args();
      args.q = slice(args.q, 1, h * group, group), args.out = slice(args.out, 1, h * group, group);
      args.lse = slice(args.lse, 1, h * group, group);
      for (TensorView* t : {&args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale})
        if (*t && t->shape[1] > 1) *t = slice(*t, 1, h, 1);
      attention(args, forced(kProducts));
    }
    heads.finish();
    CHECK(Bytes(c) == batch);
  });
}

TEST_CASE("cuda: a row's f8e4m3 products do not depend on what lies past its keys, nor on lse", "[kernel]") {
  constexpr const char* kShapes[] = {"hq=2 sq=300 sk=300 d=64 causal", "hq=2 sq=300 sk=300 d=128 causal"};
  each_forced(kShapes, std::array{kScales[0]}, [](Case& c) {
    const Bytes all = expected(kProducts, c);
    Case others(c.problem, 9);
    const auto hidden = [](std::int64_t key) { return key >= 150; };
    for (Tensor Case::*t : {&Case::k, &Case::v})
      for (std::int64_t i = 0; i < (c.*t).size(); ++i)
        if (hidden(i / c.problem.d % c.problem.sk)) (c.*t).flat(i) = (others.*t).flat(i);
    const Bytes changed = expected(kProducts, c);
    const auto row_bytes = static_cast<std::ptrdiff_t>(all.out.size()) / (c.problem.hq * c.problem.sq);
    for (std::ptrdiff_t head = 0; head < c.problem.hq; ++head) {
      const auto at = head * c.problem.sq * row_bytes;
      CHECK(std::equal(all.out.begin() + at, all.out.begin() + at + 150 * row_bytes, changed.out.begin() + at));
    }
    c.poison_outputs();
    AttentionArgs args = c.args();
    args.lse = {};
    run(args, kProducts);
    CHECK(Bytes(c).out == changed.out);
  });
}

TEST_CASE("cuda: rows that f8e4m3 products cannot have are multiplied in bf16", "[kernel]") {
  constexpr const char* kRows[] = {"hq=2 sq=100 sk=250 d=64", "b=2 hq=4 hk=2 sq=330 d=128 causal"};
  each_forced(kRows, std::array{kScales[0], kScales[2]}, [](Case& plain) {
    for (Tensor Case::*of : {&Case::q, &Case::k, &Case::v}) {
      Case c(plain.problem);
      c.*of = with_rows_apart(c.*of, c.problem.d + 8);  // 16 bytes are no multiple
      CHECK(expected(kProducts, c) == expected(kPrefill, c));
      check_products(c);
      Case aligned(plain.problem);
      aligned.*of = with_rows_apart(aligned.*of, c.problem.d + 16);
      CHECK(expected(kProducts, aligned) == expected(kProducts, plain));
    }
  });
  // A scale to a row.
  each_forced(kRows, std::array{kScales[1], kScales[3]}, [](Case& plain) {
    Case c(plain.problem, 3), of_heads(plain.problem, 5);
    REQUIRE(c.q_scale.layout().shape[2] == c.problem.sq);
    CHECK(expected(kProducts, c) == expected(kPrefill, c));
    check_products(c);
    REQUIRE(of_heads.q_scale.layout().shape[2] == 1);
    CHECK_FALSE(expected(kProducts, of_heads) == expected(kPrefill, of_heads));
    check_products(of_heads);
  });
}
