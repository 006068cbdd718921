#!/usr/bin/env python3
# ctest: name=python.pip_install_and_pytest_find_a_bug labels=full timeout=3000 processors=2 skip=77
"""`pip install .` as somebody does it who has a server and pytest.

pip_install_check.py [--keep FOLDER]

Installs this source tree and pytest into a new virtual environment, with a build folder of its own, and runs there,
outside of the tree, the example of fixtures/subjects: the sound cache passes its test, and the bug of
WastefulLruCache is found, with its trace. Says how long it took from `pip install` to the finding. Compiles the whole
program, so this takes minutes. Ends with 77 where pip cannot bring pytest in.
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
SKIPPED = 77
BUG = "is cached and can never be hit"


def run(words, folder, **named):
    return subprocess.run([str(word) for word in words], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False, **named)


def expect(done, status, text=""):
    """Ends the check where a command did not end as it should."""
    if done.returncode != status or text not in done.stdout:
        print(done.stdout)
        sys.exit(f"FAIL: `{' '.join(map(str, done.args))}` ended with {done.returncode}; due are {status} and `{text}`")


def check(folder):
    venv = folder / "venv"
    expect(run([sys.executable, "-m", "venv", venv], folder), 0)
    pip = [venv / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet"]
    brought = run([*pip, "pytest", "scikit-build-core>=0.10"], folder)
    if brought.returncode != 0:
        lines = [line for line in brought.stdout.splitlines() if line.startswith("ERROR")]
        print(f"skipped: pip cannot bring pytest in ({lines[-1] if lines else 'no reason given'})")
        return SKIPPED

    begin = time.monotonic()
    expect(run([*pip, f"--config-settings=build-dir={folder}/build", ROOT], folder), 0)
    built = time.monotonic() - begin
    test = (ROOT / "fixtures" / "subjects" / "test_lru_cache.py").read_text()
    (folder / "test_sound.py").write_text(test)
    (folder / "test_wasteful.py").write_text(test.replace("LruCache", "WastefulLruCache"))
    shutil.copy(ROOT / "fixtures" / "subjects" / "lru_cache.py", folder)
    pytest = [venv / "bin" / "pytest", "-q", "-p", "no:cacheprovider"]
    begin_test = time.monotonic()
    expect(run([*pytest, "test_wasteful.py"], folder), 1, BUG)
    print(f"from `pip install` to the finding {built + time.monotonic() - begin_test:.0f} s, "
          f"{built:.0f} s of them for the installation")
    expect(run([*pytest, "test_sound.py"], folder), 0)
    expect(run([venv / "bin" / "lockstep", "list", "policies"], folder), 0, "sglang-no-buffer")
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=pathlib.Path)
    keep = parser.parse_args().keep
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        return check(keep.resolve())
    with tempfile.TemporaryDirectory(prefix="lockstep-pip-") as folder:
        return check(pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
