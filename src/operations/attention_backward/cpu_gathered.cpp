// attention_backward of gathered keys on the CPU: the workers that share it.
//
// Keys of a list are scattered over the pool, and each token has another list. A work item that had a range of the
// pool would find few keys of each token in it, and would pack the token's rows again for them. So a work item is a
// token here, for one head, with all keys of its rows: it processes its list in steps of some keys, which the kernel
// gathers, and dQ belongs to it alone. dK and dV of a step are added to sums of the pool's rows in the workspace, in
// the order of the tokens: a work item waits for its turn.
//
// The waits are short. A list is first sorted by the range of the pool that its keys are in, stably. A work item that
// has added all of its keys up to some range lets the next one proceed up to there. So work items follow each other
// through the pool, and most of their work does not depend on that order.
//
//   head 0: token 0, token 1, ... | range 0, range 1, ... | head 1: ...
//
// After a head's tokens come work items that turn the sums into gradients, one for each range of the pool, and reset
// the range for the next head. So the sums of only one head exist at a time.
#include <atomic>
#include <cstring>

#include "cpu/entry.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/attention_backward/cpu.hpp"

namespace rapt::cpu {
namespace {

using std::int64_t;
using P = AttentionBackwardProblem;

// The number of ranges of a pool: enough that workers seldom meet in one. Their length decides the order in which keys
// are added to dQ, so it depends on the pool alone.
constexpr int64_t kRanges = 64, kMinRangeRows = 64;
// Groups of at least this many heads need no accumulation intervals: the sums over a group's heads are as short.
constexpr int64_t kLongGroup = 32;

struct PoolRanges {
  int64_t rows, length, count;

  explicit PoolRanges(int64_t pool_rows)
      : rows(pool_rows), length(std::max(ceil_div(rows, kRanges), kMinRangeRows)), count(ceil_div(rows, length)) {}
  int64_t of(int64_t row) const { return row / length; }
};

bool has_pool_sums(const P& p) {
  return p.grads & (P::kDk | P::kDv);
}

PoolSums pool_sums_of(const P& p) {
  const auto whole = [](int64_t n) { return (n + 31) / 32 * 32; };
  PoolSums pool{};
  pool.dv_at = p.grads & P::kDk ? whole(p.d) : 0;
  pool.stride = pool.dv_at + (p.grads & P::kDv ? whole(p.dv) : 0);
  if (p.hk > 0 && p.hq / p.hk < kLongGroup) pool.accum_at = p.pool * pool.stride;
  return pool;
}

// The workers of one call, which take work items one by one.
struct GatheredBackwardWorkers {
  const AttentionBackwardKernel& kernel;
  const IsaKernels& isa;
  const GatheredBackwardPlan& plan;
  const AttentionBackwardParams& p;
  const PoolSums* pool;  // null: no dK and no dV
  std::int32_t *progress, *head_facts;
  std::byte* scratch;
  float* sink_sums;
  const CallTasks* tasks;
  const PoolRanges ranges{p.page_count};
  const int64_t tokens = p.group > 0 && p.pools > 0 ? p.b / p.pools : 0;  // of a pool
  const int64_t items_of_head = tokens + (pool ? ranges.count : 0);
  std::atomic<int64_t> next{0};

  void work(int worker) {
    std::byte* const worker_scratch = scratch + static_cast<std::size_t>(worker) * plan.worker_bytes();
    // Parameters with the sorted list in place of the token's list.
    AttentionBackwardParams sorted = p;
    auto* const list = reinterpret_cast<int64_t*>(worker_scratch + plan.kernel_bytes);
    sorted.pages = {.data = list, .stride = 1, .is_int64 = true}, sorted.pages_stride_b = sorted.pages_stride_token = 0;
    const int64_t end = p.pools * p.hk * items_of_head;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) {
      const TaskScope task(tasks, Task::Kind::item, worker, i, 1);
      const int64_t head = i / items_of_head, at = i % items_of_head;
      if (at < tokens) add_token(i, head, at, sorted, list, worker_scratch);
      else store_range(i, head, at - tokens);
    }
  }

