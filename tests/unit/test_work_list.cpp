// Work lists: every row and split of keys in one item, in an order and of a size that keep all workers busy.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "operations/attention/cpu_work_list.hpp"
#include "operations/call.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::cpu;

namespace {

constexpr int kThreads = 4;

/// A kernel that nobody runs.
AttentionKernel kernel() {
  AttentionKernel k{};
  k.facts = {.operation = Operation::attention, .phase = Phase::prefill, .arithmetic = "none", .dtypes = kFloatTypes};
  k.facts.block_q = 32, k.facts.block_k = 64;
  k.max_rows = 1024, k.items_per_worker = 4, k.min_item_rows = 128;
  k.scratch_bytes = [](const AttentionShape&) noexcept { return std::size_t{64}; };
  return k;
}

/// The parameters of a dense call.
AttentionParams params_of(const AttentionProblem& p) {
  AttentionParams f{};
  fill_sizes(p, f);
  f.score.modifier_rows = f.score.modifier_keys = kNoLimit;
  f.score.left = p.window_left >= 0 ? p.window_left : kOpen;
  f.score.right = p.causal ? 0 : kOpen;
  f.score.offset = p.align_offset;
  return f;
}

struct Item {
  std::int64_t last_key;
  ItemPlace place;
};

/// All items of a dense call, in the order workers take them.
std::vector<Item> items(const AttentionProblem& p, const AttentionKernel& kernel, int threads) {
  const AttentionCandidate candidate{&kernel, nullptr};
  const AttentionPlan plan = plan_attention(p, {&candidate}, threads, std::size_t{2} << 20);
  const AttentionParams f = params_of(p);
  std::vector<Item> all;
  std::vector<SequenceWork> list(static_cast<std::size_t>(plan.max_sequences));
  for (const SequenceWork& s : work_list(plan, f, list.data())) {
    CHECK(s.first_item == std::ssize(all));
    for (std::int64_t i = 0; i < s.count * p.hk * s.row_items * s.splits; ++i) {
      const ItemPlace place = place_of(s, p.hk, i);
      const std::int64_t token = (place.row_end - 1) / f.group;
      all.push_back({p.causal ? std::min(token + f.score.offset, p.sk - 1) : p.sk - 1, place});
    }
  }
  return all;
}

}  // namespace

TEST_CASE("work list: every row and split is one item's, whatever the order", "[unit]") {
  for (const char* text :
       {"attention b=2 hq=3 sq=1000", "attention b=3 hq=4 hk=2 sq=777 causal",
        "attention hq=5 sq=100 sk=900 causal align=33", "attention b=2 hq=2 sq=700 causal window=90,-1",
        "attention hq=2 sq=20 sk=5000 causal align=4000", "attention b=5 hq=8 hk=2 sq=1 sk=3000"}) {
    for (int threads : {1, kThreads}) {
      const AttentionProblem p = AttentionProblem::parse(text + std::string(" d=64"));
      std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>, int> taken;  // b, hk, row, split
      std::int64_t splits = 1;
      for (const Item& item : items(p, kernel(), threads)) {
        const ItemPlace& place = item.place;
        for (std::int64_t row = place.row_begin; row < place.row_end; ++row)
          ++taken[{place.b, place.hk, row, place.split}];
        splits = std::max(splits, place.split + 1);
      }
      INFO(p.to_string() << " on " << threads);
      CHECK(std::ssize(taken) == p.b * p.sq * p.hq * splits);
      CHECK(std::all_of(taken.begin(), taken.end(), [](const auto& entry) { return entry.second == 1; }));
    }
  }
}

TEST_CASE("work list: keys are split where rows, or heads and ranges of rows, are few", "[unit]") {
  for (const auto& [text, splits] :
       {std::pair("hq=8 hk=8 sq=1 sk=65536", 32), std::pair("hq=16 hk=1 sq=1 sk=65536", 64),
        std::pair("hq=1 sq=1 sk=1024", 2), std::pair("hq=1 sq=1 sk=640", 1), std::pair("hq=1 sq=1 sk=641", 2),
        std::pair("hq=1 sq=1 sk=1152", 2), std::pair("hq=128 hk=1 sq=1 sk=65536", 32),
        std::pair("hq=128 hk=1 sq=1 sk=8192", 8), std::pair("hq=128 hk=1 sq=1 sk=1024", 1),
        std::pair("hq=128 hk=1 sq=16 sk=65536", 2), std::pair("hq=128 hk=1 sq=17 sk=65536", 1),
        std::pair("hq=128 hk=8 sq=8 sk=65536", 4), std::pair("hq=32 hk=32 sq=100 sk=65536", 1),
        std::pair("hq=1 sq=1024", 1)}) {
    for (const char* batch : {"", " b=3"}) {
      const AttentionProblem p = AttentionProblem::parse("attention d=64 " + std::string(text) + batch);
      std::int64_t most = 0;
      for (const Item& item : items(p, kernel(), kThreads)) most = std::max(most, item.place.split + 1);
      INFO(p.to_string());
      CHECK(most == splits);
    }
  }
}

