"""The cluster token: on every call, from three places, never shown."""

from __future__ import annotations

import base64
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fork_client import plain_starts
from tests.roles.processes import (
    DONE,
    IDLE,
    JOB,
    PSCLUSTER,
    Process,
    Roles,
    environ,
    free_addresses,
    make_cluster,
    run,
    run_all,
    tf_config,
)
from tests.roles.wire import SECONDS, SERVICES, Metadata, with_token
from tests.waiting import until

from pscluster.core.errors import KIND_METADATA
from pscluster.core.limits import MAX_METADATA
from pscluster.core.role.open_health import PATH
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.tokens import MIN_BITS, strength, user_token_file
from pscluster.core.transport.methods import Method, methods

TOKEN = "correct-horse-battery-staple"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
WRONG: dict[str, Metadata] = {
    "none": (),
    "the token itself": (("authorization", f"Bearer {TOKEN}"),),
    "no scheme": (("authorization", TOKEN),),
    "empty": (("authorization", ""),),
    "no session": (("authorization", f"Pscluster1 {'0' * 32} 1 {'0' * 64}"),),
    "a counter that is none": (("authorization", f"Pscluster1 {'0' * 32} -1 {'0' * 64}"),),
    "half a proof": (("authorization", f"Pscluster1 {'0' * 32} 1 {'0' * 32}"),),
    "a proof of dots": (("authorization", f"Pscluster1 {'0' * 32} 1 {'.' * 64}"),),
    "two spaces": (("authorization", f"Pscluster1  {'0' * 32} 1 {'0' * 64}"),),
}


@dataclass
class Guarded:
    """A working cluster with a token."""

    addresses: dict[str, str]
    processes: list[Process]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server, a worker and a coordinator whose script has connected."""
    folder = tmp_path_factory.mktemp("guarded")
    cluster = make_cluster()
    with Roles(cluster, folder, {"PSCLUSTER_TOKEN": TOKEN}) as roles:
        with plain_starts():  # their command lines are looked at
            ps, worker = roles.ps(), roles.worker()
            coordinator = roles.coordinator(IDLE, str(folder / "gate"))
        coordinator.wait_for("connected")
        yield Guarded({job: cluster[job][0] for job in SERVICES}, [ps, worker, coordinator])


def call(channel: grpc.Channel, method: Method, metadata: Metadata = ()) -> grpc.RpcError | None:
    """Call a method with an empty message; return how it ended, None if it was answered."""
    request: object = iter([b""]) if method.client_streaming else b""
    try:
        reply = getattr(channel, method.shape)(method.path)(request, metadata=metadata, timeout=SECONDS)
        if method.server_streaming:
            next(reply, None)
            reply.cancel()
    except grpc.RpcError as error:
        return error
    return None


ALL_METHODS = [
    pytest.param(role, method, id=f"{role} {method.path}")
    for role, services in SERVICES.items()
    for service in services
    for method in methods(service)
]


@pytest.mark.parametrize(("role", "method"), ALL_METHODS)
def test_every_method(role: str, method: Method, guarded: Guarded) -> None:
    """Each method of each role refuses missing and wrong tokens, with a message, and accepts the right one."""
    with grpc.insecure_channel(guarded.addresses[role]) as channel:
        for proof, metadata in WRONG.items():
            error = call(channel, method, metadata)
            assert error is not None, proof
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, proof
            details = error.details() or ""
            kinds = [str(item.value) for item in error.trailing_metadata() or () if item.key == KIND_METADATA]
            assert "this cluster requires a token: set PSCLUSTER_TOKEN or PSCLUSTER_TOKEN_FILE" in details
            assert kinds == ["authentication"]
            assert TOKEN not in details
        error = call(with_token(channel, TOKEN), method)
        assert error is None or error.code() != grpc.StatusCode.UNAUTHENTICATED


def test_nothing_was_changed_or_shown(guarded: Guarded) -> None:
    """After all those calls the cluster works for its coordinator, and no log has the token or a traceback."""
    code, output = run("status", config=tf_config({k: [v] for k, v in guarded.addresses.items()}, "ps"), **WITH_TOKEN)
    assert code == 0, output
    assert output.count("serving") == 2
    for process in guarded.processes:
        assert process.is_running
        assert TOKEN not in process.output
        assert "Traceback" not in process.output
        assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()


WITH_TOKEN = {"PSCLUSTER_TOKEN": TOKEN}
NONE = {"PSCLUSTER_INSECURE": "1"}
"""Not the user's own token, either."""


