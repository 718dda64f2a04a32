#include "operations/attention/cpu_plan.hpp"

#include <algorithm>
#include <string>

#include "cpu/entry.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/cpu_work_list.hpp"

namespace rapt::cpu {
namespace {

// The keys of a split, or 8 for each row if that is more. Up to a quarter more keys are not split again: that would
// cost a work item and partial results, and save little.
constexpr std::int64_t kSplitKeys = 512;
// A sequence of at most kFewRows rows has at most this many splits, counted over all of its kv heads.
constexpr std::int64_t kMaxSplitsOfSequence = 256;
// A sequence of more rows has its keys split only as far as it then has at most this many work items, counted over all
// of its kv heads, and as if each item had kRowsOfSplitItem rows.
constexpr std::int64_t kMaxSplitItems = 32, kRowsOfSplitItem = 128;
// Where there are several workers, each should get at least this many items, even if an item then has fewer rows than
// min_item_rows.
constexpr std::int64_t kMinItems = 2;
// Work items whose keys are packed already are half as large, since more of them cost little.
constexpr int kFinerIfKept = 2;
// The overhead of a work item besides arithmetic and reading: 0.4 us on Zen 2 and 0.6 on a Xeon. And the microseconds
// of work that are worth a worker (docs/internals/cpu_kernels.md); other operations ask for more.
constexpr double kItemUs = 0.6;
constexpr double kAttentionWorkerUs = 3;

std::int64_t max_splits(std::int64_t hk, std::int64_t rows) {
  hk = std::max<std::int64_t>(hk, 1);
  if (rows > kSplitRows) return 1;
  const std::int64_t splits =
      rows <= kFewRows ? kMaxSplitsOfSequence / hk : kMaxSplitItems / (hk * ceil_div(rows, kRowsOfSplitItem));
  return std::clamp<std::int64_t>(splits, 1, kMaxSplits);
}

double bytes_of_keys(const AttentionProblem& p) {
  return static_cast<double>(p.b * p.hk) * static_cast<double>(p.sk) * static_cast<double>(p.d + p.dv) *
         bytes_of(p.kv_dtype);
}

double bytes_of_tensors(const AttentionProblem& p) {
  const auto tokens = static_cast<double>(p.b * p.hq) * static_cast<double>(p.sq);
  return bytes_of_keys(p) + tokens * static_cast<double>(p.d) * bytes_of(p.q_dtype) +
         tokens * static_cast<double>(p.dv) * bytes_of(p.out_dtype);
}

[[noreturn]] void too_large(const AttentionProblem& p) {
  throw Error("problem", p.to_string(), "one whose workspace has less than 2^64 bytes");
}

bool takes_whole_heads(const AttentionKernel& kernel) {
  return kernel.max_rows == 0;
}

// The query blocks of a work item share each block of K and V. More of them are better as long as their Q^T and O^T
// stay in `bytes` of L2.
std::int64_t max_query_blocks(const AttentionProblem& p, const AttentionKernel& kernel, std::size_t bytes) {
  const std::int64_t rows = kernel.facts.block_q;
  const auto query_block_bytes = static_cast<std::int64_t>(sizeof(float)) * rows * (p.d + p.dv);
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(bytes) / query_block_bytes, 1, kernel.max_rows / rows);
}

// Rows of a kv head of one element of the batch. All tokens count, even where keys are gathered and each token is a
// sequence of its own.
std::int64_t rows_of_batch_element(const AttentionProblem& p) {
  return p.hk > 0 ? p.sq * (p.hq / p.hk) : 0;
}

// The largest number of splits of a head's keys if the head has this many rows. work_list() counts keys from a multiple
// of kSplitAlign on, up to kSplitAlign - 1 more than rows see.
std::int64_t max_splits_of(const AttentionProblem& p, std::int64_t rows) {
  const std::int64_t unseen = may_start_late(p) ? kSplitAlign - 1 : 0;
  return split_count(p.sk + unseen, p.hk, rows, has_positions(p));
}
// The largest number of partial results that a kv head of one batch element can leave, whatever number of rows it has,
// up to `rows`.
std::int64_t max_partials(const AttentionProblem& p, std::int64_t rows) {
  const std::int64_t few = std::min(rows, kFewRows), splits = max_splits_of(p, few);
  if (splits <= 1) return 0;
  const std::int64_t of_more =
      rows > kFewRows ? kMaxSplitItems * kRowsOfSplitItem / std::max<std::int64_t>(p.hk, 1) : 0;
  return std::max(few * splits, of_more);
}

// Sizes everything but what depends on the number of workers. `partials` are those of a kv head of one batch element.
void size_workspace(AttentionPlan& plan, const AttentionProblem& problem, std::int64_t partials) {
  const AttentionProblem p = in_sequences(problem);
  const AttentionChoice& choice = plan.choice;
  const std::int64_t rows = rows_of_head(p);
  const auto needs = [&](const AttentionCandidate* candidate, std::int64_t rows_per_item) {
    const std::int64_t of_item = std::min(rows_per_item, std::max<std::int64_t>(rows, 1));
    if (candidate)
      plan.scratch_bytes = std::max(
          plan.scratch_bytes,
          candidate->kernel->scratch_bytes({p.sk, p.d, p.dv, of_item, p.k_groups + (p.k_groups > 0 && p.k_tail > 0)}));
  };
  if (choice.short_keys) {
    const AttentionKernel& kernel = *choice.short_keys->kernel;
    plan.short_rows_per_item =
        std::min<std::int64_t>(round_up(plan.rows_per_item, kernel.facts.block_q), kernel.max_rows);
  }
  needs(choice.chosen, plan.rows_per_item), needs(choice.short_keys, plan.short_rows_per_item);
  needs(choice.few_rows, kDecodeRows);
  plan.max_sequences = has_lengths(p) ? p.b : 1;
  if (takes_whole_heads(*choice.chosen->kernel) || partials == 0) return;
  const std::int64_t heads = problem.b * problem.hk, split_rows = std::min(rows_of_batch_element(problem), kSplitRows);
  partials *= heads;
  if (p.ragged_q >= 0) partials = std::min(partials, p.ragged_q * p.hq * max_splits_of(p, 1));
  if (__builtin_mul_overflow(static_cast<std::size_t>(partials),
                             static_cast<std::size_t>(partial_floats(p.dv)) * sizeof(float), &plan.partial_bytes))
    too_large(p);
  plan.counter_bytes = whole_lines(static_cast<std::size_t>(heads * split_rows) * sizeof(std::int32_t));
}

void add_workers(AttentionPlan& plan, const AttentionProblem& p, int threads) {
  plan.threads = threads;
  plan.queue_bytes = static_cast<std::size_t>(threads) * sizeof(WorkQueue);
  plan.list_bytes = whole_lines(static_cast<std::size_t>(plan.max_sequences) * sizeof(SequenceWork));
  std::size_t& total = plan.workspace_bytes;
  if (__builtin_mul_overflow(plan.scratch_bytes, static_cast<std::size_t>(threads), &total)) too_large(p);
  for (const std::size_t bytes : {plan.partial_bytes, plan.counter_bytes, plan.queue_bytes, plan.list_bytes})
    if (__builtin_add_overflow(total, bytes, &total)) too_large(p);
}

}  // namespace

