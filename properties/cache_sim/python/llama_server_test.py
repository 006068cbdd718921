#!/usr/bin/env python3
# ctest: name=subjects.llama_server_is_judged labels=full timeout=1800 skip=77 args={lockstep}
"""llama-server under `lockstep server`, where `python3 fixtures/subjects/llama_cpp setup` has built it.

llama_server_test.py PROGRAM

What was reported of the pinned release (reports/found/llama_*.py) is still there, and random requests that keep away from
the conditions of those bugs find nothing. Exit status 77: llama.cpp is not built.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = pathlib.Path(os.environ.get("LLAMA_CPP") or ROOT / ".lockstep" / "llama_cpp-11434.0.0")
SERVER = FOLDER / "build" / "bin" / "llama-server"
SKIPPED = 77
REPORTED = {"stale_checkpoint": ("nemotron_h", "qwen35"), "busy_slot": ("nemotron_h", "llama"),
            "queued_copy": ("qwen35", "llama"), "moved_snapshots": ("qwen35_mtp",)}
TRIES = 3  # some depend on when a request comes


def model(name):
    return str(FOLDER / "models" / f"{name}.gguf")


def reported():
    """A sentence for each bug that its script does not show; a plain attention model has no checkpoints."""
    for name, models in REPORTED.items():
        for one in models:
            words = [sys.executable, str(ROOT / "reports" / "found" / f"llama_{name}.py"), str(SERVER), model(one)]
            for _ in range(TRIES):
                run = subprocess.run(words, capture_output=True, text=True, timeout=300)
                if "WRONG" in run.stdout and run.returncode == 1:
                    break
            else:
                yield f"llama_{name}.py shows nothing on {one}:\n{run.stdout}{run.stderr}"
    words = [sys.executable, str(ROOT / "reports" / "found" / "llama_stale_checkpoint.py"), str(SERVER), model("llama")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        yield f"llama_stale_checkpoint.py on a model without recurrent layers:\n{run.stdout}{run.stderr}"


def searched(program):
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "lockstep.server", "search", "llama", "--program", str(SERVER), "--avoid", "all",
                 "--requests", "300", "--seed", "11", "--out", out]
        for name in ("nemotron_h", "granitehybrid", "qwen35", "qwen35_mtp", "llama"):
            words += ["--model", model(name)]
        run = subprocess.run(words, capture_output=True, text=True, timeout=600, env={
            **os.environ, "LOCKSTEP_PROGRAM": program, "PYTHONPATH": str(ROOT / "cache_sim" / "python")})
    return [] if run.returncode == 0 else [f"with the reported bugs avoided:\n{run.stdout}{run.stderr}"]


def main(words):
    if not SERVER.exists() or not pathlib.Path(model("llama")).exists():
        print("skipped: llama.cpp is not built: `python3 fixtures/subjects/llama_cpp setup` builds it")
        return SKIPPED
    said = [*reported(), *searched(os.path.abspath(words[0]))]
    print("\n".join(said) or "reported bugs are there, nothing else was found")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
