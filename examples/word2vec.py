"""Learn what words mean from the company they keep; of the tables only the rows that a batch touches are sent.

    pscluster run --ps 2 --workers 3 examples/word2vec.py
    pscluster run --ps 2 --workers 3 examples/word2vec.py --files novel.txt letters.txt --words love death

Skip-gram with negative sampling (Mikolov et al. 2013). The text is what every machine with Python has, the docstrings
of its standard library, or the files you give. Each word has a row in two tables, which are cut over all servers and
made there: for a table larger than one machine set --vocabulary and --shards.
"""

import argparse
import ast
import functools
import math
import os
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.coordinator import (
    ClusterCoordinator,
    DistributedDataset,
    FixedShardsPartitioner,
    IndexedSlices,
    ParameterServerStrategy,
    TFConfigClusterResolver,
    Variable,
    callbacks,
    embedding_lookup,
    initializers,
    metrics,
    optimizers,
)

WINDOW = 3  # words that count as near, before and after
OFFSETS = np.array([offset for offset in range(-WINDOW, WINDOW + 1) if offset])
DRAWN = 6  # words drawn for each word of the text, as negative examples
NEGATIVES = 2  # their total weight for each neighbour
RARE = 5  # less frequent words are left out
THIN = 1e-3  # of more frequent words, some occurrences are left out
HELD_OUT = 20  # one of this many sentences is held out
BLOCK = 1 << 16  # rows or words at a time, in passes over all of them
NO_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}  # folders
ASKED = ("file", "socket", "thread", "integer", "error", "encoding", "month", "server", "header", "left", "mouse")
Array = np.ndarray[Any, np.dtype[Any]]


# The text


def documentation() -> Iterator[str]:
    """The docstrings of the standard library, read from its sources: nothing is imported."""
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted({*folders} - NO_TEXT)
        for file in sorted(name for name in files if name.endswith(".py")):
            try:
                nodes: list[Any] = [ast.parse(Path(folder, file).read_bytes())]
            except SyntaxError:  # for another version, or a template
                continue
            while nodes:
                node = nodes.pop()
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield ast.get_docstring(node) or ""
                nodes += getattr(node, "body", [])


def sentences(texts: Iterable[str]) -> list[tuple[str, ...]]:
    """Their words, each sentence once, in a fixed order that is unrelated to the text's."""
    paragraphs = [paragraph for text in texts for paragraph in re.split(r"\n\s*\n", text)]
    prose = [paragraph for paragraph in paragraphs if not paragraph.lstrip().startswith(">>>")]
    parts = [sentence for paragraph in prose for sentence in re.split(r"(?<=[.!?:;])\s", paragraph)]
    distinct = dict.fromkeys(tuple(re.findall(r"[^\W\d_]{2,}", sentence.lower())) for sentence in parts)
    several = [words for words in distinct if len(words) > 2]
    return [several[index] for index in np.random.default_rng(1).permutation(len(several))]


@dataclass(eq=False)
class Windows:
    """The words of a text, each with those near it in its sentence, -1 if there is none. Created when read."""

    ids: Array
    lies_in: Array  # the sentence's number

    @classmethod
    def of(cls, text: Sequence[Sequence[str]], ids: dict[str, int], kept: Array) -> "Windows":
        """The share, from 0 to 1, of the occurrences of a word with this id that is kept."""
        rng = np.random.default_rng(2)
        known = [[ids[word] for word in words if word in ids] for words in text]
        flat = np.array([word_id for words in known for word_id in words], np.int32)
        lies_in = np.repeat(np.arange(len(known), dtype=np.int32), [len(words) for words in known])
        stays = rng.random(len(flat)) < kept[flat]
        return cls(flat[stays], lies_in[stays])

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        """The words at these places, and for each the 2 * WINDOW around it."""
        places = np.arange(start, stop)[:, np.newaxis] + OFFSETS
        inside = places.clip(0, len(self.ids) - 1)
        near = (places == inside) & (self.lies_in[inside] == self.lies_in[start:stop, np.newaxis])
        return self.ids[start:stop], np.where(near, self.ids[inside], -1)


