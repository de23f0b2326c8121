"""The decision which collectives are carried out: over all short scripts of four devices, and what peers may say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest

from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError
from pscluster.core.layouts.mesh import Mesh
from pscluster.worker.programs.local.rounds import (
    ArrayShape,
    Ended,
    Failed,
    Status,
    Waiting,
    decide,
    decode,
    encode,
    group_of,
)

SQUARE = Mesh({"x": 2, "y": 2})
ONE = (ArrayShape("float64", (3,)),)


def can_end(scripts: Sequence[str]) -> bool:
    """Whether the devices come to an end if any group whose devices all wait in it may go on."""
    places = [0] * len(scripts)
    while True:
        for device, script in enumerate(scripts):
            if places[device] == len(script):
                continue
            dim = script[places[device]]
            group = group_of(SQUARE, dim, device)
            if all(scripts[other][places[other] : places[other] + 1] == dim for other in group):
                for other in group:
                    places[other] += 1
                break
        else:
            return all(place == len(script) for place, script in zip(places, scripts, strict=True))


def test_all_short_scripts() -> None:
    """Devices that each call up to two collectives, over either dimension: they end if they can, or raise an error."""
    scripts = ["", "x", "xx", "xy", "yx"]
    ended = 0
    for chosen in itertools.product(scripts, repeat=4):
        left = list(chosen)
        try:
            for _ in range(5):
                statuses: dict[int, Status] = {
                    device: Waiting("psum", (script[0],), ONE) if script else Ended()
                    for device, script in enumerate(left)
                }
                groups = decide(SQUARE, statuses)
                for device in (device for group in groups for device in group.devices):
                    left[device] = left[device][1:]
                if not groups:
                    break
            assert not any(left)
            found = ""
        except MisuseError as error:
            found = str(error)
        assert can_end(chosen) == (not found), chosen
        assert not found or "have to call the same collectives in the same order" in found
        ended += not found
    assert ended >= 5


def test_groups() -> None:
    """Devices that differ in their places on these dimensions."""
    mesh = Mesh({"x": 3, "y": 2})
    assert group_of(mesh, ["x"], 3) == (1, 3, 5)
    assert group_of(mesh, ["y"], 3) == (2, 3)
    assert group_of(mesh, ["x", "y"], 3) == (0, 1, 2, 3, 4, 5)


def test_errors_name_devices_and_places() -> None:
    """A call that failed, that returned too early, or that does something else."""
    line = Mesh({"x": 2})
    waiting = Waiting("psum", ("x",), ONE, place="a.py:3")
    cases: list[tuple[Status, type[Exception], str]] = [
        (
            Failed("ValueError: no"),
            MemberUnavailableError,
            r"the call of device 1 \(.*CPU:1\) has failed: ValueError: no",
        ),
        (Ended(), MisuseError, r"waits in psum over x at a.py:3 for device 1 .*whose call has returned without it"),
        (
            Waiting("pmax", ("x",), ONE, place="b.py:4"),
            MisuseError,
            "whose call waits in pmax over x at b.py:4, which is",
        ),
        (Waiting("psum", ("x",), ()), MisuseError, "with 0 arrays, not 1"),
        (Waiting("psum", ("x",), (ArrayShape("int8", (3,)),)), MisuseError, r"an array int8\[3\], not float64\[3\]"),
        (Waiting("psum", ("x",), (ArrayShape("float64", (4,)),)), MisuseError, r"an array float64\[4\]"),
    ]
    for other, error, message in cases:
        with pytest.raises(error, match=message):
            decide(line, {0: waiting, 1: other})
    gathers = [Waiting("all_gather", ("x",), (ArrayShape("int8", shape),), 1) for shape in [(2, 3), (2, 5), (3, 3)]]
    assert len(decide(line, {0: gathers[0], 1: gathers[1]})) == 1
    with pytest.raises(MisuseError, match=r"an array int8\[3, 3\]"):
        decide(line, {0: gathers[0], 1: gathers[2]})


def test_what_tasks_say() -> None:
    """Statuses come back as they were; what makes no sense is refused."""
    statuses: dict[int, Status] = {
        0: Waiting("psum", ("x", "y"), (ArrayShape("float32", (2, 0)), ArrayShape("int8", ())), 1, "a.py:3"),
        1: Ended((ArrayShape("bool", (1,)),), (1 << 63,)),
        2: Failed("why"),
    }
    assert decode(encode(statuses), [0, 1, 2], SQUARE) == statuses
    bad = [
        b"\xff",
        b"[]",
        b"[[]]",
        b"[" * 100_000,
        *(
            json.dumps([item]).encode()
            for item in (
                None,
                ["waiting", "psum", ["z"], [], 0, ""],
                ["waiting", "psum", [], [], 0, ""],
                ["waiting", "psum", [["x"]], [], 0, ""],
                ["waiting", "psum", ["x"], [["float64", [-1]]], 0, ""],
                ["waiting", "psum", ["x"], [["object", [1]]], 0, ""],
                ["waiting", "psum", ["x"], [[7, [1]]], 0, ""],
                ["waiting", "psum", ["x"], [["float64", 7]], 0, ""],
                ["ended", [], ["a"]],
                ["ended", [7], []],
                ["failed", 7],
            )
        ),
    ]
    for data in bad:
        with pytest.raises(ProtocolError, match=r"invalid account|unknown element type"):
            decode(data, [0], SQUARE)
