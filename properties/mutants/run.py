#!/usr/bin/env python3
"""How much of what can be broken does the search find? Plants every mutant of mutate.py and lets `explore` look for it.

run.py --build build/cpu --out DIR [SOURCE…] [--seeds 3] [--traces 5000] [--every 1] [--time 600]

The mutated sources are compiled as the build folder compiles them and linked with its other objects, so that one
program holds all mutants. Each is searched for with seeds 1 … N: how many traces until it is found (median of the
seeds), as which kind of finding, and how many lines are left when the trace of seed 1 is shrunk. A mutant that kills
the program or never ends is found too; how soon is then known by halving. Writes mutants.json and mutants.md.
"""
import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["cache_sim/" + name for name in ("pools.cpp", "radix_tree.cpp", "sglang_policy.cpp",
                                            "sglang_extra_buffer.cpp", "sglang_legacy.cpp", "scheduler.cpp")]
LONGEST_S = 20  # an undamaged search of 5,000 traces takes a few seconds: what takes longer hangs


def build(options):
    """The program with all mutants, and their list."""
    mutated = options.out / "mutated"
    subprocess.run([sys.executable, str(ROOT / "properties/mutants/mutate.py"), *options.sources,
                    "--root", str(ROOT), "--out", str(mutated)], check=True)
    commands = {c["file"]: c for c in json.loads((options.build / "compile_commands.json").read_text())}
    parts = [options.build / "CMakeFiles" / f"lockstep{part}.dir" for part in ("", "_base", "_reference", "_sim")]
    objects = {str(path) for part in parts for path in part.rglob("*.o")}
    for name in options.sources:
        command = commands[str(ROOT / name)]
        words = shlex.split(command["command"])
        own = str((options.out / name.replace("/", "_")).with_suffix(".o").resolve())
        objects.discard(str(pathlib.Path(command["directory"]) / words[words.index("-o") + 1])
                        if not words[words.index("-o") + 1].startswith("/") else words[words.index("-o") + 1])
        words[words.index("-o") + 1] = own
        words[words.index("-c") + 1] = str((mutated / name).resolve())
        print("compiling", name, flush=True)
        subprocess.run([*words, f"-I{mutated.resolve()}", "-Wno-error", "-w"], check=True, cwd=command["directory"])
        objects.add(own)
    program = options.out / "lockstep_mutants"
    libraries = ["-lfmt", "-lzstd", "-lpthread"]
    subprocess.run(["c++", "-o", str(program), *sorted(objects), *libraries], check=True)
    return program.resolve(), json.loads((mutated / "mutants.json").read_text())


class Search:
    def __init__(self, program, out, traces):
        self.program, self.out, self.traces = program, out, traces

    def explore(self, number, seed, traces, shrinks):
        """What the search said, or how the program ended: `died`, `never ended`."""
        result = self.out / "explore.json"
        result.unlink(missing_ok=True)
        words = [str(self.program), "explore", "--seed", str(seed), "--traces", str(traces), "--json", str(result),
                 "--out", str(self.out / "findings" / str(number))]
        try:
            done = subprocess.run(words + ([] if shrinks else ["--no-shrink"]), capture_output=True, text=True,
                                  timeout=LONGEST_S, env={**os.environ, "LOCKSTEP_MUTANT": str(number)})
        except subprocess.TimeoutExpired:
            return "never ended"
        if done.returncode == 2:  # the generator's own operations became bad input
            return "bad input"
        if not result.exists():
            return "died"
        return json.loads(result.read_text())

    def first_trace_that_ends_so(self, number, seed, ending):
        low, high = 0, self.traces
        step = 1
        while step < high:  # most show at once
            if self.explore(number, seed, step, False) == ending:
                high = step
                break
            low, step = step, step * 4
        while high - low > 1:
            middle = (low + high) // 2
            if self.explore(number, seed, middle, False) == ending:
                high = middle
            else:
                low = middle
        return high

    def tests_to_detect(self, number, seed, shrinks):
        """(traces, kind, shrunk lines), or None where nothing is found."""
        said = self.explore(number, seed, self.traces, shrinks)
        if isinstance(said, str) and shrinks:  # it may be the shrinking that ends so
            said = self.explore(number, seed, self.traces, False)
        if said == "never ended":
            return self.traces, said, None  # halving would take minutes
        if isinstance(said, str):
            return self.first_trace_that_ends_so(number, seed, said), said, None
        if said["verdict"] == "pass":
            return None
        search = said["search"]
        return search["tests_to_detect"], said["findings"][0]["kind"], search["shrunk_lines"] if shrinks else None


