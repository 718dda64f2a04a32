// The indexer of sparse attention as Python gives it.
#include <array>
#include <utility>

#include "bind.hpp"
#include "call.hpp"
#include "error.hpp"
#include "rapt/index_scores.hpp"
#include "rapt/select_topk.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

// What rapt.dsa.index_scores and index_topk are given alike, in the order of _dsa.py's _INPUTS.
struct IndexInputs {
  nb::handle q, k, w, align, relu, causal, scale, k_scale, seqlens, block_table, key_begin, key_end, threads, isa;
};

// Runs without the GIL, and refuses under Python's names.
template <class Work>
void run(const Arrays& arrays, const Context& context, const PythonNames& names, const Work& work) {
  try {
    const nb::gil_scoped_release unlocked;
    work(context);
  } catch (const Error& error) {
    refuse(error, names);
  }
  arrays.mark_written();
}

// rapt.dsa.index_scores into `scores`, or index_topk into `indices`; the other is None. The one that is given is called
// `out` in refusals. Without the GIL where it works.
void index_scores(const IndexInputs& a, nb::handle scores, nb::handle indices) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kNames{
      {{"weights", "w"}, {"scores", "out"}, {"indices", "out"}}};
  Arrays arrays;
  const auto integers = [&](const char* name, nb::handle array) {
    return arrays.read(name, array, {.elements = Elements::integers});
  };
  IndexScoresArgs args;
  args.q = arrays.read("q", a.q, {.elements = Elements::floats, .shaped = true});
  args.k = arrays.read("k", a.k, {.elements = Elements::keys, .shaped = true});
  args.weights = arrays.read("w", a.w, {.elements = Elements::f32, .shaped = true});
  args.k_scale = arrays.read("k_scale", a.k_scale, {.elements = Elements::f32});
  args.seqlens = integers("seqlens", a.seqlens), args.block_table = integers("block_table", a.block_table);
  args.key_begin = integers("key_begin", a.key_begin), args.key_end = integers("key_end", a.key_end);
  args.align = align_of(a.align);
  args.relu = truth("relu", a.relu), args.causal = truth("causal", a.causal);
  args.scale = real("scale", a.scale);
  args.scores = arrays.read("out", scores, {.writable = true, .elements = Elements::f32});
  args.indices = arrays.read("out", indices, {.writable = true, .elements = Elements::integers});
  const Context context = context_of(arrays, a.threads, a.isa, args.q.device);
  run(arrays, context, kNames, [&](const Context& on) { rapt::index_scores(args, on); });
}

// rapt.dsa.select_topk into `out`. Without the GIL where it works.
void select_topk(nb::handle scores, nb::handle out, nb::handle threads, nb::handle isa) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 1> kNames{{{"indices", "out"}}};
  Arrays arrays;
  const SelectTopkArgs args{
      arrays.read("scores", scores, {.elements = Elements::f32, .shaped = true}),
      arrays.read("out", out, {.writable = true, .elements = Elements::integers, .shaped = true})};
  const Context context = context_of(arrays, threads, isa, args.scores.device);
  run(arrays, context, kNames, [&](const Context& on) { rapt::select_topk(args, on); });
}

}  // namespace

void bind_index_scores(nb::module_& m) {
  const auto any = nb::arg().none();
  m.def(
      "index_scores",
      [](const nb::tuple& inputs, nb::handle scores, nb::handle indices) {
        index_scores(arguments_of<IndexInputs>(inputs), scores, indices);
      },
      nb::arg(), any, any, nb::sig("def index_scores(inputs: tuple[Any, ...], scores: Any, indices: Any, /) -> None"),
      "`rapt.dsa.index_scores` into `scores`, or `rapt.dsa.index_topk` into `indices`; the other is None. `inputs` in "
      "the order of _dsa.py's _INPUTS.");
}

void bind_select_topk(nb::module_& m) {
  const auto any = nb::arg().none();
  m.def("select_topk", &select_topk, any, any, any, any,
        nb::sig("def select_topk(scores: Any, out: Any, threads: int | None, isa: str | None, /) -> None"),
        "`rapt.dsa.select_topk` into `out`.");
}

}  // namespace rapt::python
