"""Making models: once a process, on its own thread, with the backend that they were served with."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pscluster.core.context import current_function
from pscluster.core.errors import ConfigurationError
from pscluster.keras.copies import Copy, to_numpy
from pscluster.ps.client.client import PsClient

BACKENDS = ("jax", "torch")

_made: weakref.WeakKeyDictionary[PsClient, dict[tuple[int, int], Copy]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def make_model(model_fn: Callable[[], Any], policy: str) -> Any:
    """Call the user's function on a thread of its own: there Keras numbers layers from the start, so the names are
    the same in all processes. `policy` is the data type policy, which is a thread's, too.
    """
    made: list[Any] = []
    errors: list[BaseException] = []

    def make() -> None:
        import keras

        try:
            keras.config.set_dtype_policy(policy)
            made.append(model_fn())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(make,), name="make-model")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def copy_of(
    client: PsClient, served: int, make: Callable[[], Any], backend: str, tables: Callable[[], Sequence[int]]
) -> Copy:
    """Return this process's copy of a served model, for the replica that runs here. `tables` returns those of `Copy`.

    Both functions are called for a new copy only.
    """
    function = current_function()
    replica = 0 if function is None or function.replica is None else int(function.replica.replica_id)
    with _making:
        copies = _made.setdefault(client, {})
        if (copy := copies.get((served, replica))) is None:
            model = make()
            for variable in model.non_trainable_variables:
                if function is not None and variable.path.endswith("seed_generator_state"):
                    state = to_numpy(variable)
                    variable.assign(state + np.array([function.worker_index + replica, 0], state.dtype))
            copy = copies[served, replica] = class_of(backend)(model, tables())
        return copy


def class_of(backend: str) -> type[Copy]:
    if backend == "jax":
        from pscluster.keras.jax_copy import JaxCopy

        return JaxCopy
    from pscluster.keras.torch_copy import TorchCopy

    return TorchCopy


def check_backend(wanted: str | None = None) -> str:
    """Return Keras' backend here. ConfigurationError if it is none of ours, or not the one that is wanted."""
    if wanted is not None and "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", wanted)
    import keras

    backend: str = keras.config.backend()
    if backend not in BACKENDS or backend != (wanted or backend):
        raise ConfigurationError(
            f"Keras' backend is {backend!r} here, and must be {' or '.join([wanted] if wanted else BACKENDS)}: set "
            f"KERAS_BACKEND={wanted or BACKENDS[0]} in the environment of the script and of all workers"
        )
    return backend
