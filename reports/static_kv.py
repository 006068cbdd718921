#!/usr/bin/env python3
# ctest: name=evidence.static_kv_check labels=quick timeout=60 args=check
# ctest: name=evidence.static_kv_selftest labels=quick timeout=60 args=selftest
# ctest: name=evidence.static_kv_programs labels=full timeout=900 skip=77 args=programs
"""The evidence of the exported model on a GPU: reports/static_kv.json.

    static_kv.py check             no test of it failed; it is whole and of the sources that are there now, or says in
                                   "pending" why not
    static_kv.py write RESULTS     writes it into the folder RESULTS from the logs that bench/static_kv_on_gpu.sh left
                                   there, on the machine that measured
    static_kv.py programs          exports what was measured again: 0 where the programs are the same ones, and the
                                   text model is noted as seen; 1 where one is another; 77 without transformers
    static_kv.py selftest          check notices a changed source, write a failure

"sources" is a digest of the exporter (cache_sim/python/lockstep/static_kv), its tables (fixtures/subjects/static_kv),
the C++ runtime, its tests on a GPU and what takes its times; of C++ without comments and spaces. The text model is left out: a GPU is given the programs
that are exported from it, and "programs" are their digests (static_kv_programs.py). "text model" is the digest of the
text that was last seen to give them."""
import datetime
import hashlib
import importlib
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent))

import evidence  # noqa: E402

ROOT = evidence.ROOT
FILE = ROOT / "reports/static_kv.json"
PYTHON = ROOT / "cache_sim/python"
PATTERNS = ("cache_sim/python/lockstep/static_kv/*.py", "fixtures/subjects/static_kv/*.py", "kernels/torch/static_kv/*.?pp", "bench/static_kv_times.cpp",
            "bench/initcheck_graph_copy.cu", "properties/kernels/torch/static_kv/static_kv_graphs_torch_test.cpp", "properties/support/static_kv_cases.hpp")
TEXT_MODEL = PYTHON / "lockstep/static_kv/text_model.py"
PROGRAMS = ROOT / "reports/static_kv_programs.py"
SKIPPED = 77  # ctest's word for a test that cannot run here
UNMEASURED = ": not measured"


def digest():
    return digest_of(path for pattern in PATTERNS for path in ROOT.glob(pattern) if path != TEXT_MODEL)


def digest_of(paths):
    whole = hashlib.sha256()
    for path in sorted(paths):
        text = re.sub("^# ctest: .*\n", "", path.read_text(), flags=re.M)  # of the tests, not of the program
        whole.update(f"{path.name}\n{text if path.suffix == '.py' else evidence.bare(text)}\n".encode())
    return whole.hexdigest()[:16]


def unexcused(said, now, complaints, script):
    """What `script` has to complain of: a reason in "pending" excuses other sources, and whatever was not measured."""
    older = [f"its sources changed since it was measured: run {script} run"] if said["sources"] != now else []
    pending = str(said.get("pending", "")).strip()
    return [one for one in complaints + older if not (pending and (one in older or one.endswith(UNMEASURED)))]


def card():
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"gpu": gpu, "driver": driver}


def machine():
    code = "import torch, transformers; print(torch.version.cuda, torch.__version__, transformers.__version__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    cuda, torch, transformers = said.split()[-3:]
    return card() | {"cuda": cuda, "torch": torch, "transformers": transformers}


def tests_of(file):
    """Of a log of GoogleTest: how many passed, which did not, and what each one counted."""
    tests = [test for suite in json.loads(file.read_text())["testsuites"] for test in suite["testsuite"]]
    name = {id(test): f"{test['classname']}.{test['name']}" for test in tests}
    return {
        "passed": sum(test["result"] == "COMPLETED" and "failures" not in test for test in tests),
        "failed": [name[id(test)] for test in tests if "failures" in test],
        "skipped": [name[id(test)] for test in tests if test["result"] == "SKIPPED"],
        "compared": {name[id(test)]: {key: float(test[key]) for key in ("cases", "error") if key in test}
                     for test in tests if "cases" in test},
    }


def summary(file, pattern):
    found = re.findall(pattern, file.read_text()) if file.is_file() else []
    return max(map(int, found), default=-1)


def table_of(file):
    """Of a log of `static_kv table`: cases, how many differ, the largest error as a share of the original's own."""
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"(\d+) cases, (\d+) differ; [^:]*: (.*)", text)
    if not found:
        return {"cases": 0, "differ": -1}
    shares = [float(share) for share in re.findall(r"\b(\d+\.\d\d|inf|nan)\b", found[3])]
    return {"cases": int(found[1]), "differ": int(found[2]), "error": max(shares)}


