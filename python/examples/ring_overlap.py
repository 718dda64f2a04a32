#!/usr/bin/env python3
"""Show that the messages of ring attention travel while the kernel computes.

    pip install '.[torch]'
    torchrun --nproc-per-node 2 python/examples/ring_overlap.py --trace ring.json    # or: ... --tokens 32768

Give each process its own cores, and set OMP_NUM_THREADS to their number. The program first sends the messages of a call
without computing. Then it traces a call. Messages are hidden except for the time that the process waited for them,
which includes waiting for a slower process. The backward's last message is never hidden: it brings gradients home after
the last kernel. --trace writes the first process's forward, for chrome://tracing or https://ui.perfetto.dev.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which it would keep: gloo's threads would crash as Python ends
from rapt.distributed import ring_attention
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def milliseconds_alone(message: Tensor, count: int) -> float:
    """Of `count` steps around the ring, in each of which a process sends the message and receives one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    times = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            send = dist.P2POp(dist.isend, message, (rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, torch.empty_like(message), (rank - 1) % ranks)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192, help="of all processes")
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="of queries and of keys")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trace", help="the file to write")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if ranks < 2:
        parser.error("got one process; wanted torchrun --nproc-per-node 2, or more")
    torch.manual_seed(dist.get_rank())
    shapes = [(1, heads, args.tokens // ranks, 128) for heads in (args.heads[0], args.heads[1], args.heads[1])]
    q, k, v = (torch.randn(shape, dtype=getattr(torch, args.dtype), requires_grad=True) for shape in shapes)

    keys = torch.cat((k, v), -1).detach()
    alone = milliseconds_alone(keys, ranks - 1)
    alone_backward = alone + milliseconds_alone(keys.float(), ranks)  # the sums of gradients travel, too

    def traced(call) -> tuple[Tensor, profile]:
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            result = call()
        return result, trace

    ring_attention(q, k, v, causal=True, balanced=True).sum().backward()  # opens connections
    out, forward = traced(lambda: ring_attention(q, k, v, causal=True, balanced=True))
    _, backward = traced(lambda: out.backward(torch.ones_like(out)))
    if dist.get_rank() == 0:
        for name, trace, messages in (("forward", forward, alone), ("backward", backward, alone_backward)):
            took = {event.key: event.cpu_time_total / 1e3 for event in trace.key_averages()}
            kernels, waited = took["rapt.distributed.kernel"], took["rapt.distributed.wait"]
            share = max(0, 1 - waited / messages)
            alone_took = f"messages alone {messages:.2f} ms"
            print(f"{name}: kernels {kernels:.2f} ms, {alone_took}, waited {waited:.2f} ms: {share:.0%} hidden")
        if args.trace:
            forward.export_chrome_trace(args.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
