#include "operations/select_topk/case.hpp"
#include "support/random.hpp"

namespace rapt::testing {

SelectTopkProblem sample_select_topk(Random& random) {
  SelectTopkProblem p;
  p.rows = between(random, 1, 20);
  p.sk = one_in(random, 3) ? between(random, 1000, 20000) : between(random, 1, 300);
  p.n = one_in(random, 4)   ? pick(random, {1, 2, 16, 17, 48, 49, p.sk, p.sk + 1, 2 * p.sk})
        : one_in(random, 3) ? between(random, 1, 2100)
                            : between(random, 1, p.sk);
  return p;
}

}  // namespace rapt::testing
