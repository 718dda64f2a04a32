#!/usr/bin/env python3
"""Runs the program named by the environment's RAPT_CLI as a user would."""

import json
import math
import os
import pty
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

PROBLEM = "b=1 hq=2 sq=48 d=16 causal"
OTHERS = {"append_kv": "append_kv new=bf16 kv=i8 b=3 hk=2 n=5 sk=40 d=16 dv=8 page=8 groups=2",
          "merge_states": "merge_states dtype=bf16 out=f32 rows=20 dv=24 count=3 lse",
          "delta_rule": "delta_rule decay=head b=2 hq=2 hv=4 t=1 d=16 dv=8 beta state",
          "delta_rule_backward": "delta_rule_backward decay=head b=2 hq=2 hv=4 t=9 d=16 dv=8 beta state"}
ROW_KEYS = """name problem entry threads b hq hk sq sk d dv causal dtype real_time time_unit median_ms best_ms spread
    gflops peak_gflops of_peak of_peak_best amx_peak_gflops of_amx_peak of_amx_peak_best gbs read_gbs of_bandwidth
    of_bandwidth_best vs_naive iterations cpu_time run_name run_type samples""".split()
RUN_KEYS = "date host_name cpu num_cpus features caches library_version commit compiler".split()
CONTEXT_KEYS = RUN_KEYS + "isa set threads fma_peak_gflops amx_peak_gflops read_bandwidth_gbs".split()
SETS = Path(__file__).resolve().parents[2] / "bench" / "sets"


