// What holds of problems of any operation.
#include "rapt/problem.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "operations/call.hpp"

namespace rapt {

Problem parse_problem(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\n");
  const std::string_view rest = begin == std::string_view::npos ? std::string_view() : text.substr(begin);
  const std::string_view name = rest.substr(0, rest.find_first_of(" \t\n"));
  if (name == to_string(Operation::attention)) return AttentionProblem::parse(text);
  if (name == to_string(Operation::append_kv)) return AppendKvProblem::parse(text);
  if (name == to_string(Operation::merge_states)) return MergeStatesProblem::parse(text);
  throw Error("problem", "\"" + std::string(name) + "\"", "the operation first: attention, append_kv or merge_states");
}

std::string to_string(const Problem& problem) {
  return std::visit([](const auto& p) { return p.to_string(); }, problem);
}

DeviceType device_of(const Problem& problem) {
  const auto* attention = std::get_if<AttentionProblem>(&problem);
  return attention ? attention->device : DeviceType::cpu;
}

Problem planned(Problem problem) {
  if (auto* p = std::get_if<AttentionProblem>(&problem)) {
    p->layout = AttentionProblem::Layout::bhsd;
    for (std::uint8_t* dims : {&p->bias, &p->mask})
      if (*dims != AttentionProblem::kNone) *dims = 0;
  }
  return problem;
}

std::vector<Problem> corner_problems(const Problem& largest) {
  const auto* attention = std::get_if<AttentionProblem>(&largest);
  if (!attention) return {largest};
  std::vector<Problem> corners;
  AttentionProblem p = *attention;
  for (const std::int64_t sk : {attention->sk, std::min<std::int64_t>(attention->sk, 1)})
    for (const std::int64_t sq : {attention->sq, std::min<std::int64_t>(attention->sq, 1)}) {
      p.sq = sq, p.sk = sk;
      corners.emplace_back(p);
    }
  return corners;
}

}  // namespace rapt
