// KV caches against the oracle: every layout and every type, on every entry that takes them.
#include <algorithm>
#include <random>
#include <span>
#include <string>

#include "operations/attention/sampler.hpp"
#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// Between guard pages.
void check_every_layout(const std::string& words, std::uint64_t seed, Placement placement) {
  for (const char* layout :
       {"sk=64 seqlens", "sk=70 seqlens", "sk=37 seqlens layout=bhds", "sk=70 ragged_k=120", "sk=70 seqlens page=1",
        "sk=48 seqlens page=8 layout=bshd", "sk=80 seqlens page=16", "sk=48 seqlens page=16 layout=other",
        "sk=68 seqlens page=17", "sk=128 seqlens page=128", "sk=33 seqlens ring", "sk=40 seqlens ring"}) {
    Case c(AttentionProblem::parse("attention b=3 lse " + words + " " + layout), seed, placement);
    c.protect_inputs();
    check_every_entry(c);
  }
}

// With these a sequence is full and one is empty; each row of keys, or of values, has scales of its own, and indices
// are i32 or i64.
constexpr std::uint64_t kScalesOfKeys = 2, kScalesOfValues = 7;

}  // namespace

TEST_CASE("caches: every type in every layout", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* rows : {"hq=3 hk=1 sq=1 d=2", "hq=2 sq=7 d=34 dv=18", "hq=8 hk=1 sq=2 d=64"})
    for (Placement placement : {Placement::front, Placement::back})
      check_every_layout(rows + cache_words(dtype), kScalesOfKeys, placement);
}

TEST_CASE("caches: every type in every layout with more rows", "[kernel][long]") {
  const DType dtype = each_cache_type();
  std::size_t turn = static_cast<std::size_t>(dtype), other = turn + 1;
  for (const char* rows : {"hq=2 sq=1", "hq=6 hk=2 sq=1", "hq=5 hk=1 sq=2", "hq=16 hk=2 sq=7", "hq=2 hk=2 sq=64"}) {
    const std::string words = std::string(rows) + " d=32 dv=24" + cache_words(dtype);
    if (is_sampled(turn, 2)) check_every_layout(words, kScalesOfKeys, Placement::front);
    if (is_sampled(other, 2)) check_every_layout(words, kScalesOfValues, Placement::back);
  }
}

