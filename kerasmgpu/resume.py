"""Exact resume: what a training run is made of, and the way back to it.

A saved state holds weights, optimizers, metrics of the epoch that had begun, the place
in the data and the random states of every rank. On resume the data pipeline is brought
to where it was: the iterators that Keras had made are made again (each draws the seeds
of one shuffle), and the batches of the epoch that were consumed run through without
training. `callbacks.BackupAndRestore` decides when, and keeps the files.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from kerasmgpu import metrics, state
from kerasmgpu.collectives import (
    all_gather_object,
    broadcast_object,
    groups,
    topology,
)
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.keras_compat import PyDatasetAdapter, build_from_spec
from kerasmgpu.shards import assign_wholes, gathered, sharded_variables, whole_of
from kerasmgpu.step import StepFunction

FORMAT = 1
#: What rank 0 alone needs.
_HEAVY = ("weights", "optimizers", "metrics")


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in a run: `batch` batches of epoch `epoch` are done.

    Attributes:
        first_epoch: the epoch with which the run began, counted from 0.
        epoch, batch: as above.
        num_batches: batches an epoch, where known by then.
        ended: whether the data of the epoch has ended with `batch`.
    """

    first_epoch: int
    epoch: int
    batch: int
    num_batches: int | None
    ended: bool = False


