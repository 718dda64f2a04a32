// KV caches: what leaves every bit alone: the order of pages, pages or one piece, the rest of a batch, executors.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "support/bits.hpp"
#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

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

/// Writes the keys of `from`, or what else they have one of per row, to where they lie in `whole`.
void gather(const Case& c, const Tensor& from, const Case& whole, Tensor& to) {
  const auto& shape = from.layout().shape;
  if (!from) return;
  const bool everywhere = shape[0] == 1;
  to = Tensor(from.dtype(), Layout(std::array<std::int64_t, 4>{everywhere ? 1 : whole.problem.b, shape[1],
                                                               everywhere ? 1 : whole.problem.sk, shape[3]}));
  for (std::int64_t n = 0; n < whole.problem.b; ++n) {
    for (std::int64_t j = 0; j < index_at(c.seqlens, {n}); ++j) {
      const Slot slot = c.slot(n, j);
      for (std::int64_t i = 0; i < shape[1] * shape[3]; ++i) {
        std::memcpy(to.buffer().data() + byte_of(to, {n, j}, i / shape[3], i % shape[3]),
                    from.buffer().data() + byte_of(from, slot, i / shape[3], i % shape[3]), size_of(from.dtype()));
      }
    }
  }
}

}  // namespace

TEST_CASE("caches: pages may lie in any order", "[kernel][long]") {
  const DType dtype = each_cache_type();
  for (const char* rows : {"hq=6 hk=2 sq=1", "hq=2 sq=7"}) {
    for (const char* page : {"sk=520 page=1", "sk=608 page=16", "sk=1190 page=17", "sk=640 page=128"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=3 d=64 lse causal align=bottom_right seqlens " + std::string(rows) +
                                  " " + page + cache_words(dtype, 2));
      Case c(problem, 2);
      const std::vector<std::string> names = every_entry(problem);
      std::vector<Result> before;
      for (const std::string& entry : names) before.push_back(run(c, entry));
      const std::int64_t pages = c.k.layout().shape[0];
      std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
      std::iota(order.begin(), order.end(), 0);
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

TEST_CASE("caches: pages give the bits of the same keys in one piece", "[kernel][long]") {
  const DType dtype = each_cache_type();
  auto turn = static_cast<std::size_t>(dtype);
  for (const char* words :
       {"hq=6 hk=2 sq=1 sk=1190 d=32 page=17", "hq=2 sq=7 sk=600 d=32 page=1", "hq=4 hk=1 sq=70 sk=640 d=32 page=128",
        "hq=2 hk=1 sq=70 sk=272 d=64 page=16", "hq=2 hk=1 sq=70 sk=272 d=64 page=16 window=70,-1",
        "hq=2 hk=1 sq=70 sk=288 d=64 page=32", "hq=2 hk=1 sq=70 sk=288 d=64 page=32 window=70,-1",
        "hq=2 hk=1 sq=70 sk=288 d=64 page=48", "hq=2 hk=1 sq=70 sk=288 d=64 page=48 window=70,-1",
        "hq=2 hk=1 sq=70 sk=320 d=64 page=64", "hq=2 hk=1 sq=70 sk=320 d=64 page=64 window=70,-1"}) {
    for (const char* types : {"", " q=bf16 out=bf16"}) {
      if (!is_sampled(turn, 3)) continue;
      const AttentionProblem paged = AttentionProblem::parse("attention b=2 lse causal align=bottom_right seqlens " +
                                                             std::string(words) + types + cache_words(dtype));
      AttentionProblem flat = paged;
      flat.page_size = 0;
      Case c(paged, 4), whole(flat, 4);  // scales of all pages, or per page
      gather(c, c.k, whole, whole.k), gather(c, c.k_scale, whole, whole.k_scale);
      gather(c, c.v, whole, whole.v), gather(c, c.v_scale, whole, whole.v_scale);
      for (const std::string& entry : every_entry(paged)) {
        INFO(entry << ": " << paged.to_string());
        CHECK(run(whole, entry) == run(c, entry));
      }
    }
  }
}

TEST_CASE("caches: a sequence alone gives the bits it gives in a batch", "[kernel][numbers]") {
  const DType dtype = each_cache_type();
  auto turn = static_cast<std::size_t>(dtype);
  for (const char* rows : {"hq=6 hk=2 sq=1", "hq=5 hk=1 sq=3", "hq=4 hk=1 sq=30 q=bf16 out=bf16"}) {
    for (const char* layout : {"sk=1100", "sk=1104 page=16", "sk=600 ring"}) {
      if (!is_sampled(turn, 2)) continue;
      const bool prompt = std::string(rows).find("bf16") != std::string::npos;  // of which tensor cores take one scale
      const AttentionProblem problem =
          AttentionProblem::parse("attention b=5 d=64 lse causal align=bottom_right seqlens " + std::string(rows) +
                                  " " + layout + cache_words(dtype, prompt ? 1 : 2));
      Case batch(problem, 2), single(problem, 2);
      for (const std::string& entry : every_entry(problem)) {
        const Forced context = forced(entry);
        batch.poison_outputs();
        single.poison_outputs();
        run(batch.args(), context);
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
          run(args, context);
        }
        INFO(entry << ": " << problem.to_string());
        CHECK(same_bits(batch.out, single.out));
        CHECK(same_bits(batch.lse, single.lse));
      }
    }
  }
}

// Of 8 to 16 rows, which are attention_decode's over many keys only.
TEST_CASE("caches: a sequence of a batch gets the kernel that it gets alone", "[kernel]") {
  constexpr std::int64_t kLengths[] = {3, 64, 128, 129, 1100};
  const Context context;
  for (const char* dtype : {"f32", "bf16"})
    for (const char* rows : {"hq=4 hk=2 sq=4", "hq=3 hk=1 sq=4", "hq=8 hk=1 sq=2"}) {
      Case batch(
          AttentionProblem::parse("attention b=5 sk=1100 d=64 seqlens lse dtype=" + std::string(dtype) + " " + rows),
          3);
      Case single(batch.problem, 3);
      for (std::int64_t n = 0; n < 5; ++n) set_index(batch.seqlens, n, kLengths[n]);
      attention(batch.args(), context);
      for (std::int64_t n = 0; n < 5; ++n) {
        AttentionArgs args = batch.args();
        const auto own = [n](const TensorView& view) { return slice(view, 0, n, 1); };
        args.q = own(args.q);
        args.kv = KvSource::strided(slice(own(args.kv.k), 2, 0, kLengths[n]), slice(own(args.kv.v), 2, 0, kLengths[n]));
        args.out = slice(single.out.mutable_view(), 0, n, 1), args.lse = slice(single.lse.mutable_view(), 0, n, 1);
        attention(args, context);
      }
      INFO(batch.problem.to_string());
      CHECK(same_bits(batch.out, single.out));
      CHECK(same_bits(batch.lse, single.lse));
    }
}

// The first of two ragged sequences, of which the second is no call of attention_decode's; by any instruction set that
// the environment may ask for.
TEST_CASE("caches: a ragged sequence gets the kernel that it gets alone", "[kernel]") {
  constexpr std::int64_t kHeads = 2, kSize = 16, kOtherRows = 17, kOtherKeys = 68;
  ScopedEnvironment no_kernel("RAPT_KERNEL", nullptr);
  std::vector<std::string> isas = {""};
  for (const Isa isa : usable_isas())
    if (isa != Isa::amx && isa != Isa::avx512bf16 && isa != Isa::neonbf16)  // these have none of fp32
      isas.emplace_back(to_string(isa));
  for (const std::string& isa : isas) {
    ScopedEnvironment environment("RAPT_ISA", isa.empty() ? nullptr : isa.c_str());
    const Context context;
    for (std::int64_t rows : {1, 3, 4, 8, 12, 16})
      for (std::int64_t keys : {1, 5, 64, 130}) {
        const auto numbers = [](std::int64_t n, std::int64_t width) {
          std::vector<float> x(static_cast<std::size_t>(n * width));
          for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
          return x;
        };
        const std::vector<float> q = numbers(rows + kOtherRows, kHeads * kSize),
                                 k = numbers(keys + kOtherKeys, kHeads * kSize);
        const auto result_of = [&](std::int64_t sequences) {
          const std::int64_t all_rows = sequences == 1 ? rows : rows + kOtherRows,
                             all_keys = sequences == 1 ? keys : keys + kOtherKeys;
          const std::int64_t row_ends[] = {0, rows, all_rows}, key_ends[] = {0, keys, all_keys};
          std::vector<float> out(static_cast<std::size_t>(all_rows * kHeads * kSize));
          AttentionArgs args;
          args.q = TensorView(q.data(), {all_rows, kHeads, kSize});
          const TensorView of_keys(k.data(), {all_keys, kHeads, kSize});
          args.kv = KvSource::ragged(of_keys, of_keys, TensorView(key_ends, {sequences + 1}));
          args.cu_seqlens_q = TensorView(row_ends, {sequences + 1});
          args.out = MutableTensorView(out.data(), {all_rows, kHeads, kSize});
          attention(args, context);
          out.resize(static_cast<std::size_t>(rows * kHeads * kSize));
          return out;
        };
        INFO(isa << ": " << rows << " rows, " << keys << " keys");
        CHECK(result_of(2) == result_of(1));
      }
  }
}

TEST_CASE("caches: executors and thread counts do not change a bit", "[kernel][threads][numbers]") {
  for (DType dtype : {DType::f32, DType::f16, DType::i4x2}) {
    for (const char* words :
         {"b=1 hq=1 sq=1 sk=2064 page=16", "b=1 hq=8 hk=1 sq=2 sk=1100", "b=5 hq=4 hk=2 sq=1 sk=900 ring",
          "b=4 hq=2 sq=40 sk=612 page=17 ragged_q=50 causal align=bottom_right"}) {
      const AttentionProblem problem =
          AttentionProblem::parse("attention d=64 lse seqlens " + std::string(words) + cache_words(dtype));
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
