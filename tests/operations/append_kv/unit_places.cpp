// append_kv(): where rows land, and what is refused.
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "rapt/append_kv.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/small_tensors.hpp"

using namespace rapt;
using namespace rapt::testing;
using std::int64_t;

namespace {

/// Appends two sequences of 3 and 6 new rows to caches that hold `before`, and checks every byte of the cache: place
/// (sequence, key) gives block and row of k and v, or a negative row where none is to be written.
void check_places(const KvCache& cache, Tensor& k, Tensor& v, const std::vector<int64_t>& before, bool ragged,
                  const std::function<std::pair<int64_t, int64_t>(int64_t, int64_t)>& place) {
  constexpr int64_t hk = 2, d = 4, dv = 3;
  constexpr int64_t counts[] = {3, 6};
  Tensor lengths = make(DType::i64, {2});
  for (int64_t i = 0; i < 2; ++i) lengths.flat<int64_t>(i) = before[static_cast<std::size_t>(i)];
  const Tensor starts = ints({0, 3, 9});
  // Number (t, h, c) of a sequence's side, and never 0.
  const auto value = [](int64_t i, int64_t t, int64_t h, int64_t c) {
    return static_cast<float>(1 + c + 10 * (h + 10 * (t + 10 * i)));
  };
  Tensor wanted_k(k.dtype(), k.layout()), wanted_v(v.dtype(), v.layout());
  k.poison(), v.poison();
  const auto fill = [&](Tensor& fresh, int64_t size, Tensor& wanted, int64_t i) {
    for (int64_t t = 0; t < counts[i]; ++t) {
      const auto [block, row] = place(i, before[static_cast<std::size_t>(i)] + t);
      for (int64_t h = 0; h < hk; ++h)
        for (int64_t c = 0; c < size; ++c) {
          if (ragged) fresh.at({3 * i + t, h, c}) = value(i, t, h, c);
          else fresh.at({0, h, t, c}) = value(i, t, h, c);
          if (row >= 0 && (cache.kind != KvSource::Kind::ring || t >= counts[i] - k.layout().shape[2]))
            wanted.at({block, h, row, c}) = value(i, t, h, c);
        }
    }
  };
  if (ragged) {
    Tensor fresh_k = make(DType::f32, {9, hk, d}, {2 * hk * d, d, 1}), fresh_v = make(DType::f32, {9, hk, dv});
    for (int64_t i = 0; i < 2; ++i) fill(fresh_k, d, wanted_k, i), fill(fresh_v, dv, wanted_v, i);
    append_kv({fresh_k.view(), fresh_v.view(), cache, lengths.view(), starts.view()});
  } else {
    // One sequence of the batch at a time, the other without new rows by ragged starts.
    for (int64_t i = 0; i < 2; ++i) {
      Tensor fresh_k = make(DType::f32, {1, hk, counts[i], d}, {0, d, 2 * hk * d, 1}),
             fresh_v = make(DType::f32, {1, hk, counts[i], dv});
      fill(fresh_k, d, wanted_k, i), fill(fresh_v, dv, wanted_v, i);
      KvCache one = cache;
      TensorView length = slice(lengths.view(), 0, i, 1);
      if (cache.kind == KvSource::Kind::paged) one.block_table = slice(cache.block_table, 0, i, 1);
      else one.k = slice(cache.k, 0, i, 1), one.v = slice(cache.v, 0, i, 1);
      append_kv({fresh_k.view(), fresh_v.view(), one, length, {}});
    }
  }
  CHECK(bytes_of(k) == bytes_of(wanted_k));
  CHECK(bytes_of(v) == bytes_of(wanted_v));
}

}  // namespace

