#include "operations/attention/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "operations/attention/layouts.hpp"
#include "support/device.hpp"
#include "support/fill.hpp"

namespace rapt::testing {
namespace {

using Generator = std::mt19937_64;

/// [b, h, s, d], or the ragged [total, h, d] when total >= 0.
Layout tensor_layout(AttentionProblem::Layout layout, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d,
                     std::int64_t total) {
  using enum AttentionProblem::Layout;
  if (total >= 0) {
    const Dims shape{total, h, d};
    switch (layout) {
      case bhsd:
      case bshd:
        return Layout(shape);
      case bhds:
        return layout_of(shape, {1, 2, 0});
      case other:
        return layout_of(shape, {1, 0, 2}, 2, 3);
    }
  }
  const Dims shape{b, h, s, d};
  switch (layout) {
    case bhsd:
      return layout_of(shape, {0, 1, 2, 3});
    case bshd:
      return layout_of(shape, {0, 2, 1, 3});
    case bhds:
      return layout_of(shape, {0, 1, 3, 2});
    case other:
      break;
  }
  return layout_of(shape, {0, 1, 2, 3}, 2, 3);
}

/// The pages of each sequence, [b][pages in use], and how many pages there are in all: three are nobody's. Every second
/// sequence shares the full pages that it has in common with the first.
struct Pages {
  std::vector<Dims> of;
  std::int64_t count = 0;

  Pages(const Dims& lengths, std::int64_t page_size, std::uint64_t seed, Generator random) {
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      Dims own(static_cast<std::size_t>((lengths[n] + page_size - 1) / page_size));
      const bool shares = n > 0 && (n + seed) % 2 == 1;
      const auto shared = static_cast<std::size_t>(shares ? std::min(lengths[0], lengths[n]) / page_size : 0);
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = i < shared ? of[0][i] : count++;
      of.push_back(own);
    }
    Dims shuffled(static_cast<std::size_t>(count += 3));
    for (std::size_t i = 0; i < shuffled.size(); ++i) shuffled[i] = static_cast<std::int64_t>(i);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (Dims& own : of)
      for (std::int64_t& page : own) page = shuffled[static_cast<std::size_t>(page)];
  }

  /// [b, n] with nonsense where a sequence has no page.
  Tensor table(const AttentionProblem& p, std::uint64_t seed, Placement placement) const {
    const Dims shape{p.b, p.sk / p.page_size};
    const bool wide = seed % 2 == 1;
    Tensor tensor(wide ? DType::i64 : DType::i32,
                  p.layout == AttentionProblem::Layout::other ? layout_of(shape, {0, 1}, 2, 3) : Layout(shape),
                  placement);
    for (std::int64_t n = 0; n < shape[0]; ++n) {
      const Dims& own = of[static_cast<std::size_t>(n)];
      for (std::int64_t i = 0; i < shape[1]; ++i) {
        const std::int64_t page = i < std::ssize(own) ? own[static_cast<std::size_t>(i)]
                                  : (n + i) % 2       ? -1
                                  : wide              ? std::int64_t{1} << 60
                                                      : std::numeric_limits<std::int32_t>::max();
        if (wide) tensor.at<std::int64_t>({n, i}) = page;
        else tensor.at<std::int32_t>({n, i}) = static_cast<std::int32_t>(page);
      }
    }
    return tensor;
  }
};

/// The lists of gathered keys, and the rows of k that are on some.
struct Lists {
  std::int64_t entries, rows;  // k is [entries, hk, rows, d]
  Tensor indices, counts;
  std::vector<bool> is_listed;  // [entries][rows]

