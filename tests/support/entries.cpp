#include "support/entries.hpp"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "support/device.hpp"

namespace rapt::testing {
namespace {

AttentionProblem small() {
  return AttentionProblem::parse("attention sq=1 d=16");
}

// Those that `wanted` picks and that take the problem on their device.
std::vector<std::string> taking(const Problem& problem, const std::function<bool(std::string_view)>& wanted) {
  std::vector<std::string> names;
  for (const EntryInfo& entry : entries()) {
    if (entry.operation != operation_of(problem) || !entry.unusable.empty() || !wanted(entry.name)) continue;
    try {
      Problem there = problem;
      std::visit(
          [&](auto& p) {
            if constexpr (requires { p.device; }) p.device = device_of(entry.name);
          },
          there);
      names.emplace_back(Plan(there, forced(entry.name)).entry());
    } catch (const Error&) {
      // Takes other types, or would need too much memory.
    }
  }
  return names;
}

bool has_steps(const TensorView& t, std::size_t dim) {
  return t.shape[dim] > 1 && t.strides[dim] != 0;
}
// Whether the rows of a dense tensor of bytes begin at multiples of 16.
bool is_aligned(const TensorView& t) {
  bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.strides[3] == 1;
  for (std::size_t dim = 0; dim < 3; ++dim) aligned = aligned && (!has_steps(t, dim) || t.strides[dim] % 16 == 0);
  return aligned;
}
bool is_expanded(const TensorView& t) {
  bool expanded = false;
  for (std::size_t dim = 0; dim < 3; ++dim) expanded = expanded || (t.shape[dim] > 1 && t.strides[dim] == 0);
  return expanded;
}

[[noreturn]] void refuse_all(const Problem& problem) {
  throw std::logic_error("no entry takes " + to_string(problem));
}

}  // namespace

std::vector<std::string> every_entry(const Problem& problem) {
  std::vector<std::string> names = taking(problem, selected);
  const std::vector<EntryInfo> all = entries();
  const auto is_selected = [](const EntryInfo& entry) { return entry.unusable.empty() && selected(entry.name); };
  if (std::none_of(all.begin(), all.end(), is_selected))
    throw std::logic_error("RAPT_TEST_ENTRIES selects no entry that this machine can run");
  if (names.empty() && std::all_of(all.begin(), all.end(), [](const EntryInfo& entry) { return selected(entry.name); }))
    refuse_all(problem);
  return names;
}

std::vector<std::string> every_entry() {
  return every_entry(small());
}

std::vector<std::string> usable_entries(const Problem& problem) {
  const DeviceType device = std::visit(
      [](const auto& p) {
        if constexpr (requires { p.device; }) return p.device;
        else return DeviceType::cpu;
      },
      problem);
  std::vector<std::string> names = taking(problem, [&](std::string_view entry) { return device_of(entry) == device; });
  if (names.empty()) refuse_all(problem);
  return names;
}

std::vector<std::string> usable_entries() {
  return usable_entries(small());
}

bool selected(std::string_view entry) {
  const char* wanted = std::getenv("RAPT_TEST_ENTRIES");
  return wanted == nullptr || entry.find(wanted) != std::string_view::npos;
}

EntryInfo info_of(std::string_view entry) {
  for (const EntryInfo& info : entries())
    if (info.name == entry) return info;
  throw std::logic_error("no entry " + std::string(entry));
}

DType operands_of(std::string_view entry) {
  return info_of(entry).arithmetic == "bf16" ? DType::bf16 : DType::f32;
}

Weights weights_of(std::string_view entry, const AttentionArgs& args) {
  const std::string arithmetic = info_of(entry).arithmetic;
  if (arithmetic == "f8e4m3") return weights_of_f8_products(args);
  return arithmetic == "bf16" ? Weights::bf16 : Weights::of_inputs;
}

Weights weights_of_f8_products(const AttentionArgs& args) {
  const TensorView &q = args.q, &k = args.kv.k, &v = args.kv.v;
  const bool has_scales_of_rows = args.q_scale && has_steps(args.q_scale, 2);
  const bool loads = is_aligned(q) && is_aligned(k) && is_aligned(v) && !is_expanded(q) && !is_expanded(k);
  return loads && !has_scales_of_rows ? Weights::f8e4m3 : Weights::bf16;
}

bool ignores_hidden_values(std::string_view entry) {
  return info_of(entry).isa != "sm90a";
}

DeviceType device_of(std::string_view entry) {
  return info_of(entry).backend == "cpu" ? DeviceType::cpu : DeviceType::cuda;
}

bool has_gpu() {
  const std::vector<EntryInfo> all = entries();
  return std::any_of(all.begin(), all.end(),
                     [](const EntryInfo& e) { return e.backend == "cuda" && e.unusable.empty(); });
}

Forced forced(const std::string& entry) {
  return forced(entry, serial_executor(), 1);
}

Forced forced(const std::string& entry, std::shared_ptr<Executor> executor, int threads) {
  ContextOptions options;
  options.executor = std::move(executor);
  options.threads = threads;
  options.kernel = entry;
  return {entry, std::move(options)};
}

Errors run_and_compare(Case& c, const Context& context, const Reference& reference) {
  c.poison_outputs();
  const AttentionArgs args = c.args();
  attention(args, context);
  return compare(args, reference);
}

Errors run_and_compare(Case& c, const std::string& entry, const Reference& reference) {
  c.poison_outputs();
  const AttentionArgs args = c.args();
  run(args, entry);
  return compare(args, reference, weights_of(entry, args));
}

std::string describe(const Errors& e) {
  std::ostringstream text;
  text << "rel_frobenius=" << e.rel_frobenius << " (limit " << e.frobenius_limit << ") max_abs=" << e.max_abs
       << " (limit " << e.max_abs_limit << ") of_bound=" << e.max_bound << " lse_max=" << e.lse_max
       << " lse_of_bound=" << e.lse_max_bound << " nonfinite_agree=" << e.nonfinite_agree;
  return text.str();
}

}  // namespace rapt::testing
