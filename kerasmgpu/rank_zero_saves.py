"""Callbacks of Keras's that save on rank 0 what all ranks hold in parts.

Only rank 0 knows whether such a callback saves: it alone runs it, with its own monitor,
folder and errors. The other ranks wait beside it, and come to gather when it saves.
"""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import on_rank_zero
from kerasmgpu.shards import gathered, sharded_variables
from kerasmgpu.state import optimizers_of

#: Those that read weights, or save them in a way of their own.
_REFUSED = {"BackupAndRestore": "BackupAndRestore"}
_REFUSED["OrbaxCheckpoint"] = "RankZeroCheckpoint"


class SavesOnRankZero(keras.callbacks.Callback):
    """Runs a ModelCheckpoint on rank 0 while the others are ready to gather.

    What it raises is raised on every rank.

    Args:
        callback: a `keras.callbacks.ModelCheckpoint`.

    Attributes:
        stands_for: the callback.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.stands_for = callback

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.stands_for.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.stands_for.set_model(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.stands_for.save_freq != "epoch":
            self._together("on_train_batch_end", batch, logs)
        elif topology().is_rank_zero:
            self.stands_for.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._together("on_epoch_end", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._together("on_train_end", logs)

    def _together(self, hook: str, *args: Any) -> None:
        what = f"save with {type(self.stands_for).__name__}"
        on_rank_zero(what, lambda: getattr(self.stands_for, hook)(*args), self._gather)

    def _gather(self) -> None:
        parts = sharded_variables(self.model, optimizers_of(self.model))
        with gathered(parts.values()):
            pass


def _delegate(name: str) -> Any:
    def hook(self: SavesOnRankZero, *args: Any, **kwargs: Any) -> None:
        if topology().is_rank_zero:
            getattr(self.stands_for, name)(*args, **kwargs)

    hook.__name__ = name
    return hook


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_") and _name not in vars(SavesOnRankZero):
        setattr(SavesOnRankZero, _name, _delegate(_name))


def serving_parts(callback: Any) -> Any:
    """The callback to use with sharded layers in place of one that saves weights.

    Raises:
        InvalidArgumentError: there is none.
    """
    if getattr(callback, "runs_on_all_ranks", False):
        return callback
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return SavesOnRankZero(callback)
    for kind in type(callback).__mro__:
        of_keras = kind.__module__.split(".")[0] == "keras"
        if of_keras and kind.__name__ in _REFUSED:
            raise InvalidArgumentError(
                f"Rank {topology().rank} of {topology().size}: expected "
                f"kerasmgpu.callbacks.{_REFUSED[kind.__name__]} for a model with "
                f"sharded layers. Received: Keras's {kind.__name__}, which knows "
                "nothing of the parts that other ranks hold."
            )
    return callback
