// The CPU backend: an entry for each kernel and ISA.
#include <unistd.h>

#include "cpu/entry.hpp"
#include "rapt/plan.hpp"

namespace rapt {

const Backend& cpu_backend() {
  static const Backend backend = [] {
    Backend made{"cpu", {}};
#define RAPT_OPERATION(name, Name, NAME) cpu::add_##name(cpu::machine(), made.entries);
#include "rapt/operations.def"
    return made;
  }();
  return backend;
}

std::string why_unusable(std::string_view isa) {
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (to_string(built.isa) == isa)
      return built.unusable.empty() && built.denied ? std::string(built.denied(false)) : built.unusable;
  return {};
}

CpuIdentity cpu_identity() {
  CpuIdentity cpu{cpu::cpu_model(), {}, sysconf(_SC_NPROCESSORS_CONF)};
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (built.unusable.empty()) cpu.isas.append(cpu.isas.empty() ? "" : " ").append(built.name);
  return cpu;
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (why_unusable(to_string(built.isa)).empty()) isas.push_back(built.isa);
  return isas;
}

}  // namespace rapt
