"""`pscluster plan`: propose which shards should move, and which variables should be resharded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from pscluster.coordinator.cli.status import with_joined
from pscluster.coordinator.moves.plan import Measure, make_plan, measured
from pscluster.coordinator.observability.status_client import StatusClient
from pscluster.core.display.sanitize import shown, shown_json
from pscluster.core.limits import MAX_COUNT
from pscluster.core.transport.channels import PeerAddress


def show_plan(peers: Sequence[PeerAddress], by: Measure, *, as_text: bool = True) -> int:
    """Print a plan of the servers among these tasks; return the exit code: 1 if one of them does not answer."""
    with contextlib.closing(StatusClient(peers)) as client:
        answers = with_joined(client, peers, MAX_COUNT, explained=True, shards=True)
    servers = {peer: answer for peer, answer in answers.items() if peer.role == "ps"}
    replies = [answer for answer in servers.values() if not isinstance(answer, str)]
    for peer, answer in servers.items():
        if isinstance(answer, str):
            print(f"no plan: {peer.task} is not up: {shown(answer)}", file=sys.stderr)
    if len(replies) < len(servers):
        return 1
    plan = make_plan(*measured(replies, by), len(servers), by)
    print("\n".join(map(shown, str(plan).splitlines())) if as_text else shown_json(plan.as_json()))
    return 0
