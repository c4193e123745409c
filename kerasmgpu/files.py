"""Files are rank 0's business, whole or not at all, and without a trace of kerasmgpu.

A wrapped model's `save`, `save_weights` and `export` write on rank 0 only, with no
collective, first under a temporary name in the same folder. What is saved is a copy of
the model object that has its own class again and shares the layers; with a snapshot of
the values it can be saved on a thread while training goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import broadcast_object, topology
from kerasmgpu.errors import KerasMGPUError
from kerasmgpu.keras_compat import prepare_thread_for_saving
from kerasmgpu.optimizer import plain_class
from kerasmgpu.shards import (
    axis_of,
    given_wholes,
    save_variables,
    slots_of,
    wholes_at_hand,
)
from kerasmgpu.state import optimizers_of


class SaveError(KerasMGPUError, OSError):
    """A file could not be written. What was there before is still there."""


_HELP = "kerasmgpu: help"
_helped: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "kerasmgpu_helped", default=False
)


# A model as Keras knows it -----------------------------------------------------------


def plain_copy(model: Any) -> Any:
    """The model as it was before `wrap`, with the same layers and variables.

    The wrapped model is not touched, so it may be training meanwhile.
    """
    if "_kerasmgpu" not in model.__dict__:
        return model
    plain: dict[int, Any] = {}
    for optimizer in optimizers_of(model):
        if "_kerasmgpu" in optimizer.__dict__:
            plain[id(optimizer)] = _plain_optimizer(optimizer)

    def put(value: Any) -> Any:
        if id(value) in plain:
            return plain[id(value)]
        if isinstance(value, (list, tuple)) and any(id(v) in plain for v in value):
            return [put(v) for v in value]
        if isinstance(value, dict) and any(id(v) in plain for v in value.values()):
            return {key: put(v) for key, v in value.items()}
        return value

    result = _with_class(model, plain_class(model))
    for name, value in list(result.__dict__.items()):
        result.__dict__[name] = put(value)
    compiled = result.__dict__.get("_compile_config")
    if compiled is not None:  # what `compile` was given
        compiled = copy.copy(compiled)
        compiled.config = {key: put(v) for key, v in compiled.config.items()}
        result.__dict__["_compile_config"] = compiled
    return result


def _plain_optimizer(optimizer: Any) -> Any:
    result = _with_class(optimizer, plain_class(optimizer))
    if slots_of(optimizer):
        result.__dict__["save_own_variables"] = functools.partial(
            save_variables, list(optimizer.variables)
        )
    inner = result.__dict__.get("inner_optimizer")
    if inner is not None and "_kerasmgpu" in inner.__dict__:
        result.__dict__["inner_optimizer"] = _plain_optimizer(inner)
    return result


def _with_class(obj: Any, cls: type) -> Any:
    result: Any = object.__new__(cls)
    result.__dict__.update(obj.__dict__)
    # The class itself, and what callbacks have put on the object.
    for name in [n for n in result.__dict__ if n.startswith("_kerasmgpu")]:
        del result.__dict__[name]
    for name in ("apply", "_get_current_learning_rate"):
        result.__dict__.pop(name, None)
    return result


class Snapshot:
    """The values of a model and its optimizers at one moment.

    Where layers are sharded, to be made inside of `shards.gathered`.

    Args:
        model: a model, as a rule wrapped; it may go on training.
    """

    def __init__(self, model: Any) -> None:
        self.model = plain_copy(model)
        owners = (model, *optimizers_of(model))
        variables = {id(v): v for owner in owners for v in owner.variables}
        self._wholes = wholes_at_hand()
        self._values = [
            (v, tf.identity(v.value)) for v in variables.values() if axis_of(v) is None
        ]

    def save(self, filepath: Any, weights_only: bool = False) -> None:
        """Writes the values of that moment; may be called on another thread."""
        prepare_thread_for_saving()  # Keras keeps this, and the scope, by thread
        with (
            given_wholes(self._wholes),
            keras.StatelessScope(self._values),
            replaced(filepath) as temporary,
        ):
            if weights_only:
                self.model.save_weights(temporary)
            else:
                self.model.save(temporary)


# Writing -----------------------------------------------------------------------------


def write_on_rank_zero(
    model: Any, method: str, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Calls Keras's `save`, `save_weights` or `export` for a wrapped model.

    Rank 0 writes and the others return at once; no collective.

    Args:
        model: the wrapped model.
        method: the name of the model's method.
        filepath: where to; a local path is replaced in one go.
        *args, **kwargs: passed on.
    """
    if not topology().is_rank_zero:
        return
    write = getattr(plain_copy(model), method)
    overwrite = kwargs.get("overwrite", args[0] if args else True)
    local = isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)
    if not local or (overwrite is False and os.path.exists(filepath)):
        write(filepath, *args, **kwargs)  # Keras asks before it overwrites
        return
    with replaced(filepath) as temporary:
        write(temporary, *args, **kwargs)