  Lists(const AttentionProblem& p, std::optional<std::int64_t> pool, std::uint64_t seed, Generator random,
        Placement placement)
      : entries(seed % 3 == 2 ? 1 : p.b),
        rows(pool.value_or(p.sk + 5)),
        is_listed(static_cast<std::size_t>(entries * rows)) {
    const auto between = [&](std::int64_t low, std::int64_t high) {
      return std::uniform_int_distribution<std::int64_t>(low, high)(random);
    };
    const bool wide = seed % 2 == 1, has_counts = seed / 2 % 2 == 1,
               spaced = p.layout == AttentionProblem::Layout::other;
    const auto make = [&](const Dims& shape) {
      Dims order;
      for (std::size_t i = 0; i < shape.size(); ++i) order.push_back(static_cast<std::int64_t>(i));
      return Tensor(wide ? DType::i64 : DType::i32, spaced ? layout_of(shape, order, 2, 3) : Layout(shape), placement);
    };
    const auto set = [&](Tensor& t, std::int64_t i, std::int64_t value) {
      if (wide) t.flat<std::int64_t>(i) = value;
      else t.flat<std::int32_t>(i) = static_cast<std::int32_t>(value);
    };
    indices = make({p.b, p.sq, p.sk});
    if (has_counts) counts = make({p.b, p.sq});
    for (std::int64_t token = 0; token < p.b * p.sq; ++token) {
      const std::uint64_t choice = (static_cast<std::uint64_t>(token) + seed) % 5;
      // Full, full but for gaps, shorter, shorter with gaps, empty.
      const std::int64_t length = choice == 4 ? 0 : choice < 2 ? p.sk : between(0, p.sk);
      const std::int64_t count = has_counts ? between(length, p.sk) : p.sk;
      if (has_counts) set(counts, token, count);
      for (std::int64_t j = 0; j < p.sk; ++j) {
        std::int64_t row = between(0, std::max<std::int64_t>(rows - 3, 0));
        if (rows == 0 || j >= length || (choice % 2 == 1 && between(0, 3) == 0)) row = -between(1, 9);
        if (j < count && row >= 0)
          is_listed[static_cast<std::size_t>((entries == 1 ? 0 : token / p.sq) * rows + row)] = true;
        if (j >= count && j % 2 == 0) row = std::numeric_limits<std::int32_t>::max();
        set(indices, token * p.sk + j, row);
      }
    }
  }
};

}  // namespace

AttentionProblem typed(const std::string& text, DType dtype) {
  AttentionProblem problem = AttentionProblem::parse(text);
  problem.q_dtype = problem.kv_dtype = problem.out_dtype = dtype;
  return problem;
}

Case::Case(const AttentionProblem& given, std::uint64_t seed, Placement placement, std::optional<std::int64_t> pool)
    : problem(given) {
  const AttentionProblem& p = problem;
  const auto generator = [seed](std::uint64_t tensor) { return Generator(seed * 64 + tensor); };
  const auto make = [&](DType dtype, std::int64_t h, std::int64_t s, std::int64_t d, std::int64_t total) {
    return Tensor(dtype, tensor_layout(p.layout, p.b, h, s, d, total), placement);
  };
  q = make(p.q_dtype, p.hq, p.sq, p.d, p.ragged_q);
  out = make(p.out_dtype, p.hq, p.sq, p.dv, p.ragged_q);
  fill_normal(q, generator(0));
  if (p.q_scale) scale_queries(seed, placement);

  if (p.ragged_q >= 0) {
    cu_seqlens_q = index_tensor(cumulated(ragged_lengths(p.b, p.sq, p.ragged_q, seed, "ragged_q")), seed, placement);
  }
  if (p.ragged_k >= 0) {
    const Dims lengths = ragged_lengths(p.b, p.sk, p.ragged_k, seed, "ragged_k");
    cu_seqlens_k = index_tensor(cumulated(lengths), seed / 2, placement);
  }
  make_keys(seed, placement, pool);

  if (p.lse) {
    lse = p.ragged_q >= 0 ? Tensor(DType::f32, Layout(Dims{p.ragged_q, p.hq}), placement)
                          : Tensor(DType::f32, Layout(Dims{p.b, p.hq, p.sq}), placement);
  }
  make_modifiers(p, seed, placement);
}

