#include "operations/attention/cpu_work_list.hpp"

#include <algorithm>
#include <memory>

namespace rapt::cpu {
namespace {

// The kernel that a sequence gets, and the rows of its items.
void choose_kernel(const AttentionPlan& plan, std::int64_t len_k, SequenceWork& work) {
  const AttentionChoice& choice = plan.choice;
  work.kernel = &choice.kernel_for(work.rows, len_k);
  const auto is = [&](const AttentionCandidate* other) { return other && work.kernel == other->kernel; };
  work.rows_per_item = is(choice.few_rows)     ? work.rows
                       : is(choice.short_keys) ? plan.short_rows_per_item
                                               : plan.rows_per_item;
  work.row_items = ceil_div(work.rows, work.rows_per_item);
}

}  // namespace

std::span<const SequenceWork> work_list(const AttentionPlan& plan, const AttentionParams& p, SequenceWork* list) {
  SequenceWork* end = list;
  const bool alike = are_alike(p);
  for (std::int64_t i = 0; i < (alike ? std::min<std::int64_t>(p.b, 1) : p.b); ++i) {
    const Sequence q = sequence_of(p, p, i);
    SequenceWork s{};
    s.b = i, s.count = alike ? p.b : 1, s.rows = q.len_q * p.group;
    if (s.rows == 0) continue;
    choose_kernel(plan, q.len_k, s);
    KeyRange keys = visible_keys(p.score, q);
    keys.last = std::max(keys.first, keys.last);
    s.first_key = keys.first / kSplitAlign * kSplitAlign;
    // Heads one after another keep K and V cached. But if later rows see more keys and no kernel keeps packed keys,
    // the most costly work items of all heads come first, so that workers finish together.
    s.heads_in_turn =
        s.row_items > 1 && plan.threads > 1 && !plan.keeps_keys && p.score.left == kOpen && p.score.right != kOpen;
    s.splits = 1;
    const std::int64_t key_count = std::max<std::int64_t>(keys.last - s.first_key, 1);
    if (s.kernel->facts.phase != Phase::naive)
      s.splits = split_count(key_count, p.hk, p.tokens > 0 ? p.tokens * p.group : s.rows, p.tokens == 0);
    s.split_align = split_align(p.d, p.dv), s.key_blocks = ceil_div(key_count, s.split_align);
    s.cost =
        static_cast<double>(std::min(s.rows, s.rows_per_item)) *
        static_cast<double>(s.splits == 1 ? keys.last - keys.first : ceil_div(s.key_blocks, s.splits) * s.split_align);
    std::construct_at(end++, s);
  }
  std::sort(list, end, [](const SequenceWork& x, const SequenceWork& y) {
    return x.cost != y.cost ? x.cost > y.cost : x.b < y.b;
  });
  std::int64_t item = 0, partial = 0, counter = 0;
  for (SequenceWork& s : std::span(list, end)) {
    s.first_item = item, s.first_partial = partial, s.first_counter = counter;
    item += s.count * p.hk * s.items_of_head();
    if (s.splits == 1) continue;
    partial += s.count * p.hk * s.rows * s.splits * partial_floats(p.dv);
    counter += s.count * p.hk * s.row_items;
  }
  return {list, end};
}

ItemPlace place_of(const SequenceWork& s, std::int64_t heads, std::int64_t item) {
  const std::int64_t of_sequence = heads * s.items_of_head(), in_sequence = item % of_sequence;
  const std::int64_t range = in_sequence / s.splits;
  const std::int64_t hk = s.heads_in_turn ? range % heads : range / s.row_items;
  const std::int64_t from_last = s.heads_in_turn ? range / heads : range % s.row_items;
  const std::int64_t begin = (s.row_items - 1 - from_last) * s.rows_per_item;
  return {s.b + item / of_sequence, hk, begin, std::min(begin + s.rows_per_item, s.rows), item % s.splits};
}

std::span<WorkQueue> partition_into_queues(std::span<const SequenceWork> all, std::int64_t hk,
                                           std::span<WorkQueue> queues) {
  if (std::any_of(all.begin(), all.end(), [](const SequenceWork& s) { return s.heads_in_turn; }))
    queues = queues.first(1);
  const auto cost_of_head = [](const SequenceWork& s) { return s.cost * static_cast<double>(s.items_of_head()); };
  double total = 0, before = 0;
  for (const SequenceWork& s : all) total += cost_of_head(s) * static_cast<double>(s.count * hk);
  const double of_queue = total / static_cast<double>(queues.size());
  // A queue ends with the last head that ends within its share; one that would begin within a head begins with it,
  // which leaves the head to the last of those: workers of the others help.
  std::size_t n = 0;
  std::int64_t begin = 0;
  for (const SequenceWork& s : all) {
    const double of_head = cost_of_head(s);
    const std::int64_t heads = s.count * hk;
    const double after = before + of_head * static_cast<double>(heads);
    for (double share; n + 1 < queues.size() && (share = static_cast<double>(n + 1) * of_queue) < after * (1 - 1e-9);
         ++n) {
      const auto whole = static_cast<std::int64_t>((share - before) / of_head + 1e-9);
      const std::int64_t end = s.first_item + std::clamp<std::int64_t>(whole, 0, heads - 1) * s.items_of_head();
      queues[n].next = begin, queues[n].end = begin = end;
    }
    before = after;
  }
  for (const std::int64_t end = all.back().first_item + all.back().count * hk * all.back().items_of_head();
       n < queues.size(); ++n)
    queues[n].next = begin, queues[n].end = begin = end;
  return queues;
}

}  // namespace rapt::cpu
