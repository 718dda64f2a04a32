// Every block of C++, C and CMake in docs/guide, docs/tutorials and README.md is part of a test.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "support/catch.hpp"

namespace rapt::testing {
namespace {

namespace fs = std::filesystem;

/// The lines of a file without their indentation, each ended by a newline.
std::string unindented(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  for (std::string line; std::getline(in, line);)
    out += line.substr(std::min(line.find_first_not_of(' '), line.size())) + '\n';
  return out;
}

std::string read(const fs::path& path) {
  std::ifstream in(path);
  INFO("opening " << path);
  REQUIRE(in.good());
  return {std::istreambuf_iterator<char>(in), {}};
}

/// By the language of a fence, the tests that have to hold its lines.
std::map<std::string, std::string> sources(const fs::path& tests) {
  std::map<std::string, std::string> of;
  for (const char* name :
       {"tests/api/test_examples.cpp", "tests/api/test_examples_caches.cpp", "docs/tutorials/engine.cpp"})
    of["cpp"] += unindented(read(tests.parent_path() / name));
  of["c"] = unindented(read(tests / "c" / "test_examples.c"));
  of["cmake"] = unindented(read(tests / "package" / "find_package" / "CMakeLists.txt"));
  return of;
}

/// The lines of a text that are not empty, without its first one.
std::string without_title(const std::string& text) {
  std::istringstream in(text);
  std::string out, line;
  std::getline(in, line);
  while (std::getline(in, line))
    if (!line.empty()) out += line + '\n';
  return out;
}

}  // namespace

TEST_CASE("guide: every example of the guides, the tutorials and README.md is part of a test", "[examples]") {
  const fs::path tests = fs::path(RAPT_TEST_DATA).parent_path(), root = tests.parent_path();
  const auto held = sources(tests);
  std::map<std::string, int> blocks;
  std::vector<fs::path> pages = {root / "README.md"};
  for (const char* folder : {"guide", "tutorials"})
    for (const auto& entry : fs::recursive_directory_iterator(root / "docs" / folder))
      if (entry.is_regular_file()) pages.push_back(entry.path());
  for (const fs::path& page : pages) {
    std::istringstream lines(read(page));
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("```", 0) != 0) continue;
      const std::string language = line.substr(3);
      const auto source = held.find(language);
      // Paragraphs of a block may stand apart in the test.
      std::string paragraph;
      const auto check = [&] {
        INFO(page << ":\n" << paragraph);
        if (source != held.end() && !paragraph.empty()) CHECK(source->second.find(paragraph) != std::string::npos);
        paragraph.clear();
      };
      bool closed = false;
      while (!closed && std::getline(lines, line)) {
        closed = line == "```";
        if (closed || line.empty()) check();
        else paragraph += unindented(line);
      }
      INFO(page);
      CHECK(closed);
      // Shell and Python have tests of their own: tests/cli and python/tests/test_guide.py.
      CHECK((source != held.end() || language == "sh" || language == "python" || language == "text"));
      ++blocks[language];
    }
  }
  CHECK(blocks["cpp"] >= 20);
  CHECK(blocks["c"] >= 3);
  CHECK(blocks["cmake"] >= 1);
}

TEST_CASE("tutorial: the blocks of the engine's page are its whole program", "[examples]") {
  const fs::path folder = fs::path(RAPT_TEST_DATA).parent_path().parent_path() / "docs" / "tutorials";
  std::istringstream page(read(folder / "engine.md"));
  std::string code = "title\n";
  bool inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("```", 0) == 0) inside = line == "```cpp";
    else if (inside) code += line + '\n';
  }
  CHECK(without_title(code) == without_title(read(folder / "engine.cpp")));
}

}  // namespace rapt::testing
