"""`kerasmgpu.run`: a function on several ranks, from a notebook or a script."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kerasmgpu
from kerasmgpu.errors import InvalidArgumentError, InvalidTypeError, LaunchError
from kerasmgpu.launch import spec as specs


class RemoteTraceback(Exception):
    """The cause of an exception raised on a rank: where it was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int = 2,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on every rank of a new job, and waits for it.

    For notebooks, and for scripts that want ranks for a part of their work. The
    function is sent with `cloudpickle`, so it may be defined in a notebook cell or in
    a script without a main guard. What the ranks print appears here, marked by rank.
    The ranks are new processes: TensorFlow may already be imported here, but what is
    on a GPU here stays there.

    Args:
        fn: The function. Import what it needs inside it, and make the
            `kerasmgpu.HorovodStrategy` inside it too.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks. Default: 2.
        hosts: Hosts with their slots, such as `"a:2,b:2"`. Default: this machine.
        env: Variables to set on every rank.

    Returns:
        The list of what `fn` returned, by rank.

    Raises:
        Exception: what the first rank to fail raised; its cause names the rank, the
            host and the traceback there.
        LaunchError: The job could not be started, or a rank ended without an
            exception (it was killed, or called `sys.exit`).

    Example:

    ```python
    def train(learning_rate):
        import keras, kerasmgpu
        strategy = kerasmgpu.HorovodStrategy()
        ...
        return history.history

    histories = kerasmgpu.run(train, args=(0.1,), num_proc=4)
    ```
    """
    import cloudpickle

    from kerasmgpu.launch.output import Output
    from kerasmgpu.launch.plan import make_plan
    from kerasmgpu.launch.preflight import check_hosts
    from kerasmgpu.launch.runner import Runner

    _check_arguments(fn, num_proc, hosts, env)
    listed = () if hosts is None else specs.parse_hosts(hosts)
    spec = specs.JobSpec(
        command=(sys.executable, "-m", "kerasmgpu.launch.function_main"),
        num_ranks=specs.choose_num_ranks(num_proc, listed, os.environ),
        hosts=listed,
        env=dict(env or {}),
    )
    call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    payload = pickle.dumps({"path": sys.path, "call": call})
    plan = make_plan(spec, _environ())
    output = Output()
    try:
        if not spec.is_local:
            check_hosts(spec)
        outcome = Runner(spec, plan, output, payload).run()
    finally:
        output.close()
    if outcome.stop_signal is not None:
        raise KeyboardInterrupt
    results = [_result(rank.result) for rank in outcome.ranks]
    if outcome.first is not None:
        _raise_first(outcome, results[outcome.first.rank])
    if outcome.exit_code:
        raise LaunchError(outcome.message or "The job failed.")
    return [pickle.loads(result["value"]) for result in results if result is not None]


def _check_arguments(fn: Any, num_proc: Any, hosts: Any, env: Any) -> None:
    if not callable(fn):
        raise InvalidTypeError(
            f"Expected a function as `fn`. Received: {fn!r}, a {type(fn).__name__}."
        )
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise InvalidArgumentError(
            f"Expected a whole number of at least 1 as `num_proc`. "
            f"Received: {num_proc!r}."
        )
    if hosts is not None and not isinstance(hosts, str):
        raise InvalidTypeError(
            'Expected a string like "a:2,b:2" as `hosts`. '
            f"Received: {hosts!r} of type {type(hosts).__name__}."
        )
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidTypeError(
                f"Expected strings in `env`. Received: {name!r}: {value!r}."
            )


def _environ() -> dict[str, str]:
    """This process's environment, in which the ranks find this very package."""
    environ = dict(os.environ)
    root = str(Path(kerasmgpu.__file__).parent.parent)
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths and "site-packages" not in root:
        environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return environ


def _result(data: bytes | None) -> dict[str, Any] | None:
    return None if data is None else pickle.loads(data)


def _raise_first(outcome: Any, result: dict[str, Any] | None) -> None:
    first = outcome.first
    where = f"rank {first.rank} of {len(outcome.ranks)} on host {first.host}"
    if result is None or "error" not in result:
        raise LaunchError(outcome.message)
    cause = RemoteTraceback(f"on {where}:\n\n{result['traceback']}")
    if result["error"] is None:
        raise LaunchError(
            f"{where} raised an exception that cannot be sent: {result['text']}"
        ) from cause
    raise pickle.loads(result["error"]) from cause
