"""StringLookup and IntegerLookup: tokens to indices and back, with Keras 3's arguments and order of indices.

The indices are those of Keras: first the mask token, if there is one and `output_mode` is "int", then `num_oov_indices`
indices of tokens that are not in the vocabulary (out of vocabulary, OOV), then the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import MisuseError
from pscluster.worker.features import tokens
from pscluster.worker.features.counts import Counts, packed_texts, unpacked_texts
from pscluster.worker.features.encoding import MASKED, MODES, checked_mode, encoded
from pscluster.worker.features.layer import Analysis, Layer, State
from pscluster.worker.features.tokens import Integers, Ints, Texts, array_of, some

_MODES = (*MODES, "tf_idf")


class _Lookup(Layer):
    """What both lookups do; they differ in their tokens."""

    _texts: bool

    def __init__(
        self,
        max_tokens: int | None,
        num_oov_indices: int,
        mask_token: Any,
        oov_token: Any,
        vocabulary: Any,
        idf_weights: Any,
        invert: bool,
        output_mode: str,
        pad_to_max_tokens: bool,
        name: str | None,
    ) -> None:
        super().__init__(name)
        label = self._label
        if max_tokens is not None:
            max_tokens = checks.whole(f"{label}: max_tokens", max_tokens, ", or None", above=1)
        self.num_oov_indices = checks.whole(f"{label}: num_oov_indices", num_oov_indices, at_least=0)
        self.output_mode = checked_mode(label, output_mode, _MODES)
        if invert and output_mode != "int":
            raise ValueError(f"{label}: output_mode is {output_mode!r}; with invert=True it must be 'int'")
        if pad_to_max_tokens and max_tokens is None:
            raise ValueError(f"{label}: pad_to_max_tokens is set, but not max_tokens: give it")
        self.max_tokens, self.invert, self.pad_to_max_tokens = max_tokens, bool(invert), bool(pad_to_max_tokens)
        self.mask_token = None if mask_token is None else self._token("mask_token", mask_token)
        self.oov_token = self._token("oov_token", oov_token)
        self._vocabulary: Texts | Integers | None = None
        self._weights: npt.NDArray[np.float32] | None = None
        self._given = False
        if max_tokens is not None and max_tokens <= self._token_start:
            raise ValueError(
                f"{label}: max_tokens is {max_tokens}, of which {self._token_start} are for the mask token and those "
                "out of vocabulary: give more"
            )
        if vocabulary is not None:
            self.set_vocabulary(vocabulary, idf_weights)
        elif idf_weights is not None:
            raise ValueError(f"{label}: idf_weights are given, but not vocabulary: give both, or adapt it")

    def _token(self, argument: str, token: Any) -> Any:
        raise NotImplementedError

    def _tokens_of(self, values: Any) -> tuple[Any, npt.NDArray[Any] | None, tuple[int, ...]]:
        """Return tokens as `numbers_of` takes them, perhaps the places of all among them, and their shape."""
        raise NotImplementedError

    def _made(self, different: Sequence[Any]) -> Texts | Integers:
        raise NotImplementedError

    def _hashed(self, values: Any) -> Ints:
        """Return for tokens that are not in the vocabulary which of the OOV indices each has, from 0."""
        raise NotImplementedError

    @property
    def _oov_start(self) -> int:
        return int(self.mask_token is not None and self.output_mode == "int")

    @property
    def _token_start(self) -> int:
        return self._oov_start + self.num_oov_indices

    @property
    def _special(self) -> list[Any]:
        """The tokens before those of the vocabulary."""
        return [self.mask_token] * self._oov_start + [self.oov_token] * self.num_oov_indices

    # The vocabulary

    @property
    def is_adapted(self) -> bool:
        return self._vocabulary is not None

    def _ready(self) -> Any:
        if self._vocabulary is None:
            raise self._unadapted("vocabulary=[...]")
        return self._vocabulary

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Look up these tokens from now on; the layer can then not be adapted.

        Args:
            vocabulary: different tokens in the order of their indices. It may begin with the mask token and the OOV
                tokens, as `get_vocabulary` returns them. Or the path of a text file with a token in each line.
            idf_weights: for `output_mode="tf_idf"`: a weight for each token.

        Raises:
            ValueError: it is empty, too long, has a token twice, or the mask token in another place.
            TypeError: its tokens are of the wrong type.
        """
        self._check_changeable()
        label = f"the vocabulary of {self._label}"
        if isinstance(vocabulary, str):
            with open(vocabulary, encoding="utf-8") as file:
                lines = file.read().splitlines()
            vocabulary = lines if self._texts else [int(line) for line in lines]
        different: list[Any]
        if self._texts:
            different, _ = tokens.texts_of(self._label, vocabulary)
        else:
            different = tokens.ints_of(self._label, vocabulary).ravel().tolist()
        if (special := self._special) and different[: len(special)] == special:
            different = different[len(special) :]
        if not different:
            raise ValueError(f"{label} is empty: give at least one token, or adapt the layer")
        if twice := tokens.repeated(different):
            raise ValueError(f"{label} has {some(twice)} more than once: give each token once")
        if self.mask_token is not None and self.mask_token in different:
            raise ValueError(f"{label} has the mask token {self.mask_token!r} among its tokens: leave it out")
        if self.invert and self.oov_token in different:
            raise ValueError(f"{label} has the OOV token {self.oov_token!r} among its tokens: leave it out")
        if self.max_tokens is not None and len(different) + self._token_start > self.max_tokens:
            raise ValueError(
                f"{label} has {len(different):,} tokens, and max_tokens is {self.max_tokens:,}, {self._token_start} of "
                "which are for the mask token and those out of vocabulary: give fewer, or a greater max_tokens"
            )
        weights = self._checked_weights(idf_weights, len(different))
        self._vocabulary, self._weights, self._given = self._made(different), weights, True
        self._sent = None

    def _checked_weights(self, weights: Any, count: int) -> npt.NDArray[np.float32] | None:
        if self.output_mode != "tf_idf":
            if weights is not None:
                raise ValueError(f"{self._label}: idf_weights are only for output_mode='tf_idf': leave them out")
            return None
        if weights is None:
            raise ValueError(f"{self._label}: with output_mode='tf_idf' give idf_weights, one for each token")
        array = np.asarray(weights, np.float32)
        if array.shape != (count,):
            raise ValueError(f"{self._label}: idf_weights have the shape {array.shape}; there are {count} tokens")
        return array

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Return the tokens in the order of their indices; without the special ones, those of the vocabulary only."""
        known = list(self._ready().tokens)
        if not include_special_tokens:
            return known
        return self._special + known

    def vocabulary_size(self) -> int:
        """Return how many indices there are, those of the mask token and of OOV tokens included."""
        return len(self._ready()) + self._token_start

    # Adapting

    def _analysis(self) -> Analysis:
        if self._given:
            raise MisuseError(f"{self._label} was given its vocabulary, and can't be adapted: make it without one")
        return Counts(self._label, self._texts, self.output_mode == "tf_idf")

    def _learn(self, state: State) -> None:
        different = unpacked_texts(state) if self._texts else state["values"].tolist()
        counts = dict(zip(different, state["counts"].tolist(), strict=True))
        places = {token: place for place, token in enumerate(different)}
        for special in (self.mask_token, self.oov_token):
            counts.pop(special, None)
        if not counts:
            raise ValueError(f"{self._label} was adapted to data without tokens: give it some")
        known = tokens.by_frequency(counts)
        if self.max_tokens is not None:
            known = known[: self.max_tokens - self._token_start]
        if self.output_mode == "tf_idf":
            containing = state["documents"][[places[token] for token in known]]
            self._weights = np.log(1 + int(state["num_documents"]) / (1 + containing)).astype(np.float32)
        self._vocabulary = self._made(known)

    def get_config(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "num_oov_indices": self.num_oov_indices,
            "mask_token": self.mask_token,
            "oov_token": self.oov_token,
            "invert": self.invert,
            "output_mode": self.output_mode,
            "pad_to_max_tokens": self.pad_to_max_tokens,
            "name": self.name,
        }

    def get_state(self) -> State:
        known = self._ready()
        state: State = packed_texts(known.tokens) if self._texts else {"values": known.as_array}
        if self._weights is not None:
            state["idf"] = self._weights
        if self._given:
            state["given"] = np.array(True)
        return state

    def _take(self, state: State) -> None:
        known = self._made(unpacked_texts(state) if self._texts else state["values"].tolist())
        weights = state["idf"] if self.output_mode == "tf_idf" else None
        self._vocabulary, self._weights, self._given = known, weights, "given" in state

    # Looking up

    def __call__(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the indices of tokens in the output mode, or with `invert` the tokens of indices.

        Args:
            inputs: an array of tokens of any shape, or what makes one; with `invert`, of indices.

        Returns:
            With "int" indices of int64, in the same shape. With "one_hot", "multi_hot" and "count" int64, with
            "tf_idf" float32, along a last axis of `vocabulary_size()` or, if padded, `max_tokens`: see `encoded`. With
            `invert` tokens: an array of objects (str), or int64.

        Raises:
            MisuseError: it was never adapted.
            ValueError: with `num_oov_indices=0` a token is not in the vocabulary; with `invert` an index is out of
                range.
        """
        if self.invert:
            return self._inverted(inputs)
        known = self._ready()
        flat, places, shape = self._tokens_of(inputs)
        numbers: Ints = known.numbers_of(flat)
        indices = numbers + self._token_start
        missing = np.flatnonzero(numbers < 0)
        if missing.size:
            self._place_missing(indices, missing, flat)
        indices = (indices if places is None else indices[places]).reshape(shape)
        depth = self.max_tokens if self.pad_to_max_tokens and self.max_tokens else len(known) + self._token_start
        if self.output_mode != "tf_idf":
            return encoded(indices, self.output_mode, depth, np.int64)
        return encoded(indices, "count", depth, np.float32) * self._padded_weights(depth)

    def _place_missing(self, indices: Ints, missing: Ints, flat: Any) -> None:
        """Set the indices of tokens that are not in the vocabulary: of the mask token, or OOV."""
        values = [flat[place] for place in missing.tolist()] if self._texts else flat[missing]
        if self.mask_token is not None:
            masked = np.fromiter((value == self.mask_token for value in values), bool, len(values))
            indices[missing[masked]] = 0 if self.output_mode == "int" else MASKED
            missing = missing[~masked]
            values = [value for value in values if value != self.mask_token] if self._texts else values[~masked]
        if not missing.size:
            return
        if self.num_oov_indices == 0:
            raise ValueError(
                f"{self._label} was given {some(np.asarray(values).tolist())}, not in its vocabulary: set "
                "num_oov_indices=1 or more, or adapt it to data that has all tokens"
            )
        indices[missing] = self._oov_start + (self._hashed(values) if self.num_oov_indices > 1 else 0)

    def _padded_weights(self, depth: int) -> npt.NDArray[np.float32]:
        """Return a weight for each index: for OOV tokens the mean of the others."""
        assert self._weights is not None  # set with the vocabulary
        weights = np.zeros(depth, np.float32)
        weights[: self._token_start] = self._weights.mean()
        weights[self._token_start : self._token_start + self._weights.size] = self._weights
        return weights

    def _inverted(self, inputs: Any) -> npt.NDArray[Any]:
        known = self._ready()
        indices = array_of(self._label, inputs)
        if indices.dtype.kind not in "iu" and indices.size:
            raise TypeError(f"{self._label} takes indices, as it has invert=True, not an array of {indices.dtype}")
        indices = indices.astype(np.int64, copy=False)
        size = len(known) + self._token_start
        if wrong := indices[(indices < 0) | (indices >= size)].tolist():
            raise ValueError(
                f"{self._label} was given the indices {some(wrong)}; they must be at least 0 and below {size}, its "
                "vocabulary_size()"
            )
        special = np.array(self._special, known.as_array.dtype)
        return np.asarray(np.concatenate([special, known.as_array])[indices], known.as_array.dtype)


