"""Lend and borrow: an engine takes its weights from one of equal shape, rank from rank of the same number."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence

from rolloutfleet.contract.adapter import HeldAdapter
from rolloutfleet.contract.policy import PauseMode
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
from rolloutfleet_worker.podbase import ENGINE_CALL_SECONDS
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
                shapes = await self._order("shape", self._ranks.every_rank({}), call.deadline_seconds)
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
        """A serving engine is paused first, its requests aborted: whoever borrows holds a version that the fleet has left behind."""
        async with self._act(call):
            await self._require_shape(call)
            if self.fence.state is WorkerState.SERVING:
                self._hold(call.deadline_seconds)
                await self._pause_engine(PauseMode.ABORT, ENGINE_CALL_SECONDS)
                self.fence = self.fence.paused()
            was = self.fence
            self.fence = was.borrow_begins(call.version)
            self._hold(call.deadline_seconds + call.hold_seconds)
            body = {
                "rendezvous": call.rendezvous.model_dump(mode="json"),
                "wire": call.wire,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                await self._publish_door(self.fence)
                answers = await self._order("borrow", self._with_adapters(body, call.adapters), call.deadline_seconds)
            except RankFailedError as failure:
                self.fence = self.fence.receive_failed(touched=failure.touched, was=was, message=str(failure))
                await self._publish_door(self.fence)
                raise self._problem(ProblemCode.TRANSFER_FAILED, str(failure)) from failure
            except ProblemError as problem:
                self.fence = self.fence.receive_failed(touched=True, was=was, message=str(problem))
                await self._publish_door(self.fence)
                raise
            self.fence = self.fence.receive_done()
            self._note_borrowed(call.version, call.adapters)
        return merge_receives(call.version, [answers[rank] for rank in sorted(answers)])

    async def _require_shape(self, call: Borrow) -> None:
        try:
            shapes = await self._order("shape", self._ranks.every_rank({}), call.deadline_seconds)
        except RankFailedError as failure:
            raise self._problem(ProblemCode.TRANSFER_FAILED, f"the weights cannot be borrowed: {failure}") from failure
        mine = _shape_of_all(shapes)
        if mine != call.shape:
            raise self._problem(
                ProblemCode.WRONG_STATE,
                f"the lender's weights have shape {call.shape[:12]}, this engine's {mine[:12]}: names, types or shapes "
                "of live tensors differ, so weights can only come from the trainer",
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


def _shape_of_all(answers: Mapping[int, Frame]) -> str:
    """One digest over the shapes of all local ranks, in rank order."""
    return hashlib.sha256("".join(str(answers[rank]["shape"]) for rank in sorted(answers)).encode()).hexdigest()
