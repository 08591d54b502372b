"""Two real ranks that cannot meet, and the cause that their output points to."""

import socket

import pytest

from tiercel.doctor.trials import collective_verdict, host_name, likely_cause


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    verdict = collective_verdict("gloo", timeout_seconds=10.0)
    assert (verdict.name, verdict.status) == ("gloo collectives", "broken")
    assert "nowhere0" in verdict.found
    assert "GLOO_SOCKET_IFNAME" in verdict.remedy
    assert all(name in verdict.remedy for _, name in socket.if_nameindex())


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("NCCL WARN Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", "--shm-size"),
        ("The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", "again"),
        ("gloo: getaddrinfo: Name or service not known", "/etc/hosts"),
        ("Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused", "firewall"),
        ("NCCL error: unhandled cuda error", "NCCL_DEBUG=INFO"),
        ("a", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_an_error_points_to_its_likely_cause(error, remedy):
    assert remedy in likely_cause(error)


def test_a_name_that_does_not_resolve_is_a_warning():
    assert host_name("localhost").status == "ok"
    verdict = host_name("no-such-machine.invalid")
    assert verdict.status == "warning" and "/etc/hosts" in verdict.remedy