class Resume:
    """Takes the state of a `fit`, and brings a `fit` back to one that was taken.

    Must be created, and its methods called, on every rank.

    Args:
        session: the wrapped model's.
        first_epoch: with which this `fit` begins.
    """

    def __init__(self, session: Any, first_epoch: int) -> None:
        self.session = session
        self.first_epoch = first_epoch
        self.position: Position | None = None
        self._start_random = _host_random_state()
        self._epoch_random = self._start_random
        self._saved: dict[str, Any] | None = None
        self._fast_forward: _FastForward | None = None

    # Taking ---------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """At the beginning of an epoch, before its data is asked for."""
        position, saved = self.position, self._saved
        if position is None or saved is None or epoch != position.epoch:
            self._epoch_random = _host_random_state()
            return
        mine = self._own_random()
        self._epoch_random = mine["epoch"] if position.batch else mine["now"]
        if position.batch:
            self._restore_metrics(saved)

    def take(self, epoch: int, batch: int, logs: Any) -> dict[str, Any]:
        """The state of the run, after `batch` batches of epoch `epoch`.

        Returns:
            The state on rank 0, nothing on others.
        """
        session, model = self.session, self.session.model
        position = self._here(epoch, batch)
        optimizers = state.optimizers_of(model)
        session.complete_rank_zero()
        values: list[np.ndarray] | None = None
        if position.batch:
            local = metrics.sum_over_ranks(model, session.metric_starts or {})
            values = [v.numpy() for v in model.metrics_variables]
            metrics.restore(local)
        mine = {
            "start": self._start_random,
            "epoch": self._epoch_random,
            "now": _host_random_state(),
            "seeds": [v.numpy() for v in state.seed_states(model)],
        }
        everyone = all_gather_object(mine)
        with gathered(sharded_variables(model, optimizers).values()):
            if not topology().is_rank_zero:
                return {}
            weights = [whole_of(v) for v in _weights(model)]
            slots = [[whole_of(v) for v in o.variables] for o in optimizers]
        return {
            "format": FORMAT,
            "size": topology().size,
            "model_parallel_size": groups().model_parallel_size,
            "structure": state.structure(model, optimizers, False),
            "global_batch_size": session.global_batch_size,
            "position": dataclasses.asdict(position),
            "tf_seed": state.global_seed(),
            "seed_is_ours": state.seed_of_ours() is not None,
            "logs": {k: np.asarray(v) for k, v in (logs or {}).items()},
            "random": everyone,
            "weights": weights,
            "optimizers": slots,
            "metrics": values,
        }

    def _here(self, epoch: int, batch: int) -> Position:
        number = self.session.data.num_batches
        step = self.session.model.train_function
        ended = bool(batch) and isinstance(step, StepFunction) and step.data_ended
        return Position(self.first_epoch, epoch, batch, number, ended)

    # Going back -----------------------------------------------------------------------

    def adopt(self, saved: dict[str, Any] | None) -> None:
        """Before the data pipeline is made: takes rank 0's saved state, or none."""
        light = {k: v for k, v in (saved or {}).items() if k not in _HEAVY}
        light = broadcast_object(light)
        if not light:
            return
        self._saved = saved if topology().is_rank_zero and saved else light
        self.position = Position(**light["position"])
        self.first_epoch = self.position.first_epoch
        mine = self._own_random()
        self._start_random = mine["start"]
        seed = light["tf_seed"]
        if seed is not None:
            state.restore_seed(seed, light.get("seed_is_ours", False))
        _set_host_random_state(mine["start"])

    def restore_model(self) -> None:
        """Before any callback begins: weights and optimizers, on all ranks."""
        saved, position = self._saved, self.position
        if saved is None or position is None:
            return
        session = self.session
        model, data = session.model, session.data
        _build(model, data.batch_spec)
        optimizers = session.wrap_optimizers()
        self._check_data(saved, position)
        failure = None
        if topology().is_rank_zero:
            failure = _difference(saved, state.structure(model, optimizers, False))
        failure = broadcast_object(failure)
        if failure is not None:
            raise InvalidArgumentError(failure)
        self._assign_saved(optimizers, saved)
        session.accumulated_apart = False
        if session.spans_ranks:
            session.send_state()
        epochs = position.epoch - position.first_epoch
        model._initial_epoch = position.epoch
        made, taken = iterators_made(
            epochs,
            session.steps_per_epoch,
            position.num_batches,
        )
        data.replay = lambda: self._replay(epochs, made)
        if position.batch or taken:
            self._fast_forward = _FastForward(model, position, taken, saved["logs"])
            model.train_function = self._fast_forward

    def _assign_saved(self, optimizers: list[Any], saved: dict[str, Any]) -> None:
        """The weights and slots that rank 0 has read, and parts for its group."""
        model = self.session.model
        sharded_variables(model, optimizers)  # marks the slots
        variables = [*_weights(model), *(v for o in optimizers for v in o.variables)]
        values = None
        if topology().is_rank_zero:
            slots = [value for one in saved["optimizers"] for value in one]
            values = [*saved["weights"], *slots]
        assign_wholes(variables, values)

    def restore_random(self) -> None:
        """When rank 0's state has reached every rank: this rank's random states."""
        saved = self._saved
        if saved is None or not _same_ranks(saved):
            return
        variables = state.seed_states(self.session.model)
        _assign(variables, self._own_random()["seeds"])

    def train_function_made(self) -> None:
        if self._fast_forward is not None:
            self._fast_forward.function = self.session.model.train_function
            self.session.model.train_function = self._fast_forward

    def is_skipping(self, batch: int) -> bool:
        """Whether batch `batch` of the current epoch was trained before."""
        return self._fast_forward is not None and batch < self._fast_forward.batch

    def finish(self) -> None:
        """Where the run was: from here on everything is as if it had not ended."""
        if self.position is None:
            return
        self.close()
        if self.position.batch:
            _set_host_random_state(self._own_random()["now"])
        self._saved = self.position = None

    def close(self) -> None:
        """Leaves the model with its own train function."""
        if self._fast_forward is not None:
            self.session.model.train_function = self._fast_forward.function
            self._fast_forward = None

    def _own_random(self) -> dict[str, Any]:
        saved = self._saved or {}
        return saved["random"][topology().rank if _same_ranks(saved) else 0]

    def _check_data(self, saved: dict[str, Any], position: Position) -> None:
        session = self.session
        mine = session.global_batch_size
        if saved["global_batch_size"] != mine:
            raise InvalidArgumentError(
                "The backup was made with a global batch of "
                f"{saved['global_batch_size']} rows. Received: {mine} rows. Expected "
                "the same: use the same batch_size (it is global, whatever the number "
                "of ranks), or another backup_dir."
            )
        number = session.data.num_batches
        if session.sharding != "none" and number != position.num_batches:
            if number is None or position.num_batches is None:
                return
            raise InvalidArgumentError(
                f"The backup was made with {position.num_batches} batches an epoch. "
                f"Received: data of {number} batches. Expected the same data; use "
                "another backup_dir to begin anew."
            )

    def _replay(self, epochs: int, made: int) -> None:
        data = self.session.data
        for _ in range(epochs):
            if isinstance(data.source, PyDatasetAdapter):
                data.source.py_dataset.on_epoch_begin()
                data.source.py_dataset.on_epoch_end()
        for _ in range(made):
            iter(data.get_tf_dataset())
        _set_host_random_state(self._epoch_random)

    def _restore_metrics(self, saved: dict[str, Any]) -> None:
        """The sums of the partial epoch, on rank 0; others begin at nothing."""
        if not topology().is_rank_zero:
            return
        variables = self.session.model.metrics_variables
        values = saved["metrics"]
        if [v.shape for v in variables] != [v.shape for v in values]:
            warnings.warn(
                "The metrics of the epoch in which the run was ended could not be "
                "restored: the model now has others. They begin anew.",
                stacklevel=2,
            )
            return
        _assign(variables, values)