def test_health_alone_may_be_opened(tmp_path: Path) -> None:
    """With --open-health a check needs no token but all else does, and callers that hold it up delay only their
    like."""
    cluster = make_cluster()
    address = cluster["ps"][0]
    with Roles(cluster, tmp_path, {**WITH_TOKEN, "PSCLUSTER_OPEN_HEALTH": "1"}) as roles:
        roles.ps()
        until(lambda: run("health", address, **NONE)[0] == 0, "the server serves")
        with ExitStack() as stack, grpc.insecure_channel(address) as channel:
            for service in SERVICES["ps"]:
                for method in methods(service):
                    error = call(channel, method)
                    refused = error is not None and error.code() == grpc.StatusCode.UNAUTHENTICATED
                    assert refused == (method.path != PATH), method.path
            alone = stack.enter_context(grpc.insecure_channel(address, options=OWN_CONNECTION))
            error = call(alone, method, [("x", "")] * (MAX_METADATA + 1))
            assert error is not None
            assert error.code() == grpc.StatusCode.UNAVAILABLE, "a large head gets no answer"
            # The calls never end and send nothing: each occupies a place until its time is over.
            over, check = threading.Event(), cast("Any", channel.stream_unary(PATH))
            held = [check.future(iter(over.wait, True)) for _ in range(40)]
            until(lambda: any(call.done() for call in held), "those for whom there is no place are refused")
            assert {call.code() for call in held if call.done()} <= {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.CANCELLED,
            }
            more = [stack.enter_context(grpc.insecure_channel(address, options=OWN_CONNECTION)) for _ in range(10)]
            checks = [cast("Any", channel.stream_unary(PATH)) for channel in more]
            held += [check.future(iter(over.wait, True)) for check in checks for _ in range(4)]
            until(lambda: sum(call.done() for call in held[40:]) >= 8, "all places are taken")
            probe: Any = stack.enter_context(grpc.insecure_channel(address, options=OWN_CONNECTION)).unary_unary(PATH)
            assert probe(b"", timeout=SECONDS), "a probe finds a place all the same"
            assert run("health", address, **WITH_TOKEN)[0] == 0
            until(lambda: all(call.done() for call in held), "who sends nothing is given up")
            over.set()
        assert run("health", address, **NONE)[0] == 0


def test_tools(guarded: Guarded, tmp_path: Path) -> None:
    """`pscluster health` and `status` need the token, and say so without it."""
    address = guarded.addresses["ps"]
    config = tf_config({"ps": [address]}, "ps")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(TOKEN + "\n")
    wrong.write_text(TOKEN[::-1])
    for file in (right, wrong):
        file.chmod(0o600)
    assert run("health", address, **WITH_TOKEN)[0] == 0
    assert run("health", "--token-file", str(right), address)[0] == 0
    assert run("status", PSCLUSTER_TOKEN_FILE=str(right), config=config)[0] == 0
    for options, env, why in (
        ([], NONE, "requires a token"),
        (["--token-file", str(wrong)], {"PSCLUSTER_TOKEN_FILE": str(right)}, "does not accept this process's token"),
    ):
        code, output = run("health", *options, address, **env)
        assert code == 1
        source = f" (from {wrong})" if options else ""
        assert output.startswith(f"this cluster {why}{source}: set PSCLUSTER_TOKEN or PSCLUSTER_TOKEN_FILE")
    code, output = run("status", config=config, **NONE)
    assert code == 1
    assert "this cluster requires a token" in output


