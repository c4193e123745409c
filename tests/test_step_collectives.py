"""What a training step sends: each collective by name, and no other."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ranks import traced_nodes

import kerasmgpu

WEIGHTS = 4  # of the two dense layers below
GRADIENTS = {f"kerasmgpu.gradients.0.{i}" for i in range(WEIGHTS)}
CONTROL = {"kerasmgpu.control.train"}


def trained(sharding="batch", normalize=False, **compile_options):
    """A small model, after two steps."""
    layers = [keras.Input((6,)), keras.layers.Dense(5)]
    layers += [keras.layers.BatchNormalization(scale=False, center=False)] * normalize
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, **compile_options.pop("sgd", {}))
    model.compile(optimizer=optimizer, loss="mse", **compile_options)
    model = kerasmgpu.HorovodStrategy(sharding=sharding).wrap(model)
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
def test_one_control_vector_and_one_message_a_gradient(sharding):
    assert collectives_of_a_step(sharding) == CONTROL | GRADIENTS


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
