#include "operations/attention/cuda_gathered.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda/entry.hpp"
#include "cuda/kernels/gathered_lists.hpp"

namespace rapt::cuda {
namespace {

using std::int64_t;

// Bytes of one unit, which strides count: an element, or of i4x2 a pair.
constexpr int64_t unit_bytes(DType type) {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) \
  if (type == DType::name) return (bits + 7) / 8;
#include "rapt/dtypes.def"
  return 0;
}

// Calls f(data, strides, bytes of a unit) for the tensors with a row for each token, or for each key.
template <class Params, class F>
void for_token_rows(Params& p, F f) {
  f(p.q, p.q_stride, unit_bytes(p.q_type)), f(p.out, p.out_stride, unit_bytes(p.out_type));
  if (p.q_scale) f(p.q_scale, p.q_scale_stride, unit_bytes(DType::f32));
  if (p.lse) f(p.lse, p.lse_stride, unit_bytes(DType::f32));
}
template <class Params, class F>
void for_key_rows(Params& p, F f) {
  f(p.k, p.k_stride, unit_bytes(p.kv_type)), f(p.v, p.v_stride, unit_bytes(p.kv_type));
  for (auto* quant : {&p.k_quant, &p.v_quant}) {
    if (quant->scale) f(quant->scale, quant->scale_stride, unit_bytes(DType::f32));
    if (quant->zero) f(quant->zero, quant->zero_stride, unit_bytes(DType::f32));
  }
  if (p.k_tail.size > 0) f(p.k_tail.data, p.k_tail.stride, unit_bytes(p.k_tail.type));
}

// From a token's row to the next one's over all batch entries; empty: there is no such stride.
std::optional<int64_t> token_stride(const Strides& s, int64_t entries, int64_t tokens) {
  if (entries == 1) return s.s;
  if (tokens == 1) return s.b;
  return s.b == tokens * s.s ? std::optional(s.s) : std::nullopt;
}

// By how many rows the keys of a batch entry lie behind those of the one before, the same for all of their tensors;
// empty: there is no such number.
std::optional<int64_t> rows_between_entries(const AttentionParams& p) {
  std::optional<int64_t> rows;
  bool exist = true;
  for_key_rows(p, [&](const void*, const Strides& s, int64_t) {
    if (s.b == 0 && s.s == 0) return;
    const bool is_whole = s.s != 0 && s.b % s.s == 0;
    exist = exist && is_whole && (!rows || *rows == s.b / s.s);
    if (is_whole) rows = s.b / s.s;
  });
  return exist ? std::optional(rows.value_or(0)) : std::nullopt;
}

// Tokens of batch entries [first, first + count), as a call over pages.
AttentionParams part_of(const AttentionParams& p, const GatheredLists& lists, int64_t first, int64_t count) {
  const int64_t index_bytes = p.pages.is_int64 ? 8 : 4;
  AttentionParams part = p;
  const auto move_to = [](auto*& data, int64_t bytes) {
    using Pointer = std::remove_reference_t<decltype(data)>;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
    data = reinterpret_cast<Pointer>(reinterpret_cast<Byte*>(data) + bytes);
  };
  for_token_rows(part, [&](auto*& data, Strides& s, int64_t bytes) {
    move_to(data, first * s.b * bytes);
    s.b = token_stride(s, count, p.tokens).value_or(0);
  });
  for_key_rows(part, [&](auto*& data, Strides& s, int64_t bytes) {
    move_to(data, first * s.b * bytes);
    s.b = s.s;
  });
  const void* rows = lists.rows;
  move_to(rows, first * p.tokens * p.sk * index_bytes);
  part.b = count * p.tokens;
  part.pages = {rows, 1, p.pages.is_int64}, part.pages_stride_b = p.sk;
  part.page_count = p.page_count + (count - 1) * lists.rows_apart;
  part.k_len = {lists.lengths + first * p.tokens, 1, false};
  part.tokens = part.pages_stride_token = 0, part.counts = {};
  return part;
}

// Plans do not know whether indices are i32.
std::size_t bytes_of_rows(const AttentionParams& p) {
  return whole_lines(p.b * p.sk * static_cast<int64_t>(sizeof(int64_t)));
}
std::size_t bytes_of_lengths(const AttentionParams& p) {
  return whole_lines(4 * p.b);
}

}  // namespace

bool lists_can_be_counted(const AttentionParams& p) {
  return p.tokens == 0 || (p.sk <= INT32_MAX && p.b <= kMaxSize / std::max<int64_t>(p.sk, 1));
}

std::size_t lists_workspace(const AttentionParams& p) {
  return p.tokens == 0 ? 0 : bytes_of_rows(p) + bytes_of_lengths(p) + whole_lines(4 * p.b * p.hk * p.group);
}

cudaError_t run_over_lists(const AttentionParams& p, std::byte* workspace, cudaStream_t stream,
                           const std::function<cudaError_t(const AttentionParams&)>& run) {
  constexpr int64_t kMaxRows = INT32_MAX;
  const int64_t entries = p.b / p.tokens;
  const std::optional<int64_t> rows = rows_between_entries(p);
  bool at_once = entries == 1 || (rows && *rows <= (kMaxRows - p.page_count) / (entries - 1));
  AttentionParams call = p;
  if (p.lse && at_once && !token_stride(p.lse_stride, entries, p.tokens)) {
    const int64_t heads = p.hk * p.group;
    call.lse = reinterpret_cast<float*>(workspace + bytes_of_rows(p) + bytes_of_lengths(p));
    call.lse_stride = {heads * p.tokens, 1, heads, 0};
  }
  for_token_rows(call, [&](const void*, const Strides& s, int64_t) {
    at_once = at_once && token_stride(s, entries, p.tokens).has_value();
  });
  if (!at_once) call = p;
  const GatheredLists lists{workspace, reinterpret_cast<std::int32_t*>(workspace + bytes_of_rows(p)),
                            at_once && entries > 1 ? *rows : 0};
  cudaError_t status = launch_gathered_lists(p, lists, stream);
  const int64_t step = at_once ? entries : 1;
  for (int64_t entry = 0; entry < entries && status == cudaSuccess; entry += step)
    status = run(part_of(call, lists, entry, step));
  return status != cudaSuccess || call.lse == p.lse ? status : launch_scatter_lse(p, call.lse, stream);
}

}  // namespace rapt::cuda