@pytest.mark.parametrize("role", ["worker", "chief"])
@pytest.mark.parametrize("token", [None, "another-token-entirely"])
def test_role_with_another_token(role: str, token: str | None, guarded: Guarded, tmp_path: Path) -> None:
    """A role without the servers' token is refused immediately, in one line that names the server; exit code 1."""
    cluster = make_cluster()
    cluster["ps"] = [guarded.addresses["ps"]]
    (tmp_path / "job.py").write_text(JOB)
    arguments = ["worker"] if role == "worker" else ["coordinator", str(tmp_path / "job.py")]
    env = {"PSCLUSTER_TOKEN": token} if token else {}
    code, output = run(*arguments, config=tf_config(cluster, role), **env)
    assert code == 1
    last = output.splitlines()[-1]
    source = f" (from {user_token_file()})" if token is None else ""
    why = f"does not accept this process's token{source}"
    assert last.startswith(f"pscluster: this cluster {why}: set PSCLUSTER_TOKEN or PSCLUSTER_TOKEN_FILE")
    assert last.endswith(f"(refused by ps 0 at {cluster['ps'][0]})")
    assert "Traceback" not in output
    assert token is None or token not in output


def test_three_places(tmp_path: Path) -> None:
    """The option takes precedence over PSCLUSTER_TOKEN_FILE, and that over PSCLUSTER_TOKEN; a job runs with each."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"  {TOKEN}\n")
    wrong.write_text(TOKEN[::-1])
    with Roles(make_cluster(), tmp_path) as roles:
        roles.env = {"PSCLUSTER_TOKEN": TOKEN.upper(), "PSCLUSTER_TOKEN_FILE": str(wrong)}
        ps = roles.ps(0, "--token-file", str(right))
        roles.env = {"PSCLUSTER_TOKEN": TOKEN.upper(), "PSCLUSTER_TOKEN_FILE": str(right)}
        worker = roles.worker()
        roles.env = {"PSCLUSTER_TOKEN": TOKEN}
        coordinator = roles.coordinator(JOB)
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        for process in (ps, worker, coordinator):
            assert TOKEN not in process.output


def test_a_token_is_changed_without_a_stop(tmp_path: Path) -> None:
    """A file holds several tokens: all are accepted, the first is sent; changes take effect without a restart."""
    new = "a-newer-one-that-no-role-knows"
    file, cluster = tmp_path / "token", make_cluster()
    file.write_text(f"{TOKEN}\n")
    env = {"PSCLUSTER_TOKEN_FILE": str(file)}

    def write(*tokens: str) -> None:
        file.with_suffix(".draft").write_text("\n".join(tokens))
        file.with_suffix(".draft").rename(file)

    def is_let_in(token: str) -> bool:
        return run("health", cluster["ps"][0], PSCLUSTER_TOKEN=token)[0] == 0

    with Roles(cluster, tmp_path, env) as roles:
        ps = roles.ps()
        until(lambda: is_let_in(TOKEN), "it serves")
        assert not is_let_in(new)
        write(TOKEN, new)
        until(lambda: is_let_in(new), "the new one is accepted")
        assert is_let_in(TOKEN)
        write(new, "short")
        stay = f"keeping the current tokens: the cluster token in {file} can be guessed: its 5 characters"
        until(lambda: is_let_in(TOKEN) and stay in ps.output, "one that can't be used is refused")
        write(new)
        until(lambda: not is_let_in(TOKEN), "the old one is refused")
        assert is_let_in(new)
        assert run("health", cluster["ps"][0], **env)[0] == 0
        assert TOKEN not in ps.output
        assert new not in ps.output


def test_create_token_race(tmp_path: Path) -> None:
    """Roles that all have to create the token agree on one, which only its owner can read."""
    path = tmp_path / "token"
    with Roles(make_cluster(ps=3, workers=2), tmp_path, {"PSCLUSTER_TOKEN_FILE": str(path)}) as roles:
        started = [roles.ps(i, "--create-token") for i in range(3)] + [
            roles.worker(i, "--create-token") for i in (0, 1)
        ]
        coordinator = roles.coordinator(JOB, options=["--create-token"])
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        token = path.read_text().strip()
        assert len(token) >= 32
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["script.py", "token"], "no draft is left"
        for process in [*started, coordinator]:
            assert token not in process.output
            assert token not in " ".join(process.command)


def test_token_command(tmp_path: Path) -> None:
    """`pscluster token` prints another token each time; with --file it makes the file once, readable only by its
    owner."""
    first, second = run("token")[1], run("token")[1]
    assert first != second
    assert len(first.strip()) >= 32
    path = tmp_path / "token"
    assert run("token", "--file", str(path)) == (0, "")
    token = path.read_text()
    assert run("token", "--file", str(path)) == (0, "")
    assert path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, output = run("token", "--file", str(tmp_path / "no" / "token"))
    assert code == 2
    assert output.startswith(f"pscluster: can't create the token file {tmp_path}/no/token: No such file or directory")


def test_create_token_needs_a_name() -> None:
    """--create-token without a file to create is a mistake in the command line."""
    code, output = run("ps", "--create-token", config=tf_config(make_cluster(), "ps"))
    assert code == 2
    assert output == "pscluster: --create-token needs --token-file or PSCLUSTER_TOKEN_FILE to name the file\n"


@pytest.mark.parametrize("command", ["ps", "worker", "coordinator", "health"])
def test_unusable_tokens(command: str, tmp_path: Path) -> None:
    """A token that is too short, not ASCII, or in an unreadable file is refused, and not shown."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "short").write_text("secret-secret")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("schlüssel-schlüssel-schlüssel".encode("latin-1"))
    role = {"coordinator": "chief", "health": "ps"}.get(command, command)
    rest = {"coordinator": [str(tmp_path / "job.py")], "health": ["127.0.0.1:2222"]}.get(command, [])
    config = tf_config(make_cluster(), role)
    source, guessed = "the cluster token in PSCLUSTER_TOKEN", "can be guessed: its"
    cases = [
        (
            {"PSCLUSTER_TOKEN": "secret-secret"},
            f"{source} {guessed} 13 characters are worth",
        ),
        ({"PSCLUSTER_TOKEN_FILE": str(tmp_path / "none")}, f"can't read the token file {tmp_path}/none: No such file"),
    ]
    if command == "ps":  # one function reads it for all
        cases += [
            (
                {"PSCLUSTER_TOKEN": ""},
                "PSCLUSTER_TOKEN is empty: put a token there",
            ),
            (
                {"PSCLUSTER_TOKEN_FILE": str(tmp_path / "short")},
                f"the cluster token in {tmp_path}/short {guessed}",
            ),
            (
                {"PSCLUSTER_TOKEN_FILE": str(tmp_path / "empty")},
                f"the token file {tmp_path}/empty is empty: put a token there",
            ),
            ({"PSCLUSTER_TOKEN_FILE": str(tmp_path / "latin")}, f"can't read the token file {tmp_path}/latin: it is"),
            ({"PSCLUSTER_TOKEN_FILE": str(tmp_path)}, f"can't read the token file {tmp_path}: Is a directory"),
        ]
    results = run_all([([command, *rest], {"TF_CONFIG": config, **env}) for env, _ in cases])
    for (code, output), (_, sentence) in zip(results, cases, strict=True):
        assert code == 2
        assert output.startswith(f"pscluster: {sentence}")
        assert len(output.splitlines()) == 1
        assert "secret" not in output
        assert "`pscluster token" in output, "it says how to make one"


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
def test_off_loopback_without_a_token(role: str, tmp_path: Path) -> None:
    """A role that would listen where others reach it refuses to start without a token: exit code 2 and a message."""
    (tmp_path / "job.py").write_text(JOB)
    command = "coordinator" if role == "chief" else role
    script = [str(tmp_path / "job.py")] if role == "chief" else []
    cluster = make_cluster()
    far = {**cluster, role: ["role.example.com:2222"]}
    cases = [
        (["--bind", "0.0.0.0:2222"], cluster, "0.0.0.0:2222"),
        (["--bind", "[::]:2222"], cluster, "[::]:2222"),
        ([], far, "0.0.0.0:2222"),
    ]
    cases = cases if role != "chief" else cases[2:]
    if role == "chief":  # found by the script, which makes the strategy
        results = [run(command, *script, config=tf_config(far, role))]
    else:
        results = run_all([([command, *options], {"TF_CONFIG": tf_config(spec, role)}) for options, spec, _ in cases])
    for (code, output), (_, _, where) in zip(results, cases, strict=True):
        assert code == 2, output
        assert output.startswith(f"pscluster: refusing to listen on {where} without a cluster token")
        assert all(word in output for word in ("PSCLUSTER_TOKEN_FILE", "`pscluster token --file PATH`", "--insecure"))
        assert len(output.splitlines()) == 1


