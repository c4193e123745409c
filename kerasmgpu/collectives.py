"""What operations exist between ranks: the only module that imports Horovod.

Every operation has the same shape: the input is untouched, the result is returned, and
at size 1 it is the input. Each **must be called on every rank**, in the same order.
Operations on tensors work eagerly and inside `tf.function`. What users call, for nests
of values of any type and with gradients, is in `tensors.py`.

Horovod matches the ranks' calls by name. Names here are made from the kind of call and
its position (in the nest, or in the graph that is being traced), never from counters
that could run apart on two ranks. Eager calls run in a small cached `tf.function`,
because TensorFlow drops the name of an eager operation. The scope around a name does
not count: Keras numbers layers by what a process has built, and TensorFlow branches.
Where two calls of one function could overlap, its operations are made one after the
other, so that no two of a name are under way.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from kerasmgpu import report, transport
from kerasmgpu.errors import (
    CollectiveError,
    HorovodNotFoundError,
    InvalidArgumentError,
    LaunchError,
    RankMismatchError,
)
from kerasmgpu.groups import Groups
from kerasmgpu.horovod_environment import check_built_for_current_tensorflow
from kerasmgpu.topology import (
    Topology,
    check_size,
    launched_rank,
    launched_size,
    slurm_step_size,
)

#: Words in the error of a collective whose peer has gone (Horovod's own, and Gloo's).
_PEER_LOST = (
    "Horovod has been shut down",
    "Connection reset by peer",
    "Connection closed by peer",
)

_topology: Topology | None = None
_groups = Groups()
#: "group" or "position" -> Horovod's process set, where it is not all ranks.
_process_sets: dict[str, Any] = {}
_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "kerasmgpu_alone", default=False
)
#: Functions of which no two calls run at once, and how often each name occurs in one.
_step_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
_positions: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)


# Joining ------------------------------------------------------------------------------


def join(stall_timeout_seconds: float = 60.0, model_parallel_size: int = 1) -> Topology:
    """Joins the job that a launcher started; a job of one process without a launcher.

    The first call starts Horovod where more than one process was launched; later calls
    return what the first found. Must be called on every rank. TensorFlow is not
    started: its devices can be chosen before `start_roll_call`.

    Args:
        stall_timeout_seconds: how long a rank waits for others before Horovod says so.
        model_parallel_size: ranks in a group. It holds for the process: Horovod is
            told of the groups when it starts.

    Returns:
        This process's `Topology`.

    Raises:
        InvalidArgumentError: groups of this size are not possible, or an earlier call
            made others.
        HorovodNotFoundError: several processes were launched and Horovod cannot be
            imported.
        LaunchError: the launcher's size is not the size that Horovod found.
    """
    global _topology
    if _topology is not None:
        _check_groups(model_parallel_size)
        return _topology
    promised = launched_size()
    expected = promised[0] if promised is not None else slurm_step_size() or 1
    if expected == 1:
        _set_groups(Groups(model_parallel_size))
        _topology = Topology()
        return _topology
    hvd = _horovod()
    # By the build, not by this rank's devices: ranks must not fuse differently.
    on_cpus = not hvd.nccl_built()
    _choose_transport_defaults(expected, on_cpus, stall_timeout_seconds)
    threads = transport.threads_of_process()
    asked = Groups(model_parallel_size, launched_rank(), expected)
    sets = _make_process_sets(asked)
    hvd.init(process_sets=[made for made, _ in sets])
    if on_cpus:
        started = transport.threads_of_process() - threads
        transport.let_computation_go_first(started)
    check_size(hvd.size())
    if hvd.size() == 1:  # a Slurm script that runs python without srun
        print(
            f"kerasmgpu: Slurm offers {expected} tasks, but this job has one rank. "
            "Start it with `srun` or `kerasmgpu run` to use them all.",
            flush=True,
        )
    _topology = Topology(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        node_rank=hvd.cross_rank(),
        num_nodes=hvd.cross_size(),
    )
    _set_groups(Groups(model_parallel_size, hvd.rank(), hvd.size()))
    _process_sets.update({kind: s for s, kind in sets if hvd.rank() in s.ranks})
    if _topology.size > 1:
        report.install_failure_hooks()
    return _topology


def start_roll_call(stall_timeout_seconds: float) -> None:
    """After `join`: lets a rank that waits too long say on whom, and in what.

    The first call counts. Must be called on every rank.
    """
    if topology().size > 1:
        report.start(topology(), stall_timeout_seconds, all_gather_object)


def mark_used(what: str) -> None:
    """Notes that this rank takes part in the job in earnest, by way of `what`."""
    if topology().size > 1:
        report.used(what)


def topology() -> Topology:
    """This process's place in the job; a job of one before `join`."""
    if _alone.get():
        return Topology()
    return _topology or Topology()


