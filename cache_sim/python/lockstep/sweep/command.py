"""lockstep sweep: one search over many machines.

    lockstep sweep plan [FILE] --shards N -o DIR    deals the searches of a settings file to N shards
    lockstep sweep run DIR [--index I]              plays a shard; any engine may start it, on any machine that sees DIR
    lockstep sweep run DIR --shrink [--index I]     plays a shard of the second set, which shrinks what the first one found
    lockstep sweep merge DIR                        what was found and what is missing: sweep.json and index.html in DIR
    lockstep sweep next DIR -o DIR2                 plans the next round: new seeds, and the corpus and the findings of this one
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from lockstep.counted import counted
from lockstep.help import Parser, end_help
from lockstep.server.steps import printable
from lockstep.settings import SettingsError, sentence_of
from lockstep.sweep import shard, units
from lockstep.sweep.corpus import smallest_cover
from lockstep.sweep.merge import merge
from lockstep.sweep.plan import Build, Plan, Refused, make_plan, read_plan, this_build, traces_in, version_of, write_plan

STATUSES = {0: "done, and nothing was found", 2: "bad usage, bad settings, or a plan that cannot be read",
            3: "the environment: another build, a shard that was lost; of merge also: incomplete, or a canary was not found",
            10: "merge: there are findings", 12: "merge: a unit was over its time limit",
            13: "the same unit gave two different results", 130: "interrupted"}


def parser() -> argparse.ArgumentParser:
    words = Parser(prog="lockstep sweep", description=__doc__)
    actions = words.add_subparsers(dest="action", required=True)
    plan = actions.add_parser("plan", help="deal the searches of a settings file to shards")
    plan.add_argument("file", nargs="?", type=pathlib.Path, metavar="FILE",
                      help="an INI file, as of nightly (default: every policy beside its oracle)")
    plan.add_argument("--shards", type=int, default=1, metavar="N", help="pieces that engines start (default: %(default)s)")
    plan.add_argument("-o", "--out", type=pathlib.Path, default=pathlib.Path("sweep"), metavar="DIR",
                      help="the folder that all machines see (default: %(default)s)")
    end_help(plan, _some(0, 2, 3), "lockstep sweep plan fixtures/cluster/small.ini --shards 2 -o small")
    run = actions.add_parser("run", help="play a shard")
    run.add_argument("folder", type=pathlib.Path, metavar="DIR", help="of the plan")
    run.add_argument("--index", type=int, metavar="I",
                     help="of the shard, from 0 (default: PARALLEL_SEQ less 1, SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX)")
    run.add_argument("--shrink", action="store_true", help="the shard of the second set")
    run.add_argument("--again", action="store_true", help="play it although it is done, and compare the results")
    run.add_argument("--unit", type=int, metavar="U", help="play this unit alone and print its result (default: the whole shard)")
    end_help(run, _some(0, 2, 3, 13, 130), "lockstep sweep run small --index 0")
    merging = actions.add_parser("merge", help="what was found, and what is missing")
    merging.add_argument("folder", type=pathlib.Path, metavar="DIR", help="of the plan")
    end_help(merging, STATUSES, "lockstep sweep merge small")
    following = actions.add_parser("next", help="plan the next round")
    following.add_argument("folder", type=pathlib.Path, metavar="DIR", help="of the round that is complete")
    following.add_argument("-o", "--out", type=pathlib.Path, required=True, metavar="DIR2", help="of the new plan; it is required (no default)")
    following.add_argument("--shards", type=int, metavar="N", help="pieces that engines start (default: as many as before)")
    following.add_argument("--without-missing", action="store_true", help="go on although shards are missing")
    end_help(following, _some(0, 2, 3), "lockstep sweep next small -o second")
    end_help(words, STATUSES, "lockstep sweep plan fixtures/cluster/small.ini --shards 2 -o small")
    return words


def _some(*statuses: int) -> dict[int, str]:
    return {status: STATUSES[status] for status in statuses}


def _plan(options: argparse.Namespace) -> int:
    if options.shards < 1:
        raise SettingsError("--shards: there is at least one")
    _say_plan(make_plan(options.file, options.shards, options.out))
    return 0


def _say_plan(plan: Plan) -> None:
    for one in plan.data["left_out"]:
        print(f"left out: {one['name']}: {printable(one['text'])}")
    print(f"{plan.folder}: round {plan.data['round']}, {counted(plan.units, 'unit')} in {counted(plan.shards, 'shard')}, plan {plan.digest}")


def _run(options: argparse.Namespace) -> int:
    plan = read_plan(options.folder)
    if options.unit is not None:
        build = this_build()
        plan.check_build(build)
        plan.check_subject(plan.section_of(options.unit)[0], build)
        print(json.dumps(units.play(plan, options.unit), indent=1, ensure_ascii=False))
        return 0
    index = options.index if options.index is not None else shard.index_from_environment()
    if index is None:
        raise SettingsError("run: --index is missing, and neither of " + ", ".join(shard.ENGINES) + " is set")
    status, said = shard.run(plan, index, options.shrink, options.again)
    print(f"lockstep: {said}" if status else said, file=sys.stderr if status else sys.stdout)
    return status


def _merge(options: argparse.Namespace) -> int:
    report, _ = merge(options.folder)
    totals = report["totals"]
    print(f"{totals['units']} of {counted(totals['units_planned'], 'unit')}, {counted(totals['traces'], 'trace')}, "
          f"{counted(totals['operations'], 'operation')}: something was found {counted(totals['occurrences'], 'time')}")
    if report["missing"]:
        print(f"missing shards: {','.join(map(str, report['missing']))}")
    for name in report["foreign"]:
        print(f"not counted, of another build or plan, or damaged: {name}")
    for one in report["lost"]:
        print(f"lost: {one['text']}")
    for one in report["canaries"]:
        print(f"canary {one['defect']}: " + (f"found by trace {one['tests_to_detect']}" if one["found"] else "NOT FOUND"))
    for one in report["own_findings"]:
        print(f"{one['kind']}: unit {one['unit']} of {one['section']}")
    for one in report["findings"]:
        print(f"{one['state']}: {one['key']} ({counted(one['count'], 'time')}): {one['kind']}: {printable(one['text'])}")
    if report["missing_to_shrink"]:
        print(f"not shrunk yet: {counted(len(report['missing_to_shrink']), 'shard')} of `lockstep sweep run {options.folder} --shrink`: "
              f"{','.join(map(str, report['missing_to_shrink']))}")
    print(f"{report['verdict']}; {options.folder / 'index.html'}")
    return int(report["status"])


def _next(options: argparse.Namespace) -> int:
    before = read_plan(options.folder)
    report, merged = merge(options.folder)
    if (report["missing"] or report["missing_to_shrink"]) and not options.without_missing:
        raise Refused(f"{options.folder}: shards are missing (`lockstep sweep merge` names them); the next round would depend on which")
    build = this_build()
    sections = []
    for section in before.sections:
        if section["kind"] == "known":
            continue
        sections.append({**section, "version": _version_now(before, section, build)})
        if section["kind"] == "replay":
            sections[-1].update(traces_in(section["folders"], before.base))
    known = [{name: one.get(name) for name in _KNOWN} for one in report["findings"] if one["trace"]]
    seen = {section["name"]: [path.read_text(encoding="utf-8") for path in _old_corpus(before, section["name"])] for section in sections}
    corpus = {name: smallest_cover([*seen.get(name, []), *kept.values()]) for name, kept in merged.corpora.items()}
    plan = write_plan(options.out, sections, options.shards or before.shards, build, before.base, before.data["limit"],
                      before.data["round"] + 1, before.data["next_seed"], known, corpus)
    _say_plan(plan)
    return 0


_KNOWN = ("key", "early_keys", "section", "subject", "version", "kind", "text", "verb", "field", "trace", "lines", "tests_to_detect", "unit",
          "seed", "words", "server", "shrunk", "said", "first_round", "state")


def _version_now(plan: Plan, section: dict[str, Any], build: Build) -> str:
    now = version_of(section.get("named", []), plan.base, build)
    return now if section["version"].startswith(("files ", "Lockstep ")) else section["version"]


def _old_corpus(plan: Plan, name: str) -> list[pathlib.Path]:
    return [plan.folder / "corpus" / name / f"{digest}.trace" for digest in plan.data["corpus"].get(name, [])]


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    try:
        return {"plan": _plan, "run": _run, "merge": _merge, "next": _next}[options.action](options)
    except (SettingsError, ValueError) as error:
        print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except (Refused, units.Lost, OSError) as error:
        print(f"lockstep: {printable(sentence_of(error))}", file=sys.stderr)
        return 3
