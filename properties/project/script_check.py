#!/usr/bin/env python3
# ctest: name=setup.texts_build_nothing_and_replay_goes_first labels=quick timeout=600
"""Runs the script ./lockstep in a folder of its own, with stand-ins for apt-get, cmake and ninja.

  - What asks for a text starts no installation and no build where nothing is built yet.
  - `report` and its like build the program alone: no judge, no kernels, no question to nvcc. `judge` and `list operations`
    bring in what the judge needs and build it; what hides its progress, as a shell's completion does, starts no build.
  - What tests or the judge have configured stays, so that `report` and they can take turns.
  - A checkout whose folders cannot be written serves as long as its program is not older than the sources.
  - What asks a script of bench/ for help starts no measurement, and a sanitizer whose process died is not clean.
  - `./lockstep replay` neither waits for the tests that another ./lockstep builds nor builds any; the other one goes on
    after it.
  - `./lockstep test --tier fuzz` builds the fuzzers alone, in a folder of their own, without numbers.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG = 60  # seconds that the tests of the stand-in take: longer than this check may
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'
CMAKE = RECORD + """
: >"$2/build/$4/CMakeCache.txt"
case "$*" in *LOCKSTEP_BUILD_TESTS=ON*) echo LOCKSTEP_BUILD_TESTS:BOOL=ON >>"$2/build/$4/CMakeCache.txt" ;; esac
case "$*" in *LOCKSTEP_NUMBERS=ON*) echo LOCKSTEP_NUMBERS:BOOL=ON >>"$2/build/$4/CMakeCache.txt" ;; esac
case "$*" in *LOCKSTEP_CUDA=auto*) echo LOCKSTEP_CUDA:STRING=auto >>"$2/build/$4/CMakeCache.txt" ;; esac
"""
NINJA = RECORD + f"""
for program in lockstep lockstep-judge; do
  [ "$3" != $program ] && [ "$3" != lockstep-judge ] || {{ printf '#!/bin/sh\\necho played "$@"\\n' >"$2/new" && chmod +x "$2/new" && mv "$2/new" "$2/$program"; }}
