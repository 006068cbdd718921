#!/usr/bin/env python3
"""The share of reference/ that its own tests run. Builds them with clang's coverage and counts source regions.

cover_reference.py --out DIR [--show]

The tests are those of run_reference.py without LibTorch, with 30 cases of each law. Prints one row per header and exits with 1
below 95 %. --show lists the functions that were not run whole. Needs clang++ and Debian's package llvm.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys

import run_reference

ROOT = run_reference.ROOT
FLAGS = "-std=c++20 -O0 -w -ffp-contract=off -fprofile-instr-generate -fcoverage-mapping".split()


def build_and_run(source, out, include):
    """The profile of one test program."""
    program, profile, stamp = out / source.stem, out / f"{source.stem}.profraw", out / f"{source.stem}.stamp"
    now = run_reference.digest(*run_reference.included(source, [ROOT]))
    if not profile.exists() or not stamp.exists() or stamp.read_text() != now:
        print("compiling", source.name, flush=True)
        folders = [f"-I{ROOT}"] + [word for folder in include for word in ("-isystem", folder)]
        subprocess.run(["clang++", *FLAGS, *folders, str(source), "-o", str(program), *run_reference.LIBRARIES],
                       check=True)
        done = subprocess.run([program], capture_output=True, text=True,
                              env={**run_reference.ENVIRONMENT, "RC_PARAMS": "seed=1 noshrink=1 max_success=30",
                                   "LLVM_PROFILE_FILE": str(profile)})
        if done.returncode:
            sys.exit(f"{source.name} fails:\n{done.stdout[-2000:]}")
        stamp.write_text(now)
    return program, profile


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=pathlib.Path, required=True)
    words.add_argument("--show", action="store_true")
    words.add_argument("--include", nargs="*", default=run_reference.system_folders())
    options = words.parse_args()
    for tool in ("clang++", "llvm-profdata", "llvm-cov"):
        if not shutil.which(tool):
            sys.exit(f"{tool} is missing: apt-get install clang llvm")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    headers = run_reference.headers()
    built = [build_and_run(source, out, options.include)
             for source in run_reference.tests(set(headers), pathlib.Path("none"))]
    merged = out / "merged.profdata"
    subprocess.run(["llvm-profdata", "merge", "-sparse", *(str(profile) for _, profile in built), "-o", str(merged)],
                   check=True)
    objects = [str(built[0][0])] + [word for program, _ in built[1:] for word in ("-object", str(program))]
    exported = subprocess.run(["llvm-cov", "export", "-summary-only", f"-instr-profile={merged}", *objects,
                               *(str(ROOT / header) for header in headers)], check=True, capture_output=True, text=True)
    files = {f["filename"]: f["summary"]["regions"] for f in json.loads(exported.stdout)["data"][0]["files"]}
    covered = total = 0
    print("| header | regions | run | share |\n|---|---|---|---|")
    for header in headers:
        regions = files.get(str(ROOT / header))
        if regions:
            covered, total = covered + regions["covered"], total + regions["count"]
            print(f"| {header} | {regions['count']} | {regions['covered']} | {regions['percent']:.1f} % |")
    print(f"| all | {total} | {covered} | {100 * covered / total:.2f} % |")
    if options.show:
        subprocess.run(["llvm-cov", "show", f"-instr-profile={merged}", *objects, "-show-regions=0", "-show-instantiations=0",
                        "-region-coverage-lt=100", *(str(ROOT / header) for header in headers)], check=True)
    return 0 if covered > 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main())
