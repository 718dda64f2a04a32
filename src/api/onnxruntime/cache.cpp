#include "api/onnxruntime/cache.hpp"

#include <algorithm>
#include <cstring>

namespace rapt::onnx {
namespace {

// An empty past made inside the model may have the address of present.
bool in_place(const Input& past, const MutableTensorView& present) {
  return past && past.shape[2] > 0 && past.data == present.data;
}

void check(const Input& past, const char* name, const MutableTensorView& present, std::int64_t rows_needed) {
  if (!past) {
    if (rows_needed > 0) throw Error(name, "nothing", std::to_string(rows_needed) + " rows");
    return;
  }
  need_rank(past, name, {4});
  for (std::size_t i : {0u, 1u, 3u})
    if (past.shape[i] != present.shape[i])
      throw Error(name, "dimension " + std::to_string(i) + " of " + std::to_string(past.shape[i]),
                  std::to_string(present.shape[i]));
  if (past.shape[2] < rows_needed)
    throw Error(name, std::to_string(past.shape[2]) + " rows", "at least " + std::to_string(rows_needed));
  const bool one_block = present.shape[0] * present.shape[1] == 1;
  if (in_place(past, present) && past.shape[2] != present.shape[2] && !one_block)
    throw Error(name, "the memory of its output", "another memory, as the heads lie apart in both");
}

}  // namespace

void carry_over(const Call& call, const Input& past_k, const Input& past_v, const KvCache& present,
                std::span<const std::int32_t> lengths, std::int64_t added) {
  const std::int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  check(past_k, "past_key", present.k, longest);
  check(past_v, "past_value", present.v, longest);
  if (past_k.shape[2] != past_v.shape[2])
    throw Error("past_value", std::to_string(past_v.shape[2]) + " rows",
                "as many as past_key: " + std::to_string(past_k.shape[2]));

  const std::int64_t heads = present.k.shape[1];
  const auto blocks = static_cast<std::size_t>(present.k.shape[0] * heads);
  const auto carry = [&](const Input& past, const MutableTensorView& now, std::size_t block) {
    if (in_place(past, now)) return;
    const std::size_t row = static_cast<std::size_t>(now.shape[3]) * size_of(now.dtype);
    const auto rows = static_cast<std::size_t>(now.shape[2]);
    const auto kept = static_cast<std::size_t>(lengths[block / static_cast<std::size_t>(heads)]);
    std::byte* const to = static_cast<std::byte*>(now.data) + block * rows * row;
    if (kept > 0) {
      const auto* from =
          static_cast<const std::byte*>(past.data) + block * static_cast<std::size_t>(past.shape[2]) * row;
      std::memcpy(to, from, kept * row);
    }
    const std::size_t end = std::min(rows, kept + static_cast<std::size_t>(added));
    std::memset(to + end * row, 0, (rows - end) * row);
  };
  const auto bytes_of = [&](const MutableTensorView& now) {
    return blocks * static_cast<std::size_t>(longest * now.shape[3]) * size_of(now.dtype);
  };
  call.for_each(2 * blocks, bytes_of(present.k) + bytes_of(present.v), [&](std::size_t i) {
    if (i < blocks) carry(past_k, present.k, i);
    else carry(past_v, present.v, i - blocks);
  });
}

std::int64_t append(Call& call, const Input& past_k, const Input& past_v, KvSource& kv, std::size_t present_key,
                    std::size_t present_value) {
  const std::int64_t b = kv.k.shape[0], heads = kv.k.shape[1], added = kv.k.shape[2];
  if (kv.v.shape[2] != added)
    throw Error("value", std::to_string(kv.v.shape[2]) + " rows", "as many as key: " + std::to_string(added));
  const std::int64_t past = past_k ? past_k.shape[2] : 0;
  const auto shape = [&](const TensorView& rows) { return std::array{b, heads, past + added, rows.shape[3]}; };
  if (!past_k && !past_v && !call.output(present_key, shape(kv.k)).data &&
      !call.output(present_value, shape(kv.v)).data)
    return 0;
  const KvCache cache = KvCache::strided(call.output_or_scratch(present_key, kv.k.dtype, shape(kv.k)),
                                         call.output_or_scratch(present_value, kv.v.dtype, shape(kv.v)));
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(b), static_cast<std::int32_t>(past));
  carry_over(call, past_k, past_v, cache, lengths, added);
  if (b > 0 && added > 0) call.append_kv({kv.k, kv.v, cache, TensorView(lengths.data(), {b}), {}});
  kv = KvSource::strided(cache.k, cache.v);
  return past;
}

}  // namespace rapt::onnx
