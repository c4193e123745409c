"""The model mixin: `fit`, `evaluate` and `predict` that span all ranks.

A wrapped model is the user's object with its class swapped for a subclass (mixin
first, the user's class second, same name and module). Keras's own loops run: they are
given this rank's data, a step function that agrees with the other ranks, and a list of
callbacks that decides alike on all ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu import metrics, report, state, xla_step
from kerasmgpu.callback_list import RankCallbackList, flat
from kerasmgpu.collectives import (
    all_gather_object,
    groups,
    reduce_tensor,
    topology,
)
from kerasmgpu.data import DATA, ROW_IDS, ShardedAdapter, spare_data
from kerasmgpu.errors import CollectiveError, InvalidArgumentError, InvalidTypeError
from kerasmgpu.files import (
    ask_for_help,
    is_helped,
    on_rank_zero,
    write_on_rank_zero,
)
from kerasmgpu.fit_data import FitData
from kerasmgpu.keras_compat import (
    adopt_registered_name,
    compiled_metrics,
    get_data_adapter,
    split_for_validation,
    tree,
)
from kerasmgpu.layers.fused_batch_norm import fused_normalization
from kerasmgpu.layers.group_ops import join_parts
from kerasmgpu.layers.on_device import backward_beside_forward, not_placed
from kerasmgpu.micro_batches import check_can_split, train_in_pieces
from kerasmgpu.optimizer import plain_class, unwrap_optimizer
from kerasmgpu.predictions import gather_rows
from kerasmgpu.session import AgreedFlag, Session, session_of, spanning
from kerasmgpu.shards import (
    gathered,
    have_wholes,
    sharded_layers,
    sharded_variables,
)
from kerasmgpu.step import StepFunction

if TYPE_CHECKING:
    _Base: Any = keras.Model
else:
    _Base = object


class RankedModel(_Base):
    """Mixin, put before the user's model class by `wrap`."""

    train_function: Any
    test_function: Any

    stop_training = AgreedFlag("stop_training")
    stop_evaluating = AgreedFlag("stop_evaluating")

    # Compiling ------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        session = session_of(self)
        if session is not None:
            session.wrap_optimizers()

    def make_train_function(self, force: bool = False) -> Any:
        own = session_of(self)
        if own is not None and own.micro_batch_size is not None:
            check_can_split(self, plain_class(self))
            _turn_xla_off(self, "a step in pieces (micro_batch_size)")
        session = spanning(self)
        if session is None:
            return super().make_train_function(force)
        self._note_sharded_layers()
        if self.train_function is None or force:
            session.wrap_optimizers()
            self.train_function = session.make_step(self.train_step, training=True)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        session = spanning(self)
        if session is None:
            return super().make_test_function(force)
        self._note_sharded_layers()
        if self.test_function is None or force:
            self.test_function = session.make_step(self.test_step, training=False)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        if spanning(self) is not None:
            self._note_sharded_layers()
        return super().make_predict_function(force)

    def _note_sharded_layers(self) -> None:
        session = session_of(self)
        if session is not None and session.note_sharded_layers():
            _turn_xla_off(self, "a model with sharded layers")

    # Steps ----------------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        own, session = session_of(self), spanning(self)
        with _fusing(self), backward_beside_forward():
            if own is not None and own.micro_batch_size is not None:
                return train_in_pieces(self, args[0], own.piece_size.at_most)
            if session is not None and session.uses_xla(super().train_step, *args):
                return xla_step.train_step(self, *args)
            return super().train_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with _fusing(self):
            return super().test_step(*args, **kwargs)

    # Loops ----------------------------------------------------------------------------

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        session = session_of(self)
        if session is None:
            return super().fit(**given)
        session.refuse_local("fit")
        self._assert_compile_called("fit")
        spans_ranks = session.spans_ranks
        session.has_validation = bool(validation_split) or validation_data is not None
        if spans_ranks:
            session.meet(
                "fit",
                batch_size=batch_size,
                epochs=epochs,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation=session.has_validation,
                validation_freq=validation_freq,
                sharding=session.sharding,
                steps_per_execution=self.steps_per_execution,
            )
        session.first_epoch = initial_epoch
        for callback in flat(callbacks):
            if hasattr(callback, "on_fit_begin"):
                callback.on_fit_begin(session)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        data = self._fit_data(
            x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight
        )
        session.describe_data(data, steps_per_epoch)
        if validation_data is not None and spans_ranks:
            xv, yv, wv = keras.utils.unpack_x_y_sample_weight(validation_data)
            validation_data = ShardedAdapter(
                xv,
                yv,
                wv,
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
                sharding=session.equal_sharding,
            )
        verbose = verbose if topology().is_rank_zero else 0
        steps = steps_per_epoch or data.num_batches
        callback_list = _callback_list(
            session, callbacks, verbose, steps, epochs=epochs, add_history=True
        )
        session.callbacks = callback_list.callbacks
        for function in (self.train_function, self.test_function):
            if isinstance(function, StepFunction):
                function.start_over()
        self._initial_epoch = None
        session.clear_stop("stop_training")
        with session.loop_running(), session.fitted():
            return super().fit(
                x=data,
                epochs=epochs,
                verbose=verbose,
                callbacks=callback_list,
                validation_data=validation_data,
                shuffle=False,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size or batch_size,
                validation_freq=validation_freq,
            )

    def _fit_data(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        shuffle: Any,
        class_weight: Any,
    ) -> FitData:
        arguments = {
            "x": x,
            "y": y,
            "sample_weight": sample_weight,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "class_weight": class_weight,
        }
        session = spanning(self)
        if session is None:
            return FitData(get_data_adapter(**arguments, steps_per_epoch=steps))
        return ShardedAdapter(**arguments, steps=steps, sharding=session.sharding)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        given = {
            k: v
            for k, v in locals().items()
            if k not in ("self", "kwargs", "__class__")
        }
        session = spanning(self)
        if session is None:
            with _own_functions(self, "test_function"):
                return super().evaluate(**given, **kwargs)
        session.clear_stop("stop_evaluating")
        if kwargs.get("_use_cached_eval_dataset"):  # the validation of `fit`
            return super().evaluate(**given, **kwargs)
        self._assert_compile_called("evaluate")
        session.meet(
            "evaluate", batch_size=batch_size, steps=steps, sharding=session.sharding
        )
        data = ShardedAdapter(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps,
            sharding=session.equal_sharding,
        )
        verbose = verbose if topology().is_rank_zero else 0
        callback_list = _callback_list(
            session, callbacks, verbose, steps or data.num_batches
        )
        if isinstance(self.test_function, StepFunction):
            self.test_function.start_over()
        with session.loop_running():
            return super().evaluate(
                x=data,
                verbose=verbose,
                steps=steps,
                callbacks=callback_list,
                return_dict=return_dict,
                **kwargs,
            )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        session = spanning(self)
        if session is None:
            return super().predict(x, batch_size, verbose, steps, callbacks)
        session.meet(
            "predict", batch_size=batch_size, steps=steps, sharding=session.sharding
        )
        data = ShardedAdapter(
            x,
            batch_size=batch_size,
            steps=steps,
            sharding=session.equal_sharding,
            with_row_ids=True,
        )
        if not self.built:
            spec = data.get_tf_dataset().element_spec[DATA]
            self(keras.utils.unpack_x_y_sample_weight(spare_data(spec))[0])
        session.send_state()
        verbose = verbose if topology().is_rank_zero else 0
        callback_list = _callback_list(
            session, callbacks, verbose, steps or data.num_batches
        )
        result = super().predict(
            data, verbose=verbose, steps=steps, callbacks=callback_list
        )
        return gather_rows(
            result["outputs"], result[ROW_IDS], own_rows=session.sharding == "none"
        )

    def predict_step(self, data: Any) -> Any:
        if not (isinstance(data, dict) and ROW_IDS in data):
            return self._whole(super().predict_step(data))
        outputs = self._whole(super().predict_step(data[DATA]))
        return {"outputs": outputs, ROW_IDS: data[ROW_IDS]}

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        if tree.flatten(compiled_metrics(self)):
            y_pred = self._whole(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _whole(self, outputs: Any) -> Any:
        session = session_of(self)
        split = session is not None and session.output_is_split
        return tree.map_structure(join_parts, outputs) if split else outputs

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        if (own := session_of(self)) is not None:
            own.refuse_local("train_on_batch")
        session = spanning(self)
        if session is None:
            return super().train_on_batch(
                x, y, sample_weight, class_weight, return_dict
            )
        report.used("train_on_batch")
        logs = super().train_on_batch(
            x, y, sample_weight, class_weight, return_dict=True
        )
        return self._global_logs(logs, return_dict)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        session = spanning(self)
        if session is None:
            with _own_functions(self, "test_function"):
                return super().test_on_batch(x, y, sample_weight, return_dict)
        report.used("test_on_batch")
        logs = super().test_on_batch(x, y, sample_weight, return_dict=True)
        return self._global_logs(logs, return_dict)

    # Logs -----------------------------------------------------------------------------

    def _global_logs(self, logs: Any, return_dict: bool) -> Any:
        values = self._get_metrics_result_or_logs(logs)
        logs = {  # in the order of the plain model's
            key: float(values[key]) if np.ndim(values[key]) == 0 else values[key]
            for key in logs
        }
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Keras's, at the end of an epoch, over all ranks."""
        session = spanning(self)
        if session is None:
            return super()._get_metrics_result_or_logs(logs)
        self._put_metrics_back()
        session.summed_metrics = metrics.sum_over_ranks(
            self, session.metric_starts or {}
        )
        result = super()._get_metrics_result_or_logs(logs)
        if result is not logs or not isinstance(logs, dict):
            return result
        return _global_numbers(logs, self.get_metrics_result(), session.last_step)

    def _put_metrics_back(self) -> None:
        session = session_of(self)
        if session is not None and session.summed_metrics is not None:
            metrics.restore(session.summed_metrics)
            session.summed_metrics = None

    def reset_metrics(self) -> None:
        self._put_metrics_back()
        super().reset_metrics()
        if (session := session_of(self)) is not None:
            session.metric_starts = None

    # Files ----------------------------------------------------------------------------

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        _write(self, "save", filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        _write(self, "save_weights", filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        session = spanning(self)
        if session is None or not sharded_layers(self):
            super().load_weights(filepath, *args, **kwargs)
            return
        if is_helped():
            raise CollectiveError(
                f"Rank {topology().rank} of {topology().size}: expected load_weights "
                "of a model with sharded layers to be called on all ranks. Received: "
                "a call in a callback that runs on rank 0 only."
            )
        session.meet("load_weights")  # each rank cuts its part out of the file
        failure: Exception | None = None
        try:
            super().load_weights(filepath, *args, **kwargs)
        except Exception as error:
            failure = error
        everyone = all_gather_object(failure and f"{type(failure).__name__}: {failure}")
        for rank, words in enumerate(everyone):
            if words is not None:
                raise InvalidArgumentError(
                    f"Rank {topology().rank} of {topology().size}: rank {rank} could "
                    f"not load the weights {filepath!r}: {words} A model with sharded "
                    "layers is loaded by all ranks from a file that each can read."
                ) from failure

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if sharded_layers(self):
            raise InvalidArgumentError(
                f"Rank {topology().rank} of {topology().size}: expected a model "
                "without sharded layers to export. Save it with model.save, load it "
                "with keras.models.load_model in one process, and export that."
            )
        with not_placed():  # a server may have other devices
            write_on_rank_zero(self, "export", filepath, *args, **kwargs)


def _fusing(model: Any) -> Any:
    session = session_of(model)
    if session is None or not session.fuse_batch_norm:
        return contextlib.nullcontext()
    return fused_normalization(model)


def _write(model: Any, method: str, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Calls Keras's `save` or `save_weights` on rank 0.

    With sharded layers it must be called on every rank: parts are gathered first, and
    what goes wrong is raised on all.
    """

    def write() -> None:
        write_on_rank_zero(model, method, filepath, *args, **kwargs)

    session = session_of(model)
    parts = sharded_variables(model, state.optimizers_of(model))
    if session is None or not parts or have_wholes():
        write()
        return
    if method == "save" and str(filepath).endswith((".h5", ".hdf5")):
        raise InvalidArgumentError(
            f"Rank {topology().rank} of {topology().size}: expected a name that ends "
            "in .keras to save a model with sharded layers. Received: "
            f"{str(filepath)!r}, the old format, which would hold this rank's parts."
        )
    if not session.fitting:
        session.meet(method, ", which every rank calls where layers are sharded")
        with gathered(parts.values()):
            on_rank_zero(f"write {filepath}", write)
    elif ask_for_help():
        with gathered(parts.values()):
            write()
    else:
        raise CollectiveError(
            f"Rank {topology().rank} of {topology().size}: expected "
            "kerasmgpu.callbacks.RankZeroCheckpoint to save a model with sharded "
            f"layers during fit. Received: a call of {method}() in a callback, which "
            "other ranks may not make."
        )


def _global_numbers(
    logs: dict[str, Any], metric_logs: dict[str, Any], step: StepFunction | None
) -> dict[str, Any]:
    """What a custom step returned, over ranks.

    What is a metric's result is the result of the summed state; other numbers become
    their mean over ranks, weighted by the rows of the last batch.
    """
    known = step.log_metrics if step is not None else {}
    share = step.share if step is not None else groups().speaks / groups().replicas
    result: dict[str, Any] = {}
    numbers: dict[str, np.ndarray] = {}
    for key in sorted(logs):
        if key in known:
            result[key] = known[key].result()
        elif key in metric_logs:
            result[key] = metric_logs[key]
        else:
            numbers[key] = np.asarray(logs[key], "float64")
    if numbers:
        flat = np.concatenate([value.ravel() for value in numbers.values()])
        mine = flat * share if share else np.zeros_like(flat)
        total = reduce_tensor(tf.constant(mine), "sum", "kerasmgpu.logs").numpy()
        sizes = np.cumsum([value.size for value in numbers.values()])[:-1]
        for (key, value), part in zip(
            numbers.items(), np.split(total, sizes), strict=True
        ):
            result[key] = part.reshape(value.shape) if value.ndim else float(part[0])
    return {key: result[key] for key in logs}


def _callback_list(
    session: Session,
    callbacks: Any,
    verbose: Any,
    steps: int | None,
    epochs: int = 1,
    add_history: bool = False,
) -> RankCallbackList:
    """The list that Keras would make, as one of a wrapped model."""
    return RankCallbackList(
        callbacks,
        session,
        add_history=add_history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=session.model,
    )


@contextlib.contextmanager
def _own_functions(model: Any, name: str) -> Iterator[None]:
    """Lets Keras make its own step function, for a call that does not span ranks."""
    held = getattr(model, name)
    if session_of(model) is None or topology().size == 1:
        yield
        return
    setattr(model, name, None)
    try:
        yield
    finally:
        setattr(model, name, held)


def _turn_xla_off(model: Any, what: str) -> None:
    """Where XLA wants to know how many rows a piece has, or meets a collective."""
    if model.jit_compile and topology().is_rank_zero:
        warnings.warn(
            f"jit_compile is on, and {what} runs without XLA, with the same numbers. "
            "Compile with jit_compile=False to silence this.",
            stacklevel=2,
        )
    model.jit_compile = False


# Wrapping -----------------------------------------------------------------------------


def wrap_model(model: Any, **options: Any) -> Any:
    """Swaps the model's class; the same object is returned. Idempotent."""
    session = session_of(model)
    if session is not None:
        held = {name: getattr(session, name) for name in options}
        if held != options:
            raise InvalidArgumentError(
                f"The model {model.name!r} was already wrapped with {held}. Received: "
                f"a strategy with {options}. Call strategy.unwrap(model) first."
            )
        return model
    if getattr(model, "_distribute_strategy", None) is not None:
        raise InvalidTypeError(
            "Received: a model made under a tf.distribute strategy. kerasmgpu takes "
            "the place of tf.distribute; build the model outside of "
            "`with strategy.scope()`."
        )
    session = Session(model, **options)
    object.__setattr__(model, "_kerasmgpu", session)
    original = type(model)
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    wrapped = type(original.__name__, (RankedModel, original), members)
    wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    adopt_registered_name(wrapped, original)
    model.__class__ = wrapped
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
    session.wrap_optimizers()
    session.note_sharded_layers()
    return model


def unwrap_model(model: Any) -> Any:
    """Puts the classes of the model and its optimizers back."""
    if session_of(model) is None:
        return model
    model._put_metrics_back()
    for layer in sharded_layers(model):
        object.__setattr__(layer, "wrapped", False)
    for optimizer in state.optimizers_of(model):
        unwrap_optimizer(optimizer)
    original = plain_class(model)
    object.__delattr__(model, "_kerasmgpu")
    model.__class__ = original
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
    return model