class StringLookup(_Lookup):
    """Turn strings into indices, or with `invert` indices into strings.

    Args:
        max_tokens: the most that `vocabulary_size()` may become by `adapt`, which keeps the most frequent; None: no
            limit.
        num_oov_indices: how many indices there are for strings that are not in the vocabulary, which share them by
            hash (XXH3 of their UTF-8; Keras uses FarmHash64, so which of several one gets differs). 0: those are
            errors.
        mask_token: a string that stands for none: index 0, and left out in other output modes. None: there is none.
        oov_token: what `invert` returns for their indices.
        vocabulary: see `set_vocabulary`. None: adapt it.
        idf_weights: for `output_mode="tf_idf"`, with a vocabulary: one for each token.
        invert: take indices and return strings.
        output_mode: "int": indices; "one_hot", "multi_hot", "count", "tf_idf": an axis with an entry for each index.
        pad_to_max_tokens: let that axis be `max_tokens` long, however many tokens there are.
        name: what errors call it.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """

    default_name = "string_lookup"
    _texts = True

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str = "[UNK]",  # noqa: S107  # no password  # nosec B107
        vocabulary: Iterable[str] | str | None = None,
        idf_weights: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            *(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, idf_weights),
            *(invert, output_mode, pad_to_max_tokens, name),
        )

    def _token(self, argument: str, token: Any) -> str:
        if not isinstance(token, str):
            raise TypeError(f"{self._label}: {argument} is {token!r}; it must be a string")
        return str(token)

    def _tokens_of(self, values: Any) -> tuple[list[str], npt.NDArray[Any] | None, tuple[int, ...]]:
        return tokens.different_texts_of(self._label, values)

    def _made(self, different: Sequence[Any]) -> Texts:
        return Texts(different)

    def _hashed(self, values: Any) -> Ints:
        return (tokens.hash_texts(values, 0) % np.uint64(self.num_oov_indices)).astype(np.int64)


class IntegerLookup(_Lookup):
    """Turn integers into indices, or with `invert` indices into integers.

    The arguments are those of `StringLookup`, but for the type of tokens. Integers that are not in the vocabulary share
    the OOV indices by their remainder, as Keras' default has it. int64.
    """

    default_name = "integer_lookup"
    _texts = False

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int = -1,
        vocabulary: Iterable[int] | str | None = None,
        idf_weights: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            *(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, idf_weights),
            *(invert, output_mode, pad_to_max_tokens, name),
        )

    def _token(self, argument: str, token: Any) -> int:
        return checks.whole(f"{self._label}: {argument}", token, at_least=-(1 << 63), below=1 << 63)

    def _tokens_of(self, values: Any) -> tuple[Ints, None, tuple[int, ...]]:
        array = tokens.ints_of(self._label, values)
        return array.ravel(), None, array.shape

    def _made(self, different: Sequence[Any]) -> Integers:
        return Integers(np.array(different, np.int64))

    def _hashed(self, values: Any) -> Ints:
        return np.asarray(np.mod(values, self.num_oov_indices))
