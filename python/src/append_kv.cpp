#include "rapt/append_kv.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.hpp"
#include "cache.hpp"
#include "call.hpp"

namespace rapt::python {
namespace {

// What rapt.append_kv hands on, in its order.
struct AppendArguments {
  nb::handle k_new, v_new, k, v, cache_seqlens, cu_seqlens;
  CacheArguments cache;
};

// Without the GIL where it works.
void append_kv(const AppendArguments& a) {
  Arrays arrays;
  AppendKvArgs args;
  args.k_new = arrays.read("k_new", a.k_new), args.v_new = arrays.read("v_new", a.v_new);
  args.cache = cache_of(arrays, a.k, a.v, a.cache);
  args.seqlens = arrays.read("cache_seqlens", a.cache_seqlens, {.elements = Elements::integers});
  args.cu_seqlens = arrays.read("cu_seqlens", a.cu_seqlens, {.elements = Elements::integers});
  if (!args.cu_seqlens) check_pages(args.cache.kind, args.cache.k, args.seqlens, args.k_new);
  const Context context = context_of(arrays, nb::none(), nb::none(), args.cache.k.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::append_kv(args, context);
  }
  arrays.mark_written();
}

}  // namespace

void bind_append_kv(nb::module_& m) {
  m.def(
      "append_kv", [](const nb::args& given) { append_kv(arguments_of<AppendArguments>(given)); },
      nb::sig("def append_kv(*arguments: Any) -> None"),
      "`rapt.append_kv`: all its arguments, those of cache_arguments() last.");
  m.def(
      "cache_arguments",
      [] {
        std::vector<std::string> names(CacheLayout::kNames.begin(), CacheLayout::kNames.end());
        names.insert(names.end(), CacheArguments::kNames.begin(), CacheArguments::kNames.end());
        return names;
      },
      "The names of the arguments that say how a cache's keys lie and what they are coded in, in order.");
}

}  // namespace rapt::python
