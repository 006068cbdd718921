#!/usr/bin/env python3
# ctest: name=sources.are_formatted labels=quick timeout=600 skip=77 args="format --quick"
# ctest: name=sources.changed_are_tidy labels=quick timeout=600 processors=2 skip=77 args="tidy --quick --build {build}"
# ctest: name=sources.check_sees_planted_mistakes labels=quick timeout=600 skip=77 args="selftest --build {build}"
"""clang-format and clang-tidy over the sources.

    sources_check.py format               clang-format would change no file
    sources_check.py tidy --build BUILD   clang-tidy finds nothing in the .cpp and .cu files of a build, nor in what they
                                          include; files that include Torch or CuTe stay out
    sources_check.py selftest             both see mistakes that are planted in a project of a few lines

A file that was clean is not looked at again until it, or a file that it includes, changes.

--quick makes them tests of the quick tier: skipped (77) unless the tool has version 14, since another one formats
otherwise and knows other checks. clang-tidy then looks only at what changed: at what is not committed, and at the
commits since LOCKSTEP_BASE, origin/main or main, or at the last 20 where HEAD is that commit. A changed header is
checked with one file that includes it. The newest changes come first; no file is begun after 45 seconds, none is
waited for after 75, and those left are named. Sources that reach Torch's headers through one of ours stay out, too.

clang 14 reads CUDA 13 as host code: naming, size and calls are checked in kernels too. What it misses of the toolkit
is declared in a header that is written into the build folder.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VERSION = "14"
SECONDS, MOST_SECONDS = 45, 75  # of the quick test: until a file is begun, until one is given up
COMMITS = 20
SKIPPED = 77
SUFFIXES = (".cpp", ".hpp", ".cu", ".cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
HEAVY = re.compile(r"^#include <(torch|ATen|c10|cute|cutlass)/", re.M)
CUDA_FLAGS = ("-x cuda --cuda-host-only -nocudalib -Wno-unknown-cuda-version -w -std=c++20 "
              "-Xclang -fcuda-allow-variadic-functions -D__CLANG_CUDA_TEXTURE_INTRINSICS_H__").split()
# Included by clang 14 itself; CUDA 13 no longer has it. Declares what clang 14 does not know on the host.
CUDA_STUB = "".join(f"__device__ {type} __reduce_{word}_sync(unsigned, {type});\n"
                    for word in ("add", "min", "max") for type in ("unsigned", "int")) + """
template <class T> __device__ T __ldcg(const T*);
template <class T> __device__ T __ldcs(const T*);
template <class T> __device__ void __stcs(T*, T);
"""
# Kernels are not held to these: a product of ints is an index into shared memory, which has 227 KiB; arguments of a
# kernel are values; an operand of inline assembly stands in no parentheses.
CUDA_CHECKS = ("-bugprone-implicit-widening-of-multiplication-result,-performance-unnecessary-value-param,"
               "-bugprone-macro-parentheses")
# Errors of clang 14 alone: alignas behind the storage class, and a structured binding in a lambda (C++20). The others are
# in tests that measured evidence is bound to: either order makes a case, and names and a move wait for the next measurement.
EXEMPT = re.compile("'alignas' attribute cannot be applied to types|reference to local binding '|"
                    "mla_decode_gpu_test.cpp.* unsequenced modification and access to 'seed'|"
                    "gated_delta_net_decode_gpu_test.cpp.* (global constant '[KV]'|constness of 'note')")
# Two thirds of the time of a source that includes Eigen; the quick test leaves it to the target `tidy`.
SLOW_CHECKS = "-performance-unnecessary-value-param"


class Stop(Exception):
    """Ends the check with a sentence and an exit status."""

    def __init__(self, sentence, status):
        super().__init__(sentence)
        self.status = status


def git(root, *words):
    """The lines of git's answer; None where git refuses or is not there."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else None


