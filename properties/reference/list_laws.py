#!/usr/bin/env python3
# ctest: name=reference.laws_with_1000_cases labels=full timeout=1200 processors=2 args={lockstep_tests}
"""Runs the laws of the references and lists them: cases run, cases discarded, seconds.

list_laws.py PROGRAM [--cases 1000] [--jobs 2] [--filter GTEST_FILTER] [--markdown FILE]

A law is a test of PROGRAM whose cases RapidCheck draws. Cases that a law throws away count as discarded. Exits with 1
if one fails, or if a law discards more than it runs.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

SUITES = ("CausalConv1d Recurrence/ Mamba2 GatedDelta ScaledState SoftmaxAttention Mla SplitSchedule Latent Fp8 RmsNorm "
          "GatedRmsNorm Rope Router Swiglu SpeculativeCommit RejectionSampling TreeAcceptance StaticKv HybridLayers "
          "DataParallelAttention").split()


def names(program, chosen="*"):
    """The program's tests, as GoogleTest filters them."""
    listed = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter={chosen}"], check=True,
                            capture_output=True, text=True).stdout
    suite = ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if not line.startswith(" "):
            suite = name
        elif name:
            yield suite + name.strip()


def run(program, name, cases):
    start = time.monotonic()
    done = subprocess.run([program, f"--gtest_filter={name}"], capture_output=True, text=True,
                          env={**os.environ, "RC_PARAMS": f"max_success={cases} verbose_progress=1"})
    said = done.stdout + done.stderr
    # RapidCheck prints a sign for every case: . passed, x discarded, and others where it shrinks a failure.
    signs = "".join(re.findall(r"^[.x!]+", said, re.M))
    return {"name": name, "passed": signs.count("."), "discarded": signs.count("x"), "failed": done.returncode != 0,
            "seconds": time.monotonic() - start, "said": said}


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("program")
    words.add_argument("--cases", type=int, default=1000)
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--filter", default=":".join(f"{suite}*" for suite in SUITES))
    words.add_argument("--markdown", type=pathlib.Path)
    options = words.parse_args()
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        all_tests = list(pool.map(lambda name: run(options.program, name, options.cases),
                                  names(options.program, options.filter)))
    laws = [t for t in all_tests if "Using configuration" in t["said"] and (t["passed"] or t["failed"])]
    lines = ["| law | cases | discarded | rate | seconds |", "|---|---|---|---|---|"]
    for law in laws:
        tried = law["passed"] + law["discarded"]
        lines.append(f"| {law['name']} | {law['passed']} | {law['discarded']} | "
                     f"{100 * law['discarded'] / max(1, tried):.1f} % | {law['seconds']:.1f} |")
    lines.append(f"| {len(laws)} laws | {sum(l['passed'] for l in laws)} | {sum(l['discarded'] for l in laws)} | | "
                 f"{time.monotonic() - start:.0f} on {options.jobs} jobs |")
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    for test in all_tests:
        if test["failed"]:
            print(f"\n{test['name']} failed\n{test['said'][-3000:]}")
    wasteful = [law["name"] for law in laws if law["discarded"] > law["passed"]]
    if wasteful:
        print("discard more than they run:", ", ".join(wasteful))
    return 1 if not laws or wasteful or any(t["failed"] for t in all_tests) else 0


if __name__ == "__main__":
    sys.exit(main())
