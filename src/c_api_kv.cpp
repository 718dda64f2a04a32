// The C interface of KV caches and merging.
#include <string>
#include <vector>

#include "c_api.hpp"

namespace {

using namespace rapt::c;

rapt::AppendArgs to_args(const rapt_append_args* given) {
  const rapt_append_args a = known_part(deref(given, "args"), "rapt_append_args");
  rapt::AppendArgs args;
  args.k_new = to_view(a.k_new, "k_new");
  args.v_new = to_view(a.v_new, "v_new");
  args.seqlens = to_view(a.seqlens, "seqlens");
  args.cu_seqlens = to_view(a.cu_seqlens, "cu_seqlens");
  rapt::KvCache& cache = args.cache;
  cache.kind = to_enum(a.kv_kind, rapt::KvSource::Kind::ring, "cache.kind");
  cache.k = to_view(a.k, "cache.k");
  cache.v = to_view(a.v, "cache.v");
  cache.block_table = to_view(a.block_table, "cache.block_table");
  cache.k_scale = to_view(a.k_scale, "cache.k_scale");
  cache.v_scale = to_view(a.v_scale, "cache.v_scale");
  cache.k_zero = to_view(a.k_zero, "cache.k_zero");
  cache.v_zero = to_view(a.v_zero, "cache.v_zero");
  return args;
}

std::vector<rapt::TensorView> to_views(const rapt_tensor* tensors, std::size_t count, const std::string& name) {
  std::vector<rapt::TensorView> views;
  for (std::size_t i = 0; i < count; ++i) views.push_back(to_view(tensors[i], name + "[" + std::to_string(i) + "]"));
  return views;
}

}  // namespace

rapt_status rapt_append_kv(const rapt_append_args* args) noexcept {
  return guard([&] { rapt::append_kv(to_args(args)); });
}

rapt_status rapt_merge_states(const rapt_tensor* outs, const rapt_tensor* lses, size_t count, const rapt_tensor* out,
                              const rapt_tensor* lse) noexcept {
  return guard([&] {
    if (count) deref(outs, "outs"), deref(lses, "lses");
    rapt::merge_states(to_views(outs, count, "outs"), to_views(lses, count, "lses"), to_view(deref(out, "out"), "out"),
                       lse ? to_view(*lse, "lse") : rapt::MutableTensorView());
  });
}
