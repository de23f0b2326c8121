"""Sources that are files, as a worker reads them: real files of each kind, whole and broken."""

from __future__ import annotations

import functools
import http.server
import io
import itertools
import json
import os
import pickle
import random
import tarfile
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv
from pyarrow.feather import write_feather

from pscluster.coordinator import sources
from pscluster.core.errors import DatasetError, MisuseError
from pscluster.core.functions import policy
from pscluster.core.values.decoding import decode
from pscluster.core.values.encoding import encode
from pscluster.worker.data.files import lines, tars
from pscluster.worker.data.files.columns import need_arrow
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import Blocks, Ranges, source_of

ROWS = 1000
MEMORY: Any = fsspec.filesystem("memory")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(rows: int = ROWS, first: int = 0) -> pa.Table:
    """Rows with a number of their own, and strings."""
    number = np.arange(first, first + rows)
    return pa.table({"number": number, "half": number / 2, "word": [f"w{n}" for n in number.tolist()]})


def write(path: Path, of: pa.Table, **options: Any) -> None:
    """Write a table in the format that the path's ending says."""
    if path.suffix == ".parquet":
        pq.write_table(of, path, **options)
    elif path.suffix == ".arrow":
        write_feather(of, path, chunksize=options.get("row_group_size"))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in of.to_pylist()))
    else:
        write_csv(of, path)


def read(source: Any, *, epoch: int = 0, **options: Any) -> list[Any]:
    """Return the elements of an epoch, as a worker has them after the source was sent to it."""
    sent = pickle.loads(pickle.dumps(Pipeline(source_of(source), "files", **options)))
    elements = list(sent.elements(epoch, 0, sent.visited_length))
    for element in elements:
        if isinstance(element, Exception):
            raise element
    return elements


def column(elements: list[Any], name: str = "number") -> list[Any]:
    """Return the values of one column of all batches."""
    return [value for element in elements for value in element[name].tolist()]


KINDS: dict[str, Callable[..., Any]] = {
    "parquet": lambda path, **options: sources.parquet(path, block_rows=100, **options),
    "csv": lambda path, **options: sources.csv(path, block_bytes=1000, **options),
    "jsonl": lambda path, **options: sources.json_lines(path, block_bytes=1000, **options),
    "arrow": sources.arrow,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_once_an_epoch(folder: Path, kind: str) -> None:
    """In the order of the files; shuffled in one that the seed gives; some of the columns, in any order."""
    write(folder / f"b.{kind}", table(first=ROWS), row_group_size=300)
    write(folder / f"a.{kind}", table(), row_group_size=70)
    source = KINDS[kind](f"*.{kind}")
    in_order = read(source, batch=64)
    assert column(in_order) == list(range(2 * ROWS))
    assert in_order[0]["half"].dtype == np.float64
    assert column(in_order, "word")[-1] == "w1999"
    assert in_order[0]["word"].dtype == object
    orders = [column(read(source, epoch=epoch, batch=64, seed=3)) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(2 * ROWS)) for order in orders)
    assert any(order[0] >= ROWS or order[-1] < ROWS for order in (orders[0], orders[2])), "files are shuffled, too"
    (first, *_) = read(KINDS[kind]([f"{folder}/a.{kind}"], columns=["word", "number"]))
    assert (list(first), first["word"], int(first["number"])) == (["word", "number"], "w0", 0)


def test_batches_may_be_written_to(folder: Path) -> None:
    """They share nothing with what the source keeps."""
    write(folder / "a.parquet", table(), row_group_size=ROWS)
    source = sources.parquet("a.parquet", block_rows=300)
    for seed in (None, 1):
        for batch in (elements := read(source, batch=50, seed=seed)):
            batch["number"] += 1
        assert sorted(column(elements)) == list(range(1, ROWS + 1))
        assert sorted(column(read(source, batch=50, seed=seed))) == list(range(ROWS))


def test_rows_of_row_groups(folder: Path) -> None:
    """Small row groups are put together, a large one is cut, and its blocks stay together in any order."""
    write(folder / "small.parquet", table(), row_group_size=40)
    write(folder / "zlarge.parquet", table(10_000, ROWS), row_group_size=10_000)
    source = sources.parquet("*.parquet", block_rows=100)
    assert isinstance(source, Blocks)
    assert source.sizes is not None
    assert source.sizes.tolist() == [80] * 12 + [40] + [2500] * 4
    assert source.name_of(1) == f"rows 80 to 159 of '{folder}/small.parquet'"
    for epoch in range(5):
        order = [bool(element["number"][0] >= ROWS) for element in read(source, epoch=epoch, batch=10_000, seed=1)]
        assert sum(order) == 4
        assert "".join("ny"[large] for large in order).strip("n") == "yyyy"


