// The program of docs/tutorials/engine.md: continuous batching over a paged int8 cache, with shared prefixes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <iostream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "rapt/rapt.hpp"

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
  std::int64_t wanted = 0;          // tokens still to generate
  std::int64_t cached = 0;          // tokens whose keys and values are in the cache
  std::vector<std::int32_t> pages;  // in the order of its keys
};

class Pages {
 public:
  Pages() {
    for (std::int32_t page = 0; page < page_count; ++page) free_.push_back(page);
  }

  bool admit(Sequence& sequence) {
    const std::int64_t needed = (std::ssize(sequence.tokens) + sequence.wanted + page_size - 1) / page_size;
    const std::int64_t whole = (std::ssize(sequence.tokens) - 1) / page_size;  // a step needs at least one new token
    std::vector<std::int32_t> pages;  // first those that another sequence has, then new ones
    while (std::ssize(pages) < whole) {
      const auto known = shared_.find(prefix(sequence, std::ssize(pages) + 1));
      if (known == shared_.end()) break;
      pages.push_back(known->second);
    }
    const std::int64_t reused = std::ssize(pages);
    if (needed > most || needed - reused > free()) return false;
    pages.insert(pages.end(), free_.end() - (needed - reused), free_.end());
    free_.resize(free_.size() - static_cast<std::size_t>(needed - reused));
    for (std::int64_t i = reused; i < whole; ++i) shared_[prefix(sequence, i + 1)] = pages[i];
    for (const std::int32_t page : pages) ++users_[page];
    sequence.cached = reused * page_size;
    sequence.pages = std::move(pages);
    return true;
  }

  void release(const Sequence& sequence) {
    for (const std::int32_t page : sequence.pages) {
      if (--users_[page] > 0) continue;
      std::erase_if(shared_, [&](const auto& known) { return known.second == page; });
      free_.push_back(page);
    }
  }

  std::int64_t free() const { return std::ssize(free_); }

 private:
  static std::vector<int> prefix(const Sequence& sequence, std::int64_t pages) {
    return {sequence.tokens.begin(), sequence.tokens.begin() + pages * page_size};
  }

  std::vector<std::int32_t> free_;
  std::vector<int> users_ = std::vector<int>(page_count);  // sequences that hold a page
  std::map<std::vector<int>, std::int32_t> shared_;        // by all tokens up to a page's end: the page
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
    --running[i].wanted;
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
      if (running[i].wanted > 0) continue;
      pages.release(running[i]);
      done.push_back(std::move(running[i]));
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return done;
}

struct ToyModel {
  static constexpr int vocabulary = 40;
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

  int next_token(const float* row) const {
    std::vector<float> logits(vocabulary);
    for (int token = 0; token < vocabulary; ++token)
      for (std::int64_t c = 0; c < hq * d; ++c) logits[token] += row[c] * element(3, token, c);
    return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
};

int main() {
  std::deque<Sequence> requests;
  for (int user = 0; user < 3; ++user) {
    Sequence request;
    for (int t = 0; t < 20; ++t) request.tokens.push_back(t * 3 % ToyModel::vocabulary);  // a prefix that all share
    request.tokens.push_back(user);
    request.wanted = 8;
    requests.push_back(request);
  }
  for (const Sequence& sequence : serve(requests, ToyModel())) {
    for (const int token : sequence.tokens) std::cout << token << ' ';
    std::cout << '\n';
  }
  return 0;
}
