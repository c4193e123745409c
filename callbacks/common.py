"""What several callbacks need: the wrapped model's session, and checks of arguments."""

from __future__ import annotations

from typing import Any

from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidArgumentError


def where() -> str:
    """The beginning of an error message: on which rank, where there are several."""
    place = topology()
    return f"Rank {place.rank} of {place.size}: " if place.size > 1 else ""


def session_of(model: Any) -> Any:
    """The `Session` of a wrapped model, or None."""
    return model.__dict__.get("_kerasmgpu")


def required_session(model: Any, name: str) -> Any:
    """The `Session` of a wrapped model.

    Raises:
        InvalidArgumentError: the model is not wrapped.
    """
    session = session_of(model)
    if session is None:
        raise InvalidArgumentError(
            f"{where()}{name} needs a wrapped model. Received: the model "
            f"{model.name!r} as plain Keras has it. Call `strategy.wrap(model)` before "
            "fit."
        )
    return session


def check_frequency(name: str, value: Any) -> None:
    """Refuses what is neither "epoch" nor a positive number of batches."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not number:
        raise InvalidArgumentError(
            f'Expected {name} to be "epoch" or a number of batches of at least 1. '
            f"Received: {name}={value!r}."
        )


def check_monitor(callback: Any, model: Any, session: Any) -> None:
    """Refuses a monitor that no log will have, where that is known before training.

    A custom `train_step`, or a callback of the user's, may add logs of its own: then
    the check has to wait for the first epoch's logs.
    """
    known = session is not None and session.log_names()
    if not known or callback.monitor in known:
        return
    raise unknown_monitor(callback, known)


def unknown_monitor(callback: Any, known: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{where()}{type(callback).__name__} cannot find monitor={callback.monitor!r}. "
        f"Expected one of {', '.join(sorted(known))}. A name that begins with val_ "
        "needs validation_data or validation_split in fit."
    )
