"""What the launcher prints: whole lines, each marked with its rank."""

from __future__ import annotations

import errno
import sys
import threading
import time
from pathlib import Path
from typing import IO, TextIO

from kerasmgpu.errors import InvalidArgumentError

_COLOURS = (36, 33, 32, 35, 34, 91, 92, 93, 94, 95, 96)


class Output:
    """Prints the ranks' lines, and keeps a file a rank where asked.

    Args:
        output_dir: folder for `rank.0.out`, `rank.0.err`, …; None for no files.
        stdout: where the ranks' standard output goes.
        stderr: where their errors and the launcher's own words go.
    """

    def __init__(
        self,
        output_dir: str | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._streams = {
            "stdout": sys.stdout if stdout is None else stdout,
            "stderr": sys.stderr if stderr is None else stderr,
        }
        self._on_terminal = {
            name: _is_terminal(stream) for name, stream in self._streams.items()
        }
        self._files: dict[str, IO[str]] = {}
        self._folder = Path(output_dir) if output_dir is not None else None
        self._drawn_at = 0.0
        self._drawn = False
        self._lock = threading.Lock()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgumentError(
                    f"Expected a folder that can be written. "
                    f"Received: --output-dir {output_dir} ({error})."
                ) from None

    def lines(self, rank: int, stream: str, lines: list[str]) -> None:
        """Prints whole lines of one rank."""
        if self._folder is not None:
            self._keep(rank, stream, lines)
        mark = f"[{rank}] "
        if self._on_terminal[stream]:
            colour = _COLOURS[rank % len(_COLOURS)]
            mark = f"\x1b[{colour}m[{rank}]\x1b[0m "
        self._print(stream, "".join(f"{mark}{line}\n" for line in lines))

    def partial(self, rank: int, text: str) -> None:
        """Redraws a progress bar in place; only on a terminal."""
        now = time.monotonic()
        if not self._on_terminal["stdout"] or not text or now - self._drawn_at < 0.1:
            return
        self._drawn_at = now
        self._print("stdout", f"\r[{rank}] {text}\x1b[K", whole=False)

    def say(self, text: str) -> None:
        """Prints the launcher's own words."""
        self._print("stderr", text if text.endswith("\n") else text + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _print(self, stream: str, text: str, whole: bool = True) -> None:
        with self._lock:
            if self._drawn and whole:
                text = "\r\x1b[K" + text
            self._drawn = not whole
            out = self._streams[stream]
            try:
                try:
                    out.write(text)
                except UnicodeEncodeError:
                    encoding = getattr(out, "encoding", None) or "utf-8"
                    out.write(text.encode(encoding, "replace").decode(encoding))
                out.flush()
            except OSError as error:
                # A closed terminal: SIGHUP tells so too, and ranks may save.
                if error.errno != errno.EIO:
                    raise

    def _keep(self, rank: int, stream: str, lines: list[str]) -> None:
        name = f"rank.{rank}.{'out' if stream == 'stdout' else 'err'}"
        if name not in self._files and self._folder is not None:
            self._files[name] = open(  # noqa: SIM115
                self._folder / name, "w", encoding="utf-8", errors="surrogateescape"
            )
        self._files[name].writelines(line + "\n" for line in lines)
        self._files[name].flush()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