class _FastForward:
    """Stands in for `train_function` until the batches that were trained are past."""

    def __init__(self, model: Any, position: Position, extra: int, logs: Any) -> None:
        self.model = model
        self.function = model.train_function
        self.batch = position.batch
        self.ended = position.ended
        self.extra = extra
        self.done = 0
        self.logs = logs

    def __call__(self, iterator: Any) -> Any:
        if isinstance(self.function, StepFunction):
            self.function.make_ready(iterator)
        _drop(iterator, self.extra)
        self.extra = 0
        if self.done >= self.batch:
            return self.function(iterator)
        count = min(self.model.steps_per_execution, self.batch - self.done)
        _drop(iterator, count)
        self.done += count
        over = self.ended and self.done >= self.batch
        if over and isinstance(self.function, StepFunction):
            self.function.end_of(iterator)
        return self.logs


def iterators_made(
    epochs: int,
    steps_per_epoch: int | None,
    num_batches: int | None,
) -> tuple[int, int]:
    """What Keras's `EpochIterator` has made of a dataset in `epochs` whole epochs.

    Without `steps_per_epoch` it makes one iterator when an epoch begins and, where the
    length is known, another when it ends, which it drops. With `steps_per_epoch` an
    iterator lives on from epoch to epoch.

    Returns:
        How many iterators were made before the one that comes next, and how many
        batches were taken from that one.
    """
    if epochs == 0:
        return 0, 0
    if steps_per_epoch is None:
        return epochs if num_batches is None else 2 * epochs, 0
    made, seen = 1, 0
    for _ in range(epochs):
        if num_batches is None:
            seen += steps_per_epoch
            continue
        seen = min(seen + steps_per_epoch, num_batches)
        if seen >= num_batches:
            made, seen = made + 1, 0
    return made - 1, seen


def _build(model: Any, spec: Any) -> None:
    try:
        build_from_spec(model, spec)
    except Exception:
        if not model.built or not all(o.built for o in state.optimizers_of(model)):
            raise  # otherwise only metrics of the user's could not be built


def _weights(model: Any) -> list[Any]:
    apart = {id(v) for v in model.metrics_variables}
    return [v for v in model.variables if id(v) not in apart]


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _same_ranks(saved: dict[str, Any]) -> bool:
    """Whether the saved run had as many ranks, and the same groups of them."""
    m = saved.get("model_parallel_size", 1)
    return (saved["size"], m) == (topology().size, groups().model_parallel_size)


def _difference(saved: dict[str, Any], mine: list[Any]) -> str | None:
    theirs = saved["structure"]
    for position in range(max(len(theirs), len(mine))):
        old = theirs[position] if position < len(theirs) else None
        new = mine[position] if position < len(mine) else None
        if state.without_name(old) != state.without_name(new):
            return (
                "The backup is of another model or optimizer. First difference: the "
                f"backup has {state.words(old)}; this model has {state.words(new)}. "
                "Expected the same code as the run that made it. Use another "
                "backup_dir for this model, or delete the folder to begin anew."
            )
    return None


def _host_random_state() -> Any:
    return random.getstate(), np.random.get_state()


def _set_host_random_state(saved: Any) -> None:
    random.setstate(saved[0])
    np.random.set_state(saved[1])


@tf.function(reduce_retracing=True, autograph=False)
def _drop_many(iterator: Any, count: tf.Tensor) -> None:
    tf.while_loop(
        lambda number: number < count,
        lambda number: _after(iterator.get_next(), number + 1),
        (tf.constant(0, tf.int64),),
        parallel_iterations=1,
    )


def _after(element: Any, number: tf.Tensor) -> tuple[tf.Tensor]:
    with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
        return (tf.identity(number),)


def _drop(iterator: Any, count: int) -> None:
    """Takes `count` batches from an iterator and forgets them."""
    if count:
        _drop_many(iterator, tf.constant(count, tf.int64))
