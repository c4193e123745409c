"""What kerasmgpu knows of one wrapped model, and how its ranks agree.

A `Session` hangs on each wrapped model. It holds the strategy's options, what is known
of the `fit` under way, and the flags by which the ranks stop together.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu import metrics, report, state, xla_step
from kerasmgpu.balance import Balancer
from kerasmgpu.calibration import seconds_alone
from kerasmgpu.collectives import all_gather_object, reduce_tensor, topology
from kerasmgpu.errors import (
    CollectiveError,
    InvalidArgumentError,
    RankMismatchError,
)
from kerasmgpu.fit_data import FitData
from kerasmgpu.keras_compat import build_from_spec, tree
from kerasmgpu.layers.sharded_loss import ShardedSoftmaxCrossEntropy
from kerasmgpu.layers.split_outputs import split_outputs
from kerasmgpu.memory_step import MemoryStepFunction
from kerasmgpu.micro_batches import AUTO, PieceSize
from kerasmgpu.optimizer import (
    check_optimizers_of_groups,
    plain_class,
    wrap_optimizer,
)
from kerasmgpu.resume import Resume
from kerasmgpu.shards import sharded_layers
from kerasmgpu.step import StepFunction
from kerasmgpu.timing import JointTimers, StepTimers

_STOP_FLAGS = ("stop_training", "stop_evaluating")


class Depth:
    """A context that counts how often it is entered; cheaper than a generator."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *failure: object) -> None:
        self.count -= 1


