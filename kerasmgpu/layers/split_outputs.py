"""Where outputs that stay split (`gather_output=False`) may go.

Each rank of a group has other features of such an output. A layer that mixes features,
or has weights of its own, would compute something else on every rank.
"""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.collectives import groups
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.keras_compat import tree
from kerasmgpu.layers.sharded import ELEMENTWISE

_LAYERS = keras.layers
_ELEMENTWISE_LAYERS = (
    *(_LAYERS.ReLU, _LAYERS.LeakyReLU, _LAYERS.ELU, _LAYERS.Dropout, _LAYERS.Identity),
    *(_LAYERS.Rescaling, _LAYERS.Add, _LAYERS.Subtract, _LAYERS.Multiply),
    *(_LAYERS.Average, _LAYERS.Maximum, _LAYERS.Minimum),
)


def split_outputs(model: Any) -> list[Any]:
    """The layers that make those of a model's outputs that stay split.

    Follows the graph of a functional or Sequential model. Of others nothing is known.

    Raises:
        InvalidArgumentError: a split output goes into a layer that needs the whole, or
            the reverse.
    """
    outputs = _tensors(getattr(model, "outputs", None))
    known: dict[int, bool] = {}
    todo = list(outputs)
    while todo:  # not by recursion: graphs are deep
        tensor = todo[-1]
        inputs = _made_of(tensor)
        missing = [t for t in inputs if id(t) not in known]
        if not missing:
            known[id(tensor)] = _stays_split(
                _maker(tensor), [known[id(t)] for t in inputs]
            )
            todo.pop()
        todo.extend(missing)
    return [_maker(tensor) for tensor in outputs if known[id(tensor)]]


def _stays_split(layer: Any, inputs: list[bool]) -> bool:
    """Whether the output of a layer is split, by whether its inputs are."""
    wants_split = getattr(layer, "input_is_split", False)
    if wants_split and all(inputs):
        return False
    if wants_split or (any(inputs) and not (all(inputs) and _is_elementwise(layer))):
        place = groups()
        received = "a split" if any(inputs) else "a whole"
        raise InvalidArgumentError(
            f"Rank {place.rank} of {place.size}: expected an output that stays split "
            "(gather_output=False) to go only through layers that work element by "
            "element (Activation, ReLU, Dropout, Add, ...) and into a ShardedDense("
            'shard="input", input_is_split=True), or to end the model. Received: '
            f"{received} input of {layer.name!r} ({type(layer).__name__}). Make the "
            "layer before it with gather_output=True, or change this one."
        )
    if any(inputs):
        return True
    if isinstance(layer, keras.Model) and getattr(layer, "outputs", None):
        return bool(split_outputs(layer))
    return not getattr(layer, "output_is_whole", True)


def _is_elementwise(layer: Any) -> bool:
    if type(layer) is _LAYERS.Activation:
        return getattr(layer.activation, "__name__", None) in ELEMENTWISE
    return type(layer) in _ELEMENTWISE_LAYERS


def _maker(tensor: Any) -> Any:
    return tensor._keras_history.operation


def _made_of(tensor: Any) -> list[Any]:
    history = tensor._keras_history
    if history.operation is None or not history.operation._inbound_nodes:
        return []
    return _tensors(history.operation._inbound_nodes[history.node_index].input_tensors)


def _tensors(nest: Any) -> list[Any]:
    return [t for t in tree.flatten(nest) if hasattr(t, "_keras_history")]
