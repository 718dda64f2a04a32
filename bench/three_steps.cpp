#include "three_steps.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

namespace rapt::bench {

// RAPT_STEP_ISAS has X(isa) for each that there are kernels of.
#define X(isa)                     \
  namespace isa {                  \
  extern const StepKernels kSteps; \
  }
RAPT_STEP_ISAS
#undef X

namespace {

constexpr std::int64_t kBlockRows = 256;
constexpr double kMaxScoreBytes = 0x1p31;
constexpr double kSoftmaxFlops = 5;  // maximum, difference, exponential, sum, division

const StepKernels& kernels_of(Isa isa) {
#define X(name) \
  if (isa == Isa::name) return name::kSteps;
  RAPT_STEP_ISAS
#undef X
  throw std::logic_error("no three steps of this ISA");
}

double real(std::int64_t x) {
  return static_cast<double>(x);
}

const float* floats(const TensorView& t) {
  return static_cast<const float*>(t.data);
}

}  // namespace

std::string why_no_three_steps(const Problem& problem) {
  const auto* p = std::get_if<AttentionProblem>(&problem);
  if (!p) return "only attention has three steps";
  AttentionProblem plain;
  plain.b = p->b, plain.hq = p->hq, plain.hk = p->hk, plain.sq = p->sq, plain.sk = p->sk, plain.d = p->d;
  plain.dv = p->dv, plain.causal = p->causal;
  if (!(*p == plain)) return "three steps are for contiguous fp32 without features other than causal";
  if (std::min({p->b, p->hq, p->sq, p->sk}) == 0) return "nothing to compute";
  if (4 * real(p->b) * real(p->hq) * real(p->sq) * real(p->sk) > kMaxScoreBytes)
    return "its scores take more than 2 GiB";
  return {};
}

ThreeSteps::ThreeSteps(const AttentionArgs& args, Isa isa, int threads)
    : args_(args),
      p_(AttentionProblem::of(args)),
      kernels_(kernels_of(isa)),
      threads_(threads),
      executor_(threads == 1 ? serial_executor() : tbb_executor()) {
  const std::int64_t heads = p_.b * p_.hq, scores = heads * p_.sq * p_.sk;
  const std::int64_t visible = p_.causal ? heads * p_.sq * (p_.sq + 1) / 2 : scores;  // then sq = sk
  const double q = real(heads * p_.sq * p_.d), k = real(p_.b * p_.hk * p_.sk * p_.d), s = real(scores),
               v = real(p_.b * p_.hk * p_.sk * p_.dv), out = real(heads * p_.sq * p_.dv);
  steps_ = {Step{"scores", {2 * s * real(p_.d), 4 * (q + k + s)}},
            Step{"softmax", {kSoftmaxFlops * real(visible), 4 * 2 * s}},
            Step{"values", {2 * s * real(p_.dv), 4 * (s + v + out)}}};
  scores_.resize(static_cast<std::size_t>(scores));
  out_.resize(static_cast<std::size_t>(heads * p_.sq * p_.dv));
}

void ThreeSteps::run_block(int step, std::int64_t head, std::int64_t first, std::int64_t rows) {
  const std::int64_t kv_head = head / p_.hq * p_.hk + head % p_.hq / (p_.hq / p_.hk);
  float* const s = scores_.data() + (head * p_.sq + first) * p_.sk;
  if (step == 0)
    kernels_.scores(floats(args_.q) + (head * p_.sq + first) * p_.d, floats(args_.kv.k) + kv_head * p_.sk * p_.d, s,
                    rows, p_.sk, p_.d);
  if (step == 1)
    kernels_.softmax(s, rows, p_.sk, p_.causal ? first + 1 : p_.sk, 1 / std::sqrt(static_cast<float>(p_.d)));
  if (step == 2)
    kernels_.values(s, floats(args_.kv.v) + kv_head * p_.sk * p_.dv, out_.data() + (head * p_.sq + first) * p_.dv, rows,
                    p_.sk, p_.dv);
}

void ThreeSteps::run(int step) {
  struct Work {
    ThreeSteps& steps;
    int step;
    std::int64_t blocks;  // of a head
    std::atomic<std::int64_t> next{0};

    void run() {
      const AttentionProblem& p = steps.p_;
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < p.b * p.hq * blocks;) {
        const std::int64_t first = i % blocks * kBlockRows;
        steps.run_block(step, i / blocks, first, std::min(kBlockRows, p.sq - first));
      }
    }
  } work{*this, step, (p_.sq + kBlockRows - 1) / kBlockRows};
  executor_->run(
      threads_, [](void* argument, int) { static_cast<Work*>(argument)->run(); }, &work);
}

}  // namespace rapt::bench
