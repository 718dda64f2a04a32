// attention_backward on the CPU: divides keys into work items, and runs them on workers.
#include "operations/attention_backward/cpu.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "core/float_environment.hpp"
#include "cpu/entry.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"

namespace rapt::cpu {
namespace {

using std::int64_t;
using P = AttentionBackwardProblem;

constexpr int64_t kItemsPerWorker = 3;  // the fewest per worker, if there are several, so that they finish together
// Heads with few rows have splits, whose number and length depend on the sequence's keys alone: work items that pass
// chunks on to each other would have too few chunks to occupy workers.
constexpr int64_t kMaxRowsOfSplits = 192, kMinKeysOfSplit = 512;

// A call's workspace holds, one after another: the number of work items and chunks before each sequence; for each work
// item the chunks it has finished; for each head what begin() determines about it; the workers' scratch; sums of dQ of
// heads with several work items; and the rows' shares of dsinks and dalibi.
struct BackwardPlan final : EntryPlan {
  int64_t keys_per_item = 0;  // of heads without splits
  int64_t max_keys = 0;       // of any work item
  int64_t chunk_rows = 0;
  std::size_t first_bytes = 0, progress_bytes = 0, scratch_bytes = 0, sums_bytes = 0, row_bytes = 0;

  std::string note() const override {
    return std::to_string(work_items) + " work items of up to " + std::to_string(max_keys) +
           " keys, rows in chunks of " + std::to_string(chunk_rows);
  }
};

// The work items, and the chunks with sums, of all sequences before one.
struct WorkBefore {
  int64_t items, chunks;
};

int64_t items_of(int64_t len_k, int64_t keys_per_item) {
  return std::max<int64_t>(ceil_div(len_k, keys_per_item), 1);
}

int64_t keys_of_split(int64_t len_k) {
  return std::max(ceil_div(ceil_div(len_k, kMaxSplits), kBackwardKeys) * kBackwardKeys, kMinKeysOfSplit);
}

// The most splits that a sequence of up to len_k keys can have. Fewer keys may have more splits: 32768 have 64 of
// 512, 32769 have 57 of 576.
int64_t max_splits_of(int64_t len_k) {
  return std::clamp<int64_t>(ceil_div(len_k, kMinKeysOfSplit), 1, kMaxSplits);
}

// A head's work items: their keys, their number, and how many sums of dQ its rows have, one or one per split.
struct HeadItems {
  int64_t keys, items, sums;

