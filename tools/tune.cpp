// `rapt tune`: for each entry that some problem runs on, one value after another. A candidate is compared with what is
// best so far, and what all of them come to with the defaults, in fresh samples: the best of several noisy figures
// flatters itself.
#include "tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "bench/sets.hpp"
#include "bench/timing.hpp"
#include "common.hpp"
#include "progress.hpp"
#include "support/cases.hpp"

namespace rapt::tools {
namespace {

using bench::Comparison;

constexpr double kMinGain = 0.01;     // on the whole
constexpr double kMaxLoss = 0.03;     // of any problem
constexpr double kErrors = 3;         // a gain is more than so many standard errors
constexpr double kConfirmFactor = 3;  // times as long

/// Without the tuning and guards that the environment asks for.
Context context_with(int threads, const std::vector<EntryTuning>& entries) {
  ContextOptions options;
  options.threads = threads;
  options.tuning = Tuning{entries, {}};
  options.guards = Guards{};
  return Context(std::move(options));
}

/// A problem on some threads.
struct Shape {
  Problem problem;
  int threads;

  Plan plan(const std::vector<EntryTuning>& entries) const { return Plan(problem, context_with(threads, entries)); }
};

/// Its tensors, and the bits that its results have.
class Trial {
 public:
  explicit Trial(const Shape& shape) : shape_(shape) {
    const Context plain = context_with(shape.threads, {});
    with_memory(shape.problem, plain, [&] { std::visit([&](const auto& problem) { fill(problem); }, shape.problem); });
    wanted_ = bits_(plain);
  }
  const Shape& shape() const { return shape_; }

  bool changes_bits(const std::vector<EntryTuning>& entries) const {
    return bits_(context_with(shape_.threads, entries)) != wanted_;
  }
  Comparison compare(const std::vector<EntryTuning>& before, const std::vector<EntryTuning>& after,
                     double seconds) const {
    const Context first = context_with(shape_.threads, before), second = context_with(shape_.threads, after);
    constexpr double kMinCall = 2e-3, kRounds = 16;
    return bench::compare([&] { call_(first); }, [&] { call_(second); }, seconds,
                          std::min(kMinCall, seconds / kRounds));
  }

 private:
  template <class P>
  void fill(const P& problem) {
    const auto inputs = std::make_shared<typename testing::CaseOf<P>::type>(testing::CaseOf<P>::timed(problem, 1));
    bits_ = [inputs](const Context& context) { return testing::bits_on(*inputs, context); };
    call_ = [inputs, args = inputs->args()](const Context& context) { testing::call(args, context); };
  }

  Shape shape_;
  std::function<std::vector<std::byte>(const Context&)> bits_;
  std::function<void(const Context&)> call_;
  std::vector<std::byte> wanted_;
};

/// Comparisons of the problems of an entry; those whose plans are the same are none.
struct Outcome {
  std::vector<std::optional<Comparison>> of;

  std::size_t changed() const {
    return static_cast<std::size_t>(std::count_if(of.begin(), of.end(), [](const auto& c) { return c.has_value(); }));
  }
  /// How many times as fast on the whole: the geometric mean.
  double ratio() const {
    double sum = 0;
    for (const auto& c : of) sum += c ? std::log(c->ratio) : 0;
    return std::exp(sum / static_cast<double>(of.size()));
  }
  double error() const {
    double squares = 0;
    for (const auto& c : of) squares += c ? c->error * c->error : 0;
    return std::sqrt(squares) / static_cast<double>(of.size());
  }
  bool loses() const {
    return std::any_of(of.begin(), of.end(), [](const auto& c) { return c && c->ratio < 1 - kMaxLoss; });
  }
  bool wins() const { return ratio() - 1 > std::max(kMinGain, kErrors * error()) && !loses(); }
  const char* verdict() const {
    return wins() ? "wins" : loses() ? "some problem loses" : ratio() - 1 > kMinGain ? "within the noise" : "no gain";
  }
};

/// Other values to try: a few steps of 2, or some sizes where there is no limit yet.
std::vector<std::int64_t> candidates_of(const TuningKey& key, std::int64_t value) {
  std::vector<std::int64_t> candidates;
  if (value == -1 || key.value == &TuningValues::first) return candidates;
  const std::vector<std::int64_t> wanted =
      value == 0 ? std::vector<std::int64_t>{64, 256} : std::vector{value / 4, value / 2, value * 2, value * 4};
  for (const std::int64_t candidate : wanted)
    if (key.min <= candidate && candidate <= key.max) candidates.push_back(candidate);
  return candidates;
}

/// The problems that run on one entry, and what else there is to try for them.
struct Group {
  EntryInfo entry;
  std::vector<Shape> shapes;
  std::vector<EntryInfo> others;  ///< which give the same bits

