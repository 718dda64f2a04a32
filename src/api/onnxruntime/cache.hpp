// The cache of a node: the keys and values before a call (`past`) and after it (`present`).
#pragma once

#include <cstdint>
#include <span>

#include "api/onnxruntime/operator.hpp"

namespace rapt::onnx {

/// Makes `present` [b, hk, rows, d] begin with the first lengths[i] rows of each sequence of `past` [b, hk, rows', d],
/// for keys and for values. Does nothing if both are the same memory, in which rows stay where they are. Otherwise the
/// rows of `present` past those and the `added` ones become 0. An absent `past` has no rows. Throws Error if `past` has
/// another shape or fewer rows, or if keys and values differ in rows.
void carry_over(const Call& call, const Input& past_k, const Input& past_v, const KvCache& present,
                std::span<const std::int32_t> lengths, std::int64_t added);

/// Makes `kv` the keys and values of `past` and of `kv`, in the node's outputs, and returns the rows of `past`. Leaves
/// kv as it is if the node has no cache.
std::int64_t append(Call& call, const Input& past_k, const Input& past_v, KvSource& kv, std::size_t present_key,
                    std::size_t present_value);

}  // namespace rapt::onnx
