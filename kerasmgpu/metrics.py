"""Metrics: the ranks' states are summed, then `result()` is taken.

Keras's metrics keep sums (totals, counts, confusion counts), so the sum of the ranks'
states is the state of one process. A metric of the user's is tried on the first batch:
where the states of two parts do not add up to the state of the whole, it is refused by
name. A `Mean` or `Sum` of a plain number (a loss that is already a mean over this
rank's rows) counts by the rank's share of the rows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import groups, reduce_tensor, topology
from kerasmgpu.control import current_step
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.keras_compat import (
    CompileMetrics,
    compiled_metrics,
    holders_of_metrics_to_come,
    tree,
)
from kerasmgpu.overriding import overridden

#: Outcome of trying a metric on a batch.
UNKNOWN, FAILED, PASSED = -1, 0, 1


def leaf_metrics(model: Any) -> list[Any]:
    """All metrics of a model, those inside a `CompileMetrics` one by one."""
    found: list[Any] = []
    for metric in model.metrics:
        found.extend(metric.metrics if isinstance(metric, CompileMetrics) else [metric])
    return found


def users_metrics(model: Any) -> list[Any]:
    """Metrics of classes that are not Keras's own, also before they are built."""
    compiled = [
        metric
        for metric in tree.flatten(compiled_metrics(model))
        if isinstance(metric, keras.metrics.Metric)
    ]
    found: dict[int, Any] = {}
    for metric in [*compiled, *leaf_metrics(model)]:
        if not type(metric).__module__.startswith("keras."):
            found[id(metric)] = metric
    return list(found.values())


# In the step --------------------------------------------------------------------------


class Watch:
    """What a step's metrics did, collected while the step is traced or run.

    Attributes:
        trials: metric name → int32 scalar, an outcome of `_try_metric`.
        results: id of a tensor that `metric.result()` gave → (tensor, metric).
    """

    def __init__(self) -> None:
        self.trials: dict[str, tf.Tensor] = {}
        self.results: dict[int, tuple[Any, Any]] = {}


_watch: contextvars.ContextVar[Watch | None] = contextvars.ContextVar(
    "kerasmgpu_watch", default=None
)


@contextlib.contextmanager
def watched_metrics(model: Any, try_metrics: tf.Tensor) -> Iterator[Watch]:
    """While it lasts, plain numbers count by rows, and a user's metrics are tried.

    Args:
        model: whose metrics are meant.
        try_metrics: bool scalar tensor: whether to try them in this step.
    """
    watch = Watch()

    def trying(metric: Any) -> Any:
        return _trying(metric, try_metrics, watch)

    def recording(metric: Any) -> Any:
        return _recording_results(metric, watch)

    with contextlib.ExitStack() as stack:
        stack.enter_context(numbers_count_by_rows())
        for metrics, name, make in (
            (users_metrics(model), "update_state", trying),
            (leaf_metrics(model), "result", recording),
        ):
            stack.enter_context(overridden(metrics, name, make))

        def building(holder: Any) -> Any:
            build = holder.build

            def recorded_from_now_on(*args: Any, **kwargs: Any) -> None:
                build(*args, **kwargs)
                made = overridden(holder.metrics, "result", recording)
                stack.enter_context(made)

            return recorded_from_now_on

        holders = holders_of_metrics_to_come(model)
        stack.enter_context(overridden(holders, "build", building))
        token = _watch.set(watch)
        try:
            yield watch
        finally:
            _watch.reset(token)


@contextlib.contextmanager
def trials_apart(keep: bool = False) -> Iterator[dict[str, tf.Tensor]]:
    """While it lasts, trials are noted in the dictionary that it yields.

    Args:
        keep: note them where the step has its own.
    """
    watch = _watch.get() or Watch()
    if keep:
        yield watch.trials
        return
    whole, watch.trials = watch.trials, {}
    try:
        yield watch.trials
    finally:
        watch.trials = whole


def recorded_results() -> dict[int, tuple[Any, Any]]:
    """`Watch.results` of the step that is being traced or run."""
    watch = _watch.get()
    return watch.results if watch is not None else {}


