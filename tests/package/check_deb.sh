#!/usr/bin/env bash
# check_deb.sh FOLDER: installs the folder's Debian packages on this machine, uses them as their users would, and removes them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=("$(realpath "$1")"/*.deb)
names=()
for package in "${packages[@]}"; do names+=("$(dpkg-deb -f "$package" Package)"); done
root=()
[[ $(id -u) == 0 ]] || root=(sudo)
work=$(mktemp -d)
remove() {
  "${root[@]}" dpkg --remove "${names[@]}"
  rm -rf "$work"
}
trap remove EXIT
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"

# What is compiled in, by words of its notice.
declare -A notices=([librapt]=xsimd [librapt-cuda]="NVIDIA NVTX" [librapt-dev]="" [rapt-tools]="CLI11 Eigen fmt JSON"
                    [python3-rapt]="nanobind robin-map xsimd CLI11 Eigen fmt JSON")
for name in "${names[@]}"; do
  for word in "Apache License" ${notices[${name%%[0-9].*}]}; do
    grep -qwF "$word" "/usr/share/doc/$name/copyright" || { echo "$name: no notice of $word in its copyright file"; exit 1; }
  done
  dpkg --verify "$name"
  while read -r path; do
    [[ ! -L $path || -e $path ]] || { echo "$name: $path leads nowhere"; exit 1; }
  done < <(dpkg -L "$name")
done
export RAPT_EXPECT_CUDA=0
[[ " ${names[*]}" != *" librapt-cuda"* ]] || RAPT_EXPECT_CUDA=1
cmake -G Ninja -S "$here/find_package" -B "$work/cmake"
cmake --build "$work/cmake"
"$work/cmake/consumer"
# shellcheck disable=SC2046
c++ -std=c++20 "$here/consumer.cpp" $(pkg-config --cflags --libs rapt) -o "$work/consumer"
"$work/consumer"
dpkg -L rapt-tools | grep -qx /usr/share/man/man1/rapt.1.gz
/usr/bin/rapt check --problem "b=1 hq=2 sq=48 d=16 causal"
/usr/bin/rapt demo --threads 1
cd "$work"
cmp <(/usr/bin/rapt --help) <(/usr/bin/python3 -m rapt --help)
env -u PYTHONDONTWRITEBYTECODE /usr/bin/python3 - <<'END'
import importlib.metadata, os, numpy, rapt
assert rapt.__file__.startswith("/usr/lib/python3/dist-packages/"), rapt.__file__
found = importlib.metadata.distribution("rapt-attention")
assert found.version == rapt.__version__ and "rapt" in {entry.name for entry in found.entry_points}, found.metadata
assert os.path.exists(os.path.join(os.path.dirname(rapt.__file__), "bench/sets/quick.txt"))
assert bool(rapt.info()["backends"][1]["missing"]) == (os.environ["RAPT_EXPECT_CUDA"] == "0"), rapt.info()["backends"]
q = numpy.random.default_rng(0).standard_normal((1, 2, 48, 16)).astype(numpy.float32)
weights = numpy.exp(q.astype(float) @ q.astype(float).swapaxes(-1, -2) / 4)
assert abs(rapt.attention(q, q, q) - weights / weights.sum(-1, keepdims=True) @ q).max() < 1e-5
END
trap - EXIT
remove
test ! -e /usr/lib/python3/dist-packages/rapt
echo "${#packages[@]} packages: installed, used from C++ and Python, removed"
