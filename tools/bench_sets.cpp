#include "bench_sets.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common.hpp"

namespace rapt::tools {
namespace {

std::vector<std::string> paper_set() {
  std::vector<std::string> texts;
  for (int d : {64, 128}) {
    for (int s : {128, 512, 1024, 2048, 4096}) {
      for (const char* causal : {"", " causal"}) texts.push_back(fmt::format("b=1 hq=8 sq={} d={}{}", s, d, causal));
    }
  }
  return texts;
}

std::vector<std::string> quick_set() {
  return {"b=1 hq=8 sq=128 d=64",  "b=1 hq=8 sq=128 d=64 causal",
          "b=1 hq=8 sq=512 d=64",  "b=1 hq=8 sq=512 d=64 causal",
          "b=1 hq=8 sq=1024 d=64", "b=1 hq=8 sq=1024 d=64 causal",
          "b=1 hq=8 sq=512 d=128", "b=1 hq=8 sq=512 d=128 causal",
          "b=1 hq=8 sq=512 d=80",  "b=1 hq=8 hk=2 sq=512 d=64 causal layout=bshd"};
}

std::vector<std::string> halves_set() {
  std::vector<std::string> texts;
  for (const char* dtype : {"bf16", "f16"}) {
    for (int d : {64, 128}) {
      for (int s : {512, 1024, 4096}) {
        for (const char* causal : {"", " causal"})
          texts.push_back(fmt::format("dtype={} b=1 hq=8 sq={} d={}{}", dtype, s, d, causal));
      }
    }
  }
  return texts;
}

/// What reading keys and values bounds: every type, group and way to keep them.
std::vector<std::string> decode_set() {
  const std::string one_token = "b=1 hq=32 hk=8 sq=1 sk=32768 d=128";
  std::vector<std::string> texts;
  for (const char* types : {"dtype=f32", "dtype=bf16", "dtype=f16", "dtype=bf16 kv=i8 groups=1", "dtype=bf16 kv=f8e4m3",
                            "dtype=bf16 kv=f8e5m2", "dtype=bf16 kv=i4x2 groups=4"})
    texts.push_back(fmt::format("{} {}", types, one_token));
  for (const char* text : {"b=1 hq=8 sq=1 sk=32768 d=128", "b=1 hq=64 hk=8 sq=1 sk=32768 d=128",
                           "b=1 hq=32 hk=8 sq=4 sk=32768 d=128 causal align=bottom_right",
                           "b=16 hq=32 hk=8 sq=1 sk=2048 d=128 seqlens page=16", "b=1 hq=1 sq=1 sk=131072 d=128",
                           "b=1 hq=32 hk=8 sq=1 sk=65536 d=128 window=32767,0 align=bottom_right",
                           "b=1 hq=32 hk=8 sq=1 sk=32768 d=128 seqlens ring", "b=1 hq=32 hk=8 sq=1 sk=1024 d=128"})
    texts.push_back(fmt::format("dtype=bf16 {}", text));
  return texts;
}

std::vector<std::string> full_set() {
  std::vector<std::string> texts = paper_set();
  for (int d : {32, 40, 72, 80, 96, 112, 160, 192, 256}) {
    texts.push_back(fmt::format("b=1 hq=8 sq=1024 d={}", d));
    texts.push_back(fmt::format("b=1 hq=8 sq=1024 d={} causal", d));
  }
  for (int d : {64, 128}) {
    for (const char* layout : {"bshd", "bhds"}) {
      texts.push_back(fmt::format("b=1 hq=8 sq=1024 d={} layout={}", d, layout));
    }
    texts.push_back(fmt::format("b=1 hq=16 sq=1024 d={} causal layout=bshd", d));
    texts.push_back(fmt::format("b=1 hq=8 hk=2 sq=1024 d={} causal", d));
    texts.push_back(fmt::format("b=1 hq=8 hk=1 sq=1024 d={} causal", d));
  }
  for (const char* text : {// Sizes that are no multiple of a block, and ones too small for the threads to pay.
                           "b=1 hq=12 sq=197 d=64", "b=1 hq=16 sq=257 d=80", "b=1 hq=8 sq=1500 d=64",
                           "b=32 hq=12 sq=16 d=32", "b=8 hq=12 sq=32 d=64", "b=1 hq=8 sq=64 d=64 causal",
                           "b=1 hq=8 sq=1 sk=1024 d=64", "b=1 hq=8 sq=7 sk=1024 d=128",
                           // Cross attention to a text prompt.
                           "b=1 hq=8 sq=4096 sk=77 d=40", "b=1 hq=8 sq=1024 sk=77 d=64",
                           // Sparse by position, and long.
                           "b=1 hq=8 sq=4096 d=64 causal window=256,0", "b=1 hq=8 sq=1024 d=64 window=64,64",
                           "b=1 hq=8 sq=512 sk=2048 d=64 causal align=bottom_right", "b=1 hq=2 sq=16384 d=64 causal",
                           "b=1 hq=2 sq=16384 d=128",
                           // The head sizes of latent attention.
                           "b=1 hq=16 hk=1 sq=256 d=576 dv=512 causal",
                           // What happens to scores.
                           "b=1 hq=8 sq=1024 d=64 bias=hqk", "b=4 hq=8 sq=512 d=64 mask=bk",
                           "b=1 hq=8 sq=1024 d=64 causal alibi", "b=1 hq=8 sq=1024 d=64 causal softcap=30",
                           "b=1 hq=8 sq=1024 d=64 causal sinks lse", "b=4 hq=8 sq=512 d=64 seqlens"}) {
    texts.emplace_back(text);
  }
  return texts;
}

/// One value of a 1-D i32 or i64 tensor.
std::int64_t element(const TensorView& view, std::int64_t index) {
  index *= view.strides[0];
  if (view.dtype == DType::i32) return static_cast<const std::int32_t*>(view.data)[index];
  return static_cast<const std::int64_t*>(view.data)[index];
}

std::int64_t offset_of(const ScoreSpec& score, std::int64_t len_q, std::int64_t len_k) {
  if (!score.align) return 0;
  switch (score.align->kind) {
    case Align::Kind::top_left:
      return 0;
    case Align::Kind::bottom_right:
      return len_k - len_q;
    case Align::Kind::offset:
      return score.align->value;
  }
  return 0;
}

/// What the rows of a sequence see of its keys [gone, len_k).
struct Attended {
  std::int64_t pairs = 0;  ///< (row, key)
  std::int64_t keys = 0;   ///< that some row sees

