// The C interface: convert and call.
#include "c_api.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

static_assert(RAPT_F32 == int(rapt::DType::f32) && RAPT_F16 == int(rapt::DType::f16) &&
              RAPT_BF16 == int(rapt::DType::bf16) && RAPT_BOOL == int(rapt::DType::boolean) &&
              RAPT_I32 == int(rapt::DType::i32) && RAPT_I64 == int(rapt::DType::i64) &&
              RAPT_I8 == int(rapt::DType::i8) && RAPT_F8E4M3 == int(rapt::DType::f8e4m3) &&
              RAPT_F8E5M2 == int(rapt::DType::f8e5m2) && RAPT_I4X2 == int(rapt::DType::i4x2));
static_assert(RAPT_CPU == int(rapt::DeviceType::cpu) && RAPT_CUDA == int(rapt::DeviceType::cuda));
static_assert(RAPT_ISA_GENERIC == int(rapt::Isa::generic) && RAPT_ISA_AVX2 == int(rapt::Isa::avx2) &&
              RAPT_ISA_AVX512 == int(rapt::Isa::avx512) && RAPT_ISA_NEON == int(rapt::Isa::neon) &&
              RAPT_ISA_AVX512BF16 == int(rapt::Isa::avx512bf16) && RAPT_ISA_AMX == int(rapt::Isa::amx));
static_assert(RAPT_KV_STRIDED == int(rapt::KvSource::Kind::strided) &&
              RAPT_KV_RAGGED == int(rapt::KvSource::Kind::ragged) &&
              RAPT_KV_PAGED == int(rapt::KvSource::Kind::paged) && RAPT_KV_RING == int(rapt::KvSource::Kind::ring));
static_assert(RAPT_ALIGN_NONE == int(rapt::Problem::Align::none) &&
              RAPT_ALIGN_TOP_LEFT == int(rapt::Problem::Align::top_left) &&
              RAPT_ALIGN_BOTTOM_RIGHT == int(rapt::Problem::Align::bottom_right) &&
              RAPT_ALIGN_OFFSET == int(rapt::Problem::Align::offset));
static_assert(std::size(rapt_tensor{}.shape) == rapt::kMaxDims);

struct rapt_context {
  rapt::Context value;
};

struct rapt_plan {
  rapt::Plan value;
  std::string entry{value.entry()};
  std::string backend{value.backend()};
  std::vector<rapt_candidate> candidates;

  explicit rapt_plan(rapt::Plan plan) : value(std::move(plan)) {
    for (const auto& c : value.candidates()) candidates.push_back({c.entry.c_str(), c.refusal.c_str()});
  }
};

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

namespace {

using namespace rapt::c;
using rapt::Error;

rapt::ScoreSpec to_score(const rapt_attention_args& a) {
  rapt::ScoreSpec score;
  if (a.has_scale) score.scale = a.scale;
  score.causal = a.causal != 0;
  if (a.has_window) score.window = {a.window_left, a.window_right};
  using Align = rapt::Problem::Align;
  switch (to_enum(a.align, Align::offset, "score.align")) {
    case Align::none:
      break;
    case Align::top_left:
      score.align = rapt::Align::top_left();
      break;
    case Align::bottom_right:
      score.align = rapt::Align::bottom_right();
      break;
    case Align::offset:
      score.align = rapt::Align::offset(a.align_offset);
      break;
  }
  if (a.softcap != 0) score.softcap = a.softcap;
  score.bias = to_view(a.bias, "score.bias");
  score.mask = to_view(a.mask, "score.mask");
  score.alibi = to_view(a.alibi, "score.alibi");
  score.sinks = to_view(a.sinks, "score.sinks");
  return score;
}

rapt::AttentionArgs to_args(const rapt_attention_args* given) {
  const rapt_attention_args a = known_part(deref(given, "args"), "rapt_attention_args");
  rapt::AttentionArgs args;
  args.q = to_view(a.q, "q");
  args.kv.kind = to_enum(a.kv_kind, rapt::KvSource::Kind::ring, "kv.kind");
  args.kv.k = to_view(a.k, "k");
  args.kv.v = to_view(a.v, "v");
  args.kv.seqlens = to_view(a.kv_seqlens, "kv.seqlens");
  args.kv.cu_seqlens = to_view(a.cu_seqlens_k, "kv.cu_seqlens");
  args.kv.block_table = to_view(a.block_table, "kv.block_table");
  args.kv.k_scale = to_view(a.k_scale, "kv.k_scale");
  args.kv.v_scale = to_view(a.v_scale, "kv.v_scale");
  args.kv.k_zero = to_view(a.k_zero, "kv.k_zero");
  args.kv.v_zero = to_view(a.v_zero, "kv.v_zero");
  args.out = to_view(a.out, "out");
  args.score = to_score(a);
  args.lse = to_view(a.lse, "lse");
  args.cu_seqlens_q = to_view(a.cu_seqlens_q, "cu_seqlens_q");
  return args;
}

const rapt::Context& to_context(const rapt_context* context) {
  return context ? context->value : rapt::default_context();
}

std::span<std::byte> to_workspace(void* workspace, std::size_t bytes) {
  if (bytes > 0) deref(static_cast<std::byte*>(workspace), "workspace");
  return {static_cast<std::byte*>(workspace), bytes};
}

class UserExecutor final : public rapt::Executor {
 public:
  explicit UserExecutor(const rapt_user_executor& user) : user_(user), name_(user.name ? user.name : "user") {
    deref(user.concurrency, "user_executor.concurrency");
    deref(user.run, "user_executor.run");
  }
  std::string_view name() const noexcept override { return name_; }
  int concurrency() const override { return std::max(1, user_.concurrency(user_.user)); }
  void run(int strands, void (*strand)(void*, int), void* argument) override {
    user_.run(user_.user, strands, strand, argument);
  }

