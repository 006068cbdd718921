#!/usr/bin/env python3
# ctest: name=program.minds_the_terminal labels=quick timeout=600 args={lockstep}
"""The program at a terminal and behind a pipe.

terminal_check.py PROGRAM

Progress goes to standard error alone, after two seconds, as one line that is rewritten on a terminal, and not with
--quiet; colours are for terminals without NO_COLOR; the completion of each shell knows every command and option of
--help; SARIF and GitHub's annotations name the line; a search that finds nothing writes its page too.
"""
import json
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[3]
WORKLOAD = "sessions:requests=3"
TRACE = "fixtures/traces/finish_keeps_its_state.trace"
DEFECT = ["replay", TRACE, "--defect", "sglang-no-buffer:frees-donated-slot"]


def on_terminal(command, **environment):
    """Standard output and standard error of a command, each a terminal of its own."""
    streams = [pty.openpty(), pty.openpty()]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=streams[0][1], stderr=streams[1][1],
                               env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm",
                                    **environment})
    for _, inner in streams:
        os.close(inner)
    texts = {outer: b"" for outer, _ in streams}
    left = set(texts)
    while left:
        for stream in select.select(list(left), [], [])[0]:
            try:
                piece = os.read(stream, 65536)
            except OSError:  # the other side is closed
                piece = b""
            texts[stream] += piece
            if not piece:
                left.remove(stream)
                os.close(stream)
    return process.wait(), *[texts[outer].decode() for outer, _ in streams]


def slow(seconds, *words):
    """A replay beside a child that starts late."""
    return [PROGRAM, "replay", WORKLOAD, "--timeout", "60s", "--subject",
            f"exec:sleep {seconds}; exec python3 fixtures/subjects/minimal_cache.py", *words]


def progress_is_shown():
    status, out, err = on_terminal(slow(4))
    assert re.fullmatch(rf"(\r\x1b\[Klockstep: replay {WORKLOAD}: \d+ s)+\r\x1b\[K", re.sub(r"\d+ operations?, ", "", err)), err
    assert status == 0 and "lockstep: " not in out and "digest=" in out, out
    again = on_terminal(slow(4, "--quiet"))
    assert again == (0, "", ""), again
    assert on_terminal([PROGRAM, "replay", TRACE])[2] == "", "a short run says nothing"


def a_judge_names_its_case():
    candidates = os.path.join(os.path.dirname(PROGRAM), "lockstep_candidates.so")
    if not os.path.exists(candidates):
        return print("skipped: no", candidates)
    hangs = [PROGRAM, "judge", "gated_delta_rule_update", "--candidate", candidates + ":gdn_hangs", "--device", "cpu",
             "--case", "decode-odd", "--timeout", "4", "--no-time"]
    status, out, err = on_terminal(hangs)
    assert status == 11, out
    assert "\r\x1b[Klockstep: judge gated_delta_rule_update: case decode-odd-" in err and "(1 of " in err, err
    assert "(1 of" not in out and err.endswith("\r\x1b[K"), out
    assert on_terminal(hangs + ["--quiet"])[2] == "", "--quiet says nothing"


def off_a_terminal_it_is_a_line():
    done = subprocess.run(slow(32), cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"lockstep: replay \S+: 3\d s\n", re.sub(r"\d+ operations, ", "", done.stderr)), done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def colours_can_be_left_out():
    red = "\x1b[1;31m"
    assert red in on_terminal([PROGRAM, *DEFECT])[1]
    assert red not in on_terminal([PROGRAM, *DEFECT], NO_COLOR="1")[1]
    assert red not in on_terminal([PROGRAM, *DEFECT], TERM="dumb")[1]
    assert red not in subprocess.run([PROGRAM, *DEFECT], cwd=ROOT, capture_output=True, text=True).stdout


def quiet_leaves_findings():
    run = lambda *words: subprocess.run([PROGRAM, *words], cwd=ROOT, capture_output=True, text=True)
    nothing = run("replay", TRACE, "-q")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", ""), nothing
    found = run(*DEFECT, "--quiet")
    assert found.returncode == 10 and "freed-slot-in-use" in found.stdout and "digest=" not in found.stdout, found


def sarif_names_the_line():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.sarif"
        for words, count in ((DEFECT, 1), (["replay", TRACE], 0)):
            subprocess.run([PROGRAM, *words, "--sarif", path], cwd=ROOT, capture_output=True)
            log = json.loads(path.read_text())
            results = log["runs"][0]["results"]
            assert log["version"] == "2.1.0" and len(results) == count, log
            if results:
                place = results[0]["locations"][0]["physicalLocation"]
                assert place["artifactLocation"]["uri"] == TRACE and place["region"]["startLine"] > 1, place
                assert results[0]["ruleId"] == log["runs"][0]["tool"]["driver"]["rules"][0]["id"] == "freed-slot-in-use"


