"""rapt.guards: who hears of findings, and when."""

import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import rapt
from reference import inputs


@pytest.fixture
def broken():
    q, k, v = inputs(1, 2, 2, 4, 6, 8)
    k[0, 1, 3, 2] = np.nan
    return q, k, v


def test_findings_are_warnings(broken):
    with rapt.guards(nan=True, determinism=True), pytest.warns(rapt.GuardWarning, match=r"^nan: k\[0, 1, 3, 2\] is nan, first seen in out"):
        rapt.attention(*broken)


def test_nothing_is_watched_outside_the_block(broken):
    with rapt.guards(nan=True):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rapt.attention(*broken)
        with rapt.guards():
            rapt.attention(*broken)


def test_handler_gets_reports_of_all_threads(broken):
    reports = []
    with rapt.guards(nan=True, handler=reports.append):
        thread = threading.Thread(target=rapt.attention, args=broken)
        thread.start()
        thread.join()
        rapt.attention(*broken, scale=0.5)
    assert len(reports) == 2
    report = reports[0]
    assert report.guard == "nan" and report.finding
    assert report.place == ("k", (0, 1, 3, 2)) and report.seen == ("out", (0, 1, 0, 0)) and np.isnan(report.value)
    assert report.problem in report.text and report.entry in report.text


def test_a_handler_may_raise(broken):
    def refuse(report):
        raise FloatingPointError(report.text)

    out = np.zeros((1, 2, 4, 8), np.float32)
    with rapt.guards(nan=True, handler=refuse), pytest.raises(FloatingPointError, match="nan: k"):
        rapt.attention(*broken, out=out)
    assert np.isnan(out[0, 1]).all() and np.isfinite(out[0, 0]).all()


def test_what_is_not_watched_is_said(broken):
    reports = []
    with rapt.guards(shadow=2, handler=reports.append):
        q, k, v = inputs(1, 2, 2, 4, 6, 8)
        out, lse = rapt.attention(q, k, v, return_lse=True)
        rapt.merge_states([out], [lse])
    assert [(r.finding, r.place) for r in reports] == [(False, None)]
    assert "not watched" in reports[0].text


def test_only_findings_are_guard_warnings():
    new = cache = np.ones((1, 1, 2, 4), np.float32)
    with rapt.guards(nan=True, shadow=4), pytest.warns(rapt.NotWatchedWarning, match="^shadow: not watched") as heard:
        warnings.simplefilter("error", rapt.GuardWarning)
        rapt.append_kv(new, new, cache.copy(), cache.copy(), np.zeros(1, np.int32))
    assert len(heard) == 1


def test_each_block_hears_once_what_is_not_watched():
    def call():  # in two contexts
        x = np.ones((1, 1, 4, 8), np.float32)
        for threads in (1, 2):
            rapt.attention(x, x, x * np.float32(1e31), threads=threads)  # past the shadow's bounds

    outer, inner = [], []
    with rapt.guards(shadow=2, handler=outer.append):
        call()
        for _ in range(2):
            with rapt.guards(shadow=2, handler=inner.append):
                call()
        call()
    assert len(outer) == 1 and len(inner) == 2


@pytest.mark.parametrize("wrong", [{"nan": "no"}, {"determinism": 1}, {"shadow": 2.5}, {"shadow": "3"}, {"shadow": True}, {"tolerance": "1"},
                                   {"tolerance": None}, {"handler": 3}], ids=str)
def test_wrong_types_are_refused_on_entry(wrong):
    before = rapt.info()["guards"]
    with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: got "), rapt.guards(**wrong):
        pass
    assert rapt.info()["guards"] == before


def test_blocks_nest(broken):
    assert rapt.info()["guards"] == os.environ.get("RAPT_GUARDS", "")
    with rapt.guards(nan=True):
        with rapt.guards(shadow=3, tolerance=0.5):
            assert rapt.info()["guards"] == "shadow=3,tolerance=0.5"
        assert rapt.info()["guards"] == "nan"
    with pytest.raises(ValueError, match="tolerance"), rapt.guards(nan=True, tolerance=0):
        pass
    with pytest.raises(ValueError, match="without shadow"), rapt.guards(nan=True, tolerance=0.1):
        pass
    with pytest.raises(ValueError, match="shadow"), rapt.guards(shadow=-1):
        pass


def test_blocks_of_two_threads_overlap(broken):
    before = rapt.info()["guards"]
    first, second = rapt.guards(nan=True), rapt.guards(determinism=True)
    first.__enter__()
    second.__enter__()
    assert rapt.info()["guards"] == "determinism"
    first.__exit__(None, None, None)  # not the last that began, so that nothing changes
    assert rapt.info()["guards"] == "determinism"
    second.__exit__(None, None, None)
    assert rapt.info()["guards"] == before


def test_torch_is_watched(broken):
    torch = pytest.importorskip("torch")
    import rapt.torch

    tensors = [torch.from_numpy(x).requires_grad_() for x in broken]
    with rapt.guards(nan=True), pytest.warns(rapt.GuardWarning, match=r"nan: k\[0, 1, 3, 2\]"):
        out = rapt.torch.scaled_dot_product_attention(*tensors)
    reports = []
    with rapt.guards(nan=True, handler=reports.append):
        out.sum().backward()
    assert [report.place[0] for report in reports] == ["k"]


def test_environment():
    program = """if True:
        import numpy as np, rapt
        print("imported", rapt.__version__)
        x = np.full((1, 1, 1, 4), np.nan, np.float32)
        with rapt.guards():
            rapt.attention(x, x, x)
            assert rapt.info()["guards"] == ""
        print("called")
        rapt.attention(x, x, x)"""

    def errors(words):
        environment = {**os.environ, "RAPT_GUARDS": words}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
        assert result.stdout == f"imported {rapt.__version__}\ncalled\n", result.stderr  # a wrong variable fails in calls alone
        return result.stderr

    assert "GuardWarning: nan: q[0, 0, 0, 0] is nan" in errors("nan")
    assert errors("") == ""
    assert 'RAPT_GUARDS: got "nans"; wanted nan, shadow=ROWS' in errors("nans")
