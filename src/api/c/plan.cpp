// Facts about plans, and what this build has, in the C interface.
#include <algorithm>

#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

// A bit for each rapt_dtype.
std::uint32_t types_of(const rapt::EntryInfo& entry) {
  std::uint32_t types = 0;
  for (const rapt::DType dtype : entry.dtypes) types |= 1u << static_cast<unsigned>(dtype);
  return types;
}

struct Entries {
  std::vector<rapt::EntryInfo> entries = rapt::entries();
  std::vector<rapt_entry_info> views;

  Entries() {
    for (const auto& e : entries)
      views.push_back({.name = e.name.c_str(),
                       .backend = e.backend.c_str(),
                       .operation = static_cast<std::int32_t>(e.operation),
                       .phase = static_cast<std::int32_t>(e.phase),
                       .arithmetic = e.arithmetic.c_str(),
                       .isa = e.isa.c_str(),
                       .dtypes = types_of(e),
                       .min_head_dim = e.min_head_dim,
                       .max_head_dim = e.max_head_dim,
                       .max_value_head_dim = e.max_value_head_dim,
                       .unusable = e.unusable.c_str(),
                       .opt_in = e.opt_in.c_str()});
  }
  bool operator==(const Entries& other) const {
    const auto alike = [](const auto& a, const auto& b) { return a.unusable == b.unusable; };
    return std::equal(entries.begin(), entries.end(), other.entries.begin(), other.entries.end(), alike);
  }
};

struct UsableIsas {
  std::vector<std::int32_t> values;

  UsableIsas() {
    for (const rapt::Isa isa : rapt::usable_isas()) values.push_back(static_cast<std::int32_t>(isa));
  }
  bool operator==(const UsableIsas&) const = default;
};

// What lasts for callers' pointers. It changes once at most: when the OS has refused AMX's registers.
template <class T>
const T& latest() {
  static const T first;
  if (first == T()) return first;
  static const T since;
  return since;
}

}  // namespace

rapt_status rapt_max_workspace_bytes(const char* largest_problem, const rapt_context* context, size_t* bytes) noexcept {
  return guard([&] {
    non_null(bytes, "bytes") = 0;
    const rapt::Problem largest = rapt::parse_problem(&non_null(largest_problem, "largest_problem"));
    *bytes = rapt::max_workspace_bytes(largest, to_context(context));
  });
}

rapt_status rapt_plan_create_from_text(const char* text, const rapt_context* context, rapt_plan** plan) noexcept {
  return guard([&] {
    non_null(plan, "plan") = nullptr;
    *plan = new rapt_plan(rapt::Plan(rapt::parse_problem(&non_null(text, "text")), to_context(context)));
  });
}

void rapt_plan_destroy(rapt_plan* plan) noexcept {
  delete plan;
}

const char* rapt_plan_entry(const rapt_plan* plan) noexcept {
  return plan ? plan->entry.c_str() : "";
}
const char* rapt_plan_backend(const rapt_plan* plan) noexcept {
  return plan ? plan->backend.c_str() : "";
}
size_t rapt_plan_workspace_bytes(const rapt_plan* plan) noexcept {
  return plan ? plan->value.workspace_bytes() : 0;
}
int rapt_plan_threads(const rapt_plan* plan) noexcept {
  return plan ? plan->value.threads() : 0;
}
int64_t rapt_plan_work_items(const rapt_plan* plan) noexcept {
  return plan ? plan->value.work_items() : 0;
}

rapt_status rapt_plan_candidates(const rapt_plan* plan, const rapt_candidate** candidates, size_t* count) noexcept {
  return guard([&] {
    non_null(candidates, "candidates") = nullptr;
    non_null(count, "count") = 0;
    const auto& list = non_null(plan, "plan").candidates;
    *candidates = list.data();
    *count = list.size();
  });
}

rapt_status rapt_plan_explain(const rapt_plan* plan, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(non_null(plan, "plan").value.explain(), buffer, capacity, size);
  });
}

rapt_status rapt_plan_problem_text(const rapt_plan* plan, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(to_string(non_null(plan, "plan").value.problem()), buffer, capacity, size);
  });
}

rapt_status rapt_entries(const rapt_entry_info** entries, size_t* count) noexcept {
  return guard([&] {
    non_null(entries, "entries") = nullptr;
    non_null(count, "count") = 0;
    const auto& all = latest<Entries>();
    *entries = all.views.data();
    *count = all.views.size();
  });
}

rapt_status rapt_usable_isas(const int32_t** isas, size_t* count) noexcept {
  return guard([&] {
    non_null(isas, "isas") = nullptr;
    non_null(count, "count") = 0;
    const auto& all = latest<UsableIsas>().values;
    *isas = all.data();
    *count = all.size();
  });
}
