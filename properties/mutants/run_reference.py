#!/usr/bin/env python3
"""Do the laws see every small mistake in reference/? Plants the mutants of mutate_reference.py and runs the tests.

run_reference.py --out DIR [HEADER…] [--tests NAME…] [--every N] [--seed S] [--time SECONDS] [--torch FOLDER]

Each test program is compiled once with all mutants in it. Every test is run alone first, to know which mutants it
comes by and how long it takes; a mutant is then given to the tests that come by it, shortest program first, until one
fails. The tests against LibTorch take part where LibTorch is. Assertions of Eigen and of the standard library are on. Results go to DIR/results.jsonl as they come, and a
second call goes on where the first one stopped; what survived is asked again when a test has changed. DIR/mutants.md is
the table. Survivors are excused by name, with a reason, in reference_survivors.md beside this script; exits with 1 if
one is not, or if fewer than 95 % are killed.
"""
import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "properties/reference"))
from list_laws import names  # noqa: E402
# Oracles of cache policies and the vocabulary of traces have mutants of their own: run.py.
FOLDERS = ["tensors", "recurrent", "attention", "layers"]
LIBRARIES = ["-lgtest_main", "-lgtest", "-lrapidcheck", "-lpthread"]
ENVIRONMENT = {**os.environ, "RC_PARAMS": "seed=1 noshrink=1 max_success=100"}


def headers():
    return ["reference/base/parallel.hpp"] + [str(path.relative_to(ROOT)) for folder in FOLDERS
                                              for path in sorted((ROOT / "reference" / folder).glob("*.hpp"))]


def system_folders():
    """The folders of Eigen and of the views."""
    return [folder for folder in ("/usr/include/eigen3", "/usr/local/cuda/include/cccl",
                                  str(ROOT / ".lockstep/wheels/nvidia/cu13/include/cccl")) if pathlib.Path(folder).is_dir()]


def tests(mutated, torch):
    """The quick tests that include one of the headers and nothing that needs the rest of the project."""
    found = []
    for path in sorted((ROOT / "properties").rglob("*_test.cpp")):
        included = re.findall(r'#include "([^"]+)"', path.read_text())
        ours = all(i.startswith("reference/") and (ROOT / i).with_suffix(".cpp").exists() is False or
                   i.startswith("properties/") and not (ROOT / i).with_suffix(".cpp").exists() for i in included)
        skipped = r"_(full|gpu)_test|accuracy" if torch.is_dir() else r"_(full|gpu|torch)_test"
        if ours and included and not re.search(skipped, path.name) and any(
                i in mutated or i.startswith("properties/") for i in included):
            found.append(path)
    return found


def included(path, folders):
    """The file and what it includes of ours, through all of them."""
    found, waiting = [], [path]
    while waiting:
        last = waiting.pop()
        if last in found:
            continue
        found.append(last)
        for name in re.findall(r'^#include "([^"]+)"', last.read_text(), re.M):
            waiting += [folder / name for folder in folders if (folder / name).exists()][:1]
    return sorted(found)


def digest(*paths):
    return hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()[:16]


