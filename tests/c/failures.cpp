// Memory that runs out, at every allocation in turn, and callbacks that throw: each is a status, and nothing leaks.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "../support/operator_new.hpp"
#include "rapt/problem.hpp"
#include "rapt/rapt.h"

namespace {

constexpr long kNever = -1;
thread_local long until_failure = kNever;  // allocations of this thread that succeed before one fails
thread_local bool keeps_failing = false;   // and so do all that follow
thread_local bool failed = false;
std::atomic<long> live{0};

void before_new() {
  if (until_failure == 0) {
    failed = true;
    if (!keeps_failing) until_failure = kNever;
    throw std::bad_alloc();
  }
  if (until_failure > 0) --until_failure;
  ++live;
}
void before_delete(void* data) noexcept {
  if (data) --live;
}

int failures = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "failed: %s (last error: %s)\n", what.c_str(), rapt_last_error());
}

rapt_tensor tensor(void* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  rapt_tensor t;
  rapt_tensor_contiguous(&t, data, dtype, static_cast<int32_t>(shape.size()), shape.begin());
  return t;
}

// A call that is worth more than one worker, and the memory of all that is done here.
struct Problem {
  static constexpr int64_t kHeads = 8, kRows = 64, kSize = 32, kRoom = 2 * kRows;
  std::vector<float> q = std::vector<float>(kHeads * kRows * kSize, 0.5f), k = q, v = q, out = q;
  std::vector<float> lse = std::vector<float>(kHeads * kRows), scale = std::vector<float>(kHeads * kRoom);
  std::vector<signed char> k_codes = std::vector<signed char>(kHeads * kRoom * kSize), v_codes = k_codes;
  std::vector<float> v_scale = scale, merged = q;
  int64_t length = 3;
  rapt_attention_args args = rapt_attention_args_init();
  rapt_append_kv_args append = rapt_append_kv_args_init();
  rapt_merge_states_args merge = rapt_merge_states_args_init();

  Problem() {
    args.q = tensor(q.data(), RAPT_F32, {1, kHeads, kRows, kSize});
    args.k = tensor(k.data(), RAPT_F32, {1, kHeads, kRows, kSize});
    args.v = tensor(v.data(), RAPT_F32, {1, kHeads, kRows, kSize});
    args.out = tensor(out.data(), RAPT_F32, {1, kHeads, kRows, kSize});
    args.lse = tensor(lse.data(), RAPT_F32, {1, kHeads, kRows});
    merge.outs = &args.out, merge.lses = &args.lse, merge.count = 1;
    merge.out = tensor(merged.data(), RAPT_F32, {1, kHeads, kRows, kSize});
    append.k_new = args.k, append.v_new = args.v;
    append.seqlens = tensor(&length, RAPT_I64, {1});
    append.k = tensor(k_codes.data(), RAPT_I8, {1, kHeads, kRoom, kSize});
    append.v = tensor(v_codes.data(), RAPT_I8, {1, kHeads, kRoom, kSize});
    append.k_scale = tensor(scale.data(), RAPT_F32, {1, kHeads, kRoom, 1});
    append.v_scale = tensor(v_scale.data(), RAPT_F32, {1, kHeads, kRoom, 1});
  }
};

void ignore(void*, const char*) {}

// Every function of the interface that may fail, up to the first that does. `threads`: on oneTBB, too.
rapt_status use_everything(Problem& p, bool threads) {
  rapt_context* context = nullptr;
  rapt_plan *plan = nullptr, *same = nullptr;
  rapt_context_options options = rapt_context_options_init();
  options.executor = RAPT_EXECUTOR_SERIAL;
  options.observer = ignore;
  char text[4096];
  const rapt_candidate* candidates;
  const rapt_entry_info* entries;
  const int32_t* isas;
  std::size_t count;
  rapt_status status = RAPT_OK;
  const auto step = [&](auto call) {
    if (status == RAPT_OK) status = call();
  };
  step([&] { return rapt_usable_isas(&isas, &count); });
  step([&] { return rapt_entries(&entries, &count); });
  step([&] { return rapt_context_create(&options, &context); });
  step([&] { return rapt_attention(&p.args, context); });
  step([&] { return rapt_plan_create_attention(&p.args, context, &plan); });
  step([&] { return rapt_plan_run_attention(plan, &p.args, nullptr, 0); });
  step([&] { return rapt_plan_candidates(plan, &candidates, &count); });
  step([&] { return rapt_plan_explain(plan, text, sizeof text, nullptr); });
  step([&] { return rapt_plan_problem_text(plan, text, sizeof text, nullptr); });
  step([&] { return rapt_problem_text(RAPT_OPERATION_ATTENTION, &p.args, text, sizeof text, nullptr); });
  step([&] { return rapt_plan_create_from_text(text, context, &same); });
  step([&] { return rapt_append_kv(&p.append, nullptr); });
  step([&] { return rapt_merge_states(&p.merge, nullptr); });
  if (threads) step([&] { return rapt_attention(&p.args, nullptr); });
  step([&] { return std::strchr(rapt_version(), '.') ? RAPT_OK : RAPT_INTERNAL_ERROR; });
  rapt_plan_destroy(same);
  rapt_plan_destroy(plan);
  rapt_context_destroy(context);
  return status;
}

