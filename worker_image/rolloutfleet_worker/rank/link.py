"""The control thread of one rank: takes orders from the launcher over a Unix socket, beside vLLM's own loop.

Orders that move weights run one at a time on a second thread, so that an abort is obeyed while a collective blocks. Lending has a third
one of its own: it may go on beside whatever else a serving engine is asked.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from rolloutfleet_worker.wire import Frame, encode, receive_frame

log = logging.getLogger(__name__)


class RankOperations(Protocol):
    """What a rank can be ordered to do; each takes and gives a JSON object."""

    rank: int

    def describe(self) -> Frame: ...
    def check(self, body: Frame) -> Frame: ...
    def join(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def prepare(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def receive(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def free(self) -> Frame: ...
    def unmap(self) -> Frame: ...
    def shape(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def offer(self, body: Frame) -> Frame: ...
    def lend(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def borrow(self, body: Frame, cancelled: threading.Event) -> Frame: ...
    def let_go(self) -> None: ...
    def abort(self) -> None: ...


class RankError(Exception):
    """An order failed; ``touched`` says whether a live weight may have changed, ``cut_off`` that another party is to blame."""

    def __init__(self, message: str, *, touched: bool = False, cut_off: bool = False) -> None:
        super().__init__(message)
        self.touched = touched
        self.cut_off = cut_off


def is_cut_off(error: BaseException) -> bool:
    """Whether this is how a rank that is sound itself sees a party of its group that is gone or stands still."""
    return isinstance(error, ConnectionError | TimeoutError)


class RankLink:
    """Connects a rank's operations to its launcher; the process ends when the launcher is gone."""

    def __init__(self, path: str, operations: RankOperations) -> None:
        self._path = path
        self._operations = operations
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rolloutfleet-transfer")
        self._lender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rolloutfleet-lending")
        self._sending = threading.Lock()
        self._under_way: set[threading.Event] = set()
        self._lending = threading.Event()
        """Cancels the lending that was ordered last."""
        self._stopping = False
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def start(self) -> None:
        """Connect and say which rank this is, then serve orders on a daemon thread.

        Raises:
            OSError: the launcher's socket is not there.
        """
        self._connection.connect(self._path)
        self._send({"hello": {"rank": self._operations.rank, "pid": os.getpid(), **self._operations.describe()}})
        threading.Thread(target=self._serve, name="rolloutfleet-control", daemon=True).start()

    def stop(self) -> None:
        self._stopping = True
        self._operations.abort()
        for executor in (self._worker, self._lender):
            executor.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # an answer that nobody takes any more
            self._obey()
        if not self._stopping:
            # Without its launcher nothing fences this process any more, so it must not go on serving.
            log.critical("the launcher closed its socket; this rank's process ends")
            os._exit(70)

    def _obey(self) -> None:
        """Returns when the launcher is gone."""
        while (order := self._next_order()) is not None:
            match order["op"]:
                case "abort":
                    for cancelled in self._under_way:
                        cancelled.set()
                    self._operations.abort()
                    self._send({"id": order["id"], "ok": True, "body": {}})
                case "let-go":
                    self._lending.set()
                    self._operations.let_go()
                    self._send({"id": order["id"], "ok": True, "body": {}})
                case _:
                    self._submit(order)

    def _next_order(self) -> Frame | None:
        try:
            return receive_frame(self._connection)
        except OSError:
            return None

    def _submit(self, order: Frame) -> None:
        body = order["body"]
        # Made here, not when the order's turn comes, so that an abort in between is not lost.
        cancelled = threading.Event()
        self._under_way = {event for event in self._under_way if not event.is_set()} | {cancelled}
        rank = self._operations
        operation: Callable[[], Frame] = {
            "check": lambda: rank.check(body),
            "join": lambda: rank.join(body, cancelled),
            "prepare": lambda: rank.prepare(body, cancelled),
            "receive": lambda: rank.receive(body, cancelled),
            "free": rank.free,
            "unmap": rank.unmap,
            "shape": lambda: rank.shape(body, cancelled),
            "offer": lambda: rank.offer(body),
            "lend": lambda: rank.lend(body, cancelled),
            "borrow": lambda: rank.borrow(body, cancelled),
        }[order["op"]]
        executor = self._worker
        if order["op"] == "lend":
            executor, self._lending = self._lender, cancelled
        executor.submit(operation).add_done_callback(lambda done: self._finish(order["id"], cancelled, done))

    def _finish(self, order_id: int, cancelled: threading.Event, done: "Future[Frame]") -> None:
        # From now on there is nothing left to cancel, and the control thread may forget the event.
        cancelled.set()
        self._answer(order_id, done)

    def _answer(self, order_id: int, done: "Future[Frame]") -> None:
        if done.cancelled():
            return
        failure = done.exception()
        if failure is None:
            self._send({"id": order_id, "ok": True, "body": done.result()})
            return
        log.error("order failed", exc_info=failure)
        touched = failure.touched if isinstance(failure, RankError) else True
        message = str(failure) if isinstance(failure, RankError) else f"{type(failure).__name__}: {failure}"
        cut_off = isinstance(failure, RankError) and failure.cut_off
        self._send({"id": order_id, "ok": False, "message": message, "touched": touched, "cut_off": cut_off})

    def _send(self, frame: Frame) -> None:
        with self._sending:
            self._connection.sendall(encode(frame))