def test_filters(folder: Path) -> None:
    """Rows that match, also by a column that is not read; row groups without any are no blocks."""
    write(folder / "a.parquet", table(), row_group_size=100)
    source = sources.parquet("a.parquet", columns=["word"], filters=[("number", ">=", 650)], block_rows=50)
    assert len(source) == 4 * 2
    assert column(read(source, batch=64), "word") == [f"w{n}" for n in range(650, ROWS)]
    assert list(read(source)[0]) == ["word"]
    expression = sources.parquet("a.parquet", filters=(pc.field("number") == 7) | (pc.field("half") == 400))
    assert column(read(expression, batch=64)) == [7, 800]


def test_partitions_in_the_names_of_folders(folder: Path) -> None:
    """They are columns, of numbers or texts; of filtered ones the files that can't match are not read."""
    for year, shop in itertools.product((2023, 2024), ("a b", "7")):
        path = folder / f"year={year}" / f"shop={shop.replace(' ', '%20')}"
        path.mkdir(parents=True)
        write(path / "x.parquet", table(200, year), row_group_size=60)
    pattern = "year=*/*/*.parquet"
    (first, *_) = found = read(sources.parquet(pattern, hive_partitioning=True, block_rows=100), batch=64, seed=1)
    assert list(first) == ["number", "half", "word", "year", "shop"]
    assert first["year"].dtype == np.int64
    assert sorted(zip(column(found, "year"), column(found, "shop"), column(found), strict=True)) == [
        (year, shop, year + n) for year in (2023, 2024) for shop in ("7", "a b") for n in range(200)
    ]
    for path in folder.glob("year=2023/*/*"):
        content = bytearray(path.read_bytes())
        content[4:200] = bytes(196)  # its footer is read, and nothing else of it
        path.write_bytes(content)
    filters = [("year", ">", 2023), ("shop", "==", "7"), ("number", "<", 2074)]
    source = sources.parquet(pattern, hive_partitioning=True, columns=["shop", "number"], filters=filters)
    assert len(source) == 1
    (batch,) = read(source, batch=100)
    assert list(batch) == ["shop", "number"]
    assert (batch["number"].tolist(), set(batch["shop"])) == (list(range(2024, 2074)), {"7"})
    assert "year" not in read(sources.parquet("year=2024/*/*.parquet"))[0]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"paths": pattern, "columns": ["year"]}, "are all in the names of folders: add one that is in the files"),
        (
            {"paths": [pattern, "z/*"]},
            "z/x.parquet' is in folders that name nothing, and .* in ones that name 'year', ",
        ),
        ({"paths": "z/*"}, "hive_partitioning=True, and '.*x.parquet' is in no folder such as 'year=2024'"),
        ({"paths": "number=3/*"}, "the column 'number' is in '.*', and in the names of its folders: rename one"),
        ({"paths": pattern, "filters": [("month", ">", 3)]}, r"don't fit .*, with columns .* 'word', 'year', 'shop'"),
    ]
    for name in ("z", "number=3"):
        (folder / name).mkdir()
        write(folder / name / "x.parquet", table(5))
    for options, said in refused:
        with pytest.raises(ValueError, match=said):
            sources.parquet(**options, hive_partitioning=True)


def test_types(folder: Path) -> None:
    """What becomes of each type of Arrow, with nulls filled."""
    of = pa.table(
        {
            "flag": [True, False],
            "small": pa.array([1, None], pa.int8()),
            "time": pa.array([1, 2], pa.timestamp("us", "UTC")),
            "bytes": [b"a", b"b"],
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "vector": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
            "ids": [[1, 2, 3], []],
            "tags": [["a"], ["b", "c"]],
            "name": ["n", None],
        }
    )
    write(folder / "a.parquet", of)
    write(folder / "a.arrow", of)
    fills = {"small": -1, "name": "unnamed"}
    for source in (sources.parquet("a.parquet", fill_nulls=fills), sources.arrow("a.arrow", fill_nulls=fills)):
        (batch,) = read(source, batch=2)
        assert batch["flag"].tolist() == [True, False]
        assert (batch["small"].dtype, batch["small"].tolist()) == (np.int8, [1, -1])
        assert batch["time"].dtype == "datetime64[us]"
        assert batch["bytes"].tolist() == [b"a", b"b"]
        assert batch["kind"].tolist() == ["x", "y"]
        assert (batch["vector"].dtype, batch["vector"].shape) == (np.float32, (2, 2))
        assert [ids.tolist() for ids in batch["ids"]] == [[1, 2, 3], []]
        assert [tags.tolist() for tags in batch["tags"]] == [["a"], ["b", "c"]]
        assert batch["name"].tolist() == ["n", "unnamed"]


