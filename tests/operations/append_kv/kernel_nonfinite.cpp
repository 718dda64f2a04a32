// KV caches: NaN and Inf in codes, scales and tails, and anything at all where no row looks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "support/bits.hpp"
#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

/// Then a score that is not finite is of one sign, if its keys' elements are.
void make_queries_positive(Case& c) {
  for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = std::abs(c.q.flat(i));
}

/// Fills every byte of the rows of k, v and their scales that none of the keys [first, last) of sequence 0 lies in.
void fill_others(Case& c, std::int64_t first, std::int64_t last, int byte) {
  const auto entries = c.k.layout().shape[0], rows = c.k.layout().shape[2];
  std::vector<bool> seen(static_cast<std::size_t>(entries * rows));
  for (std::int64_t j = first; j < last; ++j) {
    const Slot slot = c.slot(0, j);
    seen[static_cast<std::size_t>(slot.entry * rows + slot.row)] = true;
  }
  for (Tensor* t : {&c.k, &c.v, &c.k_scale, &c.v_scale, &c.k_tail}) {
    const auto& shape = t->layout().shape;
    if (!*t || shape[0] != entries || shape[2] != rows) continue;  // scales of more than one row
    for (std::int64_t at = 0; at < entries * rows; ++at) {
      for (std::int64_t i = 0; i < shape[1] * shape[3] && !seen[static_cast<std::size_t>(at)]; ++i) {
        std::memset(t->buffer().data() + byte_of(*t, {at / rows, at % rows}, i / shape[3], i % shape[3]), byte,
                    size_of(t->dtype()));
      }
    }
  }
}

}  // namespace

TEST_CASE("caches: NaN and Inf codes of 8-bit floats", "[kernel]") {
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
            const Slot slot = c.slot(0, key);
            (in_v ? c.v : c.k).at<std::uint8_t>({slot.entry, 0, slot.row, 5}) = code;
            check_every_entry(c);
            if (in_v) continue;
            make_queries_positive(c);
            check_every_entry(c);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: NaN and Inf codes beside prompts", "[kernel][long]") {
  const bool e5m2 = GENERATE(false, true);
  const std::vector<std::uint8_t> codes =
      e5m2 ? std::vector<std::uint8_t>{0x7c, 0xfd} : std::vector<std::uint8_t>{0x7f};
  for (const char* words : {"sk=200 page=8 d=64 groups=1", "sk=200 d=40", "sk=180 ring d=128 groups=1"}) {
    for (const char* types : {"q=bf16 out=bf16 ", "q=f16 out=f16 ", ""}) {
      for (const std::uint8_t code : codes) {
        for (const bool in_v : {false, true}) {
          // Key 3 is no row's, 100 is some rows', 169 the last row's, and 172 is past the length.
          for (const std::int64_t key : {3, 100, 169, 172}) {
            if (!has_gpu() && (key != 169 || *types == '\0')) continue;
            Case c(AttentionProblem::parse("attention hq=4 hk=2 sq=80 causal window=60,-1 align=90 lse seqlens kv=f8e" +
                                           std::string(e5m2 ? "5m2 " : "4m3 ") + types + words),
                   4);  // full
            const Slot slot = c.slot(0, key);
            (in_v ? c.v : c.k).at<std::uint8_t>({slot.entry, 1, slot.row, 5}) = code;
            set_index(c.seqlens, {0}, 170);
            check_every_entry(c);
            if (in_v) continue;
            make_queries_positive(c);
            check_every_entry(c);
          }
        }
      }
    }
  }
}

