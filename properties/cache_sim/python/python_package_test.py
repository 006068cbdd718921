#!/usr/bin/env python3
# ctest: name=python.package_searches_and_replays labels=quick timeout=600 args="--program {lockstep}"
# ctest: name=python.package_at_length labels=full timeout=900 args="--program {lockstep} --full"
"""The Python package: the subject protocol, explore, replay and the nightly search.

python_package_test.py --program PROGRAM [--full] [unittest's words]

Runs the package of the source tree with PROGRAM, without anything that a bare machine lacks: no pytest, no network.
"""
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import unittest.mock
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = str(ROOT / "cache_sim" / "python")
sys.path.insert(0, PACKAGE)
sys.path.insert(0, str(ROOT / "properties" / "support"))
sys.path.insert(0, str(ROOT / "fixtures" / "subjects"))
import lockstep  # noqa: E402
import program_tests  # noqa: E402
from lockstep import calls, html_parts, nightly, session  # noqa: E402
from hybrid_cache import SharingHybridCache  # noqa: E402
from lru_cache import LruCache, WastefulLruCache  # noqa: E402

AMPLE = {"kv_tokens": 1 << 20}


class Infinite(lockstep.Subject):
    """A prefix cache of single tokens with room for everything; `kept` is where bugs are planted."""

    def __init__(self, config):
        super().__init__(config)
        self.stored, self.running = set(), {}

    def admit(self, id, tokens, salt):
        cached = 0
        while cached < len(tokens) - 1 and (salt, tokens[:cached + 1]) in self.stored:
            cached += 1
        self.running[id] = [salt, tokens, cached]
        return cached

    def extend(self, id, n, tokens):
        self.running[id][1] += tokens
        self.running[id][2] += n

    def checkpoint(self, id, up_to):
        salt, tokens, computed = self.running[id]
        self.store(salt, tokens, computed if up_to is None else up_to)

    def store(self, salt, tokens, size):
        self.stored.update((salt, tokens[:end + 1]) for end in range(size))

    def kept(self, tokens, computed):
        return computed

    def finish(self, id, insert):
        salt, tokens, computed = self.running.pop(id)
        if insert:
            self.store(salt, tokens, self.kept(tokens, computed))

    def abort(self, id):
        del self.running[id]

    preempt = abort


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def finding(self, subject, **words):
        """The error that a search of 300 traces raises."""
        words = {"traces": 300, "out": self.folder / "found", **words}
        with self.assertRaises(lockstep.FindingError) as raised:
            lockstep.explore(subject, **words)
        return raised.exception


# --- A line in, a line out ------------------------------------------------------------------------

def answers(subject, *lines):
    played = session.Session(subject)
    return [played.answer(line) for line in ("hello protocol=1 kv_tokens=64 step_time=2us", *lines)]


