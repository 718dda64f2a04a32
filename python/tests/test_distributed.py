"""rapt.distributed over 2, 3 and 4 processes, against one process. Each group of processes runs all cases once."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import context_parallel_cases
import distributed_decode_cases
import distributed_delta_rule_cases
import distributed_mesh_cases
from distributed_cases import CASES, FEW_ROWS, nothing_hangs, rank_main

import rapt.distributed
from rapt._distributed_kernel import padding
from rapt._distributed_packed import cut, packed_blocks
from rapt._distributed_parts import Options, Span, blocks, in_parts, in_sequence, spans

_ALL = CASES | distributed_delta_rule_cases.CASES | distributed_decode_cases.CASES
# What 16 bits change does not depend on the number of ranks.
_FP32 = {name: case for name, case in _ALL.items() if not name.endswith("float16")}
CASES_OF = {2: _ALL | context_parallel_cases.CASES, 3: _FP32, 4: _FP32}
CASES_OF = {ranks: cases | distributed_mesh_cases.CASES.get(ranks, {}) for ranks, cases in CASES_OF.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {}


@pytest.fixture
def reports(request, folders, tmp_path_factory):
    """The folder with what the ranks of a group report, who run all cases at the first test that asks."""
    ranks = request.param
    if ranks not in folders:
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        # Forked from a process that has imported what takes longest, once for all of them.
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["distributed_cases"])
        arguments = ranks, str(folders[ranks]), CASES_OF[ranks]
        torch.multiprocessing.start_processes(rank_main, arguments, nprocs=ranks, start_method="forkserver")
    return ranks, folders[ranks]


@pytest.mark.parametrize(
    ("reports", "case"),
    [(ranks, case) for ranks, cases in CASES_OF.items() for case in (*cases, nothing_hangs.__name__)],
    indirect=["reports"],
)
def test_ranks(reports, case):
    ranks, folder = reports
    for rank in range(ranks):
        report = folder / f"{case}.{rank}"
        assert report.exists(), "not run: a case before it failed"
        assert not report.read_text(), f"rank {rank}:\n{report.read_text()}"


def test_blocks_are_what_rows_see():
    """Every pair of a row and a key that it sees is in one block, and no other pair."""
    draw = random.Random(0)
    for _ in range(300):
        size, balanced, causal = draw.randint(1, 5), draw.random() < 0.5, draw.random() < 0.5
        sq, sk = (2 * draw.randint(1, 4) for _ in range(2))
        if draw.random() < 0.5:
            sk = sq
        left, right, offset = draw.choice([-1, 0, 3, 9]), draw.choice([-1, 0, 2]), draw.choice([0, 0, -4, 5])
        options, has_alibi = Options(causal, offset, left, right, None, None), draw.random() < 0.3
        for of_rows, of_keys in itertools.product(range(size), repeat=2):
            own, theirs = spans(of_rows, size, sq, balanced), spans(of_keys, size, sk, balanced)
            row = {s.begin + i: s.start + i for s in own for i in range(s.end - s.begin)}
            key = {s.begin + i: s.start + i for s in theirs for i in range(s.end - s.begin)}
            wanted = {
                (i, j)
                for i, j in itertools.product(row, key)
                if (not causal or key[j] <= row[i] + offset)
                and (left < 0 or key[j] >= row[i] + offset - left)
                and (right < 0 or key[j] <= row[i] + offset + right)
            }
            got = []
            for block in blocks(own, theirs, options, has_alibi):
                begin = own[block.first].begin
                for i in range(begin, own[block.last - 1].end):
                    for j in range(block.begin, block.end):
                        ahead = i - begin + (block.align or 0) - (j - block.begin)  # keys from j to the row's position
                        low = max(0 if causal else -99, -right if right >= 0 else -99)
                        if block.align is None or low <= ahead <= (left if left >= 0 else 99):
                            got.append((i, j))
            assert sorted(got) == sorted(wanted)
            assert not has_alibi or all(block.align is not None for block in blocks(own, theirs, options, has_alibi))


def test_seen_keys_are_what_rows_see():
    """From the first key that a row sees to the last, and one key if there is none."""
    draw = random.Random(2)
    for _ in range(2000):
        q, keys = Span(0, draw.randint(1, 9), draw.randint(0, 20)), draw.randint(1, 20)
        causal, offset = draw.random() < 0.5, draw.randint(-25, 25)
        left, right = draw.choice([-1, 0, 3, 30]), draw.choice([-1, 0, 2, 40])
        wanted = [
            key
            for key, row in itertools.product(range(keys), range(q.start + offset, q.stop + offset))
            if (not causal or key <= row) and (left < 0 or key >= row - left) and (right < 0 or key <= row + right)
        ]
        seen = Options(causal, offset, left, right, None, None).seen(q, keys)
        assert seen == slice(min(wanted), max(wanted) + 1) if wanted else 0 <= seen.start == seen.stop - 1 < keys


def test_packed_blocks_are_what_rows_see():
    """Every pair of a row and a key that it sees is in one block, and no other pair."""
    draw = random.Random(1)
    for _ in range(200):
        size, balanced, causal = draw.randint(1, 5), draw.random() < 0.5, draw.random() < 0.5
        rows = 2 * draw.randint(1, 4)
        inner = sorted(draw.randint(0, size * rows) for _ in range(draw.randint(0, 6)))  # some sequences are empty
        offsets = [0, *inner, size * rows]
        sequence = [sum(end <= i for end in offsets) for i in range(size * rows)]
        left, right = draw.choice([-1, 0, 3]), draw.choice([-1, 0, 2])
        options, has_alibi = Options(causal, 0, left, right, None, None), draw.random() < 0.3

        def sees(i, j):
            low = max(0 if causal else -99, -right if right >= 0 else -99)
            return low <= i - j <= (left if left >= 0 else 99)

        for of_rows, of_keys in itertools.product(range(size), repeat=2):
            own, theirs = (cut(spans(rank, size, rows, balanced), offsets) for rank in (of_rows, of_keys))
            row, key = ([s.start + i for s in part for i in range(s.end - s.begin)] for part in (own, theirs))
            assert len(row) == len(key) == rows
            pairs = itertools.product(range(rows), repeat=2)
            wanted = [(i, j) for i, j in pairs if sequence[row[i]] == sequence[key[j]] and sees(row[i], key[j])]
            got = []
            for block in packed_blocks(own, theirs, offsets, options, has_alibi):
                begin, end = own[block.first].begin, own[block.last - 1].end
                if block.offsets is not None:
                    assert (begin, end, block.begin, block.end) == (0, rows, 0, rows)
                    for first, last in itertools.pairwise(block.offsets):
                        got += [(i, j) for i, j in itertools.product(range(first, last), repeat=2) if sees(i, j)]
                    continue
                for i, j in itertools.product(range(begin, end), range(block.begin, block.end)):
                    if block.align is None or sees(i - begin + block.align, j - block.begin):
                        got.append((i, j))
            assert sorted(got) == wanted


def test_balanced_ranks_do_the_same_work():
    causal = Options(True, 0, -1, -1, None, None)
    for size in (2, 3, 8):
        pairs = []
        for rank in range(size):
            own = spans(rank, size, 64, True)
            found = [blocks(own, spans(of, size, 64, True), causal, False) for of in range(size)]
            assert all(len(of_rank) == 1 for of_rank in found)  # one call of the kernel for each rank's keys
            areas = [(own[b.last - 1].end - own[b.first].begin) * (b.end - b.begin) for (b,) in found]
            pairs.append(sum(areas) - areas[rank] / 2)
        assert max(pairs) == min(pairs)


def test_few_rows_are_padded():
    """For the bits of all rows, where a part's own number of rows would choose another kernel or split its keys."""
    for name, (hq, hk, sq, sk) in FEW_ROWS.items():
        options = Options(True, sk - sq, -1, -1, None, None)
        before, count = padding((1, hq, hk, sq, sk, 16, 24), sq // 8, sq // 2, torch.float32, options, False, False)
        assert count > sq // 8 and before + sq // 8 <= count, name
    assert padding((1, 8, 8, 4096, 4096, 64, 64), 1024, 1024, torch.float32, options, False, False) == (0, 1024)


def test_orders_are_inverse():
    x = torch.arange(24)
    for size, balanced in itertools.product((1, 2, 3, 4), (False, True)):
        parts = in_parts(x, size, 0, balanced)
        assert torch.equal(in_sequence(parts, size, 0, balanced), x)
        own = [torch.cat([x[s.start : s.stop] for s in spans(r, size, 24 // size, balanced)]) for r in range(size)]
        assert torch.equal(parts, torch.cat(own))


def test_no_group():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="group: got no process group"):
        rapt.distributed.ring_attention(x, x, x)
