"""Programs as data: what is read, and that anything else is refused before it runs."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from tests.worker.programs.support import grid, typed

from pscluster.core.errors import ProtocolError
from pscluster.worker.programs.program import Compute, Numbers, Placeholder, encode
from pscluster.worker.programs.reading import parse, read_numbers

GRID = grid(1)
A = typed(np.zeros((6, 4), np.float32), ["x", None], GRID)
TERMS = typed(np.zeros(4, np.float32), [None], GRID, ["x"])
SUM = typed(np.zeros(4, np.float32), ["y"], GRID)
CODE: list[Any] = [
    ["compute", [1], "add.reduce", [0], [["in", 0]], {"axis": ["tuple", 0]}],
    ["move", 2, 1],
    ["fetch", 2, False],
]


def text() -> str:
    """A program that sums over a sharded axis."""
    return encode(GRID, [A, TERMS, SUM], 1, CODE, [2])


def test_a_program_is_read() -> None:
    """Arguments become Python's, with places for blocks; registers end with their last use."""
    program = parse(text())
    assert program.mesh == GRID
    assert program.arrays == (A, TERMS, SUM)
    assert program.code[0] == Compute((1,), "add.reduce", (0,), (Placeholder("in", 0),), {"axis": (0,)})
    assert program.last_use == ((0,), (1,), ())
    arguments = [
        ["list", 1, ["tuple"]],
        ["slice", 1, None, -1],
        ["..."],
        ["complex", 1.5, 2],
        ["shape", 0],
        None,
        True,
        1 << 70,
        float("inf"),
        "text",
    ]
    code = [["compute", [1], "add", [0], arguments, {}]]
    read = parse(encode(GRID, [A, A], 1, code, [1])).code[0]
    assert isinstance(read, Compute)
    assert read.args == (
        [1, ()],
        slice(1, None, -1),
        ...,
        1.5 + 2j,
        Placeholder("shape", 0),
        None,
        True,
        1 << 70,
        float("inf"),
        "text",
    )


def text_with_variables() -> str:
    """A program that reads a variable, and applies a gradient."""
    code = [["read", 0, 0], ["update", "gradient", 0, 0, 0], ["fetch", 0, False]]
    return encode(GRID, [A, A], 0, code, [], [A], 1)


def changed(path: tuple[Any, ...], value: Any, whole: str = "") -> str:
    """The program with one thing replaced."""
    data = json.loads(whole or text())
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("more",), 1, "and nothing else"),
        (("mesh",), 3, "the mesh is 3, not a list of 3"),
        (("mesh", 0, 0, 1), 4, "has 8 devices, but 6 are given"),
        (("mesh", 1, 0), "GPU", "not the name of a device"),
        (("arrays", 0, 0, 0), -1, "a length is -1"),
        (("arrays", 0, 0, 0), 1.0, "a length is 1.0"),
        (("arrays", 0, 1), "object", "unknown element type 'object'"),
        (("arrays", 0, 2), ["x"], "has 2 axes, but the layout has 1"),
        (("arrays", 0, 2), ["z", None], "can't be sharded over 'z'"),
        (("arrays", 0, 0), [1] * 65, "the most are 64"),
        (("arrays", 1, 3), ["z"], "can't be partial over"),
        (("arrays", 1, 3), ["x", "x"], "can't be partial over"),
        (("arrays", 0, 3), ["x"], "can't be partial over"),
        (("arrays", 1, 4), "subtract", "can't be combined by 'subtract'"),
        (("inputs",), 4, "inputs is 4"),
        (("inputs",), 0, "instruction 0: register 0 is read before it is written"),
        (("inputs",), 2, "register 1 is written twice"),
        (("outputs",), [2, 2], "an output occurs twice"),
        (("outputs",), [3], "a register is 3; it is a whole number below 3"),
        (("outputs",), [True], "a register is True"),
        (("code", 0), [], "there is no instruction None"),
        (("code", 0, 0), "exec", "there is no instruction 'exec'"),
        (("code", 0, 0), ["load"], "there is no instruction"),
        (("code", 1), ["move", 2], "move does not take 1 values"),
        (("code", 0, 2), "save", "there is no function 'save'"),
        (("code", 0, 2), "__import__", "there is no function"),
        (("code", 0, 1), [], "at least one output"),
        (("code", 0, 4), [["in", 1]], "a number of 'in' is 1"),
        (("code", 0, 4), [["eval", "1"]], "is not an argument"),
        (("code", 0, 4), [{}], "a plain value, or a tagged list"),
        (("code", 0, 5), [], "named arguments"),
        (("code", 1), ["move", 2, 0], "keeps shape and type"),
        (("code", 2), ["fetch", 1, False], "has terms, which have to be combined first"),
        (("code", 2), ["fetch", 2, 1], "is not true or false"),
        (("code", 1), ["create", 2, "file", []], "there is no maker 'file'"),
        (("code", 1), ["create", 2, "full", []], "is \\[\\], not a list of 2"),
        (("code", 1), ["create", 2, "full", ["1", 0]], "full takes numbers"),
        (("code", 1), ["load", 2, -1], "a payload is -1"),
        (("code", 1), ["call", [], 0, [0], [], True], "has outputs, or layouts in place of them"),
        (("code", 1), ["call", [2], 0, [0], [["x"]], True], "has outputs, or layouts in place of them"),
        (("code", 1), ["call", [2], 0, [0], [], 1], "checks replicas or not"),
        (("code", 1), ["call", [2], -1, [0], [], True], "a function is -1"),
        (("code", 1), ["call", [2], 0, [1], [], True], "has terms, which have to be combined first"),
        (("code", 1), ["call", [], 0, [0], [["z"]], True], "can't be sharded over 'z'"),
    ],
)
def test_a_malformed_program_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    """The error says which instruction, and what is wrong with it."""
    with pytest.raises(ProtocolError, match=message):
        parse(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("variables",), 3, "variables is 3, not a list"),
        (("variables", 0, 3), ["y"], "a variable has no terms"),
        (("variables", 0, 2), ["z", None], "can't be sharded over 'z'"),
        (("optimizers",), -1, "optimizers is -1"),
        (("optimizers",), 0, "instruction 1: an optimizer is 0; it is a whole number below 0"),
        (("code", 0), ["read", 0, 1], "instruction 0: a variable is 1; it is a whole number below 1"),
        (("variables", 0, 0), [4, 6], r"a variable has one shape and type: float32\[6, 4\] is not float32\[4, 6\]"),
        (("variables", 0, 1), "float64", "is not float64"),
        (("code", 1, 1), "mul", "can't be updated by 'mul'; there are assign, add, sub, gradient"),
        (("code", 1, 1), "add", "a gradient, and nothing else, has an optimizer"),
        (("code", 1, 4), None, "a gradient, and nothing else"),
        (("code", 1, 2), 1, "register 1 is read before it is written"),
        (("code", 1, 3), 1, "a variable is 1"),
        (("code", 2), ["read", 1, 0], "instruction 2: variable 0 is read after it is updated"),
    ],
)
def test_malformed_uses_of_variables_are_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    """Shapes, kinds, and the order of reads and updates."""
    whole = text_with_variables()
    assert [update.kind for update in parse(whole).updates] == ["gradient"]
    with pytest.raises(ProtocolError, match=message):
        parse(changed(path, value, whole))