TEST_CASE("append: rows land at their positions and nothing else changes", "[unit]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const bool ragged = GENERATE(false, true);
  SECTION("strided, with gaps") {
    Tensor k = make(dtype, {2, 2, 9, 4}, {200, 90, 8, 2}), v = make(dtype, {2, 2, 9, 3}, {54, 3, 6, 1});
    check_places(KvCache::strided(k.mutable_view(), v.mutable_view()), k, v, {4, 3}, ragged,
                 [](int64_t i, int64_t j) { return std::pair(i, j); });
  }
  SECTION("ring") {
    Tensor k = make(dtype, {2, 2, 4, 4}), v = make(dtype, {2, 2, 4, 3});
    check_places(KvCache::ring(k.mutable_view(), v.mutable_view()), k, v, {7, 1'000'000'007}, ragged,
                 [](int64_t i, int64_t j) { return std::pair(i, j % 4); });
  }
  SECTION("pages of 4, of 1 and of 16") {
    for (const int64_t size : {4, 1, 16}) {
      constexpr int64_t pages = 40, columns = 16;
      Tensor k = make(dtype, {pages, 2, size, 4}), v = make(dtype, {pages, 2, size, 3}, {16 * 8, 3, 6, 1});
      const int64_t before[] = {5, 2};
      // Entries that no new row needs are no pages.
      Tensor table = make(DType::i64, {2, columns}, {columns + 3, 1});
      for (int64_t i = 0; i < table.size(); ++i) table.flat<int64_t>(i) = i % 2 ? -1 : pages;
      const auto page = [&](int64_t i, int64_t j) { return (i * 17 + j / size * 7 + 3) % pages; };
      for (int64_t i = 0; i < 2; ++i)
        for (int64_t t = 0; t < (i ? 6 : 3); ++t)
          table.at<int64_t>({i, (before[i] + t) / size}) = page(i, before[i] + t);
      check_places(KvCache::paged(k.mutable_view(), v.mutable_view(), table.view()), k, v, {5, 2}, ragged,
                   [&](int64_t i, int64_t j) { return std::pair(page(i, j), j % size); });
    }
  }
}

namespace {

struct Valid {
  Tensor k = make(DType::i8, {4, 2, 4, 8}), v = make(DType::i8, {4, 2, 4, 6});
  Tensor k_scale = make(DType::f32, {4, 2, 4, 2}), v_scale = make(DType::f32, {4, 2, 4, 1});
  Tensor k_zero = make(DType::f32, {4, 2, 4, 2}), k_tail = make(DType::bf16, {4, 2, 4, 2});
  Tensor k_new = filled(DType::f32, {2, 2, 3, 10}, [](int64_t i) { return static_cast<float>(i % 5); });
  Tensor v_new = filled(DType::f32, {2, 2, 3, 6}, [](int64_t i) { return static_cast<float>(i % 7); });
  Tensor table = make(DType::i32, {2, 2}), seqlens = ints({2, 3}), starts = ints({0, 2, 6});
  AppendKvArgs args;

  Valid() {
    for (std::int32_t i = 0; i < 4; ++i) table.flat<std::int32_t>(i) = 3 - i;
    args.k_new = k_new.view(), args.v_new = v_new.view(), args.seqlens = seqlens.view();
    args.cache = KvCache::paged(k.mutable_view(), v.mutable_view(), table.view())
                     .quantized(k_scale.mutable_view(), v_scale.mutable_view(), k_zero.mutable_view())
                     .with_tail(k_tail.mutable_view());
  }
};

void refuses(const std::string& argument, const std::function<void(Valid&)>& spoil) {
  Valid valid;
  INFO(argument);
  spoil(valid);
  const Tensor* const outputs[] = {&valid.k, &valid.v, &valid.k_scale, &valid.v_scale, &valid.k_zero, &valid.k_tail};
  std::vector<std::vector<std::byte>> before;
  for (const Tensor* t : outputs) before.push_back(bytes_of(*t));
  CHECK(refused_argument([&] { append_kv(valid.args); }) == argument);
  for (std::size_t i = 0; i < before.size(); ++i) CHECK(bytes_of(*outputs[i]) == before[i]);
}

}  // namespace

TEST_CASE("append: what is wrong is named, and nothing is written", "[unit]") {
  Valid valid;
  REQUIRE_NOTHROW(append_kv(valid.args));
  const auto to_strided = [](Valid& a) {
    a.args.cache.kind = KvSource::Kind::strided, a.args.cache.block_table = {};
    a.args.seqlens = TensorView(a.seqlens.buffer().data(), DType::i32, {4}, {0});
    a.args.k_new.shape[0] = a.args.v_new.shape[0] = 4, a.args.k_new.strides[0] = a.args.v_new.strides[0] = 0;
    a.seqlens.flat<std::int32_t>(0) = 1;
  };
  {
    Valid strided;
    to_strided(strided);
    REQUIRE_NOTHROW(append_kv(strided.args));
  }
  refuses("k_new", [](Valid& a) { a.args.k_new = {}; });
  refuses("k_new", [](Valid& a) { a.args.k_new.dtype = DType::i32; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[0] = 1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.strides[2] = -1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.data = nullptr; });
  refuses("k_new", [](Valid& a) { a.args.k_new.device.type = DeviceType::cuda; });
  refuses("k_new", [](Valid& a) { a.args.k_new.device.index = 1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[1] = 1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[3] = 0; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[3] = 4; });
  refuses("v_new", [](Valid& a) { a.args.v_new.shape[3] = 5; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k.shape[3] = 0; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.shape[3] = 8193; });
  refuses("v_new", [](Valid& a) { a.args.v_new = {}; });
  refuses("v_new", [](Valid& a) { a.args.v_new.shape[2] = 2; });
  refuses("v_new", [](Valid& a) { a.args.v_new.shape[1] = 1; });
  refuses("v_new", [](Valid& a) { a.args.v_new.dtype = DType::i8; });
  refuses("seqlens", [](Valid& a) { a.args.seqlens = {}; });
  refuses("seqlens", [](Valid& a) { a.args.seqlens.dtype = DType::f32; });
  refuses("seqlens", [](Valid& a) { a.seqlens.flat<std::int32_t>(1) = -1; });
  refuses("seqlens", [](Valid& a) { a.seqlens.flat<std::int32_t>(1) = 6; });
  refuses("cu_seqlens", [](Valid& a) {
    a.args.k_new = TensorView(a.k_new.buffer().data(), DType::f32, {6, 2, 10});
    a.args.v_new = TensorView(a.v_new.buffer().data(), DType::f32, {6, 2, 6});
    a.starts.flat<std::int32_t>(2) = 5;
    a.args.cu_seqlens = a.starts.view();
  });
  refuses("k_new", [](Valid& a) { a.args.cu_seqlens = a.starts.view(); });  // of rank 4
  refuses("cache.kind", [](Valid& a) { a.args.cache.kind = KvSource::Kind::ragged; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k = {}; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k.dtype = DType::boolean; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k.strides[2] = 0; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.dtype = DType::f8e4m3; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.shape[2] = 3; });
  refuses("cache.v_scale", [](Valid& a) { a.args.cache.v = a.args.cache.k, a.args.cache.v.shape[3] = 6; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.data = a.v_new.buffer().data(); });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table = {}; });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table.dtype = DType::f32; });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table.shape[0] = 1; });
  refuses("seqlens", [](Valid& a) { a.args.seqlens.shape[0] = 1; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = 4; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = -1; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = a.table.flat<std::int32_t>(3); });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale = {}, a.args.cache.k_zero = {}; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.dtype = DType::bf16; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[3] = 3; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[1] = 1; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[2] = 2; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.strides[2] = 0; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k_scale.data = a.args.cache.k_zero.data; });
  refuses("cache.v_scale", [](Valid& a) {  // groups of 3 nibbles
    a.args.cache.k.dtype = a.args.cache.v.dtype = DType::i4x2;
    a.args.cache.k.shape[3] = 4, a.args.cache.v.shape[3] = 3, a.args.cache.v_scale.shape[3] = 2;
    a.args.cache.v_scale.strides[0] = 16, a.args.cache.v_scale.shape[0] = 1;
  });
  for (std::size_t dim : {0, 1, 2}) refuses("cache.k_tail", [=](Valid& a) { --a.args.cache.k_tail.shape[dim]; });
  refuses("cache.k_tail", [](Valid& a) { a.args.cache.k_tail.shape[3] = 0; });
  refuses("cache.k_tail", [](Valid& a) { a.args.cache.k_tail.shape[3] = 8185, a.args.cache.k_tail.strides[2] = 8185; });
  refuses("cache.k_tail", [](Valid& a) { a.args.cache.k_tail.strides[2] = 1; });  // rows overlap
  refuses("cache.k_tail", [](Valid& a) { a.args.cache.k_tail.dtype = DType::i8; });
  refuses("cache.k_tail", [](Valid& a) { a.args.cache.k_tail.data = a.v_new.buffer().data(); });
  refuses("k_new", [](Valid& a) { a.args.cache.k_tail = {}; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[3] = 8; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k_zero.shape[2] = 1; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k_zero.shape[3] = 1; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k.dtype = a.args.cache.v.dtype = DType::f8e5m2; });
  for (const float bad : {0.f, -1.f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    refuses("cache.v_scale", [&](Valid& a) {
      a.args.cache.v_scale.shape[2] = 1;
      a.v_scale.at({0, 1, 0, 0}) = bad;
      for (int64_t i = 0; i < 4; ++i)
        for (int64_t h = 0; h < 2; ++h)
          if (i != 0 || h != 1) a.v_scale.at({i, h, 0, 0}) = 1;
    });
  }
  refuses("seqlens", [&](Valid& a) { to_strided(a), a.seqlens.flat<std::int32_t>(0) = 2; });
  refuses("cache.block_table", [&](Valid& a) { to_strided(a), a.args.cache.block_table = a.table.view(); });
  refuses("cache.k", [&](Valid& a) {
    to_strided(a);
    a.args.k_new.shape[0] = a.args.v_new.shape[0] = 3, a.args.seqlens.shape[0] = 3;
  });
}

