"""The callbacks of a wrapped model's `fit`: same decisions on all ranks.

Keras's `CallbackList`, plus: callbacks that only write files run on rank 0; a request
to stop, made by any callback on any rank, is agreed on before anyone acts on it; what a
callback restores on rank 0 at the start (an initial epoch) holds for all.
"""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.collectives import broadcast_object, topology
from kerasmgpu.data import ROW_IDS
from kerasmgpu.rank_zero_saves import serving_parts
from kerasmgpu.shards import sharded_layers

_ORBAX = "OrbaxCheckpoint"

#: Keras's callbacks that do nothing but write (or read) files.
FILE_CALLBACKS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    # Of newer releases of Keras.
    *([keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, _ORBAX) else []),
)


def _guarded(name: str) -> Any:
    """A hook during which the model's stop flags read as the callbacks set them."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        with self._session.callbacks_running():
            getattr(super(RankCallbackList, self), name)(*args, **kwargs)

    hook.__name__ = name
    return hook


class RankCallbackList(keras.callbacks.CallbackList):
    """A `CallbackList` of a wrapped model.

    Callbacks of this package may have hooks of their own, called on every rank:
    `on_fit_begin(session)` before the data pipeline is made, `before_train_begin()`
    before any callback's `on_train_begin`. One with `runs_last = True` is moved to the
    end: it sees what the others have made of a batch or an epoch.

    Args:
        callbacks: the user's.
        session: the model's `Session`.
        **kwargs: as of `keras.callbacks.CallbackList`.
    """

    def __init__(self, callbacks: Any, session: Any, **kwargs: Any) -> None:
        self._session = session
        given = flat(callbacks)
        if sharded_layers(session.model):
            given = [serving_parts(callback) for callback in given]
        mine = [callback for callback in given if runs_here(callback)]
        super().__init__(mine, **kwargs)
        self.callbacks.sort(key=lambda c: getattr(c, "runs_last", False))

    on_train_end = _guarded("on_train_end")
    on_test_begin = _guarded("on_test_begin")
    on_test_end = _guarded("on_test_end")
    on_test_batch_begin = _guarded("on_test_batch_begin")
    on_test_batch_end = _guarded("on_test_batch_end")

    def on_train_begin(self, logs: Any = None) -> None:
        session = self._session
        with session.callbacks_running():
            for callback in self.callbacks:
                if hasattr(callback, "before_train_begin"):
                    callback.before_train_begin()
            super().on_train_begin(logs)
        model = session.model
        if session.spans_ranks:
            model._initial_epoch = broadcast_object(model._initial_epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._session.begin_epoch(epoch)
        with self._session.callbacks_running():
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        resume = self._session.resume
        if resume is not None:
            if resume.is_skipping(batch):
                return
            resume.finish()
        with self._session.callbacks_running():
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        resume = self._session.resume
        if resume is not None and resume.is_skipping(batch):
            return
        with self._session.callbacks_running():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        session = self._session
        if session.resume is not None:
            session.resume.finish()
        if session.spans_ranks:
            session.complete_rank_zero()
        with session.callbacks_running():
            super().on_epoch_end(epoch, logs)
        if session.spans_ranks:
            session.agree_to_stop()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        outputs = (logs or {}).get("outputs")
        if isinstance(outputs, dict) and ROW_IDS in outputs:
            logs = {**(logs or {}), "outputs": outputs["outputs"]}
        super().on_predict_batch_end(batch, logs)


def runs_here(callback: Any) -> bool:
    """Whether a callback runs on this rank."""
    if topology().is_rank_zero or getattr(callback, "runs_on_all_ranks", False):
        return True
    return not isinstance(callback, FILE_CALLBACKS)


def flat(callbacks: Any) -> list[Any]:
    """The callbacks in what `fit` takes: one, a nest, a `CallbackList`."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, (list, tuple)):
        return [c for entry in callbacks for c in flat(entry)]
    return [callbacks]
