// The calling process: fork, and the floating-point environment of its threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <thread>

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
