"""What the data of a machine say, in sentences that are computed."""

import statistics

from .data import geomean
from .three_steps_data import bytes_text, label


def on(threads):
    return "one thread" if threads == 1 else f"{threads} threads"


def percent(share):
    return f"{100 * share:.0f} %"


def some(keys, all_of):
    """A list of a few problems, the number of many."""
    return "; ".join(map(label, keys)) if len(keys) <= 4 else f"{len(keys)} of {len(all_of)} problems"


def speed(machine):
    """Of the fused call over three steps, for each number of threads."""
    for threads in machine.runs:
        ratios = {key: machine.speedup(threads, key) for key in machine.keys(threads, "fused")}
        low, high = min(ratios, key=lambda key: ratios[key].mean), max(ratios, key=lambda key: ratios[key].mean)
        yield (f"**Speed, {on(threads)}**: the three steps take {geomean(ratio.mean for ratio in ratios.values()):.2f} times as long as the fused "
               f"call (geometric mean), from {ratios[low].mean:.2f} ({label(low)}) to {ratios[high].mean:.2f} ({label(high)}).")
        slower = [key for key, ratio in ratios.items() if ratio.mean + (ratio.half or 0) < 1]
        open_ = [key for key, ratio in ratios.items() if key not in slower and ratio.mean - (ratio.half or 0) <= 1]
        if slower:
            yield f"**Fusing does not pay, {on(threads)}**: the three steps are faster in {some(slower, ratios)}."
        if open_:
            yield f"**Not decided, {on(threads)}**: the ratio's confidence interval has 1 in it in {some(open_, ratios)}."


def ridge(machine):
    """How much of the three steps' time memory accounts for."""
    for threads in machine.runs:
        memory, peak = machine.memory(threads), max(rate for _, rate in machine.units(threads))
        if not memory:
            continue
        dots = {key: machine.runs[threads][key] for key in machine.keys(threads, "three steps") if not key[2]}
        left = [key for key, dot in dots.items() if dot["intensity"] < peak / memory]
        moving = [dot["gflops"] / dot["intensity"] / memory for dot in dots.values()]
        products = [machine.of_peak(threads, (*key[:3], step)) for key in dots for step in ("scores", "values")
                    if (*key[:3], step) in machine.runs[threads]]
        fused = [machine.of_peak(threads, (*key[:3], "fused")) for key in dots]
        rest = "" if max(moving) > 0.5 or not products else (
            f" Most of what fusing gains here is elsewhere: in the softmax's pass over the matrix, and in products that reach {percent(statistics.median(products))} "
            f"of the peak where the fused call, softmax included, reaches {percent(statistics.median(fused))} (medians).")
        yield (f"**The ridge, {on(threads)}**: it is at {peak / memory:.1f} FLOPs per byte, and {len(left)} of {len(dots)} full problems in three steps are left "
               f"of it. Moving the formula's bytes at memory's rate would take {percent(min(moving))} to {percent(max(moving))} of their time.{rest}")


def where_the_matrix_lies(machine):
    last = max(machine.caches, default=0)  # the OS may say nothing of caches
    size = machine.caches.get(last, 0)
    for threads in machine.runs:
        fits, not_fits = [], []
        for s, d, causal, step in machine.keys(threads, "three steps"):
            if not causal:
                (fits if 32 * s**2 < size else not_fits).append((s, d, causal, step))  # float32, 8 heads
        if fits and not_fits:
            shares = [statistics.median(machine.of_peak(threads, key) for key in keys) for keys in (fits, not_fits)]
            not_memory = " So it is not memory that bounds the shorter ones." if shares[1] > shares[0] else ""
            yield (f"**Where the matrix lies, {on(threads)}**: while the matrix of all heads fits the L{last} of {bytes_text(size)} (S up to "
                   f"{max(key[0] for key in fits)}), the three steps reach {percent(shares[0])} of the peak (median over full problems); "
                   f"beyond, {percent(shares[1])}.{not_memory}")
        memory = machine.memory(threads)
        if memory:
            keys = [key for key in machine.keys(threads, "three steps") if not key[2]]
            above = [key for key in keys if machine.runs[threads][key]["gflops"] > machine.runs[threads][key]["intensity"] * memory]
            names = f": {some(above, keys)}" if len(above) < len(keys) else ""
            why = f"{names}. There a cache has kept the matrix from one step to the next, at least in part" if above else ""
            yield (f"**Above memory's slope, {on(threads)}**: {len(above)} of {len(keys)} full problems in three steps are faster than memory could give "
                   f"their bytes{why}.")


