#include "roofline_output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace rapt::tools {
namespace {

constexpr const char* kMethod =
    "FLOPs and bytes are by formula, each matrix moved once. So data that stay in a cache may stand above memory's "
    "roof. Counted intensity has the same FLOPs over 64 bytes for each miss of the last-level cache that the processor "
    "counts. What has no FLOPs is held against memory's bandwidth.";
constexpr const char* kNoCounters = "no counters here";

/// How dots of a step look; the first is also for calls of other operations.
struct Style {
  const char *step, *color, *what;
  double radius;
};
constexpr std::array<Style, 5> kStyles = {{{"fused", "#0b6bcb", "fused, or a call of another operation", 6},
                                           {"three steps", "#e07b00", "three steps in all", 6},
                                           {"scores", "#2a9d5c", "scores q k^T", 4},
                                           {"softmax", "#c43b3b", "softmax", 4},
                                           {"values", "#7b52ab", "values P v", 4}}};
constexpr const char *kInk = "#1c2733", *kMuted = "#56636f", *kGrid = "#e3e8ed";

const Style& style_of(const Dot& dot) {
  const auto found = std::find_if(kStyles.begin(), kStyles.end(), [&](const Style& s) { return s.step == dot.step; });
  return found == kStyles.end() ? kStyles.front() : *found;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') result += "&amp;";
    else if (c == '<') result += "&lt;";
    else if (c == '>') result += "&gt;";
    else if (c == '"') result += "&quot;";
    else result += c;
  }
  return result;
}

std::string machine_text(const Machine& machine, const RooflineRun& run) {
  return fmt::format("rapt {} on {}, {} of {} CPUs", version(), machine.cpu.empty() ? machine.host : machine.cpu,
                     run.threads, machine.cpus);
}

std::string ceiling_text(const std::vector<Ceiling>& ceilings, const char* unit) {
  std::string text;
  for (const Ceiling& c : ceilings)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", c.name,
                        c.rate > 0 ? fmt::format("{:.1f} {}", c.rate, unit) : "not had");
  return text;
}

std::string units_text(const RooflineRun& run) {
  const std::string floats = ceiling_text(run.units, "GFLOP/s");
  return run.int8.empty() ? floats : floats + ", " + ceiling_text(run.int8, "GOP/s");
}

std::string figure(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

/// Columns of a dot, in every output for people.
constexpr std::array<const char*, 10> kColumns = {"step", "runs on", "FLOP/byte", "counted", "instr/cycle",
                                                  "ms",   "GFLOP/s", "GB/s",      "roof",    "% of roof"};
std::array<std::string, 10> columns(const Dot& dot, const RooflineRun& run) {
  return {dot.step,
          dot.entry,
          figure(dot.intensity(), 2),
          run.no_counters.empty() ? figure(dot.counted_intensity(), 2) : kNoCounters,
          figure(dot.counts.instructions / dot.counts.cycles, 2),
          figure(dot.median_s * 1e3, 4),
          figure(dot.gflops(), 1),
          figure(dot.gbs(), 1),
          dot.cost.flops > 0 ? figure(dot.roof(), 1) : "no FLOPs",
          figure(100 * dot.of_roof(), 1)};
}

/// Whether it is its problem's first dot: the call's, before those of steps.
bool is_first_dot(const RooflineRun& run, const Dot& dot) {
  return &dot == run.dots.data() || (&dot - 1)->problem != dot.problem;
}

/// Below every table.
std::string method_text(const RooflineRun& run) {
  return kMethod + (run.no_counters.empty() ? "" : fmt::format(" {}: {}.", kNoCounters, run.no_counters));
}

Json counted_json(const Dot& dot) {
  const bench::Counts& counts = dot.counts;
  return {{"instructions", number(counts.instructions)},  {"cycles", number(counts.cycles)},
          {"cache_misses", number(counts.cache_misses)},  {"bytes", number(counts.miss_bytes())},
          {"intensity", number(dot.counted_intensity())}, {"cpu_ms", number(1e3 * counts.cpu_seconds)},
          {"page_faults", number(counts.page_faults)}};
}

/// The chart's axes: both logarithmic, in powers of two.
class Axes {
 public:
  Axes(const RooflineRun& run) {
    double peak = 1, slowest = 0;
    for (const Ceiling& c : run.units) peak = std::max(peak, c.rate);
    for (const Ceiling& c : run.reads)
      if (c.rate > 0) slowest = slowest > 0 ? std::min(slowest, c.rate) : c.rate;
    double low_x = 1, high_x = slowest > 0 ? 2 * peak / slowest : 2, low_y = peak / 16, high_y = peak;
    for (const Ceiling& c : run.int8) high_y = std::max(high_y, c.rate);
    for (const Dot& dot : run.dots) {
      if (!drawn(dot)) continue;
      low_x = std::min(low_x, dot.intensity()), high_x = std::max(high_x, dot.intensity());
      low_y = std::min(low_y, dot.gflops()), high_y = std::max(high_y, dot.gflops());
    }
    x0_ = std::floor(std::log2(low_x)) - 1, x1_ = std::ceil(std::log2(high_x)) + 1;
    y0_ = std::floor(std::log2(low_y)) - 1, y1_ = std::ceil(std::log2(high_y)) + 1;
  }

  static constexpr double kLeft = 70, kTop = 116, kWidth = 900, kHeight = 480;

  /// Whether there is a place for it: operations that compute nothing have none.
  static bool drawn(const Dot& dot) { return dot.cost.flops > 0 && dot.cost.bytes > 0 && dot.median_s > 0; }
  double x(double intensity) const { return kLeft + kWidth * (std::log2(intensity) - x0_) / (x1_ - x0_); }
  double y(double gflops) const { return kTop + kHeight * (1 - (std::log2(gflops) - y0_) / (y1_ - y0_)); }
  double low_x() const { return std::exp2(x0_); }
  double high_x() const { return std::exp2(x1_); }
  double low_y() const { return std::exp2(y0_); }
  double high_y() const { return std::exp2(y1_); }

 private:
  double x0_, x1_, y0_, y1_;
};

std::string line(double x1, double y1, double x2, double y2, const char* color, const char* more = "") {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" {}/>\n", x1, y1, x2,
                     y2, color, more);
}
std::string text_at(double x, double y, const std::string& text, const std::string& more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, escaped(text));
}