def join_trials(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The outcome of two trials, of which one may be unknown."""
    least, most = tf.minimum(one, other), tf.maximum(one, other)
    return tf.where(least == UNKNOWN, most, least)


@contextlib.contextmanager
def numbers_count_by_rows() -> Iterator[None]:
    """While it lasts, a `Mean` or `Sum` of a plain number counts by the step's rows."""
    with contextlib.ExitStack() as stack:
        for cls in (keras.metrics.Mean, keras.metrics.Sum):
            stack.enter_context(_by_rows(cls))
        yield


@contextlib.contextmanager
def _by_rows(cls: Any) -> Iterator[None]:
    original = cls.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is not None and sample_weight is None and _is_number(values):
            sample_weight = step.weight
        return original(metric, values, sample_weight)

    cls.update_state = update_state
    try:
        yield
    finally:
        cls.update_state = original


def _is_number(values: Any) -> bool:
    shape = getattr(values, "shape", ())
    return shape is not None and len(shape) == 0


def _recording_results(metric: Any, watch: Watch) -> Any:
    result = metric.result

    def recording() -> Any:
        value = result()
        if tf.is_tensor(value):
            watch.results[id(value)] = (value, metric)
        return value

    return recording


def _trying(metric: Any, try_metrics: tf.Tensor, watch: Watch) -> Any:
    update_state = metric.update_state
    busy = False

    def trying(*args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if not busy and metric.name not in watch.trials and current_step() is not None:
            busy = True
            try:
                outcome = _try_metric(metric, update_state, args, kwargs, try_metrics)
            finally:
                busy = False
            watch.trials[metric.name] = outcome
        return update_state(*args, **kwargs)

    return trying


def _try_metric(
    metric: Any, update_state: Any, args: Any, kwargs: Any, wanted: tf.Tensor
) -> tf.Tensor:
    """Whether the states of two uneven parts of a batch add up to that of the whole."""
    if not metric.variables or any(
        isinstance(value, tf.Variable) for value in vars(metric).values()
    ):
        return tf.constant(FAILED)  # a state that Keras, and we, cannot see
    leaves = [
        tf.convert_to_tensor(leaf)
        for leaf in tree.flatten((args, kwargs))
        if leaf is not None and not isinstance(leaf, (str, bool))
    ]
    batched = [leaf for leaf in leaves if leaf.shape.rank]
    rows = tf.shape(batched[0])[0] if batched else tf.constant(2)
    split = tf.maximum(rows // 3, 1)

    def part(begin: Any, end: Any) -> None:
        def cut(leaf: Any) -> Any:
            if leaf is None or isinstance(leaf, (str, bool)):
                return leaf
            tensor = tf.convert_to_tensor(leaf)
            return tensor[begin:end] if tensor.shape.rank else tensor

        part_args, part_kwargs = tree.map_structure(cut, (args, kwargs))
        update_state(*part_args, **part_kwargs)

    def states(begin: Any, end: Any, times: int = 1) -> list[tf.Tensor]:
        metric.reset_state()
        for _ in range(times):
            part(begin, end)
        return [tf.cast(tf.identity(v.value), tf.float64) for v in metric.variables]

    saved = {id(v): tf.identity(v.value) for v in metric.variables}

    def run() -> tf.Tensor:
        part(0, split)  # builds what is built late
        metric.reset_state()
        start = [tf.cast(tf.identity(v.value), tf.float64) for v in metric.variables]
        fresh = {id(v): tf.identity(v.value) for v in metric.variables}
        if batched:
            first, second = states(0, split), states(split, rows)
            whole = states(0, rows)
        else:  # numbers cannot be cut: then twice the same must give twice the state
            first, second = states(0, 1), states(0, 1)
            whole = states(0, 1, times=2)
        for variable in metric.variables:
            variable.assign(saved.get(id(variable), fresh[id(variable)]))
        close = [
            tf.reduce_all(
                tf.abs((a - s) + (b - s) - (w - s)) <= 1e-3 * tf.abs(w - s) + 1e-5
            )
            for s, a, b, w in zip(start, first, second, whole, strict=True)
        ]
        return tf.where(tf.reduce_all(close), PASSED, FAILED)

    return tf.cond(tf.logical_and(wanted, rows >= 2), run, lambda: tf.constant(UNKNOWN))


def refuse(names: Sequence[str]) -> None:
    """Raises the error about metrics whose states cannot be summed."""
    listed = ", ".join(repr(name) for name in names)
    raise InvalidArgumentError(
        f"Rank {topology().rank} of {topology().size}: the metric(s) {listed} cannot "
        "be summed over ranks: the states of two parts of a batch do not add up to the "
        "state of the whole (as with a running maximum, or a mean of batch means), or "
        "it keeps its state elsewhere than in Keras variables. Expected variables, "
        "made with self.add_weight, that are sums over rows. Keep sums and counts in "
        "update_state and divide in result(), or compute the metric in a callback from "
        "model.predict."
    )


# At the end of an epoch ---------------------------------------------------------------


def start_values(model: Any) -> dict[int, tf.Tensor]:
    """What the user's metrics hold before the first batch; as a rule zeros.

    Taken by the id of the variable. It is not part of the sum.
    """
    return {
        id(variable): tf.identity(variable.value)
        for metric in users_metrics(model)
        for variable in metric.variables
    }


def sum_over_ranks(
    model: Any, starts: dict[int, tf.Tensor]
) -> list[tuple[Any, tf.Tensor]]:
    """Replaces the state of all metrics by its sum over ranks.

    Must be called on every rank.

    Args:
        model: whose metrics are meant.
        starts: this rank's `start_values`; they count on rank 0 alone.

    Returns:
        `(variable, this rank's own value)`, to put back with `restore`.
    """
    variables = {id(v): v for metric in leaf_metrics(model) for v in metric.variables}
    local = [(v, tf.identity(v.value)) for v in variables.values()]
    by_type: dict[str, list[Any]] = {}
    for variable in variables.values():
        by_type.setdefault(tf.as_dtype(variable.dtype).name, []).append(variable)
    for dtype, group in sorted(by_type.items()):
        wide = tf.float64 if tf.as_dtype(dtype).is_floating else tf.int64
        flat = []
        for variable in group:
            value = tf.cast(variable.value, wide)
            if id(variable) in starts and not topology().is_rank_zero:
                value -= tf.cast(starts[id(variable)], wide)
            if not groups().speaks:  # the group's rows count once
                value = tf.zeros_like(value)
            flat.append(tf.reshape(value, [-1]))
        total = reduce_tensor(tf.concat(flat, 0), "sum", f"kerasmgpu.metrics.{dtype}")
        sizes = [int(np.prod(v.shape)) for v in group]
        for variable, part in zip(group, tf.split(total, sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), dtype))
    return local


def restore(local: list[tuple[Any, tf.Tensor]]) -> None:
    """Puts back what `sum_over_ranks` replaced."""
    for variable, value in local:
        variable.assign(value)