  std::size_t candidates() const {
    std::size_t count = others.size();
    for (const TuningKey& key : tuning_keys()) count += candidates_of(key, entry.tuning.*key.value).size();
    return count;
  }
};

std::vector<Shape> read_shapes(const TuneOptions& options) {
  std::vector<bench::SetLine> lines;
  if (options.problems.empty()) lines = bench::read_set(options.set);
  for (const std::string& text : options.problems) lines.push_back({parse_problem(text), ""});
  std::vector<Shape> shapes;
  for (const bench::SetLine& line : lines)
    for (const int threads : options.threads) {
      if (make_plan(line.problem, context_with(threads, {}), line.where).backend() != "cpu")
        throw UsageError(
            fmt::format("{}: no CPU kernel takes it; rapt tune measures the CPU's", short_text(line.problem)));
      shapes.push_back({line.problem, threads});
    }
  return shapes;
}

std::vector<Group> grouped(const std::vector<Shape>& shapes) {
  const std::vector<EntryInfo> all = entries();
  std::vector<Group> groups;
  for (const Shape& shape : shapes) {
    const Plan plan = shape.plan({});
    const auto same = [&](const Group& group) { return group.entry.name == plan.entry(); };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      const auto found = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == plan.entry(); });
      group = groups.insert(group, Group{*found, {}, {}});
    }
    group->shapes.push_back(shape);
  }
  for (Group& group : groups)
    for (const EntryInfo& other : all) {
      const auto is_chosen = [&](const Group& g) { return g.entry.name == other.name; };
      if (other.operation == group.entry.operation && other.tuning.first != -1 && other.unusable.empty() &&
          std::none_of(groups.begin(), groups.end(), is_chosen))
        group.others.push_back(other);
    }
  return groups;
}

class Tuner {
 public:
  Tuner(const TuneOptions& options, std::vector<Group> groups)
      : options_(options), groups_(std::move(groups)), progress_(steps()) {}

  /// The entries that win, with their values.
  std::vector<EntryTuning> run() {
    std::vector<EntryTuning> won;
    for (const Group& group : groups_)
      if (const auto entry = tune(group)) won.push_back(*entry);
    progress_.clear();
    return won;
  }
  int wrong() const { return wrong_; }

 private:
  std::size_t steps() const {
    std::size_t steps = 0;
    for (const Group& group : groups_) steps += group.candidates() + 1;
    return std::max<std::size_t>(steps, 1);
  }

  std::optional<EntryTuning> tune(const Group& group) {
    say("\n{}\n", group.entry.name);
    trials_.clear();
    for (const Shape& shape : group.shapes) trials_.emplace_back(shape);
    EntryTuning best{group.entry.name, group.entry.tuning};
    const EntryTuning plain = best;
    double gain = 1;  // of `best` over what it was compared with
    const auto consider = [&](const EntryTuning& before, const EntryTuning& candidate, const std::string& text) {
      const auto outcome = attempt(before, candidate, text);
      if (outcome && outcome->wins() && outcome->ratio() > gain) best = candidate, gain = outcome->ratio();
    };
    for (const EntryInfo& other : group.others) {
      EntryTuning candidate{other.name, other.tuning};
      candidate.values.first = 1;
      consider(plain, candidate, other.name + " first");
    }
    for (const TuningKey& key : tuning_keys()) {
      const EntryTuning before = best;
      gain = 1;
      for (const std::int64_t value : candidates_of(key, before.values.*key.value)) {
        EntryTuning candidate = before;
        candidate.values.*key.value = value;
        consider(before, candidate, fmt::format("{} {} -> {}", key.name, before.values.*key.value, value));
      }
    }
    progress_.begin(group.entry.name + ": the defaults again");
    if (best == plain) return {};
    const Outcome outcome = compare(plain, best, kConfirmFactor * options_.min_time);
    print(outcome);
    if (outcome.wins()) return best;
    say("  not confirmed ({}): the defaults stay\n", outcome.verdict());
    return {};
  }