def on_rank_zero(
    what: str, function: Callable[[], Any], help_it: Callable[[], Any] | None = None
) -> Any:
    """Runs a function on rank 0 and gives its result, or its error, to every rank.

    Must be called on every rank.

    Args:
        what: for the message, such as "write the checkpoint model.keras".
        function: called on rank 0 alone.
        help_it: called on the others as often as the function calls `ask_for_help`.

    Raises:
        KerasMGPUError: what the function raised, or a SaveError that says it.
    """
    result = None
    failure: tuple[type[KerasMGPUError], str, Exception] | None = None
    if topology().is_rank_zero:
        token = _helped.set(help_it is not None)
        try:
            result = function()
        except KerasMGPUError as error:
            failure = (type(error), str(error), error)
        except Exception as error:
            failure = (SaveError, f"Rank 0 could not {what}: {_reason(error)}", error)
        finally:
            _helped.reset(token)
    told = broadcast_object((result, failure[:2] if failure else None))
    while told == _HELP and help_it is not None:
        help_it()
        told = broadcast_object(None)
    if told[1] is not None:
        kind, message = told[1]
        cause = failure[2] if failure else None
        raise kind(message) from (cause if not isinstance(cause, kind) else None)
    return told[0]


def ask_for_help() -> bool:
    """In a function of `on_rank_zero`: lets the other ranks call their `help_it`.

    Returns:
        Whether they do; otherwise nothing has happened.
    """
    if _helped.get():
        broadcast_object(_HELP)
    return _helped.get()


def is_helped() -> bool:
    """Whether this is rank 0, in a function that the others wait beside."""
    return _helped.get()


def _reason(error: Exception) -> str:
    """What went wrong, and what to do."""
    text = f"{type(error).__name__}: {error}"
    for kind, advice in (
        (FileNotFoundError, "Create the folder, or check the path."),
        (PermissionError, "Check who owns the folder."),
        (IsADirectoryError, "Name a file, not a folder."),
    ):
        if isinstance(error, kind):
            return f"{text} {advice}"
    full = " Is the disk full?" if isinstance(error, OSError) else ""
    return f"{text}{full} What was saved before is untouched."


@contextlib.contextmanager
def replaced(filepath: Any) -> Iterator[str]:
    """Yields a temporary path beside `filepath`; puts it in its place at the end.

    What was written is flushed to disk before it takes the name, so that a kill at any
    moment leaves the old or the new file. An error leaves the old one.
    """
    target = pathlib.Path(filepath)
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"Expected an existing folder to write {target.name} in. Received: "
            f"{str(target)!r}, whose folder {str(target.parent)!r} does not exist. "
            "Create it, or check the path."
        )
    folder = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    )
    try:
        # The same name, so that Keras sees the ending; shards come beside it.
        yield str(folder / target.name)
        written = sorted(folder.iterdir(), key=lambda path: path.name == target.name)
        for path in written:  # the one of the given name last
            for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
                _flush(file)
            if path.is_dir() and (target.parent / path.name).exists():
                os.replace(target.parent / path.name, folder / "replaced")
            os.replace(path, target.parent / path.name)
        _flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(filepath: Any) -> None:
    """Removes what a killed process left of writing `filepath`.

    For files that one job alone writes.
    """
    target = pathlib.Path(filepath)
    for path in target.parent.glob(f".{target.name}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
