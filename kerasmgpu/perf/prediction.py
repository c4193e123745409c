"""What a record of a measurement says about more processes than were measured."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.model import StepModel, ring_seconds, server_seconds
from kerasmgpu.perf.record import read_json
from kerasmgpu.perf.scaling import MODES

_AGAIN = (
    "Make one with `kerasmgpu bench --np 1,2 --json FILE` or `kerasmgpu bench "
    "--emulate-step-seconds 0.1 --np 2,4,8 --json FILE`."
)
COSTS = {"ring": ring_seconds, "server": server_seconds}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What predictions start from.

    Attributes:
        model: the workload's name.
        gradient_bytes: that a process sends in a step.
        fit: of the measured steps, as of `scaling.describe_fit`.
        mode: "weak" or "strong" scaling.
        emulated: whether devices were emulated.
    """

    model: str
    gradient_bytes: int
    fit: dict[str, Any]
    mode: str = "weak"
    emulated: bool = False

    @property
    def steps(self) -> StepModel:
        """The fitted model, on links like those that were measured."""
        fit = self.fit
        return StepModel(fit["compute"], fit["exchange"], fit["each"], self.mode)

    def on_links(
        self, size: int, exchange: str, bandwidth: float, latency: float
    ) -> float:
        """Seconds of a step on `size` processes with other links.

        The fitted computing, and after it the cost model's exchange. What the fit has
        for sending and for further processes belongs to the measured links.

        Args:
            exchange: "ring" or "server".
            bandwidth: bytes/s of each process's link.
            latency: seconds.
        """
        computing = StepModel(self.fit["compute"], 0.0, 0.0, self.mode)
        spent = COSTS[exchange](self.gradient_bytes, size, bandwidth, latency)
        return computing.step_seconds(size) + spent

    def speedup(self, size: int, seconds: float) -> float:
        """In rows a second, of `size` processes with such a step against one."""
        rows = size if self.mode == "weak" else 1
        return rows * float(self.fit["compute"]) / seconds


def read_record(path: Path) -> Measured:
    """Reads what a `kerasmgpu bench --json` of two ranks or more wrote.

    Raises:
        InvalidArgumentError: it is no such record, or lacks a field (which is named).
    """
    record = read_json(path, "a record", _AGAIN)

    def field(*names: str) -> Any:
        value = record
        for position, name in enumerate(names):
            if not isinstance(value, dict) or name not in value:
                raise InvalidArgumentError(
                    f"The record {path} lacks the field "
                    f"{'.'.join(names[: position + 1])}. {_AGAIN}"
                )
            value = value[name]
        return value

    def number(*names: str) -> float:
        value = field(*names)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 <= value < math.inf:
            raise InvalidArgumentError(
                f"Expected a number of 0 or more in the field {'.'.join(names)} of "
                f"the record {path}. Received: {value!r}. {_AGAIN}"
            )
        return float(value)

    emulated = isinstance(record, dict) and record.get("emulated") is True
    model, mode = str(field("model")), field("mode")
    if mode not in MODES:
        raise InvalidArgumentError(
            f"Expected the field mode of the record {path} to be one of "
            f"{', '.join(MODES)}. Received: {mode!r}. {_AGAIN}"
        )
    where = ("fits", "ring") if emulated else ("fit",)
    if field(*where) == {}:
        raise InvalidArgumentError(
            f"The record {path} holds no measurement of two ranks or more. {_AGAIN}"
        )
    fit: dict[str, Any] = {
        name: number(*where, name) for name in ("compute", "exchange", "each")
    }
    for name in ("residuals", "left_out"):
        errors = field(*where, name)
        if not isinstance(errors, dict):
            raise InvalidArgumentError(
                f"Expected errors by number of processes in the field "
                f"{'.'.join((*where, name))} of the record {path}. Received: "
                f"{errors!r}. {_AGAIN}"
            )
        fit[name] = errors
    num_bytes = int(number("gradient_bytes"))
    if not fit["compute"] > 0 or not fit["residuals"] or not num_bytes:
        raise InvalidArgumentError(
            f"Expected the record {path} to hold gradients, residuals and a fit with "
            f"some computing. Received: gradient_bytes={num_bytes}, compute="
            f"{fit['compute']:g}, {len(fit['residuals'])} residual(s). {_AGAIN}"
        )
    return Measured(model, num_bytes, fit, mode, emulated)


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
