"""Gradients of embeddings: rows or tables, by which are fewer bytes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from ranks import check, cross_entropy, traced_nodes

from kerasmgpu import slices

pytestmark = pytest.mark.world_size(2)

K = keras.optimizers
LENGTH, DIM = 5, 4
#: Of 17 rows in batches of 8 the last has one, so that one rank has none. A full batch
#: looks up 40 rows: more than twice the small table's, not of the large one's.
ROWS, BATCH, SMALL, LARGE = 17, 8, 10, 30

OPTIMIZERS = {
    "sgd": lambda: K.SGD(0.1),
    "momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: K.Lion(0.01),
    "loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1, momentum=0.9)),
    # To these two slices of a row are not their sum.
    "adam": lambda: K.Adam(0.01, epsilon=1e-4),
    "clipped": lambda: K.SGD(0.1, clipnorm=0.05),
}
SUMS_DO = ("sgd", "momentum", "lion", "loss_scale")


def same_as_one_process(vocabulary: int, optimizer: str, **compile_options):
    generator = np.random.default_rng(2)
    x = generator.integers(0, vocabulary, size=(ROWS, LENGTH))
    y = generator.integers(0, 4, ROWS)

    def build():
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(vocabulary, DIM),
                layers.Flatten(),
                layers.Dense(4),
            ]
        )
        model.compile(OPTIMIZERS[optimizer](), cross_entropy(), **compile_options)
        return model

    return check(build, x, y, batch_size=BATCH, shuffle=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_choices_in_one_graph_give_the_numbers_of_one_process(optimizer):
    model = same_as_one_process(SMALL, optimizer)
    nodes = traced_nodes(model)[0]
    table = "kerasmgpu.gradients.0.0.table"
    found = [node for node in nodes if node.name.endswith(table)]
    assert len(found) == (optimizer in SUMS_DO)
    for node in found:  # a name that is the same on all ranks
        assert node.attr["ignore_name_scope"].b


@pytest.mark.parametrize(
    ("optimizer", "vocabulary"),
    [("sgd", SMALL), ("sgd", LARGE), ("momentum", SMALL), ("adam", SMALL)],
)
def test_what_is_sent_is_the_smaller(optimizer, vocabulary, monkeypatch):
    sent: list[tuple[str, int]] = []

    def noted(function):
        def call(tensor, *arguments, **options):
            name = next(a for a in arguments if str(a).startswith("kerasmgpu."))
            sent.append((name.rpartition(".")[2], len(tensor)))
            return function(tensor, *arguments, **options)

        return call

    for name in ("gather_tensor", "reduce_tensor"):
        monkeypatch.setattr(slices, name, noted(getattr(slices, name)))
    same_as_one_process(vocabulary, optimizer, run_eagerly=True)
    rows = BATCH // 2 * LENGTH
    of_a_full_batch = sent[:2]
    if vocabulary == SMALL and optimizer in SUMS_DO:
        assert of_a_full_batch == [("indices", rows), ("table", SMALL)]
    else:
        assert of_a_full_batch == [("indices", rows), ("values", rows)]
    # The last batch's one row, of the rank that has it; the other sends nothing.
    assert [name for name, _ in sent[-2:]] == ["indices", "values"]
    assert {number for _, number in sent[-2:]} in ({LENGTH}, {0})
