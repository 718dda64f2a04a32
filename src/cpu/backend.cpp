// The CPU backend: one entry per kernel and ISA.
#include "backend.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cpu/machine.hpp"
#include "cpu/schedule.hpp"
#include "rapt/plan.hpp"
#include "rapt/roofline.hpp"

namespace rapt {
namespace cpu {
namespace {

Quantization quantization(const Operand& scale, const Operand& zero, std::int64_t n, std::int64_t groups) {
  return {static_cast<const float*>(scale.data), static_cast<const float*>(zero.data), strides(scale), strides(zero),
          n / std::max<std::int64_t>(groups, 1)};
}

ForwardParams forward_params(const Call& call) {
  const Problem& p = call.problem;
  ForwardParams f{};
  f.q = call.q.data, f.k = call.k.data, f.v = call.v.data, f.out = call.out.data;
  f.lse = static_cast<float*>(call.lse.data);
  f.q_type = element_of(p.q_dtype), f.kv_type = element_of(p.kv_dtype), f.out_type = element_of(p.out_dtype);
  f.q_stride = strides(call.q);
  f.k_stride = strides(call.k);
  f.v_stride = strides(call.v);
  f.out_stride = strides(call.out);
  f.lse_stride = strides(call.lse);
  f.q_begin = call.q_begin, f.k_begin = call.k_begin, f.k_len = call.k_len;
  f.page_size = p.ring ? p.sk : p.page_size, f.ring = p.ring;
  f.pages = call.pages, f.pages_stride_b = call.pages_stride_b;
  f.k_quant = quantization(call.k_scale, call.k_zero, p.d, p.k_groups);
  f.v_quant = quantization(call.v_scale, call.v_zero, p.dv, p.v_groups);
  f.hk = p.hk, f.group = p.hq / p.hk;
  f.sq = p.sq, f.sk = p.sk, f.d = p.d, f.dv = p.dv;
  f.score = score_params(call);
  return f;
}

struct Strand {
  std::byte* scratch;
  std::int64_t b = -1, hk = -1;  // of its last item
};

// One call on its way through the executor: strands take items until none is left.
struct Loop {
  const KernelTable& table;
  const ForwardSchedule& schedule;
  const ForwardParams& params;
  std::span<const SequenceGroup> all;
  std::span<Lot> lots;
  std::byte* scratch;  // of every strand, then states, then counters

  std::byte* states() const { return scratch + static_cast<std::size_t>(schedule.threads) * schedule.scratch_bytes; }
  std::byte* counters() const { return states() + schedule.state_bytes; }

  void strand(int index) {
    Strand strand{scratch + static_cast<std::size_t>(index) * schedule.scratch_bytes};
    for (std::size_t n = 0; n < lots.size(); ++n) {
      Lot& lot = lots[(static_cast<std::size_t>(index) + n) % lots.size()];
      if (lot.next.load(std::memory_order_relaxed) >= lot.end) continue;  // leaves the line to who needs it
      for (std::int64_t i; (i = lot.next.fetch_add(1, std::memory_order_relaxed)) < lot.end;) run(i, strand);
    }
  }

