#include "operations/append_kv/case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "operations/attention/layouts.hpp"

namespace rapt::testing {
namespace {

using std::int64_t;

double code_at(const Tensor& cache, int64_t entry, int64_t h, int64_t row, int64_t c) {
  if (cache.dtype() != DType::i4x2) return static_cast<double>(cache.at({entry, h, row, c}));
  const int byte = cache.at<std::uint8_t>({entry, h, row, c / 2}), code = c % 2 ? byte >> 4 : byte & 0xf;
  return code < 8 ? code : code - 16;
}

/// Of scales and zeros, whose entries and rows may broadcast.
double scale_at(const Tensor& scale, Slot at, int64_t h, int64_t group) {
  const auto& shape = scale.layout().shape;
  return static_cast<double>(scale.at({shape[0] == 1 ? 0 : at.entry, h, shape[2] == 1 ? 0 : at.row, group}));
}

/// Between two numbers of the type next to x.
double unit_of(DType dtype, double x) {
  if (dtype == DType::f16) return std::max(std::fabs(x) * 0x1p-10, 0x1p-24);
  return std::fabs(x) * (dtype == DType::bf16 ? 0x1p-7 : 0x1p-23);
}

bool is_poison(const Tensor& tensor, int64_t entry, int64_t row) {
  const Tensor fresh(tensor.dtype(), Layout(Dims{1}));
  const auto& [shape, strides] = std::pair{tensor.layout().shape, tensor.layout().strides};
  const std::size_t width = fresh.buffer().size();
  for (int64_t h = 0; h < shape[1]; ++h)
    for (int64_t c = 0; c < shape[3]; ++c) {
      const int64_t at = entry * strides[0] + h * strides[1] + row * strides[2] + c * strides[3];
      if (std::memcmp(tensor.buffer().data() + static_cast<std::size_t>(at) * width, fresh.buffer().data(), width) != 0)
        return false;
    }
  return true;
}

}  // namespace

AppendCase::AppendCase(const AppendKvProblem& given, std::uint64_t seed, Placement placement, Spacing spacing)
    : problem(given) {
  const AppendKvProblem& p = problem;
  std::mt19937_64 random(seed);
  if (p.ragged >= 0) {
    first_ = cumulated(ragged_lengths(p.b, p.n, p.ragged, seed, "ragged"));
    cu_seqlens = index_tensor(first_, seed, placement);
  }
  const auto between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, std::max(low, high))(random);
  };
  for (int64_t i = 0; i < p.b; ++i) {
    const int64_t room = max_keys_before(p, p.sk, count(i));
    const std::uint64_t choice = (static_cast<std::uint64_t>(i) + seed) % 4;
    before_.push_back(choice == 0 ? 0 : choice == 1 ? std::max<int64_t>(room, 0) : between(0, room));
  }
  seqlens = index_tensor(before_, seed / 2, placement);

  entries_ = p.b, rows_ = p.sk;
  if (p.page_size > 0) {
    rows_ = p.page_size;
    const int64_t columns = p.sk / rows_;
    entries_ = 3;
    for (int64_t i = 0; i < p.b; ++i) {
      Dims& own = pages_.emplace_back(static_cast<std::size_t>(columns), -1);
      for (int64_t t = 0; t < count(i) && before_[static_cast<std::size_t>(i)] + t < p.sk; ++t) {
        int64_t& page = own[static_cast<std::size_t>((before_[static_cast<std::size_t>(i)] + t) / rows_)];
        if (page < 0) page = entries_++;
      }
    }
    Dims order(static_cast<std::size_t>(entries_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    block_table = Tensor(seed % 2 ? DType::i64 : DType::i32, spaced({p.b, columns}, spacing), placement);
    for (int64_t i = 0; i < p.b; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        int64_t& page = pages_[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
        if (page >= 0) page = order[static_cast<std::size_t>(page)];
        if (seed % 2) block_table.at<int64_t>({i, j}) = page < 0 && j % 2 ? entries_ : page;
        else block_table.at<std::int32_t>({i, j}) = static_cast<std::int32_t>(page < 0 && j % 2 ? entries_ : page);
      }
  }
  // Zeros of both, or of one of them.
  const bool zeros = p.zeros && is_integer(p.kv_dtype);
  k = make(p.d, p.k_tail, p.k_groups, zeros && (p.values_are_keys || seed % 3 != 2), 2 * seed, placement, spacing);
  if (p.k_tail > 0) tail = Tensor(p.k_tail_dtype, spaced({entries_, p.hk, rows_, p.k_tail}, spacing), placement);
  if (p.values_are_keys) {
    const int64_t group = p.v_groups > 0 ? p.dv / p.v_groups : 1;
    first_column_ = between(0, (p.d - p.k_tail - p.dv) / group) * group;
    return;
  }
  v = make(p.dv, 0, p.v_groups, zeros && seed % 3 != 0, 2 * seed + 1, placement, spacing);
}

AppendCase::Side AppendCase::make(int64_t size, int64_t tail_size, int64_t groups, bool zeros, std::uint64_t seed,
                                  Placement placement, Spacing spacing) const {
  const AppendKvProblem& p = problem;
  std::mt19937_64 random(seed + 100);
  Side side;
  side.fresh = Tensor(
      p.new_dtype, spaced(p.ragged >= 0 ? Dims{p.ragged, p.hk, size} : Dims{p.b, p.hk, p.n, size}, spacing), placement);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < side.fresh.size(); ++i) {
    const int64_t row = i / size;
    const float x = normal(random) * std::exp2(static_cast<float>(row % 7 - 3) * 4);
    side.fresh.flat(i) = row % 11 == 7 ? 0 : x;
  }
  const int64_t packed = p.kv_dtype == DType::i4x2 ? 2 : 1;
  side.cache = Tensor(p.kv_dtype, spaced({entries_, p.hk, rows_, (size - tail_size) / packed}, spacing), placement);
  if (groups == 0) return side;
  // Of scales that are given, rows or entries or both have one in common; one row, or one entry, is all of them.
  const bool own_entries = seed % 3 == 0 && rows_ > 1, own_rows = seed % 3 == 1 && entries_ > 1;
  const bool given = p.given_scales;
  const Dims shape{given && !own_entries ? 1 : entries_, p.hk, given && !own_rows ? 1 : rows_, groups};
  side.scale = Tensor(DType::f32, spaced(shape, spacing), placement);
  if (zeros) side.zero = Tensor(DType::f32, spaced(shape, spacing), placement);
  if (!given) return side;
  std::uniform_real_distribution<float> uniform(-1, 1);
  const auto end = static_cast<float>(largest(p.kv_dtype));
  for (int64_t i = 0; i < side.scale.size(); ++i)
    side.scale.flat(i) = std::exp2(uniform(random)) * (is_integer(p.kv_dtype) ? 3 / end : 1);
  for (int64_t i = 0; i < side.zero.size(); ++i) side.zero.flat(i) = uniform(random) * end / 8;
  side.given_scale = side.scale.values(), side.given_zero = side.zero.values();
  return side;
}

AppendKvArgs AppendCase::args() {
  AppendKvArgs args;
  args.k_new = k.fresh.view(), args.v_new = v.fresh.view();
  MutableTensorView keys = k.cache.mutable_view(), values = v.cache.mutable_view();
  const bool shared = problem.values_are_keys;
  MutableTensorView v_scale = (shared ? k : v).scale.mutable_view(), v_zero = (shared ? k : v).zero.mutable_view();
  if (shared) {
    args.v_new = slice(args.k_new, args.k_new.ndim - 1, first_column_, problem.dv);
    const int64_t packed = problem.kv_dtype == DType::i4x2 ? 2 : 1;
    values = slice(keys, 3, first_column_ / packed, problem.dv / packed);
    if (problem.v_groups > 0) {
      const int64_t first_group = first_column_ / (problem.dv / problem.v_groups);
      v_scale = slice(v_scale, 3, first_group, problem.v_groups);
      if (v_zero) v_zero = slice(v_zero, 3, first_group, problem.v_groups);
    }
  }
  args.cache = cache_of(problem, keys, values, block_table.view())
                   .quantized(k.scale.mutable_view(), v_scale, k.zero.mutable_view(), v_zero)
                   .with_tail(tail.mutable_view());
  args.seqlens = seqlens.view(), args.cu_seqlens = cu_seqlens.view();
  return args;
}

void AppendCase::protect_inputs() {
  for (Tensor* tensor : {&k.fresh, &v.fresh, &seqlens, &cu_seqlens, &block_table}) tensor->buffer().protect();
  if (problem.given_scales)
    for (Tensor* tensor : {&k.scale, &v.scale, &k.zero, &v.zero}) tensor->buffer().protect();
}

std::vector<Tensor*> AppendCase::outputs() {
  std::vector<Tensor*> tensors{&k.cache, &v.cache, &tail};
  if (!problem.given_scales) tensors.insert(tensors.end(), {&k.scale, &v.scale, &k.zero, &v.zero});
  return tensors;
}

void AppendCase::clear() {
  for (Tensor* tensor : outputs()) tensor->poison();
}

int64_t AppendCase::count(int64_t i) const {
  const auto at = static_cast<std::size_t>(i);
  return first_.empty() ? problem.n : first_[at + 1] - first_[at];
}

Slot AppendCase::slot(int64_t i, int64_t t) const {
  const auto at = static_cast<std::size_t>(i);
  const int64_t j = before_[at] + t;
  if (t < first_kept(problem, problem.sk, count(i))) return {};
  if (problem.page_size > 0) return {pages_[at][static_cast<std::size_t>(j / rows_)], j % rows_};
  return {i, row_in_entry(problem, problem.sk, j)};
}

float AppendCase::row_at(const Tensor& fresh, int64_t i, int64_t t, int64_t h, int64_t c) const {
  return first_.empty() ? fresh.at({i, h, t, c}) : fresh.at({first_row(i) + t, h, c});
}

void AppendCase::compare_row(const Side& side, int64_t i, int64_t t, int64_t h, Tally& tally, const Made* made) const {
  const DType dtype = side.cache.dtype();
  const int64_t size = side.cache.layout().shape[3] * (dtype == DType::i4x2 ? 2 : 1);
  const int64_t group = side.scale ? size / side.scale.layout().shape[3] : size;
  const Slot to = slot(i, t);
  const auto fresh = [&](int64_t c) { return row_at(made ? made->x : side.fresh, i, t, h, c); };
  const auto off = [&](int64_t c) { return made ? static_cast<double>(row_at(made->off, i, t, h, c)) : 0; };
  // A number that is off before it is rounded may be rounded to the next one.
  const auto add_float = [&](const Tensor& tensor, float got, int64_t c) {
    const auto wanted = static_cast<double>(rounded(fresh(c), tensor.dtype()));
    tally.add(static_cast<double>(got), wanted, off(c) > 0 ? off(c) + unit_of(tensor.dtype(), wanted) : 0);
  };
  if (&side == &k)
    for (int64_t c = 0; c < problem.k_tail; ++c) add_float(tail, tail.at({to.entry, h, to.row, c}), size + c);
  for (int64_t begin = 0; begin < size; begin += group) {
    double most = 0, low = HUGE_VAL, high = -HUGE_VAL, most_off = 0;
    for (int64_t c = begin; c < begin + group; ++c) {
      const auto x = static_cast<double>(fresh(c));
      most_off = std::max(most_off, off(c));
      most = std::max(most, std::fabs(x)), low = std::min(low, x), high = std::max(high, x);
    }
    const double scale = side.scale ? scale_at(side.scale, to, h, begin / group) : 1;
    const double zero = side.zero ? scale_at(side.zero, to, h, begin / group) : 0;
    const double end = is_integer(dtype) || is_fp8(dtype) ? largest(dtype) : 0;
    const double first = is_integer(dtype) ? -end - 1 : -end;
    if (side.scale && !problem.given_scales) {
      const double computed = side.zero ? std::max((high - low) / (2 * end + 1), most * 0x1p-20) : most / end;
      const double wanted = most == 0 ? 1 : std::max(computed, 0x1p-126);
      if (!(std::fabs(scale - wanted) <= wanted * 0x1p-23 + 2 * most_off / end))
        tally.violate("a scale is " + std::to_string(scale) + " in place of " + std::to_string(wanted));
    }
    for (int64_t c = begin; c < begin + group; ++c) {
      const float given = fresh(c);
      const auto x = static_cast<double>(given);
      const double code = code_at(side.cache, to.entry, h, to.row, c);
      if (!is_integer(dtype) && !is_fp8(dtype)) {
        add_float(side.cache, static_cast<float>(code), c);
        continue;
      }
      const double inside = std::clamp(x, (first - zero) * scale, (end - zero) * scale);
      const double relative = dtype == DType::f8e4m3 ? 0x1p-4 : 0x1p-3,
                   unit = dtype == DType::f8e4m3 ? 0x1p-10 : 0x1p-17;
      const double bound = is_integer(dtype) ? scale / 2 : std::max(relative * std::fabs(inside), unit * scale);
      tally.add((code - zero) * scale, inside, bound + most * 0x1p-21 + 2 * off(c));
    }
  }
}

void AppendCase::compare(const Side& side, int64_t row_step, Tally& tally, const Made* made) const {
  std::vector<bool> written(static_cast<std::size_t>(entries_ * rows_));
  for (int64_t i = 0; i < problem.b; ++i) {
    const int64_t n = count(i), kept = first_kept(problem, problem.sk, n);
    for (int64_t t = kept; t < n; ++t) {
      const Slot to = slot(i, t);
      written[static_cast<std::size_t>(to.entry * rows_ + to.row)] = true;
    }
    for (int64_t t = kept; t < n; t = next_row(t, row_step, n))
      for (int64_t h = 0; h < problem.hk; ++h) compare_row(side, i, t, h, tally, made);
  }
  std::vector<const Tensor*> outputs{&side.cache};
  if (&side == &k) outputs.push_back(&tail);
  if (!problem.given_scales) outputs.insert(outputs.end(), {&side.scale, &side.zero});
  for (const Tensor* tensor : outputs) {
    if (!*tensor) continue;
    for (std::size_t at = 0; at < written.size(); ++at)
      if (!written[at] && !is_poison(*tensor, static_cast<int64_t>(at) / rows_, static_cast<int64_t>(at) % rows_))
        tally.violate("a row that no new row goes to was written");
    if (!tensor->gaps_intact()) tally.violate("memory between the elements of the cache was written");
  }
  if (problem.given_scales && (side.scale.values() != side.given_scale || side.zero.values() != side.given_zero))
    tally.violate("a scale or zero that was given was written");
}

Verdict AppendCase::verdict(int64_t row_step) const {
  Tally tally;
  compare(row_step, tally);
  return tally.verdict();
}

void AppendCase::compare(int64_t row_step, Tally& tally, const Made* keys) const {
  compare(k, row_step, tally, keys);
  if (!problem.values_are_keys) compare(v, row_step, tally, nullptr);
}

std::vector<DType> CaseOf<AppendKvProblem>::types(const AppendKvProblem& p) {
  return {p.new_dtype, p.kv_dtype};
}
double CaseOf<AppendKvProblem>::tensor_bytes(const AppendKvProblem& p) {
  const double rows = real(p.hk) * (p.ragged >= 0 ? real(p.ragged) : real(p.b) * real(p.n));
  const double keys = real(p.hk) * real(p.b) * real(p.sk), size = real(p.values_are_keys ? p.d : p.d + p.dv);
  const double groups = real(p.values_are_keys ? p.k_groups : p.k_groups + p.v_groups);
  const double scales = p.given_scales ? 0 : groups * (p.zeros ? 8 : 4);
  return rows * size * bytes_of(p.new_dtype) +
         keys * ((size - real(p.k_tail)) * bytes_of(p.kv_dtype) + real(p.k_tail) * bytes_of(p.k_tail_dtype) + scales);
}
CaseOf<AppendKvProblem>::Sizes CaseOf<AppendKvProblem>::sizes(const AppendKvProblem& p) {
  return {{"b", p.b}, {"hk", p.hk}, {"n", p.n}, {"sk", p.sk}, {"d", p.d}, {"dv", p.dv}};
}

void move_tensors(AppendKvArgs& args, DeviceTensors& tensors) {
  KvCache& cache = args.cache;
  for (TensorView* t : {&args.k_new, &args.v_new, &args.seqlens, &args.cu_seqlens, &cache.block_table})
    tensors.move(*t);
  // Scales and zeros that broadcast are inputs.
  for (MutableTensorView* t :
       {&cache.k, &cache.v, &cache.k_tail, &cache.k_scale, &cache.v_scale, &cache.k_zero, &cache.v_zero})
    tensors.move(*t);
}

}  // namespace rapt::testing
