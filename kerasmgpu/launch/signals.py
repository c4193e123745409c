"""Signals to the launcher, noted for its loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Iterator

#: For ranks to end by themselves after a signal to the launcher. A preempted job
#: saves its state after SIGTERM, so that takes longer.
GRACE_SECONDS = {signal.SIGINT: 4.0, signal.SIGHUP: 4.0, signal.SIGTERM: 25.0}


@contextlib.contextmanager
def noted_signals(selector: selectors.BaseSelector) -> Iterator[list[int]]:
    """A list to which signals are added as they come; they also wake the selector.

    Only the main thread may have signal handlers: elsewhere the list stays empty.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    selector.register(read, selectors.EVENT_READ, read)
    old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    old = {}
    for number in GRACE_SECONDS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # `nohup` asks for that.
        old[number] = signal.signal(number, lambda received, _: noted.append(received))
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup)
        selector.unregister(read)
        os.close(read)
        os.close(write)
