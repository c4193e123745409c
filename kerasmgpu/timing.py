"""Where a step waits: seconds, added up inside the step.

Reading a clock in the graph is the only way to tell what happens inside one call.
Nothing is added to steps that are traced without timers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

NAMES = ("input", "reduce")

_current: contextvars.ContextVar[StepTimers | None] = contextvars.ContextVar(
    "kerasmgpu_timers", default=None
)


class StepTimers:
    """Seconds that this rank's steps have waited, by cause."""

    def __init__(self) -> None:
        self._seconds = {
            name: tf.Variable(0.0, dtype=tf.float64, trainable=False) for name in NAMES
        }

    def add(self, name: str, seconds: tf.Tensor) -> None:
        self._seconds[name].assign_add(seconds)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = {}
        for name, variable in self._seconds.items():
            taken[name] = float(variable)
            variable.assign(0.0)
        return taken


class JointTimers(StepTimers):
    """Several timers that are told the same, each for a reader of its own."""

    def __init__(self, *timers: StepTimers) -> None:
        self.timers = timers

    def add(self, name: str, seconds: tf.Tensor) -> None:
        for one in self.timers:
            one.add(name, seconds)


@contextlib.contextmanager
def timed_by(timers: StepTimers | None) -> Iterator[None]:
    """While it lasts, `timed` adds to these timers."""
    token = _current.set(timers)
    try:
        yield
    finally:
        _current.reset(token)


def timed(
    name: str, function: Callable[[], Any], ready: Any = None, wait: bool = False
) -> Any:
    """Runs a function and notes how long its result took from when it was possible.

    Args:
        name: one of `NAMES`.
        function: what to run.
        ready: a nest of tensors; the clock starts when all of them are there.
        wait: whether the function may begin only after the clock was started.
    """
    timers = _current.get()
    if timers is None:
        return function()
    with tf.control_dependencies(_tensors(ready)):
        start = tf.timestamp()
    with tf.control_dependencies([start] if wait else []):
        result = function()
    with tf.control_dependencies([start, *_tensors(result)]):
        end = tf.timestamp()
    timers.add(name, tf.maximum(end - start, 0.0))
    if wait:
        # What comes after must not begin before the clock was read: on one thread it
        # would be done first, and be counted.
        with tf.control_dependencies([end]):
            result = tf.nest.map_structure(
                lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, result
            )
    return result


def _tensors(nest: Any) -> list[Any]:
    leaves = tf.nest.flatten(nest, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]
