// What the subcommands of `rapt` share: the machine, entry names, contexts and output files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/rapt.hpp"

namespace rapt::tools {

/// Keys keep the order they were given in, so that files can be read and compared by people.
using Json = nlohmann::ordered_json;

inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;  ///< a wrong result, or something outside the user's hands
inline constexpr int kUsage = 2;    ///< the command line or the environment asks for what cannot be done

/// A command line that cannot be carried out; `what()` is one line for the user.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Cache {
  int level = 0;
  std::string type;  ///< "Data", "Instruction" or "Unified"
  std::int64_t bytes = 0;
  int shared_by = 1;  ///< logical CPUs that share one such cache
};

/// The machine as the operating system describes it. What it does not tell is empty or 0.
struct Machine {
  std::string host;
  std::string cpu;
  int cpus = 0;                       ///< logical CPUs
  std::vector<std::string> features;  ///< instruction-set flags that matter to kernels
  std::vector<Cache> caches;          ///< those of the first CPU

  std::int64_t last_level_bytes() const;
};
Machine read_machine();

/// What the user gave, for a terminal: control characters as escapes ("\x1b").
std::string printable(std::string_view text);
/// "32 KiB", "1 MiB", "40 B".
std::string human_bytes(double bytes);
/// The commit that this program was built from, with "-dirty" behind it if files had changed; "unknown" outside of git.
extern const char* const kCommit;
/// Indented text. Bytes that are no UTF-8, which names of files may have, become U+FFFD.
std::string to_text(const Json& json);
/// When, where, by which build and with which of rapt's variables in the environment a JSON file was made, in
/// google-benchmark's words where it has them.
Json run_context(const Machine& machine);
/// JSON has no NaN: what was not measured is null.
Json number(double value);

/// The entry of this name; else those of the operation `text`, or with it between dots of their names ("delta_rule",
/// "avx512"); else those whose names contain it. Of these the names, in dispatch order, that this machine can run on
/// host memory. Throws UsageError when there is none.
std::vector<std::string> match_entries(std::string_view text);
/// Why a problem of `operation` is skipped: what --entry `text` matches is for others.
std::string no_entry_of(std::string_view text, Operation operation);
/// The problem of a text, in which the word "attention" may be left out. Throws UsageError.
Problem parse_problem(const std::string& text);
/// The text of a problem, in which the word "attention" is left out.
std::string short_text(const Problem& problem);

/// The types of its tensors, inputs first (CaseOf::types): "f32", or "f32/bf16/f16" when they differ.
std::string types_text(const Problem& problem);

/// What read bandwidth is taken from: the same for all ISAs and threads, so that the figures can be compared.
std::shared_ptr<const std::vector<float>> read_buffer(const Machine& machine);

/// Runs `call`. When memory for it cannot be had, throws std::runtime_error that says what the tensors of `problem` and
/// the workspace of its plan take.
template <class Call>
auto with_memory(const Problem& problem, const Context& context, Call&& call);

/// A context for up to `threads` threads (0: all) that uses `entry` only (empty: dispatch's choice).
Context make_context(int threads, const std::string& entry, std::function<void(const Task&)> task_observer = {});

/// What would run. Throws UsageError for a problem that no arguments could give or no entry takes; `where` is what the
/// message begins with, --problem and the text if it is empty.
Plan make_plan(const Problem& problem, const Context& context, const std::string& where = "");

/// Throws UsageError when a path cannot be written, or is given twice; leaves nothing behind. Empty ones are passed
/// over.
void require_writable(std::initializer_list<std::filesystem::path> paths);
/// Replaces `path` in one step: readers see the old file or the new one, never a part.
void write_file(const std::filesystem::path& path, std::string_view text);
void write_json(const std::filesystem::path& path, const Json& json);

/// Whether the tensors of a problem take more than the machine has.
bool exceeds_memory(const Problem& problem);
[[noreturn]] void refuse_memory(const Problem& problem, const Context& context);

template <class Call>
auto with_memory(const Problem& problem, const Context& context, Call&& call) {
  try {
    if (exceeds_memory(problem)) throw std::bad_alloc();  // lists of what is in them would be made first, and fill it
    return call();
  } catch (const std::bad_alloc&) {
    refuse_memory(problem, context);
  }
}

}  // namespace rapt::tools