def corpus(text: Sequence[Sequence[str]], vocabulary: int) -> tuple[list[str], Windows, Windows]:
    """The distinct words, most frequent first; and, with their numbers there as ids, what to train on and what to hold
    out."""
    frequent = Counter(word for words in text for word in words).most_common(vocabulary)
    ids = {word: word_id for word_id, (word, count) in enumerate(frequent) if count >= RARE}
    shares = np.array([count for _, count in frequent[: len(ids)]]) / max(1, sum(map(len, text)))
    kept = np.sqrt(THIN / np.maximum(shares, THIN))
    cut = len(text) // HELD_OUT
    return list(ids), Windows.of(text[cut:], ids, kept), Windows.of(text[:cut], ids, kept)


Batch = tuple[Array, Array, Array, Array]
"""Words (size,); and (size, 2 * WINDOW + DRAWN) each others, whether they were near it, and what they weigh."""


def shares_below(counts: Array) -> Array:
    """For each word, the share of draws that are words up to it, from their counts."""
    return np.cumsum(counts**0.75) / np.sum(counts**0.75)


def draw(drawn_below: Array, seed: int, batch: tuple[Array, Array]) -> Batch:
    """Add words that are not near to a batch: for each batch the same ones at every attempt."""
    words, near = batch
    rng = np.random.default_rng([seed, zlib.crc32(words.tobytes()), zlib.crc32(near.tobytes())])
    drawn = np.searchsorted(drawn_below[:-1], rng.random((len(words), DRAWN)), "right")
    there = near >= 0
    weights = np.broadcast_to(NEGATIVES / DRAWN * there.sum(axis=1, keepdims=True), drawn.shape)
    labels = np.broadcast_to(np.arange(near.shape[1] + DRAWN) < near.shape[1], (len(words), near.shape[1] + DRAWN))
    others = np.concatenate([np.maximum(near, 0), drawn], axis=1)
    return words, others, labels, np.concatenate([there, weights], axis=1, dtype=np.float32)


# The model


def row_of(ids: Array | Sequence[int], vocabulary: int) -> Array:
    """A word's row in the tables. Words are spread over them, so that each shard has its share of the frequent ones."""
    stride = round(0.618 * vocabulary)
    while math.gcd(stride, vocabulary) > 1:
        stride += 1
    rows: Array = np.asarray(ids, np.int64) * stride % vocabulary
    return rows


def likely(of_words: Array, of_others: Array) -> Array:
    """The probability that each other word is near, from the rows (size, dim) and (size, others, dim)."""
    predicted: Array = 1 / (1 + np.exp(-np.matmul(of_others, of_words[:, :, np.newaxis])[:, :, 0]))
    return predicted


def gradients(d_scores: Array, of_words: Array, of_others: Array) -> tuple[Array, Array]:
    """The gradients by the rows of the words and of the others, from those by the scores."""
    return np.matmul(d_scores[:, np.newaxis], of_others)[:, 0], d_scores[:, :, np.newaxis] * of_words[:, np.newaxis]


def log_losses(predicted: Array, labels: Array) -> Array:
    return -np.log(np.maximum(np.where(labels, predicted, 1 - predicted), 1e-9))


def step(tables: Sequence[Variable], optimizer: optimizers.Optimizer, batch: Batch) -> float:
    """Train on a batch, on whichever worker is free."""
    words, others, labels, weights = batch
    places = [row_of(words, len(tables[0])), row_of(others, len(tables[1]))]
    rows = embedding_lookup(tables, places)  # each distinct row once, one request per server
    predicted = likely(*rows)
    row_gradients = gradients((predicted - labels) * weights, *rows)
    slices = [
        IndexedSlices(d.reshape(-1, d.shape[-1]), ids.reshape(-1)) for d, ids in zip(row_gradients, places, strict=True)
    ]
    optimizer.apply_gradients(zip(slices, tables, strict=True))  # gradients for the same row are summed
    return float(np.average(log_losses(predicted, labels), weights=weights))


