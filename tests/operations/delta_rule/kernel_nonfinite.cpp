// delta_rule with NaN and Inf: where they may get to.
#include <cmath>
#include <string>
#include <vector>

#include "operations/delta_rule/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using Bits = DeltaRuleBits;

}  // namespace

TEST_CASE("delta_rule: NaN and Inf stay where the recurrence takes them", "[kernel]") {
  constexpr int64_t d = 20, dv = 24;
  enum class In { q, k, v, g, beta, state };
  for (const char* words :
       {"b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state", "b=2 hq=2 t=70 d=20 dv=24 decay=head beta state",
        "b=2 hq=2 t=70 d=20 dv=24 rule=gated decay=channel state",
        "dtype=bf16 b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state",
        "b=2 hq=2 t=1 d=20 dv=24 decay=channel beta state", "b=2 hq=2 t=1 d=20 dv=24 decay=head beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      const Forced context = forced(entry);
      DeltaRuleCase c = case_with_states(problem_of(words), 1, Decays::mostly_weak);
      c.beta_sigmoid = c.beta_double = false;
      const Bits before = bits_on(c, context);
      const int64_t t = c.problem.t;
      for (const In in : {In::q, In::k, In::v, In::g, In::beta, In::state})
        for (const int64_t token : {0, 33, 64, 69})
          for (const float value : {kNan, kInf}) {
            constexpr int64_t column = 7;
            const bool in_column = in == In::v || in == In::state;
            if (token >= t || (token > 0 && in == In::state)) continue;
            if ((value == kInf && !in_column) || (in == In::beta && !c.beta)) continue;
            Element element = in == In::q              ? c.q.at({1, token, 0, 5})
                              : in == In::k            ? c.k.at({1, token, 0, 5})
                              : in == In::v            ? c.v.at({1, token, 0, column})
                              : in == In::beta         ? c.beta.at({1, token, 0})
                              : in == In::state        ? c.initial.at({1, 0, 5, column})
                              : c.g.layout().ndim == 4 ? c.g.at({1, token, 0, 5})
                                                       : c.g.at({1, token, 0});
            const float own = element;
            element = value;
            const Bits after = bits_on(c, context);
            element = own;
            INFO(entry << ": " << words << ", in " << static_cast<int>(in) << " at token " << token);
            int64_t reached = 0;
            const auto hit = [&](int64_t b, int64_t at, int64_t h, int64_t j) {
              if (b != 1 || h != 0 || at < token) return false;
              return in == In::q ? at == token : in_column ? j == column : true;
            };
            const auto is_right = [](const std::vector<float>& got, const std::vector<float>& was, const auto& harmed) {
              for (std::size_t i = 0; i < got.size(); ++i)
                if (harmed(static_cast<int64_t>(i)) ? std::isfinite(got[i]) : got[i] != was[i]) return false;
              return true;
            };
            CHECK(is_right(after.out, before.out, [&](int64_t i) {
              const bool harmed = hit(i / (t * 2 * dv), i / (2 * dv) % t, i / dv % 2, i % dv);
              reached += harmed;
              return harmed;
            }));
            CHECK(reached > 0);
            Bits kept = after;  // but for rows of a state that only round otherwise: those beside an unknown decay
            const bool rows_apart = c.problem.rule == UpdateRule::gated && (in == In::k || in == In::g);
            const auto of_head = [](int64_t i) { return i / (2 * d * dv) == 1 && i / (d * dv) % 2 == 0; };
            for (std::size_t i = 0; rows_apart && i < kept.state.size(); ++i)
              if (const auto at = static_cast<int64_t>(i); of_head(at) && at / dv % d != 5)
                kept.state[i] = before.state[i];
            CHECK(is_right(kept.state, before.state, [&](int64_t i) {
              if (!of_head(i) || in == In::q) return false;
              if (in_column && i % dv != column) return false;
              const bool one_row = in == In::state ? c.problem.rule == UpdateRule::gated : rows_apart;
              return !one_row || i / dv % d == 5;
            }));
          }
    }
}