  /// Nothing if no plan changes, or some bit does.
  std::optional<Outcome> attempt(const EntryTuning& before, const EntryTuning& after, const std::string& text) {
    progress_.begin(fmt::format("{}: {}", before.entry, text));
    const auto changes = [&](const Trial& trial) { return is_changed(trial, before, after); };
    if (std::none_of(trials_.begin(), trials_.end(), changes)) return {};
    for (const Trial& trial : trials_) {
      if (!changes(trial) || !trial.changes_bits({after})) continue;
      ++wrong_;
      say("  {:<34} WRONG: other bits of {}\n", text, short_text(trial.shape().problem));
      return {};
    }
    const Outcome outcome = compare(before, after, options_.min_time);
    say("  {:<34} {:>3} of {:<3} plans  {:.3f} +- {:.3f}  {}\n", text, outcome.changed(), trials_.size(),
        outcome.ratio(), outcome.error(), outcome.verdict());
    return outcome;
  }
  static bool is_changed(const Trial& trial, const EntryTuning& before, const EntryTuning& after) {
    return trial.shape().plan({before}).explain() != trial.shape().plan({after}).explain();
  }
  Outcome compare(const EntryTuning& before, const EntryTuning& after, double seconds) const {
    Outcome outcome;
    for (const Trial& trial : trials_)
      outcome.of.push_back(is_changed(trial, before, after) ? std::optional(trial.compare({before}, {after}, seconds))
                                                            : std::nullopt);
    return outcome;
  }

  void print(const Outcome& outcome) {
    say("  against the defaults: {:.3f} +- {:.3f}\n  {:>10} {:>10} {:>7}  threads  problem\n", outcome.ratio(),
        outcome.error(), "before ms", "after ms", "ratio");
    for (std::size_t i = 0; i < trials_.size(); ++i) {
      const Shape& shape = trials_[i].shape();
      const auto& c = outcome.of[i];
      const std::string times =
          c ? fmt::format("{:>10.4f} {:>10.4f} {:>7.3f}", c->first_s * 1e3, c->second_s * 1e3, c->ratio)
            : fmt::format("{:>29}", "same plan");
      say("  {}  {:>7}  {}\n", times, shape.threads, short_text(shape.problem));
    }
  }
  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    progress_.clear();
    fmt::print(format, std::forward<Args>(args)...);
    std::fflush(stdout);
    progress_.show();
  }

  const TuneOptions& options_;
  const std::vector<Group> groups_;
  Progress progress_;
  std::vector<Trial> trials_;
  int wrong_ = 0;
};

/// Writes the file, and reads it as a context does.
void write(const std::string& path, const std::vector<EntryTuning>& won) {
  write_file(path, to_string(Tuning{won, {}}));
  if (context_with(0, read_tuning(path).entries).tuning().entries != won)
    throw std::runtime_error(fmt::format("{}: reads back as something else", path));
}

}  // namespace

int run_tune(const TuneOptions& given) {
  // A forced ISA is another matter: the entries that it leads to are tuned.
  if (const char* kernel = std::getenv("RAPT_KERNEL"); kernel != nullptr && *kernel != '\0')
    throw UsageError(
        fmt::format("RAPT_KERNEL: \"{}\"; wanted none, as calls are tuned on the entries that they run on", kernel));
  // Guards take time of their own, and the file that RAPT_TUNING names may be the one to be replaced.
  const Guards guards = Guards::of_environment();
  const char* const tuning = std::getenv("RAPT_TUNING");
  TuneOptions options = given;
  if (options.threads.empty()) options.threads = {tbb_executor()->concurrency()};
  require_writable({options.output_path});
  const Machine machine = read_machine();
  std::vector<Group> groups = grouped(read_shapes(options));
  fmt::print("rapt {}, {}, {} logical CPUs\n", version(), machine.cpu.empty() ? "unnamed CPU" : machine.cpu,
             machine.cpus);
  if (guards.any()) fmt::print("Guards are set aside: {}\n", to_string(guards));
  if (tuning != nullptr && *tuning != '\0') fmt::print("RAPT_TUNING is set aside: {}\n", printable(tuning));
  Tuner tuner(options, std::move(groups));
  const std::vector<EntryTuning> won = tuner.run();
  if (tuner.wrong() != 0) {
    fmt::print(stderr, "rapt: {} candidates change bits, which none may; nothing is written\n", tuner.wrong());
    return kFailure;
  }
  fmt::print("\n{}\n", won.empty() ? "The defaults are best here." : "Won:");
  for (const EntryTuning& entry : won) fmt::print("  {}: {}\n", entry.entry, tuned_text(entry));
  if (options.output_path.empty()) {
    fmt::print("Nothing is written without --output FILE.\n");
    return kSuccess;
  }
  write(options.output_path, won);
  fmt::print("Written to {0}, for RAPT_TUNING={0}\n", options.output_path);
  return kSuccess;
}

}  // namespace rapt::tools
