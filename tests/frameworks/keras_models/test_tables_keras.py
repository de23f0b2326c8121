"""Embeddings of Keras models that are tables, of which steps read and push rows only; on JAX, and again on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import pscluster.keras
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, optimizers
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.keras.lazy_zeros import zeros_for

# Keras' own conversions of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BACKEND = keras.config.backend()
RNG = np.random.default_rng(0)
USERS, WORDS = 1000, 60


def batch(size: int = 32) -> Any:
    """Users, and texts that are filled up with zeros."""
    texts = RNG.integers(1, WORDS, (size, 2, 5)) * (RNG.random((size, 2, 5)) < 0.7)
    x = {"user": RNG.integers(0, USERS, size), "asked": texts[:, 0], "answered": texts[:, 1]}
    return x, (x["user"] % 2).astype(np.float32)[:, None]


def recommender(optimizer: Any = None, words: dict[str, Any] | None = None) -> Any:
    """A table of users, and one of words that is looked up twice, with a mask."""
    inputs = {"user": keras.Input((), dtype="int32", name="user")}
    inputs |= {name: keras.Input((5,), dtype="int32", name=name) for name in ("asked", "answered")}
    of_words = keras.layers.Embedding(WORDS, 6, mask_zero=True, name="words", **(words or {}))
    user = keras.layers.Embedding(USERS, 4, name="users")(inputs["user"])
    texts = [keras.layers.GlobalAveragePooling1D()(of_words(inputs[name])) for name in ("asked", "answered")]
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([user, *texts]))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adagrad(0.3), loss, metrics=["accuracy"])
    return model


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_rows_that_are_not_used_take_no_memory() -> None:
    """Of a table that a worker makes, also if `model_fn` sets rows. Other embeddings are made as always."""
    rows, before = 1 << 22, resident()
    with zeros_for(frozenset(["large/embeddings"])):
        large, other = (keras.layers.Embedding(number, 64, name=name) for name, number in (("large", rows), ("o", 3)))
        ids = keras.Input((), dtype="int32")
        keras.Model(ids, [large(ids), other(ids)])
    assert large.embeddings.shape == (rows, 64)
    assert resident() - before < 256 << 20, "of 1 GiB"
    assert np.asarray(keras.ops.convert_to_numpy(other.embeddings)).any()
    with zeros_for(frozenset(["small/embeddings"])):
        small = keras.layers.Embedding(3, 2, name="small")
        small.build()
    assert not np.asarray(keras.ops.convert_to_numpy(small.embeddings)).any()
    small.set_weights([np.ones((3, 2))])
    assert np.asarray(keras.ops.convert_to_numpy(small.embeddings)).all()


def test_every_step_is_that_of_one_process(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """And a file of plain Keras has all rows, and brings them back."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        adagrad = optimizers.Adagrad(0.3, initial_accumulator_value=0.1, epsilon=1e-7)
        served = pscluster.keras.serve(recommender, tables={"users": adagrad, "words/*": adagrad}, name="a")
    assert served.tables == {"a/users/embeddings": adagrad, "a/words/embeddings": adagrad}
    plain, coordinator = served.to_keras(), ClusterCoordinator(strategy)
    for x, y in (batch(), batch(), batch(20), batch(7)):
        logs = coordinator.schedule(lambda of: served.train_on_batch(of), args=((x, y),)).fetch()
        plain.reset_metrics()
        for name, value in plain.train_on_batch(x, y, return_dict=True).items():
            assert logs[name] == pytest.approx(float(value), rel=2e-3), name
    model = served.to_keras()
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=2e-3, atol=2e-4)

    x, y = batch(64)
    data = coordinator.distribute_dataset((x, y)).batch(16)
    expected = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    assert coordinator.evaluate(served, data) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(coordinator.predict(served, data), model.predict(x, verbose=0), atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(x, y, verbose=0, return_dict=True) == pytest.approx(expected, rel=1e-4)
    table = served.variables["a/users/embeddings"]
    before = table.numpy()
    table.assign(np.zeros(table.shape))
    served.load_weights(tmp_path / "model.keras")
    assert (table.numpy() == before).all()


def test_a_step_reads_and_pushes_the_rows_of_its_batch(strategy: ParameterServerStrategy) -> None:
    """With the optimizer of the model, of which rows without a gradient keep their moments."""
    with strategy.scope():
        served = pscluster.keras.serve(lambda: recommender("adam"), tables=["users"], name="b")
    table = served.variables["b/users/embeddings"]
    before = table.numpy()
    x, y = batch()
    served.train_on_batch((x, y))
    changed = np.flatnonzero((table.numpy() != before).any(axis=1))
    assert set(changed) == set(x["user"])
    assert served._copy.model.get_layer("users").weights == []
    assert served.optimizer.iterations == 1
    x["user"][3] = USERS
    with pytest.raises(InvalidUpdateError, match=str(USERS)):
        served.train_on_batch((x, y))
    x["user"][3], y[:] = 5, np.nan
    with pytest.raises(InvalidUpdateError, match="NaN or infinity in the gradient of"):
        served.train_on_batch((x, y))
    assert served.optimizer.iterations == 1


class Tied(keras.layers.Layer):
    """The logits of all words."""

    def __init__(self, embedding: Any, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))


