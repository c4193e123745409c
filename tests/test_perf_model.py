"""The laws of scaling, against numbers worked out by hand."""

import math

import pytest

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.model import (
    StepModel,
    amdahl_limit,
    amdahl_speedup,
    fit_steps,
    gustafson_speedup,
    karp_flatt,
    left_out_errors,
    parse_bandwidth,
    parse_seconds,
    relative_residuals,
    ring_seconds,
    server_seconds,
)


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


def test_gustafson():
    assert gustafson_speedup(0.25, 4) == 4 - 0.25 * 3


def test_exchanges_by_hand():
    # 12.5 MB over 3 processes at 100 Mbit/s: a ring takes 1.33 s, a server 4 s.
    link = parse_bandwidth("100mbit")
    assert link == 12.5e6
    assert ring_seconds(12.5e6, 3, link) == pytest.approx(4 / 3)
    assert ring_seconds(12.5e6, 3, link, latency=0.01) == pytest.approx(4 / 3 + 0.04)
    assert server_seconds(12.5e6, 3, link) == pytest.approx(4.0)
    assert ring_seconds(1e9, 1, link, 1.0) == server_seconds(1e9, 1, link, 1.0) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("25gbit", 25e9 / 8), ("3GB", 3e9), ("1.5 Gbit/s", 1.5e9 / 8), ("10MB/s", 10e6)],
)
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["fast", "25", "10mbps", "-1gbit", "0gbit", "1..2gbit"]
)
def test_nonsense_bandwidths_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="such as 25gbit"):
        parse_bandwidth(text)


def test_times():
    assert parse_seconds("20us") == pytest.approx(20e-6)
    assert parse_seconds("0.5") == 0.5
    with pytest.raises(InvalidArgumentError, match="such as 20us"):
        parse_seconds("soon")


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_a_fit_finds_what_steps_were_made_of(mode):
    made = StepModel(0.1, 0.02, 0.003, mode)
    steps = {size: made.step_seconds(size) for size in (1, 2, 4, 8)}
    fitted = fit_steps(steps, mode)
    assert (fitted.compute, fitted.exchange, fitted.each) == pytest.approx(
        (0.1, 0.02, 0.003)
    )
    assert max(map(abs, relative_residuals(fitted, steps).values())) < 1e-9
    assert left_out_errors(steps, mode) == pytest.approx({2: 0, 4: 0, 8: 0})


def test_a_fit_has_no_negative_part():
    # Faster on more processes than on one: computing alone is the nearest.
    fitted = fit_steps({1: 0.1, 2: 0.09, 4: 0.08})
    assert fitted.exchange == fitted.each == 0
    assert 0.08 < fitted.compute < 0.1


def test_a_step_of_two_processes_by_hand():
    weak = StepModel(1.0, 0.5, 0.0)
    assert weak.step_seconds(2) == 1.5
    assert weak.speedup(2) == pytest.approx(2 / 1.5)
    assert StepModel(1.0, 0.5, 0.0, "strong").speedup(2) == pytest.approx(1.0)


def test_a_fit_needs_two_sizes():
    with pytest.raises(InvalidArgumentError, match="at least one other number"):
        fit_steps({1: 0.1})
