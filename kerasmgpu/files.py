"""Files are rank 0's business, whole or not at all, and without a trace of kerasmgpu.

A wrapped model's `save`, `save_weights` and `export` write on rank 0 only, with no
collective, first under a temporary name in the same folder.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from kerasmgpu.collectives import topology
from kerasmgpu.optimizer import plain_class
from kerasmgpu.state import optimizers_of


@contextlib.contextmanager
def plain_classes(model: Any) -> Iterator[None]:
    """While it lasts, the model and its optimizers have their own classes again."""
    wrapped = [model]
    for optimizer in optimizers_of(model):
        inner = getattr(optimizer, "inner_optimizer", None)
        wrapped.extend(o for o in (optimizer, inner) if o is not None)
    wrapped = [obj for obj in wrapped if "_kerasmgpu" in obj.__dict__]
    classes = [type(obj) for obj in wrapped]
    for obj in wrapped:
        obj.__class__ = plain_class(obj)
    try:
        yield
    finally:
        for obj, cls in zip(wrapped, classes, strict=True):
            obj.__class__ = cls


def write_on_rank_zero(
    model: Any, write: Any, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Calls Keras's `save`, `save_weights` or `export` of a wrapped model.

    Rank 0 writes and the others return at once; no collective.

    Args:
        model: the wrapped model.
        write: the bound method of the model's own class.
        filepath: where to; a local path is replaced in one go.
        *args, **kwargs: passed on.
    """
    if "_kerasmgpu" in model.__dict__ and not topology().is_rank_zero:
        return
    with plain_classes(model):
        overwrite = kwargs.get("overwrite", args[0] if args else True)
        local = isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)
        if not local or (not overwrite and os.path.exists(filepath)):
            write(filepath, *args, **kwargs)  # Keras asks before it overwrites
            return
        with replaced(filepath) as temporary:
            write(temporary, *args, **kwargs)


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


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