def test_updates_go_together() -> None:
    """Those that follow each other, unless they are large."""
    large = typed(np.zeros((2000, 3000)), [None, None], GRID)
    code = [["update", "add", 0, 0, None], ["update", "add", 1, 1, None]]
    for of, groups in ((A, 1), (large, 2)):
        assert len(parse(encode(GRID, [of, of], 2, code, [], [of, of])).groups) == groups


@pytest.mark.parametrize("rubbish", ["", "[", "null", "[]", "{}", '"' * 5, "[" * 100_000, "1" * 5000, b"{}", None])
def test_rubbish_is_refused(rubbish: Any) -> None:
    """What is not JSON, or no program; nor the numbers of arrays that come with one."""
    with pytest.raises(ProtocolError):
        parse(rubbish)
    with pytest.raises(ProtocolError, match="4 lists of numbers"):
        read_numbers(rubbish)


def test_the_numbers_of_a_run_are_read() -> None:
    """As they were written; anything but four lists of whole numbers is refused."""
    numbers = Numbers([1, 2], [3], [4, 5], [1])
    assert read_numbers(numbers.encoded()) == numbers
    encoded = numbers.encoded()
    wrong: list[Any] = [b"", encoded[:-1], encoded[:-8], encoded + bytes(8), b"\xff" * 32, bytearray(encoded)]
    for rubbish in wrong:
        with pytest.raises(ProtocolError, match="4 lists of numbers"):
            read_numbers(rubbish)


def test_arguments_nested_deep_are_refused() -> None:
    """Python's stack is not at a peer's disposal."""
    deep = '["list",' * 900 + "1" + "]" * 900
    with pytest.raises(ProtocolError):
        parse(text().replace('["in",0]', deep))


def test_mutations_are_refused_or_make_sense() -> None:
    """Whatever replaces a part of a program, it is a program or a ProtocolError."""
    generator = random.Random(1)
    values: list[Any] = [None, True, -1, 0, 1, 2, 1 << 40, 1.5, "", "x", "add", [], [0], ["in", 0], [[]], {}, {"a": 1}]
    made_sense = 0
    for nth in range(2000):
        data = copy.deepcopy(json.loads(text() if nth % 2 else text_with_variables()))
        inner: Any = data
        while True:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            key = generator.choice(list(keys)) if len(keys) else None
            if key is None or not isinstance(inner[key], dict | list) or not inner[key] or generator.random() < 0.3:
                break
            inner = inner[key]
        if key is not None:
            inner[key] = generator.choice(values)
        try:
            parse.__wrapped__(json.dumps(data))
            made_sense += 1
        except ProtocolError:
            pass
    assert made_sense < 1500
