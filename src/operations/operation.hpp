// What an operation says of itself, and what follows for all of them from its argument table.
#pragma once

#include <cstddef>
#include <span>

#include "operations/bound.hpp"
#include "operations/call.hpp"

namespace rapt {

// Specialised in operations/<name>/operation.hpp, by the arguments' type:
//
//     using C                           the C structure
//     static constexpr ArgumentTable arguments
//     static Call bind(args, bound)     the problem and the parameters; throws Error for what the table cannot say
//     static void check_values(args, call)  if what tensors hold may be wrong, once they are known not to overlap
//     static void set_scalars(c, args)  if there are arguments that are no tensors: from C
//     static unsigned features(args)    of the call, one bit or more, if shapes or presence depend on them; else 1
//     static constexpr const char* feature_names[]  then: of the features, for errors, from the lowest bit on
//     static std::vector<Problem> corners(problem)  if its entry depends on sizes: corner_problems() of call.hpp
//     static Device device(args)        if it runs on GPUs: where its tensors are to be; else the CPU
template <class Args>
struct OperationOf;

template <class Args>
constexpr ArgumentList arguments_of() {
  using Op = OperationOf<Args>;
  ArgumentList list{Op::arguments.arguments, {Op::arguments.dimensions.data(), Op::arguments.count}, {}};
  if constexpr (requires { Op::feature_names; }) list.feature_names = Op::feature_names;
  return list;
}
template <class Args>
inline constexpr ArgumentList kArgumentsOf = arguments_of<Args>();

// The number of a dimension of the table, for Bound.
template <class Args>
consteval int dimension_of(std::string_view name) {
  return OperationOf<Args>::arguments.id(name);
}

template <class Args>
inline constexpr bool runs_on_gpus = requires(const Args& args) {
  OperationOf<Args>::device(args);
};

}  // namespace rapt
