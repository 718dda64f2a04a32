// Which CPU kernels run a call of attention, on made-up kernels with limits like those of a machine with AMX.
#include <string>
#include <string_view>
#include <vector>

#include "operations/attention/cpu_choice.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::cpu;

namespace {

AttentionKernel kernel(Phase phase, const char* arithmetic, DTypeSet dtypes) {
  AttentionKernel k{};
  k.facts = {.operation = Operation::attention, .phase = phase, .arithmetic = arithmetic, .dtypes = dtypes};
  return k;
}

/// A machine whose matrix units take bf16, and whose vectors take every type.
struct Kernels {
  AttentionKernel tiles = kernel(Phase::prefill, "bf16", set_of(DType::bf16)), decode, prefill, naive;
  IsaSupport amx{}, avx512{};
  std::vector<AttentionCandidate> all;

  Kernels() {
    for (auto [phase, k] : {std::pair(Phase::decode, &decode), {Phase::prefill, &prefill}, {Phase::naive, &naive}})
      *k = kernel(phase, "f32", kCacheTypes);
    tiles.min_rows = 4, tiles.min_key_elements = 2560, tiles.decode_rows = 8, prefill.full_rows = 16;
    amx.isa = Isa::amx, amx.name = "amx", avx512.isa = Isa::avx512, avx512.name = "avx512";
    all = {{&decode, &avx512}, {&tiles, &amx}, {&prefill, &avx512}, {&naive, &avx512}};
  }
  Kernels(const Kernels&) = delete;

  /// The first kernel that does not refuse, as dispatch does.
  const AttentionCandidate& chosen(std::string_view text, const Context::Impl& context) const {
    for (const AttentionCandidate& own : all)
      if (((set_of(AttentionProblem::parse(text).q_dtype)) & ~own.kernel->facts.dtypes) == 0 &&
          refuse(own, AttentionProblem::parse(text), all, context).empty())
        return own;
    throw std::runtime_error("none");
  }
  AttentionChoice choice(std::string_view text, const Context::Impl& context) const {
    return choose(chosen(text, context), AttentionProblem::parse(text), all, context);
  }
};

}  // namespace

TEST_CASE("choice: one kernel runs sequences of one length", "[unit]") {
  const Kernels k;
  const Context::Impl context{ContextOptions{}};
  const auto runs = [&](const char* text) {
    const AttentionChoice choice = k.choice(text, context);
    CHECK((choice.few_rows == nullptr && choice.short_keys == nullptr && choice.rule().empty()));
    return choice.chosen->kernel;
  };
  CHECK(runs("attention dtype=bf16 sq=8 sk=4096 d=64") == &k.decode);
  CHECK(runs("attention dtype=bf16 sq=9 sk=4096 d=64") == &k.tiles);
  CHECK(runs("attention dtype=bf16 sq=9 sk=19 d=64") == &k.decode);  // 2432 key elements
  CHECK(runs("attention dtype=bf16 sq=16 sk=19 d=64") == &k.prefill);
  CHECK(runs("attention dtype=bf16 sq=17 sk=19 d=64") == &k.prefill);
  CHECK(runs("attention dtype=bf16 sq=17 sk=20 d=64") == &k.tiles);
  CHECK(runs("attention sq=16 sk=128 d=64") == &k.prefill);  // 1024 key elements a row
  CHECK(runs("attention sq=16 sk=129 d=64") == &k.decode);
}

TEST_CASE("choice: each sequence of a call gets the kernel that it would get alone", "[unit]") {
  const Kernels k;
  const Context::Impl context{ContextOptions{}};
  const AttentionChoice choice = k.choice("attention dtype=bf16 b=9 sq=512 sk=4096 d=64 ragged_q=600", context);
  CHECK(choice.chosen->kernel == &k.tiles);
  for (const std::int64_t rows : {1, 8, 9, 15, 16, 17, 512})
    for (const std::int64_t keys : {1, 19, 20, 128, 129, 4096}) {
      const std::string alone = "attention dtype=bf16 d=64 sq=" + std::to_string(rows) + " sk=" + std::to_string(keys);
      INFO(alone);
      CHECK(&choice.kernel_for(rows, keys) == k.chosen(alone, context).kernel);
    }
  CHECK(choice.rule() ==
        "from 4 rows and 2560 key elements (keys x (d + dv)) on: attention_decode.f32.avx512 up to 8 rows of a head, "
        "else attention_prefill.bf16.amx; below: attention_decode.f32.avx512 up to 16 rows of a head (from 16 rows on "
        "only over more than 1024 key elements a row), else attention_prefill.f32.avx512");
  CHECK(k.choice("attention b=9 sq=512 sk=64 d=64 seqlens", context).rule().empty());  // no sequence has few rows
  // attention_decode runs all sequences if it is the fastest for short and for long ones.
  CHECK(k.choice("attention dtype=bf16 b=9 sq=4 sk=4096 d=64 seqlens", context).chosen->kernel == &k.decode);
  CHECK(k.choice("attention dtype=bf16 b=9 sq=16 sk=64 d=64 seqlens", context).few_rows->kernel == &k.decode);
}

TEST_CASE("choice: a forced kernel or instruction set is not weighed against others", "[unit]") {
  const Kernels k;
  const char* const text = "attention dtype=bf16 b=9 sq=512 sk=4 d=64 ragged_q=600";
  Context::Impl forced{ContextOptions{}};
  forced.options.kernel = "attention_prefill.bf16.amx", forced.kernel_operation = Operation::attention;
  const AttentionCandidate& tiles = k.all[1];
  CHECK(refuse(tiles, AttentionProblem::parse(text), k.all, forced).empty());
  CHECK(&choose(tiles, AttentionProblem::parse(text), k.all, forced).kernel_for(1, 1) == &k.tiles);

  Context::Impl capped{ContextOptions{}};
  capped.options.isa = Isa::avx512;
  CHECK(k.choice("attention dtype=bf16 sq=512 d=64", capped).chosen->kernel == &k.prefill);
  CHECK(refuse(tiles, AttentionProblem::parse(text), k.all, capped) == "above the context's ISA cap");
}
