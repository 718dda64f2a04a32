#!/usr/bin/env python3
"""`rapt roofline` as a user would run it."""

import json
import math
import os
import tempfile
import unittest
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path

from cli_test import CliTest, OTHERS, PROBLEM, RUN_KEYS, rapt

STEPS = ["scores", "softmax", "values"]


class Cells(HTMLParser):
    """The texts of a page's table, row by row."""

    def __init__(self):
        super().__init__()
        self.rows, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1].append(data)

    def handle_endtag(self, tag):
        self.inside = False


class Roofline(CliTest):
    def roofline(self, *problems, threads="1", seeds="1", **environment):
        """(what is printed, JSON, SVG, HTML)."""
        with tempfile.TemporaryDirectory() as folder:
            files = [f"{folder}/roofline.{kind}" for kind in ("json", "svg", "html")]
            text = self.run_ok("roofline", "--min-time", "0.001", "--threads", threads, "--seeds", seeds,
                               *(word for p in problems for word in ("--problem", p)),
                               *(word for file in files for word in ("--" + file.rpartition(".")[2], file)), **environment)
            self.assertEqual(len(os.listdir(folder)), 3)
            return text, *(read(Path(file).read_text()) for read, file in zip((json.loads, xml.fromstring, str), files))

    def test_formulas(self):
        """FLOPs and bytes of the steps; the fused call's are those of `rapt bench`, which has tests of its own."""
        _, document, _, _ = self.roofline("b=2 hq=4 hk=2 sq=20 sk=30 d=8 dv=4", "b=1 hq=2 sq=20 d=8 causal")
        scores = [2 * 4 * 20 * 30, 2 * 20 * 20]
        visible = [scores[0], 2 * 20 * 21 // 2]
        wanted = [[("fused", 2 * scores[0] * 12, 4 * (2 * 4 * 20 * 12 + 2 * 2 * 30 * 12)), None,
                   ("scores", 2 * scores[0] * 8, 4 * (2 * 4 * 20 * 8 + 2 * 2 * 30 * 8 + scores[0])),
                   ("softmax", 5 * visible[0], 8 * scores[0]),
                   ("values", 2 * scores[0] * 4, 4 * (scores[0] + 2 * 2 * 30 * 4 + 2 * 4 * 20 * 4))],
                  [("fused", 2 * visible[1] * 16, 4 * 4 * 2 * 20 * 8), None,
                   ("scores", 2 * scores[1] * 8, 4 * (2 * 2 * 20 * 8 + scores[1])),
                   ("softmax", 5 * visible[1], 8 * scores[1]),
                   ("values", 2 * scores[1] * 8, 4 * (scores[1] + 2 * 2 * 20 * 8))]]
        dots = document["dots"]
        self.assertEqual(len(dots), 10)
        for problem, first in zip(wanted, (0, 5)):
            for dot, expected in zip(dots[first:first + 5], problem):
                if expected:
                    self.assertEqual((dot["step"], dot["flops"], dot["bytes"]), expected)
            fused, three, *steps = dots[first:first + 5]
            self.assertEqual((three["step"], three["flops"]), ("three steps", fused["flops"]))
            self.assertEqual(three["bytes"], sum(step["bytes"] for step in steps))
            self.assertTrue(math.isclose(three["median_ms"], sum(step["median_ms"] for step in steps), rel_tol=1e-9))

    def test_outputs_agree(self):
        problems = [PROBLEM, "dtype=bf16 " + PROBLEM, PROBLEM + " softcap=9", OTHERS["delta_rule"], OTHERS["select_topk"]]
        text, document, svg, html = self.roofline(*problems)
        for key in RUN_KEYS:
            self.assertTrue(document["context"][key], key)
        for output in (text, html):
            self.assertIn(document["context"]["method"], output)
        dots = document["dots"]
        self.assertEqual([dot["step"] for dot in dots], ["fused", "three steps", *STEPS, "fused", "fused", "delta_rule", "select_topk"])
        vectors = {isa["name"] for isa in self.run_json("info")["isas"] if isa["usable"]} - {"avx512bf16", "neonbf16"}
        self.assertEqual({unit["name"].split()[0] for unit in document["units"]}, vectors)
        self.assertEqual(document["reads"][-1]["name"], "memory")
        memory = document["reads"][-1]["gbs"]
        peaks = {unit["name"].split()[0]: unit["gflops"] for unit in document["units"]}
        for dot in dots:
            self.assertTrue(math.isclose(dot["gflops"], dot["flops"] / dot["median_ms"] / 1e6, rel_tol=1e-9))
            self.assertTrue(math.isclose(dot["gbs"], dot["bytes"] / dot["median_ms"] / 1e6, rel_tol=1e-9))
            self.assertTrue(math.isclose(dot["intensity"], dot["flops"] / dot["bytes"], rel_tol=1e-9))
            roof = min(peaks[dot["unit"]], dot["intensity"] * memory)
            self.assertTrue(math.isclose(dot["roof_gflops"], roof, rel_tol=1e-9))
            share = dot["gbs"] / memory if dot["flops"] == 0 else dot["gflops"] / roof
            self.assertTrue(math.isclose(dot["of_roof"], share, rel_tol=1e-9))
            self.assertIn(f"{dot['median_ms']:.4f}", text)
        table = Cells()
        table.feed(html)
        rows = [row for row in table.rows if len(row) == 10]
        self.assertEqual([row[:2] for row in rows[1:]], [[dot["step"], dot["entry"]] for dot in dots])
        # The selection computes nothing: it is held against memory's bandwidth, and has no place in the chart.
        self.assertEqual(rows[-1][-2:], ["no FLOPs", f"{100 * dots[-1]['gbs'] / memory:.1f}"])
        titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")][1:]
        self.assertEqual([title.split(", ")[-3].split(":")[0] for title in titles],
                         [dot["step"] for dot in dots if dot["flops"] > 0])
        for circle in svg.iter("{http://www.w3.org/2000/svg}circle"):
            self.assertTrue(0 < float(circle.get("cx")) < 1010 and 0 < float(circle.get("cy")) < 620)
        for outside in ("http://", "https://", "<script", "<link", "<img"):
            self.assertNotIn(outside, html.replace('xmlns="http://www.w3.org/2000/svg"', ""))

    def test_counted(self):
        """Of the processor's events either figures or a reason, never zeros; the kernel's are there on any Linux that lets us."""
        text, document, _, html = self.roofline(PROBLEM, seeds="3")
        self.check_seeds(document)
        self.check_int8(document)
        reason = document["context"]["no_counters"]
        fused, three, *steps = document["dots"]
        if reason:
            self.assertRegex(reason, r"\Aperf_event_open: \w")
            for output in (text, html):
                self.assertEqual(output.count("no counters here"), len(document["dots"]) + 1)
                self.assertIn(reason, output)
        for dot in document["dots"]:
            counted = dot["counted"]
            if reason:
                for event in ("instructions", "cycles", "cache_misses", "bytes", "intensity"):
                    self.assertIsNone(counted[event])
            else:
                self.assertGreater(counted["instructions"], dot["flops"] / 64)
                self.assertEqual(counted["bytes"], 64 * counted["cache_misses"])
                if counted["bytes"]:
                    self.assertTrue(math.isclose(counted["intensity"], dot["flops"] / counted["bytes"], rel_tol=1e-9))
            if counted["cpu_ms"] is not None:
                self.assertGreater(counted["cpu_ms"], 0)
                self.assertGreaterEqual(counted["page_faults"], 0)
        if three["counted"]["cpu_ms"] is not None:
            self.assertTrue(math.isclose(three["counted"]["cpu_ms"], sum(step["counted"]["cpu_ms"] for step in steps), rel_tol=1e-9))
            self.assertLess(fused["counted"]["cpu_ms"], 1000)

    def check_seeds(self, document):
        self.assertEqual(document["context"]["seeds"], 3)
        _, three, *steps = document["dots"]
        for dot in document["dots"]:
            self.assertEqual(len(dot["seeds_ms"]), 3)
            self.assertTrue(min(dot["seeds_ms"]) > 0)
        for seed in range(3):
            self.assertTrue(math.isclose(three["seeds_ms"][seed], sum(step["seeds_ms"][seed] for step in steps), rel_tol=1e-9))

    def check_int8(self, document):
        """Products of bytes are a ceiling where an ISA has them, and nowhere else."""
        units = {unit["name"].split()[0] for unit in document["units"]}
        for ceiling in document["int8"]:
            isa, what = ceiling["name"].split()
            self.assertIn(isa, units)
            self.assertEqual(what, "int8")
            self.assertGreater(ceiling["gops"], 0)
        flags = set(document["context"]["features"])
        for isa, feature in (("amx", "amx_int8"), ("avx512", "avx512_vnni"), ("avx2", "avx_vnni")):
            if feature in flags and isa in units:
                self.assertIn(f"{isa} int8", [ceiling["name"] for ceiling in document["int8"]])

    def test_three_steps_on_every_isa(self):
        for isa in self.run_json("info")["isas"]:
            if isa["usable"] and isa["name"] not in ("amx", "avx512bf16", "neonbf16"):  # which take no fp32
                _, document, _, _ = self.roofline("b=1 hq=3 sq=300 sk=70 d=33 dv=9", RAPT_ISA=isa["name"])
                (scores,) = [dot for dot in document["dots"] if dot["step"] == "scores"]
                self.assertEqual(scores["entry"], f"Eigen, {scores['unit']}")
                self.assertEqual(scores["unit"], isa["name"])

    def test_threads(self):
        if self.run_json("info")["executors"][0]["threads"] < 2:
            self.skipTest("one CPU")
        text, document, _, _ = self.roofline("b=1 hq=3 sq=300 d=32", threads="2")
        self.assertEqual(document["context"]["threads"], 2)
        self.assertRegex(text, r"\Arapt [^\n]*, 2 of \d+ CPUs\n")

    def test_nothing_to_compute(self):
        _, document, svg, _ = self.roofline("b=0 hq=2 sq=20 d=8", "b=1 hq=2 sq=20 sk=0 d=8")
        self.assertEqual([(dot["step"], dot["flops"]) for dot in document["dots"]], [("fused", 0)] * 2)
        self.assertEqual(len(list(svg.iter("{http://www.w3.org/2000/svg}title"))), 1)

    def test_usage(self):
        with tempfile.TemporaryDirectory() as folder:
            for option in ("--json", "--svg", "--html"):
                for path, mentions in {f"{folder}/missing/file": "missing/file", folder: "is a directory",
                                       "": f"{option}: an empty value"}.items():
                    self.assert_usage_error("roofline", "--problem", PROBLEM, option, path, mentions=mentions)
            self.assert_usage_error("roofline", "--problem", PROBLEM, "--svg", f"{folder}/a", "--html", f"{folder}/a",
                                    mentions="given for two files")
            self.assertEqual(os.listdir(folder), [])
        self.assert_usage_error("roofline", "--set", "quick", "--problem", PROBLEM, mentions="--set")
        self.assert_usage_error("roofline", "--set", "endless", mentions='--set: "endless"; wanted a file')
        self.assert_usage_error("roofline", "--problem", "b=1 hq=3 hk=2 sq=8 d=8", mentions="hk")
        self.assert_usage_error("roofline", "--problem", PROBLEM, "--threads", "0", mentions="--threads")
        self.assert_usage_error("roofline", "--problem", PROBLEM, "--seeds", "0", mentions="--seeds")
        result = rapt("roofline", "--problem", "b=1000 hq=1000 sq=100000 d=128")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"\Arapt: [^\n]*out of memory[^\n]*\n\Z")


if __name__ == "__main__":
    unittest.main()