std::string grid(const Axes& axes) {
  std::string svg;
  const double right = Axes::kLeft + Axes::kWidth, bottom = Axes::kTop + Axes::kHeight;
  const auto label = [](double value) {
    return value < 1 ? fmt::format("1/{:.0f}", 1 / value) : fmt::format("{:.0f}", value);
  };
  for (double x = axes.low_x(); x <= axes.high_x(); x *= 2) {
    svg += line(axes.x(x), Axes::kTop, axes.x(x), bottom, kGrid);
    svg += text_at(axes.x(x), bottom + 18, label(x), fmt::format("text-anchor=\"middle\" fill=\"{}\"", kMuted));
  }
  for (double y = axes.low_y(); y <= axes.high_y(); y *= 2) {
    svg += line(Axes::kLeft, axes.y(y), right, axes.y(y), kGrid);
    svg += text_at(Axes::kLeft - 8, axes.y(y) + 4, label(y), fmt::format("text-anchor=\"end\" fill=\"{}\"", kMuted));
  }
  svg += text_at((Axes::kLeft + right) / 2, bottom + 38, "FLOPs per byte, by formula", "text-anchor=\"middle\"");
  svg += text_at(Axes::kLeft - 8, Axes::kTop - 12, "GFLOP/s");
  return svg;
}