  HeadItems(int64_t rows, int64_t len_k, int64_t keys_per_item)
      : keys(rows <= kMaxRowsOfSplits ? keys_of_split(len_k) : keys_per_item),
        items(items_of(len_k, keys)),
        sums(rows <= kMaxRowsOfSplits ? items : 1) {}
};

// Problems without tensors may be of any size. Throws Error for one whose items, or pieces of the bias, pass int64.
void check_items(const P& p) {
  const auto at_least_1 = [](int64_t size) { return static_cast<double>(std::max<int64_t>(size, 1)); };
  const double items = at_least_1(p.b) * at_least_1(std::max(p.hq, p.hk)) * (p.dbias ? at_least_1(p.sq) : 1) *
                       at_least_1(p.sk) / static_cast<double>(kBackwardKeys);
  if (items > 0x1p60) throw Error("problem", p.to_string(), "one of less than 2^60 work items");
}

// An upper bound on the chunks with sums of heads with splits, which have up to `rows` rows.
int64_t chunks_in_splits(const P& p, int64_t rows, int64_t chunk_rows) {
  int64_t splits = p.b * max_splits_of(p.sk);
  if (p.sk <= kMinKeysOfSplit) return 0;
  if (p.ragged_k >= 0)
    splits = std::min(splits, ceil_div(2 * p.ragged_k, kMinKeysOfSplit));  // of more than kMinKeysOfSplit each
  return p.hk * splits * ceil_div(std::min(rows, kMaxRowsOfSplits), chunk_rows);
}

// Sizes everything for plan.threads workers. `in_ranges`: heads without splits may have several work items; `splits`:
// heads may have splits.
void size_workspace(BackwardPlan& plan, const P& p, const AttentionBackwardKernel& kernel, int64_t items,
                    bool in_ranges, bool splits) {
  const int64_t heads = p.b * p.hk, rows = rows_of_head(p);
  int64_t chunks = in_ranges ? heads * ceil_div(rows, plan.chunk_rows) : 0;
  if (p.ragged_q >= 0) chunks = std::min(chunks, p.ragged_q * p.hq / plan.chunk_rows + heads);
  if (splits) chunks += chunks_in_splits(p, rows, plan.chunk_rows);
  plan.max_keys = std::max(plan.keys_per_item, splits ? keys_of_split(p.sk) : 0);
  const int64_t all_rows = p.ragged_q >= 0 ? p.ragged_q * p.hq : p.b * p.hq * p.sq;
  const int64_t sums_of_chunk = plan.chunk_rows * kernel.sums_of_row(p.d);
  constexpr double kMaxFloats = 0x1p60;
  if (static_cast<double>(chunks) * static_cast<double>(sums_of_chunk) > kMaxFloats)
    throw Error("problem", p.to_string(), "one whose workspace has less than 2^64 bytes");
  const BackwardShape shape{p.d, p.dv, changes_derivative(p), plan.max_keys};
  plan.first_bytes = whole_lines(static_cast<std::size_t>(p.b + 1) * sizeof(WorkBefore));
  plan.progress_bytes = whole_lines(static_cast<std::size_t>(items + heads) * sizeof(std::int32_t));
  plan.scratch_bytes = kernel.scratch_bytes(shape);
  if (p.dbias) plan.scratch_bytes = std::max(plan.scratch_bytes, kernel.bias_scratch_bytes(shape));
  plan.sums_bytes = whole_lines(static_cast<std::size_t>(chunks * sums_of_chunk) * sizeof(float));
  plan.row_bytes = whole_lines(static_cast<std::size_t>(all_rows) * sizeof(float));
  plan.workspace_bytes = plan.first_bytes + plan.progress_bytes +
                         static_cast<std::size_t>(plan.threads) * plan.scratch_bytes + plan.sums_bytes +
                         plan.row_bytes * static_cast<std::size_t>(p.dsinks + p.dalibi);
}

BackwardPlan plan_backward(const P& p, const AttentionBackwardKernel& kernel, int concurrency) {
  check_items(p);
  BackwardPlan plan;
  plan.chunk_rows = rows_of_chunk(kernel);
  const int64_t heads = p.b * p.hk;
  const double pairs = static_cast<double>(rows_of_head(p)) * static_cast<double>(heads) * static_cast<double>(p.sk);
  const double flops = pairs * static_cast<double>(6 * p.d + 4 * p.dv) * (p.causal ? 0.5 : 1.0);
  const double useful_workers = std::clamp(flops / kFlopsPerWorker, 1.0, static_cast<double>(concurrency));
  // As many ranges of about the same length as keep the workers busy.
  const int64_t key_blocks = ceil_div(std::max<int64_t>(p.sk, 1), kBackwardKeys);
  int64_t ranges = ceil_div(key_blocks * kBackwardKeys, max_backward_keys(p));
  if (useful_workers > 1)
    ranges = std::clamp(ceil_div(static_cast<int64_t>(useful_workers) * kItemsPerWorker, std::max<int64_t>(heads, 1)),
                        ranges, key_blocks);
  plan.keys_per_item = ceil_div(key_blocks, ranges) * kBackwardKeys;
  const bool few = rows_of_head(p) <= kMaxRowsOfSplits, splits = few || p.ragged_q >= 0;
  const int64_t in_ranges = few ? 1 : items_of(p.sk, plan.keys_per_item);
  const int64_t of_head = std::max(in_ranges, splits ? max_splits_of(p.sk) : 1);
  if (few) plan.keys_per_item = keys_of_split(p.sk);
  const bool only_bias = p.grads == 0 && !p.dsinks && !p.dalibi;
  plan.work_items = only_bias ? 0 : heads * of_head;
  int64_t pieces = 0;
  if (p.dbias)
    pieces = (p.bias & P::kFullB ? p.b : 1) * (p.bias & P::kFullH ? p.hq : 1) *
             (p.bias & P::kFullQ ? ceil_div(p.sq, kernel.bias_rows) : 1) * (p.bias & P::kFullK ? key_blocks : 1);
  plan.threads = workers_for(useful_workers, concurrency, plan.work_items + pieces);
  size_workspace(plan, p, kernel, plan.work_items, in_ranges > 1, splits);
  return plan;
}

struct AttentionBackwardWorkers {
  const AttentionBackwardKernel& kernel;
  const BackwardPlan& plan;
  const AttentionBackwardParams& p;
  const WorkBefore* before;             // [b + 1]
  std::int32_t *progress, *head_facts;  // of each item; [b][hk]
  std::byte* scratch;
  float *sums, *sink_sums, *slope_sums;
  const CallTasks* tasks;
  std::atomic<int64_t> next{0};

