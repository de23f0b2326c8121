"""StringLookup and IntegerLookup in one process: Keras' indices, output modes and order; large batches; bad input."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.core.errors import MisuseError
from pscluster.worker.features import tokens
from pscluster.worker.features.layer import layer_of, shared_layer
from pscluster.worker.features.lookups import IntegerLookup, StringLookup

WORDS = ["b", "a", "c"]


@pytest.mark.parametrize(
    ("options", "inputs", "expected"),
    [
        ({}, ["b", "a", "z", "c"], [1, 2, 0, 3]),
        ({"num_oov_indices": 0}, [["b"], ["c"]], [[0], [2]]),
        ({"mask_token": ""}, ["", "b", "z"], [0, 2, 1]),
        ({"mask_token": "", "num_oov_indices": 0}, ["", "b"], [0, 1]),
        ({"output_mode": "one_hot"}, ["a", "z"], [[0, 0, 1, 0], [1, 0, 0, 0]]),
        ({"output_mode": "one_hot"}, [["a"], ["z"]], [[0, 0, 1, 0], [1, 0, 0, 0]]),
        ({"output_mode": "multi_hot"}, [["a", "a"], ["z", "c"]], [[0, 0, 1, 0], [1, 0, 0, 1]]),
        ({"output_mode": "count"}, [["a", "a"], ["z", "c"]], [[0, 0, 2, 0], [1, 0, 0, 1]]),
        ({"output_mode": "count", "mask_token": ""}, [["a", ""], ["", "z"]], [[0, 0, 1, 0], [1, 0, 0, 0]]),
        ({"output_mode": "multi_hot", "max_tokens": 6, "pad_to_max_tokens": True}, ["a", "c"], [0, 0, 1, 1, 0, 0]),
        ({"invert": True}, [1, 0, 3], ["b", "[UNK]", "c"]),
        ({"invert": True, "mask_token": ""}, [[0, 1], [2, 4]], [["", "[UNK]"], ["b", "c"]]),
        ({}, "a", 2),
        ({}, np.empty((0, 2), str), np.empty((0, 2), np.int64)),
        ({}, np.array(["a", b"c"], object), [2, 3]),
        ({}, np.array([b"a", b"q"]), [2, 0]),
    ],
)
def test_strings(options: dict[str, Any], inputs: Any, expected: Any) -> None:
    """Every option by an example; the same after a copy, a pickle, and on a worker."""
    layer = StringLookup(vocabulary=WORDS, **options)
    result = layer(inputs)
    assert result.tolist() == np.asarray(expected).tolist()
    assert result.shape == np.shape(expected)
    assert result.dtype == (object if options.get("invert") else np.int64)
    for again in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        shared_layer("StringLookup", layer.get_config(), layer.get_state()),
    ):
        assert again(inputs).tolist() == result.tolist()
        assert again.as_sent().handle_key == layer.as_sent().handle_key


def test_integers() -> None:
    """Their OOV indices are by remainder, as Keras' default is, negative ones too."""
    layer = IntegerLookup(vocabulary=[12, 1138, 42], num_oov_indices=2)
    assert layer([[12, 1138, 42], [42, 1000, 37], [-1, -2, 12]]).tolist() == [[2, 3, 4], [4, 0, 1], [1, 0, 2]]
    masked = IntegerLookup(vocabulary=[12, 1138, 42], mask_token=0)
    assert masked(np.array([0, 12, 7], np.int32)).tolist() == [0, 2, 1]
    inverse = IntegerLookup(vocabulary=masked.get_vocabulary(), mask_token=0, invert=True)
    assert inverse([0, 1, 2, 4]).tolist() == [0, -1, 12, 42]
    assert inverse.get_vocabulary() == masked.get_vocabulary() == [0, -1, 12, 1138, 42]
    assert IntegerLookup(vocabulary=[12, 1138, 42], invert=True)([[0, 1], [2, 3]]).tolist() == [[-1, 12], [1138, 42]]
    with pytest.raises(ValueError, match="was given 7, 8, not in its vocabulary"):
        IntegerLookup(vocabulary=[12], num_oov_indices=0)([12, 7, 8])


