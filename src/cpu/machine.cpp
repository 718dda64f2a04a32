#include "cpu/machine.hpp"

#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/text.hpp"

namespace rapt::cpu {
namespace {

[[maybe_unused]] std::string missing_for_generic() {
  return {};
}
[[maybe_unused]] std::string missing_for_neon() {
  return {};
}
#if defined(__aarch64__)
// HWCAP has what every CPU of the machine has.
[[maybe_unused]] std::string missing_for_neonbf16() {
  constexpr unsigned long kBf16 = 1ul << 14;  // of AT_HWCAP2; older headers lack the name
  if ((getauxval(AT_HWCAP2) & kBf16) == 0) return "this CPU or OS has no BF16 (FEAT_BF16)";
  return {};
}
#endif
#if defined(__x86_64__)
// __builtin_cpu_supports asks both the CPU and the OS (XGETBV).
[[maybe_unused]] std::string missing_for_avx2() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return "this CPU or OS has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "this CPU has no FMA";
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kF16c = 1u << 29;  // of ECX, leaf 1; clang 14 cannot ask by name
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kF16c) == 0) return "this CPU has no F16C";
  if (!__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) return "this CPU has no BMI (x86-64-v3)";
  return {};
}
[[maybe_unused]] std::string missing_for_avx512() {
  if (std::string missing = missing_for_avx2(); !missing.empty()) return missing;
  if (!__builtin_cpu_supports("avx512f")) return "this CPU or OS has no AVX-512";
  return lacking("AVX-512", {{"BW", __builtin_cpu_supports("avx512bw") != 0},
                             {"DQ", __builtin_cpu_supports("avx512dq") != 0},
                             {"VL", __builtin_cpu_supports("avx512vl") != 0},
                             {"CD", __builtin_cpu_supports("avx512cd") != 0}});
}
// VBMI and VBMI2 are for exp2 on 16-bit integers. AMX kernels need all of it too.
[[maybe_unused]] std::string missing_for_avx512bf16() {
  if (std::string missing = missing_for_avx512(); !missing.empty()) return missing;
  return lacking("AVX-512", {{"VBMI", __builtin_cpu_supports("avx512vbmi") != 0},
                             {"VBMI2", __builtin_cpu_supports("avx512vbmi2") != 0},
                             {"BF16", __builtin_cpu_supports("avx512bf16") != 0}});
}
// AMD's CPUs (Zen 4) multiply pairs of bf16 as fast as fp32 numbers, Intel's (Xeons with AMX) at a quarter of that.
[[maybe_unused]] const char* slow_avx512bf16() {
  return __builtin_cpu_is("amd") ? nullptr : "slower than AVX-512 on Intel's CPUs";
}
constexpr long kTileData = 18;  // of the states that the OS saves (XFEATURE_XTILE_DATA)

[[maybe_unused]] std::string missing_for_amx() {
  if (std::string missing = missing_for_avx512bf16(); !missing.empty()) return missing;
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of EDX, leaf 7
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0)
    return "this CPU has no AMX-BF16";
  constexpr long kSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  std::uint64_t states = 0;
  if (syscall(SYS_arch_prctl, kSupported, &states) != 0 || (states >> kTileData & 1) == 0)
    return "this OS has no AMX (Linux has since 5.16)";
  return {};
}

// Linux grants a process the tile registers on request. All its threads and children then have them, and their
// alternate signal stacks must have room for them. So the request is made once, when a kernel is about to run, and its
// answer is kept: otherwise bits could change with the signal stacks of other threads. It is an atomic, which fork()
// cannot leave locked.
[[maybe_unused]] std::string_view tiles_denied(bool ask) {
  constexpr int kNotAsked = -1;
  static std::atomic<int> answer{kNotAsked};  // 0, or the OS's errno
  static_assert(std::atomic<int>::is_always_lock_free);
  int error = answer.load();
  if (error == kNotAsked && ask) {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    const int told = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
    if (answer.compare_exchange_strong(error, told)) error = told;
  }
  if (error == kNotAsked || error == 0) return {};
  return error == ENOSPC ? std::string_view(machine().small_signal_stack)
                         : "the OS refuses this process AMX's tile registers";
}
#endif

