"""A map in four processes that decodes images, on one worker, beside torch's DataLoader with as many, in turn."""

from __future__ import annotations

import functools
import statistics
import timeit
from typing import Any

from costs import cluster_of, compared
from decode_data import BATCH, WORKERS, decode, images
from driver import serve, timed
from harness import PEERS, Side

from pscluster.coordinator import __version__


def decoding(count: int, rounds: int) -> dict[str, Any]:
    """Images per second of each, and milliseconds of one decode while nothing else runs."""
    one = images(1)[0]
    alone = statistics.median(timeit.repeat(functools.partial(decode, one), number=20, repeat=5)) / 20
    with (
        Side("torch", "torch_decode_side.py", python=PEERS, isolated=False) as torch,
        cluster_of(1, 1) as (_, _, coordinator),
    ):
        torch.ready()

        def read(part: Any) -> int:
            return sum(len(batch) for batch in part)

        data = coordinator.distribute_dataset(images(count)).map(decode, workers=WORKERS).batch(BATCH)
        in_parts = {"a batch a function": data, "eight": data.parts(8)}

        def ours(dataset: Any) -> float:
            def all_of_them() -> None:
                seen = [coordinator.schedule(read, args=(part,)) for part in dataset]
                assert sum(coordinator.fetch(seen)) == count

            return timed(all_of_them)

        ways: dict[str, Any] = {name: functools.partial(ours, dataset) for name, dataset in in_parts.items()}
        ways["torch"] = lambda: torch.ask("epoch", count=count)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for trial in range(rounds + 1):
            for name in ways if trial % 2 else reversed(ways):
                seconds = ways[name]()
                if trial:
                    rates[name].append(count / seconds)
        compared_ = {name: compared(rates[name], rates["torch"]) for name in in_parts}
        return {"alone": alone * 1e3, "compared": compared_}


if __name__ == "__main__":
    serve(lambda _: ({"decoding": decoding}, {"pscluster": __version__}))
