#!/usr/bin/env python3
"""bench/measure.py and bench/report.py, with a stand-in for the rapt command: which data count, what is written, and when."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from datetime import datetime, timezone
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from measure import machine_name  # noqa: E402
from pages import data, performance, three_steps  # noqa: E402
from pages.three_steps_data import Mean  # noqa: E402
from simulate_cache import misses  # noqa: E402

CONTEXT = {"date": "2030-01-02T03:04:05Z", "host_name": "secret", "cpu": "AMD EPYC", "num_cpus": 2, "features": ["avx2"], "commit": "abc",
           "compiler": "g++ 12", "caches": [{"type": "Unified", "level": 3, "size": 2 ** 25, "num_sharing": 2}], "seeds": 3,
           "no_counters": "perf_event_open: none"}
MEMORY, PEAK = 10.0, 100.0

# Answers `info`, fails on two threads, hangs on request; else writes what FAKE_DOCUMENT has.
FAKE = """#!/usr/bin/env python3
import json, os, sys, time
words = sys.argv[1:]
if words[0] == "info":
    print(json.dumps({"context": json.loads(os.environ["FAKE_DOCUMENT"])["context"]}))
    sys.exit()
open(words[words.index("--json") + 1], "w").write(os.environ["FAKE_DOCUMENT"])
if os.environ.get("FAKE_HANGS"):
    print("hangs", flush=True)
    time.sleep(60)
sys.exit(words[words.index("--threads") + 1] == "2" and words[0] == "roofline")
"""


def roofline_document(fused_ms=1.0, three_ms=2.0, seeds=3):
    """What `rapt roofline --set fusion` would write on a machine where every call takes so long."""
    dots = []
    for d in three_steps.HEAD_DIMS:
        for s in three_steps.LENGTHS:
            for causal in (False, True):
                flops = 32 * s * s * d / (1 + causal)
                softmax = three_ms / 4
                for step, ms, moved in (("fused", fused_ms, 128 * s * d), ("three steps", three_ms, 128 * (s * s + s * d)), ("softmax", softmax, 64 * s * s)):
                    roof = min(PEAK, MEMORY * flops / moved)
                    dots.append({"problem": f"attention b=1 hq=8 sq={s} d={d}{' causal' * causal}", "step": step, "unit": "avx2", "flops": flops,
                                 "bytes": moved, "intensity": flops / moved, "gflops": flops / ms / 1e6, "roof_gflops": roof, "spread": 0.01,
                                 "seeds_ms": [ms * (1 + 0.001 * seed) for seed in range(seeds)], "counted": {"intensity": None}})
    return {"context": CONTEXT, "units": [{"name": "avx2 fp32", "gflops": PEAK}], "reads": [{"name": "memory", "gbs": MEMORY}], "dots": dots}


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def put(self, day, name, document):
        (self.folder / day).mkdir(exist_ok=True)
        (self.folder / day / name).write_text(document if isinstance(document, str) else json.dumps(document))


class ReportData(Folder):
    def test_the_newest_day_that_has_a_kind_counts(self):
        names = ["a.json", "a.csv"]
        self.assertIsNone(data.newest(names, self.folder))
        self.put("2030-01-01", "a.json", "{}")
        self.put("2030-01-02", "a.csv", "")
        self.put("2030-01-03", "b.csv", "")
        self.assertEqual(data.newest(names, self.folder), self.folder / "2030-01-02" / "a.csv")
        self.put("2030-01-02", "a.json", "{}")
        self.assertEqual(data.newest(names, self.folder).name, "a.json")
        self.put("2030-01-01", "b.csv", "")
        newest = data.newest_of("*.csv", self.folder)
        self.assertEqual({name: path.parent.name for name, path in newest.items()}, {"a.csv": "2030-01-02", "b.csv": "2030-01-03"})

    def test_json_stands_for_csv(self):
        """Rows of `rapt bench --set decode` and of `python -m rapt.bench --set` have the columns of the older files."""
        row = {"name": "attention_decode.bf16/dtype=bf16 b=8 hq=32 hk=8 sq=1 sk=4096 d=128/threads:16", "dtype": "bf16", "median_ms": 1.2345,
               "problem": "attention dtype=bf16 b=8 hq=32 hk=8 sq=1 sk=4096 d=128", "gbs": 150.2, "of_bandwidth": 0.987}
        self.assertEqual(data.timed(row), {"case": "bf16, b=8 sk=4096", "ms": "1.23", "gbs": "150", "percent_of_read": "99"})
        quantised = {"name": "e/q=bf16 kv=i8 out=bf16 b=1 hq=32 hk=8 sq=1 sk=32768 d=128 groups=1/threads:16", "dtype": "bf16/i8/bf16"}
        self.assertEqual(data.timed({**row, **quantised})["case"], "bf16 / i8, groups=1")
        self.assertIsNone(data.timed({**row, "problem": "append_kv b=1"}))
        old = data.rows_of(data.RESULTS / "2026-11-21" / "xeon16-attention-f32.csv", "lengths")[0]
        side = {"median_ms": 2.0, "rel_err": 1e-7, "gbs": 3}
        new = data.compared({"dtype": "f32", "threads": 1, "b": 1, "hq": 8, "sq": 128, "sk": 128, "d": 64, "causal": False, "rapt": side,
                             "torch": side, "vs_torch": 1.5, "noisy": ["vs_torch"]})
        self.assertTrue(new["noisy"])
        for column in {"dtype", "threads", "b", "h", "s", "d", "mask"}:
            self.assertEqual(new[column], old[column])
        self.assertTrue({"rapt_ms", "torch_ms", "ratio", "rapt_error"} <= new.keys())


    def test_callgrind(self):
        """Misses of the calls that were timed, of each side; what else is in a profile is not counted."""
        tree = """1,038,434 (44.79%) 180,631 (43.38%) 170,655 (60.48%)  77,891 (56.46%)  < ???:rapt::bench::run_timed_calls(long) (6x) [/b/rapt]
  515,100 (22.22%)  90,294 (21.69%)  85,379 (30.26%)  45,819 (33.21%)  < ???:rapt::bench::run_timed_calls(long) [clone .constprop.0] (3x) [/b]
