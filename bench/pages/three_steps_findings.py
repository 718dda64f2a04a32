"""What the data of a machine say, in sentences that are computed."""

import statistics

from .data import geomean
from .three_steps_data import bytes_text, label


def on(threads):
    return "one thread" if threads == 1 else f"{threads} threads"


def percent(share):
    return f"{100 * share:.0f} %"


def speed(machine):
    """Of the fused call over three steps, for each number of threads."""
    for threads in machine.runs:
        ratios = {key: machine.speedup(threads, key) for key in machine.keys(threads, "fused")}
        low, high = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
        yield (f"**Speed, {on(threads)}**: the three steps take {geomean(ratios.values()):.2f} times as long as the fused call (geometric mean), "
               f"from {ratios[low]:.2f} ({label(low)}) to {ratios[high]:.2f} ({label(high)}).")
        slower = []
        for key in ratios:
            fused, three = (machine.time(threads, (*key[:3], step)) for step in ("fused", "three steps"))
            if fused.mean + (fused.half or 0) >= three.mean - (three.half or 0):
                slower.append(label(key))
        if slower:
            yield f"**Not shown to be faster, {on(threads)}**: the confidence intervals meet, or fused is slower, in {'; '.join(slower)}."


def where_the_matrix_lies(machine):
    last = max(machine.caches)
    size = machine.caches[last]
    for threads in machine.runs:
        fits, not_fits = [], []
        for key in machine.keys(threads, "three steps"):
            if not key[2]:
                (fits if 32 * key[0] ** 2 <= size else not_fits).append(key)
        if fits and not_fits:
            shares = [statistics.median(machine.of_peak(threads, key) for key in keys) for keys in (fits, not_fits)]
            yield (f"**Where the matrix lies, {on(threads)}**: while the matrix of all heads fits the L{last} of {bytes_text(size)} (S up to "
                   f"{max(key[0] for key in fits)}), the three steps reach {percent(shares[0])} of the peak (median over full problems); "
                   f"beyond, {percent(shares[1])}.")
        memory = machine.memory(threads)
        if memory:
            keys = [key for key in machine.keys(threads, "three steps") if not key[2]]
            above = [key for key in keys if machine.runs[threads][key]["gflops"] > machine.runs[threads][key]["intensity"] * memory]
            names = f": {'; '.join(label(key) for key in above)}" if 0 < len(above) < len(keys) else ""
            yield (f"**Above memory's slope, {on(threads)}**: {len(above)} of {len(keys)} full problems in three steps are faster than memory could give "
                   f"their bytes{names}. There a cache has kept the matrix from one step to the next, at least in part.")


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
        texts = []
        for step in ("fused", "three steps"):
            shares = []
            for d in sorted({key[1] for key in machine.keys(threads, step)}):
                s = machine.lengths(threads, d)[-1]
                shares.append(machine.time(threads, (s, d, True, step)).mean / machine.time(threads, (s, d, False, step)).mean)
            texts.append(f"{' and '.join(map(percent, shares))} of it {'fused' if step == 'fused' else 'in three steps'}")
        widths = " and ".join(str(d) for d in sorted({key[1] for key in machine.keys(threads, "fused")}))
        yield f"**Causal, {on(threads)}**: at the largest S, and d = {widths}, half the pairs take {texts[0]}, and {texts[1]}, compared with all pairs."


def threads_gain(machine):
    if 1 not in machine.runs or machine.most == 1:
        return
    texts = []
    for step in ("fused", "three steps"):
        gains = {key: machine.time(1, key).mean / machine.time(machine.most, key).mean
                 for key in machine.keys(machine.most, step) if key in machine.runs[1]}
        low, high = min(gains, key=gains.get), max(gains, key=gains.get)
        texts.append(f"the {'fused call' if step == 'fused' else 'three steps'} {gains[low]:.1f} ({label(low)}) to {gains[high]:.1f} ({label(high)})")
    peaks = [max(rate for _, rate in machine.units(threads)) for threads in (1, machine.most)]
    yield (f"**From one thread to {machine.most}**: {texts[0]} times as fast, {texts[1]} times. The peak of arithmetic grows {peaks[1] / peaks[0]:.1f} times"
           + (f", memory's bandwidth {machine.memory(machine.most) / machine.memory(1):.1f} times." if machine.memory(machine.most) and machine.memory(1)
              else "."))


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
    return [line for part in (speed, where_the_matrix_lies, softmax, length, causal, threads_gain, scatter) for line in part(machine)]
