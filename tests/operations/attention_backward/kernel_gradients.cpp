// attention_backward on every entry: against the float64 oracle over sizes, types and features. What it shares with the
// other operations (executors, plans, workspaces) is in tests/kernel/test_operations.cpp, NaN and Inf in
// kernel_nonfinite.cpp.
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "operations/attention/sampler.hpp"
#include "operations/attention_backward/check.hpp"
#include "support/executors.hpp"
#include "support/fill.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

constexpr int64_t kHeadDims[] = {1, 3, 8, 16, 17, 40, 64, 80, 96, 128, 192, 256};
constexpr int64_t kLengths[] = {1, 2, 7, 31, 64, 65, 127, 129, 200, 333, 640};

/// Each feature alone, and what it is usually found with.
constexpr const char* kFeatures[] = {
    "b=2 hq=2 sq=70 sk=90 d=24",
    "b=2 hq=6 hk=2 sq=45 sk=70 d=24",
    "hq=7 hk=1 sq=33 sk=140 d=16 causal align=bottom_right",
    "hq=2 sq=150 d=24 causal",
    "hq=2 sq=90 sk=60 d=24 causal align=bottom_right",
    "hq=2 sq=60 sk=90 d=24 causal align=top_left",
    "hq=2 sq=70 d=24 causal align=-20",
    "hq=2 sq=70 sk=60 d=24 causal align=100",
    "hq=2 sq=150 d=24 window=30,0",
    "hq=2 sq=150 d=24 window=-1,16",
    "hq=2 sq=140 sk=200 d=24 causal window=50,10 align=bottom_right",
    "hq=2 sq=80 d=24 window=0,0",
    "hq=2 sq=70 d=24 scale=0",
    "hq=2 sq=70 d=24 scale=-0.25",
    "hq=2 sq=70 sk=80 d=24 softcap=3",
    "hq=2 sq=70 d=24 softcap=20 causal dlse",
    "hq=2 sq=70 sk=80 d=24 dlse",
    "hq=4 hk=2 sq=70 d=24 causal dlse",
    "b=2 hq=2 sq=70 sk=80 d=24 bias=bhqk",
    "b=2 hq=2 sq=70 sk=80 d=24 bias=bhqk dbias",
    "b=2 hq=2 sq=70 sk=80 d=24 bias=k dbias",
    "b=2 hq=2 sq=70 sk=80 d=24 bias=bk dbias dlse",
    "b=2 hq=4 hk=2 sq=70 sk=80 d=24 bias=hk dbias",
    "b=2 hq=4 hk=2 sq=70 sk=80 d=24 bias=qk dbias",
    "b=2 hq=4 hk=1 sq=70 sk=80 d=24 bias=hqk dbias",
    "b=2 hq=4 hk=2 sq=70 sk=80 d=24 bias=bqk dbias",
    "b=2 hq=4 hk=2 sq=70 d=24 bias=bhk dbias causal softcap=5",
    "b=2 hq=2 sq=70 sk=180 d=24 bias=bhq dbias dlse",
    "b=2 hq=4 hk=2 sq=130 sk=80 d=24 bias=h mask=bq dbias sinks dsinks",
    "b=2 hq=4 hk=2 sq=70 sk=300 d=24 bias=1 dbias sinks dsinks dlse",
    "b=2 hq=2 sq=70 d=24 bias=q mask=1 dbias causal sinks dropout=0.5",
    "b=2 hq=2 sq=70 sk=80 d=24 mask=bhqk",
    "b=2 hq=2 sq=70 sk=80 d=24 mask=bk dlse",
    "b=2 hq=2 sq=70 sk=80 d=24 mask=qk bias=bk dbias",
    "b=2 hq=4 sq=70 d=24 alibi",
    "b=2 hq=4 hk=2 sq=70 d=24 alibi dalibi causal",
    "b=2 hq=4 sq=70 sk=50 d=24 alibi dalibi align=-3 dlse",
    "hq=3 sq=250 sk=300 d=40 alibi dalibi causal align=bottom_right",
    "b=2 hq=4 hk=2 sq=70 sk=1200 d=24 alibi dalibi sinks dsinks dlse align=bottom_right causal",
    "b=3 hq=2 sq=120 sk=1100 d=24 window=300,0 align=bottom_right seqlens",
    "hq=2 sq=150 sk=600 d=24 causal align=-70",
    "b=2 hq=4 hk=2 sq=230 sk=290 d=40 softcap=6 alibi dalibi align=20",
    "b=2 hq=3 sq=70 d=24 sinks",
    "b=2 hq=4 hk=2 sq=70 d=24 sinks dsinks dlse",
    "b=2 hq=2 sq=70 sk=50 d=24 sinks dsinks causal align=bottom_right",
    "b=5 hq=2 sq=60 sk=100 d=24 seqlens",
    "b=5 hq=2 sq=60 sk=100 d=24 seqlens causal align=bottom_right dlse",
    "b=3 hq=4 hk=2 sq=60 sk=50 d=24 ragged_q=130",
    "b=3 hq=2 sq=60 sk=100 d=24 ragged_k=190",
    "b=5 hq=4 hk=2 sq=60 d=24 causal ragged_q=160 ragged_k=160 dlse",
    "b=3 hq=2 sq=60 sk=90 d=24 ragged_q=130 ragged_k=200 bias=bhqk dbias alibi align=bottom_right dalibi",
    "b=3 hq=2 sq=60 sk=190 d=24 ragged_q=130 ragged_k=300 bias=bq mask=hq dbias sinks",
    "b=2 hq=4 hk=2 sq=70 sk=80 d=24 dropout=0.1",
    "b=2 hq=4 hk=2 sq=70 d=24 dropout=0.5 causal softcap=9 bias=qk dbias sinks dsinks alibi dalibi dlse",
    "b=3 hq=4 hk=2 sq=60 sk=50 d=24 ragged_q=130 ragged_k=100 dropout=0.25",
    "hq=2 sq=70 sk=80 d=24 dropout=1",
    "b=2 hq=4 hk=2 sq=70 sk=60 d=24 dv=17 layout=bshd",
    "b=2 hq=4 hk=2 sq=70 sk=60 d=24 dv=17 layout=bhds",
    "b=2 hq=4 hk=2 sq=70 sk=60 d=24 dv=17 layout=other bias=bhqk dbias",
    "b=3 hq=2 sq=60 sk=60 d=24 layout=other ragged_q=130 ragged_k=130",
    ("b=2 hq=4 hk=2 sq=65 sk=100 d=24 dv=40 causal window=30,-1 align=bottom_right softcap=30 bias=hqk mask=bk alibi "
     "sinks dlse dbias dsinks dalibi"),
};

