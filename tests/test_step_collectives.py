"""What a training step sends: each collective by name, and no other."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ranks import traced_nodes

import kerasmgpu
from kerasmgpu.buckets import BUCKET_BYTES

GRADIENTS = {"kerasmgpu.gradients.0.0_to_3"}  # of the two dense layers below
CONTROL = {"kerasmgpu.control.train"}


def trained(
    sharding="batch", normalize=False, units=5, options=None, **compile_options
):
    """A small model, after two steps."""
    layers = [keras.Input((6,)), keras.layers.Dense(units)]
    layers += [keras.layers.BatchNormalization(scale=False, center=False)] * normalize
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, **compile_options.pop("sgd", {}))
    model.compile(optimizer=optimizer, loss="mse", **compile_options)
    model = kerasmgpu.HorovodStrategy(sharding=sharding, **(options or {})).wrap(model)
    model.fit(np.ones((8, 6)), np.ones(8), batch_size=4, epochs=1, verbose=0)
    return model


def collectives_of_a_step(*args, **options):
    """Names of the Horovod operations in a traced step."""
    model = trained(*args, **options)
    names = [
        node.name for node in traced_nodes(model)[0] if node.op.startswith("Horovod")
    ]
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sharding", ["batch", "none"])
def test_one_control_vector_and_one_message_for_small_gradients(sharding):
    assert collectives_of_a_step(sharding) == CONTROL | GRADIENTS


@pytest.mark.world_size(2)
def test_a_message_for_each_large_gradient():
    units = BUCKET_BYTES // 4 // 6 + 1  # the first kernel only is too large
    expected = {f"kerasmgpu.gradients.0.{name}" for name in ("0", "1_to_3")}
    assert collectives_of_a_step(units=units) == CONTROL | expected


@pytest.mark.world_size(2)
def test_compressed_gradients_travel_together_too():
    assert collectives_of_a_step(options={"gradient_compression": "fp16"}) == (
        CONTROL | GRADIENTS
    )
    assert collectives_of_a_step(options={"gradient_compression": "bf16"}) == (
        CONTROL
        | {f"kerasmgpu.gradients.0.0_to_3.{part}" for part in ("pieces", "sums")}
    )


@pytest.mark.world_size(2)
def test_adasum_looks_at_each_gradient():
    assert collectives_of_a_step(options={"gradient_reduction": "adasum"}) == (
        CONTROL | {f"kerasmgpu.gradients.0.{i}" for i in range(4)}
    )


@pytest.mark.world_size(2)
def test_clipping_and_metrics_send_nothing_more():
    found = collectives_of_a_step(
        metrics=["mae"], weighted_metrics=["mse"], sgd={"global_clipnorm": 1.0}
    )
    assert found == CONTROL | GRADIENTS


@pytest.mark.world_size(2)
def test_all_moving_statistics_are_one_message():
    found = collectives_of_a_step(normalize=True)
    assert found == CONTROL | GRADIENTS | {"kerasmgpu.moving_statistics"}


@pytest.mark.world_size(2)
def test_accumulated_gradients_are_sent_once_an_update():
    found = collectives_of_a_step(sgd={"gradient_accumulation_steps": 2})
    in_every_step = {name for name in found if "/cond" not in name}
    assert in_every_step == CONTROL
    assert {name.rpartition("/")[2] for name in found - CONTROL} == GRADIENTS


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sharding", ["batch", "none"])
def test_gradients_need_not_wait_for_their_weight(sharding):
    """It is made before the forward pass, where it does not come from other ranks."""
    _, functions = traced_nodes(trained(sharding))
    (step,) = (
        {node.name: node for node in function.node_def}
        for function in functions.values()
        if any(node.op == "HorovodAllreduce" for node in function.node_def)
    )
    products = [name for name, node in step.items() if node.op == "MatMul"]
    forward = [name for name in products if not name.startswith("gradient_tape")]
    assert len(forward) == 2, products
    before, pending = set(), forward[:1]
    while pending:
        name = pending.pop()
        if name in step and name not in before:
            before.add(name)
            pending += [part.lstrip("^").split(":")[0] for part in step[name].input]
    operations = {step[name].op for name in before}
    assert ("DivNoNan" in operations) is (sharding == "batch")
    assert "HorovodAllreduce" not in operations
