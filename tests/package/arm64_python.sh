#!/usr/bin/env bash
# Unpacks CPython for aarch64 from Debian's packages, with the C and C++ libraries that it needs, and prints a command that runs it under
# qemu. Nothing is installed: aarch64's Python would replace this machine's.
#
#     tests/package/arm64_python.sh FOLDER
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1")
python=python3.11  # Debian 12's
if [[ ! -x $folder/usr/bin/$python ]]; then
  mkdir -p "$folder/packages"
  (cd "$folder/packages" && apt-get download -q $python-minimal:arm64 libpython3.11-{minimal,stdlib}:arm64 \
    {libc6,libexpat1,libffi8,libgcc-s1,libstdc++6,zlib1g}:arm64 >&2)
  for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder"; done
fi
# Python calls itself by its name, -0: a kernel without binfmt_misc starts this script, but no program of aarch64.
command=$folder/usr/bin/python
printf '#!/bin/sh\nexec %s -L %s -0 "$0" %s "$@"\n' "$(command -v qemu-aarch64-static)" "$folder" "$folder/usr/bin/$python" >"$command"
chmod +x "$command"
echo "$command"
