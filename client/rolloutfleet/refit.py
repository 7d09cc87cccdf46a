"""Drives one refit from the trainer's side: follow the sync job's word, and act when told to, as all ranks of the trainer do.

The caller's thread follows the sync job by long polls. Joining, preparing and sending block inside torch or NCCL, so each runs in a
thread of its own; when the sync job aborts, or time is up, the group is aborted from here, which ends that thread. A refit that has lost
members begins another attempt without them: the trainer leaves the group that it was in, and does everything again in the new one.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from rolloutfleet.channel import Channel
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import (
    FleetView,
    Phase,
    RefitResult,
    RefitView,
    TrainerFailed,
    TrainerJoin,
    TrainerJoined,
    TrainerPrepare,
    TrainerPrepared,
    TrainerSent,
)
from rolloutfleet.delivery import Cargo
from rolloutfleet.errors import (
    DeadlineExceeded,
    FleetUnreachable,
    InvalidRequest,
    RefitFailed,
    RolloutFleetError,
    SessionLost,
    TeamLost,
    refit_error_of,
)
from rolloutfleet.exiting import start_thread
from rolloutfleet.rank import Order, is_cut_off, lost_ranks
from rolloutfleet.session import Session
from rolloutfleet.team.crew import Crew
from rolloutfleet.team.messages import Failure

logger = logging.getLogger("rolloutfleet")

LONG_POLL_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 5.0

Progress = Callable[[RefitView], None]


def failure_of(error: Exception, epoch: int) -> TrainerFailed:
    """What the sync job is told of an error in this epoch."""
    lost = lost_ranks(error)
    return TrainerFailed(
        epoch=epoch, message=f"{type(error).__name__}: {error}", peer_lost=is_cut_off(error), lost_ranks=lost
    )


class Refit:
    """One refit that the sync job has accepted."""

    def __init__(self, channel: Channel, session: Session, crew: Crew, cargo: Cargo, accepted: RefitView) -> None:
        self._channel = channel
        self._session = session
        self._crew = crew
        self._cargo = cargo
        self._view = accepted
        self._attempt = accepted.attempt
        self._cancelled = threading.Event()
        self._work: threading.Thread | None = None
        self._local_error: Exception | None = None
        self._done: set[tuple[str, int]] = set()

    def run(self, timeout: float, progress: Progress | None = None) -> RefitResult:
        """The result, once every engine serves the new version; the errors are those of :meth:`rolloutfleet.Fleet.refit`."""
        end_watch = self._crew.watch(self._report_crew)
        try:
            result = self._follow(timeout, progress)
        except RolloutFleetError as error:
            self._stop(str(error))
            raise
        except BaseException as error:
            self._give_up(f"the trainer left the refit: {type(error).__name__}: {error}")
            self._stop(type(error).__name__)
            raise
        else:
            self._join_work()
            return result
        finally:
            end_watch()

    def _follow(self, timeout: float, progress: Progress | None) -> RefitResult:
        deadline = time.monotonic() + timeout
        shown: Phase | None = None
        while True:
            view = self._view
            if progress is not None:
                progress(view)
            if view.phase is not shown:
                shown = view.phase
                logger.info("refit to version %s, epoch %s: %s", view.version, view.epoch, view.phase)
            if view.phase is Phase.COMPLETE and view.result is not None:
                return view.result
            if view.phase is Phase.FAILED and view.problem is not None:
                raise refit_error_of(
                    view.problem, view.version, committed=view.result is not None
                ) from self._local_error
            if view.phase is Phase.ABORTING:
                self._stop(view.problem.message if view.problem else "the sync job aborts the attempt")
            if view.attempt != self._attempt:
                self._begin_attempt(view)
            self._act(view)
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._out_of_time(view, timeout)
            self._view = self._poll(view, min(LONG_POLL_SECONDS, left), deadline)

    def _begin_attempt(self, view: RefitView) -> None:
        """Be free for another group, whether or not the abort of the one before was seen."""
        self._stop(f"attempt {view.attempt} of the refit begins")
        logger.warning(
            "refit to version %s has lost members; attempt %d goes on without them", view.version, view.attempt
        )
        self._attempt = view.attempt
        self._local_error = None
        self._cancelled = threading.Event()
        self._crew.open_attempt()

    def _out_of_time(self, view: RefitView, timeout: float) -> DeadlineExceeded:
        self._give_up(f"the trainer's deadline of {timeout:g} s passed")
        return DeadlineExceeded(
            f"refit to version {view.version} did not end within {timeout:g} s: it stood in phase {view.phase}, waiting for "
            f"{', '.join(view.waiting_for) or 'nobody named'}. See `rolloutfleet status`, or pass a longer timeout="
        )

    def _poll(self, view: RefitView, wait: float, deadline: float) -> RefitView:
        query = {"after": str(view.sequence), "wait": f"{wait:.1f}"}
        try:
            return self._channel.get(f"refits/{view.refit}", RefitView, query=query, held=wait)
        except FleetUnreachable as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise
            # The sync job may be restarting; the refit goes on or is gone when it is back.
            logger.warning("lost sight of refit %s, trying again: %s", view.refit, error)
            time.sleep(_RETRY_SECONDS)
            return view
        except InvalidRequest as error:
            if error.problem is None or error.problem.code is not ProblemCode.NOT_FOUND:
                raise
            self._session.mark_lost()
            raise self._forgotten(view, error) from error
        except SessionLost:
            self._session.mark_lost()
            raise

    def _forgotten(self, view: RefitView, error: InvalidRequest) -> RolloutFleetError:
        """A sync job that restarts forgets a refit, and finishes it all the same when its version stands in the record as committed."""
        message = f"the sync job restarted and no longer knows the refit to version {view.version}"
        if self._cargo.repair or self._channel.get("fleet", FleetView).version < view.version:
            return SessionLost(message, problem=error.problem)
        return RefitFailed(
            f"{message}, which is committed: the sync job brings the engines that received it to it",
            problem=error.problem,
            committed=True,
        )

    def _act(self, view: RefitView) -> None:
        for order in (view.join, view.prepare, view.send):
            if order is not None:
                self._begin(order)

    def _begin(self, order: Order) -> None:
        step = (type(order).__name__, order.epoch)
        if step in self._done or self._cancelled.is_set():
            return
        self._done.add(step)
        cancelled = self._cancelled
        self._work = start_thread(
            f"rolloutfleet-{step[0]}-{order.epoch}",
            lambda: self._perform(order, cancelled),
            lambda: self._leave("the process ends"),
        )

    def _perform(self, order: Order, cancelled: threading.Event) -> None:
        """The work of one order; ``cancelled`` is that of the order's own attempt."""
        deadline = time.monotonic() + order.deadline_seconds
        try:
            self._crew.order(order)
            sent = self._session.rank.perform(order, self._cargo, cancelled)
            self._crew.await_done(order, cancelled)
            if isinstance(order, TrainerJoin):
                self._tell("joined", TrainerJoined(epoch=order.epoch), deadline, cancelled)
            elif isinstance(order, TrainerPrepare):
                self._tell("prepared", TrainerPrepared(epoch=order.epoch), deadline, cancelled)
            elif sent is not None:
                done = TrainerSent(
                    epoch=order.epoch, tensors=sent.tensors, nbytes=sent.nbytes, digests=dict(sent.digests)
                )
                self._tell("sent", done, deadline, cancelled)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame; refit() raises what the fleet makes of it
            if not cancelled.is_set():
                self._local_error = error
                if error is not self._crew.failure:
                    self._report_failure(failure_of(error, order.epoch))

    def _tell(
        self,
        step: str,
        done: TrainerJoined | TrainerPrepared | TrainerSent,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Says that a step is done, and again while no answer comes: the sync job may have heard it already, and takes it twice as once."""
        while True:
            try:
                return self._channel.tell(f"refits/{self._view.refit}/{step}", done)
            except FleetUnreachable as error:
                if time.monotonic() + _RETRY_SECONDS >= deadline or cancelled.wait(_RETRY_SECONDS):
                    raise
                logger.warning("the sync job may not have heard that %s is done, telling it again: %s", step, error)

    def _give_up(self, message: str) -> None:
        """Ends the refit, whatever attempt it is in by now."""
        self._report_failure(TrainerFailed(epoch=0, message=message))

    def _report_crew(self, failure: Failure | TeamLost, sentence: str) -> None:
        if isinstance(failure, TeamLost):
            self._give_up(sentence)
            return
        cut_off = {"peer_lost": failure.peer_lost, "lost_ranks": failure.lost_ranks}
        self._report_failure(TrainerFailed(epoch=failure.epoch, message=sentence, **cut_off))

    def _report_failure(self, failed: TrainerFailed) -> None:
        try:
            self._channel.tell(f"refits/{self._view.refit}/failed", failed)
        except RolloutFleetError as error:
            logger.warning("the sync job was not told that the trainer failed (%s): %s", failed.message, error)

    def _stop(self, reason: str) -> None:
        """Ends whatever this trainer is doing in the group; a thread stuck inside NCCL's own start is left behind as a daemon."""
        self._cancelled.set()
        self._crew.stop(reason)
        self._leave(reason)
        self._join_work()

    def _leave(self, reason: str) -> None:
        self._cancelled.set()
        self._session.rank.leave(reason)

    def _join_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.join(_STOP_SECONDS)
            if work.is_alive():
                logger.warning("%s did not end within %g s of being aborted", work.name, _STOP_SECONDS)
