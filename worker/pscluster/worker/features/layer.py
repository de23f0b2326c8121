"""What all layers have in common: how they are adapted, how they travel, and their configuration and state.

    FRESH --adapt, a vocabulary, a mean, ...--> READY --adapt--> READY, with other values
    FRESH: can't be called, nor sent to workers.      READY: sent as it is now; functions keep what they captured

`adapt` has two halves. An analysis is data, sent to the workers: it turns elements into a state, a dict of arrays, and
merges states in the order of the shards that they are of. So the result is the same whichever workers computed it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.by_reference import WithoutPickle
from pscluster.core.functions.definitions import CapturedFunction, MadeHandle, partial_of
from pscluster.core.handles import Handle

Array = npt.NDArray[Any]

State = dict[str, Array]
"""What was learned from data, by name."""


class Analysis(Protocol):
    """Learns from batches. Its instances are data, without state of their own."""

    def initial(self) -> Any:
        """Return what `update` begins with."""

    def update(self, learned: Any, batch: Any) -> Any:
        """Add a batch."""

    def packed(self, learned: Any) -> State:
        """Return what was learned as arrays."""

    def merged(self, states: Sequence[State]) -> State:
        """Return the state of all data, from those of its parts in order."""


@runtime_checkable
class Sharded(Protocol):
    """Data that workers read: a `DistributedDataset`."""

    def over_shards(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return what `fn` returns for each of several shards, in order; each example is in one of them."""


def analyzed(analysis: Analysis, elements: Iterable[Any]) -> State:
    """Return the state of these elements. Runs on workers, for the elements of a shard."""
    learned = analysis.initial()
    for element in elements:
        learned = analysis.update(learned, element)
    return analysis.packed(learned)


class Layer(Handle):
    """Base of the layers. Thread-safe, but for `adapt`: call it when no other thread uses the layer."""

    handle_kind: ClassVar[str] = "layer"
    default_name: ClassVar[str]
    _made_on_worker = False

    def __init__(self, name: str | None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"the name of a {type(self).__name__} is {name!r}; it must be a string, and not empty")
        self.name = name or self.default_name
        self._sent: MadeHandle | None = None
        self._sending = threading.Lock()

    @property
    def _label(self) -> str:
        """What errors call it."""
        return f"{type(self).__name__} {self.name!r}"

    # What subclasses say

    def __call__(self, inputs: Any) -> Array:
        """Return what the layer makes of an array."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make such a layer, without what it has learned or was given to look up."""
        raise NotImplementedError

    def get_state(self) -> State:
        """Return what it has learned, or was given, as arrays; {} if there is nothing to learn.

        Raises:
            MisuseError: it was never adapted.
        """
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace what it has learned by what `get_state` of a layer with the same configuration returned."""
        self._check_changeable()
        try:
            self._take({name: np.asarray(array) for name, array in state.items()})
        except KeyError as error:
            raise ValueError(f"the state of {self._label} has {sorted(state)}, and no {error}") from None
        self._sent = None

    def _take(self, state: State) -> None:
        """Take a state. KeyError if something is missing."""

    def _analysis(self) -> Analysis:
        """Return what it learns. MisuseError if it can't be adapted."""
        raise MisuseError(f"{self._label} has nothing to learn: use it without adapt()")

    @property
    def is_adapted(self) -> bool:
        """Whether it can be used: it was adapted, or was given all that it needs."""
        return True

    def _unadapted(self, argument: str) -> MisuseError:
        return MisuseError(
            f"{self._label} was never adapted: call adapt(data) in the script before it is used, or give {argument}"
        )

    def _check_changeable(self) -> None:
        if self._made_on_worker:
            raise MisuseError(
                f"{self._label} can't be changed on a worker, whose functions share it: adapt it in the script"
            )

    def adapt(self, data: Any) -> Self:
        """Learn from data, in place of what was learned before. Return the layer.

        Args:
            data: an array or list; an iterable of batches, such as a generator; or a distributed dataset, whose first
                epoch is read once on the workers: each example counts once, whatever dies, and its position does not
                change. Its elements must be what the layer is called with, so `map` it to that.

        Raises:
            MisuseError: the layer has nothing to learn, or was given what it would learn.
            TypeError, ValueError: the data is not what the layer takes, or there is none.
            FunctionError: on a worker, the data could not be read, or is not what the layer takes.
        """
        self._check_changeable()
        analysis = self._analysis()
        if isinstance(data, Sharded):
            states = data.over_shards(partial_of(f"adapt {self.name}", analyzed, analysis))
        else:
            states = [analyzed(analysis, self._batches(data))]
        self._learn(analysis.merged(states))
        self._sent = None
        return self

    def _batches(self, data: Any) -> Iterator[Any]:
        if isinstance(data, list | tuple) or hasattr(data, "__array__"):
            yield data
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes | dict):
            yield from data
        else:
            raise TypeError(
                f"{self._label} can't be adapted to {type_of(data)}: give an array, a distributed dataset, or batches"
            )

    def _learn(self, state: State) -> None:
        """Take what an analysis has learned. ValueError if there was no data."""
        raise NotImplementedError

    # How it travels

    def as_sent(self) -> MadeHandle:
        """Return the handle of the layer as it is now."""
        with self._sending:
            if self._sent is None:
                self._sent = MadeHandle(self.handle_kind, _definition_of(self))
            return self._sent

    @property
    def handle_key(self) -> str:
        return self.as_sent().handle_key

    def __copy__(self) -> Self:
        copied: Self = layer_of(*_parts_of(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return layer_of, _parts_of(self)

    def __repr__(self) -> str:
        return f"<{self._label}>" if self.is_adapted else f"<{self._label}, not adapted>"


LAYERS = {
    "CategoryCrossing": "hashing",
    "Discretization": "numeric",
    "HashedCrossing": "hashing",
    "Hashing": "hashing",
    "IntegerLookup": "lookups",
    "Normalization": "numeric",
    "StringLookup": "lookups",
}
"""The module of each class, which is what travels: a name."""


def _parts_of(layer: Layer) -> tuple[str, dict[str, Any], State]:
    kind = type(layer).__name__
    if LAYERS.get(kind) != type(layer).__module__.rpartition(".")[2]:
        raise MisuseError(f"{layer._label} is of a class of your own: workers make only the library's layers")
    return kind, layer.get_config(), layer.get_state() if layer.is_adapted else {}


def _definition_of(layer: Layer) -> CapturedFunction:
    kind, config, _ = _parts_of(layer)
    made = partial_of(layer._label, shared_layer, kind, config, layer.get_state())
    sent = WithoutPickle(made)  # data and a name, also where pickles are on: the same state has the same digest
    return CapturedFunction(sent.definition.digest, layer._label, sent.definition)


def layer_of(kind: str, config: Mapping[str, Any], state: Mapping[str, Array]) -> Any:
    """Return a layer from the name of its class, its configuration, and its state if it has one."""
    if kind not in LAYERS:
        raise ValueError(f"there is no layer {kind!r}; there are {', '.join(LAYERS)}")
    if "vocabulary" in config:  # which may name a file: peers must not have one opened
        raise ValueError(f"the configuration of a {kind} has a vocabulary: that is part of its state")
    module = importlib.import_module(f"{__package__}.{LAYERS[kind]}")
    layer = getattr(module, kind)(**config)
    if state:
        layer.set_state(state)
    return layer


def shared_layer(kind: str, config: Mapping[str, Any], state: Mapping[str, Array]) -> Any:
    """Return the layer that the functions of a worker share."""
    layer = layer_of(kind, config, state)
    layer._made_on_worker = True
    return layer
