"""`kerasmgpu bench --emulate-step-seconds`: waits in place of devices that compute.

A machine with few cores cannot show how many devices scale. Here each rank trains a
model whose layers compute nothing: they wait as long as a device would take, forward
and backward, and use no processor meanwhile. Weights, and so gradients, have the real
sizes, and everything else is real: the wrapped model's step, its collectives and the
optimizer's update.

As a program, a rank of the job that is measured:

    python -m kerasmgpu.perf.emulate --model mnist_cnn --step-seconds 0.1 --folder DIR
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.measure import make_clock
from kerasmgpu.perf.model import ring_seconds, server_seconds
from kerasmgpu.perf.scaling import describe_fit
from kerasmgpu.perf.workloads import BATCHES_PER_EPOCH, WORKLOADS

if TYPE_CHECKING:
    from rich.table import Table

EXCHANGES = {"ring": ring_seconds, "server": server_seconds}
#: A wait holds one of TensorFlow's threads; exchanges need others meanwhile.
THREADS = 4
#: Of a step: the forward pass's share; the backward pass takes twice as long.
FORWARD_SHARE = 1 / 3
WARMUP_STEPS = 5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--exchange", choices=sorted(EXCHANGES), default="ring")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS)
    args = parser.parse_args(argv)
    import keras
    import numpy as np
    import tensorflow as tf

    import kerasmgpu

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    strategy = kerasmgpu.HorovodStrategy()
    plain = WORKLOADS[args.model].compiled_model()
    model = emulated_model(layers_of(plain), args.step_seconds)
    model.compile(keras.optimizers.SGD(1e-3), "mean_squared_error")
    model = strategy.wrap(model)
    if args.exchange == "server" and strategy.size > 1:
        exchange_at_root(model.optimizer)
    clock = make_clock(args.warmup_steps, args.seconds)
    x = np.zeros((BATCHES_PER_EPOCH * strategy.size, 1), "float32")
    model.fit(x, x, strategy.size, epochs=1_000_000, callbacks=[clock], verbose=0)
    weights = model.trainable_variables
    result = {
        "median_step_seconds": statistics.median(clock.step_seconds),
        "steps": len(clock.step_seconds),
        "gradient_bytes": sum(4 * math.prod(weight.shape) for weight in weights),
    }
    path = args.folder / f"result.{strategy.rank}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


def layers_of(model: Any) -> list[tuple[list[tuple[int, ...]], float]]:
    """Of each layer with weights: their shapes, and its multiplications for a row."""
    found = []
    for layer in model.layers:
        shapes = [tuple(weight.shape) for weight in layer.trainable_weights]
        if shapes:
            outputs = math.prod(layer.output.shape[1:])
            found.append((shapes, float(outputs * math.prod(shapes[0][:-1]))))
    return found


class Device:
    """What a device does with the layers of a step: one after the other, in a queue.

    The first layer begins when it is asked for, so what a step does before it (the
    update, the exchange that it waits for, the next batch) takes its time. A later one
    begins when the one before it ends, also where this program, which has handed both
    over before, is woken up late: a device's queue does not wait for its host.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def compute(self, seconds: float, starts: bool) -> None:
        """Returns when a layer is done.

        Args:
            seconds: that it takes.
            starts: whether it is the first of a step.
        """
        if starts:
            self._free_at = time.perf_counter()
        self._free_at += seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


def emulated_model(
    layers: Sequence[tuple[Sequence[tuple[int, ...]], float]], step_seconds: float
) -> Any:
    """A model of layers that wait, with these weights; not compiled.

    Args:
        layers: shapes of weights and cost of each layer, of which it takes its share.
        step_seconds: that all waits of a step take together.
    """
    import keras
    import tensorflow as tf

    device = Device()

    def wait(x: Any, seconds: float, starts: bool = False) -> Any:
        def compute(value: Any) -> Any:
            device.compute(seconds, starts)
            return value

        waited = tf.numpy_function(compute, [x], x.dtype)
        waited.set_shape(x.shape)
        return waited

    class Waiting(keras.layers.Layer):
        """Hands its input on, after a while; gradients of 0 for its weights."""

        def __init__(
            self, shapes: Sequence[tuple[int, ...]], seconds: float, starts: bool
        ) -> None:
            super().__init__()
            self.seconds = seconds
            self.shapes = shapes
            self.starts = starts

        def build(self, input_shape: Any) -> None:
            self.own = [self.add_weight(shape=shape) for shape in self.shapes]

        def call(self, x: Any) -> Any:
            if isinstance(x, keras.KerasTensor):
                return x

            @tf.custom_gradient
            def compute(x: Any, *weights: Any) -> Any:
                def backward(dy: Any) -> Any:
                    dx = wait(dy, (1 - FORWARD_SHARE) * self.seconds)
                    zero = 0.0 * tf.reduce_sum(dx)  # there only after the wait
                    return (dx, *(tf.fill(shape, zero) for shape in self.shapes))

                return wait(x, FORWARD_SHARE * self.seconds, self.starts), backward

            return compute(x, *(tf.convert_to_tensor(weight) for weight in self.own))

    total = sum(cost for _, cost in layers)
    parts = [
        Waiting(shapes, step_seconds * cost / total, starts=number == 0)
        for number, (shapes, cost) in enumerate(layers)
    ]
    return keras.Sequential([keras.Input((1,)), *parts])