void Case::scale_queries(std::uint64_t seed, Placement placement) {
  const Layout& rows = q.layout();
  const auto last = static_cast<std::size_t>(rows.ndim - 1);
  Dims shape(rows.shape.begin(), rows.shape.begin() + rows.ndim);
  shape[last] = 1;
  if (seed % 2 == 0) shape[0] = 1;
  if (rows.ndim == 4 && seed / 2 % 2 == 0) shape[2] = 1;
  q_scale = Tensor(DType::f32, Layout(shape), placement);
  Generator random(seed * 64 + 14);
  std::uniform_real_distribution<float> power(-1, 1);
  for (std::int64_t i = 0; i < q_scale.size(); ++i)
    q_scale.flat(i) = std::exp2(power(random)) * (random() % 4 == 0 ? -1.f : 1.f);
}

void Case::make_keys(std::uint64_t seed, Placement placement, std::optional<std::int64_t> pool) {
  const AttentionProblem& p = problem;
  const auto generator = [seed](std::uint64_t tensor) { return Generator(seed * 64 + tensor); };
  std::optional<Lists> lists;
  if (!has_positions(p)) {
    lists.emplace(p, pool, seed, generator(12), placement);
    indices = std::move(lists->indices), counts = std::move(lists->counts);
  }
  const std::int64_t entries = lists ? lists->entries : p.b, rows = lists ? lists->rows : p.sk;
  const bool ragged = p.ragged_k >= 0, paged = p.page_size > 0;
  if (paged && !p.kv_lengths) throw std::logic_error("a case in pages has lengths: " + p.to_string());
  Dims lengths;
  if (p.kv_lengths) {
    lengths = key_lengths(p, seed, generator(3));
    seqlens = index_tensor(lengths, seed, placement);
  }
  const Pages pages(paged ? lengths : Dims{}, std::max<std::int64_t>(p.page_size, 1), seed, generator(8));
  if (paged) block_table = pages.table(p, seed, placement);
  const auto slot = [&](std::int64_t n, std::int64_t j) -> Slot {
    if (!lengths.empty() && j >= lengths[static_cast<std::size_t>(n)]) return {};
    if (lists && !lists->is_listed[static_cast<std::size_t>(n * rows + j)]) return {};
    if (!paged) return {n, lists ? j : row_in_entry(p, rows, j)};
    return {pages.of[static_cast<std::size_t>(n)][static_cast<std::size_t>(j / p.page_size)], j % p.page_size};
  };
  const auto make = [&](DType dtype, std::int64_t d, std::int64_t groups, bool zeros, std::uint64_t tensor) {
    const std::int64_t inner = dtype == DType::i4x2 ? d / 2 : d;
    const Layout layout = paged ? tensor_layout(p.layout, pages.count, p.hk, p.page_size, inner, -1)
                                : tensor_layout(p.layout, entries, p.hk, rows, inner, p.ragged_k);
    const bool by_entries = paged || ragged || (seed + tensor) % 2 == 0;
    const Cache::Shared shared = p.head_scales ? Cache::Shared{true, by_entries} : Cache::Shared::some(seed + tensor);
    Cache cache(dtype, layout, groups, shared, zeros, seed + tensor, placement);
    Tensor values(DType::f32, Layout(ragged ? Dims{p.ragged_k, p.hk, 1, d} : Dims{entries, p.hk, rows, d}));
    fill_normal(values, generator(tensor));
    cache.fill(values, slot, generator(8 + tensor));
    return cache;
  };
  // Zeros of both, or of one of them.
  shares_coding = can_share_coding(p) && seed / 2 % 2 == 0;
  const bool k_zeros = p.zeros && p.k_groups > 0 && (seed % 3 != 2 || p.v_groups == 0 || shares_coding);
  const bool v_zeros = p.zeros && p.v_groups > 0 && (seed % 3 != 0 || p.k_groups == 0);
  Cache keys = make(p.kv_dtype, p.d - p.k_tail, p.k_groups, k_zeros, 1),
        values = make(p.kv_dtype, p.dv, p.v_groups, v_zeros, 2);
  k = std::move(keys.rows), k_scale = std::move(keys.scale), k_zero = std::move(keys.zero);
  v = std::move(values.rows), v_scale = std::move(values.scale), v_zero = std::move(values.zero);
  if (p.k_tail > 0) k_tail = make(p.k_tail_dtype, p.k_tail, 0, false, 13).rows;
  const auto is_of_heads = [&](const Tensor& scale) {
    const auto& shape = scale.layout().shape;
    return !scale || (ragged ? shape[0] == 1 : shape[2] == 1 && (!paged || shape[0] == 1));
  };
  problem.head_scales = (k_scale || v_scale) && is_of_heads(k_scale) && is_of_heads(shares_coding ? k_scale : v_scale);
}

