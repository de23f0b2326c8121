"""The job's metadata on its server: put through the write path, kept, marked and restored with the shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from tests.fakes import FakeCall
from tests.ps.storage.support import (
    IDENTITY,
    JOB,
    Client,
    begun,
    declare,
    dense,
    facts,
    found_in,
    killed,
    manager_of,
    put,
    values_of,
)

from pscluster.core.errors import ProtocolError, PsClusterError, StaleError
from pscluster.core.limits import MAX_TEXT_BYTES, MAX_TEXTS
from pscluster.core.transport.frames import pack, unpack
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import METADATA
from pscluster.ps.storage.checkpoint_parts import CheckpointParts
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import node_pb2, ps_pb2

both = pytest.mark.parametrize("kind", [Durability.SNAPSHOT, Durability.LOG])


@pytest.fixture
def held() -> Store:
    """A store of server 0 with a variable."""
    store = Store(0, JOB)
    declare(store, 1, np.zeros(3))
    return store


@pytest.fixture
def client(held: Store) -> Client:
    """Without a disk."""
    return Client(StateManager(DurabilityOptions()), held)


def texts(held: Store) -> Mapping[str, str]:
    """All of them."""
    return held.directory.metadata.texts


def test_the_last_one_counts(held: Store, client: Client) -> None:
    """A late copy of an older put changes nothing, whether or not the first one arrived, for each reason in turn."""
    first, lost = client.made(put("progress", "1")), client.made(put("progress", "never arrived"))
    client.send(first)
    client.update(put("progress", "2"), put("positions", "here"))
    reply = client.send(first)
    assert (reply.applied, reply.repeated_, list(reply.updates)) == (0, 1, [3])
    client.update(put("progress", "3"))
    client.update(put("progress", "4"))  # all before are answered
    for late in (first, lost):
        with pytest.raises(StaleError, match="was answered long ago"):
            client.send(late)
    of_term, of_job, of_incarnation = (client.made(put("progress", "late")) for _ in range(3))
    with held.ledger() as ledger:
        ledger.open_term(1)
    with pytest.raises(StaleError, match="a checkpoint was restored since"):
        client.send(of_term)
    of_job[0].term = of_incarnation[0].term = 1
    held.close_incarnation(client.incarnation)
    with pytest.raises(StaleError, match="given up for dead"):
        client.send(of_incarnation)
    held.take_over(JOB + 1)
    with pytest.raises(StaleError, match="another coordinator took it over"):
        client.send(of_job)
    assert texts(held) == {"progress": "4", "positions": "here"}


@both
def test_a_death(tmp_path: Path, kind: Durability) -> None:
    """Restored with its keys, so that a late copy changes nothing; a log has the last put, too."""
    with begun(tmp_path / "s", kind) as (manager, held):
        manager.save()
        client = Client(manager, held)
        first = client.made(put("progress", "1"))
        client.send(first)
        client.update(put("progress", "2"))
        manager.save()
        saved = facts(held)
        client.update(put("progress", "3"), put("training", "x"))
        copy, boot_id = killed(tmp_path / "s"), held.losses.boot_id
        latest = facts(held)["metadata"]
    with manager_of(copy, kind) as manager:
        restored = manager.restore()
        assert restored is not None
        again = restored.store
        assert facts(again)["metadata"] == (saved["metadata"] if kind is Durability.SNAPSHOT else latest)
        assert Client(manager, again).send(first).repeated_ == 1
        again.note_lost([(*METADATA, boot_id, 4)])
        assert again.lost == ({"(metadata)": 2} if kind is Durability.SNAPSHOT else {})
        expected = texts(again)
        manager.save()
        assert texts(found_in(killed(copy), kind)) == expected


def test_a_server_without_metadata_has_lost_none(tmp_path: Path) -> None:
    """Clients tell every server of what server 0 has acknowledged."""
    with manager_of(tmp_path / "s", Durability.SNAPSHOT) as manager:
        manager.restore()
        held = Store(1, JOB)
        manager.begin(held, IDENTITY)
        manager.save()
        copy, boot_id = killed(tmp_path / "s"), held.losses.boot_id
    other = found_in(copy)
    other.note_lost([(*METADATA, boot_id, 4), (*METADATA, boot_id + 1, 4)])
    assert other.lost == {}


def test_restored_with_the_shards(held: Store, client: Client) -> None:
    """What is staged changes nothing; the commit puts all texts in the place of those there are, under its term."""
    client.update(put("progress", "old"), dense(ps_pb2.ADD, np.ones(3)))
    parts = CheckpointParts()
    assert parts.mark(held, 1) == {"progress": "old"}
    client.update(put("training", "new"), dense(ps_pb2.ADD, np.ones(3)))
    late = client.made(put("progress", "late"))

    def request(restore_id: int, texts: Mapping[str, str] | None = None) -> ps_pb2.RestoreRequest:
        shard = ps_pb2.RestoreShard(variable=1, arrays=[ps_pb2.RestoreArray(array="value")])
        metadata = None if texts is None else ps_pb2.Metadata(texts=texts)
        return ps_pb2.RestoreRequest(id=restore_id, shards=[shard], metadata=metadata)

    before = facts(held)
    parts.stage(held, request(2, {"progress": "restored"}), str)
    assert facts(held) == before
    parts.commit(held, 2, 1)
    assert texts(held) == {"progress": "restored"}
    assert values_of(held, 1).tolist() == [0, 0, 0]
    with pytest.raises(StaleError, match="a checkpoint was restored since"):
        client.send(late)
    parts.stage(held, request(3), str)
    parts.commit(held, 3, 2)
    assert texts(held) == {"progress": "restored"}, "without metadata it stays"
    parts.stage(held, request(4, {}), str)
    parts.commit(held, 4, 3)
    assert texts(held) == {}
    for wrong in (
        {"": ""},
        {"x" * 2000: ""},
        {"x": "y" * (MAX_TEXT_BYTES + 1)},
        dict.fromkeys(map(str, range(99)), ""),
    ):
        with pytest.raises(ProtocolError):
            parts.stage(held, request(5, wrong), str)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "é" * (MAX_TEXT_BYTES // 2 + 1)}, "metadata 'progress': 65,538 bytes; the limit is 65,536"),
        ({"name": ""}, "metadata '': text without a name"),
        ({"name": "x" * 2000}, "a name in a job's metadata of 2,000 characters"),
        ({"shard": 0}, "is not for the metadata of ps 0 alone"),
        ({"variable": 1}, "is not for the metadata of ps 0 alone"),
        ({"value_bytes": 4}, "is not for the metadata of ps 0 alone"),
        ({"scalar": True}, "is not for the metadata of ps 0 alone"),
    ],
)
def test_refused(held: Store, client: Client, change: dict[str, Any], said: str) -> None:
    """Nothing of the request is applied."""
    item = put("progress", "text")
    made = client.made(dense(ps_pb2.ADD, np.ones(3)), item)
    for name, value in change.items():
        setattr(made[0].items[1], name, value)
    before = facts(held)
    with pytest.raises(ProtocolError, match=said):
        client.send(made)
    assert facts(held) == before


def test_too_many_names(held: Store, client: Client) -> None:
    """The names there are can still be put."""
    for index in range(MAX_TEXTS):
        client.update(put(f"{index}", "1"))
    with pytest.raises(ProtocolError, match=f"17 names in a job's metadata; the limit is {MAX_TEXTS}"):
        client.update(put("more", "1"))
    client.update(put("0", "2"))
    assert texts(held) == {"0": "2"} | {f"{index}": "1" for index in range(1, MAX_TEXTS)}


def test_ordinary_requests_find_no_variable(held: Store, client: Client) -> None:
    """Metadata is neither read nor updated as a variable, nor on another server."""
    variable, shard = METADATA
    with pytest.raises(PsClusterError, match="there is no variable with id 0"):
        client.update(dense(ps_pb2.ASSIGN, np.empty(0, np.uint8), variable, shard))
    other = Client(client.manager, Store(1, JOB))
    with pytest.raises(ProtocolError, match="is not for the metadata of ps 0 alone"):
        other.update(put("progress", "x"))
    assert held.totals() == (1, 24)


def test_through_the_service() -> None:
    """Put on a session, described on request; a name or text that is no text is refused, and the session goes on."""
    role = ParameterServerRole(0)
    service, call = ParameterServerService(role), FakeCall()
    role.job_began(node_pb2.AttachRequest(job=JOB))

    def sent(request: ps_pb2.Request, *edit: bytes) -> ps_pb2.Reply:
        data = pack(request)
        (reply,) = service.session(iter([data.replace(*edit) if edit else data]), call)  # type: ignore[arg-type]
        return unpack(b"".join(reply) if isinstance(reply, list) else reply, ps_pb2.Reply)[0]

    def request(sequence: int, name: str, text: str) -> ps_pb2.Request:
        update = ps_pb2.UpdateRequest(job=JOB, incarnation=9, sequence=sequence)
        update.items.append(put(name, text)[0])
        update.items[0].nth = 1
        return ps_pb2.Request(update=update, last=True)

    assert sent(request(1, "progress", "text")).update.applied == 1
    for name, text in (("XXXX", "text"), ("name", "XXXX")):
        with pytest.raises((ProtocolError, DecodeError)):
            sent(request(2, name, text), b"XXXX", b"\xff\xfe\xff\xfe")
    assert sent(request(3, "huge", "x" * (MAX_TEXT_BYTES + 1))).refusal.kind == "protocol"
    describe = ps_pb2.DescribeRequest(job=JOB, all=True, metadata=True)
    described = service.describe(describe, call)  # type: ignore[arg-type]
    assert (dict(described.metadata), len(described.variables)) == ({"progress": "text"}, 0)