def sources(root):
    """The project's files: those that git knows or has not been told to ignore, or without git all in the folders."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    if listed is None:
        folders = ("reference", "kernels", "cache_sim", "properties", "bench", "fixtures")
        listed = [str(path.relative_to(root)) for folder in folders for path in sorted((root / folder).rglob("*"))]
    return [name for name in listed if name.endswith(SUFFIXES) and (root / name).is_file()]


def tool(name, quick):
    found = shutil.which(f"{name}-{VERSION}") or shutil.which(name)
    if not found:
        raise Stop(f"there is no {name} (Debian: apt-get install {name})", SKIPPED if quick else 3)
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    major = re.search(r"version (\d+)", version)
    if quick and (not major or major[1] != VERSION):
        raise Stop(f"{found} is not version {VERSION}, which keeps this tree", SKIPPED)
    return found


def formatted(root, quick):
    names = sources(root)
    done = subprocess.run([tool("clang-format", quick), "--dry-run", "-Werror", *names], cwd=root)
    print(f"{len(names)} files, clang-format would change {'none' if done.returncode == 0 else 'some'}")
    return done.returncode == 0


def changed(root):
    """The names of changed files, newest first, and since when. Renamed and deleted files may be among them."""
    history = ["-c", "log.showRoot=false", "log", "--name-only", "--format="]
    asked = os.environ.get("LOCKSTEP_BASE")
    if asked and git(root, "merge-base", "HEAD", asked) is None:
        raise Stop(f"LOCKSTEP_BASE: git knows no commit `{asked}` that HEAD shares a history with", 2)
    since, span = f"the last {COMMITS} commits", [f"-{COMMITS}"]
    head = git(root, "rev-parse", "HEAD")
    if head is None:
        raise Stop("git knows no history here, so nothing says what changed", SKIPPED)
    for ref in [asked] if asked else ["origin/main", "main"]:
        base = git(root, "merge-base", "HEAD", ref)
        if base and base != head:
            since, span = ref, [f"{base[0]}..HEAD"]
            break
    names = git(root, "diff", "--name-only", "HEAD") + git(root, "ls-files", "--others", "--exclude-standard")
    names += [name for name in git(root, *history, *span) if name]
    if not names and git(root, "rev-parse", "--is-shallow-repository") == ["true"]:
        raise Stop("the clone has no history (fetch-depth: 0 brings it), so nothing says what changed", SKIPPED)
    return list(dict.fromkeys(names)), since


# The precompiled header has the compiler's own format: sources are read without it, so an include that one lacks is seen.
PRECOMPILED = re.compile(r" (-Winvalid-pch|(-Xclang )?-include(-pch)? (-Xclang )?[^ ]*cmake_pch[^ ]*)")


def by_file(entry):
    """The command of each file, where several are compiled as one (CMAKE_UNITY_BUILD)."""
    if "/Unity/unity_" not in entry["file"]:
        return [entry]
    files = re.findall(r'^#include "(.*)"', pathlib.Path(entry["file"]).read_text(), re.M)
    return [{**entry, "file": file, "command": entry["command"].replace(entry["file"], file)} for file in files]


class Build:
    """The compile commands of a build, and which of our files each of its sources includes."""

    def __init__(self, root, build, quick):
        self.root, self.build = root, build
        self.texts = {name: (root / name).read_text() for name in sources(root)}
        self.commands = {}
        text = PRECOMPILED.sub("", (build / "compile_commands.json").read_text())
        entries = [apart for entry in json.loads(text) for apart in by_file(entry)]
        (build / "tidy").mkdir(exist_ok=True)
        (build / "tidy/compile_commands.json").write_text(json.dumps(entries))
        for entry in entries:
            path = pathlib.Path(entry["file"])
            if path.is_relative_to(root) and str(path.relative_to(root)) in self.texts:
                self.commands.setdefault(str(path.relative_to(root)), entry["command"])
        reached = {name: self.reach(name) for name in self.commands}
        self.reached = {name: files for name, files in reached.items()
                        if not any(HEAVY.search(self.texts[file]) for file in (files if quick else [name]))}

    def reach(self, name):
        seen, waiting = set(), [name]
        while waiting:
            file = waiting.pop()
            if file in seen or file not in self.texts:
                continue
            seen.add(file)
            waiting += INCLUDE.findall(self.texts[file])
        return seen

    def units(self, names):
        """The sources to look at for these changed files: each itself, a header with the source of its name or else the
        source that includes least, unless one of those before includes it."""
        chosen = []
        for name in names:
            if name in self.reached:
                chosen.append(name)
            elif name.endswith((".hpp", ".cuh")) and not any(name in self.reached[unit] for unit in chosen):
                stem = name.rsplit(".", 1)[0] + "."
                users = [unit for unit, files in self.reached.items() if name in files]
                chosen += sorted(users, key=lambda unit: (not unit.startswith(stem), len(self.reached[unit]), unit))[:1]
        return list(dict.fromkeys(chosen))

    def digest(self, unit, quick):
        text = [str(self.words(unit, "", quick)), self.commands[unit], (self.root / ".clang-tidy").read_text()]
        text += [f"{name}\n{self.texts[name]}" for name in sorted(self.reached[unit])]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def words(self, unit, clang_tidy, quick):
        """The command line of clang-tidy. For clang a command of nvcc is translated."""
        if not unit.endswith(".cu"):
            return [clang_tidy, "--quiet", f"--checks={SLOW_CHECKS if quick else ''}", "-p", self.build / "tidy",
                    "--extra-arg=-Wno-unknown-warning-option", self.root / unit]
        command = self.commands[unit].replace("-isystem=", "-isystem ").replace('\\"', '"')
        nvcc, *flags = shlex.split(command)
        cuda = pathlib.Path(nvcc).resolve().parent.parent
        kept = [flag for flag in flags if flag.startswith(("-I", "-D"))]
        for i, flag in enumerate(flags[:-1]):
            if flag == "-isystem":
                kept += [flag, flags[i + 1]]
        stubs = self.build / "clang_cuda"
        stubs.mkdir(exist_ok=True)
        (stubs / "texture_fetch_functions.h").write_text(CUDA_STUB)
        return [clang_tidy, "--quiet", f"--checks={CUDA_CHECKS}", self.root / unit, "--", *CUDA_FLAGS,
                f"--cuda-path={cuda}", "-isystem", stubs, "-isystem", cuda / "include/cccl", "-isystem",
                cuda / "include", *kept]


def findings(text):
    """clang-tidy's findings, without exempt ones and without those of size in functions of the device."""
    kept = []
    for finding in re.split(r"^(?=/\S+:\d+:\d+: (?:error|warning):)", text, flags=re.M):
        place = re.match(r"(\S+?):(\d+):.*\[readability-function-size", finding)
        if place:
            lines = pathlib.Path(place[1]).read_text().split("\n")[:int(place[2])]
            head = re.split(r"[;{}]\s*$|^\s*$", "\n".join(lines[:-1])[-400:], flags=re.M)[-1] + lines[-1]
            if re.search(r"__(device|global)__", head):
                continue
        if not EXEMPT.search(finding):
            kept.append(finding)
    return "".join(kept)


