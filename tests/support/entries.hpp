// Running one registry entry at a time.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/attention/oracle.hpp"
#include "rapt/plan.hpp"

namespace rapt::testing {

/// Names of the entries that this machine can run and that take `problem`, in dispatch order; those that run only where
/// they are named are among them. Throws std::logic_error when there is none.
std::vector<std::string> usable_entries(const Problem& problem);
/// The same for a small attention problem of f32.
std::vector<std::string> usable_entries();
/// The same on every device, of those that are selected; none only if a selection leaves none.
std::vector<std::string> every_entry(const Problem& problem);
std::vector<std::string> every_entry();

/// False when the environment's RAPT_TEST_ENTRIES is set and the name does not contain it.
bool selected(std::string_view entry);

/// What the registry says of an entry; throws std::logic_error if there is none of that name.
EntryInfo info_of(std::string_view entry);

/// False where values that a row does not see may change the row's last bits (docs/guide/cuda.md, "Entries").
bool ignores_hidden_values(std::string_view entry);

/// What an entry of delta_rule rounds the operands of products to: f32 or bf16.
DType operands_of(std::string_view entry);

/// What an entry of attention rounds the weights of a call to, and so which bounds hold for it.
Weights weights_of(std::string_view entry, const AttentionArgs& args);
/// The same of the entry of f8e4m3 products, which multiplies some calls in bf16 (docs/guide/cuda.md, "8-bit
/// products").
Weights weights_of_f8_products(const AttentionArgs& args);

/// The device whose memory `entry` works on.
DeviceType device_of(std::string_view entry);
/// Whether an entry of this build has a GPU here.
bool has_gpu();

/// A context that uses `entry` and no other.
struct Forced : Context {
  Forced(std::string name, ContextOptions options) : Context(std::move(options)), entry(std::move(name)) {}
  std::string entry;
};
/// Serial.
Forced forced(const std::string& entry);
/// The same on `executor` with at most `threads` workers.
Forced forced(const std::string& entry, std::shared_ptr<Executor> executor, int threads);

/// Runs `c` on `context`, which is the host's, into fresh poison and compares with `reference`.
Errors run_and_compare(Case& c, const Context& context, const Reference& reference);
/// The same on `entry`, serially.
Errors run_and_compare(Case& c, const std::string& entry, const Reference& reference);

/// "rel_frobenius=..., ...": every figure.
std::string describe(const Errors& errors);

/// The argument that an Error thrown by `call` names; empty when nothing was thrown.
template <class Call>
std::string refused_argument(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.argument();
  }
  return {};
}
/// All that it says.
template <class Call>
std::string refused_text(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace rapt::testing
