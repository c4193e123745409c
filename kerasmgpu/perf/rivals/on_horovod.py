"""Rivals on Horovod: tf_keras by `horovod.tensorflow.keras`, and a bare Keras 3.

    python -m kerasmgpu.perf.rivals.on_horovod KIND --model resnet20 --folder DIR ...

KIND is "tf_keras" (Keras 2, with Horovod's own layer for it, its callbacks and its
optimizer) or "bare" (Keras 3 with the shortest code that trains on ranks: gradients are
averaged by `horovod.tensorflow.grouped_allreduce` and Keras does the rest by its own
operations). Each rank trains on rows of its own, as Horovod's examples do. Horovod is
imported by no other module than this and `collectives`, and `horovod.tensorflow.keras`
by none but this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from kerasmgpu.errors import LaunchError
from kerasmgpu.topology import launched_rank

KINDS = ("tf_keras", "bare")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--count", type=int, required=True, help="ranks")
    parser.add_argument("--share", type=int, required=True, help="cores of a rank")
    args = parser.parse_args(argv)
    cores, first = sorted(os.sched_getaffinity(0)), args.share * launched_rank()
    # Before TensorFlow is imported, which makes a thread a core.
    os.sched_setaffinity(0, cores[first : first + args.share])
    keras, hvd = _tf_keras() if args.kind == "tf_keras" else _keras()
    hvd.init()
    if hvd.size() != args.count:
        raise LaunchError(
            f"Expected a job of {args.count} ranks. Received: one of {hvd.size()}."
        )
    result = _measure(args, keras, hvd)
    path = args.folder / f"result.{hvd.rank()}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


def _tf_keras() -> tuple[Any, Any]:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tf_keras

    # The workloads and the clock say `import keras`; Keras 2 has the same names.
    sys.modules["keras"] = tf_keras
    import horovod.tensorflow.keras as hvd

    return tf_keras, hvd


def _keras() -> tuple[Any, Any]:
    import horovod.tensorflow as hvd
    import keras

    return keras, hvd


def _measure(args: argparse.Namespace, keras: Any, hvd: Any) -> dict[str, Any]:
    import tensorflow as tf

    from kerasmgpu.perf.measure import make_clock
    from kerasmgpu.perf.workloads import WORKLOADS

    workload = WORKLOADS[args.model]
    clock = make_clock(args.warmup_steps)

    class Stop(keras.callbacks.Callback):
        """Ends the training on all ranks after the same epoch."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            over = float(sum(clock.step_seconds) >= args.seconds)
            if float(hvd.allreduce(tf.constant(over), name="over")) > 0:
                self.model.stop_training = True

    model = workload.compiled_model()
    callbacks = [clock, Stop()]
    if args.kind == "tf_keras":
        optimizer = hvd.DistributedOptimizer(model.optimizer)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    else:
        optimizer = _averaging(model.optimizer, hvd)
        hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    model.compile(optimizer=optimizer, loss=model.loss, metrics=["accuracy"])
    batch_size = workload.per_rank_batch_size
    keras.utils.set_random_seed(hvd.rank())
    x, y = workload.data(batch_size)
    model.fit(x, y, batch_size, epochs=1_000_000, callbacks=callbacks, verbose=0)
    _check_alike(model, hvd)
    seconds = sum(clock.step_seconds)
    return {
        "steps": len(clock.step_seconds),
        "samples_per_second": len(clock.step_seconds) * batch_size / seconds,
        "median_step_seconds": statistics.median(clock.step_seconds),
        "version": f"{args.kind} {keras.__version__}",
    }


def _averaging(optimizer: Any, hvd: Any) -> Any:
    """A Keras 3 optimizer that averages over ranks what it is given."""
    base = type(optimizer)

    class Averaging(base):  # type: ignore[misc, valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(hvd.grouped_allreduce(list(grads)), trainable_variables)

    made = Averaging.from_config(optimizer.get_config())
    made.__class__.__name__ = base.__name__
    return made


def _check_alike(model: Any, hvd: Any) -> None:
    """Raises where ranks ended with different weights: nothing was averaged then."""
    import tensorflow as tf

    for number, variable in enumerate(model.trainable_variables):
        own = tf.convert_to_tensor(variable)
        mean = hvd.allreduce(own, name=f"check.{number}")
        if not bool(tf.reduce_all(tf.abs(mean - own) < 1e-5)):
            raise LaunchError(
                f"Rank {hvd.rank()} of {hvd.size()}: expected the same weights on all "
                f"ranks after training. Received: others in weight {number}. This "
                "rival does not average gradients with the installed versions."
            )


if __name__ == "__main__":
    main()
