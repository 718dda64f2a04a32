// Attention of a real language model (tests/data): every entry has to give what the model computed.
#include <algorithm>
#include <string>

#include "operations/attention/captured.hpp"
#include "operations/attention/oracle.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/entries.hpp"

namespace rapt::testing {
namespace {

/// q, k, v and out of a call, rounded to another type; everything else stays the call's own.
struct Rounded {
  Tensor q, k, v, out;
  AttentionArgs args;

  Rounded(const AttentionArgs& given, DType dtype)
      : q(copy(given.q, dtype)),
        k(copy(given.kv.k, dtype)),
        v(copy(given.kv.v, dtype)),
        out(dtype, given.out),
        args(given) {
    args.q = q.view();
    args.kv.k = k.view();
    args.kv.v = v.view();
    args.out = out.mutable_view();
  }

 private:
  static Tensor copy(const TensorView& from, DType dtype) {  // all of tests/data is contiguous
    Tensor to(dtype, from);
    for (std::int64_t i = 0; i < to.size(); ++i) to.flat(i) = static_cast<const float*>(from.data)[i];
    return to;
  }
};

}  // namespace

TEST_CASE("captured: recordings of unequal lengths and of one text are there", "[captured]") {
  int padded = 0, single = 0;
  for (const Captured& captured : load_captured(RAPT_TEST_DATA)) {
    const std::vector<std::int64_t> lengths = captured.lengths();
    CHECK(captured.texts().size() == lengths.size());
    if (lengths.size() == 1) ++single;
    if (lengths.size() > 1 && lengths.front() != lengths.back()) ++padded;
    // The bound below is meaningful only if the model itself is as exact as fp32 can be.
    CHECK(captured.model_error() > 0);
    CHECK(captured.model_error() < 5e-7);
  }
  CHECK(padded >= 3);
  CHECK(single >= 1);
}

TEST_CASE("captured: every entry agrees with the model and with float64", "[captured]") {
  for (Captured& captured : load_captured(RAPT_TEST_DATA)) {
    for (const std::string& entry : every_entry()) {
      bool is_taken = true;  // in every way to pad: some take no ragged queries
      for (const Padding padding : kPaddings) {
        CAPTURE(captured.name(), entry, to_string(padding));
        const AttentionArgs args = captured.args(padding);
        const std::vector<std::string> takers = every_entry(AttentionProblem::of(args));
        if (std::find(takers.begin(), takers.end(), entry) == takers.end()) {
          is_taken = false;
          continue;
        }
        run(args, entry);

        const Difference difference = captured.difference(padding);
        CAPTURE(difference.max_abs, difference.max_abs_bound, difference.relative, difference.relative_bound);
        CHECK(difference.ok());

        const Errors errors = compare(args, oracle(args));
        CAPTURE(describe(errors));
        CHECK(errors.ok());
      }
      CAPTURE(captured.name(), entry);
      // Of a ragged call, attention_prefill's entries leave sequences of few rows to the kernel of decoding.
      if (is_taken && !entry.starts_with("attention_prefill"))
        CHECK(captured.same_bits(Padding::key_lengths, Padding::ragged));
    }
  }
}

TEST_CASE("captured: every entry agrees with float64 in 16 bits", "[captured]") {
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  for (Captured& captured : load_captured(RAPT_TEST_DATA)) {
    for (const Padding padding : kPaddings) {
      Rounded call(captured.args(padding), dtype);
      const Reference reference = oracle(call.args);
      for (const std::string& entry : every_entry(AttentionProblem::of(call.args))) {
        call.out.poison();
        run(call.args, entry);
        const Errors errors = compare(call.args, reference);
        CAPTURE(captured.name(), entry, to_string(padding), describe(errors));
        CHECK(errors.ok());
      }
    }
  }
}

TEST_CASE("captured: a result that is wrong anywhere is noticed", "[captured]") {
  for (Captured& captured : load_captured(RAPT_TEST_DATA)) {
    for (const Padding padding : kPaddings) {
      CAPTURE(captured.name(), to_string(padding));
      AttentionArgs args = captured.args(padding);
      CHECK_FALSE(captured.difference(padding).ok());  // nothing written yet

      attention(args);
      REQUIRE(captured.difference(padding).ok());
      float& first = *static_cast<float*>(args.out.data);
      first += 1e-3f;
      CHECK_FALSE(captured.difference(padding).ok());
    }
    // A wrong mask is not within the bounds: the padding matters.
    if (captured.lengths().front() == captured.lengths().back()) continue;
    AttentionArgs args = captured.args(Padding::boolean_mask);
    args.score.mask = {};
    attention(args);
    CHECK_FALSE(captured.difference(Padding::boolean_mask).ok());
  }
}

}  // namespace rapt::testing