def gathered(results):
    """What the logs say; -1 where a tool or a table did not end."""
    read = lambda name: json.loads((results / name).read_text())  # noqa: E731
    sanitizer = {}
    for what, tool in itertools.product(("", "packages."), evidence.SANITIZERS):
        pattern = r"RACECHECK SUMMARY: (\d+) hazard" if tool == "racecheck" else r"ERROR SUMMARY: (\d+) error"
        sanitizer[what + tool] = summary(results / f"{what}{tool}.log", pattern)
    tables = {f"{shape}, {form}": table_of(results / f"table.{shape}.{form}.log")
              for shape in ("tied", "untied") for form in ("exported", "package")}
    copies = {form: summary(results / f"copy.{form}.log", r"ERROR SUMMARY: (\d+) error")
              for form in ("stream", "graph", "nothing")}
    others = results / "others.txt"
    traps = (results / "traps.log").read_text().splitlines()
    times = {}
    for shape in ("tied", "qwen3-0.6b"):
        cost, runtime = (results / f"{name}.{shape}.json" for name in ("cost", "times"))
        if all(file.is_file() and file.stat().st_size for file in (cost, runtime)):
            times[shape] = read(cost.name) | {"runtime": read(runtime.name)}
            if others.is_file():
                times[shape]["other processes"] = len(others.read_text().splitlines())
        else:
            times[shape] = {"missing": True}
    return {
        "graphs": tests_of(results / "graphs.json"),
        "packages": tests_of(results / "packages.json"),
        "python": tables,
        "planted": {"found": sum(line.startswith("ok") for line in traps),
                    "missed": sum(line.startswith("FAIL") for line in traps)},
        "sanitizer": sanitizer,
        "initcheck of a copy in a graph": copies,
        "times": times,
    }


def failures(said):
    """A sentence for each comparison that failed or was not made."""
    wrong = [f"{what}: {test} failed" for what in ("graphs", "packages") for test in said[what]["failed"]]
    wrong += [f"{what}: {test} was skipped" for what in ("graphs", "packages") for test in said[what]["skipped"]]
    wrong += [f"{name}: {table['differ']} differ" for name, table in said["python"].items() if table["differ"] != 0]
    if said["planted"]["missed"] or not said["planted"]["found"]:
        wrong.append(f"planted: {said['planted']}")
    for shape, times in said["times"].items():
        forms = times.get("forms", {})
        allowed = 4 * forms.get("eager, in place", {}).get("error", 0) + 1e-6
        wrong += [f"{shape}, {form}: logits are {one['error']:.1e} from float64, {allowed:.1e} allowed"
                  for form, one in forms.items() if not one.get("error", 0) <= allowed]
    return wrong


def gaps(said):
    """A sentence for each sanitizer that did not end clean, for what was not read, and for times that were not taken
    alone."""
    found = [f"{tool}: {count}" for tool, count in said["sanitizer"].items() if count != 0]
    found += [f"{word}: not read" for word in ("gpu", "driver", "cuda", "commit") if said.get(word, "not read") == "not read"]
    found += [f"{shape}: times were not taken" for shape, times in said["times"].items() if times.get("missing")]
    return found + [f"{shape}: times were taken beside other work" for shape, times in said["times"].items()
                    if times.get("beside other work") or times.get("other processes")]


def environment():
    sys.path.insert(1, str(ROOT / "fixtures/subjects/transformers"))
    return importlib.import_module("environment")


def exported_now(folder=PYTHON, words=()):
    """{name: digest} of the programs that a folder's package `lockstep` gives, all or those whose names are `words`."""
    run = environment()
    python = sys.executable if run.is_here() else run.PYTHON
    out = subprocess.run([python, PROGRAMS, folder, *words], stdout=subprocess.PIPE, check=True, env=run.variables()).stdout
    return json.loads(out)


def programs():
    if not (environment().is_here() or environment().is_made()):
        print(environment().MISSING)
        return SKIPPED
    with tempfile.TemporaryDirectory() as scratch:
        planted = pathlib.Path(scratch)
        shutil.copytree(PYTHON / "lockstep", planted / "lockstep")
        text = TEXT_MODEL.read_text()
        broken = text.replace(".masked_fill(hidden, 0.0)", "")  # what nobody wrote is weighed by 0
        assert broken != text
        (planted / TEXT_MODEL.relative_to(PYTHON)).write_text(broken)
        said = json.loads(FILE.read_text())
        one = next(iter(said["programs"]))
        assert exported_now(planted, [one])[one] != said["programs"][one], "a changed model gives the same program"
    now = exported_now()
    others = [name for name in now.keys() | said["programs"].keys() if now.get(name) != said["programs"].get(name)]
    if others:
        print(f"{'; '.join(sorted(others))}: another program than the one that was measured; run bench/static_kv_on_gpu.sh")
        return 1
    print(f"{len(now)} programs are those that were measured")
    if said["text model"] != digest_of([TEXT_MODEL]):
        FILE.write_text(json.dumps(said | {"text model": digest_of([TEXT_MODEL])}, indent=1, ensure_ascii=False) + "\n")
        print(f"{FILE.relative_to(ROOT)}: the text model that is there now is noted")
    return 0