/// Of cases that are compared with each other alone.
constexpr auto kLibrary = BackwardCase::Forward::library;

void check_samples(std::uint64_t seed, int count, const SampleOptions& options) {
  std::mt19937_64 random(seed);
  for (int i = 0; i < count; ++i) {
    const AttentionBackwardProblem problem = sample_backward(random, options);
    const std::uint64_t own = random() % 1000;
    check_backward(problem, own, own % 3 == 0 ? std::optional(kFloatTypes[own / 3 % 3]) : std::nullopt);
  }
}

/// The sequences of a dense tensor end to end, as a ragged call takes them.
template <class View>
View as_ragged(View t) {
  View flat = t;
  flat.ndim = t.ndim - 1;
  flat.shape = {t.shape[0] * t.shape[2], t.shape[1], t.shape[3], 0};
  flat.strides = {t.strides[2], t.strides[1], t.strides[3], 0};
  return flat;
}

}  // namespace

// A row of one key has that key's value, whatever its score: dP and delta are the same products.
TEST_CASE("backward: rows that see one key get nothing but dlse", "[kernel]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const auto forward = GENERATE(BackwardCase::Forward::oracle, kLibrary);
  const auto zeros_of = [](const Tensor& gradient) {
    int64_t zeros = 0;
    for (int64_t i = 0; i < gradient.size(); ++i) zeros += gradient.flat(i) == 0;
    return zeros;
  };
  const auto on_every_entry = [&](BackwardCase& c, const auto& check) {
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      c.clear();
      c.run(forced(entry));
      check();
    }
  };
  for (const char* words :
       {"hq=2 sq=80 d=24 window=0,0", "b=2 hq=4 hk=2 sq=70 sk=1 d=64 dv=40", "hq=2 sq=200 d=128 causal window=0,-1",
        "b=2 hq=2 sq=30 sk=1 d=16 layout=bhds", "b=3 hq=2 sq=40 sk=1 d=32 ragged_q=70",
        "hq=2 sq=70 d=64 window=0,0 softcap=5 bias=qk dbias alibi dalibi"}) {
    BackwardCase c(typed_backward(words, dtype), 3, Placement::heap, {}, forward);
    on_every_entry(c, [&] {
      for (const Tensor* t : {&c.dq, &c.dk, &c.dbias, &c.dalibi}) CHECK(zeros_of(*t) == t->size());
      CHECK(zeros_of(c.dv) < c.dv.size() / 8);
    });
  }
  BackwardCase causal(typed_backward("hq=3 hk=1 sq=150 d=64 causal", dtype), 3, Placement::heap, {}, forward);
  on_every_entry(causal, [&] {
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t e = 0; e < 64; ++e) CHECK(causal.dq.at({0, h, 0, e}) == 0);
    CHECK(zeros_of(causal.dq) < causal.dq.size() / 64);
  });
  BackwardCase with_dlse(typed_backward("hq=2 sq=80 d=24 window=0,0 dlse", dtype), 3, Placement::heap, {}, forward);
  check_backward(with_dlse);
  // As in ring attention, where out is an average over more keys than the call has.
  BackwardCase part(typed_backward("hq=2 sq=80 d=24 window=0,0", dtype), 3, Placement::heap, {}, forward);
  for (int64_t i = 0; i < part.inputs.out.size(); ++i) part.inputs.out.flat(i) *= 0.75f;
  on_every_entry(part, [&] { CHECK(zeros_of(part.dq) < part.dq.size() / 8); });
}