  // Stores the gradients of a range of the pool once all tokens are done with it.
  void store_range(int64_t number, int64_t head, int64_t range) const {
    if (tokens > 0) wait_for(progress[number - range - 1], range + 1);
    const int64_t begin = range * ranges.length;
    isa.attention_backward.store_pool(
        p, {head / p.hk, head % p.hk, begin, std::min(begin + ranges.length, ranges.rows)}, *pool);
    advance(progress[number], 1);
  }

  void add_token(int64_t number, int64_t head, int64_t token, const AttentionBackwardParams& sorted, int64_t* list,
                 std::byte* worker_scratch) const {
    BackwardItem item{.b = head / p.hk * tokens + token, .hk = head % p.hk, .sink_sums = sink_sums, .pool = pool};
    item.head_facts = head_facts + item.b * p.hk + item.hk;
    const int64_t keys = sort_list(item.b, list);
    if (keys > plan.keys_per_step)
      item.dq_sums = reinterpret_cast<float*>(worker_scratch + plan.kernel_bytes + plan.list_bytes);
    int64_t allowed_ranges = 0;  // the first ranges, to which this work item may add
    do {
      item.key_end = item.key_begin + plan.keys_per_step;
      kernel.begin(sorted, item, worker_scratch);
      for (int64_t row = 0; row < p.group; row += plan.chunk_rows) kernel.add_rows(sorted, item, row, worker_scratch);
      const int64_t last = std::min(item.key_end, keys);
      if (pool && last > item.key_begin) {
        allowed_ranges = wait_for_ranges(number, head, token, allowed_ranges, ranges.of(list[last - 1]) + 1);
        kernel.end(sorted, item, worker_scratch);
        // Advances only to the ranges it has waited for: between this step's last range and the next step's first one,
        // earlier tokens may still be adding.
        if (last < keys) advance(progress[number], std::min(ranges.of(list[last]), allowed_ranges));
      }
      item.key_begin = item.key_end;
    } while (item.key_begin < keys);
    if (!pool) return;
    wait_for_ranges(number, head, token, allowed_ranges, ranges.count);
    advance(progress[number], ranges.count);
  }

  // Waits until this work item may add to ranges [begin, end): until the token before is done with them, or for the
  // first token until the previous head's are stored. Returns the larger of begin and end.
  int64_t wait_for_ranges(int64_t number, int64_t head, int64_t token, int64_t begin, int64_t end) const {
    if (token > 0) wait_for(progress[number - 1], end);
    for (int64_t range = begin; token == 0 && head > 0 && range < end; ++range)
      wait_for(progress[number - ranges.count + range], 1);
    return std::max(begin, end);
  }

  // Sorts the list of a token, which is sequence b, by ranges. Returns its length.
  int64_t sort_list(int64_t b, int64_t* list) const {
    Sequence q = sequence_of(p, p, b);
    const int64_t entry = entry_of(p, b, q);
    int64_t at[kRanges + 1] = {};
    for (int64_t j = 0; j < q.len_k; ++j) ++at[ranges.of(listed_row(p, entry, q.k_first, j)) + 1];
    for (int64_t range = 0; range < ranges.count; ++range) at[range + 1] += at[range];
    for (int64_t j = 0; j < q.len_k; ++j) {
      const int64_t row = listed_row(p, entry, q.k_first, j);
      list[at[ranges.of(row)]++] = row;
    }
    return q.len_k;
  }
};

int64_t items_of(const P& p) {
  const int64_t of_head = has_pool_sums(p) ? PoolRanges(p.pool).count : 0;
  return p.hk * (p.b * p.sq + std::max<int64_t>(p.b, 1) * of_head);
}

}  // namespace

std::string GatheredBackwardPlan::note() const {
  return std::to_string(work_items) + " work items of one token, up to " + std::to_string(keys_per_step) +
         " keys at a time, rows in chunks of " + std::to_string(chunk_rows);
}

