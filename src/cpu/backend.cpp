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
  for (const cpu::IsaSupport& support : cpu::machine().isas)
    if (to_string(support.isa) == isa)
      return support.unusable.empty() && support.denied ? std::string(support.denied(false)) : support.unusable;
  return {};
}

CpuIdentity cpu_identity() {
  CpuIdentity cpu{cpu::cpu_model(), {}, sysconf(_SC_NPROCESSORS_CONF)};
  for (const cpu::IsaSupport& support : cpu::machine().isas)
    if (support.unusable.empty()) cpu.isas.append(cpu.isas.empty() ? "" : " ").append(support.name);
  return cpu;
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const cpu::IsaSupport& support : cpu::machine().isas)
    if (why_unusable(to_string(support.isa)).empty()) isas.push_back(support.isa);
  return isas;
}

}  // namespace rapt
