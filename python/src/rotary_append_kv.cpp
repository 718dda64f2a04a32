#include "rapt/rotary_append_kv.hpp"

#include "bind.hpp"
#include "cache.hpp"
#include "call.hpp"
#include "error.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

// What rapt.rotary_append_kv hands on, in its order; k and v may be None.
struct RotaryArguments {
  nb::handle q, k_new, v_new, k, v, cache_seqlens, cu_seqlens, cos, sin, positions, q_norm, k_norm, norm_eps,
      norm_plus_one, interleaved, rotary_dim, rotary_offset, q_out, k_out;
  CacheArguments cache;
};

// Without the GIL where it works.
void rotary_append_kv(const RotaryArguments& a) {
  Arrays arrays;
  RotaryAppendKvArgs args;
  const ReadOptions floats{.elements = Elements::floats}, integers{.elements = Elements::integers};
  args.append.k_new = arrays.read("k_new", a.k_new, floats), args.append.v_new = arrays.read("v_new", a.v_new, floats);
  if (a.k.is_none() && !a.cache.kv_dtype.is_none())
    refuse_value("kv_dtype", shown(a.cache.kv_dtype), "None without a cache");
  args.append.cache = cache_of(arrays, a.k, a.v, a.cache);
  args.append.seqlens = arrays.read("cache_seqlens", a.cache_seqlens, integers);
  args.append.cu_seqlens = arrays.read("cu_seqlens", a.cu_seqlens, integers);
  if (!args.append.cu_seqlens)
    check_pages(args.append.cache.kind, args.append.cache.k, args.append.seqlens, args.append.k_new);
  args.q = arrays.read("q", a.q, floats);
  args.q_out = arrays.read("q_out", a.q_out, {.writable = true, .elements = Elements::floats});
  args.k_out = arrays.read("k_out", a.k_out, {.writable = true, .elements = Elements::floats});
  args.cos = arrays.read("cos", a.cos, floats), args.sin = arrays.read("sin", a.sin, floats);
  args.positions = arrays.read("positions", a.positions, integers);
  args.q_norm = arrays.read("q_norm", a.q_norm, floats), args.k_norm = arrays.read("k_norm", a.k_norm, floats);
  const std::optional<float> norm_eps = real("norm_eps", a.norm_eps);
  if (!norm_eps) refuse_type("norm_eps", "None", "a number");
  args.norm_eps = *norm_eps;
  args.norm_plus_one = truth("norm_plus_one", a.norm_plus_one), args.interleaved = truth("interleaved", a.interleaved);
  if (!a.rotary_dim.is_none()) {
    args.rotary_dim = integer("rotary_dim", a.rotary_dim, "None or an even number");
    // In C++ 0 stands for the width of cos, as None does here.
    if (args.rotary_dim == 0) refuse_value("rotary_dim", "0", "None or an even number from 2");
  }
  args.rotary_offset = integer("rotary_offset", a.rotary_offset, "0 or a channel");
  const Context context = context_of(arrays, nb::none(), nb::none(), args.append.k_new.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::rotary_append_kv(args, context);
  }
  arrays.mark_written();
}

}  // namespace

void bind_rotary_append_kv(nb::module_& m) {
  m.def(
      "rotary_append_kv", [](const nb::args& given) { rotary_append_kv(arguments_of<RotaryArguments>(given)); },
      nb::sig("def rotary_append_kv(*arguments: Any) -> None"),
      "`rapt.rotary_append_kv`: all its arguments and results, those of cache_arguments() last.");
}

}  // namespace rapt::python