class Protocol(unittest.TestCase):
    def test_what_is_overridden_is_what_hello_offers(self):
        class Tree(lockstep.Subject):
            honours = ("request_rows", "page")
            labels = True

            def match(self, tokens, **others):
                return len(tokens) - 1

        self.assertEqual(answers(Infinite)[0], "levels=request again=1 honours=")
        self.assertEqual(answers(Tree)[0], "levels=request,tree again=1 labels=1 honours=max_running,page,request_rows")
        self.assertEqual(answers(Tree, "match tokens=a3+[7] salt=s", "insert tokens=a3", "admit id=r tokens=a3")[1:],
                         ["kv=3", "unsupported", "unsupported"])

    def test_the_package_knows_the_words_that_the_program_knows(self):
        told = subprocess.run([os.environ["LOCKSTEP_PROGRAM"], "list", "verbs", "--json"], capture_output=True, text=True, check=True).stdout
        kept = pathlib.Path(PACKAGE, "lockstep", "vocabulary.json").read_text()
        self.assertEqual(told, kept, "`lockstep list verbs --json >cache_sim/python/lockstep/vocabulary.json` renews it")

    def test_a_reply_has_the_fields_of_its_verbs_answer(self):
        of = {"admit": lockstep.Admitted, "extend": lockstep.Extended, "checkpoint": lockstep.Stored,
              "finish": lockstep.Stored, "evict": lockstep.Evicted, "check": lockstep.Counted, "match": lockstep.Matched,
              "insert": lockstep.Inserted, "alloc": lockstep.Slot}
        rows = {row["name"]: row["answer"] for row in session._VOCABULARY["verbs"]}
        for verb, reply in of.items():
            must = {field["name"]: field["required"] for field in rows[verb] if field["name"] != "violations"}
            has = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(reply)
                   if not field.name.startswith("evicted_") and not field.name.endswith(("_tokens", "salt"))}
            self.assertEqual(must, has, verb)

    def test_fields_are_offered_where_a_method_has_their_parameters(self):
        class Transfers(Infinite):
            def admit(self, id, tokens, external):
                return external

        class Trees(Transfers):
            def extend(self, id, n, tokens, drafts, parents):
                return n

            def accept(self, id, n, tokens):
                return n

        class Ends(Trees):
            def finish(self, id, insert, up_to):
                return None

        class Everything(Ends):
            def admit(self, **fields):
                return 0

        self.assertEqual(answers(Transfers)[0], "levels=request again=1 takes=external honours=")
        self.assertEqual(answers(Trees)[0], "levels=request again=1 takes=external honours=")
        self.assertEqual(answers(Ends)[0], "levels=request again=1 takes=external,server honours=")
        self.assertEqual(answers(Everything)[0], "levels=request again=1 takes=external,keys,server honours=")

    def test_overlap_is_offered_where_steps_can_be_asynchronous(self):
        class Ahead(Infinite):
            def extend(self, id, n, tokens, async_):
                return n

            def complete(self, id):
                pass

        self.assertEqual(answers(Ahead, "extend async=1 id=r n=1"), ["levels=request again=1 honours=overlap", "n=1"])

    def test_a_parameter_that_is_left_out_is_an_operation_that_is_not_asked_for(self):
        class Plain(Infinite):
            def admit(self, id, tokens):
                return 0

        self.assertEqual(answers(Plain, "admit id=r tokens=a3 prompt=2", "admit id=r tokens=a3 salt=s",
                                 "extend drafts=a3:4 id=r n=1")[1:], ["cached=0", "unsupported", "unsupported"])

    def test_every_parameter_comes_as_its_type(self):
        seen = {}

        class Sees(lockstep.Subject):
            def admit(self, id, tokens, prompt, salt, external):
                seen["admit"] = (id, tokens, prompt, salt, external)
                seen["config"] = self.config
                return 0

            def extend(self, id, n, tokens, drafts, async_):
                seen["extend"] = (n, tokens, drafts, async_)

            def accept(self, id, n, tokens):
                pass

            def step(self, ids, padded):
                seen["step"] = (ids, padded)

            def compact(self, mapping):
                seen["compact"] = mapping

        self.assertEqual(answers(Sees, "admit id=r tokens=a2+[5] salt=s", "extend drafts=b1:3 id=r n=3", "step ids=r,q",
                                 "compact mapping=-1,0")[1:], ["cached=0", "n=3", "ok", "ok"])
        a, b = 1 << 32, 2 << 32
        self.assertEqual(seen["admit"], ("r", (a, a + 1, 5), 3, "s", 0))
        self.assertEqual(seen["extend"], (3, (), (b + 1, b + 2), False))
        self.assertEqual((seen["step"], seen["compact"]), ((["r", "q"], None), [-1, 0]))
        self.assertEqual((seen["config"].kv_tokens, seen["config"].step_time, seen["config"].rows), (64, 2000, 256))

    def test_replies_and_refusals_are_typed(self):
        class Says(lockstep.Subject):
            def admit(self, id, tokens):
                if id == "full":
                    raise lockstep.Refused("no_state_slot", evicted_kv=3)
                if id == "never":
                    raise lockstep.Unsupported("not in this version")
                return lockstep.Admitted(2, state=2, state_tokens=tokens[:2], evicted_kv=1)

            def evict(self, kv, state):
                return lockstep.Evicted(kv=kv, state=0)

            def check(self):
                raise lockstep.Violation("slot 3 is free\nand in use")

        self.assertEqual(
            answers(Says, "admit id=r tokens=a5", "admit id=full tokens=a5", "admit id=never tokens=a5", "evict kv=4")[1:],
            ["evicted_kv=1 cached=2 state=2 state_tokens=a2", "refused=no_state_slot evicted_kv=3", "unsupported",
             "kv=4 state=0"])
        line = Says.check.__code__.co_firstlineno + 1
        place = session.shown_path(__file__)
        self.assertEqual(answers(Says, "check")[1],
                         f"violation=slot 3 is free and in use ({place}:{line}, in check)")
        with self.assertRaisesRegex(ValueError, "no refusal 'no_room'; they are no_kv, no_state_slot"):
            lockstep.Refused("no_room")

    def test_an_exception_names_its_place_in_the_subject(self):
        class Raises(Infinite):
            def extend(self, id, n, tokens):
                json.loads("{")

            def abort(self, id):
                assert id == "nobody"

            def preempt(self, id):
                sys.exit(3)

            def finish(self, id, insert):
                raise Unspeakable

        class Unspeakable(Exception):
            def __str__(self):
                return self.reason

        said = answers(Raises, "extend id=r n=1", "abort id=r", "preempt id=r", "finish id=r")[1:]
        line = Raises.extend.__code__.co_firstlineno + 1
        self.assertRegex(said[0], rf"^raised=JSONDecodeError: .*\(.*{pathlib.Path(__file__).name}:{line}, in extend\)$")
        self.assertRegex(said[1], r'^violation=AssertionError: assert id == "nobody" \(')
        self.assertRegex(said[2], r"^raised=SystemExit: 3 \(")
        self.assertRegex(said[3], r"^raised=Unspeakable: raise Unspeakable \(")

    def test_a_wrong_class_is_refused_in_a_sentence(self):
        class Misspelt(Infinite):
            def abort(self, ident):
                pass

        class Silent(Infinite):
            def admit(self, id, tokens):
                pass

        class Honours(Infinite):
            honours = ("pages",)

        with self.assertRaisesRegex(TypeError, r"test.py:\d+: Misspelt.abort has a parameter `ident` .* are id$"):
            lockstep.explore(Misspelt)
        with self.assertRaisesRegex(TypeError, "there is no `pages`; the fields are kv_tokens, state_slots, page"):
            lockstep.explore(Honours)
        with self.assertRaisesRegex(TypeError, "dict is no lockstep.Subject"):
            lockstep.explore(dict)
        with self.assertRaisesRegex(TypeError, "makes no subject: give its class"):
            lockstep.explore(Silent({}))
        self.assertRegex(answers(Silent, "admit id=r tokens=a3")[1],
                         r"^raised=TypeError: Silent.admit \(.*\) returned None; it returns a number, cached=, or")

    def test_tokens_and_their_text(self):
        for text in ("a3", "a2:5+b7", "[7,8]+a1+[9]", "zz4", "verylongname3:9", "[]"):
            self.assertEqual(lockstep.tokens_text(lockstep.parse_tokens(text)), text)
        self.assertEqual(lockstep.parse_tokens("aa2")[1], (27 << 32) + 1)
        self.assertLess(lockstep.parse_tokens("verylongname9")[-1], 1 << 63)
        with self.assertRaisesRegex(ValueError, "`3a` is not a term"):
            lockstep.parse_tokens("3a")

    def test_a_documents_number_is_the_same_in_every_process(self):
        """However many names came before, and however many come in between."""
        self.assertEqual(lockstep.parse_tokens("cliqill1"), ((1 << 30) << 32,))  # the first scheduled request's output
        names = ("verylongname1", "cliqilq1", "zzzzzzz1")
        before = [lockstep.parse_tokens(name) for name in names]
        for number in range(5000):
            lockstep.parse_tokens(lockstep.tokens_text([((1 << 30) + number) << 32]))
        self.assertEqual([lockstep.parse_tokens(name) for name in names], before)
        said = subprocess.run([sys.executable, "-c", "import lockstep\nfor name in " + repr(names[::-1]) +
                               ": print(lockstep.parse_tokens(name)[0])"],
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual(said.stdout.split(), [str(one[0]) for one in before[::-1]])


# --- explore and replay ---------------------------------------------------------------------------

class Explore(Scratch):
    def test_a_sound_cache_passes(self):
        found = lockstep.explore(LruCache, beside="oracle:radix", config=AMPLE, traces=40, out=self.folder / "found")
        self.assertGreater(found.operations, 500)
        self.assertEqual((found.traces, found.findings, found.seed), (40, [], 1))
        self.assertFalse((self.folder / "found").exists())
        lockstep.explore(LruCache, traces=40)
        lockstep.explore(Infinite, beside=LruCache, traces=10)
        lockstep.explore(Infinite, beside="oracle:radix", traces=40)  # which would run out of what nobody honours

    def test_a_class_alone_is_given_the_fields_that_it_honours(self):
        for honoured in ("page", "blocks"):
            given = {"page": set(), "blocks": set()}

            class Sized(Infinite):
                honours = (honoured,)

                def __init__(self, config):
                    super().__init__(config)
                    given["page"].add(config.page)
                    given["blocks"].add(config.blocks)

            lockstep.explore(Sized, traces=20)
            for field, values in given.items():
                self.assertEqual(len(values) > 1, field == honoured, f"{field} of a class that honours {honoured}")

    def test_a_planted_bug_is_found_shrunk_written_and_replayed(self):
        error = self.finding(WastefulLruCache)
        self.assertIsInstance(error, AssertionError)
        finding = error.findings[0]
        self.assertEqual(finding.kind, "broken-invariant")
        self.assertLessEqual(len(finding.trace_text.splitlines()), 8)
        self.assertGreater(finding.lines_before, 20)
        self.assertEqual(finding.trace.parent, self.folder / "found")
        for part in (finding.trace_text, "WastefulLruCache says after `check`", "can never be hit",
                     f"lockstep.replay('{finding.trace}', WastefulLruCache)"):
            self.assertIn(part, str(error))
        self.assertIsInstance(error.__cause__, lockstep.Violation)
        with self.assertRaisesRegex(lockstep.FindingError, "can never be hit"):
            lockstep.replay(finding.trace, WastefulLruCache)
        self.assertEqual(lockstep.replay(finding.trace, LruCache).traces, [finding.trace])
        self.assertEqual(len(lockstep.replay(self.folder / "found", LruCache).traces), 1)
        # The trace says itself who plays it, in a process of its own.
        done = subprocess.run([os.environ["LOCKSTEP_PROGRAM"], "replay", str(finding.trace), "--run-lines", "--allow-exec"],
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
        self.assertEqual(done.returncode, 10, done.stdout + done.stderr)
        self.assertIn("can never be hit", done.stdout)

    def test_a_class_in_a_function_is_compared_with_an_oracle(self):
        instances = []

        class Forgets(Infinite):
            def __init__(self, config):
                super().__init__(config)
                instances.append(os.getpid())

            def kept(self, tokens, computed):
                return max(0, computed - 1)

        error = self.finding(Forgets, beside="oracle:radix")
        self.assertEqual(error.findings[0].kind, "missed-reuse")
        self.assertEqual(set(instances), {os.getpid()})
        with self.assertRaises(lockstep.FindingError):  # who stands beside is read in the trace
            lockstep.replay(error.trace, Forgets)
        lockstep.replay(error.trace, Infinite)

    def test_reuse_of_what_was_never_computed_is_found_without_anybody_beside(self):
        class Lies(Infinite):
            def kept(self, tokens, computed):
                return len(tokens) + 1

            def admit(self, id, tokens, salt):
                return max(super().admit(id, tokens, salt), 1 if len(tokens) > 1 else 0)

        self.assertEqual(self.finding(Lies).findings[0].kind, "cached-too-much")

    def test_a_class_alone_is_held_to_its_promises(self):
        class Promises(Infinite):
            rehits = 1

            def __init__(self, config):
                super().__init__(config)
                self.chunks = config.page

        class Forgets(Promises):
            def kept(self, tokens, computed):
                return max(0, computed - 1)

        self.assertEqual(answers(Promises)[0], "levels=request again=1 honours= rehits=1 chunks=1")
        lockstep.explore(Promises, traces=40)
        self.assertEqual(self.finding(Forgets).findings[0].kind, "missed-reuse")

    def test_what_two_salts_share_is_found_where_the_class_says_whose_it_is(self):
        class Whose(Infinite):
            def __init__(self, config):
                super().__init__(config)
                self.owner = {}

            def store(self, salt, tokens, size):
                super().store(salt, tokens, size)
                self.owner.update((self.place(salt, tokens[:end + 1]), salt) for end in range(size))

            def place(self, salt, prefix):
                return salt, prefix

            def admit(self, id, tokens, salt):
                cached = super().admit(id, tokens, salt)
                owner = self.owner.get(self.place(salt, tokens[:cached]), "")
                return lockstep.Admitted(cached, cached_tokens=tokens[:cached], salt=owner)

        class Shares(Whose):
            def place(self, salt, prefix):
                return prefix

        lockstep.explore(Whose, traces=40)
        finding = self.finding(Shares).findings[0]
        self.assertEqual(finding.kind, "wrong-state-prefix")
        self.assertIn("hands out what was computed under the salt `", finding.text)

    def test_an_exception_keeps_its_line_and_its_traceback(self):
        class Raises(Infinite):
            def kept(self, tokens, computed):
                return {}[computed] if computed > 3 else computed

        error = self.finding(Raises)
        line = Raises.kept.__code__.co_firstlineno + 1
        self.assertEqual(error.findings[0].kind, "subject-died")
        self.assertRegex(error.findings[0].trace_text, "(?m)^admit ")  # nobody finishes what never ran
        self.assertRegex(str(error), rf"Raises raised after `finish`: KeyError: 4 \(.*:{line}, in kept\)")
        self.assertIsInstance(error.__cause__, KeyError)

    def test_an_exception_of_another_trace_is_not_the_findings(self):
        class Short(Infinite):
            def admit(self, id, tokens):
                if len(tokens) < 3:
                    raise KeyError(len(tokens))
                return len(tokens)

        error = self.finding(Short)
        self.assertEqual(error.findings[0].kind, "cached-too-much")
        self.assertIsNone(error.__cause__)

    def test_an_exception_in_the_constructor_is_a_finding(self):
        class Picky(LruCache):
            def __init__(self, config):
                if config.kv_tokens < 20:
                    raise ValueError("too little memory")
                super().__init__(config)

        error = self.finding(Picky)
        self.assertRegex(str(error), "subject-died: Picky raised after `hello`: ValueError: too little memory")

    def test_one_process_plays_many_traces(self):
        started = []

        class Counted(Infinite):
            def __init__(self, config):
                super().__init__(config)
                started.append(os.getpid())

        processes = self.folder / "processes"
        python = self.folder / "python3"
        python.write_text(f'#!/bin/sh\necho >>"{processes}"\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        before = sys.executable
        sys.executable = str(python)
        try:
            lockstep.explore(Counted, traces=60, config={"ranks": 1})
        finally:
            sys.executable = before
        self.assertGreaterEqual(len(started), 60)
        self.assertEqual(processes.read_text().count("\n"), 1)

    def test_what_a_subject_prints_is_no_answer(self):
        class Prints(Infinite):
            def admit(self, id, tokens, salt):
                print("hello cached=7")
                return super().admit(id, tokens, salt)

        lockstep.explore(Prints, traces=10)

    def test_a_method_that_hangs_is_shown_where_it_is(self):
        class Hangs(Infinite):
            def abort(self, id):
                threading.Event().wait(60)

        error = self.finding(Hangs, timeout=8, shrink=False)  # a busy machine starts a child in seconds
        self.assertEqual(error.findings[0].kind, "subject-silent")
        line = Hangs.abort.__code__.co_firstlineno + 1
        self.assertRegex(str(error), rf"it was here: threading.Event\(\).wait\(60\) \(.*:{line}, in abort\)")

    def test_an_interrupt_ends_the_search_and_its_processes(self):
        class Interrupts(Infinite):
            def abort(self, id):
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            lockstep.explore(Interrupts, seconds=60, out=self.folder / "found")
        self.assertFalse((self.folder / "found").exists())  # what the interrupt ended is no finding
        with self.assertRaises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_it_works_in_another_thread(self):
        class Hangs(Infinite):
            def abort(self, id):
                while True:
                    pass

        outcome = []

        def work():
            outcome.append(lockstep.explore(Infinite, traces=10).traces)
            try:
                lockstep.explore(Hangs, traces=100, timeout=3, shrink=False, out=self.folder)
            except lockstep.FindingError as error:
                outcome.append(error.findings[0].kind)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(outcome, [10, "subject-silent"])

    def test_functions_and_words_are_subjects_too(self):
        lockstep.explore(functools.partial(Infinite), traces=10)
        lockstep.explore(lambda config: Infinite(config), beside=lambda config: Infinite(config), traces=10)
        lockstep.explore("sglang-no-buffer", beside="oracle", traces=10)
        child = f"exec:{sys.executable} {ROOT}/fixtures/subjects/minimal_cache.py"
        lockstep.explore(Infinite, beside=child, traces=10)

    def test_what_cannot_be_done_is_said_in_a_sentence(self):
        with self.assertRaisesRegex(lockstep.LockstepError, "there is no policy `mine`"):
            lockstep.explore(Infinite, beside="oracle:mine", traces=1)
        with self.assertRaisesRegex(lockstep.LockstepError, "pages"):
            lockstep.explore(Infinite, config={"pages": 3}, traces=1)
        with self.assertRaisesRegex(lockstep.LockstepError, "nowhere.trace"):
            lockstep.replay(self.folder / "nowhere.trace", Infinite)
        with self.assertRaisesRegex(lockstep.LockstepError, "no .trace file is there"):
            lockstep.replay(self.folder, Infinite)
        for below in ({"seconds": -1}, {"traces": 1, "timeout": -1}):
            with self.assertRaisesRegex(lockstep.LockstepError, "--time"):
                lockstep.explore(Infinite, **below)

    def test_a_long_text_is_cut_in_letters_that_the_program_prints(self):
        class Talks(Infinite):
            def abort(self, id):
                raise lockstep.Violation("word " * 60)

        self.assertRegex(str(self.finding(Talks, shrink=False)), r"word wo\.\.\. \(")

    def test_a_state_is_told_by_the_tokens_that_it_has_seen(self):
        error = self.finding(SharingHybridCache)
        self.assertEqual(error.findings[0].kind, "wrong-state-prefix")
        self.assertRegex(str(error), "SharingHybridCache hands out a state of .* that stands for ")

        class OneMore(Infinite):
            labels = True

            def admit(self, id, tokens, salt):
                cached = super().admit(id, tokens, salt)
                return lockstep.Admitted(cached, state=cached, conv=cached, state_tokens=tokens[:cached],
                                         conv_tokens=tokens[:cached + 1] if cached else ())

        self.assertRegex(str(self.finding(OneMore)), "a conv state of 1 token that stands for a2, which is 2 tokens")

    def test_a_class_that_takes_adapters_and_images_is_sent_some(self):
        class Blind(Infinite):
            def admit(self, id, tokens, salt, lora, images):
                return super().admit(id, tokens, salt)

        self.assertEqual(self.finding(Blind).findings[0].kind, "cached-too-much")

    def test_the_tests_of_the_examples(self):
        import test_hybrid_cache
        import test_lru_cache
        explore = lockstep.explore
        shorter = unittest.mock.patch.object(
            lockstep, "explore", lambda *subject, **words: explore(*subject, **{**words, "seconds": 1}), create=True)
        with shorter:
            for name, test in [*vars(test_hybrid_cache).items(), *vars(test_lru_cache).items()]:
                if name.startswith("test_"):
                    test(self.folder)


# --- A process of its own -------------------------------------------------------------------------

class Serve(Scratch):
    def served(self, target, *lines):
        return subprocess.run([sys.executable, "-m", "lockstep.serve", *target.split()], input="\n".join(lines) + "\n",
                              capture_output=True, text=True, cwd=self.folder,
                              env={**os.environ, "PYTHONPATH": PACKAGE})

    def test_a_file_or_a_module_and_words(self):
        (self.folder / "mine.py").write_text(textwrap.dedent("""
            import lockstep
            class Mine(lockstep.Subject):
                def __init__(self, config, first="0"):
                    print("a word that is no answer")
                    self.first = int(first)
                def admit(self, id, tokens):
                    return self.first
            """))
        for target in ("mine.py:Mine 3", "mine:Mine 3"):
            done = self.served(target, "hello protocol=1 page=1", "admit id=r tokens=a5")
            self.assertEqual(done.stdout.splitlines(), ["levels=request again=1 honours=", "cached=3"], done.stderr)

    def test_what_it_cannot_load_is_said_in_a_sentence(self):
        for target, said in (("mine", "is neither module:Class nor"), ("none.py:Mine", "there is no file none.py"),
                             ("os:Mine", "os has no `Mine`"), ("os:sep", "is no class"),
                             ("x.py:f.<locals>.C", "only lockstep.explore")):
            done = self.served(target, "hello protocol=1")
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr)


# --- Every night ----------------------------------------------------------------------------------

class Nightly(Scratch):
    def night(self, settings, *words):
        (self.folder / "night.ini").write_text(textwrap.dedent(settings))
        done = subprocess.run([sys.executable, "-m", "lockstep.nightly", str(self.folder / "night.ini"), *words],
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
        report = self.folder / "corpus" / "nightly.json"
        self.page = (self.folder / "corpus" / "index.html").read_text() if report.exists() else ""
        return done, json.loads(report.read_text()) if report.exists() else None

    def test_a_finding_is_new_once_and_known_until_it_is_gone(self):
        subject = self.folder / "cache.py"
        head = f"import sys\nsys.path.insert(0, {str(ROOT / 'fixtures' / 'subjects')!r})\n"
        broken = head + "from lru_cache import WastefulLruCache as Cache\n"
        settings = """
            [nightly]
            seconds = 3
            folder = corpus
            [mine]
            subject = cache.py:Cache
            [elsewhere]
            subject = no_such_module:Cache
            optional = yes
            weight = 0.1
            """
        seeds, states = [], []
        for text in (broken, broken, head + "from lru_cache import LruCache as Cache\n", broken):
            subject.write_text(text)
            done, report = self.night(settings)
            mine, elsewhere = report["subjects"]
            seeds += mine["seeds"] + [report["canaries"][0]["seed"]]
            states.append((done.returncode, sorted({one["state"] for one in mine["findings"]})))
            self.assertTrue(report["canaries"][0]["found"], done.stdout + done.stderr)
            self.assertGreater(mine["operations"], 0)
            self.assertIn("No module named 'no_such_module'", elsewhere["cannot_run"])
        self.assertEqual([states[0], states[2]], [(10, ["new"]), (0, ["gone"])])
        self.assertEqual(states[3][0], 10)
        self.assertIn("still there", states[1][1])
        self.assertIn("came back", states[3][1])  # and perhaps a new one: a night searches for seconds
        self.assertEqual(len(seeds), len(set(seeds)))
        self.assertEqual([night["night"] for night in report["nights"]], [1, 2, 3, 4])
        self.assertGreater(mine["operations_ever"], mine["operations"])
        finding = mine["findings"][0]
        self.assertTrue((self.folder / "corpus" / finding["trace"]).is_file())
        xml.etree.ElementTree.fromstring(self.page.removeprefix("<!DOCTYPE html>\n"))
        for part in ("can never be hit", "came back", "--good:", f"{report['marks']}"):
            self.assertIn(part, self.page)

    @program_tests.full
    def test_what_is_found_before_the_first_operation_is_known_the_next_night(self):
        child = self.folder / "child.py"
        child.write_text("for _ in iter(input, ''): print('levels=request raised=no memory', flush=True)\n")
        settings = f"""
            [nightly]
            seconds = 3
            folder = corpus
            [mine]
            subject = exec:{sys.executable} {child}
            """
        states = []
        for _ in range(2):
            done, report = self.night(settings)
            states.append((done.returncode, [one["state"] for one in report["subjects"][0]["findings"]]))
        self.assertEqual(states, [(10, ["new"]), (0, ["still there"])], done.stdout + done.stderr)

    @program_tests.full
    def test_a_kept_finding_that_cannot_be_played_fails_the_night(self):
        subject = self.folder / "cache.py"
        subject.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'fixtures' / 'subjects')!r})\n"
                           "from lru_cache import WastefulLruCache as Cache\n")
        settings = "[nightly]\nseconds = 3\nfolder = corpus\n[mine]\nsubject = cache.py:Cache\n"
        _, report = self.night(settings)
        for finding in report["subjects"][0]["findings"]:
            (self.folder / "corpus" / finding["trace"]).write_text("admitt\n")
        subject.write_text(subject.read_text().replace("Wasteful", ""))
        done, report = self.night(settings)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertEqual({one["state"] for one in report["subjects"][0]["findings"]}, {"cannot be played"})
        self.assertIn(".trace:1:", done.stdout)

    @program_tests.full
    def test_a_server_is_searched_too(self):
        toy = f"{sys.executable} {ROOT / 'fixtures' / 'subjects' / 'toy_server.py'}"
        settings = """
            [nightly]
            seconds = 4
            folder = corpus
            [server]
            server = llama --program '{}' --model toy --config slots=1,clients=1 --findings 1
            """
        states = []
        for bug in (" --bug stops-early", ""):
            done, report = self.night(settings.format(toy + bug))
            server = report["subjects"][0]
            states.append((done.returncode, [one["state"] for one in server["findings"]]))
            self.assertGreater(server["operations"], 0, done.stdout + done.stderr)
        self.assertEqual(states, [(10, ["new"]), (0, ["gone"])], done.stdout + done.stderr)
        self.assertTrue(server["findings"][0]["signature"].startswith("answer-differs: "))
        self.assertTrue((self.folder / "corpus" / server["findings"][0]["trace"]).is_file())

    def test_a_canary_that_is_not_found_fails_the_night(self):
        before = nightly.CANARY_SECONDS
        nightly.CANARY_SECONDS = 0.001  # too little time for any trace with a finding
        try:
            settings = nightly.Settings(base=self.folder, seconds=0.1, targets=[nightly.Target("policies")])
            night = nightly.Night(settings, nightly.Corpus(self.folder / "corpus"))
            night._explore = lambda words, folder: (subprocess.CompletedProcess(words, 0, "", ""), {"findings": []})
            night.watch_canaries()
        finally:
            nightly.CANARY_SECONDS = before
        self.assertEqual(night.conclude(interrupted=False), 3)
        self.assertIn("✗ not found", (self.folder / "corpus" / "index.html").read_text())

    def test_a_night_that_is_ended_early_leaves_its_page(self):
        words = [sys.executable, "-m", "lockstep.nightly", "--seconds", "300", "--folder", str(self.folder / "corpus")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PACKAGE}) as night:
            corpus = self.folder / "corpus" / "corpus.json"
            while not corpus.is_file() or json.loads(corpus.read_text())["next_seed"] < 3:  # the search has begun
                self.assertIsNone(night.poll())
                time.sleep(0.05)
            night.terminate()
            said = night.communicate(timeout=60)[0]
        self.assertEqual(night.returncode, 130, said)
        self.assertIn("The night was interrupted", (self.folder / "corpus" / "index.html").read_text())

    def test_a_night_that_is_killed_leaves_no_search_behind(self):
        words = [sys.executable, "-m", "lockstep.nightly", "--seconds", "300", "--folder", str(self.folder / "corpus")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PACKAGE}) as night:
            children = pathlib.Path(f"/proc/{night.pid}/task/{night.pid}/children")
            searches = []
            while not searches:
                self.assertIsNone(night.poll())
                for child in children.read_text().split():
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        if b"explore" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                            searches.append(os.pidfd_open(int(child)))
            night.kill()
        for search in searches:
            self.assertTrue(select.select([search], [], [], 60)[0], "the search goes on")
            os.close(search)

    @program_tests.full
    def test_policies_are_searched_where_nothing_is_named(self):
        done, report = self.night("[nightly]\nseconds = 3\nfolder = corpus\n")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertGreater(len(report["subjects"][0]["marks"]), 0)

    def test_bad_settings_are_named(self):
        for settings, said in (("[nightly]\nsecond = 3\n", "night.ini:2: [nightly] there is no field `second`"),
                               ("[nightly]\nseconds = -1\n", "seconds: `-1` is not a positive number"),
                               ("[a b]\nsubject = x:Y\n", "[a b] a name has letters"),
                               ("[a]\nbeside = oracle:radix\n", "[a] beside: there is no subject"),
                               ("[a]\nserver = abacus --model m\n", "[a] server: `abacus` is no engine: llama, openai"),
                               ("[a]\nserver = llama --program '\n", "[a] server: No closing quotation"),
                               ("[a\x1b]\nsubject = x:Y\n", "night.ini:1: [a\\x1b] a name has letters"),
                               ("  [a]  ; not [b]\nsubject = x:Y\nweight = x ; y\n", "night.ini:3: [a] weight: `x` is not a positive number"),
                               ("seconds = 3\n", "night.ini:1: `seconds = 3` stands before the first [section]"),
                               ("\ufeff[nightly]\n", "night.ini: begins with a byte order mark"),
                               ("[a]\nweight = 1\nweight = 2\n", "night.ini:3: [a] weight stands twice"),
                               ("[a]\n[a]\n", "night.ini:2: [a] stands twice"),
                               ("[a]\nweight 1\n", "night.ini:2: `weight 1` is not a field like seconds = 60"),
                               ("[a]\nserver = llama\nsubject = x:Y\n", "so neither subject nor config stands beside it"),
                               ("[nightly]\ncanary = sglang-no-buffer:none\nseconds = 1\n", "sglang-no-buffer:none")):
            done, _ = self.night(settings)
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(said, done.stderr)

    def test_bad_words_are_one_sentence(self):
        for command, words in (("nightly", "--minutes 3"), ("server", "search llama --seed x"), ("sweep", "run"), ("static_kv", "export")):
            done = subprocess.run([sys.executable, "-m", f"lockstep.{command}", *words.split()], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": PACKAGE})
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertRegex(done.stderr, rf"^lockstep: (.*\b{command}.*): .*; `\1 --help` shows its words$")

    def test_files_that_are_something_else_are_named(self):
        for name, reads in (("night.ini", nightly.read_settings),
                            ("corpus.json", lambda file: nightly.Corpus(file.parent))):
            for content in (b"\xff\xfe\x00", b"[]"):
                file = self.folder / name
                file.write_bytes(content)
                with self.subTest(name=name, content=content), self.assertRaisesRegex(nightly.SettingsError, name):
                    reads(file)

    def test_the_settings_of_this_project_are_read(self):
        settings = nightly.read_settings(ROOT / "fixtures" / "nightly.ini")
        self.assertEqual(settings.targets[0].words(), [])
        lru = next(target for target in settings.targets if target.name == "lru-cache")
        self.assertEqual(lru.words()[:3], ["--subject", "oracle:radix", "--subject"])
        self.assertRegex(lru.words()[3], "^exec:.*python3? -m lockstep.serve subjects/lru_cache.py:LruCache$")

    def test_one_cause_has_one_signature(self):
        one = calls.signature("k", "child `python3 x` says after `check`: a2+b1:3 is gone (x.py:7, in check)")
        two = calls.signature("k", "child `python3 y` says after `check`: [1,2] is gone (x.py:9, in check)")
        self.assertEqual(one, two)
        self.assertNotEqual(one, calls.signature("k", "child `python3 x` says after `check`: a2 is there"))

    def test_the_page_has_the_style_of_the_report(self):
        self.assertIn("--page:", html_parts.style())


if __name__ == "__main__":
    program_tests.main(__doc__)
