#!/usr/bin/env python3
# ctest: name=evidence.check labels=quick timeout=300 args=check
# ctest: name=evidence.selftest labels=quick timeout=300 args=selftest
"""The evidence of the kernels: reports/kernels/<operation>.json.

    evidence.py check                 every kernel's evidence is of the sources that are there now, with
                                      one entry for each card that measured it, whose errors the yardstick
                                      allows and whose rates and shares are those of its bytes, flops and
                                      times, or the kernel is listed in reports/pending.json with a reason
    evidence.py digest [OPERATION]    what the sources are now
    evidence.py measured              the digests and the commit as JSON, for bench/on_gpu.sh: written where
                                      the measuring happens, so that evidence names what was measured
    evidence.py join FILE FILE…       the first is what the others, logs of parts of the tests, say together
    evidence.py merge RESULTS         writes the evidence from a folder of results that bench/on_gpu.sh
                                      brought back: measured.json, accuracy.json, speed.json, sanitizer.json
                                      (evidence is not complete without sanitizers, on any card, over its
                                      sources); plain layers have accuracy and no speed row. The entry of the
                                      card that measured is replaced; those of other cards stay if they are of
                                      the same sources, and are dropped, by name, if not. Without accuracy.json
                                      what there is of the other two is added to evidence of the same sources:
                                      sanitizers of the operations that sanitizer.json names, rows of single
                                      cases. An operation whose sources are not those that were measured is
                                      refused, and the exit status is 1
    evidence.py selftest              check notices a changed source, no changed comment, and a card without
                                      figures, with two entries, with too large an error or with a rate or
                                      share that its row does not give; merge takes an
                                      operation without a speed row, keeps another card's figures over the same
                                      sources and over no other, refuses other sources, and adds sanitizers and
                                      rows to the evidence that they are of, and to no other

The digest is of the operation's kernel file, of its test (OPERATION_gpu_test.cpp below properties/), and of every
file of this project that these include, the references among them: by their names without folders; comments, spaces and
the lines that include files of this project are left out. A file that only moves keeps its digest.
"""
import contextlib
import datetime
import functools
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
RATES = ("copy_gbps", "matmul_tflops")  # against which limit_share is counted
MACHINE = ("gpu", "driver", "cuda", "copy_gbps", "read_gbps", "matmul_tflops")  # of speed.json, for each entry
OUR_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def kernel_files(root):
    """The kernels: an operation is a file of a family's folder that nvcc compiles. Name and path from the root."""
    families = ("recurrent", "attention", "layers", "models", "replay")
    return {path.stem: str(path.relative_to(root))
            for family in families for path in (root / "kernels" / family).glob("*.cu")}


def operations(root):
    """Names of the kernels, sorted."""
    return sorted(kernel_files(root))


@functools.cache
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
        waiting += included((root / name).read_text())
    return sorted(found, key=lambda name: (pathlib.PurePath(name).name, name))


@functools.cache  # many kernels include the same files
def included(text):
    return OUR_INCLUDE.findall(text)


@functools.cache
def digested(text):
    return bare(OUR_INCLUDE.sub("", text))


def bare(text):
    """C++ without comments and spaces; strings stay as they are."""
    token = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'|//[^\n]*|/\*.*?\*/|\s+', re.S)
    return token.sub(lambda m: m[0] if m[0][0] in "\"'" else "", text)


def digest(root, operation):
    whole = hashlib.sha256()
    for name in sources(root, operation):
        whole.update(f"{pathlib.PurePath(name).name}\n{digested((root / name).read_text())}\n".encode())
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
        elif (evidence := json.loads(file.read_text()))["sources"] != digest(root, operation):
            said.append(f"{operation}: its sources changed since they were measured; measure it with "
                        "bench/on_gpu.sh or list it in reports/pending.json with a reason")
        elif unsound := unsound_chips(evidence["chips"]):
            said.append(f"{operation}: {unsound}")
        elif unclean := [tool for tool in SANITIZERS if evidence["sanitizer"].get(tool) != 0]:
            said.append(f"{operation}: {', '.join(unclean)} of compute-sanitizer did not end clean over these sources")
    return said


