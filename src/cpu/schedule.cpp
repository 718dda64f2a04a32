#include "cpu/schedule.hpp"

#include <algorithm>
#include <memory>
#include <string>

namespace rapt::cpu {
namespace {

constexpr double kFlopsPerStrand = 1e6;    // about 10 us: below that a wake-up costs more than it brings
constexpr double kBytesPerStrand = 128e3;  // of keys and values, likewise
// Sequences of at most kPartRows rows are cut along their keys, into parts of a multiple of kPartKeys: so many that one
// sequence occupies a large machine, so few that states stay small beside the cache.
constexpr std::int64_t kPartRows = 64, kPartKeys = 512, kPartsOfSequence = 256;
constexpr std::int64_t kAlign = 128;     // a whole number of any kernel's blocks
constexpr std::int64_t kLeastItems = 2;  // of a strand, among several
constexpr int kFinerIfKept = 2;          // items that find their keys prepared

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Most parts of a head's keys.
std::int64_t most_parts(std::int64_t hk) {
  return std::clamp<std::int64_t>(kPartsOfSequence / std::max<std::int64_t>(hk, 1), 1, kMaxParts);
}

double bytes_of_keys(const Problem& p) {
  const double bits = p.kv_dtype == DType::i4x2 ? 4 : 8 * static_cast<double>(size_of(p.kv_dtype));
  return static_cast<double>(p.b * p.hk) * static_cast<double>(p.sk) * static_cast<double>(p.d + p.dv) * bits / 8;
}

[[noreturn]] void too_large(const Problem& p) {
  throw Error("problem", p.to_string(), "one whose workspace has less than 2^64 bytes");
}

std::int64_t rows_of_head(const Problem& p) {
  return p.hk > 0 ? p.sq * (p.hq / p.hk) : 0;
}

// Panels of an item share each block of K and V: the more the better, while their Q^T and O^T stay in half of L2.
std::int64_t max_panels(const Problem& p, const ForwardKernel& kernel, std::size_t l2_bytes) {
  const auto panel_bytes = static_cast<std::int64_t>(sizeof(float)) * kernel.rows * (p.d + p.dv);
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(l2_bytes) / 2 / panel_bytes, 1,
                                  kernel.max_rows / kernel.rows);
}

std::int64_t round_up(std::int64_t a, std::int64_t step) {
  return ceil_div(a, step) * step;
}

// Sizes everything but the strands' number. `splits`: sequences may have so few rows that their keys are cut into
// parts.
void size_workspace(ForwardSchedule& s, const Problem& p, bool splits) {
  const std::int64_t rows = rows_of_head(p), heads = p.b * p.hk;
  const auto needs = [&](const ForwardKernel* kernel, std::int64_t rows_per_item) {
    const std::int64_t of_item = std::min(rows_per_item, std::max<std::int64_t>(rows, 1));
    if (kernel) s.scratch_bytes = std::max(s.scratch_bytes, kernel->scratch_bytes({p.sk, p.d, p.dv, of_item}));
  };
  if (s.plain)
    s.plain_rows_per_item = std::min<std::int64_t>(round_up(s.rows_per_item, s.plain->rows), s.plain->max_rows);
  needs(s.kernel, s.rows_per_item), needs(s.plain, s.plain_rows_per_item), needs(s.decode, kDecodeRows);
  const bool alike = p.ragged_q < 0 && p.ragged_k < 0 && !p.kv_lengths;
  s.max_groups = alike ? 1 : p.b;
  // list_sequences() counts keys from a multiple of kAlign on, so that there may be kAlign - 1 more than sk.
  const std::int64_t parts = std::min(most_parts(p.hk), ceil_div(p.sk + kAlign - 1, kPartKeys));
  if (!splits || s.kernel->rows == 0 || parts <= 1) return;
  s.max_parts = parts;
  std::int64_t part_rows = heads * std::min(rows, kPartRows);
  if (p.ragged_q >= 0) part_rows = std::min(part_rows, p.ragged_q * p.hq);
  if (__builtin_mul_overflow(static_cast<std::size_t>(part_rows * parts),
                             static_cast<std::size_t>(state_floats(p.dv)) * sizeof(float), &s.state_bytes))
    too_large(p);
  s.counter_bytes = static_cast<std::size_t>(ceil_div(part_rows, 16)) * 64;
}

std::size_t total_bytes(const ForwardSchedule& s, const Problem& p) {
  std::size_t total = 0;
  if (__builtin_mul_overflow(s.scratch_bytes, static_cast<std::size_t>(s.threads), &total)) too_large(p);
  for (const std::size_t bytes : {s.state_bytes, s.counter_bytes, s.lot_bytes(), s.list_bytes()})
    if (__builtin_add_overflow(total, bytes, &total)) too_large(p);
  return total;
}

}  // namespace

