// The floating-point environment of a call's threads: it changes no result, and is left as it was.
#include <array>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "operations/attention_backward/case.hpp"
#include "operations/delta_rule_backward/case.hpp"
#include "operations/index_scores/case.hpp"
#include "operations/rotary_append_kv/case.hpp"
#include "operations/select_topk/case.hpp"
#include "rapt/append_kv.hpp"
#include "rapt/merge_states.hpp"
#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kLarge = "attention b=2 hq=4 hk=2 sq=256 d=64 causal lse";

/// Rounding, masks, flush-to-zero and denormals-are-zero of this thread; not the sticky exception flags.
std::uint64_t float_mode() {
#if defined(__SSE2__)
  return _mm_getcsr() & ~0x3fu;
#elif defined(__aarch64__)
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#endif
}

void set_float_mode(std::uint64_t mode) {
#if defined(__SSE2__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

#if defined(__SSE2__)
constexpr std::uint64_t kFlush = 0x8040;
#else
constexpr std::uint64_t kFlush = 1 << 24;
#endif

}  // namespace

TEST_CASE("a call leaves the floating-point mode of its threads alone", "[kernel][threads]") {
  Case c(typed(kLarge, each_type()));
  for (const std::string& entry : threaded_entries(c.problem)) {
    for (const std::uint64_t extra : {std::uint64_t{0}, kFlush}) {
      const std::uint64_t normal = float_mode();
      const auto executor = std::make_shared<ThreadExecutor>(3);
      std::atomic<int> changed{0}, workers{0};
      thread_local std::uint64_t before;
      executor->before = [&] {
        set_float_mode(normal | extra);
        before = float_mode();
      };
      executor->after = [&] {
        ++workers;
        changed += before != float_mode();
      };
      set_float_mode(normal | extra);
      attention(c.args(), forced(entry, executor, 3));
      attention(c.args(), forced(entry));
      const std::uint64_t after = float_mode();
      set_float_mode(normal);
      INFO(entry);
      CHECK(after == (normal | extra));
      CHECK(changed == 0);
      CHECK(workers > 0);
    }
  }
}

TEST_CASE("a call leaves the rounding direction alone", "[kernel]") {
  Case c(AttentionProblem::parse("attention hq=2 sq=40 d=16"));
  for (int direction : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::fesetround(direction);
    attention(c.args());
    const int after = std::fegetround();
    std::fesetround(FE_TONEAREST);
    CHECK(after == direction);
  }
}

namespace {

/// What `compute` gives in every mode that a thread may be in is what it gives by default, and it leaves the mode, the
/// exceptions that were seen included, as it was.
void check_every_mode(const std::function<std::vector<std::byte>()>& compute) {
  const std::uint64_t normal = float_mode();
  const std::vector<std::byte> expected = compute();
  for (int direction : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    for (std::uint64_t extra : {std::uint64_t{0}, kFlush}) {
      std::fesetround(direction);
      set_float_mode(float_mode() | extra);
      std::feclearexcept(FE_ALL_EXCEPT);
      std::feraiseexcept(FE_DIVBYZERO);
      const std::uint64_t before = float_mode();
      const std::vector<std::byte> got = compute();
      const std::uint64_t after = float_mode();
      const int seen = std::fetestexcept(FE_ALL_EXCEPT);
      set_float_mode(normal);
      std::feclearexcept(FE_ALL_EXCEPT);
      INFO("direction " << direction << ", flush " << extra);
      CHECK(got == expected);
      CHECK(after == before);
      CHECK(seen == FE_DIVBYZERO);
    }
  }
}

void add_bytes(std::vector<std::byte>& all, const Tensor& t) {
  const auto* const data = static_cast<const std::byte*>(static_cast<const void*>(t.buffer().data()));
  all.insert(all.end(), data, data + t.size() * static_cast<std::int64_t>(size_of(t.dtype())));
}

/// The same of what every usable entry makes of a case.
template <class AnyCase>
void check_every_mode_of(AnyCase& c, std::uint64_t seed) {
  for (const std::string& entry : usable_entries(c.problem)) {
    const Context context = forced(entry);
    INFO(entry << ": " << c.problem.to_string() << ", seed " << seed);
    check_every_mode([&] {
      c.clear();
      c.run(context);
      std::vector<std::byte> all;
      for (const Tensor* t : c.outputs()) add_bytes(all, *t);
      return all;
    });
  }
}

}  // namespace