def test_insecure(tmp_path: Path) -> None:
    """With --insecure it starts, and its log warns; here 127.0.0.1 stands for an address that others reach."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys\n"
        "from pscluster.core.role import listening, options, server\n"
        "for module in (listening, options, server):\n"
        "    module.is_on_this_machine = lambda address: False\n"
        "from pscluster.ps.server.main import main\n"
        "main()\n"
    )
    (address,) = free_addresses(1)
    with Roles({"ps": ["ps0.example.com:2222"]}, tmp_path) as roles:
        python = (sys.executable,)
        refused = roles.start(str(launcher), "--bind", address, role="ps", command=python)
        assert refused.wait() == 2
        started = roles.start(str(launcher), "--bind", address, "--insecure", role="ps", command=python)
        line = started.wait_for("without a token")
        assert f"ps/0 WARNING listening on {address} without a token (--insecure)" in line
        started.wait_for("serving on")
        assert run("health", address, **NONE)[0] == 0


def test_bind_elsewhere_with_a_token(tmp_path: Path) -> None:
    """--bind takes precedence over the address in TF_CONFIG, which may be a name that others resolve."""
    (address,) = free_addresses(1)
    with Roles({"ps": ["ps0.example.com:2222"]}, tmp_path, WITH_TOKEN) as roles:
        roles.ps(0, "--bind", address).wait_for(f"serving on {address}")


@pytest.mark.plain_starts
def test_run_keeps_its_token_to_itself(tmp_path: Path) -> None:
    """`pscluster run` makes a token that is in no command line and no output."""
    said = 'from pscluster.core.security.tokens import load_token; print("connected", load_token(None)'
    (tmp_path / "idle.py").write_text(IDLE.replace('print("connected"', said))
    gate = tmp_path / "gate"
    command = [*PSCLUSTER, "run", "--log-level", "debug", str(tmp_path / "idle.py"), str(gate)]
    with Process(command, environ()) as process:
        token = process.wait_for("connected").split()[-1].encode()
        assert len(token) >= 32
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and folder.name != str(os.getpid()):
                try:
                    assert token not in (folder / "cmdline").read_bytes()
                except (FileNotFoundError, ProcessLookupError):  # it has just ended
                    continue
        gate.touch()
        assert process.wait() == 0
        assert process.output.count(token.decode()) == 1, "by the script"


NOWHERE = """
import os, pathlib, subprocess, sys
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable
from pscluster.core.security.tokens import load_token

