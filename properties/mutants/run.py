#!/usr/bin/env python3
"""The share of planted mistakes that the search finds. Plants every mutant of mutate.py and lets `explore` look for it.

run.py --build build/cpu --out DIR [SOURCE…] [--seeds 20] [--first 3] [--traces 5000] [--time 600]
run.py --build build/cpu --out DIR [SOURCE…] --sweep    for the section `mutants` of `lockstep sweep`
run.py --build build/cpu --out DIR [SOURCE…] --tests FILTER

The mutated sources are compiled as the build folder compiles them and linked with its other objects, so that one
program holds all mutants. Each is searched for with seeds 1 … --first; where one of them finds it, with the others
too: in how many traces it is found (median of the seeds), as which kind of finding, and how many lines are left when
the first finding is shrunk. A mutant that kills the program or never ends is found as well, with its trace's number;
one that never ends keeps to the first seeds, one that equivalent.txt names and that is not found to the first.

Results are added to DIR/results.jsonl one by one, so that a run that was ended goes on where it was. A mutant that was
not found and has a reason in equivalent.txt is listed as equivalent: nothing that anybody can observe depends on it.
--publish FILE writes the table (Markdown) and, beside it, the data (JSON).

A source that judges (cache_sim/check, cache_sim/logs) has no search that could find its mistakes. With --tests its
mutants are linked into the program and into its tests, and a test of FILTER (as of GoogleTest) has to fail.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKS = ("radix_auditor", "radix_recount", "radix_uses", "marconi_auditor", "edge_llm_auditor", "vllm_auditor",
          "align_worker", "label_blocks")
COMPARED_WITH_VALUES = ("block_hash", "runtime_config")  # by tests of their own; a search reads neither
SOURCES = ["cache_sim/policies/pools.cpp", "cache_sim/policies/row_policy.cpp",
           *(str(path.relative_to(ROOT)) for family in ("sglang", "vllm", "marconi", "edge_llm")
             for path in sorted((ROOT / "cache_sim/policies" / family).glob("*.cpp"))
             if path.stem not in CHECKS + COMPARED_WITH_VALUES),
           "cache_sim/server/scheduler.cpp", "cache_sim/server/sglang/sglang_scheduler.cpp",
           "cache_sim/server/vllm/vllm_scheduler.cpp"]
# Policies that run a source's lines: the policy of the seeds 1, 2, …, in turn. The others are run by most policies,
# one of which each trace draws.
SEARCHED = {"cache_sim/policies/vllm/": ("vllm-align", "vllm-all", "vllm-align-retention-0"),
            "cache_sim/server/vllm/vllm_scheduler.cpp": ("vllm-align",),
            "cache_sim/policies/marconi/": ("marconi", "marconi-artifact"),
            "cache_sim/policies/edge_llm/": ("edge-llm", "edge-llm-v0"),
            "cache_sim/policies/row_policy.cpp": ("edge-llm", "edge-llm-v0", "static-kv")}
LONGEST_S = 300  # a search of 5,000 traces takes a second or two
INTERNAL_ERROR = 3  # the program's word for an exception that it did not expect, such as an allocation without end
TRACE_LONGEST = "15s"  # a trace takes a fraction of a millisecond; what is longer never ends, on a busy machine too


UNSHRUNK = ("never ends", "dies", "bad input")  # there is no run that could be shortened

# --- The program ------------------------------------------------------------------------------------------------------

def build(options):
    """Compiles the program with all mutants and their list."""
    mutated = options.out / "mutated"
    subprocess.run([sys.executable, str(HERE / "mutate.py"), *options.sources,
                    "--root", str(ROOT), "--out", str(mutated)], check=True)
    commands = {c["file"]: c for c in json.loads((options.build / "compile_commands.json").read_text())}
    if bundled := [name for name in options.sources if str(ROOT / name) not in commands]:
        sys.exit(f"{options.build} does not compile {bundled[0]} by itself, as a folder of `cmake --preset cpu` does")
    programs = {"lockstep_mutants": "lockstep", **({"mutants_tests": "lockstep_tests"} if options.tests else {})}
    links = {}
    for name, target in programs.items():
        commands_of = subprocess.run(["ninja", "-C", str(options.build), "-t", "commands", "-s", target],
                                     check=True, capture_output=True, text=True)
        links[name] = shlex.split(commands_of.stdout.strip().split("&&")[1])
    for name in options.sources:
        command = commands[str(ROOT / name)]
        words = shlex.split(command["command"])
        own = str((options.out / name.replace("/", "_")).with_suffix(".o").resolve())
        for link in links.values():
            link[link.index(words[words.index("-o") + 1])] = own
        words[words.index("-o") + 1] = own
        words[words.index("-c") + 1] = str((mutated / name).resolve())
        print("compiling", name, flush=True)
        subprocess.run([*words, f"-I{mutated.resolve()}", "-Wno-error", "-w"], check=True, cwd=command["directory"])
    for name, link in links.items():
        link[link.index("-o") + 1] = str((options.out / name).resolve())
        subprocess.run(link, check=True, cwd=options.build)


# --- The search -------------------------------------------------------------------------------------------------------

Found = collections.namedtuple("Found", "traces kind lines executions trace")


class Search:
    def __init__(self, out, traces):
        self.program, self.out, self.traces = (out / "lockstep_mutants").resolve(), out, traces

    def explore(self, mutant, seed, shrinks):
        """The finding of a search; None for nothing, "too long" where shrinking does not end."""
        number = mutant["number"]
        result, folder = self.out / "explore.json", self.out / "findings" / str(number)
        result.unlink(missing_ok=True)
        for old in folder.glob("*.trace"):
            old.unlink()
        words = [str(self.program), "explore", "--seed", str(seed), "--traces", str(self.traces), "--json", str(result),
                 "--timeout", TRACE_LONGEST, "--out", str(folder)] + ([] if shrinks else ["--no-shrink"])
        words += subjects_of(mutant["file"], seed)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S,
                                  env={**os.environ, "LOCKSTEP_MUTANT": str(number)})
        except subprocess.TimeoutExpired:
            return "too long"
        if not result.exists() and done.returncode == INTERNAL_ERROR:
            return Found(self.traces, "dies", None, None, None)  # it does not say in which trace
        if not result.exists():
            where = re.search(r"trace (\d+) of seed \d+ ([^\n]*)", done.stderr)
            if not where:
                sys.exit(f"mutant {number}, seed {seed}: status {done.returncode}: {done.stderr[-300:]}")
            kind = ("never ends" if "not ended" in where[2] else "dies" if "kills" in where[2] else "bad input")
            return Found(int(where[1]), kind, None, None, None)
        said = json.loads(result.read_text())
        if said["verdict"] == "pass":
            return None
        finding = said["findings"][0]
        text = pathlib.Path(finding["trace"]).read_text()
        kept = [line for line in text.splitlines() if line and not line.startswith("#")] if shrinks else None
        return Found(finding["tests_to_detect"], finding["kind"], finding["shrunk_lines"] if shrinks else None,
                     finding["shrink_executions"] if shrinks else None, kept)

    def shrunk(self, mutant, seed):
        """The finding as it was, where a shrunk trace of a mutant hangs or dies."""
        found = self.explore(mutant, seed, True)
        if isinstance(found, Found) and found.lines is not None:
            return found
        return self.explore(mutant, seed, False)


def subjects_of(source, seed):
    """The words of `explore` that say who plays."""
    for beginning, policies in SEARCHED.items():
        if source.startswith(beginning):
            policy = policies[(seed - 1) % len(policies)]
            return ["--subject", policy, "--subject", f"oracle:{policy}"]
    return []


def judged(search, mutant, options, equivalent):
    found = {}
    first = 1 if mutant["key"] in equivalent else options.first
    shrunk = None
    for seed in range(1, options.seeds + 1):
        seen = {f and f.kind for f in found.values()}
        if seed > first and (seen == {None} or seen == {"never ends"}):
            break  # a hang takes its time, and more seeds would only take it again
        found[seed] = search.explore(mutant, seed, False)
        if found[seed] == "too long":
            found[seed] = Found(options.traces, "never ends", None, None, None)
        if found[seed] and options.once:
            break
        if found[seed] and shrunk is None and not options.raw and found[seed].kind not in UNSHRUNK:
            shrunk = search.shrunk(mutant, seed)
    counts = [f.traces if f else float("inf") for f in found.values()]
    median = statistics.median_low(counts)
    kinds = collections.Counter(f.kind for f in found.values() if f)
    return {"key": mutant["key"], "seeds": len(found), "seeds_that_found": sum(f is not None for f in found.values()),
            "tests_to_detect": None if median == float("inf") else median,
            "kind": kinds.most_common(1)[0][0] if kinds else None,
            "shrunk_lines": shrunk.lines if isinstance(shrunk, Found) else None,
            "shrink_executions": shrunk.executions if isinstance(shrunk, Found) else None,
            "trace": shrunk.trace if isinstance(shrunk, Found) else None}


def killed_by(mutant, options):
    """The first test that fails with the mutant, or how the program ended; None where all pass."""
    try:
        done = subprocess.run([(options.out / "mutants_tests").resolve(), "--gtest_fail_fast",
                               f"--gtest_filter={options.tests}"], capture_output=True, text=True, errors="replace",
                              timeout=LONGEST_S, env={**os.environ, "LOCKSTEP_MUTANT": str(mutant["number"]),
                                                      "LOCKSTEP_PROGRAM": str((options.out / "lockstep_mutants").resolve())})
    except subprocess.TimeoutExpired:
        return "never ends"
    failed = re.search(r"\[  FAILED  \] ([^\s,]+)", done.stdout)
    return failed[1] if failed else "dies" if done.returncode else None


# --- The table --------------------------------------------------------------------------------------------------------

def reasons(file):
    """Key → reason. Lines that are not indented are keys, the others the reason that they share."""
    found = {}
    for paragraph in (HERE / file).read_text().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        keys = [line for line in lines if line and not line.startswith(" ")]
        for key in keys:
            found[key] = " ".join(line.strip() for line in lines if line.startswith(" "))
    return found


def number(value):
    return "-" if value is None else f"{value:g}"


def row(name, own):
    alive = [r for r in own if not r["equivalent"]]
    found = [r for r in alive if r["seeds_that_found"]]
    tests = [r["tests_to_detect"] for r in found if r["tests_to_detect"] is not None]
    lines = [r["shrunk_lines"] for r in found if r["shrunk_lines"] is not None]
    share = f"{100 * len(found) / len(alive):.1f} %" if alive else "-"
    return (f"| {name} | {len(own)} | {len(own) - len(alive)} | {len(found)} of {len(alive)} | {share} "
            f"| {number(statistics.median(tests) if tests else None)} | {sum(t <= 10 for t in tests)} "
            f"| {sum(t > 1000 for t in tests)} | {number(statistics.median(lines) if lines else None)} "
            f"| {number(max(lines, default=None))} |")


def escaped(text):
    return text.replace("|", "\\|").replace("`", "'")


def table(results, mutants, options):
    kinds = ("deletion", "comparison")
    equivalent = sum(r["equivalent"] is not None for r in results)
    searches = (f"a mutant has at most {options.seeds} searches (seeds 1 … {options.seeds}), of which the first that "
                "finds it is the last." if options.once else
                f"a mutant has {options.first} searches (seeds 1 … {options.first}), and one that is found "
                f"{options.seeds}; one that never ends keeps to the first {options.first}, one that is listed as "
                "equivalent and not found to the first.")
    lines = ["# Planted defects in bulk", "",
             f"Every single-statement deletion and every flipped comparison of {len(options.sources)} sources, "
             f"{len(mutants)} mutants, of which {len(results)} were run: `properties/mutants/run.py`. A search is "
             f"{options.traces:,} traces of `lockstep explore`; {searches} "
             f"{equivalent} mutants ({100 * equivalent / max(1, len(results)):.1f} %) are equivalent: "
             "nothing that can be observed depends on them.", "",
             "| | mutants | equivalent | found | share | median traces | found by the first 10 | after 1,000 or more "
             "| median lines | longest |", "|---|---|---|---|---|---|---|---|---|---|"]
    lines += [row(kind, [r for r in results if r["mutation"] == kind]) for kind in kinds]
    lines += [row(f"`{source}`", own) for source in options.sources
              if (own := [r for r in results if r["file"] == source])]
    ended = collections.Counter(r["kind"] for r in results if r["seeds_that_found"])
    lines += ["", "Found as: " + ", ".join(f"{kind} {count}" for kind, count in ended.most_common()) + ".",
              "`dies` and `never ends`: the program does, and the number of the trace is known; `bad input`: the "
              "policy calls a legal operation bad input.", "", "## Not found", ""]
    lines += by_reason((r["gap"], r["key"]) for r in results if not r["seeds_that_found"] and not r["equivalent"])
    lines += ["", "## Equivalent", ""]
    lines += by_reason((r["equivalent"], r["key"]) for r in results if r["equivalent"])
    return "\n".join(lines) + "\n"


def by_reason(pairs):
    keys = collections.defaultdict(list)
    for reason, key in pairs:
        keys[reason].append(key)
    return [line for reason, own in keys.items()
            for line in (f"- {reason}", *(f"  - `{escaped(key)}`" for key in own))] or ["None."]


def publish(options, mutants):
    equivalent, gaps, results = reasons("equivalent.txt"), reasons("gaps.txt"), []
    done = read_results(options)
    for mutant in mutants:
        if mutant["key"] in done:
            result = done[mutant["key"]]
            reason = None if result["seeds_that_found"] else equivalent.get(mutant["key"])
            results.append({**result, "file": mutant["file"], "mutation": mutant["kind"], "equivalent": reason,
                            "gap": gaps.get(mutant["key"], "Nobody knows why.")})
    for name, listed in (("equivalent.txt", equivalent), ("gaps.txt", gaps)):
        for key in sorted(set(listed) - {m["key"] for m in mutants}):
            print(name, "names no mutant:", key)
        for key in (r["key"] for r in results if r["seeds_that_found"] and r["key"] in listed):
            print(name, "names a mutant that was found:", key)
    options.publish.write_text(table(results, mutants, options))
    fields = ("tests_to_detect", "seeds_that_found", "seeds", "kind", "shrunk_lines", "shrink_executions")
    rows = ["  " + json.dumps([r["key"], *(r[f] for f in fields), r["equivalent"] is not None], ensure_ascii=False)
            for r in results]
    data = json.dumps({"lockstep": 1, "command": "mutants", "traces": options.traces, "seeds": options.seeds,
                       "columns": ["key", *fields, "equivalent"]}, indent=1)[:-2]
    options.publish.with_suffix(".json").write_text(data + ',\n "mutants": [\n' + ",\n".join(rows) + "\n ]}\n")
    print(table(results, mutants, options).split("## Not found")[0])


# --- What was done already --------------------------------------------------------------------------------------------

def read_results(options):
    path = options.out / "results.jsonl"
    if not path.exists():
        return {}
    return {r["key"]: r for r in map(json.loads, path.read_text().splitlines())}


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sources", nargs="*", default=SOURCES)
    words.add_argument("--build", type=pathlib.Path, default=ROOT / "build/cpu")
    words.add_argument("--out", type=pathlib.Path, required=True)
    words.add_argument("--seeds", type=int, default=20)
    words.add_argument("--first", type=int, default=3)
    words.add_argument("--traces", type=int, default=5000)
    words.add_argument("--time", type=float, default=float("inf"), help="seconds after which no other mutant begins")
    words.add_argument("--sample", type=int, help="so many mutants, drawn from those that have no result yet")
    words.add_argument("--only", help="mutants whose key contains this")
    words.add_argument("--again", action="store_true", help="also those that have a result and were not found")
    words.add_argument("--once", action="store_true", help="a mutant that was found is not looked for again, nor shrunk")
    words.add_argument("--raw", action="store_true", help="nothing is shrunk")
    words.add_argument("--built", action="store_true", help="the program of the last call")
    words.add_argument("--sweep", action="store_true", help="no search: the program and the list that a sweep's `mutants` reads")
    words.add_argument("--tests", metavar="FILTER", help="no search: the tests that have to find the mutants")
    words.add_argument("--publish", type=pathlib.Path, help="no search: the table of what was found so far")
    options = words.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.built and not options.publish:
        build(options)
    mutants = json.loads((options.out / "mutated/mutants.json").read_text())
    if options.publish:
        return publish(options, mutants)
    if options.sweep:
        own = [m for m in mutants if m["file"] in options.sources and m["key"] not in reasons("equivalent.txt")]
        seeds = range(1, 1 + max(map(len, SEARCHED.values())))
        listed = [{"key": m["key"], "number": m["number"], "words": list(words)} for m in own
                  for words in sorted({tuple(subjects_of(m["file"], seed)) for seed in seeds})]
        (options.out / "sweep.json").write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
        return
    done, search, start = read_results(options), Search(options.out, options.traces), time.monotonic()
    if options.again:
        done = {key: r for key, r in done.items() if r["seeds_that_found"]}
    equivalent = reasons("equivalent.txt")
    chosen = [m for m in mutants if m["file"] in options.sources and m["key"] not in done
              and (not options.only or options.only in m["key"])]
    if options.sample is not None:
        chosen = random.Random(1).sample(chosen, min(options.sample, len(chosen)))
    for mutant in chosen:
        if time.monotonic() - start > options.time:
            break
        if options.tests:
            killer = killed_by(mutant, options)
            result = {"key": mutant["key"], "seeds_that_found": int(killer is not None), "test": killer}
        else:
            result = judged(search, mutant, options, equivalent)
        with open(options.out / "results.jsonl", "a") as file:
            file.write(json.dumps(result) + "\n")
        place = f"{mutant['number']} {mutant['file']}:{mutant['line']} {mutant['kind']}"
        print(f"{place}: {result['test']}" if options.tests else f"{place}: {result['seeds_that_found']}/"
              f"{result['seeds']} after {result['tests_to_detect']} {result['kind']} {result['shrunk_lines']}", flush=True)


main()
