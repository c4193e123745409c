"""`HorovodStrategy`: the facade over topology, devices, model and collectives."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu import collectives, data, devices, state, tensors
from kerasmgpu.errors import InvalidArgumentError, InvalidTypeError, check_one_of
from kerasmgpu.micro_batches import check_micro_batch_size
from kerasmgpu.model import unwrap_model, wrap_model
from kerasmgpu.optimizer import (
    COMPRESSIONS,
    REDUCTIONS,
    unwrap_optimizer,
    wrap_optimizer,
)
from kerasmgpu.session import session_of

_RULES = ("linear", "sqrt", "none")


class HorovodStrategy:
    """Trains a Keras model on all processes of a job as one process would.

    Joins the job that a launcher started (`kerasmgpu run`, `horovodrun`, `mpirun`,
    `srun`), pins this rank's GPU if there is one, and shares rank 0's random seed.
    Create it first, on every rank; without a launcher it is a job of one process, and
    everything behaves as in plain Keras, also where Horovod is not installed.

    Args:
        gradient_reduction: "mean" (default; each rank's gradient counts by its rows:
            exact), "sum" (plain sum, no weights) or "adasum" (Maleki et al. 2020, arXiv
            2006.02924; a power of two ranks).
        gradient_compression: None (default), "fp16" or "bf16": the type in which
            gradients are sent; half the bytes.
        sharding: "batch" (default): all ranks see the same global batches, and of k
            rows rank r takes rows k·r/N to k·(r+1)/N. "none": each rank brings batches
            of its own, for `fit`, validation, `evaluate` and `predict`; rows may differ
            by rank and over time, and `predict` returns this rank's rows. "balanced":
            as "batch", but in training rows are divided by the ranks' speeds, which are
            measured in every epoch.
        fuse_batch_norm: compute BatchNormalization in training and evaluation by
            TensorFlow's fused operation where it can: the same numbers, faster.
        micro_batch_size: at most so many rows of a rank at a time: a training step runs
            them piece by piece and updates once, with the numbers of the whole step and
            less memory (see the README). None (default): all at once. "auto": all at
            once, and in halves where memory does not suffice.
        devices_per_rank: devices that each rank owns, for `kerasmgpu.layers.OnDevice`:
            GPUs, from `local_rank` times this number on, or parts of its CPU.
        model_parallel_size: ranks that hold one model together, a group; must divide
            the number of ranks, and is the same for the whole process. The ranks of a
            group see the same rows, the groups different ones (see the README).
        memory_growth: take GPU memory as it is needed instead of all of it.
        stall_timeout_seconds: a rank that waits longer for others says on whom, and in
            what.

    Raises:
        InvalidArgumentError: an argument is none of the values above, or
            devices_per_rank is not that of the ranks' first strategies.
        LaunchError: the launcher started another number of processes than joined; too
            few GPUs; TensorFlow started before devices could be chosen.
        HorovodNotFoundError: more than one process, and Horovod cannot be imported.

    Example:

    ```python
    strategy = kerasmgpu.HorovodStrategy()
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(optimizer="sgd", loss="mse")
    model = strategy.wrap(model)
    model.fit(x, y, batch_size=256)  # 256 rows a step over all ranks together
    ```

    Dropout and noise differ by rank, and a plain BatchNormalization takes the moments
    of each rank's own rows; both differ from one process (see the README).
    """

    def __init__(
        self,
        *,
        gradient_reduction: str = "mean",
        gradient_compression: str | None = None,
        sharding: str = "batch",
        fuse_batch_norm: bool = True,
        micro_batch_size: int | str | None = None,
        devices_per_rank: int = 1,
        model_parallel_size: int = 1,
        memory_growth: bool = True,
        stall_timeout_seconds: float = 60,
    ) -> None:
        check_one_of("gradient_reduction", gradient_reduction, REDUCTIONS)
        check_one_of("gradient_compression", gradient_compression, COMPRESSIONS)
        check_one_of("sharding", sharding, data.SHARDINGS)
        check_micro_batch_size(micro_batch_size)
        if type(devices_per_rank) is not int or devices_per_rank < 1:
            raise InvalidArgumentError(
                "Expected devices_per_rank to be a positive whole number. Received: "
                f"devices_per_rank={devices_per_rank!r}."
            )
        if not stall_timeout_seconds > 0:
            raise InvalidArgumentError(
                "Expected stall_timeout_seconds to be a positive number of seconds. "
                f"Received: stall_timeout_seconds={stall_timeout_seconds!r}."
            )
        _check_backend()
        self.gradient_reduction = gradient_reduction
        self.gradient_compression = gradient_compression
        self.sharding = sharding
        self.fuse_batch_norm = fuse_batch_norm
        self.micro_batch_size = micro_batch_size
        self._topology = collectives.join(
            float(stall_timeout_seconds), model_parallel_size
        )
        self.model_parallel_size = model_parallel_size
        if model_parallel_size > 1:
            _check_options_of_groups(
                gradient_reduction, gradient_compression, sharding, micro_batch_size
            )
        if gradient_reduction == "adasum" and self.size & (self.size - 1):
            raise InvalidArgumentError(
                'gradient_reduction="adasum" needs a power of two ranks. Received: a '
                f"job of {self.size}."
            )
        self.devices_per_rank = devices_per_rank
        self.gpu, failure = devices.choose_devices(
            self._topology, memory_growth, devices_per_rank
        )
        collectives.start_roll_call(float(stall_timeout_seconds))
        devices.agree_on_devices(self._topology, devices_per_rank, failure)
        devices.keep_to_own_cores(self._topology, has_gpu=self.gpu is not None)
        devices.keep_freed_memory(self._topology, has_gpu=self.gpu is not None)
        state.share_random_seeds()
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()

    # Who am I -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process, 0 to `size` - 1."""
        return self._topology.rank

    @property
    def size(self) -> int:
        """Processes in the job."""
        return self._topology.size

    @property
    def local_rank(self) -> int:
        """This process among those on its host."""
        return self._topology.local_rank

    @property
    def local_size(self) -> int:
        """Processes on this host."""
        return self._topology.local_size

    @property
    def node_rank(self) -> int:
        """This host among the hosts."""
        return self._topology.node_rank

    @property
    def num_nodes(self) -> int:
        """Hosts in the job."""
        return self._topology.num_nodes

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self._topology.is_rank_zero

    @property
    def num_replicas_in_sync(self) -> int:
        """Groups of ranks, `size` where each is one, as `tf.distribute` names it."""
        return self._topology.size // self.model_parallel_size

    # Wrapping -------------------------------------------------------------------------

    def wrap(self, model_or_optimizer: Any) -> Any:
        """Makes a model's `fit`, `evaluate` and `predict` span all ranks.

        Works before or after `compile` and after `load_model`. A wrapped optimizer
        alone, for training loops of one's own, averages the ranks' gradients in
        `apply`. Wrap on every rank.

        Args:
            model_or_optimizer: a Keras 3 model or optimizer.

        Returns:
            The same object. Wrapping twice is harmless.

        Raises:
            InvalidTypeError: it is neither, or belongs to Keras 2 (`tf_keras`).
            InvalidArgumentError: it was wrapped with other options.
        """
        if isinstance(model_or_optimizer, keras.Model):
            wrap_model(
                model_or_optimizer,
                sharding=self.sharding,
                gradient_reduction=self.gradient_reduction,
                gradient_compression=self.gradient_compression,
                fuse_batch_norm=self.fuse_batch_norm,
                micro_batch_size=self.micro_batch_size,
            )
            self._models.add(model_or_optimizer)
            return model_or_optimizer
        if isinstance(model_or_optimizer, keras.optimizers.Optimizer):
            if self.model_parallel_size > 1:
                raise InvalidTypeError(
                    f"Rank {self.rank} of {self.size}: expected a model to wrap under "
                    f"model_parallel_size={self.model_parallel_size}. Received: an "
                    "optimizer alone, which does not know of groups."
                )
            collectives.mark_used("an optimizer")
            return wrap_optimizer(
                model_or_optimizer, self.gradient_reduction, self.gradient_compression
            )
        raise InvalidTypeError(_not_keras(model_or_optimizer, self._topology))

    def unwrap(self, obj: Any) -> Any:
        """Takes back what `wrap` did; the same object is returned."""
        if isinstance(obj, keras.Model):
            return unwrap_model(obj)
        if isinstance(obj, keras.optimizers.Optimizer):
            return unwrap_optimizer(obj)
        raise InvalidTypeError(_not_keras(obj, self._topology))

    def scale_learning_rate(
        self,
        base_learning_rate: float,
        *,
        base_batch_size: int,
        batch_size: int,
        rule: str = "linear",
    ) -> float:
        """The learning rate for a larger global batch.

        Nothing is scaled unless you ask for it; the number of ranks alone does not
        matter, only the global batch does.

        Args:
            base_learning_rate: the rate that is right for `base_batch_size`.
            base_batch_size: rows a step for which it is right.
            batch_size: rows a step over all ranks together.
            rule: "linear" (Goyal et al. 2017, arXiv 1706.02677), "sqrt" (Krizhevsky
                2014, arXiv 1404.5997) or "none".

        Returns:
            The scaled rate.

        Example:

        >>> strategy.scale_learning_rate(0.1, base_batch_size=64, batch_size=256)
        0.4
        """
        check_one_of("rule", rule, _RULES)
        for name, value in (
            ("base_learning_rate", base_learning_rate),
            ("base_batch_size", base_batch_size),
            ("batch_size", batch_size),
        ):
            if not value > 0:
                raise InvalidArgumentError(
                    f"Expected {name} to be positive. Received: {name}={value!r}."
                )
        factor = batch_size / base_batch_size
        if rule == "none":
            return float(base_learning_rate)
        return base_learning_rate * (factor if rule == "linear" else math.sqrt(factor))

    # Data -----------------------------------------------------------------------------

    def shard(self, dataset: Any) -> Any:
        """This rank's part of a dataset or of a list of files.

        For pipelines that are then fitted with `sharding="none"`.

        Args:
            dataset: a batched `tf.data.Dataset`, of every batch of which this rank's
                rows are taken; or a list of file names, of which every `size`-th is
                taken, so that no rank reads what it does not need.

        Returns:
            A `tf.data.Dataset`, or a list.

        Raises:
            InvalidArgumentError: fewer files than ranks.
            InvalidTypeError: neither a dataset nor a list.
        """
        if isinstance(dataset, tf.data.Dataset):
            return data.shard_dataset(dataset)
        if isinstance(dataset, Sequence) and not isinstance(dataset, (str, bytes)):
            return data.shard_files(dataset)
        raise InvalidTypeError(
            "Expected a batched tf.data.Dataset or a list of file names. Received: "
            f"{type(dataset).__name__}. Arrays need no shard: pass them to fit whole."
        )

    # Contexts -------------------------------------------------------------------------

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """While it lasts, evaluate and predict run on this rank alone.

        No collective takes place, so one rank may do it without the others.
        """
        if self.model_parallel_size > 1:
            raise InvalidArgumentError(
                f"Rank {self.rank} of {self.size}: expected model_parallel_size=1 in "
                "strategy.local(): one rank of a group holds only a part of the "
                f"model. Received: model_parallel_size={self.model_parallel_size}. "
                "Call evaluate or predict on all ranks."
            )
        sessions = [s for s in map(session_of, self._models) if s is not None]
        for session in sessions:
            session.local_depth += 1
        try:
            yield
        finally:
            for session in sessions:
                session.local_depth -= 1

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others do (for downloads).

        Must be entered on every rank. Where the block raises on rank 0, the others
        raise too instead of waiting.
        """
        if self.size == 1:
            yield
            return
        failure: str | None = None
        if not self.is_rank_zero:
            failure = self.broadcast_object(None)
            if failure is not None:
                raise RuntimeError(
                    f"Rank {self.rank} of {self.size}: rank 0 failed in "
                    f"rank_zero_first(): {failure}"
                )
            yield
            return
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.broadcast_object(failure)

    # Collectives ----------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        return tensors.all_reduce(value, op)

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, value: Any) -> Any:
        return tensors.all_gather(value)

    @tf.autograph.experimental.do_not_convert
    def broadcast(self, value: Any, root_rank: int = 0) -> Any:
        return tensors.broadcast(value, root_rank)

    def broadcast_object(self, obj: Any, root_rank: int = 0) -> Any:
        return collectives.broadcast_object(obj, root_rank)

    def barrier(self) -> None:
        collectives.barrier()

    all_reduce.__doc__ = tensors.all_reduce.__doc__
    all_gather.__doc__ = tensors.all_gather.__doc__
    broadcast.__doc__ = tensors.broadcast.__doc__
    broadcast_object.__doc__ = collectives.broadcast_object.__doc__
    barrier.__doc__ = collectives.barrier.__doc__

    def __repr__(self) -> str:
        return f"HorovodStrategy(rank={self.rank}, size={self.size})"


def _check_backend() -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidArgumentError(
            "kerasmgpu needs Keras's TensorFlow backend. Received: the backend "
            f"{backend!r} (KERAS_BACKEND={os.environ.get('KERAS_BACKEND', '')!r}). Set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


def _check_options_of_groups(
    reduction: str, compression: str | None, sharding: str, micro_batch_size: Any
) -> None:
    for name, value, only in (
        ("gradient_reduction", reduction, "mean"),
        ("gradient_compression", compression, None),
        ("sharding", sharding, "batch"),
        ("micro_batch_size", micro_batch_size, None),
    ):
        if value != only:
            raise InvalidArgumentError(
                f"Expected {name}={only!r} with groups of ranks "
                f"(model_parallel_size). Received: {name}={value!r}."
            )


def _not_keras(obj: Any, topology: Any) -> str:
    module = type(obj).__module__
    where = f"Rank {topology.rank} of {topology.size}: " if topology.size > 1 else ""
    message = (
        f"{where}expected a Keras 3 model or optimizer (keras.Model, "
        f"keras.optimizers.Optimizer). Received: {module}.{type(obj).__qualname__}."
    )
    if any(word in module for word in ("tf_keras", "tensorflow.python.keras")):
        return (
            f"{message} That is Keras 2; unset TF_USE_LEGACY_KERAS and import keras, "
            "not tf_keras."
        )
    if isinstance(obj, str):
        return f"{message} Pass the optimizer object, or wrap the compiled model."
    return message
