"""Whose threads calls run on: PyTorch's for its tensors, oneTBB's for other arrays; nested, at once, and after a fork."""

import ctypes
import ctypes.util
import os
import subprocess
import sys
import threading

import pytest
import rapt

torch = pytest.importorskip("torch")

import rapt.torch  # noqa: E402

CPUS = len(os.sched_getaffinity(0))
ours = rapt.torch.scaled_dot_product_attention


def torch_has_openmp():
    return "OpenMP" in torch.__config__.parallel_info()


pytestmark = pytest.mark.skipif(not torch_has_openmp(), reason="PyTorch on a thread pool of its own")


@pytest.fixture
def team():
    """Sets the number of PyTorch's threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, 256, 64, generator=generator).to(dtype) for _ in range(3)]


def one_thread(*tensors, **options):
    return rapt.attention(*tensors, threads=1, **options)


def script(text, *arguments, **environment):
    """What a Python of its own prints; a child that hangs fails."""
    command = [sys.executable, "-c", text, *arguments]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]


def test_without_pytorch_calls_run_on_onetbb():
    (pools,) = script("import rapt; print(rapt.info()['pools'])")
    assert pools == "{'numpy': 'tbb'}"


def test_the_pool_is_said(team):
    team(2)
    pools = rapt.info()["pools"]
    assert pools["numpy"] == "tbb" and pools["torch"].startswith("openmp (lib")
    q, k, v = inputs()
    explanation = rapt.explain(q, k, v)
    assert explanation.executor == pools["torch"] and f"executor   {pools['torch']}\n" in str(explanation)
    assert rapt.explain(q.numpy(), k.numpy(), v.numpy()).executor == "tbb"
    assert rapt.explain(q.numpy(), k.numpy(), v.numpy(), out=torch.empty_like(q)).executor == pools["torch"]


LOAD = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]; from rapt import _core; print(_core.pool(True))"
LIBTORCH = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")


def other_runtime():
    """An OpenMP runtime that is not PyTorch's."""
    for name in ("omp", "omp5", "iomp5"):
        if found := ctypes.util.find_library(name):
            return found
    pytest.skip("no libomp or libiomp5 on this machine")


def test_a_library_that_nobody_else_sees_is_found():
    (nothing,) = script(LOAD)
    (local,) = script(LOAD, LIBTORCH)
    assert nothing == "tbb" and local == rapt.info()["pools"]["torch"]


TORCH_THEN_RAPT = """
import ctypes, os, sys
def threads():
    return len(os.listdir("/proc/self/task"))
others = [ctypes.CDLL(path) for path in sys.argv[2:]]
__import__(sys.argv[1])
import torch, rapt, rapt.torch
torch.set_num_threads(4)
x = torch.randn(4, 4, 512, 512)
before = threads()
torch.add(x, x)
team = threads()
rapt.torch.scaled_dot_product_attention(x, x, x)
rapt.attention(x, x, x)
print(team - before, threads() - team)
print(rapt.info()["pools"]["torch"])
"""


@pytest.mark.parametrize("first", ["rapt", "torch"])
def test_no_thread_is_started_beside_pytorchs(first):
    threads, pool = script(TORCH_THEN_RAPT, first)
    assert threads == "3 0" and pool == rapt.info()["pools"]["torch"]


@pytest.mark.parametrize("first", ["rapt", "torch"])
def test_of_several_runtimes_it_is_pytorchs(first):
    """Which one that is depends on the order: oneTBB makes libiomp5 global where it finds it, before PyTorch or after."""
    threads, pool = script(TORCH_THEN_RAPT, first, other_runtime())
    assert threads == "3 0" and pool.startswith("openmp (lib")


