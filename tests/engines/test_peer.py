"""Lending and borrowing between two processes, without an engine around them."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from rolloutfleet.contract.policy import Wire
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.transport.store import connect_store, host_store
from rolloutfleet_worker.rank import peer

CPU = torch.device("cpu")
SECONDS = 60.0
LARGE = 20_000_000
"""Elements of several groups."""


def tensors(seed: int, elements: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=generator),
        torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        torch.randn(7, 4, generator=generator).t(),
        torch.randn(1, generator=generator)[0],
        torch.randint(0, 255, (elements | 1,), generator=generator, dtype=torch.uint8),
    ]


def borrow_once(port: int, told: Connection, elements: int, ranks: int) -> None:
    """In a process of its own: borrows as so many ranks, one after another, and tells whether it got what was lent."""
    for rank in range(ranks):
        pair = peer.Pair(connect_store("127.0.0.1", port, 30), rank, peer.BORROWER)
        mine = tensors(99, elements)
        told.send("ready")
        deadline = time.monotonic() + 30
        try:
            digest = pair.await_digest(deadline)
            nbytes = peer.borrow(pair, mine, Wire.GLOO, CPU, deadline)
        except OSError as error:
            told.send((type(error).__name__, time.monotonic()))
            return
        lent = tensors(rank, elements)
        told.send((digest, nbytes, [torch.equal(a, b) for a, b in zip(mine, lent, strict=True)]))


def lend_once(told: Connection, elements: int) -> None:
    """In a process of its own: tells where it is found, and lends."""
    listening = hold_listening_socket("127.0.0.1")
    port = listening.getsockname()[1]
    pair = peer.Pair(host_store(listening, 30), 0, peer.LENDER)
    lent = tensors(0, elements)
    told.send(port)
    peer.lend(pair, lent, "digest", Wire.GLOO, CPU, time.monotonic() + 60)


class Borrower:
    def __init__(self, elements: int = 1000, ranks: int = 1) -> None:
        listening = hold_listening_socket("127.0.0.1")
        port = listening.getsockname()[1]
        self.store = host_store(listening, 30)
        context = multiprocessing.get_context("spawn")
        self.told, theirs = context.Pipe()
        self.process = context.Process(target=borrow_once, args=(port, theirs, elements, ranks))
        self.process.start()
        theirs.close()

    def hear(self):
        assert self.told.poll(SECONDS)
        return self.told.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def borrowers():
    started: list[Borrower] = []

    def start(**options) -> Borrower:
        started.append(Borrower(**options))
        return started[-1]

    yield start
    for borrower in started:
        borrower.close()


def when_half_way(pair: peer.Pair, verb: str, act: Callable[[], None]) -> None:
    """Has the pair do this after the first group of chunks and before the second."""
    form = pair.form

    def forming(*arguments):
        group = form(*arguments)
        move, calls = getattr(group, verb), itertools.count(1)

        def counted(*each):
            if next(calls) == 2:
                act()
            move(*each)

        setattr(group, verb, counted)
        return group

    pair.form = forming


class Clock:
    """When something began."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.at = 0.0

    def __call__(self) -> None:
        self.at = time.monotonic()
        self._act()


def test_ranks_of_one_number_meet_and_every_byte_arrives(borrowers):
    borrower = borrowers(ranks=2)
    for rank in range(2):
        pair = peer.Pair(borrower.store, rank, peer.LENDER)
        lent = tensors(rank)
        peer.lend(pair, lent, f"digest-{rank}", Wire.GLOO, CPU, time.monotonic() + 30)
        assert borrower.hear() == "ready"
        digest, nbytes, equal = borrower.hear()
        assert digest == f"digest-{rank}"
        assert nbytes == sum(tensor.numel() * tensor.element_size() for tensor in lent)
        assert equal == [True] * 5


@pytest.mark.scenario("F60")
def test_a_borrower_that_is_killed_frees_the_lender_within_five_seconds(borrowers):
    borrower = borrowers(elements=LARGE)
    pair, killed = peer.Pair(borrower.store, 0, peer.LENDER), Clock(borrower.process.kill)
    when_half_way(pair, "send", killed)
    with pytest.raises(OSError, match=r"lost"):
        peer.lend(pair, tensors(0, LARGE), "digest", Wire.GLOO, CPU, time.monotonic() + SECONDS)
    assert time.monotonic() - killed.at < 5


@pytest.mark.scenario("F60")
def test_a_lender_that_is_killed_frees_the_borrower_within_five_seconds():
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    lender = context.Process(target=lend_once, args=(theirs, LARGE))
    lender.start()
    try:
        assert told.poll(SECONDS)
        pair = peer.Pair(connect_store("127.0.0.1", told.recv(), 30), 0, peer.BORROWER)
        killed = Clock(lender.kill)
        when_half_way(pair, "receive", killed)
        with pytest.raises(OSError, match=r"lost"):
            peer.borrow(pair, tensors(99, LARGE), Wire.GLOO, CPU, time.monotonic() + SECONDS)
        assert time.monotonic() - killed.at < 5
    finally:
        lender.kill()
        lender.join()


def test_a_lender_that_lets_go_frees_both_within_five_seconds(borrowers):
    borrower = borrowers(elements=LARGE)
    pair = peer.Pair(borrower.store, 0, peer.LENDER)
    assert borrower.hear() == "ready"
    ended = Clock(lambda: pair.end("told to let go"))

    def end() -> None:
        ended()
        os.kill(borrower.process.pid, signal.SIGCONT)

    def stop() -> None:
        # A borrower that stands still takes nothing more, so that the lender waits in the middle of a send.
        os.kill(borrower.process.pid, signal.SIGSTOP)
        threading.Timer(0.2, end).start()

    when_half_way(pair, "send", stop)
    with pytest.raises(OSError, match=r"ended|aborted|cancelled"):
        peer.lend(pair, tensors(0, LARGE), "digest", Wire.GLOO, CPU, time.monotonic() + SECONDS)
    assert time.monotonic() - ended.at < 5
    name, heard_at = borrower.hear()
    assert name in {"ConnectionError", "ConnectionAbortedError", "MemberGone"}
    assert heard_at - ended.at < 5


def test_a_borrower_that_never_comes_is_waited_for_until_the_deadline():
    listening = hold_listening_socket("127.0.0.1")
    pair = peer.Pair(host_store(listening, 30), 0, peer.LENDER)
    with pytest.raises(TimeoutError, match="no word from rank 1"):
        peer.lend(pair, tensors(0), "digest", Wire.GLOO, CPU, time.monotonic() + 0.3)


def test_a_tensor_with_gaps_cannot_be_copied_as_it_lies():
    with pytest.raises(ValueError, match=r"shape \[5\] with strides \[2\] has gaps"):
        list(peer._in_groups([torch.zeros(10)[::2]]))
