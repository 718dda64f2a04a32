// Operations and plans in the C interface: one way for all, over their argument tables.
#include "api/c/c_api.hpp"
#include "operations/all.hpp"

namespace {

using namespace rapt;
using namespace rapt::c;

// Arguments as C++ has them, and the lists of tensors that they point to.
template <class Args>
struct Given {
  Args args;
  std::vector<std::vector<TensorView>> lists;
};

// Fills the tensors of a table in; those of a forward's are found in `forward`.
void read_tensors(const ArgumentList& table, const void* c_args, const void* forward, void* args,
                  std::vector<std::vector<TensorView>>& lists) {
  for (const Argument& a : table.arguments) {
    if (a.step) continue;
    const void* const from = a.is_of_forward ? forward : c_args;
    const rapt_tensor* const given = a.of_c(from);
    if (!a.count) {
      const TensorView view = to_view(*given, a.name);
      if (view) a.set(args, {&view, 1});
      continue;
    }
    std::vector<TensorView>& list = lists.emplace_back();
    const std::size_t n = a.count_of_c(from);
    if (n > 0) non_null(given, a.name);
    for (std::size_t i = 0; i < n; ++i) list.push_back(to_view(given[i], a.name_of(i)));
    a.set(args, list);
  }
}

// The C structure that `given` points to, as this version has it.
template <class C>
C c_args_of(const void* given, const char* argument, Operation operation) {
  return to_this_version(non_null(static_cast<const C*>(given), argument),
                         "rapt_" + std::string(to_string(operation)) + "_args");
}

template <class Args>
Given<Args> read(Operation operation, const void* c_args) {
  using Op = OperationOf<Args>;
  auto args = c_args_of<typename Op::C>(c_args, "args", operation);
  Given<Args> given{};
  if constexpr (requires { typename Op::Forward; }) {
    using Forward = typename OperationOf<typename Op::Forward>::C;
    const auto forward = c_args_of<Forward>(args.forward, "forward", Op::kForward);
    args.forward = &forward;
    read_tensors(kArgumentsOf<Args>, &args, &forward, &given.args, given.lists);
    Op::set_scalars(args, given.args);
  } else {
    read_tensors(kArgumentsOf<Args>, &args, nullptr, &given.args, given.lists);
    if constexpr (requires { Op::set_scalars(args, given.args); }) Op::set_scalars(args, given.args);
  }
  return given;
}

#define RAPT_OPERATION(name, Name, NAME)                                                     \
  void run(const Name##Args& args, const Context& context, std::span<std::byte> workspace) { \
    ::rapt::name(args, context, workspace);                                                  \
  }
#include "rapt/operations.def"

// Calls use(args) with the arguments of an operation.
template <class Use>
void with_args(std::int32_t operation, const void* c_args, const Use& use) {
  switch (operation) {
#define RAPT_OPERATION(name, Name, NAME) \
  case RAPT_OPERATION_##NAME:            \
    return use(read<Name##Args>(Operation::name, c_args).args);
#include "rapt/operations.def"
  }
  throw Error("operation", std::to_string(operation), "one of rapt_operation");
}

}  // namespace

#define RAPT_OPERATION(name, Name, NAME) static_assert(RAPT_OPERATION_##NAME == int(rapt::Operation::name));
#include "rapt/operations.def"

rapt_status rapt_run(std::int32_t operation, const void* args, const rapt_context* context, void* workspace,
                     size_t workspace_bytes) noexcept {
  return guard([&] {
    with_args(operation, args,
              [&](const auto& given) { run(given, to_context(context), to_workspace(workspace, workspace_bytes)); });
  });
}

rapt_status rapt_plan_create(std::int32_t operation, const void* args, const rapt_context* context,
                             rapt_plan** plan) noexcept {
  return guard([&] {
    non_null(plan, "plan") = nullptr;
    with_args(operation, args, [&](const auto& given) { *plan = new rapt_plan(Plan(given, to_context(context))); });
  });
}

rapt_status rapt_plan_run(const rapt_plan* plan, std::int32_t operation, const void* args, void* workspace,
                          size_t workspace_bytes) noexcept {
  return guard([&] {
    const Plan& value = non_null(plan, "plan").value;
    with_args(operation, args, [&](const auto& given) { value.run(given, to_workspace(workspace, workspace_bytes)); });
  });
}

rapt_status rapt_problem_text(std::int32_t operation, const void* args, char* buffer, size_t capacity,
                              size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    with_args(operation, args,
              [&](const auto& given) { copy_text(to_string(validate(given).problem), buffer, capacity, size); });
  });
}

rapt_status rapt_dropout_mask(float dropout, uint64_t seed, uint64_t offset, const rapt_tensor* mask) noexcept {
  return guard([&] { dropout_mask({dropout, seed, offset}, to_view(non_null(mask, "mask"), "mask")); });
}