def test_a_preloaded_runtime_is_pytorchs():
    threads, pool = script(TORCH_THEN_RAPT, "torch", LD_PRELOAD=other_runtime())
    assert threads == "3 0" and pool.startswith("openmp (lib") and pool != rapt.info()["pools"]["torch"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_bits_are_onetbbs_for_any_number_of_threads(team, dtype, causal):
    tensors = inputs(dtype)
    arrays = [t.float().numpy() for t in tensors]
    wanted = one_thread(*tensors, causal=causal)
    if dtype is torch.float32:
        assert (torch.from_numpy(rapt.attention(*arrays, causal=causal)) == wanted).all()
    for threads in (1, 2, 3, 4, 1, 2):
        team(threads)
        assert rapt.explain(*tensors).threads == min(threads, CPUS)
        assert (ours(*tensors, is_causal=causal) == wanted).all()
        assert (rapt.attention(*tensors, causal=causal) == wanted).all()
        assert torch.get_num_threads() == threads
    assert rapt.explain(*tensors, threads=1).threads == 1


def test_eight_python_threads_at_once(team):
    team(4)
    results = [[] for _ in range(8)]
    wanted = [one_thread(*inputs(seed=i)) for i in range(8)]

    def work(i):
        tensors = inputs(seed=i)
        for _ in range(20):
            results[i].append(bool((ours(*tensors) == wanted[i]).all()))
            (tensors[0] @ tensors[1].mT).sum()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(result == [True] * 20 for result in results)


def test_within_a_parallel_region_of_pytorchs_runtime(team):
    """Through the C interface of the runtime, as PyTorch's operators do it."""
    team(3)
    tensors = inputs()
    wanted = one_thread(*tensors)
    runtime = ctypes.CDLL(LIBTORCH)  # a look-up there goes on to what it is linked with
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def body(_):
        explanation = rapt.explain(*tensors, threads=3)
        seen.append((explanation.threads, bool((ours(*tensors) == wanted).all())))

    runtime.GOMP_parallel(body, None, 0, 0)
    assert seen == [(1, True)] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_within_tasks_of_pytorchs_other_pool(team):
    team(2)
    tensors = inputs()
    wanted = one_thread(*tensors)
    unit = torch.jit.CompilationUnit("""
def task(q, k, v):
    return torch.ops.rapt.scaled_dot_product_attention(q, k, v, None, False, None, False)
def tasks(q, k, v):
    started = [torch.jit.fork(task, q, k, v) for _ in range(4)]
    return [torch.jit.wait(one) for one in started]
""")
    for _ in range(5):
        results = unit.tasks(*tensors)
        assert len(results) == 4 and all((result == wanted).all() for result in results)


def test_within_autograd(team):
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return ours(*tensors)

        @staticmethod
        def backward(ctx, grad):
            return grad * ours(*ctx.saved_tensors), None, None

    team(2)
    q, k, v = inputs()
    wanted = one_thread(q, k, v)
    q.requires_grad_()
    Attention.apply(q, k, v).sum().backward()
    assert (q.grad == wanted).all()


def test_compiled_code(team):
    team(2)
    q, k, v = inputs()
    run = torch.compile(lambda q, k, v: ours(q * 2, k, v) + 1, fullgraph=True)
    wanted = one_thread(q * 2, k, v) + 1
    for threads in (2, 1, 2):
        team(threads)
        assert (run(q, k, v) == wanted).all()


FORK = """
import os, sys, torch, rapt, rapt.torch
torch.set_num_threads(2)
x = torch.randn(2, 4, 256, 64)
wanted = rapt.attention(x, x, x)
assert (rapt.torch.scaled_dot_product_attention(x @ torch.eye(64), x, x) == wanted).all()
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    assert (rapt.torch.scaled_dot_product_attention(x, x, x) == wanted).all()
    sys.exit(os.waitstatus_to_exitcode(status))
# With contexts of the parent, and with one of its own. By NumPy, as PyTorch's operators would hang.
isa = rapt.info()["isas"][0]
same = [rapt.torch.scaled_dot_product_attention(x, x, x), rapt.attention(x, x, x), rapt.attention(x, x, x, isa=isa)]
names = rapt.explain(x, x, x).executor, rapt.info()["pools"]["torch"]
print(all((t.numpy() == wanted.numpy()).all() for t in same), *names, flush=True)
os._exit(0)
"""


def test_a_forked_child_is_serial():
    assert script(FORK) == ["True serial serial"]


LOADER = """
import torch, rapt, rapt.torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        x = torch.full((2, 4, 256, 64), float(i))
        return rapt.torch.scaled_dot_product_attention(x, x, x)[0, 0, 0, 0]
torch.set_num_threads(2)
x = torch.randn(2, 4, 256, 64)
rapt.torch.scaled_dot_product_attention(x @ torch.eye(64), x, x)
for _ in range(2):
    print([round(float(v)) for v in torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None, multiprocessing_context="fork")])
    rapt.torch.scaled_dot_product_attention(x, x, x)
"""


def test_workers_of_a_data_loader():
    assert script(LOADER) == [str([0, 1, 2, 3, 4, 5, 6, 7])] * 2


def test_pytorchs_threads_do_not_count_for_numpy(team):
    team(1)
    arrays = [t.numpy() for t in inputs()]
    assert rapt.explain(*arrays).threads == min(CPUS, rapt.info()["threads"])
