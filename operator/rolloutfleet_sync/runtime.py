"""The thin edge around the state machine: feeds it events, carries out its commands."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from rolloutfleet_sync.clock import Clock
from rolloutfleet_sync.log import logger
from rolloutfleet_sync.metrics import Metrics
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import (
    CallWorker,
    CancelCalls,
    Command,
    PublishStatus,
    ReadStatus,
    WriteCommit,
    WriteIntent,
    WriteRecord,
)
from rolloutfleet_sync.protocol.machine import may_publish, next_wakeup, step
from rolloutfleet_sync.protocol.model import State
from rolloutfleet_sync.protocol.summary import judge_readiness, summarize_status
from rolloutfleet_sync.store import RosterSource, StatusStore, StoreConflictError, StoreError
from rolloutfleet_sync.telling import Teller
from rolloutfleet_sync.workers import WorkerCaller

PUBLISH_INTERVAL = 1.0
"""Least seconds between two reports."""
PUBLISH_SECONDS = 10.0
STOP_SECONDS = 12.0


class Runtime:
    """Owns the state; everything else sees it through :attr:`state` and changes it through :meth:`apply`."""

    def __init__(
        self,
        state: State,
        store: StatusStore,
        rosters: RosterSource,
        caller: WorkerCaller,
        *,
        clock: Clock | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
    ) -> None:
        self.state = state
        self.clock = clock or Clock()
        self.new_id = new_id
        self.metrics = Metrics(state.identity.fleet, lambda: self.state, self.clock.now)
        self._teller = Teller(self.metrics, self.clock.wall)
        self._store = store
        self._rosters = rosters
        self._caller = caller
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._woken = asyncio.Event()
        self._publish = asyncio.Event()
        self._writing = asyncio.Lock()
        self._failure: asyncio.Future[None] | None = None

    def apply(self, event: events.Event) -> None:
        """Take one step; raises ProblemError, without any change, when a trainer's request is refused."""
        before = self.state
        self.state, commands = step(before, event, self.clock.now())
        for command in commands:
            self._execute(command)
        if self.state is not before:
            self._teller.note(before, self.state)
            self._changed.set()
            self._changed = asyncio.Event()
            self._woken.set()

    async def wait_for_change(self, until: float) -> None:
        """Return after the next change of the state, or when the clock has reached ``until``."""
        await self.clock.wait(self._changed, until)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set, then bring what is under way to where a successor can take over.

        Raises StoreConflictError when another sync job works for the same fleet.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self._spawn(self._follow_rosters())
        self._spawn(self._publish_reports())
        self._spawn(self._keep_time())
        stopping = asyncio.ensure_future(stop.wait())
        first: set[asyncio.Future[Any]] = {stopping, self._failure}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            await self._stop()
        finally:
            stopping.cancel()
            await self._close()

    async def _stop(self) -> None:
        self.apply(events.StopRequested())
        until = self.clock.now() + STOP_SECONDS
        # A refit that is past the pause is left to the successor, which finds its intent in the status.
        while self.state.active is not None and may_publish(self.state) and self.clock.now() < until:
            await self.wait_for_change(until)
        if may_publish(self.state):
            try:
                await self._write_report()
            except StoreError as error:
                logger.error("the last status could not be written", extra={"error": str(error)})

    async def _close(self) -> None:
        tasks = [*self._tasks, *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._caller.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure and not self._failure.done():
            self._failure.set_exception(task.exception() or AssertionError("unreachable"))

    def _execute(self, command: Command) -> None:
        match command:
            case CallWorker():
                task = asyncio.ensure_future(self._call(command))
                self._calls[command.call] = task
                task.add_done_callback(self._ended)
            case CancelCalls(numbers):
                for number in numbers:
                    running = self._calls.pop(number, None)
                    if running is not None:
                        running.cancel()
            case ReadStatus():
                self._spawn(self._read())
            case WriteIntent() | WriteCommit():
                self._spawn(self._write(command))
            case PublishStatus():
                self._publish.set()

    async def _call(self, command: CallWorker) -> None:
        event = await self._caller.call(command)
        self._calls.pop(command.call, None)
        if isinstance(event, events.CallFailed) and command.message is not None:
            logger.warning(
                "call failed",
                extra={"verb": command.verb.value, "member": command.pod_name, "reason": event.problem.message[:2000]},
            )
        self.apply(event)

    async def _read(self) -> None:
        async with self._writing:
            try:
                event: events.Event = events.StatusRead(await self._store.read())
            except StoreError as error:
                logger.error("the status could not be read", extra={"error": str(error)})
                event = events.StatusUnreadable(str(error))
        self.apply(event)

    async def _write(self, command: WriteRecord) -> None:
        async with self._writing:
            status = summarize_status(self.state, command.record, self.clock.wall)
            try:
                await self._store.write(status, judge_readiness(self.state), command.seconds)
                event: events.Event = events.RecordWritten(command.write)
            except StoreConflictError:
                # Whoever goes on after this would write what it believes over the record of the sync job that has taken over.
                raise
            except StoreError as error:
                logger.error("a durable write failed", extra={"write": type(command).__name__, "error": str(error)})
                event = events.WriteFailed(command.write, str(error))
        self.apply(event)

    async def _write_report(self) -> None:
        async with self._writing:
            if self.state.record is None or not may_publish(self.state):
                self._publish.set()
                return
            status = summarize_status(self.state, self.state.record, self.clock.wall)
            await self._store.write(status, judge_readiness(self.state), PUBLISH_SECONDS)

    async def _publish_reports(self) -> None:
        while True:
            await self._publish.wait()
            await self.clock.wait(asyncio.Event(), self.clock.now() + PUBLISH_INTERVAL)
            while not may_publish(self.state):
                await self.wait_for_change(float("inf"))
            self._publish.clear()
            try:
                await self._write_report()
            except StoreConflictError:
                raise
            except StoreError as error:
                logger.error("the status could not be written", extra={"error": str(error)})
                self._publish.set()

    async def _follow_rosters(self) -> None:
        async for roster in self._rosters.watch():
            identity = self.state.identity
            if roster.fleet_uid != identity.fleet_uid:
                logger.error(
                    "roster of another fleet ignored",
                    extra={"expected": identity.fleet_uid, "found": roster.fleet_uid},
                )
                continue
            if roster != self.state.roster:
                logger.info("roster changed", extra={"engines": roster.engines, "members": len(roster.members)})
                self.apply(events.RosterChanged(roster))

    async def _keep_time(self) -> None:
        self.apply(events.Tick())
        while True:
            self._woken.clear()
            due = next_wakeup(self.state)
            if due <= self.clock.now():
                self.apply(events.Tick())
                await asyncio.sleep(0)
            else:
                await self.clock.wait(self._woken, due)
