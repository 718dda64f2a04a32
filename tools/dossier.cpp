#include "dossier.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <variant>
#include <vector>

#include "check.hpp"
#include "common.hpp"
#include "info.hpp"
#include "progress.hpp"

namespace rapt::tools {
namespace {

/// Whether the page is that of an entry: "entries" has the values that fields of the entry may have.
bool is_of(const Json& page, const Json& entry) {
  return std::all_of(page["entries"].items().begin(), page["entries"].items().end(), [&](const auto& field) {
    const Json& values = field.value();
    return std::find(values.begin(), values.end(), entry.at(field.key())) != values.end();
  });
}

/// Null for an entry that cannot run here.
Json measure(const Json& entry, int threads) {
  if (!entry["usable"].get<bool>() || entry["backend"] != "cpu") return nullptr;
  const EntryErrors errors = errors_of(entry["name"], threads);
  Json relative = Json::object();
  for (const auto& [types, error] : errors.rel_frobenius) relative[types] = error;
  return {{"checked", errors.checked},
          {"refused", errors.refused},
          {"violation", errors.violation},
          {"of_bound", errors.of_bound},
          {"worst_problem", errors.worst_problem},
          {"rel_frobenius", relative}};
}

/// The pages of these entries, each with those of its entries that are among them, in the order of docs/kernels.md.
std::vector<Json> pages_of(const std::vector<EntryInfo>& wanted, const DossierOptions& options) {
  if (kernel_pages().empty()) throw std::runtime_error("this rapt was built without Python 3, which makes dossiers");
  std::vector<Json> pages;
  for (const char* text : kernel_pages()) pages.push_back(Json::parse(text)), pages.back()["listed"] = Json::array();
  Progress progress(options.no_check ? 0 : wanted.size());
  for (const EntryInfo& info : wanted) {
    Json entry = describe(info);
    const auto page = std::find_if(pages.begin(), pages.end(), [&](const Json& p) { return is_of(p, entry); });
    if (page == pages.end())
      throw std::runtime_error(fmt::format("{}: docs/kernels.md had no section with this entry", info.name));
    if (!options.no_check) progress.begin(info.name), entry["errors"] = measure(entry, options.threads);
    (*page)["listed"].push_back(std::move(entry));
  }
  std::erase_if(pages, [](const Json& page) { return page["listed"].empty(); });
  for (Json& page : pages) {
    Json of_entries = Json::array();  // sources are compiled for other ISAs, too, where kernels there share them
    for (Json& object : page["code"]) {
      const bool has_entry = std::any_of(page["listed"].begin(), page["listed"].end(),
                                         [&](const Json& entry) { return entry["isa"] == object["isa"]; });
      if (has_entry) of_entries.push_back(std::move(object));
    }
    page["code"] = std::move(of_entries);
  }
  return pages;
}

using Text = std::back_insert_iterator<std::string>;

void heading(Text text, const char* what) {
  fmt::format_to(text, "\n### {}\n\n", what);
}

void list(Text text, const Json& lines) {
  for (const Json& line : lines) fmt::format_to(text, "- {}\n", line.get<std::string>());
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

std::string joined(const Json& strings) {
  return fmt::format("{}", fmt::join(strings.get<std::vector<std::string>>(), " "));
}

/// The limits of the head sizes that problems of the entry's operation have; kIndex is where it is looked for.
template <std::size_t kIndex = 0>
std::string heads_text(const Json& entry) {
  if constexpr (kIndex == std::variant_size_v<Problem>) {
    throw std::logic_error("no such operation");
  } else {
    if (entry["operation"] != to_string(static_cast<Operation>(kIndex))) return heads_text<kIndex + 1>(entry);
    using P = std::variant_alternative_t<kIndex, Problem>;
    constexpr bool has_d = requires(P p) {
      p.d;
    };
    constexpr bool has_dv = requires(P p) {
      p.dv;
    };
    const std::int64_t min = entry["min_head_size"], d = entry["max_head_size"], dv = entry["max_value_head_size"];
    if (!has_dv) return has_d ? fmt::format("d {} to {}", min, d) : "-";
    if (!has_d) return fmt::format("dv {} to {}", min, dv);
    return dv == d ? fmt::format("d, dv {} to {}", min, d) : fmt::format("d {} to {}, dv to {}", min, d, dv);
  }
}

void print_entries(Text text, const Json& entries) {
  heading(text, "Entries");
  fmt::format_to(text,
                 "| entry | types | head sizes | block: rows x keys | on this machine |\n|---|---|---|---|---|\n");
  for (const Json& entry : entries) {
    const int rows = entry["block_q"], keys = entry["block_k"];
    const std::string reason = entry["reason"], opt_in = entry["opt_in"];
    fmt::format_to(text, "| `{}` | {} | {} | {} | {}{} |\n", entry["name"].get<std::string>(), joined(entry["dtypes"]),
                   heads_text(entry), rows == 0 ? "-" : fmt::format("{} x {}", rows, keys),
                   reason.empty() ? "usable" : reason, opt_in.empty() ? "" : "; " + opt_in);
  }
}

std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

/// What was read of one object, as cells of a row.
std::string code_cells(const Json& code) {
  if (code.contains("not_read")) return fmt::format("not read: {} | | | |", code["not_read"].get<std::string>());
  const std::string bytes = std::to_string(code["code_bytes"].get<std::int64_t>());
  if (code["largest"].is_null()) return bytes + " | none | | |";
  const Json& tile = code["largest"];
  return fmt::format("{} | {} | {} | {}, {}, {}, {} |", bytes, code["loops"].get<int>(),
                     code["loops_on_stack"].get<int>(), tile["accumulators"].get<int>(), tile["sums"].get<int>(),
                     tile["registers"].get<int>(), tile["on_stack"].get<int>());
}

void print_cpu_code(Text text, const Json& code) {
  fmt::format_to(
      text,
      "\nProduct loops are innermost loops that add products to registers which they carry; the largest is that "
      "with most of them. Vector instructions that read or write the stack are spills, or arrays that lie there.\n\n"
      "| ISA | source | bytes of code | product loops | with such instructions | the largest: registers carried, "
      "products a pass, vector registers, instructions on the stack |\n|---|---|---|---|---|---|\n");
  for (const Json& object : code) {
    fmt::format_to(text, "| {} | {} | {}\n", object["isa"].get<std::string>(), file_name(object["source"]),
                   code_cells(object));
  }
}

void print_gpu_code(Text text, const Json& code) {
  std::map<std::string, std::vector<std::string>> not_read;  // reasons, and of which sources
  for (const Json& object : code) {
    const std::string source = file_name(object["source"]);
    if (object.contains("not_read")) {
      not_read[object["not_read"]].push_back(source);
      continue;
    }
    for (const Json& usage : object["gpu"])
      fmt::format_to(text,
                     "- {}, {}: {} kernels, {} bytes of code; at most {} registers a thread, {} bytes of stack, {} of "
                     "static shared memory\n",
                     source, usage["architecture"].get<std::string>(), usage["kernels"].get<int>(),
                     usage["code_bytes"].get<std::int64_t>(), usage["registers"].get<int>(),
                     usage["stack_bytes"].get<int>(), usage["shared_bytes"].get<int>());
  }
  for (const auto& [reason, sources] : not_read)
    fmt::format_to(text, "- {}: not read, {}\n", fmt::join(sources, ", "), reason);
}

/// Those that all have, and of each ISA the others.
void print_flags(Text text, const Json& code) {
  std::map<std::string, std::vector<std::string>> flags;
  for (const Json& object : code) flags[object["isa"]] = words_of(object["flags"]);
  std::vector<std::string> common;
  for (const std::string& word : flags.begin()->second) {
    const bool everywhere = std::all_of(flags.begin(), flags.end(), [&](const auto& isa) {
      return std::find(isa.second.begin(), isa.second.end(), word) != isa.second.end();
    });
    if (everywhere) common.push_back(word);
  }
  if (common.empty()) fmt::format_to(text, "Flags were not recorded.\n");
  else fmt::format_to(text, "- all: `{}`\n", fmt::join(common, " "));
  for (auto& [isa, words] : flags) {
    std::erase_if(words,
                  [&](const auto& word) { return std::find(common.begin(), common.end(), word) != common.end(); });
    if (!words.empty()) fmt::format_to(text, "- {}: `{}`\n", isa, fmt::join(words, " "));
  }
}

void print_code(Text text, const Json& page) {
  heading(text, "Code");
  if (page["code"].empty()) {
    fmt::format_to(text, "Not in this build.\n");
    return;
  }
  fmt::format_to(text, "Compiled by {}, and read from the objects:\n\n", page["compiler"].get<std::string>());
  print_flags(text, page["code"]);
  if (page["backend"] == "cuda") print_gpu_code(text, page["code"]);
  else print_cpu_code(text, page["code"]);
}

void print_errors(Text text, const Json& entries) {
  heading(text, "Errors against float64");
  if (!entries[0].contains("errors")) {
    fmt::format_to(text, "Not measured: `--no-check`.\n");
    return;
  }
  fmt::format_to(text,
                 "Over the problems of `rapt check`, on this machine: shares of the contract's bounds, and relative "
                 "Frobenius errors, of whichever output has the largest, where all tensors have one type.\n\n"
                 "| entry | problems | largest share of a bound | relative errors |\n|---|---|---|---|\n");
  for (const Json& entry : entries) {
    const Json& errors = entry["errors"];
    const std::string name = entry["name"];
    if (errors.is_null()) {
      fmt::format_to(text, "| `{}` | not measured here | | |\n", name);
      continue;
    }
    std::vector<std::string> relative;
    for (const auto& [types, error] : errors["rel_frobenius"].items())
      relative.push_back(fmt::format("{} {:.1e}", types, error.get<double>()));
    const std::string violation = errors["violation"];
    fmt::format_to(text, "| `{}` | {}, and {} refused | {:.2f}: `{}`{} | {} |\n", name, errors["checked"].get<int>(),
                   errors["refused"].get<int>(), errors["of_bound"].get<double>(),
                   errors["worst_problem"].get<std::string>(), violation.empty() ? "" : "; WRONG: " + violation,
                   fmt::join(relative, ", "));
  }
}

/// "1.1 to 2.8", "64", with so many digits behind the point.
std::string span_text(const Json& span, int digits) {
  const double min = span["min"], max = span["max"];
  const std::string end = fmt::format("{:.{}f}", max, digits);
  return min == max ? end : fmt::format("{:.{}f} to {}", min, digits, end);
}

void print_figures(Text text, const Json& page) {
  heading(text, "Speed, and beside PyTorch");
  if (page["data"].empty()) {
    fmt::format_to(text, "Not measured: {}\n", page["no_data"].get<std::string>());
    return;
  }
  fmt::format_to(text,
                 "`bench/results/README.md` has machine, commit and command of each file, and what its columns are. "
                 "Means are geometric.\n\n");
  for (const Json& data : page["data"]) {
    std::vector<std::string> says;
    if (const Json& ratio = data["times_as_fast_as_torch"]; !ratio.is_null())
      says.push_back(fmt::format("{:.2f} times as fast as PyTorch (`{}`: {})", ratio["mean"].get<double>(),
                                 ratio["column"].get<std::string>(), span_text(ratio, 2)));
    if (const Json& error = data["largest_error"]; !error.is_null())
      says.push_back(fmt::format("largest relative error {:.1e}, PyTorch's {:.1e}", error["rapt"].get<double>(),
                                 error["torch"].get<double>()));
    if (!data["percent_of_peak"].is_null()) says.push_back(span_text(data["percent_of_peak"], 0) + " % of the peak");
    if (!data["percent_of_read"].is_null())
      says.push_back(span_text(data["percent_of_read"], 0) + " % of the read bandwidth");
    if (!data["registers"].is_null()) says.push_back(span_text(data["registers"], 0) + " registers a thread");
    if (!data["spilled_bytes"].is_null())
      says.push_back(span_text(data["spilled_bytes"], 0) + " bytes spilled in a call");
    for (const auto& [column, ends] : data["columns"].items())
      says.push_back(
          fmt::format("`{}` {:.4g} to {:.4g}", column, ends["min"].get<double>(), ends["max"].get<double>()));
    fmt::format_to(text, "- `{}`: {} rows; {}\n", data["data"].get<std::string>(), data["rows"].get<int>(),
                   fmt::join(says, "; "));
  }
}

void print_tests(Text text, const Json& page) {
  heading(text, "Tests");
  std::vector<std::string> files;
  for (const Json& file : page["tests"])
    files.push_back(fmt::format("`{}` ({})", file["file"].get<std::string>(), file["cases"].get<int>()));
  const Json& entries = page["listed"];
  const auto usable = std::find_if(entries.begin(), entries.end(), [](const Json& entry) { return entry["usable"]; });
  fmt::format_to(text,
                 "Files that run every entry of the operation, with how many cases they have: {}. On one entry:\n\n"
                 "    RAPT_TEST_ENTRIES={} ctest --preset release -L kernel\n",
                 fmt::join(files, ", "), (usable == entries.end() ? entries[0] : *usable)["name"].get<std::string>());
}

std::string to_markdown(const Json& context, const std::vector<Json>& pages) {
  std::string result;
  const Text text(result);
  fmt::format_to(text, "# Kernels of rapt {}\n\nCommit {}; written on {}{}.\n",
                 context["library_version"].get<std::string>(), context["commit"].get<std::string>(),
                 context["date"].get<std::string>(),
                 context["cpu"].get<std::string>().empty() ? "" : ", " + context["cpu"].get<std::string>());
  for (const Json& page : pages) {
    fmt::format_to(text, "\n## {}\n\n{}\n\nSource: {}\n", page["name"].get<std::string>(),
                   page["computes"].get<std::string>(), joined(page["sources"]));
    print_entries(text, page["listed"]);
    heading(text, "Sizes, and why");
    list(text, page["sizes"]);
    print_code(text, page);
    print_errors(text, page["listed"]);
    print_figures(text, page);
    print_tests(text, page);
    heading(text, "Limits");
    list(text, page["limits"]);
  }
  return result;
}

}  // namespace

int run_dossier(const DossierOptions& options) {
  require_writable({options.json_path});
  const std::vector<Json> pages = pages_of(options.entry.empty() ? entries() : named_entries(options.entry), options);
  const Json context = run_context(read_machine());
  const Json document = {{"context", context}, {"kernels", pages}};
  if (options.json && options.json_path.empty()) fmt::print("{}\n", to_text(document));
  else fmt::print("{}", to_markdown(context, pages));
  if (!options.json_path.empty()) write_json(options.json_path, document);
  const bool wrong = std::any_of(pages.begin(), pages.end(), [](const Json& page) {
    return std::any_of(page["listed"].begin(), page["listed"].end(), [](const Json& entry) {
      return entry.contains("errors") && !entry["errors"].is_null() && entry["errors"]["violation"] != "";
    });
  });
  return wrong ? kFailure : kSuccess;
}

}  // namespace rapt::tools