def tidy(root, folder, quick, hurry):
    clang_tidy = tool("clang-tidy", quick)
    build = Build(root, folder, quick)
    units, of = sorted(build.reached), "the build"
    if quick:
        names, of = changed(root)
        units = build.units(names)
    kept = folder / "tidy_clean.json"
    clean = json.loads(kept.read_text()) if kept.is_file() else {}
    waiting = [unit for unit in units if clean.get(unit) != build.digest(unit, quick)]
    begun, left, failed = time.monotonic(), [], []

    def look(unit):
        passed = time.monotonic() - begun
        if hurry and passed > SECONDS:
            return left.append(unit)
        try:
            done = subprocess.run(build.words(unit, clang_tidy, quick), cwd=root, capture_output=True, text=True,
                                  timeout=MOST_SECONDS - passed if hurry else None)
        except subprocess.TimeoutExpired:
            return left.append(unit)
        said = findings(done.stdout)
        if said if done.stdout else done.returncode != 0:
            failed.append(unit)
            print(f"{unit}:\n{said or done.stderr}", flush=True)
        else:
            clean[unit] = build.digest(unit, quick)
        return None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(look, waiting))
    kept.write_text(json.dumps(clean, indent=0, sort_keys=True))
    print(f"{len(units)} sources of {of}: {len(units) - len(waiting)} were clean before, "
          f"{len(waiting) - len(left) - len(failed)} are clean, {len(failed)} are not")
    if left:
        print(f"not looked at within {MOST_SECONDS} seconds: {' '.join(sorted(left))}")
    return not failed


# --- Selftest -------------------------------------------------------------------------------------

CLEAN = {
    "cache_sim/a/b/c.hpp": "#pragma once\n\nclass Counter {\n  int count_ = 0;\n};\n",
    "cache_sim/a/one.cpp": '#include "cache_sim/a/b/c.hpp"\n\nint twice(int number) {\n  return 2 * number;\n}\n',
    "cache_sim/a/two.cpp": "int Untouched() {\n  return 1;\n}\n",  # a mistake in a file that nobody changes
    "kernels/k.cuh": "#pragma once\n\nconstexpr int kThreads = 128;\n",
    "kernels/k.cu": '#include "kernels/k.cuh"\n\n'
                    "__global__ void fill(float* out) {\n  out[threadIdx.x] = kThreads;\n}\n\n"
                    "void start(float* out, cudaStream_t stream) {\n  fill<<<1, kThreads, 0, stream>>>(out);\n}\n",
}
LONG = "  if (*out > 0) ++*out;\n" * 75
MISTAKES = (  # file, text, words of the finding
    ("cache_sim/a/one.cpp", "int Twice(int number) { return 2 * number; }\n", "function 'Twice'"),
    ("cache_sim/a/one.cpp", "#include <cstdlib>\n\nint draw() { return std::rand(); }\n", "cert-msc50-cpp"),
    ("cache_sim/a/b/c.hpp", "#pragma once\n\nclass Counter {\n  int count = 0;\n};\n", "private member 'count'"),
    ("cache_sim/a/new.cpp", "int three() {\n", "expected '}'"),
    ("kernels/k.cu", "__global__ void Fill(float* out) { out[threadIdx.x] = 0; }\n", "function 'Fill'"),
    ("kernels/k.cu", "#include <cstdlib>\n\nint draw() { return std::rand(); }\n", "cert-msc50-cpp"),
    ("kernels/k.cu", f"void start(float* out) {{\n{LONG}}}\n", "function 'start' exceeds"),
    ("kernels/k.cuh", "#pragma once\n\nconstexpr int THREADS = 128;\nconstexpr int kThreads = THREADS;\n",
     "global constant 'THREADS'"),
    ("kernels/k.cuh", "#pragma once\n\nconstexpr int kThreads = 128;\n\nstruct Row {\n private:\n  int at = 0;\n};\n",
     "private member 'at'"),
)


