#include "guards/guards.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string_view>
#include <utility>

#include "core/float_environment.hpp"
#include "core/text.hpp"

namespace rapt {
namespace {

using Guard = GuardReport::Guard;

constexpr const char* kWords = "nan, shadow=ROWS, tolerance=FACTOR and determinism, with commas between them";
constexpr const char* kRows = "rows, from 0 to 2147483647";
constexpr const char* kFactor = "a finite factor above 0";

template <class Number>
Number number_of(const char* argument, std::string_view word, std::size_t from, const char* wanted) {
  const std::string_view text = word.substr(from);
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size())
    throw Error(argument, "\"" + std::string(word) + "\"", wanted);
  return number;
}

// Nine digits tell floats apart.
std::string number_text(double x) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), x, std::chars_format::general, 9).ptr};
}

void check(const char* argument, const Guards& guards) {
  if (guards.shadow < 0) throw Error(argument, "shadow=" + std::to_string(guards.shadow), kRows);
  if (!(guards.tolerance > 0) || !std::isfinite(guards.tolerance))
    throw Error(argument, "a tolerance of " + number_text(guards.tolerance), kFactor);
  if (guards.shadow == 0 && guards.tolerance != 1)
    throw Error(argument, "a tolerance without shadow", "shadow=ROWS, too, whose bounds it is for");
}

Guards parse(const char* argument, std::string_view words) {
  Guards guards;
  if (words.empty()) return guards;
  const auto quoted = [](std::string_view text) { return "\"" + std::string(text) + "\""; };
  std::set<std::string_view> given;
  for (std::size_t at = 0; at <= words.size();) {
    const std::size_t end = std::min(words.find(',', at), words.size());
    const std::string_view word = words.substr(at, end - at);
    at = end + 1;
    if (word == "nan") guards.nan = true;
    else if (word == "determinism") guards.determinism = true;
    else if (word.starts_with("shadow=")) guards.shadow = number_of<int>(argument, word, 7, kRows);
    else if (word.starts_with("tolerance=")) guards.tolerance = number_of<double>(argument, word, 10, kFactor);
    else throw Error(argument, quoted(word.empty() ? words : word), kWords);
    if (!given.insert(word.substr(0, word.find('='))).second) throw Error(argument, quoted(words), "every word once");
  }
  check(argument, guards);
  return guards;
}

std::string to_text(const GuardReport::Place& place) {
  std::string text = place.tensor + "[";
  for (std::size_t i = 0; i < place.index.size(); ++i) text += (i ? ", " : "") + std::to_string(place.index[i]);
  return text + "]";
}

std::unique_ptr<const Context::Impl> context_like(const Context::Impl& like, std::shared_ptr<Executor> executor) {
  ContextOptions options = like.options;
  options.executor = std::move(executor);
  options.threads = 0;
  options.observer = nullptr, options.task_observer = nullptr;
  options.guards = Guards{};
  auto context = std::make_unique<Context::Impl>(std::move(options));
  context->isa_forced = like.isa_forced;
  return context;
}

// Several workers, on one thread, the last one first.
class WorkersInTurn final : public Executor {
 public:
  std::string_view name() const noexcept override { return "in turn"; }
  int concurrency() const override { return 3; }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    for (int i = workers; i-- > 0;) work(argument, i);
  }
};

}  // namespace

std::string_view to_string(Guard guard) noexcept {
  switch (guard) {
    case Guard::nan:
      return "nan";
    case Guard::shadow:
      return "shadow";
    case Guard::determinism:
      return "determinism";
  }
  return "";
}

std::string to_string(const GuardReport& r) {
  std::string text = std::string(to_string(r.guard)) + ": ";
  if (r.kind == GuardReport::Kind::not_watched) {
    text += "not watched: " + r.reason;
  } else {
    text += to_text(r.place) + " is " + number_text(r.value);
    if (r.guard == Guard::nan && !r.seen.tensor.empty()) text += ", first seen in " + to_text(r.seen);
    if (r.guard == Guard::shadow)
      text += "; wanted " + number_text(r.wanted) + ", give or take " + number_text(r.bound);
    if (r.guard == Guard::determinism) text += ", and " + number_text(r.wanted) + " in a second run";
  }
  return text + "; " + r.problem + " -> " + r.entry;
}

