"""rapt.distributed on two hosts with two processes each, by torchrun. The hosts are network namespaces of this machine,
joined by a virtual cable.

Linux only. Needs iproute2, util-linux and the right to make namespaces: as root, or as any user where the kernel lets
users make their own. Nothing of it is left when the test ends.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = torch.distributed
if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from distributed_cases import CASES, inputs, raises, rank_main

from rapt.distributed import ring_attention, shard_sequence

# To the namespace of the last command that was started. Both ends of the cable are named eth0.
CABLE = """
while [ "$(readlink /proc/$!/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add eth0 type veth peer name eth0 netns $!
"""
# "$@" is torchrun.
HOSTS = f"""
set -e
unshare --net --uts bash -c '
  hostname second
  until ip link set eth0 up 2>/dev/null; do sleep 0.05; done
  ip link set lo up
  ip address add 10.77.0.2/24 dev eth0
  "$@" --node-rank 1 "$PROGRAM" "$FOLDER"' host "$@" &
{CABLE}
hostname first
ip link set lo up
ip address add 10.77.0.1/24 dev eth0
ip link set eth0 up
"$@" --node-rank 0 "$PROGRAM" "$FOLDER"
wait $!
"""
ALONE = ["unshare", "--map-root-user", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
METHODS = ("all_gather_attention", "ring_attention")


def keys_cross_the_cable(rank, ranks):
    names = [None] * ranks
    dist.all_gather_object(names, socket.gethostname())
    assert names == ["first", "first", "second", "second"]
    q, k, v = (shard_sequence(x, 2) for x in inputs(2, 2, 4096, 4096, torch.float32, b=1)[:3])
    before = received()
    dist.barrier()
    ring_attention(q, k, v)
    dist.barrier()
    assert received() - before >= (ranks - 1) * (k.nbytes + v.nbytes)


def cable_is_cut(rank, ranks):
    """Every rank raises, at the latest after the timeout of the group."""
    q, k, v = (shard_sequence(x, 2) for x in inputs(2, 2, 48, 48, torch.float32)[:3])
    group = dist.new_group(timeout=timedelta(seconds=10))
    begin, last = time.monotonic(), rank == ranks - 1
    with raises(RuntimeError, f"ring_attention: rank {rank} lost another rank of its group (ranks 0, 1, 2, 3)"):
        for call in range(1000):
            if last and call == 5:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            ring_attention(q, k, v, group=group)
    assert time.monotonic() - begin < 60
    if last:  # torchrun wants to hear from the other host
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)


def received():
    """Bytes that have come over this host's end of the cable."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[0])


def test_two_hosts(tmp_path):
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no iproute2 or util-linux")
    tried = subprocess.run([*ALONE, "bash", "-c", f"unshare --net sleep 9 & {CABLE}"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no right to make namespaces and joined interfaces: {tried.stderr.strip()}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "10.77.0.1", "--master-port", "29500"]
    given = {"PROGRAM": __file__, "FOLDER": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    run = [*ALONE, "bash", "-c", HOSTS, "hosts", *torchrun]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=os.environ | given)
    assert done.returncode == 0, done.stderr
    for case, rank in ((case, rank) for case in (*CASES_HERE, cable_is_cut.__name__) for rank in range(4)):
        text = (tmp_path / f"{case}.{rank}").read_text()
        assert not text, f"{case}, rank {rank}:\n{text}"


CASES_HERE = {keys_cross_the_cable.__name__: keys_cross_the_cable}
CASES_HERE |= {name: CASES[name] for method in METHODS for name in (f"{method}-float32", f"packed-{method}")}

if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    rank_main(int(os.environ["RANK"]), ranks, sys.argv[1], CASES_HERE, cable_is_cut, rendezvous="env://")
