// The calling process: fork, and threads of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "support/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kLarge = "attention b=2 hq=4 hk=2 sq=256 d=64 causal lse";

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
  Case c(AttentionProblem::parse(kLarge)), own(AttentionProblem::parse(kLarge));
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
      if (executor->name().starts_with("openmp")) {  // serial in a context of the child's own, too
        own.poison_outputs();
        attention(own.args(), forced(usable_entries().front(), executor, 4));
        same = same && same_bits(c.out, own.out) && executor->concurrency() == 1;
      }
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
  std::promise<void> started, called;
  std::vector<float> from_early_thread, from_late_thread;
  std::thread early([&, may_call = called.get_future()] {
    started.set_value();
    may_call.wait();
    from_early_thread = compute();
  });
  started.get_future().wait();  // a child of a thread that is allocating has its heap's lock for ever
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