TEST_CASE("work list: splits of keys are about equal, and the plan knows how many there are", "[unit]") {
  const AttentionKernel k = kernel();
  const AttentionCandidate candidate{&k, nullptr};
  for (const char* text : {"hq=4 hk=1 sq=1 d=64", "hq=5 sq=1 d=64", "hq=8 sq=2 d=64 window=5000,-1 align=77",
                           "hq=128 hk=1 sq=1 d=576 dv=512", "hq=32 hk=2 sq=8 d=128", "hq=300 sq=1 d=64"}) {
    for (std::int64_t keys = 1; keys < 40000; keys += keys < 6000 ? 7 : 997) {
      AttentionProblem p = AttentionProblem::parse("attention " + std::string(text) + " sk=" + std::to_string(keys));
      p.align_offset = p.window_left < 0 ? 0 : keys;  // then keys before keys - 5000 are not seen
      const AttentionPlan plan = plan_attention(p, {&candidate}, 1, std::size_t{2} << 20);
      const AttentionParams f = params_of(p);
      SequenceWork room{};
      const SequenceWork& s = work_list(plan, f, &room).front();
      const std::int64_t first = std::max<std::int64_t>(f.score.offset - f.score.left, 0), seen = keys - s.first_key;
      INFO(p.to_string());
      REQUIRE(s.splits <= plan.max_splits);
      if (p.window_left < 0) REQUIRE(s.splits == plan.max_splits);
      REQUIRE(s.split_begin(0) == (p.window_left < 0 ? 0 : first / kSplitAlign * kSplitAlign));
      for (std::int64_t i = 0; s.splits > 1 && i < s.splits; ++i) {
        const std::int64_t end = i + 1 < s.splits ? s.split_begin(i + 1) : keys;
        REQUIRE(std::abs(end - s.split_begin(i) - seen / s.splits) <= 2 * s.split_align);
        REQUIRE(end - s.split_begin(i) > s.split_align);
      }
    }
  }
}

TEST_CASE("work list: workers share a queue only where later rows see more keys", "[unit]") {
  const AttentionKernel k = kernel();
  const AttentionCandidate candidate{&k, nullptr};
  for (const auto& [text, count] :
       {std::pair("attention b=8 hq=4 sq=1 sk=1000 d=64 causal align=999", kThreads),
        std::pair("attention hq=8 sq=2048 d=64 causal", 1), std::pair("attention hq=8 sq=2048 d=64", kThreads)}) {
    const AttentionProblem p = AttentionProblem::parse(text);
    const AttentionPlan plan = plan_attention(p, {&candidate}, kThreads, std::size_t{2} << 20);
    SequenceWork room{};
    std::vector<WorkQueue> queues(kThreads);
    INFO(text);
    CHECK(std::ssize(partition_into_queues(work_list(plan, params_of(p), &room), p.hk, queues)) == count);
  }
}

TEST_CASE("work list: every token whose keys are gathered is a sequence", "[unit]") {
  // Few tokens are split along their keys, many are not.
  for (const auto& [text, splits] :
       {std::pair("attention b=3 hq=128 hk=1 sq=1 sk=2048", 4), std::pair("attention hq=128 hk=1 sq=4 sk=8192", 8),
        std::pair("attention hq=128 hk=1 sq=5 sk=8192", 6), std::pair("attention hq=128 hk=1 sq=17 sk=8192", 1),
        std::pair("attention b=2 hq=16 hk=2 sq=3 sk=700", 2), std::pair("attention hq=16 hk=1 sq=500 sk=2048", 1)}) {
    for (int threads : {1, kThreads}) {
      const AttentionProblem p = AttentionProblem::parse(text + std::string(" d=64 gathered"));
      std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>, int> taken;  // token, hk, row, split
      for (const Item& item : items(p, kernel(), threads))
        for (std::int64_t row = item.place.row_begin; row < item.place.row_end; ++row)
          ++taken[{item.place.b, item.place.hk, row, item.place.split}];
      INFO(p.to_string() << " on " << threads);
      CHECK(std::ssize(taken) == p.b * p.sq * p.hq * splits);
      CHECK(std::get<0>(taken.rbegin()->first) == p.b * p.sq - 1);
      CHECK(std::all_of(taken.begin(), taken.end(), [](const auto& entry) { return entry.second == 1; }));
    }
  }
}

TEST_CASE("work list: of causal calls the most costly items of all heads come first", "[unit]") {
  const std::vector<Item> all =
      items(AttentionProblem::parse("attention hq=6 sq=2048 d=64 causal"), kernel(), kThreads);
  REQUIRE(all.size() > 6);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i].last_key <= all[i - 1].last_key);
  CHECK(all[5].last_key == 2047);
}

