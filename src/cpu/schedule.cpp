#include "cpu/schedule.hpp"

#include <algorithm>
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

}  // namespace

ForwardSchedule schedule_forward(const Problem& p, const ForwardKernel& kernel, const ForwardKernel* decode,
                                 int concurrency, std::size_t l2_bytes) {
  ForwardSchedule s;
  s.kernel = &kernel, s.decode = decode;
  const std::int64_t group = p.hk > 0 ? p.hq / p.hk : 0, rows = p.sq * group, heads = p.b * p.hk;
  s.rows_per_item = std::max<std::int64_t>(rows, 1);
  if (kernel.rows > 0) {
    // Panels of an item share each block of K and V: the more the better, while their Q^T and O^T stay in half of L2
    // ...
    const auto panel_bytes = static_cast<std::int64_t>(sizeof(float)) * kernel.rows * (p.d + p.dv);
    std::int64_t panels =
        std::min<std::int64_t>(static_cast<std::int64_t>(l2_bytes) / 2 / panel_bytes, kernel.max_rows / kernel.rows);
    // ... and each of several strands gets its share of items.
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
  s.scratch_bytes = kernel.scratch_bytes({p.sk, p.d, p.dv, std::min(s.rows_per_item, std::max<std::int64_t>(rows, 1))});
  if (decode) s.scratch_bytes = std::max(s.scratch_bytes, decode->scratch_bytes({p.sk, p.d, p.dv, kDecodeRows}));

  // sequences() counts keys from a multiple of kAlign on, so that there may be kAlign - 1 more than sk.
  const std::int64_t parts = std::min(most_parts(p.hk), ceil_div(p.sk + kAlign - 1, kPartKeys));
  if (kernel.rows > 0 && parts > 1 && (rows <= kPartRows || p.ragged_q >= 0)) {
    std::int64_t part_rows = heads * std::min(rows, kPartRows);
    if (p.ragged_q >= 0) part_rows = std::min(part_rows, p.ragged_q * p.hq);
    std::size_t states = 0;
    if (__builtin_mul_overflow(static_cast<std::size_t>(part_rows * parts),
                               static_cast<std::size_t>(state_floats(p.dv)) * sizeof(float), &states))
      too_large(p);
    s.state_bytes = states;
    s.counter_bytes = static_cast<std::size_t>(ceil_div(part_rows, 16)) * 64;
    if (rows <= kPartRows) s.work_items *= parts;
  }

  const double pairs = static_cast<double>(rows) * static_cast<double>(heads) * static_cast<double>(p.sk);
  const double flops = 2.0 * pairs * static_cast<double>(p.d + p.dv) * (p.causal ? 0.5 : 1.0);
  const double worth = std::max(flops / kFlopsPerStrand, bytes_of_keys(p) / kBytesPerStrand);
  s.threads = static_cast<int>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(std::clamp(worth, 1.0, static_cast<double>(concurrency))), 1,
                               std::max<std::int64_t>(s.work_items, 1)));
  std::size_t scratch = 0;
  if (__builtin_mul_overflow(s.scratch_bytes, static_cast<std::size_t>(s.threads), &scratch) ||
      __builtin_add_overflow(scratch, s.state_bytes, &scratch) ||
      __builtin_add_overflow(scratch, s.counter_bytes, &s.workspace_bytes))
    too_large(p);
  s.note =
      std::to_string(s.work_items) + " items of up to " + std::to_string(s.rows_per_item) + " rows (tokens x group)";
  if (s.state_bytes > 0) s.note += ", keys in up to " + std::to_string(parts) + " parts";
  return s;
}

std::vector<Sequence> sequences(const ForwardSchedule& schedule, const ForwardParams& p, std::int64_t b) {
  std::vector<Sequence> all;
  all.reserve(static_cast<std::size_t>(b));
  for (std::int64_t i = 0; i < b; ++i) {
    const std::int64_t len_q = p.q_begin ? p.q_begin[i + 1] - p.q_begin[i] : p.sq;
    const std::int64_t len_k = p.k_len ? p.k_len[i] : p.k_begin ? p.k_begin[i + 1] - p.k_begin[i] : p.sk;
    Sequence s{};
    s.b = i, s.rows = len_q * p.group;
    if (s.rows == 0) continue;
    s.kernel = schedule.decode && s.rows <= kDecodeRows ? schedule.decode : schedule.kernel;
    s.rows_per_item = s.kernel == schedule.kernel ? schedule.rows_per_item : s.rows;
    s.row_items = ceil_div(s.rows, s.rows_per_item);
    // What any row sees.
    const ScoreParams& score = p.score;
    const std::int64_t offset = score.offset + (score.bottom_right ? len_k - len_q : 0);
    const std::int64_t gone = p.page_size > 0 && !p.pages ? std::max<std::int64_t>(len_k - p.page_size, 0) : 0;
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
    all.push_back(s);
  }
  std::stable_sort(all.begin(), all.end(), [](const Sequence& x, const Sequence& y) { return x.cost > y.cost; });
  std::int64_t item = 0, state = 0, counter = 0;
  for (Sequence& s : all) {
    s.first_item = item, s.first_state = state, s.first_counter = counter;
    item += p.hk * s.items_of_head();
    if (s.parts == 1) continue;
    state += p.hk * s.rows * s.parts * state_floats(p.dv);
    counter += p.hk * s.row_items;
  }
  return all;
}

ItemPlace place_of(const Sequence& s, std::int64_t heads, std::int64_t item) {
  const std::int64_t range = item / s.parts;
  const std::int64_t hk = s.heads_in_turn ? range % heads : range / s.row_items;
  const std::int64_t from_last = s.heads_in_turn ? range / heads : range % s.row_items;
  const std::int64_t begin = (s.row_items - 1 - from_last) * s.rows_per_item;
  return {hk, begin, std::min(begin + s.rows_per_item, s.rows), range, item % s.parts};
}

std::vector<std::int64_t> cut_into_lots(const std::vector<Sequence>& all, std::int64_t hk, int strands) {
  const int lots = all.front().heads_in_turn ? 1 : strands;
  const auto head_cost = [](const Sequence& s) { return s.cost * static_cast<double>(s.items_of_head()); };
  double total = 0, after = 0;
  for (const Sequence& s : all) total += head_cost(s) * static_cast<double>(hk);
  // Lots that would begin within a head begin with it, which leaves it to the last of them; strands of the others help.
  std::vector<std::int64_t> first{0};
  for (const Sequence& s : all)
    for (std::int64_t head = 0; head < hk; ++head) {
      after += head_cost(s);
      while (std::ssize(first) < lots && static_cast<double>(first.size()) * total < after * lots * (1 - 1e-9))
        first.push_back(s.first_item + head * s.items_of_head());
    }
  const std::int64_t end = all.back().first_item + hk * all.back().items_of_head();
  first.resize(static_cast<std::size_t>(lots) + 1, end);
  return first;
}

}  // namespace rapt::cpu
