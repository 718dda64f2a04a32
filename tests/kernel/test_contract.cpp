// The table of docs/contract.md, row by row, on every entry. Bad input is in unit_validation.cpp of
// tests/operations/attention, NaN and Inf in its kernel_nonfinite.cpp.
#include <cmath>
#include <limits>

#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// Every element of out and lse of row (n, h, i).
void check_empty_row(const Case& c, std::int64_t n, std::int64_t h, std::int64_t i) {
  for (std::int64_t e = 0; e < c.problem.dv; ++e) CHECK(c.out.at({n, h, i, e}) == 0);
  CHECK(c.lse.at({n, h, i}) == -kInf);
}

/// Runs the case on every entry and hands it to `check` with the results in place.
template <class Check>
void with_every_entry(Case& c, Check check) {
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.poison_outputs();
    run(c.args(), entry);
    check();
  }
}

}  // namespace

TEST_CASE("query head h reads kv head floor(h / g)", "[kernel]") {
  const DType dtype = each_type();
  Case c(typed("attention b=2 hq=15 hk=3 sq=4 sk=9 d=8", dtype));
  const std::int64_t group = 5;
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = static_cast<float>(i / (9 * 8));
  with_every_entry(c, [&] {
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t h = 0; h < 15; ++h) {
        const double epsilon = dtype == DType::f32 ? 1e-6 : 0x1p-7;
        CHECK(c.out.at({n, h, 3, 7}) == Approx(static_cast<double>(n * 3 + h / group)).epsilon(epsilon));
      }
    }
  });
}

TEST_CASE("scale defaults to d^-1/2 and may be zero or negative", "[kernel]") {
  const DType dtype = each_type();
  Case implicit(typed("attention sq=20 d=64", dtype)), given(typed("attention sq=20 d=64 scale=0.125", dtype));
  for (const std::string& entry : every_entry(given.problem)) {
    run(implicit.args(), entry);
    run(given.args(), entry);
    INFO(entry);
    CHECK(same_bits(implicit.out, given.out));
  }
  check_every_entry(typed("attention hq=2 sq=20 sk=70 d=24 scale=0 lse", dtype));
  check_every_entry(typed("attention hq=2 sq=20 sk=70 d=24 scale=-0.3 lse", dtype));
  check_every_entry(typed("attention hq=2 sq=20 sk=70 d=24 scale=-0.3 causal align=bottom_right softcap=5 lse", dtype));
}

TEST_CASE("align places row 0 among the keys", "[kernel]") {
  for (const char* align : {"top_left", "bottom_right", "-7", "-3", "0", "5", "31", "200", "-200"}) {
    for (const char* what : {"causal", "window=4,2", "alibi", "causal window=9,-1 alibi"}) {
      const std::string tail = std::string(" d=16 lse ") + what + " align=" + align;
      check_every_type("attention hq=2 sq=11 sk=37" + tail);
      check_every_type("attention hq=2 sq=37 sk=11" + tail);
    }
  }
}

TEST_CASE("bottom_right follows the length of each sequence", "[kernel]") {
  for (std::uint64_t seed : {1, 2, 3}) {
    check_every_type("attention b=5 hq=2 sq=13 sk=40 d=16 causal align=bottom_right lse seqlens", seed);
    check_every_type("attention b=5 hq=2 sq=13 sk=40 d=16 causal align=bottom_right lse ragged_q=40 ragged_k=90", seed);
  }
}

TEST_CASE("equal lengths need no align", "[kernel]") {
  check_every_type("attention b=2 hq=3 sq=50 d=16 causal lse");
  check_every_type("attention b=3 sq=50 d=16 causal window=3,3 alibi lse ragged_q=77 ragged_k=77 layout=bshd");
  check_every_type("attention b=3 sq=50 d=16 causal lse seqlens");
}

TEST_CASE("extreme offsets and windows do not overflow", "[kernel]") {
  // Offsets reach 2^52 either way, windows the end of int64.
  const std::string far = std::to_string(std::int64_t{1} << 52);
  const std::string largest = std::to_string(std::numeric_limits<std::int64_t>::max());
  for (const std::string& offset : {far, "-" + far}) {
    check_every_type("attention sq=5 sk=9 d=8 causal lse align=" + offset);
    check_every_type("attention sq=5 sk=9 d=8 window=3,4 lse align=" + offset);
    check_every_type("attention sq=5 sk=9 d=8 window=" + far + ",4 causal lse align=" + offset);
    check_every_type("attention sq=5 sk=9 d=8 window=3," + largest + " lse align=" + offset);
  }
  check_every_type("attention sq=5 sk=9 d=8 lse align=2 window=" + largest + "," + largest);
  check_every_type("attention sq=5 sk=9 d=8 causal lse align=-2 window=" + largest + ",0");
}

TEST_CASE("windows of every kind, with and without causal", "[kernel]") {
  for (const char* window : {"0,0", "5,0", "0,5", "-1,3", "3,-1", "17,2", "64,64", "1000,1000"}) {
    for (const char* causal : {"", " causal"}) {
      check_every_type("attention hq=2 sq=150 d=16 lse window=" + std::string(window) + causal);
    }
  }
}

