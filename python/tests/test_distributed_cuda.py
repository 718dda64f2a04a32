"""rapt.distributed over GPUs and NCCL, against one GPU. Skipped where there are fewer than two GPUs, or rapt has no backend
for them."""

import pytest
import rapt

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two CUDA devices", allow_module_level=True)
if not any(entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)

import distributed_mesh_cases
from distributed_cases import CASES, METHODS, rank_main, shards

OTHERS = ("empty_rows", "same_bits_again", "losses_that_differ", "ring_messages", "disagreements")


def cases_of(ranks):
    names = {f"{method.__name__}-{dtype}" for method in METHODS for dtype in ("float32", "bfloat16", "float16")}
    names |= {f"packed-{method.__name__}" for method in METHODS}
    return {name: CASES[name] for name in (*sorted(names), *OTHERS)} | distributed_mesh_cases.CASES[ranks]


def gpu_main(rank, ranks, folder, device="cuda"):
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    rank_main(rank, ranks, folder, cases_of(ranks), last_case=shards, backend=backend)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} CUDA devices")
    torch.multiprocessing.start_processes(gpu_main, (ranks, str(tmp_path)), nprocs=ranks, start_method="spawn")
    for case in (*cases_of(ranks), shards.__name__):
        for rank in range(ranks):
            report = tmp_path / f"{case}.{rank}"
            assert report.exists(), f"{case}: not run: a case before it failed"
            assert not report.read_text(), f"{case}, rank {rank}:\n{report.read_text()}"
