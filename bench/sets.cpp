#include "sets.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>
#include <variant>

namespace rapt::bench {
namespace {

constexpr std::string_view kWanted = "; wanted ";  // of every Error

std::vector<SetLine> parse(std::istream& stream, const std::string& file) {
  std::vector<SetLine> lines;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    line.resize(std::min(line.find('#'), line.size()));
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    line = line.substr(first, line.find_last_not_of(" \t\r") + 1 - first);
    const std::string where = file + ":" + std::to_string(number);
    try {
      lines.push_back({parse_line(line), where});
    } catch (const Error& error) {
      const std::string what = std::string(error.what()).substr(error.argument().size() + 2);
      const std::size_t wanted = what.find(kWanted);
      throw Error(where, what.substr(0, wanted), what.substr(wanted + kWanted.size()));
    }
  }
  if (lines.empty()) throw Error(file, "no problems", "the text of one a line");
  return lines;
}

}  // namespace

Problem parse_line(const std::string& text) {
  std::istringstream words(text);
  std::string first;
  words >> first;
  bool named = false;
  for (std::size_t i = 0; i < std::variant_size_v<Problem>; ++i)
    named = named || first == to_string(static_cast<Operation>(i));
  return parse_problem(named ? text : "attention " + text);
}

std::string set_names() {
  std::string names;
  for (const BuiltInSet& set : built_in_sets()) names += (names.empty() ? "" : ", ") + std::string(set.name);
  return names;
}

std::vector<SetLine> read_set(const std::string& set) {
  for (const BuiltInSet& known : built_in_sets()) {
    if (known.name != set) continue;
    std::istringstream stream{std::string(known.text)};
    return parse(stream, "bench/sets/" + set + ".txt");
  }
  std::ifstream stream(set);
  if (!stream || std::filesystem::is_directory(set)) {
    throw Error("--set", "\"" + set + "\"", "a file, or one of " + set_names());
  }
  return parse(stream, set);
}

const std::vector<SetLine>& check_problems() {
  static const std::vector<SetLine> all = [] {
    std::vector<SetLine> lines;
    for (const auto& [operation, text] : built_in_checks()) {
      std::istringstream stream{std::string(text)};
      for (SetLine& line : parse(stream, "tests/operations/" + std::string(operation) + "/problems.txt"))
        lines.push_back(std::move(line));
    }
    return lines;
  }();
  return all;
}

}  // namespace rapt::bench
