// KV caches: every way to lay keys out, every type they are kept in, on every entry that takes them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "support/check.hpp"
#include "support/executors.hpp"
#include "support/sampler.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr std::array kCacheTypes = {DType::f32,    DType::bf16,   DType::f16, DType::i8,
                                    DType::f8e4m3, DType::f8e5m2, DType::i4x2};

/// The words of a cache of this type: what needs scales gets `groups` of them.
std::string cache(DType dtype, int groups = 1) {
  const bool scales = dtype == DType::i8 || dtype == DType::i4x2 || (groups > 1 && dtype >= DType::i8);
  return " kv=" + std::string(to_string(dtype)) + (scales ? " groups=" + std::to_string(groups) : "");
}

/// Runs the test case that calls it once for each type of cache.
DType each_cache_type() {
  return GENERATE(from_range(kCacheTypes));
}

struct Result {
  std::vector<float> out, lse;
  friend bool operator==(const Result& a, const Result& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
    };
    return same(a.out, b.out) && same(a.lse, b.lse);
  }
};

Result run(Case& c, const AttentionArgs& args, const Forced& context) {
  c.poison_outputs();
  testing::run(args, context);
  return {c.out.values(), c.lse.values()};
}
Result run(Case& c, const std::string& entry) {
  return run(c, c.args(), forced(entry));
}

/// Moves entry n of the first dimension to order[n].
void permute_entries(Tensor& t, const std::vector<std::int64_t>& order) {
  if (!t || t.layout().shape[0] != std::ssize(order)) return;  // scales of all pages
  const Tensor before = [&] {
    Tensor copy(t.dtype(), t.layout());
    std::memcpy(copy.buffer().data(), t.buffer().data(), t.buffer().size());
    return copy;
  }();
  const std::size_t bytes = size_of(t.dtype()) * static_cast<std::size_t>(t.layout().strides[0]);
  for (std::size_t n = 0; n < order.size(); ++n) {
    std::memcpy(t.buffer().data() + static_cast<std::size_t>(order[n]) * bytes, before.buffer().data() + n * bytes,
                bytes);
  }
}

/// Bytes of element i of a row, where sizes of 1 broadcast.
std::size_t byte_of(const Tensor& t, std::int64_t entry, std::int64_t h, std::int64_t row, std::int64_t i) {
  const auto& step = t.layout().strides;
  const auto& size = t.layout().shape;
  const std::int64_t at =
      (size[0] == 1 ? 0 : entry) * step[0] + h * step[1] + (size[2] == 1 ? 0 : row) * step[2] + i * step[3];
  return static_cast<std::size_t>(at) * size_of(t.dtype());
}

/// Where key j of sequence n lies: {entry, row}.
std::pair<std::int64_t, std::int64_t> slot_of(const Case& c, std::int64_t n, std::int64_t j) {
  const std::int64_t page_size = c.problem.page_size;
  if (page_size > 0) return {index_at(c.block_table, {n, j / page_size}), j % page_size};
  return {n, c.problem.ring ? j % c.problem.sk : j};
}

/// Fills every byte of the rows of k, v and their scales that none of the keys [first, last) of sequence 0 lies in.
void fill_others(Case& c, std::int64_t first, std::int64_t last, int byte) {
  const auto entries = c.k.layout().shape[0], rows = c.k.layout().shape[2];
  std::vector<bool> seen(static_cast<std::size_t>(entries * rows));
  for (std::int64_t j = first; j < last; ++j) {
    const auto [entry, row] = slot_of(c, 0, j);
    seen[static_cast<std::size_t>(entry * rows + row)] = true;
  }
  for (Tensor* t : {&c.k, &c.v, &c.k_scale, &c.v_scale, &c.k_tail}) {
    const auto& shape = t->layout().shape;
    if (!*t || shape[0] != entries || shape[2] != rows) continue;  // scales of more than one row
    for (std::int64_t at = 0; at < entries * rows; ++at) {
      for (std::int64_t i = 0; i < shape[1] * shape[3] && !seen[static_cast<std::size_t>(at)]; ++i) {
        std::memset(t->buffer().data() + byte_of(*t, at / rows, i / shape[3], at % rows, i % shape[3]), byte,
                    size_of(t->dtype()));
      }
    }
  }
}