  int64_t rows_of(const Sequence& q) const { return q.len_q * p.group; }
  int64_t chunks_of(const Sequence& q) const { return ceil_div(rows_of(q), plan.chunk_rows); }
  HeadItems items_of_head(const Sequence& q) const { return {rows_of(q), q.len_k, plan.keys_per_item}; }

  // Pieces of the bias along rows and along keys. They are numbered after the other work items.
  int64_t bias_rows() const { return ceil_div(p.grad_bias_q, kernel.bias_rows); }
  int64_t bias_keys() const { return ceil_div(p.grad_bias_k, kBackwardKeys); }
  int64_t bias_items() const { return p.grad_bias ? p.grad_bias_b * p.grad_bias_h * bias_rows() * bias_keys() : 0; }

  void work(int worker) {
    std::byte* const worker_scratch = scratch + static_cast<std::size_t>(worker) * plan.scratch_bytes;
    const int64_t items = before[p.b].items, end = items + bias_items();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) {
      const TaskScope task(tasks, Task::Kind::item, worker, i, 1);
      i < items ? run(i, worker, worker_scratch) : run_bias(i - items, worker_scratch);
    }
  }
  void run_bias(int64_t i, std::byte* worker_scratch) const {
    const int64_t head = i / (bias_rows() * bias_keys()), piece = i % (bias_rows() * bias_keys());
    const BiasItem item{head / p.grad_bias_h, head % p.grad_bias_h, piece / bias_keys() * kernel.bias_rows,
                        piece % bias_keys() * kBackwardKeys};
    kernel.add_bias(p, item, worker_scratch);
  }

  // Work items are taken in order, so one that another waits for has been started. With several workers, heads
  // alternate: a head with few chunks leaves room for others. A single worker finishes a head while its rows are
  // cached.
  void run(int64_t number, int worker, std::byte* worker_scratch) {
    const auto after = [](int64_t i, const WorkBefore& x) { return i < x.items; };
    const int64_t b = std::upper_bound(before, before + p.b + 1, number, after) - before - 1;
    const Sequence q = sequence_of(p, p, b);
    const HeadItems head = items_of_head(q);
    const int64_t in_sequence = number - before[b].items, next_range = plan.threads > 1 ? p.hk : 1;
    const int64_t range = plan.threads > 1 ? in_sequence / p.hk : in_sequence % head.items;
    const int64_t hk = plan.threads > 1 ? in_sequence % p.hk : in_sequence / head.items;
    const int64_t chunks = chunks_of(q), sums_of_chunk = plan.chunk_rows * kernel.sums_of_row(p.d);
    const bool is_last = range + 1 == head.items;
    BackwardItem item{.b = b,
                      .hk = hk,
                      .key_begin = range * head.keys,
                      .key_end = (range + 1) * head.keys,
                      .clear_end = is_last && p.total_k < 0 ? p.sk : 0,
                      .split = head.sums > 1,
                      .sink_sums = sink_sums,
                      .slope_sums = slope_sums,
                      .head_facts = head_facts + b * p.hk + hk};
    float* const head_sums = sums + (before[b].chunks + hk * chunks * head.sums) * sums_of_chunk;
    if (head.items > 1) item.dq_sums = head_sums;
    if (item.split) {
      item.dq_sums += range * chunks * sums_of_chunk;
      std::fill_n(item.dq_sums, chunks * sums_of_chunk, 0.f);
    }
    // The last rows come first: with a causal mask all work items see them, so none waits long for the one before.
    kernel.begin(p, item, worker_scratch);
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      if (!sees(q, item.key_begin, head.keys, chunk)) continue;
      if (range > 0 && !item.split && sees(q, item.key_begin - head.keys, head.keys, chunk))
        wait_for(progress[number - next_range], chunks - chunk);
      kernel.add_rows(p, item, chunk * plan.chunk_rows, worker_scratch);
      if (!is_last && !item.split) advance(progress[number], chunks - chunk);
    }
    kernel.end(p, item, worker_scratch);
    if (!item.split) return;
    if (!completes(progress[number - range * next_range], head.items)) return;  // of the head's first item
    item.dq_sums = head_sums;
    const TaskScope task(tasks, Task::Kind::combine, worker);
    finish_rows(item, q, chunks, head.items, worker_scratch);
  }

