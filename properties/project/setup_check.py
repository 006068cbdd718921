#!/usr/bin/env python3
# ctest: name=setup.brings_what_is_included labels=quick timeout=600 args={lockstep}
"""Holds the set-up of ./lockstep to the sources.

setup_check.py [PROGRAM]

Every library that a source includes has a row in the package tables of ./lockstep, so that a machine with more than a
bare Debian 12 hides no missing package; the Containerfile installs what the program's table names; every command of
PROGRAM stands in the script's own list, and none else. The version of CMakeLists.txt is that of PROGRAM, of the change
log's first section and of the editor's package. .ci/bare_machine tries the whole set-up in a bare root.
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Brought in as wheels, or by the CUDA toolkit, or part of the compiler and of the C library.
ELSEWHERE = {"torch", "ATen", "c10", "cuda", "cub", "thrust", "sys"}
SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh"}


def rows(script):
    """Probes of both package tables: what shows that a package is there."""
    tables = re.findall(r"^(?:program|test)_packages='\n(.*?)'", script, re.S | re.M)
    return {probe: package for table in tables for package, probe in (line.split() for line in table.splitlines())}


def libraries(root):
    """The first part of every <folder/header> or <header.h> that a source includes, with one file that does."""
    found = {}
    for folder in ("reference", "cache_sim", "kernels", "properties", "bench", "fixtures"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                for name in re.findall(r"^#include <([^>]+)>", path.read_text(), re.M):
                    if "/" in name or name in ("zstd.h", "xxhash.h"):
                        found.setdefault(name.split("/")[0], path.relative_to(root))
    return {name: path for name, path in found.items() if name not in ELSEWHERE}


def complaints(script, used):
    """A sentence for each library without a row. Debian puts Eigen one folder deeper."""
    known = {part for probe in rows(script) for part in probe.split("/")}
    return [f"{path}: includes <{name}>, and no package of ./lockstep brings it" for name, path in used.items()
            if name not in known]


def missing_in_container(script, containerfile):
    """Packages that the program's table has and the container does not bring, or the other way round; dpkg-dev reads which
    libraries a package needs, file what is a program."""
    table = re.search(r"^program_packages='\n(.*?)'", script, re.S | re.M)[1]
    wanted = {line.split()[0] for line in table.splitlines()} | {"dpkg-dev", "file"}
    brought = set(re.search(r"install -y --no-install-recommends \\\n(.*?)\nCOPY", containerfile, re.S)[1]
                  .replace("\\", " ").split())
    return sorted(wanted ^ brought)


def versions(cmake, changes, editor):
    """The version of the project, of the change log's newest section, and of the editor's package."""
    return [re.search(r"^project\(lockstep VERSION ([\d.]+)", cmake, re.M)[1],
            re.search(r"^## (\d[\d.]*)", changes, re.M)[1], json.loads(editor)["version"]]


def commands(program):
    """The words below `Subcommands:` of the program's --help."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  ([a-z][a-z-]*) ", text.split("Subcommands:")[1], re.M))


def main(words):
    script = (ROOT / "lockstep").read_text()
    said = complaints(script, libraries(ROOT))
    without = script.replace("gmock/gmock.h", "none")
    assert any("<gmock>" in text for text in complaints(without, libraries(ROOT))), "a missing package is not seen"
    container = (ROOT / "Containerfile").read_text()
    said += [f"Containerfile: {name} is missing, or too much" for name in missing_in_container(script, container)]
    assert missing_in_container(script, container.replace("libssl-dev", "")) == ["libssl-dev"], "nothing is missed"
    numbers = versions(*[(ROOT / name).read_text() for name in
                         ("CMakeLists.txt", "CHANGELOG.md", "fixtures/editors/vscode/package.json")])
    if words:
        numbers.append(subprocess.run([words[0], "--version"], capture_output=True, text=True).stdout.strip())
    said += [f"there are several versions: {numbers}"] if len(set(numbers)) != 1 else []
    if words:
        listed = set(re.findall(r"^  ([a-z][a-z-]*) ", re.search(r"<<'END'\n(.*?)\nEND\n", script, re.S)[1], re.M))
        there = commands(words[0]) | {"test", "nightly", "server", "sweep"}
        said += [f"./lockstep: the list of commands lacks {word}" for word in sorted(there - listed)]
        said += [f"./lockstep: lists {word}, which the program does not know" for word in sorted(listed - there)]
    print("\n".join(said) or "every library has a package, every command is listed")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
