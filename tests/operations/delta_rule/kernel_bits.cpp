// What the bits of delta_rule may not depend on: later tokens, other sequences, shared heads, strides, threads.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "operations/delta_rule/check.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using Bits = DeltaRuleBits;

}  // namespace

TEST_CASE("delta_rule: later tokens change no bit of earlier ones", "[kernel][numbers]") {
  for (const Decays decays : kAllDecays)
    for (const char* words :
         {"b=1 hq=2 t=140 d=20 dv=24 decay=channel beta", "b=1 hq=4 hk=2 t=140 d=20 dv=24 decay=head beta",
          "b=1 hq=2 t=140 d=20 rule=linear", "dtype=bf16 b=1 hq=4 hk=2 t=140 d=20 dv=24 decay=channel beta"})
      for (const std::string& entry : every_entry(problem_of(words))) {
        const Forced context = forced(entry);
        DeltaRuleCase c(problem_of(words), 5, Placement::heap, Spacing::dense, decays);
        const std::vector<float> whole = bits_on(c, context).out;
        const auto row = static_cast<int64_t>(whole.size()) / 140;  // of a token, wherever it lies in memory
        const auto prefix_is = [&](int64_t count, const std::vector<float>& other) {
          return std::memcmp(whole.data(), other.data(), static_cast<std::size_t>(count * row) * sizeof(float)) == 0;
        };
        for (const int64_t cut : {139, 129, 128, 127, 100, 81, 66, 65, 64, 63, 33, 17, 16, 3, 2, 1}) {
          INFO(entry << ": " << words << ", decays " << static_cast<int>(decays) << ", cut at " << cut);
          c.clear();
          run(part_of(c, 0, 0, cut), context);
          REQUIRE(prefix_is(cut, c.out.values()));
          const float later = cut % 2 ? kNan : 0.7f;
          for (Tensor* t : {&c.q, &c.k, &c.v, &c.g, &c.beta})
            for (int64_t i = t->size() / 140 * cut; i < t->size(); ++i) t->flat(i) = t == &c.g ? -later : later;
          REQUIRE(prefix_is(cut, bits_on(c, context).out));
        }
      }
}

TEST_CASE("delta_rule: decode has the bits of a longer sequence's first token", "[kernel]") {
  for (const char* words :
       {"b=3 hq=2 t=1 d=64 dv=80 decay=channel beta state",
        "b=2 hq=4 hk=2 t=1 d=20 dv=33 decay=head gate beta l2norm state",
        "b=2 hq=2 hk=1 t=1 d=130 dv=256 decay=channel beta state", "b=2 hq=2 t=1 d=17 dv=100 rule=gated decay=constant",
        "dtype=bf16 b=4 hq=2 t=1 d=128 decay=head beta state slots",
        "dtype=bf16 state_dtype=bf16 b=4 hq=2 t=1 d=128 decay=head beta state slots",
        "b=3 hq=2 t=1 d=36 dv=12 ragged=2 beta state"})
    for (const std::string& decode : every_entry(problem_of(words))) {
      if (decode.find("_decode") == std::string::npos) continue;
      // Of a ragged call on a GPU the host does not know that each sequence has one token.
      if (device_of(decode) == DeviceType::cuda && problem_of(words).ragged >= 0) continue;
      std::string prefill = decode;
      prefill.erase(prefill.find("_decode"), 7);
      // The GPU's, which all GPUs have.
      if (const std::size_t hopper = prefill.find(".sm90a"); hopper != std::string::npos) prefill.erase(hopper);
      for (const std::uint64_t seed : {1, 2, 3, 4}) {
        INFO(decode << ": " << words << ", seed " << seed);
        DeltaRuleCase c(problem_of(words), seed);
        CHECK((bits_on(c, forced(decode)) == bits_on(c, forced(prefill))));
      }
    }
}

