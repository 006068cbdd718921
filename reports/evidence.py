#!/usr/bin/env python3
# ctest: name=evidence.check labels=quick timeout=300 args=check
# ctest: name=evidence.selftest labels=quick timeout=300 args=selftest
"""The evidence of the kernels: reports/kernels/<operation>.json.

    evidence.py check                 every kernel's evidence is of the sources that are there now, or
                                      the kernel is listed in reports/pending.json with a reason
    evidence.py digest [OPERATION]    what the sources are now
    evidence.py measured              the digests and the commit as JSON, for bench/on_gpu.sh: written where
                                      the measuring happens, so that evidence names what was measured
    evidence.py join FILE FILE…       the first is what the others, logs of parts of the tests, say together
    evidence.py merge RESULTS         writes the evidence from a folder of results that bench/on_gpu.sh
                                      brought back: measured.json, accuracy.json, speed.json, sanitizer.json
                                      (without it the evidence is not complete); plain layers have accuracy
                                      and no speed row. Without accuracy.json what there is of the other two is
                                      added to evidence of the same sources: sanitizers of the operations that
                                      sanitizer.json names, rows of single cases. An operation whose sources
                                      are not those that were measured is refused, and the exit status is 1
    evidence.py selftest              check notices a changed source, and no changed comment; merge takes
                                      an operation without a speed row, refuses other sources, and adds
                                      sanitizers and rows to the evidence that they are of, and to no other

The digest is of the operation's kernel file, of its test (OPERATION_gpu_test.cpp below properties/), and of every
file of this project that these include, the references among them: by their names without folders; comments, spaces and
the lines that include files of this project are left out. A file that only moves keeps its digest.
"""
import contextlib
import datetime
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
OUR_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def kernel_files(root):
    """The kernels: an operation is a file of a family's folder that nvcc compiles. Name and path from the root."""
    families = ("recurrent", "attention", "layers", "models", "replay")
    return {path.stem: str(path.relative_to(root))
            for family in families for path in (root / "kernels" / family).glob("*.cu")}


def operations(root):
    """Names of the kernels, sorted."""
    return sorted(kernel_files(root))


def gpu_tests(root, operation):
    """The operation's test, in whatever folder below properties/ it stands: paths from the root."""
    return [str(path.relative_to(root)) for path in sorted((root / "properties").rglob(f"{operation}_gpu_test.cpp"))]


def sources(root, operation):
    """The operation's kernel and test and what they include, relative to the root; by file name, since a move is no
    change, and where two folders hold one name by folder."""
    found, waiting = set(), [kernel_files(root)[operation], *gpu_tests(root, operation)]
    while waiting:
        name = waiting.pop()
        if name in found or not (root / name).is_file():
            continue
        found.add(name)
        waiting += OUR_INCLUDE.findall((root / name).read_text())
    return sorted(found, key=lambda name: (pathlib.PurePath(name).name, name))


def bare(text):
    """C++ without comments and spaces; strings stay as they are."""
    token = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'|//[^\n]*|/\*.*?\*/|\s+', re.S)
    return token.sub(lambda m: m[0] if m[0][0] in "\"'" else "", text)


def digest(root, operation):
    whole = hashlib.sha256()
    for name in sources(root, operation):
        text = OUR_INCLUDE.sub("", (root / name).read_text())
        whole.update(f"{pathlib.PurePath(name).name}\n{bare(text)}\n".encode())
    return whole.hexdigest()[:16]


