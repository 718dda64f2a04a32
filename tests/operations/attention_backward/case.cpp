#include "operations/attention_backward/case.hpp"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "operations/attention/layouts.hpp"
#include "rapt/plan.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"
#include "support/fill.hpp"

namespace rapt::testing {
namespace {

/// The forward by the best entry that multiplies in fp32: others may leave lse a unit of the inputs' type off.
void run_library(const AttentionArgs& args) {
  static const auto threads = std::make_shared<ThreadExecutor>(static_cast<int>(std::thread::hardware_concurrency()));
  for (const EntryInfo& entry : entries()) {
    if (entry.operation != Operation::attention || !entry.unusable.empty() || entry.arithmetic != "f32") continue;
    const Context context = forced(entry.name, threads, 0);
    try {
      return attention(args, context);
    } catch (const Error&) {
      // Takes other types.
    }
  }
  attention(args);
}

}  // namespace

BackwardCase::BackwardCase(const AttentionBackwardProblem& given, std::uint64_t seed, Placement placement,
                           std::optional<DType> gradients, Forward forward)
    : BackwardCase(given, Case(given, seed, placement, given.pool), seed, placement, gradients, forward) {}

BackwardCase::BackwardCase(const AttentionBackwardProblem& given, Case forward_inputs, std::uint64_t seed,
                           Placement placement, std::optional<DType> gradients, Forward forward)
    : problem(given), inputs(std::move(forward_inputs)), forward_(forward) {
  const AttentionBackwardProblem& p = problem;
  const auto like = [&](const Tensor& tensor, bool wanted) {
    return wanted ? Tensor(gradients.value_or(tensor.dtype()), tensor.layout(), placement) : Tensor();
  };
  dout = Tensor(p.dout_dtype, inputs.out.layout(), placement);
  fill_normal(dout, std::mt19937_64(seed * 64 + 20));
  if (p.dlse) {
    dlse = Tensor(DType::f32, inputs.lse.layout(), placement);
    fill_normal(dlse, std::mt19937_64(seed * 64 + 21));
  }
  dq = like(inputs.q, p.grads & p.kDq);
  dk = like(inputs.k, p.grads & p.kDk);
  dv = like(inputs.v, p.grads & p.kDv);
  dbias = like(inputs.bias, p.dbias);
  dsinks = like(inputs.sinks, p.dsinks);
  dalibi = like(inputs.alibi, p.dalibi);
  if (forward != Forward::later) run_forward();
}

void BackwardCase::run_forward() {
  const AttentionArgs args = inputs.args();
  if (forward_ == Forward::library) return run_library(args);
  const Reference reference = oracle(args);
  for (std::int64_t i = 0; i < inputs.out.size(); ++i)
    inputs.out.flat(i) = static_cast<float>(reference.out[static_cast<std::size_t>(i)]);
  for (std::int64_t i = 0; i < inputs.lse.size(); ++i)
    inputs.lse.flat(i) = static_cast<float>(reference.lse[static_cast<std::size_t>(i)]);
}

AttentionBackwardArgs BackwardCase::args() {
  const AttentionArgs forward = inputs.args();
  AttentionBackwardArgs args;
  args.q = forward.q, args.kv = forward.kv, args.score = forward.score, args.cu_seqlens_q = forward.cu_seqlens_q;
  args.out = forward.out, args.lse = forward.lse;
  args.dout = dout.view(), args.dlse = dlse.view();
  args.dq = dq.mutable_view(), args.dk = dk.mutable_view(), args.dv = dv.mutable_view();
  args.dbias = dbias.mutable_view(), args.dsinks = dsinks.mutable_view(), args.dalibi = dalibi.mutable_view();
  return args;
}

void move_tensors(AttentionBackwardArgs& args, DeviceTensors& tensors) {
  const auto of_forward = [](const TensorView& t) -> MutableTensorView {
    return {const_cast<void*>(t.data), t.dtype, t, t.device};
  };
  AttentionArgs forward{args.q, args.kv, of_forward(args.out), args.score, of_forward(args.lse), args.cu_seqlens_q};
  move_inputs(forward, tensors);
  args.q = forward.q, args.kv = forward.kv, args.score = forward.score, args.cu_seqlens_q = forward.cu_seqlens_q;
  for (TensorView* t : {&args.out, &args.lse, &args.dout, &args.dlse}) tensors.move(*t);
  for (MutableTensorView* t : {&args.dq, &args.dk, &args.dv, &args.dbias, &args.dsinks, &args.dalibi}) tensors.move(*t);
}

void BackwardCase::protect_inputs() {
  inputs.protect_inputs();
  for (Tensor* tensor : {&inputs.out, &inputs.lse, &dout, &dlse}) tensor->buffer().protect();
}

std::vector<Tensor*> BackwardCase::outputs() {
  std::vector<Tensor*> wanted;
  for (Tensor* tensor : {&dq, &dk, &dv, &dbias, &dsinks, &dalibi})
    if (*tensor) wanted.push_back(tensor);
  return wanted;
}

void BackwardCase::clear() {
  for (Tensor* tensor : outputs()) tensor->poison();
}

Verdict BackwardCase::verdict(const BackwardReference& reference) {
  Verdict verdict = verdict_of(args(), reference);
  for (const Tensor* tensor : outputs())
    if (!tensor->gaps_intact() && verdict.violation.empty())
      verdict.violation = "memory between the elements of a gradient was written";
  return verdict;
}

Verdict verdict_of(const AttentionBackwardArgs& args, const BackwardReference& reference) {
  Verdict worst;
  worst.errors.frobenius_limit = worst.errors.max_abs_limit = HUGE_VAL;
  for_each_gradient(args, reference, [&](const char* name, const TensorView& view, const GradientReference& wanted) {
    const Errors errors = compare(view, wanted);
    worst.errors.rel_frobenius = std::max(worst.errors.rel_frobenius, errors.rel_frobenius);
    worst.errors.max_abs = std::max(worst.errors.max_abs, errors.max_abs);
    worst.errors.max_bound = std::max(worst.errors.max_bound, errors.max_bound);
    worst.errors.nonfinite_agree = worst.errors.nonfinite_agree && errors.nonfinite_agree;
    if (const std::string wrong = violation_of(errors); !wrong.empty() && worst.violation.empty())
      worst.violation = std::string(name) + ": " + wrong;
  });
  return worst;
}

std::vector<DType> CaseOf<AttentionBackwardProblem>::types(const AttentionBackwardProblem& p) {
  return {p.q_dtype, p.kv_dtype, p.out_dtype, p.dout_dtype};
}
double CaseOf<AttentionBackwardProblem>::tensor_bytes(const AttentionBackwardProblem& p) {
  const double queries = real(p.hq) * (p.ragged_q >= 0 ? real(p.ragged_q) : real(p.b) * real(p.sq));
  AttentionProblem forward = p;
  if (!has_positions(p)) forward.sk = p.pool;
  const double keys = real(p.hk) * (p.ragged_k >= 0 ? real(p.ragged_k) : real(p.b) * real(forward.sk));
  return CaseOf<AttentionProblem>::tensor_bytes(forward) + queries * real(p.dv) * bytes_of(p.dout_dtype) +
         (p.grads & p.kDq ? queries * real(p.d) * bytes_of(p.q_dtype) : 0) +
         keys * (real(p.grads & p.kDk ? p.d : 0) + real(p.grads & p.kDv ? p.dv : 0)) * bytes_of(p.kv_dtype);
}
CaseOf<AttentionBackwardProblem>::Sizes CaseOf<AttentionBackwardProblem>::sizes(const AttentionBackwardProblem& p) {
  return CaseOf<AttentionProblem>::sizes(p);
}

bool CaseOf<AttentionBackwardProblem>::is_large(const AttentionBackwardProblem& p) {
  constexpr std::int64_t kMaxScores = 1 << 20;
  return p.b * p.hq * p.sq * p.sk > kMaxScores;
}
BackwardCase CaseOf<AttentionBackwardProblem>::fresh(const AttentionBackwardProblem& problem, std::uint64_t seed) {
  using Forward = BackwardCase::Forward;
  return BackwardCase(problem, seed, Placement::heap, {}, is_large(problem) ? Forward::library : Forward::oracle);
}
BackwardCase CaseOf<AttentionBackwardProblem>::timed(const AttentionBackwardProblem& problem, std::uint64_t seed) {
  return {problem, timed_case(problem, seed, problem.pool), seed, Placement::heap, {}, BackwardCase::Forward::library};
}

Verdict CaseOf<AttentionBackwardProblem>::verify(BackwardCase& inputs, const Context& context, std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  if (rows == 0) return inputs.verdict();
  const AttentionBackwardProblem& p = inputs.problem;
  Verdict verdict;
  // The first head of the first sequence and the last of the last.
  for (const bool last : {false, true}) {
    const std::int64_t h = last ? p.hk - 1 : 0, n = last ? p.b - 1 : 0;
    if (!verdict.violation.empty() || (last && h == 0 && n == 0)) break;
    const Verdict head = inputs.verdict({step_over(std::max(p.sq, p.sk), rows), n, h});
    take_worst(verdict.errors, head.errors);
    verdict.violation = head.violation.empty() ? "" : "kv head " + std::to_string(h) + ": " + head.violation;
  }
  return verdict;
}

}  // namespace rapt::testing