rapt_status fail_at(long n, bool keep, Problem& p, bool threads) {
  until_failure = n, keeps_failing = keep, failed = false;
  const rapt_status status = use_everything(p, threads);
  until_failure = kNever;
  return status;
}

// Returns whether the n-th allocation was still there to fail.
bool fail_in_new_process(long n, bool keep, Problem& p) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const rapt_status status = fail_at(n, keep, p, true);
    _exit((status == RAPT_OK || (status == RAPT_OUT_OF_MEMORY && failed) ? 0 : 2) + failed);
  }
  int state = 0;
  waitpid(child, &state, 0);
  check(WIFEXITED(state) && WEXITSTATUS(state) < 2,
        "allocation " + std::to_string(n) + " of a new process fails: wait status " + std::to_string(state));
  return !WIFEXITED(state) || WEXITSTATUS(state) % 2 != 0;
}

void test_memory(long step) {
  Problem p;
  for (const bool keep : {false, true}) {
    long n = 0;  // what is made once per process is made in every child anew: rapt was not used here yet
    while (fail_in_new_process(n, keep, p) && failures < 10) n += step;
    check(n > 10, "a new process allocates");
  }
  check(use_everything(p, true) == RAPT_OK, "there is memory");
  for (const bool keep : {false, true}) {
    long n = 0;
    do {
      const long before = live;
      const rapt_status status = fail_at(n, keep, p, false);
      const long leaked = live - before;
      const std::string what = "allocation " + std::to_string(n) + " fails: ";
      check(status == RAPT_OK || (status == RAPT_OUT_OF_MEMORY && failed), what + "status " + std::to_string(status));
      check(leaked == 0, what + std::to_string(leaked) + " blocks leak");
      ++n;
    } while (failed);
    check(n > 10, "calls allocate");
  }
}

// Of the C++ interface alone: its text is too long for a string's own memory.
void test_hash() {
  const auto problem =
      rapt::AttentionProblem::parse("attention b=2 hq=8 hk=2 sq=128 sk=512 d=64 causal align=bottom_right");
  until_failure = 0, keeps_failing = false;
  bool thrown = false;
  try {
    problem.hash();
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  until_failure = kNever;
  check(thrown, "a hash without memory throws std::bad_alloc");
}

// Callbacks, one of which throws.
struct Callbacks {
  enum Which { none, concurrency, run_before, run_after, observer, allocator, allocator_out_of_memory } throws = none;

  void at(Which place) const {
    if (throws == place) throw std::runtime_error("thrown on purpose");
  }
  static const Callbacks& of(void* user) { return *static_cast<const Callbacks*>(user); }
};

void test_callbacks() {
  Problem p;
  Callbacks callbacks;
  rapt_context_options options = rapt_context_options_init();
  options.executor = RAPT_EXECUTOR_USER;
  options.user_executor.user = options.allocator.user = options.observer_user = &callbacks;
  options.user_executor.concurrency = [](void* user) {
    Callbacks::of(user).at(Callbacks::concurrency);
    return 3;
  };
  options.user_executor.run = [](void* user, int workers, void (*work)(void*, int), void* argument) {
    Callbacks::of(user).at(Callbacks::run_before);
    for (int i = 0; i < workers; ++i) work(argument, i);
    Callbacks::of(user).at(Callbacks::run_after);
  };
  options.observer = [](void* user, const char*) { Callbacks::of(user).at(Callbacks::observer); };
  options.allocator.allocate = [](void* user, std::size_t bytes, std::size_t alignment) {
    Callbacks::of(user).at(Callbacks::allocator);
    if (Callbacks::of(user).throws == Callbacks::allocator_out_of_memory) throw std::bad_alloc();
    return operator new(bytes, std::align_val_t(alignment));
  };
  options.allocator.deallocate = [](void*, void* data, std::size_t, std::size_t alignment) noexcept {
    operator delete(data, std::align_val_t(alignment));
  };
  for (int i = Callbacks::concurrency; i <= Callbacks::allocator_out_of_memory; ++i) {
    const std::string what = "callback " + std::to_string(i) + " throws";
    const long before = live;
    rapt_context* context = nullptr;
    check(rapt_context_create(&options, &context) == RAPT_OK, "a context is made");
    callbacks.throws = static_cast<Callbacks::Which>(i);
    const bool memory = callbacks.throws == Callbacks::allocator_out_of_memory;
    check(rapt_attention(&p.args, context) == (memory ? RAPT_OUT_OF_MEMORY : RAPT_INTERNAL_ERROR), what);
    if (!memory) check(std::strcmp(rapt_last_error(), "thrown on purpose") == 0, what + ": its message");
    callbacks.throws = Callbacks::none;
    check(rapt_attention(&p.args, context) == RAPT_OK, what + ": the context survives");
    rapt_context_destroy(context);
    const long leaked = live - before;
    check(leaked == 0, what + ": " + std::to_string(leaked) + " blocks leak");
  }
}

}  // namespace

// An argument n has only every n-th allocation of a new process fail, for emulators, which translate all code in each.
int main(int argc, char** argv) {
  test_memory(argc > 1 ? std::max(std::atol(argv[1]), 1L) : 1);
  test_hash();
  test_callbacks();
  return failures != 0;
}
