"""One step on one rank: the function that `fit` and `evaluate` call for each batch.

It starts the control vector, runs the user's `train_step` (or `test_step`) on this
rank's rows with losses, metrics and synchronized layers made to add up over ranks, and
averages the moving statistics that the step changed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu import control
from kerasmgpu.balance import Balancer
from kerasmgpu.collectives import (
    all_gather_object,
    begin_step_graph,
    groups,
    reduce_tensor,
    topology,
    waiting_for_ranks,
)
from kerasmgpu.data import DATA, META, shard_batch
from kerasmgpu.derived_logs import derived
from kerasmgpu.keras_compat import tree
from kerasmgpu.layers.batch_norm import synchronized_moments
from kerasmgpu.losses import scaled_losses
from kerasmgpu.metrics import FAILED, UNKNOWN, Watch, refuse, watched_metrics
from kerasmgpu.optimizer import accumulators, applying
from kerasmgpu.state import is_seed_state, optimizers_of
from kerasmgpu.timing import StepTimers, timed, timed_by

_OPTIONAL = (tf.experimental.Optional, tf.OptionalSpec)


class StepFunction:
    """Callable like Keras's `train_function`: takes an iterator, returns the logs.

    Args:
        model: the wrapped model.
        step: `model.train_step` or `model.test_step`.
        training: whether it is a training step.
        same_batches: whether all ranks see the same global batches.
        prepare: called once, before the first batch is computed, when all variables
            exist; sends rank 0's state to the others.
        stop_requested: whether this rank asks to stop.
        starting: called before each batch, when all variables exist.
        finished: called after each batch, with this object.

    Attributes:
        stop_agreed: whether any rank asked to stop in the last step.
        log_metrics: key of the logs → what has it as its `result()`: a metric, or a
            function of metrics.
        share: this rank's share of the rows of the last batch; one rank of a group has
            the group's, the others none.
        total_rows: rows of the last global batch.
        timers: where to note what steps wait for; to be set before the first call.
        balancer: cuts whole global batches by the ranks' speeds; likewise.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Any], Any],
        *,
        training: bool,
        same_batches: bool,
        prepare: Callable[[], None],
        stop_requested: Callable[[], bool],
        starting: Callable[[], None],
        finished: Callable[[StepFunction], None],
    ) -> None:
        self.model = model
        self.step = step
        self.training = training
        self.same_batches = same_batches
        self.prepare = prepare
        self.stop_requested = stop_requested
        self.starting = starting
        self.finished = finished
        self.stop_agreed = False
        self.log_metrics: dict[str, Any] = {}
        self.share = 0.0
        self.total_rows = 0.0
        self.timers: StepTimers | None = None
        self.balancer: Balancer | None = None
        self.steps_taken = 0
        self._trial_names: list[str] = []
        self._trials_left = 10
        self._prepared = False
        self._variables_sent = 0
        self._zero_or_one = tf.constant(0.0, tf.float64), tf.constant(1.0, tf.float64)
        self._no_or_yes = tf.constant(False), tf.constant(True)
        self._traced: Any = None
        self._traced_for: Any = None
        self._ended: Any = None
        self._kind = "train" if training else "test"
        #: Whether each step is run from Python, and not all of them in one graph.
        self.by_hand = bool(model.run_eagerly)
        one_step = tf.autograph.experimental.do_not_convert(self._run_step)
        many_steps = tf.autograph.experimental.do_not_convert(self._run_steps)
        if not model.run_eagerly:
            # XLA cannot hold a collective of Horovod's; xla_step.py compiles the rest.
            one_step = tf.function(one_step, reduce_retracing=True, jit_compile=False)
            many_steps = tf.function(many_steps, reduce_retracing=True)
        self._one_step: Any = one_step
        self._many_steps: Any = many_steps

    def start_over(self) -> None:
        """Makes the next call `prepare` again."""
        self._prepared = False
        self.let_go_of_data()

    def let_go_of_data(self) -> None:
        """Forgets the iterator, which would keep the user's data in memory."""
        self._traced_for = self._ended = None

    def __call__(self, iterator: Any) -> Any:
        began = time.perf_counter()
        if iterator is self._ended:
            self._end_as_keras_does()
            raise StopIteration
        trying = self._trials_left > 0
        flags = self._zero_or_one[self.stop_requested()], self._no_or_yes[trying]
        if not isinstance(iterator, tf.data.Iterator):
            # train_on_batch and test_on_batch hand over one global batch.
            whole = self.balancer is not None
            data, meta = shard_batch(next(iter(iterator)), whole)
            function, first = self._one_step, {DATA: data, META: meta}
        elif self.by_hand:
            function, first = self._run_eagerly(iterator), self._next(iterator)
        else:
            function, first = self._many_steps_from(iterator, flags), iterator
        first_step = not self._prepared
        if first_step:
            self._build(function, first, flags)
            self._prepare_once()
        self.starting()
        with waiting_for_ranks(f"step {self.steps_taken + 1} of {self._kind}"):
            logs, sums, meta, trials = function(first, *flags)
            sums, meta = np.asarray(sums), np.asarray(meta)
        self.steps_taken += 1
        if self.balancer is not None:
            if first_step:  # it took time to trace
                self.balancer.timers.take()
            else:
                seconds = time.perf_counter() - began
                self.balancer.note_step(float(meta[control.META_ROWS]), seconds)
        if self.model.run_eagerly and self._variables_sent != len(self.model.variables):
            self._prepare_once()  # a step has made more of them
        agreed = control.read(sums, self.same_batches)
        self.total_rows = float(control.total_rows(sums))
        own = meta[control.META_ROWS] if groups().speaks else 0.0
        self.share = float(own / self.total_rows)
        self.stop_agreed = agreed.stop
        if trying:
            self._check_trials(np.asarray(trials))
        self._ended = None if agreed.more else iterator
        self.finished(self)
        return logs

    def _many_steps_from(self, iterator: Any, flags: Any) -> Any:
        """The traced function for an iterator: finding it again takes time a step."""
        if not self._prepared:
            return self._many_steps
        if self._traced_for is not iterator:
            self._traced = self._many_steps.get_concrete_function(iterator, *flags)
            self._traced_for = iterator
        return self._traced

    def _prepare_once(self) -> None:
        self.prepare()
        self._prepared = True
        self._variables_sent = len(self.model.variables)

    @property
    def data_ended(self) -> bool:
        """Whether the data of the epoch ended with the last step."""
        return self._ended is not None

    def make_ready(self, iterator: Any) -> None:
        """Prepares, without a step, a model whose variables exist."""
        if not self._prepared:
            if not self.model.run_eagerly:
                flags = (tf.constant(0.0, tf.float64), tf.constant(True))
                self._build(self._many_steps, iterator, flags)
            self._prepare_once()

    def end_of(self, iterator: Any) -> None:
        """Notes that an iterator has no more batches."""
        self._ended = iterator

    def _end_as_keras_does(self) -> None:
        """What plain Keras leaves behind where data ends without a known length.

        There the end is met by starting a step whose batch does not come. What does
        not depend on the batch takes place all the same: the optimizer's count goes up,
        weights decay, and what was accumulated is dropped where an update was due
        (Keras 3.15, TensorFlow's `OutOfRangeError`).
        """
        model = self.model
        if not self.training or model.run_eagerly or model.steps_per_execution > 1:
            return
        for optimizer in optimizers_of(model):
            if hasattr(optimizer, "inner_optimizer") or not optimizer.built:
                continue
            optimizer._iterations.assign_add(1)
            every = optimizer.gradient_accumulation_steps or 1
            if int(optimizer._iterations.numpy()) % every == 0:
                optimizer._apply_weight_decay(optimizer._trainable_variables)
                for variable in accumulators(optimizer):
                    variable.assign(tf.zeros_like(variable.value))

    def _build(self, function: Any, first: Any, flags: Any) -> None:
        """Creates all variables, in the order in which plain Keras would."""
        if not self.model.run_eagerly:
            function.get_concrete_function(first, *flags)
            return
        if not self.model.built:
            x = keras.utils.unpack_x_y_sample_weight(plain_batch(first[DATA]))[0]
            self.model(x)
        optimizer = self.model.optimizer
        if self.training and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)

    # Running --------------------------------------------------------------------------

    def _run_steps(self, iterator: Any, stop: tf.Tensor, wanted: tf.Tensor) -> Any:
        """Up to `steps_per_execution` steps in one graph."""
        outputs = self._one_step(self._next(iterator), stop, wanted)
        steps = self.model.steps_per_execution
        if steps == 1:
            return outputs

        def more(number: tf.Tensor, outputs: Any) -> tf.Tensor:
            going_on = outputs[1][control.MORE] > 0
            return tf.logical_and(number < steps, going_on)

        def another(number: tf.Tensor, outputs: Any) -> Any:
            with tf.control_dependencies(tf.nest.flatten(outputs)):
                return number + 1, self._one_step(self._next(iterator), stop, wanted)

        # One iteration at a time: two would have collectives of one name under way.
        return tf.while_loop(
            more, another, (tf.constant(1), outputs), parallel_iterations=1
        )[1]

    def _next(self, iterator: Any) -> Any:
        with timed_by(self.timers):
            return timed("input", iterator.get_next, wait=True)

    def _run_eagerly(self, iterator: Any) -> Callable[..., Any]:
        def run(first: Any, stop: tf.Tensor, wanted: tf.Tensor) -> Any:
            outputs = self._run_step(first, stop, wanted)
            for _ in range(self.model.steps_per_execution - 1):
                if outputs[1][control.MORE] > 0:
                    outputs = self._run_step(self._next(iterator), stop, wanted)
            return outputs

        return run

    def _run_step(self, element: Any, stop: tf.Tensor, wanted: tf.Tensor) -> Any:
        """Returns the logs, the summed control vector, this rank's, and the trials."""
        begin_step_graph()
        element = self._own_part(element)
        meta = element[META]
        name = f"kerasmgpu.control.{self._kind}"
        sums = control.exchange(meta, stop, name)
        step = control.make_step(meta, sums, self.training, self.same_batches)
        with self._in_step(step, wanted) as (changed, watch):
            logs = self.step(self._after_weight(plain_batch(element[DATA]), step))
        average_moving_statistics(self.model, changed, step)
        self._note_results(logs, watch)
        return logs, sums, meta, self._note_trials(watch)

    def _after_weight(self, data: Any, step: control.Step) -> Any:
        """The batch, there once this rank's weight is known.

        A rank of one core takes its ready operations last in, first out: the few that
        make the weight, for which gradients wait before they are sent, would come when
        the backward pass is over. Where the weight comes with the control vector, the
        forward pass does not wait for it.
        """
        if not (self.training and self.same_batches):
            return data
        with tf.control_dependencies([step.weight]):
            return tree.map_structure(
                lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, data
            )

    def _own_part(self, element: dict[str, Any]) -> dict[str, Any]:
        return element if self.balancer is None else self.balancer.own_part(element)

    @contextlib.contextmanager
    def _in_step(
        self, step: control.Step, wanted: tf.Tensor
    ) -> Iterator[tuple[dict[int, Any], Watch]]:
        """All that makes a step of Keras's one of many ranks."""
        model = self.model
        with contextlib.ExitStack() as stack:
            stack.enter_context(control.in_step(step))
            changed = stack.enter_context(watched_assignments(model, step))
            stack.enter_context(scaled_losses(model, self.same_batches))
            stack.enter_context(synchronized_moments(model))
            watch = stack.enter_context(watched_metrics(model, wanted))
            stack.enter_context(timed_by(self.timers))
            yield changed, watch

    def _note_results(self, logs: Any, watch: Watch) -> None:
        """Which of the logs are results of metrics, or calculated from them."""
        self.log_metrics = {}
        for key, value in logs.items() if isinstance(logs, dict) else ():
            if id(value) in watch.results:
                self.log_metrics[key] = watch.results[id(value)][1]
                continue
            function, depends = derived(value, watch.results)
            if function is not None:
                self.log_metrics[key] = function
            elif depends and topology().is_rank_zero:
                warnings.warn(
                    f"The log {key!r} is calculated from metrics and from data. "
                    "Metrics count this rank's rows until the epoch ends, so what is "
                    "logged is the mean of the ranks' values, not the value of all "
                    "rows. Log results of metrics, or what follows from them alone.",
                    stacklevel=2,
                )

    def _note_trials(self, watch: Watch) -> tf.Tensor:
        """The outcomes of the metrics' trials, as one tensor."""
        self._trial_names = list(watch.trials)
        trials = list(watch.trials.values())
        return tf.stack(trials) if trials else tf.zeros([0], tf.int32)

    def _check_trials(self, trials: np.ndarray) -> None:
        if not self._trial_names:
            self._trials_left = 0
            return
        outcomes = np.array(all_gather_object(trials.tolist()))
        failed = (outcomes == FAILED).any(axis=0)
        if failed.any():
            names = [n for n, bad in zip(self._trial_names, failed, strict=True) if bad]
            refuse(names)
        undecided = (outcomes == UNKNOWN).all(axis=0).any()
        self._trials_left = self._trials_left - 1 if undecided else 0