/// Writes the keys of `from`, or what else they have one of per row, to where they lie in `whole`.
void gather(const Case& c, const Tensor& from, const Case& whole, Tensor& to) {
  const auto& shape = from.layout().shape;
  if (!from) return;
  const bool everywhere = shape[0] == 1;
  to = Tensor(from.dtype(), Layout(std::array<std::int64_t, 4>{everywhere ? 1 : whole.problem.b, shape[1],
                                                               everywhere ? 1 : whole.problem.sk, shape[3]}));
  for (std::int64_t n = 0; n < whole.problem.b; ++n) {
    for (std::int64_t j = 0; j < index_at(c.seqlens, {n}); ++j) {
      const auto [entry, row] = slot_of(c, n, j);
      for (std::int64_t i = 0; i < shape[1] * shape[3]; ++i) {
        std::memcpy(to.buffer().data() + byte_of(to, n, i / shape[3], j, i % shape[3]),
                    from.buffer().data() + byte_of(from, entry, i / shape[3], row, i % shape[3]),
                    size_of(from.dtype()));
      }
    }
  }
}

}  // namespace

TEST_CASE("caches: every type in every layout", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* layout : {"sk=64 seqlens", "sk=64 ragged_k=120", "sk=64 seqlens page=1", "sk=64 seqlens page=16",
                             "sk=68 seqlens page=17", "sk=128 seqlens page=128", "sk=40 seqlens ring"}) {
    for (const char* rows : {"hq=2 sq=1", "hq=6 hk=2 sq=1", "hq=5 hk=1 sq=2", "hq=16 hk=2 sq=7", "hq=2 hk=2 sq=64"}) {
      for (std::uint64_t seed : {1, 2}) {
        check_every_entry(
            AttentionProblem::parse("attention b=3 d=32 dv=24 lse " + std::string(rows) + " " + layout + cache(dtype)),
            seed);
      }
    }
  }
}

TEST_CASE("caches: sampled problems", "[kernel][long]") {
  std::mt19937_64 random(501);
  for (int i = 0; i < 60; ++i) check_every_entry(sample(random, kEverythingCached), random() % 1000);
}

TEST_CASE("caches: scores are made of the same parts as elsewhere", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* words :
       {"causal align=bottom_right", "causal align=bottom_right window=20,-1 sinks", "window=9,3 align=bottom_right",
        "softcap=5 alibi align=bottom_right", "alibi causal align=bottom_right sinks scale=-0.3", "causal align=11"}) {
    for (const char* layout : {"sk=96 seqlens page=16", "sk=70 seqlens", "sk=33 seqlens ring"}) {
      for (const char* rows : {"hq=3 hk=1 sq=1", "hq=5 hk=1 sq=7", "hq=16 hk=2 sq=2"}) {
        check_every_entry(AttentionProblem::parse("attention b=4 d=16 lse " + std::string(rows) + " " + words + " " +
                                                  layout + cache(dtype, 2)),
                          2);
      }
    }
  }
  for (const char* words : {"bias=bhqk", "bias=k mask=bk sinks", "bias=hk softcap=3 causal align=bottom_right"}) {
    check_every_entry(AttentionProblem::parse("attention b=3 hq=6 hk=2 sq=7 sk=85 page=17 seqlens d=24 lse " +
                                              std::string(words) + cache(dtype)));
  }
}