done
[ "$3" != all ] || [ -e "$CALLS.enough" ] || {{ trap 'kill $!; exit 130' TERM; sleep {LONG} & wait; }}
"""


class Checkout:
    """The script, sources that it looks at, and a PATH on which nothing real is set up or built."""

    def __init__(self, folder):
        self.root = folder / "checkout"
        self.calls = folder / "calls"
        self.calls.touch()
        tools = folder / "tools"
        for path in (tools, self.root / "cache_sim", self.root / "reference", self.root / "kernels", self.root / "cmake"):
            path.mkdir(parents=True)
        for name in ("lockstep", "CMakeLists.txt", "CMakePresets.json"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "cache_sim/a.cpp").touch()
        for name, text in {"apt-get": RECORD, "cmake": CMAKE, "ctest": RECORD, "ninja": NINJA}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        python = self.root / ".lockstep/python/bin/python"  # what the tests would bring in is there
        python.parent.mkdir(parents=True)
        python.write_text(RECORD)
        python.chmod(0o755)
        (self.root / ".lockstep/wheels").mkdir()
        for wheel in [line.split("=", 1)[1] for line in (ROOT / "lockstep").read_text().splitlines()
                      if line.startswith("cccl_wheel=")]:
            (self.root / f".lockstep/wheels/{wheel}.complete").touch()
        (self.root / "properties").mkdir()
        (self.root / "properties/skipped_tests.py").write_text("")
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(self.calls),
                            "LOCKSTEP_CUDA": "off", "LOCKSTEP_TORCH_DIR": str(folder)}

    def copied(self, name):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(ROOT / name, path)

    def start(self, *words):
        return subprocess.Popen([str(self.root / "lockstep"), *words], env=self.environment, text=True,
                                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=LONG)
        return process.returncode, out, err

    def called(self):
        return self.calls.read_text().splitlines()

    def wait_until(self, says, what):
        end = time.monotonic() + LONG
        while not says():
            assert time.monotonic() < end, f"never: {what}; called {self.called()}"
            time.sleep(0.05)


def texts_build_nothing(checkout):
    for words, status, says in ((("--help",), 0, "replay FILE"), (("replay", "--help"), 0, "replay FILE"),
                                (("--version",), 0, "."), (("list", "policies"), 3, "not built yet"),
                                (("completion", "bash"), 3, "not built yet"), (("raplay", "x"), 2, "no command"),
                                ((), 0, "replay FILE")):
        found, out, err = checkout.run(*words)
        assert found == status and says in out + err, (words, found, out, err)
        assert not checkout.called(), f"{words} starts {checkout.called()}"


def built(calls):
    return [call.split()[-1] for call in calls if call.startswith("ninja")]


def only_what_is_needed_is_built(checkout):
    (checkout.root.parent / "tools/nvcc").write_text(RECORD)
    (checkout.root.parent / "tools/nvcc").chmod(0o755)
    checkout.environment["LOCKSTEP_CUDA"] = "auto"
    wheel = next((checkout.root / ".lockstep/wheels").glob("nvidia-cuda-cccl==*.complete"))
    wheel.unlink()
    configured = lambda: [call for call in checkout.called() if call.startswith("cmake")]
    assert checkout.run("report", "x")[:2] == (0, "played report x\n")
    assert built(checkout.called()) == ["lockstep"], checkout.called()
    assert len(configured()) == 1 and all(
        word in configured()[0] for word in ("LOCKSTEP_CUDA=off", "LOCKSTEP_NUMBERS=OFF")), configured()
    assert not any(call.startswith(("nvcc", "python")) for call in checkout.called()), checkout.called()

    hidden = subprocess.run([checkout.root / "lockstep", "list", "operations"], env=checkout.environment,
                            capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=LONG)
    assert (hidden.returncode, hidden.stdout) == (3, b"") and built(checkout.called()) == ["lockstep"], hidden

    for words in (("list", "operations"), ("judge", "x", "--candidate", "y")):
        status, out, err = checkout.run(*words)
        assert (status, out) == (0, f"played {' '.join(words)}\n"), (status, out, err)
        assert built(checkout.called())[-1] == "lockstep-judge", checkout.called()
    assert len(configured()) == 2 and "LOCKSTEP_CUDA=auto" in configured()[1], configured()
    assert all(word in configured()[1] for word in ("LOCKSTEP_NUMBERS=ON", "LOCKSTEP_BUILD_TESTS=OFF")), configured()
    brought = [call for call in checkout.called() if "pip download" in call]
    assert len(brought) == 1 and "nvidia-cuda-cccl" in brought[0] and wheel.exists(), brought

    assert checkout.run("replay", "x")[0] == 0 and built(checkout.called())[-1] == "lockstep"
    assert len(configured()) == 2, "report and judge take turns without configuring anew"

    for words, target in (((), "lockstep"), (("--fidelity", "reference"), "lockstep"), (("--fidelity", "torch"), "lockstep-torch"),
                          (("--fidelity=kernels",), "lockstep-torch"), (("--config", "fidelity=torch"), "lockstep-torch"),
                          (("--config", "fidelity=torchx"), "lockstep")):
        assert checkout.run("explore", *words)[0] == 0 and built(checkout.called())[-1] == target, (words, checkout.called())
    assert len([call for call in checkout.called() if "pip download" in call]) == 1, "LOCKSTEP_TORCH_DIR names PyTorch"


def a_foreign_checkout_serves(checkout):
    assert checkout.run("report", "x")[0] == 0
    shutil.rmtree(checkout.root / ".lockstep")
    (checkout.root / ".lockstep").touch()  # no folder can be made there, not even by root
    before = checkout.called()
    assert checkout.run("replay", "x")[:2] == (0, "played replay x\n"), "what is built serves"
    for words in (("judge", "x"), ("test",)):
        status, out, err = checkout.run(*words)
        assert status == 3 and "cannot be written" in err and "cp -r" in err, (words, status, out, err)
    time.sleep(1.1)
    (checkout.root / "cache_sim/a.cpp").touch()
    status, out, err = checkout.run("replay", "x")
    assert status == 3 and "older than its sources" in err, (status, out, err)
    assert checkout.called() == before, checkout.called()


def help_starts_no_measurement(checkout):
    for script, words in (("on_gpu.sh", ("stage", "--help")), ("on_gpu.sh", ("run", "--help")), ("peers/stage.sh", ("-h",)),
                          ("static_kv_on_gpu.sh", ("--help",)), ("judge_on_gpu.sh", ("--help",))):
        copied = checkout.copied(f"bench/{script}")
        before = sorted(checkout.root.rglob("*"))
        ran = subprocess.run(["bash", copied, *words], env=checkout.environment, cwd=checkout.root, capture_output=True,
                             text=True, timeout=LONG)
        assert ran.returncode == 2 and f"bench/{script}" in ran.stderr, (script, words, ran)
        assert sorted(checkout.root.rglob("*")) == before and not checkout.called(), (script, words, ran)


def a_sanitizer_that_died_is_not_clean(checkout):
    tool = pathlib.Path(checkout.environment["PATH"].split(":")[0]) / "compute-sanitizer"
    tool.write_text("""#!/bin/sh
