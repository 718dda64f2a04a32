// The loops that measure this machine's limits.
#include "rapt/roofline.hpp"

#include <string>

#include "cpu/machine.hpp"
#include "dispatch/entry.hpp"

namespace rapt {
namespace {

const cpu::IsaKernels& kernels_of(Isa isa) {
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (built.isa == isa && built.unusable.empty() && (!built.withheld || built.withheld(true).empty()))
      return *built.kernels;
  const std::string reason = why_unusable(to_string(isa));
  throw Error("isa", std::string(to_string(isa)),
              "an ISA of this build and CPU" + (reason.empty() ? "" : " (" + reason + ")"));
}

}  // namespace

double run_fma_chains(Isa isa, std::int64_t iterations) {
  return kernels_of(isa).fma_chains(iterations);
}
float run_read_stream(Isa isa, const float* data, std::size_t bytes, std::int64_t rounds) {
  const cpu::IsaKernels& kernels = kernels_of(isa);
  float sum = 0;
  for (std::int64_t i = 0; i < rounds; ++i)
    sum += kernels.read_stream(data, static_cast<std::int64_t>(bytes / sizeof(float)));
  return sum;
}

}  // namespace rapt