bool Case::can_share_coding(const AttentionProblem& p) {
  return p.latent && p.k_groups > 0 && p.v_groups > 0 && (p.d - p.k_tail) / p.k_groups == p.dv / p.v_groups;
}

AttentionArgs Case::args() {
  AttentionArgs args;
  args.q = q.view(), args.q_scale = q_scale.view();
  const TensorView keys = k.view();
  const std::int64_t inner = problem.kv_dtype == DType::i4x2 ? problem.dv / 2 : problem.dv;
  const TensorView values = problem.latent ? slice(keys, keys.ndim - 1, 0, inner) : v.view();
  args.kv = source_of(problem, keys, values,
                      {cu_seqlens_k.view(), block_table.view(), seqlens.view(), indices.view(), counts.view()});
  const auto coding_of_v = [&](const Tensor& of_k, const Tensor& of_v) {
    const TensorView t = of_k.view();
    return !shares_coding ? of_v.view() : t ? slice(t, t.ndim - 1, 0, problem.v_groups) : t;
  };
  args.kv = args.kv.quantized(k_scale.view(), coding_of_v(k_scale, v_scale), k_zero.view(), coding_of_v(k_zero, v_zero))
                .with_tail(k_tail.view());
  args.out = out.mutable_view();
  args.lse = lse.mutable_view();
  args.cu_seqlens_q = cu_seqlens_q.view();
  ScoreSpec& score = args.score;
  if (problem.has_scale) score.scale = problem.scale;
  score.causal = problem.causal;
  if (problem.window_left >= 0 || problem.window_right >= 0) {
    score.window = Window{problem.window_left, problem.window_right};
  }
  score.align = align_of(problem);
  give_modifiers(problem, score);
  return args;
}

void Case::protect_inputs() {
  for (Tensor* tensor : {&q, &q_scale, &k, &v, &seqlens, &cu_seqlens_q, &cu_seqlens_k, &block_table, &indices, &counts,
                         &k_scale, &v_scale, &k_zero, &v_zero, &k_tail}) {
    tensor->buffer().protect();
  }
  for (Tensor* tensor : modifiers()) tensor->buffer().protect();
}

void Case::poison_outputs() {
  out.poison();
  lse.poison();
}

Slot Case::slot(std::int64_t n, std::int64_t j) const {
  if (problem.page_size > 0) return {index_at(block_table, {n, j / problem.page_size}), j % problem.page_size};
  return {n, row_in_entry(problem, problem.sk, j)};
}

void move_inputs(AttentionArgs& args, DeviceTensors& tensors) {
  // Nobody can see there that lengths are equal; here they are, or this throws.
  if (!args.score.align && has_positions(args.kv)) {
    AttentionProblem::of(args);
    args.score.align = Align::top_left();
  }
  KvSource& kv = args.kv;
  ScoreSpec& score = args.score;
  for (TensorView* t : {&args.q, &args.q_scale, &kv.k, &kv.v, &kv.k_scale, &kv.v_scale, &kv.k_zero, &kv.v_zero,
                        &kv.k_tail, &kv.seqlens, &kv.cu_seqlens, &kv.block_table, &kv.indices, &kv.counts, &score.bias,
                        &score.mask, &score.alibi, &score.sinks, &args.cu_seqlens_q})
    tensors.move(*t);
}
void move_tensors(AttentionArgs& args, DeviceTensors& tensors) {
  move_inputs(args, tensors);
  for (MutableTensorView* t : {&args.out, &args.lse}) tensors.move(*t);
}

}  // namespace rapt::testing
