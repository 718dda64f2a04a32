#include "rapt/merge_states.hpp"

#include <string>
#include <vector>

#include "bind.hpp"
#include "call.hpp"

namespace rapt::python {
namespace {

// `outs` and `lses` are sequences of arrays; `lse` may be None. Without the GIL where it works.
void merge_states(const nb::sequence& outs, const nb::sequence& lses, nb::handle out, nb::handle lse) {
  Arrays arrays;
  const auto views = [&](const char* name, const nb::sequence& sequence, Elements elements) {
    std::vector<TensorView> read;
    for (const nb::handle item : sequence) {
      const std::string argument = std::string(name) + "[" + std::to_string(read.size()) + "]";
      read.push_back(arrays.read(argument.c_str(), item, {.elements = elements}));
    }
    return read;
  };
  const std::vector<TensorView> from = views("outs", outs, Elements::any), with = views("lses", lses, Elements::f32);
  const MutableTensorView to = arrays.read("out", out, {.writable = true});
  const MutableTensorView total = arrays.read("lse", lse, {.writable = true});
  const Context context = context_of(arrays, nb::none(), nb::none(), to.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::merge_states(from, with, to, total, context);
  }
  arrays.mark_written();
}

}  // namespace

void bind_merge_states(nb::module_& m) {
  m.def("merge_states", &merge_states, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::sig("def merge_states(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any, /) -> None"),
        "`rapt.merge_states` into `out` and, if it is not None, `lse`.");
}

}  // namespace rapt::python