def test_oov_of_strings_by_hash() -> None:
    """They are spread over the indices, and the same everywhere: the values are fixed."""
    layer = StringLookup(vocabulary=["a"], num_oov_indices=4, mask_token="")
    unknown = [f"word {number}" for number in range(200)]
    indices = layer(unknown)
    assert sorted(set(indices.tolist())) == [1, 2, 3, 4]
    assert layer([*unknown[:6], "", "a"]).tolist() == [*indices[:6].tolist(), 0, 5]
    assert indices[:6].tolist() == layer(unknown[:6]).tolist()


@pytest.mark.parametrize("vocabulary", [100, 60_000])
@pytest.mark.parametrize("with_arrow", [True, False])
def test_large_batches(vocabulary: int, with_arrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pyarrow and without, few different tokens or many: the same indices."""
    if not with_arrow:
        monkeypatch.setattr(tokens, "_pyarrow", lambda: None)
    words = [f"wörd {number}" for number in range(vocabulary)]
    layer = StringLookup(vocabulary=words, mask_token="")
    numbers = np.random.default_rng(1).integers(0, vocabulary + 10, 40_000)
    batch = np.array([*(f"wörd {number}" for number in numbers), ""])
    expected = np.where(numbers < vocabulary, numbers + 2, 1)
    assert np.array_equal(layer(batch), [*expected, 0])
    assert np.array_equal(layer(batch.astype(object)), [*expected, 0])
    assert np.array_equal(layer(np.array([*batch, "\ud800"])), [*expected, 0, 1]), "what UTF-8 does not have"
    assert np.array_equal(layer(batch[:-1].reshape(-1, 4)), expected.reshape(-1, 4))
    for wrong, message in (
        (None, "not None of type NoneType: replace what is missing by a string"),
        (np.nan, "not nan of type float: replace what is missing by a string"),
        (1.5, "not 1.5 of type float: convert them, for instance with"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(np.array([*batch, wrong], object))
    with pytest.raises(TypeError, match="not 3 of type int: use an IntegerLookup"):
        layer(np.array([*batch, 3], object))
    counted = StringLookup(mask_token="", max_tokens=50).adapt(batch)
    most = np.bincount(numbers).max()
    assert counted.get_vocabulary()[2] in [words[number] for number in np.flatnonzero(np.bincount(numbers) == most)]
    assert counted.get_vocabulary() == StringLookup(mask_token="", max_tokens=50).adapt(iter(batch)).get_vocabulary()


def test_arrays_of_pyarrow() -> None:
    """They are arrays, too, chunked and encoded ones as well."""
    pyarrow: Any = pytest.importorskip("pyarrow")
    layer = StringLookup(vocabulary=WORDS)
    column = pyarrow.chunked_array([["a", "b"], ["z"]])
    for words in (column, column.dictionary_encode(), column.combine_chunks(), column.cast(pyarrow.large_string())):
        assert layer(words).tolist() == [2, 1, 0]
    with pytest.raises(TypeError, match="not None of type NoneType"):
        layer(pyarrow.array(["a", None]))
    with pytest.raises(TypeError, match="not 3 of type int"):
        layer(pyarrow.array([3]))
    assert StringLookup().adapt(column).vocabulary_size() == 4
    encoded = pyarrow.DictionaryArray.from_arrays([2, 0, 2], ["a", "unused", "b", "a"])
    assert StringLookup(vocabulary=WORDS, num_oov_indices=0)(encoded).tolist() == [0, 1, 0]
    assert StringLookup().adapt(encoded).get_vocabulary() == ["[UNK]", "b", "a"]


def test_adapted() -> None:
    """The most frequent first, then in reverse order; special tokens do not count; again in place of before."""
    layer = StringLookup(mask_token="", max_tokens=5)
    assert not layer.is_adapted
    assert layer.adapt([["b", "c", "a", ""], ["[UNK]", "a", "d", "e"]]).get_vocabulary() == ["", "[UNK]", "a", "e", "d"]
    assert layer.vocabulary_size() == 5
    assert layer.get_vocabulary(include_special_tokens=False) == ["a", "e", "d"]
    assert layer.adapt(batch for batch in (["x"], ["y", "y"])).get_vocabulary() == ["", "[UNK]", "y", "x"]
    integers = IntegerLookup().adapt(np.array([[5, 7], [5, -1]]))
    assert integers.get_vocabulary() == [-1, 5, 7]


def test_tf_idf() -> None:
    """Weights by Keras' formula, log(1 + documents / (1 + those with the token)); OOV tokens have the mean."""
    layer = StringLookup(output_mode="tf_idf").adapt([["a", "a"], ["a", "b"], ["b", "c"]])
    assert layer.get_vocabulary() == ["[UNK]", "a", "b", "c"]
    weights = np.log(1 + 3 / (1 + np.array([2, 2, 1]))).astype(np.float32)
    assert layer([["a", "a"], ["c", "q"]]).tolist() == pytest.approx(
        np.array([[0, 2 * weights[0], 0, 0], [weights.mean(), 0, 0, weights[2]]])
    )
    assert layer([["a"]]).dtype == np.float32
    given = StringLookup(vocabulary=["a", "b", "c"], idf_weights=weights, output_mode="tf_idf")
    assert np.array_equal(given([["a", "q"]]), layer([["a", "q"]]))


def test_a_file_of_tokens(tmp_path: Path) -> None:
    """A token in each line."""
    path = tmp_path / "words.txt"
    path.write_text("12\nfür\n", encoding="utf-8")
    assert StringLookup(vocabulary=str(path))(["für", "12"]).tolist() == [2, 1]
    path.write_text("12\n-3\n", encoding="utf-8")
    assert IntegerLookup(vocabulary=str(path))([-3]).tolist() == [2]


def test_threads_make_the_table_once() -> None:
    """Functions that run at the same time share what looks up."""
    layer = StringLookup(vocabulary=[str(number) for number in range(20_000)])
    begin = threading.Barrier(3)

    def look_up(_: int) -> list[int]:
        begin.wait(30)
        return list(layer(["19999", "0"]).tolist())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(look_up, range(3))) == [[20_000, 1]] * 3