// The keys of the first threads are seen by no row of the last blocks.
TEST_CASE("backward: rows that see no key, beside others that do", "[kernel]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const char* words :
       {"sq=450 sk=300 d=64 window=40,10 align=0", "hq=4 hk=1 sq=450 sk=300 d=128 window=40,0 align=0"}) {
    BackwardCase c(typed_backward(words, dtype), 4);
    const BackwardReference reference = oracle_backward(c.args());
    for (const std::string& entry : every_entry(c.problem))
      for (const int threads : {1, 2, 4}) {
        INFO(entry << " on " << threads << ": " << c.problem.to_string());
        c.clear();
        c.run(forced(entry, std::make_shared<ThreadExecutor>(threads), threads));
        CHECK(c.verdict(reference).violation == "");
      }
  }
}

TEST_CASE("backward: head dimensions", "[kernel][long]") {
  for (std::size_t i = 0; i < std::size(kHeadDims); ++i)
    for (const std::size_t turn : {0, 1, 2, 3}) {
      const int64_t d = kHeadDims[i], dv = kHeadDims[turn == 0 ? i : (i + 3 * turn + 1) % std::size(kHeadDims)];
      const int64_t sq = kLengths[(i + 3 * turn) % 9], sk = kLengths[(2 * i + 5 * turn + 3) % 9];
      const DType dtype = kFloatTypes[(i + turn) % 3];
      for (const DType type : turn == 0 ? std::vector(kFloatTypes.begin(), kFloatTypes.end()) : std::vector{dtype})
        check_backward(typed_backward("hq=2 hk=1 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) +
                                          " d=" + std::to_string(d) + " dv=" + std::to_string(dv) + " dlse" +
                                          (turn % 2 ? " causal align=bottom_right" : ""),
                                      type),
                       i + 1);
    }
}

