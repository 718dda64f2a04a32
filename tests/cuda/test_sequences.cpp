// Sequences of many lengths in one call on a GPU, which alone knows them.
#include <algorithm>
#include <array>
#include <random>

#include "cases.hpp"

using namespace rapt;
using namespace rapt::testing;

// One of few keys, whose splits one warp merges where it is alone; one of fewer, whose results are stored at once
// there; both with scores that are computed once more.
TEST_CASE("cuda: splits of a sequence's keys do not depend on the batch", "[kernel]") {
  constexpr const char* kBatches[] = {
      "attention b=4 hq=8 hk=2 sq=2 sk=9000 d=128 seqlens causal align=bottom_right lse",
      "attention b=4 hq=72 hk=1 sq=2 sk=9000 d=576 dv=512 latent seqlens causal align=bottom_right lse"};
  constexpr std::int64_t kLengths[] = {9000, 700, 1600, 40};
  const auto make = [&](const AttentionProblem& problem) {
    Case c = with_all_keys(problem);
    for (std::int64_t n = 0; n < c.problem.b; ++n) set_index(c.seqlens, n, kLengths[n]);
    c.q.at({2, 3, 1, 5}) = 6e4f, c.k.at({2, 0, 77, 5}) = 6e4f;
    c.q.at({3, 1, 1, 5}) = 6e4f, c.k.at({3, 0, 20, 5}) = 6e4f;
    return c;
  };
  const auto test = [&](const std::string& entry, Case& c) {
    const Bytes batch = expected(entry, c);
    c.poison_outputs();
    const DeviceCall call(c.args());
    for (std::int64_t n = 0; n < c.problem.b; ++n) {
      AttentionArgs args = call.args();
      for (TensorView* t : {&args.q, &args.kv.k, &args.kv.v}) *t = slice(*t, 0, n, 1);
      for (TensorView* t : {&args.kv.k, &args.kv.v}) *t = slice(*t, 2, 0, kLengths[n]);
      args.kv.seqlens = {};
      args.out = slice(args.out, 0, n, 1), args.lse = slice(args.lse, 0, n, 1);
      attention(args, forced(entry));
    }
    call.finish();
    CHECK(Bytes(c) == batch);
  };
  each_case(kBatches, test, {.make = make});
}

// `b` sequences of so many rows, each the one before, `step` rows further on. Scales of whole heads stay.
static TensorView overlapping(const TensorView& t, std::int64_t b, std::int64_t rows, std::int64_t step) {
  TensorView all = t;
  if (!t || t.shape[2] == 1) return all;
  all.shape[0] = b, all.shape[2] = rows;
  all.strides[0] = step * t.strides[2];
  return all;
}

// So many heads that a thread block gets several splits, one after another, and a head one thread block, two or more.
// Queries that no vector load takes get the other kernel that splits keys. Sequences share rows: most of the time would
// go into making numbers.
TEST_CASE("cuda: few rows in a batch that fills a GPU have the bits that they have alone", "[kernel]") {
  struct Batch {
    std::int64_t b, rows, keys;
    const char* problem;
  };
  constexpr Batch kBatches[] = {
      {64, 1, 600, "attention hq=8 hk=4 sq=64 sk=1104 d=64 sinks lse"},
      {64, 3, 600, "attention hq=16 hk=4 sq=66 sk=1104 d=128 dv=40 lse"},
      {33, 1, 800, "attention hq=8 sq=33 sk=1056 d=128 window=699,0 align=bottom_right lse"},
      {64, 1, 600, "attention hq=4 sq=64 sk=1104 d=256 lse"},
      {32, 1, 1500, "attention hq=4 sq=32 sk=1748 d=64 lse"},
      {16, 1, 2048, "attention hq=4 sq=16 sk=2168 d=64 lse"},
      {33, 1, 800, "attention hq=8 sq=33 sk=1056 d=80 lse"},
      {58, 1, 16900, "attention hq=2 hk=1 sq=58 sk=17356 d=64 lse"},
      {64, 1, 600, "attention hq=16 hk=8 sq=64 sk=1104 d=64 kv=i8 groups=1 lse"},
      {64, 5, 600, "attention hq=8 sq=68 sk=1104 d=128 kv=i4x2 groups=1 sinks lse"},
      {64, 1, 800, "attention hq=8 sq=64 sk=1304 d=128 kv=f8e5m2 window=699,0 align=bottom_right lse"}};
  for (const auto& [b, rows, keys, problem] : kBatches) {
    const auto test = [&, b = b, rows = rows, keys = keys](const std::string& entry, Case& c) {
      const Tensor odd_rows = with_rows_apart(c.q, c.problem.d + 1);
      Tensor out(c.out.dtype(), Layout(std::array{b, c.problem.hq, rows, c.problem.dv}));
      Tensor lse(DType::f32, Layout(std::array{b, c.problem.hq, rows}));
      Tensor lengths(DType::i32, Layout(std::array{b}));
      for (std::int64_t n = 0; n < b; ++n) set_index(lengths, n, keys);
      AttentionArgs args = c.args();
      args.q = overlapping(args.q, b, rows, 1);
      for (TensorView* t : {&args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale})
        *t = overlapping(*t, b, keys, 8);
      args.out = out.mutable_view(), args.lse = lse.mutable_view();
      const auto results = [&] { return std::array{Bytes::copy(out), Bytes::copy(lse)}; };

      run(args, entry);
      const auto batch = results();
      const auto check_again = [&](const AttentionArgs& other) {
        out.poison(), lse.poison();
        run(other, entry);
        CHECK(results() == batch);
      };
      AttentionArgs given_lengths = args;
      given_lengths.kv.seqlens = lengths.view();
      check_again(given_lengths);
      AttentionArgs by_other_kernel = args;
      by_other_kernel.q = overlapping(odd_rows.view(), b, rows, 1);
      check_again(by_other_kernel);
      out.poison(), lse.poison();
      const DeviceCall call(args);
      for (std::int64_t n = 0; n < b; ++n) {
        AttentionArgs alone = call.args();
        for (TensorView* t : {&alone.q, &alone.kv.k, &alone.kv.v, &alone.kv.k_scale, &alone.kv.v_scale})
          if (*t && t->shape[0] > 1) *t = slice(*t, 0, n, 1);
        alone.out = slice(alone.out, 0, n, 1), alone.lse = slice(alone.lse, 0, n, 1);
        attention(alone, forced(entry));
      }
      call.finish();
      CHECK(results() == batch);
    };
    each_case(std::array{problem}, test, {.named = "attention_decode"});
  }
}