def call(layer: Any, inputs: Any) -> Any:
    """Call a layer."""
    return layer(inputs)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: StringLookup(name="film")(["a"]), MisuseError, "StringLookup 'film' was never adapted: call adapt"),
        (lambda: StringLookup().as_sent(), MisuseError, "was never adapted"),
        (lambda: StringLookup(invert=True)([1]), MisuseError, "was never adapted"),
        (lambda: StringLookup(vocabulary=["a", "b", "a"]), ValueError, "has 'a' more than once: give each token once"),
        (lambda: IntegerLookup(vocabulary=[7, 7]), ValueError, "has 7 more than once"),
        (lambda: StringLookup(vocabulary=[]), ValueError, "is empty: give at least one token"),
        (
            lambda: StringLookup(vocabulary=["a", ""], mask_token=""),
            ValueError,
            "has the mask token '' among its tokens",
        ),
        (lambda: StringLookup(vocabulary=["a", "[UNK]"], invert=True), ValueError, "has the OOV token '[UNK]' among"),
        (lambda: StringLookup(vocabulary=WORDS, max_tokens=3), ValueError, "3 tokens, and max_tokens is 3, 1 of which"),
        (lambda: StringLookup(max_tokens=2, num_oov_indices=2), ValueError, "max_tokens is 2, of which 2 are for the"),
        (
            lambda: StringLookup(max_tokens=1),
            ValueError,
            "max_tokens is 1; it must be a whole number, above 1, or None",
        ),
        (lambda: StringLookup(num_oov_indices=-1), ValueError, "num_oov_indices is -1; it must be"),
        (lambda: StringLookup(mask_token=3), TypeError, "mask_token is 3; it must be a string"),  # type: ignore[arg-type]
        (lambda: IntegerLookup(mask_token="x"), ValueError, "mask_token is 'x'; it must be a whole number"),  # type: ignore[arg-type]
        (
            lambda: StringLookup(output_mode="hot"),
            ValueError,
            "output_mode is 'hot'; it must be one of 'int', 'one_hot'",
        ),
        (lambda: StringLookup(invert=True, output_mode="count"), ValueError, "with invert=True it must be 'int'"),
        (lambda: StringLookup(pad_to_max_tokens=True), ValueError, "pad_to_max_tokens is set, but not max_tokens"),
        (lambda: StringLookup(vocabulary=WORDS, output_mode="tf_idf"), ValueError, "give idf_weights, one for each"),
        (lambda: StringLookup(vocabulary=WORDS, idf_weights=[1, 2, 3]), ValueError, "only for output_mode='tf_idf'"),
        (
            lambda: StringLookup(vocabulary=WORDS, idf_weights=[1], output_mode="tf_idf"),
            ValueError,
            r"the shape (1,); there are 3 tokens",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS), [1, 2]),
            TypeError,
            "takes strings, not 1 of type int: use an Int",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS), ["a", None]),
            TypeError,
            "not None of type NoneType: replace what",
        ),
        (lambda: call(IntegerLookup(vocabulary=[1]), ["1"]), TypeError, "not strings such as '1': use a StringLookup"),
        (lambda: call(IntegerLookup(vocabulary=[1]), [1.5]), TypeError, "takes integers, not float64: convert them"),
        (lambda: IntegerLookup(vocabulary=["a"]), TypeError, "takes integers, not strings such as 'a'"),  # type: ignore[list-item]
        (
            lambda: call(StringLookup(vocabulary=WORDS), [["a"], ["b", "c"]]),
            ValueError,
            "rows of different lengths: pad",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS), {"x": ["a"]}),
            TypeError,
            "a dict with 'x': give it one of these",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS, num_oov_indices=0), ["a", "q", "r"]),
            ValueError,
            "was given 'q', 'r', not in its vocabulary: set num_oov_indices=1",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS, invert=True), [4, -1]),
            ValueError,
            "was given the indices 4, -1; they must be at least 0 and below 4, its vocabulary_size()",
        ),
        (
            lambda: call(StringLookup(vocabulary=WORDS, invert=True), ["a"]),
            TypeError,
            "takes indices, as it has invert",
        ),
        (
            lambda: StringLookup(vocabulary=WORDS).adapt(["a"]),
            MisuseError,
            "was given its vocabulary, and can't be adapt",
        ),
        (lambda: StringLookup().adapt([]), ValueError, "was adapted to data without tokens: give it some"),
        (lambda: StringLookup().adapt([1]), TypeError, "takes strings, not 1 of type int"),
        (lambda: StringLookup().adapt("text"), TypeError, "can't be adapted to a str: give an array"),
        (lambda: StringLookup(name=""), ValueError, "the name of a StringLookup is ''; it must be a string"),
        (
            lambda: StringLookup().set_state({}),
            ValueError,
            "the state of StringLookup 'string_lookup' has [], and no 'text'",
        ),
        (lambda: layer_of("Lookup", {}, {}), ValueError, "there is no layer 'Lookup'; there are CategoryCrossing"),
        (
            lambda: shared_layer("StringLookup", {"vocabulary": "/etc/hostname"}, {}),
            ValueError,
            "the configuration of a StringLookup has a vocabulary: that is part of its state",
        ),
        (
            lambda: shared_layer("StringLookup", {}, StringLookup(vocabulary=WORDS).get_state()).set_vocabulary(["a"]),
            MisuseError,
            "can't be changed on a worker, whose functions share it: adapt it in the script",
        ),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    """One sentence with the layer's name, the value and what to do."""
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_of_ones_own() -> None:
    """Workers would not have it: it is refused when it would be sent."""

    class Mine(StringLookup):
        pass

    assert Mine(vocabulary=WORDS)(["c"]).tolist() == [3]
    with pytest.raises(MisuseError, match="Mine 'string_lookup' is of a class of your own: workers make only"):
        Mine(vocabulary=WORDS).as_sent()
