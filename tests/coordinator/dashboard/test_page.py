"""The live page in a real browser, on a real cluster: what it shows, what becomes of it when something dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.conftest import Gate, wait_for_file
from tests.coordinator.dashboard.browser import browser, complaints, needs_browser, save_picture
from tests.waiting import until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    Dashboard,
    EmbeddingTable,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    ProgressLine,
    Variable,
)
from pscluster.coordinator.observability.events import EventLog

pytestmark = [needs_browser, pytest.mark.timeout(240)]

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@contextlib.contextmanager
def job(restart: bool = True) -> Iterator[tuple[LocalCluster, ClusterCoordinator]]:
    """A cluster of the test's own, of two servers and two workers."""
    with (
        LocalCluster(2, 2, log_level="ERROR", restart=restart) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy,
    ):
        yield cluster, ClusterCoordinator(strategy)


def text_of(driver: Any, selector: str) -> str:
    """The text of the first element that the selector finds, on one line."""
    return str(driver.execute_script(f"return document.querySelector({selector!r})?.innerText ?? ''")).replace(
        "\n", " "
    )


def row(driver: Any, table: str, first: str) -> str:
    """The text of the row of this table that begins so."""
    rows = driver.execute_script(
        f"return [...document.querySelectorAll('#{table} tbody tr')].map((row) => row.innerText)"
    )
    return next((" ".join(text.split()) for text in rows if text.startswith(first)), "")


def shows(driver: Any, predicate: Callable[[], object], words: str) -> None:
    """Wait until the page does."""
    until(predicate, f"the page shows {words}", lambda: text_of(driver, "main"))


def test_a_job(tmp_path: Path) -> None:
    """Queue, loss, load, the hot variable, an error and a checkpoint are shown; names and errors are data."""
    with job() as (_, coordinator), Dashboard(coordinator, "127.0.0.1:0") as page:
        strategy = coordinator.strategy
        with strategy.scope():
            table = Variable(np.zeros((1000, 64), np.float32), name="table")
            odd = Variable(np.zeros(4, np.float32), name=MARKUP)
            users = EmbeddingTable(4, capacity=100, name="users", num_shards=1)

        def step() -> None:
            strategy.read([table, odd])
            table.scatter_add(IndexedSlices(np.ones((10, 64), np.float32), np.arange(10)))
            users.scatter_add(IndexedSlices(np.ones((5, 4), np.float32), np.arange(5)))
            users.lookup(np.arange(10))

        def wrong() -> None:
            raise ValueError(MARKUP)

        def work(line: ProgressLine) -> None:
            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join()
            line.update(20, loss=0.25, logs={"accuracy": 0.5})

        with browser(tmp_path / "profile") as driver, ProgressLine(coordinator, 1_000_000) as line:
            driver.get(page.url)
            shows(driver, lambda: "nothing is scheduled" in text_of(driver, "#verdict"), "that all is well")
            coordinator.schedule(wrong)
            with pytest.raises(ValueError, match="hacked"):
                coordinator.join()
            CheckpointManager(str(tmp_path / "checkpoints"), strategy=strategy).save()

            def moving() -> bool:
                work(line)
                hot = "hot" in row(driver, "variables", "table") and "KiB" in row(driver, "servers", "ps 0")
                return hot and "50 %" in row(driver, "tables", "users")

            shows(driver, moving, "which variable is hot, what the servers move, and how many lookups find a row")
            assert row(driver, "tables", "users").startswith("users 5 100 ")
            for worker in ("worker 0", "worker 1"):
                assert "working" in row(driver, "workers", worker) or "idle" in row(driver, "workers", worker)
            assert row(driver, "variables", MARKUP)
            assert MARKUP in text_of(driver, "#errors")
            traceback = "return document.querySelector('#errors pre').textContent"
            shows(driver, lambda: "test_page.py" in driver.execute_script(traceback), "the traceback")
            assert "ckpt-000001" in text_of(driver, "#checkpoints")
            assert "accuracy" in text_of(driver, "#tiles").lower()
            assert "0.25" in text_of(driver, "#loss-figure")
            assert driver.execute_script("return document.querySelectorAll('#loss-chart canvas').length") == 1
            assert driver.execute_script("return window.hacked") is None
            assert driver.execute_script("return document.querySelectorAll('main script, main img').length") == 0
            check_structure(driver)
            check_width(driver, 1600)
            check_width(driver, 400)
            save_picture(driver, tmp_path / "page.png")
            coordinator.schedule(wrong)
            with pytest.raises(ValueError, match="hacked"):
                coordinator.join()
            strategy.close()
            shows(driver, lambda: text_of(driver, "#verdict") == "The job is over", "that the job is over")
            assert MARKUP in text_of(driver, "#problems")
            assert "test_page.py" in driver.execute_script(traceback), "that of an error at the very end, too"
            shows(driver, lambda: "not connected; last seen" in text_of(driver, "#link"), "that it is not connected")
            mine = [text for text in complaints(driver) if "ERR_CONNECTION_" not in text]  # it dials again
            assert mine == []


def check_structure(driver: Any) -> None:
    """What those need who do not see the page, or have no mouse."""
    structure = driver.execute_script("""
        const count = (selector) => document.querySelectorAll(selector).length;
        const headings = [...document.querySelectorAll("h1, h2, h3")].map((each) => each.tagName);
        return {
            landmarks: [count("main"), count("header"), count("nav[aria-label]")],
            language: document.documentElement.lang, headings, status: count("[role=status], output"),
            tables: count("table[aria-label]"), scopes: count("th:not([scope])"),
            charts: [...document.querySelectorAll("[role=img]")].map((each) => each.getAttribute("aria-label"))};
    """)
    assert structure["landmarks"] == [1, 1, 1]
    assert not driver.execute_script("return document.querySelector('#replicas').offsetParent"), "there are none"
    assert (structure["language"], structure["status"], structure["tables"], structure["scopes"]) == ("en", 1, 6, 0)
    assert structure["headings"] == ["H1", *["H2"] * 8]
    assert all("over time: " in label for label in structure["charts"])
    order = driver.execute_script("return [...document.querySelectorAll('main section[id]')].map((each) => each.id)")
    assert order.index("errors") < order.index("variables"), "what is wrong comes first, on a narrow page, too"