1,553,534 (67.00%) 270,925 (65.07%) 256,034 (90.74%) 123,710 (89.68%)  *  ???:std::_Function_handler<void (), tools::Run::time_steps(int)>

      700 ( 0.01%)       1 ( 0.01%)       2 ( 0.00%)       3 ( 0.00%)  < ???:somebody::else(std::function<void ()> const&) (5x) [/b/rapt]
      700 ( 0.01%)       1 ( 0.01%)       2 ( 0.00%)       3 ( 0.00%)  *  ???:std::_Function_handler<void (), tools::Run::time_problem<P>(int)>

  255,324 (11.01%)   .                 12,377 ( 4.39%)   5,987 ( 4.34%)  < ???:rapt::bench::run_timed_calls(long) (1x) [/b/rapt]
  255,324 (33.00%)   .                 12,377 ( 4.39%)   5,987 ( 4.34%)  *  ???:std::_Function_handler<void (), tools::Run::time_problem<P>(int)>
"""
        self.assertEqual(misses(tree), {"three steps": (9, [1553534, 270925, 256034, 123710]), "fused": (1, [255324, 0, 12377, 5987])})
        with self.assertRaisesRegex(SystemExit, "no calls of fused"):
            misses(tree[:tree.index("\n\n")])


class ReportPage(Folder):
    def page(self):
        files = three_steps.files(self.folder)
        return files, files["docs/report/README.md"]

    def test_without_data(self):
        files, text = self.page()
        self.assertEqual(list(files), ["docs/report/README.md"])
        self.assertIn("No machine has been measured", text)

    def test_figures_are_those_of_the_data(self):
        self.put("2030-01-01", "old1-roofline-1-threads.json", roofline_document(three_ms=9))
        self.put("2030-01-02", "old1-roofline-1-threads.json", roofline_document(three_ms=3))
        self.put("2030-01-02", "old1-roofline-2-threads.json", roofline_document(fused_ms=4, three_ms=2))
        files, text = self.page()
        self.assertNotIn("No machine has been measured", text)
        self.assertNotIn("secret", text)
        self.assertIn("**Speed, one thread**: the three steps take 3.00 times as long", text)
        self.assertIn("**Fusing does not pay, 2 threads**: the three steps are faster in 24 of 24 problems", text)
        self.assertIn("25 % (S = 128, d = 64) to 25 %", text)  # of the softmax
        self.assertIn("10.0 FLOPs per byte", text)  # the ridge
        self.assertIn("From one thread to 2", text)
        self.assertEqual(text.count("\n| 64 | causal |"), 6)
        for image in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
            self.assertTrue(files[f"docs/report/{image}"].startswith("<svg"))
        self.assertEqual(len(files), 4)
        # S = 4096, d = 128, full: 4 S^2 d FLOPs a head over 3 ms and 100 GFLOP/s.
        machine = three_steps.machines_of(self.folder)[0]
        share = 8 * 4 * 4096 ** 2 * 128 / 3.003e-3 / 1e11
        self.assertAlmostEqual(machine.of_peak(1, (4096, 128, False, "three steps")), share, places=6)

    def test_what_is_slower(self):
        def row(name, dtype, ratio, noisy=()):
            return {"name": name, "dtype": dtype, "vs_torch_back_to_back": ratio, "vs_sdpa": ratio, "noisy": noisy}
        rows = [row("long", dtype, 2.0) for dtype in ("fp32", "bf16", "fp16")]
        rows += [row("short", "bf16", 0.5), row("short", "fp32", 0.75), row("scattered", "fp16", 0.25, ["vs_torch_back_to_back"])]
        models = {"context": {"torch": "2.11.0"}, "rows": rows}
        self.assertIn('The one slower shape is "short" (0.50x in bf16, 0.75x in fp32).', performance.headline(models, models, rows))
        models["rows"] += [row("tiny", "fp16", 0.9)]
        self.assertIn('Slower shapes are "short" (0.50x in bf16, 0.75x in fp32), "tiny" (0.90x in fp16).', performance.headline(models, models, rows))
        models["rows"] = [row for row in rows if row["vs_sdpa"] > 1]
        self.assertNotIn("lower shape", performance.headline(models, models, rows))

    def test_halves_that_scatter_or_are_missing(self):
        rows = [{"dtype": "bf16", "threads": "1", "d": "64", "ratio": "2", "noisy": ["ratio"]}]
        class Halves(dict):
            other_halves = {"old1": [{"dtype": "f16", "threads": "2", "d": "128", "ratio": "2"}]}
        table = performance.halves_table(Halves(halves=rows, zen4=[]))
        self.assertIn("| Xeon, AMX | bf16 | 1 | samples scatter |  |", table)
        self.assertIn("| old1 | fp16 | 2 |  | 2.00 (2.00 to 2.00) |", table)

    def test_memory_that_could_not_be_read(self):
        document = roofline_document(seeds=1)
        document["reads"][0]["gbs"] = None
        self.put("2030-01-02", "old1-roofline-1-threads.json", {**document, "context": {**CONTEXT, "caches": []}})
        self.put("2030-01-02", "old1-roofline-4-threads.json", {**document, "reads": [{"name": "L1", "gbs": 50.0}, *document["reads"]]})
        _, text = self.page()
        self.assertIn("not measured", text)
        self.assertNotIn("±", text.split("## old1")[1].split("## Limits")[0])  # one seed has no interval

    def test_intervals(self):
        mean = Mean([1.0, 2.0, 3.0])
        self.assertEqual(mean.mean, 2)
        self.assertAlmostEqual(mean.half, 4.303 / 3 ** 0.5)


class Measure(Folder):
    def setUp(self):
        super().setUp()
        self.rapt = self.folder / "rapt"
        self.rapt.write_text(FAKE)
        self.rapt.chmod(0o755)
        self.out = self.folder / "results"
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAPT_")}
        self.environment = {**plain, "FAKE_DOCUMENT": json.dumps(roofline_document())}
        self.command = [sys.executable, str(BENCH / "measure.py"), "--rapt", str(self.rapt), "--out", str(self.out), "--threads", "2"]

    def measure(self, *words):
        return subprocess.run([*self.command, *words], capture_output=True, text=True, env=self.environment, check=False)

    def files(self):
        return {path.name: path for path in self.out.glob("*/*")}

    def test_files(self):
        """What succeeds is written, with the command and without the host's name; what fails leaves what there was."""
        day = datetime.now(timezone.utc).date().isoformat()
        (self.out / day).mkdir(parents=True)
        kept = self.out / day / "epyc2-roofline-2-threads.json"
        kept.write_text("before")
        result = self.measure("--only", "roofline")
        self.assertEqual(result.returncode, 1)
        self.assertIn("epyc2-roofline-2-threads.json: exit code 1", result.stderr)
        self.assertEqual(set(self.files()), {"epyc2-roofline-1-threads.json", "epyc2-roofline-2-threads.json"})
        self.assertEqual(kept.read_text(), "before")
        context = json.loads(self.files()["epyc2-roofline-1-threads.json"].read_text())["context"]
        self.assertNotIn("host_name", context)
        self.assertTrue(context["command"].startswith("rapt roofline --set fusion --threads 1"), context["command"])
        self.assertEqual((context["commit"], context["compiler"]), ("abc", "g++ 12"))

    def test_interrupted(self):
        self.environment["FAKE_HANGS"] = "1"
        with subprocess.Popen([*self.command, "--only", "roofline"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=self.environment, start_new_session=True) as run:
            while "hangs" not in (line := run.stdout.readline()):
                self.assertTrue(line)
            os.kill(run.pid, signal.SIGTERM)  # the command ends with it
            _, errors = run.communicate(timeout=30)
        self.assertIn("interrupted", errors)
        self.assertEqual(self.files(), {})

    def test_usage(self):
        for words, mentions in ((["--only", "nonsense"], "nonsense; wanted some of roofline,decode"), (["--only", "halves"], "halves; wanted"),
                                (["--machine", "a b"], "--machine"), (["--rapt", str(self.folder / "none")], "none"), (["--threads", "0"], "--threads")):
            result = self.measure(*words)
            self.assertEqual(result.returncode, 2, words)
            self.assertIn(mentions, result.stderr)
        result = self.measure("--only", "models", "--machine", "mine")
        self.assertEqual((result.returncode, self.files()), (0, {}))
        self.assertIn("mine-models-2-threads.json: left out, no --python with transformers", result.stdout)
        self.environment["RAPT_GUARDS"] = "nan"
        result = self.measure("--only", "models")
        self.assertEqual(result.returncode, 2)
        self.assertIn("RAPT_GUARDS: 'nan'; wanted an environment without it", result.stderr)

    def test_machine_names(self):
        for cpu, name in {"AMD EPYC": "epyc2", "Intel(R) Xeon(R) Processor": "xeon2", "AMD Ryzen 9 7950X 16-Core Processor": "ryzen2",
                          "13th Gen Intel(R) Core(TM) i7-1360P": "core2", "": "cpu2"}.items():
            self.assertEqual(machine_name(cpu, 2), name)


if __name__ == "__main__":
    unittest.main()
