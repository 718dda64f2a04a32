// Guards of rotary_append_kv.
#include "operations/append_kv/guards.hpp"

#include "operations/rotary_append_kv/operation.hpp"

namespace rapt {

void find_not_finite(const WatchedCall<RotaryAppendKvArgs>& w, const SavedState&, Reports& reports) {
  const RotaryAppendKvArgs& a = w.args;
  FirstNotFinite result, cause;
  result("q_out", a.q_out), result("k_out", a.k_out);
  if (const auto& found = result.found()) {
    cause("q", a.q_out.data == a.q.data ? TensorView() : a.q);
    cause("k_new", a.k_out.data == a.append.k_new.data ? TensorView() : a.append.k_new);
    for (const auto& [name, view] :
         {std::pair{"q_norm", a.q_norm}, {"k_norm", a.k_norm}, {"cos", a.cos}, {"sin", a.sin}})
      cause(name, view);
    return report(reports, *found, cause.found());
  }
  const auto found = not_finite_rows(a.append, std::get<RotaryAppendKvParams>(w.call.params));
  if (found) reports.add(GuardReport::Guard::nan, found->place, found->value);
}

const char* why_not_again(const RotaryAppendKvArgs& args) {
  if (args.append.cache.k) return "a cache is written in place";
  if ((args.q && args.q_out.data == args.q.data) || args.k_out.data == args.append.k_new.data)
    return "q or k is written in place";
  return nullptr;
}

}  // namespace rapt