  // The worker that finishes a head's last split adds up dQ of all splits, in order. Then a work item without keys
  // makes gradients of the sums.
  void finish_rows(BackwardItem item, const Sequence& q, int64_t chunks, int64_t splits,
                   std::byte* worker_scratch) const {
    const int64_t n = chunks * plan.chunk_rows * kernel.sums_of_row(p.d);
    {
      const FloatEnvironment environment;
      for (int64_t split = 1; split < splits; ++split)
        for (int64_t i = 0; i < n; ++i) item.dq_sums[i] += item.dq_sums[split * n + i];
    }
    item.key_begin = item.key_end = q.len_k, item.clear_end = 0, item.split = false;
    kernel.begin(p, item, worker_scratch);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) kernel.add_rows(p, item, chunk * plan.chunk_rows, worker_scratch);
  }

  // Whether rows of the chunk see some of `keys` keys from key_begin on. Chunks that see no key belong to the first
  // work item.
  bool sees(const Sequence& q, int64_t key_begin, int64_t keys, int64_t chunk) const {
    const int64_t first = chunk * plan.chunk_rows / p.group;
    const int64_t last = (std::min((chunk + 1) * plan.chunk_rows, rows_of(q)) - 1) / p.group,
                  offset = row_offset(p.score, q);
    const int64_t low = visible_keys(p.score, first, offset + first, 0, q.len_k).first;
    const int64_t high = visible_keys(p.score, last, offset + last, 0, q.len_k).last;
    if (low >= high) return key_begin == 0;
    return low < key_begin + keys && high > key_begin;
  }
};

