"""Programs run on one task, and on several: what each holds, and what they fetch."""

import itertools
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts
from tests.worker.programs.support import Tasks, grid, typed, whole

from pscluster.core.errors import ProtocolError, TensorLostError
from pscluster.core.layouts.layout import Layout
from pscluster.worker.collectives import algorithms
from pscluster.worker.programs import interpreter, moves
from pscluster.worker.programs.exchange import OneProcess
from pscluster.worker.programs.interpreter import run
from pscluster.worker.programs.program import ArrayType, Numbers, encode
from pscluster.worker.programs.reading import parse
from pscluster.worker.programs.store import BlockStore

FLOAT = np.dtype(np.float64)


@pytest.mark.parametrize("tasks", [1, 2, 6])
def test_arrays_move_between_all_layouts(tasks: int) -> None:
    """From one to another, alone and together, arrays stay what they are, on any number of tasks."""
    mesh = grid(tasks)
    numbers = np.arange(35).reshape(7, 5)
    arrays = [numbers.astype(dtype) for dtype in ("int8", "float64", "complex128", "float32")]
    layouts = all_layouts(mesh, 2)
    for source in layouts:
        types = [ArrayType(array.shape, array.dtype, source) for array in arrays]
        code: list[Any] = [["load", register, register] for register in range(len(arrays))]
        for layout, (register, array) in itertools.product(layouts, enumerate(arrays)):
            code.append(["move", len(types), register])
            types.append(ArrayType(array.shape, array.dtype, layout))
        moved = range(len(arrays), len(types))
        together = code + [["fetch", register, False] for register in moved]
        alone = [*code[: len(arrays)], ["move", moved[0], 0], ["fetch", moved[0], False]]
        loads = list(zip(arrays, types, strict=False))
        for run_code, used in ((together, moved), (alone, moved[:1])):
            fetched = Tasks(mesh).run(types, run_code, loads=loads)
            for nth, register in enumerate(used):
                found = whole([blocks[nth] for blocks in fetched], types[register])
                np.testing.assert_array_equal(found, arrays[nth % len(arrays)])


