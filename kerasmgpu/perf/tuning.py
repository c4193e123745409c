"""`kerasmgpu bench --tune`: the settings with which a model trains fastest here.

One setting after the other, each against the best so far in jobs that take turns; a
change is kept where it wins by more than the noise. What is tried first is what
mattered most where we measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kerasmgpu.perf.settings import Settings

#: A setting is changed where the median round is faster by this factor, and every
#: round is faster.
LEAST_GAIN = 1.02
CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("OMPI_MCA_mpi_yield_when_idle", ("0",)),
    ("KERASMGPU_PIN_CORES", ("0",)),
    ("HOROVOD_CYCLE_TIME", ("1", "5")),
    ("HOROVOD_FUSION_THRESHOLD", ("0", str(64 << 20))),
    ("OMPI_MCA_coll_tuned_allreduce_algorithm", ("4", "3")),
    ("OMPI_MCA_smsc", ("^cma",)),
    ("KERASMGPU_KEEP_MEMORY", ("0",)),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One change that was tried.

    Attributes:
        what: in words.
        gains: of each round: samples/s with it, to those without.
        kept: whether it is in the settings from there on.
    """

    what: str
    gains: list[float]
    kept: bool


def changes(threads: int) -> Iterator[tuple[str, Callable[[Settings], Settings]]]:
    """What to try, in order: in words, and what makes it of other settings."""
    choices = list(CHOICES)
    if threads > 1:
        counts = sorted({1, threads // 2})
        choices.append(("TF_NUM_INTRAOP_THREADS", tuple(map(str, counts))))
    for name, values in choices:
        for value in values:
            yield f"{name}={value}", partial(_with, name=name, value=value)
    yield "--gloo", partial(dataclasses.replace, gloo=True)


def _with(settings: Settings, name: str, value: str) -> Settings:
    environment = {**settings.environment, name: value}
    return dataclasses.replace(settings, environment=environment)


def search(
    measure: Callable[[Settings], float],
    rounds: int,
    threads: int,
    tell: Callable[[str], None],
) -> tuple[Settings, list[Trial]]:
    """Finds settings.

    Args:
        measure: trains with settings; returns samples/s of the whole job, and 0 where
            it cannot run so.
        rounds: of each trial; both sides are measured in each.
        threads: of a rank.
        tell: is told what is tried.
    """
    best = Settings({})
    trials: list[Trial] = []
    for what, change in changes(threads):
        tried = change(best)
        tell(what)
        gains = []
        for number in range(rounds):
            if number % 2:
                new, old = measure(tried), measure(best)
            else:
                old, new = measure(best), measure(tried)
            gains.append(new / old)
        kept = statistics.median(gains) >= LEAST_GAIN and min(gains) > 1
        trials.append(Trial(what, gains, kept))
        if kept:
            best = tried
    return best, trials


def rate_of(ranks: list[dict[str, Any]]) -> float:
    """Samples/s of a job, of what its ranks measured."""
    return sum(rank["samples_per_second"] for rank in ranks)
