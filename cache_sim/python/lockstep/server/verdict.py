"""The verdict of `lockstep check-log` on the log of a life, compared with the truth of every prompt."""
from __future__ import annotations

import json
import pathlib
import re
import subprocess
from dataclasses import dataclass, field

from lockstep import program
from lockstep.server.engines import Answer
from lockstep.server.life import Life
from lockstep.server.steps import Finding, step_of_answer
from lockstep.server.truth import Truth


TRUTH_PLACE = re.compile(r" \([^()]*truth\.jsonl:\d+\)")  # a temporary file, gone before the text is read


@dataclass
class Verdict:
    findings: list[Finding] = field(default_factory=list)
    near_ties: int = 0


def write_log(life: Life, path: pathlib.Path) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in life.lines))


def write_truths(life: Life, truth: Truth, path: pathlib.Path) -> None:
    """Writes the truths. Gaps that are unknown are asked for only where an output differs; the others are written as 0."""
    truths: dict[tuple[int, ...], Answer] = {}
    for line in life.lines:
        prompt, output = line["prompt"], line["output"]
        known = truths.get(tuple(prompt))
        if known is None or len(known.output) < len(output):
            known = truths[tuple(prompt)] = truth(prompt, len(output))
        at = next((k for k, (said, right) in enumerate(zip(output, known.output)) if said != right), None)
        if at is not None:
            known.gaps[at] = truth.gap(prompt, at)
    with path.open("w") as file:
        for tokens, answer in truths.items():
            line = {"prompt": tokens, "output": answer.output, "gaps": [gap or 0.0 for gap in answer.gaps]}
            file.write(json.dumps(line) + "\n")


def judge(life: Life, truth: Truth, folder: pathlib.Path, gap: float) -> Verdict:
    """Judges a life. Findings are ordered by the place of their answer in the log; those without an answer come last."""
    if not life.lines:
        return Verdict(life.findings)
    log, truths, said = folder / "log.jsonl", folder / "truth.jsonl", folder / "verdict.json"
    write_log(life, log)
    write_truths(life, truth, truths)
    words = [program.path(), "check-log", str(log), "--truth", str(truths), "--gap", str(gap), "--json", str(said)]
    run = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if run.returncode not in (0, 11):
        raise OSError(f"check-log ended with {run.returncode}: {(run.stderr or run.stdout).strip()}")
    whole = json.loads(said.read_text())
    findings = [Finding(one["kind"], step_of_answer(one["request"]), TRUTH_PLACE.sub("", one["text"]), one["expected"],
                        one["actual"])
                for one in whole["findings"]]
    places = {step_of_answer(line["id"]): k for k, line in reversed(list(enumerate(life.lines)))}
    findings = sorted(life.findings + findings, key=lambda one: places.get(one.step, len(life.lines)))
    return Verdict(findings, whole["near_ties"])