 private:
  rapt_user_executor user_;
  std::string name_;
};

std::shared_ptr<rapt::Executor> to_executor(const rapt_context_options& o) {
  switch (o.executor) {
    case RAPT_EXECUTOR_DEFAULT:
      return nullptr;
    case RAPT_EXECUTOR_SERIAL:
      return rapt::serial_executor();
    case RAPT_EXECUTOR_TBB:
      return rapt::tbb_executor();
    case RAPT_EXECUTOR_OPENMP:
      return rapt::openmp_executor();
    case RAPT_EXECUTOR_LOADED_OPENMP:
      if (std::shared_ptr<rapt::Executor> executor = rapt::loaded_openmp_executor()) return executor;
      throw Error("executor", "loaded openmp", "an executor of this process (it has loaded no OpenMP runtime)");
    case RAPT_EXECUTOR_USER:
      return std::make_shared<UserExecutor>(o.user_executor);
    default:
      throw Error("executor", std::to_string(o.executor), "a rapt_executor_kind");
  }
}

rapt::ContextOptions to_options(const rapt_context_options* given) {
  if (!given) return {};
  const rapt_context_options o = known_part(*given, "rapt_context_options");
  rapt::ContextOptions options;
  options.executor = to_executor(o);
  options.threads = o.threads;
  if (o.has_isa) options.isa = to_enum(o.isa, rapt::Isa::amx, "isa");
  if (o.kernel) options.kernel = o.kernel;
  options.stream = o.stream;
  if (o.allocator.allocate || o.allocator.deallocate) {
    deref(o.allocator.allocate, "allocator.allocate");
    deref(o.allocator.deallocate, "allocator.deallocate");
    options.allocator = rapt::Allocator{o.allocator.allocate, o.allocator.deallocate, o.allocator.user};
  }
  if (o.observer) {
    options.observer = [observer = o.observer, user = o.observer_user](std::string_view text) {
      observer(user, std::string(text).c_str());
    };
  }
  return options;
}

void copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* size) {
  const std::size_t needed = text.size() + 1;
  if (size) *size = needed;
  if (!buffer) return;
  if (capacity < needed) throw Error("capacity", std::to_string(capacity), std::to_string(needed) + " bytes");
  *std::copy(text.begin(), text.end(), buffer) = '\0';
}

struct Entries {
  std::vector<rapt::EntryInfo> entries = rapt::entries();
  std::vector<rapt_entry_info> views;

  Entries() {
    for (const auto& e : entries)
      views.push_back({e.name.c_str(), e.backend.c_str(), e.unusable.c_str(), e.opt_in.c_str()});
  }
  bool operator==(const Entries& other) const {
    const auto alike = [](const auto& a, const auto& b) { return a.unusable == b.unusable; };
    return std::equal(entries.begin(), entries.end(), other.entries.begin(), other.entries.end(), alike);
  }
};

struct UsableIsas {
  std::vector<std::int32_t> values;

  UsableIsas() {
    for (const rapt::Isa isa : rapt::usable_isas()) values.push_back(static_cast<std::int32_t>(isa));
  }
  bool operator==(const UsableIsas&) const = default;
};

// What lasts for callers' pointers. It changes once at most: when the OS has refused AMX's registers.
template <class T>
const T& latest() {
  static const T first;
  if (first == T()) return first;
  static const T since;
  return since;
}

}  // namespace

const char* rapt_last_error() noexcept {
  return last_error;
}
const char* rapt_last_error_argument() noexcept {
  return last_error_argument;
}

