"""A training step in pieces: activations of a few rows at a time, one update.

`HorovodStrategy(micro_batch_size=r)` runs forward and backward on at most `r` rows at a
time and adds up the gradients, which are then reduced and applied once, as if the step
had not been cut. A piece counts by its rows (`control.Step`), and each loss by what it
divides by (`losses.py`), where the sum over all pieces of all ranks has to be known
before the first backward: where a mask or weights decide it, the losses' divisors are
counted first, in a forward pass of their own. In a graph, only the part of it that they
depend on is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import reduce_tensor, topology
from kerasmgpu.control import Step, current_step, in_step
from kerasmgpu.data import number_of_rows, rows_between
from kerasmgpu.derived_logs import Derived, derived
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.keras_compat import tree
from kerasmgpu.losses import divisors, scaled_losses
from kerasmgpu.metrics import (
    join_trials,
    recorded_results,
    trials_apart,
    watched_metrics,
)

AUTO = "auto"


@dataclasses.dataclass
class PieceSize:
    """Rows that a rank runs at a time; None for all of them."""

    rows: int | None = None

    @property
    def at_most(self) -> int:
        return self.rows or 1 << 40


def check_micro_batch_size(value: Any) -> None:
    """Refuses what is neither None, "auto" nor a number of rows."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and value != AUTO and not number:
        raise InvalidArgumentError(
            "Expected micro_batch_size to be None, a number of rows of at least 1, or "
            f'"auto". Received: micro_batch_size={value!r}.'
        )


def check_can_split(model: Any, plain: type) -> None:
    """Refuses a model whose step cannot be run in pieces.

    Args:
        model: the wrapped model.
        plain: its class before it was wrapped.
    """
    rank, size = topology().rank, topology().size
    where = f"Rank {rank} of {size}: " if size > 1 else ""
    if getattr(plain, "train_step", None) is not keras.Model.train_step:
        raise InvalidArgumentError(
            f"{where}micro_batch_size cannot split a train_step of one's own. Expected "
            f"keras.Model.train_step. Received: {plain.__qualname__}.train_step. "
            "Override compute_loss instead, use a smaller batch_size with "
            "gradient_accumulation_steps, or leave micro_batch_size out."
        )
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False) is True:
            raise InvalidArgumentError(
                f"{where}micro_batch_size cannot split a step with synchronized "
                "moments, which need all rows at once. Received: the layer "
                f"{layer.name!r} with synchronized=True. Use GroupNormalization or "
                "LayerNormalization, or leave micro_batch_size out."
            )


def train_in_pieces(model: Any, data: Any, rows_per_piece: Any) -> Any:
    """As `keras.Model.train_step`, in pieces of at most `rows_per_piece` rows."""
    with whole_step(model, data) as step:
        pieces = Pieces(model, data, step, rows_per_piece)
        totals = [reduce_tensor(part, "sum") for part in pieces.divisors()]
        gradients = pieces.gradients(totals)
    return update(model, gradients, pieces.numbers, pieces.functions)


@contextlib.contextmanager
def whole_step(model: Any, data: Any) -> Iterator[Step]:
    """The step being run; one of this process alone where no other ranks take part."""
    step = current_step()
    if step is not None:
        yield step
        return
    rows = tf.cast(number_of_rows(data), tf.float64)
    step = Step(rows, rows, tf.constant(1.0, tf.float32), training=True)
    with (
        in_step(step),
        scaled_losses(model, True),
        watched_metrics(model, tf.constant(False)),
    ):
        yield step


def update(
    model: Any,
    gradients: list[Any],
    numbers: dict[str, tf.Tensor],
    functions: dict[str, Derived],
) -> Any:
    """The rest of Keras's `train_step`. Returns the logs.

    Args:
        model: the wrapped model.
        gradients: of its weights, as `Pieces.gradients` returned them.
        numbers: `Pieces.numbers`.
        functions: `Pieces.functions`.
    """
    if gradients:
        model.optimizer.apply_gradients(
            zip(gradients, model.trainable_weights, strict=True)
        )
    logs = dict(model.get_metrics_result())
    logs.update({key: function.result() for key, function in functions.items()})
    return {**logs, **numbers}