/// Diagonals that end at the highest unit, and levels that begin at the fastest read.
std::string roofs(const Axes& axes, const RooflineRun& run) {
  std::string svg;
  double peak = 0, fastest = 0;
  for (const Ceiling& c : run.units) peak = std::max(peak, c.rate);
  for (const Ceiling& c : run.reads) fastest = std::max(fastest, c.rate);
  if (peak == 0 || fastest == 0) return svg;
  for (const Ceiling& c : run.reads) {
    if (c.rate <= 0) continue;
    const double from = std::max(axes.low_x(), axes.low_y() / c.rate), to = std::min(axes.high_x(), peak / c.rate);
    if (from >= to) continue;
    const double x1 = axes.x(from), y1 = axes.y(from * c.rate), x2 = axes.x(to), y2 = axes.y(to * c.rate);
    svg += line(x1, y1, x2, y2, kInk, "stroke-width=\"1.5\"");
    const double x = x1 + 0.12 * (x2 - x1), y = y1 + 0.12 * (y2 - y1) - 6;
    svg += text_at(x, y, fmt::format("{} {:.0f} GB/s", c.name, c.rate),
                   fmt::format("font-size=\"11\" transform=\"rotate({:.1f} {:.1f} {:.1f})\"",
                               std::atan2(y2 - y1, x2 - x1) * 57.29578, x, y));
  }
  const auto level = [&](const Ceiling& c, const char* unit) {
    if (c.rate < axes.low_y()) return;
    const double right = axes.x(axes.high_x());
    svg += line(axes.x(std::max(axes.low_x(), c.rate / fastest)), axes.y(c.rate), right, axes.y(c.rate), kInk,
                c.rate == peak ? "stroke-width=\"1.5\"" : "stroke-dasharray=\"5 4\"");
    svg += text_at(right - 4, axes.y(c.rate) - 5, fmt::format("{} {:.0f} {}", c.name, c.rate, unit),
                   "font-size=\"11\" text-anchor=\"end\"");
  };
  for (const Ceiling& c : run.units) level(c, "GFLOP/s");
  for (const Ceiling& c : run.int8) level(c, "GOP/s");
  return svg;
}

std::string dots(const Axes& axes, const RooflineRun& run) {
  std::string paths, marks;
  const Dot* fused = nullptr;
  for (const Dot& dot : run.dots) {
    if (!Axes::drawn(dot)) continue;
    const double x = axes.x(dot.intensity()), y = axes.y(dot.gflops());
    if (dot.step == "fused") fused = &dot;
    if (dot.step == "three steps" && fused)
      paths += line(x, y, axes.x(fused->intensity()), axes.y(fused->gflops()), kMuted, "stroke-dasharray=\"2 3\"");
    const Style& style = style_of(dot);
    const std::string what = fmt::format("{}: {}, {}: {} FLOP/byte, {} ms, {} GFLOP/s", dot.problem + 1,
                                         short_text(run.problems[dot.problem]), dot.step, figure(dot.intensity(), 2),
                                         figure(dot.median_s * 1e3, 4), figure(dot.gflops(), 1));
    marks += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\" fill-opacity=\"0.85\"><title>{}</title></circle>\n",
        x, y, style.radius, style.color, escaped(what));
    marks += text_at(x + style.radius + 2, y + 4, std::to_string(dot.problem + 1),
                     fmt::format("font-size=\"10\" fill=\"{}\"", style.color));
  }
  return paths + marks;
}

}  // namespace

double Dot::roof() const {
  return read_gbs > 0 ? std::min(peak, intensity() * read_gbs) : peak;
}

double Dot::of_roof() const {
  const double of_memory = read_gbs > 0 && cost.bytes > 0 ? gbs() / read_gbs : 0;
  return std::max(gflops() / peak, of_memory);
}

std::string roofline_table(const Machine& machine, const RooflineRun& run) {
  std::string table =
      fmt::format("{}\n{}\nread: {}\n", machine_text(machine, run), units_text(run), ceiling_text(run.reads, "GB/s"));
  std::size_t width = 0, step_width = 0;
  for (const Dot& dot : run.dots)
    width = std::max(width, dot.entry.size()), step_width = std::max(step_width, dot.step.size());
  const auto add_row = [&](const auto& c) {
    table += fmt::format("  {:<{}}  {:<{}}  {:>9}  {:>16}  {:>11}  {:>10}  {:>8}  {:>7}  {:>8}  {:>9}\n", c[0],
                         step_width, c[1], width, c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]);
  };
  add_row(kColumns);
  for (const Dot& dot : run.dots) {
    if (is_first_dot(run, dot))
      table += fmt::format("{}: {}\n", dot.problem + 1, short_text(run.problems[dot.problem]));
    add_row(columns(dot, run));
    if (dot.samples < run.min_samples) table.insert(table.size() - 1, fmt::format("  {} steady samples", dot.samples));
  }
  return table + method_text(run) + "\n";
}

