// Queries of f8e4m3, with scales and without, on every entry that takes them.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "support/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

AttentionProblem of(const std::string& words) {
  return AttentionProblem::parse("attention q=f8e4m3 lse " + words);
}

void check_every_cpu_entry(Case& c) {
  const Reference reference = oracle(c.args());
  for (const std::string& entry : every_entry(c.problem)) {
    if (device_of(entry) != DeviceType::cpu) continue;
    INFO(entry << ": " << c.problem.to_string());
    CHECK(run_and_compare(c, entry, reference).ok());
  }
}

}  // namespace

// An entry that refused too much would be left out of every test in silence, one that took too much would not.
TEST_CASE("f8e4m3 queries: the CPU's entries of fp32 arithmetic take them, the others say that they do not",
          "[kernel]") {
  for (const char* types :
       {"kv=f32", "kv=bf16 out=bf16 q_scale", "kv=f16", "kv=f8e4m3 groups=1 q_scale", "kv=i8 groups=1"}) {
    const AttentionProblem problem = of(std::string(types) + " hq=4 hk=2 sq=32 sk=70 d=64");
    for (const EntryInfo& entry : entries()) {
      if (entry.operation != Operation::attention || !entry.unusable.empty() || entry.backend != "cpu") continue;
      INFO(entry.name << ": " << problem.to_string());
      const std::string refusal = refused_text([&] { Plan(problem, forced(entry.name)); });
      if (entry.arithmetic == "f32") CHECK(refusal == "");
      else
        CHECK((refusal.find("takes no f8e4m3 queries") != std::string::npos ||
               refusal.find("takes other element types") != std::string::npos));
    }
  }
}

TEST_CASE("f8e4m3 queries: every type of keys in every layout", "[kernel]") {
  const DType dtype = each_cache_type();
  std::uint64_t n = 0;
  for (const char* words :
       {"b=2 hq=2 sq=7 sk=33 d=34 dv=18", "b=3 hq=6 hk=2 sq=1 sk=70 d=32 seqlens",
        "b=2 hq=8 hk=2 sq=40 sk=90 d=24 layout=other",
        "b=2 hq=4 hk=1 sq=33 sk=50 d=16 causal align=bottom_right layout=bshd",
        "b=3 hq=3 hk=1 sq=9 sk=40 d=6 ragged_q=19", "b=3 hq=4 hk=2 sq=40 sk=70 d=64 ragged_q=61 ragged_k=120",
        "b=2 hq=4 sq=3 sk=64 d=16 dv=8 layout=bhds", "b=2 hq=16 hk=2 sq=2 sk=48 d=64 seqlens page=16",
        "b=3 hq=4 hk=2 sq=30 sk=48 d=24 seqlens page=8", "b=2 hq=2 sq=2 sk=33 d=40 seqlens ring",
        "b=2 hq=4 hk=2 sq=5 sk=20 d=32 gathered sinks", "b=2 hq=4 hk=1 sq=3 sk=60 d=40 dv=24 latent"}) {
    for (const char* scale : {"", " q_scale", " q_scale out=bf16", " q_scale out=f16"}) {
      const std::uint64_t seed = 2 + (n + n / 4) % 4;  // each way to broadcast, of each scale in turn
      Case c(of(words + cache_words(dtype) + scale), seed, seed % 2 ? Placement::front : Placement::back);
      c.protect_inputs();
      check_every_entry(c);
      ++n;
    }
  }
}

TEST_CASE("f8e4m3 queries: long keys in splits, and scores of every kind", "[kernel][long]") {
  for (const char* words :
       {"b=2 hq=8 hk=1 sq=1 sk=9000 d=64 kv=f8e4m3 groups=1 head_scales", "b=1 hq=2 sq=5 sk=5000 d=128 kv=bf16",
        "b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal align=bottom_right window=100,-1 softcap=20 alibi sinks",
        "b=2 hq=4 hk=2 sq=70 sk=99 d=40 bias=bhqk mask=qk dropout=0.3",
        "b=1 hq=2 sq=9 sk=99 d=40 bias=k scale=-0.2 dropout=0.5",
        "b=1 hq=128 hk=1 sq=1 sk=1100 d=576 dv=512 kv=f8e4m3 groups=4 tail=64 tail_dtype=bf16 latent"})
    check_every_entry(of(std::string(words) + " q_scale"));
}

