// When the OS is asked for AMX's tile registers, and what becomes of a process that has small signal stacks.
#include <fcntl.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rapt/rapt.h"
#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

#if defined(__x86_64__) && defined(SYS_arch_prctl)
namespace {

constexpr std::size_t kSmall = 8192;  // SIGSTKSZ as it was for decades
constexpr std::uint64_t kTiles = std::uint64_t{1} << 18;
const char* const kHalves = "attention hq=2 sq=200 d=64 dtype=bf16 lse";

/// What arch_prctl(2) says of the states that the OS has, or that this process may use.
std::uint64_t states(long which) {
  std::uint64_t mask = 0;
  return syscall(SYS_arch_prctl, which, &mask) == 0 ? mask : 0;
}
bool os_has_tiles() {
  return (states(0x1021) & kTiles) != 0;
}
bool process_has_tiles() {
  return (states(0x1022) & kTiles) != 0;
}

std::string amx_entry() {
  for (const EntryInfo& entry : entries())
    if (entry.arithmetic == "bf16" && entry.isa == "amx" && entry.name.find("model") == std::string::npos)
      return entry.name;
  return {};
}
/// Why nothing here can be tested; empty if it can.
std::string without_amx() {
  if (amx_entry().empty()) return "this build has no AMX kernels";
  if (!os_has_tiles()) return "this machine has no AMX";
  if (getauxval(AT_MINSIGSTKSZ) <= kSmall) return "its tile registers fit small signal stacks";
  return {};
}

/// An alternate signal stack of kSmall bytes for the calling thread; the errno of sigaltstack, 0 if it is there now.
int small_stack() {
  static thread_local std::vector<char> memory(kSmall);
  const stack_t stack{memory.data(), 0, memory.size()};
  return sigaltstack(&stack, nullptr) == 0 ? 0 : errno;
}
void no_stack() {
  stack_t stack{};
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
}

bool says_why(const std::string& text) {
  return text.find("alternate signal stack smaller than " + std::to_string(getauxval(AT_MINSIGSTKSZ)) + " bytes") !=
         std::string::npos;
}

/// Whether C's list of entries says why AMX is denied, and whether C calls AMX usable.
std::pair<bool, bool> in_c() {
  const rapt_entry_info* listed = nullptr;
  const std::int32_t* isas = nullptr;
  std::size_t count = 0, isa_count = 0;
  REQUIRE(rapt_entries(&listed, &count) == RAPT_OK);
  REQUIRE(rapt_usable_isas(&isas, &isa_count) == RAPT_OK);
  const bool denied = std::any_of(listed, listed + count, [](const auto& entry) { return says_why(entry.unusable); });
  return {denied, std::find(isas, isas + isa_count, RAPT_ISA_AMX) != isas + isa_count};
}

/// Runs the hidden test `name` in a process of its own, which has asked for nothing yet.
void in_new_process(const std::string& name, const char* isa) {
  INFO(name << ", RAPT_ISA=" << (isa ? isa : ""));
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    unsetenv("RAPT_KERNEL");
    // The address sanitizer has alternate signal stacks of its own, and unmaps whatever stands in their place.
    const char* const asan = std::getenv("ASAN_OPTIONS");
    setenv("ASAN_OPTIONS", (std::string(asan ? asan : "") + ":use_sigaltstack=0").c_str(), 1);
    if (isa) setenv("RAPT_ISA", isa, 1);
    else unsetenv("RAPT_ISA");
    execl("/proc/self/exe", "/proc/self/exe", name.c_str(), static_cast<char*>(nullptr));
    _exit(126);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

}  // namespace

TEST_CASE("a child that may not run AMX", "[.amx-child]") {
  REQUIRE(amx_entry().size() > 0);
  usable_isas();
  Case c(AttentionProblem::parse(kHalves));
  attention(c.args());
  CHECK(Plan(c.problem).entry().find(".amx") == std::string_view::npos);
  CHECK_FALSE(process_has_tiles());
  CHECK(small_stack() == 0);
  std::thread([] { CHECK(small_stack() == 0); }).join();
  no_stack();
}

TEST_CASE("a child that only looks at AMX", "[.amx-child]") {
  REQUIRE(usable_isas().front() == Isa::amx);
  CHECK(entries().front().unusable.empty());
  const Context context;
  Plan(AttentionProblem::parse("attention hq=2 sq=200 d=64"), context);  // fp32, which has no AMX kernel
  Plan(AttentionProblem::parse("attention hq=2 sq=1 sk=200 d=64 dtype=bf16"), context);  // decode
  CHECK_FALSE(process_has_tiles());
  CHECK(small_stack() == 0);
  no_stack();
}

TEST_CASE("a child that runs AMX", "[.amx-child]") {
  Case c(AttentionProblem::parse(kHalves));
  CHECK(Plan(c.problem).entry() == amx_entry());
  CHECK(process_has_tiles());
  attention(c.args());
  CHECK(compare(c.args(), oracle(c.args())).ok());
  CHECK(small_stack() == ENOMEM);  // the price, as docs/contract.md says
}

TEST_CASE("a child with a small signal stack", "[.amx-child]") {
  const bool forced_by_environment = std::getenv("RAPT_ISA") != nullptr;
  CHECK(usable_isas().front() == Isa::amx);
  CHECK(in_c() == std::pair(false, true));
  const AttentionProblem problem = AttentionProblem::parse(kHalves);
  // On another thread, whose stack counts as much.
  std::thread([&] {
    CHECK(small_stack() == 0);
    if (forced_by_environment) {
      CHECK(says_why(refused_text([&] { Plan{problem}; })));
    } else {
      const Plan plan(problem);
      CHECK(plan.entry().find(".amx") == std::string_view::npos);
      CHECK(says_why(plan.explain()));
    }
    no_stack();
  }).join();
  // The answer holds.
  CHECK_FALSE(process_has_tiles());
  for (const EntryInfo& entry : entries())
    if (entry.isa == "amx") CHECK(says_why(entry.unusable));
  CHECK(in_c() == std::pair(true, false));
  const std::vector<Isa> isas = usable_isas();
  CHECK(std::find(isas.begin(), isas.end(), Isa::amx) == isas.end());
  ContextOptions options;
  options.kernel = amx_entry();
  CHECK(says_why(refused_text([&] { Context{options}; })));
  if (forced_by_environment) return;
  Case c(problem);
  attention(c.args());
  CHECK(compare(c.args(), oracle(c.args())).ok());
  CHECK(Plan(problem).entry().find(".amx") == std::string_view::npos);
  // In a child of the process as well.
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(Plan(problem).entry().find(".amx") == std::string_view::npos ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

TEST_CASE("AMX: the OS is asked for tile registers when a kernel is about to use them", "[api]") {
  if (const std::string reason = without_amx(); !reason.empty()) {
    WARN("skipped: " << reason);
    return;
  }
  for (Isa isa : usable_isas())
    if (isa < Isa::avx512bf16) in_new_process("a child that may not run AMX", std::string(to_string(isa)).c_str());
  in_new_process("a child that only looks at AMX", nullptr);
  in_new_process("a child that runs AMX", nullptr);
}

TEST_CASE("AMX: a process with a small signal stack does without and says why", "[api]") {
  if (const std::string reason = without_amx(); !reason.empty()) {
    WARN("skipped: " << reason);
    return;
  }
  in_new_process("a child with a small signal stack", nullptr);
  in_new_process("a child with a small signal stack", "amx");
}
#endif