def predict(tables: Sequence[Variable], batch: Batch) -> dict[str, tuple[Array, ...]]:
    """The metrics' input for a batch, on workers, too: each example counts once."""
    words, others, labels, weights = batch
    predicted = likely(*embedding_lookup(tables, [row_of(words, len(tables[0])), row_of(others, len(tables[1]))]))
    return {"loss": (log_losses(predicted, labels), weights), "auc": (labels, predicted, weights)}


class Speed(callbacks.Callback):
    """How many words of the text are trained on per second, without evaluation."""

    def __init__(self, train: DistributedDataset) -> None:
        self._train = train
        self._words = self._seconds = 0.0

    def _take(self, sign: int) -> None:
        self._words += sign * (self._train.epoch * self._train.examples + self._train.visited)
        self._seconds += sign * time.monotonic()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._take(-1)

    def on_test_begin(self, *_: Any, **__: Any) -> None:
        self._take(1)

    def __str__(self) -> str:
        return f"{self._words / max(self._seconds, 1e-9):,.0f} words/s"


# What to compare with


def baselines(train: Windows, batches: Iterable[Batch], counts: Array) -> tuple[float, float]:
    """The AUC reached by word frequencies alone, and by how often two words were near each other."""
    held_out = list(batches)
    keys = [words[:, np.newaxis].astype(np.int64) * len(counts) + others for words, others, _, _ in held_out]
    asked = np.unique(np.concatenate(keys))
    pairs = np.zeros(len(asked))
    for start in range(0, len(train), BLOCK):
        words, near = train.read(start, min(start + BLOCK, len(train)))
        trained = (words[:, np.newaxis].astype(np.int64) * len(counts) + near)[near >= 0]
        places = np.searchsorted(asked, trained).clip(max=len(asked) - 1)
        pairs += np.bincount(places[asked[places] == trained], minlength=len(asked))
    auc = metrics.AUC(num_thresholds=1000)
    by_frequency, by_pairs = auc.initial(), auc.initial()
    for key, (words, others, labels, weights) in zip(keys, held_out, strict=True):
        more = counts[others] ** 0.25  # near this many times for each time drawn
        frequency = more / (more + np.mean(counts) ** 0.25)
        observed, expected = pairs[np.searchsorted(asked, key)], counts[words][:, np.newaxis] * counts[others]
        excess = observed / (observed + expected / len(train) * 2 * WINDOW)  # relative to what chance would give
        by_frequency = auc.update(by_frequency, labels, frequency, weights)
        by_pairs = auc.update(by_pairs, labels, np.where(observed, 1 + excess, frequency) / 2, weights)
    return auc.result(by_frequency), auc.result(by_pairs)


# What was learned


def unit(rows: Array) -> Array:
    """The same directions, with length 1."""
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return scaled


def neighbours(table: Variable, words: int, asked: Sequence[int], count: int = 6) -> Array:
    """For each given id, all words by the angle between their rows, nearest first."""
    of_asked = unit(embedding_lookup(table, row_of(asked, len(table))))
    blocks = [row_of(np.arange(start, min(start + BLOCK, words)), len(table)) for start in range(0, words, BLOCK)]
    cosines = np.concatenate([of_asked @ unit(embedding_lookup(table, block)).T for block in blocks], axis=1)
    cosines[np.arange(len(asked)), asked] = -np.inf
    return np.argsort(-cosines, axis=1)[:, :count]


