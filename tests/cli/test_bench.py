#!/usr/bin/env python3
"""`rapt bench` as a user would run it."""

import json
import math
import os
import re
import tempfile
import unittest
from pathlib import Path

from cli_test import CliTest, OTHERS, PROBLEM, RUN_KEYS, isa_of, rapt

ROW_KEYS = """name problem entry threads b hq hk sq sk d dv causal dtype real_time time_unit median_ms best_ms spread
    gflops peak_gflops of_peak of_peak_best amx_peak_gflops of_amx_peak of_amx_peak_best gbs read_gbs of_bandwidth
    of_bandwidth_best vs_naive iterations cpu_time run_name run_type samples""".split()
CONTEXT_KEYS = RUN_KEYS + "isa set threads fma_peak_gflops amx_peak_gflops read_bandwidth_gbs".split()
SETS = Path(__file__).resolve().parents[2] / "bench" / "sets"


class Bench(CliTest):
    def bench(self, *arguments, says=""):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            result = rapt("bench", "--min-time", "0.01", "--json", str(path), *arguments)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertEqual(result.stderr, says, "progress is for terminals only")
            self.assertEqual(os.listdir(folder), ["rows.json"])
            return result.stdout, json.loads(path.read_text())

    def test_row(self):
        text, document = self.bench("--problem", PROBLEM, "--seeds", "2")
        self.assertIn(PROBLEM, text)
        for key in CONTEXT_KEYS:
            self.assertIn(key, document["context"])
        self.assertEqual(document["context"]["threads"], [1])
        (row,) = document["benchmarks"]
        for key in ROW_KEYS:
            self.assertIn(key, row)
        self.assertIn(row["entry"], text)
        self.assertEqual([row[key] for key in ("b", "hq", "hk", "sq", "sk", "d", "dv", "threads", "causal", "dtype")],
                         [1, 2, 2, 48, 48, 16, 16, 1, True, "f32"])
        self.assertTrue(0 < row["best_ms"] <= row["median_ms"] < 1000)
        self.assertEqual((row["real_time"], row["time_unit"]), (row["median_ms"], "ms"))
        self.assertGreater(row["vs_naive"], 0)
        self.assertGreater(document["context"]["read_bandwidth_gbs"][0], 0)
        self.assertTrue(math.isclose(row["gflops"], row["flops"] / row["median_ms"] / 1e6, rel_tol=1e-6))

    def test_types(self):
        problems = ["dtype=bf16 " + PROBLEM, "q=f16 kv=f16 " + PROBLEM, "kv=bf16 out=f16 b=1 hq=2 hk=1 sq=8 sk=6 d=4 dv=2"]
        text, document = self.bench(*(word for problem in problems for word in ("--problem", problem)))
        rows = document["benchmarks"]
        self.assertEqual([row["dtype"] for row in rows], ["bf16", "f16/f16/f32", "f32/bf16/f16"])
        self.assertEqual(rows[0]["bytes"], 2 * 48 * 4 * 16 * 2)
        self.assertEqual(rows[1]["bytes"], 2 * 48 * 16 * (3 * 2 + 4))
        self.assertEqual(rows[2]["bytes"], 2 * 8 * 4 * 4 + 6 * (4 + 2) * 2 + 2 * 8 * 2 * 2)
        for row in rows:
            self.assertRegex(text, rf"{re.escape(row['problem'].split(' ', 1)[1])} +{row['dtype']} ")

    def test_bytes_of_caches(self):
        """q, out, and what is read of keys and values: by type, length, window and capacity, with scales and zeros."""
        shape, rows = "b=3 hq=4 hk=2 sq=1 d=16 dv=8", 3 * 4 * (16 + 8)
        cases = {"dtype=bf16 sk=40": 2 * rows + 3 * 2 * 40 * 24 * 2,
                 "dtype=bf16 sk=40 seqlens page=8": 2 * rows + 3 * 2 * 40 * 24 * 2,
                 "kv=bf16 sk=40 seqlens ring": 4 * rows + 3 * 2 * 40 * 24 * 2,
                 "sk=40 window=9,0 align=bottom_right": 4 * rows + 3 * 2 * 10 * 24 * 4,
                 "sk=40 causal align=20 seqlens page=4": 4 * rows + 3 * 2 * 21 * 24 * 4,
                 "kv=f8e4m3 sk=40": 4 * rows + 3 * 2 * 40 * 24,
                 "kv=i8 groups=1 sk=40": 4 * rows + 3 * 2 * 40 * (24 + 2 * 4),
                 "kv=i8 k_groups=2 v_groups=4 zeros sk=40 seqlens page=1": 4 * rows + 3 * 2 * 40 * (24 + 2 * 6 * 4),
                 "kv=i8 groups=2 tail=4 tail_dtype=bf16 sk=40": 4 * rows + 3 * 2 * 40 * (20 + 4 * 2 + 2 * 2 * 4),
                 "kv=i8 groups=2 tail=8 latent sk=40": 4 * rows + 3 * 2 * 40 * (8 + 8 * 4 + 2 * 4),
                 "kv=i4x2 groups=4 sk=40": 4 * rows + 3 * 2 * 40 * (12 + 2 * 4 * 4),
                 "kv=f8e4m3 groups=1 head_scales sk=40": 4 * rows + 3 * 2 * (40 * 24 + 2 * 4),
                 "q=f8e4m3 q_scale kv=f8e4m3 out=bf16 sk=40": 3 * 4 * (16 + 4 + 8 * 2) + 3 * 2 * 40 * 24}
        _, document = self.bench(*(word for case in cases for word in ("--problem", f"{shape} {case}")))
        self.assertEqual([row["bytes"] for row in document["benchmarks"]], list(cases.values()))
        # Rows of a sequence that see keys in common read them once.
        _, document = self.bench("--problem", "b=1 hq=1 sq=4 sk=40 d=8 causal window=3,-1 align=bottom_right")
        self.assertEqual(document["benchmarks"][0]["bytes"], 4 * (4 * 16 + (3 + 4) * 16))

    def test_other_operations(self):
        """Every new row that stays, read and written, with its scales; every state, its lse, and what comes out."""
        rows = 3 * 2 * 5
        cases = {"append_kv b=3 hk=2 n=5 sk=9 d=16 dv=8": rows * 24 * 8,
                 "append_kv dtype=bf16 b=3 hk=2 n=5 sk=9 d=16 dv=8 values_are_keys": rows * 16 * 4,
                 "append_kv dtype=f16 b=3 hk=2 n=5 sk=4 d=16 dv=8 ring": 3 * 2 * 4 * 24 * 4,
                 "append_kv b=3 hk=2 n=5 sk=9 d=16 dv=8 ragged=9": 9 * 2 * 24 * 8,
                 "append_kv kv=f8e4m3 b=3 hk=2 n=5 sk=9 d=16 dv=8": rows * 24 * 5,
                 OTHERS["append_kv"]: rows * (24 * 3 + 2 * 2 * 4),
                 "append_kv kv=i8 b=3 hk=2 n=5 sk=9 d=16 dv=6 groups=1 tail=10 values_are_keys": rows * (16 * 4 + 6 + 10 * 4 + 4),
                 "append_kv kv=i4x2 b=3 hk=2 n=5 sk=9 d=16 dv=8 k_groups=4 v_groups=1 zeros": rows * (24 * 4 + 12 + 2 * 5 * 4),
                 OTHERS["merge_states"]: 20 * 24 * (3 * 2 + 4) + 20 * 4 * 4,
                 "merge_states rows=20 dv=24 count=1": 20 * 24 * 8 + 20 * 4}
        text, document = self.bench(*(word for case in cases for word in ("--problem", case)))
        benchmarks = document["benchmarks"]
        self.assertEqual([row["problem"] for row in benchmarks], list(cases))
        self.assertEqual([row["bytes"] for row in benchmarks], list(cases.values()))
        for row in benchmarks:
            self.assertEqual(row["entry"].split(".")[0], row["problem"].split()[0])
            self.assertIn(row["entry"], text)
            self.assertRegex(text, rf"(?m)^{re.escape(row['problem'])} +{row['dtype']} ")
            self.assertTrue(math.isclose(row["gbs"], row["bytes"] / row["median_ms"] / 1e6, rel_tol=1e-6))
            self.assertTrue(0 < row["of_bandwidth"] <= row["of_bandwidth_best"])
            self.assertIsNone(row["vs_naive"])
        append, merge = (benchmarks[list(cases).index(OTHERS[name])] for name in ("append_kv", "merge_states"))
        self.assertEqual([append[key] for key in ("b", "hk", "n", "sk", "d", "dv", "dtype", "flops")],
                         [3, 2, 5, 40, 16, 8, "bf16/i8", 0])
        self.assertEqual([merge[key] for key in ("rows", "dv", "count", "dtype", "flops")],
                         [20, 24, 3, "bf16/f32", 2 * 20 * 24 * 3])

    def test_indices(self):
        """The visible pairs in all heads; what is read, the keys that are seen once, and what is written."""
        rows, pairs = 2 * 9, 2 * sum(range(62, 71))
        read = rows * 3 * (16 + 1) * 4 + 2 * 70 * 16 * 4
        causal = 2 * sum(range(1, 10))
        cases = {OTHERS["index_scores"]: (2 * pairs * 3 * 16, read + rows * 70 * 4 + rows * 20 * 4),
                 "index_scores q=bf16 k=i8 b=2 sq=9 sk=70 h=3 d=16 align=top_left scales":
                     (2 * causal * 3 * 16, rows * 3 * (16 * 2 + 4) + 2 * 9 * (16 + 4) + rows * 70 * 4),
                 OTHERS["select_topk"]: (0, 12 * (70 + 20) * 4)}
        _, document = self.bench(*(word for case in cases for word in ("--problem", case)))
        self.assertEqual([(row["problem"], row["flops"], row["bytes"]) for row in document["benchmarks"]],
                         [(case, *wanted) for case, wanted in cases.items()])
        self.assertEqual([row["dtype"] for row in document["benchmarks"]], ["f32", "bf16/i8", "f32"])

    def test_gradients(self):
        """q.k, dout.v, and the sums that are wanted; what is read, and the gradients, once each."""
        shape = "b=2 hq=4 hk=2 sq=9 sk=20 d=16 dv=8"
        pairs, rows, keys = 2 * 4 * 9 * 20, 2 * 4 * 9, 2 * 2 * 20
        read = rows * (16 + 8 + 8) * 4 + keys * 24 * 4 + rows * 4
        cases = {f"attention_backward {shape}": (3 * 16 + 2 * 8, read + rows * 16 * 4 + keys * 24 * 4),
                 f"attention_backward {shape} grads=q dlse": (2 * 16 + 8, read + rows * 4 + rows * 16 * 4),
                 f"attention_backward {shape} grads=v": (16 + 8, read + keys * 8 * 4)}
        text, document = self.bench(*(word for case in cases for word in ("--problem", case)))
        benchmarks = document["benchmarks"]
        self.assertEqual([row["problem"] for row in benchmarks], list(cases))
        for row, (flops, size) in zip(benchmarks, cases.values()):
            self.assertEqual((row["flops"], row["bytes"]), (2 * pairs * flops, size))
            self.assertEqual([row[key] for key in ("b", "hq", "hk", "sq", "sk", "d", "dv", "causal", "dtype")],
                             [2, 4, 2, 9, 20, 16, 8, False, "f32"])
            self.assertTrue(row["entry"].startswith("attention_backward."))
            self.assertIn(row["entry"], text)
            self.assertIsNone(row["vs_naive"])
        _, document = self.bench("--problem", "attention_backward dtype=bf16 dout=f32 b=1 hq=2 sq=48 d=16 causal")
        self.assertEqual(document["benchmarks"][0]["flops"], 2 * 2 * (48 * 49 // 2) * 5 * 16)
        self.assertEqual(document["benchmarks"][0]["dtype"], "bf16/bf16/bf16/f32")

    def test_entries_are_for_their_operation(self):
        problems = [word for problem in (PROBLEM, *OTHERS.values()) for word in ("--problem", problem)]
        operation_of = {entry["name"]: entry["operation"] for entry in self.run_json("info")["entries"]}
        for operation in ("append_kv", "delta_rule_backward", "select_topk"):
            skipped = [f'rapt: --problem "{problem}": skipped: --entry {operation} names no usable entry of {other}\n'
                       for other, problem in {"attention": PROBLEM, **OTHERS}.items() if other != operation]
            _, document = self.bench(*problems, "--entry", operation, says="".join(skipped))
            self.assertTrue(document["benchmarks"])
            for row in document["benchmarks"]:
                self.assertIn(operation, operation_of[row["entry"]])
                self.assertEqual(row["problem"], OTHERS[operation_of[row["entry"]]])
        self.assert_usage_error("bench", "--problem", PROBLEM, "--min-time", "nan", mentions="--min-time: nan")
        for option in ("--entry", "--json"):
            self.assert_usage_error("bench", "--problem", PROBLEM, option, "", mentions=f"{option}: an empty value")
        self.assert_usage_error("bench", "--problem", PROBLEM, "--entry", "append_kv",
                                mentions="--entry append_kv: no problem is of its operation")

    def test_bandwidth(self):
        text, document = self.bench("--problem", "dtype=bf16 b=1 hq=4 hk=1 sq=1 sk=4096 d=64", "--problem", PROBLEM)
        for row in document["benchmarks"]:
            self.assertTrue(math.isclose(row["gbs"], row["bytes"] / row["median_ms"] / 1e6, rel_tol=1e-6))
            self.assertTrue(0 < row["of_bandwidth"] <= row["of_bandwidth_best"])
            self.assertGreater(row["read_gbs"], 0)
            self.assertRegex(text, rf"(?m)^{re.escape(row['problem'].split(' ', 1)[1])} .* {100 * row['of_bandwidth']:.1f} ")

    def test_peaks(self):
        """Shares of the vector peak for every entry, of the AMX peak for those of AMX."""
        text, document = self.bench("--problem", "dtype=bf16 " + PROBLEM, "--entry", "attention_prefill")
        amx_rows = [row for row in document["benchmarks"] if isa_of(row["entry"]) == "amx"]
        for row in document["benchmarks"]:
            for prefix in [""] + (["amx_"] if row in amx_rows else []):
                peak, share = row[f"{prefix}peak_gflops"], row[f"of_{prefix}peak"]
                self.assertEqual(peak is None, share is None)  # of unsteady samples only
                self.assertTrue(peak is None or share > 0)
            if row not in amx_rows:
                self.assertEqual((row["amx_peak_gflops"], row["of_amx_peak"], row["of_amx_peak_best"]), (None,) * 3)
        self.assertEqual("AMX peak" in text, bool(amx_rows))
        self.assertEqual(document["context"]["amx_peak_gflops"][0] is not None, bool(amx_rows))

    def test_flops_are_exact(self):
        """Counted by the program; here in units of one (row, key) pair of one head."""
        def pairs(sq, sk, seen):
            return sum(seen(i, j) for i in range(sq) for j in range(sk))

        cases = {"b=3 hq=4 hk=2 sq=20 sk=30 d=8 dv=4": 3 * 20 * 30,
                 "b=1 hq=1 sq=20 d=8 causal": pairs(20, 20, lambda i, j: j <= i),
                 "b=1 hq=1 sq=20 sk=31 d=8 causal align=bottom_right": pairs(20, 31, lambda i, j: j <= i + 11),
                 "b=1 hq=1 sq=31 sk=20 d=8 causal align=bottom_right": pairs(31, 20, lambda i, j: j <= i - 11),
                 "b=1 hq=1 sq=20 sk=31 d=8 window=3,5 align=4":
                     pairs(20, 31, lambda i, j: i + 4 - 3 <= j <= i + 4 + 5),
                 "b=1 hq=1 sq=20 d=8 causal window=3,-1": pairs(20, 20, lambda i, j: i - 3 <= j <= i)}
        _, document = self.bench(*(word for case in cases for word in ("--problem", case)))
        self.assertEqual([row["flops"] / (2 * (row["d"] + row["dv"]) * row["hq"]) for row in document["benchmarks"]],
                         list(cases.values()))

    def test_entries_and_threads(self):
        # Entries that take f32.
        entries = [entry["name"] for entry in self.run_json("info")["entries"]
                   if entry["usable"] and entry["operation"] == "attention" and "f32" in entry["dtypes"]]
        _, document = self.bench("--problem", PROBLEM, "--entry", "attention")
        self.assertEqual([row["entry"] for row in document["benchmarks"]], entries)
        # Of a few on more threads: every row reads a buffer larger than the last-level cache.
        naive = [entry for entry in entries if "naive" in entry]
        threads = [1, 2] if self.run_json("info")["executors"][0]["threads"] >= 2 else [1]
        _, document = self.bench("--problem", PROBLEM, "--entry", "naive", "--threads", ",".join(map(str, threads)))
        rows = [(row["entry"], row["threads"]) for row in document["benchmarks"]]
        self.assertEqual(rows, [(entry, count) for entry in naive for count in threads])
        self.assertEqual(document["context"]["threads"], threads)


class BenchFiles(CliTest):
    def test_unwritable_paths_are_refused_first(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assert_usage_error("bench", "--problem", PROBLEM, "--json", f"{folder}/missing/rows.json",
                                    mentions="missing/rows.json")
            self.assert_usage_error("bench", "--problem", PROBLEM, "--json", folder, mentions="is a directory")
            self.assertEqual(os.listdir(folder), [])

    def test_files_are_replaced(self):
        with tempfile.TemporaryDirectory() as folder:
            path, link = Path(folder) / "rows.json", Path(folder) / "link.json"
            path.write_text("old")
            link.symlink_to("rows.json")
            self.run_ok("bench", "--min-time", "0.01", "--problem", PROBLEM, "--json", str(link))
            self.assertEqual(sorted(os.listdir(folder)), ["link.json", "rows.json"])
            self.assertTrue(link.is_symlink())
            self.assertEqual(len(json.loads(path.read_text())["benchmarks"]), 1)

    def test_links_to_nothing_stay_links(self):
        with tempfile.TemporaryDirectory() as folder:
            closed, new = Path(folder) / "closed", Path(folder) / "new"
            closed.symlink_to("/proc/self/fd/99")  # as /dev/stdout is where there is no standard output
            new.symlink_to("rows.json")
            self.assert_usage_error("bench", "--problem", PROBLEM, "--json", str(closed), mentions="cannot be written")
            self.run_ok("bench", "--min-time", "0.01", "--problem", PROBLEM, "--json", str(new))
            self.assertTrue(closed.is_symlink() and new.is_symlink())
            self.assertEqual(len(json.loads((Path(folder) / "rows.json").read_text())["benchmarks"]), 1)

    def test_devices_are_written_in_place(self):
        text = self.run_ok("bench", "--min-time", "0.01", "--problem", PROBLEM, "--json", "/dev/stdout")
        self.assertEqual(len(json.loads(text[text.index("{"):])["benchmarks"]), 1)
        self.assertFalse(Path("/dev/stdout").is_file())


class Compare(CliTest):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "before.json"

    def before(self, change):
        """A run of two problems, in whose file `change` is made."""
        self.run_ok("bench", "--min-time", "0.01", *self.problems, "--json", str(self.path))
        document = json.loads(self.path.read_text())
        change(document)
        self.path.write_text(json.dumps(document))

    problems = ("--problem", PROBLEM, "--problem", "b=1 hq=4 sq=64 d=32")

    def compare(self):
        return rapt("bench", "--min-time", "0.01", *self.problems, "--compare", str(self.path))

    def test_speeds(self):
        for factor, code in ((100, 1), (0.01, 0)):
            def change(document):
                for row in document["benchmarks"]:
                    row["best_ms"] /= factor
                    for share in ("of_peak_best", "of_bandwidth_best"):
                        row[share] = row[share] and row[share] * factor
            self.before(change)
            result = self.compare()
            self.assertEqual((result.returncode, result.stderr), (code, ""))
            self.assertIn("x before", result.stdout)
            speeds = [float(speed) for speed in re.findall(r"(?m)  (\d+\.\d{3})(?:  slower)?(?:  \d+ of .* steady)?$", result.stdout)]
            self.assertEqual(len(speeds), 2, result.stdout)
            self.assertTrue(all((speed < 0.95) == code for speed in speeds), result.stdout)
            self.assertEqual(result.stdout.count("  slower"), 2 * code)
            mean = math.sqrt(speeds[0] * speeds[1])
            told = re.search(rf"before.json: 2 of 2 rows compared: geometric mean (.*)x, {2 * code} slower; least (.*)x: attention",
                             result.stdout)
            self.assertAlmostEqual(float(told[1]), mean, delta=0.001 + 0.01 * mean)
            self.assertEqual(float(told[2]), min(speeds))

    def test_another_entry_is_compared_by_time(self):
        def change(document):
            for row in document["benchmarks"]:
                row["entry"] = "attention_other"
                row["best_ms"] /= 100
        self.before(change)
        result = self.compare()
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        self.assertEqual(result.stdout.count("  slower"), 2)

    def test_several_entries(self):
        def change(document):
            for i, row in enumerate(document["benchmarks"]):
                row["best_ms"] *= 100 if i else 0.01
                for share in ("of_peak_best", "of_bandwidth_best"):
                    row[share] = row[share] and row[share] * (0.01 if i else 100)
        self.problems = ("--problem", PROBLEM, "--entry", "attention")
        self.before(change)
        result = self.compare()
        rows = len(json.loads(self.path.read_text())["benchmarks"])
        self.assertGreater(rows, 1)
        self.assertIn(f"{rows} of {rows} rows compared", result.stdout)
        self.assertRegex(result.stdout, r", 1 slower; least .*, threads 1, attention")

    def test_no_row_in_common(self):
        self.before(lambda document: document["benchmarks"].clear())
        result = self.compare()
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        self.assertIn("before.json: 0 of 2 rows compared\n", result.stdout)

    def test_rows_that_are_only_in_one_run(self):
        def change(document):
            document["benchmarks"][0]["threads"] = 77
            document["benchmarks"][1] |= {"best_ms": 1e9, "of_peak_best": None, "of_bandwidth_best": None}
            document["context"]["cpu"] = "Z80"
        self.before(change)
        result = self.compare()
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("before.json is of another CPU: Z80\n", result.stdout)
        self.assertIn("before.json: 1 of 2 rows compared", result.stdout)
        self.assertRegex(result.stdout, rf"(?m){re.escape(PROBLEM)} .*  -( |$)")

    def test_other_files(self):
        texts = ("", "[]", "{", '{"context": {"cpu": ""}, "benchmarks": 3}', '{"context": {}, "benchmarks": []}',
                 '{"context": {"cpu": ""}, "benchmarks": [{"problem": "attention", "threads": "1"}]}',
                 '{"context": {"cpu": ""}, "benchmarks": [{"problem": "attention", "threads": 1, "entry": "x", "of_peak_best": "x"}]}')
        for text in texts:
            self.path.write_text(text)
            self.assert_usage_error("bench", "--problem", PROBLEM, "--compare", str(self.path),
                                    mentions="before.json: wanted a file that `rapt bench --json` wrote")
        for path in (self.path.parent, self.path.parent / "none"):
            self.assert_usage_error("bench", "--problem", PROBLEM, "--compare", str(path), mentions=f"--compare {path}: ")
        self.assert_usage_error("bench", "--problem", PROBLEM, "--compare", "", mentions="--compare: an empty value")


class Trace(CliTest):
    def trace(self, *problems, threads="1"):
        """(rows of --json, events of --trace by what they are)."""
        with tempfile.TemporaryDirectory() as folder:
            self.run_ok("bench", "--min-time", "0.001", *(word for p in problems for word in ("--problem", p)),
                        "--threads", threads, "--json", f"{folder}/rows.json", "--trace", f"{folder}/trace.json")
            self.assertEqual(sorted(os.listdir(folder)), ["rows.json", "trace.json"])
            rows = json.loads(Path(folder, "rows.json").read_text())["benchmarks"]
            trace = json.loads(Path(folder, "trace.json").read_text())
        for key in RUN_KEYS:
            self.assertIn(key, trace["otherData"])
        events = trace["traceEvents"]
        self.assertEqual({event["ph"] for event in events}, {"M", "X"})
        return rows, [e for e in events if e["ph"] == "M"], [e for e in events if e["ph"] == "X"]

    def test_rows_are_processes(self):
        rows, names, events = self.trace(PROBLEM, *OTHERS.values())
        processes = {name["pid"]: name["args"]["name"] for name in names if name["name"] == "process_name"}
        self.assertEqual(len(processes), len(rows))
        for (pid, name), row in zip(sorted(processes.items()), rows):
            self.assertEqual(name, f"{row['problem'].removeprefix('attention ')}, threads 1: {row['entry']}")
            own = [event for event in events if event["pid"] == pid]
            calls = [event for event in own if event["name"] == row["entry"]]
            self.assertEqual(len(calls), 3)
            for call in calls:
                self.assertEqual([call["args"][key] for key in ("problem", "entry", "threads", "flops", "bytes")],
                                 [row[key] for key in ("problem", "entry", "threads", "flops", "bytes")])
                self.assertTrue(math.isclose(call["args"]["gbs"], row["bytes"] / call["dur"] / 1e3, rel_tol=0.01))
                inside = [e["name"] for e in own if e is not call and call["ts"] <= e["ts"] < call["ts"] + call["dur"]]
                self.assertEqual(inside[:2], ["validate", "plan"])
                self.assertEqual([inside.count(name) for name in ("validate", "plan", "worker")], [1, 1, 1])
                self.assertIn("item", inside)

    def test_tasks_nest_on_their_threads(self):
        problem = "b=1 hq=2 sq=1 sk=9000 d=64"
        threads = min(2, self.run_json("info")["executors"][0]["threads"])
        items = self.run_json("info", "--problem", problem, "--threads", str(threads))["work_items"]
        _, names, events = self.trace(problem, threads=str(threads))
        self.assertTrue({e["tid"] for e in events} <= {name["tid"] for name in names if name["name"] == "thread_name"})
        for number in {event["args"]["call"] for event in events if "call" in event["args"]}:
            of_call = [event for event in events if event["args"].get("call") == number]
            workers = [event for event in of_call if event["name"] == "worker"]
            self.assertEqual(sorted(worker["args"]["worker"] for worker in workers), list(range(threads)))
            done = []
            for item in (event for event in of_call if event["name"] == "item"):
                (worker,) = [w for w in workers if w["args"]["worker"] == item["args"]["worker"]]
                self.assertEqual(worker["tid"], item["tid"])
                self.assertTrue(worker["ts"] <= item["ts"] and
                                item["ts"] + item["dur"] <= worker["ts"] + worker["dur"] + 0.002)
                done += range(item["args"]["item"], item["args"]["item"] + item["args"]["items"])
            self.assertEqual(sorted(done), list(range(items)))
            self.assertEqual(len([event for event in of_call if event["name"] == "combine"]), 2)

    def test_unwritable_paths_are_refused_first(self):
        with tempfile.TemporaryDirectory() as folder:
            for path, mentions in {f"{folder}/missing/trace.json": "missing/trace.json", folder: "is a directory"}.items():
                self.assert_usage_error("bench", "--problem", PROBLEM, "--trace", path, mentions=mentions)
            self.assertEqual(os.listdir(folder), [])
        self.assert_usage_error("bench", "--problem", PROBLEM, "--trace", "", mentions="--trace: an empty value")


class Sets(CliTest):
    def bench(self, text):
        """What `rapt bench --set` makes of a file with this text."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "own.txt"
            file.write_text(text)
            return rapt("bench", "--min-time", "0.001", "--set", str(file), "--json", f"{folder}/rows.json"), file, \
                Path(folder, "rows.json").read_text() if Path(folder, "rows.json").exists() else None

    def test_own_file(self):
        result, file, rows = self.bench(f"# Mine\n\n{PROBLEM} # named\n\t attention dtype=bf16 b=1 hq=2 sq=8 d=8\r\n"
                                        + "\n".join(OTHERS.values()))
        self.assertEqual(result.returncode, 0, result.stderr)
        document = json.loads(rows)
        self.assertEqual(document["context"]["set"], str(file))
        self.assertEqual([row["problem"] for row in document["benchmarks"]],
                         [f"attention {PROBLEM}", "attention dtype=bf16 b=1 hq=2 sq=8 d=8", *OTHERS.values()])

    def test_bad_lines(self):
        for line, message in {"b=1 hq=2 sq=x d=8": '"sq=x"; wanted a number after =',
                              "sideways": '"sideways"; wanted ',
                              "append_kv n=1 sk=4 d=8 hq=2": '"hq=2"; wanted ',
                              "merge_states rows=4 dv=0": "outs: dv = 0; wanted ",
                              "b=1 hq=3 hk=2 sq=8 d=8": "k: 2 heads for 3 query heads; wanted "}.items():
            result, file, rows = self.bench(f"{PROBLEM}\n{line}\n")
            self.assertEqual((result.returncode, rows), (2, None))
            self.assertTrue(result.stderr.startswith(f"rapt: {file}:2: {message}"), result.stderr)
        result, file, _ = self.bench("# nothing\n")
        self.assertEqual(result.stderr, f"rapt: {file}: no problems; wanted the text of one a line\n")

    def test_built_in(self):
        """The program has the sets of the repository, and every line of them can be planned."""
        names = sorted(file.stem for file in SETS.glob("*.txt"))
        self.assertIn("quick", names)
        self.assert_usage_error("bench", "--set", "endless",
                                mentions=f'--set: "endless"; wanted a file, or one of {", ".join(names)}\n')
        lines = {line.partition("#")[0].strip() for name in names for line in (SETS / f"{name}.txt").read_text().splitlines()}
        for problem in sorted(lines - {""}):
            self.run_ok("info", "--problem", problem)

    def test_refused_lines_of_built_in_sets_are_named(self):
        name = self.bf16_entry()
        first = [bool(line) and line[0] != "#" for line in (SETS / "quick.txt").read_text().splitlines()].index(True) + 1
        self.assert_usage_error("bench", "--set", "quick", mentions=f"bench/sets/quick.txt:{first}: ", RAPT_KERNEL=name)


if __name__ == "__main__":
    unittest.main()
