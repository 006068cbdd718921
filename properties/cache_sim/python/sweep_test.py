#!/usr/bin/env python3
# ctest: name=python.sweep_gives_the_same_bytes labels=quick timeout=900 args="--program {lockstep}"
# ctest: name=python.sweep_at_length labels=full timeout=900 args="--program {lockstep} --full"
"""`lockstep sweep`: the merged result does not depend on how many shards there are, on which machine plays them, or on
what is killed meanwhile.

sweep_test.py --program PROGRAM [--full] [unittest's words]
"""
import contextlib
import io
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = str(ROOT / "cache_sim" / "python")
sys.path.insert(0, PACKAGE)
sys.path.insert(0, str(ROOT / "properties" / "support"))
import program_tests  # noqa: E402
from lockstep.settings import SettingsError  # noqa: E402
from lockstep.sweep import command, corpus, keys, merge, plan, publish, shard  # noqa: E402

CACHE = """
    import pathlib, sys
    sys.path.insert(0, %r)
    from lru_cache import LruCache, WastefulLruCache
    Cache = WastefulLruCache if pathlib.Path(%r).exists() else LruCache
    """
MIXED = """
    [sweep]
    traces = 1200
    unit = 100
    [policies]
    [mine]
    subject = cache.py:Cache
    traces = 120
    unit = 40
    [planted]
    defects = radix
    traces = 1000
    seeds = 3
    [kept]
    replay = kept
    [grid]
    compare = sessions:requests=60 sessions:requests=60,seed=2
    policies = radix, sglang-no-buffer
    capacity = 1GiB, 16GiB
    """


