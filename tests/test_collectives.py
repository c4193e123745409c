"""The collectives, on 3 ranks: values, types, nests, gradients, errors."""

from __future__ import annotations

import ctypes
import resource

import numpy as np
import pytest
import tensorflow as tf
from ranks import strategy

from kerasmgpu import collectives, tensors
from kerasmgpu.collectives import topology

pytestmark = pytest.mark.world_size(3)

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.fixture(autouse=True)
def everyone():
    return strategy()


def of_rank(dtype, rank=None):
    rank = topology().rank if rank is None else rank
    return tf.cast(tf.constant([[1, 2], [3, 4]]) * (rank + 1), dtype)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", FLOATS + WHOLE)
def test_sum_of_every_type(dtype, graph):
    def total(x):
        return tensors.all_reduce(x, op="sum")

    result = (tf.function(total) if graph else total)(of_rank(dtype))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, tf.cast([[6, 12], [18, 24]], dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_keeps_the_type(dtype):
    result = tensors.all_reduce(of_rank(dtype))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, tf.cast([[2, 4], [6, 8]], dtype))


@pytest.mark.parametrize("dtype", ["float32", "int32", "int16", "uint8"])
def test_min_and_max(dtype):
    np.testing.assert_array_equal(
        tensors.all_reduce(of_rank(dtype), "min"), [[1, 2], [3, 4]]
    )
    np.testing.assert_array_equal(
        tensors.all_reduce(of_rank(dtype), "max"), [[3, 6], [9, 12]]
    )


def test_bools():
    flag = tf.constant([True, topology().rank == 0])
    assert tensors.all_reduce(flag, "min").numpy().tolist() == [True, False]
    assert tensors.all_reduce(flag, "max").numpy().tolist() == [True, True]
    with pytest.raises(TypeError, match=r"true on all ranks.*op='sum'"):
        tensors.all_reduce(flag, "sum")


def test_numbers_arrays_and_nests():
    rank = topology().rank
    result = tensors.all_reduce(
        {"b": [rank, float(rank)], "a": np.full(2, rank, "float64")}, op="sum"
    )
    assert int(result["b"][0]) == 3
    assert result["b"][0].dtype == tf.int32
    assert float(result["b"][1]) == 3.0
    np.testing.assert_array_equal(result["a"], [3.0, 3.0])
    assert result["a"].dtype == tf.float64


def test_all_gather_of_different_rows():
    rank = topology().rank
    result = tensors.all_gather(tf.fill([rank, 2], float(rank)))
    np.testing.assert_array_equal(result, [[1, 1], [2, 2], [2, 2]])
    assert tensors.all_gather(rank).numpy().tolist() == [0, 1, 2]
    for dtype in FLOATS + WHOLE + ["bool"]:
        gathered = tensors.all_gather(tf.cast([rank], dtype))
        np.testing.assert_array_equal(gathered, tf.cast([0, 1, 2], dtype))


@pytest.mark.parametrize("dtype", FLOATS + WHOLE + ["bool"])
def test_broadcast(dtype):
    for root in range(3):
        result = tensors.broadcast(of_rank(dtype), root_rank=root)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, of_rank(dtype, root))


def test_objects():
    rank = topology().rank
    sent = {"f": lambda x: x + rank, "rank": rank, "empty": None}
    got = collectives.broadcast_object(sent, root_rank=2)
    assert got["f"](1) == 3
    assert got["rank"] == 2
    assert collectives.broadcast_object("only here" if rank == 0 else None) == (
        "only here"
    )
    assert collectives.all_gather_object("x" * rank) == ["", "x", "xx"]
    collectives.barrier()


@pytest.mark.parametrize("graph", [False, True])
def test_gradients(graph):
    """Of the sum over ranks of what each differentiates."""
    rank = topology().rank
    weights = tf.constant([1.0, 10.0, 100.0])
    x = tf.constant([1.0 + rank, 5.0])

    def gradients(function):
        def take():
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_sum(function(x)) * weights[rank]
            return tape.gradient(value, x)

        return (tf.function(take) if graph else take)().numpy().tolist()

    assert gradients(lambda x: tensors.all_reduce(x, "sum")) == [111.0, 111.0]
    np.testing.assert_allclose(gradients(tensors.all_reduce), [37.0, 37.0])
    assert gradients(tensors.all_gather) == [111.0, 111.0]
    expected = [111.0, 111.0] if rank == 1 else [0.0, 0.0]
    assert gradients(lambda x: tensors.broadcast(x, 1)) == expected
    shared = gradients(lambda x: tensors.all_reduce(x, "max"))
    np.testing.assert_allclose(shared, [111.0 if rank == 2 else 0.0, 37.0])