def exchange_at_root(optimizer: Any) -> None:
    """Makes a wrapped optimizer send its gradients through rank 0, to compare."""
    from kerasmgpu.collectives import sum_at_root
    from kerasmgpu.optimizer import Reducer

    class ServerReducer(Reducer):
        def reduce(
            self, gradients: Sequence[Any], parts: Sequence[bool], weighed: bool
        ) -> list[Any]:
            if not weighed:
                gradients = self.weigh(gradients, parts)
            return [
                sum_at_root(gradient, f"{self.name}.{position}")
                for position, gradient in enumerate(gradients)
            ]

    given = optimizer._kerasmgpu
    optimizer._kerasmgpu = ServerReducer(given.reduction, None, given.name)


def check(model: str, step_seconds: float) -> None:
    """Raises before anything is started where this cannot be emulated."""
    if not 0 < step_seconds < 60:
        raise InvalidArgumentError(
            "Expected --emulate-step-seconds above 0 and below 60. Received: "
            f"{step_seconds:g}."
        )
    if model == "embedding":
        raise InvalidArgumentError(
            "Expected a --model whose gradients are dense, to emulate devices. "
            "Received: --model embedding."
        )


def measure_rounds(
    run: Callable[[int, str], list[dict[str, Any]]],
    sizes: Sequence[int],
    exchanges: Sequence[str],
    rounds: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One process, and jobs of every size and exchange, in an order that alternates.

    Args:
        run: measures a job of so many ranks with this exchange.
        sizes: numbers of ranks.
        exchanges: of "ring" and "server".
        rounds: of all.
        progress: is told what is measured.
    """
    plan = [(1, "ring")]
    plan += [(n, exchange) for n in sizes if n > 1 for exchange in exchanges]
    taken = []
    for number in range(rounds):
        found = {}
        for size, exchange in plan[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {rounds}: {size} emulated, {exchange}")
            found[f"{size}: {exchange}"] = run(size, exchange)
        taken.append(found)
    return taken


def summarize(
    rounds: Sequence[Mapping[str, Any]], bandwidth: float | None
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Exchange → processes → name of a figure → its value in each round.

    A job's step is its slowest rank's. "speedup" is in rows a second against one
    process; "model" is that of computing, then exchanging, by the cost model, and
    "bound" that of hiding either behind the other.
    """
    results: dict[str, dict[str, dict[str, list[float]]]] = {}

    def steps(key: str) -> list[float]:
        return [max(r["median_step_seconds"] for r in taken[key]) for taken in rounds]

    alone = steps("1: ring")
    num_bytes = rounds[0]["1: ring"][0]["gradient_bytes"]
    for key in rounds[0]:
        size, exchange = int(key.partition(":")[0]), key.partition(": ")[2]
        if size == 1:
            continue
        own = steps(key)
        figures = {
            "step_seconds": own,
            "speedup": [size * a / b for a, b in zip(alone, own, strict=True)],
        }
        if bandwidth is not None:
            cost = EXCHANGES[exchange](num_bytes, size, bandwidth)
            figures["model"] = [size * a / (a + cost) for a in alone]
            figures["bound"] = [size * a / max(a, cost) for a in alone]
        results.setdefault(exchange, {})[str(size)] = figures
    for by_size in results.values():
        by_size["1"] = {"step_seconds": alone, "speedup": [1.0] * len(alone)}
    return results


def fits_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Exchange → `describe_fit` of its median steps."""
    return {
        exchange: describe_fit(
            {
                int(size): statistics.median(figures["step_seconds"])
                for size, figures in by_size.items()
            },
            "weak",
        )
        for exchange, by_size in results.items()
    }


def cost_lines(
    alone: float, num_bytes: int, bandwidth: float, largest: int
) -> dict[str, dict[int, float]]:
    """Lines of a plot: what the cost model says of both exchanges, up to N processes.

    Args:
        alone: seconds of a step of one process.
        num_bytes: of its gradients.
        bandwidth: of each process's link, bytes/s.
        largest: N.

    Returns:
        Label → processes → speed-up.
    """
    lines: dict[str, dict[int, float]] = {}
    for exchange, cost in EXCHANGES.items():
        seconds = {n: cost(num_bytes, n, bandwidth) for n in range(1, largest + 1)}
        lines[f"cost model, {exchange}: after computing"] = {
            n: n * alone / (alone + spent) for n, spent in seconds.items()
        }
        lines[f"cost model, {exchange}: behind computing"] = {
            n: n * alone / max(alone, spent) for n, spent in seconds.items()
        }
    return lines


def make_table(title: str, results: Mapping[str, Any]) -> Table:
    """The table of `summarize`'s figures: medians, with the lowest and highest."""
    from rich.table import Table

    table = Table(title=title)
    for heading in ("exchange", "processes", "step ms", "speed-up", "cost model"):
        table.add_column(heading, justify="right")
    for exchange, by_size in results.items():
        for size in sorted(by_size, key=int):
            figures = by_size[size]
            gains = figures["speedup"]
            table.add_row(
                exchange,
                size,
                f"{1e3 * statistics.median(figures['step_seconds']):.1f}",
                f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})",
                f"{statistics.median(figures['model']):.2f}-"
                f"{statistics.median(figures['bound']):.2f}"
                if "model" in figures
                else "",
            )
    return table


if __name__ == "__main__":
    main()