TEST_CASE("bias and mask broadcast over any dimensions", "[kernel][long]") {
  for (const char* full :
       {"1", "k", "q", "qk", "h", "hk", "hq", "hqk", "b", "bk", "bq", "bqk", "bh", "bhk", "bhq", "bhqk"}) {
    for (std::uint64_t seed : {1, 2}) {  // with and without leading dimensions of size 1
      const std::string sizes = "attention b=2 hq=4 hk=2 sq=19 sk=45 d=16 lse";
      check_every_type(sizes + " bias=" + full, seed);
      check_every_type(sizes + " mask=" + full, seed);
      check_every_type(sizes + " bias=" + full + " mask=" + full + " layout=other", seed);
      check_every_type(sizes + " ragged_q=30 ragged_k=70 bias=" + full + " mask=" + full, seed);
    }
  }
}

TEST_CASE("bias, slopes and sinks of 16 bits", "[kernel]") {
  for (const char* type : {"bf16", "f16"}) {
    const std::string tail = std::string(" lse bias_dtype=") + type;
    check_every_type("attention b=2 hq=4 hk=2 sq=19 sk=45 d=16 bias=bhqk sinks" + tail);
    check_every_type("attention hq=4 sq=70 sk=150 d=32 causal align=bottom_right alibi sinks bias=k layout=other" +
                     tail);
    check_every_type("attention b=2 hq=4 hk=1 sq=1 sk=900 d=64 alibi align=bottom_right sinks bias=hk" + tail);
  }
}

TEST_CASE("bias and mask repeat along strides of zero", "[kernel]") {
  Case c(typed("attention b=2 hq=2 sq=7 sk=33 d=8 lse bias=k mask=k", each_type()));
  AttentionArgs args = c.args();
  const auto expanded = [](const TensorView& row) {
    TensorView full = row;
    full.ndim = 4;
    full.shape = {2, 2, 7, 33};
    full.strides = {0, 0, 0, row.strides[static_cast<std::size_t>(row.ndim - 1)]};
    return full;
  };
  args.score.bias = expanded(args.score.bias);
  args.score.mask = expanded(args.score.mask);
  check_every_entry(c, args);
}

TEST_CASE("a fully masked row gives zeros and lse -inf", "[kernel]") {
  Case c(typed("attention b=1 hq=2 sq=6 sk=40 d=8 dv=24 lse mask=hqk bias=hqk", each_type()));
  for (std::int64_t j = 0; j < 40; ++j) {
    c.mask.flat<bool>((0 * 6 + 2) * 40 + j) = false;                                   // by the mask
    c.bias.flat((1 * 6 + 5) * 40 + j) = -kInf;                                         // by the bias
    c.mask.flat<bool>((1 * 6 + 1) * 40 + j) = c.bias.flat((1 * 6 + 1) * 40 + j) < -9;  // by both together
  }
  with_every_entry(c, [&] {
    check_empty_row(c, 0, 0, 2);
    check_empty_row(c, 0, 1, 5);
    check_empty_row(c, 0, 1, 1);
  });
  check_every_entry(c);
}

TEST_CASE("rows above the first key are empty", "[kernel]") {
  Case c(typed("attention sq=40 sk=8 d=8 causal align=bottom_right lse", each_type()));
  with_every_entry(c, [&] {
    for (std::int64_t i = 0; i < 32; ++i) check_empty_row(c, 0, 0, i);
    CHECK(c.lse.at({0, 0, 32}) > -kInf);
  });
}

TEST_CASE("no keys at all give zeros and lse -inf", "[kernel]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=2 hq=2 sq=3 sk=0 d=8 lse", "attention b=2 hq=2 sq=3 sk=0 d=8 lse seqlens",
                           "attention b=2 hq=2 sq=3 sk=0 d=8 lse ragged_k=0"}) {
    Case c(typed(text, dtype));
    with_every_entry(c, [&] {
      for (std::int64_t n = 0; n < 2; ++n) {
        for (std::int64_t i = 0; i < 3; ++i) check_empty_row(c, n, 1, i);
      }
    });
  }
}

TEST_CASE("nothing is written when b, hq or sq is 0", "[kernel]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=0 hq=2 sq=3 d=8 lse", "attention b=1 hq=0 hk=1 sq=3 d=8 lse",
                           "attention b=2 hq=2 sq=0 sk=5 d=8 lse", "attention b=2 sq=0 sk=5 d=8 lse ragged_q=0"}) {
    Case c(typed(text, dtype));
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      CHECK_NOTHROW(run(c.args(), entry));
    }
  }
}

TEST_CASE("lse is the natural log of the sum of exp", "[kernel]") {
  Case c(AttentionProblem::parse("attention sq=1 sk=4 d=1 scale=1 lse"));
  c.q.flat(0) = 1;
  for (std::int64_t j = 0; j < 4; ++j) c.k.flat(j) = static_cast<float>(j);
  with_every_entry(c, [&] { CHECK(c.lse.flat(0) == Approx(3.4401896985611953).epsilon(3e-7)); });
}

