"""N ranks = one process: sources of data, and rows that run out."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import (
    assert_ranks_agree,
    assert_same,
    check,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
)

from kerasmgpu.collectives import all_gather_object, topology

pytestmark = pytest.mark.world_size(3)


def build():
    model = dense_net()
    model.compile(keras.optimizers.SGD(0.05), cross_entropy(), metrics=["accuracy"])
    return model


@pytest.mark.parametrize(("rows", "batch_size"), [(24, 2), (25, 8), (26, 8), (33, 2)])
def test_array_rows(rows, batch_size):
    """Last batches of every size; also batches with fewer rows than ranks."""
    x, y = classification(rows)
    validation = (x[:10], y[:10])
    check(build, x, y, batch_size=batch_size, validation_data=validation)


def test_default_batch_size_and_validation_split():
    x, y = classification(90)
    check(build, x, y, validation_split=0.3, epochs=3, validation_freq=2)


def test_without_a_seed_every_epoch_has_its_own_order(monkeypatch):
    """As in one process; the ranks agree on it, and no row is lost."""
    from kerasmgpu import data, state

    monkeypatch.setattr(state, "_seed_of_ours", state.global_seed())
    rows = np.arange(20)
    adapter = data.ShardedAdapter(rows, batch_size=6, shuffle=True)
    epochs = []
    for _ in range(3):
        own = [e[data.DATA][: int(e[data.META][0])] for e in adapter.get_tf_dataset()]
        own = np.concatenate([np.reshape(part, -1) for part in own])
        epochs.append(np.concatenate(all_gather_object(own)).tolist())
    assert all(sorted(epoch) == rows.tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_steps_per_epoch_of_arrays():
    x, y = classification(40)
    check(build, x, y, batch_size=8, steps_per_epoch=2, epochs=3)


def test_tensors_and_shuffle_by_batch():
    x, y = classification(40)
    check(build, tf.constant(x), tf.constant(y), batch_size=8, shuffle="batch")


def batches(rows=29, batch_size=8):
    x, y = classification(rows)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def test_dataset():
    check(build, batches, validation_data=batches(13))


def test_dataset_with_a_seeded_shuffle():
    x, y = classification(29)

    def dataset():
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return rows.shuffle(29, seed=4).batch(8).prefetch(2)

    check(build, dataset)


def test_dataset_with_an_unseeded_shuffle():
    """Made after the strategy, the shuffle has rank 0's seed on every rank."""
    x, y = classification(29)

    def dataset():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(29).batch(8)

    check(build, dataset)


def test_dataset_of_unknown_length():
    check(build, lambda: batches().filter(lambda *_: True))


@pytest.mark.parametrize("name", ["adam", "decay", "loss_scale", "accumulation"])
def test_what_keras_does_at_an_end_it_did_not_know(name):
    """Without a known length, Keras counts a step, and decays, once more an epoch."""
    K = keras.optimizers
    make = {
        "adam": lambda: K.Adam(0.01, epsilon=1e-4),
        "decay": lambda: K.SGD(0.1, weight_decay=0.1),
        "loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1, weight_decay=0.1)),
        "accumulation": lambda: K.SGD(
            0.1, weight_decay=0.1, gradient_accumulation_steps=3
        ),
    }[name]

    def compiled():
        model = dense_net()
        model.compile(make(), cross_entropy())
        return model

    check(compiled, lambda: batches().filter(lambda *_: True), epochs=3)


def test_endless_dataset():
    check(build, lambda: batches().repeat(), steps_per_epoch=5)


def test_dataset_with_class_weight_and_sample_weight():
    check(build, batches, class_weight={0: 1.0, 1: 2.0, 2: 3.0, 3: 0.1})
    x, y = classification(29)
    weights = np.linspace(0, 1, 29).astype("float32")
    check(
        build,
        lambda: tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(8),
    )


class Sequence(keras.utils.PyDataset):
    def __init__(self, rows=29, **options):
        super().__init__(**options)
        self.x, self.y = classification(rows)
        self.ended = 0

    def __len__(self):
        return (len(self.x) + 7) // 8

    def __getitem__(self, index):
        part = slice(index * 8, (index + 1) * 8)
        return self.x[part], self.y[part]

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize("workers", [1, 2])
def test_py_dataset(workers):
    check(build, lambda: Sequence(workers=workers), validation_data=Sequence(13))


def test_py_dataset_hooks_are_called():
    plain, ranked = Sequence(), Sequence()
    build().fit(plain, epochs=2, verbose=0)
    strategy().wrap(build()).fit(ranked, epochs=2, verbose=0)
    assert ranked.ended == plain.ended > 0


def endless(rows=40):
    x, y = classification(rows)
    while True:
        for start in range(0, rows, 8):
            yield x[start : start + 8], y[start : start + 8]


def test_generator():
    check(build, endless, steps_per_epoch=4, epochs=3)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_generator_that_ends():
    x, y = classification(29)

    def generator():
        for start in range(0, 29, 8):
            yield x[start : start + 8], y[start : start + 8]

    check(build, generator, epochs=1)


