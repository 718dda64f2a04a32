#include "rapt/problem.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <vector>

#include "text.hpp"

namespace rapt {
namespace {

constexpr std::array kDTypes = {DType::f32, DType::f16, DType::bf16,   DType::boolean, DType::i32,
                                DType::i64, DType::i8,  DType::f8e4m3, DType::f8e5m2,  DType::i4x2};
constexpr std::array<std::string_view, 4> kLayouts = {"bhsd", "bshd", "bhds", "other"};

[[noreturn]] void refuse(std::string_view word, const char* wanted) {
  throw Error("problem", "\"" + std::string(word) + "\"", wanted);
}

template <class T>
T number(std::string_view word, std::string_view text, const char* wanted = "a number after =") {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) refuse(word, "a number that fits 64 bits, or a float");
  if (error != std::errc() || end != text.data() + text.size()) refuse(word, wanted);
  return value;
}

DType dtype(std::string_view word, std::string_view text) {
  for (DType t : kDTypes)
    if (text == to_string(t)) return t;
  refuse(word, "f32, bf16 or f16, or for kv i8, f8e4m3, f8e5m2 or i4x2");
}

// "bk", "hqk", ...: letters of b, h, q in this order, then k.
std::uint8_t broadcast(std::string_view word, std::string_view text) {
  std::uint8_t dims = 0;
  std::size_t at = 0;
  for (const auto& [letter, bit] : {std::pair{'b', Problem::kFullB}, {'h', Problem::kFullH}, {'q', Problem::kFullQ}})
    if (at < text.size() && text[at] == letter) dims |= bit, ++at;
  if (text.substr(at) != "k") refuse(word, "the letters of the full dimensions, in order, out of b, h, q, and k last");
  return dims;
}
std::string letters(std::uint8_t dims) {
  std::string text;
  if (dims & Problem::kFullB) text += 'b';
  if (dims & Problem::kFullH) text += 'h';
  if (dims & Problem::kFullQ) text += 'q';
  return text + 'k';
}

}  // namespace

std::string Problem::to_string() const {
  std::string text = "attention";
  const auto word = [&](std::string_view key, const auto& value) {
    text += ' ';
    text += key;
    text += '=';
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) text += std::to_string(value);
    else text += value;
  };
  const auto flag = [&](std::string_view key, bool on) {
    if (on) text += ' ', text += key;
  };
  if (q_dtype != DType::f32 && q_dtype == kv_dtype && q_dtype == out_dtype) {
    word("dtype", rapt::to_string(q_dtype));
  } else {
    if (q_dtype != DType::f32) word("q", rapt::to_string(q_dtype));
    if (kv_dtype != DType::f32) word("kv", rapt::to_string(kv_dtype));
    if (out_dtype != DType::f32) word("out", rapt::to_string(out_dtype));
  }
  if (device != DeviceType::cpu) word("device", rapt::to_string(device));
  word("b", b);
  word("hq", hq);
  if (hk != hq) word("hk", hk);
  word("sq", sq);
  if (sk != sq) word("sk", sk);
  word("d", d);
  if (dv != d) word("dv", dv);
  flag("causal", causal);
  if (window_left != -1 || window_right != -1)
    word("window", std::to_string(window_left) + "," + std::to_string(window_right));
  if (align == Align::top_left) word("align", "top_left");
  if (align == Align::bottom_right) word("align", "bottom_right");
  if (align == Align::offset) word("align", align_offset);
  if (has_scale) word("scale", shortest(scale));
  if (softcap != 0) word("softcap", shortest(softcap));
  if (bias != kNone) word("bias", letters(bias));
  if (bias_dtype != DType::f32) word("bias_dtype", rapt::to_string(bias_dtype));
  if (mask != kNone) word("mask", letters(mask));
  flag("alibi", alibi);
  flag("sinks", sinks);
  flag("lse", lse);
  flag("seqlens", kv_lengths);
  if (ragged_q >= 0) word("ragged_q", ragged_q);
  if (ragged_k >= 0) word("ragged_k", ragged_k);
  if (page_size != 0) word("page", page_size);
  flag("ring", ring);
  if (k_groups == v_groups) {
    if (k_groups != 0) word("groups", k_groups);
  } else {
    if (k_groups != 0) word("k_groups", k_groups);
    if (v_groups != 0) word("v_groups", v_groups);
  }
  flag("zeros", zeros);
  if (layout != Layout::bhsd) word("layout", kLayouts[static_cast<std::size_t>(layout)]);
  return text;
}

