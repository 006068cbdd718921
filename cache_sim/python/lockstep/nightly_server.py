"""A running server as one of the searches of a night: calls `lockstep server`, and translates its data into explore's."""
from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

from lockstep import program

SHRINK_SHARE = 0.25  # of the search time, to shrink one finding
PLAYED_AGAIN = ("--program", "--truth", "--reset", "--vocabulary", "--timeout", "--gap")  # options that a replay has as well


def run(words: list[str], base: pathlib.Path, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    package = pathlib.Path(__file__).resolve().parents[1]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run([sys.executable, "-m", "lockstep.server", *words], cwd=base, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", check=False, timeout=limit,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, preexec_fn=program.bound_to_us())


def search(server: str, seed: int, seconds: float, folder: pathlib.Path,
           base: pathlib.Path) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The finished process, and its data in explore's form: answers count as operations, lives as traces. None if it wrote none."""
    outcome = folder / "outcome.json"
    ran = run(["search", *shlex.split(server), "--seed", str(seed), "--requests", str(10**9), "--time", f"{seconds:.1f}",
               "--shrink-time", f"{max(5.0, seconds * SHRINK_SHARE):.0f}", "--out", str(folder), "--json", str(outcome)],
              base)
    if not outcome.is_file():
        return ran, None
    data = json.loads(outcome.read_text(encoding="utf-8"))
    found = [{"kind": one["finding"]["kind"], "text": one["finding"]["text"], "trace": str(folder / f"{one['name']}.json"),
              "signature": f"{one['finding']['kind']}: {' '.join(sorted(one['features'])) or 'no feature'}",
              "tests_to_detect": one["first_answer"], "shrunk_lines": one["steps"]} for one in data["found"]]
    return ran, {"search": {"operations": data["answers"], "traces_run": data["lives"], "marks_missed": None},
                 "findings": found}


def replay(server: str, file: pathlib.Path, base: pathlib.Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(server)
    kept = [word for at, word in enumerate(words) if word in PLAYED_AGAIN or (at and words[at - 1] in PLAYED_AGAIN)]
    return run(["replay", str(file.resolve()), *kept], base)
