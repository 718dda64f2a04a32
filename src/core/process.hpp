// Whether this process is a fork, without the system call that getpid() is each time.
#pragma once

namespace rapt {

/// How many forks lie between the process that loaded rapt and this one. What had threads of its own before a fork has
/// none of them after it. Forks by `_Fork()` or a bare `clone()`, which run no handlers, are not counted.
int forks() noexcept;

}  // namespace rapt