class Program:
    def __init__(self, source, out, include, cxx, torch):
        self.name, self.path = source.stem, out / source.stem
        stamp, now = out / f"{source.stem}.stamp", digest(*included(source, [out / "mutated", ROOT]))
        if not self.path.exists() or not stamp.exists() or stamp.read_text() != now:
            print("compiling", source.name, flush=True)
            folders = [f"-I{out / 'mutated'}", f"-I{ROOT}"] + [w for i in include for w in ("-isystem", i)]
            libraries = list(LIBRARIES)
            if "_torch_" in source.name:
                folders += ["-isystem", f"{torch}/include", "-isystem", f"{torch}/include/torch/csrc/api/include"]
                libraries += [f"-L{torch}/lib", "-Wl,--as-needed", "-Wl,--unresolved-symbols=ignore-in-shared-libs",
                              f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
            subprocess.run([*cxx.split(), *folders, str(source), "-o", str(self.path), *libraries], check=True)
            stamp.write_text(now)
            (out / f"{source.stem}.reached.json").unlink(missing_ok=True)
        self.look(out / f"{source.stem}.reached.json")

    def look(self, cache):
        """Which mutants each test comes by, and its seconds."""
        if not cache.exists():
            self.tests, seen = {}, cache.with_suffix(".txt")
            for name in names(self.path):
                start = time.monotonic()
                done = subprocess.run([self.path, f"--gtest_filter={name}"], capture_output=True,
                                      env={**ENVIRONMENT, "LOCKSTEP_REACHED": str(seen)})
                if done.returncode:
                    print(f"{self.name}: {name} fails without any mutant and is left out", flush=True)
                    continue
                self.tests[name] = {"seconds": time.monotonic() - start,
                                    "reached": [int(n) for n in seen.read_text().split()]}
            cache.write_text(json.dumps(self.tests))
        self.tests = json.loads(cache.read_text())
        self.by_mutant = collections.defaultdict(list)
        for name, test in self.tests.items():
            for number in test["reached"]:
                self.by_mutant[number].append(name)

    def kills(self, number):
        """The first test that fails, what the program died of, or nothing."""
        chosen = self.by_mutant.get(number, [])
        limit = 3 + 10 * sum(self.tests[name]["seconds"] for name in chosen)
        try:
            done = subprocess.run([self.path, "--gtest_fail_fast", f"--gtest_filter={':'.join(chosen)}"],
                                  capture_output=True, text=True, errors="replace", timeout=limit,
                                  env={**ENVIRONMENT, "LOCKSTEP_MUTANT": str(number)})
        except subprocess.TimeoutExpired:
            return f"{self.name}: no end"
        if done.returncode == 0:
            return None
        failed = re.search(r"\[  FAILED  \] (\S+)", done.stdout)
        return f"{self.name}: {failed.group(1).rstrip(',') if failed else f'died with {done.returncode}'}"

    def seconds(self, number):
        return sum(self.tests[name]["seconds"] for name in self.by_mutant.get(number, []))


def key(mutant):
    return f"{mutant['file']} | {mutant['text']} | {mutant['kind']}"


def place(mutant):
    """By which a survivor is excused: the line of code it stands on, what it changes there, and how."""
    return mutant["file"], mutant["source"], mutant["text"], mutant["kind"]


def excuses():
    """Survivors that have a reason: the rows of reference_survivors.md."""
    path = HERE / "reference_survivors.md"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| reference/")]
    plain = [[cell.strip().strip("`").replace("\\|", "|") for cell in row] for row in rows]
    return {tuple(row[:4]): row[4] for row in plain}


def row(mutant, reason):
    cells = [mutant["file"], f"`{mutant['source']}`", f"`{mutant['text']}`", mutant["kind"], reason]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def judge(options, mutants, programs, old):
    start, results = time.monotonic(), []
    reached = {n for p in programs for n in p.by_mutant}
    at_one_place = collections.defaultdict(set)
    for m in mutants:
        at_one_place[m["file"], m["line"], m["text"]].add(m["number"])
    with (options.out / "results.jsonl").open("a") as log:
        for mutant in mutants:
            number = mutant["number"]
            if number not in reached and at_one_place[mutant["file"], mutant["line"], mutant["text"]] & reached:
                continue  # a mistake that values of this type cannot have
            known = old.get(mutant["id"])
            tried = sorted((p for p in programs if number in p.by_mutant), key=lambda p: p.seconds(number))
            asked = {p.name: (options.out / f"{p.name}.stamp").read_text() for p in tried}
            if known and (known["killed"] or known["asked"] == asked or (options.tests and not tried)):
                results.append({**mutant, **known})
                continue
            if time.monotonic() - start > options.time:
                continue
            killed = next((found for p in tried if (found := p.kills(number))), None)
            result = {"killed": killed, "asked": asked, "reached": bool(tried)}
            results.append({**mutant, **result})
            log.write(json.dumps({"id": mutant["id"], "key": key(mutant), **result}) + "\n")
            log.flush()
            if not killed:
                print(f"{'survived' if tried else 'not reached'}: {mutant['file']}:{mutant['line']} "
                      f"[{mutant['kind']}] {mutant['text']}", flush=True)
    return results


def table(results, planted, options):
    excused = excuses()
    lines = ["# Planted mistakes in reference/", "",
             f"`properties/mutants/run_reference.py --every {options.every} --seed {options.seed}`: {len(results)} of "
             f"{planted} mutants asked.", "", "| header | mutants | killed | share | survivors with a reason |",
             "|---|---|---|---|---|"]
    for file in sorted({r["file"] for r in results}) + [""]:
        own = [r for r in results if r["file"] == file or not file]
        killed = sum(bool(r["killed"]) for r in own)
        named = sum(not r["killed"] and place(r) in excused for r in own)
        lines.append(f"| {file or 'all'} | {len(own)} | {killed} | {100 * killed / max(1, len(own)):.1f} % | {named} |")
    lines += ["", "## Survivors", "", "| header | line | mutated | how | reason |", "|---|---|---|---|---|"]
    lines += [row(r, excused.get(place(r), "")) for r in results if not r["killed"]]
    return "\n".join(lines) + "\n"


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("headers", nargs="*")
    words.add_argument("--out", type=pathlib.Path, required=True)
    words.add_argument("--tests", nargs="*", help="stems of the files below properties/ that are asked, all by default")
    words.add_argument("--every", type=int, default=1, help="one mutant of so many, chosen by the seed")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--time", type=float, default=float("inf"), help="seconds after which no other mutant begins")
    words.add_argument("--torch", type=pathlib.Path, default=ROOT / ".lockstep/wheels/torch")
    words.add_argument("--cxx", default="g++ -std=c++20 -O1 -w -ffp-contract=off -D_GLIBCXX_ASSERTIONS")
    words.add_argument("--include", nargs="*", default=system_folders())
    options = words.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = options.headers or headers()
    subprocess.run([sys.executable, str(HERE / "mutate_reference.py"), *chosen, "--root", str(ROOT),
                    "--out", str(options.out / "mutated"), "--include", *options.include], check=True)
    mutants = json.loads((options.out / "mutated/mutants.json").read_text())
    seen = collections.Counter()
    for mutant in mutants:  # a mutant is the same one in a later call if its text, its kind and its turn are
        seen[key(mutant)] += 1
        mutant["id"] = f"{key(mutant)} | {seen[key(mutant)]}"
    planted = len(mutants)
    if options.every > 1:
        mutants = sorted(random.Random(options.seed).sample(mutants, planted // options.every), key=lambda m: m["number"])
    programs = [Program(source, options.out, options.include, options.cxx, options.torch)
                for source in tests(set(chosen), options.torch) if not options.tests or source.stem in options.tests]
    log = options.out / "results.jsonl"
    old = {r["id"]: r for r in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    results = judge(options, mutants, programs, old)
    (options.out / "mutants.md").write_text(table(results, planted, options))
    killed, excused = sum(bool(r["killed"]) for r in results), excuses()
    unexcused = [r for r in results if not r["killed"] and place(r) not in excused]
    print(f"{killed} of {len(results)} killed ({100 * killed / max(1, len(results)):.1f} %), "
          f"{len(unexcused)} survivors without a reason")
    return 0 if killed >= 0.95 * len(results) and not unexcused else 1


if __name__ == "__main__":
    sys.exit(main())