def test_text(folder: Path) -> None:
    """Lines of every ending, without it; the last one may lack it."""
    (folder / "a.txt").write_bytes("\ufeffone\r\n\ntwo ü\x85\n".encode() + b"three")
    (folder / "b.txt").write_bytes(b"four\n")
    (folder / "empty.txt").touch()
    for size in (1, 7, 1000):
        assert read(sources.text("*.txt", block_bytes=size)) == ["one", "", "two ü\x85", "three", "four"]


def test_csv(folder: Path) -> None:
    """Values in quotes, other delimiters, no header, types that are given, and empty values."""
    (folder / "a.csv").write_bytes('\ufeffn,s\r\n1,"a ""b"""\r\n\r\n2,"c,d"\r\n,\r\n'.encode())
    for size in (1, 1000):
        elements = read(sources.csv("a.csv", types={"n": "float32"}, fill_nulls={"n": -1}, block_bytes=size))
        assert [(float(row["n"]), row["s"]) for row in elements] == [(1.0, 'a "b"'), (2.0, "c,d"), (-1.0, "")]
        assert elements[0]["n"].dtype == np.float32
    (folder / "b.tsv").write_text('1\t5"\n2\t6\n')
    plain = read(sources.csv("b.tsv", names=["n", "s"], delimiter="\t", quoting=False, types={"s": str}), batch=2)
    assert plain[0]["s"].tolist() == ['5"', "6"]
    (folder / "c.csv").write_text('n,s\n1,"a\nb"\n2,"c\n\nd"\n3,e\n')
    (folder / "d0.csv").write_text("n,s")
    (folder / "d1.csv").write_text("n,s\n5,f\n")
    rows = read(sources.csv("d?.csv"), batch=1)
    assert column(rows, "n") == [5], "types are those of the first file with rows"
    for size in (*range(1, 30), 1000):
        rows = read(sources.csv("c.csv", quoted_newlines=True, block_bytes=size), batch=1)
        assert (column(rows, "n"), column(rows, "s")) == ([1, 2, 3], ["a\nb", "c\n\nd", "e"])


@pytest.mark.timeout(60)  # of a second: nothing is done for each pair of columns
def test_csv_of_many_columns(folder: Path) -> None:
    """Whose header is longer than what is looked at of other files."""
    names = [f"feature {number}" for number in range(10_000)]
    (folder / "wide.csv").write_text(",".join(names) + "\n" + ",".join(map(str, range(10_000))) + "\n")
    (row,) = read(sources.csv("wide.csv"), batch=1)
    assert list(row) == names
    assert row[names[-1]].tolist() == [9_999]


def test_json(folder: Path) -> None:
    """Fields that are missing, more than expected, lists."""
    (folder / "a.jsonl").write_text('{"a": 1, "l": [1, 2]}\n\n{"l": [], "b": 2}\n{"a": 3, "z": {}, "l": [4]}\n')
    for size in (1, 1000):
        source = sources.json_lines("a.jsonl", columns=["a", "l"], fill_nulls={"a": 0}, block_bytes=size)
        batches = read(source, batch=5)
        assert column(batches, "a") == [1, 0, 3]
        assert [ids.tolist() for batch in batches for ids in batch["l"]] == [[1, 2], [], [4]]


def test_npy(folder: Path) -> None:
    """Several files as one array, several arrays side by side."""
    for index in range(3):
        np.save(folder / f"x{index}.npy", np.arange(index * 700, (index + 1) * 700))
    np.save(folder / "y.npy", np.arange(4200.0).reshape(2100, 2))
    assert np.concatenate(read(sources.npy("x*.npy"), batch=64)).tolist() == list(range(2100))
    both = sources.npy({"x": "x*.npy", "y": ["y.npy"]})
    assert len(both) == 2100
    shuffled = read(both, batch=64, seed=1)
    assert sorted(column(shuffled, "x")) == list(range(2100))
    assert all((batch["y"][:, 0] == 2 * batch["x"]).all() for batch in shuffled)
    shuffled[0]["x"][:] = -1
    assert min(column(read(both, batch=64), "x")) == 0
    with pytest.raises(ValueError, match=r"the arrays have {'0': 700, '1': 2100} rows"):
        sources.npy(("x0.npy", "y.npy"))


def tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar, compressed as its ending says."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def test_a_file_in_a_tar_has_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is read; what is part of no example may have any size, and is not read."""
    monkeypatch.setattr(tars, "LARGEST_FILE", 1000)
    tar(folder / "good.tar", {"model": bytes(9999), ".hidden.x": bytes(9999), "a.x": bytes(1000)})
    assert [example["x"] for example in read(sources.webdataset("good.tar"))] == [bytes(1000)]
    tar(folder / "large.tar.gz", {"a.x": b"", "b.x": bytes(1001)})
    with pytest.raises(DatasetError, match=r"large.tar.gz' has 'b.x', a file of 1,001 bytes; the limit is 1,000"):
        read(sources.webdataset("large.tar.gz"))


def test_tars(folder: Path) -> None:
    """Neighbours whose names are alike are an example; a tar that was cut short is refused where it is."""
    for index, name in enumerate(["0.tar", "1.tar.gz"]):
        numbers = range(index * 100, (index + 1) * 100)
        files = [(f"d/{n:03}.cls", b"%d" % n) for n in numbers] + [(f"d/{n:03}.x.BIN", bytes(n)) for n in numbers]
        tar(folder / name, {"README": b"", **dict(sorted(files))})
    source = sources.webdataset("*.tar*")
    examples = read(source)
    assert [int(example["cls"]) for example in examples] == list(range(200))
    assert examples[7] == {"__key__": "d/007", "cls": b"7", "x.bin": bytes(7)}
    (first, *_) = read(source, batch=32)
    assert (first["x.bin"][3], first["cls"].dtype) == (bytes(3), object)
    shuffled = [int(example["cls"]) for example in read(source, seed=1, split=10)]
    assert shuffled != sorted(shuffled) == list(range(200))
    (folder / "cut.tar").write_bytes((folder / "0.tar").read_bytes()[:70_000])
    tar(folder / "twice.tar", {"a.x": b"", "a.X": b""})
    with pytest.raises(
        DatasetError, match=r"after the first \d\d examples of the file '.*cut.tar'.* has no end, so it"
    ):
        read(sources.webdataset("cut.tar"))
    bits, damaged = random.Random(1).randbytes(40_000), folder / "damaged.tar.gz"
    tar(damaged, {"a.x": bits, "b.x": bits[::-1]})
    whole = damaged.read_bytes()
    for content in (whole[:-4], whole[:-1500] + bytes([whole[-1500] ^ 1]) + whole[-1499:]):
        damaged.write_bytes(content)
        with pytest.raises(DatasetError, match=r"'.*damaged.tar.gz' can't be read as a tar file"):
            read(sources.webdataset("damaged.tar.gz"))
    with pytest.raises(DatasetError, match=r"'.*twice.tar' has 'a.x' twice in one example"):
        read(sources.webdataset("twice.tar"))
    (folder / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"'.*a.txt' can't be read as a tar file"):
        sources.webdataset("a.txt")


def test_urls(folder: Path) -> None:
    """Whatever fsspec opens: here memory, with a pattern."""
    write(folder / "a.parquet", table())
    write(folder / "a.csv", table())
    for name in ("a.parquet", "a.csv"):
        for copy in "12":
            MEMORY.pipe(f"/pscluster-test/{copy}{name}", (folder / name).read_bytes())
    assert column(read(sources.parquet("memory://pscluster-test/*.parquet"), batch=100)) == 2 * list(range(ROWS))
    urls = ["memory://pscluster-test/1a.csv", "memory://pscluster-test/2a.csv"]
    assert column(read(sources.csv(urls, block_bytes=5000), batch=100)) == 2 * list(range(ROWS))
    filtered = sources.parquet(urls[0].replace("csv", "parquet"), filters=[("number", "<", 3)])
    assert column(read(filtered, batch=100)) == [0, 1, 2]
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: sources.parquet("memory://pscluster-test/none*"), "no file matches 'memory://pscluster-test/none"),
        (lambda: sources.parquet("memory://pscluster-test/none"), "there is no file 'memory://pscluster-test/none'"),
        (lambda: sources.parquet("nothing://a"), "fsspec can't open 'nothing://a'"),
        (lambda: sources.arrow("memory://pscluster-test/1a.csv"), "is not a local file, and Arrow files are mapped"),
        (lambda: sources.npy("memory://pscluster-test/1a.csv"), "is not a local file, and npy files are mapped"),
    ]
    for make, said in refused:
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            make()