  Attended(const ScoreSpec& score, std::int64_t len_q, std::int64_t gone, std::int64_t len_k) {
    const std::int64_t offset = offset_of(score, len_q, len_k);
    const std::int64_t left = score.window ? score.window->left : -1;
    const std::int64_t right = score.window ? score.window->right : -1;
    std::int64_t next = gone;  // rows see ranges that move on: keys before this one are counted
    for (std::int64_t i = 0; i < len_q; ++i) {
      const std::int64_t here = i + offset;
      const std::int64_t first = left < 0 ? gone : std::max(gone, here - left);
      std::int64_t end = len_k;
      if (score.causal) end = std::min(end, here + 1);
      if (right >= 0) end = std::min(end, here + right + 1);
      pairs += std::max<std::int64_t>(0, end - first);
      keys += std::max<std::int64_t>(0, end - std::max(first, next));
      next = std::max(next, end);
    }
  }
};

/// Of `rows` rows of n elements.
double row_bytes(std::int64_t rows, std::int64_t n, DType dtype) {
  return static_cast<double>(rows) * static_cast<double>(n) * bytes_of(dtype);
}

/// Of scales or zeros for `rows` rows. Where they broadcast, there are fewer.
double scale_bytes(const TensorView& t, std::int64_t rows) {
  if (!t) return 0;
  std::int64_t size = 1;
  for (int dim = 0; dim < t.ndim; ++dim) size *= t.shape[static_cast<std::size_t>(dim)];
  return static_cast<double>(std::min(size, rows * t.shape[static_cast<std::size_t>(t.ndim - 1)])) * sizeof(float);
}

}  // namespace

ProblemSet problem_set(std::string_view name) {
  std::vector<std::string> texts;
  double seconds = 1.1;
  if (name == "quick") {
    texts = quick_set();
    seconds = 0.4;
  } else if (name == "paper") {
    texts = paper_set();
  } else if (name == "halves") {
    texts = halves_set();
  } else if (name == "decode") {
    texts = decode_set();
  } else if (name == "full") {
    texts = full_set();
  } else {
    throw UsageError(fmt::format("--set {}: no such set; wanted quick, paper, halves, decode or full", name));
  }
  ProblemSet set{{}, seconds};
  for (const std::string& text : texts) set.problems.push_back(Problem::parse("attention " + text));
  return set;
}

Cost cost_of(const AttentionArgs& args, const Problem& p) {
  std::int64_t pairs = 0, rows = 0, keys = 0;
  const TensorView &starts_q = args.cu_seqlens_q, &starts_k = args.kv.cu_seqlens;
  for (std::int64_t n = 0; n < p.b; ++n) {
    const std::int64_t len_q = starts_q ? element(starts_q, n + 1) - element(starts_q, n) : p.sq;
    std::int64_t len_k = starts_k ? element(starts_k, n + 1) - element(starts_k, n) : p.sk;
    if (args.kv.seqlens) len_k = element(args.kv.seqlens, n);
    const std::int64_t gone = p.ring ? std::max<std::int64_t>(0, len_k - p.sk) : 0;
    const Attended attended(args.score, len_q, gone, len_k);
    pairs += attended.pairs;
    rows += len_q;
    keys += attended.keys;
  }
  rows *= p.hq, keys *= p.hk;
  Cost cost;
  cost.flops = 2 * static_cast<double>(pairs) * static_cast<double>(p.hq) * static_cast<double>(p.d + p.dv);
  cost.bytes =
      row_bytes(rows, p.d, p.q_dtype) + row_bytes(keys, p.d + p.dv, p.kv_dtype) + row_bytes(rows, p.dv, p.out_dtype);
  for (const TensorView* t : {&args.kv.k_scale, &args.kv.k_zero, &args.kv.v_scale, &args.kv.v_zero})
    cost.bytes += scale_bytes(*t, keys);
  return cost;
}

}  // namespace rapt::tools
