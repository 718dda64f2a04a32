#include "cpu/entry.hpp"

#include <algorithm>
#include <string>

namespace rapt::cpu {

CpuEntry::CpuEntry(const KernelFacts& kernel_facts, const BuiltIsa& built) : built_(built) {
  facts = kernel_facts;
  name = entry_name(facts, built.name);
  isa = to_string(built.isa);
  unusable = built.unusable;
  denied = built.denied;
  if (const char* why = facts.opt_in ? facts.opt_in : built.opt_in) opt_in = std::string("only if forced: ") + why;
}

std::string_view refuse_isa(const BuiltIsa& built, const Context::Impl& context) {
  if (context.options.isa && built.isa > *context.options.isa) return "above the context's ISA cap";
  return {};
}

int workers_for(double worth, int concurrency, std::int64_t items) {
  const double workers = std::clamp(worth, 1.0, static_cast<double>(concurrency));
  return static_cast<int>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(workers), 1, std::max<std::int64_t>(items, 1)));
}

StreamPlan::StreamPlan(const StreamWork& work, int concurrency) : scratch_bytes(work.scratch_bytes) {
  work_items = work.items;
  threads = workers_for(work.bytes / kBytesPerWorker, concurrency, work.items);
  items_per_chunk = std::max<std::int64_t>(work.items / (threads * kChunksPerWorker), 1);
  workspace_bytes = static_cast<std::size_t>(threads) * scratch_bytes;
}

std::string StreamPlan::note() const {
  return std::to_string(work_items) + " work items, " + std::to_string(items_per_chunk) + " at a time";
}

}  // namespace rapt::cpu