class Silent(http.server.SimpleHTTPRequestHandler):
    """Sends files, whole ones only, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


def test_urls_of_a_server(folder: Path) -> None:
    """One that sends whole files only, and one that is not there, are not taken for files that are wrong or missing."""
    write(folder / "a.csv", table())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        url = f"http://127.0.0.1:{server.server_port}/a.csv"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            assert column(read(sources.csv(url), batch=100)) == list(range(ROWS))
            with pytest.raises(DatasetError, match=f"'{url}' can't be read in blocks: The HTTP server .* range"):
                read(sources.csv(url, block_bytes=5000))
        finally:
            server.shutdown()
            serving.join()
    with pytest.raises(FileNotFoundError, match=f"there is no file '{url}', or it can't be reached: Cannot connect"):
        sources.csv(url)


# Bad input


@pytest.fixture
def broken(folder: Path) -> Path:
    """Files that are not what they should be."""
    write(folder / "good.parquet", table())
    write(folder / "good.csv", table())
    write(folder / "good.jsonl", table())
    write(folder / "good.arrow", table())
    write(folder / "other.parquet", table().set_column(0, "number", pa.array(map(str, range(ROWS)))))
    write(folder / "other.arrow", table().set_column(0, "number", pa.array(map(str, range(ROWS)))))
    write(folder / "nested.parquet", pa.table({"s": [{"a": 1}]}))
    np.save(folder / "good.npy", np.zeros((3, 2)))
    np.save(folder / "other.npy", np.zeros((3, 4)))
    np.save(folder / "scalar.npy", np.float32(1))
    np.save(folder / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(folder / "archive.npz", a=np.zeros(3))
    (folder / "cut.parquet").write_bytes((folder / "good.parquet").read_bytes()[:-20])
    (folder / "cut.arrow").write_bytes((folder / "good.arrow").read_bytes()[:-200])
    (folder / "text.parquet").write_text("a,b\n1,2\n")
    (folder / "zipped.csv").write_bytes(b"\x1f\x8b\x08\x00")
    (folder / "list.jsonl").write_text('[{"a": 1}]\n')
    (folder / "bad.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    (folder / "short.csv").write_text("a,b\n1,2\n3\n")
    (folder / "empty.csv").touch()
    (folder / "blank_header.csv").write_text("\na,b\n1,2\n")
    (folder / "unknown.csv").write_text("a,b\n1,\n2,\n")
    (folder / "quoted.csv").write_text('a,b\n1,"2\n3"\n')
    (folder / "ab.csv").write_text("a,b\n1,2\n")
    (folder / "ba.csv").write_text("b,a\n1,2\n")
    (folder / "twice.csv").write_text("a,b,a\n1,2,3\n")
    (folder / "latin.csv").write_bytes("a,b\n1,Ol\xe9\n".encode("latin1"))
    (folder / "latin_header.csv").write_bytes("a,Ol\xe9\n1,2\n".encode("latin1"))
    (folder / "mac.csv").write_bytes(b"a,b\r1,2\r")
    (folder / "broken_header.csv").write_text('"a\nx",b\n1,2\n')
    (folder / "long.csv").write_text("a\n" + "x" * 1_300_000)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: sources.parquet("no*.parquet"), r"no file matches '.*/no\*\.parquet'"),
    (lambda: sources.csv("no.csv"), r"there is no file '.*/no\.csv'"),
    (lambda: sources.text([]), "no files are given"),
    (lambda: sources.text(["ab.csv", "a?.csv"]), "'.*ab.csv' is given twice"),
    (lambda: sources.text("sub"), r"is a folder: give a pattern for the files in it, such as '.*sub/\*'"),
    (lambda: sources.text("pipe"), "is not a regular file"),
    (
        lambda: sources.text({"a.txt"}),  # type: ignore[arg-type]
        "files are given as a path, .* not as a set",
    ),
    (
        lambda: sources.text([3]),  # type: ignore[list-item]
        "a file is given as text or a Path, not as an int",
    ),
    (lambda: sources.parquet("text.parquet"), "'.*text.parquet' can't be read as a Parquet file"),
    (lambda: sources.parquet("cut.parquet"), "'.*cut.parquet' can't be read as a Parquet file"),
    (lambda: sources.parquet("good.csv"), "'.*good.csv' can't be read as a Parquet file"),
    (
        lambda: sources.parquet("good.parquet", columns=["numbr"]),
        r"'.*' has no column 'numbr' \(did you mean 'number'\?\): its columns are 'number', 'half', 'word'",
    ),
    (lambda: sources.parquet("good.parquet", columns="number"), "columns is 'number'; give a list of names"),
    (lambda: sources.parquet("good.parquet", columns=[]), "columns is empty"),
    (lambda: sources.parquet("good.parquet", columns=["half", "half"]), "columns has 'half' twice"),
    (lambda: sources.parquet("good.parquet", fill_nulls={"x": 0}), "the selection of fill_nulls= has no column 'x'"),
    (
        lambda: sources.parquet(["good.parquet", "other.parquet"]),
        "'number' is of type string in '.*other.parquet',",
    ),
    (
        lambda: sources.parquet("nested.parquet"),
        r"'s' of .* is of type struct<.*>, which has no array .*columns=",
    ),
    (
        lambda: sources.parquet("good.parquet", filters=[("x", ">", 1)]),
        r"the filters .* don't fit '.*good.parquet', with columns [^\n]*$",
    ),
    (
        lambda: sources.parquet("good.parquet", filters=[("number", ">", 10**9)]),
        "no row of '.*good.parquet' can match filters=",
    ),
    (lambda: sources.parquet("good.parquet", filters="x > 1"), "filters='x > 1' is not a filter of pyarrow"),
    (lambda: sources.parquet("good.parquet", block_rows=0), "block_rows is 0; it must be a whole number, 1 or more"),
    (lambda: sources.arrow("good.csv"), "'.*good.csv' can't be read as an Arrow file: it begins with"),
    (lambda: sources.arrow("cut.arrow"), "'.*cut.arrow' can't be read as an Arrow file"),
    (lambda: sources.arrow(["good.arrow", "other.arrow"]), "'number' is of type string in '.*other.arrow', and int64"),
    (lambda: sources.arrow("good.arrow", columns=["x"]), "has no column 'x'"),
    (lambda: sources.npy("good.csv"), "'.*good.csv' can't be read as an npy file: it begins with b'"),
    (lambda: sources.npy("archive.npz"), "'.*archive.npz' can't be read as an npy file: it is an archive"),
    (lambda: sources.npy("objects.npy"), "'.*objects.npy' can't be read as an npy file"),
    (lambda: sources.npy("scalar.npy"), r"'.*scalar.npy' has an array without rows, of shape \(\)"),
    (
        lambda: sources.npy(["good.npy", "other.npy"]),
        r"'.*other.npy' has rows of <f8 and shape \(4,\), and",
    ),
    (lambda: sources.npy({}), "in a dict or tuple, one path, pattern or list for each"),
    (lambda: sources.csv("zipped.csv"), r"'.*zipped.csv' is compressed \(gzip\), .*: decompress it, or convert it"),
    (lambda: sources.csv("good.parquet"), "'.*good.parquet' is not a CSV file: it is a Parquet file"),
    (lambda: sources.text("good.arrow"), "'.*good.arrow' is not a text file: it is an Arrow file"),
    (lambda: sources.csv("short.csv"), "line 3 of '.*short.csv' can't be parsed: .*Expected 2 columns, got 1: 3"),
    (lambda: sources.csv("empty.csv"), "the source has no examples: all its files are empty"),
    (lambda: sources.csv("unknown.csv"), r"'b' has no value in the first lines .*: give it, types={'b': 'float32'}"),
    (lambda: sources.csv(["ab.csv", "ba.csv"]), r"the columns of '.*ba.csv' are \['b', 'a'\], and those of the first"),
    (
        lambda: sources.csv("quoted.csv"),
        "line 2 of '.*quoted.csv' has a quoted value that does not end on it: .*newlines",
    ),
    (lambda: sources.csv("twice.csv"), "'.*twice.csv' has several columns 'a': rename all but one, or give others in"),
    (
        lambda: sources.csv("latin.csv"),
        "the column 'b' of '.*latin.csv' has text that is not UTF-8: .*types={'b': 'binary'} to read it as bytes",
    ),
    (lambda: sources.csv("latin_header.csv"), "the header of '.*latin_header.csv' is not UTF-8: .*; convert the file"),
    (lambda: sources.csv("blank_header.csv"), "the first line of '.*blank_header.csv' is blank: it must have the"),
    (lambda: sources.csv("mac.csv"), "'.*mac.csv' has a carriage return within its first line: end lines with line"),
    (
        lambda: sources.csv("broken_header.csv", quoted_newlines=True),
        "'.*broken_header.csv' has a line break within a name of its header: rename that column",
    ),
    (lambda: sources.csv("long.csv"), "'.*long.csv' is not a CSV file: the line at byte 2 has more than 100,000 bytes"),
    (
        lambda: sources.csv("ab.csv", types={"a": "float16"}),
        "types has 'float16' for 'a', which can't be read from text: CSV conversion to halffloat is not supported",
    ),
    (lambda: sources.csv("ab.csv", columns=["c"]), "'.*ab.csv' has no column 'c': its columns are 'a', 'b'"),
    (lambda: sources.csv("ab.csv", types={"a": "floaty"}), "types has 'floaty' for 'a', which is not a type"),
    (lambda: sources.csv("ab.csv", types={"c": "int8"}), "the selection of types= has no column 'c'"),
    (lambda: sources.csv("ab.csv", delimiter=",,"), "delimiter is ',,'; it must be one ASCII character"),
    (lambda: sources.csv("ab.csv", quoting=False, quoted_newlines=True), "without quotes all line breaks end a line"),
    (
        lambda: sources.csv("ab.csv", block_bytes=1.5),  # type: ignore[arg-type]
        "block_bytes is 1.5; it must be a whole number",
    ),
    (lambda: sources.json_lines("list.jsonl"), "not a file of JSON lines: .*: write one object a line, not a list"),
    (lambda: sources.json_lines("bad.jsonl"), "line 3 of '.*bad.jsonl' can't be parsed"),
    (lambda: sources.json_lines("good.csv"), "'.*good.csv' is not a file of JSON lines: it begins with"),
]


def test_what_is_refused_at_once(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the source is made, with the file, the column and a hint."""
    monkeypatch.setattr(lines, "LONGEST_LINE", 100_000)
    for make, said in REFUSED:
        with pytest.raises((ValueError, TypeError, FileNotFoundError, MisuseError), match=said):
            make()


