// Gathered keys on GPUs, without one: the pages that kernels get lead to the same rows of every tensor as the lists.
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "operations/attention/cuda_gathered.hpp"
#include "operations/call.hpp"
#include "rapt/attention.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"

using namespace rapt;
using std::int64_t;

namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kRows = 9, kListed = 6;

// Rows that a token of a call touches, as addresses: of each query head of q and out, and of each listed key and kv
// head of k and v.
using Touched = std::vector<const void*>;

template <class T>
const void* at(const T* data, int64_t offset) {
  return data + offset;
}

struct Shape {
  int64_t b, tokens;
  bool pool, tokens_first, padded, is_int64, counted;
};

// The call's tensors: memory that nothing but the fake kernel for lists reads.
struct Tensors {
  std::vector<std::uint16_t> q, k, v, out;
  std::vector<float> lse;
  std::vector<std::int32_t> rows, counts;
  std::vector<int64_t> long_rows;
  AttentionArgs args;

  explicit Tensors(const Shape& c)
      : q(4096), k(4096), v(4096), out(4096), lse(512), rows(static_cast<std::size_t>(c.b * c.tokens * kListed)) {
    using Sizes = std::vector<int64_t>;
    const auto view = [](void* data, DType type, const Sizes& shape, const Sizes& strides) {
      MutableTensorView made(data, type, shape, strides);
      made.device = {DeviceType::cuda, 0};
      return made;
    };
    const auto queries = [&](std::vector<std::uint16_t>& data) {
      const int64_t d = 4, s = c.tokens_first ? kHeads * d : d, h = c.tokens_first ? d : c.tokens * d;
      return view(data.data(), DType::bf16, {c.b, kHeads, c.tokens, d}, {kHeads * c.tokens * d, h, s, 1});
    };
    const int64_t entries = c.pool ? 1 : c.b, row = 4, head = kRows * row, entry = kKvHeads * head + (c.padded ? 2 : 0);
    const auto keys = [&](std::vector<std::uint16_t>& data) {
      return view(data.data(), DType::bf16, {entries, kKvHeads, kRows, row}, {entry, head, row, 1});
    };
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int32_t>(i * 7 % (kRows + 2)) - 1;
    for (std::int32_t& x : rows) x = x == kRows ? -5 : x;
    long_rows.assign(rows.begin(), rows.end());
    counts.resize(static_cast<std::size_t>(2 * c.b * c.tokens));
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<std::int32_t>(i % (kListed + 1));
    args.q = queries(q), args.out = queries(out);
    args.lse = view(lse.data(), DType::f32, {c.b, kHeads, c.tokens}, {kHeads * c.tokens, c.tokens, 1});
    void* const listed = c.is_int64 ? static_cast<void*>(long_rows.data()) : rows.data();
    const TensorView indices =
        view(listed, c.is_int64 ? DType::i64 : DType::i32, {c.b, c.tokens, kListed}, {c.tokens * kListed, kListed, 1});
    TensorView counted;
    if (c.counted) counted = view(counts.data(), DType::i32, {c.b, c.tokens}, {2 * c.tokens, 2});
    args.kv = KvSource::gathered(keys(k), keys(v), indices, counted);
  }
};

// By the definition.
std::vector<Touched> wanted(const Shape& c, const Tensors& t, const AttentionParams& p) {
  std::vector<Touched> all;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t token = 0; token < c.tokens; ++token) {
      Touched& one = all.emplace_back();
      for (int64_t h = 0; h < kHeads; ++h) {
        one.push_back(at(t.q.data(), b * p.q_stride.b + h * p.q_stride.h + token * p.q_stride.s));
        one.push_back(at(t.out.data(), b * p.out_stride.b + h * p.out_stride.h + token * p.out_stride.s));
      }
      const auto number = static_cast<std::size_t>(b * c.tokens + token);
      const int64_t count = c.counted ? t.counts[2 * number] : kListed;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t row = t.rows[number * kListed + static_cast<std::size_t>(j)];
        for (int64_t h = 0; h < kKvHeads && row >= 0; ++h) {
          const int64_t offset = (c.pool ? 0 : b * p.k_stride.b) + h * p.k_stride.h + row * p.k_stride.s;
          one.push_back(at(t.k.data(), offset)), one.push_back(at(t.v.data(), offset));
        }
      }
    }
  }
  return all;
}

// As a kernel finds them. Its lse are the numbers of its rows.
void add_touched(const AttentionParams& p, std::vector<Touched>& all) {
  const auto* const q = static_cast<const std::uint16_t*>(p.q);
  for (int64_t i = 0; i < p.b; ++i) {
    Touched& one = all.emplace_back();
    for (int64_t h = 0; h < kHeads; ++h) {
      one.push_back(at(q, i * p.q_stride.b + h * p.q_stride.h));
      one.push_back(at(static_cast<const std::uint16_t*>(p.out), i * p.out_stride.b + h * p.out_stride.h));
      p.lse[i * p.lse_stride.b + h * p.lse_stride.h] = static_cast<float>((all.size() - 1) * kHeads + h);
    }
    const Sequence s = sequence_of(p, p, i);
    for (int64_t j = 0; j < s.len_k; ++j) {
      for (int64_t h = 0; h < kKvHeads; ++h) {
        one.push_back(at(static_cast<const std::uint16_t*>(p.k), key_index(p, p.k_stride, i, h, s.k_first, j)));
        one.push_back(at(static_cast<const std::uint16_t*>(p.v), key_index(p, p.v_stride, i, h, s.k_first, j)));
      }
    }
  }
}

}  // namespace