Json roofline_json(const Machine& machine, const RooflineRun& run) {
  const auto ceilings = [](const std::vector<Ceiling>& all, const char* unit) {
    Json json = Json::array();
    for (const Ceiling& c : all) json.push_back({{"name", c.name}, {unit, c.rate > 0 ? Json(c.rate) : Json(nullptr)}});
    return json;
  };
  Json all = Json::array();
  for (const Dot& dot : run.dots) {
    std::vector<double> seeds_ms;
    for (const double seconds : dot.seeds_s) seeds_ms.push_back(1e3 * seconds);
    all.push_back({{"problem", to_string(run.problems[dot.problem])},
                   {"step", dot.step},
                   {"entry", dot.entry},
                   {"unit", to_string(dot.unit)},
                   {"flops", dot.cost.flops},
                   {"bytes", dot.cost.bytes},
                   {"intensity", number(dot.intensity())},
                   {"counted", counted_json(dot)},
                   {"median_ms", dot.median_s * 1e3},
                   {"seeds_ms", seeds_ms},
                   {"spread", number(dot.spread)},
                   {"samples", dot.samples},
                   {"gflops", number(dot.gflops())},
                   {"gbs", number(dot.gbs())},
                   {"roof_gflops", number(dot.roof())},
                   {"of_roof", number(dot.of_roof())}});
  }
  Json context = run_context(machine);
  context.update({{"threads", run.threads},
                  {"seeds", run.seeds},
                  {"method", kMethod},
                  {"no_counters", run.no_counters.empty() ? Json(nullptr) : Json(run.no_counters)}});
  return {{"context", context},
          {"units", ceilings(run.units, "gflops")},
          {"int8", ceilings(run.int8, "gops")},
          {"reads", ceilings(run.reads, "gbs")},
          {"dots", all}};
}

std::string roofline_svg(const Machine& machine, const RooflineRun& run) {
  const Axes axes(run);
  const double list = Axes::kTop + Axes::kHeight + 66,
               height = list + 18 * static_cast<double>(run.problems.size()) + 12;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1010 {0:.0f}\" width=\"1010\" height=\"{0:.0f}\" "
      "font-family=\"system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"{1}\" "
      "role=\"img\">\n<title>Roofline</title>\n<rect width=\"1010\" height=\"{0:.0f}\" rx=\"8\" fill=\"#ffffff\"/>\n",
      height, kInk);
  svg += text_at(24, 32, "Roofline", "font-size=\"18\" font-weight=\"600\"");
  svg += text_at(24, 52, machine_text(machine, run), fmt::format("fill=\"{}\"", kMuted));
  double x = 24;
  for (const Style& style : kStyles) {
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"70\" r=\"{}\" fill=\"{}\"/>\n", x + 6, style.radius, style.color);
    svg += text_at(x + 18, 74, style.what);
    x += 42 + 7 * static_cast<double>(std::string_view(style.what).size());
  }
  svg += grid(axes) + roofs(axes, run) + dots(axes, run);
  for (std::size_t i = 0; i < run.problems.size(); ++i)
    svg += text_at(24, list + 18 * static_cast<double>(i), fmt::format("{}: {}", i + 1, short_text(run.problems[i])),
                   "font-size=\"12\"");
  return svg + "</svg>\n";
}

std::string roofline_html(const Machine& machine, const RooflineRun& run) {
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>Roofline</title>\n<style>\n"
      "body {{ font-family: system-ui, sans-serif; color: {}; max-width: 1010px; margin: 2em auto; }}\n"
      "table {{ border-collapse: collapse; font-size: 13px; }}\n"
      "td, th {{ padding: 2px 10px; text-align: right; border-bottom: 1px solid {}; }}\n"
      "td:nth-child(-n+2), th {{ text-align: left; }}\n</style>\n</head>\n<body>\n",
      kInk, kGrid);
  html += roofline_svg(machine, run);
  html += fmt::format("<p>{}. Read: {}.</p>\n<p>{}</p>\n<table>\n<tr>", escaped(units_text(run)),
                      escaped(ceiling_text(run.reads, "GB/s")), escaped(method_text(run)));
  for (const char* name : kColumns) html += fmt::format("<th>{}</th>", name);
  html += "</tr>\n";
  for (const Dot& dot : run.dots) {
    if (is_first_dot(run, dot))
      html += fmt::format("<tr><th colspan=\"10\">{}: {}</th></tr>\n", dot.problem + 1,
                          escaped(short_text(run.problems[dot.problem])));
    html += "<tr>";
    for (const std::string& cell : columns(dot, run)) html += fmt::format("<td>{}</td>", escaped(cell));
    html += "</tr>\n";
  }
  return html + "</table>\n</body>\n</html>\n";
}

}  // namespace rapt::tools
