#include "cpu/machine.hpp"

#include <unistd.h>

namespace rapt::cpu {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports asks both the CPU and the OS (XGETBV).
[[maybe_unused]] std::string missing_for_avx2() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return "this CPU or OS has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "this CPU has no FMA";
  if (!__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) return "this CPU has no BMI (x86-64-v3)";
  return {};
}
[[maybe_unused]] std::string missing_for_avx512() {
  if (std::string missing = missing_for_avx2(); !missing.empty()) return missing;
  if (!__builtin_cpu_supports("avx512f")) return "this CPU or OS has no AVX-512";
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512cd"))
    return "this CPU lacks AVX-512 BW, DQ, VL or CD (x86-64-v4)";
  return {};
}
#endif

Machine probe() {
  Machine m;
#if RAPT_HAVE_AVX512
  m.isas.push_back({Isa::avx512, &avx512::kTable, missing_for_avx512()});
#endif
#if RAPT_HAVE_AVX2
  m.isas.push_back({Isa::avx2, &avx2::kTable, missing_for_avx2()});
#endif
#if RAPT_HAVE_NEON
  m.isas.push_back({Isa::neon, &neon::kTable, {}});
#endif
#if RAPT_HAVE_GENERIC
  m.isas.push_back({Isa::generic, &generic::kTable, {}});
#endif
  const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  m.l2_bytes = l2 > 0 ? static_cast<std::size_t>(l2) : std::size_t{512} << 10;
  return m;
}

}  // namespace

const Machine& machine() {
  static const Machine m = probe();
  return m;
}

}  // namespace rapt::cpu
