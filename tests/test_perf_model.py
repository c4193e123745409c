"""The laws of scaling, against numbers worked out by hand."""

import math

import pytest

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.model import amdahl_limit, amdahl_speedup, karp_flatt


def test_amdahl() -> None:
    assert amdahl_speedup(0.0, 8) == 8
    assert amdahl_speedup(1.0, 8) == 1
    assert amdahl_speedup(0.1, 4) == pytest.approx(1 / 0.325)
    assert amdahl_limit(0.05) == pytest.approx(20)
    assert amdahl_limit(0) == math.inf


def test_karp_and_flatt_finds_the_serial_part_that_amdahl_puts_in() -> None:
    for serial in (0.0, 0.02, 0.5):
        speedup = amdahl_speedup(serial, 6)
        assert karp_flatt(speedup, 6) == pytest.approx(serial, abs=1e-12)
    assert karp_flatt(1.0, 1) is None
    assert karp_flatt(4.4, 4) < 0  # faster than N times


def test_what_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="speedup to be positive"):
        karp_flatt(0.0, 2)
    with pytest.raises(InvalidArgumentError, match="num_processes to be at least 1"):
        amdahl_speedup(0.1, 0)
    with pytest.raises(InvalidArgumentError, match="serial_fraction to be at least 0"):
        amdahl_limit(-0.1)