def rapt(*arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAPT_ISA", "RAPT_KERNEL")}
    return subprocess.run([os.environ["RAPT_CLI"], *arguments], capture_output=True, text=True,
                          env={**inherited, **environment}, check=False)


def isa_of(name):
    """The instruction set of an entry: "amx" also of a build with the software model of its tiles."""
    (isa,) = [entry["isa"] for entry in json.loads(rapt("info", "--json").stdout)["entries"] if entry["name"] == name]
    return isa


class CliTest(unittest.TestCase):
    def run_ok(self, *arguments, **environment):
        result = rapt(*arguments, **environment)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stdout}{result.stderr}")
        return result.stdout

    def run_json(self, *arguments, **environment):
        return json.loads(self.run_ok(*arguments, "--json", **environment))

    def bf16_entry(self):
        """One that refuses f32."""
        for entry in self.run_json("info")["entries"]:
            if entry["usable"] and entry["arithmetic"] == "bf16":
                return entry["name"]
        return self.skipTest("every entry of this machine takes f32")

    def assert_usage_error(self, *arguments, mentions, **environment):
        """Exit code 2, one line that names the culprit, and no output."""
        result = rapt(*arguments, **environment)
        self.assertEqual(result.returncode, 2, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertEqual(result.stdout, "")
        self.assertRegex(result.stderr, r"\Arapt: [^\n]+\n\Z")
        self.assertIn(mentions, result.stderr)


class Info(CliTest):
    def test_json_is_complete(self):
        info = self.run_json("info")
        self.assertRegex(info["context"]["library_version"], r"^\d+\.\d+\.\d+")
        self.assertGreater(info["context"]["num_cpus"], 0)
        self.assertTrue(info["entries"])
        for item in info["entries"] + info["isas"] + info["backends"]:
            self.assertEqual(item["usable"], item["reason"] == "", item)
        self.assertTrue(any(isa["usable"] for isa in info["isas"]))
        self.assertEqual(len({entry["name"] for entry in info["entries"]}), len(info["entries"]))
        usable = {isa["name"] for isa in info["isas"] if isa["usable"]}
        for entry in info["entries"]:
            self.assertTrue(not entry["usable"] or entry["backend"] != "cpu" or entry["isa"] in usable, entry)
            self.assertIn(entry["phase"], ("all", "prefill", "decode", "naive"))
            self.assertTrue(entry["name"].startswith(entry["operation"]), entry)
            self.assertTrue(entry["dtypes"])

    def test_text_says_the_same(self):
        info = self.run_json("info")
        text = self.run_ok("info")
        usable = {backend["name"]: backend["usable"] for backend in info["backends"]}
        for item in info["entries"] + info["isas"] + info["executors"] + info["backends"]:
            reason = item["reason"]
            if "backend" in item and not usable[item["backend"]]:
                reason = f"{item['backend']} is not usable"
            self.assertRegex(text, rf"(?m){re.escape(item['name'])} .*{re.escape(reason)}$")
        for entry in info["entries"]:
            self.assertRegex(text, rf"(?m){re.escape(entry['name'])} +{entry['backend']} ")

    def test_a_backend_says_once_why_it_is_unusable(self):
        info = self.run_json("info")
        self.assertEqual([backend["name"] for backend in info["backends"]], ["cpu", "cuda"])
        for backend in info["backends"]:
            entries = [entry for entry in info["entries"] if entry["backend"] == backend["name"]]
            self.assertEqual(backend["usable"], any(entry["usable"] for entry in entries))
            if entries and not backend["usable"]:
                self.assertEqual(self.run_ok("info").count(backend["reason"]), 1)

    def test_entries_are_listed_in_an_environment_that_names_none(self):
        wanted = self.run_ok("info")
        name = self.run_json("info")["entries"][0]["name"]
        for variable, value in {"RAPT_KERNEL": name + "x", "RAPT_ISA": "quantum"}.items():
            result = rapt("info", **{variable: value})
            self.assertEqual(result.returncode, 2)
            self.assertIn(wanted[wanted.index("\nISAs"):], result.stdout)
            remark = ": none of the entries below" if variable == "RAPT_KERNEL" else ""
            self.assertRegex(result.stdout, rf"(?m)^{variable} +{value} \(environment\){remark}$")
            self.assertRegex(result.stderr, rf"\Arapt: {variable}: \"{value}\"; wanted an [^\n]+\n\Z")
            result = rapt("info", "--json", **{variable: value})
            self.assertEqual(result.returncode, 2)
            self.assertEqual(json.loads(result.stdout)["entries"], self.run_json("info")["entries"])
            self.assertEqual(f"rapt: {json.loads(result.stdout)['refusal']}\n", result.stderr)
        self.assertIn(f"(perhaps {name})", rapt("info", RAPT_KERNEL=name + "x").stderr)
        self.assert_usage_error("check", mentions=f"(perhaps {name})", RAPT_KERNEL=name + "x")
        self.assertEqual(self.run_json("info")["refusal"], "")

    def test_environment_is_shown(self):
        name = [isa["name"] for isa in self.run_json("info")["isas"] if isa["usable"]][-1]
        self.assertRegex(self.run_ok("info", RAPT_ISA=name), rf"RAPT_ISA +{name}")


class Guide(CliTest):
    """The commands of docs/guide/cli.md do what they say; those that take long are looked at only."""

    SLOW = (["rapt", "check"], ["rapt", "demo"])

    def commands(self):
        page = Path(__file__).parents[2] / "docs" / "guide" / "cli.md"
        for block in re.findall(r"(?ms)^```sh\n(.*?)^```", page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                environment = dict(words.pop(0).split("=", 1) for _ in range(line.startswith("RAPT_")))
                if words[0] == "rapt":
                    yield words, environment

    def test_commands(self):
        sets = rapt("bench", "--set", "nonsuch").stderr
        ran = 0
        for words, environment in self.commands():
            if words in self.SLOW:
                continue
            if "--set" in words:
                self.assertRegex(sets, rf"\b{words[words.index('--set') + 1]}\b")
                continue
            if os.cpu_count() == 1 and "--threads" in words:
                continue
            self.run_ok(*words[1:], **environment)
            ran += 1
        self.assertGreaterEqual(ran, 8)


class InfoProblem(CliTest):
    def test_names_what_would_run(self):
        plan = self.run_json("info", "--problem", PROBLEM)
        self.assertEqual(plan["problem"], "attention " + PROBLEM)
        self.assertIn(plan["entry"], [candidate["entry"] for candidate in plan["candidates"]])
        self.assertIn(plan["entry"], self.run_ok("info", "--problem", PROBLEM))

    def test_opt_in_entries_run_only_if_forced(self):
        problem = "dtype=bf16 " + PROBLEM  # which all of them take
        listed = self.run_json("info")["entries"]
        for name in [entry["name"] for entry in listed if entry["operation"] == "attention" and entry["opt_in"] and entry["usable"]]:
            self.assertRegex(self.run_ok("info"), rf"(?m){re.escape(name)} .*only if forced")
            plan = self.run_json("info", "--problem", problem)
            (refusal,) = [candidate["refusal"] for candidate in plan["candidates"] if candidate["entry"] == name]
            self.assertIn("only if forced", refusal)
            self.assertIn(refusal, self.run_ok("info", "--problem", problem))
            self.assertEqual(self.run_json("info", "--problem", problem, RAPT_KERNEL=name)["entry"], name)

    def test_isa_is_obeyed(self):
        for isa in self.run_json("info")["isas"]:
            if isa["usable"]:
                plan = self.run_json("info", "--problem", "dtype=bf16 " + PROBLEM, RAPT_ISA=isa["name"])
                self.assertEqual(isa_of(plan["entry"]), isa["name"])

    def test_types(self):
        for types in ("dtype=bf16", "dtype=f16", "q=bf16 kv=bf16", "kv=f16 out=bf16"):
            plan = self.run_json("info", "--problem", types + " " + PROBLEM)
            self.assertEqual(plan["problem"], f"attention {types} {PROBLEM}")
        self.assert_usage_error("info", "--problem", "dtype=i64 " + PROBLEM, mentions="i64")

    def test_bad_problems(self):
        self.assert_usage_error("info", "--problem", "b=1 hq=2 sq=x d=16", mentions="sq")
        self.assert_usage_error("info", "--problem", "b=1 hq=2 sq=4 d=16 sideways", mentions="sideways")
        self.assert_usage_error("info", "--problem", "b=1 hq=3 hk=2 sq=4 d=16", mentions="h")
        self.assert_usage_error("info", "--problem", "b=1 hq=2 sq=4 d=16 sq=8", mentions="sq=8")

    def test_bad_environment(self):
        self.assert_usage_error("info", "--problem", PROBLEM, mentions="quantum", RAPT_ISA="quantum")
        self.assert_usage_error("info", "--problem", PROBLEM, mentions="no_such_entry", RAPT_KERNEL="no_such_entry")


class Check(CliTest):
    def test_problems_given(self):
        text = self.run_ok("check", "--problem", PROBLEM, "--problem", "attention b=2 hq=2 sq=30 d=8 lse", "--seeds", "2")
        self.assertIn("4 checked, 0 wrong", text)

    def test_default_list(self):
        text = self.run_ok("check")
        self.assertIn(" 0 wrong, 0 skipped", text)
        for word in ("page=1 ", "page=16 ", "ring ", "kv=i8 ", "kv=f8e4m3 ", "kv=f8e5m2 ", "kv=i4x2 ", "zeros ", "sinks of -10", "scale of 1e38",
                     "given_scales ", "values_are_keys ", "append_kv new=", "merge_states rows=", "attention_backward b=",
                     "attention_backward dtype=bf16", " dbias", " dsinks", " dalibi", " dlse", "grads=kv", "delta_rule rule=", "decay=channel ", " gate ",
                     " slots", "steps=4"):
            self.assertIn(word, text)

    def test_sampled_heads(self):
        """Of few rows of a long cache only some heads are compared."""
        problem = "dtype=bf16 b=1 hq=12 hk=4 sq=32 sk=24000 d=128 causal align=bottom_right alibi sinks bias=hk lse"
        self.assertIn("1 checked, 0 wrong", self.run_ok("check", "--problem", problem))

    def test_sampled_columns(self):
        """Of long sequences some columns of two states are compared."""
        problem = "delta_rule b=2 hq=3 t=4000 d=64 dv=100 decay=channel beta state"
        self.assertIn("1 checked, 0 wrong", self.run_ok("check", "--problem", problem))

    def test_gradients_of_the_delta_rule(self):
        """Of long sequences those of two states."""
        problem = "delta_rule_backward b=2 hq=6 t=600 d=64 decay=channel beta state"
        self.assertIn("1 checked, 0 wrong", self.run_ok("check", "--problem", problem))

    def test_gradients(self):
        """All of small problems; some rows and keys of two heads of large ones."""
        text = self.run_ok("check", "--problem", f"attention_backward {PROBLEM}", "--seeds", "3", "--problem",
                           "attention_backward dtype=bf16 b=2 hq=8 hk=4 sq=900 d=24 causal alibi dropout=0.1")
        self.assertIn("6 checked, 0 wrong", text)
        self.assertRegex(text, r"(?m)^attention_backward\.")  # the entry

    def test_every_usable_entry(self):
        usable = [entry for entry in self.run_json("info")["entries"] if entry["usable"]]
        problems = ("--problem", PROBLEM, "--problem", f"attention_backward {PROBLEM}")
        for text, wanted in {"attention": lambda entry: entry["operation"] == "attention",
                             "f32": lambda entry: entry["name"].split(".")[1] == "f32",
                             "naive.": lambda entry: "naive." in entry["name"]}.items():
            printed = self.run_ok("check", *problems, "--entry", text)
            for entry in usable:
                if entry["operation"].startswith("attention"):
                    self.assertEqual(entry["name"] in printed.splitlines(), wanted(entry), (text, printed))

    def test_one_entry(self):
        entries = self.run_json("info")["entries"]
        for operation, problem in {"attention": PROBLEM, **OTHERS}.items():
            name = [entry["name"] for entry in entries if entry["usable"] and entry["operation"] == operation
                    and "f32" in entry["dtypes"]][-1]
            lines = self.run_ok("check", "--problem", problem, "--entry", name).splitlines()
            self.assertIn(name, lines)

    def test_other_operations(self):
        """Each by every entry of its own, and of problems that are given only those that the entries are for."""
        entries = self.run_json("info")["entries"]
        problems = [word for problem in (PROBLEM, *OTHERS.values()) for word in ("--problem", problem)]
        for operation in OTHERS:
            named = [entry for entry in entries if entry["usable"] and entry["operation"] == operation]
            self.assertTrue(named)
            with tempfile.TemporaryDirectory() as folder:
                text = self.run_ok("check", "--entry", operation, "--seeds", "2", *problems, "--json", f"{folder}/rows.json")
                rows = json.loads(Path(folder, "rows.json").read_text())["checks"]
            self.assertIn(f"{2 * len(named)} checked, 0 wrong, 0 skipped", text)
            self.assertEqual([(row["entry"], row["problem"], row["seed"]) for row in rows],
                             [(entry["name"], OTHERS[entry["operation"]], seed) for entry in named for seed in (1, 2)])
            for row in rows:
                self.assertTrue(0 < row["of_bound"] <= 1, row)
                self.assertEqual(row["violation"], "")
                self.assertEqual(row["lse_error"] is None, operation != "merge_states")
        self.assertIn(f"{len(OTHERS) + 1} checked, 0 wrong", self.run_ok("check", *problems))
        self.assert_usage_error("check", "--problem", "append_kv n=10 sk=9 d=8", mentions="seqlens: 10 new keys")
        self.assert_usage_error("check", "--problem", "append_kv n=1 sk=9 d=8 sq=4", mentions='"sq=4"')
        self.assertIn("nothing was checked", rapt("check", "--problem", PROBLEM, "--entry", "append_kv").stderr)

    def test_types(self):
        text = self.run_ok("check", "--entry", "attention", "--problem", "dtype=bf16 out=f32 b=1 hq=2 sq=70 d=40 lse",
                           "--problem", "dtype=f16 b=1 hq=2 sq=70 d=40 lse")
        self.assertIn(" 0 wrong,", text)

    @unittest.skipIf(os.environ.get("RAPT_SANITIZE"), "sanitizers end the program when memory cannot be had")
    def test_out_of_memory_says_how_much(self):
        for command in ("check", "bench"):
            result = rapt(command, "--problem", "dtype=bf16 b=1 hq=1 sq=1 sk=1099511627776 d=64")
            self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
            self.assertRegex(result.stderr, r"\Arapt: [^\n]*out of memory; its tensors take 256.0 TiB, its workspace [^\n]+\n\Z")

    def test_bad_entries(self):
        self.assert_usage_error("check", "--entry", "no_such_entry", mentions="no_such_entry")
        for entry in self.run_json("info")["entries"]:
            if not entry["usable"]:
                self.assert_usage_error("check", "--entry", entry["name"], mentions=entry["reason"])


class Bench(CliTest):
    def bench(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            result = rapt("bench", "--min-time", "0.01", "--json", str(path), *arguments)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertEqual(result.stderr, "", "progress is for terminals only")
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
                 "kv=i4x2 groups=4 sk=40": 4 * rows + 3 * 2 * 40 * (12 + 2 * 4 * 4)}
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
        for operation in OTHERS:
            _, document = self.bench(*problems, "--entry", operation)
            self.assertTrue(document["benchmarks"])
            for row in document["benchmarks"]:
                self.assertIn(operation, operation_of[row["entry"]])
                self.assertEqual(row["problem"], OTHERS[operation_of[row["entry"]]])
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


class JsonFiles(CliTest):
    def write(self, *arguments):
        """(what is printed, what is written)."""
        with tempfile.TemporaryDirectory() as folder:
            text = self.run_ok(*arguments, "--json", f"{folder}/file.json")
            self.assertEqual(os.listdir(folder), ["file.json"])
            document = json.loads(Path(folder, "file.json").read_text())
        for key in RUN_KEYS:
            self.assertTrue(document["context"][key], key)
        return text, document

    def test_check(self):
        text, document = self.write("check", "--problem", PROBLEM, "--problem", PROBLEM + " lse", "--seeds", "2")
        rows = document["checks"]
        self.assertEqual([(row["problem"], row["seed"]) for row in rows],
                         [(f"attention {PROBLEM}{lse}", seed) for lse in ("", " lse") for seed in (1, 2)])
        for row in rows:
            self.assertIn(row["entry"], text)
            self.assertIn(f"{row['max_error']:.2e}  {row['of_bound']:8.3f}", text)
            self.assertTrue(0 < row["rel_frobenius"] < 1e-5 and 0 < row["of_bound"] <= 1)
            self.assertEqual((row["violation"], row["lse_error"] is not None), ("", "lse" in row["problem"]))
        context = document["context"]
        self.assertEqual((context["checked"], context["wrong"], context["skipped"]), (4, 0, 0))

    def test_skipped_checks_say_why(self):
        name = self.bf16_entry()
        problems = [PROBLEM, "dtype=bf16 " + PROBLEM]
        text, document = self.write("check", "--entry", name, "--problem", problems[0], "--problem", problems[1])
        skipped, checked = document["checks"]
        self.assertEqual([skipped["problem"], checked["problem"]], ["attention " + problem for problem in problems])
        self.assertIn(f"skipped: {skipped['skipped']}\n", text)
        self.assertEqual((checked["entry"], document["context"]["skipped"]), (name, 1))

    def test_info(self):
        text, document = self.write("info")
        self.assertEqual(text, self.run_ok("info"))
        printed = self.run_json("info")
        self.assertEqual({**printed, "context": None}, {**document, "context": None})
        self.assertIn(f"commit {document['context']['commit']},", text)

    def test_info_of_a_problem(self):
        text, document = self.write("info", "--problem", PROBLEM)
        self.assertEqual(text, self.run_ok("info", "--problem", PROBLEM))
        self.assertEqual(document["problem"], "attention " + PROBLEM)
        self.assertIn(document["entry"], text)

    def test_unwritable_paths_are_refused_first(self):
        for command in ("check", "info"):
            self.assert_usage_error(command, "--json", "/no/such/folder/rows.json", mentions="/no/such/folder/rows.json")


class ProgressBar(CliTest):
    """On a terminal; that files get nothing of it is asserted wherever standard error is compared with ""."""

    def on_terminal(self, *arguments):
        leader, follower = pty.openpty()
        try:
            process = subprocess.Popen([os.environ["RAPT_CLI"], *arguments], stdout=subprocess.PIPE, stderr=follower)
            os.close(follower)
            output, shown = process.stdout.read().decode(), b""
            process.stdout.close()
            try:
                while block := os.read(leader, 4096):
                    shown += block
            except OSError:  # Linux: the other side is closed
                pass
            self.assertEqual(process.wait(), 0)
        finally:
            os.close(leader)
        return output, shown.decode()

    def test_bar(self):
        two = ("--problem", PROBLEM, "--problem", PROBLEM + " lse")
        for arguments in (("check", *two), ("bench", "--min-time", "0.01", *two)):
            output, shown = self.on_terminal(*arguments)
            self.assertNotIn("\x1b", output)
            self.assertIn(f"[{'.' * 20}] 1/2  {PROBLEM}", shown)
            self.assertRegex(shown, rf"\[#{{10}}\.{{10}}\] 2/2  \d+:\d\d left  {PROBLEM} lse")
            self.assertTrue(shown.endswith("\r\x1b[K"), "it is gone at the end")
            self.assertEqual(rapt(*arguments).stderr, "")


class Usage(CliTest):
    def test_errors(self):
        self.assert_usage_error(mentions="subcommand")
        self.assert_usage_error("levitate", mentions="levitate")
        self.assert_usage_error("info", "--colour", mentions="--colour")
        self.assert_usage_error("check", "--seeds", "0", mentions="--seeds")
        self.assert_usage_error("check", "--seeds", "many", mentions="--seeds")
        self.assert_usage_error("check", "--problem", "b=1", mentions="b=1")
        self.assert_usage_error("bench", "--set", "endless", mentions="endless")
        self.assert_usage_error("bench", "--set", "quick", "--problem", PROBLEM, mentions="--set")
        for command in ("info", "check", "bench", "demo"):
            self.assert_usage_error(command, "--threads", "0", mentions="--threads")
            self.assert_usage_error(command, "--threads", "4000", mentions="--threads")
        self.assert_usage_error("bench", "--threads", "1,x", mentions="--threads")
        self.assert_usage_error("bench", "--min-time", "-1", mentions="--min-time")
        self.assert_usage_error("bench", "--problem", "b=1 hq=2 sq=8 d=0", mentions="d=0")
        self.assert_usage_error("bench", "--problem", "b=2 hq=2 sq=8 d=4 ragged_q=99 ragged_k=99", mentions="ragged")
        self.assert_usage_error("demo", "--data-dir", "/no/such/folder", mentions="/no/such/folder")

    def test_help(self):
        for command in ("info", "check", "bench", "demo"):
            self.assertIn("--", self.run_ok(command, "--help"))
            self.assertIn(command, self.run_ok("--help"))
            text = self.run_ok(command, "--help")
            examples = text[text.index("\nExamples:\n"):].split("\n  ")[1:]
            self.assertTrue(2 <= len(examples) <= 3 and all(line.startswith(f"rapt {command}") for line in examples), text)
        self.assertRegex(self.run_ok("--version"), r"^\d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    unittest.main()
