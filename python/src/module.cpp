// rapt._core: what python/rapt is made of. Its types and docstrings are in _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "call.hpp"
#include "context.hpp"
#include "eager.hpp"
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
    entry["operation"] = std::string(to_string(info.operation));
    entry["phase"] = std::string(to_string(info.phase));
    entry["arithmetic"] = info.arithmetic;
    entry["isa"] = info.isa;
    nb::list dtypes;
    for (const DType dtype : info.dtypes) dtypes.append(std::string(to_string(dtype)));
    entry["dtypes"] = dtypes;
    entry["min_head_size"] = info.min_head_size;
    entry["max_head_size"] = info.max_head_size;
    entry["max_value_head_size"] = info.max_value_head_size;
    entry["unusable"] = info.unusable;
    entry["opt_in"] = info.opt_in;
    list.append(entry);
  }
  return list;
}

}  // namespace

NB_MODULE(_core, m) {
  register_errors();
  m.def("read_torch_by_table", &read_torch_by_table);
  m.def("version", &version);
  m.def("isas", &isa_names);
  m.def("entries", &entry_list);
  m.def("set_guards", &set_guards, nb::arg().none());
  m.def("guards", &guards);
  m.def("concurrency", [] { return tbb_executor()->concurrency(); });
  m.def("pool", [](bool torch) { return std::string(executor_of(torch ? Pool::torch : Pool::tbb)->name()); });
  const auto any = nb::arg().none();
  m.def("sdpa", &sdpa, any, any, any, any, nb::arg(), any, any, any, any, any);
  m.def("eager_sdpa", &eager_sdpa, any, any, any, any, any, any, any, any);
  m.def("eager_sdpa_gradients", &eager_sdpa_gradients, any, any, any, any, any, any, any, any, any, nb::arg(), any,
        nb::arg(), any, nb::arg());
  const auto no_dropout = nb::arg("dropout_p") = 0.0;
  const auto no_seed = nb::arg("seed").none() = nb::none();
  for (const bool with_lse : {false, true})
    m.def(
        with_lse ? "dispatched_sdpa_with_lse" : "dispatched_sdpa",
        [with_lse](nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle is_causal,
                   nb::handle scale, nb::handle enable_gqa, nb::handle dropout_p, nb::handle seed) {
          return dispatched_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, seed, with_lse);
        },
        nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("attn_mask").none(), nb::arg("is_causal"),
        nb::arg("scale").none(), nb::arg("enable_gqa"), no_dropout, no_seed);
  m.def("dispatched_sdpa_gradients", &dispatched_sdpa_gradients, any, any, any, any, any, any, any, any, any, nb::arg(),
        any, nb::arg(), any, nb::arg());
  m.def("dispatched", &dispatched);
  m.def("dispatched_above_autograd", &dispatched_above_autograd);
  m.def("eager_attention", &eager_attention, any, any, any, any, any, any, nb::arg(), any, any, any, any);
#define RAPT_OPERATION(name, Name, NAME) bind_##name(m);
#include "rapt/operations.def"
  m.def("explain", [](const nb::args& given) { return explain(arguments_of<AttentionArguments>(given)); });
  m.def("parse_problem", [](std::string_view problem) { return to_string(parse_problem(problem)); });
  m.def("explain_problem", &explain_problem, nb::arg(), any, any);
  m.def("dropout_mask", &write_dropout_mask, any, any, any, nb::arg());

  nb::class_<Plan>(m, "Explanation")
      .def_prop_ro("entry", &Plan::entry)
      .def_prop_ro("backend", &Plan::backend)
      .def_prop_ro("problem", [](const Plan& plan) { return to_string(plan.problem()); })
      .def_prop_ro("threads", &Plan::threads)
      .def_prop_ro("executor", &Plan::executor)
      .def_prop_ro("work_items", &Plan::work_items)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_prop_ro("candidates", &candidates)
      .def("__str__", &Plan::explain)
      .def("__repr__", [](const Plan& plan) { return "<rapt.Explanation of " + to_string(plan.problem()) + ">"; });
}

}  // namespace rapt::python
