// Errors, texts and tensors of the C interface.
#include <algorithm>
#include <cstdio>

#include "api/c/c_api.hpp"

static_assert(RAPT_CPU == int(rapt::DeviceType::cpu) && RAPT_CUDA == int(rapt::DeviceType::cuda));
static_assert(RAPT_ALIGN_NONE == int(rapt::AttentionProblem::Align::none) &&
              RAPT_ALIGN_TOP_LEFT == int(rapt::AttentionProblem::Align::top_left) &&
              RAPT_ALIGN_BOTTOM_RIGHT == int(rapt::AttentionProblem::Align::bottom_right) &&
              RAPT_ALIGN_OFFSET == int(rapt::AttentionProblem::Align::offset));
static_assert(std::size(rapt_tensor{}.shape) == rapt::kMaxDims);

static_assert(RAPT_RULE_LINEAR == int(rapt::UpdateRule::linear) && RAPT_RULE_GATED == int(rapt::UpdateRule::gated) &&
              RAPT_RULE_DELTA == int(rapt::UpdateRule::delta) &&
              RAPT_RULE_GATED_DELTA == int(rapt::UpdateRule::gated_delta));
static_assert(RAPT_GUARD_NAN == int(rapt::GuardReport::Guard::nan) &&
              RAPT_GUARD_SHADOW == int(rapt::GuardReport::Guard::shadow) &&
              RAPT_GUARD_DETERMINISM == int(rapt::GuardReport::Guard::determinism));
static_assert(std::size(rapt_guard_place{}.index) == rapt::kMaxDims);
static_assert(RAPT_PHASE_ALL == int(rapt::Phase::all) && RAPT_PHASE_PREFILL == int(rapt::Phase::prefill) &&
              RAPT_PHASE_DECODE == int(rapt::Phase::decode) && RAPT_PHASE_NAIVE == int(rapt::Phase::naive));

namespace {

// Plain arrays: recording a failure must not itself fail.
thread_local char last_error[2048] = "";
thread_local char last_error_argument[64] = "";

}  // namespace

rapt_status rapt::c::fail(rapt_status status, const char* argument, const char* message) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", message);
  std::snprintf(last_error_argument, sizeof last_error_argument, "%s", argument);
  return status;
}

void rapt::c::copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* size) {
  const std::size_t needed = text.size() + 1;
  if (size) *size = needed;
  if (!buffer) return;
  if (capacity < needed) throw Error("capacity", std::to_string(capacity), std::to_string(needed) + " bytes");
  *std::copy(text.begin(), text.end(), buffer) = '\0';
}

const char* rapt_last_error() noexcept {
  return last_error;
}
const char* rapt_last_error_argument() noexcept {
  return last_error_argument;
}

rapt_status rapt_tensor_contiguous(rapt_tensor* tensor, void* data, int32_t dtype, int32_t ndim,
                                   const int64_t* shape) noexcept {
  using namespace rapt::c;
  using rapt::Error;
  return guard([&] {
    non_null(tensor, "tensor") = {};
    non_null(shape, "shape");
    if (ndim < 1 || ndim > rapt::kMaxDims) throw Error("ndim", std::to_string(ndim), "1 to 4");
    to_enum(dtype, rapt::kLastDType, "dtype");
    const rapt::Layout layout({shape, static_cast<std::size_t>(ndim)});
    tensor->data = data;
    tensor->dtype = dtype;
    tensor->device_type = RAPT_CPU;
    tensor->ndim = ndim;
    std::copy_n(layout.shape.begin(), ndim, tensor->shape);
    std::copy_n(layout.strides.begin(), ndim, tensor->strides);
  });
}

const char* rapt_version() noexcept {
  return rapt::version().data();  // of a string literal
}