def write(results):
    said = {"sources": digest(), "text model": digest_of([TEXT_MODEL]), "programs": exported_now(),
            "commit": evidence.commit_of(ROOT), **machine(),
            "date": datetime.date.today().isoformat(), **gathered(results)}
    (results / "static_kv.json").write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    wrong = failures(said) + gaps(said)
    print("\n".join(wrong) or "everything is as it has to be")
    return int(bool(wrong))


def check(file=FILE, now=None, text_model=None):
    if not file.is_file():
        return ["there is no reports/static_kv.json: bench/static_kv_on_gpu.sh writes it"]
    said = json.loads(file.read_text())
    older = ["its sources changed since they were measured"] if said["sources"] != (now or digest()) else []
    if said["text model"] != (text_model or digest_of([TEXT_MODEL])):
        older.append("text_model.py changed: `reports/static_kv.py programs` says whether it still gives the programs that were measured")
    open_ones = older + gaps(said)
    if not open_ones or str(said.get("pending", "")).strip():
        return failures(said)
    return [*failures(said), *open_ones, "run bench/static_kv_on_gpu.sh, or say in \"pending\" why not"]


def selftest():
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "static_kv.json"
        log = pathlib.Path(folder) / "table.log"
        log.write_text("x\n  170 cases, 1 differ; errors of logits, the original's own being 1: greedy 16 0.31, beams 4 1.20\n")
        assert table_of(log) == {"cases": 170, "differ": 1, "error": 1.2}, table_of(log)
        assert table_of(pathlib.Path(folder) / "absent")["differ"] == -1
        sound = {"sources": "a", "text model": "t", "gpu": "g", "driver": "1", "cuda": "13.0", "commit": "c", "times": {"tied": {}}, "graphs": {"failed": [], "skipped": []}, "packages": {"failed": [], "skipped": []},
                 "python": {"tied": {"differ": 0}}, "planted": {"found": 3, "missed": 0}, "sanitizer": {"memcheck": 0}}
        for change, complaint in (({}, 0), ({"sources": "b"}, 2), ({"sources": "b", "pending": "why"}, 0), ({"pending": " "}, 0),
                                  ({"text model": "u"}, 2),
                                  ({"sanitizer": {"memcheck": -1}}, 2), ({"sanitizer": {"memcheck": 9}, "pending": " "}, 2),
                                  ({"times": {"tied": {"beside other work": True}}}, 2),
                                  ({"times": {"tied": {"other processes": 1}}}, 2), ({"times": {"tied": {"missing": True}}}, 2),
                                  ({"driver": "not read"}, 2),
                                  ({"times": {"tied": {"forms": {"eager, in place": {"error": 1e-3}, "x": {"error": 5e-3}}}}}, 1),
                                  ({"times": {"tied": {"forms": {"eager, in place": {"error": 1e-3}, "x": {"error": 4e-3}}}}}, 0),
                                  ({"times": {"tied": {"forms": {"x": {"error": float("nan")}}}}}, 1),
                                  ({"python": {"x": {"differ": 2}}, "pending": "why"}, 1), ({"planted": {"found": 0, "missed": 0}}, 1),
                                  ({"graphs": {"failed": ["x"], "skipped": ["y"]}}, 2), ({"python": {"x": {"differ": -1}}}, 1)):
            file.write_text(json.dumps(sound | change))
            assert len(check(file, "a", "t")) == complaint, (change, check(file, "a", "t"))


def main(words):
    if words == ["check"]:
        wrong = check()
        pending = "" if wrong else json.loads(FILE.read_text()).get("pending", "")
        print("\n".join(wrong) or (f"pending: {pending}" if pending else "reports/static_kv.json is of these sources"))
        return int(bool(wrong))
    if words == ["programs"]:
        return programs()
    if words == ["selftest"]:
        selftest()
        return 0
    if words[:1] == ["write"] and len(words) == 2:
        return write(pathlib.Path(words[1]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