def test_a_folder_that_may_not_be_read(folder: Path) -> None:
    """Is not taken for one without files."""
    (folder / "mine").mkdir(mode=0)
    pattern = f"{folder}/mine/**/*.csv"
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(PermissionError, match=r"no file matches '.*': .* may not read the folder '.*mine'"):
            sources.csv(pattern)
    finally:
        if is_root:
            os.seteuid(0)


LINES = 300_000  # more than what is looked at when the source is made


@pytest.mark.parametrize(
    ("make", "header", "more", "said"),
    [
        (sources.csv, "n,s\n", b"1,a\nx,b\n", "line 300,003 of '.*f' can't be parsed: In column 'n': .*'x'; or give"),
        (sources.csv, "n,s\n", b"1,a\n1,2,3\n", "line 300,003 of '.*f' can't be parsed: .*got 3"),
        (sources.csv, "n,s\n", b'1,a\n1,"a\n', "line 300,003 of '.*f' has a quoted value that does not end on it"),
        (sources.csv, "n,s\n", b"1,a\n,b\n", r"'n' of '.*f' has nulls \(1 of the .*, fill_nulls={'n': \.\.\.}"),
        (sources.text, "", b"ok\n\xff\n", "line 300,002 of '.*f' is not UTF-8: invalid start byte"),
    ],
)
def test_bad_lines_are_named(folder: Path, make: Callable[..., Any], header: str, more: bytes, said: str) -> None:
    """In any block of the file."""
    (folder / "f").write_bytes(header.encode() + b"1,a\n" * LINES + more)
    for size in (1 << 19, 1 << 23):
        with pytest.raises(DatasetError, match=said):
            read(make("f", block_bytes=size), batch=1 << 20)


