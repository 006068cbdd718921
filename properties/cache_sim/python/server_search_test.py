#!/usr/bin/env python3
# ctest: name=python.server_search labels=quick timeout=900 args="--program {lockstep}"
# ctest: name=python.server_search_at_length labels=full timeout=1800 args="--program {lockstep} --full"
"""`lockstep server`: random requests to a server, judged beside what it says with an empty cache.

server_search_test.py --program PROGRAM [--full] [unittest's words]

The server is fixtures/subjects/toy_server.py, sound, and broken in each way that it knows. It mostly answers in this
process, because a search starts it many times.
"""
import contextlib
import http.client
import io
import json
import math
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "cache_sim" / "python"))
sys.path.insert(0, str(ROOT / "fixtures" / "subjects"))
sys.path.insert(0, str(ROOT / "properties" / "support"))
import toy_server  # noqa: E402
from lockstep.server import child, command, engines, search  # noqa: E402
from lockstep.server.drawing import Drawing  # noqa: E402
from lockstep.server.life import play  # noqa: E402
from lockstep.server.shrinking import PLAYS_MAX, PLAYS_MAX_OF_FEW, Shrinker, plays_for  # noqa: E402
from lockstep.server.steps import BadFile, Finding, Kept, Step  # noqa: E402
from lockstep.server.truth import TruthDiffers, Truths  # noqa: E402
from lockstep.server.verdict import judge  # noqa: E402
from program_tests import FULL, full, main  # noqa: E402

TOY = str(ROOT / "fixtures" / "subjects" / "toy_server.py")


class InThisProcess:
    """Stands for lockstep.server.child.Child."""

    def __init__(self, words):
        self.ended = ""
        self.server = toy_server.Server(words)
        self.server.end = self.end
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()

    def end(self):
        self.ended = "ended with status 3"

    def died(self):
        return self.ended

    def last_line(self):
        return "out of memory"

    def stop(self):
        self.server.closed.set()
        self.server.shutdown()
        self.server.server_close()


class Toy(engines.Llama):
    """The toy by llama-server's native API."""

    bug = ""  # or several, with spaces
    truth_bug = ""

    def start(self, config, folder, truth=False):
        words = (self.truth_words if truth else self.words)(config, 0, folder)
        if truth:
            words = [*words, "--no-cache", *(["--bug", self.truth_bug] if self.truth_bug else [])]
        for bug in [] if truth else self.bug.split():
            words = [*words, "--bug", bug]
        return InThisProcess(words)


#: What a search fixes, so that it takes a second and not a minute.
WHERE = {
    "stale-checkpoint": {"slots": 1, "clients": 1},
    "busy-slot": {"slots": 2, "clients": 3, "named_slots": True, "host_cache": "default", "long": True},
    "moved-snapshots": {"slots": 3, "clients": 4, "drafts": "ngram-simple"},
    "queued-copy": {"slots": 3, "clients": 1, "copies": True, "unified": False},
    "says-more-cached": {"slots": 1, "clients": 1},
    "stops-early": {"slots": 1, "clients": 1},
    "dies": {"slots": 1, "clients": 1},
    "falls-silent": {"slots": 1, "clients": 1},
    "forgets-to-crop": {"slots": 1, "clients": 1},
}
KIND = {"says-more-cached": "cached-too-much", "stops-early": "answer-differs", "dies": "subject-died",
        "falls-silent": "subject-silent"}
QUICK = ("stale-checkpoint", "dies")  # the others with --full
MOST_STEPS = {"dies": 1, "falls-silent": 1, "says-more-cached": 1, "stops-early": 2, "forgets-to-crop": 2,
              "stale-checkpoint": 3, "queued-copy": 4, "busy-slot": 4, "moved-snapshots": 8}


def toy(bug="", timeout=20.0):
    engine = Toy("toy", ["toy.gguf"], (3, 303), timeout)
    engine.bug = bug
    return engine


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def searched(self, engine, **words):
        options = search.Options(**{"out": self.folder / "found", "quiet": True, "shrink_lives": 150, "findings": 1,
                                    **words})
        with contextlib.redirect_stdout(io.StringIO()) as said:
            outcome = search.Search(engine, options).run()
        self.said = said.getvalue()
        return outcome