def unsound_chips(chips):
    """What is wrong with the entries of a kernel's cards, or an empty text."""
    names = [chip["gpu"] for chip in chips]
    if not chips:
        return "no card has measured it"
    if twice := {name for name in names if names.count(name) > 1}:
        return f"{', '.join(sorted(twice))} has two entries"
    if empty := [chip["gpu"] for chip in chips if not chip["accuracy"]]:
        return f"its entry of {', '.join(empty)} has no accuracy"
    if beyond := [f"{entry['case']} on {chip['gpu']}" for chip in chips for entry in chip["accuracy"]
                  if share_of_bound(entry) > 1]:
        return f"the yardstick does not allow the error of {', '.join(beyond)}"
    if wrong := [f"{row['case']} on {chip['gpu']} says {name}={row.get(name)} for {value:.6g}" for chip in chips
                 for row in chip.get("speed", []) if "time_us" in row for name, value in miscounted(row, chip)]:
        return f"bytes, flops and time do not give the figures of rows: {', '.join(wrong)}"
    return ""


def miscounted(row, chip):
    """(name, right value) of each figure that does not follow from a row's bytes, flops and time, beyond rounding.
    The rates are those of the row's own run where it names them, else those of its card's entry."""
    us = row["time_us"]
    copy_gbps, tflops = (row.get(rate, chip[rate]) for rate in RATES)
    gbps = row["bytes"] / us / 1e3
    share = max(gbps / copy_gbps, row.get("flops", 0) / us / 1e6 / tflops)
    for name, value, digits in (("gbps", gbps, 1), ("limit_share", share, 4)):
        rounding = 0.51 * 10**-digits + value * (0.00051 / us + 1e-4)  # of the figure; of the time and the rates
        if not abs(row.get(name, float("nan")) - value) <= rounding:
            yield name, value


def share_of_bound(entry):
    """How much of its bound an error is; what is no number is beyond any bound."""
    error, bound = entry.get("error", 0), entry.get("yardstick", 0)
    if error is None or error != error or bound is None:
        return float("inf")
    return error / bound if bound else (float("inf") if error else 0)


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
                worse = max(kept, entry, key=share_of_bound)
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


def with_rows(chip, rows, machine):
    """The card's entry with rows of speed in the places of those of the same cases; new cases go behind them. Rows name
    the rates of their run where the entry has others."""
    others = {rate: machine[rate] for rate in RATES if machine[rate] != chip[rate]}
    new = {row["case"]: row | others for row in rows}
    old = [new.pop(row["case"], row) for row in chip["speed"]]
    return chip | {"speed": old + list(new.values())}


def with_chip(evidence, chip):
    """The evidence with this entry as that of its card; entries are sorted by the names of cards."""
    others = [other for other in evidence["chips"] if other["gpu"] != chip["gpu"]]
    return evidence | {"chips": sorted([*others, chip], key=lambda one: one["gpu"])}


