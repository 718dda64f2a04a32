"""Runs of `rapt roofline --set fusion` on one machine, by number of threads."""

import math
import re
import statistics

# Student's t for 95 % of both sides, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def bytes_text(size):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:g} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return ""


def label(key):
    s, d, causal, _ = key
    return f"S = {s}, d = {d}{', causal' * causal}"


class Mean:
    """Over seeds, and half of its 95 % confidence interval (None of a single seed)."""

    def __init__(self, seeds):
        self.mean = statistics.mean(seeds)
        n = len(seeds)
        self.half = STUDENT.get(n - 1, 2.0) * statistics.stdev(seeds) / math.sqrt(n) if n > 1 else None

    def __str__(self):
        digits = max(0, 2 - math.floor(math.log10(self.mean)))
        around = "" if self.half is None else f" ± {100 * self.half / self.mean:.0f} %"
        return f"{self.mean:.{digits}f}{around}"


class Machine:
    """`runs`: by threads, dots by (S, d, causal, step)."""

    def __init__(self, name, files):
        self.name = name
        self.documents = {threads: document for threads, (_, document) in files.items()}
        self.runs = {threads: {self._key(dot): dot for dot in run["dots"]} for threads, run in self.documents.items()}
        self.max_threads = max(self.runs)
        self.day = " and ".join(dict.fromkeys(day for day, _ in files.values()))
        context = self.documents[self.max_threads]["context"]
        self.cpu, self.cpus = context["cpu"], context["num_cpus"]
        self.commit, self.compiler = context["commit"], context["compiler"]
        self.seeds = min(run["context"]["seeds"] for run in self.documents.values())
        self.caches = {cache["level"]: cache["size"] for cache in context["caches"] if cache["type"] != "Instruction"}

    @staticmethod
    def _key(dot):
        words = dict(re.findall(r"(\w+)=(\S+)", dot["problem"]))
        return int(words["sq"]), int(words["d"]), "causal" in dot["problem"].split(), dot["step"]

    def lengths(self, threads, d):
        return sorted({key[0] for key in self.runs[threads] if key[1] == d})

    def keys(self, threads, step):
        return [key for key in self.runs[threads] if key[3] == step]

    def time(self, threads, key):
        """Milliseconds."""
        return Mean(self.runs[threads][key]["seeds_ms"])

    def speedup(self, threads, key):
        """The three steps' time over the fused call's, of the same seeds."""
        fused, three = (self.runs[threads][(*key[:3], step)]["seeds_ms"] for step in ("fused", "three steps"))
        return Mean([slow / fast for fast, slow in zip(fused, three)])

    def units(self, threads):
        return [(unit["name"], unit["gflops"]) for unit in self.documents[threads]["units"] if unit["gflops"] and "fp32" in unit["name"]]

    def reads(self, threads):
        """(level, GB/s) of those that could be measured."""
        return [(read["name"], read["gbs"]) for read in self.documents[threads]["reads"] if read["gbs"]]

    def memory(self, threads):
        return dict(self.reads(threads)).get("memory")

    def peak(self, threads, key):
        return dict(self.units(threads))[f"{self.runs[threads][key]['unit']} fp32"]

    def of_peak(self, threads, key):
        return self.runs[threads][key]["flops"] / self.time(threads, key).mean / 1e6 / self.peak(threads, key)

    def of_roof(self, threads, key):
        roof = self.runs[threads][key]["roof_gflops"]
        return self.runs[threads][key]["flops"] / self.time(threads, key).mean / 1e6 / roof

    def ceilings(self, threads):
        """Texts: peak, memory, ridge."""
        peak, memory = max(rate for _, rate in self.units(threads)), self.memory(threads)
        if not memory:
            return f"{peak:.0f} GFLOP/s", "not measured", ""
        return f"{peak:.0f} GFLOP/s", f"{memory:.1f} GB/s", f"{peak / memory:.1f} FLOPs per byte"