[ "$2 $GTEST_SHARD_INDEX" != "$DIES" ] || echo "========= Error: process didn't terminate successfully"
[ $2 = racecheck ] && echo '========= RACECHECK SUMMARY: 0 hazards displayed' || echo '========= ERROR SUMMARY: 0 errors'
""")
    tool.chmod(0o755)
    script, results = checkout.copied("bench/on_gpu.sh"), checkout.root / "results"
    results.mkdir()
    (results / "measured.json").touch()
    for dies in ("", "racecheck 3", "memcheck 0"):
        ran = subprocess.run(["bash", script, "sanitize", results], capture_output=True, text=True,
                             env={**checkout.environment, "DIES": dies, "LOCKSTEP_BUILT": str(results)}, timeout=LONG)
        wanted = {name: -1 if name in dies else 0 for name in ("memcheck", "racecheck", "initcheck", "synccheck")}
        assert json.loads((results / "sanitizer.json").read_text()) == wanted, (dies, ran)


def replay_goes_first(checkout):
    tests = checkout.start("test")
    try:
        building = lambda: [call for call in checkout.called() if call.startswith("ninja") and call.endswith(" all")]
        checkout.wait_until(lambda: len(building()) == 1, "tests are built")
        assert checkout.run("replay", "x")[:2] == (0, "played replay x\n"), "what is built already serves"
        assert len(building()) == 1, "nobody was stopped for it"
        time.sleep(1.1)
        (checkout.root / "cache_sim/a.cpp").touch()  # now the program has to be built again
        before = len(checkout.called())
        status, out, err = checkout.run("replay", "y")
        assert (status, out) == (0, "played replay y\n"), (status, out, err)
        asked = [call for call in checkout.called()[before:] if not call.endswith(" all")]
        assert [call.split()[-1] for call in asked] == ["lockstep"], asked
        checkout.wait_until(lambda: len(building()) == 2, "the tests go on")
        assert tests.poll() is None
        pathlib.Path(f"{checkout.calls}.enough").touch()
    finally:
        os.killpg(tests.pid, signal.SIGTERM)
        tests.communicate()


def tests_are_built(checkout):
    pathlib.Path(f"{checkout.calls}.enough").touch()
    status, out, err = checkout.run("test")
    assert status == 0 and any(call.startswith("ctest") for call in checkout.called()), (status, out, err)


def fuzzers_have_a_build_of_their_own(checkout):
    status, out, err = checkout.run("test", "--tier", "fuzz")
    called = checkout.called()
    assert status == 0, (status, out, err)
    assert any(call.startswith("cmake") and "--preset fuzz" in call and "LOCKSTEP_NUMBERS=OFF" in call for call in called), called
    assert [call.split()[-1] for call in called if call.startswith("ninja")] == ["lockstep_fuzz"], called
    assert any(call.startswith("ctest") and "build/fuzz -L ^fuzz$" in call for call in called), called
    assert not (checkout.root / "build/current").exists(), "the program that is used stays what it was"


def main():
    for check in (texts_build_nothing, only_what_is_needed_is_built, a_foreign_checkout_serves, help_starts_no_measurement,
                  a_sanitizer_that_died_is_not_clean, replay_goes_first, tests_are_built, fuzzers_have_a_build_of_their_own):
        with tempfile.TemporaryDirectory() as folder:
            check(Checkout(pathlib.Path(folder)))
        print(f"ok: {check.__name__}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