TEST_CASE("work list: items of equal cost go head by head, and so do all on one thread or where keys are kept",
          "[unit]") {
  AttentionKernel keeps = kernel();
  keeps.kept_keys = [](std::int64_t, std::int64_t) noexcept { return std::int64_t{2048}; };
  for (const auto& [text, kernel, threads] :
       {std::tuple("attention b=2 hq=6 sq=2048 d=64", kernel(), kThreads),
        std::tuple("attention hq=6 sq=2048 d=64 causal", kernel(), 1),
        std::tuple("attention hq=6 sq=2048 d=64 causal window=100,-1", kernel(), kThreads),
        std::tuple("attention hq=6 sq=2048 d=64 causal", keeps, kThreads)}) {
    const std::vector<Item> all = items(AttentionProblem::parse(text), kernel, threads);
    INFO(text);
    REQUIRE(all.size() > 6);
    for (std::size_t i = 1; i < all.size(); ++i) {
      const auto key = [](const Item& x) { return std::tuple(x.place.b, x.place.hk, -x.place.row_begin); };
      CHECK(key(all[i - 1]) < key(all[i]));
    }
  }
}

TEST_CASE("work list: queues are whole heads of about the same cost", "[unit]") {
  const auto queues = [](const std::vector<SequenceWork>& all, std::int64_t hk, std::size_t count) {
    std::vector<WorkQueue> room(count);
    CHECK(partition_into_queues(all, hk, room).size() == count);
    std::int64_t end = 0;
    std::vector<std::int64_t> sizes;
    for (const WorkQueue& queue : room) {
      CHECK(queue.next == end);
      sizes.push_back(queue.end - queue.next);
      end = queue.end;
    }
    return sizes;
  };
  using Sizes = std::vector<std::int64_t>;
  const auto sequence = [](std::int64_t first_item, std::int64_t row_items, double cost, std::int64_t count = 1) {
    SequenceWork s{};
    s.count = count, s.first_item = first_item, s.row_items = row_items, s.splits = 1, s.cost = cost;
    return s;
  };
  // Two of 8 heads each, as sequences of a ragged and of a dense call.
  for (const std::vector<SequenceWork>& same :
       {std::vector{sequence(0, 5, 3.7), sequence(40, 5, 3.7)}, std::vector{sequence(0, 5, 3.7, 2)}}) {
    CHECK(queues(same, 8, 1) == Sizes{80});
    CHECK(queues(same, 8, 4) == Sizes{20, 20, 20, 20});
    CHECK(queues(same, 8, 16) == Sizes(16, 5));
    const Sizes of_32 = queues(same, 8, 32);  // two workers for each head
    CHECK(std::count(of_32.begin(), of_32.end(), 5) == 16);
    CHECK(std::count(of_32.begin(), of_32.end(), 0) == 16);
  }
  // One long sequence and many short ones: workers in proportion.
  std::vector<SequenceWork> uneven{sequence(0, 6, 10)};
  for (int i = 0; i < 20; ++i) uneven.push_back(sequence(6 + i, 1, 1));
  CHECK(queues(uneven, 1, 4) == Sizes{0, 0, 6, 20});
  CHECK(queues({sequence(0, 2, 0)}, 3, 4) == Sizes{6, 0, 0, 0});  // nothing to weigh
}

TEST_CASE("work list: items even out over workers while they repay what they prepare", "[unit]") {
  AttentionKernel k = kernel();
  const AttentionCandidate candidate{&k, nullptr};
  const auto rows_per_item = [&candidate](const char* text, int threads) {
    return plan_attention(AttentionProblem::parse(text + std::string(" d=64")), {&candidate}, threads,
                          std::size_t{2} << 20)
        .rows_per_item;
  };
  CHECK(rows_per_item("attention hq=8 sq=4096", 16) == 512);  // 4 per worker
  CHECK(rows_per_item("attention hq=8 sq=1024", 16) == 128);
  CHECK(rows_per_item("attention hq=8 sq=768", 16) == 128);  // 3
  CHECK(rows_per_item("attention hq=8 sq=512", 16) == 128);  // 2
  CHECK(rows_per_item("attention hq=8 sq=256", 16) == 64);   // 2 of fewer rows
  CHECK(rows_per_item("attention hq=8 sq=64", 16) == 32);
  CHECK(rows_per_item("attention hq=8 sq=65536", 16) == 1024);  // the most
  CHECK(rows_per_item("attention hq=1 sq=1024", 1) == 1024);    // nothing to even out
  // Keys that stay prepared.
  k.kept_keys = [](std::int64_t, std::int64_t) noexcept { return std::int64_t{2048}; };
  CHECK(rows_per_item("attention hq=8 sq=4096", 16) == 512);  // too many keys
  CHECK(rows_per_item("attention hq=8 sq=2048", 16) == 128);  // 8 per worker
  CHECK(rows_per_item("attention hq=8 sq=1024", 16) == 64);
  CHECK(rows_per_item("attention hq=8 sq=512", 16) == 64);  // 4
  CHECK(rows_per_item("attention hq=8 sq=2048 window=256,-1", 16) == 256);
  CHECK(rows_per_item("attention hq=1 sq=1024", 1) == 1024);
}