TEST_CASE("append: k, v and scales may lie in turn in one buffer", "[unit]") {
  // Rows of [k: 8 bytes | its scale | v: 4 bytes | its scale].
  constexpr int64_t rows = 6, row = 20;
  alignas(4) std::uint8_t buffer[rows * row];
  std::memset(buffer, 0xb5, sizeof buffer);
  const auto bytes = [&](int64_t at, int64_t d) {
    return MutableTensorView(buffer + at, DType::i8, {1, 1, rows, d}, {0, 0, row, 1});
  };
  const auto scale = [&](int64_t at) {
    return MutableTensorView(buffer + at, DType::f32, {1, 1, rows, 1}, {0, 0, row / 4, 1});
  };
  const Tensor k_new = filled(DType::f32, {1, 1, 2, 8}, [](int64_t i) { return static_cast<float>(i); });
  const Tensor v_new = filled(DType::f32, {1, 1, 2, 4}, [](int64_t i) { return static_cast<float>(i + 1); });
  const Tensor before = ints({3});
  AppendKvArgs args = {k_new.view(),
                       v_new.view(),
                       KvCache::strided(bytes(0, 8), bytes(12, 4)).quantized(scale(8), scale(16)),
                       before.view(),
                       {}};
  append_kv(args);
  for (int64_t i = 0; i < rows * row; ++i)
    if (i / row != 3 && i / row != 4) REQUIRE(buffer[i] == 0xb5);
  for (int64_t t = 0; t < 2; ++t) {
    const std::uint8_t* const at = buffer + (3 + t) * row;
    float s = 0;
    std::memcpy(&s, at + 16, 4);
    CHECK(s == Approx((4 * t + 4) / 127.f));
    CHECK(at[12 + 3] == 127);
    CHECK(at[7] == 127);
  }
  args.cache.v = bytes(10, 4);  // over k's scale
  CHECK(refused_argument([&] { append_kv(args); }) == "cache.k_scale");
}

