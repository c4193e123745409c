"""The errors this package raises.

Every error is a `KerasMGPUError` and also the built-in that a Keras user would
expect (`ValueError`, `TypeError`, `RuntimeError`, `ImportError`), so that
`except ValueError` keeps working. Messages say what was received, what was expected
and how to mend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KerasMGPUError(Exception):
    """Base class of all errors raised by kerasmgpu."""


class InvalidArgumentError(KerasMGPUError, ValueError):
    """An argument has a value that cannot be used."""


class InvalidTypeError(KerasMGPUError, TypeError):
    """An argument is of a type that cannot be used."""


class RankMismatchError(KerasMGPUError, RuntimeError):
    """The ranks of one job hold different models, data or call orders."""


class OutOfMemoryError(KerasMGPUError, MemoryError):
    """Memory does not suffice for the smallest step there is."""


class CollectiveError(KerasMGPUError, RuntimeError):
    """A collective could not be completed, as a rule because a rank has left."""


class LaunchError(KerasMGPUError, RuntimeError):
    """The job was started in a way that cannot work (sizes differ, wrong MPI)."""


class HorovodNotFoundError(KerasMGPUError, ImportError):
    """Horovod is needed (more than one rank) and cannot be imported."""


class BuildError(KerasMGPUError, RuntimeError):
    """Horovod could not be built, checked or installed."""


def check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuses an argument that is none of the allowed values."""
    if value not in allowed:
        raise InvalidArgumentError(
            f"Expected {name} to be one of {', '.join(map(repr, allowed))}. "
            f"Received: {name}={value!r}."
        )
