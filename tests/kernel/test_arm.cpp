// Which kernels an Arm CPU gets. An emulator's CPU is chosen outside: tests/CMakeLists.txt runs each on one.
#include <algorithm>
#include <string>
#include <vector>

#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kProblem = "attention hq=2 sq=70 sk=90 d=64 dtype=bf16";

bool is_usable(Isa isa) {
  const std::vector<Isa> usable = usable_isas();
  return std::find(usable.begin(), usable.end(), isa) != usable.end();
}

/// The ISA that dispatch chooses has right results.
void check_choice(const char* text, Isa isa) {
  ScopedEnvironment no_isa("RAPT_ISA", nullptr), no_kernel("RAPT_KERNEL", nullptr);
  Case c(AttentionProblem::parse(text));
  const Context context;
  const std::string entry(Plan(c.problem, context).entry());
  INFO(entry);
  CHECK(entry.find("." + std::string(to_string(isa)) + ".") != std::string::npos);
  CHECK(run_and_compare(c, context, oracle(c.args())).ok());
}

}  // namespace

TEST_CASE("an Arm CPU without BF16 has NEON's kernels, and says why no others", "[.]") {
  REQUIRE(is_usable(Isa::neon));
  CHECK_FALSE(is_usable(Isa::neonbf16));
  int entries_without = 0;
  for (const EntryInfo& entry : entries()) {
    if (entry.isa != "neonbf16") continue;
    CHECK(entry.unusable.find("FEAT_BF16") != std::string::npos);
    CHECK(refused_argument([&] { forced(std::string(entry.name)); }) == "kernel");
    ++entries_without;
  }
  CHECK(entries_without == 2);
  check_choice(kProblem, Isa::neon);
}

TEST_CASE("an Arm CPU with BF16 multiplies bf16, and leaves short sequences to NEON", "[.]") {
  REQUIRE(is_usable(Isa::neonbf16));
  check_choice(kProblem, Isa::neonbf16);
  check_choice("attention hq=2 sq=40 sk=40 d=64 dtype=bf16", Isa::neon);
  check_choice("attention hq=2 sq=70 sk=90 d=64", Isa::neon);
}
