# ctest: name=bench.a_peer_may_die labels=quick timeout=60 args=selftest
"""Runs cases in a worker process, and continues in a new one when a contestant ends it.

    python3 bench/peers/supervise.py selftest

After an illegal access a process can no longer use its GPU, and some peers make such an access. So
a worker runs the cases, reports before each step which contestant has its turn, and reports every
finished row. When the worker dies, that contestant is left out of that case, and a new worker runs
the cases that have no row yet.
"""

import json
import os
import signal
import subprocess
import sys

TURN, ROW, FACTS = "turn", "row", "facts"


class Reporter:
    """Used by the worker: writes lines of JSON to a file descriptor that the supervisor reads."""

    def __init__(self, descriptor):
        self.file = os.fdopen(descriptor, "w", buffering=1)

    def facts(self, facts):
        """Reports facts about the machine, which later workers get in their state."""
        self.say({FACTS: facts})

    def turn(self, case, name):
        """Reports that the contestant `name` runs in `case` from now on: a death counts as its
        death."""
        self.say({TURN: [case, name]})

    def row(self, case, row):
        """Reports the finished row of a case."""
        self.say({ROW: [case, row]})

    def say(self, line):
        self.file.write(json.dumps(line) + "\n")


def supervise(command, cases, on_row):
    """Runs workers until every case has a row, and returns the state, {"facts", "rows": {case:
    row}, "dead": {case: {name: why}}, "cases"}. command(the state as JSON, descriptor) returns a
    worker's command line; on_row(state) is called after each row. Raises RuntimeError where a
    worker ends and no contestant is left to blame."""
    state = {"facts": None, "rows": {}, "dead": {}, "cases": list(cases)}
    while len(state["rows"]) < len(state["cases"]):
        turn = None
        read, write = os.pipe()
        worker = subprocess.Popen(command(json.dumps(state), write), pass_fds=(write,))
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                said = json.loads(line)
                if FACTS in said:
                    state["facts"] = said[FACTS]
                elif TURN in said:
                    turn = said[TURN]
                else:
                    case, row = said[ROW]
                    state["rows"][str(case)] = row
                    turn = None
                    on_row(state)
        status = worker.wait()
        missing = [case for case in state["cases"] if str(case) not in state["rows"]]
        if not missing:
            return state
        if turn is None or turn[1] in state["dead"].get(str(turn[0]), {}):
            raise RuntimeError(f"a worker {how(status)} with {len(missing)} cases to go, and nobody's turn was it")
        state["dead"].setdefault(str(turn[0]), {})[turn[1]] = f"its process {how(status)}"
    return state


def how(status):
    """A worker's exit status in words."""
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def selftest():
    """Tests supervise() with workers that die in a contestant's turn, and with one that ends before
    any turn."""
    worker = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import supervise
state, say = json.loads(sys.argv[2]), supervise.Reporter(int(sys.argv[3]))
say.facts({"worker": os.getpid()} if state["facts"] is None else state["facts"])
for case in state["cases"]:
    if str(case) in state["rows"]:
        continue
    times = {}
    for name in ("sound", "deadly"):
        if name in state["dead"].get(str(case), {}):
            continue
        say.turn(case, name)
        if name == "deadly" and case == 1:
            os.abort()
        if name == "sound" and case == 3 and "deadly" not in times:
            sys.exit(5)
        times[name] = case
    say.row(case, times)
"""
    here = os.path.dirname(os.path.abspath(__file__))
    seen = []

    def command(state, descriptor):
        return [sys.executable, "-c", worker, here, state, str(descriptor)]

    state = supervise(command, range(3), lambda state: seen.append(len(state["rows"])))
    assert state["rows"] == {"0": {"sound": 0, "deadly": 0}, "1": {"sound": 1}, "2": {"sound": 2, "deadly": 2}}, state
    assert state["dead"] == {"1": {"deadly": "its process died of SIGABRT"}}, state
    assert seen == [1, 2, 3], seen
    state = supervise(command, (3,), lambda state: None)
    assert state["rows"] == {"3": {"deadly": 3}}, state
    assert state["dead"] == {"3": {"sound": "its process ended with status 5"}}, state
    try:
        supervise(lambda state, descriptor: [sys.executable, "-c", "raise SystemExit(7)"], (0,), lambda state: None)
        raise AssertionError("a worker that does nothing was taken for one that works")
    except RuntimeError as error:
        assert "status 7" in str(error), error


if __name__ == "__main__":
    if sys.argv[1:] != ["selftest"]:
        sys.exit(__doc__)
    selftest()