def complaints(root):
    """A sentence for every kernel whose evidence is missing or of other sources."""
    pending = json.loads((root / "reports/pending.json").read_text())
    known = operations(root)
    said = [f"reports/pending.json: {name} is no kernel" for name in pending if name not in known]
    for operation in known:
        file = root / "reports/kernels" / f"{operation}.json"
        if operation in pending:
            if not str(pending[operation]).strip():
                said.append(f"reports/pending.json: {operation} is pending without a reason")
        elif not file.is_file():
            said.append(f"{operation}: there is no reports/kernels/{operation}.json")
        elif json.loads(file.read_text())["sources"] != digest(root, operation):
            said.append(f"{operation}: its sources changed since they were measured; measure it with "
                        "bench/on_gpu.sh or list it in reports/pending.json with a reason")
        elif unclean := [tool for tool in SANITIZERS if json.loads(file.read_text())["sanitizer"].get(tool) != 0]:
            said.append(f"{operation}: {', '.join(unclean)} of compute-sanitizer did not end clean over these sources")
    return said


def write(root, file, evidence):
    file.write_text(json.dumps(evidence, indent=1, ensure_ascii=False) + "\n")
    print(f"written {file.relative_to(root)}")


def join(logs):
    """Logs of accuracy as one: of each case the error that is the largest part of its bound, and all cases."""
    joined = {}
    for log in logs:
        for operation, entries in (log or {}).items():
            for entry in entries:
                kept = joined.setdefault(operation, {}).setdefault(entry["case"], entry)
                if kept is entry:
                    continue
                share = [(e["error"] or 0) / (e["yardstick"] or 1) for e in (kept, entry)]
                worse = entry if share[1] > share[0] else kept
                joined[operation][entry["case"]] = worse | {"cases": kept["cases"] + entry["cases"]}
    return {operation: [cases[name] for name in sorted(cases)] for operation, cases in sorted(joined.items())}


def commit_of(root):
    """The commit of the tree: git's, or what LOCKSTEP_COMMIT says of a copy without git."""
    if named := os.environ.get("LOCKSTEP_COMMIT"):
        return named
    if not shutil.which("git"):
        return "unknown"
    git = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def measured(root):
    """What is measured now: {"commit", "sources": {operation: digest}}."""
    return {"commit": commit_of(root), "sources": {name: digest(root, name) for name in operations(root)}}


def with_rows(evidence, rows):
    """The evidence with rows of speed in the places of those of the same cases; new cases go behind them."""
    new = {row["case"]: row for row in rows}
    old = [new.pop(row["case"], row) for row in evidence["speed"]]
    return evidence | {"speed": old + list(new.values())}


def merge(root, results):
    """Writes the evidence of every operation that the results speak of; a sentence for each that they cannot
    be evidence of, because its sources are not those that were measured. Results without accuracy, of the
    sanitizers alone or of some cases' speed, are added to evidence of the same sources."""
    if not (results / "measured.json").is_file():
        return [f"{results}: there is no measured.json, which bench/on_gpu.sh writes where it measures"]
    was = json.loads((results / "measured.json").read_text())
    sanitizer, speed, accuracy = (json.loads(file.read_text()) if (file := results / f"{name}.json").is_file() else {}
                                  for name in ("sanitizer", "speed", "accuracy"))
    sanitized = sanitizer.pop("operations", operations(root))
    machine = {key: speed[key] for key in ("gpu", "driver", "cuda", "copy_gbps", "read_gbps", "matmul_tflops")
               if key in speed}
    refused = []
    for operation in operations(root):
        file = root / "reports/kernels" / f"{operation}.json"
        tools = sanitizer if operation in sanitized else {}
        rows = speed.get("operations", {}).get(operation, [])
        if accuracy and operation not in accuracy or not accuracy and not (file.is_file() and (tools or rows)):
            continue
        if was["sources"].get(operation) != digest(root, operation):
            refused.append(f"{operation}: its sources are not those that were measured; its evidence stays")
            continue
        if not accuracy:
            evidence = json.loads(file.read_text())
            other = [key for key in ("gpu", "driver", "cuda") if rows and evidence.get(key) != machine[key]]
            if evidence["sources"] != was["sources"][operation]:
                continue
            if other:
                refused.append(f"{operation}: its cases were measured with another {other[0]}; its evidence stays")
                continue
            evidence = with_rows(evidence, rows) if rows else evidence
            write(root, file, evidence | ({"sanitizer": tools} if tools else {}))
            continue
        evidence = {"operation": operation, "sources": was["sources"][operation], "commit": was["commit"], **machine}
        evidence["date"] = datetime.date.today().isoformat()
        evidence["accuracy"] = accuracy[operation]
        evidence["speed"] = rows
        evidence["sanitizer"] = tools
        file.parent.mkdir(exist_ok=True)
        write(root, file, evidence)
    return refused


