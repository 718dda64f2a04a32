// Layout, TensorView and the test tensors' own poison.
#include <array>
#include <limits>
#include <span>
#include <vector>

#include "rapt/tensor.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

Layout layout(std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {}) {
  return {shape, strides};
}

}  // namespace

TEST_CASE("layout: contiguous strides", "[unit]") {
  const Layout l = layout({2, 3, 4, 5});
  CHECK(l.ndim == 4);
  CHECK(l.strides == std::array<std::int64_t, 4>{60, 20, 5, 1});
  CHECK(layout({7}).strides[0] == 1);
}

TEST_CASE("layout: ranks and sizes that cannot be", "[unit]") {
  CHECK(refused_argument([] { layout({}); }) == "shape");
  CHECK(refused_argument([] { layout({1, 1, 1, 1, 1}); }) == "shape");
  CHECK(refused_argument([] { layout({2, 3}, {1}); }) == "strides");
  const std::int64_t big = std::numeric_limits<std::int64_t>::max() / 2;
  CHECK(refused_argument([&] { layout({3, big}); }) == "shape");
  CHECK(refused_argument([&] { layout({big, 3, 1}); }) == "shape");
  CHECK(refused_argument([&] { layout({3, big}, {1, 1}); }).empty());  // signs and ranges are the operation's business
}

TEST_CASE("views know their type and whether they are there", "[unit]") {
  float x[6] = {};
  const bool flags[6] = {};
  CHECK_FALSE(TensorView());
  CHECK_FALSE(MutableTensorView());
  const MutableTensorView view(x, {2, 3});
  CHECK(view);
  CHECK(view.dtype == DType::f32);
  CHECK(TensorView(view).data == x);
  CHECK(TensorView(flags, {6}).dtype == DType::boolean);
  CHECK(TensorView(x, {2, 2}, {3, 1}).strides[0] == 3);
}

TEST_CASE("views take shapes and strides of any integers", "[unit]") {
  float x[24] = {};
  const TensorView wanted(x, {2, 3, 4}, {12, 4, 1});
  const auto same = [&](const TensorView& view) {
    return view.data == x && view.dtype == DType::f32 && view.ndim == 3 && view.shape == wanted.shape &&
           view.strides == wanted.strides;
  };
  const std::size_t b = 2;
  const long long h = 3;
  const std::int8_t d = 4;
  const unsigned step = 12;
  enum { kOne = 1 };
  CHECK(same({x, {b, h, d}}));
  CHECK(same({x, DType::f32, {b, h, d}, {step, d, kOne}}));
  CHECK(same(MutableTensorView(x, {b, h, d}, {step, d, kOne})));
  CHECK(same(MutableTensorView(x, DType::f32, {b, h, d})));
  const std::vector<std::size_t> shape = {2, 3, 4};
  const std::array<int, 3> steps = {12, 4, 1};
  const std::span<const std::int64_t> wide(wanted.shape.data(), 3);
  const std::initializer_list<long> listed = {2, 3, 4};
  const unsigned short plain[] = {2, 3, 4};
  CHECK(same({x, shape}));
  CHECK(same({x, shape, steps}));
  CHECK(same({x, {2, 3, 4}, steps}));
  CHECK(same({x, shape, {12, 4, 1}}));
  CHECK(same({x, shape, {}}));
  CHECK(same({x, wide, steps}));
  CHECK(same({x, listed}));
  CHECK(same({x, plain}));
  CHECK(same({x, DType::f32, wide}));
  CHECK(same({x, DType::f32, {shape, steps}}));  // a Layout
  CHECK(same({x, DType::f32, {shape}, {DeviceType::cpu, 0}}));
  CHECK(same(MutableTensorView(x, shape, steps)));
  CHECK(same(MutableTensorView(x, DType::f32, shape, steps)));
  CHECK(same({x, DType::f32, Layout(shape, steps), Device{}}));
  // Sizes that int64 cannot hold do not turn into others.
  CHECK(refused_argument([&] { TensorView(x, {std::numeric_limits<std::size_t>::max(), b}); }) == "shape");
  CHECK(TensorView(x, {2}, {std::numeric_limits<std::size_t>::max()}).strides[0] ==
        std::numeric_limits<std::int64_t>::max());
  CHECK(refused_argument([&] { TensorView(x, std::vector<unsigned>(7, 1u)); }) == "shape");
  CHECK(refused_argument([&] { TensorView(x, shape, std::array<int, 2>{1, 1}); }) == "strides");
}

namespace {
template <class T>
DType deduced() {
  T x[2] = {};
  CHECK(MutableTensorView(x, {2}).dtype == TensorView(static_cast<const T*>(x), {2}).dtype);
  CHECK(size_of(TensorView(x, {2}).dtype) == sizeof(T));
  return TensorView(x, {2}).dtype;
}
}  // namespace

TEST_CASE("views know the types that C++ has", "[unit]") {
  CHECK(deduced<float>() == DType::f32);
  CHECK(deduced<bool>() == DType::boolean);
  CHECK(deduced<std::int8_t>() == DType::i8);
  CHECK(deduced<std::int32_t>() == DType::i32);
  CHECK(deduced<std::int64_t>() == DType::i64);
  CHECK(deduced<long>() == (sizeof(long) == 8 ? DType::i64 : DType::i32));
  CHECK(deduced<long long>() == DType::i64);
#if defined(__FLT16_MANT_DIG__) && (defined(__clang__) || __GNUC__ >= 13 || defined(__x86_64__))
  __extension__ using Half = _Float16;
  CHECK(deduced<Half>() == DType::f16);
#else
  WARN("skipped: this compiler has no _Float16");
#endif
#ifdef __BFLT16_MANT_DIG__
  __extension__ using Brain = __bf16;
  CHECK(deduced<Brain>() == DType::bf16);
#else
  WARN("skipped: this compiler has no __bf16");
#endif
}

TEST_CASE("dtypes have sizes and names", "[unit]") {
  CHECK(size_of(DType::f32) == 4);
  CHECK(size_of(DType::f16) == 2);
  CHECK(size_of(DType::bf16) == 2);
  CHECK(size_of(DType::boolean) == 1);
  CHECK(size_of(DType::i32) == 4);
  CHECK(size_of(DType::i64) == 8);
  CHECK(to_string(DType::bf16) == "bf16");
  CHECK(to_string(Isa::avx512) == "avx512");
  CHECK(to_string(DeviceType::cuda) == "cuda");
}

TEST_CASE("errors name the argument, what was got and what was wanted", "[unit]") {
  const Error error("score.scale", "nan", "a finite number");
  CHECK(error.argument() == "score.scale");
  CHECK(std::string(error.what()) == "score.scale: nan; wanted a finite number");
}

TEST_CASE("test tensors notice writes into gaps", "[unit]") {
  Tensor t(DType::f32, layout({2, 3}, {7, 2}));
  CHECK(t.gaps_intact());
  t.at({1, 2}) = 4;
  CHECK(t.gaps_intact());
  reinterpret_cast<float*>(t.buffer().data())[1] = 0;
  CHECK_FALSE(t.gaps_intact());
}
