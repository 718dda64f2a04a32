// The calling process: fork, and the floating-point environment of its threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kLarge = "attention b=2 hq=4 hk=2 sq=256 d=64 causal lse";

/// Rounding, masks, flush-to-zero and denormals-are-zero of this thread; not the sticky exception flags.
std::uint64_t float_mode() {
#if defined(__SSE2__)
  return _mm_getcsr() & ~0x3fu;
#elif defined(__aarch64__)
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#endif
}

void set_float_mode(std::uint64_t mode) {
#if defined(__SSE2__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

#if defined(__SSE2__)
constexpr std::uint64_t kFlush = 0x8040;
#else
constexpr std::uint64_t kFlush = 1 << 24;
#endif

/// What compute() returns in a forked child; empty if that dies.
std::vector<float> in_child(const std::function<std::vector<float>()>& compute) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(60);
    const std::vector<float> values = compute();
    const char* at = reinterpret_cast<const char*>(values.data());
    const char* const end = at + values.size() * sizeof(float);
    for (ssize_t n; at < end && (n = write(ends[1], at, static_cast<std::size_t>(end - at))) > 0;) at += n;
    _exit(0);
  }
  close(ends[1]);
  std::string bytes(1 << 16, 0);
  std::size_t size = 0;
  for (ssize_t n; (n = read(ends[0], bytes.data() + size, bytes.size() - size)) > 0;) {
    size += static_cast<std::size_t>(n);
    if (size == bytes.size()) bytes.resize(2 * size);
  }
  close(ends[0]);
  waitpid(child, nullptr, 0);
  std::vector<float> values(size / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

}  // namespace

TEST_CASE("a forked child runs with its parent's context", "[api]") {
  Case c(Problem::parse(kLarge)), own(Problem::parse(kLarge));
  for (const auto& executor : all_executors()) {
    const Context context = forced(usable_entries().front(), executor, 4);
    c.poison_outputs();
    attention(c.args(), context);  // starts the pool's threads, which the child will not have
    const Plan plan(c.args(), context);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(60);  // a child that waits for lost threads must not outlive the test
      attention(own.args(), context);
      bool same = same_bits(c.out, own.out);
      own.poison_outputs();
      plan.run(own.args());
      same = same && same_bits(c.out, own.out);
      _exit(same ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    INFO(executor->name());
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    // The parent goes on as before.
    own.poison_outputs();
    attention(own.args(), context);
    CHECK(same_bits(c.out, own.out));
  }
}

// Linux gives the registers of a matrix unit to a process that asks, and what asks is the first call.
TEST_CASE("threads and children from before and after the first call give the same bits", "[api]") {
  const auto compute = [] {
    ContextOptions options;
    options.executor = serial_executor();
    const Context context(options);
    std::vector<float> all;
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      Case c(typed(kLarge, dtype));
      attention(c.args(), context);
      const std::vector<float> out = c.out.values();
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  std::promise<void> called;
  std::vector<float> from_early_thread, from_late_thread;
  std::thread early([&] {
    called.get_future().wait();
    from_early_thread = compute();
  });
  const std::vector<float> from_early_child = in_child(compute);
  const std::vector<float> want = compute();
  called.set_value();
  early.join();
  std::thread([&] { from_late_thread = compute(); }).join();
  CHECK(from_early_child == want);
  CHECK(from_early_thread == want);
  CHECK(from_late_thread == want);
  CHECK(in_child(compute) == want);
}

TEST_CASE("a call leaves the floating-point mode of its threads alone", "[api][threads]") {
  Case c(typed(kLarge, each_type()));
  for (const std::string& entry : threaded_entries(c.problem)) {
    for (const std::uint64_t extra : {std::uint64_t{0}, kFlush}) {
      const std::uint64_t normal = float_mode();
      const auto executor = std::make_shared<ThreadExecutor>(3);
      std::atomic<int> changed{0}, strands{0};
      thread_local std::uint64_t before;
      executor->before = [&] {
        set_float_mode(normal | extra);
        before = float_mode();
      };
      executor->after = [&] {
        ++strands;
        changed += before != float_mode();
      };
      set_float_mode(normal | extra);
      attention(c.args(), forced(entry, executor, 3));
      attention(c.args(), forced(entry));
      const std::uint64_t after = float_mode();
      set_float_mode(normal);
      INFO(entry);
      CHECK(after == (normal | extra));
      CHECK(changed == 0);
      CHECK(strands > 0);
    }
  }
}

TEST_CASE("a call leaves the rounding direction alone", "[api]") {
  Case c(Problem::parse("attention hq=2 sq=40 d=16"));
  for (int direction : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::fesetround(direction);
    attention(c.args());
    const int after = std::fegetround();
    std::fesetround(FE_TONEAREST);
    CHECK(after == direction);
  }
}
