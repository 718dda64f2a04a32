// The bits of a row depend on its own inputs and the ISA only.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <set>

#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

// Large enough to be spread over four workers, small enough for ThreadSanitizer.
const char* const kProblems[] = {
    "attention b=2 hq=6 hk=2 sq=80 sk=120 d=40 dv=24 causal align=bottom_right bias=bk sinks lse",
    "attention b=4 hq=2 sq=60 sk=110 d=64 lse ragged_q=130 ragged_k=260 layout=bshd",
    "attention b=5 hq=10 hk=2 sq=1 sk=700 d=64 lse seqlens",
    "attention b=1 hq=3 sq=160 d=33 mask=qk softcap=20 lse",
    "attention b=1 hq=2 sq=70 sk=90 d=256 dv=192 lse",
    "attention b=1 hq=64 hk=1 sq=1 sk=1100 d=16 dv=512 lse",  // whose splits all workers combine
};

/// Copies of sequence n of a dense case, alone in a batch of one.
AttentionArgs alone(const AttentionArgs& all, std::int64_t n, Case& target) {
  AttentionArgs one = all;
  one.q = slice(all.q, 0, n, 1);
  one.kv.k = slice(all.kv.k, 0, n, 1);
  one.kv.v = slice(all.kv.v, 0, n, 1);
  one.out = slice(target.out.mutable_view(), 0, n, 1);
  one.lse = slice(target.lse.mutable_view(), 0, n, 1);
  return one;
}

}  // namespace

TEST_CASE("executors and thread counts do not change a bit", "[kernel][threads][numbers]") {
  const DType dtype = each_type();
  for (const char* text : kProblems) {
    const AttentionProblem problem = typed(text, dtype);
    Case first(problem, 3), second(problem, 3);
    for (const std::string& entry : threaded_entries(problem)) {
      run(first.args(), entry);
      for (const auto& executor : all_executors()) {
        for (int threads : {2, 4}) {
          const Forced context = forced(entry, executor, threads);
          for (int repeat = 0; repeat < (threads == 4 ? 2 : 1); ++repeat) {
            second.poison_outputs();
            run(second.args(), context);
            INFO(entry << " on " << executor->name() << " with " << threads << ": " << problem.to_string());
            CHECK(same_bits(first.out, second.out));
            CHECK(same_bits(first.lse, second.lse));
          }
        }
      }
    }
  }
}

TEST_CASE("what items leave in a worker's scratch for the next ones does not change a bit",
          "[kernel][threads][numbers]") {
  const DType dtype = each_type();
  for (const char* text : {"attention b=2 hq=3 sq=450 d=32 causal lse", "attention hq=2 sq=450 d=40 dv=24 lse",
                           "attention hq=4 hk=2 sq=300 d=32 window=90,20 lse"}) {
    const AttentionProblem problem = typed(text, dtype);
    Case first(problem), second(problem);
    // Some keys and values that kernels for usual numbers leave to others.
    for (Case* c : {&first, &second}) {
      c->k.at({0, 0, 70, 3}) = kNan, c->k.at({0, 1, 260, 0}) = kInf;
      c->v.at({0, 0, 130, 7}) = kInf, c->v.at({0, 1, 5, 9}) = 1e-40f, c->v.at({0, 1, 290, 1}) = kNan;
    }
    for (const std::string& entry : threaded_entries(problem)) {
      run(first.args(), forced(entry, serial_executor(), 1));  // one item for each head
      run(second.args(), forced(entry, std::make_shared<ThreadExecutor>(4), 4));
      INFO(entry << ": " << problem.to_string());
      CHECK(same_bits(first.out, second.out));
      CHECK(same_bits(first.lse, second.lse));
    }
  }
}

