"""What the tests of the program share: it is the one that the environment's RAPT_CLI names."""

import json
import os
import subprocess
import unittest

PROBLEM = "b=1 hq=2 sq=48 d=16 causal"
OTHERS = {"append_kv": "append_kv new=bf16 kv=i8 b=3 hk=2 n=5 sk=40 d=16 dv=8 page=8 groups=2",
          "rotary_append_kv": "rotary_append_kv new=bf16 kv=i8 b=3 hk=2 n=5 sk=40 d=16 dv=8 page=8 groups=2 hq=4 rotary=16 norm",
          "merge_states": "merge_states dtype=bf16 out=f32 rows=20 dv=24 count=3 lse",
          "delta_rule": "delta_rule decay=head b=2 hq=2 hv=4 t=1 d=16 dv=8 beta state",
          "delta_rule_backward": "delta_rule_backward decay=head b=2 hq=2 hv=4 t=9 d=16 dv=8 beta state",
          "index_scores": "index_scores b=2 sq=9 sk=70 h=3 d=16 align=bottom_right topk=20 scores",
          "select_topk": "select_topk rows=12 sk=70 n=20"}
VARIABLES = ("RAPT_ISA", "RAPT_KERNEL", "RAPT_GUARDS", "RAPT_CUDA_LIBRARY")
RUN_KEYS = "date host_name cpu num_cpus features caches library_version commit compiler environment".split()


def rapt(*arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run([os.environ["RAPT_CLI"], *arguments], capture_output=True, text=True, errors="surrogateescape",
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
