// Layout, TensorView and the test tensors' own poison.
#include <limits>

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