TEST_CASE("append: rows of a latent cache hold codes, scales and a tail", "[unit]") {
  // DeepSeek's rows, 656 bytes: 512 codes, 4 scales, 64 bf16. The values are the codes.
  constexpr int64_t rows = 5, row = 656;
  Tensor buffer = make(DType::f32, {1, rows, row / 4});
  auto* const bytes = reinterpret_cast<std::uint8_t*>(buffer.buffer().data());
  std::memset(bytes, 0xb5, rows * row);
  const MutableTensorView codes(bytes, DType::f8e4m3, {1, 1, rows, 512}, {0, 0, row, 1}),
      scale(bytes + 512, DType::f32, {1, 1, rows, 4}, {0, 0, row / 4, 1}),
      tail(bytes + 528, DType::bf16, {1, 1, rows, 64}, {0, 0, row / 2, 1});
  const Tensor fresh =
      filled(DType::f32, {1, 1, 2, 576}, [](int64_t i) { return static_cast<float>(i % 576 / 128 * 2 + 2); });
  const Tensor before = ints({2});
  const TensorView v_new = slice(fresh.view(), 3, 0, 512);
  const KvCache cache = KvCache::strided(codes, codes).quantized(scale, scale).with_tail(tail);
  AppendKvArgs args = {fresh.view(), v_new, cache, before.view(), {}};
  append_kv(args);
  for (int64_t i = 0; i < rows * row; ++i)
    if (i / row != 2 && i / row != 3) REQUIRE(bytes[i] == 0xb5);
  for (int64_t j : {2, 3}) {
    for (int64_t c = 0; c < 512; ++c) {
      const auto size = static_cast<float>(c / 128 * 2 + 2);
      REQUIRE(bytes[j * row + c] == 0x7e);  // 448
      REQUIRE(static_cast<const float*>(scale.data)[j * row / 4 + c / 128] == size / 448);
    }
    for (int64_t c = 0; c < 64; ++c) REQUIRE(static_cast<const std::uint16_t*>(tail.data)[j * row / 2 + c] == 0x4120);
  }
  const auto refused = [&] { return refused_argument([&] { append_kv(args); }); };
  args.cache.v_scale.shape[3] = 2;
  CHECK(refused() == "cache.v_scale");
  args.cache = cache, args.cache.v_scale = {};
  CHECK(refused() == "cache.v_scale");
  args.cache = cache, args.cache.v_scale.data = bytes + 516;  // the next group's
  args.cache.v_scale.shape[3] = 3, args.cache.v.shape[3] = 384, args.v_new.shape[3] = 384;
  CHECK(refused() == "cache.v_scale");
  args.cache.v.data = bytes + 128, args.v_new.data = static_cast<const float*>(v_new.data) + 128;
  CHECK(refused() == "");
  args.cache.k_tail.data = bytes + 526;
  CHECK(refused() == "cache.k_scale");
}