TEST_CASE("delta_rule: a sequence has the bits that it has alone, ragged or in a batch", "[kernel]") {
  for (const char* words : {"b=5 hq=4 hk=2 t=70 d=20 dv=40 ragged=200 decay=channel beta state",
                            "b=3 hq=2 hv=4 t=67 d=24 decay=head gate beta l2norm state",
                            "dtype=bf16 b=4 hq=2 t=40 d=36 dv=12 ragged=90 decay=constant beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      INFO(entry << ": " << words);
      const Forced context = forced(entry);
      DeltaRuleCase c = case_with_states(problem_of(words), 2, Decays::some);
      const Bits together = bits_on(c, context);
      c.clear();
      for (int64_t i = 0; i < c.problem.b; ++i) run(part_of(c, i, 0, c.length(i)), context);
      CHECK((Bits{c.out.values(), c.final.values()} == together));
    }
}

TEST_CASE("delta_rule: heads that share q, k or v have the bits of copies", "[kernel][long]") {
  struct Shared {
    const char *words, *copies;
    int64_t q, k, v;  // heads that share one
  };
  for (const Shared& s :
       {Shared{"hq=2 hv=6 t=70 d=20 dv=24 decay=head", "hq=6 t=70 d=20 dv=24 decay=head", 3, 3, 1},
        Shared{"dtype=bf16 hq=2 hv=6 t=70 d=20 decay=head", "dtype=bf16 hq=6 t=70 d=20 decay=head", 3, 3, 1},
        Shared{"hq=4 hk=4 hv=2 t=70 d=20 dv=24 decay=channel", "hq=4 t=70 d=20 dv=24 decay=channel", 1, 1, 2},
        Shared{"hq=1 hk=4 t=70 d=20 dv=24 decay=head", "hq=4 t=70 d=20 dv=24 decay=head", 4, 1, 1}}) {
    DeltaRuleCase few(problem_of(s.words), 9), many(problem_of(s.copies), 9);
    few.scale = many.scale;
    const auto copy = [](Tensor& to, const Tensor& from, int64_t group) {
      const int64_t heads = to.layout().shape[2], size = to.layout().shape[3];
      for (int64_t i = 0; i < to.size(); ++i) {
        const int64_t t = i / size / heads, h = i / size % heads / group;
        to.flat(i) = from.flat((t * (heads / group) + h) * size + i % size);
      }
    };
    copy(many.q, few.q, s.q), copy(many.k, few.k, s.k), copy(many.v, few.v, s.v);
    for (int64_t i = 0; i < few.g.size(); ++i) many.g.flat(i) = few.g.flat(i);
    for (const std::string& entry : every_entry(few.problem)) {
      INFO(entry << ": " << s.words);
      CHECK((bits_on(few, forced(entry)) == bits_on(many, forced(entry))));
    }
  }
  // Query heads of one state.
  DeltaRuleCase few(problem_of("hq=6 hk=2 t=70 d=20 dv=24 decay=head"), 9);
  for (const std::string& entry : every_entry(few.problem)) {
    const std::vector<float> whole = bits_on(few, forced(entry)).out;
    for (int64_t r = 0; r < 3; ++r) {
      INFO(entry << ", query " << r << " of each state");
      DeltaRuleArgs args = few.args();
      args.q = slice(args.q, 2, r, 2), args.out = slice(args.out, 2, r, 2);
      args.q.strides[2] *= 3, args.out.strides[2] *= 3;
      few.clear();
      run(args, forced(entry));
      const std::vector<float> one = few.out.values();
      for (std::size_t i = 0; i < whole.size(); ++i)
        if (static_cast<int64_t>(i) / 24 % 3 == r) REQUIRE(std::memcmp(&whole[i], &one[i], sizeof(float)) == 0);
    }
  }
}

TEST_CASE("delta_rule: where tensors lie changes no bit", "[kernel]") {
  for (const char* words : {"b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state",
                            "b=3 hq=2 t=3 d=33 dv=17 decay=head beta state slots steps=3"})
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      DeltaRuleCase dense(problem_of(words), seed), gaps(problem_of(words), seed, Placement::heap, Spacing::gaps);
      for (const std::string& entry : every_entry(dense.problem)) {
        INFO(entry << ": " << words << ", seed " << seed);
        const Bits bits = bits_on(dense, forced(entry));
        CHECK((bits_on(gaps, forced(entry)) == bits));
        if (!dense.in_place) continue;
        DeltaRuleArgs args = dense.args();  // from a state of its own
        args.initial_state = dense.initial.view();
        dense.clear();
        run(args, forced(entry));
        CHECK((Bits{dense.out.values(), dense.final.values()} == bits));
      }
    }
}

TEST_CASE("delta_rule: 1 to 16 threads write the same bits", "[kernel][long]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words : {"hq=2 t=100 d=128 dv=200 decay=channel beta state", "b=3 hq=3 t=40 d=100 decay=head beta",
                            "dtype=bf16 hq=2 t=100 d=128 dv=200 decay=channel beta state",
                            "b=16 hq=2 t=1 d=128 decay=head gate beta state slots"}) {
    DeltaRuleCase c(problem_of(words), 4);
    for (const std::string& entry : {usable_entries(c.problem).front()}) {
      const Bits serial = bits_on(c, forced(entry));
      for (int threads = 1; threads <= 16; ++threads) {
        INFO(entry << " on " << threads << ": " << words);
        REQUIRE((bits_on(c, forced(entry, executor, threads)) == serial));
      }
    }
  }
}
