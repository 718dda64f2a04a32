"""Writes the C++ source with what `rapt info --code` prints of the kernels' object files: bytes of code, how loops use registers and the
stack, and the compiler's flags.

usage: kernel_code.py --output FILE [--objdump PROGRAM] [--cuobjdump PROGRAM] [--compile-commands FILE] [--objects TARGET OBJECT...]...

A target is a library of objects, whose name ends with the instruction set. What a program is missing for is said to be not read.
"""

import argparse
import json
import re
import shlex
import struct
import subprocess
import tempfile
from pathlib import Path

# Adds packed products to a register, of x86 and of aarch64; SSE2 adds what it has multiplied before.
ACCUMULATE = re.compile(r"vfn?m(add|sub)231p[sd]$|vdpbf16ps$|tdp\w+$|fml[as]$|bfmmla$|addps$")
VECTOR = re.compile(r"%[xyz]mm(\d+)|\b[vq](\d+)\b|%tmm\d")
JUMP = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)$")
TARGET = re.compile(r"\b([0-9a-f]+) <")


def code_bytes(path):
    """Of all sections of an ELF file that hold instructions."""
    data = Path(path).read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ValueError(f"{path}: not a 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    executable = 4
    total = 0
    for i in range(count):
        flags, = struct.unpack_from("<Q", data, offset + i * size + 8)
        length, = struct.unpack_from("<Q", data, offset + i * size + 32)
        total += length if flags & executable else 0
    return total


def functions(listing):
    """Of objdump's listing: for each function its [(address, mnemonic, operands)]."""
    found = []
    for line in listing.splitlines():
        if line.endswith(">:"):
            found.append([])
        elif found and line.startswith(" ") and ":\t" in line:
            address, _, text = line.partition(":\t")
            mnemonic, _, operands = text.partition("\t" if "\t" in text else " ")
            found[-1].append((int(address, 16), mnemonic, operands.strip()))
    return found


def innermost_loops(code):
    """[(first, last)] indices of instructions: what a jump goes back over, without another such within."""
    at = {address: i for i, (address, _, _) in enumerate(code)}
    ends = {}
    for i, (address, mnemonic, operands) in enumerate(code):
        target = JUMP.match(mnemonic) and TARGET.search(operands)
        if target and int(target[1], 16) <= address and int(target[1], 16) in at:
            ends[at[int(target[1], 16)]] = i  # of all jumps to one place the last
    loops = sorted(ends.items(), key=lambda loop: (loop[1], -loop[0]))
    innermost, latest = [], -1  # the latest beginning of a loop that has ended
    for first, last in loops:
        if first > latest:
            innermost.append((first, last))
            latest = first
    return innermost


def stack_of(code):
    """A pattern of the operands that lie on the stack. A frame pointer is one only where a function makes it so."""
    registers = [r"\(%rsp", r"\[sp\b"]
    for _, mnemonic, operands in code:
        if mnemonic == "mov" and operands.replace(" ", "") in ("%rsp,%rbp", "x29,sp"):
            registers.append(r"\(%rbp" if "rbp" in operands else r"\[x29\b")
            break
    return re.compile("|".join(registers))


def target_of(operands):
    """The vector register that an instruction writes, if it writes one: of x86 the last operand, of aarch64 the first."""
    operands = operands.partition("#")[0].rstrip()
    place = operands.rpartition(",")[2] if "%" in operands else operands.partition(",")[0]
    return (VECTOR.match(place.strip()) or [""])[0]


def accumulators(body):
    """Registers that a loop adds products to and does nothing else to: so they are carried from one pass to the next."""
    added, written, count = set(), set(), 0
    for _, mnemonic, operands in body:
        is_sum = bool(ACCUMULATE.match(mnemonic))
        count += is_sum
        (added if is_sum else written).add(target_of(operands))
    return added - written - {""}, count


def read_listing(listing):
    """{"loops", "loops_on_stack", "largest"}: innermost loops that add products to registers; those of them in which a vector instruction
    reads or writes the stack, as spills do; and the one with most such registers: its register tile."""
    loops, on_stack, largest = 0, 0, None
    for code in functions(listing):
        stack = stack_of(code)
        for first, last in innermost_loops(code):
            body = code[first:last + 1]
            tile, sums = accumulators(body)
            if not tile:
                continue
            registers = {match[1] or match[2] for _, _, operands in body for match in VECTOR.finditer(operands)} - {None}
            loop = {"accumulators": len(tile), "sums": sums, "registers": len(registers),
                    "on_stack": sum(1 for _, _, operands in body if stack.search(operands) and VECTOR.search(operands))}
            loops += 1
            on_stack += loop["on_stack"] > 0
            if largest is None or (loop["accumulators"], sums) > (largest["accumulators"], largest["sums"]):
                largest = loop
    return {"loops": loops, "loops_on_stack": on_stack, "largest": largest}


def read_object(objdump, path):
    listing = subprocess.run([objdump, "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True).stdout
    return {"code_bytes": code_bytes(path), **read_listing(listing)}


def read_resources(text):
    """[{"architecture", "kernels", "registers", "stack_bytes", "shared_bytes"}] of `cuobjdump --dump-resource-usage`: for each architecture
    the largest of all its kernels."""
    largest = {}
    architecture = ""
    for line in text.splitlines():
        if line.startswith("arch = "):
            architecture = line[len("arch = "):].strip()
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line)
        if usage:
            registers, stack, shared = map(int, usage.groups())
            now = largest.setdefault(architecture, {"kernels": 0, "registers": 0, "stack_bytes": 0, "shared_bytes": 0})
            now["kernels"] += 1
            for key, value in (("registers", registers), ("stack_bytes", stack), ("shared_bytes", shared)):
                now[key] = max(now[key], value)
    return [{"architecture": architecture, **usage} for architecture, usage in largest.items()]


def read_gpu_object(cuobjdump, path):
    text = subprocess.run([cuobjdump, "--dump-resource-usage", path], check=True, capture_output=True, text=True).stdout
    usage = read_resources(text)
    if not usage:
        return {"not_read": "PTX only, which the driver compiles"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "--extract-elf", "all", Path(path).resolve()], check=True, capture_output=True, cwd=folder)
        for one in usage:
            one["code_bytes"] = sum(map(code_bytes, Path(folder).glob(f"*.{one['architecture']}.cubin")))
    return {"gpu": usage}


def read(arguments, path):
    gpu = ".cu." in Path(path).name
    tool = arguments.cuobjdump if gpu else arguments.objdump
    if not tool:
        return {"not_read": f"no {'cuobjdump' if gpu else 'objdump'} when this rapt was built"}
    try:
        return read_gpu_object(tool, path) if gpu else read_object(tool, path)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return {"not_read": str(error)}


def flags_of(commands, target):
    """The flags that make code, of a target's first source: no paths, warnings or definitions of others."""
    for command in commands:
        if f"{target}.dir/" in command.get("output", command["command"]):
            kept = re.compile(r"-(O|m|f(?!diagnostics|file-prefix|macro-prefix|orward)|std=|DRAPT_|DNDEBUG|-generate-code|gencode)")
            return " ".join(dict.fromkeys(word for word in shlex.split(command["command"]) if kept.match(word)))
    return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    for name in ("objdump", "cuobjdump", "compile-commands"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--objects", nargs="+", action="append", default=[])
    arguments = parser.parse_args()
    listed = Path(arguments.compile_commands)
    commands = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else []
    found = []
    for target, *objects in arguments.objects:
        isa, flags = target.rpartition("_")[2], flags_of(commands, target)
        for path in objects:
            source = re.search(r"src/\w+/kernels/\w+\.(cpp|cu)", path)[0]
            if not source.endswith("/table.cpp"):
                found.append({"isa": isa, "source": source, "flags": flags, **read(arguments, path)})
    Path(arguments.output).write_text(f"""// Made by tools/kernel_code.py.
#include "tools/info.hpp"

const char* const rapt::tools::kKernelCode = R"json({json.dumps(found)})json";
""", encoding="utf-8")


if __name__ == "__main__":
    main()