// The last query block of a chunk may have few rows, whose scores other products compute.
TEST_CASE("backward: few rows, alone and behind whole query blocks", "[kernel][long]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const char* const kWords[] = {"sk=70 d=64",
                                "sk=1100 d=16 dv=40 dlse",
                                "sk=150 d=17 dv=128 causal align=bottom_right",
                                "sk=90 d=40 dv=8",
                                "sk=200 d=80 dv=16 window=30,5 align=bottom_right softcap=4 sinks dsinks",
                                "sk=140 d=33 bias=hqk dbias mask=qk alibi dalibi align=0 dropout=0.2",
                                "b=2 sk=130 d=24 layout=bhds bias=q dbias seqlens",
                                "sk=131 d=48 layout=other scale=-0.3 mask=k dlse"};
  std::size_t turn = 0;
  for (const char* words : kWords)
    for (const int64_t sq : {1, 2, 3, 4, 5, 17, 49, 50, 97, 100}) {
      if (++turn % 3 != static_cast<std::size_t>(dtype) % 3 && sq > 5) continue;
      BackwardCase c(
          typed_backward("hq=2 hk=" + std::to_string(1 + turn % 2) + " sq=" + std::to_string(sq) + " " + words, dtype),
          turn, turn % 2 ? Placement::front : Placement::back);
      c.protect_inputs();
      check_backward(c);
    }
}

TEST_CASE("backward: every pair of lengths", "[kernel][long]") {
  std::size_t turn = 0;
  for (const int64_t sq : kLengths)
    for (const int64_t sk : kLengths) {
      ++turn;
      check_backward(typed_backward("sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) + " d=16 dv=17" +
                                        (turn % 3 == 1 ? " causal align=bottom_right" : ""),
                                    kFloatTypes[turn / 2 % 3]),
                     turn);
    }
}

TEST_CASE("backward: each feature alone, and nothing outside of the tensors is touched", "[kernel][long]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  for (const char* words : kFeatures) {
    std::optional<BackwardReference> reference;  // the same wherever tensors lie
    for (const Placement placement : {Placement::front, Placement::back}) {
      if (dtype == DType::f16 && placement == Placement::front) continue;  // the same loads as of bf16
      BackwardCase c(typed_backward(words, dtype), 3, placement);
      c.protect_inputs();
      if (!reference) reference = oracle_backward(c.args());
      check_backward(c, *reference);
    }
  }
}

TEST_CASE("backward: relative error on standard normal inputs", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const double limit = dtype == DType::f32 ? 1.6e-6 : 1.25 * (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
  for (const char* words : {"hq=2 sq=64 d=64", "hq=2 sq=128 d=64 causal", "sq=512 d=64", "sq=640 d=128 causal",
                            "sq=300 sk=200 d=80 dv=96", "sq=200 d=256", "hq=4 hk=1 sq=333 d=16", "sq=300 d=3"}) {
    BackwardCase c(typed_backward(words, dtype), 9);
    const BackwardReference reference = oracle_backward(c.args());
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      c.run(forced(entry));
      CHECK(c.verdict(reference).errors.rel_frobenius <= limit);
    }
  }
}

TEST_CASE("backward: every mix of types", "[kernel][long]") {
  for (const DType q : kFloatTypes)
    for (const DType kv : kFloatTypes)
      for (const DType out : kFloatTypes)
        for (const DType dout : kFloatTypes) {
          AttentionBackwardProblem p = AttentionBackwardProblem::parse(
              "attention_backward hq=2 hk=1 sq=40 sk=70 d=24 dv=17 causal "
              "align=bottom_right bias=qk dbias sinks dsinks alibi dalibi");
          p.q_dtype = q, p.kv_dtype = kv, p.out_dtype = out, p.dout_dtype = dout, p.bias_dtype = dout;
          check_backward(p);
        }
}

TEST_CASE("backward: gradients of any type are rounded once", "[kernel][numbers]") {
  for (const DType dtype : kFloatTypes)
    for (const char* words :
         {"b=2 hq=4 hk=2 sq=70 sk=150 d=24 dv=17 bias=hk dbias sinks dsinks alibi align=0 dalibi", "sq=640 d=64 causal",
          "b=3 hq=2 sq=60 d=24 layout=other ragged_q=130 ragged_k=130 bias=qk dbias"}) {
      BackwardCase exact(typed_backward(words, dtype), 4, Placement::heap, DType::f32, kLibrary);
      std::vector<BackwardCase> rounded_once;
      for (const DType written : kFloatTypes)
        rounded_once.emplace_back(exact.problem, 4, Placement::heap, written, kLibrary);
      for (const std::string& entry : every_entry(exact.problem)) {
        exact.run(forced(entry));
        for (BackwardCase& once : rounded_once) {
          once.run(forced(entry));
          for (std::size_t t = 0; t < exact.outputs().size(); ++t) {
            const std::vector<float> from = exact.outputs()[t]->values(), to = once.outputs()[t]->values();
            const DType written = once.outputs()[t]->dtype();
            INFO(entry << ": " << exact.problem.to_string() << " to " << to_string(written));
            for (std::size_t i = 0; i < from.size(); ++i) {
              if (rounded(from[i], written) == to[i]) continue;
              FAIL("gradient " << t << ", element " << i << ": " << from[i] << " became " << to[i]);
            }
          }
        }
      }
    }
}

