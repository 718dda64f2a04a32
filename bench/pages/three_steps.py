"""docs/report: attention in three steps and fused, derived and measured. The text is three_steps.md.in."""

import re
from pathlib import Path

from . import three_steps_findings as findings
from .charts import line_chart, roofline_chart
from .data import RESULTS, newest, newest_of, read_json, table
from .three_steps_data import Machine, bytes_text

TEXT = Path(__file__).with_name("three_steps.md.in")
FOLDER = "docs/report"
HEADS, LENGTHS, HEAD_DIMS = 8, (128, 256, 512, 1024, 2048, 4096), (64, 128)  # of bench/sets/fusion.txt
COLORS = {64: "#0b6bcb", 128: "#e07b00"}
NOTHING = """No machine has been measured for this page yet: no file of `bench/results` is named `<machine>-roofline-<threads>-threads.json`.

"""


def machines_of(results):
    runs = {}
    for name, path in newest_of("*-roofline-*-threads.json", results).items():
        machine, threads = re.fullmatch(r"([^-]+)-roofline-(\d+)-threads\.json", name).groups()
        runs.setdefault(machine, {})[int(threads)] = (path.parent.name, read_json(path))
    return [Machine(name, dict(sorted(of.items()))) for name, of in sorted(runs.items())]


def matrix_table(machines):
    caches = {(machine.name, level): size for machine in machines for level, size in machine.caches.items() if level > 1}
    head = ["S", "the matrix of all heads", *(f"fits L{level} of {name}, {bytes_text(size)}" for (name, level), size in caches.items())]
    rows = []
    for s in LENGTHS:
        size = 4 * HEADS * s * s
        rows.append([str(s), bytes_text(size), *("yes" if size < cache else "no" for cache in caches.values())])
    return table(head, rows)


def intensity_table():
    """Of 4 s^2 d FLOPs in fp32: three steps move q, k, v, out and four times the matrix of scores, the fused call the former alone."""
    rows = []
    for d in HEAD_DIMS:
        for s in LENGTHS:
            three, fused = d / 4 * s / (s + d), s / 4
            rows.append([str(d), str(s), f"{three:.1f}", f"{fused:.0f}", f"{fused / three:.0f}"])
    return table(["d", "S", "three steps, FLOPs per byte", "fused", "times as many"], rows)


def roofline_figure(machine):
    threads = machine.max_threads
    run = machine.runs[threads]
    pairs = []
    for d in HEAD_DIMS:
        for s in machine.lengths(threads, d):
            three, fused = (run[(s, d, False, step)] for step in ("three steps", "fused"))
            pairs.append((f"S = {s}", COLORS[d], *((dot["intensity"], dot["gflops"]) for dot in (three, fused))))
    return roofline_chart(f"{machine.name}: three steps (hollow) and fused (full)",
                          f"fp32, {HEADS} heads, full · {machine.cpu}, {threads} thread{'s' * (threads > 1)}",
                          (machine.units(threads), machine.reads(threads)), pairs,
                          [(f"d = {d}", COLORS[d], 1) for d in HEAD_DIMS])


def by_length(machine, value, title, subtitle, unit, **options):
    """A panel for each number of threads; full problems."""
    panels = []
    for threads in machine.runs:
        lines = []
        for d in HEAD_DIMS:
            for step, dash in (("fused", ""), ("three steps", "6 4")):
                lines.append((COLORS[d], dash, [(s, value(machine, threads, (s, d, False, step))) for s in machine.lengths(threads, d)]))
        panels.append((f"{threads} thread{'s' * (threads > 1)}", lines))
    legend = [(f"d = {d}", COLORS[d], 1) for d in HEAD_DIMS] + [("dashed: three steps", "#ffffff", 1)]
    return line_chart(title, f"{subtitle} · {machine.cpu}", unit, panels, legend, **options)


def results_table(machine):
    head = ["d", "", "S"]
    for threads in machine.runs:
        head += [f"fused ms, {threads} thread{'s' * (threads > 1)}", "three steps ms", "three steps / fused"]
    rows = []
    for d in HEAD_DIMS:
        for causal in (False, True):
            for s in machine.lengths(machine.max_threads, d):
                row = [str(d), "causal" if causal else "full", str(s)]
                for threads in machine.runs:
                    row += [str(machine.time(threads, (s, d, causal, step))) for step in ("fused", "three steps")]
                    row.append(str(machine.speedup(threads, (s, d, causal))))
                rows.append(row)
    return table(head, rows)


