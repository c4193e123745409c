"""Which rank failed first, and how that is told."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence

from kerasmgpu.launch.rank import RankState
from kerasmgpu.launch.spec import JobSpec

#: Lines that TensorFlow prints whatever happens.
_CHATTER = re.compile(r"I\d{4} |WARNING: All log messages before absl")

MAX_TRACEBACK_LINES = 16
MAX_WAITING_LINES = 5


def first_failure(ranks: Sequence[RankState]) -> RankState | None:
    """The rank whose end began the failure of the job, or None.

    Ranks that only met the loss of another are passed over, as long as there is one
    that failed by itself or left (with exit code 0) before them.
    """
    failed = [rank for rank in ranks if rank.failed]
    if not failed:
        return None
    own = [rank for rank in failed if not rank.is_consequence]
    if own:
        first = min(own, key=_when)
        waited_for = any(r.state and r.state.waiting for r in ranks if r is not first)
        if first.leaving_code and not first.traceback and waited_for:
            first.left_early = True
        return first
    first = min(failed, key=_when)
    left = [rank for rank in ranks if _left_at(rank) <= _when(first) + 0.5]
    if left:
        deserter = min(left, key=_left_at)
        deserter.left_early = True
        return deserter
    return first


def summary(first: RankState, ranks: Sequence[RankState], started_at: float) -> str:
    """The launcher's last words: at most 30 lines."""
    lines = []
    others = _waiting_lines(first, ranks)
    where = f"rank {first.rank} of {len(ranks)} on host {first.host}"
    if first.traceback:
        shown = first.traceback.rstrip().split("\n")
        if len(shown) > MAX_TRACEBACK_LINES:
            shown = [shown[0], "  …", *shown[-MAX_TRACEBACK_LINES + 2 :]]
        lines += [f"kerasmgpu: traceback of {where}:", *shown]
    elif first.exit_code and first.tail:
        tail = [line for line in first.tail if not _CHATTER.match(line)]
        if tail:
            lines += [f"kerasmgpu: last lines of {where}:", *tail[-8:]]
    seconds = max(0.0, _when(first) - started_at)
    lines.append(
        f"kerasmgpu: {where} failed first, {seconds:.1f} s after the start: "
        f"{describe(first)}"
    )
    return "\n".join(lines + others)


def describe(rank: RankState) -> str:
    """How a rank ended, in words."""
    if rank.why is not None:
        return rank.why
    if rank.left_early:
        return (
            f"it left with exit code {rank.left_with} while other ranks still waited "
            "for it"
        )
    code = rank.exit_code or 0
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}, exit code {128 - code}"
    last = rank.traceback.rstrip().rpartition("\n")[2]
    return f"exit code {code}" + (f": {last[:300]}" if last else "")


def version_difference(ranks: Sequence[RankState]) -> str | None:
    """Says which hosts run which versions, where they differ."""
    for package in ranks[0].versions:
        found: dict[str | None, list[str]] = {}
        for rank in ranks:
            hosts = found.setdefault(rank.versions.get(package), [])
            if rank.host not in hosts:
                hosts.append(rank.host)
        if len(found) > 1:
            told = "; ".join(
                f"{version or 'not installed'} on {', '.join(hosts)}"
                for version, hosts in found.items()
            )
            return (
                f"the hosts have different versions of {package}: {told}. "
                "Install the same one on all, in a folder of the same name"
            )
    return None


def unused(spec: JobSpec, ranks: Sequence[RankState]) -> str:
    """A warning where ranks of a Python program each worked alone, or ""."""
    program = os.path.basename(spec.command[0])
    if (
        len(ranks) == 1
        or not program.startswith("python")
        or any(rank.used for rank in ranks)
    ):
        return ""
    return (
        f"kerasmgpu: WARNING: {len(ranks)} ranks ran, but no model was wrapped and no "
        "collective was called: each rank worked alone. Call "
        "`model = strategy.wrap(model)` with a kerasmgpu.HorovodStrategy()."
    )


def _waiting_lines(first: RankState, ranks: Sequence[RankState]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for rank in ranks:
        doing = "" if rank is first else _doing(rank)
        if doing:
            groups.setdefault(doing, []).append(f"{rank.rank} ({rank.host})")
    lines = [
        f"kerasmgpu: rank {', '.join(names[:6])}"
        f"{' and others' if len(names) > 6 else ''} {doing}"
        for doing, names in groups.items()
    ]
    return lines[:MAX_WAITING_LINES]


def _doing(rank: RankState) -> str:
    """What another rank did when the first failed, in words, or ""."""
    state = rank.state
    if state is not None and state.what:
        verb = "was waiting in" if state.waiting else "was in"
        return f"{verb} {state.what}, for {state.seconds:.1f} s"
    if rank.is_consequence and rank.traceback:
        last = rank.traceback.rstrip().rpartition("\n")[2]
        return f"was stopped by that: {last[:200]}"
    return ""


def _left_at(rank: RankState) -> float:
    """When a rank began to leave by itself; infinity where it did not."""
    if rank.leaving_at is not None:
        return rank.leaving_at
    if rank.ended and rank.exit_code == 0:
        return rank.ended_at
    return float("inf")


def _when(rank: RankState) -> float:
    if rank.failed_at is not None:
        return rank.failed_at
    return rank.ended_at or time.monotonic()