TEST_CASE("caches: scales that are not finite reach only the rows that see their keys", "[kernel]") {
  const float bad = GENERATE(kInf, -kInf, kNan);
  const auto check = [bad](const std::string& words, std::initializer_list<std::int64_t> keys) {
    const AttentionProblem problem = AttentionProblem::parse("attention lse causal " + words);
    for (const std::int64_t key : keys) {
      Case of_keys(problem, 2), of_values(problem, 1);  // the seeds give these scales to each row
      REQUIRE(of_keys.k_scale.layout().shape[2] == problem.sk);
      REQUIRE(of_values.v_scale.layout().shape[2] == problem.sk);
      of_keys.k_scale.at({0, 0, key, key % problem.k_groups}) = bad;
      check_every_entry(of_keys);
      // Of a row whose codes and queries are positive -inf hides the key.
      for (std::int64_t i = 0; i < of_keys.k.layout().shape[3]; ++i) of_keys.k.at<std::uint8_t>({0, 0, key, i}) = 0x33;
      make_queries_positive(of_keys);
      check_every_entry(of_keys);
      of_values.v_scale.at({0, problem.hk - 1, key, key % problem.v_groups}) = bad;
      check_every_entry(of_values);
    }
  };
  for (const char* words :
       {"d=64 groups=1", "d=64 k_groups=2 v_groups=1", "d=40 groups=1", "d=64 groups=1 dropout=0.4"})
    check("q=bf16 out=bf16 kv=i8 hq=4 hk=2 sq=80 sk=80 " + std::string(words), {50, 61});  // of either group
  for (const char* type : {"kv=i8 groups=2", "kv=i4x2 groups=2 zeros", "kv=f8e4m3 groups=2"})
    check("hq=2 hk=1 sq=6 sk=60 d=64 window=5,-1 align=34 " + std::string(type), {3, 33});  // no row's, and some rows'
}

TEST_CASE("caches: NaN and Inf in tails of keys", "[kernel]") {
  for (const float bad : {kNan, kInf}) {
    for (const char* layout : {"sk=64", "sk=64 page=16"}) {
      // Key 3 is left of all windows, 33 is some rows'.
      for (const std::int64_t key : {3, 33}) {
        const AttentionProblem problem = AttentionProblem::parse(
            "attention kv=f8e4m3 groups=2 tail=6 tail_dtype=bf16 hq=2 hk=1 sq=6 d=22 dv=16 causal window=5,-1 align=34 "
            "lse seqlens " +
            std::string(layout));
        Case c(problem, 4);  // full
        const Slot slot = c.slot(0, key);
        c.k_tail.at({slot.entry, 0, slot.row, 5}) = bad;
        make_queries_positive(c);
        check_every_entry(c);
      }
    }
  }
}

TEST_CASE("caches: an Inf code of a latent value leaves the keys' columns as they are", "[kernel]") {
  for (const char* rows : {"hq=2 hk=1 sq=6", "hq=20 hk=1 sq=6"}) {
    for (std::int64_t key : {3, 33}) {
      Case c(AttentionProblem::parse("attention kv=f8e5m2 groups=2 tail=6 latent sk=64 d=38 dv=32 causal window=5,-1 "
                                     "align=34 lse " +
                                     std::string(rows)),
             4);
      REQUIRE(c.shares_coding);
      c.k.at<std::uint8_t>({0, 0, key, 7}) = 0x7c;  // Inf
      make_queries_positive(c);
      check_every_entry(c);
    }
  }
}

TEST_CASE("caches: what no row sees may hold anything", "[kernel]") {
  const DType dtype = each_cache_type();
  for (const char* words : {"sk=320 page=16", "sk=323 page=17", "sk=300 page=1", "sk=200", "sk=40 ring"}) {
    for (const char* rows : {"hq=3 hk=1 sq=1", "hq=2 sq=5"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=1 d=64 lse causal window=20,-1 align=bottom_right seqlens " +
                                  std::string(rows) + " " + words + cache_words(dtype, 2));
      const std::vector<std::string> entries = every_entry(problem);
      for (std::uint64_t seed : {1, 2, 4}) {
        Case c(problem, seed);
        const std::int64_t length = index_at(c.seqlens, {0}),
                           first = std::max<std::int64_t>(length - problem.sq - 20, 0);
        std::vector<Result> before;
        for (const std::string& entry : entries) before.push_back(run(c, entry));
        for (int byte : {0xff, 0x7f, 0x00}) {
          fill_others(c, first, length, byte);
          if (problem.page_size > 0) {
            const std::int64_t pages = problem.sk / problem.page_size;
            for (std::int64_t i = 0; i < pages; ++i) {
              if (i < first / problem.page_size || i * problem.page_size >= length)
                set_index(c.block_table, {0, i}, byte == 0 ? -1 : std::numeric_limits<std::int32_t>::max());
            }
          }
          for (std::size_t i = 0; i < entries.size(); ++i) {
            INFO(entries[i] << ": " << problem.to_string());
            CHECK(run(c, entries[i]) == before[i]);
          }
        }
      }
    }
  }
}
