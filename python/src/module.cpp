// rapt._core: what python/rapt is made of. `tools/dev stubs` writes its signatures and docstrings to _core.pyi.
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
#include "tools/command.hpp"

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
    entry["min_head_dim"] = info.min_head_dim;
    entry["max_head_dim"] = info.max_head_dim;
    entry["max_value_head_dim"] = info.max_value_head_dim;
    entry["unusable"] = info.unusable;
    entry["opt_in"] = info.opt_in;
    list.append(entry);
  }
  return list;
}

nb::list backend_list() {
  nb::list list;
  for (const BackendInfo& info : backends()) {
    nb::dict backend;
    backend["name"] = info.name;
    backend["library"] = info.library;
    backend["version"] = info.version;
    backend["missing"] = info.missing;
    list.append(backend);
  }
  return list;
}

/// `argv` are bytes, as the system has them: they need not be UTF-8.
int command(const std::vector<nb::bytes>& argv, const nb::bytes& data_dir) {
  std::vector<const char*> words;
  for (const nb::bytes& word : argv) words.push_back(word.c_str());
  const nb::gil_scoped_release released;
  return tools::run_command(words, data_dir.c_str());
}

// What PyTorch's functions are replaced by: everything that these are given, and NotImplemented where they leave it.
void bind_torch(nb::module_& m) {
  const auto any = nb::arg().none();
  m.def("sdpa", &sdpa, any, any, any, any, nb::arg(), any, any, any, any, any,
        nb::sig("def sdpa(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None, "
                "out: Any, lse: Any, dropout_p: float, seed: int | None, /) -> None"),
        "PyTorch's scaled_dot_product_attention into `out`, and lse into `lse` if that is not None; the caller has "
        "checked shapes and dtypes.");
  m.def("eager_sdpa", &eager_sdpa, any, any, any, any, any, any, any, any,
        nb::sig("def eager_sdpa(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, "
                "scale: Any, enable_gqa: Any, /) -> Any"),
        "PyTorch's scaled_dot_product_attention where nobody but the kernel has a part in it: no mode, transform, "
        "tracer, autocast, profiler or dropout, and plain tensors that rapt has a kernel for. Else NotImplemented, "
        "and nothing done.");
  m.def("eager_sdpa_gradients", &eager_sdpa_gradients, any, any, any, any, any, any, any, any, any, nb::arg(), any,
        nb::arg(), any, nb::arg(),
        nb::sig("def eager_sdpa_gradients(grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, "
                "attn_mask: Any, out: Any, lse: Any, seed: Any, is_causal: bool, scale: float | None, "
                "enable_gqa: bool, dropout_p: float, wanted: list[bool], /) -> Any"),
        "Its gradients on the CPU of plain tensors of four dimensions, with nothing left to sum: those of query, key, "
        "value and attn_mask, None for those that are not wanted. Else NotImplemented, and nothing done.");
  const auto def_dispatched = [&](const char* name, bool with_lse, const char* signature, const char* doc) {
    m.def(
        name,
        [with_lse](nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle is_causal,
                   nb::handle scale, nb::handle enable_gqa, nb::handle dropout_p, nb::handle seed) {
          return dispatched_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, seed, with_lse);
        },
        nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("attn_mask").none(), nb::arg("is_causal"),
        nb::arg("scale").none(), nb::arg("enable_gqa"), nb::arg("dropout_p") = 0.0, nb::arg("seed").none() = nb::none(),
        nb::sig(signature), doc);
  };
  def_dispatched("dispatched_sdpa", false,
                 "def dispatched_sdpa(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, "
                 "scale: float | None, enable_gqa: bool, dropout_p: float = ..., seed: Any = ...) -> Any",
                 "The operator rapt::scaled_dot_product_attention below autograd, of plain tensors without dropout. "
                 "Else NotImplemented, and nothing done.");
  def_dispatched("dispatched_sdpa_with_lse", true,
                 "def dispatched_sdpa_with_lse(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, "
                 "scale: float | None, enable_gqa: bool, dropout_p: float = ..., seed: Any = ...) -> Any",
                 "The same of rapt::scaled_dot_product_attention_with_lse.");
  m.def("dispatched_sdpa_gradients", &dispatched_sdpa_gradients, any, any, any, any, any, any, any, any, any, nb::arg(),
        any, nb::arg(), any, nb::arg(),
        nb::sig("def dispatched_sdpa_gradients(grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, "
                "attn_mask: Any, out: Any, lse: Any, seed: Any, is_causal: bool, scale: float | None, "
                "enable_gqa: bool, dropout_p: float, wanted: list[bool], /) -> Any"),
        "The same of rapt::scaled_dot_product_attention_backward.");
  m.def("dispatched", &dispatched,
        nb::sig("def dispatched(function: str, otherwise: Callable[..., Any], /) -> Callable[..., Any]"),
        "A kernel for PyTorch's dispatcher: what this module's `function` returns, or otherwise(*inputs) if that is "
        "NotImplemented.");
  m.def("dispatched_above_autograd", &dispatched_above_autograd,
        nb::sig("def dispatched_above_autograd(function: str, otherwise: Callable[..., Any], plain: int, /) -> "
                "Callable[..., Any]"),
        "The same for a key of autograd, called with keyset: otherwise(keyset, *inputs) also where the raw keyset is "
        "not `plain`, and where a gradient is to be recorded.");
  m.def("eager_attention", &eager_attention, any, any, any, any, any, any, nb::arg(), any, any, any, any,
        nb::sig("def eager_attention(query: Any, key: Any, value: Any, attention_mask: Any, position_bias: Any, "
                "sinks: Any, causal: bool, sliding_window: Any, softcap: Any, scaling: Any, dropout: Any, /) -> Any"),
        "The same of `rapt.transformers`: [b, h, n, d] to [b, n, h, dv], rows and keys ending together.");
  m.def("read_torch_by_table", &read_torch_by_table, nb::sig("def read_torch_by_table(wanted: bool, /) -> None"),
        "Whether PyTorch's tensors are read through its table of C functions, where it has one (2.10 and newer), or by "
        "their attributes. For tests.");
}

}  // namespace