  void run(std::int64_t i, Strand& strand) {
    constexpr std::int64_t kAllKeys = std::numeric_limits<std::int64_t>::max();
    const auto after = [](std::int64_t item, const SequenceGroup& s) { return item < s.first_item; };
    const SequenceGroup& s = *(std::upper_bound(all.begin(), all.end(), i, after) - 1);
    const auto [b, hk, begin, end, range, part] = place_of(s, params.hk, i - s.first_item);
    WorkItem item{b, hk, begin, end, 0, kAllKeys, nullptr, b == strand.b && hk == strand.hk};
    strand.b = b, strand.hk = hk;
    if (s.parts == 1) return s.kernel->run(params, item, strand.scratch);

    const std::int64_t state = state_floats(params.dv);
    float* const group_states = reinterpret_cast<float*>(states()) + s.first_state +
                                (((b - s.b) * params.hk + hk) * s.rows + begin) * s.parts * state;
    if (part > 0) item.key_begin = s.first_key + part * s.part_keys;
    if (part + 1 < s.parts) item.key_end = s.first_key + (part + 1) * s.part_keys;
    item.state = group_states + part * (end - begin) * state;
    s.kernel->run(params, item, strand.scratch);
    // Whoever does the last part has the others' states in sight and finishes the rows.
    const std::int64_t counter = s.first_counter + (b - s.b) * params.hk * s.row_items + range;
    const std::atomic_ref done(reinterpret_cast<std::int32_t*>(counters())[counter]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == s.parts)
      table.combine(params, {b, hk, begin, end, 0, kAllKeys, group_states}, s.parts);
  }
};

class CpuBackend final : public Backend {
 public:
  CpuBackend() {
    for (const BuiltIsa& built : machine().isas) add(built, built.table->decode);
    for (const BuiltIsa& built : machine().isas)
      for (const ForwardKernel* kernel : built.table->forward) add(built, kernel);
    for (const BuiltIsa& built : machine().isas) add(built, built.table->naive);
  }

  std::string_view name() const noexcept override { return "cpu"; }
  std::span<const Entry> entries() const noexcept override { return entries_; }

  std::string_view refuse(const Entry& entry, const Problem& p, const Context::Impl& context) const override {
    if (context.isa_forced && entry.isa != *context.options.isa) return "RAPT_ISA asks for another ISA";
    if (context.options.isa && entry.isa > *context.options.isa) return "above the context's ISA cap";
    const ForwardKernel& kernel = *built(entry).kernel;
    if (((only(element_of(p.q_dtype)) | only(element_of(p.kv_dtype))) & ~kernel.elements) != 0)
      return "takes other element types";
    const std::int64_t rows = p.hk > 0 ? p.sq * (p.hq / p.hk) : 0;
    if (is_decode(entry) && rows > kDecodeRows && context.options.kernel.empty())
      return "for few query rows (tokens x group) only";
    if (chooses(context) && !is_worthwhile(kernel, rows, p.sk, p.d, p.dv))
      return "for longer sequences: others are faster here";
    if (kernel.rows == 0 && static_cast<double>(p.sq) * static_cast<double>(p.hq) * static_cast<double>(p.sk) > 0x1p40)
      return "its S x S matrix would not fit any memory";
    return {};
  }

  std::unique_ptr<Schedule> plan(const Entry& entry, const Problem& p, const Context::Impl& context) const override {
    return std::make_unique<ForwardSchedule>(
        schedule_forward(p, kernels(entry, p, context), context.concurrency(), machine().l2_bytes));
  }

  std::size_t max_workspace_bytes(const Entry& entry, const Problem& largest,
                                  const Context::Impl& context) const override {
    return cpu::max_workspace_bytes(largest, kernels(entry, largest, context), context.concurrency(),
                                    machine().l2_bytes);
  }

  void run(const Entry& entry, const Schedule& schedule, const Call& call, const Context::Impl& context,
           std::byte* workspace) const override {
    const auto& plan = static_cast<const ForwardSchedule&>(schedule);
    const ForwardParams params = forward_params(call);
    auto* const lots = reinterpret_cast<Lot*>(workspace);
    auto* const list = reinterpret_cast<SequenceGroup*>(workspace + plan.lot_bytes());
    const std::span<const SequenceGroup> all = list_sequences(plan, params, call.problem.b, list);
    if (all.empty()) return;
    std::uninitialized_value_construct_n(lots, plan.threads);
    Loop loop{*built(entry).table,
              plan,
              params,
              all,
              cut_into_lots(all, params.hk, {lots, static_cast<std::size_t>(plan.threads)}),
              workspace + plan.lot_bytes() + plan.list_bytes()};
    std::memset(loop.counters(), 0, plan.counter_bytes);
    if (plan.threads == 1) return loop.strand(0);
    context.executor().run(
        plan.threads, [](void* argument, int index) { static_cast<Loop*>(argument)->strand(index); }, &loop);
  }