TEST_CASE("a thread's rounding does not change what append_kv writes", "[kernel][numbers]") {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  const std::array<std::int64_t, 4> shape{1, 1, 40, 32}, bytes{1, 1, 40, 16}, codings{1, 1, 40, 2};
  const std::int64_t none[] = {0};
  Tensor fresh(DType::f32, Layout(shape));
  for (std::int64_t i = 0; i < fresh.size(); ++i)  // denormals of every type among them
    fresh.flat(i) = std::ldexp(normal(random), i % 3 == 0 ? static_cast<int>(random() % 140) - 139 : 0);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i8, DType::i4x2, DType::f8e4m3, DType::f8e5m2}) {
    for (bool coded : {false, true}) {
      const bool integers = dtype == DType::i8 || dtype == DType::i4x2;
      if (integers ? !coded : coded && size_of(dtype) > 1) continue;
      INFO(to_string(dtype) << (coded ? " with scales" : ""));
      check_every_mode([&] {
        const Layout layout(dtype == DType::i4x2 ? bytes : shape);
        Tensor k(dtype, layout), v(dtype, layout);
        Tensor k_scale(DType::f32, Layout(codings)), v_scale(DType::f32, Layout(codings)),
            zero(DType::f32, Layout(codings));
        KvCache cache = KvCache::strided(k.mutable_view(), v.mutable_view());
        if (coded)
          cache = cache.quantized(k_scale.mutable_view(), v_scale.mutable_view(),
                                  integers ? zero.mutable_view() : MutableTensorView());
        append_kv({fresh.view(), fresh.view(), cache, {none, {1}}, {}});
        std::vector<std::byte> all;
        for (const Tensor* t : {&k, &v}) add_bytes(all, *t);
        if (coded) add_bytes(all, k_scale), add_bytes(all, v_scale);
        if (coded && integers) add_bytes(all, zero);
        return all;
      });
    }
  }
}

TEST_CASE("a thread's rounding does not change what rotary_append_kv gives", "[kernel][numbers]") {
  for (const char* words : {"hq=2 norm", "dtype=bf16 hq=2 interleaved", "kv=i8 groups=2 zeros hq=1 rows"}) {
    RotaryCase c(RotaryAppendKvProblem::parse("rotary_append_kv b=1 hk=1 n=40 sk=64 d=32 " + std::string(words)));
    for (Tensor* t : {&c.q, &c.append.k.fresh})
      for (std::int64_t i = 0; i < t->size(); i += 3) t->flat(i) = std::ldexp(t->flat(i), -128);  // denormals
    check_every_mode_of(c, 1);
  }
}

TEST_CASE("a thread's rounding does not change what merge_states gives", "[kernel][numbers]") {
  std::mt19937_64 random(8);
  std::normal_distribution<float> normal;
  const std::array<std::int64_t, 2> shape{30, 16};
  const std::array<std::int64_t, 1> rows{30};
  std::vector<Tensor> outs, lses;
  for (int i = 0; i < 3; ++i) {
    outs.emplace_back(DType::f32, Layout(shape)), lses.emplace_back(DType::f32, Layout(rows));
    for (std::int64_t at = 0; at < outs.back().size(); ++at)
      outs.back().flat(at) = std::ldexp(normal(random), at % 5 ? 0 : -130);
    for (std::int64_t at = 0; at < 30; ++at) lses.back().flat(at) = 3 * normal(random);
  }
  const std::vector<TensorView> parts = {outs[0].view(), outs[1].view(), outs[2].view()},
                                sums = {lses[0].view(), lses[1].view(), lses[2].view()};
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    check_every_mode([&] {
      Tensor out(dtype, Layout(shape)), lse(DType::f32, Layout(rows));
      merge_states(parts, sums, out.mutable_view(), lse.mutable_view());
      std::vector<std::byte> all;
      add_bytes(all, out), add_bytes(all, lse);
      return all;
    });
  }
}

TEST_CASE("a thread's rounding does not change what delta_rule gives", "[kernel][numbers]") {
  for (const char* words :
       {"hq=2 t=70 d=24 dv=20 decay=channel beta state", "hq=2 t=70 d=7 decay=head gate beta l2norm",
        "dtype=bf16 hq=2 t=70 d=24 decay=constant beta state", "t=70 d=11 out=f16 rule=linear"})
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
      DeltaRuleCase c(DeltaRuleProblem::parse("delta_rule " + std::string(words)), seed);
      c.scale.reset();                                  // the default is computed, too
      for (std::int64_t i = 0; i < c.v.size(); i += 3)  // denormals of every type
        c.v.flat(i) = std::ldexp(c.v.flat(i), -static_cast<int>(i % 140));
      check_every_mode_of(c, seed);
    }
}