def places(*_):
    token = str(load_token(None))
    found = [os.environ.get("PSCLUSTER_TOKEN", ""), pathlib.Path("/proc/self/environ").read_text(errors="replace")]
    found.append(subprocess.run(["env"], capture_output=True, text=True).stdout)
    return len(token) >= 32, [token in each for each in found]

if __name__ == "__main__":
    with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
        def initial(shape, dtype):
            assert places() == (True, [False] * 3), places()
            return __import__("numpy").zeros(shape, dtype)
        with strategy.scope():
            made = Variable(initial, shape=(2,), name="made")
        coordinator = ClusterCoordinator(strategy)
        print("on a worker", coordinator.schedule(places).fetch())
        print("in the script", places())
"""


@pytest.mark.plain_starts
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="it shows an environment on Linux")
def test_the_token_is_in_no_environment(tmp_path: Path) -> None:
    """Functions on workers and servers, the script, and what they start have the token, but not in the environment."""
    (tmp_path / "script.py").write_text(NOWHERE)
    code, output = run("run", str(tmp_path / "script.py"))
    assert code == 0, output
    for where in ("on a worker", "in the script"):
        assert f"{where} (True, [False, False, False])" in output, output


def test_options_do_not_show_it() -> None:
    """Options appear in tracebacks and logs, but not the token."""
    assert "hidden" not in repr(RoleOptions(token="a-hidden-token-of-a-cluster"))


@pytest.mark.parametrize(
    ("token", "is_strong"),
    [
        ("", False),
        ("a" * 500, False),
        ("ab" * 100, False),
        ("password" * 20, False),
        ("0123456789abcdef", False),
        ("0123456789abcdef0123456789abcde", False),  # half of it repeated
        ("password" * 6 + "passwor", False),  # the last repetition is cut short
        (("0123456789" * 4)[:39], False),
        ("0f1e2d3c4b5a69788796a5b4c3d2e1f0", True),
        ("kJ8-wq_ZtR5vX2mN0pLs7A", True),
        (TOKEN, True),
    ],
)
def test_strength(token: str, is_strong: bool) -> None:
    """Repetition and few distinct characters make a token weak; 128 random bits are enough."""
    assert (strength(token) >= MIN_BITS) == is_strong


@given(st.binary(min_size=16, max_size=32))
@example(b"\x00\x00\x00\x00\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b")  # no digit in base 64
def test_random_tokens_are_strong(secret: bytes) -> None:
    """Tokens of 128 random bits or more are accepted, in hexadecimal and in base 64, barring freak repetition."""
    if len(set(secret)) < 12:
        return
    assert strength(secret.hex()) >= MIN_BITS
    assert strength(base64.urlsafe_b64encode(secret).decode().rstrip("=")) >= MIN_BITS


def test_the_token_of_the_user(tmp_path: Path) -> None:
    """Three roles started by hand without a token share one that only their user can read, and no other caller is
    accepted; with --insecure alone there is none."""
    cluster, home = make_cluster(), tmp_path / "home"
    file = home / "pscluster" / "token"
    env = {"XDG_CONFIG_HOME": str(home)}
    with Roles(cluster, tmp_path, env) as roles:
        started = [roles.ps(), roles.worker()]
        coordinator = roles.coordinator(JOB)
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        token = file.read_text().strip()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        output = "".join(process.output for process in (*started, coordinator))
        assert output.count(f"made a token for the roles of this user: {file}") >= 1
        assert token not in output
        assert run("health", cluster["ps"][0], **env)[0] == 0
        code, said = run("health", cluster["ps"][0], XDG_CONFIG_HOME=str(tmp_path / "another"))
        assert (code, said.startswith("this cluster requires a token")) == (1, True)
        with grpc.insecure_channel(cluster["worker"][0]) as channel:
            for method in methods(SERVICES["worker"][1]):
                error = call(channel, method)
                assert error is not None
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_token_of_the_user_that_others_can_read(tmp_path: Path) -> None:
    """It is refused, with the remedy, since any user who could read it may be calling."""
    file = tmp_path / "pscluster" / "token"
    file.parent.mkdir()
    file.write_text(TOKEN)
    file.chmod(0o640)
    code, output = run("ps", config=tf_config(make_cluster(), "ps"), XDG_CONFIG_HOME=str(tmp_path))
    assert code == 2
    assert f"other users can read or change the token file {file} (mode 0640" in output
    named = run("health", "--token-file", str(file), "127.0.0.1:1")[1]
    assert f"other users can read the token file {file} (mode 0640): `chmod 600` it" in named


def test_without_a_token_no_pickles(tmp_path: Path) -> None:
    """If none can be stored for the user a role on loopback takes no code by value, and says so; with --insecure any
    user of the machine may send it code, which it says, too."""
    cluster = make_cluster(chief=False)
    (tmp_path / "file").write_text("in the way")
    with Roles(cluster, tmp_path, {"XDG_CONFIG_HOME": str(tmp_path / "file")}) as roles:
        worker, ps = roles.worker(), roles.ps()
        worker.wait_for("running without a token, as this user.s can.t be stored")
        worker.wait_for("any user of this machine can read and change what is here, though not send code")
        worker.wait_for(f"pickles are off here, since this role listens on {cluster['worker'][0]} without a token")
        ps.wait_for("pickles are off here")
    with Roles(make_cluster(chief=False), tmp_path) as roles:
        roles.ps(0, "--insecure").wait_for(
            r"without a token \(--insecure\): any user of this machine can run code here"
        )