def softmax(machine):
    for threads in machine.runs:
        shares = {}
        for key in machine.keys(threads, "three steps"):
            if not key[2]:
                shares[key] = machine.time(threads, (*key[:3], "softmax")).mean / machine.time(threads, key).mean
        low, high = min(shares, key=shares.get), max(shares, key=shares.get)
        flops = [5 / (4 * d + 5) for d in sorted({key[1] for key in shares}, reverse=True)]
        yield (f"**The softmax, {on(threads)}**: {' to '.join(f'{100 * share:.1f}' for share in flops)} % of the three steps' FLOPs, and {percent(shares[low])} "
               f"({label(low)}) to {percent(shares[high])} ({label(high)}) of their time.")


def length(machine):
    for threads in machine.runs:
        texts = []
        for d in sorted({key[1] for key in machine.keys(threads, "fused")}):
            ends = [machine.lengths(threads, d)[i] for i in (0, -1)]
            shares = [machine.of_peak(threads, (s, d, False, "fused")) for s in ends]
            texts.append(f"{percent(shares[0])} of the peak at S = {ends[0]} and {percent(shares[1])} at S = {ends[1]} with d = {d}")
        yield f"**Length, {on(threads)}**: the fused call reaches {'; '.join(texts)}."


def causal(machine):
    for threads in machine.runs:
        widths, texts = sorted({key[1] for key in machine.keys(threads, "fused")}), []
        for step in ("fused", "three steps"):
            shares = []
            for d in widths:
                s = machine.lengths(threads, d)[-1]
                share = machine.time(threads, (s, d, True, step)).mean / machine.time(threads, (s, d, False, step)).mean
                shares.append(f"{percent(share)} (S = {s}, d = {d})")
            texts.append(f"{'the fused call takes' if step == 'fused' else 'the three steps take'} {' and '.join(shares)}")
        yield f"**Causal, {on(threads)}**: with half of the pairs, {texts[0]} of the full problem's time, {texts[1]}."


def threads_gain(machine):
    if 1 not in machine.runs or machine.max_threads == 1:
        return
    texts, max_gain = [], 0
    for step in ("fused", "three steps"):
        gains = {key: machine.time(1, key).mean / machine.time(machine.max_threads, key).mean
                 for key in machine.keys(machine.max_threads, step) if key in machine.runs[1]}
        low, high = min(gains, key=gains.get), max(gains, key=gains.get)
        max_gain = max(max_gain, gains[high])
        texts.append(f"the {'fused call' if step == 'fused' else 'three steps'} {gains[low]:.1f} ({label(low)}) to {gains[high]:.1f} ({label(high)})")
    peaks = [max(rate for _, rate in machine.units(threads)) for threads in (1, machine.max_threads)]
    yield (f"**From one thread to {machine.max_threads}**: {texts[0]} times as fast, {texts[1]} times. The peak of arithmetic grows {peaks[1] / peaks[0]:.1f} times"
           + (f", memory's bandwidth {machine.memory(machine.max_threads) / machine.memory(1):.1f} times." if machine.memory(machine.max_threads) and machine.memory(1)
              else ".")
           + (" (More than the peak: both runs scatter, as below, and more cores have more cache.)" if max_gain > 1.05 * peaks[1] / peaks[0] else ""))


def scatter(machine):
    for threads in machine.runs:
        widths = {}
        for step in ("fused", "three steps"):
            for key in machine.keys(threads, step):
                time = machine.time(threads, key)
                if time.half is not None:
                    widths[key] = time.half / time.mean
        if widths:
            worst = max(widths, key=widths.get)
            within = statistics.median(dot["spread"] for dot in machine.runs[threads].values())
            yield (f"**Scatter, {on(threads)}**: half an interval is {100 * statistics.median(widths.values()):.1f} % of the mean (median), at most "
                   f"{percent(widths[worst])} ({label(worst)}, {worst[3]}). Within all samples of a row, the quartiles are {100 * within:.1f} % of the "
                   f"median apart (median).")


def of(machine):
    """Sentences, for people."""
    return [line for part in (speed, ridge, where_the_matrix_lies, softmax, length, causal, threads_gain, scatter) for line in part(machine)]
