// The `rapt` program.
#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>

#include "command.hpp"

namespace {

/// The recorded tensors of an installed program, or of the sources that this one was built from.
std::string default_data_dir() {
  std::error_code unknown;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unknown).parent_path();
  std::string folder;
  for (const char* const from_program : {RAPT_SOURCE_DATA, RAPT_INSTALLED_DATA}) {
    folder = (program / from_program).lexically_normal().string();
    if (std::filesystem::is_directory(folder, unknown)) break;
  }
  return folder;
}

}  // namespace

int main(int argc, char** argv) {
  return rapt::tools::run_command({argv, static_cast<std::size_t>(argc)}, default_data_dir());
}
