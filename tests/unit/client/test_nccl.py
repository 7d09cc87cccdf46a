"""What ends an NCCL group: real connections, a stand-in for the library. Moving bytes takes GPUs (tests/gpu/push_pull.py)."""

import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.routing import hold_listening_socket  # noqa: E402
from rolloutfleet.transport import nccl  # noqa: E402
from rolloutfleet.transport.group import MemberGone  # noqa: E402
from rolloutfleet.transport.libnccl import Communicator, NcclError  # noqa: E402
from rolloutfleet.transport.liveness import Watch, watch_members  # noqa: E402
from rolloutfleet.transport.store import SessionStore, connect_store, host_store  # noqa: E402

CLIENT = Path(__file__).parents[3] / "client"

MEMBER = f"""
import sys, threading, time
sys.path.insert(0, {str(CLIENT)!r})
from rolloutfleet.transport.liveness import watch_members
from rolloutfleet.transport.store import connect_store
store = connect_store("127.0.0.1", int(sys.argv[1]), 60).of_epoch(1)
watch = watch_members(store, "127.0.0.1", 2, 3, time.monotonic() + 60, threading.Event())
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def store() -> SessionStore:
    return host_store(hold_listening_socket("127.0.0.1"), 60)


def watch(store: SessionStore, rank: int, world_size: int, seconds: float = 60) -> Watch:
    until = time.monotonic() + seconds
    return watch_members(store.of_epoch(1), "127.0.0.1", rank, world_size, until, threading.Event())


class Watched:
    """The watches of all ranks, and what each but rank 0 has been told."""

    def __init__(self, store: SessionStore, world_size: int, others: Sequence[int]) -> None:
        port = store.store.port
        with ThreadPoolExecutor() as threads:
            zero = threads.submit(watch, store, 0, world_size)
            watches = {
                rank: threads.submit(watch, connect_store("127.0.0.1", port, 60), rank, world_size) for rank in others
            }
        self.zero = zero.result()
        self.others = {rank: each.result() for rank, each in watches.items()}
        self._told: dict[int, queue.Queue[str]] = {rank: queue.Queue() for rank in others}
        for rank, other in self.others.items():
            other.start(self._told[rank].put)

    def told(self, rank: int) -> str:
        return self._told[rank].get(timeout=5)

    def close(self) -> None:
        self.zero.close()
        for other in self.others.values():
            other.close()


@pytest.fixture
def watched(store: SessionStore) -> Iterator[Watched]:
    started = Watched(store, 3, (1, 2))
    yield started
    started.close()


class StandInLibrary:
    """Takes the place of libnccl: counts calls, fails or hangs in an abort when told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure = ""
        self.free = threading.Event()
        self.free.set()

    def broadcast(self, *_: Any) -> None:
        self.calls.append("broadcast")

    @contextmanager
    def grouped(self, _: Communicator) -> Iterator[None]:
        yield

    def raise_async_error(self, _: Communicator) -> None:
        if self.failure:
            raise NcclError(self.failure)

    def abort(self, _: Communicator) -> None:
        self.free.wait(60)
        self.calls.append("abort")


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(nccl.Group, "_stream", lambda _: 0)


def make_group(watch: Watch, library: StandInLibrary) -> nccl.Group:
    return nccl.Group(library, Communicator(1), watch, epoch=4, rank=0, world_size=3, device=torch.device("cuda", 0))


def ended(group: nccl.Group) -> OSError:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            group.raise_if_ended()
        except OSError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("the group did not end within 5 s")


