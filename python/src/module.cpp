// rapt._core: what python/rapt is made of. Its types and docstrings are in _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "cache.hpp"
#include "call.hpp"
#include "context.hpp"
#include "error.hpp"

namespace rapt::python {
namespace {

std::vector<std::pair<std::string, std::string>> candidates(const Plan& plan) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const Candidate& c : plan.candidates()) pairs.emplace_back(c.entry, c.refusal);
  return pairs;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa isa : usable_isas()) names.emplace_back(to_string(isa));
  return names;
}

nb::list entry_list() {
  nb::list list;
  for (const EntryInfo& info : entries()) {
    nb::dict entry;
    entry["name"] = info.name;
    entry["backend"] = info.backend;
    entry["unusable"] = info.unusable;
    entry["opt_in"] = info.opt_in;
    list.append(entry);
  }
  return list;
}

}  // namespace

NB_MODULE(_core, m) {
  register_errors();
  m.def("adopt_torch", &adopt_torch);
  m.def("version", &version);
  m.def("isas", &isa_names);
  m.def("entries", &entry_list);
  m.def("concurrency", [] { return tbb_executor()->concurrency(); });
  m.def("pool", [](bool torch) { return std::string(executor_of(torch ? Pool::torch : Pool::tbb)->name()); });
  m.def("sdpa", &sdpa, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("append_kv", &append_kv);
  m.def("merge_states", &merge_states, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());

  nb::class_<Plan>(m, "Explanation")
      .def_prop_ro("entry", &Plan::entry)
      .def_prop_ro("backend", &Plan::backend)
      .def_prop_ro("problem", [](const Plan& plan) { return plan.problem().to_string(); })
      .def_prop_ro("threads", &Plan::threads)
      .def_prop_ro("executor", &Plan::executor)
      .def_prop_ro("work_items", &Plan::work_items)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_prop_ro("candidates", &candidates)
      .def("__str__", &Plan::explain)
      .def("__repr__", [](const Plan& plan) { return "<rapt.Explanation of " + plan.problem().to_string() + ">"; });

  nb::class_<Call>(m, "Call").def(nb::init<const nb::dict&>()).def("run", &Call::run).def("plan", &Call::plan);
}

}  // namespace rapt::python