@pytest.mark.parametrize("tasks", [2, 6])
def test_large_pieces_are_cut_along_their_first_axis(tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent, from any part of a block, comes to its place in any other, however many messages it takes."""
    monkeypatch.setattr(moves, "PIECE_BYTES", 64)
    mesh = grid(tasks)
    array = np.arange(31 * 9.0).reshape(31, 9)
    layouts = all_layouts(mesh, 2)
    for source in layouts:
        types = [ArrayType(array.shape, array.dtype, layout) for layout in (source, *layouts)]
        for register in range(1, len(types)):
            code: list[Any] = [["load", 0, 0], ["move", register, 0], ["fetch", register, False]]
            fetched = Tasks(mesh).run(types, code, loads=[(array, types[0])])
            np.testing.assert_array_equal(whole([blocks[0] for blocks in fetched], types[register]), array)


@pytest.mark.parametrize("tasks", [1, 2, 6])
def test_sums_have_the_same_bits_on_any_number_of_tasks(tasks: int) -> None:
    """Terms are added in the order of the devices, wherever these are."""
    mesh = grid(tasks)
    array = np.random.default_rng(1).normal(size=(50, 7)) * 10.0 ** np.arange(7)
    rows = typed(array, ["x", "y"], mesh)
    terms = typed(array[0], ["y"], mesh, ["x"])
    for target in all_layouts(mesh, 1):
        result = ArrayType((7,), FLOAT, target)
        code: list[Any] = [
            ["load", 0, 0],
            ["compute", [1], "add.reduce", [0], [["in", 0]], {"axis": 0}],
            ["move", 2, 1],
            ["fetch", 2, False],
        ]
        fetched = Tasks(mesh).run([rows, terms, result], code, loads=[(array, rows)])
        by_column = np.concatenate(
            [
                sum_of([np.ascontiguousarray(block) for block in np.array_split(half, 3)])
                for half in np.array_split(array, 2, axis=1)
            ]
        )
        np.testing.assert_array_equal(whole([blocks[0] for blocks in fetched], result), by_column)
        np.testing.assert_allclose(by_column, array.sum(axis=0))


def test_what_needs_nothing_of_others_is_computed_while_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a move, up to what needs it, is computed when all is sent, with the same results."""
    events: list[str] = []
    exchange, compute = algorithms.exchange, interpreter._Running._compute

    def exchanged(links: Any, outgoing: Any, incoming: Any, meanwhile: Any) -> None:
        def marked() -> None:
            events.append("sent")
            meanwhile()
            events.append("awaited")

        exchange(links, outgoing, incoming, marked)

    def computed(self: Any, start: int, stop: int) -> None:
        events.append(f"{start}-{stop}")
        compute(self, start, stop)

    monkeypatch.setattr(algorithms, "exchange", exchanged)
    monkeypatch.setattr(interpreter._Running, "_compute", computed)
    mesh = grid(2)
    array, own = np.random.default_rng(1).normal(size=(6, 4)), np.arange(4.0)
    rows, terms, all_of_it = typed(array, ["x", "y"], mesh), typed(own, ["y"], mesh, ["x"]), typed(own, [None], mesh)
    code: list[Any] = [
        ["load", 0, 0],
        ["load", 1, 1],
        ["compute", [2], "add.reduce", [0], [["in", 0]], {"axis": 0}],
        ["move", 3, 2],
        ["compute", [4], "multiply", [1], [["in", 0], 0.5], {}],
        ["compute", [5], "multiply", [4, 4], [["in", 0], ["in", 1]], {}],
        ["compute", [6], "add", [3, 5], [["in", 0], ["in", 1]], {}],
        ["fetch", 6, False],
    ]
    types = [rows, all_of_it, terms, *[all_of_it] * 4]
    for _ in range(3):  # the second time it is planned
        events.clear()
        fetched = Tasks(mesh).run(types, code, loads=[(array, rows), (own, all_of_it)])
        np.testing.assert_allclose(whole([blocks[0] for blocks in fetched], all_of_it), array.sum(0) + own**2 / 4)
        of_one = [event for nth, event in enumerate(events) if event not in events[:nth]]
        assert of_one == ["2-3", "sent", "4-6", "awaited", "6-7"]


def sum_of(blocks: list[Any]) -> Any:
    """The sum of the sums of blocks, in their order."""
    total = blocks[0].sum(axis=0)
    for block in blocks[1:]:
        total = total + block.sum(axis=0)
    return total


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(
    ("maker", "numbers", "dtype"),
    [
        ("full", [2.5, 0], "float32"),
        ("full", [float("inf"), 0], "float64"),
        ("full", [1, 2.5], "complex64"),
        ("full", [7, 0], "int64"),
        ("normal", [0.0, 1.0, 1], "float64"),
        ("truncated_normal", [0.0, 1.0, 2], "float32"),
        ("uniform", [0, 100, 3], "int32"),
        ("eye", [1], "float32"),
    ],
)
def test_what_is_made_does_not_depend_on_the_layout(tasks: int, maker: str, numbers: list[Any], dtype: str) -> None:
    """For every layout, and any number of tasks."""
    mesh, shape = grid(tasks), (70, 67)
    types = [ArrayType(shape, np.dtype(dtype), layout) for layout in all_layouts(mesh, 2)]
    code: list[Any] = []
    for register in range(len(types)):
        code += [["create", register, maker, numbers], ["fetch", register, False]]
    fetched = Tasks(mesh).run(types, code)
    arrays = [whole([blocks[nth] for blocks in fetched], of) for nth, of in enumerate(types)]
    for array in arrays[1:]:
        np.testing.assert_array_equal(array, arrays[0])
    if maker == "eye":
        np.testing.assert_array_equal(arrays[0], np.eye(*shape, k=1))


@pytest.mark.parametrize(("start", "step", "dtype"), [(0, 1, "int64"), (5, -3, "int32"), (0.1, 0.7, "float64")])
def test_a_range_is_numpys(start: float, step: float, dtype: str) -> None:
    """Bit for bit, also in floats."""
    mesh = grid(1)
    wanted = np.arange(start, start + step * 100.5, step).astype(dtype)
    types = [ArrayType(wanted.shape, np.dtype(dtype), layout) for layout in all_layouts(mesh, 1)]
    code: list[Any] = []
    for register in range(len(types)):
        code += [["create", register, "arange", [start, step]], ["fetch", register, False]]
    for nth, blocks in enumerate(Tasks(mesh).run(types, code)[0]):
        np.testing.assert_array_equal(whole([blocks], types[nth]), wanted)


def test_arrays_stay_from_one_program_to_the_next() -> None:
    """Until they are forgotten; a program whose input is not there says so, and stores nothing."""
    tasks = Tasks(grid(2))
    array = np.arange(6.0)
    of = typed(array, ["x"], tasks.mesh)
    tasks.run([of], [["load", 0, 0]], outputs={0: 7}, loads=[(array, of)])
    code: list[Any] = [["compute", [1], "negative", [0], [["in", 0]], {}], ["fetch", 1, False]]
    for _ in range(2):  # as when it is run again: the same comes out
        fetched = tasks.run([of, of], code, inputs=[7], outputs={1: 8})
        np.testing.assert_array_equal(whole([blocks[0] for blocks in fetched], of), -array)
    tasks.run([], [], forgotten=[7, 99])
    assert [len(store) for store in tasks.stores] == [1, 1]
    with pytest.raises(TensorLostError, match=r"global array 7, float64\[6\], is lost"):
        tasks.run([of, of], code, inputs=[7], outputs={1: 9})
    other = typed(array, ["y"], tasks.mesh)
    with pytest.raises(ProtocolError, match="global array 8 is"):
        tasks.run([other], [["fetch", 0, False]], inputs=[8])
    assert [len(store) for store in tasks.stores] == [1, 1]


def test_equal_blocks_are_one() -> None:
    """Devices of a task that have the same share it, and compute once."""
    mesh, store = grid(1), BlockStore()
    array = np.arange(6.0)
    of = typed(array, ["x"], mesh)
    program = parse(encode(mesh, [of, of], 0, [["load", 0, 0], ["compute", [1], "exp", [0], [["in", 0]], {}]], [1]))
    payload = {shard: array[2 * shard : 2 * shard + 2] for shard in range(3)}
    run(program, store, OneProcess(), Numbers([], [1], []), [payload])
    blocks = store.get(1, of).of
    assert len({id(block) for block in blocks.values()}) == 3
    assert blocks[0] is blocks[1]


def test_every_device_can_be_fetched() -> None:
    """With replicas, in the order of devices."""
    tasks = Tasks(grid(2))
    array = np.arange(3)
    of = typed(array, ["x"], tasks.mesh)
    fetched = tasks.run([of], [["load", 0, 0], ["fetch", 0, True]], loads=[(array, of)])
    assert [block.tolist() for block in itertools.chain(*(blocks[0] for blocks in fetched))] == [
        *([[0]] * 2),
        *([[1]] * 2),
        *([[2]] * 2),
    ]


def test_what_does_not_fit_is_refused() -> None:
    """Payloads of other shapes, too few numbers, and functions that return something else."""
    mesh, store = grid(1), BlockStore()
    of = ArrayType((6,), FLOAT, Layout(["x"], mesh))
    loading = parse(encode(mesh, [of], 0, [["load", 0, 0]], []))
    rubbish: list[Any] = [{}, {0: np.zeros(2)}, 3, {n: np.zeros(3) for n in range(3)}, {n: [0, 0] for n in range(3)}]
    for payload in rubbish:
        with pytest.raises(ProtocolError, match="needs a block of shape"):
            run(loading, store, OneProcess(), Numbers([], [], []), [payload])
    with pytest.raises(ProtocolError, match="1 payloads and 0 functions, and was given 0, 0, 0, 0"):
        run(loading, store, OneProcess(), Numbers([], [], []), [])
    wrong = parse(
        encode(mesh, [of, of], 0, [["create", 0, "full", [1, 0]], ["compute", [1], "sign", [0], [1], {}]], [1])
    )
    with pytest.raises(ProtocolError, match="sign has returned"):
        run(wrong, store, OneProcess(), Numbers([], [5], []), [])
    assert not len(store)