def test_blank_files_come_first(folder: Path) -> None:
    """They tell nothing of the columns; where all files are blank there are none."""
    (folder / "a").write_bytes(b"\n\n")
    (folder / "b").write_bytes(b'{"n": 1}\n')
    (folder / "c").write_bytes(b"1\n")
    for source in (sources.json_lines(["a", "b"]), sources.csv(["a", "c"], names=["n"])):
        assert [element["n"].tolist() for element in read(source, batch=8)] == [[1]]
    for make in (sources.json_lines, functools.partial(sources.csv, names=["n"])):
        with pytest.raises(ValueError, match="the source has no examples: all its files are empty"):
            make("a")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"n": "x"}', r"can't be parsed: JSON parse error: Column\(/n\) .*; or give other types= for its columns"),
        (b'{"s": "", "n": 1.5}', "can't be parsed: column 'n': Failed to convert JSON to int64, .*:1.5; or give other"),
        (b'{"n": 1, "s": "\xff"}', "is not UTF-8: invalid start byte"),
    ],
)
def test_bad_json_is_named(folder: Path, line: bytes, said: str) -> None:
    """As above."""
    (folder / "f").write_bytes(b'{"n": 1, "s": "a"}\n' * LINES + b"\n" + line + b'\n{"n": 1, "s": "a"}\n')
    for size in (1 << 19, 1 << 23):
        with pytest.raises(DatasetError, match=f"line 300,002 of '.*f' {said}"):
            read(sources.json_lines("f", block_bytes=size), batch=1 << 20)