std::int64_t split_count(std::int64_t keys, std::int64_t hk, std::int64_t rows, bool positions) {
  const std::int64_t wanted = positions ? std::max(kSplitKeys, round_up(8 * rows, kSplitKeys)) : kSplitKeys;
  return std::clamp<std::int64_t>(ceil_div(keys - wanted / 4, wanted), 1, max_splits(hk, rows));
}

std::int64_t rows_of_head(const AttentionProblem& problem) {
  return rows_of_batch_element(in_sequences(problem));
}

AttentionPlan plan_attention(const AttentionProblem& problem, const AttentionChoice& choice, int concurrency,
                             std::size_t l2_bytes) {
  const AttentionProblem p = in_sequences(problem);
  const AttentionKernel& kernel = *choice.chosen->kernel;
  AttentionPlan plan;
  plan.choice = choice;
  const std::int64_t rows = rows_of_head(p), heads = p.b * p.hk, rows_of_all = rows_of_batch_element(problem);
  const std::int64_t splits = takes_whole_heads(kernel) ? 1 : max_splits_of(problem, rows_of_all);
  plan.max_splits = p.ragged_q >= 0 && !takes_whole_heads(kernel) ? max_splits_of(problem, 1) : splits;
  plan.rows_per_item = std::max<std::int64_t>(rows, 1);
  if (!takes_whole_heads(kernel)) {
    const std::int64_t block = kernel.facts.block_q;
    std::int64_t q_blocks = max_query_blocks(p, kernel, item_bytes(l2_bytes));
    // Each of several workers gets its share of the items. Where keys are split, an item prepares its keys for itself
    // alone, so the number of items is left to the splits, which cost about the same, and items keep their rows.
    const std::int64_t of_worker = rows * heads * splits / block / concurrency;
    // With a left window, an item sees keys that the item before it did not.
    plan.keeps_keys = concurrency > 1 && kernel.kept_keys && p.window_left < 0 && has_positions(p) &&
                      p.sk <= kernel.kept_keys(p.d, p.dv);
    const int finer = plan.keeps_keys ? kFinerIfKept : 1;
    const std::int64_t min_query_blocks =
        std::min<std::int64_t>(kernel.min_item_rows / finer / block, splits > 1 ? of_worker : of_worker / kMinItems);
    if (concurrency > 1)
      q_blocks = std::min(q_blocks, std::max(of_worker / (kernel.items_per_worker * finer), min_query_blocks));
    // All items of a head are about equally large.
    const std::int64_t of_head = std::max<std::int64_t>(ceil_div(rows, block), 1);
    const std::int64_t items = ceil_div(of_head, std::max<std::int64_t>(q_blocks, 1));
    plan.rows_per_item = ceil_div(of_head, items) * block;
  }
  // Tensors that fit the workers' L2 are probably cached, and prefetching them again costs small work items 2 to 10 %.
  plan.looks_ahead = bytes_of_tensors(p) > static_cast<double>(l2_bytes) * concurrency;
  plan.work_items = heads * ceil_div(rows, plan.rows_per_item);
  const std::int64_t partials = splits > 1 ? rows_of_all * splits : 0;
  size_workspace(plan, problem, p.ragged_q >= 0 ? max_partials(problem, rows_of_all) : partials);
  plan.work_items *= splits;

  const double pairs = static_cast<double>(rows) * static_cast<double>(heads) * static_cast<double>(p.sk);
  const double flops = 2.0 * pairs * static_cast<double>(p.d + p.dv) * (p.causal ? 0.5 : 1.0);
  const double us =
      std::max(flops / kFlopsPerUs, bytes_of_keys(p) / kBytesPerUs) + kItemUs * static_cast<double>(plan.work_items);
  add_workers(plan, p, workers_for(us / kAttentionWorkerUs, concurrency, plan.work_items));
  return plan;
}

std::size_t max_workspace_bytes(const AttentionProblem& p, const AttentionChoice& choice, int concurrency,
                                std::size_t l2_bytes) {
  const AttentionKernel& kernel = *choice.chosen->kernel;
  AttentionPlan plan;
  plan.choice = choice;
  plan.rows_per_item = takes_whole_heads(kernel)
                           ? rows_of_head(p)
                           : max_query_blocks(p, kernel, item_bytes(l2_bytes)) * kernel.facts.block_q;
  size_workspace(plan, p, max_partials(p, rows_of_batch_element(p)));
  add_workers(plan, p, concurrency);
  return plan.workspace_bytes;
}

std::string AttentionPlan::note() const {
  std::string text =
      std::to_string(work_items) + " work items of up to " + std::to_string(rows_per_item) + " rows (tokens x group)";
  if (partial_bytes > 0) text += ", keys in up to " + std::to_string(max_splits) + " splits";
  if (const std::string rule = choice.rule(); !rule.empty()) text += "\nkernels    " + rule;
  return text;
}

}  // namespace rapt::cpu