def said_by(function, *words):
    """What a check answers, and what it prints."""
    with tempfile.TemporaryFile("w+") as file:
        saved = os.dup(1), os.dup(2)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            answer = function(*words)
            sys.stdout.flush()
        finally:
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return answer, file.read()


def expect(condition, sentence, said=""):
    if not condition:
        raise Stop(f"{sentence}\n{said}", 1)


def selftest(build):
    tool("clang-format", True), tool("clang-tidy", True)
    nvcc = next((entry["command"].split()[0] for entry in json.loads((build / "compile_commands.json").read_text())
                 if entry["file"].endswith(".cu")), None)
    os.environ.pop("LOCKSTEP_BASE", None)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve() / "project"
        (root / "build").mkdir(parents=True)

        def write(name, text):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

        def commit(word):
            for words in (("add", "-A"), ("commit", "-qm", word)):
                done = git(root, "-c", "user.name=a", "-c", "user.email=a@b", *words)
                expect(done is not None, f"git {words[0]} failed")

        for name, text in CLEAN.items():
            write(name, text)
        for name in (".clang-tidy", ".clang-format"):
            shutil.copy(ROOT / name, root / name)
        write(".gitignore", "build\n")
        write("build/compile_commands.json", json.dumps([
            {"directory": str(root), "file": str(root / name),
             "command": f"{nvcc if name.endswith('.cu') else 'c++'} -I{root} -c {root / name}"}
            for name in [*CLEAN, "cache_sim/a/new.cpp"] if name.endswith(".cpp") or name.endswith(".cu") and nvcc]))
        git(root, "init", "-qb", "main")
        commit("clean")
        answer, said = said_by(formatted, root, True)
        expect(answer and f"{len(CLEAN)} files" in said, "formatted files are refused", said)
        answer, said = said_by(tidy, root, root / "build", True, False)
        expect(answer and said.startswith("0 sources"), "a file of the first commit counts as changed", said)
        git(root, "switch", "-qc", "work")
        for name in ("cache_sim/a/one.cpp", "kernels/k.cuh"):
            write(name, CLEAN[name] + "\n// A comment is new.\n")
        answer, said = said_by(tidy, root, root / "build", True, False)
        expect(answer, "clean files are refused", said)
        answer, said = said_by(tidy, root, root / "build", True, False)
        expect(answer and f"{2 if nvcc else 1} were clean before" in said, "a clean file is looked at again", said)
        mistakes = [mistake for mistake in MISTAKES if nvcc or mistake[0].startswith("cache_sim")]
        for i, (name, text, words) in enumerate(mistakes):
            write(name, text)
            if i % 2:
                commit("mistake")  # seen before and after it is committed
            answer, said = said_by(tidy, root, root / "build", True, False)
            expect(not answer and words in said, f"{name}: nobody sees {words}", said)
            if name in CLEAN:
                write(name, CLEAN[name])
            else:
                (root / name).unlink()
        write("kernels/k.cuh", "#pragma once\nconstexpr int  kThreads = 128;\n")
        expect(not said_by(formatted, root, True)[0], "a badly formatted file passes")
        os.environ["LOCKSTEP_BASE"] = "main"
        expect("main" in said_by(tidy, root, root / "build", True, False)[1], "LOCKSTEP_BASE is not looked at")
    print(f"{len(mistakes)} planted mistakes are seen{'' if nvcc else '; none in kernels: this build has no nvcc'}")
    return True


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("word", choices=("format", "tidy", "selftest"))
    words.add_argument("--build", type=pathlib.Path, help="folder with compile_commands.json (build/current)",
                       default=ROOT / "build/current")
    words.add_argument("--quick", action="store_true", help="as a test of the quick tier")
    given = words.parse_args()
    build = given.build.absolute()
    try:
        passed = {"format": lambda: formatted(ROOT, given.quick),
                  "tidy": lambda: tidy(ROOT, build, given.quick, hurry=given.quick),
                  "selftest": lambda: selftest(build)}[given.word]()
    except Stop as stop:
        print(f"skipped: {stop}" if stop.status == SKIPPED else f"sources_check.py: {stop}", file=sys.stderr)
        return stop.status
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
