#include "dispatch/cuda_library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <cstdlib>
#include <filesystem>

#include "dispatch/fingerprint.hpp"
#include "rapt/plan.hpp"

namespace rapt {
namespace {

// rapt's own functions, which librapt_cuda gets.
constexpr RaptFunctions kRaptFunctions{entry_name, to_string, fill_sizes};

std::string error_of_dl() {
  const char* const text = dlerror();
  return text != nullptr ? text : "no reason given";
}

// The folder, with its slash, of the file that holds this code: a program, librapt, or a Python module. Empty: nobody
// knows.
std::string own_folder() {
  Dl_info info;
  void* found = nullptr;
  if (dladdr1(&kRaptFunctions, &info, &found, RTLD_DL_LINKMAP) == 0 || found == nullptr) return {};
  std::string file = static_cast<const link_map*>(found)->l_name;
  if (file.empty()) {  // the program itself, which may have been started by any name
    file.resize(PATH_MAX);
    const ssize_t size = readlink("/proc/self/exe", file.data(), file.size());
    file.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  }
  if (!file.starts_with('/')) return {};  // relative to where the process was when it loaded this
  return std::filesystem::path(file.substr(0, file.rfind('/') + 1)).lexically_normal().string();
}

// dlopen() takes a name without a slash for one that the system is to find.
CudaBackend open_library(const std::string& name) {
  CudaBackend result;
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    result.missing = error_of_dl();
    return result;
  }
  link_map* map = nullptr;
  result.file = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : name;
  const auto describe = reinterpret_cast<decltype(&rapt_cuda_library)>(dlsym(handle, "rapt_cuda_library"));
  if (describe == nullptr) {
    result.missing = error_of_dl();
  } else if (const CudaLibrary& library = *describe();
             library.version != version() || library.build != std::string_view(kBuild)) {
    result.version = library.version;
    result.missing = result.file + " is of rapt " + library.version + " (" + library.build + "), and this is rapt " +
                     std::string(version()) + " (" + kBuild +
                     "); both must be of one version, built from the same sources by the same compiler";
  } else {
    result.version = library.version;
    result.backend = &library.backend(kRaptFunctions);
  }
  if (result.backend == nullptr) dlclose(handle);  // else it stays open
  return result;
}

}  // namespace

CudaBackend load_cuda_library(const char* named) {
  if (named != nullptr) {
    CudaBackend result = open_library(named);
    if (result.backend == nullptr)
      result.missing = "RAPT_CUDA_LIBRARY is " + std::string(named) + ": " + result.missing;
    return result;
  }
  // Whoever can make a link to a program with more privileges chooses what lies beside the link.
  const std::string folder = getauxval(AT_SECURE) == 0 ? own_folder() : "";
  if (const std::string beside = folder + RAPT_CUDA_FILE; !folder.empty() && access(beside.c_str(), F_OK) == 0)
    return open_library(beside);
  CudaBackend result = open_library(RAPT_CUDA_FILE);
  if (!result.file.empty()) return result;
  result.missing = "no GPU backend was found: " + result.missing + (folder.empty() ? "" : ", nor is it in " + folder);
  result.missing +=
      ". Install rapt-attention-cuda (pip) or " RAPT_CUDA_PACKAGE " (Debian) of rapt's version, build with ";
  result.missing += "RAPT_CUDA=ON, or set RAPT_CUDA_LIBRARY to the file's path";
  return result;
}

const CudaBackend& cuda_backend_of_process() {
  static const CudaBackend loaded = [] {
    const char* const named = secure_getenv("RAPT_CUDA_LIBRARY");
    return load_cuda_library(named != nullptr && *named != '\0' ? named : nullptr);
  }();
  return loaded;
}

}  // namespace rapt