class Pieces:
    """The rows of a step, cut into pieces.

    Args:
        model: the wrapped model.
        data: this rank's rows, as for `train_step`.
        step: the step.
        rows_per_piece: int or int64 scalar tensor, at most so many rows at a time.

    Attributes, set by `gradients`:
        numbers: what the model's `compute_metrics` returned beside results of metrics,
            the mean over this rank's rows.
        functions: the same, where metrics alone decide it.
    """

    def __init__(self, model: Any, data: Any, step: Step, rows_per_piece: Any) -> None:
        self.model = model
        self.data = data
        self.step = step
        self.rows_per_piece = tf.cast(rows_per_piece, tf.int64)
        # Of rows that count nothing one is enough.
        self.rows = tf.maximum(tf.cast(step.rows, tf.int64), 1)
        self.number = (self.rows + self.rows_per_piece - 1) // self.rows_per_piece

    def divisors(self) -> list[tf.Tensor]:
        """What each loss divides by on this rank; leaves no trace in the model.

        Empty where losses divide by the rows.
        """

        def count(number: tf.Tensor) -> dict[str, tf.Tensor]:
            with _without_assignments(), trials_apart():
                found = self._forward(number, None, training=False)[1]
            return {str(i): value for i, value in enumerate(found)}

        totals = self._sum(count, _zeros_of, _added)
        return [totals[str(i)] for i in range(len(totals))]

    def gradients(self, totals: list[tf.Tensor]) -> list[Any]:
        """The gradients of this rank's rows; metrics are updated on the way.

        Args:
            totals: `divisors()`, summed over ranks.
        """
        weights = self.model.trainable_weights
        kinds: dict[str, tf.DType] = {}

        def backward(number: tf.Tensor) -> dict[str, tf.Tensor]:
            with trials_apart() as trials, tf.GradientTape() as tape:
                loss, _, logs = self._forward(number, totals, training=True)
            share = self._rows_of(number) / tf.maximum(self.step.rows, 1.0)
            results: dict[str, tf.Tensor] = {}
            for i, gradient in enumerate(tape.gradient(loss, weights)):
                if isinstance(gradient, tf.IndexedSlices):
                    kinds[f"{i}.slices"] = gradient.dtype
                    results[f"{i}.slices"] = _weighed(gradient.values, share)
                    results[f"{i}.indices"] = gradient.indices
                elif gradient is not None:
                    kinds[f"{i}.dense"] = gradient.dtype
                    # Its shape is not always known, its weight's is.
                    gradient = tf.ensure_shape(gradient, weights[i].shape)
                    results[f"{i}.dense"] = _weighed(gradient, share)
            for key, value in self._own_logs(logs).items():
                results[f"{key}.log"] = _weighed(value, share)
            self._trial_names = list(trials)
            for name, outcome in trials.items():
                results[f"{name}.trial"] = outcome
            return results

        def join(key: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
            if key.endswith((".slices", ".indices")):
                return tf.concat([one, other], 0)
            return join_trials(one, other) if key.endswith(".trial") else one + other

        def start(key: str, like: Any) -> tf.Tensor:
            if key.endswith((".slices", ".indices")):
                return tf.zeros([0, *like.shape[1:]], like.dtype)
            if key.endswith(".trial"):
                return tf.constant(-1, like.dtype)
            return _zeros_of(key, like)

        sums = self._sum(backward, start, join)
        with trials_apart(keep=True) as trials:
            trials.update({name: sums[f"{name}.trial"] for name in self._trial_names})
        self.numbers = {
            key.removesuffix(".log"): value
            for key, value in sums.items()
            if key.endswith(".log")
        }
        gradients: list[Any] = []
        for i, weight in enumerate(weights):
            if f"{i}.slices" in sums:
                values = tf.cast(sums[f"{i}.slices"], kinds[f"{i}.slices"])
                shape = tf.constant(tuple(weight.shape), sums[f"{i}.indices"].dtype)
                gradients.append(tf.IndexedSlices(values, sums[f"{i}.indices"], shape))
            elif f"{i}.dense" in sums:
                gradients.append(tf.cast(sums[f"{i}.dense"], kinds[f"{i}.dense"]))
            else:
                gradients.append(None)
        return gradients

    def _own_logs(self, logs: Any) -> dict[str, Any]:
        """What of the logs is neither a metric's result nor follows from results."""
        self.functions = {}
        results = recorded_results()
        own = {}
        for key in set(logs or {}) - set(self.model.get_metrics_result()):
            function, _ = derived(logs[key], results)
            if function is None:
                own[key] = logs[key]
            else:
                self.functions[key] = function
        return own

    def _rows_of(self, number: tf.Tensor) -> tf.Tensor:
        """float64, how many rows of piece `number` count."""
        low, high = self._bounds(number)
        return tf.minimum(tf.cast(high - low, tf.float64), self.step.rows)

    def _bounds(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        low = number * self.rows_per_piece
        return low, tf.minimum(low + self.rows_per_piece, self.rows)

    def _forward(
        self, number: tf.Tensor, totals: list[tf.Tensor] | None, training: bool
    ) -> tuple[tf.Tensor, list[tf.Tensor], Any]:
        """As in Keras's `train_step`: (scaled) loss, what losses divide by, logs."""
        model, step = self.model, self.step
        low, high = self._bounds(number)
        piece = tree.map_structure(
            lambda leaf: rows_between(leaf, low, high), self.data
        )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
        rows = self._rows_of(number)
        weight = tf.cast(tf.math.divide_no_nan(rows, step.total_rows), tf.float32)
        with (
            in_step(Step(rows, step.total_rows, weight, step.training)),
            divisors(totals) as found,
        ):
            if model._call_has_training_arg:
                y_pred = model(x, training=training)
            else:
                y_pred = model(x)
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            model._loss_tracker.update_state(
                loss, sample_weight=tf.cast(high - low, tf.int32)
            )
            if model.optimizer is not None:
                loss = model.optimizer.scale_loss(loss)
            logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return loss, found, logs

    def _sum(
        self,
        function: Callable[[tf.Tensor], dict[str, tf.Tensor]],
        start: Callable[[str, Any], tf.Tensor],
        join: Callable[[str, tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """Joins what `function` gives for each piece, one piece after the other."""
        if tf.executing_eagerly():
            sums = function(tf.constant(0, tf.int64))
            for number in range(1, int(self.number)):
                more = function(tf.constant(number, tf.int64))
                sums = {key: join(key, sums[key], more[key]) for key in sums}
            return sums
        # Traced once, before the loop, whose variables have to be known beforehand.
        traced = tf.function(function, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int64)
        )
        likes = traced.structured_outputs
        if not likes:
            return {}
        keys = sorted(likes)

        def another(number: tf.Tensor, *sums: tf.Tensor) -> Any:
            more = traced(number)
            joined = (join(k, s, more[k]) for k, s in zip(keys, sums, strict=True))
            return number + 1, *joined

        starts = [start(key, likes[key]) for key in keys]
        shapes = [
            tf.TensorShape([None, *s.shape[1:]])
            if key.endswith((".slices", ".indices"))
            else s.shape
            for key, s in zip(keys, starts, strict=True)
        ]
        # One at a time: only then do activations of one piece take memory.
        result = tf.while_loop(
            lambda number, *_: number < self.number,
            another,
            (tf.constant(0, tf.int64), *starts),
            shape_invariants=(tf.TensorShape([]), *shapes),
            parallel_iterations=1,
        )
        return dict(zip(keys, result[1:], strict=True))


def _weighed(gradient: Any, share: tf.Tensor) -> tf.Tensor:
    """A piece's part of the rank's gradient, in at least float32."""
    gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype in (tf.float16, tf.bfloat16):
        gradient = tf.cast(gradient, tf.float32)
    return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))


def _zeros_of(key: str, like: Any) -> tf.Tensor:
    return tf.zeros(like.shape, like.dtype)


def _added(key: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return one + other


@contextlib.contextmanager
def _without_assignments() -> Iterator[None]:
    """While it lasts, Keras variables keep their values: metrics, random states."""
    cls = keras.Variable
    original = cls.assign
    cls.assign = lambda variable, value: value
    try:
        yield
    finally:
        cls.assign = original
