"""Arrays that were received, as arrays of JAX: `jax.device_put`, without its time.

Called within a step, `device_put` takes 0.3 ms, and 0.02 ms more for each array, nearly all of it in Python that checks
what arrays from anywhere may be. The function of jaxlib in which it ends takes a tenth of that. It is not public: it is
used only where it does the same with a first array, for the only device there is, and for types that every
configuration of JAX has.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pscluster.ps.handles.indexing import Array


def on_device(arrays: Sequence[Array]) -> Sequence[Any]:
    """Return arrays as those of JAX, on its default device. They may share memory: nothing may write to it."""
    import jax

    put = direct_put()
    if put is None or jax.config.jax_default_device is not None or any(array.itemsize > 4 for array in arrays):
        return jax.device_put(arrays)  # type: ignore[no-any-return]  # untyped where JAX is not installed
    return [put(array) for array in arrays]


def is_traced() -> bool:
    """Return whether JAX traces the calling function, as `jit` does: what it computes is known later only.

    Differentiation alone is no tracing here: it computes at once.
    """
    import jax

    untraced = _untraced_state()
    if untraced is not None and untraced():
        return False
    return isinstance(jax.numpy.negative(np.float32(0)), jax.core.Tracer)  # the quickest operation of all


@functools.cache
def _untraced_state() -> Callable[[], bool] | None:
    """Return what tells whether JAX neither traces nor differentiates here; None if this version of JAX has it not.

    An operation that shows it takes 0.1 ms within a step.
    """
    try:
        from jax.extend.core import get_opaque_trace_state
    except ImportError:
        return None
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(get_opaque_trace_state()), name="jax-state")
    thread.start()  # where nothing can be traced
    thread.join()
    (untraced,) = states
    return lambda: bool(get_opaque_trace_state() == untraced)


@functools.cache
def direct_put() -> Callable[[Array], Any] | None:
    """Return what puts an array on the only device; None if there are several, or this version of jaxlib has it not."""
    import jax

    devices = jax.devices()
    if len(devices) > 1:
        return None
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    shaped = functools.lru_cache(1024)(jax.core.ShapedArray)
    try:
        from jaxlib.xla_client import batched_device_put

        def put(array: Array) -> Any:
            return batched_device_put(shaped(array.shape, array.dtype), sharding, [array], devices, False)

        made, expected = (make(np.arange(3, dtype=np.float32)) for make in (put, jax.device_put))
        same = [
            (type(array), array.aval, array.sharding, array.committed, np.asarray(array).tolist())
            for array in (made, expected)
        ]
    except Exception:  # whatever another version makes of it
        return None
    return put if same[0] == same[1] else None
