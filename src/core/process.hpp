// Which process this is, without the system call that getpid() is each time: in sandboxes it takes a microsecond.
#pragma once

namespace rapt {

/// How many forks lie between the process that loaded rapt and this one. What had threads of its own before a fork has
/// none of them after it.
int forks() noexcept;

}  // namespace rapt