TEST_CASE("append: errors name what has to change, and where it is", "[unit]") {
  const auto message = [](const std::function<void(Valid&)>& spoil) {
    Valid valid;
    spoil(valid);
    return refused_text([&] { append_kv(valid.args); });
  };
  CHECK(message([](Valid& a) { a.args.k_new.shape[3] = 7; }) ==
        "k_new: shape [2, 2, 3, 7]; wanted the head dimension d = 10");
  CHECK(message([](Valid& a) { a.args.seqlens.shape[0] = 1; }) ==
        "seqlens: shape [1]; wanted cache.block_table's batch b = 2");
  CHECK(message([](Valid& a) { a.args.k_new.shape[0] = 1; }) ==
        "k_new: shape [1, 2, 3, 10]; wanted cache.block_table's batch b = 2");
  CHECK(message([](Valid& a) { a.seqlens.flat<std::int32_t>(1) = -4; }) ==
        "seqlens: length -4 of sequence 1; wanted 0 to 2^52");
  CHECK(message([](Valid& a) { a.table.flat<std::int32_t>(3) = 9; }) ==
        "cache.block_table: page 9 for key 4 of sequence 1; wanted 0 to 3, one of cache.k's pages");
  CHECK(message([](Valid& a) {
          KvCache& c = a.args.cache;
          for (MutableTensorView* t : {&c.k, &c.v, &c.k_scale, &c.v_scale, &c.k_zero, &c.k_tail}) t->shape[0] = 0;
        }) == "cache.block_table: page 3 for key 2 of sequence 0; wanted no keys, as cache.k has no pages");
  CHECK(message([](Valid& a) {
          a.args.cache.k_scale.shape[2] = a.args.cache.k_zero.shape[2] = 1;
          for (int64_t i = 0; i < a.k_scale.size(); ++i) a.k_scale.flat(i) = -1e-30f;
        }) == "cache.k_scale: -1e-30; wanted finite numbers above 0");
}