ForwardSchedule schedule_forward(const Problem& p, const Kernels& kernels, int concurrency, std::size_t l2_bytes) {
  const ForwardKernel& kernel = kernels.kernel;
  ForwardSchedule s;
  s.kernel = &kernel, s.decode = kernels.decode, s.plain = kernels.plain;
  const std::int64_t rows = rows_of_head(p), heads = p.b * p.hk;
  s.rows_per_item = std::max<std::int64_t>(rows, 1);
  if (kernel.rows > 0) {
    std::int64_t panels = max_panels(p, kernel, l2_bytes);
    // Each of several strands gets its share of items.
    const std::int64_t of_strand = rows * heads / kernel.rows / concurrency;
    // With a left window the next item sees keys that the one before did not.
    s.keeps_keys = concurrency > 1 && kernel.kept_keys && p.window_left < 0 && p.sk <= kernel.kept_keys(p.d, p.dv);
    const int finer = s.keeps_keys ? kFinerIfKept : 1;
    const std::int64_t least = std::min<std::int64_t>(kernel.least_rows / finer / kernel.rows, of_strand / kLeastItems);
    if (concurrency > 1) panels = std::min(panels, std::max(of_strand / (kernel.items_per_strand * finer), least));
    // The items of a head are about as large.
    const std::int64_t of_head = std::max<std::int64_t>(ceil_div(rows, kernel.rows), 1);
    const std::int64_t items = ceil_div(of_head, std::max<std::int64_t>(panels, 1));
    s.rows_per_item = ceil_div(of_head, items) * kernel.rows;
  }
  s.work_items = heads * ceil_div(rows, s.rows_per_item);
  size_workspace(s, p, rows <= kPartRows || p.ragged_q >= 0);
  if (rows <= kPartRows) s.work_items *= s.max_parts;

  const double pairs = static_cast<double>(rows) * static_cast<double>(heads) * static_cast<double>(p.sk);
  const double flops = 2.0 * pairs * static_cast<double>(p.d + p.dv) * (p.causal ? 0.5 : 1.0);
  const double worth = std::max(flops / kFlopsPerStrand, bytes_of_keys(p) / kBytesPerStrand);
  s.threads = static_cast<int>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(std::clamp(worth, 1.0, static_cast<double>(concurrency))), 1,
                               std::max<std::int64_t>(s.work_items, 1)));
  s.workspace_bytes = total_bytes(s, p);
  return s;
}

std::size_t max_workspace_bytes(const Problem& p, const Kernels& kernels, int concurrency, std::size_t l2_bytes) {
  const ForwardKernel& kernel = kernels.kernel;
  ForwardSchedule s;
  s.kernel = &kernel, s.decode = kernels.decode, s.plain = kernels.plain, s.threads = concurrency;
  s.rows_per_item = kernel.rows > 0 ? max_panels(p, kernel, l2_bytes) * kernel.rows : rows_of_head(p);
  size_workspace(s, p, true);
  return total_bytes(s, p);
}

std::string ForwardSchedule::note() const {
  std::string text =
      std::to_string(work_items) + " items of up to " + std::to_string(rows_per_item) + " rows (tokens x group)";
  if (state_bytes > 0) text += ", keys in up to " + std::to_string(max_parts) + " parts";
  return text;
}