def merge(root, results):
    """Writes the evidence of every operation that the results speak of; a sentence for each that they cannot
    be evidence of, because its sources are not those that were measured. The results become the entry of their
    card; other cards keep theirs if these are of the same sources. Results without accuracy, of the sanitizers
    alone or of some cases' speed, are added to evidence of the same sources."""
    if not (results / "measured.json").is_file():
        return [f"{results}: there is no measured.json, which bench/on_gpu.sh writes where it measures"]
    was = json.loads((results / "measured.json").read_text())
    sanitizer, speed, accuracy = (json.loads(file.read_text()) if (file := results / f"{name}.json").is_file() else {}
                                  for name in ("sanitizer", "speed", "accuracy"))
    sanitized = sanitizer.pop("operations", operations(root))
    machine = {key: speed[key] for key in MACHINE if key in speed}
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
        evidence = json.loads(file.read_text()) if file.is_file() else {"sources": None, "chips": []}
        if evidence["sources"] != was["sources"][operation]:
            if not accuracy:
                continue
            if machine and (old := [chip["gpu"] for chip in evidence["chips"] if chip["gpu"] != machine["gpu"]]):
                print(f"{operation}: dropped what was measured of other sources on {', '.join(old)}")
            evidence = {"operation": operation, "sources": was["sources"][operation], "sanitizer": {}, "chips": []}
        if accuracy and not machine:
            refused.append(f"{operation}: there is no speed.json, which names the card; its evidence stays")
            continue
        if accuracy:
            today = datetime.date.today().isoformat()
            evidence = with_chip(evidence, {**machine, "commit": was["commit"], "date": today,
                                            "accuracy": accuracy[operation], "speed": rows})
        elif rows:
            chip = next((chip for chip in evidence["chips"] if chip["gpu"] == machine["gpu"]), None)
            if chip is None:
                refused.append(f"{operation}: {machine['gpu']} has no entry that its cases could be added to")
                continue
            if other := [key for key in ("driver", "cuda") if chip[key] != machine[key]]:
                refused.append(f"{operation}: its cases were measured with another {other[0]}; its evidence stays")
                continue
            evidence = with_chip(evidence, with_rows(chip, rows, machine))
        file.parent.mkdir(exist_ok=True)
        write(root, file, evidence | ({"sanitizer": tools} if tools else {}))
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
                json.dumps({"sources": digest(copy, operation), "sanitizer": dict.fromkeys(SANITIZERS, 0),
                            "chips": [{"gpu": "one", "accuracy": [{}]}, {"gpu": "two", "accuracy": [{}]}]}))
        assert complaints(copy) == [], complaints(copy)
        file = copy / "reports/kernels" / f"{operations(copy)[0]}.json"
        sound = json.loads(file.read_text())
        for chips, text in (([], "no card"), ([*sound["chips"], sound["chips"][0]], "one has two entries"),
                            ([sound["chips"][0], {"gpu": "two", "accuracy": []}], "of two has no accuracy"),
                            *(([{"gpu": "one", "accuracy": [{"case": "out", "error": error, "yardstick": 1}]}],
                               "the error of out on one") for error in (2, None, float("nan")))):
            file.write_text(json.dumps(sound | {"chips": chips}))
            assert [text in said for said in complaints(copy)] == [True], (text, complaints(copy))
        row = {"case": "B=1", "bytes": 4_000_000, "time_us": 2.0, "gbps": 2000.0, "limit_share": 0.5}
        for change, wrong in (({}, ""), ({"gbps": 2001.0}, "gbps=2001.0 for 2000"), ({"bytes": 4_010_000}, "gbps=2000.0"),
                              ({"limit_share": 0.501}, "limit_share=0.501 for 0.5"), ({"limit_share": float("nan")}, "=nan"),
                              ({"copy_gbps": 3000.0}, "for 0.666667"), ({"copy_gbps": 3000.0, "limit_share": 0.6667}, ""),
                              ({"flops": 10**9}, "for 0.625"), ({"flops": 10**9, "limit_share": 0.625}, "")):
            one = sound["chips"][0] | {"copy_gbps": 4000.0, "matmul_tflops": 800.0, "speed": [row | change]}
            file.write_text(json.dumps(sound | {"chips": [one]}))
            assert [wrong in said for said in complaints(copy)] == [True] * bool(wrong), (change, complaints(copy))
        file.write_text(json.dumps(sound))
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
        for beyond in ({"error": None, "yardstick": 1.0}, {"error": 0.1, "yardstick": 0.0}):  # NaN; bits that differ
            bad = {"case": "x", "cases": 1, "worst": "wrong"} | beyond
            for logs in ([parts[0], {"a": [bad]}], [{"a": [bad]}, parts[0]]):
                assert join(logs) == {"a": [bad | {"cases": 3}]}, join(logs)
        untimed, timed = operations(copy)[:2]
        results = copy / "results"
        results.mkdir()
        numbers = dict.fromkeys(MACHINE, 1) | {"gpu": "one"}
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
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert merge(copy, results) == []
        assert f"{timed}: dropped what was measured of other sources on two" in said.getvalue(), said.getvalue()
        (copy / "reports/pending.json").write_text("{}")

        def evidence_of(name):
            return json.loads((copy / "reports/kernels" / f"{name}.json").read_text())

        def chips_of(name):
            return {chip["gpu"]: chip for chip in evidence_of(name)["chips"]}

        assert list(chips_of(untimed)) == list(chips_of(timed)) == ["one"]
        assert chips_of(untimed)["one"]["accuracy"] and chips_of(untimed)["one"]["speed"] == []
        assert chips_of(timed)["one"]["speed"] == [{"case": "B=1"}]
        wanted = f"{untimed}: racecheck of compute-sanitizer did not end clean over these sources"
        assert wanted in complaints(copy), complaints(copy)
        clean = dict.fromkeys(SANITIZERS, 0)
        for content, of, unclean in ((clean, "one", False), (None, "two", False), (None, "one", False),
                                     (None, None, True)):
            (results / "sanitizer.json").unlink(missing_ok=True)
            if content:
                (results / "sanitizer.json").write_text(json.dumps(content))
            if of is None:  # nothing is known of these sources
                (copy / "reports/kernels" / f"{untimed}.json").unlink()
            speed = numbers | {"gpu": of or "one", "operations": {timed: [{"case": str(of)}]}}
            (results / "speed.json").write_text(json.dumps(speed))
            with contextlib.redirect_stdout(io.StringIO()):
                assert merge(copy, results) == []
            found = any(text.startswith(f"{untimed}:") for text in complaints(copy))
            assert found == unclean, complaints(copy)
        assert list(chips_of(timed)) == ["one", "two"] and list(chips_of(untimed)) == ["one"]
        assert [chip["speed"] for chip in chips_of(timed).values()] == [[{"case": "None"}], [{"case": "two"}]]
        (results / "speed.json").unlink()
        assert "names the card" in merge(copy, results)[0]
        (results / "accuracy.json").unlink()
        (results / "sanitizer.json").write_text(json.dumps(dict.fromkeys(SANITIZERS, 0)))
        with contextlib.redirect_stdout(io.StringIO()):
            merge(copy, results)
        assert not any(text.startswith(f"{untimed}:") for text in complaints(copy)), complaints(copy)

        def merged(name, content):  # alone, beside what was measured
            for file in results.glob("s*.json"):
                file.unlink()
            (results / f"{name}.json").write_text(json.dumps(content))
            with contextlib.redirect_stdout(io.StringIO()):
                return merge(copy, results)

        assert merged("sanitizer", dict.fromkeys(SANITIZERS, 3) | {"operations": [timed]}) == []
        assert evidence_of(timed)["sanitizer"] == dict.fromkeys(SANITIZERS, 3)
        assert evidence_of(untimed)["sanitizer"] == dict.fromkeys(SANITIZERS, 0)
        rows = [{"case": "None", "peers": []}, {"case": "B=9"}]
        assert merged("speed", numbers | {"copy_gbps": 2, "operations": {timed: rows}}) == []
        assert chips_of(timed)["one"]["speed"] == [row | {"copy_gbps": 2} for row in rows], chips_of(timed)
        assert chips_of(untimed)["one"]["speed"] == []
        assert chips_of(timed)["two"]["speed"] == [{"case": "two"}]
        assert evidence_of(timed)["sanitizer"] == dict.fromkeys(SANITIZERS, 3)
        assert "another driver" in merged("speed", numbers | {"driver": 2, "operations": {timed: rows[:1]}})[0]
        assert "three has no entry" in merged("speed", numbers | {"gpu": "three", "operations": {timed: rows[:1]}})[0]
        (results / "measured.json").write_text(json.dumps(other))
        assert merged("speed", numbers | {"operations": {timed: [], untimed: rows}}) == []
        assert chips_of(untimed)["one"]["speed"] == rows
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
