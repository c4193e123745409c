"""The models that `kerasmgpu bench` trains, and data of their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

BATCHES_PER_EPOCH = 50


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and what it is fed.

    Attributes:
        per_rank_batch_size: rows a process trains on in a step.
        input_shape: of one row.
        build: returns the model, not compiled; logits of ten classes.
        optimizer: returns its optimizer.
        vocabulary: 0 for inputs that are images; else they are numbers below this.
    """

    per_rank_batch_size: int
    input_shape: tuple[int, ...]
    build: Callable[[tuple[int, ...]], Any]
    optimizer: Callable[[], Any]
    vocabulary: int = 0

    def compiled_model(self) -> Any:
        """The model, ready for `fit`; the same weights in every process."""
        import keras

        keras.utils.set_random_seed(0)
        model = self.build(self.input_shape)
        model.compile(
            optimizer=self.optimizer(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def data(self, batch_size: int) -> tuple[Any, Any]:
        """Random inputs and labels for one epoch of this global batch size."""
        import numpy as np

        generator = np.random.default_rng(0)
        shape = (BATCHES_PER_EPOCH * batch_size, *self.input_shape)
        inputs: Any
        if self.vocabulary:
            inputs = generator.integers(0, self.vocabulary, shape, dtype="int32")
        else:
            inputs = generator.random(shape, dtype="float32")
        return inputs, generator.integers(0, 10, len(inputs))


def _mnist_cnn(input_shape: tuple[int, ...]) -> Any:
    """The net of examples/mnist.py."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def _mlp(input_shape: tuple[int, ...]) -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    )


def _embedding(input_shape: tuple[int, ...]) -> Any:
    """A bag of words: nearly all weights are in a table of which few rows are used."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(input_shape, dtype="int32"),
            layers.Embedding(_VOCABULARY, 64),
            layers.GlobalAveragePooling1D(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def _resnet20(input_shape: tuple[int, ...]) -> Any:
    """He et al. 2015 (arXiv 1512.03385), section 4.2, with n = 3."""
    import keras
    from keras import layers

    def convolve(x: Any, filters: int, strides: int, relu: bool) -> Any:
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        return layers.ReLU()(x) if relu else x

    inputs = keras.Input(input_shape)
    x = convolve(inputs, 16, 1, relu=True)
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            shortcut = x
            if strides == 2:
                shortcut = layers.Conv2D(filters, 1, 2, use_bias=False)(x)
                shortcut = layers.BatchNormalization()(shortcut)
            x = convolve(x, filters, strides, relu=True)
            x = convolve(x, filters, 1, relu=False)
            x = layers.ReLU()(layers.Add()([x, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def _adam() -> Any:
    import keras

    return keras.optimizers.Adam(1e-3)


def _momentum() -> Any:
    import keras

    return keras.optimizers.SGD(0.05, momentum=0.9)


_VOCABULARY = 20_000

WORKLOADS = {
    "embedding": Workload(64, (64,), _embedding, _adam, vocabulary=_VOCABULARY),
    "mnist_cnn": Workload(64, (28, 28, 1), _mnist_cnn, _adam),
    "mlp": Workload(64, (784,), _mlp, _adam),
    "resnet20": Workload(32, (32, 32, 3), _resnet20, _momentum),
}
