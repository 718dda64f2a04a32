// Runs a fuzz target without libFuzzer: every seed file, then fixed pseudo-random changes of them.
//
//     fuzz_<target>_driver RUNS [SEED_FOLDER]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<Bytes> read_seeds(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> seeds;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return seeds;
}

/// `run` picks everything, so that a run can be repeated alone.
Bytes make_input(const std::vector<Bytes>& seeds, unsigned run) {
  std::mt19937 random(run);
  const auto below = [&](std::size_t count) { return count ? random() % count : 0; };
  if (seeds.empty()) {
    Bytes bytes(below(256));
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    return bytes;
  }
  Bytes bytes = seeds[run % seeds.size()];
  for (std::size_t changes = run < seeds.size() ? 0 : 1 + below(4); changes > 0; --changes) {
    const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1));
    const Bytes& other = seeds[below(seeds.size())];
    const auto from = other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1));
    switch (below(4)) {
      case 0:
        bytes.insert(at, static_cast<std::uint8_t>(random()));
        break;
      case 1:
        bytes.erase(at, at + std::min<std::ptrdiff_t>(bytes.end() - at, 1 + static_cast<int>(below(4))));
        break;
      case 2:
        if (at != bytes.end()) *at = static_cast<std::uint8_t>(' ' + below(95));
        break;
      case 3:
        bytes.insert(at, from, other.end());
        break;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: %s RUNS [SEED_FOLDER]\n", argv[0]), 2;
  const auto runs = static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10));
  const std::vector<Bytes> seeds = argc > 2 ? read_seeds(argv[2]) : std::vector<Bytes>();
  for (unsigned run = 0; run < runs; ++run) {
    const Bytes input = make_input(seeds, run);
    try {
      LLVMFuzzerTestOneInput(input.data(), input.size());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "run %u of %u: %s\ninput:", run, runs, error.what());
      for (const auto byte : input) std::fprintf(stderr, " %02x", byte);
      std::fprintf(stderr, "\n");
      return 1;
    }
  }
  std::printf("%u runs of %zu seeds\n", runs, seeds.size());
}
