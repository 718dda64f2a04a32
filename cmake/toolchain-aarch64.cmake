# Cross-compiles for aarch64 on Debian or Ubuntu with that architecture's own packages beside the host's:
# g++-aarch64-linux-gnu qemu-user-static libstdc++6:arm64 libgomp1:arm64 libtbb-dev:arm64.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc CACHE FILEPATH "")
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++ CACHE FILEPATH "")
# No -L: the loader of libc6:arm64 (/lib/ld-linux-aarch64.so.1) then finds that package's libc and no other. With -L
# it would be the cross compiler's loader with the libc of libc6:arm64, and the first thread to start would hang.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