// A sum of products that is flushed to -0 becomes +0 by a product of weight 0 or not, by the sign of a value that the
// row does not see: which values those are depends on the rows that threads do together.
TEST_CASE("hidden values do not change the sign of zero", "[kernel][long]") {
  std::mt19937 random(7);
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 60; ++i) {
    const std::string text = "attention hq=3 sq=" + std::to_string(100 + below(300)) +
                             " d=32 causal window=" + std::to_string(below(10)) +
                             ",0 align=" + std::to_string(below(40));
    const AttentionProblem problem = typed(text, DType::bf16);
    Case one(problem), many(problem);
    for (Case* c : {&one, &many}) {
      std::mt19937 values(static_cast<unsigned>(i));
      for (std::int64_t n = 0; n < c->q.size(); ++n) c->q.flat(n) = 4 * c->q.flat(n), c->k.flat(n) = 4 * c->k.flat(n);
      for (std::int64_t n = 0; n < c->v.size(); ++n) {
        const float sign = values() % 2 != 0 ? -1.f : 1.f,
                    small = std::ldexp(1.f, -10 - static_cast<int>(values() % 65));
        c->v.flat(n) = sign * (values() % 100 < 97 ? 0.f : small);
      }
    }
    for (const std::string& entry : threaded_entries(problem)) {
      run(one.args(), forced(entry, serial_executor(), 1));
      run(many.args(), forced(entry, tbb_executor(), 4));
      INFO(entry << ": " << problem.to_string());
      CHECK(same_bits(one.out, many.out));
    }
  }
}

TEST_CASE("a sequence alone gives the bits it gives in a batch", "[kernel]") {
  const AttentionProblem problem =
      typed("attention b=5 hq=6 hk=2 sq=70 sk=111 d=48 causal align=bottom_right lse", each_type());
  Case batch(problem), single(problem);
  for (const std::string& entry : every_entry(problem)) {
    const Forced context = forced(entry, tbb_executor(), 2);
    batch.poison_outputs();
    single.poison_outputs();
    run(batch.args(), context);
    const AttentionArgs args = batch.args();
    for (std::int64_t n = 0; n < problem.b; ++n) run(alone(args, n, single), context);
    INFO(entry);
    CHECK(same_bits(batch.out, single.out));
    CHECK(same_bits(batch.lse, single.lse));
  }
}

TEST_CASE("ragged sequences give the bits of dense ones", "[kernel]") {
  // Sequences of equal length in [total, h, d] are the dense batch in bshd.
  const DType dtype = each_type();
  Case ragged(typed("attention b=3 hq=4 hk=2 sq=45 d=40 causal lse ragged_q=135 ragged_k=135 layout=bshd", dtype));
  Case dense(typed("attention b=3 hq=4 hk=2 sq=45 d=40 causal lse layout=bshd", dtype));
  AttentionArgs args = dense.args();
  args.q.data = ragged.q.view().data;
  args.kv.k.data = ragged.k.view().data;
  args.kv.v.data = ragged.v.view().data;
  for (const std::string& entry : every_entry(ragged.problem)) {
    run(ragged.args(), entry);
    run(args, entry);
    INFO(entry);
    for (std::int64_t row = 0; row < 135; ++row) {
      for (std::int64_t h = 0; h < 4; ++h) {
        CHECK(ragged.out.at({row, h, 39}) == dense.out.at({row / 45, h, row % 45, 39}));
        CHECK(ragged.lse.at({row, h}) == dense.lse.at({row / 45, h, row % 45}));
      }
    }
  }
}

TEST_CASE("ragged sequences of any lengths give the bits they give alone, whichever kernel dispatch gives them to",
          "[kernel]") {
  // Sequence n of [total, h, columns] as a batch of one.
  const auto alone = []<class View>(View t, std::int64_t begin, std::int64_t rows) {
    t.data = const_cast<std::byte*>(static_cast<const std::byte*>(t.data)) +
             begin * t.strides[0] * static_cast<std::int64_t>(size_of(t.dtype));
    t.ndim = 4, t.shape = {1, t.shape[1], rows, t.shape[2]}, t.strides = {0, t.strides[1], t.strides[0], t.strides[2]};
    return t;
  };
  const std::array<std::int64_t, 8> q_begin{0, 1, 41, 105, 225, 233, 433, 553},
      k_begin{0, 30, 60, 260, 300, 620, 820, 821};
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(3);
  const Context context(options);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Tensor q(dtype, Layout(std::array{553, 4, 64})), k(dtype, Layout(std::array{821, 2, 64})), v(dtype, k.layout()),
        batch(dtype, q.layout()), single(dtype, q.layout());
    std::mt19937_64 random(71);
    for (Tensor* t : {&q, &k, &v})
      for (std::int64_t i = 0; i < t->size(); ++i) t->flat(i) = std::normal_distribution<float>()(random);
    const auto list = [](const auto& starts) { return TensorView(starts.data(), {std::ssize(starts)}); };
    AttentionArgs args;
    args.q = q.view(), args.out = batch.mutable_view(), args.cu_seqlens_q = list(q_begin);
    args.kv = KvSource::ragged(k.view(), v.view(), list(k_begin));
    attention(args, context);
    std::set<std::string_view> entries;
    for (std::size_t n = 0; n + 1 < q_begin.size(); ++n) {
      const auto rows = q_begin[n + 1] - q_begin[n], keys = k_begin[n + 1] - k_begin[n];
      AttentionArgs one;
      one.q = alone(q.view(), q_begin[n], rows), one.out = alone(single.mutable_view(), q_begin[n], rows);
      one.kv = KvSource::strided(alone(k.view(), k_begin[n], keys), alone(v.view(), k_begin[n], keys));
      attention(one, context);
      entries.insert(Plan(one, context).entry());
    }
    INFO(to_string(dtype));
    CHECK(same_bits(batch, single));
    CHECK(entries.size() > 1);
    const bool tiles = std::any_of(entries.begin(), entries.end(), [](auto e) { return e.find(".amx.") != e.npos; });
    if (tiles) CHECK(entries.size() == 3);  // few rows, short sequences, long ones
  }
}

