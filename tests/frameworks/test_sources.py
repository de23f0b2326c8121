"""Datasets of Hugging Face, and tars that webdataset wrote, as sources."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import webdataset
from webdataset import tariterators

from pscluster.coordinator import sources
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import source_of


def read(source: Any, **options: Any) -> list[Any]:
    """Return the elements of an epoch, as a worker has them after the source was sent to it."""
    pipeline = pickle.loads(pickle.dumps(Pipeline(source_of(source), "data", **options)))
    return list(pipeline.elements(0, 0, pipeline.visited_length))


@pytest.mark.parametrize("saved", [False, True])
def test_hugging_face(tmp_path: Path, saved: bool) -> None:
    """In memory or in files, also with rows that were chosen: each once, with the types of Arrow."""
    features = datasets.Features(
        {"n": datasets.Value("int32"), "s": datasets.Value("string"), "v": datasets.List(datasets.Value("float32"), 3)}
    )
    rows = {"n": list(range(3000)), "s": [str(n) for n in range(3000)], "v": [[n, 0, 0] for n in range(3000)]}
    dataset = datasets.Dataset.from_dict(rows, features)
    if saved:
        dataset.save_to_disk(str(tmp_path / "saved"), num_shards=3)
        dataset = datasets.load_from_disk(str(tmp_path / "saved"))
    source = sources.hugging_face(dataset.shuffle(seed=1).select(range(2500)))
    batches = read(source, batch=64, seed=2)
    assert len(np.unique(np.concatenate([batch["n"] for batch in batches]))) == 2500
    for batch in batches:
        assert (batch["n"].dtype, batch["s"].dtype, batch["v"].dtype) == (np.int32, object, np.float32)
        assert batch["s"].tolist() == [str(n) for n in batch["n"].tolist()]
        np.testing.assert_array_equal(batch["v"][:, 0], batch["n"])
    assert list(read(sources.hugging_face(dataset, columns=["s"]))[0]) == ["s"]
    assert read(dataset)[17]["s"] == "17", "and as a sequence"


def test_what_is_refused() -> None:
    """Dicts of datasets, datasets without a length, columns that are missing."""
    dataset = datasets.Dataset.from_dict({"n": [1]})
    with pytest.raises(TypeError, match=r"give one of them, dataset\['train'\]"):
        sources.hugging_face(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(TypeError, match="IterableDataset is not a Dataset of Hugging Face that has a length"):
        sources.hugging_face(dataset.to_iterable_dataset())
    with pytest.raises(ValueError, match="the dataset has no column 'm'"):
        sources.hugging_face(dataset, columns=["m"])


def test_webdataset(tmp_path: Path) -> None:
    """What its writer wrote is read as its reader does."""
    with webdataset.ShardWriter(f"{tmp_path}/%03d.tar", maxcount=40, verbose=0) as writer:
        for n in range(100):
            writer.write({"__key__": f"{n:04}", "cls": n, "x.npy": np.arange(n)})
    examples = read(sources.webdataset(f"{tmp_path}/*.tar"))
    theirs: list[dict[str, Any]] = []
    for path in sorted(tmp_path.glob("*.tar")):
        with path.open("rb") as file:
            members = tariterators.tar_file_iterator(file)
            theirs += tariterators.group_by_keys({**member, "__url__": path.name} for member in members)
    for mine, other in zip(examples, theirs, strict=True):
        assert mine == {name: other[name] for name in ("__key__", "cls", "x.npy")}
