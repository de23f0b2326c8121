"""What lookups learn: how often each token is in the data, and in how many documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.worker.features import tokens
from pscluster.worker.features.layer import Array, State


@dataclass(slots=True)
class _Learned:
    tokens: Counter[Any]
    documents: Counter[Any]  # in how many each token is
    num_documents: int = 0


@dataclass(frozen=True)
class Counts:
    """Counts tokens; with `documents`, also in how many documents each is: a row of a batch is one."""

    label: str
    texts: bool
    documents: bool

    def initial(self) -> _Learned:
        return _Learned(Counter(), Counter())

    def update(self, learned: _Learned, batch: Any) -> _Learned:
        flat: list[Any]
        if self.texts and not self.documents:
            flat, places, shape = tokens.different_texts_of(self.label, batch)
            if places is not None:
                _add(learned.tokens, flat, np.bincount(places, minlength=len(flat)))
                return learned
        elif self.texts:
            flat, shape = tokens.texts_of(self.label, batch)
        else:
            array = tokens.ints_of(self.label, batch)
            flat, shape = array.ravel().tolist(), array.shape
        learned.tokens.update(flat)
        if self.documents:
            rows = shape[0] if shape else 1
            length = len(flat) // rows if rows else 0
            for row in range(rows):
                learned.documents.update(set(flat[row * length : (row + 1) * length]))
            learned.num_documents += rows
        return learned

    def packed(self, learned: _Learned) -> State:
        different = list(learned.tokens)
        state = packed_texts(different) if self.texts else {"values": np.array(different, np.int64)}
        state["counts"] = np.fromiter(learned.tokens.values(), np.int64, len(different))
        if self.documents:
            state["documents"] = np.array([learned.documents[token] for token in different], np.int64)
            state["num_documents"] = np.array(learned.num_documents, np.int64)
        return state

    def merged(self, states: Sequence[State]) -> State:
        whole = self.initial()
        for state in states:
            different = unpacked_texts(state) if self.texts else state["values"].tolist()
            _add(whole.tokens, different, state["counts"])
            if self.documents:
                _add(whole.documents, different, state["documents"])
                whole.num_documents += int(state["num_documents"])
        return self.packed(whole)


def _add(counts: Counter[Any], different: Sequence[Any], numbers: Array) -> None:
    for token, count in zip(different, numbers.tolist(), strict=True):
        counts[token] += count


def packed_texts(texts: Sequence[str]) -> State:
    """Return texts as the arrays of a state."""
    text, lengths = tokens.pack(texts)
    return {"text": text, "lengths": lengths}


def unpacked_texts(state: State) -> list[str]:
    """Return the texts of a state. KeyError if it has none, ValueError if they make no sense."""
    return tokens.unpack(state["text"], state["lengths"])
