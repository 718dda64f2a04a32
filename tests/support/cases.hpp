// The tensors of a problem of any operation, and the bits of its results.
#pragma once

#include <cstddef>
#include <vector>

#include "rapt/rapt.hpp"
#include "support/all_cases.hpp"

namespace rapt::testing {

/// Carries out any operation.
#define RAPT_OPERATION(name, Name, NAME)                             \
  inline void call(const Name##Args& args, const Context& context) { \
    rapt::name(args, context);                                       \
  }
#include "rapt/operations.def"

/// Every byte of the outputs.
template <class Inputs>
std::vector<std::byte> bits_of(Inputs& inputs) {
  std::vector<std::byte> bits;
  for (const Tensor* tensor : inputs.outputs())
    bits.insert(bits.end(), tensor->buffer().data(), tensor->buffer().data() + tensor->buffer().size());
  return bits;
}

/// Of a call, which writes to poisoned outputs.
template <class Inputs>
std::vector<std::byte> bits_on(Inputs& inputs, const Context& context) {
  inputs.clear();
  inputs.run(context);
  return bits_of(inputs);
}

}  // namespace rapt::testing
