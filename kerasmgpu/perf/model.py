"""How a job scales: laws of speed-up, what an exchange costs, a fit of measured steps.

Plain arithmetic; TensorFlow is not needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

from kerasmgpu.errors import InvalidArgumentError


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidArgumentError(
            f"Expected {name} to be at least {least:g}. Received: {name}={value!r}."
        )


def amdahl_speedup(serial_fraction: float, num_processes: float) -> float:
    """Speed-up of a fixed problem of which a part does not become faster.

    Args:
        serial_fraction: share of one process's time that stays as it is, 0 to 1.
        num_processes: processes, at least 1.

    Returns:
        `1 / (s + (1 - s) / N)` (Amdahl 1967).
    """
    _at_least("serial_fraction", serial_fraction, 0)
    _at_least("num_processes", num_processes, 1)
    return 1.0 / (serial_fraction + (1.0 - serial_fraction) / num_processes)


def amdahl_limit(serial_fraction: float) -> float:
    """Speed-up that no number of processes exceeds: `1 / s`, infinite for 0."""
    _at_least("serial_fraction", serial_fraction, 0)
    return math.inf if serial_fraction == 0 else 1.0 / serial_fraction


def karp_flatt(speedup: float, num_processes: int) -> float | None:
    """The serial fraction that a measured speed-up stands for (Karp and Flatt 1990).

    Args:
        speedup: measured, of `num_processes` against one.
        num_processes: at least 1.

    Returns:
        `(1 / S - 1 / N) / (1 - 1 / N)`, negative where the speed-up exceeds N; None for
        one process, of which it says nothing.
    """
    _at_least("num_processes", num_processes, 1)
    if not speedup > 0:
        raise InvalidArgumentError(
            f"Expected speedup to be positive. Received: speedup={speedup!r}."
        )
    if num_processes == 1:
        return None
    return (1.0 / speedup - 1.0 / num_processes) / (1.0 - 1.0 / num_processes)


def gustafson_speedup(serial_fraction: float, num_processes: float) -> float:
    """Speed-up of a problem that grows with the processes.

    Args:
        serial_fraction: share of a process's time in the job that is serial, 0 to 1.
        num_processes: processes, at least 1.

    Returns:
        `N - s (N - 1)` (Gustafson 1988).
    """
    _at_least("serial_fraction", serial_fraction, 0)
    _at_least("num_processes", num_processes, 1)
    return num_processes - serial_fraction * (num_processes - 1)


# What an exchange costs ---------------------------------------------------------------


def ring_seconds(
    num_bytes: float, num_processes: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Time of a ring all-reduce (Patarasuk and Yuan 2009).

    Args:
        num_bytes: of each process's gradients.
        num_processes: at least 1.
        bandwidth: of a process's link, bytes/s in each direction.
        latency: of a message, seconds.

    Returns:
        `2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency`.
    """
    steps = _exchange(num_bytes, num_processes, bandwidth, latency)
    return steps * (num_bytes / num_processes / bandwidth + latency)


