#include "operations/attention/cpu_choice.hpp"

#include <algorithm>

#include "cpu/entry.hpp"
#include "operations/attention/check.hpp"

namespace rapt::cpu {
namespace {

// Where rows fill a kernel's vectors, that kernel is 1.0x to 1.7x faster than attention_decode, on AVX2 and AVX-512,
// up to this many elements of keys and values per row (docs/internals/decode.md).
constexpr std::int64_t kFewKeyElements = 1024;

// Whether the sequence repays the kernel's setup.
bool is_worthwhile(const AttentionKernel& kernel, const SequenceSize& size) {
  return size.rows >= kernel.min_rows && size.key_elements >= kernel.min_key_elements;
}

// Whether attention_decode is faster for the sequence than `kernel`, which is worthwhile for it. attention_decode reads
// keys fast, but `kernel` is faster if rows fill its vectors and the keys stay in the nearest caches. (It would have to
// pack quantised keys.)
bool decode_is_faster(const AttentionKernel& kernel, const SequenceSize& size, bool quantised) {
  if (size.rows > kernel.decode_rows) return false;
  const bool fills_vectors = kernel.full_rows > 0 && size.rows >= kernel.full_rows && !quantised;
  return !fills_vectors || size.key_elements > kFewKeyElements * size.rows;
}

bool is_quantised(const AttentionProblem& p) {
  return (set_of(p.kv_dtype) & kFloatTypes) == 0;
}

bool is_decode(const AttentionCandidate& candidate) {
  return candidate.kernel->facts.phase == Phase::decode;
}

// Whether dispatch may choose the kernel: neither a kernel nor an ISA is forced.
bool is_free(const Context::Impl& context) {
  return !context.forces_one(Operation::attention) && !context.isa_forced;
}

std::string_view refuse_context(const AttentionCandidate& candidate, const Context::Impl& context) {
  if (context.isa_forced && candidate.support->isa != *context.options.isa) return "RAPT_ISA asks for another ISA";
  return refuse_isa(*candidate.support, context);
}

// f8e4m3 queries are widened to fp32, which not every kernel takes.
bool takes_queries(const AttentionKernel& kernel, const AttentionProblem& p) {
  return p.q_dtype != DType::f8e4m3 || (set_of(DType::f32) & kernel.facts.dtypes) != 0;
}

// Whether the kernel takes these groups, zeros and tails of quantised keys and values.
bool takes_cache(const AttentionKernel& kernel, const AttentionProblem& p) {
  const std::int64_t multiple = kernel.group_multiple;
  if (multiple == 0) return true;
  const auto takes = [&](std::int64_t groups, std::int64_t n) { return groups <= 1 || n / groups % multiple == 0; };
  const bool takes_tail = p.k_tail == 0 || (set_of(p.k_tail_dtype) & kernel.facts.dtypes && p.k_tail % multiple == 0 &&
                                            p.d % multiple == 0);
  return !p.zeros && takes_tail && takes(p.k_groups, p.d - p.k_tail) && takes(p.v_groups, p.dv);
}

// Whether the kernel takes the types on this machine and in this context, whatever the sizes.
bool is_usable(const AttentionCandidate& candidate, const AttentionProblem& p, const Context::Impl& context) {
  const AttentionKernel& kernel = *candidate.kernel;
  return candidate.support->unusable.empty() && refuse_context(candidate, context).empty() &&
         ((set_of(p.q_dtype) | set_of(p.kv_dtype)) & ~kernel.facts.dtypes) == 0 &&
         (p.k_tail == 0 || kernel.facts.key_tail) && takes_queries(kernel, p) && takes_cache(kernel, p);
}

// The first usable one of which `wanted` is true, and which needs not be forced.
template <class Wanted>
const AttentionCandidate* first_usable(AttentionCandidates all, const AttentionProblem& p, const Context::Impl& context,
                                       const Wanted& wanted) {
  for (const AttentionCandidate& other : all)
    if (!other.kernel->facts.opt_in && !other.support->opt_in && is_usable(other, p, context) && wanted(other))
      return &other;
  return nullptr;
}

// Whether attention_decode takes the call: it must be faster than the first prefill kernel that dispatch would take
// instead. Where sequences have lengths, it must be faster over few keys too; otherwise the prefill kernel takes the
// call, and choose() gives each sequence the faster kernel.
bool decode_takes(const AttentionProblem& p, std::int64_t rows, AttentionCandidates all, const Context::Impl& context) {
  const auto is_faster_over = [&](std::int64_t keys) {
    const SequenceSize size{rows, keys * (p.d + p.dv)};
    const AttentionCandidate* const prefill = first_usable(all, p, context, [&](const AttentionCandidate& other) {
      return other.kernel->facts.phase == Phase::prefill && (!is_free(context) || is_worthwhile(*other.kernel, size));
    });
    return !prefill || decode_is_faster(*prefill->kernel, size, is_quantised(p));
  };
  return is_faster_over(p.sk) && (!has_lengths(p) || is_faster_over(1));
}

std::string name_of(const AttentionCandidate& candidate) {
  return entry_name(candidate.kernel->facts, candidate.support->name);
}

}  // namespace

std::string_view refuse(const AttentionCandidate& candidate, const AttentionProblem& p, AttentionCandidates all,
                        const Context::Impl& context) {
  if (const std::string_view reason = refuse_context(candidate, context); !reason.empty()) return reason;
  const std::int64_t rows = rows_of_head(p);
  if (is_decode(candidate) && !context.forces_one(Operation::attention)) {
    if (rows > kDecodeRows) return "for few query rows (tokens x group) only";
    if (!decode_takes(p, rows, all, context)) return "for fewer query rows (tokens x group): others are faster here";
  }
  if (is_free(context) && !is_worthwhile(*candidate.kernel, {rows, p.sk * (p.d + p.dv)}))
    return "for longer sequences: others are faster here";
  if (!takes_queries(*candidate.kernel, p)) return "takes no f8e4m3 queries";
  if (!takes_cache(*candidate.kernel, p))
    return "for quantised caches without zeros, whose groups are whole rows or multiples of 32 columns, "
           "as a bf16 tail is";
  constexpr double kMaxScores = 0x1p40;
  if (candidate.kernel->facts.phase == Phase::naive &&
      static_cast<double>(p.sq) * static_cast<double>(p.hq) * static_cast<double>(p.sk) > kMaxScores)
    return "its S x S matrix would not fit any memory";
  return {};
}

AttentionChoice choose(const AttentionCandidate& candidate, const AttentionProblem& p, AttentionCandidates all,
                       const Context::Impl& context) {
  AttentionChoice choice{.chosen = &candidate, .head_elements = p.d + p.dv, .quantised = is_quantised(p)};
  if (!has_lengths(p) || context.forces_one(Operation::attention) || is_decode(candidate)) return choice;
  if (p.ragged_q >= 0 || rows_of_head(p) <= kDecodeRows) choice.few_rows = first_usable(all, p, context, is_decode);
  if (is_free(context) && candidate.kernel->min_key_elements > 0)
    choice.short_keys = first_usable(all, p, context, [](const AttentionCandidate& other) {
      return !is_decode(other) && other.kernel->min_key_elements == 0;
    });
  return choice;
}

const AttentionKernel& AttentionChoice::kernel_for(std::int64_t rows, std::int64_t keys) const {
  const SequenceSize size{rows, keys * head_elements};
  const AttentionKernel& kernel =
      short_keys && !is_worthwhile(*chosen->kernel, size) ? *short_keys->kernel : *chosen->kernel;
  return few_rows && decode_is_faster(kernel, size, quantised) ? *few_rows->kernel : kernel;
}

std::string AttentionChoice::rule() const {
  const auto of = [&](const AttentionCandidate& prefill) {
    const AttentionKernel& kernel = *prefill.kernel;
    if (!few_rows) return name_of(prefill);
    std::string text = name_of(*few_rows) + " up to " + std::to_string(kernel.decode_rows) + " rows of a head";
    if (kernel.full_rows > 0 && kernel.full_rows <= kernel.decode_rows && !quantised)
      text += " (from " + std::to_string(kernel.full_rows) + " rows on only over more than " +
              std::to_string(kFewKeyElements) + " key elements a row)";
    return text + ", else " + name_of(prefill);
  };
  if (!short_keys) return few_rows ? of(*chosen) : std::string();
  const AttentionKernel& kernel = *chosen->kernel;
  const std::string rows = kernel.min_rows > 0 ? std::to_string(kernel.min_rows) + " rows and " : std::string();
  return "from " + rows + std::to_string(kernel.min_key_elements) +
         " key elements (keys x (d + dv)) on: " + of(*chosen) + "; below: " + of(*short_keys);
}

}  // namespace rapt::cpu