std::span<const SequenceGroup> list_sequences(const ForwardSchedule& schedule, const ForwardParams& p, std::int64_t b,
                                              SequenceGroup* list) {
  SequenceGroup* end = list;
  const bool alike = !p.q_begin && !p.k_begin && !p.k_len;
  for (std::int64_t i = 0; i < (alike ? std::min<std::int64_t>(b, 1) : b); ++i) {
    const std::int64_t len_q = p.q_begin ? p.q_begin[i + 1] - p.q_begin[i] : p.sq;
    const std::int64_t len_k = p.k_len ? p.k_len[i] : p.k_begin ? p.k_begin[i + 1] - p.k_begin[i] : p.sk;
    SequenceGroup s{};
    s.b = i, s.count = alike ? b : 1, s.rows = len_q * p.group;
    if (s.rows == 0) continue;
    if (schedule.decode && s.rows <= kDecodeRows) {
      s.kernel = schedule.decode, s.rows_per_item = s.rows;
    } else if (schedule.plain && !is_worthwhile(*schedule.kernel, s.rows, len_k, p.d, p.dv)) {
      s.kernel = schedule.plain, s.rows_per_item = schedule.plain_rows_per_item;
    } else {
      s.kernel = schedule.kernel, s.rows_per_item = schedule.rows_per_item;
    }
    s.row_items = ceil_div(s.rows, s.rows_per_item);
    // What any row sees.
    const ScoreParams& score = p.score;
    const std::int64_t offset = score.offset + (score.bottom_right ? len_k - len_q : 0);
    const std::int64_t gone = p.ring ? std::max<std::int64_t>(len_k - p.page_size, 0) : 0;
    const std::int64_t first = score.left == kOpen ? gone : std::clamp(offset - score.left, gone, len_k);
    const std::int64_t last = score.right == kOpen ? len_k : std::clamp(len_q + offset + score.right, first, len_k);
    s.first_key = first / kAlign * kAlign;
    // Heads one after another, so that K and V stay cached. If later rows see more keys, and no kernel keeps what it
    // made of K and V, the most costly items of all heads come first, so that strands come to their ends together.
    s.heads_in_turn = schedule.threads > 1 && !schedule.keeps_keys && score.left == kOpen && score.right != kOpen;
    s.parts = 1;
    if (s.kernel->rows > 0 && s.rows <= kPartRows) {
      const std::int64_t keys = std::max<std::int64_t>(last - s.first_key, 1);
      s.part_keys = ceil_div(ceil_div(keys, most_parts(p.hk)), kPartKeys) * kPartKeys;
      s.parts = ceil_div(keys, s.part_keys);
    }
    s.cost = static_cast<double>(std::min(s.rows, s.rows_per_item)) *
             static_cast<double>(s.parts == 1 ? last - first : s.part_keys);
    std::construct_at(end++, s);
  }
  std::sort(list, end, [](const SequenceGroup& x, const SequenceGroup& y) {
    return x.cost != y.cost ? x.cost > y.cost : x.b < y.b;
  });
  std::int64_t item = 0, state = 0, counter = 0;
  for (SequenceGroup& s : std::span(list, end)) {
    s.first_item = item, s.first_state = state, s.first_counter = counter;
    item += s.count * p.hk * s.items_of_head();
    if (s.parts == 1) continue;
    state += s.count * p.hk * s.rows * s.parts * state_floats(p.dv);
    counter += s.count * p.hk * s.row_items;
  }
  return {list, end};
}

ItemPlace place_of(const SequenceGroup& s, std::int64_t heads, std::int64_t item) {
  const std::int64_t of_sequence = heads * s.items_of_head(), in_sequence = item % of_sequence;
  const std::int64_t range = in_sequence / s.parts;
  const std::int64_t hk = s.heads_in_turn ? range % heads : range / s.row_items;
  const std::int64_t from_last = s.heads_in_turn ? range / heads : range % s.row_items;
  const std::int64_t begin = (s.row_items - 1 - from_last) * s.rows_per_item;
  return {s.b + item / of_sequence, hk, begin, std::min(begin + s.rows_per_item, s.rows), range, item % s.parts};
}

std::span<Lot> cut_into_lots(std::span<const SequenceGroup> all, std::int64_t hk, std::span<Lot> lots) {
  if (all.front().heads_in_turn) lots = lots.first(1);
  const auto cost_of_head = [](const SequenceGroup& s) { return s.cost * static_cast<double>(s.items_of_head()); };
  double total = 0, before = 0;
  for (const SequenceGroup& s : all) total += cost_of_head(s) * static_cast<double>(s.count * hk);
  const double of_lot = total / static_cast<double>(lots.size());
  // A lot ends with the last head that ends within its share; one that would begin within a head begins with it, which
  // leaves the head to the last of those: strands of the others help.
  std::size_t n = 0;
  std::int64_t begin = 0;
  for (const SequenceGroup& s : all) {
    const double of_head = cost_of_head(s);
    const std::int64_t heads = s.count * hk;
    const double after = before + of_head * static_cast<double>(heads);
    for (double share; n + 1 < lots.size() && (share = static_cast<double>(n + 1) * of_lot) < after * (1 - 1e-9); ++n) {
      const auto whole = static_cast<std::int64_t>((share - before) / of_head + 1e-9);
      const std::int64_t end = s.first_item + std::clamp<std::int64_t>(whole, 0, heads - 1) * s.items_of_head();
      lots[n].next = begin, lots[n].end = begin = end;
    }
    before = after;
  }
  for (const std::int64_t end = all.back().first_item + all.back().count * hk * all.back().items_of_head();
       n < lots.size(); ++n)
    lots[n].next = begin, lots[n].end = begin = end;
  return lots;
}

}  // namespace rapt::cpu
