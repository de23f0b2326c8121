"""The user's API: strategy, variables, optimizers, coordinator, local cluster.

The names are those of `api`, which is imported when one of them is first asked for: the command line lives in this
package too, and `pscluster health`, which containers run every few seconds, needs no NumPy. Modules among them are
imported by their names only: with `import *` they would take the place of a `metrics` or `errors` of the script's own.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pscluster.coordinator.api import *  # noqa: F403  (its names are in its __all__)
    from pscluster.coordinator.api import __all__ as __all__
    from pscluster.coordinator.api import __version__ as __version__
    from pscluster.coordinator.api import callbacks as callbacks
    from pscluster.coordinator.api import errors as errors
    from pscluster.coordinator.api import features as features
    from pscluster.coordinator.api import initializers as initializers
    from pscluster.coordinator.api import metrics as metrics
    from pscluster.coordinator.api import optimizers as optimizers
    from pscluster.coordinator.api import sources as sources
    from pscluster.coordinator.api import table_policies as table_policies
else:
    _MODULES = (
        "callbacks",
        "errors",
        "features",
        "initializers",
        "metrics",
        "optimizers",
        "sources",
        "table_policies",
    )

    def __getattr__(name):
        if not name.startswith("_") or name in ("__all__", "__version__"):
            module = f"{__name__}.{name}"
            if importlib.util.find_spec(module) is not None:  # a module of the package: not by way of the API
                return importlib.import_module(module)
            api = importlib.import_module(f"{__name__}.api")
            if hasattr(api, name):
                globals()[name] = getattr(api, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__"), *_MODULES})
