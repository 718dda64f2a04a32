// delta_rule_naive: the recurrence as it is written, token by token, with the state in scratch. The reference for the
// other kernels, compiled for one ISA.
#include "cpu/kernels/delta_rule_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/delta_rule.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

struct DeltaRuleNaiveScratch {
  float *state, *k, *q, *decay, *v, *out;  // [d][columns]; rows

  DeltaRuleNaiveScratch(BumpAllocator& allocator, const DeltaRuleShape& shape) {
    const std::int64_t d = round_up(shape.d, kLanes), columns = round_up(shape.columns, kLanes);
    state = allocator.take<float>(shape.d * columns);
    for (float** row : {&k, &q, &decay}) *row = allocator.take<float>(d);
    for (float** row : {&v, &out}) *row = allocator.take<float>(columns);
  }
};

void run(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  const std::int64_t n = item.end - item.begin, width = round_up(n, kLanes);
  BumpAllocator allocator(scratch);
  const DeltaRuleNaiveScratch w(allocator, {p.d, n, p.reads});
  const DeltaTokens tokens(p, item.b, item.h);
  const auto for_each = [&](auto f) {
    for (std::int64_t i = 0; i < p.d; ++i)
      for (std::int64_t c = 0; c < n; c += kLanes) f(i, c, w.state + i * width + c);
  };
  const auto save = [&](std::int64_t slot) {
    if (!p.final || slot < 0) return;
    for_each([&](std::int64_t i, std::int64_t c, const float* from) {
      store_state(p.final, p.final.at(slot, item.h), i, item.begin + c, min(kLanes, n - c), load(from));
    });
  };
  const std::int64_t initial = initial_slot(p, item.b);
  for_each([&](std::int64_t i, std::int64_t c, float* to) {
    store(to, p.initial && initial >= 0
                  ? load_state(p.initial, p.initial.at(initial, item.h), i, item.begin + c, min(kLanes, n - c))
                  : vec(0.f));
  });
  for (std::int64_t t = 0; t < tokens.count(); ++t) {
    const float *const k = tokens.k(t, w.k), *const v = tokens.v(t, item.begin, item.end, w.v);
    const vec factor(tokens.factor(k));
    for (std::int64_t c = 0; c < p.d; c += kLanes) store(w.k + c, load_any(k + c) * factor);
    tokens.decay(t, w.decay);
    for (std::int64_t c = 0; c < n; c += kLanes) store(w.out + c, vec(0.f));
    for_each([&](std::int64_t i, std::int64_t c, float* s) {
      const vec decayed = load(s) * vec(w.decay[i]);
      store(s, decayed);
      store(w.out + c, fma(decayed, vec(w.k[i]), load(w.out + c)));  // the prediction
    });
    const vec beta(tokens.beta(t));
    for (std::int64_t c = 0; c < n; c += kLanes)
      store(w.v + c, p.has_delta ? beta * (load_any(v + c) - load(w.out + c)) : load_any(v + c));
    for_each([&](std::int64_t i, std::int64_t c, float* s) { store(s, fma(vec(w.k[i]), load(w.v + c), load(s))); });
    for (std::int64_t r = 0; r < p.reads; ++r) {
      const float* const q = tokens.q(t, r, w.q);
      const float scale = p.scale * tokens.factor(q);
      for (std::int64_t c = 0; c < n; c += kLanes) store(w.out + c, vec(0.f));
      for_each([&](std::int64_t i, std::int64_t c, const float* s) {
        store(w.out + c, fma(vec(q[i] * scale), load(s), load(w.out + c)));
      });
      tokens.write_out(t, r, item.begin, item.end, w.out);
    }
    if (p.steps > 0) save(slot_of(p, item.b, t));
  }
  if (p.steps == 0) save(slot_of(p, item.b, 0));
}

}  // namespace

const DeltaRuleKernel kDeltaRuleNaive = {.facts = {.operation = Operation::delta_rule,
                                                   .phase = Phase::naive,
                                                   .arithmetic = "f32",
                                                   .dtypes = kFloatTypes,
                                                   .max_head_dim = 256,
                                                   .max_value_head_dim = 256},
                                         .columns = kLanes,
                                         .scratch_bytes = bytes_of<DeltaRuleNaiveScratch>,
                                         .run = run};

}  // namespace rapt::cpu::RAPT_ISA
