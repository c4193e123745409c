"""What a record of a measurement says about more processes than were measured."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.model import ring_seconds, server_seconds
from kerasmgpu.perf.record import read_json


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one process: what predictions start from.

    Attributes:
        model: the workload's name.
        step_seconds: of one process.
        gradient_bytes: that it sends in a step.
    """

    model: str
    step_seconds: float
    gradient_bytes: int


def read_record(path: Path) -> Measured:
    """Reads what a `kerasmgpu bench --json` of two ranks or more wrote.

    Raises:
        InvalidArgumentError: it is no such record, or lacks a field (which is named).
    """
    again = "Make one with `kerasmgpu bench --np 1,2 --json FILE`."
    record = read_json(path, "a record", again)

    def field(value: Any, *names: str) -> Any:
        for position, name in enumerate(names):
            if not isinstance(value, dict) or name not in value:
                raise InvalidArgumentError(
                    f"The record {path} lacks the field "
                    f"{'.'.join(names[: position + 1])}. {again}"
                )
            value = value[name]
        return value

    results = field(record, "results")
    sizes = sorted(int(size) for size in results if size != "1" and size.isdigit())
    if not sizes:
        raise InvalidArgumentError(
            f"The record {path} holds no measurement of two ranks or more. {again}"
        )
    seconds = field(record, "results", str(sizes[0]), "alone_step_seconds")
    return Measured(
        model=str(field(record, "model")),
        step_seconds=statistics.median(seconds),
        gradient_bytes=int(field(record, "gradient_bytes")),
    )


def step_seconds(
    measured: Measured, size: int, exchange: str, bandwidth: float, latency: float
) -> float:
    """Of a step on `size` processes, the exchange after the computation.

    Args:
        exchange: "ring" or "server".
        bandwidth: bytes/s of each process's link.
        latency: seconds.
    """
    cost = ring_seconds if exchange == "ring" else server_seconds
    return measured.step_seconds + cost(
        measured.gradient_bytes, size, bandwidth, latency
    )


def parse_sizes(text: str) -> list[int]:
    """`8,64,512` → the numbers, different and positive."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise InvalidArgumentError(
            "Expected --np as different positive numbers, such as 1,2. Received: "
            f"--np {text}."
        )
    return sizes