// Whether the CPU has products of bytes, which are separate ISA extensions.
bool multiplies_int8([[maybe_unused]] const IsaSupport& support) {
  if (!support.kernels->int8_chains || !support.unusable.empty()) return false;
#if defined(__x86_64__)
  constexpr unsigned kAvx512Vnni = 1u << 11, kAmxInt8 = 1u << 25, kAvxVnni = 1u << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (support.isa == Isa::amx) return !support.denied || (d & kAmxInt8) != 0;  // the model needs none
  if (support.isa != Isa::avx2) return (c & kAvx512Vnni) != 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni) != 0;
#else
  return true;
#endif
}

CpuMachine probe() {
  CpuMachine m;
#if RAPT_HAVE_NEONBF16
  m.isas.push_back({Isa::neonbf16, "neonbf16", &neonbf16::kKernels, missing_for_neonbf16()});
#endif
#if defined(RAPT_AMX_MODEL)
#define RAPT_MISSING__(isa) missing_for_##isa
#define RAPT_MISSING_(isa) RAPT_MISSING__(isa)
  m.isas.push_back({Isa::amx, "amx_model", &amx::kKernels, RAPT_MISSING_(RAPT_AMX_MODEL)()});
#elif RAPT_HAVE_AMX
  m.isas.push_back({Isa::amx, "amx", &amx::kKernels, missing_for_amx(), nullptr, tiles_denied});
  m.small_signal_stack = "the OS refuses AMX's tile registers: an alternate signal stack smaller than " +
                         std::to_string(getauxval(AT_MINSIGSTKSZ)) + " bytes is installed (sigaltstack)";
#endif
#if RAPT_HAVE_AVX512BF16
  m.isas.push_back({Isa::avx512bf16, "avx512bf16", &avx512bf16::kKernels, missing_for_avx512bf16(), slow_avx512bf16()});
#endif
#if RAPT_HAVE_AVX512
  m.isas.push_back({Isa::avx512, "avx512", &avx512::kKernels, missing_for_avx512()});
#endif
#if RAPT_HAVE_AVX2
  m.isas.push_back({Isa::avx2, "avx2", &avx2::kKernels, missing_for_avx2()});
#endif
#if RAPT_HAVE_NEON
  m.isas.push_back({Isa::neon, "neon", &neon::kKernels, missing_for_neon()});
#endif
#if RAPT_HAVE_GENERIC
  m.isas.push_back({Isa::generic, "generic", &generic::kKernels, missing_for_generic()});
#endif
  for (IsaSupport& support : m.isas) support.multiplies_int8 = multiplies_int8(support);
  const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  m.l2_bytes = l2 > 0 ? static_cast<std::size_t>(l2) : std::size_t{512} << 10;
  return m;
}

}  // namespace

std::string lacking(std::string_view family, std::initializer_list<std::pair<std::string_view, bool>> features) {
  std::vector<std::string_view> missing;
  for (const auto& [name, is_there] : features)
    if (!is_there) missing.push_back(name);
  if (missing.empty()) return {};
  return "this CPU lacks " + std::string(family) + " " + list_text(missing, " and ");
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string model;
  for (std::string line; std::getline(file, line) && !line.empty();) {  // of the first CPU
    const std::size_t colon = line.find(':');
    if (colon == line.npos) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    std::string value = line.substr(std::min(colon + 2, line.size()));
    if (key == "model name") return value;
    if (key == "CPU implementer" || key == "CPU part") model += (model.empty() ? "" : " ") + value;  // Arm's
  }
  return model;
}

const CpuMachine& machine() {
  static const CpuMachine m = probe();
  return m;
}

}  // namespace rapt::cpu
