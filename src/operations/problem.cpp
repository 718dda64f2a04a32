// What holds of calls and problems of any operation.
#include "rapt/problem.hpp"

#include <cstddef>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "core/float_environment.hpp"
#include "operations/all.hpp"

namespace rapt {
namespace {

// Parses as operation kIndex or a later one.
template <std::size_t kIndex = 0>
Problem parse_as(std::string_view name, std::string_view text, const std::string& names = {}) {
  if constexpr (kIndex == std::variant_size_v<Problem>) {
    throw Error("problem", "\"" + std::string(name) + "\"", "the operation first:" + names);
  } else {
    const std::string_view operation = to_string(static_cast<Operation>(kIndex));
    if (name == operation) return std::variant_alternative_t<kIndex, Problem>::parse(text);
    const char* before = kIndex == 0 ? " " : kIndex + 1 < std::variant_size_v<Problem> ? ", " : " or ";
    return parse_as<kIndex + 1>(name, text, names + before + std::string(operation));
  }
}

template <class Args>
constexpr bool takes_scalars = requires(const typename OperationOf<Args>::C& c, Args& args) {
  OperationOf<Args>::set_scalars(c, args);
};

template <class Args>
Call validate_by_table(const Args& args, std::span<const std::byte> workspace) {
  using Op = OperationOf<Args>;
  unsigned features = 1;
  Device device{};
  if constexpr (requires { Op::features(args); }) features = Op::features(args);
  if constexpr (runs_on_gpus<Args>) device = Op::device(args);
  Bound bound(kArgumentsOf<Args>, &args, features, device);
  bound.check();
  // Default scales are computed in floating point.
  [[maybe_unused]] const std::conditional_t<takes_scalars<Args>, FloatEnvironment, std::monostate> environment{};
  Call call = Op::bind(args, bound);
  bound.check_overlaps();
  bound.check_apart(workspace);
  if constexpr (requires { Op::check_values(args, call); }) Op::check_values(args, call);
  return call;
}

template <class Args, class P>
std::vector<Problem> corners_of(const P& largest) {
  if constexpr (requires { OperationOf<Args>::corners(largest); }) return OperationOf<Args>::corners(largest);
  else return {largest};
}

}  // namespace

#define RAPT_OPERATION(name, Name, NAME)                                        \
  Call validate(const Name##Args& args, std::span<const std::byte> workspace) { \
    return validate_by_table(args, workspace);                                  \
  }                                                                             \
  Name##Problem Name##Problem::of(const Name##Args& args) {                     \
    return std::get<Name##Problem>(validate(args).problem);                     \
  }
#include "rapt/operations.def"

Problem parse_problem(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\n");
  const std::string_view rest = begin == std::string_view::npos ? std::string_view() : text.substr(begin);
  return parse_as(rest.substr(0, rest.find_first_of(" \t\n")), text);
}

std::string to_string(const Problem& problem) {
  return std::visit([](const auto& p) { return p.to_string(); }, problem);
}

const AttentionProblem* attention_of(const Problem& problem) {
  if (const auto* p = std::get_if<AttentionBackwardProblem>(&problem)) return p;
  return std::get_if<AttentionProblem>(&problem);
}

DeviceType device_of(const Problem& problem) {
  return std::visit(
      [](const auto& p) {
        if constexpr (requires { p.device; }) return p.device;
        else return DeviceType::cpu;
      },
      problem);
}

bool is_planned(const Problem& call, const Problem& plan) {
  const AttentionProblem* const attention = attention_of(plan);
  const bool head_scales = attention && attention->head_scales;
  const auto simplify = [&]<class P>(P& p) {
    if constexpr (std::is_base_of_v<AttentionProblem, P>) {
      p.layout = AttentionProblem::Layout::bhsd, p.latent = false, p.head_scales = p.head_scales && head_scales;
      for (std::uint8_t* dims : {&p.bias, &p.mask})
        if (*dims != AttentionProblem::kNone) *dims = 0;
    }
  };
  Problem a = call, b = plan;
  std::visit(simplify, a), std::visit(simplify, b);
  return a == b;
}

std::vector<Problem> corner_problems(const Problem& largest) {
#define RAPT_OPERATION(name, Name, NAME) \
  if (const auto* p = std::get_if<Name##Problem>(&largest)) return corners_of<Name##Args>(*p);
#include "rapt/operations.def"
  return {};
}

}  // namespace rapt