class AttentionBackwardEntry final : public CpuEntry {
 public:
  AttentionBackwardEntry(const AttentionBackwardKernel& kernel, const IsaSupport& support)
      : CpuEntry(kernel.facts, support), kernel_(kernel) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    const auto& p = std::get<P>(problem);
    if (!has_positions(p))
      return std::make_unique<GatheredBackwardPlan>(plan_gathered_backward(p, kernel_, context.concurrency()));
    return std::make_unique<BackwardPlan>(plan_backward(p, kernel_, context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    const auto& p = std::get<P>(largest);
    if (!has_positions(p)) {
      GatheredBackwardPlan plan;
      size_gathered_workspace(plan, p, kernel_, context.concurrency());
      return plan.workspace_bytes;
    }
    check_items(p);
    BackwardPlan plan;
    plan.chunk_rows = rows_of_chunk(kernel_);
    plan.threads = context.concurrency();
    const int64_t blocks = ceil_div(std::max<int64_t>(p.sk, 1), kBackwardKeys);
    plan.keys_per_item = std::min(blocks * kBackwardKeys, max_backward_keys(p));
    size_workspace(plan, p, kernel_, p.b * p.hk * blocks, blocks > 1, true);
    return plan.workspace_bytes;
  }
  void run(const EntryPlan& entry_plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& p = std::get<AttentionBackwardParams>(call.params);
    if (!has_positions(std::get<P>(call.problem)))
      return run_gathered_backward(static_cast<const GatheredBackwardPlan&>(entry_plan), kernel_, *support_.kernels, p,
                                   context, tasks, workspace);
    const auto& plan = static_cast<const BackwardPlan&>(entry_plan);
    auto* const before = reinterpret_cast<WorkBefore*>(workspace);
    std::byte* at = workspace + plan.first_bytes;
    auto* const progress = reinterpret_cast<std::int32_t*>(at);
    std::memset(progress, 0, plan.progress_bytes);
    auto* const head_facts = progress + plan.progress_bytes / sizeof(std::int32_t) - p.b * p.hk;
    at += plan.progress_bytes;
    std::byte* const scratch = at;
    at += static_cast<std::size_t>(plan.threads) * plan.scratch_bytes;
    auto* const sums = reinterpret_cast<float*>(at);
    at += plan.sums_bytes;
    const auto rows_of = [&](const Gradient& wanted) -> float* {
      if (!wanted) return nullptr;
      auto* const rows = reinterpret_cast<float*>(at);
      at += plan.row_bytes;
      return rows;
    };
    float* const sink_sums = rows_of(p.grad_sinks);
    float* const slope_sums = rows_of(p.grad_alibi);
    AttentionBackwardWorkers workers{kernel_, plan, p,         before,     progress, head_facts,
                                     scratch, sums, sink_sums, slope_sums, tasks};
    before[0] = {0, 0};
    for (int64_t b = 0; b < p.b; ++b) {
      const Sequence q = sequence_of(p, p, b);
      const HeadItems head = workers.items_of_head(q);
      before[b + 1] = {before[b].items + (plan.work_items == 0 ? 0 : p.hk * head.items),
                       before[b].chunks + (head.items > 1 ? p.hk * workers.chunks_of(q) * head.sums : 0)};
    }
    run_workers(workers, plan.threads, context, tasks);
    if (sink_sums) add_up(p, *support_.kernels, sink_sums, p.grad_sinks);
    if (slope_sums) add_up(p, *support_.kernels, slope_sums, p.grad_alibi);
  }

 private:
  const AttentionBackwardKernel& kernel_;
};

}  // namespace

void add_up(const AttentionBackwardParams& p, const IsaKernels& isa, const float* rows, const Gradient& to) {
  const FloatEnvironment environment;
  const auto store = [&](int64_t at, double x) {
    const auto rounded = static_cast<float>(x);
    isa.convert(DType::f32, &rounded, to.type,
                static_cast<std::byte*>(to.data) + at * static_cast<int64_t>(size_of(to.type)), 1);
  };
  const auto sum = [&](int64_t b, int64_t h) {
    const Sequence q = sequence_of(p, p, b);
    const float* const from = p.total_q < 0 ? rows + (b * p.hq + h) * p.sq : rows + h * p.total_q + q.q_first;
    double total = 0;
    for (int64_t i = 0; i < q.len_q; ++i) total += static_cast<double>(from[i]);
    return total;
  };
  for (int64_t h = 0; h < p.hq; ++h) {
    double total = 0;
    for (int64_t b = 0; b < p.b; ++b) {
      const double of_sequence = sum(b, h);
      total += of_sequence;
      if (to.stride.b != 0) store(b * to.stride.b + h * to.stride.h, of_sequence);
    }
    if (to.stride.b == 0) store(h * to.stride.h, total);
  }
}

void add_attention_backward(const CpuMachine& machine, Entries& entries) {
  const auto add = [&](const AttentionBackwardKernel* kernel, const IsaSupport& support) {
    if (kernel) entries.push_back(std::make_unique<AttentionBackwardEntry>(*kernel, support));
  };
  for (const IsaSupport& support : machine.isas)
    add(support.kernels->attention_backward.best, support), add(support.kernels->attention_backward.f16, support);
  for (const IsaSupport& support : machine.isas) add(support.kernels->attention_backward.naive, support);
}

}  // namespace rapt::cpu
