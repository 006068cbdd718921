#!/usr/bin/env python3
# ctest: name=program.help_is_true labels=quick timeout=600 args={lockstep}
"""Holds `--help` of every command to what the program does.

help_check.py PROGRAM

Each command says which exit statuses it can have, and all of them stand in cache_sim/check/findings.md; an option that takes
a value is required, says its default, or names a file that is written; and the help ends with an example, which runs
here, in a folder that looks like a checkout, and ends as the help says. So do the commands that are Python's: nightly,
server and sweep. Where the program lies alone, without lockstep-judge, `judge --help` is the same, and what needs the judge
says so with exit status 3.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
NOT_RUN = {"report": "replays every fixture: takes a minute and is the tests' own work",
           "server replay": "it plays what an earlier search has found",
           **{f"sweep {word}": "it needs a plan that is there; a test of its own" for word in ("run", "merge", "next")}}
IN_PYTHON = ("nightly", "server", "server search", "server replay", "sweep", "sweep plan", "sweep run", "sweep merge", "sweep next")
PACKAGE = ROOT / "cache_sim" / "python"


def text_of(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commands(program):
    """The words below `Subcommands:` of the program's --help."""
    text = text_of([program, "--help"])
    return re.findall(r"^  ([a-z][a-z-]*) ", text.split("Subcommands:")[1].split("\n\n")[0], re.M)


def known_statuses():
    table = (ROOT / "cache_sim/check/findings.md").read_text().partition("## Exit status\n")[2]
    return {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)}


def options(text):
    """Name and the lines about it, of each option and positional that takes a value."""
    part = re.search(r"^(Positionals|Options|positional arguments|options):\n.*?(?=^Exit status:)", text, re.S | re.M)[0]
    for block in re.findall(r"^  (\S.*\n(?:   .*\n)*)", part, re.M):
        if re.match(r"\S+ (TEXT|INT|UINT|FLOAT)\b", block):
            yield block.split()[0], " ".join(block.split())
    for block in re.findall(r"^  (--\S+ [A-Z_]+\s.*\n?(?:    .*\n)*)", part, re.M):  # as argparse writes it
        yield block.split()[0], " ".join(block.split())


def complaints(name, text, known):
    """Sentences about what the help of a command lacks."""
    said = []
    stated = {int(number) for number in re.findall(r"^  (\d+) +\S", text.partition("Exit status:\n")[2], re.M)}
    if 0 not in stated and name != "shrink":
        said.append("says nothing of exit status 0")
    said += [f"exit status {number} is not in the contract" for number in sorted(stated - known)]
    for option, about in options(text):
        if not re.search(r"REQUIRED|^\S+ [A-Z:{}a-z,/]+=\S|default|\bwrite\b", about):
            said.append(f"{option}: no default: {about}")
    if not re.search(r"^Example( \(it ends with \d+\))?:\n  lockstep " + name + r" .+\n*\Z", text, re.M):
        said.append("does not end with an example")
    return said, stated


def run_example(program, text, stated):
    """Runs the example; a sentence if it does not end as the help says."""
    status, command = re.search(r"^Example(?: \(it ends with (\d+)\))?:\n  lockstep (.+)\n*\Z", text, re.M).groups()
    wanted = int(status or 0)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "fixtures").symlink_to(ROOT / "fixtures")
        done = subprocess.run(f'"{program}" {command}', shell=True, cwd=folder, capture_output=True, text=True,
                              timeout=300)
    if done.returncode == wanted and wanted in stated:
        return ""
    return f"the example ends with {done.returncode}, not {wanted}: {(done.stdout + done.stderr)[-500:]}"


def says_where_the_judge_is(program):
    """Complaints about a copy of the program that lies alone."""
    with tempfile.TemporaryDirectory() as folder:
        alone = shutil.copy(program, folder)
        ran = [subprocess.run([alone, *words], capture_output=True, text=True)
               for words in (("list", "operations"), ("judge", "state_copy", "--candidate", "x.so:f"))]
        said = [f"without lockstep-judge: {one}" for one in ran
                if one.returncode != 3 or one.stdout or "lockstep-judge" not in one.stderr]
        if text_of([alone, "judge", "--help"]) != text_of([program, "judge", "--help"]):
            said.append("lockstep judge --help: it is another where lockstep-judge is not there")
    return said


def main(program):
    known = known_statuses()
    assert {0, 2, 3, 10, 11, 12, 13, 130} <= known, known
    python = os.environ.setdefault("LOCKSTEP_PYTHON", sys.executable)
    has_torch = subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    has_judge = os.path.exists(program + "-judge")
    said = says_where_the_judge_is(program)
    os.environ["PYTHONPATH"] = str(PACKAGE)
    for name in [*commands(program), *IN_PYTHON]:
        text = text_of([program, *name.split(), "--help"])
        found, stated = complaints(name, text, known)
        why = NOT_RUN.get(name, "")
        if name == "judge" and not (has_torch and has_judge):
            why = f"{python} has no PyTorch" if has_judge else "there is no lockstep-judge"
        if why:
            print(f"example not run ({why}): {name}")
        elif not found:
            found = [one for one in [run_example(program, text, stated)] if one]
        said += [f"lockstep {name} --help: {one}" for one in found]
    # The check itself can fail: a status nobody knows, a default that is not there, no example, a wrong one.
    text = text_of([program, "explore", "--help"])
    for old, new in (("\n  10 ", "\n  99 "), ("UINT=1", "UINT"), ("\nExample:", "\n"), ("  0 ", "  7 ")):
        assert old in text and complaints("explore", text.replace(old, new, 1), known)[0], old
    text = text_of([program, "server", "search", "--help"])
    for old in (" (default: 1)", "write the outcome", "\nExample:"):
        assert old in text and complaints("server search", text.replace(old, "", 1), known)[0], old
    assert run_example(program, "Example:\n  lockstep replay nowhere.trace", {0}), "a wrong example is not seen"
    print("\n".join(said) or "every command says its defaults, exit statuses and an example that works")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