rapt_status rapt_tensor_contiguous(rapt_tensor* tensor, void* data, int32_t dtype, int32_t ndim,
                                   const int64_t* shape) noexcept {
  return guard([&] {
    deref(tensor, "tensor") = {};
    deref(shape, "shape");
    if (ndim < 1 || ndim > rapt::kMaxDims) throw Error("ndim", std::to_string(ndim), "1 to 4");
    to_enum(dtype, rapt::DType::i4x2, "dtype");
    const rapt::Layout layout({shape, static_cast<std::size_t>(ndim)});
    tensor->data = data;
    tensor->dtype = dtype;
    tensor->device_type = RAPT_CPU;
    tensor->ndim = ndim;
    std::copy_n(layout.shape.begin(), ndim, tensor->shape);
    std::copy_n(layout.strides.begin(), ndim, tensor->strides);
  });
}

rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) noexcept {
  return guard([&] {
    deref(context, "context") = nullptr;
    *context = new rapt_context{rapt::Context(to_options(options))};
  });
}

void rapt_context_destroy(rapt_context* context) noexcept {
  delete context;
}

rapt_status rapt_attention(const rapt_attention_args* args, const rapt_context* context) noexcept {
  return guard([&] { rapt::attention(to_args(args), to_context(context)); });
}

rapt_status rapt_attention_with_workspace(const rapt_attention_args* args, const rapt_context* context, void* workspace,
                                          size_t workspace_bytes) noexcept {
  return guard([&] { rapt::attention(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}

rapt_status rapt_max_workspace_bytes(const char* largest_problem, const rapt_context* context, size_t* bytes) noexcept {
  return guard([&] {
    deref(bytes, "bytes") = 0;
    const rapt::Problem largest = rapt::Problem::parse(&deref(largest_problem, "largest_problem"));
    *bytes = rapt::max_workspace_bytes(largest, to_context(context));
  });
}

rapt_status rapt_plan_create(const rapt_attention_args* args, const rapt_context* context, rapt_plan** plan) noexcept {
  return guard([&] {
    deref(plan, "plan") = nullptr;
    *plan = new rapt_plan(rapt::Plan(to_args(args), to_context(context)));
  });
}

rapt_status rapt_plan_create_from_text(const char* text, const rapt_context* context, rapt_plan** plan) noexcept {
  return guard([&] {
    deref(plan, "plan") = nullptr;
    *plan = new rapt_plan(rapt::Plan(rapt::Problem::parse(&deref(text, "text")), to_context(context)));
  });
}

void rapt_plan_destroy(rapt_plan* plan) noexcept {
  delete plan;
}

rapt_status rapt_plan_run(const rapt_plan* plan, const rapt_attention_args* args, void* workspace,
                          size_t workspace_bytes) noexcept {
  return guard([&] {
    const rapt::Plan& p = deref(plan, "plan").value;
    p.run(to_args(args), to_workspace(workspace, workspace_bytes));
  });
}

const char* rapt_plan_entry(const rapt_plan* plan) noexcept {
  return plan ? plan->entry.c_str() : "";
}
const char* rapt_plan_backend(const rapt_plan* plan) noexcept {
  return plan ? plan->backend.c_str() : "";
}
size_t rapt_plan_workspace_bytes(const rapt_plan* plan) noexcept {
  return plan ? plan->value.workspace_bytes() : 0;
}
int rapt_plan_threads(const rapt_plan* plan) noexcept {
  return plan ? plan->value.threads() : 0;
}
int64_t rapt_plan_work_items(const rapt_plan* plan) noexcept {
  return plan ? plan->value.work_items() : 0;
}

rapt_status rapt_plan_candidates(const rapt_plan* plan, const rapt_candidate** candidates, size_t* count) noexcept {
  return guard([&] {
    deref(candidates, "candidates") = nullptr;
    deref(count, "count") = 0;
    const auto& list = deref(plan, "plan").candidates;
    *candidates = list.data();
    *count = list.size();
  });
}

rapt_status rapt_plan_explain(const rapt_plan* plan, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(deref(plan, "plan").value.explain(), buffer, capacity, size);
  });
}

rapt_status rapt_plan_problem_text(const rapt_plan* plan, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(deref(plan, "plan").value.problem().to_string(), buffer, capacity, size);
  });
}

rapt_status rapt_problem_text(const rapt_attention_args* args, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(rapt::Problem::of(to_args(args)).to_string(), buffer, capacity, size);
  });
}

rapt_status rapt_entries(const rapt_entry_info** entries, size_t* count) noexcept {
  return guard([&] {
    deref(entries, "entries") = nullptr;
    deref(count, "count") = 0;
    const auto& all = latest<Entries>();
    *entries = all.views.data();
    *count = all.views.size();
  });
}

rapt_status rapt_usable_isas(const int32_t** isas, size_t* count) noexcept {
  return guard([&] {
    deref(isas, "isas") = nullptr;
    deref(count, "count") = 0;
    const auto& all = latest<UsableIsas>().values;
    *isas = all.data();
    *count = all.size();
  });
}

const char* rapt_version() noexcept {
  return rapt::version().data();  // of a string literal
}
