"""How a job scales: the laws that tell a serial part from a measured speed-up.

Plain arithmetic; neither TensorFlow nor NumPy is needed.
"""

from __future__ import annotations

import math

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