TEST_CASE("backward: sampled sizes", "[kernel][long]") {
  check_samples(201, 40, {});
}
TEST_CASE("backward: sampled positions and scores", "[kernel][long]") {
  check_samples(202, 60, {.positions = true, .scores = true});
}
TEST_CASE("backward: sampled problems of every kind", "[kernel][long]") {
  check_samples(203, 150, kEverything);
}

TEST_CASE("backward: dout of any strides, those of an expanded scalar too", "[kernel]") {
  for (const DType dtype : kFloatTypes)
    for (const char* words :
         {"b=2 hq=2 sq=70 sk=60 d=24 dv=40 dlse", "b=2 hq=2 sq=50 d=24 ragged_q=80 ragged_k=80 dlse"}) {
      BackwardCase c(typed_backward(words, dtype));
      AttentionBackwardArgs args = c.args();
      for (const bool scalar : {true, false}) {
        for (int dim = 0; dim < args.dout.ndim; ++dim)
          if (scalar || dim == args.dout.ndim - 1) args.dout.strides[static_cast<std::size_t>(dim)] = 0;
        if (scalar) args.dlse.strides = {};
        const BackwardReference reference = oracle_backward(args);
        for (const std::string& entry : every_entry(c.problem)) {
          INFO(entry << ": " << c.problem.to_string());
          c.clear();
          run(args, forced(entry));
          CHECK(c.verdict(reference).violation == "");
        }
        args = c.args();
      }
    }
}

TEST_CASE("backward: gradients lie as they like", "[kernel]") {
  for (const char* words :
       {"b=2 hq=4 hk=2 sq=70 sk=130 d=24 dv=17 layout=bshd bias=hqk dbias", "b=2 hq=2 sq=70 sk=130 d=24 dv=17 seqlens",
        "b=3 hq=2 sq=60 d=24 ragged_q=130 ragged_k=130 layout=bhds"}) {
    BackwardCase c(typed_backward(words, DType::f32)), other(c.problem);
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      c.run(forced(entry));
      for (const Dims& order : {Dims{3, 2, 1, 0}, Dims{1, 2, 0, 3}, Dims{0, 3, 1, 2}, Dims{0, 1, 3, 2}})
        for (const int64_t inner : {1, 2})
          for (Tensor* t : {&other.dq, &other.dk, &other.dv, &other.dbias}) {
            if (!*t) continue;
            const Layout& layout = t->layout();
            Dims kept;
            for (const int64_t dim : order)
              if (dim < layout.ndim) kept.push_back(dim);
            *t = Tensor(t->dtype(),
                        layout_of(Dims(layout.shape.begin(), layout.shape.begin() + layout.ndim), kept, inner, 3));
            other.run(forced(entry));
            for (std::size_t i = 0; i < c.outputs().size(); ++i) {
              CHECK(same_bits(*c.outputs()[i], *other.outputs()[i]));
              CHECK(other.outputs()[i]->gaps_intact());
            }
          }
    }
  }
}

TEST_CASE("backward: each input lies as it likes", "[kernel]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    BackwardCase c(typed_backward("hq=4 hk=2 sq=70 sk=130 d=24 dv=17 bias=hqk dbias", dtype)), other(c.problem);
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      c.run(forced(entry));
      for (const auto member : {&Case::q, &Case::k, &Case::v, &Case::out})
        for (const Dims& order : {Dims{3, 2, 1, 0}, Dims{0, 1, 2, 3}}) {
          const Layout& layout = (c.inputs.*member).layout();
          Tensor moved(dtype, layout_of(Dims(layout.shape.begin(), layout.shape.begin() + 4), order, 2, 3));
          for (int64_t i = 0; i < moved.size(); ++i) moved.flat(i) = (c.inputs.*member).flat(i);
          std::swap(other.inputs.*member, moved);
          other.run(forced(entry));
          std::swap(other.inputs.*member, moved);
          for (std::size_t i = 0; i < c.outputs().size(); ++i) CHECK(same_bits(*c.outputs()[i], *other.outputs()[i]));
        }
    }
  }
}

