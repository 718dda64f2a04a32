#!/usr/bin/env python3
"""Runs the program as a user would; `rapt bench` is in test_bench.py."""

import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

from cli_test import CliTest, OTHERS, PROBLEM, RUN_KEYS, isa_of, rapt


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

    def test_the_library_of_the_gpu_backend_is_named_or_missed(self):
        cuda = self.run_json("info")["backends"][1]
        self.assertEqual(bool(cuda["library"]), bool(cuda["version"]))
        self.assertTrue(cuda["library"] or "RAPT_CUDA_LIBRARY" in cuda["reason"], cuda)
        file = os.environ["RAPT_TEST_CUDA_LIBRARY"]
        fake = self.run_json("info", RAPT_CUDA_LIBRARY=file)
        version = fake["context"]["library_version"]
        wanted = {"name": "cuda", "usable": True, "reason": "", "library": file, "version": version}
        self.assertEqual(fake["backends"][1], wanted)
        self.assertIn("attention.fake.cuda", [entry["name"] for entry in fake["entries"]])
        text = self.run_ok("info", RAPT_CUDA_LIBRARY=file)
        self.assertIn(f"cuda       {file} (rapt {version}): usable\n", text)
        self.assertIn(f"RAPT_CUDA_LIBRARY {file} (environment)\n", text)
        missed = rapt("info", "--problem", "device=cuda d=16", RAPT_CUDA_LIBRARY="/nowhere.so")
        self.assertEqual(missed.returncode, 2)
        self.assertIn("device: cuda; wanted cpu (RAPT_CUDA_LIBRARY is /nowhere.so: /nowhere.so: cannot open", missed.stderr)

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

    def test_guards_of_the_environment(self):
        self.assertRegex(self.run_ok("info", RAPT_GUARDS="nan,shadow=2"), r"(?m)^RAPT_GUARDS nan,shadow=2 \(environment\)$")
        self.assert_usage_error("check", mentions="RAPT_GUARDS: \"nans\"", RAPT_GUARDS="nans")
        context = self.run_json("info", "--problem", PROBLEM, RAPT_GUARDS="nan")["context"]  # as every JSON file has it
        self.assertEqual(context["environment"], {"RAPT_ISA": "", "RAPT_KERNEL": "", "RAPT_GUARDS": "nan", "RAPT_CUDA_LIBRARY": ""})

    def test_environment_is_shown(self):
        name = [isa["name"] for isa in self.run_json("info")["isas"] if isa["usable"]][-1]
        self.assertRegex(self.run_ok("info", RAPT_ISA=name), rf"RAPT_ISA +{name}")


class Guide(CliTest):
    """The commands of docs/guide/cli.md do what they say; those that take long are looked at only."""

    SLOW = (["rapt", "check"], ["rapt", "demo"], ["rapt", "roofline", "--html", "roofline.html"])

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
        folder = tempfile.TemporaryDirectory()  # of the files that they write
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)
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


class InfoCode(CliTest):
    """What the build read out of the kernels' object files."""

    def test_every_object_was_read(self):
        document = self.run_json("info", "--code")
        code = document["code"]
        isas = {entry["isa"] for entry in self.run_json("info")["entries"] if entry["backend"] == "cpu"}
        self.assertTrue(isas <= {found["isa"] for found in code}, isas)
        self.assertEqual(len({(found["isa"], found["source"]) for found in code}), len(code))
        lines = self.run_ok("info", "--code").splitlines()
        for found in code:
            self.assertTrue("-O" in found["flags"] or "-std" in found["flags"], found)
            name = os.path.basename(found["source"])
            if name.endswith(".cpp"):
                self.assertGreater(found["code_bytes"], 500, found)
                (line,) = [line for line in lines if line.split()[:2] == [found["isa"], name]]
                self.assertIn(f" {found['code_bytes']} ", line)
            else:
                self.assertTrue(found.get("not_read") or found["gpu"], found)
        # The register tile of attention's products, whose size is in src/cpu/isa.
        if os.environ.get("RAPT_SANITIZE") or not document["context"]["compiler"].startswith("g++"):
            return
        tiles = {found["isa"]: found["largest"] for found in code if found["source"].endswith("/attention_prefill.cpp")}
        for isa, (accumulators, registers) in {"generic": (8, 16), "avx2": (12, 16), "avx512": (24, 32)}.items():
            if isa in tiles:
                self.assertEqual(tiles[isa]["accumulators"], accumulators, (isa, tiles))
                self.assertLessEqual(tiles[isa]["registers"], registers)

    def test_usage(self):
        self.assert_usage_error("info", "--code", "--problem", PROBLEM, mentions="--problem")
        self.assert_usage_error("info", "--code", "--json", "/no/such/folder/file.json", mentions="/no/such/folder")