class Searches(Scratch):
    def test_a_sound_server_passes(self):
        """Every feature is drawn, hits are many, near ties are met, and nothing is found."""
        outcome = self.searched(toy(), requests=300, seed=3)
        self.assertEqual([one.finding for one in outcome.found], [])
        self.assertGreaterEqual(outcome.answers, 300)
        self.assertGreater(outcome.cached, outcome.prompt_tokens // 10)
        if FULL:
            self.assertGreater(self.searched(toy(), requests=2000, seed=4).near_ties, 0)

    def test_each_bug_is_found_and_shrunk(self):
        for bug in toy_server.BUGS if FULL else QUICK:
            with self.subTest(bug):
                engine = toy(bug, timeout=2.0 if bug == "falls-silent" else 20.0)
                # A finding of several clients shows in some plays, and in few of them on a busy machine.
                more = {"shrink_lives": 1500, "shrink_seconds": 300.0} if WHERE[bug]["clients"] > 1 else {}
                outcome = self.searched(engine, requests=3000, fixed=WHERE[bug], **more)
                self.assertEqual(len(outcome.found), 1, bug)
                found = outcome.found[0]
                self.assertEqual(found.finding.kind, KIND.get(bug, "output-differs"))
                self.assertTrue(found.shrunk, self.said)
                self.assertLessEqual(found.steps, MOST_STEPS[bug], self.said)
                kept = Kept.read(self.folder / "found" / f"{found.name}.json")
                compile((self.folder / "found" / f"{found.name}.py").read_text(), bug, "exec")
                self.assertTrue(self.seen(engine, kept), "the kept finding comes again")
                engine.bug = ""
                self.assertFalse(self.seen(engine, kept), "and not where the server is sound")

    def seen(self, engine, kept):
        truths = Truths(engine, self.folder)
        self.addCleanup(truths.close)
        return any(judge(play(engine, kept.config, kept.steps, self.folder), truths.of(kept.config), self.folder, 0.02)
                   .findings for _ in range(3 * kept.plays))

    @full
    def test_a_search_goes_on_behind_a_finding(self):
        """Two bugs, each of which needs features that the other one does not: both are found, each is named once."""
        fixed = {"clients": 1, "slots": 2, "unified": False}
        outcome = self.searched(toy("stale-checkpoint queued-copy"), requests=3000, seed=1, findings=2, fixed=fixed)
        features = [set(one.features) for one in outcome.found]
        self.assertEqual(len(features), 2, self.said)
        self.assertTrue(all(one.shrunk for one in outcome.found), self.said)
        self.assertEqual([{"checkpoints", "copies"} & one for one in sorted(features, key=lambda one: "copies" in one)],
                         [{"checkpoints"}, {"copies"}], self.said)

    def test_later_lives_leave_out_what_a_finding_needs(self):
        found = search.Search(toy(), search.Options(fixed={"slots": 2}))
        found.needed = [{"slots": 2, "copies": True, "host_cache": 1}]
        off = set()
        for seed in range(40):
            config = toy().draw(random.Random(seed), {"slots": 2})
            before = dict(config)
            found.keep_away(config, random.Random(seed))
            needs = before["copies"] and before["host_cache"] != 0
            self.assertEqual(config != before, needs)
            off |= {name for name in config if config[name] != before[name]}
            self.assertFalse(config["copies"] and config["host_cache"] != 0)
        self.assertEqual(off, {"copies", "host_cache"}, "the slots are fixed")

    @full
    def test_the_features_that_a_finding_needs_are_named(self):
        outcome = self.searched(toy("queued-copy"), requests=6000, seed=2, fixed={"clients": 1})
        features = outcome.found[0].features
        self.assertTrue(features.get("copies"), features)
        self.assertEqual(set(features) - {"copies", "slots", "host_cache", "small_batch"}, set(), features)

    @full
    def test_a_known_bug_is_avoided(self):
        known = sorted(engines.Llama.known)
        for bug in known:
            with self.subTest(bug):
                outcome = self.searched(toy(bug), requests=200, seed=5, avoid=known)
                self.assertEqual([one.finding for one in outcome.found], [])

    @full
    def test_findings_with_one_cause_are_one(self):
        fixed = {"clients": 1, "slots": 1, "checkpoints": "default"}
        outcome = self.searched(toy("stale-checkpoint"), requests=800, seed=4, findings=9, fixed=fixed)
        self.assertGreater(outcome.bad_lives, 1)
        self.assertEqual(len(outcome.found), 1, self.said)
        self.assertEqual(sum(one.lives for one in outcome.found), outcome.bad_lives)

    def test_a_seed_is_a_run(self):
        def log(seed):
            path = self.folder / "log.jsonl"
            path.write_text("")
            self.searched(toy(), requests=60, seed=seed, fixed={"clients": 1}, log=path)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            return [(one["id"], one["prompt"], one["output"], one["cached"]) for one in lines]

        self.assertEqual(log(1), log(1))
        self.assertNotEqual(log(1), log(2))


class Truth(Scratch):
    CONFIG = {"model": "toy.gguf"}

    def truth(self, bug):
        engine = toy()
        engine.truth_bug = bug
        truths = Truths(engine, self.folder)
        self.addCleanup(truths.close)
        return truths.of({**toy().draw(random.Random(1), {}), **self.CONFIG})

    def test_it_is_the_models(self):
        prompt = [5, 6, 7]
        answer = self.truth("")(prompt, 3)
        for token, gap in zip(answer.output, answer.gaps):
            first, _, lead = toy_server.says(toy_server.state_of(prompt))
            self.assertEqual(token, first)
            self.assertAlmostEqual(gap, lead)
            prompt.append(token)

    def test_a_truth_with_a_cache_is_refused(self):
        with self.assertRaises(TruthDiffers):
            self.truth("says-more-cached")([5, 6, 7], 3)


class Steps(Scratch):
    def test_a_kept_finding_is_read_as_it_was_written(self):
        steps = [Step("r1", prompts=[[5, 6], [7]], n=3, wait="start"), Step("r2", "save", slot=1, file="0.bin")]
        kept = Kept("llama", {"slots": 2}, steps, Finding("output-differs", "r1", "text", "1", "2"), 3)
        kept.write(self.folder / "kept.json")
        self.assertEqual(Kept.read(self.folder / "kept.json"), kept)
        for text in ("", "[]", "{}", '{"engine": "llama", "config": {}, "steps": [{"what": 1}], "finding": {}}'):
            (self.folder / "bad.json").write_text(text)
            with self.assertRaises(BadFile):
                Kept.read(self.folder / "bad.json")

    def test_shrinking_keeps_the_kind_and_the_step(self):
        """A script in which another request is wrong as well is shrunk to the one that was asked for."""
        engine = toy("stops-early")
        truths = Truths(engine, self.folder)
        self.addCleanup(truths.close)
        config = engine.draw(random.Random(1), {"slots": 1, "clients": 1})
        steps = [Step(f"r{k}", prompts=[[9, 9, 9, 9, 9, 9, k]], n=8) for k in range(3, 9)]
        life = play(engine, config, steps, self.folder)
        findings = judge(life, truths.of(config), self.folder, 0.02).findings
        self.assertGreater(len(findings), 1)
        shrinker = Shrinker(engine, config, steps, findings[-1], truths, self.folder, 0.02)
        self.assertTrue(shrinker.reduce_configuration())
        shrinker.reduce_steps()
        self.assertEqual(shrinker.steps[-1].id, findings[-1].step)
        self.assertEqual(len(shrinker.steps), 2)

    def test_what_does_not_come_again_is_kept_whole(self):
        engine = toy()
        truths = Truths(engine, self.folder)
        self.addCleanup(truths.close)
        config = engine.draw(random.Random(1), {})
        steps = Drawing(engine, config, random.Random(1), truths.of(config)).steps(20)
        finding = Finding("output-differs", "r9", "once")
        shrinker = Shrinker(engine, config, steps, finding, truths, self.folder, 0.02)
        self.assertFalse(shrinker.reduce_configuration())
        self.assertEqual(shrinker.steps, steps)


class ShrinkTime(Scratch):
    """It is the limit of the life that is under way as well."""

    def test_it_bounds_a_life_that_hangs(self):
        engine = toy("falls-silent", timeout=2.0)
        found = self.searched(engine, requests=3000, fixed=WHERE["falls-silent"], shrink_seconds=1).found[0]
        self.assertEqual((found.finding.kind, found.shrunk), ("subject-silent", False))
        self.assertLess(found.shrink_seconds, 2, self.said)
        self.assertEqual((engine.timeout, engine.end), (2.0, float("inf")), "what is searched next has all of its time")

    def test_it_bounds_a_life_of_many_slow_answers(self):
        engine = toy("stops-early")
        truths = Truths(engine, self.folder)
        self.addCleanup(truths.close)
        config = engine.draw(random.Random(1), {"slots": 1, "clients": 1})
        steps = [Step(f"r{k}", prompts=[[9, 9, 9, 9, 9, 9, k]], n=8) for k in range(3, 23)]
        finding = judge(play(engine, config, steps, self.folder), truths.of(config), self.folder, 0.02).findings[-1]
        engine.ask = lambda port, step: (time.sleep(0.2), [engines.Answer([5] * step.n)])[1]
        begin = time.monotonic()
        shrinker = Shrinker(engine, config, steps, finding, truths, self.folder, 0.02, seconds=0.5)
        self.assertFalse(shrinker.reduce_configuration())
        self.assertEqual(shrinker.steps, steps)
        self.assertLess(time.monotonic() - begin, 2)

    def test_it_bounds_a_server_that_never_gets_ready(self):
        engine = engines.OpenAI("sleep 60", ["m"], (3, 303), 20.0, "sleep 60")
        for engine.start_seconds, engine.end in (3.0, time.monotonic() + 0.3), (1.0, math.inf):
            begin = time.monotonic()
            with self.assertRaises(child.NoServer):
                engine.start({"texts": False, "model": "m"}, self.folder)
            self.assertLess(time.monotonic() - begin, 2)

    def test_an_interrupted_start_leaves_no_server(self):
        engine = engines.OpenAI("sleep 60", ["m"], (3, 303), 20.0, "sleep 60")
        started = []

        def interrupted(server, path, seconds):
            started.append(server)
            raise KeyboardInterrupt

        with mock.patch.object(child.Child, "wait_ready", interrupted), self.assertRaises(KeyboardInterrupt):
            engine.start({"texts": False, "model": "m"}, self.folder)
        self.assertIsNotNone(started[0].process.poll())


class Plays(unittest.TestCase):
    def test_what_comes_seldom_is_played_often(self):
        self.assertEqual(plays_for(4, 4, 50), 1)
        self.assertEqual(plays_for(2, 4, 50), 6)  # 1 - 2 ** -6 > 0.98
        self.assertEqual(plays_for(1, 12, 50), PLAYS_MAX)
        self.assertEqual(plays_for(1, 12, 3), PLAYS_MAX_OF_FEW)


class HostileServers(Scratch):
    """Any bytes of a server are a finding, in time, and their text gives no orders to a terminal."""

    def raw(self, pieces, pause=0.0):
        """The port of a server that answers once with these bytes."""
        listening = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listening.close)

        def answer():
            client, _ = listening.accept()
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(pause)

        threading.Thread(target=answer, daemon=True).start()
        return listening.getsockname()[1]

    def test_an_answer_has_one_time_for_all_of_it(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
        begin = time.monotonic()
        with self.assertRaisesRegex(TimeoutError, "/props has no answer within 0.3 s"):
            child.get(self.raw([head] + [b" "] * 1000, 0.05), "/props", 0.3)
        self.assertLess(time.monotonic() - begin, 10)

    def test_an_answer_is_whole_and_not_endless(self):
        with self.assertRaises(http.client.IncompleteRead):
            child.get(self.raw([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]), "/props", 20)
        with mock.patch.object(child, "SIZE_MAX", 1000), self.assertRaisesRegex(http.client.HTTPException, "more than"):
            child.get(self.raw([b"HTTP/1.1 200 OK\r\n\r\n", b" " * 5000]), "/props", 20)

    def test_what_can_be_no_answer_is_a_finding(self):
        for output, cached in (([1.5], 0), ([None], 0), ([-7], 0), ([1 << 70], 0), ("abc", 0), ([True], 0), ([1], -4),
                               ([1], "7"), ([1], float("nan"))):
            with self.subTest(output=output, cached=cached), self.assertRaises(ValueError):
                engines.Answer(output, cached)
        engine = toy()
        engine.ask = lambda port, step: [engines.Answer([-7])]
        outcome = self.searched(engine, requests=1, shrink_lives=1)
        self.assertEqual([one.finding.kind for one in outcome.found], ["subject-garbled"])

    def test_its_text_is_printable_and_stands_in_the_reproduction(self):
        engine = toy()

        def ask(port, step):
            raise child.Refused('HTTP 500: \x1b[31m\n::error::no\\x """')

        engine.ask = ask
        self.searched(engine, requests=1, shrink_lives=1)
        self.assertIn("HTTP 500: \\x1b[31m\\n::error::no", self.said)
        reproduction = (self.folder / "found" / "llama-1.py").read_text()
        self.assertIn("HTTP 500: ", compile(reproduction, "llama-1.py", "exec").co_consts[0])


class Commands(Scratch):
    """The program as it is called, with servers that are processes."""

    def run_it(self, *words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "cache_sim" / "python")}
        return subprocess.run([sys.executable, "-m", "lockstep.server", *words], capture_output=True, text=True,
                              env=environment, cwd=self.folder, timeout=300)

    def test_a_finding_is_written_and_played_again(self):
        program = f"{sys.executable} {TOY}"
        found = self.run_it("search", "llama", "--program", f"{program} --bug stale-checkpoint", "--model", "toy.gguf",
                            "--config", "slots=1,clients=1", "--requests", "2000", "--findings", "1", "--shrink-lives",
                            "25", "--json", "outcome.json")
        self.assertEqual(found.returncode, 11, found.stdout + found.stderr)
        self.assertIn("llama-1: output-differs, found after", found.stdout)
        self.assertRegex(found.stdout, "needs     .*checkpoints=")
        outcome = json.loads((self.folder / "outcome.json").read_text())
        self.assertEqual(outcome["found"][0]["name"], "llama-1")
        kept = str(self.folder / "findings" / "llama-1.json")
        broken = self.run_it("replay", kept, "--program", f"{program} --bug stale-checkpoint")
        self.assertEqual(broken.returncode, 11, broken.stdout + broken.stderr)
        sound = self.run_it("replay", kept, "--program", program)
        self.assertEqual(sound.returncode, 0, sound.stdout + sound.stderr)
        script = subprocess.run([sys.executable, str(self.folder / "findings" / "llama-1.py")], capture_output=True,
                                text=True, timeout=60)
        self.assertEqual(script.returncode, 1, script.stdout + script.stderr)
        self.assertIn("WRONG, for [", script.stdout)
        self.assertIn("1 wrong", script.stdout)

    @full
    def test_openais_completions(self):
        """Token ids where the server gives them, else its text; a prompt that is rewritten finds what was not cropped."""
        program = f"{sys.executable} {TOY} --port {{port}}"
        words = ["search", "openai", "--truth", f"{program} --no-cache", "--requests", "100", "--reset", "/flush_cache"]
        for texts in ("no", "yes"):
            with self.subTest(texts=texts):
                sound = self.run_it(*words, "--program", program, "--config", f"texts={texts}")
                self.assertEqual(sound.returncode, 0, sound.stdout + sound.stderr)
                broken = self.run_it(*words, "--program", f"{program} --bug forgets-to-crop", "--config",
                                     f"texts={texts},clients=1", "--shrink-lives", "20", "--findings", "1",
                                     "--requests", "2000")
                self.assertEqual(broken.returncode, 11, broken.stdout + broken.stderr)

    def test_bad_words_are_named(self):
        for words, said in (
            (["search", "llama"], "llama needs --model, a model's file"),
            (["search", "openai"], "openai needs --program, the command that starts the server"),
            (["search", "openai", "--program", "x"], "openai needs --truth, a command for the same server without any reuse"),
            (["search", "llama", "--model", "m", "--config", "colour=3"], "--config: `colour=3` is not FIELD=VALUE with one of the fields clients"),
            (["search", "llama", "--model", "m", "--avoid", "rain"], "--avoid: there is no `rain`; the names are busy-slot"),
            (["search", "llama", "--model", "m", "--vocabulary", "9"], "--vocabulary 9 is not LOW:HIGH"),
            (["search", "llama", "--model", "m", "--program", "x '"], "--program `x '`: No closing quotation"),
            (["search", "llama", "--model", "m", "--time", "-1"], "--time -1.0 is not a number from 0 on"),
            (["search", "llama", "--model", "m", "--timeout", "0"], "--timeout 0 leaves no time for an answer"),
            (["replay", "none.json"], "none.json: cannot be read: No such file or directory"),
        ):
            done = self.run_it(*words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(said, done.stderr)
        for program, said in (("/nowhere/llama-server", "does not start"), ("false", "ended with 1: it printed nothing")):
            done = self.run_it("search", "llama", "--program", program, "--model", "m")
            self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
            self.assertIn(said, done.stderr)


if __name__ == "__main__":
    main(__doc__)
