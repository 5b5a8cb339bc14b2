"""Options of what runs on Ray: wrong ones are told before anything is imported or loaded."""

from __future__ import annotations

import socket

import pytest

from console import Run, mistake
from foretoken.cli.option import Cluster, needing
from foretoken.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--replicas", "0"), "--replicas is 0; give a whole"),
        (
            ("serve", "--replicas", "2", "--threads", "0"),
            "--threads is 0; give a whole",
        ),
        (("serve", "--threads", "2"), "--threads is for replicas; give --replicas"),
        (("serve", "--ray", ""), "--ray is empty; give host:port, auto or local"),
        (("generate", "hi", "--replicas", "2"), "--ray and --replicas are for files"),
        (("generate", "hi", "--threads", "2"), "--threads is for replicas; give --replicas"),
    ],
)
def test_mistakes_are_told_at_once(console: Run, arguments: tuple[str, ...], said: str) -> None:
    mistake(console(*arguments), said)


def test_an_address_that_does_not_answer(console: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    mistake(console("serve", "--ray", address, "--port", "0"), f"no Ray answers at {address}")


def test_what_is_missing_is_named_with_what_installs_it() -> None:
    with pytest.raises(InputError, match=r"needs no_such_package, .* 'foretoken\[serve,ray\]'"):
        with needing("serve,ray"):
            import no_such_package  # pyright: ignore  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needing("ray"):
        import foretoken.no_such_module  # pyright: ignore  # noqa: F401


def test_ray_is_used_where_it_is_asked_for() -> None:
    assert not Cluster().used and Cluster(replicas=1).used and Cluster(ray="auto").used
    assert Cluster(replicas=2).address == "local" and Cluster(ray="auto").address == "auto"
