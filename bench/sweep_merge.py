#!/usr/bin/env python3
"""Seconds and memory of `lockstep sweep merge`, by the number of shards and of findings.

bench/sweep_merge.py FOLDER [--shards 100000] [--findings 1000000]    LOCKSTEP_PROGRAM names the program

Plays a few units of a real search, and writes that many results that are made of theirs: each has its own seed, and findings
drawn from 5,000 keys. FOLDER needs 40 KB a shard and is left there.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cache_sim" / "python"
sys.path.insert(0, str(PACKAGE))
from lockstep.sweep import plan, publish, units  # noqa: E402

KEYS = 5000
PATTERNS = 8  # units that are really played


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=pathlib.Path)
    words.add_argument("--shards", type=int, default=100_000)
    words.add_argument("--findings", type=int, default=1_000_000)
    options = words.parse_args()
    options.folder.mkdir(parents=True)
    settings = options.folder / "sweep.ini"
    # The canary is unit 0, and the search has one unit for each of the other shards.
    settings.write_text(f"[sweep]\ntraces = {500 * (options.shards - 1)}\nunit = 500\n[policies]\n")
    made = plan.make_plan(settings, options.shards, options.folder / "plan")
    patterns = [units.play(made, 1 + at) for at in range(PATTERNS)]
    canary = units.play(made, 0)
    trace = "# Found by trace 7 of seed 9; 40 lines before it was shrunk.\nconfig kv_tokens=64 state_slots=8\n" + "".join(
        f"admit id=r{at} tokens=a{at + 3}+b{at}:7\nextend id=r{at} n={at + 2}\nfinish id=r{at}\n" for at in range(12))
    draw = random.Random(1)
    texts = [publish.text_of({"subject": "radix", "kind": "reply-differs", "text": f"the answer number {key} differs", "expected": "cached=3",
                              "operation": "admit id=r1", "tests_to_detect": draw.randrange(1, 20000), "lines": draw.randrange(5, 40),
                              "trace": f"{trace}check {key}\n", "words": ["--subject", "radix"], "key": f"{key:016x}", "count": 1}).strip()
             for key in range(KEYS)]
    heads = [publish.text_of({"plan": made.digest, "build": made.data["build"], "index": -1,
                              "units": [{**one, "unit": -2, "seed": -3, "findings": "HERE"}]}) for one in patterns]
    done = made.folder / "done"
    done.mkdir()
    (done / "0.json").write_text(publish.text_of({"plan": made.digest, "build": made.data["build"], "index": 0, "units": [canary]}))
    left = options.findings
    for index in range(1, options.shards):
        count = left // (options.shards - index)
        left -= count
        found = ",".join(texts[key] for key in sorted(draw.sample(range(KEYS), count)))
        text = heads[index % PATTERNS].replace('"HERE"', f"[{found}]").replace('"index":-1', f'"index":{index}')
        (done / f"{index}.json").write_text(text.replace('"unit":-2', f'"unit":{index}').replace('"seed":-3', f'"seed":{index + 1}'))
    size = sum(file.stat().st_size for file in done.iterdir())
    print(f"{options.shards} shards, {size / 1e9:.2f} GB", flush=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "lockstep.sweep", "merge", str(made.folder)], stdout=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": str(PACKAGE)})
    _, status, used = os.wait4(process.pid, 0)
    report = json.loads((made.folder / "sweep.json").read_text())
    print(f"merge: {time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of a processor, {used.ru_maxrss / 1024:.0f} MiB at most, "
          f"exit status {os.waitstatus_to_exitcode(status)}: {report['totals']['occurrences']} findings in {len(report['findings'])} keys, "
          f"{report['corpus'][0]['traces']} traces for the next round")


if __name__ == "__main__":
    main()
