"""Where groups meet: ports that nobody else can have, and a store that is not there yet, or breaks off."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from fakes.ranks import Ranks, deadline  # noqa: E402
from rolloutfleet.contract.policy import Transport  # noqa: E402
from rolloutfleet.routing import hold_listening_socket  # noqa: E402
from rolloutfleet.transport.gloo import form_group  # noqa: E402
from rolloutfleet.transport.store import await_value, connect_store, gather_members, host_store  # noqa: E402
from rolloutfleet_worker.rank.link import RankError  # noqa: E402
from rolloutfleet_worker.rank.membership import Membership, join_epoch  # noqa: E402

HERE = "127.0.0.1"


def takes(port: int) -> bool:
    """Whether somebody else can have the port."""
    with socket.socket() as other:
        try:
            other.bind((HERE, port))
        except OSError:
            return False
        return True


class Breaking:
    """A way to a store that breaks off the first connections on which anything is said, and carries the later ones."""

    def __init__(self, port: int, times: int) -> None:
        self._port, self._left = port, times
        self.broken = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server((HERE, 0))
        self.port = self._listening.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        for each in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._sockets):
            each.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._sockets.append(connection)
            self._start(self._carry, connection)

    def _carry(self, connection: socket.socket) -> None:
        said = connection.recv(65536)
        if said and self._left:
            self._left -= 1
            self.broken += 1
            connection.shutdown(socket.SHUT_RDWR)
            return
        store = socket.create_connection((HERE, self._port))
        self._sockets.append(store)
        store.sendall(said)
        self._start(_copy, store, connection)
        _copy(connection, store)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.mark.scenario("F08")
@pytest.mark.scenario("F11")
def test_a_sessions_port_is_nobody_elses_from_its_choice_to_its_end():
    listening = hold_listening_socket(HERE)
    port = listening.getsockname()[1]
    assert not takes(port)
    store = host_store(listening, 10)
    assert store.store.port == port
    assert not takes(port)
    store.store.set("key", b"value")
    assert connect_store(HERE, port, 10).store.get("key") == b"value"


@pytest.mark.scenario("F06")
@pytest.mark.scenario("F07")
@pytest.mark.scenario("F09")
def test_groups_of_two_fleets_and_of_two_epochs_on_one_host_share_no_port():
    fleets = [Ranks(3), Ranks(3)]
    try:
        ports = [port for fleet in fleets for port in endpoints(fleet)]
        assert len(ports) == len(set(ports))
        first = endpoints(fleets[0])
        fleets[0].groups[0].abort("another epoch")
        forming = {
            rank: lambda rank=rank: form_group(fleets[0].stores[rank], 2, rank, 3, 20.0) for rank in fleets[0].stores
        }
        fleets[0].groups = fleets[0].run(forming)
        assert endpoints(fleets[0]) & (first | endpoints(fleets[1])) == {store_of(fleets[0])}
        for fleet in fleets:
            got = fleet.run(
                {rank: lambda rank=rank, group=group: broadcast(group, rank) for rank, group in fleet.groups.items()}
            )
            assert all(torch.equal(tensor, torch.arange(1000)) for tensor in got.values())
    finally:
        for fleet in fleets:
            fleet.close()


def broadcast(group: Any, rank: int) -> torch.Tensor:
    tensor = torch.arange(1000) if rank == 0 else torch.zeros(1000, dtype=torch.int64)
    group.broadcast(tensor, 0, deadline())
    return tensor


def endpoints(fleet: Ranks) -> set[tuple[str, int]]:
    """Where the members of a fleet's group listen, its store's port among them."""
    return set(fleet.groups[0]._listeners) | {store_of(fleet)}


def store_of(fleet: Ranks) -> tuple[str, int]:
    return HERE, fleet.store.store.port


@pytest.mark.scenario("F10")
@pytest.mark.parametrize("times", [1, 3])
def test_a_store_that_breaks_off_while_a_member_joins_is_reached_again_within_the_deadline(times: int):
    hosted = host_store(hold_listening_socket(HERE), 20)
    way = Breaking(hosted.store.port, times)
    stores = [hosted, connect_store(HERE, way.port, 20)]
    try:
        assert way.broken == times
        gather_in_threads(stores)
    finally:
        way.close()


@pytest.mark.scenario("F10")
def test_a_store_that_comes_late_is_waited_for_in_the_same_epoch():
    listening = hold_listening_socket(HERE)
    port = listening.getsockname()[1]
    listening.close()
    joined: list[object] = []
    member = threading.Thread(target=lambda: joined.append(connect_store(HERE, port, 20)))
    member.start()
    hosted = host_store(hold_listening_socket(HERE, port), 20)
    member.join(20)
    gather_in_threads([hosted, joined[0]])


def gather_in_threads(stores: list[Any]) -> None:
    """Both members of epoch 1 arrive; raises what one of them does."""

    def gather(rank: int) -> None:
        gather_members(stores[rank].of_epoch(1), 1, rank, 2, time.monotonic() + 10, threading.Event())

    with ThreadPoolExecutor() as threads:
        for arrived in [threads.submit(gather, rank) for rank in range(2)]:
            arrived.result(20)


class StoppedHost:
    """A store whose process stops at some moment, and closes nothing: what a host looks like that has lost its power."""

    def __init__(self) -> None:
        program = (
            "import sys, time; from rolloutfleet.routing import hold_listening_socket as hold; "
            "from rolloutfleet.transport.store import host_store; hosted = host_store(hold(sys.argv[1]), 20); "
            "print(hosted.store.port, flush=True); time.sleep(600)"
        )
        # In a process of its own: end_connections sees both ends of a connection within one.
        paths = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, HERE],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def silent() -> Iterator[StoppedHost]:
    host = StoppedHost()
    yield host
    host.close()


def test_leaving_ends_a_question_to_a_store_whose_host_is_silent(silent: StoppedHost):
    membership = Membership(1, Transport.LAYOUT, connect_store(HERE, silent.port, 20), None, 1, 1)
    silent.stop()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(await_value, membership.store.store, "key", time.monotonic() + 60, threading.Event())
        wait({waiting}, 0.2)
        assert not waiting.done()
        membership.abort()
        with pytest.raises(ConnectionError, match="lost the session's store"):
            waiting.result(10)


def test_a_join_that_is_cancelled_ends_although_the_host_of_the_store_is_silent(silent: StoppedHost):
    silent.stop()
    cancelled = threading.Event()
    body = {
        "epoch": 1,
        "transport": "Layout",
        "wire": "Gloo",
        "rendezvous": {"host": HERE, "port": silent.port},
        "trainer_ranks": 1,
        "rank_offset": 1,
        "rank": 1,
        "world_size": 2,
        "timeout_seconds": 8,
    }
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(join_epoch, body, 0, torch.device("cpu"), cancelled)
        wait({joining}, 0.2)
        assert not joining.done()
        cancelled.set()
        with pytest.raises(RankError, match=r"rank 1 could not join .* was cancelled"):
            joining.result(4)
