"""A training step that is repeated in smaller pieces where memory does not suffice.

`HorovodStrategy(micro_batch_size="auto")`. A step is three functions: forward and
backward in pieces, which may run out of memory, and sends nothing; a tiny all-reduce,
in which the ranks tell each other whether they did; reduce and update. Where one did,
every rank puts back what the pieces have changed (metrics, moving statistics, random
states; weights and optimizer are not touched before the update), halves the pieces, and
runs the same rows again. The price is a step of more than one function and two small
all-reduces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasmgpu import control
from kerasmgpu.collectives import all_gather_object, reduce_tensor, topology
from kerasmgpu.data import DATA, META
from kerasmgpu.errors import OutOfMemoryError
from kerasmgpu.keras_compat import build_from_spec
from kerasmgpu.layers.fused_batch_norm import fused_normalization
from kerasmgpu.micro_batches import Pieces, PieceSize, update
from kerasmgpu.step import StepFunction, average_moving_statistics, plain_batch
from kerasmgpu.timing import timed, timed_by

_EXHAUSTED = (tf.errors.ResourceExhaustedError, MemoryError)


class MemoryStepFunction(StepFunction):
    """A `StepFunction` for training that halves its pieces when memory runs out.

    Args:
        piece_size: how large the pieces are; changed where they do not fit.
        fuse_batch_norm: as of `HorovodStrategy`.
        *args, **kwargs: as of `StepFunction`.
    """

    def __init__(
        self, *args: Any, piece_size: PieceSize, fuse_batch_norm: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.by_hand = True
        self._one_step = self._run_step
        self.piece_size = piece_size
        self.fuse_batch_norm = fuse_batch_norm
        self._changed: dict[int, Any] = {}
        self._count = self._function(self._count_divisors)
        self._backward = self._function(self._run_backward)
        self._finish = self._function(self._run_finish)

    def _function(self, function: Callable[..., Any]) -> Any:
        if self.model.run_eagerly:
            return function
        function = tf.autograph.experimental.do_not_convert(function)
        return tf.function(function, reduce_retracing=True, jit_compile=False)

    def _build(self, function: Any, first: Any, flags: Any) -> None:
        if self.model.run_eagerly:
            super()._build(function, first, flags)
            # Metrics too: what the first step changes must be there to be put back.
            build_from_spec(self.model, plain_batch(first[DATA]))
            return
        element = first if isinstance(first, dict) else first.element_spec
        data = plain_batch(element[DATA])
        meta = tf.TensorSpec([control.META_SIZE], tf.float64)
        sums = tf.TensorSpec([control.SUMS_SIZE], tf.float64)
        rows = tf.TensorSpec([], tf.int64)
        counting = self._count.get_concrete_function(data, meta, sums, flags[1], rows)
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        totals = [tf.TensorSpec([], tf.float64) for _ in counting.structured_outputs]
        self._backward.get_concrete_function(data, meta, sums, flags[1], rows, totals)

    def _run_step(self, element: Any, stop: tf.Tensor, wanted: tf.Tensor) -> Any:
        element = self._own_part(element)
        data, meta = plain_batch(element[DATA]), element[META]
        sums = control.exchange(meta, stop, f"kerasmgpu.control.{self._kind}")
        model = self.model
        held = [
            (variable, tf.identity(variable.value))
            for variable in (*model.non_trainable_variables, *model.metrics_variables)
        ]
        before = self.piece_size.rows
        failures: list[str] = []
        while True:
            rows = tf.constant(self.piece_size.at_most, tf.int64)
            facts = (data, meta, sums, wanted, rows)
            totals: list[tf.Tensor] = []
            found, failure = _tried(self._count, *facts)
            if not self._anyone_failed(failure, meta, failures):
                totals = [reduce_tensor(part, "sum") for part in found]
                found, failure = _tried(self._backward, *facts, totals)
                if not self._anyone_failed(failure, meta, failures):
                    break
            for variable, value in held:
                variable.assign(value)
        if self.piece_size.rows != before and topology().is_rank_zero:
            print(
                f"kerasmgpu: memory did not suffice on {failures[0]}. Steps now run in "
                f"pieces of at most {self.piece_size.rows} row(s) a rank "
                f"(micro_batch_size={self.piece_size.rows}), with the same numbers.",
                flush=True,
            )
        gradients, numbers, trials = found
        logs = self._finish(gradients, numbers, meta, sums)
        return logs, sums, meta, trials

    def _anyone_failed(
        self, failure: str | None, meta: tf.Tensor, failures: list[str]
    ) -> bool:
        """Whether memory ran out on any rank; then pieces are smaller from now on.

        Must be called on every rank.
        """
        mine = [float(failure is not None), float(meta[control.META_ROWS])]
        name = f"kerasmgpu.memory.{self._kind}"
        vector = tf.constant(mine, tf.float64)
        with timed_by(self.timers):
            agreed = timed("reduce", lambda: reduce_tensor(vector, "max", name))
        failed, most = agreed.numpy()
        if not failed:
            return False
        everyone = all_gather_object(failure)
        ranks = [rank for rank, text in enumerate(everyone) if text is not None]
        where = f"rank(s) {', '.join(map(str, ranks))} of {topology().size}"
        rows = min(self.piece_size.at_most, max(1, int(most)))
        failures.append(f"{where} with {rows} row(s) at a time")
        if rows == 1:
            raise OutOfMemoryError(
                f"Rank {topology().rank} of {topology().size}: memory does not suffice "
                f"for one row on {where}. Expected at least one row to fit "
                '(micro_batch_size="auto"). Use a smaller model or smaller rows. '
                f"TensorFlow said: {everyone[ranks[0]]}"
            )
        self.piece_size.rows = (rows + 1) // 2
        return True

    # In graphs ------------------------------------------------------------------------

    def _count_divisors(
        self, data: Any, meta: tf.Tensor, sums: tf.Tensor, wanted: Any, rows: Any
    ) -> list[tf.Tensor]:
        step = control.make_step(meta, sums, self.training, self.same_batches)
        with self._in_step(step, wanted), self._fusing():
            return Pieces(self.model, data, step, rows).divisors()

    def _run_backward(
        self,
        data: Any,
        meta: tf.Tensor,
        sums: tf.Tensor,
        wanted: Any,
        rows: Any,
        totals: list[tf.Tensor],
    ) -> Any:
        step = control.make_step(meta, sums, self.training, self.same_batches)
        with self._in_step(step, wanted) as (changed, watch), self._fusing():
            pieces = Pieces(self.model, data, step, rows)
            gradients = pieces.gradients(totals)
        self._changed.update(changed)
        self._functions = pieces.functions
        return gradients, pieces.numbers, self._note_trials(watch)

    def _run_finish(
        self, gradients: Any, numbers: Any, meta: tf.Tensor, sums: tf.Tensor
    ) -> Any:
        step = control.make_step(meta, sums, self.training, self.same_batches)
        with self._in_step(step, tf.constant(False)) as (_, watch):
            logs = update(self.model, gradients, numbers, self._functions)
        average_moving_statistics(self.model, self._changed, step)
        self._note_results(logs, watch)
        return logs

    def _fusing(self) -> Any:
        if self.fuse_batch_norm:
            return fused_normalization(self.model)
        return contextlib.nullcontext()


def _tried(function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """What a function returns, and what was said where memory ran out."""
    try:
        result = function(*args)
        for leaf in tf.nest.flatten(result, expand_composites=True):
            if tf.is_tensor(leaf) and leaf.shape.rank == 0:
                np.asarray(leaf)  # a GPU may still be at it: wait
        return result, None
    except _EXHAUSTED as error:
        return [], str(error).strip().splitlines()[0] if str(error) else repr(error)