def counted(machine):
    reason = next((run["context"]["no_counters"] for run in machine.documents.values() if run["context"]["no_counters"]), None)
    if reason:
        return f"Nothing was counted by the processor on this machine ({reason})."
    rows = []
    for d in HEAD_DIMS:
        for s in machine.lengths(machine.max_threads, d):
            cells = [str(d), str(s)]
            for step in ("three steps", "fused"):
                dot = machine.runs[machine.max_threads][(s, d, False, step)]
                found = dot["counted"]["intensity"]
                cells += [f"{dot['intensity']:.1f}", "no misses" if found is None else f"{found:.1f}"]
            rows.append(cells)
    head = ["d", "S", "three steps, FLOPs per byte", "counted", "fused", "counted"]
    return ("FLOPs per byte by formula, and over 64 bytes for each miss of the last-level cache that the processor counted "
            f"({machine.max_threads} threads, full):\n\n{table(head, rows)}")


def simulated(results):
    """Formula beside counts on a model of two caches; empty without data."""
    path = newest(["simulated-cache.json"], results)
    if path is None:
        return ""
    run = read_json(path)
    first, last = (int(run["context"][cache].split(",")[0]) for cache in ("d1", "last_level"))
    entries = {row["step"]: row["entry"] for row in run["rows"]}
    rows, shares, near = [], {True: [], False: []}, {step: [] for step in entries}
    for row in run["rows"]:
        matrix = 4 * row["heads"] * row["s"] ** 2
        intensities = [row["flops"] / row[moved] for moved in ("formula_bytes", "last_level_bytes", "d1_bytes")]
        cells = [f"{value:.1f}" if value < 100 else f"{value:,.0f}" for value in intensities]
        rows.append([str(row["d"]), str(row["s"]), bytes_text(matrix), row["step"], *cells])
        near[row["step"]].append(intensities[2])
        if row["step"] == "three steps":
            shares[matrix > last].append(row["last_level_bytes"] / row["formula_bytes"])
    head = ["d", "S", "the matrix", "", "by formula", f"counted beyond {bytes_text(last)}", f"counted beyond {bytes_text(first)}"]

    def span(values):
        return f"{min(values):.2g} to {max(values):.2g}"

    return f"""## Counted on a simulated cache

Do the formulas count what moves? The processors' own counters would say, but virtual machines mostly hide them. So the same calls
have run on a model of two caches, an L1 of {bytes_text(first)} and one more of {bytes_text(last)} behind it, in which every miss counts as 64 bytes ({path.parent.name},
{run["context"]["valgrind"]}, rapt at commit {run["context"]["commit"]}; {run["rows"][0]["heads"]} heads, one thread; fused: `{entries["fused"]}`, three steps: {entries["three steps"]}).
FLOPs per byte:

{table(head, rows)}

Beyond the larger cache, the three steps move {span(shares[True])} times the bytes of the formula where the matrix is larger than that cache, and
{span(shares[False])} times where it is smaller. Beyond L1, where blocks of keys and of rows come by again and again, they do {span(near["three steps"])} FLOPs
for each byte, and the fused call {span(near["fused"])}. The model does not prefetch, and does not count what is written back when a line is
replaced.

"""


def section(machine):
    about = "\n".join(f"| {threads} | " + " | ".join(machine.ceilings(threads)) + " |" for threads in machine.runs)
    found = "\n".join(f"- {line}" for line in findings.of(machine))
    return f"""## {machine.name}

{machine.cpu}, {machine.cpus} CPUs; {", ".join(f"L{level} {bytes_text(size)}" for level, size in machine.caches.items())}. Measured {machine.day} with rapt at commit
{machine.commit}, {machine.compiler}, {machine.seeds} seeds.

| threads | peak, fp32 multiply-adds | reads of memory | ridge |
|---|---|---|---|
{about}

![{machine.name}: roofline]({machine.name}-roofline.svg)

![{machine.name}: time by S]({machine.name}-time.svg)

![{machine.name}: share of the roof by S]({machine.name}-roof.svg)

What these data say:

{found}

{results_table(machine)}

{counted(machine)}

"""


def files(results=RESULTS):
    """{path below the repository's root: text}."""
    machines = machines_of(results)
    made = {}
    for machine in machines:
        made[f"{machine.name}-roofline.svg"] = roofline_figure(machine)
        made[f"{machine.name}-time.svg"] = by_length(
            machine, lambda m, threads, key: m.time(threads, key).mean, f"{machine.name}: milliseconds by sequence length",
            f"fp32, {HEADS} heads, full", "", log=True)
        made[f"{machine.name}-roof.svg"] = by_length(
            machine, lambda m, threads, key: 100 * m.of_roof(threads, key), f"{machine.name}: share of the roof by sequence length",
            "of the smaller of peak and intensity times memory's bandwidth; full", " %", line=100)
    text = TEXT.read_text(encoding="utf-8").format(
        heads=HEADS, lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}", widths=" and ".join(map(str, HEAD_DIMS)),
        matrix_table=matrix_table(machines), intensity_table=intensity_table(),
        simulated=simulated(results), machines="".join(map(section, machines)) or NOTHING)
    return {f"{FOLDER}/{name}": content for name, content in {**made, "README.md": text}.items()}
