// Choosing by options and by environment, and failing loudly when that cannot be.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

std::string chosen(const Context& context) {
  // bf16, which every instruction set has an entry for.
  return std::string(Plan(AttentionProblem::parse("attention hq=2 sq=64 d=64 dtype=bf16"), context).entry());
}

/// The instruction set in an entry's name, the third of its words.
bool is_for(const std::string& entry, Isa isa) {
  const std::string name = "." + std::string(to_string(isa));
  return entry.find(name + ".") != std::string::npos || entry.find(name + "_model.") != std::string::npos;
}

/// The best instruction set up to `cap` that has an entry for bf16 which dispatch may choose.
Isa best_isa(Isa cap) {
  for (Isa isa : usable_isas())
    for (const EntryInfo& entry : entries())
      if (isa <= cap && is_for(entry.name, isa) && entry.opt_in.empty()) return isa;
  throw std::logic_error("no instruction set");
}

}  // namespace

TEST_CASE("the best usable instruction set is the default", "[unit]") {
  ScopedEnvironment isa("RAPT_ISA", nullptr), kernel("RAPT_KERNEL", nullptr);
  const std::vector<Isa> isas = usable_isas();
  REQUIRE_FALSE(isas.empty());
  CHECK(is_for(chosen(Context()), best_isa(isas.front())));
  CHECK(chosen(Context()).find("attention_prefill") == 0);
  CHECK(std::is_sorted(isas.rbegin(), isas.rend()));
}

TEST_CASE("RAPT_ISA and the isa option cap the choice", "[unit]") {
  ScopedEnvironment kernel("RAPT_KERNEL", nullptr);
  for (Isa isa : usable_isas()) {
    ScopedEnvironment environment("RAPT_ISA", std::string(to_string(isa)).c_str());
    CHECK(is_for(chosen(Context()), isa));
    ScopedEnvironment none("RAPT_ISA", nullptr);
    ContextOptions options;
    options.isa = isa;
    CHECK(is_for(chosen(Context(options)), best_isa(isa)));
  }
}

TEST_CASE("RAPT_KERNEL and the kernel option name the entry", "[unit]") {
  ScopedEnvironment isa("RAPT_ISA", nullptr);
  for (const std::string& entry : usable_entries()) {
    ScopedEnvironment environment("RAPT_KERNEL", entry.c_str());
    CHECK(chosen(Context()) == entry);
    ScopedEnvironment none("RAPT_KERNEL", nullptr);
    CHECK(chosen(forced(entry)) == entry);
  }
}

TEST_CASE("options go before the environment", "[unit]") {
  const std::string first = usable_entries().front(), last = usable_entries().back();
  ScopedEnvironment isa("RAPT_ISA", nullptr), environment("RAPT_KERNEL", first.c_str());
  CHECK(chosen(forced(last)) == last);
}

TEST_CASE("the environment is read once, when the context is made", "[unit]") {
  const std::string last = usable_entries().back();
  ScopedEnvironment isa("RAPT_ISA", nullptr), unset("RAPT_KERNEL", nullptr);
  const Context context;
  const std::string before = chosen(context);
  ScopedEnvironment late("RAPT_KERNEL", last.c_str());
  CHECK(chosen(context) == before);
}

TEST_CASE("what cannot be had fails loudly", "[unit]") {
  ScopedEnvironment no_isa("RAPT_ISA", nullptr), no_kernel("RAPT_KERNEL", nullptr);
  for (const char* name : {"avx1024", "AVX2", "sse"}) {
    ScopedEnvironment isa("RAPT_ISA", name);
    CHECK(refused_argument([] { Context(); }) == "RAPT_ISA");
  }
  {
    ScopedEnvironment kernel("RAPT_KERNEL", "attention_prefill.f32.abacus");
    CHECK(refused_argument([] { Context(); }) == "RAPT_KERNEL");
  }
  CHECK(refused_argument([] { forced("no such entry"); }) == "kernel");
  for (const EntryInfo& entry : entries()) {
    if (!entry.unusable.empty()) CHECK(refused_argument([&] { forced(entry.name); }) == "kernel");
  }
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::neon, Isa::avx512bf16, Isa::amx, Isa::neonbf16}) {
    const std::vector<Isa> usable = usable_isas();
    if (std::find(usable.begin(), usable.end(), isa) != usable.end()) continue;
    WARN("skipped: this machine has no " << to_string(isa) << "; asking for it must fail");
    ContextOptions options;
    options.isa = isa;
    CHECK(refused_argument([&] { Context{options}; }) == "isa");
  }
}

TEST_CASE("a name that is nearly an entry's is answered with it", "[unit]") {
  const auto answer = [](const std::string& name) {
    ScopedEnvironment kernel("RAPT_KERNEL", name.c_str());
    try {
      Context();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const EntryInfo& entry : entries()) {
    const std::string& name = entry.name;
    std::string swapped = name;
    std::swap(swapped[3], swapped[4]);
    for (const std::string& wrong : {swapped, name.substr(1), name + "s", " " + name}) {
      INFO(wrong);
      CHECK(answer(wrong).find("(perhaps " + name + ")") != std::string::npos);
    }
  }
  CHECK(answer("attention_prefill").find("(perhaps attention_prefill.") != std::string::npos);
  CHECK(answer("no_such_entry").find("perhaps") == std::string::npos);
  CHECK(answer(std::string(100000, 'a')).find("perhaps") == std::string::npos);
}

TEST_CASE("a forced kernel above the cap leaves nothing to choose", "[unit]") {
  const std::vector<Isa> isas = usable_isas();
  if (isas.size() < 2) {
    WARN("skipped: needs two instruction sets");
    return;
  }
  ContextOptions options;
  options.isa = isas.back();
  options.kernel = usable_entries().front();
  std::string why;
  try {
    chosen(Context(options));
  } catch (const Error& error) {
    why = error.what();
  }
  INFO(why);
  CHECK(why.find(options.kernel + ": above the context's ISA cap") != std::string::npos);
  CHECK(why.find('\n') == std::string::npos);
}