def test_values_that_have_no_array(folder: Path) -> None:
    """Text that is not UTF-8, whose column is named; and what is to be read for nulls is never rounded."""
    bad = pa.array([b"\xff"], pa.binary()).view(pa.string())
    write(folder / "a.parquet", pa.table({"n": pa.array([None], pa.int32()), "s": bad}))
    for fill, said in (
        (1.5, "has 1.5 for 'n', which is of type int32: give a whole"),
        (1.0, "'s' of '.*' has text that"),
    ):
        with pytest.raises(DatasetError, match=said):
            read(sources.parquet("a.parquet", fill_nulls={"n": fill}), batch=1)


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow", "npy"])
def test_files_that_change(folder: Path, kind: str) -> None:
    """They are refused: of another size, written anew with the same size, or gone. None of it kills the process."""
    path = folder / f"a.{kind}"
    if kind == "npy":
        np.save(path, np.arange(ROWS))
        source: Any = sources.npy("a.npy")
    else:
        write(path, table())
        source = KINDS[kind](f"a.{kind}")
    pipeline = Pipeline(source_of(source), "files", batch=10, split=10)
    content, positions = path.read_bytes(), iter(range(0, 40, pipeline.element))

    def error() -> str:
        first = next(pipeline.elements(0, position := next(positions), position + pipeline.element))
        return str(first) if isinstance(first, DatasetError) else ""

    assert not error()
    path.write_bytes(content[: len(content) // 2])
    assert f"the file '{path}' has {len(content) // 2:,} bytes here, and had {len(content):,} on the coord" in error()
    path.write_bytes(content)
    assert f"the file '{path}' was written to during the training: leave" in error()
    path.unlink()
    assert f"there is no file '{path}' here: the files of a dataset must be at the same place on all workers" in error()


@pytest.fixture
def no_pickles(folder: Path) -> Iterator[None]:
    """A worker without pickles, which may read the files of the folder `own`."""
    before = policy.chosen_policy()
    (folder / "own").mkdir()
    policy.choose(policy.policy_of(False, "", [str(folder / "own")], {}, is_worker=True))
    yield
    policy.choose(before)


@pytest.mark.usefixtures("no_pickles")
def test_without_pickles(folder: Path) -> None:
    """Sources travel as data, and files outside a worker's folders, or at URLs, are not read."""
    outside = policy.policy_of(True, is_worker=True)
    inside = policy.chosen_policy()
    policy.choose(outside)
    for place in ("own", "."):
        for kind in KINDS:
            write(folder / place / f"a.{kind}", table())
    MEMORY.pipe("/pscluster-test/b.csv", (folder / "a.csv").read_bytes())
    made = [KINDS[kind](f"{place}/a.{kind}") for place in ("own", ".") for kind in KINDS]
    made.append(sources.csv("memory://pscluster-test/b.csv"))
    policy.choose(inside)
    for index, source in enumerate(made):
        arrived = decode(encode(source))
        (first, *_) = Pipeline(source_of(arrived), "files", batch=10).elements(0, 0, 1)
        if index < len(KINDS):
            assert first["number"][0] == 0
        else:
            assert isinstance(first, DatasetError)
            assert ("the URL" if index == len(made) - 1 else "lies outside the folders") in str(first)


def test_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the extra to install is named."""
    import sys

    (folder / "a.txt").write_text('{"x": 1}\n')
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert len(read(sources.text("a.txt"))) == 1
    for make in (sources.parquet, sources.csv, sources.json_lines, sources.arrow):
        with pytest.raises(MisuseError, match=r"pip install 'pscluster\[parquet\]', on the workers, too"):
            make("a.txt")


def test_a_module_is_had_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read waits for a module that another thread is importing: several read the first files."""
    import sys

    gate: Any = types.ModuleType("gate_of_half_made")
    gate.begun, gate.go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_made.py").write_text(f"import {gate.__name__} as gate\ngate.begun.set()\ngate.go.wait(60)\nx = 1")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(need_arrow, "half_made")
        assert gate.begun.wait(60)
        second = threads.submit(need_arrow, "half_made")
        try:
            with pytest.raises(TimeoutError):
                second.result(0.05)
        finally:
            gate.go.set()
        assert (first.result(60).x, second.result(60).x) == (1, 1)
    del sys.modules["half_made"]


def test_ranges_are_read_by_split(folder: Path) -> None:
    """A source of rows reads each of its splits once, whatever the batches are."""
    np.save(folder / "x.npy", np.arange(5000))
    source = sources.npy("x.npy")
    assert isinstance(source, Ranges)
    assert sorted(np.concatenate(read(source, batch=7, seed=1)).tolist()) == list(range(5000))
