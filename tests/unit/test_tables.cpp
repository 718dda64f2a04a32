// What goes over argument tables: lists of many tensors.
#include <cmath>
#include <string>
#include <vector>

#include "guards/not_finite.hpp"
#include "support/catch.hpp"

using namespace rapt;

namespace {

struct ListArgs {
  std::span<const TensorView> list;
  TensorView a, b;
};
struct CListArgs {
  const rapt_tensor* list;
  std::size_t count;
  rapt_tensor a, b;
};
constexpr ArgumentTable kListTable{
    read<&CListArgs::list, &ListArgs::list>("list", kF32, "1"),
    read<&CListArgs::a, &ListArgs::a>("a", kF32, "n"),
    read<&CListArgs::b, &ListArgs::b>("b", kF32, "n"),
};

}  // namespace

TEST_CASE("tables: a size is said to be of the tensor that has it, behind however long a list", "[unit]") {
  const float x[3] = {};
  for (const std::size_t count : {1, 127, 128, 256, 300}) {
    CAPTURE(count);
    const std::vector<TensorView> list(count, TensorView(x, {1}));
    const ListArgs args{list, {x, {2}}, {x, {3}}};
    const ArgumentList table{kListTable.arguments, {kListTable.dimensions.data(), kListTable.count}, {}};
    Bound bound(table, &args, 1, {});
    std::string refusal;
    try {
      bound.check();
    } catch (const Error& error) {
      refusal = error.what();
    }
    CHECK(refusal == "b: shape [3]; wanted a's n = 2");
  }
}

TEST_CASE("tables: guards see every tensor of a list", "[unit]") {
  const float fine[2] = {1, 2}, bad[2] = {3, NAN};
  const std::vector<TensorView> outs = {{fine, {1, 2}}, {fine, {1, 2}}, {bad, {1, 2}}}, lses(3, TensorView(fine, {1}));
  MergeStatesArgs args{};
  args.outs = outs, args.lses = lses;
  const auto found = not_finite_input(args);
  REQUIRE(found);
  CHECK(found->place.tensor == "outs[2]");
  CHECK(found->place.index == std::vector<std::int64_t>{0, 1});
}