TEST_CASE("a thread's rounding does not change what index_scores and select_topk give", "[kernel][numbers]") {
  for (const char* words :
       {"b=2 sq=3 sk=70 h=5 d=11 full topk=20 scores", "dtype=bf16 b=2 sq=9 sk=100 h=40 d=37 align=bottom_right",
        "q=bf16 k=i8 sq=3 sk=90 h=3 d=7 full scales topk=9 scores", "q=f16 k=f8e5m2 sq=2 sk=50 h=3 d=20 full linear"})
    for (const std::uint64_t seed : {1, 2, 3}) {
      IndexScoresCase c(IndexScoresProblem::parse("index_scores " + std::string(words)), seed);
      c.scale.reset();                                  // the default is computed, too
      for (std::int64_t i = 0; i < c.q.size(); i += 3)  // denormals of every type
        c.q.flat(i) = std::ldexp(c.q.flat(i), -static_cast<int>(i % 140));
      check_every_mode_of(c, seed);
    }
  SelectTopkCase c(SelectTopkProblem::parse("select_topk rows=20 sk=300 n=100"));
  for (const std::string& entry : usable_entries(c.problem)) {
    INFO(entry);
    check_every_mode([&] {
      c.clear();
      c.run(forced(entry));
      std::vector<std::byte> all;
      add_bytes(all, c.indices);
      return all;
    });
  }
}

TEST_CASE("a thread's rounding does not change what delta_rule_backward gives", "[kernel][numbers]") {
  for (const char* words :
       {"hq=2 t=70 d=24 dv=20 decay=channel gate beta state", "hq=1 hv=2 t=70 d=7 decay=head gate beta l2norm",
        "dtype=bf16 hq=2 t=70 d=24 decay=constant beta state", "t=70 d=11 out=f16 rule=linear"})
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
      DeltaRuleBackwardCase c(DeltaRuleBackwardProblem::parse("delta_rule_backward " + std::string(words)), seed,
                              Placement::heap, seed % 2 ? Spacing::dense : Spacing::gaps);
      c.inputs.scale.reset();                              // the default is computed, too
      for (std::int64_t i = 0; i < c.dout.size(); i += 3)  // denormals of every type
        c.dout.flat(i) = std::ldexp(c.dout.flat(i), -static_cast<int>(i % 140));
      check_every_mode_of(c, seed);
    }
}

TEST_CASE("a thread's rounding does not change what attention_backward gives", "[kernel][numbers]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const char* words : {"b=2 hq=4 hk=2 sq=150 d=24 causal softcap=9 bias=k dbias sinks dsinks alibi dalibi dlse",
                              "b=2 sq=40 sk=300 d=7 dropout=0.3", "sq=3 sk=40 d=5 causal align=bottom_right"}) {
      AttentionBackwardProblem p = AttentionBackwardProblem::parse("attention_backward " + std::string(words));
      p.q_dtype = p.kv_dtype = p.out_dtype = p.dout_dtype = dtype;
      BackwardCase c(p);
      for (std::int64_t i = 0; i < c.inputs.v.size(); i += 3)  // denormals of every type
        c.inputs.v.flat(i) = std::ldexp(c.inputs.v.flat(i), -static_cast<int>(i % 140));
      c.run_forward();
      check_every_mode_of(c, 1);
    }
}

TEST_CASE("a thread's rounding does not change the default scale", "[kernel][numbers]") {
  for (const char* sizes : {"d=3", "d=7", "d=80", "d=100 softcap=3.3", "d=24 scale=0.3"}) {
    INFO(sizes);
    Case c(AttentionProblem::parse("attention hq=2 sq=20 sk=50 lse " + std::string(sizes)));
    const auto bits = [&](int direction) {
      std::fesetround(direction);
      attention(c.args());
      std::fesetround(FE_TONEAREST);
      std::vector<std::byte> all;
      add_bytes(all, c.out), add_bytes(all, c.lse);
      return all;
    };
    const std::vector<std::byte> expected = bits(FE_TONEAREST);
    for (int direction : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) CHECK(bits(direction) == expected);
  }
}