def selftest(root):
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("kernels", "reference", "reports", "properties"):
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("html"))
        (copy / "reports/pending.json").write_text("{}")
        (copy / "reports/kernels").mkdir(exist_ok=True)
        for operation in operations(copy):
            (copy / "reports/kernels" / f"{operation}.json").write_text(
                json.dumps({"sources": digest(copy, operation), "sanitizer": dict.fromkeys(SANITIZERS, 0)}))
        assert complaints(copy) == [], complaints(copy)
        for seed in "12":  # of the order in which Python walks through a set
            said = subprocess.run([sys.executable, root / "reports/evidence.py", "digest"], check=True, text=True,
                                  capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed}).stdout
            wanted = "".join(f"{name} {digest(root, name)}\n" for name in operations(root))
            assert said == wanted, f"digests differ from one process to the next:\n{said}{wanted}"
        changed = copy / "kernels/base/device.cuh"
        changed.write_text("// another comment\n" + changed.read_text())
        assert complaints(copy) == [], "a comment was taken for a change"
        changed.write_text(changed.read_text() + "\nint another_line;\n")
        assert len(complaints(copy)) == len(operations(copy)), "a changed header went unnoticed"
        changed.write_text(changed.read_text().replace("\nint another_line;\n", ""))
        assert complaints(copy) == [], complaints(copy)
        for name in (gpu_tests(copy, operations(copy)[0])[0], "reference/recurrent/causal_conv1d.hpp"):
            before = (copy / name).read_text()
            (copy / name).write_text(before + "\nint another_line;\n")
            assert any("changed" in text for text in complaints(copy)), f"another {name} went unnoticed"
            (copy / name).write_text(before)
        changed.write_text(changed.read_text() + "\nint another_line;\n")
        (copy / "reports/pending.json").write_text(json.dumps({operations(copy)[0]: " "}))
        assert any("without a reason" in text for text in complaints(copy))
        parts = [{"a": [{"case": "x", "error": 0.5, "yardstick": 1.0, "cases": 2, "worst": "far"}]}, None,
                 {"a": [{"case": "x", "error": 0.08, "yardstick": 0.1, "cases": 3, "worst": "close"}]}]
        assert join(parts) == {"a": [parts[2]["a"][0] | {"cases": 5}]}, join(parts)
        untimed, timed = operations(copy)[:2]
        results = copy / "results"
        results.mkdir()
        numbers = dict.fromkeys(("gpu", "driver", "cuda", "copy_gbps", "read_gbps", "matmul_tflops"), 1)
        for name, content in (("accuracy", {untimed: [{"case": "out"}], timed: [{"case": "out"}]}),
                              ("speed", numbers | {"operations": {timed: [{"case": "B=1"}]}}),
                              ("sanitizer", dict.fromkeys(SANITIZERS, 0) | {"racecheck": 2})):
            (results / f"{name}.json").write_text(json.dumps(content))
        assert "no measured.json" in merge(copy, results)[0]
        now = measured(copy)
        other = now | {"sources": now["sources"] | {timed: "of other sources"}}
        (results / "measured.json").write_text(json.dumps(other))
        with contextlib.redirect_stdout(io.StringIO()):
            refused = merge(copy, results)
        assert [text.split(":")[0] for text in refused] == [timed], refused
        (results / "measured.json").write_text(json.dumps(now))
        with contextlib.redirect_stdout(io.StringIO()):
            assert merge(copy, results) == []
        (copy / "reports/pending.json").write_text("{}")
        evidence = {name: json.loads((copy / "reports/kernels" / f"{name}.json").read_text())
                    for name in (untimed, timed)}
        assert evidence[untimed]["accuracy"] and evidence[untimed]["speed"] == []
        assert evidence[timed]["speed"] == [{"case": "B=1"}]
        wanted = f"{untimed}: racecheck of compute-sanitizer did not end clean over these sources"
        assert wanted in complaints(copy), complaints(copy)
        for content, unclean in ((dict.fromkeys(SANITIZERS, 0), False), (None, True)):
            (results / "sanitizer.json").unlink()
            if content:
                (results / "sanitizer.json").write_text(json.dumps(content))
            with contextlib.redirect_stdout(io.StringIO()):
                merge(copy, results)
            found = any(text.startswith(f"{untimed}:") for text in complaints(copy))
            assert found == unclean, complaints(copy)
            (results / "sanitizer.json").touch()
        for name in ("speed.json", "accuracy.json"):
            (results / name).unlink()
        (results / "sanitizer.json").write_text(json.dumps(dict.fromkeys(SANITIZERS, 0)))
        with contextlib.redirect_stdout(io.StringIO()):
            merge(copy, results)
        assert not any(text.startswith(f"{untimed}:") for text in complaints(copy)), complaints(copy)

        def evidence_of(name):
            return json.loads((copy / "reports/kernels" / f"{name}.json").read_text())

        def merged(name, content):  # alone, beside what was measured
            for file in results.glob("s*.json"):
                file.unlink()
            (results / f"{name}.json").write_text(json.dumps(content))
            with contextlib.redirect_stdout(io.StringIO()):
                return merge(copy, results)

        assert merged("sanitizer", dict.fromkeys(SANITIZERS, 3) | {"operations": [timed]}) == []
        assert evidence_of(timed)["sanitizer"] == dict.fromkeys(SANITIZERS, 3)
        assert evidence_of(untimed)["sanitizer"] == dict.fromkeys(SANITIZERS, 0)
        rows = [{"case": "B=1", "time_us": 2}, {"case": "B=9"}]
        assert merged("speed", numbers | {"operations": {timed: rows}}) == []
        assert evidence_of(timed)["speed"] == rows and evidence_of(untimed)["speed"] == []
        assert evidence_of(timed)["sanitizer"] == dict.fromkeys(SANITIZERS, 3)
        assert "another driver" in merged("speed", numbers | {"driver": 2, "operations": {timed: rows[:1]}})[0]
        (results / "measured.json").write_text(json.dumps(other))
        assert merged("speed", numbers | {"operations": {timed: [], untimed: rows}}) == []
        assert evidence_of(untimed)["speed"] == rows
        assert [text.split(":")[0] for text in merged("speed", numbers | {"operations": {timed: rows}})] == [timed]


def main(words):
    if words == ["check"]:
        said = complaints(ROOT)
        print("\n".join(said) or "every kernel's evidence is of these sources, or pending")
        return 1 if said else 0
    if words == ["selftest"]:
        selftest(ROOT)
        return 0
    if words[:1] == ["digest"] and len(words) <= 2:
        for operation in words[1:] or operations(ROOT):
            print(operation, digest(ROOT, operation))
        return 0
    if words == ["measured"]:
        print(json.dumps(measured(ROOT), indent=1))
        return 0
    if words[:1] == ["join"] and len(words) > 2:
        logs = [json.loads(pathlib.Path(name).read_text()) for name in words[2:]]
        pathlib.Path(words[1]).write_text(json.dumps(join(logs), indent=1) + "\n")
        return 0
    if words[:1] == ["merge"] and len(words) == 2:
        refused = merge(ROOT, pathlib.Path(words[1]))
        print("".join(text + "\n" for text in refused), end="", file=sys.stderr)
        return 1 if refused else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