TEST_CASE("a sink adds to the denominator only", "[kernel]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=1 sk=2 d=1 scale=1 sinks lse"));
  for (std::int64_t i = 0; i < 2; ++i) c.q.flat(i) = 0;
  for (std::int64_t i = 0; i < 4; ++i) c.v.flat(i) = 6;
  c.sinks.flat(0) = 0;
  c.sinks.flat(1) = -kInf;
  with_every_entry(c, [&] {
    CHECK(c.out.flat(0) == Approx(4).epsilon(1e-6));
    CHECK(c.lse.flat(0) == Approx(std::log(3.0)).epsilon(1e-6));
    CHECK(c.out.flat(1) == Approx(6).epsilon(1e-6));
    CHECK(c.lse.flat(1) == Approx(std::log(2.0)).epsilon(1e-6));
  });
}

TEST_CASE("a row without keys is 0 beside a sink, which is all of its lse", "[kernel]") {
  Case c(AttentionProblem::parse("attention sq=4 sk=2 d=8 causal align=bottom_right sinks lse"));
  c.sinks.flat(0) = 1;
  with_every_entry(c, [&] {
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t j = 0; j < 8; ++j) CHECK(c.out.at({0, 0, i, j}) == 0);
      CHECK(c.lse.at({0, 0, i}) == Approx(1).epsilon(1e-6));
    }
  });
  check_every_type("attention sq=282 sk=223 d=39 causal window=14,70 align=-182 sinks lse");
  check_every_type("attention hq=2 sq=60 sk=223 d=16 causal align=-30 sinks mask=qk lse");
}

TEST_CASE("softcap comes before bias, alibi and masks", "[kernel]") {
  check_every_type("attention hq=4 hk=2 sq=33 sk=80 d=16 scale=3 softcap=2.5 bias=hqk mask=qk alibi align=7 lse");
  check_every_type("attention hq=2 sq=33 d=64 softcap=50 causal lse");
  check_every_type("attention hq=2 sq=33 d=64 scale=2000 softcap=0.5 lse");
  check_every_type("attention hq=2 sq=33 d=64 scale=0.001 softcap=1000 lse");
}

TEST_CASE("v may be wider or narrower than q and k", "[kernel]") {
  for (const char* sizes : {"d=576 dv=512", "d=1 dv=576", "d=576 dv=1", "d=192 dv=128", "d=64 dv=65"}) {
    check_every_type("attention hq=2 hk=1 sq=5 sk=130 lse causal align=bottom_right " + std::string(sizes));
  }
}

// Keys are a part of their values, not the other way round, as in latent attention.
TEST_CASE("keys may be columns of values that are longer", "[kernel]") {
  const DType dtype = each_type();
  for (const char* words : {"d=48 dv=64", "d=16 dv=32", "d=80 dv=96", "d=33 dv=64"}) {
    Case c(typed("attention hq=4 hk=2 sq=40 sk=70 lse " + std::string(words), dtype));
    AttentionArgs args = c.args();
    args.kv.k = slice(args.kv.v, 3, 0, c.problem.d);
    check_every_entry(c, args);
  }
}

TEST_CASE("every layout gives the same bits", "[kernel]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=2 hq=4 hk=2 sq=37 sk=61 d=40 dv=24 causal align=bottom_right lse",
                           "attention b=2 hq=4 hk=2 sq=70 sk=173 d=64 window=80,9 align=bottom_right lse",
                           "attention b=3 hq=4 hk=2 sq=37 sk=61 d=40 lse ragged_q=70 ragged_k=100"}) {
    AttentionProblem problem = typed(text, dtype);
    for (const std::string& entry : every_entry(problem)) {
      problem.layout = AttentionProblem::Layout::bhsd;
      Case first(problem);
      run(first.args(), entry);
      for (auto layout :
           {AttentionProblem::Layout::bshd, AttentionProblem::Layout::bhds, AttentionProblem::Layout::other}) {
        problem.layout = layout;
        Case second(problem);
        run(second.args(), entry);
        INFO(entry << ": " << problem.to_string());
        CHECK(same_bits(first.out, second.out));
        CHECK(same_bits(first.lse, second.lse));
      }
    }
  }
}

TEST_CASE("parts of keys that hardly weigh add next to nothing", "[kernel]") {
  Case c(AttentionProblem::parse("attention sq=1 sk=1024 d=8 bias=k lse"));
  for (std::int64_t i = 0; i < 8; ++i) c.q.flat(i) = 0;
  for (std::int64_t j = 0; j < 1024; ++j) {
    c.bias.flat(j) = j == 0 ? 0.f : j < 512 ? -kInf : -138.f;
    for (std::int64_t i = 0; i < 8; ++i) c.v.flat(j * 8 + i) = j == 0 ? 1.f : 0x1p100f;
  }
  with_every_entry(c, [&] {
    CHECK(c.out.flat(0) == Approx(1).epsilon(1e-6));
    CHECK(c.lse.flat(0) == Approx(0).margin(1e-6));
  });
}