TEST_CASE("append: values may be columns of the keys", "[unit]") {
  // Rows of 8, of which v has `dv` from `first` on; new rows have 2 more elements between them.
  for (const auto& [first, dv] : {std::pair<int64_t, int64_t>{0, 8}, {0, 5}, {3, 5}, {6, 1}}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
      INFO(first << ", " << dv << ", " << to_string(dtype));
      const auto size = static_cast<int64_t>(size_of(dtype));
      Tensor whole = make(dtype, {2, 2, 4, 8}), alone = make(dtype, {2, 2, 4, 8});
      const Tensor fresh =
          filled(DType::f32, {2, 2, 3, 8}, [](int64_t i) { return static_cast<float>(i % 97) / 8; }, {64, 32, 10, 1});
      const Tensor before = ints({1, 0});
      Tensor values = make(dtype, {2, 2, 4, dv});
      const TensorView v_new(static_cast<const float*>(fresh.view().data) + first, {2, 2, 3, dv}, {64, 32, 10, 1});
      append_kv(
          {fresh.view(), v_new, KvCache::strided(alone.mutable_view(), values.mutable_view()), before.view(), {}});

      const MutableTensorView k = whole.mutable_view();
      MutableTensorView v = k;
      v.data = static_cast<char*>(k.data) + first * size, v.shape[3] = dv;
      AppendKvArgs args = {fresh.view(), v_new, KvCache::strided(k, v), before.view(), {}};
      append_kv(args);
      CHECK(bytes_of(whole) == bytes_of(alone));

      const auto refused = [&] { return refused_argument([&] { append_kv(args); }); };
      const std::vector<float> copied(2 * 2 * 3 * 8);
      args.v_new = TensorView(copied.data(), {2, 2, 3, dv});
      CHECK(refused() == "v_new");
      args.v_new = v_new;
      if (dv < 8) {
        args.v_new.data = static_cast<const float*>(fresh.view().data) + (first == 0 ? 1 : 0);
        CHECK(refused() == "v_new");
        args.v_new = v_new;
      }
      args.v_new.strides[2] = 8;
      CHECK(refused() == "v_new");
      args.v_new = v_new;
      args.cache.v.data = static_cast<char*>(k.data) + (8 + first) * size;  // columns of the next key's row
      args.cache.v.shape[2] = args.cache.k.shape[2] = 3;
      CHECK(refused() == "cache.v");
      args.cache.v = v, args.cache.k = k;
      if (size > 1) continue;
      const Tensor scale = filled(DType::f32, {1, 2, 1, 1}, [](int64_t) { return 1.f; });
      const MutableTensorView given(const_cast<void*>(scale.view().data), DType::f32, Layout(scale.view()));
      args.cache = args.cache.quantized(given, given);
      CHECK(refused() == (dv == 8 ? "" : "cache.v_scale"));  // one group, of which v has a part
    }
  }
}

TEST_CASE("append: nothing to append writes nothing", "[unit]") {
  Tensor k = make(DType::f32, {2, 1, 3, 4}), v = make(DType::f32, {2, 1, 3, 4}), full = ints({3, 3});
  const std::vector<std::byte> untouched = bytes_of(k);
  const KvCache cache = KvCache::strided(k.mutable_view(), v.mutable_view());
  const TensorView none(nullptr, DType::f32, {2, 1, 0, 4});
  append_kv({none, none, cache, full.view(), {}});
  const Tensor starts = ints({0, 0, 0});
  const TensorView no_rows(nullptr, DType::f32, {0, 1, 4});
  append_kv({no_rows, no_rows, cache, full.view(), starts.view()});
  CHECK(bytes_of(k) == untouched);
  CHECK(bytes_of(v) == untouched);
}