def github_names_the_line():
    run = lambda *words: subprocess.run([PROGRAM, *words], cwd=ROOT, capture_output=True, text=True)
    errors = lambda done: [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    found = run(*DEFECT, "--github")
    assert re.fullmatch(rf"::error file={re.escape(TRACE)},line=9,title=freed-slot-in-use::state slot \d+ is free .+",
                        *errors(found)), found.stdout
    assert found.stdout.splitlines()[-1].startswith("digest="), "a run ends with its digest"
    assert errors(run(*DEFECT)) == errors(run("replay", TRACE, "--github")) == []
    with tempfile.TemporaryDirectory() as folder:
        searched = run("explore", "--defect", "sglang-no-buffer:split-moves-state", "--out", folder, "--github", "-q")
        trace, = pathlib.Path(folder).glob("*.trace")
        assert errors(searched)[0].startswith(f"::error file={trace},title="), searched.stdout
        log = pathlib.Path(folder) / "100%, my.jsonl"  # the signs that end a field of the line
        sound = {"id": "a", "prompt": [1, 2, 3], "output": [4], "cached": 0}
        log.write_text("".join(json.dumps(one) + "\n" for one in (sound, {**sound, "id": "b", "cached": 3})))
        judged = run("check-log", log, "--github", "--sarif", f"{folder}/log.sarif")
        assert re.fullmatch(rf"::error file={folder}/100%25%2C my\.jsonl,line=2,title=cached-too-much::request `b`: .+",
                            *errors(judged)), judged
        place = json.loads(pathlib.Path(folder, "log.sarif").read_text())["runs"][0]["results"][0]["locations"][0]
        assert place["physicalLocation"]["region"]["startLine"] == 2, place
        assert place["physicalLocation"]["artifactLocation"]["uri"].endswith("/100%25%2C%20my.jsonl"), place


def a_search_without_findings_has_a_page():
    with tempfile.TemporaryDirectory() as folder:
        out, page = f"{folder}/none", pathlib.Path(folder) / "new" / "page.html"
        done = subprocess.run([PROGRAM, "explore", "--traces", "3", "--out", out, "--html", page], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 0 and "Nothing found" in page.read_text(), done
        assert not os.path.exists(out), "a folder for findings where there are none"


def bash_completes(script, line):
    """Words that bash offers after this line."""
    text = f'source {script}; COMP_LINE=$1 COMP_POINT=${{#1}}; _lockstep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", text, "_", line.replace("lockstep", PROGRAM, 1)], capture_output=True, text=True,
                          check=True)
    return set(done.stdout.split())


def shells_complete_every_word():
    help_of = lambda *words: subprocess.run([PROGRAM, *words, "--help"], capture_output=True, text=True).stdout
    commands = re.findall(r"^  ([a-z][a-z-]*) ", help_of().split("Subcommands:")[1], re.M)
    with tempfile.TemporaryDirectory() as folder:
        scripts = {}
        for shell in ("bash", "zsh", "fish"):
            scripts[shell] = pathlib.Path(folder) / f"lockstep.{shell}"
            scripts[shell].write_text(
                subprocess.run([PROGRAM, "completion", shell], capture_output=True, text=True, check=True).stdout)
            if shutil.which(shell):
                subprocess.run([shell, "-n", scripts[shell]], check=True)
        bash = lambda line: bash_completes(scripts["bash"], line)
        assert set(commands) < bash("lockstep "), commands
        assert bash("lockstep rep") == {"replay", "report"}
        zsh, fish = scripts["zsh"].read_text(), scripts["fish"].read_text()
        for name in commands:
            shown = re.findall(r"^  (-\S+)", help_of(name), re.M)
            options = {word for words in shown for word in re.findall(r"--[a-z-]+", words)}
            assert options and bash(f"lockstep {name} --") == options, (name, options, bash(f"lockstep {name} --"))
            of_zsh = zsh.split(f"    {name})\n")[1].split(";;")[0]
            for option in options:
                assert f"'*{option}[" in of_zsh, (name, option)
                assert re.search(rf"from {name}' -l {option[2:]}\b", fish), (name, option)
        assert bash("lockstep replay x --check ") == {"off", "labels", "all"}
        assert "radix" in bash("lockstep replay x --subject ")
        assert bash("lockstep replay x --subject oracle:rad") == {"radix"}, "bash has the part before the colon"
        assert bash("lockstep compare x --policies lru,kv-") == {"lru,kv-bound"}
        assert "qwen3-next" in bash("lockstep compare x --model ")
        assert bash("lockstep list mod") == {"models"}


def main(program):
    global PROGRAM
    PROGRAM = os.path.abspath(program)
    checks = (off_a_terminal_it_is_a_line, progress_is_shown, a_judge_names_its_case, colours_can_be_left_out,
              quiet_leaves_findings, sarif_names_the_line, github_names_the_line,
              a_search_without_findings_has_a_page, shells_complete_every_word)
    with ThreadPoolExecutor(3) as beside:  # three of them wait
        for check, done in [(check, beside.submit(check)) for check in checks]:
            done.result()
            print(f"ok: {check.__name__}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