TEST_CASE("f8e4m3 queries: the bits are those of fp32 queries with the same numbers", "[kernel]") {
  for (const char* words :
       {"b=2 hq=4 hk=2 sq=40 sk=90 d=34 dv=18", "b=3 hq=6 hk=2 sq=1 sk=70 d=32 kv=bf16 layout=other",
        "b=2 hq=2 sq=5 sk=64 d=7 kv=f8e4m3 groups=1 seqlens page=16",
        "b=3 hq=4 hk=2 sq=9 sk=70 d=64 ragged_q=20 ragged_k=120", "b=2 hq=4 hk=2 sq=3 sk=20 d=32 kv=f16 gathered"}) {
    for (const char* scale : {"", " q_scale"}) {
      for (const std::uint64_t seed : {3, 4}) {
        Case c(of(std::string(words) + scale), seed);
        AttentionProblem widened = c.problem;
        widened.q_dtype = DType::f32, widened.q_scale = false;
        Case wide(widened, seed);
        const bool ragged = c.q.layout().ndim == 3;
        const auto& shape = c.q.layout().shape;
        for (std::int64_t i = 0; i < c.q.size(); ++i) {
          const std::int64_t d = c.problem.d, row = i / d, rows = ragged ? 1 : shape[2];
          const std::int64_t entry = row / rows / shape[1], head = row / rows % shape[1];
          const auto scale_of = [&] {
            const auto& own = c.q_scale.layout().shape;
            const std::int64_t at = own[0] == 1 ? 0 : entry;
            return static_cast<float>(ragged ? c.q_scale.at({at, head, 0})
                                             : c.q_scale.at({at, head, own[2] == 1 ? 0 : row % rows, 0}));
          };
          wide.q.flat(i) = c.q.flat(i) * (c.q_scale ? scale_of() : 1.f);
        }
        for (const std::string& entry : every_entry(c.problem)) {
          if (device_of(entry) != DeviceType::cpu) continue;
          INFO(entry << ": " << c.problem.to_string());
          c.poison_outputs(), wide.poison_outputs();
          attention(c.args(), forced(entry)), attention(wide.args(), forced(entry));
          CHECK(same_bits(c.out, wide.out));
          CHECK(same_bits(c.lse, wide.lse));
        }
      }
    }
  }
}

TEST_CASE("f8e4m3 queries: NaN codes and scales of any kind reach their rows", "[kernel]") {
  for (const char* words : {"b=2 hq=4 hk=2 sq=40 sk=50 d=19", "b=2 hq=4 hk=2 sq=2 sk=50 d=19 kv=bf16 out=bf16",
                            "b=2 hq=4 hk=2 sq=9 sk=48 d=16 kv=f8e4m3 groups=1 seqlens page=16",
                            "b=2 hq=4 hk=2 sq=3 sk=20 d=24 kv=i8 groups=1 gathered"}) {
    for (const std::uint8_t code : {0x7f, 0xff}) {
      Case c(of(std::string(words) + " q_scale"), 5);
      c.q.at<std::uint8_t>({1, 2, 1, 3}) = code;
      check_every_entry(c);
    }
    // The largest numbers, and denormals, of either sign.
    Case extreme(of(words), 5);
    for (const auto& [at, code] : {std::pair{0, 0x7e}, {1, 0xfe}, {2, 0x01}, {3, 0x87}, {4, 0x80}})
      extreme.q.at<std::uint8_t>({0, 1, 0, at}) = static_cast<std::uint8_t>(code);
    check_every_entry(extreme);
    for (const float scale : {0.f, -0.f, -3.f, kNan, kInf, -kInf}) {
      for (const bool positive : {false, true}) {        // then all scores of the row are one infinity, or NaN
        Case c(of(std::string(words) + " q_scale"), 3);  // each row has its own scale
        REQUIRE(c.q_scale.layout().shape[2] == c.problem.sq);
        c.q_scale.at({1, 2, 1, 0}) = scale;
        for (std::int64_t i = 0; positive && i < c.q.size(); ++i) c.q.flat(i) = std::abs(c.q.flat(i)) + 0.5f;
        for (std::int64_t i = 0; positive && c.k.dtype() == DType::f32 && i < c.k.size(); ++i)
          c.k.flat(i) = std::abs(c.k.flat(i));
        // To GPUs, Inf is NaN: scores of -inf hide no key.
        if (positive && scale == -kInf) check_every_cpu_entry(c);
        else check_every_entry(c);
      }
    }
  }
}