@pytest.mark.usefixtures("_no_gpu")
def test_the_end_of_a_members_process_ends_the_group_everywhere_by_name(store: SessionStore) -> None:
    command = [sys.executable, "-c", MEMBER, str(store.store.port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watched = Watched(store, 3, (1,))
    library = StandInLibrary()
    group = make_group(watched.zero, library)
    assert process.stdout.readline().strip() == "there"
    group.raise_if_ended()
    process.kill()
    began = time.monotonic()
    error = ended(group)
    assert time.monotonic() - began < 2
    process.communicate()
    assert type(error) is MemberGone
    assert "epoch 4 has lost a member: rank 2 is gone" in str(error)
    assert watched.told(1) == "rank 0 ended the group: rank 2 is gone"
    assert library.calls == ["abort"]
    with pytest.raises(ConnectionError, match="rank 2 is gone"):
        group.broadcast(torch.zeros(1), 0, time.monotonic() + 5)
    watched.close()


def test_a_member_sees_the_end_of_rank_zero(watched: Watched) -> None:
    watched.zero.start(lambda _: None)
    watched.zero.close()
    assert watched.told(1) == "rank 0 is gone"


@pytest.mark.usefixtures("_no_gpu")
def test_why_a_member_ended_the_group_reaches_the_others(watched: Watched) -> None:
    group = make_group(watched.zero, StandInLibrary())
    watched.others[1].close("rank 1 ended the group: told to")
    assert "rank 1 ended the group: told to" in str(ended(group))
    assert "rank 1 ended the group: told to" in watched.told(2)


@pytest.mark.row("B17")
@pytest.mark.usefixtures("_no_gpu")
def test_an_abort_ends_the_group_for_all_and_says_why(watched: Watched) -> None:
    group = make_group(watched.zero, StandInLibrary())
    group.abort("the sync job said so")
    with pytest.raises(ConnectionAbortedError, match="the group of epoch 4 has ended: the sync job said so"):
        group.broadcast(torch.zeros(1), 0, time.monotonic() + 5)
    assert watched.told(1) == "rank 0 ended the group: the sync job said so"


@pytest.mark.usefixtures("_no_gpu")
def test_an_abort_that_hangs_inside_nccl_is_left_behind_and_reported(watched: Watched, monkeypatch, caplog) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.2)
    library = StandInLibrary()
    library.free.clear()
    group = make_group(watched.zero, library)
    began = time.monotonic()
    with caplog.at_level(logging.CRITICAL, logger="rolloutfleet"):
        group.abort("stop")
    assert time.monotonic() - began < 2
    assert "ncclCommAbort in epoch 4 at rank 0 has not returned after 0.2 s" in caplog.text
    library.free.set()


@pytest.mark.usefixtures("_no_gpu")
def test_an_abort_waits_for_calls_that_are_being_queued(watched: Watched) -> None:
    library = StandInLibrary()
    group = make_group(watched.zero, library)
    aborting = threading.Thread(target=group.abort)
    with group.grouped(time.monotonic() + 5):
        aborting.start()
        aborting.join(0.2)
        assert library.calls == []
    aborting.join(5)
    assert library.calls == ["abort"]


@pytest.mark.scenario("F35")
@pytest.mark.usefixtures("_no_gpu")
def test_an_error_that_nccl_reports_later_is_raised(watched: Watched) -> None:
    library = StandInLibrary()
    group = make_group(watched.zero, library)
    library.failure = "an operation in flight failed"
    with pytest.raises(ConnectionError, match="an operation in flight failed"):
        group.raise_if_ended()


@pytest.mark.usefixtures("_no_gpu")
def test_nothing_is_queued_after_the_deadline(watched: Watched) -> None:
    library = StandInLibrary()
    with pytest.raises(TimeoutError, match="in epoch 4 at rank 0 was not begun in time"):
        make_group(watched.zero, library).broadcast(torch.zeros(1), 0, time.monotonic())
    assert library.calls == []


def test_members_that_do_not_show_up_before_nccl_starts_are_named(store: SessionStore) -> None:
    with pytest.raises(TimeoutError, match="rank 1, 2 did not connect to rank 0 in time"):
        watch_members(store.of_epoch(1), "127.0.0.1", 0, 3, time.monotonic() + 0.3, threading.Event())


def test_showing_up_can_be_cancelled(store: SessionStore) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ConnectionAbortedError, match="was cancelled"):
        watch_members(store.of_epoch(1), "127.0.0.1", 0, 2, time.monotonic() + 60, cancelled)


def test_a_rank_waits_for_rank_zero_until_the_deadline(store: SessionStore) -> None:
    errors: list[BaseException] = []

    def first() -> None:
        try:
            watch_members(store.of_epoch(1), "127.0.0.1", 0, 3, time.monotonic() + 1, threading.Event())
        except OSError as error:
            errors.append(error)

    zero = threading.Thread(target=first)
    zero.start()
    other = connect_store("127.0.0.1", store.store.port, 10).of_epoch(1)
    with pytest.raises(TimeoutError, match="rank 0 did not see every member in time; rank 1 waited"):
        watch_members(other, "127.0.0.1", 1, 3, time.monotonic() + 0.4, threading.Event())
    zero.join()
    assert "rank 2 did not connect" in str(errors[0])


def test_a_device_that_is_no_gpu_is_refused(store: SessionStore) -> None:
    with pytest.raises(ValueError, match="device is cpu; it must be one such as cuda:0"):
        nccl.form_group(store, 1, 0, 2, torch.device("cpu"), 1)