class Session:
    """What kerasmgpu knows of one wrapped model.

    Args:
        model: the wrapped model.
        sharding, gradient_reduction, gradient_compression, fuse_batch_norm,
        micro_batch_size: as of `HorovodStrategy`.
    """

    def __init__(
        self,
        model: Any,
        sharding: str,
        gradient_reduction: str,
        gradient_compression: str | None,
        fuse_batch_norm: bool = True,
        micro_batch_size: int | str | None = None,
    ) -> None:
        self.model = model
        self.sharding = sharding
        self.balancer: Balancer | None = None
        self.gradient_reduction = gradient_reduction
        self.gradient_compression = gradient_compression
        self.fuse_batch_norm = fuse_batch_norm
        self.micro_batch_size = micro_batch_size
        self.piece_size = PieceSize()
        if isinstance(micro_batch_size, int):
            self.piece_size.rows = micro_batch_size
        self.output_is_split = False
        self.local_depth = 0
        self.agreed: dict[str, bool] = dict.fromkeys(_STOP_FLAGS, False)
        self.last_step: StepFunction | None = None
        self.summed_metrics: list[Any] | None = None
        self.metric_starts: dict[int, Any] | None = None
        self._xla: bool | None = None
        self.fitting = False
        self.accumulated_apart = False
        # Of the `fit` under way, for callbacks.
        self.data: Any = None
        self.global_batch_size: int | None = None
        self.steps_per_epoch: int | None = None
        self.has_validation = False
        self.first_epoch = 0
        self.resume: Resume | None = None
        self.callbacks: list[Any] = []
        self.preempted = False
        self.timers: StepTimers | None = None
        self._in_callbacks = Depth()
        self._loop_thread: threading.Thread | None = None

    @property
    def spans_ranks(self) -> bool:
        """Whether steps are this package's, which agree with the other ranks.

        With micro_batch_size="auto" they are on one rank, too.
        """
        several = topology().size > 1 or self.micro_batch_size == AUTO
        return several and self.local_depth == 0

    def refuse_local(self, method: str) -> None:
        """Training on one rank alone would let the ranks' weights drift apart."""
        if self.local_depth > 0 and topology().size > 1:
            raise CollectiveError(
                f"Rank {topology().rank} of {topology().size}: expected evaluate or "
                f"predict inside strategy.local(). Received: {method}(), after which "
                "the ranks would hold different weights. Call it outside, on all ranks."
            )

    # Agreeing ---------------------------------------------------------------------

    def callbacks_running(self) -> Depth:
        """A context during which callbacks run. Entered around every batch."""
        return self._in_callbacks

    @contextlib.contextmanager
    def loop_running(self) -> Iterator[None]:
        outer = self._loop_thread
        self._loop_thread = threading.current_thread()
        try:
            yield
        finally:
            self._loop_thread = outer
            for function in (self.model.train_function, self.model.test_function):
                if outer is None and isinstance(function, StepFunction):
                    function.let_go_of_data()

    @contextlib.contextmanager
    def fitted(self) -> Iterator[None]:
        self.fitting = True
        try:
            yield
        finally:
            self.fitting = False
            if self.resume is not None:
                self.resume.close()
            self.data = self.resume = None
            self.callbacks = []
            self.preempted = False

    @property
    def in_loop(self) -> bool:
        """Whether Keras's loop itself is asking, and no callback."""
        return (
            self._loop_thread is threading.current_thread()
            and self._in_callbacks.count == 0
        )

    def requested(self, flag: str) -> bool:
        if self.preempted and flag == "stop_training":
            return True
        return bool(self.model.__dict__.get(flag, False))

    def clear_stop(self, flag: str) -> None:
        """Before a loop: nobody has asked to stop."""
        self.model.__dict__[flag] = self.agreed[flag] = False

    @property
    def stop_agreed(self) -> bool:
        """Whether some rank asked to stop the training; the same on all ranks."""
        return self.agreed["stop_training"]

    def agree_to_stop(self) -> None:
        """At the end of an epoch. Must be called on every rank."""
        request = tf.constant([int(self.requested("stop_training"))])
        stop = reduce_tensor(request, "max", "kerasmgpu.stop")
        self.agreed["stop_training"] |= bool(stop.numpy()[0])

    def meet(self, method: str, why: str = "", **facts: Any) -> None:
        """Refuses a call that the other ranks do not make alike.

        Must be called on every rank.

        Args:
            method: that was called.
            why: all ranks have to call it, for what is said of a rank that waits.
            facts: that must be the same on all ranks.
        """
        report.used(method)
        calls = all_gather_object((method, facts), f"the start of {method}(){why}")
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise RankMismatchError(
                    f"Rank {topology().rank} of {topology().size}: the ranks do not "
                    f"make the same call. Rank 0 calls {_call_text(calls[0])}, rank "
                    f"{rank} calls {_call_text(call)}. Expected the same on every rank."
                )
        state.share_host_random_state()

    # State --------------------------------------------------------------------------

    def wrap_optimizers(self) -> list[Any]:
        optimizers = state.optimizers_of(self.model)
        for position, optimizer in enumerate(optimizers):
            wrap_optimizer(
                optimizer,
                self.gradient_reduction,
                self.gradient_compression,
                name=str(position),
            )
        return optimizers

    def note_sharded_layers(self) -> list[Any]:
        """Lets the model's sharded layers compute; returns them."""
        layers = sharded_layers(self.model)
        for layer in layers:
            object.__setattr__(layer, "wrapped", True)
        outputs = tree.flatten(getattr(self.model, "outputs", None)) if layers else []
        split = split_outputs(self.model) if layers else []
        self.output_is_split = bool(split)
        loss = getattr(self.model, "loss", None)
        fits = len(outputs) == 1 and isinstance(loss, ShardedSoftmaxCrossEntropy)
        if split and loss is not None and not fits:
            raise InvalidArgumentError(
                f"Rank {topology().rank} of {topology().size}: expected whole outputs, "
                "or one split output and the loss ShardedSoftmaxCrossEntropy. "
                f"Received: the output of {split[0].name!r}, which stays split "
                f"(gather_output=False), and loss={loss!r}."
            )
        if layers and isinstance(loss, ShardedSoftmaxCrossEntropy) and not split:
            raise InvalidArgumentError(
                f"Rank {topology().rank} of {topology().size}: expected a last layer "
                "ShardedDense(classes, gather_output=False) with the loss "
                "ShardedSoftmaxCrossEntropy. Received: an output that is whole, or "
                "not known to be split."
            )
        return layers

    def send_state(self) -> None:
        """Compares the ranks' models and sends rank 0's state to all."""
        optimizers = state.optimizers_of(self.model)
        state.check_same_structure(self.model, optimizers)
        state.broadcast_state(self.model, optimizers)
        state.separate_random_states(self.model)

    def prepare_training(self) -> None:
        optimizers = state.optimizers_of(self.model)
        sharded = bool(self.note_sharded_layers())
        check_optimizers_of_groups(optimizers, sharded)
        self.send_state()
        state.gather_accumulators(optimizers, add_up=self.accumulated_apart)
        self.accumulated_apart = True
        if self.resume is not None:
            self.resume.restore_random()

    def prepare_testing(self) -> None:
        if not self.fitting:  # the ranks of a fit hold the same already
            self.send_state()

    def describe_data(self, data: FitData, steps_per_epoch: int | None) -> None:
        """Notes what callbacks ask of the data. Must be called on every rank."""
        self.data = data
        self.steps_per_epoch = steps_per_epoch
        rows: list[int | None] = [data.rows_per_batch()]
        if self.spans_ranks and self.sharding == "none":
            rows = all_gather_object(rows[0])
        known = [number for number in rows if number is not None]
        self.global_batch_size = sum(known) if len(known) == len(rows) else None

    def begin_epoch(self, epoch: int) -> None:
        """Must be called on every rank."""
        if self.balancer is not None:
            self.balancer.begin_epoch(epoch, self.global_batch_size)

    @property
    def equal_sharding(self) -> str:
        """How data that trains nothing is divided: ranks' speeds do not count."""
        return "batch" if self.sharding == "balanced" else self.sharding

    def log_names(self) -> set[str]:
        """Names in the logs of an epoch, or nothing where that is not known yet.

        A custom `train_step`, and callbacks of the user's, may add others.
        """
        model = self.model
        modules = [type(c).__module__.split(".")[0] for c in self.callbacks]
        plain = plain_class(model)
        if (
            not model.built
            or getattr(plain, "train_step", None) is not keras.Model.train_step
            or set(modules) - {"keras", "kerasmgpu"}
        ):
            return set()
        build_from_spec(model, self.data.batch_spec)
        names = {*model.get_metrics_result(), "learning_rate"}
        return names | {f"val_{n}" for n in names if self.has_validation}

    def begin_resume(self) -> Resume:
        """Must be called on every rank, before the data of a `fit` is made."""
        self.resume = Resume(self, self.first_epoch)
        return self.resume

    def seconds_alone(self, steps: int) -> list[float] | None:
        """As `calibration.seconds_alone`; None where one rank has only parts."""
        if sharded_layers(self.model):
            return None
        return seconds_alone(self, steps)

    def start_timers(self) -> StepTimers | None:
        """Makes the steps note where they wait; None where no step is this package's.

        Must be called on every rank.
        """
        if not self.spans_ranks:
            return None
        self.timers = self.timers or StepTimers()
        self.retrace()
        return self.timers

    def stop_timers(self) -> None:
        if self.timers is not None:
            self.timers = None
            self.model.train_function = None

    def retrace(self) -> None:
        """Makes a new train function: a callback has changed what a step does."""
        self.model.train_function = None
        self.model.make_train_function(force=True)
        if self.resume is not None:
            self.resume.train_function_made()

    def global_logs(self, logs: Any) -> dict[str, Any]:
        """A batch's logs over all ranks. Must be called on every rank."""
        model = self.model
        result = dict(model._get_metrics_result_or_logs(dict(logs or {})))
        model._put_metrics_back()
        return result

    def complete_rank_zero(self) -> None:
        """Before callbacks may save at the end of an epoch: rank 0 has all there is."""
        state.gather_accumulators(state.optimizers_of(self.model), add_up=True)

    def make_step(self, step: Any, training: bool) -> StepFunction:
        flag = "stop_training" if training else "stop_evaluating"
        options: dict[str, Any] = {
            "training": training,
            "same_batches": self.sharding != "none",
            "prepare": self.prepare_training if training else self.prepare_testing,
            "stop_requested": lambda: self.requested(flag),
            "starting": self._note_metric_starts,
            "finished": lambda function: self._step_finished(function, flag),
        }
        if training and self.micro_batch_size == AUTO:
            function: StepFunction = MemoryStepFunction(
                self.model,
                step,
                piece_size=self.piece_size,
                fuse_batch_norm=self.fuse_batch_norm,
                **options,
            )
        else:
            function = StepFunction(self.model, step, **options)
        if training:
            function.timers = self.timers
            if self.sharding == "balanced":
                self.balancer = self.balancer or Balancer()
                function.balancer = self.balancer
                function.timers = self.balancer.timers
                if self.timers is not None:
                    function.timers = JointTimers(self.timers, self.balancer.timers)
        return function

    def uses_xla(self, train_step: Any, data: Any = None) -> bool:
        """Whether the step is compiled by XLA; says once where it cannot be.

        Must be called inside a step that is being traced.

        Args:
            train_step: the model's own.
            data: the batch.
        """
        if not self.model.jit_compile or self.model.run_eagerly:
            return False
        if sharded_layers(self.model):
            return False
        if self._xla is None:
            why: str | None = "the model has a train_step of its own"
            if xla_step.is_keras_step(train_step):
                why = xla_step.what_xla_refuses(self.model, data)
            self._xla = why is None
            if why is not None and topology().is_rank_zero:
                warnings.warn(
                    "jit_compile is on, and this model's training step cannot be "
                    f"compiled by XLA on several ranks: {why}. It runs without XLA, "
                    "with the same numbers. Compile with jit_compile=False to silence "
                    "this.",
                    stacklevel=2,
                )
        return self._xla

    def _note_metric_starts(self) -> None:
        if self.metric_starts is None:
            self.metric_starts = metrics.start_values(self.model)

    def _step_finished(self, function: StepFunction, flag: str) -> None:
        self.last_step = function
        self.agreed[flag] |= function.stop_agreed


class AgreedFlag:
    """`model.stop_training`: callbacks read what they set, the loop what was agreed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return self
        session = session_of(model)
        if session is not None and session.in_loop and session.spans_ranks:
            return session.agreed[self.name]
        return bool(model.__dict__.get(self.name, False))

    def __set__(self, model: Any, value: Any) -> None:
        model.__dict__[self.name] = bool(value)


def session_of(model: Any) -> Session | None:
    """The session of a wrapped model, or None."""
    session = model.__dict__.get("_kerasmgpu")
    return session if isinstance(session, Session) else None


def spanning(model: Any) -> Session | None:
    session = session_of(model)
    return session if session is not None and session.spans_ranks else None


def _call_text(call: Any) -> str:
    method, facts = call
    return f"{method}({', '.join(f'{k}={v!r}' for k, v in facts.items())})"