def groups() -> Groups:
    """This process's place among the groups; groups of one where there are none."""
    return Groups() if _alone.get() else _groups


def _set_groups(made: Groups) -> None:
    global _groups
    _groups = made


def _check_groups(model_parallel_size: int) -> None:
    asked = dataclasses.replace(_groups, model_parallel_size=model_parallel_size)
    if asked != _groups:
        raise InvalidArgumentError(
            f"Rank {_groups.rank} of {_groups.size}: expected one model_parallel_size "
            "in a process, given to its first HorovodStrategy: "
            f"{_groups.model_parallel_size}. Received: model_parallel_size="
            f"{model_parallel_size}."
        )


def _make_process_sets(asked: Groups) -> list[tuple[Any, str]]:
    """Of every group and every position, the same on all ranks; not of all ranks."""
    if asked.model_parallel_size == 1:
        return []
    listed = [(ranks, "group") for ranks in asked.all_groups()]
    listed += [(ranks, "position") for ranks in asked.all_positions()]
    return [
        (_horovod().ProcessSet(ranks), kind)
        for ranks, kind in listed
        if 1 < len(ranks) < asked.size
    ]


def _ranks_among(among: str) -> int:
    """How many ranks a collective has: among "all", a "group" or a "position"."""
    if among == "all":
        return topology().size
    made = groups()
    return made.model_parallel_size if among == "group" else made.replicas


def _set_of(among: str) -> dict[str, Any]:
    return {"process_set": _process_sets[among]} if among in _process_sets else {}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While it lasts, this rank is a job of one: no collective reaches another."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@functools.cache
def _horovod() -> Any:
    # First: with a TensorFlow of another version, importing it may crash the process.
    check_built_for_current_tensorflow()
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # a broken build raises many kinds
        raise HorovodNotFoundError(
            f"Rank {launched_rank()} belongs to a job of several processes, which "
            f"needs Horovod, and Horovod cannot be imported ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}). Build it "
            "for the installed TensorFlow with `kerasmgpu install-horovod`; "
            "`kerasmgpu doctor` shows what is wrong."
        ) from error
    if not (hvd.mpi_built() or hvd.gloo_built()):
        raise LaunchError(
            "Horovod was built with neither MPI nor Gloo. Rebuild it with "
            "`kerasmgpu install-horovod --no-cache`."
        )
    return hvd


def _choose_transport_defaults(
    size: int, on_cpus: bool, stall_timeout_seconds: float
) -> None:
    """Makes the settings of `transport.py` that neither user nor launcher has made."""
    stall = str(max(1, int(stall_timeout_seconds)))
    wanted = {"HOROVOD_STALL_CHECK_TIME_SECONDS": stall, **transport.OPEN_MPI}
    if on_cpus:
        wanted |= transport.HOROVOD_WITHOUT_NCCL
    if transport.is_on_one_host(size, os.environ):
        wanted |= transport.HOROVOD_ON_ONE_HOST
    os.environ.update(transport.missing(wanted, os.environ))


@contextlib.contextmanager
def waiting_for_ranks(what: str) -> Iterator[None]:
    """Marks a block in which this rank waits for others.

    While it lasts, a wait longer than the stall time-out is reported as being in
    `what`; an error that means that another rank has left is raised as a
    `CollectiveError`.
    """
    report.waiting(what)
    try:
        yield
    except tf.errors.OpError as error:
        if any(words in str(error) for words in _PEER_LOST):
            raise CollectiveError(
                f"Rank {topology().rank} of {topology().size} could not finish {what}: "
                "another rank has left the job. Its own message, printed before or "
                "after this one, says why. "
                f"(Horovod said: {str(error).strip().splitlines()[-1]})"
            ) from error
        if "Mismatched" in str(error):
            raise RankMismatchError(
                f"Rank {topology().rank} of {topology().size} met others with another "
                f"shape or type in {what}. Horovod said: {error}"
            ) from error
        raise
    finally:
        report.working()


# Names --------------------------------------------------------------------------------


def begin_step_graph() -> None:
    """Notes that what is being traced is a step: no two of them run at once."""
    _step_graphs.add(tf.compat.v1.get_default_graph())


def _function_graph() -> tuple[Any, bool]:
    """The function being traced, around branches, and whether two calls may overlap.

    They may where it is traced within another, which may call it in two places; a
    loop's body is such a function, too.
    """
    graph = tf.compat.v1.get_default_graph()
    while any(cls.__name__ == "CondBranchFuncGraph" for cls in type(graph).__mro__):
        graph = graph.outer_graph
    within = hasattr(getattr(graph, "outer_graph", None), "outer_graph")
    return graph, within and graph not in _step_graphs