void size_gathered_workspace(GatheredBackwardPlan& plan, const P& p, const AttentionBackwardKernel& kernel,
                             int threads) {
  plan.threads = threads;
  plan.chunk_rows = rows_of_chunk(kernel);
  const int64_t blocks = ceil_div(std::max<int64_t>(p.sk, 1), kBackwardKeys);
  plan.keys_per_step = std::min(max_backward_keys(p), blocks * kBackwardKeys);
  const int64_t rows = p.hk > 0 ? ceil_div(p.hq / p.hk, plan.chunk_rows) * plan.chunk_rows : 0;
  const double of_pool = 2 * static_cast<double>(p.pool) * static_cast<double>(p.d + p.dv),
               of_worker = 2 * static_cast<double>(p.sk) + static_cast<double>(rows) * static_cast<double>(p.d);
  constexpr double kMaxFloats = 0x1p58;
  if (of_pool > kMaxFloats || of_worker * threads > kMaxFloats)
    throw Error("problem", p.to_string(), "one whose workspace has less than 2^64 bytes");
  plan.pool = pool_sums_of(p);
  const auto bytes = [](int64_t count, std::size_t size) {
    return whole_lines(static_cast<std::size_t>(count) * size);
  };
  plan.progress_bytes = bytes(items_of(p) + p.b * p.sq * p.hk, sizeof(std::int32_t));
  plan.row_bytes = p.dsinks ? bytes(p.b * p.sq * p.hq, sizeof(float)) : 0;
  plan.kernel_bytes = kernel.scratch_bytes({p.d, p.dv, changes_derivative(p), plan.keys_per_step});
  plan.list_bytes = bytes(p.sk, sizeof(int64_t));
  plan.dq_bytes = p.sk > plan.keys_per_step ? bytes(rows * kernel.sums_of_row(p.d), sizeof(float)) : 0;
  plan.count_bytes = has_pool_sums(p) ? bytes(p.pool, sizeof(int64_t)) : 0;
  plan.workspace_bytes = plan.progress_bytes + plan.row_bytes +
                         static_cast<std::size_t>(threads) * plan.worker_bytes() + plan.count_bytes +
                         bytes(p.pool * plan.pool.stride + plan.pool.accum_at, sizeof(float));
}

GatheredBackwardPlan plan_gathered_backward(const P& p, const AttentionBackwardKernel& kernel, int concurrency) {
  const double pairs = static_cast<double>(p.b) * static_cast<double>(p.sq) * static_cast<double>(p.hq) *
                       static_cast<double>(p.sk),
               flops = pairs * static_cast<double>(6 * p.d + 4 * p.dv),
               bytes = has_pool_sums(p) ? static_cast<double>(p.hk) * static_cast<double>(p.pool) *
                                              static_cast<double>(p.d + p.dv) * 4
                                        : 0;
  const double useful_workers =
      std::clamp(flops / kFlopsPerWorker + bytes / kBytesPerWorker, 1.0, static_cast<double>(concurrency));
  GatheredBackwardPlan plan;
  plan.work_items = items_of(p);
  size_gathered_workspace(plan, p, kernel, workers_for(useful_workers, concurrency, plan.work_items));
  return plan;
}

void run_gathered_backward(const GatheredBackwardPlan& plan, const AttentionBackwardKernel& kernel,
                           const IsaKernels& isa, const AttentionBackwardParams& p, const Context::Impl& context,
                           const CallTasks* tasks, std::byte* workspace) {
  const auto take = [&](std::size_t bytes) {
    std::byte* const at = workspace;
    workspace += bytes;
    return at;
  };
  auto* const progress = reinterpret_cast<std::int32_t*>(take(plan.progress_bytes));
  std::memset(progress, 0, plan.progress_bytes);
  auto* const head_facts = progress + plan.progress_bytes / sizeof(std::int32_t) - p.b * p.hk;
  auto* const sink_sums = p.grad_sinks ? reinterpret_cast<float*>(take(plan.row_bytes)) : nullptr;
  std::byte* const scratch = take(static_cast<std::size_t>(plan.threads) * plan.worker_bytes());
  PoolSums pool = plan.pool;
  pool.counts = reinterpret_cast<int64_t*>(take(plan.count_bytes));
  pool.rows = reinterpret_cast<float*>(workspace);
  std::memset(pool.counts, 0, plan.count_bytes);
  const bool has_sums = p.grad_k || p.grad_v;
  GatheredBackwardWorkers workers{kernel,   isa,        plan,    p,         has_sums ? &pool : nullptr,
                                  progress, head_facts, scratch, sink_sums, tasks};
  run_workers(workers, plan.threads, context, tasks);
  if (sink_sums) add_up(p, isa, sink_sums, p.grad_sinks);
}

}  // namespace rapt::cpu