def tied() -> Any:
    inputs = keras.Input((5,), dtype="int32")
    words, other = keras.layers.Embedding(WORDS, 6, name="words"), keras.layers.Embedding(WORDS, 6, name="other")
    rows = words(inputs) + other(inputs)
    model = keras.Model(inputs, Tied(words)(keras.layers.GlobalAveragePooling1D()(rows)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_an_embedding_that_is_used_whole_is_served_whole(
    strategy: ParameterServerStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(tied, tables=["words", "other"], name="c")
    assert list(served.tables) == ["c/other/embeddings"]
    assert "words/embeddings is served whole, not as a table: the model uses all of it" in caplog.text
    plain, (x, _) = served.to_keras(), batch()
    served.train_on_batch((x["asked"], x["user"] % WORDS))
    plain.train_on_batch(x["asked"], x["user"] % WORDS)
    for mine, theirs in zip(served.to_keras().get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-3, atol=1e-5)


class Chained(keras.Model):
    """Looks up what rows say, or uses all of a table in a way that only steps show."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.first, self.second = whole, keras.layers.Embedding(9, 4), keras.layers.Embedding(4, 1)

    def build(self, input_shape: Any) -> None:
        self.first.build()
        self.second.build()
        self.built = True

    def call(self, inputs: Any) -> Any:
        rows = self.first(inputs)
        if self.whole:
            return self.second(inputs % 4) + keras.ops.sum(self.first.embeddings)
        return self.second(keras.ops.argmax(rows, axis=-1))


@pytest.mark.parametrize("whole", [True, False])
def test_what_only_a_step_shows_is_refused_there(strategy: ParameterServerStrategy, whole: bool) -> None:
    def model_fn() -> Any:
        model = Chained(whole)
        model.build(None)
        model.compile("sgd", "mse")
        return model

    with strategy.scope():
        served = pscluster.keras.serve(model_fn, tables=["embedding*"], name=f"d {whole}")
    element = np.arange(8), np.ones((8, 1), np.float32)
    if BACKEND == "torch" and not whole:  # which looks up as it goes
        served.train_on_batch(element)
        return
    with pytest.raises(MisuseError, match="uses all of it: leave it out" if whole else "depend on rows of the tables"):
        served.train_on_batch(element)


class Own(keras.layers.Embedding):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * 2


def own() -> Any:
    model = keras.Sequential([keras.Input(()), Own(9, 4)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model_fn", "tables", "error", "message"),
    [
        (recommender, ["user"], ValueError, "'user', which fits no keras.layers.Embedding: there are .*'users'"),
        (recommender, "users", TypeError, "give a dict of patterns and optimizers"),
        (recommender, {"users": "adam"}, TypeError, r"tables\['users'\] is a str"),
        (lambda: recommender(words={"embeddings_regularizer": "l2"}), ["*"], MisuseError, "'words' has embeddings_reg"),
        (lambda: recommender(words={"embeddings_constraint": "max_norm"}), [], MisuseError, "constraint MaxNorm, wh"),
        (lambda: recommender(words={"lora_rank": 2}), ["words"], MisuseError, "has LoRA"),
        (own, ["*"], MisuseError, "is a Own with a call of its own"),
    ],
)
def test_what_can_be_no_table_is_named(
    strategy: ParameterServerStrategy, model_fn: Any, tables: Any, error: type[Exception], message: str
) -> None:
    before = len(strategy.variables)
    with strategy.scope(), pytest.raises(error, match=message):
        pscluster.keras.serve(model_fn, tables=tables, name="e")
    assert len(strategy.variables) == before