def plain_batch(data: Any) -> Any:
    """The batch as Keras hands it to a step: an optional value that is not there is
    None."""
    return tree.map_structure(
        lambda leaf: None if isinstance(leaf, _OPTIONAL) else leaf, data
    )


# Assignments in a step ----------------------------------------------------------------


@contextlib.contextmanager
def watched_assignments(model: Any, step: control.Step) -> Iterator[dict[int, Any]]:
    """Notes which variables a step assigns, and keeps spare rows out of metrics.

    While it lasts, a rank without rows leaves the model's metrics as they were. What an
    optimizer assigns in its `apply` is left alone.

    Yields:
        id → variable, of the variables that were assigned.
    """
    changed: dict[int, Any] = {}
    cls = keras.Variable
    original = cls.assign

    def assign(variable: Any, value: Any) -> Any:
        if not applying():
            changed[id(variable)] = variable
            if any(variable is v for v in model.metrics_variables):
                old = variable.value
                value = tf.cast(tf.convert_to_tensor(value), old.dtype)
                value = tf.where(step.rows > 0, value, old)
        return original(variable, value)

    cls.assign = assign
    try:
        yield changed
    finally:
        cls.assign = original


def average_moving_statistics(
    model: Any, changed: dict[int, Any], step: control.Step
) -> None:
    """Averages over ranks, by rows, the statistics that the step has moved.

    Those are the float variables that the step assigned and no optimizer trains, such
    as BatchNormalization's moving mean and variance. One collective for all of them.
    """
    moved = [
        v
        for v in model.non_trainable_variables
        if id(v) in changed
        and not is_seed_state(v)
        and tf.as_dtype(v.dtype).is_floating
    ]
    if not moved:
        return
    flat = [tf.reshape(tf.cast(v.value, tf.float32), [-1]) for v in moved]
    joined = tf.math.multiply_no_nan(tf.concat(flat, 0), step.weight_among_all)
    mean = reduce_tensor(joined, "sum", "kerasmgpu.moving_statistics")
    sizes = [int(np.prod(v.shape)) for v in moved]
    for variable, part in zip(moved, tf.split(mean, sizes), strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