def draw_picture(file: str, rows: Array, names: Sequence[str], groups: Sequence[int]) -> None:
    """Draw the words in the plane that shows most of their differences (the first two principal components)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no picture is drawn, since matplotlib is not installed: pip install "pscluster[plot]"')
        return
    centered = unit(rows) - unit(rows).mean(axis=0)
    x, y = (centered @ np.linalg.svd(centered, full_matrices=False)[2][:2].T).T
    figure = Figure(figsize=(12, 9), layout="tight")
    axes = figure.add_subplot()
    colors = [f"C{group % 10}" for group in groups]
    axes.scatter(x, y, c=colors, s=12)
    for name, color, left, bottom in zip(names, colors, x, y, strict=True):
        axes.annotate(name, (left, bottom), color=color, xytext=(3, 3), textcoords="offset points")
    axes.set_axis_off()
    figure.savefig(file, dpi=100)
    print(f"the picture of {len(names)} words is in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train vectors of words on a parameter-server cluster.")
    parser.add_argument("--files", nargs="+", type=Path, help="texts to learn from, instead of Python's documentation")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="words of the text a step")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="rows of a table: words that there is room for")
    parser.add_argument("--dim", type=int, default=64, help="length of a row")
    parser.add_argument("--shards", type=int, help="parts of a table; default: one a server")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", nargs="+", default=ASKED, help="whose neighbours are shown")
    parser.add_argument("--picture", default="word2vec.png", help="file to draw them into")
    parser.add_argument("--checkpoints", type=Path, help="directory to keep them in, and to go on from")
    options = parser.parse_args()

    files = (path.read_text("utf-8", errors="replace") for path in options.files or ())
    words, train_text, held_out_text = corpus(
        sentences(files if options.files else documentation()), options.vocabulary
    )
    if len(words) < 2 or not len(held_out_text):
        sys.exit(f"there are {len(words)} words that are there {RARE} times: give a longer text with --files")
    print(f"{len(train_text):,} words to train on, {len(held_out_text):,} held out, {len(words):,} distinct ones")
    counts = np.maximum(1, np.bincount(train_text.ids, minlength=len(words)))

    strategy = ParameterServerStrategy(TFConfigClusterResolver())
    partitioner = FixedShardsPartitioner(options.shards or strategy.cluster_resolver.cluster_spec().num_tasks("ps"))
    vocabulary, most = options.vocabulary, 0.5 / options.dim
    shape = vocabulary, options.dim
    with strategy.scope():
        of_words = Variable(
            initializers.RandomUniform(-most, most, options.seed), name="words", shape=shape, partitioner=partitioner
        )
        of_others = Variable(initializers.Zeros(), name="others", shape=shape, partitioner=partitioner)
        adagrad = optimizers.Adagrad(
            options.learning_rate, initial_accumulator_value=1e-5, weight_decay=0.01, name="adagrad"
        )
    coordinator = ClusterCoordinator(strategy)
    train = (
        coordinator.distribute_dataset(train_text, name="train").shuffle(seed=options.seed).batch(options.batch_size)
    )
    held_out = coordinator.distribute_dataset(held_out_text, name="held out").batch(options.batch_size)
    train = train.map(functools.partial(draw, shares_below(counts), options.seed))
    held_out = held_out.map(functools.partial(draw, shares_below(counts), 3))
    tables = [of_words, of_others]
    predicting = functools.partial(predict, tables)

    scored = {"loss": metrics.Mean(), "auc": metrics.AUC(num_thresholds=1000)}
    speed, backup = Speed(train), []
    if options.checkpoints:
        backup = [callbacks.BackupAndRestore(str(options.checkpoints.resolve()), delete_checkpoint=False)]
    coordinator.fit(
        functools.partial(step, tables, adagrad),  # at the top level: runs without pickles, too (--no-pickle)
        train,
        epochs=options.epochs,
        validation_data=held_out,
        validation_step=predicting,
        validation_metrics=scored,
        callbacks=[speed, *backup],
    )

    asked = [words.index(word) for word in options.words if word in words] or list(range(min(12, len(words))))
    groups: dict[int, int] = {}
    for group, (word_id, near) in enumerate(zip(asked, neighbours(of_words, len(words), asked), strict=True)):
        print(f"{words[word_id]:>10}: {' '.join(words[other] for other in near)}")
        for other in (word_id, *near.tolist()):
            groups.setdefault(other, group)
    print(strategy.placement())
    print(speed)
    by_frequency, by_pairs = baselines(train_text, held_out.local(), counts)
    reached = coordinator.evaluate(predicting, held_out, scored)["auc"]
    print(f"held-out AUC {reached:.4f}; {by_frequency:.4f} by frequency alone, {by_pairs:.4f} by counting pairs")
    names, rows = [words[word_id] for word_id in groups], embedding_lookup(of_words, row_of([*groups], vocabulary))
    draw_picture(options.picture, rows, names, list(groups.values()))
    if reached <= by_frequency:
        sys.exit("that is no more than the frequency of words tells: give it a longer text, or more epochs")


if __name__ == "__main__":
    main()