Guards Guards::parse(std::string_view words) {
  return rapt::parse("guards", words);
}
Guards Guards::of_environment() {
  const char* words = std::getenv("RAPT_GUARDS");
  return words ? rapt::parse("RAPT_GUARDS", words) : Guards{};
}

std::string to_string(const Guards& guards) {
  std::string text;
  const auto add = [&](const std::string& word) { text += (text.empty() ? "" : ",") + word; };
  if (guards.nan) add("nan");
  if (guards.shadow > 0) add("shadow=" + std::to_string(guards.shadow));
  if (guards.shadow > 0 && guards.tolerance != 1) add("tolerance=" + shortest(guards.tolerance));
  if (guards.determinism) add("determinism");
  return text;
}

std::shared_ptr<const ContextGuards> ContextGuards::of(Context::Impl& context) {
  if (!context.options.guards) context.options.guards = Guards::of_environment();
  const Guards& guards = *context.options.guards;
  check("guards", guards);
  return guards.any() ? std::make_shared<const ContextGuards>(guards, context) : nullptr;
}

ContextGuards::ContextGuards(const Guards& guards, const Context::Impl& context) : guards_(guards) {
  if (!guards.determinism) return;
  serial_ = context_like(context, serial_executor());
  several_ = context_like(context, std::make_shared<WorkersInTurn>());
}

template <class Args>
SavedState ContextGuards::save_state_before(const WatchedCall<Args>& watched) const {
  SavedState before;
  if constexpr (std::is_same_v<Args, DeltaRuleArgs>) {
    const FloatEnvironment environment;
    if (guards_.nan) find_not_finite_state(watched.args, std::get<DeltaRuleParams>(watched.call.params), before);
    if (guards_.determinism) keep_state(watched.args, serial_->allocator, before);
  }
  return before;
}

template <class Args>
void ContextGuards::check_after(const WatchedCall<Args>& watched, const SavedState& before, Reports& reports) const {
  const FloatEnvironment environment;
  if (guards_.nan) find_not_finite(watched, before, reports);
  if (guards_.shadow > 0)
    compare_with_shadow(watched, guards_.shadow, guards_.tolerance, calls_.fetch_add(1, std::memory_order_relaxed),
                        reports);
  if (!guards_.determinism) return;
  if (const char* why = why_not_again(watched.args)) return reports.skip(Guard::determinism, why);
  run_again(watched, watched.plan.threads > 1 ? *serial_ : *several_, before, reports);
}

void ContextGuards::skip_all(Reports& reports, const char* reason) const {
  if (guards_.nan) reports.skip(Guard::nan, reason);
  if (guards_.shadow > 0) reports.skip(Guard::shadow, reason);
  if (guards_.determinism) reports.skip(Guard::determinism, reason);
}

void ContextGuards::deliver(const Reports& reports) const {
  for (const GuardReport& report : reports.findings) deliver(report);
  for (const auto& [guard, reason] : reports.skipped) {
    if (!guards_.repeat_not_watched) {
      const std::lock_guard lock(mutex_);
      if (!skipped_.emplace(reports.operation(), guard, reason).second) continue;
    }
    GuardReport report = reports.about(guard, GuardReport::Kind::not_watched);
    report.reason = reason;
    deliver(report);
  }
}

void ContextGuards::deliver(const GuardReport& report) const {
  if (guards_.handler) guards_.handler(report);
  else std::fprintf(stderr, "rapt: %s\n", to_string(report).c_str());
}

#define RAPT_OPERATION(name, Name, NAME)                                                      \
  template SavedState ContextGuards::save_state_before(const WatchedCall<Name##Args>&) const; \
  template void ContextGuards::check_after(const WatchedCall<Name##Args>&, const SavedState&, Reports&) const;
#include "rapt/operations.def"

}  // namespace rapt
