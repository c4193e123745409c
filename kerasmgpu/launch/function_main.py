"""A rank of `kerasmgpu.run`: calls the function it was sent, and leaves the result."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Calls the function; an exception is left as the result, and raised."""
    from kerasmgpu import report

    report.install_failure_hooks()
    payload = pickle.loads(Path(os.environ["KERASMGPU_FUNCTION"]).read_bytes())
    # Modules that the caller found are found here too, after this rank's own.
    sys.path.extend(path for path in payload["path"] if path not in sys.path)
    try:
        fn, args, kwargs = pickle.loads(payload["call"])
        value = fn(*args, **kwargs)
        result = {"value": _dumps(value)}
    except Exception as error:
        _leave(_describe(error))
        raise
    _leave(result)


def _dumps(value: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


def _describe(error: Exception) -> dict[str, Any]:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        # Some exceptions can be written but not read back: try both.
        data: bytes | None = _dumps(error)
        pickle.loads(data or b"")
    except Exception:
        data = None
    return {"error": data, "text": text, "traceback": traceback.format_exc()}


def _leave(result: dict[str, Any]) -> None:
    path = Path(os.environ["KERASMGPU_RESULT"])
    unfinished = path.with_suffix(".part")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