// Lengths that only the GPU knows get other tiles, blocks of keys beside those that a row sees, and mostly another
// kernel. Some have tiles with more and with fewer blocks of keys, and more than one to a thread block.
TEST_CASE("cuda: a sequence has the bits that it has where its length is not given", "[kernel]") {
  constexpr const char* kSequences[] = {
      "attention hq=2 sq=70 sk=70 d=64 sinks seqlens lse",
      "attention hq=2 sq=200 sk=257 d=40 sinks seqlens causal align=bottom_right lse",
      "attention hq=2 sq=1000 sk=1000 d=64 seqlens window=300,0 align=bottom_right lse",
      "attention hq=2 sq=1000 sk=1000 d=64 sinks seqlens window=300,0 align=bottom_right lse",
      "attention hq=2 sq=500 sk=700 d=128 seqlens window=130,0 align=bottom_right lse",
      "attention b=2 hq=160 hk=40 sq=130 sk=77 d=64 seqlens lse",
      "attention b=3 hq=100 sq=197 sk=197 d=56 seqlens lse",
      "attention b=2 hq=300 sq=20 sk=128 d=64 sinks seqlens lse",
      "attention hq=16 hk=2 sq=600 sk=500 d=48 dv=40 seqlens causal align=bottom_right lse",
      "attention hq=6 sq=300 sk=2000 d=64 seqlens causal align=top_left lse",
      "attention hq=2 sq=1300 sk=3000 d=64 seqlens window=500,200 align=bottom_right lse",
      "attention hq=8 hk=1 sq=1 sk=600 d=64 dv=24 seqlens lse",
      "attention hq=100 sq=400 sk=400 d=64 seqlens causal align=top_left lse",
      "attention hq=100 sq=400 sk=400 d=40 seqlens window=100,0 align=bottom_right lse",
      "attention hq=200 hk=100 sq=300 sk=300 d=64 sinks seqlens causal align=top_left lse",
      "attention b=2 hq=150 sq=70 sk=100 d=128 seqlens lse",
      "attention hq=64 hk=2 sq=70 sk=300 d=64 seqlens lse",
      "attention hq=48 hk=3 sq=70 sk=81 d=64 seqlens lse",
      "attention hq=3 sq=100 sk=80 d=64 seqlens window=20,20 align=bottom_right lse",
      "attention hq=2 sq=150 sk=2100 d=64 seqlens lse",
      "attention hq=1 sq=1100 sk=2100 d=64 seqlens lse",
      "attention hq=150 sq=192 sk=520 d=64 seqlens lse",
      "attention hq=60 sq=300 sk=300 d=128 seqlens causal align=top_left lse",
      "attention b=2 hq=90 hk=30 sq=70 sk=300 d=96 sinks seqlens causal align=bottom_right lse",
      "attention hq=100 sq=257 sk=257 d=72 seqlens lse",
      "attention hq=50 sq=400 sk=200 d=80 sinks seqlens lse"};
  const auto make = [](const AttentionProblem& problem) {
    Case c = with_all_keys(problem);
    // Keys far above the others, the last that some rows of a tile see; sinks below all.
    for (std::int64_t row = 0; row < c.problem.sq; ++row) c.q.at({0, 0, row, 0}) = 1;
    for (std::int64_t key = 220; key < std::min<std::int64_t>(c.problem.sk, 256); ++key) c.k.at({0, 0, key, 0}) = 100;
    for (std::int64_t i = 0; i < c.sinks.size(); ++i) c.sinks.flat(i) = -10;
    return c;
  };
  const auto test = [](const std::string& entry, Case& c) {
    const Bytes with_length = expected(entry, c);
    c.poison_outputs();
    AttentionArgs args = c.args();
    args.kv.seqlens = {};
    run(args, entry);
    CHECK(Bytes(c) == with_length);
  };
  each_case(kSequences, test, {.make = make});
}

