// The `rapt` command: lists kernels, checks results against float64, measures speed.
#pragma once

#include <span>
#include <string>

namespace rapt::tools {

/// Runs the command line `argv`, which begins with the program's name. `data_dir` is the folder of the recorded tensors
/// that `rapt demo` reads by default. Returns the exit code. Standard output may stay in stdio's buffer.
int run_command(std::span<const char* const> argv, std::string data_dir);

}  // namespace rapt::tools