class Sweeps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.bug = self.folder / "bug"
        (self.folder / "cache.py").write_text(textwrap.dedent(CACHE) % (str(ROOT / "fixtures" / "subjects"), str(self.bug)))

    def plan(self, settings, shards=1, name="plan"):
        file = self.folder / "sweep.ini"
        file.write_text(textwrap.dedent(settings))
        return plan.make_plan(file, shards, self.folder / name)

    def play(self, made, shrinks=False):
        for index in range(made.shards):
            status, said = shard.run(made, index, shrinks)
            self.assertEqual(status, 0, said)

    def through(self, made):
        """The whole sweep: both sets of shards, and the report."""
        self.play(made)
        merge.merge(made.folder)
        self.play(made, shrinks=True)
        return merge.merge(made.folder)[0]

    def process(self, *words, **more):
        return subprocess.Popen([sys.executable, "-m", "lockstep.sweep", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env={**os.environ, "PYTHONPATH": PACKAGE}, **more)

    def run_to_end(self, *words):
        process = self.process(*words)
        output, complaint = process.communicate(timeout=300)
        return process.returncode, output + complaint

    def outcome(self, made):
        return {name: (made.folder / name).read_bytes() for name in ("sweep.json", "index.html")} | {
            file.name: file.read_bytes() for file in (made.folder / "findings").glob("*")}


class Bytes(Sweeps):
    def test_the_result_does_not_depend_on_the_number_of_shards(self):
        self.bug.touch()
        (self.folder / "kept").mkdir()
        for file in sorted((ROOT / "fixtures" / "traces").glob("a*.trace"))[:25]:
            shutil.copy(file, self.folder / "kept")
        outcomes = {}
        for shards in (1, 7, 64) if program_tests.FULL else (1, 7):
            made = self.plan(MIXED, shards, f"plan{shards}")
            report = self.through(made)
            self.assertTrue(report["complete"] and report["shrunk"])
            outcomes[shards] = self.outcome(made)
            self.assertEqual(outcomes[shards], outcomes[1])
        # All of it was there.
        self.assertEqual([one["found"] for one in report["canaries"]], [True])
        self.assertGreater(sum(one["found"] for one in report["defects"]), len(report["defects"]) // 2)
        self.assertEqual({one["searches"] for one in report["defects"]}, {3})
        for one in report["defects"]:
            self.assertEqual(one["median"] is not None, one["found_by"] >= 2, one)
            self.assertLessEqual(one["tests_to_detect"], one["median"] or 1000, one)
        self.assertEqual([len(one["rows"]) for one in report["comparisons"]], [4, 4])
        self.assertEqual(report["replays"], {"files": 25, "failed": []})
        self.assertTrue(report["findings"])
        self.assertGreater(len(report["drawn"]), 10)
        self.assertGreater({one["section"]: one["traces"] for one in report["corpus"]}["policies"], 10)
        page = (made.folder / "index.html").read_text()
        for part in ("sglang-no-buffer:frees-donated-slot", "cache.py:Cache", "<polyline", "<rect", "Marks never reached"):
            self.assertTrue(part in page, part)

    def test_what_is_merged_early_is_a_part(self):
        made = self.plan("[sweep]\ntraces = 300\nunit = 100\n", 4)
        report = merge.merge(made.folder)[0]
        self.assertEqual((report["status"], report["missing"]), (3, [0, 1, 2, 3]))
        shard.run(made, 2)
        report = merge.merge(made.folder)[0]
        self.assertEqual((report["status"], report["missing"], report["totals"]["units"]), (3, [0, 1, 3], 1))
        self.assertIn("3 shards missing: 0…1, 3", (made.folder / "index.html").read_text())
        self.play(made)
        self.assertEqual(merge.merge(made.folder)[0]["status"], 0)

    def test_times_stand_beside_the_result(self):
        made = self.plan("[sweep]\ntraces = 300\nunit = 100\n")
        self.play(made)
        merge.merge(made.folder)
        times = json.loads((made.folder / "times.json").read_text())
        self.assertGreater(times["sections"][1]["seeds_per_second"], 0)
        self.assertNotIn("seconds", json.loads((made.folder / "sweep.json").read_text()))


class Findings(Sweeps):
    SETTINGS = "[sweep]\ntraces = 300\nunit = 100\n[mine]\nsubject = cache.py:Cache\ntraces = 200\nunit = 50\n"

    def test_there_is_one_for_each_key_and_counts_are_folded(self):
        self.bug.touch()
        made = self.plan(self.SETTINGS, 3)
        self.play(made)
        raw = merge.merge(made.folder)[0]
        self.assertEqual({one["shrunk"] for one in raw["findings"]}, {False})
        self.play(made, shrinks=True)
        report = merge.merge(made.folder)[0]
        self.assertEqual(report["status"], 10)
        self.assertEqual({one["shrunk"] for one in report["findings"]}, {True})
        self.assertEqual(sum(one["count"] for one in report["findings"]), report["totals"]["occurrences"])
        self.assertGreater(report["totals"]["occurrences"], len(report["findings"]))
        sizes = [one["lines"] for one in report["findings"]]
        self.assertEqual(sizes, sorted(sizes))
        first = report["findings"][0]
        self.assertLess(first["lines"], 6)
        played = subprocess.run([os.environ["LOCKSTEP_PROGRAM"], "replay", str(made.folder / first["file"]), "--run-lines", "--allow-exec"],
                                cwd=self.folder, env={**os.environ, "PYTHONPATH": PACKAGE}, capture_output=True, text=True)
        self.assertEqual(played.returncode, 10, played.stdout + played.stderr)
        # Seven of them for one cause are one: each shard of the second set shrinks other keys, and none twice.
        shrunk = [one["key"] for index in range(3) for one in publish.read(made.folder / "shrunk" / f"{index}.json")["units"]]
        self.assertEqual(sorted(shrunk), sorted({key for one in raw["findings"] for key in one["early_keys"]}))

    def test_the_next_round_has_new_seeds_and_says_what_is_still_there(self):
        self.bug.touch()
        made = self.plan(self.SETTINGS, 2)
        first = self.through(made)
        for name, repaired in (("second", False), ("third", True)):
            if repaired:
                self.bug.unlink()
            folder = made.folder.parent / name
            status, said = self.run_to_end("next", made.folder, "-o", folder)
            self.assertEqual(status, 0, said)
            made = plan.read_plan(folder)
            report = self.through(made)
        self.assertEqual(report["round"], 3)
        self.assertEqual({one["state"] for one in report["findings"]}, {"gone"})
        self.assertLessEqual({one["key"] for one in first["findings"]}, {one["key"] for one in report["findings"]})
        second = json.loads((self.folder / "second" / "sweep.json").read_text())
        self.assertIn("still there", {one["state"] for one in second["findings"]})
        self.assertEqual(second["findings"][0]["first_round"], 1)
        seeds = [one["seeds"] for report in (first, second) for one in report["sections"] if "seeds" in one]
        self.assertEqual(seeds, sorted(seeds))
        self.assertLess(seeds[2][1], seeds[3][0])
        self.assertEqual(report["status"], 0)

    def test_mutants_are_searched_for(self):
        mutated = self.folder / "mutated"
        mutated.mkdir()
        program = mutated / plan.MUTANT_PROGRAM
        program.write_text(textwrap.dedent(f"""\
            #!/bin/sh
            case $LOCKSTEP_MUTANT in
              1) exec {os.environ["LOCKSTEP_PROGRAM"]} "$@" --defect sglang-no-buffer:drops-initial-state ;;
              2) exec {os.environ["LOCKSTEP_PROGRAM"]} "$@" ;;
              3) echo "lockstep: trace 7 of seed 2 has not ended" >&2; exit 12 ;;
              4) exit 3 ;;
            esac
            """))
        program.chmod(0o755)
        (mutated / plan.MUTANTS).write_text(json.dumps([{"key": f"m{i}", "number": i, "words": []} for i in range(1, 5)]))
        report = self.through(self.plan("[bulk]\nmutants = mutated\ntraces = 500\n", 2))
        found = {one["defect"]: (one["kind"], one["tests_to_detect"]) for one in report["defects"]}
        self.assertEqual(found["m1"][0], "wrong-state-prefix")
        self.assertEqual({name: found[name] for name in ("m2", "m3", "m4")}, {"m2": ("", 0), "m3": ("never ends", 7), "m4": ("dies", 500)})
        program.write_text("#!/bin/sh\n")
        made = self.plan("[bulk]\nmutants = mutated\ntraces = 500\n", 1, "other")
        program.write_text("#!/bin/sh\n#\n")
        self.assertIn("is not the program that the plan has", shard.run(made, 0, False)[1])

    def test_a_corpus_goes_from_round_to_round(self):
        kept = self.folder / "kept"
        kept.mkdir()
        (kept / "a.trace").write_text("check\n")
        made = self.plan("[sweep]\ntraces = 600\nunit = 100\n[policies]\n[kept]\nreplay = kept\n", 3)
        first = self.through(made)
        (kept / "b.trace").write_text("# run: lockstep replay %s\n# finds: leak\ncheck\n")
        self.assertEqual(self.run_to_end("next", made.folder, "-o", self.folder / "second")[0], 0)
        second = plan.read_plan(self.folder / "second")
        self.assertEqual(len(second.data["corpus"]["policies"]), first["corpus"][0]["traces"])
        report = self.through(second)
        self.assertEqual(first["replays"], {"files": 1, "failed": []})
        self.assertEqual([(one["file"], one["finds"], one["status"]) for one in report["replays"]["failed"]], [("kept/b.trace", "leak", 0)])
        self.assertEqual(report["status"], 10)
        self.assertLess(report["corpus"][0]["sets_of_marks"], first["corpus"][0]["sets_of_marks"])  # it begins with these
        missed = [next(one["marks_missed"] for one in each["sections"] if one["kind"] == "search") for each in (first, report)]
        self.assertLessEqual(set(missed[1]), set(missed[0]))

    def test_names_do_not_make_a_key(self):
        one = "# a\nconfig page=2\nadmit id=r1 tokens=a3+b1 salt=s\nextend id=r1 n=3\nadmit id=r2 tokens=a3:4 salt=s\n"
        other = "config page=2\nadmit id=x tokens=kq3+a1 salt=k\n# b\nextend id=x n=3\nadmit id=r1 tokens=kq3:4 salt=k\n"
        self.assertEqual(keys.normalised(one), keys.normalised(other))
        for difference in (("n=3", "n=4"), ("page=2", "page=4"), ("id=r2", "id=r1"), ("tokens=a3:4", "tokens=b3:4"), ("extend", "finish")):
            self.assertNotEqual(keys.normalised(one), keys.normalised(one.replace(*difference)), difference)

    def test_the_corpus_is_the_same_in_every_order(self):
        traces = [f"# Reaches {marks}.\nadmit id=r tokens={size}\n" for marks, size in
                  (("a, b", "a2"), ("a, b", "a1"), ("a", "a1"), ("b", "b1111"), ("a, c", "a1+b1"), ("a, b, c", "a3+b3+c3"))]
        cover = corpus.smallest_cover(traces)
        self.assertEqual(cover, corpus.smallest_cover(traces[::-1]))
        self.assertEqual([corpus.marks_of(one) for one in cover], [("a",), ("a", "b"), ("a", "c"), ("a", "b", "c")])
        self.assertIn("tokens=a1\n", cover[1])

    @program_tests.full
    def test_a_server_is_searched_too(self):
        toy = f"{sys.executable} {ROOT / 'fixtures' / 'subjects' / 'toy_server.py'}"
        made = self.plan(f"""
            [server]
            server = llama --program '{toy} --bug stops-early' --model toy --config slots=1,clients=1 --findings 1 --shrink-lives 10
            requests = 40
            unit = 20
            """, 2)
        report = self.through(made)
        self.assertEqual(report["status"], 10)
        self.assertEqual(report["findings"][0]["kind"], "answer-differs")
        self.assertEqual(json.loads((made.folder / report["findings"][0]["file"]).read_text()), json.loads(report["findings"][0]["trace"]))
        for index in range(2):
            self.assertEqual(shard.run(made, index, again=True)[0], 0)


class Trouble(Sweeps):
    LONG = "[sweep]\ntraces = 60000\nunit = 20000\n"

    def searches_below(self, process, seconds=60):
        """Waits for the program below a shard's process, and returns its number."""
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            for child in children.read_text().split():
                with contextlib.suppress(OSError):
                    if b"policies" not in (words := pathlib.Path(f"/proc/{child}/cmdline").read_bytes()) and b"20000" in words \
                            and b"--defect" not in words:
                        return int(child)
            time.sleep(0.01)
        self.fail(f"no search: {process.communicate()}")

    def test_a_killed_shard_leaves_nothing(self):
        made = self.plan(self.LONG, 2)
        process = self.process("run", made.folder, "--index", 1)
        self.searches_below(process)
        process.kill()
        process.communicate()
        self.assertEqual([file.name for file in made.folder.glob("done/*")], [])
        self.assertEqual(merge.merge(made.folder)[0]["missing"], [0, 1])

    def test_a_killed_program_is_neither_pass_nor_failure(self):
        made = self.plan(self.LONG, 2)
        process = self.process("run", made.folder, "--index", 1)
        os.kill(self.searches_below(process), signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 3, said)
        report = merge.merge(made.folder)[0]
        self.assertEqual((report["missing"], report["findings"]), ([0, 1], []))
        self.assertIn("the program was ended by signal 9", report["lost"][0]["text"])
        self.assertIn("signal 9", (made.folder / "index.html").read_text())

    def test_a_large_program_needs_no_memory_of_its_size(self):
        large = self.folder / "program"
        large.touch()
        os.truncate(large, 64 << 20)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        plan.program_digest(large)
        self.assertLess(tracemalloc.get_traced_memory()[1], 8 << 20)

    def test_too_little_memory_is_neither_pass_nor_failure(self):
        if program_tests.is_sanitized():
            self.skipTest("a sanitizer's program needs more addresses than any limit leaves")
        made = self.plan("[grid]\ncompare = sessions:requests=1000000,gap_us=1\npolicies = radix\ncapacity = 64GiB\n", 2)
        before = resource.getrlimit(resource.RLIMIT_AS)
        # The interpreter is inside this limit already; the program is not, with a million requests that all wait.
        process = self.process("run", made.folder, "--index", 1, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (90 << 20, before[1])))
        said = process.communicate(timeout=300)[1]
        self.assertEqual(process.returncode, 3, said)
        self.assertIn("bad_alloc", said)
        self.assertIn("bad_alloc", merge.merge(made.folder)[0]["lost"][0]["text"])

    def test_a_unit_over_its_limit_is_a_finding(self):
        made = self.plan("[sweep]\ntraces = 400000000\nunit = 200000000\nlimit = 1\n", 2)
        self.play(made)
        report = merge.merge(made.folder)[0]
        self.assertEqual(report["status"], 12)
        self.assertEqual([(one["kind"], one["unit"]) for one in report["own_findings"]], [("sweep-over-limit", 1), ("sweep-over-limit", 2)])
        self.assertIn("lockstep sweep run DIR --unit 1", (made.folder / "index.html").read_text())
        self.assertEqual(shard.run(made, 1, again=True)[0], 0)  # it is not compared: a faster machine may end it in time

    def test_two_copies_of_an_index_give_one_result(self):
        made = self.plan("[sweep]\ntraces = 600\nunit = 100\n", 2)
        copies = [self.process("run", made.folder, "--index", 0, "--again") for _ in range(3)]
        said = [copy.communicate(timeout=300) for copy in copies]
        self.assertEqual([copy.returncode for copy in copies], [0, 0, 0], said)
        self.assertEqual(sum("units in" in output for output, _ in said), 1, said)
        self.assertEqual([file.name for file in made.folder.glob("done/*")], ["0.json"])
        self.assertEqual(self.run_to_end("run", made.folder, "--index", 0), (0, "shard 0 is done already\n"))
        self.assertFalse((made.folder / "differs").exists())

    def test_another_result_of_the_same_unit_is_a_finding(self):
        made = self.plan("[mine]\nsubject = cache.py:Cache\ntraces = 60\nunit = 30\n", 2)
        self.play(made)
        self.bug.touch()  # the subject's files are the same, and its answers are not
        results = [shard.run(made, index, again=True) for index in range(2)]
        self.assertIn(13, [status for status, _ in results], results)
        report = merge.merge(made.folder)[0]
        self.assertEqual(report["status"], 13)
        self.assertEqual({one["kind"] for one in report["own_findings"]}, {"sweep-not-deterministic"})
        self.assertIn("sweep-not-deterministic", (made.folder / "index.html").read_text())

    def test_another_build_is_refused(self):
        made = self.plan("[sweep]\ntraces = 200\nunit = 100\n", 2)
        other = self.folder / "lockstep"
        shutil.copy(os.environ["LOCKSTEP_PROGRAM"], other)
        with open(other, "ab") as program:
            program.write(b"\0")
        done = subprocess.run([sys.executable, "-m", "lockstep.sweep", "run", str(made.folder), "--index", "0"], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": PACKAGE, "LOCKSTEP_PROGRAM": str(other)})
        self.assertEqual(done.returncode, 3)
        self.assertRegex(done.stderr, r"the plan is of build \S+ \(\w+\), and this is build \S+ \(\w+\)")
        self.assertFalse((made.folder / "done").exists())

    def test_a_result_of_another_build_is_named_and_replaced(self):
        made = self.plan("[sweep]\ntraces = 200\nunit = 100\n", 2)
        self.play(made)
        sound = self.folder / "sound"
        shutil.copytree(made.folder, sound)
        wanted = merge.merge(sound)[0]
        for change in (lambda data: data.update(build="0" * 16), lambda data: data.update(plan="0" * 16), lambda data: data["units"].pop(),
                       None):
            file = made.folder / "done" / "0.json"
            data = json.loads(file.read_text())
            if change:
                change(data)
                file.write_text(json.dumps(data))
            else:
                file.write_text(file.read_text()[:-20])
            report = merge.merge(made.folder)[0]
            self.assertEqual((report["foreign"][-1], report["missing"], report["status"]), ("done/0.json", [0], 3))
            self.assertEqual(shard.run(made, 0)[0], 0)
            report = merge.merge(made.folder)[0]
            self.assertEqual((report["missing"], report["totals"]), ([], wanted["totals"]))
        self.assertTrue(all(".foreign-" in name for name in report["foreign"]))

    def test_another_version_of_a_subject_is_refused(self):
        made = self.plan("[mine]\nsubject = cache.py:Cache\ntraces = 20\n", 1)
        with open(self.folder / "cache.py", "a") as file:
            file.write("# changed\n")
        with self.assertRaisesRegex(plan.Refused, r"\[mine\] the plan is for a subject of files \w+, and here are files \w+"):
            shard.run(made, 0)

    def test_a_full_disk_leaves_nothing_half(self):
        mount = ["unshare", "--user", "--map-root-user", "--mount"]
        if subprocess.run([*mount, "true"], capture_output=True).returncode:
            self.skipTest("this machine lets nobody mount a small disk")
        made = self.plan("[sweep]\ntraces = 600\nunit = 100\n", 1)
        (self.folder / "disk").mkdir()
        script = (f"mount -t tmpfs -o size=48k tmpfs disk && cp -r plan disk/ && {sys.executable} -m lockstep.sweep run disk/plan --index 0; "
                  "echo status $?; ls -A disk/plan/done; mount -o remount,size=8m disk && "
                  f"{sys.executable} -m lockstep.sweep run disk/plan --index 0; echo status $?; ls -A disk/plan/done; cp disk/plan/done/0.json .")
        done = subprocess.run([*mount, "sh", "-c", script], cwd=self.folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
        self.assertIn("No space left on device", done.stderr)
        self.assertRegex(done.stdout, r"\Astatus 3\nshard 0: .*\nstatus 0\n0.json\n\Z")
        self.play(made)
        self.assertEqual((self.folder / "0.json").read_bytes(), (made.folder / "done" / "0.json").read_bytes())

    def test_a_killed_merge_loses_nothing(self):
        self.bug.touch()
        made = self.plan(Findings.SETTINGS, 5)
        self.through(made)
        wanted = self.outcome(made)
        for wait in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3):
            merging = self.process("merge", made.folder)
            time.sleep(wait)
            merging.kill()
            merging.communicate()
            for file in ("sweep.json", "index.html"):
                self.assertEqual((made.folder / file).read_bytes(), wanted[file])
        merge.merge(made.folder)
        self.assertEqual(self.outcome(made), wanted)

    def test_a_canary_that_is_not_found_fails_the_sweep(self):
        before = plan.DEFECT_TRACES
        plan.DEFECT_TRACES = 1
        try:
            made = self.plan("[sweep]\ntraces = 100\ncanary = marconi:leaks-branch-state\n")
        finally:
            plan.DEFECT_TRACES = before
        self.play(made)
        self.assertEqual(merge.merge(made.folder)[0]["status"], 3)
        self.assertIn("✗ not found", (made.folder / "index.html").read_text())

    def test_writers_of_one_file_leave_one_whole_text(self):
        texts = [f"{number}\n" * 2000 for number in range(8)]
        won = []
        writers = [threading.Thread(target=lambda text=text: won.append((publish.publish(self.folder / "x.json", text), text))) for text in texts]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        written = (self.folder / "x.json").read_text()
        self.assertEqual([text[:2] for is_first, text in won if is_first], [written[:2]])
        self.assertIn(written, texts)
        self.assertEqual(len(won), len(texts))


class Words(Sweeps):
    def test_the_index_comes_from_an_engine(self):
        made = self.plan("[sweep]\ntraces = 200\nunit = 100\n", 3)
        for number, name in enumerate(("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "PARALLEL_SEQ")):
            value = number + 1 if name == "PARALLEL_SEQ" else number
            done = subprocess.run([sys.executable, "-m", "lockstep.sweep", "run", str(made.folder)], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": PACKAGE, name: str(value)})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue((made.folder / "done" / f"{number}.json").is_file(), name)
        self.assertEqual(self.run_to_end("run", made.folder)[0], 2)
        for one in ("--index", "--unit"):
            for number in (-1, 99999):
                self.assertEqual(self.run_to_end("run", made.folder, one, number)[0], 2)

    def test_a_unit_can_be_played_alone(self):
        made = self.plan("[sweep]\ntraces = 200\nunit = 100\n", 2)
        self.play(made)
        status, said = self.run_to_end("run", made.folder, "--unit", 2)
        self.assertEqual(status, 0)
        self.assertEqual(json.loads(said), publish.read(made.folder / "done" / "0.json")["units"][1])

    def test_bad_settings_are_named(self):
        for settings, said in (("[sweep]\ntrace = 3\n", r"\.ini:2: \[sweep\] there is no field `trace`"),
                               ("[a]\nunit = 2\n[sweep]\n; all\nUnit= 1.5\n", r"\.ini:5: \[sweep\] unit: `1.5` is not a whole number"),
                               ("[canary]\nsubject = radix\n", r"\[canary\] this name belongs to a part of every plan"),
                               ("[a]\ncompare = sessions\ncapacity = 1GiB\n", "policies: a comparison needs it"),
                               ("[a]\ndefects = nobody\n", "there is neither a defect nor a subject `nobody`"),
                               ("[a]\nmutants = nowhere\n", r"nowhere is not what `properties/mutants/run.py --sweep` makes"),
                               ("[a]\nreplay = nowhere\n", "there is no trace in nowhere"),
                               ("[a]\nsubject = radix\nwait = 3\n", "there is no field `wait`")):
            with self.assertRaisesRegex(SettingsError, said):
                self.plan(settings)
        with self.assertRaisesRegex(SettingsError, "there is no plan"):
            plan.read_plan(self.folder / "none")
        made = self.plan("[sweep]\ntraces = 200\n")
        with self.assertRaisesRegex(SettingsError, "there is a plan already"):
            self.plan("[sweep]\ntraces = 200\n")
        for name in ("known.json", "plan.json"):
            (made.folder / name).write_text('{"lockstep_sweep": 1}')
            with self.assertRaisesRegex(SettingsError, f"{name}: is not as `lockstep sweep plan` wrote it"):
                plan.read_plan(made.folder).known()

    def test_a_subject_that_cannot_start_is_left_out_where_that_is_allowed(self):
        settings = "[mine]\nsubject = exec:python3 nowhere.py\noptional = %s\n"
        with self.assertRaisesRegex(plan.Refused, r"\[mine\] cannot start"):
            self.plan(settings % "no")
        made = self.plan(settings % "yes")
        self.assertEqual([one["name"] for one in made.data["left_out"]], ["mine"])
        self.play(made)
        self.assertIn("mine was left out", (merge.merge(made.folder), (made.folder / "index.html").read_text())[1])

    def test_the_settings_of_a_night_make_a_plan(self):
        made = plan._Reader(ROOT / "fixtures" / "nightly.ini", plan.this_build())
        self.assertIn("llama-server", [section["name"] for section in made.sections])
        self.assertEqual(made.sections[0]["defects"], ["sglang-no-buffer:frees-donated-slot"])

    def test_the_page_of_the_data_has_every_field(self):
        self.bug.touch()
        (self.folder / "kept").mkdir()
        shutil.copy(ROOT / "fixtures" / "traces" / "finish_keeps_its_state.trace", self.folder / "kept")
        made = self.plan(MIXED)
        report = self.through(made)
        told = (ROOT / "cache_sim" / "python" / "sweep.md").read_text()
        for name in report:
            self.assertIn(f"`{name}`", told)
        for name in report["findings"][0]:
            self.assertIn(f"`{name}`", told)

    def test_merge_prints_what_a_program_reads(self):
        made = self.plan("[sweep]\ntraces = 200\nunit = 100\n", 2)
        self.play(made)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.assertEqual(command.main(["merge", str(made.folder)]), 0)
        self.assertRegex(output.getvalue(), r"\A3 of 3 units, \d+ traces, \d+ operations: something was found 0 times\ncanary \S+: found by trace \d+\n"
                                            r"nothing found; .*index.html\n\Z")


if __name__ == "__main__":
    program_tests.main(__doc__)