// By the kernels that dispatch chooses for dense ones: some have few rows, and get their keys split. Partial results
// lie end to end in some batches; in others there is room for as many rows of each sequence as may be split, and in the
// last for those of half of the sequences at a time. One has many splits that do not exist, and one more sequences than
// thread blocks keep a list of.
TEST_CASE("cuda: a ragged sequence has the bits that it has dense", "[kernel]") {
  struct Batch {
    const char* text;
    std::vector<std::int64_t> tokens;
    std::int64_t pages = 0;  // of a sequence, in a table wider than the case's; 0: its own
  };
  std::vector<std::int64_t> in_parts(70, 1), many(1100);
  in_parts[40] = 1100;
  for (std::size_t n = 0; n < many.size(); ++n) many[n] = static_cast<std::int64_t>(n % 4);
  const Batch batches[] = {
      {"attention b=7 hq=8 hk=2 sq=220 sk=9024 d=128 ragged_q=257 page=64 seqlens causal align=bottom_right lse",
       {1, 3, 0, 16, 220, 16, 1}},
      {"attention b=6 hq=8 hk=2 sq=3 sk=5000 d=64 ragged_q=9 seqlens alibi sinks align=bottom_right lse",
       {1, 2, 0, 3, 1, 2}},
      {"attention b=5 hq=4 sq=100 sk=704 d=40 ragged_q=230 page=16 seqlens window=100,0 align=bottom_right lse",
       {64, 65, 1, 100, 0}},
      {"attention b=40 hq=4 hk=2 sq=1 sk=9024 d=16 ragged_q=40 page=64 seqlens lse", std::vector<std::int64_t>(40, 1)},
      {"attention b=1100 hq=2 hk=1 sq=3 sk=30 d=16 ragged_q=1650 seqlens lse", many},
      {"attention b=4 hq=8 hk=4 sq=300 sk=400 d=192 dv=128 ragged_q=340 seqlens causal align=bottom_right lse",
       {1, 300, 32, 7}},
      {"attention b=7 hq=8 hk=2 sq=130 sk=3008 d=128 ragged_q=167 page=16 seqlens kv=i8 groups=1 causal "
       "align=bottom_right lse",
       {1, 3, 0, 16, 130, 16, 1}},
      {"attention b=5 hq=4 sq=100 sk=704 d=256 dv=96 ragged_q=230 page=16 seqlens kv=f8e4m3 window=100,0 "
       "align=bottom_right lse",
       {64, 65, 1, 100, 0}},
      {"attention b=7 hq=8 hk=2 sq=130 sk=3008 d=128 ragged_q=167 page=16 seqlens q=f8e4m3 kv=f8e4m3 groups=1 "
       "head_scales q_scale causal align=bottom_right lse",
       {1, 3, 0, 16, 130, 16, 1}},
      {"attention b=70 hq=32 hk=8 sq=1100 sk=64 d=128 ragged_q=1169 page=64 seqlens lse", in_parts, 2048}};
  std::vector<int> runs;
  for (const Batch& batch : batches) {
    runs.push_back(0);
    const auto test = [&](const std::string& entry, Case& c) {
      std::int64_t first = 0;
      for (std::size_t n = 0; n <= batch.tokens.size(); ++n) {
        set_index(c.cu_seqlens_q, static_cast<std::int64_t>(n), first);
        if (n < batch.tokens.size()) first += batch.tokens[n];
      }
      REQUIRE(first == c.problem.ragged_q);
      ++runs.back();
      std::vector<std::int32_t> table(static_cast<std::size_t>(c.problem.b * batch.pages));
      const auto in_wide_table = [&](AttentionArgs args) {
        if (batch.pages == 0) return args;
        for (std::int64_t n = 0; n < c.problem.b; ++n)
          table[static_cast<std::size_t>(n * batch.pages)] = static_cast<std::int32_t>(index_at(c.block_table, {n, 0}));
        args.kv.block_table = TensorView(table.data(), {c.problem.b, batch.pages});
        return args;
      };
      const AttentionArgs all = in_wide_table(c.args());
      c.poison_outputs();
      run(all, entry);
      const Bytes ragged(c);
      c.poison_outputs();
      const DeviceCall call(all);
      first = 0;
      for (std::size_t n = 0; n < batch.tokens.size(); first += batch.tokens[n++]) {
        if (batch.tokens[n] == 0) continue;
        const auto number = static_cast<std::int64_t>(n);
        const auto dense = [&](auto view) {  // [total, heads, ...] to [1, heads, tokens, ...]
          auto part = slice(view, 0, first, batch.tokens[n]);
          part.ndim = view.ndim + 1;
          for (auto dim = static_cast<std::size_t>(part.ndim) - 1; dim > 0; --dim)
            part.shape[dim] = part.shape[dim - 1], part.strides[dim] = part.strides[dim - 1];
          part.shape[0] = 1, part.strides[0] = 0;
          std::swap(part.shape[1], part.shape[2]), std::swap(part.strides[1], part.strides[2]);
          return part;
        };
        AttentionArgs args = call.args();
        args.cu_seqlens_q = {};
        if (args.q_scale) args.q_scale = dense(args.q_scale);
        args.q = dense(args.q), args.out = dense(args.out), args.lse = dense(args.lse);
        args.kv.seqlens = slice(args.kv.seqlens, 0, number, 1);
        if (args.kv.block_table) args.kv.block_table = slice(args.kv.block_table, 0, number, 1);
        else args.kv.k = slice(args.kv.k, 0, number, 1), args.kv.v = slice(args.kv.v, 0, number, 1);
        attention(args);
      }
      call.finish();
      CHECK(Bytes(c) == ragged);
    };
    each_case(std::array{batch.text}, test, {.named = "attention_prefill"});
  }
  const bool any = *std::max_element(runs.begin(), runs.end()) > 0;
  for (std::size_t n = 0; any && n < runs.size(); ++n) {
    INFO(batches[n].text);
    CHECK(runs[n] > 0);
  }
}

