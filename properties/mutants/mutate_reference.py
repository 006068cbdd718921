#!/usr/bin/env python3
"""Plants one small mistake at a time in a reference and asks its tests whether they see it.

  properties/mutants/mutate_reference.py STEM... [--count N] [--seed S] [--cxx COMMAND]

STEM is a header of reference/ or reference/base/; TESTS below names the test files that must notice. A mutant that does
not compile does not count. The headers are copied into a scratch folder: the checkout stays as it is. Exits with 1 if
fewer than 95 % of the mutants were killed; survivors are listed as FILE:LINE, before and after.
"""

import argparse
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

TESTS = {
    "causal_conv1d": ["causal_conv1d"],
    "mamba2": ["recurrence", "mamba2"],
    "gated_delta_rule": ["recurrence", "gated_delta_rule"],
    "base/recurrence": ["recurrence", "mamba2"],
    "base/slots": ["recurrence", "causal_conv1d"],
    "base/functions": ["recurrence", "mamba2", "layers"],
    "base/storage": ["yardstick"],
    "base/yardstick": ["yardstick"],
    "base/tree": ["causal_conv1d"],
    "base/fp8": ["mla_attention"],
    "softmax_attention": ["softmax_attention", "mla_attention"],
    "mla_attention": ["mla_attention"],
    "split_schedule": ["mla_attention"],
    "latent_token": ["mla_attention"],
    "rms_norm": ["layers"],
    "rope": ["layers"],
    "swiglu": ["layers"],
    "moe_router": ["layers"],
    "speculative_commit": ["speculative_commit"],
    "static_kv_update": ["static_kv_update"],
    "mamba_mixer": ["hybrid_layers"],
    "gated_delta_net": ["hybrid_layers"],
}

# What is looked for, and what may stand there instead.
SWAPS = [
    (r" \+ ", [" - "]), (r" - ", [" + "]), (r" \* ", [" + "]), (r" / ", [" * "]),
    (r" < ", [" <= ", " > "]), (r" <= ", [" < "]), (r" > ", [" >= "]), (r" >= ", [" > "]),
    (r" == ", [" != "]), (r" != ", [" == "]), (r" && ", [" || "]), (r" \|\| ", [" && "]),
    (r"\b0\b", ["1"]), (r"\b1\b", ["0", "2"]), (r" \+= ", [" = ", " -= "]), (r"(?<=[(,= ])-(?=\w)", [""]),
    (r"\bmin\b", ["max"]), (r"\bmax\b", ["min"]), (r"\btrue\b", ["false"]), (r"\bfalse\b", ["true"]),
]
# Contracts' sentences, declarations and includes are not behaviour of the equations.
SKIP = re.compile(r"^\s*(//|#|require\(|static_assert|template|using|namespace|struct|\")|operator|static_cast<std::int32_t>")


def mutants_of(text):
    """Every (line number, before, after) of a header."""
    found = []
    for number, line in enumerate(text.split("\n")):
        code = line.split("//")[0]
        if SKIP.search(line) or not code.strip():
            continue
        for pattern, others in SWAPS:
            for match in re.finditer(pattern, code):
                if "<" in match.group() and "template" in code or re.search(r"Shape<|View<|Array<", code) and match.group() in "01":
                    continue
                for other in others:
                    found.append((number, line, code[:match.start()] + other + code[match.end():] + line[len(code):]))
    return found


def survives(folder, stem, cxx):
    """None: it does not compile; else whether every test still passes."""
    for test in TESTS[stem]:
        program = folder / test
        source = folder / "properties" / f"{test}_test.cpp"
        build = subprocess.run(cxx.split() + [f"-I{folder}", str(source), "-o", str(program), "-lgtest_main", "-lgtest",
                               "-lrapidcheck", "-lpthread"], capture_output=True)
        if build.returncode:
            return None
        try:
            if subprocess.run([program], capture_output=True, timeout=60).returncode:
                return False
        except subprocess.TimeoutExpired:
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*", default=sorted(TESTS), metavar="STEM")
    parser.add_argument("--count", type=int, default=10, help="mutants per header")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cxx", default="g++ -std=c++20 -O1 -w -ffp-contract=off -isystem /usr/include/eigen3 "
                        "-isystem /usr/local/cuda/include/cccl")
    options = parser.parse_args()
    killed, survivors = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for part in ("reference", "properties"):
            shutil.copytree(ROOT / part, folder / part)
        for stem in options.stems or sorted(TESTS):
            header = folder / "reference" / f"{stem}.hpp"
            original = header.read_text()
            candidates = mutants_of(original)
            random.Random(f"{options.seed} {stem}").shuffle(candidates)
            counted = 0
            for number, before, after in candidates:
                if counted == options.count:
                    break
                lines = original.split("\n")
                lines[number] = after
                header.write_text("\n".join(lines))
                alive = survives(folder, stem, options.cxx)
                if alive is None:
                    continue
                counted += 1
                killed += not alive
                if alive:
                    survivors.append(f"reference/{stem}.hpp:{number + 1}\n  - {before.strip()}\n  + {after.strip()}")
                    print("survived", survivors[-1], flush=True)
            header.write_text(original)
            print(f"{stem}: {counted} mutants tried", flush=True)
    total = killed + len(survivors)
    print(f"{killed} of {total} killed")
    return 0 if total and killed >= 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main())
