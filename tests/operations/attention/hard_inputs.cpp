#include "operations/attention/hard_inputs.hpp"

#include <cmath>

namespace rapt::testing {
namespace {

void fill(Tensor& tensor, float value) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = value;
}
template <int kTenths>
void constant(Case& c) {
  for (Tensor* tensor : {&c.q, &c.k, &c.v}) fill(*tensor, kTenths / 10.f);
}
template <int kBelow>
void sinks_below(Case& c) {
  fill(c.sinks, -kBelow);
}
template <int kBelow>
void first_keys_below(Case& c) {
  for (std::int64_t j = 0; j < c.bias.size(); ++j) c.bias.flat(j) = j < 128 ? -kBelow : 0;
}
template <int kSink>
void small_beside_sink(Case& c) {
  fill(c.sinks, kSink);
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) *= 0x1p90f;
}

constexpr HardInputs kAll[] = {
    // Equal terms, where the roundings of a long sum all go one way.
    {"constant inputs, 64 keys", "attention sq=64 d=64 lse", constant<1>},
    {"constant inputs, 1024 keys", "attention sq=70 sk=1024 d=64 lse", constant<3>},
    {"constant inputs, one row", "attention sq=1 sk=1024 d=64 lse", constant<11>},
    // The softmax's reference is the sink's, or that of the first keys, 3 to 17 powers of two below the largest score.
    {"sinks of -2", "attention hq=2 sq=70 sk=300 d=64 sinks lse", sinks_below<2>},
    {"sinks of -6", "attention hq=2 sq=70 sk=300 d=64 sinks lse", sinks_below<6>},
    {"sinks of -10", "attention hq=2 sq=70 sk=300 d=64 sinks lse", sinks_below<10>},
    {"sinks of -15", "attention hq=2 sq=70 sk=300 d=64 sinks lse", sinks_below<15>},
    {"first keys at -4", "attention sq=70 sk=512 d=64 bias=k lse", first_keys_below<4>},
    {"first keys at -15", "attention sq=70 sk=512 d=64 bias=k lse", first_keys_below<15>},
    {"values of 2^100 and scores that rise", "attention sq=20 sk=100000 d=1 scale=1",
     [](Case& c) {
       fill(c.q, 1), fill(c.v, 0x1p100f);
       for (std::int64_t j = 0; j < c.k.size(); ++j) c.k.flat(j) = j < 100 ? 0.f : 16.6f;
     }},
    {"scale of 1e38", "attention sq=40 sk=300 d=1 lse scale=1e38",
     [](Case& c) {
       for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 10 * (1 + static_cast<float>(i % 7) / 8);
       for (std::int64_t j = 0; j < c.k.size(); ++j) c.k.flat(j) = 3e-38f * (1 + static_cast<float>(j % 5) / 4);
     }},
    {"scale of -1e-30", "attention sq=40 sk=300 d=1 lse scale=-1e-30",
     [](Case& c) {
       for (std::int64_t i = 0; i < c.q.size(); ++i) c.q.flat(i) = 1e17f * (1 + static_cast<float>(i % 7) / 8);
       for (std::int64_t j = 0; j < c.k.size(); ++j) c.k.flat(j) = 1e13f * (1 + static_cast<float>(j % 5) / 4);
     }},
    {"small weights beside a sink of 30", "attention sq=40 sk=300 d=16 sinks lse", small_beside_sink<30>},
    {"small weights beside a sink of 85", "attention sq=40 sk=300 d=16 sinks lse", small_beside_sink<85>},
    {"small weights beside a sink of 120", "attention sq=40 sk=300 d=16 sinks lse", small_beside_sink<120>},
    {"small weights beside a sink of 1000", "attention sq=40 sk=300 d=16 sinks lse", small_beside_sink<1000>},
    {"a sink of 1e10", "attention sq=40 sk=300 d=16 sinks lse", [](Case& c) { fill(c.sinks, 1e10f); }},
    {"a sink of -1e10", "attention sq=40 sk=300 d=16 sinks lse", [](Case& c) { fill(c.sinks, -1e10f); }},
    {"a sink of 2e38", "attention sq=1 sk=2000 d=16 sinks lse", [](Case& c) { fill(c.sinks, 2e38f); }},
    {"a sink of -2e38", "attention sq=40 sk=2000 d=16 sinks lse", [](Case& c) { fill(c.sinks, -2e38f); }},
    {"a sink of -1000 and no key", "attention sq=4 sk=2 d=16 causal align=bottom_right sinks lse", sinks_below<1000>},
    {"ALiBi far from the keys and a sink", "attention hq=4 sq=1 sk=128 d=64 align=1000000 alibi sinks lse",
     [](Case&) {}},
    {"ALiBi far from the keys", "attention b=1 hq=8 sq=20 d=64 align=5000000000 alibi", [](Case&) {}},
};

}  // namespace

std::span<const HardInputs> hard_inputs() {
  return kAll;
}

Case make_case(const HardInputs& inputs) {
  Case c(AttentionProblem::parse(inputs.problem), 7);
  inputs.fill(c);
  return c;
}

}  // namespace rapt::testing