class InfoProblem(CliTest):
    def test_names_what_would_run(self):
        plan = self.run_json("info", "--problem", PROBLEM)
        self.assertEqual(plan["problem"], "attention " + PROBLEM)
        self.assertIn(plan["entry"], [candidate["entry"] for candidate in plan["candidates"]])
        self.assertIn(plan["entry"], self.run_ok("info", "--problem", PROBLEM))

    def test_opt_in_entries_run_only_if_forced(self):
        problem = "dtype=bf16 " + PROBLEM  # which all of them take
        listed = self.run_json("info")["entries"]
        opt_in = [entry for entry in listed if entry["operation"] == "attention" and entry["opt_in"] and entry["usable"]]
        for name in [entry["name"] for entry in opt_in if entry["backend"] == "cpu"]:
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
        text = self.run_ok("check", "--seeds", "1")
        self.assertIn(" 0 wrong, 0 skipped", text)
        for word in ("page=1 ", "page=16 ", "ring ", "kv=i8 ", "kv=f8e4m3 ", "kv=f8e5m2 ", "kv=i4x2 ", "zeros ", "q=f8e4m3 ", " head_scales q_scale ",
                     "sinks of -10", "scale of 1e38", "given_scales ", "values_are_keys ", "append_kv new=", "merge_states rows=", "attention_backward b=",
                     "attention_backward dtype=bf16", " dbias", " dsinks", " dalibi", " dlse", "grads=kv", "delta_rule rule=", "decay=channel ", " gate ",
                     " slots", "steps=4", "index_scores dtype=bf16", "index_scores q=bf16 k=f8e4m3", " linear ", " ranges ", " topk=", "select_topk rows="):
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

    def test_sampled_queries(self):
        """Of many long ones some are compared."""
        problem = "index_scores dtype=bf16 sq=300 sk=3000 h=9 d=64 align=bottom_right topk=100"
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
                    is_checked = wanted(entry) and "f32" in entry["dtypes"]
                    self.assertEqual(entry["name"] in printed.splitlines(), is_checked, (text, printed))

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
            taken = [entry for entry in named if "f32" in entry["dtypes"]]
            self.assertTrue(taken)
            with tempfile.TemporaryDirectory() as folder:
                text = self.run_ok("check", "--entry", operation, "--seeds", "2", *problems, "--json", f"{folder}/rows.json")
                rows = json.loads(Path(folder, "rows.json").read_text())["checks"]
            others = [PROBLEM, *(problem for other, problem in OTHERS.items() if other != operation)]
            self.assertIn(f"{2 * len(taken)} checked, 0 wrong, {len(named) - len(taken) + len(others)} skipped", text)
            for problem, row in zip(others, rows):
                self.assertEqual((row["name"], "entry" in row), (problem, False))
                self.assertIn(f"--entry {operation} names no usable entry of {row['problem'].split()[0]}", row["skipped"])
                self.assertRegex(text, rf"(?m)^{re.escape(problem)} +-  skipped: {re.escape(row['skipped'])}$")
            checked = [row for row in rows if "skipped" not in row]
            self.assertEqual([(row["entry"], row["problem"], row["seed"]) for row in checked],
                             [(entry["name"], OTHERS[entry["operation"]], seed) for entry in taken for seed in (1, 2)])
            for row in checked:
                exact = operation == "select_topk"
                self.assertTrue(row["of_bound"] == 0 if exact else 0 < row["of_bound"] <= 1, row)
                self.assertEqual(row["violation"], "")
                self.assertEqual(row["lse_error"] is None, operation != "merge_states")
        self.assertIn(f"{len(OTHERS) + 1} checked, 0 wrong", self.run_ok("check", *problems))
        self.assert_usage_error("check", "--problem", "append_kv n=10 sk=9 d=8", mentions="seqlens: 10 new keys")
        self.assert_usage_error("check", "--problem", "append_kv n=1 sk=9 d=8 sq=4", mentions='"sq=4"')
        self.assert_usage_error("check", "--problem", PROBLEM, "--entry", "append_kv",
                                mentions="--entry append_kv: no problem is of its operation")
        for words in ("sq=4 d=4 kv=i8", "sq=4 d=4 kv=i8 groups=1"):
            self.assert_usage_error("check", "--problem", f"attention_backward {words}", mentions="k: dtype i8")

    def test_types(self):
        text = self.run_ok("check", "--entry", "attention", "--problem", "dtype=bf16 out=f32 b=1 hq=2 sq=70 d=40 lse",
                           "--problem", "dtype=f16 b=1 hq=2 sq=70 d=40 lse")
        self.assertIn(" 0 wrong,", text)

    @unittest.skipIf(os.environ.get("RAPT_SANITIZE"), "sanitizers end the program when memory cannot be had")
    def test_out_of_memory_says_how_much(self):
        problems = {"dtype=bf16 b=1 hq=1 sq=1 sk=1099511627776 d=64": "256.0", "delta_rule b=1000000000 t=0 d=256 state": "238.4"}
        for command, (problem, size) in itertools.product(("check", "bench"), problems.items()):
            result = rapt(command, "--problem", problem)
            self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
            self.assertRegex(result.stderr, rf"\Arapt: [^\n]*out of memory; its tensors take {size} TiB, its workspace [^\n]+\n\Z")

    def test_bad_entries(self):
        self.assert_usage_error("check", "--entry", "no_such_entry", mentions="no_such_entry")
        for entry in self.run_json("info")["entries"]:
            if not entry["usable"]:
                self.assert_usage_error("check", "--entry", entry["name"], mentions=entry["reason"])


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

    def test_bytes_that_are_no_text(self):
        result = rapt("info", "--json", RAPT_KERNEL=os.fsdecode(b"\xffe\xc3\xa9"))
        self.assertEqual(json.loads(result.stdout)["context"]["environment"]["RAPT_KERNEL"], "\ufffde\xe9")

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
        for command in ("info", "check", "bench", "roofline", "demo"):
            self.assert_usage_error(command, "--threads", "0", mentions="--threads")
            self.assert_usage_error(command, "--threads", "4000", mentions="--threads")
        self.assert_usage_error("bench", "--threads", "1,x", mentions="--threads")
        self.assert_usage_error("bench", "--min-time", "-1", mentions="--min-time")
        self.assert_usage_error("bench", "--problem", "b=1 hq=2 sq=8 d=0", mentions="d=0")
        self.assert_usage_error("bench", "--problem", "b=2 hq=2 sq=8 d=4 ragged_q=99 ragged_k=99", mentions="ragged")
        self.assert_usage_error("demo", "--data-dir", "/no/such/folder", mentions="/no/such/folder")

    def test_empty_values(self):
        for command, options in {"info": ("--problem", "--threads", "--json"),
                                 "check": ("--problem", "--entry", "--seeds", "--threads", "--json"),
                                 "bench": ("--set", "--problem", "--entry", "--seeds", "--threads", "--min-time", "--json"),
                                 "demo": ("--data-dir", "--threads")}.items():
            for option in options:
                for words in ((option, ""), (option + "=", "1")):
                    self.assert_usage_error(command, *words, mentions=f"rapt: {option}: an empty value\n")
        self.assert_usage_error("check", "", mentions="not expected")

    def test_control_characters_are_escaped(self):
        typed, shown = "\x1b[2J\x07\n\x7f\x9b\xe9", r"\x1b[2J\x07\x0a\x7f\u009b" + "\xe9"
        for words in ((typed,), ("info", typed), ("info", "--problem", typed), ("info", "--problem", "sq=" + typed),
                      ("info", "--json", f"/no/such/{typed}"), ("check", "--entry", typed), ("check", "--seeds", typed),
                      ("bench", "--set", typed), ("demo", "--data-dir", typed)):
            self.assert_usage_error(*words, mentions=shown)
        result = rapt("info", RAPT_KERNEL=typed)
        self.assertIn(f' "{shown}"; wanted ', result.stderr)
        self.assertRegex(result.stdout, rf"(?m)^RAPT_KERNEL +{re.escape(shown)} \(environment\)")

    def test_help(self):
        for command in ("info", "check", "bench", "roofline", "demo"):
            self.assertIn("--", self.run_ok(command, "--help"))
            self.assertIn(command, self.run_ok("--help"))
            text = self.run_ok(command, "--help")
            examples = text[text.index("\nExamples:\n"):].split("\n  ")[1:]
            self.assertTrue(2 <= len(examples) <= 3 and all(line.startswith(f"rapt {command}") for line in examples), text)
        self.assertRegex(self.run_ok("--version"), r"^\d+\.\d+\.\d+(\.dev\d+)?\n$")


if __name__ == "__main__":
    unittest.main()
