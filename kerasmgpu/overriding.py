"""Methods of single objects replaced for a while: how a step reaches into Keras's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def overridden(
    objects: Iterable[Any], name: str, make: Callable[[Any], Any]
) -> Iterator[None]:
    """While it lasts, each object's method `name` is what `make(object)` returned.

    Set on the object, beside its class's, and past Keras's own `__setattr__`. `make`
    sees the object as it was.
    """
    objects = list(objects)
    for one in objects:
        object.__setattr__(one, name, make(one))
    try:
        yield
    finally:
        for one in objects:
            object.__delattr__(one, name)