def check_width(driver: Any, width: int) -> None:
    """Nothing reaches beyond the page, whatever its width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(lambda: driver.execute_script("return innerWidth") == width, "the page has that width")
    wide = """
        const all = [...document.querySelectorAll("body *")];
        const scrolls = (each) => each.closest(".table, pre, .u-wrap");
        return all.filter((each) => !scrolls(each) && each.getBoundingClientRect().right > innerWidth + 1)
            .map((each) => each.outerHTML.slice(0, 80));
    """
    until(lambda: driver.execute_script(wide) == [], f"all fits into {width} px", lambda: driver.execute_script(wide))


def test_a_worker_dies(tmp_path: Path, gate: Gate) -> None:
    """A worker that is killed is shown as down, and what is wrong is said first; one that returns is shown as back."""
    with job(restart=False) as (cluster, coordinator), Dashboard(coordinator, "127.0.0.1:0") as page:
        path = gate.path

        def held() -> None:
            wait_for_file(path)

        with browser(tmp_path / "profile") as driver:
            driver.get(page.url)
            values = [coordinator.schedule(held) for _ in range(2)]
            shows(driver, lambda: "working" in row(driver, "workers", "worker 1"), "that worker 1 works")
            # The page itself notes when it shows it, so that no question of ours adds to that.
            driver.execute_script("""
                const workers = document.querySelector("#workers");
                new MutationObserver(() => {
                    if (!window.shown && workers.innerText.includes("down:")) window.shown = Date.now();
                }).observe(workers, {subtree: true, childList: true, characterData: true});
                window.before = Date.now();
            """)
            cluster.kill("worker", 1)
            shows(driver, lambda: driver.execute_script("return window.shown"), "that it is down")
            took = driver.execute_script("return window.shown - window.before")
            print(f"a killed worker was shown after {took} ms")
            shows(driver, lambda: "worker 1 is down" in text_of(driver, "#problems"), "it among what is wrong")
            shows(driver, lambda: "was killed by SIGKILL" in row(driver, "workers", "worker 1"), "how it ended")
            assert text_of(driver, "#happened").count("worker 1") == 2, "that it came, and that it went, once"
            assert text_of(driver, "#verdict") == "Needs attention"
            assert "1 of 2" in text_of(driver, "#tiles")
            cluster.restart("worker", 1)
            shows(driver, lambda: "is back" in row(driver, "workers", "worker 1"), "that it is back")
            assert "lost once" in row(driver, "workers", "worker 1")
            shows(driver, lambda: "working" in row(driver, "workers", "worker 1"), "that it has a function again")
            cluster.kill("ps", 0)
            shows(driver, lambda: "unreachable" in row(driver, "servers", "ps 0"), "that a server is gone")
            cluster.restart("ps", 0)
            shows(driver, lambda: "is back after" in row(driver, "servers", "ps 0"), "that it is back")
            shows(driver, lambda: text_of(driver, "#verdict") == "Healthy, at work", "that all is well again")
            gate.open()
            coordinator.fetch(values)
            assert complaints(driver) == []


def test_the_same_again(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """Two problems that differ in a number, numbers with the names of others: each is shown once, however often."""
    with Dashboard(coordinator, "127.0.0.1:0") as page, browser(tmp_path / "profile") as driver:
        driver.get(page.url)
        shows(driver, lambda: driver.execute_script("return last !== null"), "a picture")
        outcomes = driver.execute_script("""
            const picture = structuredClone(last);
            picture.training.logs = [["Done", 1], ["Running for", 2], ["loss", 3]];
            const found = [];
            for (const problems of [["worker 0 is down", "worker 1 is down"], ["worker 1 is down", "worker 2 is down"],
                                    ["worker 2 is down"]]) {
                picture.health.problems = problems;
                show(picture);
                const shown = [...document.querySelectorAll("#problems li")].map((each) => each.textContent);
                found.push([String(shown) === String(problems), document.querySelectorAll("#tiles > div").length]);
            }
            return found;
        """)
        assert outcomes == [[True, 11]] * 3
        assert complaints(driver) == []
        lost = driver.execute_script("lost(); return [document.title[0], $('health').dataset.state]")
        assert lost == ["✕", "bad"]


def test_another_job_at_the_same_address(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """Its errors, whose numbers are those of the old one's, are shown in their place; or the form for its token."""
    strategy = coordinator.strategy
    strategy.context.event_log.record("worker 0", "error", "the old one's")
    with browser(tmp_path / "profile") as driver:
        with Dashboard(coordinator, "127.0.0.1:0") as page:
            driver.get(page.url)
            shows(driver, lambda: "the old one's" in text_of(driver, "#errors"), "the error")
            address = urlsplit(page.url).netloc
        strategy.context.event_log = EventLog()  # as a new coordinator has
        strategy.context.event_log.record("worker 0", "error", "the new one's")
        with Dashboard(coordinator, address):
            shows(driver, lambda: "the new one's" in text_of(driver, "#errors"), "the new job's error")
            assert "the old one's" not in text_of(driver, "main")
        port = address.rpartition(":")[2]
        with Dashboard(coordinator, f"0.0.0.0:{port}", insecure=True):
            shows(driver, lambda: "requires its token" in text_of(driver, "main"), "the form")