def test_generator_with_a_batch_smaller_than_the_ranks():
    x, y = classification(17)

    def generator():
        for part in (slice(0, 8), slice(8, 9), slice(9, 17)):
            yield x[part], y[part]

    check(build, generator, epochs=1)


def ragged_model():
    words = keras.Input((), dtype="string")
    vectorize = keras.layers.TextVectorization(
        vocabulary=["a", "b", "c"], output_sequence_length=3
    )
    x = keras.layers.Embedding(5, 4)(vectorize(words))
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(words, keras.layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.05), cross_entropy())
    return model


def test_strings():
    texts = np.array(["a b", "c", "a a b", "b", "c c", "a"] * 4, dtype=object)
    y = np.arange(24) % 4

    def dataset():
        rows = tf.data.Dataset.from_tensor_slices((texts.astype("S"), y))
        return rows.batch(5)

    check(ragged_model, dataset)


# sharding="none": each rank brings its own batches ------------------------------------


def own_batches(counts, filtered=False):
    """Rank r brings batches of counts[r] rows each; returns its dataset."""
    x, y = classification(64)
    starts = [0, 20, 40]
    rank = topology().rank

    def generate():
        at = starts[rank]
        for rows in counts[rank]:
            yield x[at : at + rows], y[at : at + rows]
            at += rows

    signature = (
        tf.TensorSpec([None, 8], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    if not filtered:
        length = len(counts[rank])
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    return dataset


def joined_batches(counts):
    """What one process sees: step by step the rows of all ranks."""
    x, y = classification(64)
    at = [0, 20, 40]
    steps = max(len(c) for c in counts)
    xs, ys = [], []
    for step in range(steps):
        parts = []
        for rank, own in enumerate(counts):
            rows = own[step] if step < len(own) else 0
            parts.append(np.arange(at[rank], at[rank] + rows))
            at[rank] += rows
        index = np.concatenate(parts)
        xs.append(x[index])
        ys.append(y[index])
    return zip(xs, ys, strict=True)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        [[4, 4, 4], [4, 4, 4], [4, 4, 4]],
        [[8, 4, 1], [2, 3, 5], [1, 1, 1]],  # a slow CPU rank beside faster ones
        [[4, 4, 4], [4], [2, 2]],  # data that ends early
        [[4, 4], [], [3]],  # a rank without data
    ],
)
def test_own_batches(counts, filtered):
    keras.utils.set_random_seed(1)
    one = build()
    one_history = one.fit(
        ((x, y) for x, y in joined_batches(counts)), verbose=0, epochs=1
    )
    keras.utils.set_random_seed(1)
    ranked = strategy(sharding="none").wrap(build())
    history = ranked.fit(own_batches(counts, filtered), verbose=0, epochs=1)
    # Not the optimizer: of a generator's end, Keras counts one step too many.
    assert_same(one, one_history, ranked, history, optimizer=False)
    everything = list(joined_batches(counts))
    x = np.concatenate([b[0] for b in everything])
    y = np.concatenate([b[1] for b in everything])
    expected = one.evaluate(x, y, verbose=0, batch_size=100)
    own = own_batches(counts, filtered)
    np.testing.assert_allclose(ranked.evaluate(own, verbose=0), expected, rtol=1e-4)


def test_own_batches_over_epochs():
    counts = [[4, 4, 4], [4], [2, 2]]
    ranked = strategy(sharding="none").wrap(build())
    history = ranked.fit(
        own_batches(counts),
        epochs=3,
        verbose=0,
        validation_data=own_batches([[3], [2, 2, 2], [1]]),
    )
    assert len(history.history["val_loss"]) == 3
    assert int(ranked.optimizer.iterations.numpy()) == 9
    assert_ranks_agree(ranked)


def test_own_arrays_and_predict():
    """Each rank's arrays are its own; predict gives this rank's rows."""
    x, y = classification(60)
    rank = topology().rank
    own = slice(rank * 20, (rank + 1) * 20)
    ranked = strategy(sharding="none").wrap(build())
    ranked.fit(x[own], y[own], batch_size=12, epochs=2, verbose=0)
    assert int(ranked.optimizer.iterations.numpy()) == 2 * 5  # 4 rows a rank
    assert_ranks_agree(ranked)
    plain = keras.models.clone_model(ranked)
    plain.set_weights(ranked.get_weights())
    predicted = ranked.predict(x[own], verbose=0)
    np.testing.assert_allclose(predicted, plain.predict(x[own], verbose=0), rtol=1e-5)


def test_shard_of_a_dataset():
    """shard(dataset) with sharding="none" is what sharding="batch" does."""
    one, one_history, _, _ = one_and_all(build, lambda m: m.fit(batches(), verbose=0))
    keras.utils.set_random_seed(11)
    own = strategy(sharding="none")
    ranked = own.wrap(build())
    history = ranked.fit(own.shard(batches()), verbose=0)
    assert_same(one, one_history, ranked, history)


def test_shard_of_files():
    own = strategy()
    names = [f"part-{i}" for i in range(8)]
    assert own.shard(names) == names[topology().rank :: 3]
    with pytest.raises(ValueError, match="at least as many files as ranks"):
        own.shard(names[:2])
