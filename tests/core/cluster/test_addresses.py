"""Addresses of tasks: host and port, or a Unix socket, and a one-line answer to every mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.cluster.support import addresses, message_of

from pscluster.core.cluster.addresses import is_loopback, is_on_this_machine, parse_address, split_address
from pscluster.core.cluster.resolvers import SimpleClusterResolver, TFConfigClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.errors import ConfigurationError
from pscluster.core.transport.unix_sockets import MAX_PATH_BYTES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:1", ("localhost", 1)),
        ("ps-0.train_job.svc.cluster.local:65535", ("ps-0.train_job.svc.cluster.local", 65535)),
        ("10.0.0.5:2222", ("10.0.0.5", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[2001:DB8:0:0::1]:80", ("2001:db8::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_split_address_reads_names_and_both_kinds_of_ip(text: str, expected: tuple[str, int]) -> None:
    """Host and port are separated, with an IPv6 host without its brackets."""
    assert split_address(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ps0", "no port"),
        ("[::1]", "no port"),
        ("", "no port"),
        ("ps0:", "1 to 65535"),
        ("ps0:0", "1 to 65535"),
        ("ps0:65536", "1 to 65535"),
        ("ps0:-1", "1 to 65535"),
        ("ps0:22 ", "1 to 65535"),
        ("ps0:٢٢", "1 to 65535"),
        ("unix:/tmp/ps0", "a host and a port are needed"),
        ("::1:2222", "brackets"),
        ("a:b:2222", "brackets"),
        (":2222", "neither a name"),
        ("[zz]:2222", "neither a name"),
        ("[1::2::3]:2222", "neither a name"),
        ("256.0.0.1:2222", "neither a name"),
        ("a b:2222", "neither a name"),
        ("ps0\n:2222", "neither a name"),
        ("x" * 300 + ":2222", "neither a name"),
        ("grpc://ps0:2222", "no protocol"),
    ],
)
def test_split_address_says_what_is_wrong(text: str, reason: str) -> None:
    """Each kind of bad address has a specific reason, and the error names the key it was given."""
    text_of_error = message_of(lambda: split_address(text, "the key"))
    assert text_of_error.startswith("the key is ")
    assert reason in text_of_error


def test_an_address_without_a_port_is_completed_in_the_error() -> None:
    """The address shown as right is the user's own, with a port."""
    assert message_of(lambda: split_address("ps0.example.com")).endswith('"ps0.example.com:2222"')


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.255.0.9", "::1", "[::1]"])
def test_loopback_hosts(host: str) -> None:
    """127.0.0.0/8, ::1 and localhost are this machine."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "128.0.0.1", "127.evil.example", "localhost.evil.example"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    """A name that only looks like loopback is not taken for it."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("unix:ps-0", "begins with /"),
        ("unix:./ps-0", "begins with /"),
        ("unix:", "begins with /"),
        ("unix:2222", "begins with /"),
        ("unix:@ps-0", "no abstract names"),
        ("unix:\0ps-0", "no abstract names"),
        ("unix-abstract:ps-0", "is written unix:/PATH"),
        ("unix:///tmp/ps-0", "is written unix:/PATH"),
        ("unix:/", "needless /"),
        ("unix:/tmp/../ps-0", "needless /"),
        ("unix:/tmp//ps-0", "needless /"),
        ("unix:/tmp/ps-0/", "needless /"),
        ("unix:/tmp/ps 0", "letters, digits"),
        ("unix:/tmp/ps%200", "letters, digits"),
        ("unix:/tmp/ps-0\n", "letters, digits"),
        ("unix:/tmp/ps-ü", "letters, digits"),
        ("unix:/tmp/ps-0.lock", "for the files beside a socket"),
        ("unix:/tmp/ps-0.data", "for the files beside a socket"),
        ("unix:/" + "x" * MAX_PATH_BYTES, "at most 99 bytes, not 100"),
        ("unix_:/tmp/ps-0", "1 to 65535"),
    ],
)
def test_paths_that_are_none_of_a_socket(text: str, reason: str) -> None:
    assert reason in message_of(lambda: parse_address(text, "the key"))
    assert reason in message_of(lambda: ClusterSpec({"ps": [text]}))


def test_unix_sockets_are_addresses(set_config: Callable[..., None]) -> None:
    """They work in a spec and its dict, TF_CONFIG, and both resolvers; each path once."""
    longest = "unix:/" + "x" * (MAX_PATH_BYTES - 1)
    cluster = {"chief": ["unix:/run/Job/chief-0"], "ps": ["unix:/run/job/ps-0", longest], "worker": ["w0:2222"]}
    spec = ClusterSpec(cluster)
    assert spec.as_dict() == cluster
    assert parse_address(longest) == (longest.removeprefix("unix:"), 0)
    assert parse_address("w0:2222") == ("w0", 2222)
    assert all(is_on_this_machine(spec.task_address("ps", index)) for index in (0, 1))
    assert not is_on_this_machine("w0:2222")
    set_config(cluster=cluster, task={"type": "ps", "index": 1})
    config = TFConfig.from_environ()
    assert TFConfig.parse(config.to_json()) == config
    resolver = TFConfigClusterResolver(rpc_layer="grpc")
    assert resolver.cluster_spec() == SimpleClusterResolver(spec).cluster_spec() == spec
    assert resolver.master("ps", 0) == "grpc://unix:/run/job/ps-0"
    twice = {"ps": ["unix:/run/job/ps-0"], "worker": ["unix:/run/job/ps-0"]}
    assert "cluster.ps[0] has that address too" in message_of(lambda: ClusterSpec(twice))
    assert ClusterSpec({"ps": ["unix:/run/job/ps-0", "unix:/run/job/PS-0"]}), "paths have cases"


@given(st.text(max_size=40) | addresses)
def test_any_address_is_split_or_refused_in_one_line(text: str) -> None:
    """An accepted address has a host and a port in range; all others are a ConfigurationError of one line."""
    try:
        host, port = split_address(text)
    except ConfigurationError:
        message_of(lambda: split_address(text))
    else:
        assert host
        assert 1 <= port <= 65535
