// The work in a call that validate() has seen: rapt/cost.hpp without checking again.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "operations/arguments.hpp"
#include "operations/call.hpp"
#include "rapt/cost.hpp"

namespace rapt {

#define RAPT_OPERATION(name, Name, NAME) Cost cost_of(const Name##Args& args, const Call& call);
#include "rapt/operations.def"

// Bytes, of `rows` rows of n elements; of all elements.
double row_bytes(double rows, std::int64_t n, DType dtype);
double whole_bytes(const TensorView& t);
// Of scales or zeros for `rows` rows. Where they broadcast, there are fewer.
double scale_bytes(const TensorView& t, double rows);
// Of all elements of the tensors of a call `but` these. Arrays of integers (lengths, pages, indices) do not count.
double whole_bytes(const ArgumentList& table, const void* args, std::initializer_list<std::string_view> but = {});

}  // namespace rapt
