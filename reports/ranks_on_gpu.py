#!/usr/bin/env python3
# ctest: name=evidence.ranks_check labels=quick timeout=60 args=check
# ctest: name=evidence.ranks_selftest labels=quick timeout=60 args=selftest
"""A layer over several GPUs: reports/ranks_on_gpu.json.

    ranks_on_gpu.py run RESULTS    on a machine with several GPUs: logs and ranks_on_gpu.json go to the folder RESULTS
    ranks_on_gpu.py check          nothing is as it must not be, and the file is of the sources that are there now
    ranks_on_gpu.py selftest       check notices what is wrong

`run` plays properties/kernels/torch/ranks_check.py over NCCL, then bench/ranks_times.py; three minutes with two GPUs. LOCKSTEP_BUILT
(default: build/current) names a folder with liblockstep_torch.so for these GPUs, LOCKSTEP_COMMIT the commit of a copy without git.
"pending" in the file says why its sources may be other ones, and why what no machine was there for is not measured."""
import datetime
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent))

import evidence  # noqa: E402
import static_kv  # noqa: E402

ROOT = evidence.ROOT
FILE = ROOT / "reports/ranks_on_gpu.json"
PATTERNS = ("kernels/torch/ranks.py", "properties/kernels/torch/ranks_check.py", "bench/ranks_times.py", "kernels/torch/mla_layer.cpp",
            "kernels/models/mla_layer.?[up]*")
DEFECTS = 5
CASES = 7  # batches and prompts, of each way


def digest():
    return static_kv.digest_of(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def logged(results, name, limit, *words):
    """Exit status and output of a script, which is ended after `limit` seconds."""
    log = results / f"{name}.log"
    with open(log, "w") as out:
        status = subprocess.run(["timeout", "-k", "5", str(limit), sys.executable, *words], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    return status, log.read_text().splitlines()


def measured(results):
    import torch
    ops = pathlib.Path(os.environ.get("LOCKSTEP_BUILT", ROOT / "build/current")).resolve() / "liblockstep_torch.so"
    said = static_kv.card() | {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "torch": torch.__version__,
                               "nccl": ".".join(map(str, torch.cuda.nccl.version())), "commit": evidence.commit_of(ROOT),
                               "date": datetime.date.today().isoformat(), "sources": digest()}
    status, lines = logged(results, "check", 330, "properties/kernels/torch/ranks_check.py", ops, "--device", "cuda")
    said["check"] = {"status": status, "said": [line for line in lines if " ranks: " in line or line.startswith("planted")]}
    status, _ = logged(results, "times", 240, "bench/ranks_times.py", ops, "--out", results)
    said |= {"times status": status}
    if (results / "ranks_times.json").is_file():
        said |= json.loads((results / "ranks_times.json").read_text())
    return said


def complaints(said):
    wrong = [] if said["check"]["status"] == 0 else [f"the check over NCCL ended with {said['check']['status']}"]
    lines = said["check"]["said"]
    for size in (2, 4):
        if f"{size} ranks: equal to one device" not in lines:
            ran = any(line.startswith(f"{size} ranks") for line in lines)
            wrong.append(f"{size} ranks were not equal to one GPU" if ran else f"{size} ranks{static_kv.UNMEASURED}")
    found = [line for line in lines if line.startswith("planted") and "NOT FOUND" not in line]
    wrong += [] if len(found) == DEFECTS else [f"{len(found)} of {DEFECTS} planted defects were found"]
    times = said.get("times", [])
    wrong += [f"{row['ranks']} ranks, {row['way']}: {row['wrong']}" for row in times if "wrong" in row]
    for size, ways in ((1, 1), (2, 2), (4, 2)):
        if (there := sum(row["ranks"] == size for row in times)) != ways * CASES:
            wrong.append(f"{size} ranks: {there} of {ways * CASES} times{static_kv.UNMEASURED}")
    return wrong


def check(said, now):
    return static_kv.unexcused(said, now, complaints(said), "reports/ranks_on_gpu.py")


def selftest():
    rows = [{"ranks": size, "way": way} for size, ways in ((1, "a"), (2, "ab"), (4, "ab")) for way in ways for _ in range(CASES)]
    lines = [f"{size} ranks: equal to one device" for size in (2, 4)] + ["planted, x: found"] * DEFECTS
    sound = {"sources": "a", "check": {"status": 0, "said": lines}, "times": rows}
    for change, count in (({}, 0), ({"sources": "b"}, 1), ({"sources": "b", "pending": "why"}, 0), ({"times": rows[1:]}, 1), ({"times": []}, 3), ({"times": [], "pending": "why"}, 0),
                          ({"check": {"status": 1, "said": lines}}, 1), ({"check": {"status": 0, "said": lines[1:]}}, 1),
                          ({"check": {"status": 0, "said": ["2 ranks: far", *lines[1:]]}, "pending": "why"}, 1),
                          ({"check": {"status": 0, "said": lines[:-1] + ["planted, x: NOT FOUND"]}}, 1),
                          ({"times": [rows[0] | {"wrong": "far"}] + rows[1:]}, 1)):
        found = check({**sound, **change}, "a")
        assert len(found) == count, (change, found)


def main(words):
    if len(words) == 2 and words[0] == "run" and not words[1].startswith("-"):
        results = pathlib.Path(words[1]).resolve()
        results.mkdir(parents=True, exist_ok=True)
        said = measured(results)
        (results / FILE.name).write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
        wrong = complaints(said)
        print("\n".join(wrong) or "everything is as it has to be")
        return int(bool(wrong))
    if words == ["check"]:
        wrong = check(json.loads(FILE.read_text()), digest()) if FILE.is_file() else [f"there is no {FILE.relative_to(ROOT)}"]
        print("\n".join(wrong) or "ranks ran on GPUs from these sources, and nothing was wrong")
        return int(bool(wrong))
    if words == ["selftest"]:
        selftest()
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
