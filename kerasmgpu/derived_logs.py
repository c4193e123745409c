"""Logs that a step calculates from metrics: a perplexity, an F1 of two results.

During an epoch a metric's result counts this rank's rows only, and a function of it is
no sum over rows: the mean of the ranks' perplexities is not the perplexity of all rows.
So the part of the graph that lies between the results and the number is kept, and is
run again on the results of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class Derived:
    """A number as a function of metrics' results.

    Args:
        graph: the operations between the results and the number.
        inputs: name of a tensor in `graph` → the metric whose result it is.
        output: name of the tensor that is the number.
    """

    def __init__(
        self, graph: tf.compat.v1.GraphDef, inputs: Mapping[str, Any], output: str
    ) -> None:
        self._graph = graph
        self._inputs = dict(inputs)
        self._output = output
        self._eager = tf.function(self._calculate, autograph=False)

    def result(self) -> tf.Tensor:
        """The number for what the metrics hold now."""
        results = [metric.result() for metric in self._inputs.values()]
        calculate = self._eager if tf.executing_eagerly() else self._calculate
        return calculate(*results)

    def _calculate(self, *results: tf.Tensor) -> tf.Tensor:
        return tf.graph_util.import_graph_def(
            self._graph,
            input_map=dict(zip(self._inputs, results, strict=True)),
            return_elements=[self._output],
        )[0]


def derived(
    value: Any, results: Mapping[int, tuple[Any, Any]]
) -> tuple[Derived | None, bool]:
    """How a number of the logs depends on metrics.

    Args:
        value: the number. Only tensors of a graph are looked into.
        results: id of a tensor that `metric.result()` gave → (tensor, metric).

    Returns:
        The function, if the number depends on results alone; and whether it depends on
        results at all.
    """
    if not tf.is_tensor(value) or not hasattr(value, "graph"):
        return None, False
    known = {
        result.name: metric
        for result, metric in results.values()
        if getattr(result, "graph", None) is value.graph
    }
    inputs: dict[str, Any] = {}
    between: dict[str, tf.Operation] = {}
    alone = True
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in known:
            inputs[tensor.name] = known[tensor.name]
        elif tensor.op.name not in between:
            operation = tensor.op
            between[operation.name] = operation
            # What has no inputs and is no constant is data or a variable.
            pure = operation.type == "Const" or len(operation.inputs) > 0
            alone = alone and pure and not _is_call(operation)
            waiting.extend(operation.inputs)
    if not inputs or not alone:
        return None, bool(inputs)
    graph = tf.compat.v1.GraphDef()
    for operation in between.values():
        node = graph.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop("_class", None)  # to lie where an operation not copied lies
        data = [name for name in node.input if not name.startswith("^")]
        node.ClearField("input")
        node.input.extend(data)
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION
    return Derived(graph, inputs, value.name), True


def _is_call(operation: tf.Operation) -> bool:
    return any(attr.HasField("func") for attr in operation.node_def.attr.values())