 private:
  void add(const BuiltIsa& built, const ForwardKernel* kernel) {
    if (!kernel) return;
    std::string name = std::string(kernel->op) + "." + kernel->arithmetic + "." + built.name;
    if (kernel->rows > 0) name += ".q" + std::to_string(kernel->rows) + "k" + std::to_string(kernel->keys);
    const char* why = kernel->opt_in ? kernel->opt_in : built.opt_in;
    entries_.push_back({std::move(name), built.unusable, why ? std::string("only if forced: ") + why : "", built.isa,
                        static_cast<int>(kernels_.size()), built.withheld});
    kernels_.push_back({kernel, built.table});
  }

  struct BuiltKernel {
    const ForwardKernel* kernel;
    const KernelTable* table;
  };
  const BuiltKernel& built(const Entry& entry) const { return kernels_[static_cast<std::size_t>(entry.id)]; }
  // Sequences of a call need not be alike.
  static bool has_lengths(const Problem& p) { return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths; }
  // Whether the best kernel is asked for, rather than a certain one.
  static bool chooses(const Context::Impl& context) { return context.options.kernel.empty() && !context.isa_forced; }

  // Each sequence goes to the kernel it would get alone, unless one kernel is asked for.
  Kernels kernels(const Entry& entry, const Problem& p, const Context::Impl& context) const {
    Kernels kernels{*built(entry).kernel};
    if (!has_lengths(p) || !context.options.kernel.empty() || is_decode(entry)) return kernels;
    const bool limited = chooses(context) && kernels.kernel.min_key_elements > 0;
    Problem few = p;
    few.sq = 0;
    for (const Entry& other : entries_) {
      const ForwardKernel* kernel = built(other).kernel;
      if (!other.unusable.empty() || !refuse(other, few, context).empty()) continue;
      if (is_decode(other)) {
        if (!kernels.decode && p.ragged_q >= 0) kernels.decode = kernel;
      } else if (limited && !kernels.plain && other.opt_in.empty() && kernel->min_key_elements == 0) {
        kernels.plain = kernel;
      }
    }
    return kernels;
  }
  bool is_decode(const Entry& entry) const { return built(entry).kernel == built(entry).table->decode; }

  std::vector<Entry> entries_;
  std::vector<BuiltKernel> kernels_;
};

}  // namespace
}  // namespace cpu

const Backend& cpu_backend() {
  static const cpu::CpuBackend backend;
  return backend;
}

std::string why_unusable(std::string_view isa) {
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (to_string(built.isa) == isa)
      return built.unusable.empty() && built.withheld ? std::string(built.withheld(false)) : built.unusable;
  return {};
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (why_unusable(to_string(built.isa)).empty()) isas.push_back(built.isa);
  return isas;
}

namespace {
const cpu::KernelTable& table_of(Isa isa) {
  for (const cpu::BuiltIsa& built : cpu::machine().isas)
    if (built.isa == isa && built.unusable.empty() && (!built.withheld || built.withheld(true).empty()))
      return *built.table;
  const std::string reason = why_unusable(to_string(isa));
  throw Error("isa", std::string(to_string(isa)),
              "an ISA of this build and CPU" + (reason.empty() ? "" : " (" + reason + ")"));
}
}  // namespace

double run_fma_chains(Isa isa, std::int64_t iterations) {
  return table_of(isa).fma_chains(iterations);
}
float run_read_stream(Isa isa, const float* data, std::size_t bytes) {
  return table_of(isa).read_stream(data, static_cast<std::int64_t>(bytes / sizeof(float)));
}

}  // namespace rapt
