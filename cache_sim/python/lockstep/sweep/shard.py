"""Runs a shard: plays its units and publishes their results, once."""
from __future__ import annotations

import json
import os
import pathlib
import platform
import sys
import time
from typing import Any, Callable

from lockstep.settings import SettingsError
from lockstep.sweep import units
from lockstep.sweep.plan import Plan, Refused, this_build
from lockstep.sweep.publish import digest_of, publish, read, text_of

# Variables in which engines say which shard a process is, with the number of the first shard. Where one engine runs below another,
# the more particular one counts, and it stands first.
ENGINES = {"PARALLEL_SEQ": 1, "SLURM_ARRAY_TASK_ID": 0, "JOB_COMPLETION_INDEX": 0}
PLAYED, SHRUNK = "done", "shrunk"


def index_from_environment() -> int | None:
    for name, first in ENGINES.items():
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name]) - first
    return None


def keys_of(plan: Plan, index: int) -> list[dict[str, Any]]:
    """The findings that a shard of the second set shrinks."""
    keys = read(plan.folder / "keys.json")
    if keys is None:
        raise Refused(f"{plan.folder}: the second set of shards begins when the first is complete and merged: `lockstep sweep merge`")
    return [one for at, one in enumerate(keys["findings"]) if at % plan.shards == index]


def run(plan: Plan, index: int, shrinks: bool = False, again: bool = False) -> tuple[int, str]:
    """Plays a shard and publishes it. Returns the exit status and a sentence.

    0: published, or another copy was first with the same bytes. 3: lost, or refused; nothing was published. 13: another copy was
    first with other bytes, which is kept as a finding.
    """
    if not 0 <= index < plan.shards:
        raise SettingsError(f"there is no shard {index}: the plan has {plan.shards}, from 0")
    build = this_build()
    plan.check_build(build)
    folder = plan.folder / (SHRUNK if shrinks else PLAYED)
    path = folder / f"{index}.json"
    _set_foreign_aside(path, plan)
    if path.exists() and not again:
        return 0, f"shard {index} is done already"
    work: list[tuple[Any, Callable[[], dict[str, Any]]]]
    if shrinks:
        work = [(one["key"], lambda one=one: units.shrink(plan, one)) for one in keys_of(plan, index)]  # type: ignore[misc]
    else:
        for section in {plan.section_of(unit)[0]["name"]: plan.section_of(unit)[0] for unit in plan.units_of(index)}.values():
            plan.check_subject(section, build)
        work = [(unit, lambda unit=unit: units.play(plan, unit)) for unit in plan.units_of(index)]  # type: ignore[misc]
    started = time.monotonic()
    results, seconds = [], []
    for name, play in work:
        before, processor = time.monotonic(), _processor_seconds()
        try:
            results.append(play())
        except units.Lost as lost:
            why = f"shard {index} is neither passed nor failed: {'finding' if shrinks else 'unit'} {name}: {lost}"
            _note_loss(plan, folder, index, why)
            return 3, why
        seconds.append([name, round(time.monotonic() - before, 4), round(_processor_seconds() - processor, 4)])
    data = {"plan": plan.digest, "build": build.digest, "index": index, "units": results}
    if publish(path, text_of(data)):
        times = {"index": index, "host": platform.node(), "seconds": round(time.monotonic() - started, 4), "units": seconds}
        publish(plan.folder / f"times-{folder.name}" / f"{index}.json", text_of(times))
        return 0, f"shard {index}: {len(results)} units in {times['seconds']:.1f} s"
    return _compare(plan, folder, index, read(path), data)


def _processor_seconds() -> float:
    """Of this process and of the programs that it has waited for."""
    return sum(os.times()[:4])


def _set_foreign_aside(path: pathlib.Path, plan: Plan) -> None:
    """A result of another build or plan keeps nobody from writing the right one. It stays beside, by the digest of its bytes."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if data_of(plan, path, text) is None:
        os.replace(path, path.with_name(f"{path.stem}.foreign-{digest_of(text)}"))


def data_of(plan: Plan, path: pathlib.Path, text: str) -> dict[str, Any] | None:
    """The data of a shard's file; None if it is damaged, or of another plan or build."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or (data.get("plan"), data.get("build")) != (plan.digest, plan.data["build"]):
        return None
    if path.parent.name == PLAYED and [one["unit"] for one in data["units"]] != list(plan.units_of(int(path.stem))):
        return None
    return data


def _note_loss(plan: Plan, folder: pathlib.Path, index: int, why: str) -> None:
    """Leaves the reason for the merge. A disk that is full leaves none."""
    try:
        publish(plan.folder / "lost" / f"{folder.name}-{index}.{platform.node()}.{os.getpid()}.json",
                text_of({"set": folder.name, "index": index, "text": why}))
    except OSError as error:
        print(f"lockstep: {error}", file=sys.stderr)


def _compare(plan: Plan, folder: pathlib.Path, index: int, first: Any, second: dict[str, Any]) -> tuple[int, str]:
    """Another copy of this shard was first. Units that are over their limit in either are not compared: that depends on the machine."""
    differing = [[one, other] for one, other in zip(first["units"], second["units"])
                 if one != other and not ("over_limit" in one or "over_limit" in other)]
    if not differing:
        return 0, f"shard {index} is done already, with the same bytes"
    said = text_of([{"set": folder.name, "first": one, "second": other} for one, other in differing])
    publish(plan.folder / "differs" / f"{folder.name}-{index}-{digest_of(said)}.json", said)
    names = ", ".join(str(one.get("unit", one.get("key"))) for one, _ in differing)
    return 13, f"sweep-not-deterministic: shard {index}: another copy has other results of {names}"
