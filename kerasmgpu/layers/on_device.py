"""`OnDevice(layer, index)`: a layer, or a part of a model, on one of a rank's devices.

The layer stays what it is: only its `build` and `call` run where they are told to, so a
saved file has the plain layer. TensorFlow's tape forgets where the forward pass ran; in
a wrapped model's step the backward pass is sent after it, by the name scope that
TensorFlow gives each gradient operation.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.devices import device_name, several_devices
from kerasmgpu.errors import InvalidArgumentError, InvalidTypeError
from kerasmgpu.keras_compat import move_variable

#: What the name of a gradient operation has before the scope of the forward pass.
_BACKWARD = "gradient_tape/"

#: In a step: name scope of a placed call → its device.
_placed_scopes: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "kerasmgpu_placed_scopes", default=None
)
_placing: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "kerasmgpu_placing", default=True
)


def OnDevice(layer: Any, index: int) -> Any:
    """Puts a layer or a whole sub-model on this rank's device `index`.

    For models with branches: branches on different devices run at the same time. Its
    weights, optimizer slots, forward and backward pass are on the device. Ranks hold
    the same, so training stays data parallel between them, and results are those of one
    process without `OnDevice`. What is saved is the plain layer.

    Call it where the model is built up, after
    `HorovodStrategy(devices_per_rank=...)` and before the model is trained. A layer
    within the sub-model may be on another device. XLA is not used for such a model.
    With `run_eagerly=True`, and in a model that is not wrapped, TensorFlow chooses
    where the backward pass runs. On GPUs this has not run: its logic alone is tested.

    Args:
        layer: a `keras.Layer` or `keras.Model`, built or not.
        index: of the rank's devices, 0 to `devices_per_rank` - 1.

    Returns:
        The same layer.

    Raises:
        InvalidArgumentError: no such device, or the layer is on another already.
        InvalidTypeError: it is no Keras layer.

    Example:

    ```python
    strategy = kerasmgpu.HorovodStrategy(devices_per_rank=2)
    inputs = keras.Input((28, 28, 1))
    fine = kerasmgpu.layers.OnDevice(branch(kernel_size=3), 0)(inputs)
    coarse = kerasmgpu.layers.OnDevice(branch(kernel_size=7), 1)(inputs)
    ```
    """
    if not isinstance(layer, keras.Layer):
        raise InvalidTypeError(
            "Expected a keras.Layer or keras.Model. Received: "
            f"{type(layer).__module__}.{type(layer).__qualname__}."
        )
    device = device_name(index)
    held = vars(layer).get("_kerasmgpu_device", device)
    if held != device:
        raise InvalidArgumentError(
            f"Expected the layer {layer.name!r} to be put on one device. Received: "
            f"{device}, and it is on {held}. Put a layer on each of them."
        )
    if device is None or "_kerasmgpu_device" in vars(layer):
        return layer
    object.__setattr__(layer, "_kerasmgpu_device", device)
    for name in ("build", "call"):
        object.__setattr__(layer, name, _placed(layer, getattr(layer, name)))
    layer.supports_jit = False  # one compiled program is on one device
    for variable in layer.variables:
        inner = _device_of_part(layer, variable)
        move_variable(variable, inner or device)
    return layer


def _device_of_part(layer: Any, variable: Any) -> str | None:
    """Where a layer inside of `layer`, which owns the variable, has been put."""
    for part in layer._flatten_layers(include_self=False):
        device = vars(part).get("_kerasmgpu_device")
        if device is not None and any(v is variable for v in part.variables):
            return str(device)
    return None


def is_placing(method: Any) -> bool:
    """Whether a method is one that `OnDevice` has put on a layer."""
    return hasattr(method, "_kerasmgpu_places")


def _placed(layer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with on_device_of(layer):
            return method(*args, **kwargs)

    placed._kerasmgpu_places = True  # type: ignore[attr-defined]
    return placed


@contextlib.contextmanager
def on_device_of(layer: Any) -> Iterator[None]:
    """While it lasts, operations and new variables are on the layer's device."""
    device = vars(layer).get("_kerasmgpu_device")
    if device is None or not _placing.get():
        yield
        return
    scopes = _placed_scopes.get()
    if scopes is not None and not tf.executing_eagerly():
        scopes[tf.get_current_name_scope()] = device
    with tf.device(device):
        yield


@contextlib.contextmanager
def not_placed() -> Iterator[None]:
    """While it lasts, layers run wherever TensorFlow likes, for what is exported."""
    token = _placing.set(False)
    try:
        yield
    finally:
        _placing.reset(token)


@contextlib.contextmanager
def backward_beside_forward() -> Iterator[None]:
    """While it lasts, gradient operations in a graph go where their forward pass is."""
    if not several_devices() or tf.executing_eagerly():
        yield
        return
    scopes: dict[str, str] = {}

    def choose(operation: Any) -> str:
        return operation.device or _device_of_gradient(operation.name, scopes) or ""

    token = _placed_scopes.set(scopes)
    try:
        with tf.compat.v1.device(choose):
            yield
    finally:
        _placed_scopes.reset(token)


def _device_of_gradient(name: str, scopes: dict[str, str]) -> str | None:
    """The device of the innermost placed scope that a gradient operation belongs to."""
    _, found, path = name.partition(_BACKWARD)
    while found and path:
        path = path.rpartition("/")[0]
        if path in scopes:
            return scopes[path]
    return None
