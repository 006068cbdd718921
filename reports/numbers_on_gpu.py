#!/usr/bin/env python3
# ctest: name=evidence.numbers_check labels=quick timeout=60 args=check
# ctest: name=evidence.numbers_selftest labels=quick timeout=60 args=selftest
"""Random traces with tensors in the slots of caches, run by the kernels on a GPU: reports/numbers_on_gpu.json.

    numbers_on_gpu.py run RESULTS [WORD…]    on a machine with a GPU: logs and numbers_on_gpu.json go to the folder RESULTS
    numbers_on_gpu.py check                  nothing is as it must not be, and the file is of the sources that are there now
    numbers_on_gpu.py selftest               check notices what is wrong

Words leave out all parts but these: tests, traces, fixtures, long_fixtures, defects, sanitizer. Sound policies must show nothing. What must be found: a wrong slot of each
planted defect that moves a number in double, each mistake of a captured bucket, and a layer whose rows depend on the batch. LOCKSTEP_BUILT (default:
build/current) names a folder with lockstep-torch, lockstep_numbers_torch_tests and liblockstep_torch.so for this GPU, beside the libraries that they lack.
python3 has PyTorch 2.11. LOCKSTEP_TRACES (2000) is how many traces each family plays, LOCKSTEP_PROCESSES (16) how many run at a time; all of it takes half
an hour on 16 cores. The processes share the GPU by NVIDIA's MPS, a daemon that is started for them: without it they would take turns."""
import concurrent.futures
import contextlib
import datetime
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent))

import evidence  # noqa: E402
import static_kv  # noqa: E402

ROOT = evidence.ROOT
FILE = ROOT / "reports/numbers_on_gpu.json"
PATTERNS = ("cache_sim/numbers/torch/*.?pp", "properties/cache_sim/numbers/torch/*.cpp", "reference/models/hybrid/hybrid_config.cpp")
WITH_STATES = ("sglang-no-buffer", "vllm-align", "sglang-extra-buffer", "sglang-legacy", "marconi")
WITHOUT = ("radix", "vllm-align")
POLICIES = {f"{size}-{model}": policies for model, policies in (("nemotron-h", WITH_STATES), ("qwen3-next", WITH_STATES), ("deepseek-v3", WITHOUT),
                                                               ("qwen3", WITHOUT), ("window", WITHOUT))
            for size in ("tiny", "small") if (size, model) != ("tiny", "deepseek-v3")}  # the kernels have latents of one size
PIECE = 125  # traces of one process
PARTS_OF_FIXTURES = 32
SANITIZERS = ("memcheck", "racecheck", "synccheck")
PARTS = ("tests", "traces", "fixtures", "long_fixtures", "defects", "sanitizer")