NB_MODULE(_core, m) {
  register_errors();
  nb::class_<Plan>(m, "Explanation",
                   "What a call would do: the chosen kernel and the reasons. `str()` of it is a readable description.")
      .def_prop_ro("entry", &Plan::entry,
                   "The name of the kernel that would run: \"attention_prefill.f32.avx2.q24k128\".")
      .def_prop_ro("backend", &Plan::backend, "The device of the kernel, \"cpu\" or \"cuda\".")
      .def_prop_ro(
          "problem", [](const Plan& plan) { return to_string(plan.problem()); },
          "The problem of the call on one line, as the `rapt` command takes it.")
      .def_prop_ro("threads", &Plan::threads, "The number of threads of the call.")
      .def_prop_ro(
          "executor", &Plan::executor,
          "The executor of these threads, for calls on the CPU: \"tbb\", \"openmp (libgomp.so.1)\" or \"serial\".")
      .def_prop_ro("work_items", &Plan::work_items, "The number of work items that the threads share.")
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes,
                   "Bytes of memory that the call needs in addition to its tensors.")
      .def_prop_ro("candidates", &candidates,
                   "All kernels, best first, each with the reason why it was passed over. The reason is \"\" for the "
                   "chosen kernel and for usable ones later in the order.")
      .def("__str__", &Plan::explain)
      .def("__repr__", [](const Plan& plan) { return "<rapt.Explanation of " + to_string(plan.problem()) + ">"; });

#define RAPT_OPERATION(name, Name, NAME) bind_##name(m);
#include "rapt/operations.def"
  m.def(
      "explain", [](const nb::args& given) { return explain(arguments_of<AttentionArguments>(given)); },
      nb::sig("def explain(*arguments: Any) -> Explanation"), "`rapt.explain`: all its arguments, in its order.");
  m.def(
      "parse_problem", [](std::string_view problem) { return to_string(parse_problem(problem)); },
      nb::sig("def parse_problem(problem: str, /) -> str"),
      "A problem's text, of any operation, as rapt writes it. Raises ValueError that names the word.");
  m.def("explain_problem", &explain_problem, nb::arg(), nb::arg().none(), nb::arg().none(),
        nb::sig("def explain_problem(problem: str, threads: int | None, isa: str | None, /) -> Explanation"),
        "What would run for a problem's text, of any operation. Raises ValueError that names the word.");
  m.def("dropout_mask", &write_dropout_mask, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(),
        nb::sig("def dropout_mask(p: Any, seed: Any, offset: Any, mask: Any, /) -> None"),
        "`rapt.dropout_mask` into `mask`.");
  bind_torch(m);

  m.def("version", &version);
  m.def("isas", &isa_names);
  m.def("entries", &entry_list, nb::sig("def entries() -> list[Entry]"));
  m.def("backends", &backend_list, nb::sig("def backends() -> list[Backend]"));
  m.def("set_guards", &set_guards, nb::arg().none(), nb::sig("def set_guards(words: str | None, /) -> None"),
        "The guards of calls from now on, \"nan,shadow=16,tolerance=0.5,determinism\"; None: the environment's.");
  m.def("guards", &guards, "The words of the guards that watch now; \"\" for none.");
  m.def("command", &command, nb::sig("def command(argv: list[bytes], data_dir: bytes, /) -> int"),
        "The `rapt` command. Returns the exit code.");
  m.def("concurrency", [] { return tbb_executor()->concurrency(); });
  m.def(
      "pool", [](bool torch) { return std::string(executor_of(torch ? Pool::torch : Pool::tbb)->name()); },
      nb::sig("def pool(torch: bool, /) -> str"),
      "Name of the executor of calls with PyTorch's tensors, or of those without.");
}

}  // namespace rapt::python
