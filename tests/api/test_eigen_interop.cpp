// Views of Eigen objects: the right elements, in place, const-correct.
#include <Eigen/Dense>
#include <unsupported/Eigen/CXX11/Tensor>

#include "rapt/interop/eigen.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"

namespace rapt::testing {
namespace {

using interop::mutable_view_of;
using interop::view_of;
using RowMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <int Options>
using Tensor4 = Eigen::Tensor<float, 4, Options>;

template <class T>
concept Viewable = requires(T& t) {
  view_of(t);
};
template <class T>
concept Writable = requires(T& t) {
  mutable_view_of(t);
};

static_assert(Viewable<const Eigen::MatrixXf> && Viewable<Eigen::Array33f> && Viewable<Eigen::Ref<const RowMatrix>>);
static_assert(Writable<Eigen::MatrixXf> && Writable<Eigen::Map<RowMatrix>> && Writable<Eigen::Ref<Eigen::MatrixXf>>);
static_assert(!Writable<const Eigen::MatrixXf> && !Writable<Eigen::Map<const RowMatrix>>);
static_assert(!Writable<Eigen::Ref<const Eigen::MatrixXf>>);
static_assert(Viewable<Eigen::TensorMap<Eigen::Tensor<const float, 4>>>);
static_assert(!Writable<Eigen::TensorMap<Eigen::Tensor<const float, 4>>> && !Writable<const Tensor4<0>>);
using HalfMatrix = Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic>;
using BrainMatrix = Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
static_assert(Viewable<const HalfMatrix> && Viewable<Eigen::Ref<const BrainMatrix>> && Writable<HalfMatrix>);
static_assert(!Writable<const BrainMatrix> && !Writable<Eigen::Map<const HalfMatrix>>);
static_assert(Viewable<Eigen::Tensor<Eigen::half, 4>> && !Viewable<Eigen::MatrixXi>);
static_assert(!Viewable<Eigen::MatrixXd> && !Viewable<Eigen::Tensor<double, 4>> && !Viewable<Eigen::Tensor<float, 3>>);
// An expression has no memory to view.
static_assert(!Viewable<decltype(std::declval<Eigen::MatrixXf>() * 2.f)>);

float element(const TensorView& t, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  const auto* data = static_cast<const float*>(t.data);
  return data[i0 * t.strides[0] + i1 * t.strides[1] + i2 * t.strides[2] + i3 * t.strides[3]];
}

template <class Matrix>
void check_matrix(const Matrix& m) {
  const TensorView view = view_of(m);
  CHECK(view.data == m.data());
  CHECK(view.dtype == DType::f32);
  REQUIRE(view.ndim == 4);
  REQUIRE(view.shape == std::array<std::int64_t, 4>{1, 1, m.rows(), m.cols()});
  for (Eigen::Index i = 0; i < m.rows(); ++i) {
    for (Eigen::Index j = 0; j < m.cols(); ++j) REQUIRE(element(view, 0, 0, i, j) == m(i, j));
  }
}

template <int Options>
void check_tensor() {
  Tensor4<Options> t(2, 3, 4, 5);
  t.setRandom();
  const TensorView view = view_of(t);
  CHECK(view.data == t.data());
  REQUIRE(view.shape == std::array<std::int64_t, 4>{2, 3, 4, 5});
  for (int i = 0; i < 120; ++i) {
    const int i0 = i / 60, i1 = i / 20 % 3, i2 = i / 5 % 4, i3 = i % 5;
    REQUIRE(element(view, i0, i1, i2, i3) == t(i0, i1, i2, i3));
  }
  const Eigen::TensorMap<Tensor4<Options>> map(t.data(), 2, 3, 4, 5);
  CHECK(view_of(map).strides == view.strides);
}

}  // namespace

TEST_CASE("Eigen matrices of any storage are viewed in place", "[interop]") {
  const Eigen::MatrixXf col = Eigen::MatrixXf::Random(6, 5);
  const RowMatrix row = RowMatrix::Random(6, 5);
  check_matrix(col);
  check_matrix(row);
  check_matrix(col.block(1, 2, 3, 2));
  check_matrix(row.block(1, 2, 3, 2));
  check_matrix(row.middleRows(2, 3));
  check_matrix(col.transpose());
  check_matrix(row.row(3));
  check_matrix(col.row(3));
  check_matrix(Eigen::Ref<const Eigen::MatrixXf>(col));
  using Strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  check_matrix(Eigen::Map<const Eigen::MatrixXf, 0, Strides>(col.data(), 3, 2, Strides(12, 2)));
  check_matrix(Eigen::VectorXf(Eigen::VectorXf::Random(4)));
  check_matrix(Eigen::Array<float, 2, 3, Eigen::RowMajor>(Eigen::Array<float, 2, 3, Eigen::RowMajor>::Random()));
}

TEST_CASE("Eigen tensors of either storage order are viewed in place", "[interop]") {
  check_tensor<Eigen::ColMajor>();
  check_tensor<Eigen::RowMajor>();
}

TEST_CASE("attention on Eigen matrices writes into a block and nothing else", "[interop]") {
  const Eigen::Index s = 9, d = 6;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(s, d);
  const RowMatrix k = RowMatrix::Random(s, d);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(s, d);
  Eigen::MatrixXf out = Eigen::MatrixXf::Constant(s + 2, d + 1, 7.f);
  attention(view_of(q), view_of(k), view_of(v), mutable_view_of(out.block(1, 0, s, d)));

  Eigen::MatrixXd p = ((q.cast<double>() * k.cast<double>().transpose()) / std::sqrt(double(d))).array().exp();
  p.array().colwise() /= p.rowwise().sum().array().eval();
  const Eigen::MatrixXd expected = p * v.cast<double>();
  CHECK((out.block(1, 0, s, d).cast<double>() - expected).norm() <= 1e-6 * expected.norm());
  CHECK((out.row(0).array() == 7.f).all());
  CHECK((out.bottomRows(1).array() == 7.f).all());
  CHECK((out.rightCols(1).array() == 7.f).all());
}

TEST_CASE("Eigen's 16-bit numbers are viewed as what they are", "[interop]") {
  HalfMatrix half(3, 2);
  BrainMatrix brain(3, 2);
  CHECK(view_of(half).dtype == DType::f16);
  CHECK(view_of(brain.topRows(2)).dtype == DType::bf16);
  CHECK(mutable_view_of(brain).data == brain.data());
  CHECK(view_of(Eigen::Tensor<Eigen::bfloat16, 4>(1, 2, 3, 4)).dtype == DType::bf16);

  const Eigen::Index s = 40, d = 16;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(s, d), k = Eigen::MatrixXf::Random(s, d),
                        v = Eigen::MatrixXf::Random(s, d);
  const HalfMatrix half_q = q.cast<Eigen::half>();
  const BrainMatrix brain_k = k.cast<Eigen::bfloat16>(), brain_v = v.cast<Eigen::bfloat16>();
  HalfMatrix out(s, d);
  attention(view_of(half_q), view_of(brain_k), view_of(brain_v), mutable_view_of(out));
  // The same numbers as floats.
  const Eigen::MatrixXf wide_q = half_q.cast<float>(), wide_k = brain_k.cast<float>(), wide_v = brain_v.cast<float>();
  Eigen::MatrixXf expected(s, d);
  attention(view_of(wide_q), view_of(wide_k), view_of(wide_v), mutable_view_of(expected));
  CHECK((out.cast<float>() - expected).cwiseAbs().maxCoeff() <= 8 * 0x1p-8f);
  CHECK((out.cast<float>() - expected).norm() <= 0x1p-8f * expected.norm());
}

TEST_CASE("attention gives the same bits on column- and row-major Eigen tensors", "[interop]") {
  Tensor4<Eigen::RowMajor> row(2, 3, 8, 4), row_out(2, 3, 8, 4);
  Tensor4<Eigen::ColMajor> col(2, 3, 8, 4), col_out(2, 3, 8, 4);
  row.setRandom();
  for (int i = 0; i < 192; ++i) {
    const int i0 = i / 96, i1 = i / 32 % 3, i2 = i / 4 % 8, i3 = i % 4;
    col(i0, i1, i2, i3) = row(i0, i1, i2, i3);
  }
  attention(view_of(row), view_of(row), view_of(row), mutable_view_of(row_out));
  attention(view_of(col), view_of(col), view_of(col), mutable_view_of(col_out));
  for (int i = 0; i < 192; ++i) {
    const int i0 = i / 96, i1 = i / 32 % 3, i2 = i / 4 % 8, i3 = i % 4;
    REQUIRE(col_out(i0, i1, i2, i3) == row_out(i0, i1, i2, i3));
  }
}

}  // namespace rapt::testing