def _call_in_graph(
    operation: Callable[..., tf.Tensor],
    tensor: tf.Tensor,
    name: str | None,
    kind: str,
    **options: Any,
) -> tf.Tensor:
    """Adds a Horovod operation to the function being traced, named by its position.

    Calls of one name, or of one kind without names, are numbered in each function.
    """
    graph, may_overlap = _function_graph()
    counter = _positions.setdefault(graph, collections.Counter())
    counter[name or kind] += 1
    number = counter[name or kind]
    if name is None:
        name = f"kerasmgpu.{kind}.{number}"
    elif number > 1:
        name = f"{name}-{number}"
    if may_overlap:
        return _in_turn(
            functools.partial(operation, name=f"in.{name}", **options), tensor
        )
    return operation(tensor, name, **options)


@functools.cache
def _turns() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, name="kerasmgpu_turns")


def _in_turn(operation: Callable[..., tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Does what others of the same name may do, too, in the order of the program.

    TensorFlow keeps that order for what changes a variable.
    """
    with tf.control_dependencies([_turns().assign_add(1)]):
        result = operation(tf.identity(tensor))
    with (
        tf.control_dependencies([result]),
        tf.control_dependencies([_turns().assign_add(1)]),
    ):
        return tf.identity(result)


@functools.cache
def _eager_function(
    operation: Callable[..., tf.Tensor], dtype: tf.DType, name: str, **options: Any
) -> Any:
    # A partial, because TensorFlow takes closures of one code for retracings of one
    # function, and warns.
    return tf.function(
        functools.partial(operation, name=name, **options),
        input_signature=[tf.TensorSpec(None, dtype)],
        autograph=False,
    )


def _call(
    operation: Callable[..., tf.Tensor],
    tensor: tf.Tensor,
    name: str | None,
    kind: str,
    why: str | None = None,
    **options: Any,
) -> tf.Tensor:
    """Runs a named Horovod operation, in the graph being traced or at once.

    `why` tells, where this rank has to wait long, what it waits in.
    """
    if not tf.executing_eagerly():
        return _call_in_graph(operation, tensor, name, kind, **options)
    name = name or f"kerasmgpu.{kind}"
    function = _eager_function(operation, tensor.dtype, name, **options)
    with waiting_for_ranks(why or f"the collective {name}"):
        return function(tensor)


# Plain operations on one tensor, used by the core -------------------------------------


def _horovod_reduce(
    tensor: tf.Tensor,
    name: str,
    *,
    op: str,
    among: str = "all",
) -> tf.Tensor:
    hvd = _horovod()
    operation = {
        "sum": hvd.Sum,
        "mean": hvd.Average,
        "min": hvd.Min,
        "max": hvd.Max,
        "adasum": hvd.Adasum,
    }[op]
    result = hvd.allreduce(
        tensor,
        op=operation,
        name=name,
        ignore_name_scope=True,
        **_set_of(among),
    )
    result.set_shape(tensor.shape)
    return result


def _horovod_gather(tensor: tf.Tensor, name: str, *, among: str = "all") -> tf.Tensor:
    result = _horovod().allgather(
        tensor, name=name, ignore_name_scope=True, **_set_of(among)
    )
    if tensor.shape.rank is not None:
        result.set_shape([None, *tensor.shape[1:]])
    return result


def _horovod_broadcast(
    tensor: tf.Tensor, name: str, *, root_rank: int, among: str = "all"
) -> tf.Tensor:
    result = _horovod().broadcast(
        tensor,
        root_rank=root_rank,
        name=name,
        ignore_name_scope=True,
        **_set_of(among),
    )
    result.set_shape(tensor.shape)
    return result


@tf.autograph.experimental.do_not_convert
def reduce_tensor(
    tensor: tf.Tensor,
    op: str,
    name: str | None = None,
    among: str = "all",
) -> tf.Tensor:
    """All-reduce of one tensor of a type that Horovod takes, without a gradient.

    Among "all" ranks, this rank's "group", or the ranks of its "position".
    """
    if _ranks_among(among) == 1:
        return tensor
    kind = f"all_reduce.{op}" if among == "all" else f"all_reduce.{op}.{among}"
    return _call(_horovod_reduce, tensor, name, kind, op=op, among=among)


@tf.autograph.experimental.do_not_convert
def gather_tensor(
    tensor: tf.Tensor,
    name: str | None = None,
    why: str | None = None,
    among: str = "all",
) -> tf.Tensor:
    """All-gather of one tensor along its first dimension, without a gradient.

    Among "all" ranks, this rank's "group", or the ranks of its "position".
    """
    if _ranks_among(among) == 1:
        return tensor
    kind = "all_gather" if among == "all" else f"all_gather.{among}"
    return _call(_horovod_gather, tensor, name, kind, why, among=among)


@tf.autograph.experimental.do_not_convert
def broadcast_tensor(
    tensor: tf.Tensor, root_rank: int = 0, name: str | None = None, among: str = "all"
) -> tf.Tensor:
    """Broadcast of one tensor, without a gradient.

    Among "all" ranks, this rank's "group", or the ranks of its "position"; `root_rank`
    counts from the job's first rank in any case.
    """
    if _ranks_among(among) == 1:
        return tensor
    kind = "broadcast" if among == "all" else f"broadcast.{among}"
    return _call(
        _horovod_broadcast, tensor, name, kind, root_rank=root_rank, among=among
    )


def rank_in_graph() -> tf.Tensor:
    """This process's rank as an int32 scalar that TensorFlow does not see through."""
    return _horovod().rank_op() if topology().size > 1 else tf.constant(0)


def _horovod_exchange(tensor: tf.Tensor, name: str) -> tf.Tensor:
    return _horovod().alltoall(tensor, name=name, ignore_name_scope=True)


def exchange_pieces(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Sends piece `r` of a vector to rank `r`; returns what came, in rank order."""
    return _call(_horovod_exchange, tensor, name, "all_to_all")


def _horovod_sum_at_root(tensor: tf.Tensor, name: str) -> tf.Tensor:
    hvd, size = _horovod(), topology().size
    flat = tf.reshape(tensor, [-1])
    length = tf.size(flat)
    to_root = tf.stack([length] + [0] * (size - 1))
    send = functools.partial(hvd.alltoall, ignore_name_scope=True)
    received, _ = send(flat, splits=to_root, name=f"{name}.to_root")
    if topology().rank == 0:
        total = tf.reduce_sum(tf.reshape(received, [size, -1]), axis=0)
        answer, splits = tf.tile(total, [size]), tf.fill([size], length)
    else:
        answer, splits = received, tf.zeros([size], tf.int32)
    result, _ = send(answer, splits=splits, name=f"{name}.from_root")
    return tf.reshape(result, tf.shape(tensor))


def sum_at_root(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """A sum that all ranks send to rank 0, which sends the result to each of them.

    What a parameter server does; for comparison only. All bytes pass rank 0's link.
    """
    if topology().size == 1:
        return tensor
    result = _call(_horovod_sum_at_root, tensor, name, "sum_at_root")
    result.set_shape(tensor.shape)
    return result


# Objects ------------------------------------------------------------------------------


def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """One rank's object, on every rank; anything that can be pickled.

    Must be called on every rank, eagerly. At size 1 the object itself. Other ranks'
    `obj` is not looked at.

    Raises:
        InvalidArgumentError: there is no rank `root_rank`.
        CollectiveError: another rank has left.
    """
    check_root(root_rank)
    if topology().size == 1:
        return obj
    mine = topology().rank == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj) if mine else b"", np.uint8)
    length = broadcast_tensor(
        tf.constant([len(data)], tf.int64), root_rank, "kerasmgpu.object.length"
    )
    if not mine:
        data = np.zeros(int(length[0]), np.uint8)
    received = broadcast_tensor(tf.constant(data), root_rank, "kerasmgpu.object.bytes")
    return obj if mine else pickle.loads(received.numpy().tobytes())


def all_gather_object(obj: Any, why: str | None = None) -> list[Any]:
    """Every rank's object, in rank order. Must be called on every rank, eagerly.

    Args:
        obj: anything that can be pickled.
        why: what to say this rank waits in, where others do not come.
    """
    if topology().size == 1:
        return [obj]
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = gather_tensor(
        tf.constant([len(data)], tf.int64), "kerasmgpu.objects.lengths", why
    ).numpy()
    joined = gather_tensor(tf.constant(data), "kerasmgpu.objects.bytes").numpy()
    ends = np.cumsum(lengths)
    return [
        pickle.loads(joined[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def barrier() -> None:
    """Returns when every rank has called it. At size 1 at once."""
    if topology().size > 1:
        report.used("barrier")
        reduce_tensor(tf.zeros([1], tf.int32), "sum", "kerasmgpu.barrier")


def check_root(root_rank: int) -> None:
    if not 0 <= root_rank < topology().size:
        raise InvalidArgumentError(
            f"Expected root_rank to be a rank of this job of {topology().size} "
            f"(0 to {topology().size - 1}). Received: root_rank={root_rank}."
        )
