#include "command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench.hpp"
#include "bench/sets.hpp"
#include "check.hpp"
#include "common.hpp"
#include "demo.hpp"
#include "info.hpp"
#include "roofline.hpp"

namespace rapt::tools {
namespace {

constexpr const char* kProblemHelp =
    "the text of a problem: \"b=1 hq=8 sq=512 d=64 causal\" or \"merge_states rows=256 dv=128 count=4\"";
constexpr const char* kEntryHelp =
    "entries with this name, operation, arithmetic or ISA, or with this text in their name (default: the entry that "
    "dispatch chooses)";
constexpr int kMaxSeeds = 1000;

constexpr const char* kInfoExamples = R"(Examples:
  rapt info
  rapt info --problem "dtype=bf16 b=1 hq=32 hk=8 sq=1 sk=4096 d=128"
  rapt info --code --json code.json)";
constexpr const char* kCheckExamples = R"(Examples:
  rapt check
  rapt check --problem "b=1 hq=8 sq=512 d=64 causal" --entry attention --seeds 3
  rapt check --json check.json)";
constexpr const char* kBenchExamples = R"(Examples:
  rapt bench --set my_problems.txt --threads 1,2 --json before.json
  rapt bench --set my_problems.txt --threads 1,2 --compare before.json
  rapt bench --problem "b=1 hq=8 sq=512 d=64 causal" --entry attention --trace trace.json)";
constexpr const char* kRooflineExamples = R"(Examples:
  rapt roofline --html roofline.html
  rapt roofline --problem "b=1 hq=8 sq=512 d=64" --threads 2 --svg roofline.svg --json roofline.json)";
constexpr const char* kDemoExamples = R"(Examples:
  rapt demo
  rapt demo --threads 1)";

/// Asked for more threads than it has, the executor would silently run fewer.
const CLI::Range& thread_range() {
  static const CLI::Range range(1, tbb_executor()->concurrency());
  return range;
}

/// Declares the subcommands; `command` becomes the chosen one.
class Arguments {
 public:
  Arguments(CLI::App& app, std::string data_dir) {
    demo_.data_dir = std::move(data_dir);
    app.require_subcommand(1);
    app.set_version_flag("--version", std::string(version()));
    add_info(app);
    add_check(app);
    add_bench(app);
    add_roofline(app);
    add_demo(app);
  }

  int run() const { return command_(); }

 private:
  // CLI::Range lets it pass.
  static std::string refuse_nan(const std::string& text) {
    return std::isnan(std::strtod(text.c_str(), nullptr)) ? text + "; wanted a number" : "";
  }

  /// --set or --problem, of a command that times them.
  template <class Options>
  static void add_problems(CLI::App& command, Options& options) {
    const std::string sets = rapt::bench::set_names() + ", or a file with one problem per line";
    auto* set = command.add_option("--set", options.set, sets)->capture_default_str();
    command.add_option("--problem", options.problems, std::string(kProblemHelp) + "; repeatable")
        ->allow_extra_args(false)
        ->excludes(set);
  }
  static void add_min_time(CLI::App& command, double& seconds, const char* what) {
    command.add_option("--min-time", seconds, what)
        ->capture_default_str()
        ->check(CLI::Range(0.001, 3600.0))
        ->check(refuse_nan);
  }

  void add_info(CLI::App& app) {
    auto* info =
        app.add_subcommand("info", "List CPU, instruction sets and kernels, or explain the kernel for one problem");
    auto* problem = info->add_option("--problem", info_.problem, kProblemHelp);
    info->add_option("--threads", info_.threads, "largest number of threads for --problem (default: all)")
        ->check(thread_range());
    info->add_flag("--code", info_.code, "list the kernels' machine code: bytes, registers of product loops, spills")
        ->excludes(problem);
    auto* json = info->add_option("--json", info_.json_path, "print JSON instead, or also write it to this file");
    json->expected(0, 1)->type_name("[FILE]");
    info->footer(kInfoExamples);
    info->callback([this, json] {
      info_.json = json->count() != 0;
      command_ = [this] { return run_info(info_); };
    });
  }

  void add_check(CLI::App& app) {
    auto* check = app.add_subcommand("check", "Compare results with float64; exit code 1 if one is wrong");
    check->add_option("--problem", check_.problems, std::string(kProblemHelp) + "; repeatable")
        ->allow_extra_args(false);
    check->add_option("--entry", check_.entry, kEntryHelp);
    check->add_option("--seeds", check_.seeds, "random inputs per problem")->check(CLI::Range(1, kMaxSeeds));
    check->add_option("--threads", check_.threads, "largest number of threads (default: all)")->check(thread_range());
    check->add_option("--json", check_.json_path, "also write the results to this file")->type_name("FILE");
    check->footer(kCheckExamples);
    check->callback([this] { command_ = [this] { return run_check(check_); }; });
  }

