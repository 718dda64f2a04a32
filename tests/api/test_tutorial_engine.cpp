// The engine of docs/tutorials/engine.md, run over a toy model.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

#include "rapt/rapt.hpp"
#include "support/catch.hpp"

namespace rapt::testing {
namespace {

constexpr std::int64_t hq = 4, hk = 2, d = 16;                    // query heads, KV heads, head dimension
constexpr std::int64_t page_count = 64, page_size = 8, most = 8;  // pages, keys of a page, pages of a sequence

struct PagedCache {
  std::vector<std::int8_t> k = std::vector<std::int8_t>(page_count * hk * page_size * d), v = k;
  std::vector<float> k_scale = std::vector<float>(page_count * hk * page_size), v_scale = k_scale;

  rapt::KvCache with(const rapt::TensorView& block_table) {
    rapt::MutableTensorView keys(k.data(), {page_count, hk, page_size, d});
    rapt::MutableTensorView values(v.data(), {page_count, hk, page_size, d});
    rapt::MutableTensorView key_scales(k_scale.data(), {page_count, hk, page_size, 1});
    rapt::MutableTensorView value_scales(v_scale.data(), {page_count, hk, page_size, 1});
    return rapt::KvCache::paged(keys, values, block_table).quantized(key_scales, value_scales);
  }
};

struct Sequence {
  std::vector<int> tokens;          // the prompt, then the answer too
  std::size_t limit = 0;            // tokens at which it is done
  std::int64_t cached = 0;          // tokens whose keys and values are in the cache
  std::vector<std::int32_t> pages;  // in the order of its keys
};

class Pages {
 public:
  Pages() {
    for (std::int32_t page = 0; page < page_count; ++page) free_.push_back(page);
  }
  bool admit(Sequence& sequence) {
    const std::int64_t needed = (static_cast<std::int64_t>(sequence.limit) + page_size - 1) / page_size;
    if (needed > most || needed > std::ssize(free_)) return false;
    sequence.pages.assign(free_.end() - needed, free_.end());
    free_.resize(free_.size() - static_cast<std::size_t>(needed));
    return true;
  }
  void release(const Sequence& sequence) { free_.insert(free_.end(), sequence.pages.begin(), sequence.pages.end()); }
  std::int64_t free() const { return std::ssize(free_); }