TEST_CASE("rows split over calls give the bits of one call", "[kernel]") {
  const AttentionProblem problem =
      typed("attention b=2 hq=6 hk=2 sq=101 sk=140 d=40 causal window=60,-1 align=12 lse", each_type());
  Case whole(problem), parts(problem);
  for (const std::string& entry : every_entry(problem)) {
    run(whole.args(), entry);
    parts.poison_outputs();
    for (std::int64_t begin = 0, count = 1; begin < problem.sq; begin += count, count = count * 2 + 1) {
      count = std::min(count, problem.sq - begin);
      AttentionArgs args = parts.args();
      args.q = slice(args.q, 2, begin, count);
      args.out = slice(args.out, 2, begin, count);
      args.lse = slice(args.lse, 2, begin, count);
      args.score.align = Align::offset(12 + begin);
      run(args, entry);
    }
    INFO(entry);
    CHECK(same_bits(whole.out, parts.out));
    CHECK(same_bits(whole.lse, parts.lse));
  }
}

TEST_CASE("a head alone gives the bits it gives among others", "[kernel]") {
  const AttentionProblem problem = typed("attention b=1 hq=7 sq=70 sk=90 d=48 lse", each_type());
  Case all(problem), single(problem);
  for (const std::string& entry : every_entry(problem)) {
    run(all.args(), entry);
    for (std::int64_t h = 0; h < problem.hq; ++h) {
      AttentionArgs args = single.args();
      args.q = slice(args.q, 1, h, 1);
      args.kv.k = slice(args.kv.k, 1, h, 1);
      args.kv.v = slice(args.kv.v, 1, h, 1);
      args.out = slice(args.out, 1, h, 1);
      args.lse = slice(args.lse, 1, h, 1);
      run(args, entry);
    }
    INFO(entry);
    CHECK(same_bits(all.out, single.out));
    CHECK(same_bits(all.lse, single.lse));
  }
}

// Kernels that decide for a whole panel whether its softmax must be restated may do so for the rows that need it only.
TEST_CASE("large scores beside a row do not change its bits", "[kernel]") {
  const DType dtype = each_type();
  for (const char* scale : {"0.25", "0.7", "1", "1.4", "2", "4", "8"}) {
    const AttentionProblem problem = typed("attention hq=2 sq=70 sk=300 d=16 lse scale=" + std::string(scale), dtype);
    Case calm(problem), wild(problem);
    for (const std::int64_t row : {3, 20, 40, 69})
      for (std::int64_t i = 0; i < 16; ++i) wild.q.at({0, 0, row, i}) = 30 * wild.q.at({0, 0, row, i});
    for (const std::string& entry : every_entry(problem)) {
      run(calm.args(), entry);
      run(wild.args(), entry);
      INFO(entry << ": " << problem.to_string());
      for (std::int64_t row = 0; row < 70; ++row) {
        if (row == 3 || row == 20 || row == 40 || row == 69) continue;
        bool same = calm.lse.at({0, 0, row}) == wild.lse.at({0, 0, row});
        for (std::int64_t i = 0; i < 16; ++i) same &= calm.out.at({0, 0, row, i}) == wild.out.at({0, 0, row, i});
        INFO("row " << row);
        CHECK(same);
      }
    }
  }
}