def judged(search, mutant, seeds):
    found = [search.tests_to_detect(mutant["number"], seed, seed == 1) for seed in range(1, seeds + 1)]
    counts = [f[0] if f else float("inf") for f in found]
    median = statistics.median_low(counts)
    first = next((f for f in found if f), None)
    return {**mutant, "found": first is not None, "seeds_that_found": sum(f is not None for f in found),
            "tests_to_detect": None if median == float("inf") else median,
            "kind_of_finding": first and first[1], "shrunk_lines": found[0] and found[0][2]}


def table(results, options, skipped):
    lines = ["# Planted defects in bulk", "",
             f"`properties/mutants/run.py --seeds {options.seeds} --traces {options.traces}` over "
             f"{len(results)} mutants ({skipped} not run).", "",
             "| kind | mutants | found | share | median traces | found by the first 10 | median lines | longest |",
             "|---|---|---|---|---|---|---|---|"]
    for kind in ("deletion", "comparison"):
        own = [r for r in results if r["kind"] == kind]
        found = [r for r in own if r["found"]]
        tests = [r["tests_to_detect"] for r in found if r["tests_to_detect"] is not None]
        shrunk = [r["shrunk_lines"] for r in found if r["shrunk_lines"] is not None]
        if own:
            lines.append(f"| {kind} | {len(own)} | {len(found)} | {100 * len(found) / len(own):.1f} % "
                         f"| {statistics.median(tests) if tests else '-'} | {sum(t <= 10 for t in tests)} "
                         f"| {statistics.median(shrunk) if shrunk else '-'} | {max(shrunk, default='-')} |")
    lines += ["", "## Not found", "", "| number | place | kind | text |", "|---|---|---|---|"]
    lines += [f"| {r['number']} | {r['file']}:{r['line']} | {r['kind']} | `{r['text'].replace('|', chr(92) + '|')}` |"
              for r in results if not r["found"]]
    return "\n".join(lines) + "\n"


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sources", nargs="*", default=SOURCES)
    words.add_argument("--build", type=pathlib.Path, default=ROOT / "build/cpu")
    words.add_argument("--out", type=pathlib.Path, required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--traces", type=int, default=5000)
    words.add_argument("--every", type=int, default=1, help="one mutant of so many")
    words.add_argument("--time", type=float, default=float("inf"), help="seconds after which no other mutant begins")
    words.add_argument("--only", type=int, nargs="*", help="these numbers alone")
    words.add_argument("--built", action="store_true", help="the program of the last call")
    options = words.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.built:
        program = (options.out / "lockstep_mutants").resolve()
        mutants = json.loads((options.out / "mutated/mutants.json").read_text())
    else:
        program, mutants = build(options)
    chosen = [m for m in mutants if m["number"] in options.only] if options.only else mutants[::options.every]
    search, results, start = Search(program, options.out, options.traces), [], time.monotonic()
    for mutant in chosen:
        if time.monotonic() - start > options.time:
            break
        results.append(judged(search, mutant, options.seeds))
        last = results[-1]
        print(f"{last['number']} {last['file']}:{last['line']} {last['kind']}: "
              f"{last['tests_to_detect']} {last['kind_of_finding']} {last['shrunk_lines']}", flush=True)
    (options.out / "mutants_found.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "mutants.md").write_text(table(results, options, len(mutants) - len(results)))


main()
