// The loops that measure this machine's limits.
#include "rapt/roofline.hpp"

#include <string>

#include "cpu/machine.hpp"
#include "dispatch/entry.hpp"

namespace rapt {
namespace {

const cpu::IsaSupport& support_of(Isa isa) {
  for (const cpu::IsaSupport& support : cpu::machine().isas)
    if (support.isa == isa && support.unusable.empty() && (!support.denied || support.denied(true).empty()))
      return support;
  const std::string reason = why_unusable(to_string(isa));
  throw Error("isa", std::string(to_string(isa)),
              "an ISA of this build and CPU" + (reason.empty() ? "" : " (" + reason + ")"));
}

}  // namespace

double run_fma_chains(Isa isa, std::int64_t iterations) {
  return support_of(isa).kernels->peak_chains(iterations);
}
bool has_int8_chains(Isa isa) {
  return support_of(isa).multiplies_int8;
}
double run_int8_chains(Isa isa, std::int64_t iterations) {
  const cpu::IsaSupport& support = support_of(isa);
  if (!support.multiplies_int8)
    throw Error("isa", std::string(to_string(isa)), "an ISA that multiplies bytes on this CPU");
  std::uint32_t sum = 0;
  return support.kernels->int8_chains(iterations, sum);
}
float run_read_stream(Isa isa, const float* data, std::size_t bytes, std::int64_t rounds) {
  const cpu::IsaKernels& kernels = *support_of(isa).kernels;
  float sum = 0;
  for (std::int64_t i = 0; i < rounds; ++i)
    sum += kernels.read_stream(data, static_cast<std::int64_t>(bytes / sizeof(float)));
  return sum;
}

}  // namespace rapt
