"""Lend and borrow: an engine takes its weights from one of equal shape, rank from rank of the same number."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence

from rolloutfleet.contract.adapter import HeldAdapter
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import (
    Borrow,
    Lend,
    LendReport,
    LetGo,
    ReceiveReport,
    Rendezvous,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_worker.adapterverbs import AdapterVerbs
from rolloutfleet_worker.fence import Fence
from rolloutfleet_worker.podbase import PAUSE_GRACE_SECONDS
from rolloutfleet_worker.ranks import RankFailedError, RankStuckError
from rolloutfleet_worker.reports import merge_receives
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)

LETTING_GO_SECONDS = 5.0
"""How much later than the deadline, which the ranks keep by themselves, the launcher steps in."""


class PeerVerbs(AdapterVerbs):
    """The lender serves while it lends, and changes no weight until it has let go; the borrower is fenced as in a refit."""

    _lending: "asyncio.Task[None] | None" = None

    async def lend(self, call: Lend) -> LendReport:
        async with self._act(call):
            self.fence = self.fence.lend_begins(call.version)
            try:
                shapes = await self._order("shape", self._ranks.every_rank({"room": False}), call.deadline_seconds)
                offer = {"timeout_seconds": call.deadline_seconds}
                rendezvous = (await self._order("offer", {0: offer}, call.deadline_seconds))[0]
            except RankFailedError as failure:
                self.fence = self.fence.lend_ended()
                raise self._problem(
                    ProblemCode.TRANSFER_FAILED, f"the weights could not be offered: {failure}"
                ) from failure
            except ProblemError:
                self.fence = self.fence.lend_ended()
                raise
            adapters = tuple(held for _, held in sorted(self._adapters.items()))
            body = {"rendezvous": rendezvous, "wire": call.wire, "timeout_seconds": call.deadline_seconds}
            orders = self._with_adapters(body, adapters)
            deadline = call.deadline_seconds + LETTING_GO_SECONDS
            self._lending = asyncio.create_task(self._lend(orders, deadline), name="lending")
        return LendReport(
            adapters=adapters,
            rendezvous=Rendezvous.model_validate(rendezvous),
            shape=_shape_of_all(shapes),
            live_digests=tuple(shapes[rank]["live_digest"] for rank in sorted(shapes)),
        )

    async def let_go(self, call: LetGo) -> WorkerReport:
        """Needs no turn, for it changes nothing but the lending, which has none."""
        self.fence = self.fence.accept(call)
        lending = self._lending
        if lending is not None and not lending.done():
            try:
                await self._ranks.let_go_all()
                await asyncio.wait({lending}, timeout=LETTING_GO_SECONDS)
            except RankStuckError as stuck:
                raise self._problem(
                    ProblemCode.DEADLINE_EXCEEDED, f"the lending could not be ended: {stuck}"
                ) from stuck
            if not lending.done():
                message = f"the lending did not end within {LETTING_GO_SECONDS:g} s after it was told to"
                raise self._problem(ProblemCode.DEADLINE_EXCEEDED, message)
        return self.report()

    async def borrow(self, call: Borrow) -> ReceiveReport:
        """In place, a serving engine is paused first: whoever borrows holds a version that the fleet has left behind.

        Beside the live weights nothing pauses, and a failure leaves the engine as it was.
        """
        async with self._act(call):
            await self._require_shape(call)
            if self.fence.state is WorkerState.SERVING and not call.staged:
                self._hold(call.pause_seconds + PAUSE_GRACE_SECONDS)
                await self._pause_engine(call.pause, call.pause_seconds)
                self.fence = self.fence.paused()
            was = self.fence
            self.fence = was.borrow_begins(call.version, staged=call.staged)
            self._hold(call.deadline_seconds + call.hold_seconds)
            body = {
                "rendezvous": call.rendezvous.model_dump(mode="json"),
                "wire": call.wire,
                "version": call.version,
                "staged": call.staged,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                await self._publish_door(self.fence)
                answers = await self._order("borrow", self._with_adapters(body, call.adapters), call.deadline_seconds)
            except RankFailedError as failure:
                await self._borrow_failed(call, was, touched=failure.touched, message=str(failure))
                raise self._problem(ProblemCode.TRANSFER_FAILED, str(failure)) from failure
            except ProblemError as problem:
                await self._borrow_failed(call, was, touched=True, message=str(problem))
                raise
            self.fence = self.fence.receive_done()
            if call.staged:
                self._arrived = None  # adapters stay as they are: weights alone come beside a serving engine
            else:
                self._note_borrowed(call.version, call.adapters)
        return merge_receives(call.version, [answers[rank] for rank in sorted(answers)])

    async def _borrow_failed(self, call: Borrow, was: Fence, *, touched: bool, message: str) -> None:
        if call.staged:
            self.fence = self.fence.staged_borrow_failed()
            if self.fence.state is WorkerState.SERVING:
                self._release_hold()
        else:
            self.fence = self.fence.receive_failed(touched=touched, was=was, message=message)
        await self._publish_door(self.fence)

    async def _require_shape(self, call: Borrow) -> None:
        """Before anything is paused or taken: weights of the lender's shape, and room for them where they are to lie beside."""
        order = {"room": call.staged}
        try:
            shapes = await self._order("shape", self._ranks.every_rank(order), call.deadline_seconds)
        except RankFailedError as failure:
            raise self._problem(ProblemCode.TRANSFER_FAILED, f"the weights cannot be borrowed: {failure}") from failure
        mine = _shape_of_all(shapes)
        if mine != call.shape:
            raise self._problem(
                ProblemCode.MANIFEST_MISMATCH,
                f"the lender's weights have shape {call.shape[:12]}, this engine's {mine[:12]}: names, types or shapes "
                "of live tensors differ, so weights can only come from the trainer",
            )
        lacking = [(rank, shapes[rank]) for rank in sorted(shapes) if call.staged and not _has_room(shapes[rank])]
        if lacking:
            rank, answer = lacking[0]
            raise self._problem(
                ProblemCode.NO_ROOM,
                f"local rank {rank} has no room for a second copy of its weights: {answer['copy_bytes'] / 1e9:.2f} GB, of which "
                f"{answer['room_bytes'] / 1e9:.2f} GB are free",
            )

    def _with_adapters(self, body: Frame, adapters: Sequence[HeldAdapter]) -> dict[int, Frame]:
        """The order for each rank; the files of adapters go between the ranks of number 0."""
        files = [held.model_dump(mode="json") for held in adapters]
        return {rank: {**body, "adapters": [] if rank else files} for rank in self._ranks.every_rank(body)}

    async def _lend(self, orders: dict[int, Frame], deadline_seconds: float) -> None:
        """Ends when every pair is through, when the borrower is lost, or at the deadline."""
        try:
            await self._ranks.order_all("lend", orders, deadline_seconds, unblock="let-go")
        except RankFailedError as failure:
            log.warning("lending ended early: %s", failure)
        except RankStuckError:
            log.exception("lending could not be ended; the engine is killed and restarts")
            self._kill()
        finally:
            self.fence = self.fence.lend_ended()


def _has_room(answer: Frame) -> bool:
    return bool(answer["copy_bytes"] <= answer["room_bytes"])


def _shape_of_all(answers: Mapping[int, Frame]) -> str:
    """One digest over the shapes of all local ranks, in rank order."""
    return hashlib.sha256("".join(str(answers[rank]["shape"]) for rank in sorted(answers)).encode()).hexdigest()