TEST_CASE("backward: what is not wanted changes no bit of what is", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  for (const char* words : {"b=2 hq=4 hk=2 sq=70 sk=150 d=24 dv=17 softcap=9 bias=hk dbias sinks dsinks alibi align=0 "
                            "dalibi dlse",
                            "hq=2 sq=333 d=64 causal", "b=3 hq=4 hk=2 sq=60 d=40 ragged_q=130 ragged_k=130 causal"}) {
    BackwardCase all(typed_backward(words, dtype), 6, Placement::heap, {}, kLibrary);
    std::vector<BackwardCase> parts;
    for (std::uint8_t grads = 0; grads < 8; ++grads)
      for (const bool scores : {false, true}) {
        AttentionBackwardProblem p = all.problem;
        p.grads = grads;
        if (!scores) p.dbias = p.dsinks = p.dalibi = false;
        if (grads || p.dbias) parts.emplace_back(p, 6, Placement::heap, std::nullopt, kLibrary);
      }
    for (const std::string& entry : every_entry(all.problem)) {
      all.run(forced(entry));
      for (BackwardCase& some : parts) {
        INFO(entry << ": " << some.problem.to_string());
        some.run(forced(entry));
        for (const auto& [part, whole] : {std::pair{&some.dq, &all.dq},
                                          {&some.dk, &all.dk},
                                          {&some.dv, &all.dv},
                                          {&some.dbias, &all.dbias},
                                          {&some.dsinks, &all.dsinks},
                                          {&some.dalibi, &all.dalibi}})
          if (*part) CHECK(same_bits(*part, *whole));
      }
    }
  }
}

TEST_CASE("backward: a sequence has the bits that it has alone", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  for (const char* words : {"b=5 hq=4 hk=2 sq=70 sk=150 d=24 dv=17 dlse", "b=3 hq=2 sq=200 d=64 causal",
                            "b=6 hq=2 sq=60 sk=333 d=40 seqlens", "b=4 hq=2 sq=1 sk=640 d=64",
                            "b=4 hq=4 hk=2 sq=90 sk=2000 d=40 seqlens causal align=bottom_right"}) {
    BackwardCase c(typed_backward(words, dtype), 7, Placement::heap, {}, kLibrary);
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << c.problem.to_string());
      c.run(forced(entry));
      const std::vector<std::byte> together = bits_of(c);
      c.clear();
      for (int64_t n = 0; n < c.problem.b; ++n) run(one_sequence(c.args(), n), forced(entry));
      CHECK((bits_of(c) == together));
    }
  }
}

TEST_CASE("backward: ragged sequences have the bits of dense ones", "[kernel][numbers]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16);
  for (const char* words :
       {"b=3 hq=4 hk=2 sq=70 sk=150 d=24 dv=17 dlse layout=bshd", "b=4 hq=2 sq=200 d=64 causal layout=bshd",
        "b=3 hq=2 sq=65 d=40 layout=bshd sinks dsinks alibi dalibi bias=hqk dbias",
        "b=3 hq=2 sq=40 sk=1300 d=40 layout=bshd"}) {
    BackwardCase c(typed_backward(words, dtype), 8);
    const AttentionBackwardProblem& p = c.problem;
    Dims q_lengths(static_cast<std::size_t>(p.b), p.sq), k_lengths(static_cast<std::size_t>(p.b), p.sk);
    const Tensor starts_q = index_tensor(cumulated(q_lengths), 1, Placement::heap),
                 starts_k = index_tensor(cumulated(k_lengths), 2, Placement::heap);
    // [b, hq, sq] lies with its rows inside; ragged rows lie outside.
    Tensor lse(DType::f32, Layout(Dims{p.b * p.sq, p.hq})), dlse(DType::f32, Layout(Dims{p.b * p.sq, p.hq}));
    for (int64_t i = 0; i < lse.size(); ++i) {
      const int64_t row = i / p.hq, h = i % p.hq;
      lse.flat(i) = c.inputs.lse.at({row / p.sq, h, row % p.sq});
      if (c.dlse) dlse.flat(i) = c.dlse.at({row / p.sq, h, row % p.sq});
    }
    for (const std::string& entry : every_entry(p)) {
      INFO(entry << ": " << p.to_string());
      c.run(forced(entry));
      const std::vector<std::byte> dense = bits_of(c);
      c.clear();
      AttentionBackwardArgs args = c.args();
      args.kv = KvSource::ragged(as_ragged(args.kv.k), as_ragged(args.kv.v), starts_k.view());
      args.cu_seqlens_q = starts_q.view();
      for (TensorView* t : {&args.q, &args.out, &args.dout}) *t = as_ragged(*t);
      for (MutableTensorView* t : {&args.dq, &args.dk, &args.dv}) *t = as_ragged(*t);
      args.lse = lse.view();
      if (args.dlse) args.dlse = dlse.view();
      run(args, forced(entry));
      CHECK((bits_of(c) == dense));
    }
  }
}