 private:
  std::vector<std::int32_t> free_;
};

template <class Model>
void step(std::vector<Sequence>& running, PagedCache& memory, const Model& model) {
  std::vector<std::int32_t> rows = {0}, table;
  std::vector<std::int64_t> before, after;
  std::vector<int> tokens;
  for (const Sequence& sequence : running) {
    tokens.insert(tokens.end(), sequence.tokens.begin() + sequence.cached, sequence.tokens.end());
    rows.push_back(static_cast<std::int32_t>(tokens.size()));
    before.push_back(sequence.cached);
    after.push_back(std::ssize(sequence.tokens));
    table.insert(table.end(), sequence.pages.begin(), sequence.pages.end());
    table.resize(before.size() * most, -1);  // entries past a sequence's last page are never read
  }
  const std::int64_t b = std::ssize(running), n = std::ssize(tokens);
  const auto [q, k, v] = model.project(tokens);  // [n, hq, d], [n, hk, d], [n, hk, d]
  std::vector<float> out(q.size());

  const rapt::TensorView starts(rows.data(), {b + 1});
  const rapt::KvCache cache = memory.with({table.data(), {b, most}});
  rapt::append_kv({{k.data(), {n, hk, d}}, {v.data(), {n, hk, d}}, cache, {before.data(), {b}}, starts});

  rapt::AttentionArgs args;
  args.q = {q.data(), {n, hq, d}};
  args.kv = cache.source({after.data(), {b}});
  args.out = {out.data(), {n, hq, d}};
  args.cu_seqlens_q = starts;
  args.score.causal = true;
  args.score.align = rapt::Align::bottom_right();
  rapt::attention(args);

  for (std::size_t i = 0; i < running.size(); ++i) {
    running[i].cached = after[i];
    running[i].tokens.push_back(model.next_token(out.data() + (rows[i + 1] - 1) * hq * d));
  }
}

template <class Model>
std::vector<Sequence> serve(std::deque<Sequence> waiting, const Model& model) {
  PagedCache memory;
  Pages pages;
  std::vector<Sequence> running, done;
  while (!waiting.empty() || !running.empty()) {
    while (!waiting.empty() && pages.admit(waiting.front())) {
      running.push_back(std::move(waiting.front()));
      waiting.pop_front();
    }
    if (running.empty()) throw std::invalid_argument("a sequence needs more pages than the cache has");
    step(running, memory, model);
    for (std::size_t i = running.size(); i-- > 0;) {
      if (running[i].tokens.size() < running[i].limit) continue;
      pages.release(running[i]);
      done.push_back(std::move(running[i]));
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return done;
}

/// A language model of one layer without weights: token t has row t of four tables.
struct ToyModel {
  static constexpr std::int64_t vocabulary = 40;
  struct Projections {
    std::vector<float> q, k, v;
  };

  static float element(int table, int token, std::int64_t c) {
    return std::sin(static_cast<float>(table * 7919 + token * 131 + static_cast<int>(c) * 17));
  }
  Projections project(const std::vector<int>& tokens) const {
    Projections x;
    for (const int token : tokens) {
      for (std::int64_t c = 0; c < hq * d; ++c) x.q.push_back(element(0, token, c));
      for (std::int64_t c = 0; c < hk * d; ++c) x.k.push_back(element(1, token, c));
      for (std::int64_t c = 0; c < hk * d; ++c) x.v.push_back(element(2, token, c));
    }
    return x;
  }
  /// The word most like the row.
  int next_token(const float* row) const {
    int best = 0;
    float most_alike = -INFINITY;
    for (int token = 0; token < vocabulary; ++token) {
      float alike = 0;
      for (std::int64_t c = 0; c < hq * d; ++c) alike += row[c] * element(3, token, c);
      if (alike > most_alike) most_alike = alike, best = token;
    }
    return best;
  }
};

/// Prompts of several lengths: together they need more pages than there are.
std::deque<Sequence> requests() {
  std::deque<Sequence> made;
  for (int i = 0; i < 14; ++i) {
    Sequence sequence;
    for (int t = 0; t < 3 + 11 * i % 37; ++t) sequence.tokens.push_back((i * 5 + t * 3) % 40);
    sequence.limit = sequence.tokens.size() + 6 + static_cast<std::size_t>(i % 5) * 4;
    made.push_back(sequence);
  }
  return made;
}

}  // namespace

TEST_CASE("tutorial: every sequence of the engine gets the tokens that it gets alone", "[examples]") {
  const ToyModel model;
  std::vector<std::vector<int>> alone, together;
  for (const Sequence& request : requests()) alone.push_back(serve({request}, model).at(0).tokens);
  for (const Sequence& sequence : serve(requests(), model)) together.push_back(sequence.tokens);
  std::sort(alone.begin(), alone.end());
  std::sort(together.begin(), together.end());
  CHECK(together == alone);
  CHECK(std::any_of(together.begin(), together.end(), [](const std::vector<int>& tokens) {
    return std::adjacent_find(tokens.end() - 6, tokens.end(), std::not_equal_to<>()) != tokens.end();
  }));
}

TEST_CASE("tutorial: a step of the engine is attention over all tokens before it", "[examples]") {
  // The model hands out what it gets, and the test computes the same in double from what it gave.
  struct Watched : ToyModel {
    mutable std::vector<float> last;
    int next_token(const float* row) const {
      last.assign(row, row + hq * d);
      return ToyModel::next_token(row);
    }
  } model;
  PagedCache memory;
  Pages pages;
  std::vector<Sequence> running{{{3, 14, 15, 9, 2, 6, 5, 35, 8, 9}, 30, 0, {}}};
  REQUIRE(pages.admit(running[0]));
  CHECK(pages.free() == page_count - 4);
  while (running[0].tokens.size() < running[0].limit) {
    const auto all = model.project(running[0].tokens);
    const std::int64_t keys = std::ssize(running[0].tokens);
    step(running, memory, model);
    for (std::int64_t h = 0; h < hq; ++h) {
      const auto row = [&](const std::vector<float>& x, std::int64_t heads, std::int64_t head, std::int64_t j) {
        return x.data() + (j * heads + head) * d;
      };
      const float* q = row(all.q, hq, h, keys - 1);
      std::vector<double> wanted(d, 0.0);
      double sum = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        double x = 0;
        for (std::int64_t c = 0; c < d; ++c) x += double(q[c]) * row(all.k, hk, h / (hq / hk), j)[c];
        const double p = std::exp(x / std::sqrt(double(d)));
        sum += p;
        for (std::int64_t c = 0; c < d; ++c) wanted[std::size_t(c)] += p * row(all.v, hk, h / (hq / hk), j)[c];
      }
      // Elements of up to 1 are off by up to 1 / 254, and scores of |q| up to 16^1/2 by up to 16 / 254.
      for (std::int64_t c = 0; c < d; ++c)
        REQUIRE(std::abs(model.last[std::size_t(h * d + c)] - wanted[std::size_t(c)] / sum) < 0.07);
    }
  }
  pages.release(running[0]);
  CHECK(pages.free() == page_count);
}

TEST_CASE("tutorial: a sequence that the cache can never hold is refused", "[examples]") {
  CHECK_THROWS_AS(serve({Sequence{{1, 2, 3}, std::size_t(most * page_size) + 1, 0, {}}}, ToyModel()),
                  std::invalid_argument);
}

}  // namespace rapt::testing
