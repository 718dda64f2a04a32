#include "cpu/entry.hpp"

#include <algorithm>
#include <string>

namespace rapt::cpu {

CpuEntry::CpuEntry(const KernelFacts& kernel_facts, const IsaSupport& support) : support_(support) {
  facts = kernel_facts;
  name = entry_name(facts, support.name);
  isa = to_string(support.isa);
  unusable = support.unusable;
  denied = support.denied;
  if (const char* why = facts.opt_in ? facts.opt_in : support.opt_in) opt_in = std::string("only if forced: ") + why;
}

std::string_view refuse_isa(const IsaSupport& support, const Context::Impl& context) {
  if (context.options.isa && support.isa > *context.options.isa) return "above the context's ISA cap";
  return {};
}

int workers_for(double useful_workers, int concurrency, std::int64_t items) {
  const double workers = std::clamp(useful_workers, 1.0, static_cast<double>(concurrency));
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