// 32768 keys are cut into more splits than 32769, whose splits are longer.
TEST_CASE("backward: a workspace is enough for sequences in more splits than the longest", "[kernel][long]") {
  for (const char* text : {"attention_backward b=2 hq=2 sq=3 sk=32769 d=8 seqlens",
                           "attention_backward b=2 hq=2 sq=3 sk=32769 d=8 ragged_q=6 ragged_k=65537"}) {
    BackwardCase c(AttentionBackwardProblem::parse(text));
    if (c.inputs.seqlens) {
      c.inputs.seqlens = index_tensor({32768, 32768}, 1, Placement::heap);
    } else {
      c.inputs.cu_seqlens_k = index_tensor({0, 32769, 65537}, 1, Placement::heap);
      c.inputs.cu_seqlens_q = index_tensor({0, 3, 6}, 1, Placement::heap);
    }
    c.run_forward();
    const BackwardReference reference = oracle_backward(c.args());
    for (const std::string& entry : usable_entries(c.problem))
      for (const int threads : {1, 3}) {
        const Plan plan(c.problem, forced(entry, std::make_shared<ThreadExecutor>(threads), threads));
        const Buffer workspace(plan.workspace_bytes(), Placement::back);
        c.clear();
        plan.run(c.args(), std::span<std::byte>(workspace.data(), workspace.size()));
        const Verdict verdict = c.verdict(reference);
        INFO(entry << " on " << threads << ": " << text);
        CHECK(verdict.violation == "");
      }
  }
}

TEST_CASE("backward: no rows, no keys, no sequences", "[kernel]") {
  for (const char* words :
       {"b=2 hq=2 sq=20 sk=0 d=16", "b=2 hq=2 sq=20 sk=0 d=16 sinks dsinks dlse", "b=2 hq=2 sq=0 sk=20 d=16",
        "b=2 hq=2 sq=0 sk=0 d=16", "b=0 hq=2 sq=20 sk=20 d=16", "b=0 hq=2 sq=20 d=16 sinks dsinks alibi dalibi",
        "b=2 hq=2 sq=0 sk=20 d=16 bias=bhk dbias sinks dsinks alibi align=0 dalibi",
        "b=2 hq=2 sq=20 sk=0 d=16 bias=qk dbias", "b=0 hq=2 sq=20 d=16 bias=bhqk dbias",
        "b=0 hq=2 sq=20 d=16 bias=hk dbias", "b=2 hq=0 hk=2 sq=20 d=16",
        "b=4 hq=2 sq=9 sk=20 d=16 seqlens causal align=bottom_right",
        "b=3 hq=2 sq=20 sk=30 d=16 ragged_q=20 ragged_k=30", "b=3 hq=2 sq=0 sk=30 d=16 ragged_q=0 ragged_k=40",
        "b=3 hq=2 sq=20 sk=0 d=16 ragged_q=40 ragged_k=0"})
    for (const DType dtype : kFloatTypes)
      for (const std::uint64_t seed : {1, 2}) check_backward(typed_backward(words, dtype), seed);
}
