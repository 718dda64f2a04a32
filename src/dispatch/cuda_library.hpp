// The border between rapt and librapt_cuda, the GPU backend in a library of its own. rapt opens it at the first use of
// a GPU and is never linked with it. Across the border go Backend, Entry and what these are made of, so both sides must
// come from the same sources and compiler: kBuild of the generated dispatch/fingerprint.hpp says so.
#pragma once

#include <string>
#include <string_view>

#include "dispatch/entry.hpp"

namespace rapt {

// The functions of rapt that librapt_cuda calls. It holds no copies of them, so there is one of everything in a
// process.
struct RaptFunctions {
  std::string (*entry_name)(const KernelFacts& facts, std::string_view isa);
  std::string (*to_string)(const Problem& problem);
  void (*fill_sizes)(const AttentionProblem& problem, AttentionParams& params);
};

// What librapt_cuda says of itself. It is read before anything is known to match, so it is the same in every version.
struct CudaLibrary {
  const char* version;
  const char* build;                                          // its kBuild
  const Backend& (*backend)(const RaptFunctions& functions);  // to be called if version and build are rapt's own
};
extern "C" __attribute__((visibility("default"))) const CudaLibrary* rapt_cuda_library() noexcept;

// What came of looking for it.
struct CudaBackend {
  const Backend* backend = nullptr;  // lasts as long as the process; null: there is none
  std::string file, version;         // of the library that was opened
  std::string missing;               // why there is no backend, and how to get one
};

// The process's, which is looked for at the first call: the file that the environment's RAPT_CUDA_LIBRARY names;
// without it the one beside the file that holds rapt's code; else the one that the system finds by its name. In a
// program with more privileges than its user only the last.
const CudaBackend& cuda_backend_of_process();
// Looks anew. `named` is a path or a name, as dlopen() takes it; null: there is none.
CudaBackend load_cuda_library(const char* named);

}  // namespace rapt
