// Tuning: its files, what is refused, and that its values reach plans and dispatch.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

namespace fs = std::filesystem;

EntryTuning by_default(const std::string& entry) {
  for (const EntryInfo& info : entries())
    if (info.name == entry) return {entry, info.tuning};
  throw std::logic_error(entry);
}
EntryTuning tuned(const std::string& entry, std::int64_t TuningValues::*key, std::int64_t value) {
  EntryTuning tuning = by_default(entry);
  tuning.values.*key = value;
  return tuning;
}

std::string chosen(const std::string& problem, const Context& context = Context()) {
  return std::string(Plan(parse_problem(problem), context).entry());
}

/// A file that is gone with the test.
class File {
 public:
  explicit File(const std::string& text)
      : path_(fs::temp_directory_path() / ("rapt_tuning_" + std::to_string(getpid()))) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~File() { fs::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

Context context_with(std::vector<EntryTuning> entries) {
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(8);
  options.tuning = Tuning{std::move(entries), {}};
  return Context(options);
}

void check_says(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
}

const char* const kPrefill = "attention hq=2 sq=1024 d=64";
const char* const kIndex = "index_scores sq=1 sk=100000 h=8 d=64 topk=8 full";
const char* const kSelect = "select_topk rows=500 sk=3000 n=20";

}  // namespace

TEST_CASE("tuning: values reach the plans of their entry", "[unit]") {
  const auto plan = [](const char* problem, std::int64_t TuningValues::*key, std::int64_t value) {
    return Plan(parse_problem(problem), context_with({tuned(chosen(problem), key, value)}));
  };
  const auto items = [&](const char* problem, std::int64_t TuningValues::*key, std::int64_t value) {
    return plan(problem, key, value).work_items();
  };
  using V = TuningValues;
  for (const char* problem :
       {kPrefill, "attention hq=32 hk=8 sq=1 sk=3000 d=64", "attention_backward hq=2 sq=1024 d=64",
        "attention_backward hq=4 sq=30 sk=64 d=64 gathered pool=900", "append_kv b=8 hk=8 n=100 sk=100 d=64",
        "merge_states rows=2000 dv=64 count=2", "delta_rule hq=8 t=100 d=64 beta",
        "delta_rule_backward hq=8 t=100 d=64 beta", kIndex, kSelect}) {
    INFO(problem);
    CHECK(plan(problem, &V::worker_us, 1).threads() == 8);
    CHECK(plan(problem, &V::worker_us, 100'000).threads() == 1);
  }
  for (const char* problem :
       {kPrefill, "attention_backward hq=2 sq=1024 d=64", "delta_rule hq=8 t=512 d=64 dv=256 beta", kIndex}) {
    INFO(problem);
    CHECK(items(problem, &V::items_per_worker, 1) < items(problem, &V::items_per_worker, 8));
  }
  CHECK(plan(kSelect, &V::items_per_worker, 1).explain().find("500 work items, 62 at a time") != std::string::npos);
  CHECK(items(kPrefill, &V::min_item_rows, 4096) < items(kPrefill, &V::min_item_rows, 0));
  CHECK(items("attention hq=64 sq=4096 d=256", &V::l2_percent, 1) >
        items("attention hq=64 sq=4096 d=256", &V::l2_percent, 400));
  CHECK(items("attention_backward hq=64 sq=4096 d=256", &V::l2_percent, 1) >
        items("attention_backward hq=64 sq=4096 d=256", &V::l2_percent, 400));
  CHECK(items(kIndex, &V::split_keys, 1 << 20) < items(kIndex, &V::split_keys, 1));
  CHECK(Plan(parse_problem(kPrefill), context_with({})).explain() ==
        Plan(parse_problem(kPrefill), context_with({tuned(chosen(kSelect), &V::worker_us, 1)})).explain());
}

TEST_CASE("tuning: an entry may go first where all entries give the same bits", "[unit]") {
  ScopedEnvironment no_isa("RAPT_ISA", nullptr);
  for (const char* problem : {kSelect, "append_kv b=8 hk=8 n=100 sk=100 d=64"}) {
    for (const std::string& entry : usable_entries(parse_problem(problem))) {
      const Context context = context_with({tuned(entry, &TuningValues::first, 1)});
      const Plan plan(parse_problem(problem), context);
      CHECK(plan.entry() == entry);
      CHECK(plan.candidates().front().entry == entry);
      CHECK(max_workspace_bytes(plan.problem(), context) >= plan.workspace_bytes());
      // Neither a cap nor a forced ISA gives way.
      const std::string best(to_string(usable_isas().back()));
      ScopedEnvironment forced_isa("RAPT_ISA", best.c_str());
      CHECK(chosen(problem, context_with({tuned(entry, &TuningValues::first, 1)})) == chosen(problem));
    }
  }
}

TEST_CASE("tuning: what is written is read again", "[unit]") {
  ScopedEnvironment unset("RAPT_TUNING", nullptr);
  const std::string entry = chosen(kPrefill);
  const Tuning tuning{
      {tuned(entry, &TuningValues::items_per_worker, 8), tuned(chosen(kIndex), &TuningValues::split_keys, 99)}, {}};
  const File file(to_string(tuning));
  const Tuning read = read_tuning(file.path());
  CHECK(read.entries == tuning.entries);
  CHECK(read.source == file.path());
  CHECK(to_string(read) == to_string(tuning));
  for (const TuningKey& key : tuning_keys())  // all of them, whatever another commit's defaults are
    CHECK((to_string(tuning).find("\n" + std::string(key.name) + " = ") != std::string::npos) == (key.name != "first"));
  const File same("# A comment\r\n" + replaced(to_string(tuning), "items_per_worker = 8", "  items_per_worker=8 "));
  CHECK(read_tuning(same.path()).entries == tuning.entries);

  CHECK(Context().tuning().entries.empty());
  ScopedEnvironment environment("RAPT_TUNING", file.path().c_str());
  CHECK(Context().tuning().entries == tuning.entries);
  CHECK(Context().tuning().source == file.path());
  CHECK(context_with({}).tuning().entries.empty());  // options go before the environment
  ScopedEnvironment empty("RAPT_TUNING", "");
  CHECK(Context().tuning().entries.empty());
}

TEST_CASE("tuning: a file that is not for here is refused with what differs", "[unit]") {
  const std::string entry = chosen(kPrefill);
  const std::string good = to_string(Tuning{{tuned(entry, &TuningValues::items_per_worker, 8)}, {}});
  // The file with a line changed; what the error says behind "<file>:<line>: ".
  const auto refused = [&](const std::string& from, const std::string& to) {
    const File file(replaced(good, from, to));
    const std::string text = refused_text([&] { read_tuning(file.path()); });
    return text.starts_with(file.path() + ":") ? text.substr(file.path().size() + 1) : "not refused: " + text;
  };
  check_says(refused("format = 1", "format = 2"), "2: format = 2; wanted 1, of this version of rapt");
  check_says(refused("rapt = ", "rapt = 9"),
             "3: rapt = 9" + std::string(version()) + "; wanted " + std::string(version()));
  check_says(refused("cpu = ", "cpu = Another "), "4: cpu = Another ");
  check_says(refused("cpu = ", "cpu = Another "), ", of this machine");
  check_says(refused("isas = ", "isas = amx9 "), "5: isas = amx9 ");
  check_says(refused("cpus = ", "cpus = 9"), "6: cpus = 9");
  check_says(refused("cpus = ", "CPUs = "), "wanted cpus = ..., as in a file that `rapt tune` wrote");
  check_says(refused("[" + entry, "[x" + entry),
             "8: [x" + entry + "]; wanted an entry of this build on the CPU (perhaps " + entry);
  check_says(refused("items_per_worker = 8", "items_per_worker 8"),
             "10: items_per_worker 8; wanted [entry], or key = value");
  check_says(refused("items_per_worker = 8", "items = 8"),
             "wanted one of worker_us, items_per_worker, min_item_rows, l2_percent");
  check_says(refused("items_per_worker = 8", "split_keys = 8"), "wanted one of worker_us");  // another operation's
  for (const char* value : {"0", "65", "-1", "8.5", "8x", "", "99999999999999999999"})
    check_says(refused("worker = 8", std::string("worker = ") + value), "wanted a number from 1 to 64");
  check_says(refused("worker = 8", "worker = 8\nitems_per_worker = 8"),
             "11: items_per_worker = 8; wanted every key once");
  check_says(refused("worker = 8", "worker = 8\n[" + entry + "]"), "wanted every entry once");
  check_says(refused("[" + entry + "]\n", ""), "; wanted [entry] before its values");
  check_says(refused("format = 1", std::string(5000, 'x')), "xxx...; wanted format = ...");

  for (const TuningKey& key : tuning_keys()) {  // all of them, whatever another commit's defaults are
    const std::size_t at = good.find("\n" + std::string(key.name) + " = ");
    if (at == good.npos) continue;
    const std::string without = refused(good.substr(at, good.find('\n', at + 1) - at), "");
    check_says(without, " [" + entry + "] without " + std::string(key.name) + "; wanted all values of an entry");
  }

  // A file that was cut off is refused, but for one without entries.
  const std::size_t head = good.find("\n\n[") + 1, first_of_entry = good.find('[');
  for (std::size_t length = 0; length < good.size(); ++length) {
    const std::string part = good.substr(0, length);
    INFO(part);
    const File file(part);
    if (length < head || length > first_of_entry || !part.ends_with('\n'))
      CHECK(refused_text([&] { read_tuning(file.path()); }).starts_with(file.path()));
    else CHECK(read_tuning(file.path()).entries.empty());
  }
  const auto refused_path = [](const std::string& path) { return refused_text([&] { read_tuning(path); }); };
  check_says(refused_path("/no/such/file"),
             "/no/such/file: a file that cannot be read (No such file or directory); wanted");
  check_says(refused_path(File(std::string((1 << 20) + 1, '#')).path()), ": more than 1048576 bytes; wanted");
  const std::string pipe = (fs::temp_directory_path() / ("rapt_pipe_" + std::to_string(getpid()))).string();
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  for (const std::string& path :
       {pipe, std::string("/tmp"), std::string("/dev/zero")})  // a pipe must not be waited for
    CHECK(refused_path(path) == path + ": no regular file; wanted a file that `rapt tune` wrote");
  fs::remove(pipe);
  ScopedEnvironment environment("RAPT_TUNING", "/no/such/file");
  CHECK(refused_argument([] { Context(); }) == "RAPT_TUNING=/no/such/file");
}

TEST_CASE("tuning: values that an entry cannot have are refused", "[unit]") {
  const std::string entry = chosen(kPrefill);
  const auto refused = [](const std::vector<EntryTuning>& entries) {
    const std::string text = refused_text([&] { context_with(entries); });
    CHECK(refused_text([&] { to_string(Tuning{entries, {}}); }) == text);
    return text;
  };
  CHECK(refused({tuned(entry, &TuningValues::l2_percent, 0)}) ==
        "tuning: " + entry + ": l2_percent = 0; wanted 1 to 400");
  CHECK(refused({tuned(entry, &TuningValues::worker_us, -1)}) ==
        "tuning: " + entry + ": worker_us = -1; wanted 1 to 100000");
  CHECK(refused({tuned(entry, &TuningValues::first, 1)}) ==
        "tuning: " + entry + ": first = 1; wanted -1: its plans have nothing of the kind");
  CHECK(refused({{entry + "x", {}}}) ==
        "tuning: \"" + entry + "x\"; wanted an entry of this build on the CPU (perhaps " + entry + ")");
  CHECK(refused({tuned(entry, &TuningValues::worker_us, 1), tuned(entry, &TuningValues::worker_us, 1)}) ==
        "tuning: " + entry + " twice; wanted every entry once");
}