// The host cannot check them; guard bands and compute-sanitizer see what they lead to.
TEST_CASE("cuda: senseless lengths and tables in a GPU's memory lead nowhere", "[kernel]") {
  constexpr const char* kLists[] = {
      "attention b=3 hq=4 hk=1 sq=90 sk=120 d=40 ragged_q=200 ragged_k=250 lse alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=320 d=40 page=16 seqlens alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=32 d=40 ring seqlens alibi sinks causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=320 d=64 page=16 seqlens kv=f8e4m3 causal align=bottom_right",
      "attention b=6 hq=4 hk=1 sq=3 sk=720 d=64 ragged_q=9 page=16 seqlens causal align=bottom_right",
      "attention b=6 hq=4 hk=1 sq=3 sk=720 d=64 ragged_q=9 page=16 seqlens kv=i8 groups=1 causal align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=32 d=64 ring seqlens kv=i4x2 groups=1 causal align=bottom_right",
      "attention b=6 hq=4 hk=1 sq=70 sk=720 d=64 ragged_q=90 page=16 seqlens q=f8e4m3 kv=f8e4m3 q_scale causal "
      "align=bottom_right",
      "attention b=2 hq=6 hk=2 sq=3 sk=320 d=64 page=16 seqlens q=f8e4m3 kv=f8e4m3 causal align=bottom_right"};
  const auto test = [](const std::string& entry, Case& c) {
    // Numbers of every size and sign, also in front.
    std::mt19937_64 random(1);
    for (int round = 0; round < 4; ++round) {
      for (Tensor* list : {&c.cu_seqlens_q, &c.cu_seqlens_k, &c.seqlens, &c.block_table})
        for (std::int64_t i = 0; *list && i < list->size(); ++i)
          set_index(*list, i, static_cast<std::int64_t>(random() >> random() % 64));
      const DeviceCall call(c.args());
      attention(call.args(), forced(entry));
      call.finish();
    }
  };
  each_case(kLists, test);
}

TEST_CASE("cuda: tables without entries and caches without pages have no keys", "[kernel]") {
  each_case(kEveryWay, [](const std::string& entry, Case& c) {
    if (!c.block_table) return;
    for (const bool pages : {false, true}) {
      DeviceCall call(c.args());
      AttentionArgs args = call.args();
      if (pages) {
        KvSource& kv = args.kv;
        const std::int64_t all = kv.k.shape[0];
        for (TensorView* t : {&kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero})
          if (t->shape[0] == all) t->shape[0] = 0;
      }
      if (!pages) args.kv.block_table.shape[1] = 0, args.kv.block_table.data = nullptr;
      attention(args, forced(entry));
      call.finish();
      for (const float x : c.out.values()) REQUIRE(x == 0);
    }
  });
}
