#include <utility>

#include "operations/delta_rule/case.hpp"
#include "support/random.hpp"

namespace rapt::testing {

DeltaRuleProblem sample_delta_rule(Random& random) {
  DeltaRuleProblem p;
  p.rule = static_cast<UpdateRule>(between(random, 0, 3));
  const bool has_decay = p.rule == UpdateRule::gated || p.rule == UpdateRule::gated_delta;
  if (has_decay) p.decay = static_cast<Decay>(between(random, 0, 3));
  p.gate = p.decay != Decay::none && one_in(random, 3);
  p.beta = (p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta) && !one_in(random, 4);
  p.l2norm = one_in(random, 3);
  p.b = between(random, 1, 3);
  p.hk = between(random, 1, 3);
  p.hv = p.hk * between(random, 1, 2);
  if (one_in(random, 4)) std::swap(p.hk, p.hv);
  const std::int64_t h = p.state_heads();
  p.hq = one_in(random, 3) ? h * between(random, 2, 3) : one_in(random, 2) ? p.hk : h;
  p.t = one_in(random, 4) ? 1 : one_in(random, 4) ? between(random, 2, 9) : between(random, 1, 200);  // 1: decode
  const auto size = [&] {
    return one_in(random, 3) ? between(random, 1, 256) : pick(random, {1, 3, 8, 15, 16, 17, 32, 33, 64, 100, 128});
  };
  p.d = size(), p.dv = one_in(random, 2) ? p.d : size();
  while (p.b * h * p.t * p.d * p.dv > std::int64_t{1} << 20 && p.t > 1) p.t = (p.t + 1) / 2;
  p.state = !one_in(random, 3);
  p.slots = p.state && one_in(random, 2);
  if (p.state && one_in(random, 3)) p.state_dtype = DType::bf16;
  if (p.slots && p.t < 8 && one_in(random, 2)) p.steps = p.t + between(random, 0, 2);
  if (one_in(random, 3)) p.ragged = total(random, p.b, p.t);
  if (one_in(random, 2)) {
    p.dtype = static_cast<DType>(pick(random, {0, 1, 2}));
    p.out_dtype = one_in(random, 3) ? static_cast<DType>(pick(random, {0, 1, 2})) : p.dtype;
  }
  return p;
}

}  // namespace rapt::testing