TEST_CASE("caches: scales and zeros of any shape", "[kernel]") {
  for (const char* words : {"kv=i8 groups=1 zeros", "kv=i8 groups=4 zeros", "kv=i8 k_groups=32 v_groups=1",
                            "kv=i4x2 groups=1", "kv=i4x2 groups=2 zeros", "kv=i4x2 k_groups=16 v_groups=8 zeros",
                            "kv=f8e4m3 groups=1", "kv=f8e4m3 groups=4 zeros", "kv=f8e4m3 k_groups=2 zeros",
                            "kv=f8e5m2 groups=32 zeros", "kv=f8e5m2 v_groups=1"}) {
    for (const char* layout : {"sk=48 seqlens page=16", "sk=40", "sk=30 ragged_k=70", "sk=33 seqlens ring layout=bshd",
                               "sk=48 seqlens page=8 layout=other", "sk=33 seqlens layout=bhds"}) {
      for (std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {  // what broadcasts
        check_every_entry(
            AttentionProblem::parse("attention b=3 hq=4 hk=2 sq=3 d=32 lse " + std::string(layout) + " " + words),
            seed);
      }
    }
  }
}

TEST_CASE("caches: columns of keys that are not quantised", "[kernel][long]") {
  const DType dtype = each_cache_type();
  if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return;
  for (const char* sizes :
       {"d=32 tail=8 dv=24", "d=23 tail=1 dv=8", "d=38 tail=36 dv=2", "d=11 tail=9 dv=17 layout=other",
        "d=80 tail=16 dv=64 latent", "d=54 tail=20 dv=34 latent layout=bhds"}) {
    for (const char* layout : {"sk=70 seqlens", "sk=48 seqlens page=16", "sk=9 gathered", "sk=33 seqlens ring"}) {
      for (const char* rows : {"hq=2 sq=1", "hq=6 hk=2 sq=3", "hq=16 hk=1 sq=9"}) {
        for (const char* tail : {"bf16", "f16", "f32"}) {
          const auto problem = [&] {
            AttentionProblem p = AttentionProblem::parse("attention b=2 lse " + std::string(sizes) + " " + layout +
                                                         " " + rows + " tail_dtype=" + tail + cache(dtype));
            if (dtype == DType::i4x2) p.d += (p.d - p.k_tail) % 2, p.dv += p.dv % 2;
            return p;
          }();
          for (Placement placement : {Placement::front, Placement::back}) {
            Case c(problem, 3, placement);
            c.protect_inputs();
            check_every_entry(c);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: values that share codes and scales with keys", "[kernel]") {
  for (const char* words :
       {"kv=f8e4m3 groups=4 tail=16 tail_dtype=bf16 d=80 dv=64", "kv=i8 k_groups=4 v_groups=3 zeros d=64 dv=48",
        "kv=i4x2 k_groups=8 v_groups=5 zeros d=67 dv=40 tail=3", "kv=f8e5m2 k_groups=2 v_groups=1 tail=9 d=49 dv=20",
        "kv=f8e4m3 d=50 dv=33 tail=17 tail_dtype=f16", "kv=f8e4m3 groups=2 d=12 dv=8 tail=4"}) {
    for (const char* keys : {"sk=200 page=40 seqlens", "sk=70 gathered", "sk=33 ring seqlens", "sk=150 layout=bhds"}) {
      for (const char* rows : {"hq=4 hk=2 sq=1", "hq=12 hk=1 sq=3"}) {
        for (std::uint64_t seed : {1, 2, 3, 4, 5, 8}) {  // with scales of their own, too
          Case c(AttentionProblem::parse("attention b=2 latent lse " + std::string(rows) + " " + keys + " " + words),
                 seed, Placement::back);
          c.protect_inputs();
          check_every_entry(c);
        }
      }
    }
  }
  // A value that is not finite leaves keys' columns as they are.
  for (const char* rows : {"hq=2 hk=1 sq=6", "hq=20 hk=1 sq=6"}) {
    for (std::int64_t key : {3, 33}) {
      Case c(AttentionProblem::parse("attention kv=f8e5m2 groups=2 tail=6 latent sk=64 d=38 dv=32 causal window=5,-1 "
                                     "align=34 lse " +
                                     std::string(rows)),
             4);
      REQUIRE(c.shares_coding);
      c.k.at<std::uint8_t>({0, 0, key, 7}) = 0x7c;                                        // Inf
      for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = std::abs(c.q.flat(i));  // infinities of one sign
      check_every_entry(c);
    }
  }
}

TEST_CASE("caches: infinities and NaN in columns that are not quantised", "[kernel]") {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const char* layout : {"sk=64", "sk=64 page=16"}) {
      // Key 3 is left of all windows, 33 is some rows'.
      for (const std::int64_t key : {3, 33}) {
        const AttentionProblem problem = AttentionProblem::parse(
            "attention kv=f8e4m3 groups=2 tail=6 tail_dtype=bf16 hq=2 hk=1 sq=6 d=22 dv=16 causal window=5,-1 align=34 "
            "lse seqlens " +
            std::string(layout));
        Case c(problem, 4);  // full
        const std::int64_t page = problem.page_size > 0 ? index_at(c.block_table, {0, key / 16}) : 0;
        c.k_tail.at({page, 0, problem.page_size > 0 ? key % 16 : key, 5}) = bad;
        for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = std::abs(c.q.flat(i));  // infinities of one sign
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("caches: 16-bit queries and results", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* types : {"q=bf16 out=bf16", "q=f16 out=f16", "q=bf16", "out=f16"}) {
    for (const char* layout : {"sk=96 seqlens page=16", "sk=600 seqlens", "sk=33 seqlens ring"}) {
      check_every_entry(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 d=64 lse " + std::string(types) + " " +
                                                layout + cache(dtype, 2)));
    }
  }
}

// Products of bf16 take codes as they are: scales of keys multiply scores, of each group by itself.
TEST_CASE("caches: quantised keys of bf16 queries", "[kernel][numbers]") {
  for (const char* words :
       {"hq=40 hk=1 sq=3 sk=700 d=128", "hq=2 sq=70 sk=300 d=64 causal align=bottom_right scale=3",
        "hq=16 hk=2 sq=9 sk=4500 d=32", "hq=40 hk=1 sq=3 sk=700 d=160 dv=128 tail=32 tail_dtype=bf16 latent",
        "b=2 hq=4 hk=2 sq=40 sk=96 page=16 seqlens d=128 dv=32 tail=64 tail_dtype=bf16",
        "b=3 hq=4 sq=40 sk=96 page=16 seqlens d=96 softcap=9 sinks", "b=2 hq=36 hk=1 sq=2 sk=300 d=64 gathered",
        "hq=8 sq=90 sk=200 d=160 dv=96 window=40,10 align=bottom_right mask=qk",
        "b=3 hq=4 hk=2 sq=35 sk=70 ragged_k=150 d=32 bias=qk layout=bshd"}) {
    const AttentionProblem sizes = AttentionProblem::parse("attention q=bf16 out=bf16 lse " + std::string(words));
    for (const DType type : {DType::i8, DType::i4x2, DType::f8e4m3, DType::f8e5m2})
      for (const int turn : {0, 1, 2}) {
        AttentionProblem problem = sizes;
        problem.kv_dtype = type;
        const bool needs_scale = type == DType::i8 || type == DType::i4x2;
        problem.k_groups = turn == 0 && !needs_scale ? 0 : turn == 1 ? (problem.d - problem.k_tail) / 32 : 1;
        problem.v_groups = turn == 2 ? problem.dv / 32 : needs_scale ? 1 : 0;
        check_every_entry(problem, static_cast<std::uint64_t>(turn) + 1);
      }
  }
}

// Of whole rows and of groups of 32 columns or more, as a GPU's tensor cores take them, by up to 64 rows.
TEST_CASE("caches: few rows over quantised keys in many splits", "[kernel][numbers]") {
  const DType dtype = GENERATE(from_range(kQuantizedTypes));
  std::uint64_t n = 0;
  for (const char* words :
       {"b=2 hq=8 hk=2 sq=1 sk=1504 d=128 page=16 seqlens sinks groups=4 zeros",
        "b=2 hq=4 hk=2 sq=5 sk=1100 d=64 causal align=bottom_right alibi k_groups=2 v_groups=1",
        "hq=16 hk=1 sq=4 sk=700 d=96 dv=160 k_groups=3 v_groups=5 zeros",
        "hq=6 hk=1 sq=2 sk=900 d=192 window=700,0 align=bottom_right bias=hqk softcap=20 k_groups=2 v_groups=6",
        "b=3 hq=3 sq=1 sk=1300 d=96 ring seqlens groups=1 zeros",
        "hq=6 hk=2 sq=3 sk=900 d=256 dv=64 mask=bqk layout=bshd scale=-0.1 k_groups=8 v_groups=2",
        "hq=2 sq=3 sk=900 d=128 layout=other groups=4", "hq=9 hk=1 sq=1 sk=700 d=42 dv=50 groups=1 zeros",
        "b=3 hq=6 hk=2 sq=3 sk=400 ragged_k=900 d=64 groups=2", "hq=8 hk=1 sq=8 sk=600 d=256 groups=1",
        "hq=20 hk=1 sq=2 sk=1100 d=128 dv=96 k_groups=4 v_groups=3 zeros",
        "b=2 hq=24 hk=2 sq=2 sk=704 d=64 dv=50 page=16 seqlens softcap=20 groups=1",
        // Of its own tiles of rows on a GPU the last see no key at all.
        "hq=1 sq=40 sk=20 d=128 window=0,0 align=top_left groups=1",
        "hq=1 sq=40 sk=20 d=128 window=0,0 align=top_left page=4 seqlens groups=1"})
    for (const char* types : {"", "q=bf16 out=bf16 ", "q=f16 out=f16 "}) {
      AttentionProblem problem = AttentionProblem::parse("attention lse " + std::string(types) + words);
      problem.kv_dtype = dtype;
      check_every_entry(problem, n + n / 3);  // scales of every row, of pages, of all in turn
      ++n;
    }
}

TEST_CASE("caches: a scale that is not finite reaches the rows that see its key, and no others", "[kernel]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()})
    for (const char* words :
         {"d=64 groups=1", "d=64 k_groups=2 v_groups=1", "d=40 groups=1", "d=64 groups=1 dropout=0.4"}) {
      const AttentionProblem problem = AttentionProblem::parse(
          "attention q=bf16 kv=i8 out=bf16 hq=4 hk=2 sq=80 sk=80 causal lse " + std::string(words));
      Case of_keys(problem, 2), of_values(problem, 1);  // the seeds give these scales to each row
      of_keys.k_scale.at({0, 0, 50, 0}) = bad;
      check_every_entry(of_keys);
      // Of a row whose codes and queries are positive -inf hides the key.
      for (std::int64_t i = 0; i < problem.d; ++i) of_keys.k.at<std::int8_t>({0, 0, 50, i}) = 3;
      for (std::int64_t i = 0; i < of_keys.q.size(); ++i) of_keys.q.flat(i) = std::abs(of_keys.q.flat(i));
      check_every_entry(of_keys);
      of_values.v_scale.at({0, 1, 60, 0}) = bad;
      check_every_entry(of_values);
    }
}

TEST_CASE("caches: lengths around those at which keys may be split", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* keys :
       {"sk=511", "sk=512", "sk=513 page=1 seqlens", "sk=1024 page=16 seqlens", "sk=1024 ring seqlens",
        "sk=513 ring seqlens", "sk=1024 ring seqlens window=1017,-1", "sk=513 ring seqlens window=506,-1", "sk=4097"}) {
    for (const char* rows : {"hq=2 hk=1 sq=1", "hq=1 sq=7"}) {
      const AttentionProblem problem = AttentionProblem::parse("attention d=32 lse causal align=bottom_right " +
                                                               std::string(rows) + " " + keys + cache(dtype));
      check_every_entry(problem, 4);                    // full
      if (problem.ring) check_every_entry(problem, 3);  // some way past the capacity
    }
  }
  check_every_entry(
      AttentionProblem::parse("attention b=2 hq=4 hk=1 sq=2 sk=4096 d=32 page=128 seqlens window=600,-1 causal "
                              "align=bottom_right sinks lse" +
                              cache(dtype)));
}

TEST_CASE("caches: pages may lie in any order", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* rows : {"hq=6 hk=2 sq=1", "hq=2 sq=7"}) {
    for (const char* page : {"sk=520 page=1", "sk=608 page=16", "sk=1190 page=17", "sk=640 page=128"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=3 d=64 lse causal align=bottom_right seqlens " + std::string(rows) +
                                  " " + page + cache(dtype, 2));
      Case c(problem, 2);
      const std::vector<std::string> names = every_entry(problem);
      std::vector<Result> before;
      for (const std::string& entry : names) before.push_back(run(c, entry));
      const std::int64_t pages = c.k.layout().shape[0];
      std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
      std::shuffle(order.begin(), order.end(), std::mt19937_64(502));
      for (Tensor* t : {&c.k, &c.v, &c.k_scale, &c.v_scale}) permute_entries(*t, order);
      for (std::int64_t n = 0; n < problem.b; ++n) {
        for (std::int64_t i = 0; i < problem.sk / problem.page_size; ++i) {
          const std::int64_t old = index_at(c.block_table, {n, i});
          if (old >= 0 && old < pages) set_index(c.block_table, {n, i}, order[static_cast<std::size_t>(old)]);
        }
      }
      for (std::size_t i = 0; i < names.size(); ++i) {
        INFO(names[i] << ": " << problem.to_string());
        CHECK(run(c, names[i]) == before[i]);
      }
    }
  }
}

TEST_CASE("caches: pages give the bits of the same keys in one piece", "[kernel][numbers]") {
  const DType dtype = each_cache_type();
  for (const char* words :
       {"hq=6 hk=2 sq=1 sk=1190 page=17", "hq=2 sq=7 sk=600 page=1", "hq=4 hk=1 sq=70 sk=640 page=128"}) {
    const AttentionProblem problem = AttentionProblem::parse(
        "attention b=2 d=32 lse causal align=bottom_right seqlens " + std::string(words) + cache(dtype));
    Case c(problem, 4);  // scales of all pages, or per page
    AttentionProblem flat = problem;
    flat.page_size = 0;
    Case whole(flat, 4);
    gather(c, c.k, whole, whole.k), gather(c, c.k_scale, whole, whole.k_scale);
    gather(c, c.v, whole, whole.v), gather(c, c.v_scale, whole, whole.v_scale);
    for (const std::string& entry : every_entry(problem)) {
      INFO(entry << ": " << problem.to_string());
      CHECK(run(whole, entry) == run(c, entry));
    }
  }
}

TEST_CASE("caches: bf16 pages and queries give the bits of keys in one piece", "[kernel]") {
  for (const char* pages : {"sk=272 page=16", "sk=288 page=32", "sk=288 page=48", "sk=320 page=64"}) {
    for (const char* sees : {"", " window=70,-1"}) {
      AttentionProblem paged =
          typed("attention b=3 hq=4 hk=2 sq=70 d=64 causal align=bottom_right lse seqlens " + std::string(pages) + sees,
                DType::bf16);
      AttentionProblem flat = paged;
      flat.page_size = 0;
      Case c(paged, 4), whole(flat, 4);
      gather(c, c.k, whole, whole.k);
      gather(c, c.v, whole, whole.v);
      for (const std::string& entry : every_entry(paged)) {
        INFO(entry << ": " << paged.to_string());
        CHECK(run(whole, entry) == run(c, entry));
      }
    }
  }
}

TEST_CASE("caches: what no row sees may hold anything", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* words : {"sk=320 page=16", "sk=323 page=17", "sk=300 page=1", "sk=200", "sk=40 ring"}) {
    for (const char* rows : {"hq=3 hk=1 sq=1", "hq=2 sq=5"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=1 d=64 lse causal window=20,-1 align=bottom_right seqlens " +
                                  std::string(rows) + " " + words + cache(dtype, 2));
      for (const std::string& entry : every_entry(problem)) {
        INFO(entry << ": " << problem.to_string());
        for (std::uint64_t seed : {1, 2, 4}) {
          Case c(problem, seed);
          const std::int64_t length = index_at(c.seqlens, {0}),
                             first = std::max<std::int64_t>(length - problem.sq - 20, 0);
          const Result before = run(c, entry);
          for (int byte : {0xff, 0x7f, 0x00}) {
            fill_others(c, first, length, byte);
            if (problem.page_size > 0) {
              const std::int64_t pages = problem.sk / problem.page_size;
              for (std::int64_t i = 0; i < pages; ++i) {
                if (i < first / problem.page_size || i * problem.page_size >= length)
                  set_index(c.block_table, {0, i}, byte == 0 ? -1 : std::numeric_limits<std::int32_t>::max());
              }
            }
            CHECK(run(c, entry) == before);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: codes of 8-bit floats that are no numbers", "[kernel]") {
  const bool e5m2 = GENERATE(false, true);
  const std::vector<std::uint8_t> codes =
      e5m2 ? std::vector<std::uint8_t>{0x7c, 0xfc, 0x7d, 0xff} : std::vector<std::uint8_t>{0x7f, 0xff};
  const std::string type = e5m2 ? " kv=f8e5m2" : " kv=f8e4m3";
  for (const char* layout : {"sk=60", "sk=64 page=16", "sk=40 ring"}) {
    for (const char* groups : {"", " groups=2 zeros"}) {
      for (std::uint8_t code : codes) {
        for (bool in_v : {false, true}) {
          // Key 3 is left of all windows, 32 and 33 are some rows', 39 is the last row's.
          for (std::int64_t key : {3, 32, 33, 39}) {
            const AttentionProblem problem =
                AttentionProblem::parse("attention hq=2 hk=1 sq=6 d=16 dv=16 causal window=5,-1 align=34 lse seqlens " +
                                        std::string(layout) + type + groups);
            Case c(problem, 4);  // full
            const std::int64_t page = problem.page_size > 0 ? index_at(c.block_table, {0, key / 16}) : 0;
            const std::int64_t row = problem.page_size > 0 ? key % 16 : key;
            (in_v ? c.v : c.k).at<std::uint8_t>({page, 0, row, 5}) = code;
            check_every_entry(c);
            if (in_v) continue;
            for (std::int64_t i = 0; i < c.q.size(); ++i)
              c.q.flat(i) = std::abs(c.q.flat(i));  // infinities of one sign
            check_every_entry(c);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: scales that are no numbers", "[kernel]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  for (const char* type : {" kv=i8 groups=2", " kv=i4x2 groups=2 zeros", " kv=f8e4m3 groups=2"}) {
    for (bool of_v : {false, true}) {
      for (std::int64_t key : {3, 33}) {
        Case c(AttentionProblem::parse("attention hq=2 hk=1 sq=6 sk=60 d=64 causal window=5,-1 align=34 lse" +
                                       std::string(type)),
               of_v ? 1 : 2);  // scales of every row
        Tensor& scale = of_v ? c.v_scale : c.k_scale;
        REQUIRE(scale.layout().shape[2] == 60);
        scale.at({0, 0, key, 1}) = bad;
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("caches: between guard pages", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* layout : {"sk=70 seqlens", "sk=70 ragged_k=100", "sk=70 seqlens page=1", "sk=80 seqlens page=16",
                             "sk=68 seqlens page=17", "sk=33 seqlens ring", "sk=48 seqlens page=16 layout=other",
                             "sk=37 seqlens layout=bhds", "sk=48 seqlens page=8 layout=bshd"}) {
    for (const char* sizes : {"hq=3 hk=1 sq=1 d=2", "hq=2 sq=7 d=34 dv=18", "hq=8 hk=1 sq=2 d=64"}) {
      for (Placement placement : {Placement::front, Placement::back}) {
        Case c(AttentionProblem::parse("attention b=3 lse " + std::string(sizes) + " " + layout + cache(dtype)), 3,
               placement);
        c.protect_inputs();
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("caches: sampled problems between guard pages", "[kernel][long]") {
  std::mt19937_64 random(503);
  for (int i = 0; i < 20; ++i) {
    const AttentionProblem problem = sample(random, kEverythingCached);
    for (Placement placement : {Placement::front, Placement::back}) {
      Case c(problem, random() % 1000, placement);
      c.protect_inputs();
      check_every_entry(c);
    }
  }
}

TEST_CASE("caches: a sequence alone gives the bits it gives in a batch", "[kernel][numbers]") {
  const DType dtype = each_cache_type();
  for (const char* rows : {"hq=6 hk=2 sq=1", "hq=5 hk=1 sq=3"}) {
    for (const char* layout : {"sk=1100", "sk=1104 page=16", "sk=600 ring"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=5 d=64 lse causal align=bottom_right seqlens " + std::string(rows) +
                                  " " + layout + cache(dtype, 2));
      Case batch(problem, 2), single(problem, 2);
      for (const std::string& entry : every_entry(problem)) {
        const Forced context = forced(entry);
        batch.poison_outputs();
        single.poison_outputs();
        testing::run(batch.args(), context);
        for (std::int64_t n = 0; n < problem.b; ++n) {
          AttentionArgs args = batch.args();
          const auto own = [n](auto& view) {
            if (view && view.shape[0] == 5) view = slice(view, 0, n, 1);
          };
          own(args.q), own(args.kv.seqlens), own(args.kv.block_table);
          args.out = slice(single.out.mutable_view(), 0, n, 1);
          args.lse = slice(single.lse.mutable_view(), 0, n, 1);
          if (problem.page_size == 0) {
            for (TensorView* view : {&args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale}) own(*view);
          } else {  // room for no more than it has
            args.kv.block_table.shape[1] = (index_at(batch.seqlens, {n}) + problem.page_size - 1) / problem.page_size;
          }
          testing::run(args, context);
        }
        INFO(entry << ": " << problem.to_string());
        CHECK(same_bits(batch.out, single.out));
        CHECK(same_bits(batch.lse, single.lse));
      }
    }
  }
}

TEST_CASE("caches: executors and thread counts do not change a bit", "[kernel][threads][numbers]") {
  for (DType dtype : {DType::f32, DType::f16, DType::i4x2}) {
    for (const char* words :
         {"b=1 hq=1 sq=1 sk=2064 page=16", "b=1 hq=8 hk=1 sq=2 sk=1100", "b=5 hq=4 hk=2 sq=1 sk=900 ring",
          "b=4 hq=2 sq=40 sk=612 page=17 ragged_q=50 causal align=bottom_right"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention d=64 lse seqlens " + std::string(words) + cache(dtype));
      Case c(problem, 4);
      for (const std::string& entry : threaded_entries(problem)) {
        const Result serial = run(c, entry);
        for (const auto& executor : all_executors()) {
          for (int threads : {2, 4}) {
            INFO(entry << " on " << executor->name() << " with " << threads << ": " << problem.to_string());
            CHECK(run(c, c.args(), forced(entry, executor, threads)) == serial);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: batches of which some prefill and some decode", "[kernel][numbers]") {
  const DType dtype = each_cache_type();
  const std::int64_t starts[] = {0, 1, 2, 72, 75, 75, 275};
  for (const char* words : {"causal align=bottom_right", "align=bottom_right window=40,20 sinks"}) {
    for (const char* layout : {"sk=320 page=16 seqlens", "sk=306 page=17 seqlens", "sk=300 seqlens",
                               "sk=150 ring seqlens", "sk=300 ragged_k=900"}) {
      Case c(AttentionProblem::parse("attention b=6 hq=4 hk=2 sq=200 ragged_q=275 d=16 lse " + std::string(words) +
                                     " " + layout + cache(dtype, 2)),
             4);
      for (std::int64_t n = 0; n < 7; ++n) set_index(c.cu_seqlens_q, {n}, starts[n]);
      check_every_entry(c);
    }
  }
}
