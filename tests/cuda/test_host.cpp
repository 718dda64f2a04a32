// The host's side of calls on GPUs, over a CUDA runtime that only keeps books: errors and contexts.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

float* somewhere(std::uintptr_t at) {
  return reinterpret_cast<float*>(at << 32);
}

// A call on that device; nothing follows its pointers.
AttentionArgs on(int device) {
  const auto view = [&](std::uintptr_t at) {
    MutableTensorView made(somewhere(at), {1, 1, 4, 16});
    made.device = {DeviceType::cuda, device};
    return made;
  };
  AttentionArgs args;
  args.q = view(1);
  args.kv = KvSource::strided(view(2), view(3));
  args.out = view(4);
  return args;
}

void call(int device, const std::string& entry) {
  ContextOptions options;
  options.kernel = entry;
  attention(on(device), Context(options));
}

std::string error_of(int device, const std::string& entry) {
  try {
    call(device, entry);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

// What the kernels do is faked: one with workspace and one without are all there is.
const std::string kWithWorkspace = "attention_naive.f32.cuda";
const std::string kEntries[] = {kWithWorkspace, "attention_simt.f32.cuda.q64k64"};

}  // namespace

TEST_CASE("cuda host: an error that the caller left is neither blamed on a call nor taken away", "[unit]") {
  for (const std::string& entry : kEntries) {
    INFO(entry);
    fake = FakeCuda();
    fake.last = cudaErrorInvalidValue;
    CHECK(error_of(0, entry).empty());
    CHECK(fake.launches == 1);
    CHECK(fake.last == cudaErrorInvalidValue);
  }
}

TEST_CASE("cuda host: kernels run in the caller's workspace, and in the device's where that is empty", "[unit]") {
  ContextOptions options;
  options.kernel = kWithWorkspace;
  const Context context(options);
  auto* const memory = reinterpret_cast<std::byte*>(somewhere(5));
  fake = FakeCuda();
  attention(on(0), context, {memory, max_workspace_bytes(AttentionProblem::of(on(0)), context)});
  CHECK(fake.workspace == memory);
  attention(on(0), context, {memory, 0});
  CHECK(fake.workspace == &fake);
  Plan(on(0), context).run(on(0), {memory, 0});
  CHECK(fake.workspace == &fake);
}

TEST_CASE("cuda host: a launch that fails is an error, and leaves none behind", "[unit]") {
  for (const std::string& entry : kEntries)
    for (const cudaError_t left : {cudaSuccess, cudaErrorInvalidValue}) {
      INFO(entry << ", after " << left);
      fake = FakeCuda();
      fake.last = left;
      fake.launch = cudaErrorInvalidConfiguration;
      CHECK(error_of(0, entry) == "CUDA, starting a kernel: an error");
      CHECK(fake.last == cudaSuccess);
      fake.launch = cudaSuccess;
      CHECK(error_of(0, entry).empty());
    }
  // The same error again: known where launches give it back.
  fake = FakeCuda();
  fake.last = fake.launch = cudaErrorInvalidConfiguration;
  CHECK_FALSE(error_of(0, kWithWorkspace).empty());
}

TEST_CASE("cuda host: what work before broke is told from what a call did", "[unit]") {
  for (const std::string& entry : kEntries) {
    INFO(entry);
    fake = FakeCuda();
    CHECK(error_of(0, entry).empty());
    fake.broken = cudaErrorIllegalAddress;
    CHECK(error_of(0, entry).find("work queued before") != std::string::npos);
  }
}

TEST_CASE("cuda host: a call on one device makes no context on another", "[unit]") {
  for (const std::string& entry : kEntries) {
    INFO(entry);
    fake = FakeCuda();
    fake.context(1);
    call(1, entry);
    CHECK(fake.launched_on == 1);
    CHECK(fake.current == -1);
    CHECK(fake.contexts[0] == 0);

    fake.current = 0;
    fake.context(0);
    call(1, entry);
    CHECK(fake.launched_on == 1);
    CHECK(fake.current == 0);
    call(0, entry);
    CHECK(fake.launched_on == 0);
    CHECK(fake.current == 0);
  }
  CHECK_FALSE(error_of(99, kWithWorkspace).empty());
}
