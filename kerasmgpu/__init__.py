"""Plain Keras 3 code on many processes and machines, with Horovod underneath.

```python
import kerasmgpu

strategy = kerasmgpu.HorovodStrategy()
model = strategy.wrap(model)  # fit / evaluate / predict now span all ranks
```

Importing this package is cheap: names are loaded when first used, and neither
TensorFlow nor Horovod is imported before that.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import kerasmgpu.callbacks as callbacks
    import kerasmgpu.errors as errors
    import kerasmgpu.layers as layers
    from kerasmgpu.launch.function import run
    from kerasmgpu.strategy import HorovodStrategy

__version__ = "0.1.0"

__all__ = ["HorovodStrategy", "callbacks", "errors", "layers", "run", "__version__"]

# Public name -> (module, attribute); no attribute: the module itself.
_LAZY_NAMES: dict[str, tuple[str, str | None]] = {
    "HorovodStrategy": ("kerasmgpu.strategy", "HorovodStrategy"),
    "callbacks": ("kerasmgpu.callbacks", None),
    "errors": ("kerasmgpu.errors", None),
    "layers": ("kerasmgpu.layers", None),
    "run": ("kerasmgpu.launch.function", "run"),
}


def __getattr__(name: str) -> object:
    try:
        module_name, attribute = _LAZY_NAMES[name]
    except KeyError:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; "
            f"its public names are {', '.join(sorted(_LAZY_NAMES))}"
        ) from None
    if name == "HorovodStrategy":
        _check_backend()
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def _check_backend() -> None:
    """Refuses another backend before Keras is imported, and fails to find it."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        from kerasmgpu.errors import InvalidArgumentError

        raise InvalidArgumentError(
            "kerasmgpu needs Keras's TensorFlow backend. Received: "
            f"KERAS_BACKEND={backend!r}. Unset it, or set KERAS_BACKEND=tensorflow "
            "before Keras is imported."
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