def test_many_in_one_graph_keep_their_places():
    @tf.function
    def several(x):
        a = tensors.all_reduce(x, "sum")
        b = tensors.all_reduce(x * 2.0, "sum")
        return a, b, tensors.all_gather(x[tf.newaxis]), tensors.broadcast(x, 2)

    for _ in range(3):
        a, b, c, d = several(tf.constant(float(topology().rank)))
        assert (float(a), float(b), float(d)) == (3.0, 6.0, 2.0)
        assert c.numpy().tolist() == [0.0, 1.0, 2.0]


def test_functions_and_loops_around_a_collective():
    """Their names are the same from call to call, and values do not get mixed up."""
    rank = float(topology().rank)

    @tf.function
    def total(x):
        return tensors.all_reduce(x, "sum")

    @tf.function
    def several(x):
        here = [total(x * 10.0**i) for i in range(6)]
        _, looped = tf.while_loop(
            lambda i, found: i < 6,
            lambda i, found: (
                i + 1,
                found.write(i, total(x * 10.0 ** tf.cast(i, "float32"))),
            ),
            (0, tf.TensorArray(tf.float32, 6)),
        )
        chosen = [
            tf.cond(
                tf.size(x) > 0, lambda v=v: tensors.all_reduce(v, "sum"), lambda v=v: v
            )
            for v in here
        ]
        return here, looped.stack(), chosen

    expected = 3.0 * 10.0 ** np.arange(6)
    for _ in range(20):
        here, looped, chosen = several(tf.constant(rank))
        np.testing.assert_allclose(here, expected)
        np.testing.assert_allclose(looped, expected)
        np.testing.assert_allclose(chosen, 3.0 * expected)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tensors.all_reduce(1.0, "prod"), ValueError, "op='prod'"),
        (lambda: tensors.all_reduce(1), TypeError, "mean of whole numbers"),
        (lambda: tensors.all_reduce("text", "sum"), TypeError, "broadcast_object"),
        (lambda: tensors.all_gather(["text"]), TypeError, "broadcast_object"),
        (lambda: tensors.broadcast(1.0, 3), ValueError, "0 to 2"),
        (lambda: collectives.broadcast_object(1, -1), ValueError, "root_rank=-1"),
        (
            lambda: tensors.all_reduce(tf.ragged.constant([[1.0], []])),
            TypeError,
            "RaggedTensor",
        ),
        (lambda: tensors.all_reduce(1j, "max"), TypeError, "Complex"),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_debug_mode_compares_the_calls(monkeypatch):
    monkeypatch.setenv("KERASMGPU_DEBUG", "1")
    shape = [2] if topology().rank == 1 else [3]
    with pytest.raises(RuntimeError, match=r"Rank 0 called .*3.*rank 1 called .*2"):
        tensors.all_reduce(tf.zeros(shape))
    tensors.all_gather(tf.zeros(shape))  # rows may differ


def test_rank_zero_first(everyone, tmp_path_factory):
    path = collectives.broadcast_object(str(tmp_path_factory.mktemp("first")))
    with everyone.rank_zero_first(), open(f"{path}/order", "a") as file:
        file.write(str(topology().rank))
    collectives.barrier()
    with open(f"{path}/order") as file:
        assert file.read()[0] == "0"


def test_rank_zero_first_that_fails(everyone):
    def download():
        with everyone.rank_zero_first():
            if everyone.is_rank_zero:
                raise OSError("no disk")

    with pytest.raises((OSError, RuntimeError), match="no disk"):
        download()


def test_ranks_and_seeds(everyone):
    import random

    assert (everyone.rank, everyone.size) == (topology().rank, 3)
    assert everyone.num_replicas_in_sync == everyone.local_size == 3
    assert (everyone.node_rank, everyone.num_nodes) == (0, 1)
    assert everyone.is_rank_zero == (everyone.rank == 0)
    drawn = (random.random(), np.random.rand(), float(tf.random.uniform([])))
    assert collectives.all_gather_object(drawn) == [drawn] * 3


def test_a_large_block_of_memory_is_used_again():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(64 << 20)  # not NumPy, which asks for huge pages
        libc.memset(block, 1, 64 << 20)
        libc.free(block)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 1000