TEST_CASE("caches: sampled problems", "[kernel][long]") {
  std::mt19937_64 random(501);
  for (int i = 0; i < 50; ++i) {
    const AttentionProblem problem = sample(random, kEverythingCached);
    Case c(problem, random() % 1000, i % 2 == 0 ? Placement::front : Placement::back);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("caches: every score modifier", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* words :
       {"causal align=bottom_right", "causal align=bottom_right window=20,-1 sinks", "window=9,3 align=bottom_right",
        "softcap=5 alibi align=bottom_right", "alibi causal align=bottom_right sinks scale=-0.3", "causal align=11"}) {
    for (const char* layout : {"sk=96 seqlens page=16", "sk=70 seqlens", "sk=33 seqlens ring"}) {
      for (const char* rows : {"hq=3 hk=1 sq=1", "hq=5 hk=1 sq=7", "hq=16 hk=2 sq=2"}) {
        check_every_entry(AttentionProblem::parse("attention b=4 d=16 lse " + std::string(rows) + " " + words + " " +
                                                  layout + cache_words(dtype, 2)),
                          2);
      }
    }
  }
  for (const char* words : {"bias=bhqk", "bias=k mask=bk sinks", "bias=hk softcap=3 causal align=bottom_right"}) {
    check_every_entry(AttentionProblem::parse("attention b=3 hq=6 hk=2 sq=7 sk=85 page=17 seqlens d=24 lse " +
                                              std::string(words) + cache_words(dtype)));
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

TEST_CASE("caches: tails of keys", "[kernel][long]") {
  const DType dtype = each_cache_type();
  if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return;
  auto turn = static_cast<std::size_t>(dtype);
  for (const char* sizes :
       {"d=32 tail=8 dv=24", "d=23 tail=1 dv=8", "d=38 tail=36 dv=2", "d=11 tail=9 dv=17 layout=other",
        "d=80 tail=16 dv=64 latent", "d=54 tail=20 dv=34 latent layout=bhds"}) {
    for (const char* layout : {"sk=70 seqlens", "sk=48 seqlens page=16", "sk=9 gathered", "sk=33 seqlens ring"}) {
      for (const char* rows : {"hq=2 sq=1", "hq=6 hk=2 sq=3", "hq=16 hk=1 sq=9"}) {
        for (const char* tail : {"bf16", "f16", "f32"}) {
          const auto problem = [&] {
            AttentionProblem p = AttentionProblem::parse("attention b=2 lse " + std::string(sizes) + " " + layout +
                                                         " " + rows + " tail_dtype=" + tail + cache_words(dtype));
            if (dtype == DType::i4x2) p.d += (p.d - p.k_tail) % 2, p.dv += p.dv % 2;
            return p;
          }();
          for (Placement placement : {Placement::front, Placement::back}) {
            if (!is_sampled(turn, 5)) continue;
            Case c(problem, 3, placement);
            c.protect_inputs();
            check_every_entry(c);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: latent values share codes and scales with keys", "[kernel][long]") {
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
}

TEST_CASE("caches: 16-bit queries and results", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* types : {"q=bf16 out=bf16", "q=f16 out=f16", "q=bf16", "out=f16"}) {
    for (const char* layout : {"sk=96 seqlens page=16", "sk=600 seqlens", "sk=33 seqlens ring"}) {
      check_every_entry(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 d=64 lse " + std::string(types) + " " +
                                                layout + cache_words(dtype, 2)));
    }
  }
}

TEST_CASE("caches: quantised keys of bf16 queries", "[kernel][numbers]") {
  std::size_t n = 0;
  for (const char* words :
       {"hq=40 hk=1 sq=3 sk=700 d=128", "hq=2 sq=70 sk=300 d=64 causal align=bottom_right scale=3",
        "hq=16 hk=2 sq=9 sk=4500 d=32", "hq=40 hk=1 sq=3 sk=700 d=160 dv=128 tail=32 tail_dtype=bf16 latent",
        "b=2 hq=4 hk=2 sq=40 sk=96 page=16 seqlens d=128 dv=32 tail=64 tail_dtype=bf16",
        "b=3 hq=4 sq=40 sk=96 page=16 seqlens d=96 softcap=9 sinks", "b=2 hq=36 hk=1 sq=2 sk=300 d=64 gathered",
        "hq=8 sq=90 sk=200 d=160 dv=96 window=40,10 align=bottom_right mask=qk",
        "b=3 hq=4 hk=2 sq=35 sk=70 ragged_k=150 d=32 bias=qk layout=bshd"}) {
    const AttentionProblem sizes = AttentionProblem::parse("attention q=bf16 out=bf16 lse " + std::string(words));
    ++n;  // or every size would have the same half
    for (const DType type : {DType::i8, DType::i4x2, DType::f8e4m3, DType::f8e5m2})
      for (const int turn : {0, 1, 2}) {
        AttentionProblem problem = sizes;
        problem.kv_dtype = type;
        const bool needs_scale = type == DType::i8 || type == DType::i4x2;
        if (!is_sampled(n, 2)) continue;
        problem.k_groups = turn == 0 && !needs_scale ? 0 : turn == 1 ? (problem.d - problem.k_tail) / 32 : 1;
        problem.v_groups = turn == 2 ? problem.dv / 32 : needs_scale ? 1 : 0;
        check_every_entry(problem, static_cast<std::uint64_t>(turn) + 1);
      }
  }
}

// Of more rows than a decoding kernel takes, or of ragged queries. On a GPU scales of whole rows are tensor cores'; a
// CPU, which has one kernel for all, gets some of them.
TEST_CASE("caches: prompts over quantised keys", "[kernel][long]") {
  const DType dtype = GENERATE(from_range(kQuantizedTypes));
  std::size_t n = 0;
  for (const char* words :
       {"hq=4 hk=2 sq=40 sk=300 d=128 causal align=bottom_right", "hq=2 sq=150 sk=400 d=128",
        "b=2 hq=8 hk=2 sq=70 sk=320 page=16 seqlens d=64 causal align=bottom_right window=100,-1",
        "b=3 hq=4 hk=1 sq=100 ragged_q=130 sk=272 page=16 seqlens d=128 dv=64 causal align=bottom_right",
        "b=3 hq=2 sq=90 ragged_q=120 sk=170 ragged_k=300 d=96 causal align=bottom_right sinks",
        "b=2 hq=3 hk=1 sq=150 sk=160 ring seqlens d=64 window=9,0 align=bottom_right",
        "hq=2 sq=70 sk=200 d=192 dv=160 softcap=20 alibi align=bottom_right", "hq=2 sq=70 sk=200 d=256 dv=128 bias=hqk",
        "b=2 hq=4 hk=2 sq=80 sk=204 page=17 seqlens d=64 mask=bqk sinks",
        "hq=4 hk=1 sq=33 sk=150 d=72 dv=40 layout=bshd", "hq=2 sq=70 sk=140 d=64 layout=other",
        "b=2 hq=2 sq=80 sk=96 page=1 seqlens d=80 scale=-0.2",
        "b=2 hq=2 sq=70 sk=128 page=8 seqlens d=256 layout=other", "hq=2 sq=100 sk=90 d=64 causal align=-40",
        "hq=2 sq=70 sk=64 d=32 scale=0", "hq=1 sq=140 sk=20 d=128 window=0,0 align=top_left page=4 seqlens"})
    for (const char* coding : {"", " groups=1", " k_groups=1", " groups=2 zeros"})
      for (const char* types : {" q=bf16 out=bf16", " q=f16 out=f16", " q=bf16", " out=f16", ""}) {
        // bf16 with every coding, and of the others one.
        if (++n % 5 != 0 && std::string(types) != " q=bf16 out=bf16") continue;
        AttentionProblem problem =
            AttentionProblem::parse("attention lse " + std::string(words) + types + " kv=f8e5m2" + coding);
        problem.kv_dtype = dtype;
        const bool needs_scales = dtype == DType::i8 || dtype == DType::i4x2;
        if (needs_scales && (problem.k_groups == 0 || problem.v_groups == 0)) continue;
        if (!has_gpu() && n % 12 != 0) continue;
        check_every_entry(problem, n);  // scales of every row, of pages, of all in turn
      }
}

TEST_CASE("caches: few rows over quantised keys in many splits", "[kernel][numbers]") {
  const DType dtype = GENERATE(from_range(kQuantizedTypes));
  std::uint64_t n = 0;
  auto turn = static_cast<std::size_t>(dtype);  // each type of keys has another one of queries
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
      const std::uint64_t seed = n + n / 3;  // scales of every row, of pages, of all in turn
      ++n;
      if (is_sampled(turn, 3)) check_every_entry(problem, seed);
    }
}

TEST_CASE("caches: lengths around those at which keys may be split", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* keys : {"sk=640", "sk=641", "sk=641 page=1 seqlens", "sk=1024 page=16 seqlens",
                           "sk=1024 ring seqlens", "sk=641 ring seqlens", "sk=1024 ring seqlens window=1017,-1",
                           "sk=641 ring seqlens window=634,-1", "sk=1153", "sk=2561", "sk=4097"}) {
    for (const char* rows : {"hq=2 hk=1 sq=1", "hq=1 sq=7"}) {
      const AttentionProblem problem = AttentionProblem::parse("attention d=32 lse causal align=bottom_right " +
                                                               std::string(rows) + " " + keys + cache_words(dtype));
      check_every_entry(problem, 4);                    // full
      if (problem.ring) check_every_entry(problem, 3);  // some way past the capacity
    }
  }
  check_every_entry(
      AttentionProblem::parse("attention b=2 hq=4 hk=1 sq=2 sk=4096 d=32 page=128 seqlens window=600,-1 causal "
                              "align=bottom_right sinks lse" +
                              cache_words(dtype)));
}

// Tensors that no L2 holds: what the next item begins with is fetched ahead.
TEST_CASE("caches: table entries that no row sees are not read", "[kernel]") {
  // The first row sees keys from 1200 - 100 on, or from 1596 - 100 on, which begin a page.
  const auto [sizes, kUnseen] = GENERATE(std::pair("hq=16 sq=400", 275), std::pair("b=4 hq=24 hk=6 sq=4", 374));
  const AttentionProblem problem = AttentionProblem::parse(
      "attention sk=1600 d=64 page=4 seqlens window=100,0 align=bottom_right lse " + std::string(sizes));
  Case c(problem, 4), other(problem, 4);  // full
  const std::size_t bytes = size_of(c.block_table.dtype()), unseen = kUnseen * bytes;
  const std::span<const std::byte> table(c.block_table.buffer().data(), c.block_table.buffer().size());
  Buffer seen(table.size() - unseen, Placement::front);
  std::copy(table.begin() + static_cast<std::ptrdiff_t>(unseen), table.end(), seen.data());
  AttentionArgs args = other.args();
  args.kv.block_table.data = seen.data() - unseen;
  for (const std::string& entry : usable_entries(problem)) {
    if (device_of(entry) != DeviceType::cpu || !selected(entry)) continue;
    INFO(entry);
    run(c.args(), entry);
    other.poison_outputs();
    run(args, entry);
    CHECK(same_bits(c.out, other.out));
    CHECK(same_bits(c.lse, other.lse));
  }
}

TEST_CASE("caches: batches of which some prefill and some decode", "[kernel][numbers]") {
  const DType dtype = each_cache_type();
  const std::int64_t starts[] = {0, 1, 2, 72, 75, 75, 275};
  auto turn = static_cast<std::size_t>(dtype);
  for (const char* words : {"causal align=bottom_right", "align=bottom_right window=40,20 sinks"}) {
    for (const char* layout : {"sk=320 page=16 seqlens", "sk=306 page=17 seqlens", "sk=300 seqlens",
                               "sk=150 ring seqlens", "sk=300 ragged_k=900"}) {
      for (const char* types : {"", " q=bf16 out=bf16"}) {
        if (!is_sampled(turn, 3)) continue;
        Case c(AttentionProblem::parse("attention b=6 hq=4 hk=2 sq=200 ragged_q=275 d=16 lse " + std::string(words) +
                                       " " + layout + types + cache_words(dtype, *types ? 1 : 2)),
               4);
        for (std::int64_t n = 0; n < 7; ++n) set_index(c.cu_seqlens_q, {n}, starts[n]);
        check_every_entry(c);
      }
    }
  }
}