  void add_bench(CLI::App& app) {
    auto* bench = app.add_subcommand(
        "bench", "Measure the speed of problems, relative to this machine's peak and to naive attention");
    add_problems(*bench, bench_);
    bench->add_option("--threads", bench_.threads, "thread counts, for example 1,2 (default: 1)")
        ->delimiter(',')
        ->check(thread_range());
    bench->add_option("--entry", bench_.entry, kEntryHelp);
    bench->add_option("--seeds", bench_.seeds, "random inputs per problem")->check(CLI::Range(1, kMaxSeeds));
    add_min_time(*bench, bench_.min_time, "seconds of measurement per row");
    bench
        ->add_option("--compare", bench_.compare_path,
                     "compare with this file, which --json wrote; exit code 1 if a row is slower")
        ->type_name("FILE");
    bench->add_option("--json", bench_.json_path, "also write the rows to this file, in the format of google-benchmark")
        ->type_name("FILE");
    bench->add_option("--trace", bench_.trace_path, "also write a timeline of a few calls per row, for Perfetto")
        ->type_name("FILE");
    bench->footer(kBenchExamples);
    bench->callback([this] { command_ = [this] { return run_bench(bench_); }; });
  }

  void add_roofline(CLI::App& app) {
    auto* roofline = app.add_subcommand(
        "roofline", "Draw a roofline: this machine's ceilings, and problems below them, fused and in three steps");
    add_problems(*roofline, roofline_);
    roofline->add_option("--threads", roofline_.threads, "number of threads of every measurement")
        ->capture_default_str()
        ->check(thread_range());
    roofline->add_option("--seeds", roofline_.seeds, "random inputs per problem")->check(CLI::Range(1, kMaxSeeds));
    add_min_time(*roofline, roofline_.min_time, "seconds of measurement per dot");
    roofline->add_option("--svg", roofline_.svg_path, "write the chart to this file")->type_name("FILE");
    roofline->add_option("--html", roofline_.html_path, "write a page with the chart and a table to this file")
        ->type_name("FILE");
    roofline->add_option("--json", roofline_.json_path, "write the measurements to this file")->type_name("FILE");
    roofline->footer(kRooflineExamples);
    roofline->callback([this] { command_ = [this] { return run_roofline(roofline_); }; });
  }

  void add_demo(CLI::App& app) {
    auto* demo = app.add_subcommand(
        "demo", "Run attention on tensors of a real language model: compare with the model's results, and measure");
    demo->add_option("--data-dir", demo_.data_dir, "folder with the captured tensors")
        ->check(CLI::ExistingDirectory)
        ->capture_default_str();
    demo->add_option("--threads", demo_.threads, "largest number of threads (default: all)")->check(thread_range());
    demo->footer(kDemoExamples);
    demo->callback([this] { command_ = [this] { return run_demo(demo_); }; });
  }

  InfoOptions info_;
  CheckOptions check_;
  BenchOptions bench_;
  RooflineOptions roofline_;
  DemoOptions demo_{};
  std::function<int()> command_;
};

/// Refuses `--option ""` and `--option=`, which come from a script's unset variable. CLI11 accepts the former for
/// optional values, and gives the latter the next argument.
void refuse_empty_values(std::span<const char* const> arguments) {
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    std::string_view option = arguments[i];
    if (option.empty()) option = arguments[i - 1];
    else if (option.back() == '=') option.remove_suffix(1);
    else continue;
    if (option.starts_with("--") && option.find('=') == std::string_view::npos)
      throw UsageError(fmt::format("{}: an empty value", option));
  }
}

int run(std::span<const char* const> argv, std::string data_dir) {
  refuse_empty_values(argv);
  CLI::App app{"rapt: attention kernels for CPUs and NVIDIA GPUs", "rapt"};
  app.footer(
      "The Python package with PyTorch also has: python -m rapt.bench --help, python -m rapt.transformers --help");
  Arguments arguments(app, std::move(data_dir));
  try {
    app.parse(static_cast<int>(argv.size()), argv.data());
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    // CLI11 would only say that a subcommand is required.
    const std::vector<std::string> unknown = app.remaining();
    if (app.get_subcommands().empty() && !unknown.empty()) {
      throw UsageError(fmt::format("{}: no such command or option; see rapt --help", unknown.front()));
    }
    throw UsageError(fmt::format("{}; see rapt --help", error.what()));
  }
  return arguments.run();
}

int fail(const std::exception& error, int code) {
  fmt::print(stderr, "rapt: {}\n", printable(error.what()));
  return code;
}

}  // namespace

int run_command(std::span<const char* const> argv, std::string data_dir) {
  try {
    return run(argv, std::move(data_dir));
  } catch (const UsageError& error) {
    return fail(error, kUsage);
  } catch (const Error& error) {
    return fail(error, kUsage);
  } catch (const std::exception& error) {
    return fail(error, kFailure);
  }
}

}  // namespace rapt::tools