def digest():
    return static_kv.digest_of(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def traces_of(model, family=2000):
    """How many traces a model plays: a family's, or half as many where a tiny model of the family plays these."""
    return family if model.startswith("tiny") or model == "small-deepseek-v3" else family // 2


def is_short(trace):
    """Whether no text of the trace has more than 5,000 tokens, and no request decodes more than 200: longer ones take minutes, and a process for each model."""
    text = trace.read_text()
    return all(int(size) <= 5000 for size in re.findall(r"[ +=][a-z](\d+)", text)) and all(int(size) <= 200 for size in re.findall(r"output=[a-z]?(\d+)", text))


class Machine:
    def __init__(self, results, environment):
        self.results = results
        self.built = pathlib.Path(os.environ.get("LOCKSTEP_BUILT", ROOT / "build/current")).resolve()
        import torch  # its libraries are those that the programs need
        libraries = pathlib.Path(torch.__file__).parent / "lib"
        self.torch = torch
        self.environment = os.environ | environment | {"LD_LIBRARY_PATH": f"{self.built}:{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}"}

    def run(self, name, words, program, before=(), **more):
        """The exit status, what was printed, and the seconds; the log is NAME.log."""
        began = time.monotonic()
        ran = subprocess.run([*before, self.built / program, *words], env=self.environment | more, cwd=ROOT, text=True, capture_output=True)
        said = ran.stdout + ran.stderr
        (self.results / f"{name}.log").write_text(said)
        return {"status": ran.returncode, "said": said, "seconds": round(time.monotonic() - began, 1)}

    def tests(self, name, pattern, shard=0, shards=1, before=(), **more):
        file = self.results / f"{name}.json"
        self.run(name, [f"--gtest_filter={pattern}", f"--gtest_output=json:{file}"], "lockstep_numbers_torch_tests", before,
                 GTEST_TOTAL_SHARDS=str(shards), GTEST_SHARD_INDEX=str(shard), **more)
        if not file.is_file():
            return {"passed": 0, "failed": [f"{name} did not end"], "skipped": []}
        said = static_kv.tests_of(file)
        return {key: said[key] for key in ("passed", "failed", "skipped")}

    def traces(self, model, policy, seed, traces):
        name = f"{policy}.{model}.{seed}"
        ran = self.run(name, ["explore", "--subject", policy, "--fidelity", "kernels", "--config", f"model={model}", "--traces", str(traces), "--seed",
                              str(seed), "--no-shrink", "--timeout", "100s", "--out", str(self.results / name)], "lockstep-torch")
        played = re.search(r"^(\d+) traces?, (\d+) operations", ran["said"], re.M)
        return {"model": model, "policy": policy, "traces": int(played[1]) if played else 0, "operations": int(played[2]) if played else 0,
                "seconds": ran["seconds"], "wrong": "" if ran["status"] == 0 and played else f"{name}: status {ran['status']}: {ran['said'].strip()[-300:]}"}

    def fixtures(self, part):
        """Every PARTS_OF_FIXTURES-th trace of the fixtures, under each model that it can have."""
        folder = self.results / f"fixtures.{part}"
        folder.mkdir()
        for entry in (ROOT / "fixtures").iterdir():
            if entry.name not in ("traces", "regressions"):
                (folder / entry.name).symlink_to(entry)
                continue
            (folder / entry.name).mkdir()
            for one in sorted(filter(is_short, entry.iterdir()))[part::PARTS_OF_FIXTURES]:
                (folder / entry.name / one.name).symlink_to(one)
        return self.report(f"fixtures.{part}", folder)

    def report(self, name, fixtures, words=()):
        """How many runs of the fixtures had numbers, and what is wrong with them."""
        ran = self.run(name, ["report", "--fidelity", "kernels", *words, "--fixtures", str(fixtures), "--out", str(self.results / f"pages.{name}")], "lockstep-torch")
        counted = re.search(r"(\d+) runs? more with the numbers", ran["said"])
        return {"runs": int(counted[1]) if counted else 0, "wrong": "" if ran["status"] == 0 else f"{name}: status {ran['status']}: {ran['said'].strip()[-300:]}"}

    def long_fixture(self, trace, model):
        """The run lines of a trace under a model, of which its policies may have none; the first line alone under the model that takes ten times as
        long as the others."""
        name = f"{trace.stem}.{model}"
        folder = self.results / f"fixture.{name}" / "traces"
        folder.mkdir(parents=True)
        text = trace.read_text()
        if model == "small-deepseek-v3":
            for line in re.findall(r"^# run: .*\n(?:# finds: .*\n)?", text, re.M)[1:]:
                text = text.replace(line, "", 1)
        (folder / trace.name).write_text(text)
        ran = self.report(name, folder.parent, ["--model", model])
        return {"runs": 0, "wrong": ""} if "no run can have it" in ran["wrong"] else ran

    def sanitizer(self, tool):
        """The errors that a tool counts in the tests and in a search; -1 where it did not end."""
        tool_words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        # Racecheck takes a hundred times as long as the others, and sees the smallest test.
        logs = [f"{tool}.tests"]
        if tool == "racecheck":
            self.tests(logs[0], "TensorsOnAGpu.ofALayer*", before=tool_words)
        else:
            # Without LibTorch's cache each tensor has memory of its own; graphs need that cache.
            self.tests(logs[0], "TensorsOnAGpu.ofARight*", before=tool_words, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            logs.append(f"{tool}.search")
            self.run(logs[1], ["explore", "--subject", "sglang-no-buffer", "--fidelity", "kernels", "--config", "model=tiny-qwen3-next", "--traces", "3",
                               "--seed", "1", "--out", str(self.results / f"{tool}.found")], "lockstep-torch", tool_words)
        counted = [static_kv.summary(self.results / f"{log}.log", r"(?:ERROR|RACECHECK) SUMMARY: (\d+)") for log in logs]
        return -1 if -1 in counted else sum(counted)


@contextlib.contextmanager
def shared_gpu():
    """The environment in which several processes use one GPU at a time."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = ["nvidia-cuda-mps-control"]
        subprocess.run([*control, "-d"], env=os.environ | pipe, check=True)
        try:
            yield pipe
        finally:
            subprocess.run(control, input="quit\n", text=True, env=os.environ | pipe)


def measured(machine, parts):
    said = {"sources": digest(), "commit": evidence.commit_of(ROOT), "date": datetime.date.today().isoformat()}
    said |= static_kv.card() | {"cuda": machine.torch.version.cuda, "torch": machine.torch.__version__}
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("LOCKSTEP_PROCESSES", 16))) as pool:
        jobs = {part: [] for part in PARTS}
        if "fixtures" in parts:
            jobs["fixtures"] = [pool.submit(machine.fixtures, part) for part in range(PARTS_OF_FIXTURES)]
        if "long_fixtures" in parts:
            long = [one for folder in ("traces", "regressions") for one in sorted((ROOT / "fixtures" / folder).iterdir()) if not is_short(one)]
            jobs["long_fixtures"] = [pool.submit(machine.long_fixture, one, model) for model in sorted(POLICIES) for one in long]
        if "tests" in parts:
            jobs["tests"].append(pool.submit(machine.tests, "tests", "TensorsOnAGpu.*"))
        if "sanitizer" in parts:
            jobs["sanitizer"] = [pool.submit(machine.sanitizer, tool) for tool in SANITIZERS]
        if "traces" in parts:
            for model, policies in sorted(POLICIES.items()):  # small ones take longer and come first
                traces = traces_of(model, int(os.environ.get("LOCKSTEP_TRACES", 2000)))
                for seed, begin in enumerate(range(0, traces, PIECE), 1):
                    jobs["traces"].append(pool.submit(machine.traces, model, policies[seed % len(policies)], seed, min(PIECE, traces - begin)))
        if "defects" in parts:
            shards = 16
            for pattern in ("*movesTensorsToo*", "*givesNoWrongNumberUnderRightLabels*"):
                jobs["defects"] += [pool.submit(machine.tests, f"defects.{len(pattern)}.{i}", pattern, i, shards) for i in range(shards)]
        done = {part: [job.result() for job in some] for part, some in jobs.items()}
    if done["tests"]:
        said["tests"] = done["tests"][0]
    if done["traces"]:
        said["traces"] = {}
        for one in done["traces"]:
            sum_ = said["traces"].setdefault(one["model"], {"traces": 0, "operations": 0, "process seconds": 0, "policies": {}, "wrong": []})
            sum_["traces"] += one["traces"]
            sum_["operations"] += one["operations"]
            sum_["process seconds"] = round(sum_["process seconds"] + one["seconds"], 1)
            sum_["policies"][one["policy"]] = sum_["policies"].get(one["policy"], 0) + one["traces"]
            sum_["wrong"] += [one["wrong"]] if one["wrong"] else []
    for part in ("fixtures", "long_fixtures"):
        if done[part]:
            said[part] = {"runs": sum(one["runs"] for one in done[part]), "wrong": [one["wrong"] for one in done[part] if one["wrong"]]}
    if done["defects"]:
        said["defects"] = {"passed": sum(one["passed"] for one in done["defects"])}
        said["defects"] |= {key: sorted(name for one in done["defects"] for name in one[key]) for key in ("failed", "skipped")}
    if done["sanitizer"]:
        said["sanitizer"] = dict(zip(SANITIZERS, done["sanitizer"]))
    said["seconds"] = round(time.monotonic() - began)
    return said


def complaints(said):
    """A sentence for each thing that is not as it must be."""
    wrong = [f"{part}{static_kv.UNMEASURED}" for part in PARTS if part not in said]
    for part in ("tests", "defects"):
        if part in said:
            wrong += [f"{part}: {name} failed" for name in said[part]["failed"]]
            wrong += [f"{part}: some were skipped or none ran"] if said[part].get("skipped") or not said[part]["passed"] else []
    for model in POLICIES if "traces" in said else ():
        one = said["traces"].get(model, {"traces": 0, "wrong": []})
        wrong += one["wrong"]
        if one["traces"] < traces_of(model):
            wrong.append(f"{model}: {one['traces']} of {traces_of(model)} traces{static_kv.UNMEASURED}")
    for part in ("fixtures", "long_fixtures"):
        if part in said:
            wrong += said[part]["wrong"] or ([] if said[part]["runs"] else [f"{part}: none was played"])
    return wrong + [f"{tool}: {count} errors" for tool, count in said.get("sanitizer", {}).items() if count != 0]


def check(said, now):
    return static_kv.unexcused(said, now, complaints(said), "reports/numbers_on_gpu.py")


def selftest():
    models = {model: {"traces": 2000, "wrong": []} for model in POLICIES}
    sound = {"sources": "a", "tests": {"failed": [], "skipped": [], "passed": 3}, "traces": models, "fixtures": {"runs": 9, "wrong": []},
             "long_fixtures": {"runs": 9, "wrong": []}, "defects": {"failed": [], "skipped": [], "passed": 9}, "sanitizer": {"memcheck": 0}}
    short = {**models, "tiny-qwen3": {"traces": 1999, "wrong": []}}
    for change, count in (({}, 0), ({"sources": "b"}, 1), ({"sources": "b", "pending": "why"}, 0), ({"pending": "why", "traces": short}, 0), ({"traces": short}, 1), ({"traces": {}}, len(models)),
                          ({"tests": {"failed": ["x"], "skipped": [], "passed": 2}}, 1), ({"tests": {"failed": [], "skipped": ["x"], "passed": 2}}, 1),
                          ({"fixtures": {"runs": 0, "wrong": []}}, 1), ({"fixtures": {"runs": 9, "wrong": ["w"]}}, 1), ({"long_fixtures": {"runs": 0, "wrong": []}}, 1), ({"sanitizer": {"memcheck": -1}}, 1),
                          ({"defects": {"failed": ["y"], "skipped": [], "passed": 8}}, 1), ({"defects": {"failed": [], "skipped": [], "passed": 0}}, 1)):
        found = check({**sound, **change}, "a")
        assert len(found) == count, (change, found)
    for part in PARTS:
        less = {key: value for key, value in sound.items() if key != part}
        assert check(less, "a") and not check({**less, "pending": "why"}, "a"), part
    for words in ([], ["--help"], ["run"], ["run", "--help"], ["run", "results", "nothing"]):  # none of them starts a measurement
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert main(words) == 2 and said.getvalue().startswith("Random traces"), words


def main(words):
    if words[:1] == ["run"] and len(words) >= 2 and not words[1].startswith("-") and set(words[2:]) <= set(PARTS):
        results = pathlib.Path(words[1])
        results.mkdir(parents=True, exist_ok=True)
        with shared_gpu() as pipe:
            said = measured(Machine(results.resolve(), pipe), words[2:] or PARTS)
        (results / FILE.name).write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
        wrong = [one for one in complaints(said) if not (words[2:] and one.endswith(static_kv.UNMEASURED))]
        print(json.dumps(said, ensure_ascii=False))
        print("\n".join(wrong) or "everything is as it has to be")
        return int(bool(wrong))
    if words == ["check"]:
        wrong = check(json.loads(FILE.read_text()), digest()) if FILE.is_file() else [f"there is no {FILE.relative_to(ROOT)}"]
        print("\n".join(wrong) or "caches whose slots held tensors ran on a GPU from these sources, and nothing was wrong")
        return int(bool(wrong))
    if words == ["selftest"]:
        selftest()
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
