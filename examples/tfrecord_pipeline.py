"""Trains from TFRecord files, each rank reading and decoding its own files only.

    python examples/tfrecord_pipeline.py
    kerasmgpu run -np 2 -- python examples/tfrecord_pipeline.py

`strategy.shard(files)` gives a rank its files, and `sharding="none"` says that each
rank brings batches of its own. The files are made first: from CIFAR-10, where
`--data-dir` has `cifar10_jpeg.npz` (for `train` and `test`: `_jpeg`, all JPEG files
joined; `_offsets`, image i is bytes offsets[i] to offsets[i+1]; `_labels`), else from
small images that are drawn.

`SpeedupLogger` tells whether the ranks are kept fed. To see it say that they are not:

    kerasmgpu run -np 2 -- python examples/tfrecord_pipeline.py --slow-input-ms 100
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from data_source import add_data_arguments

import kerasmgpu

NUM_DRAWN = {"train": 2048, "test": 512}
Images = Iterator[tuple[bytes, int]]


# Making the files ---------------------------------------------------------------------


def cifar_images(path: Path, split: str, limit: int | None) -> Images:
    with np.load(path) as archive:
        joined = archive[f"{split}_jpeg"].tobytes()
        offsets = archive[f"{split}_offsets"]
        labels = archive[f"{split}_labels"][:limit]
    for i, label in enumerate(labels):
        yield joined[offsets[i] : offsets[i + 1]], int(label)


def drawn_images(split: str, limit: int | None) -> Images:
    """Stripes of ten directions, in noise."""
    rng = np.random.default_rng(len(split))
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    for _ in range(min(limit or NUM_DRAWN[split], NUM_DRAWN[split])):
        label = int(rng.integers(10))
        angle = np.pi * label / 10
        place = np.cos(angle) * across + np.sin(angle) * down + rng.uniform(0, 8)
        stripes = 128 + 80 * np.sin(place * 2 * np.pi / 8)
        image = stripes[..., np.newaxis] + rng.normal(0, 30, (32, 32, 3))
        jpeg = tf.io.encode_jpeg(np.clip(image, 0, 255).astype("uint8"))
        yield jpeg.numpy(), label


def write_records(folder: Path, images: Images, num_files: int) -> None:
    """Writes all files, or none: the folder gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(tf.io.TFRecordWriter(str(unfinished / f"{i:03}.tfr")))
            for i in range(num_files)
        ]
        for number, (jpeg, label) in enumerate(images):
            features = {
                "jpeg": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writers[number % num_files].write(example.SerializeToString())
    try:
        os.rename(unfinished, folder)
    except OSError:  # another rank of this host was faster
        shutil.rmtree(unfinished)


# Reading them -------------------------------------------------------------------------


class Pipeline:
    """Batches from some files.

    Args:
        files: to read.
        batch_size: rows of a batch, of this rank alone.
        num_threads: for reading and decoding.
        shuffle: whether in another order in each epoch.
        wait_seconds: to wait for each batch, as for a slow disk.

    Attributes:
        num_decoded: images decoded so far.
    """

    def __init__(
        self,
        files: list[str],
        batch_size: int,
        num_threads: int,
        shuffle: bool = False,
        wait_seconds: float = 0.0,
    ) -> None:
        with tf.device("CPU:0"):
            self.num_decoded = tf.Variable(0, dtype=tf.int64, trainable=False)
        names = tf.data.Dataset.from_tensor_slices(files)
        records = (names.shuffle(len(files)) if shuffle else names).interleave(
            tf.data.TFRecordDataset,
            cycle_length=min(4, len(files)),
            block_length=16,
            num_parallel_calls=num_threads,
        )
        if shuffle:  # before decoding: JPEG bytes are small
            records = records.shuffle(2048)
        batches = records.map(self._decode, num_parallel_calls=num_threads)
        batches = batches.batch(batch_size)
        if wait_seconds:
            batches = batches.map(lambda *batch: waited_for(batch, wait_seconds))
        # The next batches are made while the model trains on one.
        self.dataset = batches.prefetch(4)

    def _decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {
            "jpeg": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }
        example = tf.io.parse_single_example(record, features)
        image = tf.io.decode_jpeg(example["jpeg"], channels=3)
        image = tf.ensure_shape(image, [32, 32, 3])
        self.num_decoded.assign_add(1)
        return tf.cast(image, tf.float32) / 255, example["label"]


def waited_for(batch: tuple[tf.Tensor, ...], seconds: float) -> tuple[tf.Tensor, ...]:
    wait = tf.numpy_function(lambda: time.sleep(seconds), [], [])
    with tf.control_dependencies([wait]):
        return tuple(tf.identity(part) for part in batch)


def threads_of_rank(local_size: int) -> int:
    """This rank's share of the host's cores; a CPU rank already keeps to its own."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // local_size if cores == os.cpu_count() else cores)


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks")
    parser.add_argument("--num-files", type=int, default=16, help="of training images")
    parser.add_argument(
        "--slow-input-ms",
        type=float,
        default=0.0,
        help="wait as long for each training batch of a rank",
    )
    parser.add_argument(
        "--records-dir",
        type=Path,
        default=Path(tempfile.gettempdir(), f"kerasmgpu-records-{os.getuid()}"),
        help="where to make the files",
    )
    add_data_arguments(parser)
    args = parser.parse_args()

    strategy = kerasmgpu.HorovodStrategy(sharding="none")
    keras.utils.set_random_seed(0)
    archive = Path(args.data_dir or "", "cifar10_jpeg.npz")
    real = args.data_dir is not None and archive.is_file()

    files = {}
    for split in ("train", "test"):
        name = f"{'cifar10' if real else 'drawn'}-{split}-{args.limit or 'all'}"
        folder = args.records_dir / f"{name}-in-{args.num_files}"
        with strategy.rank_zero_first():  # the others find the files there
            if not folder.is_dir():
                images = (
                    cifar_images(archive, split, args.limit)
                    if real
                    else drawn_images(split, args.limit)
                )
                write_records(folder, images, args.num_files)
        files[split] = sorted(str(file) for file in folder.iterdir())
    if strategy.is_rank_zero:
        print(f"data: {archive if real else 'drawn images'}: {args.records_dir}")

    # This rank's rows of the global batch: ranks may have different numbers.
    before, after = (
        args.batch_size * rank // strategy.size
        for rank in (strategy.rank, strategy.rank + 1)
    )
    rows, num_threads = after - before, threads_of_rank(strategy.local_size)
    wait_seconds = args.slow_input_ms / 1e3
    train_files, test_files = (strategy.shard(files[s]) for s in ("train", "test"))
    train = Pipeline(train_files, rows, num_threads, True, wait_seconds)
    test = Pipeline(test_files, rows, num_threads)

    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = strategy.wrap(model)
    history = model.fit(
        train.dataset,
        epochs=args.epochs,
        validation_data=test.dataset,
        callbacks=[kerasmgpu.callbacks.SpeedupLogger()],
        verbose=2,
    )

    decoded = strategy.all_gather(train.num_decoded[tf.newaxis] // args.epochs)
    if strategy.is_rank_zero:
        counts = decoded.numpy().tolist()
        print(f"test accuracy {history.history['val_accuracy'][-1]:.2%}")
        print(f"images decoded an epoch, by rank: {counts}, together {sum(counts)}")


if __name__ == "__main__":
    main()