def server_seconds(
    num_bytes: float, num_processes: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Time of an exchange through one process, which the others send to and hear from.

    Args: as of `ring_seconds`.

    Returns:
        `2 (N - 1) * bytes / bandwidth + 2 * latency`: all of it crosses one link.
    """
    steps = _exchange(num_bytes, num_processes, bandwidth, latency)
    return steps * num_bytes / bandwidth + (2 * latency if steps else 0.0)


def _exchange(
    num_bytes: float, num_processes: int, bandwidth: float, latency: float
) -> int:
    _at_least("num_bytes", num_bytes, 0)
    _at_least("num_processes", num_processes, 1)
    _at_least("latency", latency, 0)
    if not bandwidth > 0:
        raise InvalidArgumentError(
            f"Expected bandwidth to be positive. Received: bandwidth={bandwidth!r}."
        )
    return 2 * (num_processes - 1)


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidth(text: str) -> float:
    """Bytes a second of `25gbit`, `100mbit` (bits) or `3.1gb` (bytes)."""
    found = re.fullmatch(
        r"([0-9.]+)\s*([kmgt]?)(bit|bits|b|byte|bytes)(?:/s)?", text.lower()
    )
    try:
        if found is None:
            raise ValueError
        value = float(found[1]) * _UNITS[found[2]]
        if not 0 < value < math.inf:
            raise ValueError
    except ValueError:
        raise InvalidArgumentError(
            "Expected a bandwidth such as 25gbit, 100mbit or 3gb (bytes), a second. "
            f"Received: {text!r}."
        ) from None
    return value / 8 if found[3].startswith("bit") else value


def parse_seconds(text: str) -> float:
    """Seconds of `20us`, `1.5ms`, `0.1s` or `0.1`."""
    found = re.fullmatch(r"([0-9.]+)\s*(us|ms|s|)", text.lower())
    try:
        if found is None:
            raise ValueError
        value = float(found[1])
        if math.isinf(value):
            raise ValueError
        return value * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}[found[2]]
    except ValueError:
        raise InvalidArgumentError(
            f"Expected a time such as 20us, 1.5ms or 0.1s. Received: {text!r}."
        ) from None


# A fit of measured steps --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The time of a step on N processes.

    `compute * work(N) + exchange * 2 (N - 1) / N + each * (N - 1)`: computing, sending
    by a ring, and what every further process adds (latency, waiting for the slowest).
    `work(N)` is 1 where each process has as many rows as one alone ("weak" scaling),
    and 1/N where they share one batch ("strong").

    Attributes:
        compute, exchange, each: seconds, none negative.
        mode: "weak" or "strong".
    """

    compute: float
    exchange: float
    each: float
    mode: str = "weak"

    def step_seconds(self, num_processes: int) -> float:
        """Of one step on N processes."""
        coefficients = (self.compute, self.exchange, self.each)
        terms = _terms(num_processes, self.mode)
        return math.fsum(c * t for c, t in zip(coefficients, terms, strict=True))

    def speedup(self, num_processes: int) -> float:
        """In rows a second, of N processes against one."""
        rows = num_processes if self.mode == "weak" else 1
        return rows * self.step_seconds(1) / self.step_seconds(num_processes)


def _terms(num_processes: int, mode: str) -> tuple[float, float, float]:
    others = num_processes - 1
    work = 1.0 if mode == "weak" else 1.0 / num_processes
    return work, 2 * others / num_processes, float(others)


def fit_steps(step_seconds: Mapping[int, float], mode: str = "weak") -> StepModel:
    """The `StepModel` nearest to measured steps: least squares, relative errors.

    Coefficients are not negative: of all choices of terms, the best whose solution has
    none below 0 (which is the non-negative least squares solution, Lawson and Hanson
    1974). With fewer measurements than terms the later terms stay 0.

    Args:
        step_seconds: processes → seconds of a step; one process must be among them.
        mode: "weak" or "strong".
    """
    import numpy as np

    if 1 not in step_seconds or len(step_seconds) < 2:
        raise InvalidArgumentError(
            "Expected the steps of one process and of at least one other number of "
            f"them. Received: those of {sorted(step_seconds)}."
        )
    sizes = sorted(step_seconds)
    scale = np.array([1 / step_seconds[size] for size in sizes])
    rows = np.array([_terms(size, mode) for size in sizes]) * scale[:, None]
    best, fitted = math.inf, StepModel(0.0, 0.0, 0.0, mode)
    for count in range(1, min(len(sizes), 3) + 1):
        for chosen in itertools.combinations(range(3), count):
            part = rows[:, chosen]
            found, *_ = np.linalg.lstsq(part, np.ones(len(sizes)), rcond=None)
            if (found < 0).any():
                continue
            error = float(np.square(part @ found - 1).sum())
            if error < best - 1e-12:
                values = dict(zip(chosen, map(float, found), strict=True))
                compute, exchange, each = (values.get(i, 0.0) for i in range(3))
                best, fitted = error, StepModel(compute, exchange, each, mode)
    return fitted


def relative_residuals(
    model: StepModel, step_seconds: Mapping[int, float]
) -> dict[int, float]:
    """Processes → how far the model is above (or below) what was measured, of 1."""
    return {
        size: model.step_seconds(size) / seconds - 1
        for size, seconds in sorted(step_seconds.items())
    }


def left_out_errors(
    step_seconds: Mapping[int, float], mode: str = "weak"
) -> dict[int, float]:
    """For each number of processes but one: its error in a fit that did not see it.

    Empty with fewer than three numbers, of which nothing can be left out.
    """
    errors: dict[int, float] = {}
    for size in sorted(step_seconds):
        others = {n: t for n, t in step_seconds.items() if n != size}
        if size > 1 and len(others) > 1:
            fitted = fit_steps(others, mode)
            errors[size] = fitted.step_seconds(size) / step_seconds[size] - 1
    return errors
