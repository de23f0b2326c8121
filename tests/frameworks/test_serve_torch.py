"""`pscluster.torch.serve`: modules whose parameters are on the servers, beside one process of torch, step by step."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import run_cluster
from tests.roles.processes import run
from torch import nn
from torch.nn import functional

import pscluster.torch
from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    SavedVariables,
    SynchronousStrategy,
    errors,
    initializers,
    metrics,
    optimizers,
)
from pscluster.core.functions.definitions import capture
from pscluster.torch import ServedModule, load_checkpoint, optimizer_from, serve

ENV = {"OMP_NUM_THREADS": "1"}
ROWS, BAGS, BATCH = 40, 25, 8
STEPS = 6
Batch = Any  # ids, bags and labels


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, 2, env=ENV)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """A strategy that cuts variables in two."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        yield strategy


@pytest.fixture
def coordinator(strategy: ParameterServerStrategy) -> ClusterCoordinator:
    return ClusterCoordinator(strategy)


class Recommender(nn.Module):
    """Two embeddings, and what is dense, with batch norm: a bias before it would have no gradient but for rounding."""

    def __init__(self, mode: str = "mean", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.emb = nn.Embedding(ROWS, 4)
        self.bag = nn.EmbeddingBag(BAGS, 4, mode=mode, **options)
        self.net = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(torch.cat([self.emb(ids), self.bag(bags)], 1))[:, 0]
        return result


def batches(count: int = STEPS) -> list[Batch]:
    rng = np.random.default_rng(0)
    return [
        (
            torch.from_numpy(rng.integers(ROWS, size=BATCH)),
            torch.from_numpy(rng.integers(BAGS, size=(BATCH, 3))),
            torch.from_numpy(rng.normal(size=BATCH).astype(np.float32)),
        )
        for _ in range(count)
    ]


def loss_of(module: Any, batch: Batch) -> torch.Tensor:
    *inputs, y = batch
    return functional.mse_loss(module(*inputs), y)


def trained_alone(module: nn.Module, make: Callable[[Any], Any], data: list[Batch], clip: float | None = None) -> Any:
    """The losses of one process; the module is trained."""
    optimizer, losses = make(module.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(coordinator: ClusterCoordinator, served: ServedModule, data: list[Batch], clip: float | None = None) -> Any:
    """The losses of the same steps, taken by one worker, which is given the module as an argument."""

    def train(served: ServedModule, data: list[Batch]) -> list[float]:
        losses = []
        for batch in data:
            batch = [torch.as_tensor(array) for array in batch]  # arrays, since tensors arrive as these
            with served.step() as module:
                loss = loss_of(module, batch)
                loss.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            losses.append(loss.item())
        return losses

    return coordinator.schedule(train, args=(served, data)).fetch()


def check_same(served: ServedModule, module: nn.Module, tolerance: float = 1e-5) -> None:
    state, expected = served.state_dict(), module.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


SGD = functools.partial(torch.optim.SGD, lr=0.2)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": SGD,
    "decay": functools.partial(torch.optim.SGD, lr=0.2, weight_decay=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
}
LAZY = {"decay", "momentum", "adam", "adamw", "rmsprop", "adadelta"}
"""Those that also change rows without a gradient, in one process: all is served whole."""


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_one_process(kind: str, coordinator: ClusterCoordinator) -> None:
    """With torch's optimizers mapped to ours; the batch norm's buffers, too."""
    tables = [] if kind in LAZY else ["emb", "bag.*"]
    served = serve(Recommender, optimizer=optimizer_from(OPTIMIZERS[kind]), tables=tables)
    assert served.tables == ([] if kind in LAZY else ["emb.weight", "bag.weight"])
    check_same(served, Recommender(), tolerance=0)
    alone = Recommender()
    expected = trained_alone(alone, OPTIMIZERS[kind], batches())
    np.testing.assert_allclose(trained(coordinator, served, batches()), expected, rtol=1e-4)
    # At gradients of epsilon's size RMSprop differs: see `optimizer_from`.
    check_same(served, alone, 1e-3 if kind == "rmsprop" else 3e-5)
    assert served.state_dict()["net.1.num_batches_tracked"] == STEPS


class Lookups(nn.Module):
    """Looks one table up twice, in a tied embedding and by a function; bags with offsets and weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Embedding(ROWS, 4, padding_idx=3, scale_grad_by_freq=True)
        self.second = nn.Embedding(ROWS, 4)
        self.second.weight = self.first.weight
        self.bag = nn.EmbeddingBag(BAGS, 4, mode="sum", include_last_offset=True, padding_idx=-1)
        self.most = nn.EmbeddingBag(BAGS, 4, mode="max")

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        first, second = self.first(ids), self.second(ids.flip(0).int() // 2)
        third = functional.embedding(bags[:, 0], self.first.weight)
        offsets = torch.arange(0, bags.numel() + 1, 3)
        weights = torch.linspace(0, 1, bags.numel())
        summed = self.bag(bags.reshape(-1), offsets, per_sample_weights=weights)
        return (first * second + third + summed + self.most(bags)).sum(1)


def with_dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))


def test_workers_drop_other_units(coordinator: ClusterCoordinator) -> None:
    """The first one those that one process would drop."""
    served = serve(with_dropout, optimizer=optimizers.SGD(0.1))

    def dropped() -> list[float]:
        with served.step() as module:
            left: list[float] = module[1](torch.ones(64)).tolist()
        return left

    expected = with_dropout()[1](torch.ones(64)).tolist()
    (first,) = coordinator.fetch(coordinator.schedule_together(dropped, workers=[0]))
    (second,) = coordinator.fetch(coordinator.schedule_together(dropped, workers=[1]))
    assert first == expected
    assert second != expected


def test_lookups_of_all_kinds(coordinator: ClusterCoordinator) -> None:
    """Rows of one step come in several lookups, and each is pushed once; clipping sees their summed gradients."""
    served = serve(Lookups, optimizer=optimizers.SGD(0.1), tables=["*"])
    assert served.tables == ["first.weight", "bag.weight", "most.weight"]
    assert served.aliases == {"second.weight": "first.weight"}
    alone = Lookups()
    make = functools.partial(torch.optim.SGD, lr=0.1)
    expected = trained_alone(alone, make, batches(), clip=0.5)
    np.testing.assert_allclose(trained(coordinator, served, batches(), clip=0.5), expected, rtol=1e-4)
    check_same(served, alone)


def test_rows_are_pulled_and_pushed_and_nothing_else(coordinator: ClusterCoordinator) -> None:
    """Of a table that is in no process' memory; ids given before come in one request, and as `lookups`."""

    def make() -> nn.Module:
        return nn.Embedding(1_000_000, 8, sparse=True, device="meta")

    served = serve(make, optimizer=optimizers.SGD(1.0), initializers={"*": initializers.Constant(2.0)}, name="big")
    (table,) = served.parameters.values()
    assert table.name == "big/weight"
    strategy = coordinator.strategy

    def train(ids: Any) -> tuple[Any, float, int]:
        before = strategy.traffic()
        with served.step({"weight": ids}) as module:
            rows = module(torch.as_tensor(ids))
            more = module(torch.tensor([5, 999_999]))
            (rows.sum() + more.sum()).backward()
            (weight,) = module.parameters()
            assert weight.shape == (1_000_000, 8)
            count = len(weight.grad)
        return strategy.traffic() - before, float(rows.sum().item()), count

    def lookups(ids: Any) -> Any:
        return served.lookups({"weight": ids})

    ids = np.array([[7, 5], [7, 123_456]])
    traffic, total, count = coordinator.schedule(train, args=(ids,)).fetch()
    assert (total, count) == (64.0, 4)
    assert max(traffic) < 1000
    rows = table.gather([7, 5, 999_999, 123_456, 6])
    np.testing.assert_array_equal(rows, np.repeat([[0], [0], [1], [1], [2]], 8, axis=1))
    _, total, _ = coordinator.schedule(train, args=(ids,), lookups=lookups).fetch()
    assert total == 8.0
    coordinator.join()
    np.testing.assert_array_equal(table.gather([7, 5]), np.full((2, 8), -2.0))


class Tied(nn.Module):
    """The same weight looked up and multiplied by, something frozen, and something that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(ROWS, 4)
        self.out = nn.Linear(4, ROWS, bias=False)
        self.out.weight = self.emb.weight
        self.fixed = nn.Embedding(BAGS, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.emb(ids) + self.fixed(bags).mean(1))
        return logits.logsumexp(1)


@pytest.mark.parametrize("from_instance", [False, True])
def test_tied_frozen_and_unused_parameters(
    from_instance: bool, coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A tied weight is one variable, whole; what is frozen is not pushed; what is not used neither, which is logged."""
    module = Tied()
    make: Any = module if from_instance else Tied
    with caplog.at_level(logging.WARNING):
        served = serve(make, optimizer=optimizers.SGD(0.5), tables=["emb", "fixed"])
    assert "emb.weight is served whole: out uses the same weight" in caplog.text
    assert served.tables == ["fixed.weight"]
    assert served.aliases == {"out.weight": "emb.weight"}
    assert capture(lambda: served).nbytes < 20_000
    alone = Tied()
    expected = trained_alone(alone, functools.partial(torch.optim.SGD, lr=0.5), batches())
    np.testing.assert_allclose(trained(coordinator, served, batches()), expected, rtol=1e-5)
    check_same(served, alone)
    assert not served.parameters["fixed.weight"].trainable
    state = served.state_dict()
    assert state["out.weight"] is state["emb.weight"]


def test_a_checkpoint_opens_in_torch_and_a_plain_state_starts_a_job(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    served = serve(Tied, optimizer=optimizers.SGD(0.5), name="model")
    plain = Tied()
    trained_alone(plain, SGD, batches(2))
    served.load_state_dict(plain.state_dict())
    check_same(served, plain, tolerance=0)
    trained(coordinator, served, batches(2))
    with CheckpointManager(str(tmp_path), strategy=coordinator.strategy) as manager:
        manager.save()
    other = Tied()
    load_checkpoint(other, SavedVariables(tmp_path), name="model")
    check_same(served, other, tolerance=0)
    assert other.out.weight is other.emb.weight
    Tied().load_state_dict(served.state_dict())
    with pytest.raises(errors.CheckpointMismatchError, match=r"no variable 'emb\.weight'"):
        load_checkpoint(other, SavedVariables(tmp_path))
    with pytest.raises(errors.InvalidUpdateError, match=r"does not fit .* no value for unused\.bias"):
        served.load_state_dict({key: value for key, value in plain.state_dict().items() if key != "unused.bias"})
    check_same(served, other, tolerance=0)


def test_gradients_are_accumulated_in_a_step_and_dropped_if_it_raises(coordinator: ClusterCoordinator) -> None:
    served = serve(Recommender, optimizer=optimizers.SGD(0.1), tables=["emb"])

    def train(data: list[Batch]) -> None:
        with served.step() as module:
            for batch in data:
                (loss_of(module, [torch.as_tensor(array) for array in batch]) / len(data)).backward()
        try:
            with served.step() as module:
                loss_of(module, [torch.as_tensor(array) for array in data[0]]).backward()
                raise KeyError
        except KeyError:
            pass
        with served.evaluation() as module:
            assert not module.training
            assert not loss_of(module, [torch.as_tensor(array) for array in data[0]]).requires_grad
        with served.step() as module:
            assert module.training
            assert all(parameter.grad is None for parameter in module.parameters())

    coordinator.schedule(train, args=(batches(2),)).fetch()
    alone = Recommender()
    optimizer = SGD(alone.parameters(), lr=0.1)
    for batch in batches(2):
        (loss_of(alone, batch) / 2).backward()
    optimizer.step()
    check_same(served, alone)


def test_compiled_and_autocast_modules(coordinator: ClusterCoordinator) -> None:
    def make() -> Any:
        return torch.compile(Recommender(), backend="aot_eager")

    served = serve(make, optimizer=optimizers.SGD(0.2), tables=["emb"])
    assert "emb.weight" in served.parameters
    alone = Recommender()
    expected = trained_alone(alone, SGD, batches())
    np.testing.assert_allclose(trained(coordinator, served, batches()), expected, rtol=1e-4)
    check_same(served, alone)

    def mixed(data: list[Batch]) -> float:
        with served.step() as module:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(module, [torch.as_tensor(array) for array in data[0]])
            loss.backward()
        return float(loss.item())

    assert coordinator.schedule(mixed, args=(batches(1),)).fetch() < 10


def test_fit_with_overlap_and_validation(coordinator: ClusterCoordinator) -> None:
    """An ordinary Dataset is the source; validation reads a snapshot; the steps are those of both workers."""

    class Examples(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self.ids, self.bags = rng.integers(ROWS, size=256), rng.integers(BAGS, size=(256, 3))

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> Any:
            y = np.float32(self.ids[index] % 2)
            return torch.tensor(self.ids[index]), torch.from_numpy(self.bags[index]), torch.tensor(y)

    served = serve(Recommender, optimizer=optimizers.Adam(0.02), tables={"emb": optimizers.Adagrad(0.3)})

    def step(batch: Any) -> float:
        batch = [torch.as_tensor(array) for array in batch]
        with served.step({"emb": batch[0]}) as module:
            loss = loss_of(module, batch)
            loss.backward()
        return float(loss.item())

    def validate(batch: Any) -> Any:
        ids, bags, y = map(torch.as_tensor, batch)
        with served.evaluation() as module:
            return y, module(ids, bags)

    data = coordinator.distribute_dataset(Examples()).shuffle(seed=1).batch(16)
    history = coordinator.fit(
        step,
        data,
        epochs=14,
        lookups=lambda batch: served.lookups({"emb": batch[0]}),
        overlap=1,
        validation_data=coordinator.distribute_dataset(Examples()).batch(64),
        validation_step=validate,
        validation_metrics=[metrics.MeanSquaredError()],
        verbose=0,
    ).history
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert served.state_dict()["net.1.num_batches_tracked"] == 14 * 16  # of both workers
    assert history["val_meansquarederror"][-1] < history["loss"][0]


def test_a_loader_feeds_a_worker(coordinator: ClusterCoordinator) -> None:
    """Also one with processes of its own, which are spawned: the worker has threads."""
    served = serve(Recommender, optimizer=optimizers.SGD(0.2), tables=["emb"])

    def data(context: Any) -> Any:
        examples = torch.utils.data.TensorDataset(*(torch.cat(tensors) for tensors in zip(*batches(), strict=True)))
        if context.input_pipeline_id:
            return torch.utils.data.DataLoader(examples, BATCH)
        return torch.utils.data.DataLoader(examples, BATCH, num_workers=1, multiprocessing_context="spawn")

    def step(iterator: Any) -> float:
        batch = next(iterator)
        with served.step() as module:
            loss = loss_of(module, batch)
            loss.backward()
        return float(loss.item())

    iterator = iter(coordinator.create_per_worker_dataset(data))
    losses = coordinator.fetch([coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS)])
    assert len(losses) == STEPS


def test_updates_count_once_when_workers_are_killed(tmp_path: Path) -> None:
    """Each step adds 1 to a row and to a parameter, whatever dies meanwhile; the module is made again."""
    killed = 3
    with (
        LocalCluster(1, 2, env=ENV, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
        strategy.scope(),
    ):
        coordinator = ClusterCoordinator(strategy)

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb = nn.Embedding.from_pretrained(torch.zeros(100, 2), freeze=False, sparse=True)
                self.sum = nn.Parameter(torch.zeros(3))

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return -(self.emb(ids).sum() + self.sum.sum())

        served = serve(Counting, optimizer=optimizers.SGD(1.0))

        def step(row: int, marks: str) -> int:
            with served.step() as module:
                module(torch.tensor([row])).backward()
            mark = Path(marks, str(row))
            if row % 10 == 3 and row < 10 * killed and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return os.getpid()

        pids = coordinator.fetch([coordinator.schedule(step, args=(row, str(tmp_path))) for row in range(50)])
        assert len(set(pids)) > 2
        state = served.state_dict()
        torch.testing.assert_close(state["emb.weight"][:50], torch.ones(50, 2))
        torch.testing.assert_close(state["emb.weight"][50:], torch.zeros(50, 2))
        torch.testing.assert_close(state["sum"], torch.full((3,), 50.0))


def test_synchronous_steps_are_those_of_one_process(cluster: LocalCluster) -> None:
    """Each of two replicas has half of a batch; the buffers are those of replica 0."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.emb = nn.Embedding(ROWS, 4)
            self.net = nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
            self.seen += len(ids)
            result: torch.Tensor = self.net(self.emb(ids) + bags.sum(1, keepdim=True) / BAGS)[:, 0]
            return result

    with SynchronousStrategy(cluster) as strategy, strategy.scope():
        served = serve(Small, optimizer=optimizers.SGD(0.1), tables=["emb"])

        def step(data: list[Any]) -> float:
            from pscluster.coordinator import replica_context

            rank = replica_context().replica_id
            mine = [torch.as_tensor(array)[rank::2] for array in data]
            with served.step(examples=len(mine[0])) as module:
                loss = loss_of(module, mine)
                loss.backward()
            return float(loss.item())

        ClusterCoordinator(strategy)
        losses = [strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None) for batch in batches(3)]
        alone = Small()
        np.testing.assert_allclose(
            losses, trained_alone(alone, functools.partial(torch.optim.SGD, lr=0.1), batches(3)), 1e-5
        )
        alone.seen /= 2
        check_same(served, alone)


# What is refused


def failing(coordinator: ClusterCoordinator, served: ServedModule, use: Callable[[Any], Any]) -> str:
    """The error of a step that does this with its module."""

    def step() -> None:
        with served.step() as module:
            use(module)

    coordinator.schedule(step)
    with pytest.raises(errors.FunctionError) as caught:
        coordinator.join()
    return str(caught.value)


def test_a_gradient_with_nan_is_refused_by_name(coordinator: ClusterCoordinator) -> None:
    served = serve(Recommender, optimizer=optimizers.SGD(0.1), tables=["emb"])

    def use(module: Any) -> None:
        loss_of(module, batches(1)[0]).backward()
        module.net[3].bias.grad[0] = torch.nan
        module.emb.weight.grad[1] = torch.inf

    message = failing(coordinator, served, use)
    assert "the gradient of emb.weight, net.3.bias has NaN or infinity, so this step pushes nothing" in message
    check_same(served, Recommender(), tolerance=0)


def test_a_module_that_is_another_one_on_the_worker_is_refused(coordinator: ClusterCoordinator) -> None:
    here = os.getpid()

    def make() -> nn.Module:
        if os.getpid() == here:
            return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
        return nn.Sequential(nn.Linear(2, 5), nn.Identity(), nn.Linear(5, 4))

    served = serve(make, optimizer=optimizers.SGD(0.1))
    message = failing(coordinator, served, lambda module: None)
    assert "no parameter '1.weight', no parameter '1.bias', another parameter, '2.weight'" in message
    assert "serve it again after a change" in message


def test_a_block_can_not_change_which_parameters_there_are(coordinator: ClusterCoordinator) -> None:
    served = serve(Tied, optimizer=optimizers.SGD(0.1), tables=["fixed"])

    def add(module: Any) -> None:
        module.unused.scale = torch.nn.Parameter(torch.ones(2))

    def add_module(module: Any) -> None:
        module.unused.extra = torch.nn.Linear(2, 2)

    def remove(module: Any) -> None:
        module.unused.bias = None

    def replace(module: Any) -> None:
        module.unused.weight = torch.nn.Parameter(torch.ones(3, 2))

    def thaw(module: Any) -> None:
        module.requires_grad_(True)

    for use, message in (
        (add, "(added 'unused.scale')"),
        (add_module, "(added 'unused.extra.weight', added 'unused.extra.bias')"),
        (remove, "(removed 'unused.bias')"),
        (replace, "(replaced 'unused.weight'), and only those that were served are trained: nothing is pushed"),
        (thaw, "the block trains 'fixed.weight', and this was frozen"),
    ):
        assert message in failing(coordinator, served, use)

    def step() -> list[bool]:
        with served.step() as module:
            module.unused.helper = torch.nn.Tanh()  # without parameters
        with served.evaluation() as module:
            return [parameter.requires_grad for parameter in module.parameters()]

    assert coordinator.schedule(step).fetch() == [True, False, True, True]
    check_same(served, Tied(), tolerance=0)


@pytest.mark.usefixtures("coordinator")
def test_what_a_block_does_to_values_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    served = serve(nn.Linear(2, 1), optimizer=optimizers.SGD(0.0))
    before = served.state_dict()
    for _ in range(2):
        with served.step() as module:
            module(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(module.parameters(), lr=1.0).step()
    (told,) = (record.getMessage() for record in caplog.records)
    assert "changed the values of weight, bias itself" in told
    assert "leave out torch's optimizer.step()" in told
    assert all(torch.equal(value, before[name]) for name, value in served.state_dict().items())


def test_what_a_block_freezes_is_frozen_for_it_alone(coordinator: ClusterCoordinator) -> None:
    served = serve(Recommender, optimizer=optimizers.SGD(0.1), tables=["emb"])

    def train(batch: Batch) -> bool:
        with served.step() as module:
            module.requires_grad_(False)
            module.net[3].requires_grad_()
            loss_of(module, [torch.as_tensor(array) for array in batch]).backward()
        with served.step() as module:
            return all(parameter.requires_grad for parameter in module.parameters())

    assert coordinator.schedule(train, args=(batches(1)[0],)).fetch()
    state, before = served.state_dict(), Recommender().state_dict()
    changed = [name for name, value in state.items() if not torch.equal(value, before[name])]
    assert {name for name in changed if "net.1." not in name} == {"net.3.weight", "net.3.bias"}


def test_the_whole_of_a_table_can_not_be_used(coordinator: ClusterCoordinator) -> None:
    served = serve(Recommender, optimizer=optimizers.SGD(0.1), tables=["emb"])
    for use in (
        lambda module: module.emb(torch.tensor([1])) @ module.emb.weight.T,
        lambda module: module.emb.weight[3],
        lambda module: functional.linear(torch.ones(1, 4), module.emb.weight),
    ):
        message = failing(coordinator, served, use)
        assert "'emb.weight' is served as a table, of which a step has only the rows that it looks up" in message
    message = failing(coordinator, served, lambda module: module.emb(torch.tensor([ROWS])))
    assert "emb.weight" in message
    assert str(ROWS) in message


def test_what_serve_refuses(strategy: ParameterServerStrategy) -> None:
    sgd = optimizers.SGD(0.1)
    linear = functools.partial(nn.Linear, 2, 2)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, r"pscluster\.torch\.optimizer_from", linear, {"optimizer": SGD(linear().parameters())}),
        (TypeError, "optimizer is None", linear, {"optimizer": None}),
        (TypeError, "takes a module, or a function", 3, {}),
        (TypeError, "returned an int", lambda: 3, {}),
        (TypeError, "tables is a str", linear, {"tables": "emb"}),
        (TypeError, r"tables\['emb'\] is an int", Recommender, {"tables": {"emb": 1}}),
        (
            ValueError,
            r"'embed\*', which fits no .* emb\.weight, bag\.weight",
            Recommender,
            {"tables": ["embed*"]},
        ),
        (ValueError, "'x', which fits no parameter", linear, {"initializers": {"x": initializers.Zeros()}}),
        (ValueError, r"the module has max_norm=1\.0", lambda: nn.Embedding(3, 2, max_norm=1.0), {}),
        (errors.MisuseError, r"'weight' is on the device 'meta'", lambda: nn.Linear(2, 2, device="meta"), {}),
        (errors.MisuseError, "has no shape yet", lambda: nn.LazyLinear(2), {}),
        (errors.MisuseError, "no parameters", nn.ReLU, {}),
    ]
    for error, message, module, options in cases:
        with pytest.raises(error, match=message):
            serve(module, **{"optimizer": sgd, **options})
    assert strategy.variables == []
    served = serve(linear, optimizer=sgd)
    with pytest.raises(errors.MisuseError, match="there is no table 'emb' here: there are none"):
        served.lookups({"emb": [1]})
    with pytest.raises(errors.MisuseError, match="already a variable 'weight'"):
        serve(linear, optimizer=sgd)


def test_it_is_made_in_a_scope() -> None:
    with pytest.raises(errors.MisuseError, match="a served module was created outside a strategy's scope"):
        serve(Recommender, optimizer=None)  # type: ignore[arg-type]


def step_of(served: ServedModule, batch: Batch) -> float:
    """A step that is sent by its name."""
    with served.step() as module:
        loss = loss_of(module, [torch.from_numpy(array) for array in batch])
        loss.backward()
    return float(loss.item())


def test_where_pickles_are_off() -> None:
    with (
        LocalCluster(1, 1, env=ENV, log_level="ERROR", allow_pickle=False) as cluster,
        ParameterServerStrategy(cluster) as strategy,
        strategy.scope(),
    ):
        served = serve(Recommender, optimizer=optimizers.SGD(0.2), tables=["emb"])
        coordinator = ClusterCoordinator(strategy)
        losses = [
            coordinator.schedule(functools.partial(step_of, served), args=(batch,)).fetch() for batch in batches(2)
        ]
        losses += [coordinator.schedule(step_of, args=(served, batch)).fetch() for batch in batches(4)[2:]]
        np.testing.assert_allclose(losses, trained_alone(Recommender(), SGD, batches(4)), rtol=1e-4)
        with pytest.raises(errors.MisuseError, match=r"was given a Recommender, .* give its class, or a function"):
            serve(Recommender(), optimizer=optimizers.SGD(0.2), name="other")


def test_only_the_state_of_an_optimizer_that_exists_is_missed(
    strategy: ParameterServerStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer_from(functools.partial(torch.optim.Adagrad, lr=0.1))
    assert not caplog.records
    optimizer_from(torch.optim.Adagrad([nn.Parameter(torch.zeros(1))]))
    assert "the state of the Adagrad, such as its moments, is not taken over" in caplog.text


def test_optimizers_that_have_no_counterpart(strategy: ParameterServerStrategy) -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    scheduled = torch.optim.SGD(parameters, 0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    refused: list[tuple[Any, str]] = [
        (torch.optim.LBFGS(parameters), "LBFGS has no counterpart on the servers; these have one: SGD, Adam"),
        (torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5), "SGD with dampening=0.5 has no counterpart"),
        (torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.5), "SGD with weight_decay=0.5"),
        (torch.optim.Adam(parameters, weight_decay=0.1), "Adam with weight_decay=0.1 has no .* use AdamW"),
        (torch.optim.Adagrad(parameters, lr_decay=0.1), "Adagrad with lr_decay=0.1 .* InverseTimeDecay"),
        (torch.optim.Adam(parameters, maximize=True), "maximize=True"),
        (torch.optim.SGD(groups, 0.1), r"groups of parameters that differ in lr \(0\.1 and 0\.5\)"),
        (scheduled, "a scheduler of torch changes the learning rate of the SGD"),
    ]
    for optimizer, message in refused:
        with pytest.raises(ValueError, match=message):
            optimizer_from(optimizer)
    with pytest.raises(TypeError, match="takes an optimizer of torch"):
        optimizer_from(3)
    made = optimizer_from(torch.optim.AdamW(parameters, 0.5, weight_decay=0.25), name="mine", global_clipnorm=1.0)
    assert (made.name, made.learning_rate) == ("mine", 0.5)


def test_torch_is_imported_when_it_is_used() -> None:
    assert set(pscluster.torch.__all__) <= set(dir(pscluster.torch)) | set(pscluster.torch._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pscluster.torch.nothing  # noqa: B018


def test_the_example_learns_and_answers(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "torch_recommender.py"
    arguments = ("--ps", "2", "--workers", "2", str(script), "--checkpoints", str(tmp_path / "saved"))
    code, output = run("run", *arguments)
    assert code == 0, output
    (right,) = re.findall(r"([\d.]+)% of the ratings are right", output)
    assert float(right) > 70, output

    request = {"user": [5, 1999], "liked": [[3, 0, 7, 0, 0], [0] * 5], "item": [499, 1]}
    lines = [json.dumps(each) for each in (request, request | {"item": [500, 1]}, {**request, "user": ["a", "b"]})]
    command = [sys.executable, str(script.with_name("serve_torch.py")), str(tmp_path / "saved")]
    served = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True, timeout=60)
    answered, *wrong = map(json.loads, served.stdout.splitlines())
    module = runpy.run_path(str(script))["Recommender"]()
    load_checkpoint(module, SavedVariables(tmp_path / "saved"))
    with torch.no_grad():
        expected = torch.sigmoid(module.eval()(*map(torch.tensor, request.values())))
    np.testing.assert_allclose(answered["likes"], expected, rtol=1e-6)
    assert "row id 500 (position 0) is out of range" in wrong[0]["error"]
    assert wrong[1] == {"error": "ids must be whole numbers"}