Problem Problem::parse(std::string_view text) {
  Problem p;
  bool named = false;
  std::vector<std::string_view> keys;
  const auto given = [&](std::string_view key) { return std::find(keys.begin(), keys.end(), key) != keys.end(); };
  while (!text.empty()) {
    const std::size_t space = text.find_first_of(" \t\n");
    const std::string_view word = text.substr(0, space);
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
    if (word.empty()) continue;
    if (!named) {
      if (word != "attention") refuse(word, "the operation first: attention");
      named = true;
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    if (given(key)) refuse(word, "every word once");
    keys.push_back(key);
    if (equals == std::string_view::npos) {
      if (key == "causal") p.causal = true;
      else if (key == "alibi") p.alibi = true;
      else if (key == "sinks") p.sinks = true;
      else if (key == "lse") p.lse = true;
      else if (key == "seqlens") p.kv_lengths = true;
      else if (key == "ring") p.ring = true;
      else if (key == "zeros") p.zeros = true;
      else refuse(word, "key=value, or one of causal, alibi, sinks, lse, seqlens, ring, zeros");
      continue;
    }
    const std::string_view value = word.substr(equals + 1);
    const auto integer = [&] { return number<std::int64_t>(word, value); };
    if (key == "dtype") {  // of those that have no word of their own
      const DType all = dtype(word, value);
      if (!given("q")) p.q_dtype = all;
      if (!given("kv")) p.kv_dtype = all;
      if (!given("out")) p.out_dtype = all;
    } else if (key == "q") p.q_dtype = dtype(word, value);
    else if (key == "kv") p.kv_dtype = dtype(word, value);
    else if (key == "out") p.out_dtype = dtype(word, value);
    else if (key == "device") {
      if (value == "cpu") p.device = DeviceType::cpu;
      else if (value == "cuda") p.device = DeviceType::cuda;
      else refuse(word, "device=cpu or device=cuda");
    } else if (key == "b") p.b = integer();
    else if (key == "hq") p.hq = integer();
    else if (key == "hk") p.hk = integer();
    else if (key == "sq") p.sq = integer();
    else if (key == "sk") p.sk = integer();
    else if (key == "d") p.d = integer();
    else if (key == "dv") p.dv = integer();
    else if (key == "window") {
      const std::size_t comma = value.find(',');
      if (comma == std::string_view::npos) refuse(word, "window=left,right");
      p.window_left = number<std::int64_t>(word, value.substr(0, comma));
      p.window_right = number<std::int64_t>(word, value.substr(comma + 1));
    } else if (key == "align") {
      p.align_offset = 0;
      if (value == "top_left") p.align = Align::top_left;
      else if (value == "bottom_right") p.align = Align::bottom_right;
      else
        p.align = Align::offset,
        p.align_offset = number<std::int64_t>(word, value, "align=top_left, bottom_right or an integer");
    } else if (key == "scale") p.has_scale = true, p.scale = number<float>(word, value);
    else if (key == "softcap") {
      p.softcap = number<float>(word, value);
      if (p.softcap == 0) refuse(word, "a softcap other than 0, or none");
    } else if (key == "bias") p.bias = broadcast(word, value);
    else if (key == "bias_dtype") p.bias_dtype = dtype(word, value);
    else if (key == "mask") p.mask = broadcast(word, value);
    else if (key == "ragged_q") p.ragged_q = integer();
    else if (key == "ragged_k") p.ragged_k = integer();
    else if (key == "page") {
      p.page_size = integer();
      if (p.page_size == 0) refuse(word, "pages of 1 row or more");
    } else if (key == "k_groups") p.k_groups = integer();
    else if (key == "v_groups") p.v_groups = integer();
    else if (key == "groups") {  // of those that have no word of their own
      const std::int64_t both = integer();
      if (!given("k_groups")) p.k_groups = both;
      if (!given("v_groups")) p.v_groups = both;
    } else if (key == "layout") {
      std::size_t i = 0;
      while (i < kLayouts.size() && value != kLayouts[i]) ++i;
      if (i == kLayouts.size()) refuse(word, "layout=bhsd, bshd, bhds or other");
      p.layout = static_cast<Layout>(i);
    } else
      refuse(word,
             "one of device dtype q kv out b hq hk sq sk d dv window align scale softcap bias bias_dtype mask ragged_q "
             "ragged_k page groups k_groups v_groups layout, each with =value, or causal alibi sinks lse seqlens ring "
             "zeros");
  }
  if (!named) refuse("", "attention and its words");
  // Text stands for one value only: NaN would differ from itself, and -0 is 0.
  if (!std::isfinite(p.scale) || !std::isfinite(p.softcap)) refuse("scale, softcap", "finite numbers");
  if (p.ragged_q < -1 || p.ragged_k < -1) refuse("ragged_q, ragged_k", "totals of 0 or more");
  if (!given("hk")) p.hk = p.hq;
  if (!given("sk")) p.sk = p.sq;
  if (!given("dv")) p.dv = p.d;
  return p;
}

std::size_t Problem::hash() const {
  return std::hash<std::string>()(to_string());
}

}  // namespace rapt