TEST_CASE("cuda host: gathered keys become pages of one row", "[unit]") {
  for (int bits = 0; bits < 128; ++bits) {
    const auto bit = [&](int n) { return (bits >> n & 1) != 0; };
    const Shape c{bit(0) ? 3 : 1, bit(1) ? 4 : 1, bit(2), bit(3), bit(4), bit(5), bit(6)};
    INFO("case " << bits);
    const Tensors t(c);
    const Call call = validate(t.args);
    const auto& p = std::get<AttentionParams>(call.params);
    alignas(256) std::array<std::byte, 4096> workspace;
    REQUIRE(cuda::lists_workspace(p) <= workspace.size());
    std::vector<Touched> found;
    int launches = 0;
    CHECK(cuda::run_over_lists(p, workspace.data(), nullptr, [&](const AttentionParams& part) {
            ++launches;
            add_touched(part, found);
            return cudaSuccess;
          }) == cudaSuccess);
    CHECK(found == wanted(c, t, p));
    for (int64_t i = 0; i < c.b * c.tokens * kHeads; ++i) {
      const int64_t token = i / kHeads, at = token / c.tokens * p.lse_stride.b + i % kHeads * p.lse_stride.h;
      CHECK(t.lse[static_cast<std::size_t>(at + token % c.tokens * p.lse_stride.s)] == static_cast<float>(i));
    }
    // Rows of all tokens are equally far apart unless heads come first; padding leaves batch entries no whole rows
    // apart.
    const bool at_once = c.b == 1 || ((c.tokens == 1 || c.tokens_first) && (c.pool || !c.padded));
    CHECK(launches == (at_once ? 1 : c.b));
  }
}

TEST_CASE("cuda host: lists of quantised keys, launch by launch", "[unit]") {
  // Two entries whose heads come before their tokens; scales of whole sequences, which broadcast over rows.
  for (const auto& [type, bytes] : {std::pair{DType::i4x2, 1}, {DType::i8, 1}, {DType::bf16, 2}, {DType::f32, 4}}) {
    AttentionParams p{};
    std::array<std::byte, 4096> memory{}, workspace{};
    std::array<float, 64> scales{};
    p.b = 6, p.tokens = p.list_tokens = 3, p.sq = 1, p.sk = 5, p.hk = 1, p.group = 2, p.page_size = 1;
    p.q = memory.data(), p.out = memory.data(), p.q_type = p.out_type = DType::bf16, p.kv_type = type;
    p.k = memory.data(), p.v = memory.data() + 1024, p.k_quant.scale = scales.data();
    p.q_stride = p.out_stride = {2 * 3 * 8, 3 * 8, 8, 1};
    p.k_stride = p.v_stride = {90, 90, 9, 1}, p.k_quant.scale_stride = {7, 0, 0, 0};
    std::array<std::int32_t, 30> rows{};
    p.pages = {rows.data(), 1, false}, p.pages_stride_b = 15, p.pages_stride_token = 5, p.page_count = 10;
    int entry = 0;
    CHECK(cuda::run_over_lists(p, workspace.data(), nullptr, [&](const AttentionParams& part) {
            CHECK(part.b == 3);
            CHECK(part.k == memory.data() + entry * 90 * bytes);
            CHECK(part.v == memory.data() + 1024 + entry * 90 * bytes);
            CHECK(part.k_quant.scale == scales.data() + entry * 7);
            CHECK(part.q == memory.data() + entry * 2 * 3 * 8 * 2);
            CHECK((part.q_stride.b == 8 && part.k_stride.b == 9 && part.k_quant.scale_stride.b == 0));
            ++entry;
            return cudaSuccess;
          }) == cudaSuccess);
    CHECK(entry == 2);
  }
}

TEST_CASE("cuda host: the largest call over lists has room for smaller ones", "[unit]") {
  const auto problem = [](int64_t b, int64_t sq) {
    AttentionProblem p = AttentionProblem::parse("attention device=cuda dtype=bf16 hq=16 hk=1 sk=2048 d=64 gathered");
    p.b = b, p.sq = sq;
    return p;
  };
  for (const int64_t largest : {1, 127, 128, 4096})
    for (const int64_t sq : {1, 64, 127, 128, 129, 4096}) {
      if (sq > largest) continue;
      INFO(sq << " of " << largest);
      CHECK(Plan(problem(1, sq)).workspace_bytes() <= max_workspace_bytes(problem(2, largest)));
    }
  CHECK_THROWS_AS(Plan(AttentionProblem::parse("attention device=cuda hq=1 sq=1000 sk=35184372088832 d=8 gathered")),
                  Error);
}
