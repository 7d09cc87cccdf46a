"""Tells of changes as they happen: in the log, a line for each, and in metrics."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from rolloutfleet.contract.trainer import Phase
from rolloutfleet_sync.log import logger
from rolloutfleet_sync.metrics import Metrics, ended_since
from rolloutfleet_sync.protocol.model import Refit, State
from rolloutfleet_sync.protocol.summary import ENTRY_MESSAGE_LENGTH, tell_refit
from rolloutfleet_sync.protocol.view import phase_of

MESSAGE_LENGTH = 2000


class Teller:
    """Looks at every change of a sync job's state."""

    def __init__(self, metrics: Metrics, wall: Callable[[float], datetime]) -> None:
        self.metrics = metrics
        self._wall = wall

    def note(self, before: State, after: State) -> None:
        """Tell what has changed between two states that follow each other."""
        self.metrics.count_change(before, after)
        if phase_of(after) is not phase_of(before) or after.version != before.version:
            self._log_phase(before, after)
        if after.refit is not before.refit and after.refit is not None:
            self._log_attempt(before.refit, after.refit)
        engines = after.roster.engines if after.roster else 0
        for refit in ended_since(before, after):
            row = tell_refit(refit, engines, self._wall).model_dump(mode="json", by_alias=True, exclude_defaults=True)
            row |= {"reason": row.pop("message", "")} if "message" in row else {}
            log = logger.info if refit.phase is Phase.COMPLETE else logger.warning
            log("refit ended", extra=row)

    def _log_phase(self, before: State, after: State) -> None:
        fields: dict[str, Any] = {"phase": phase_of(after).value, "epoch": after.epoch, "version": after.version}
        refit = after.refit
        if refit is not None and refit is not before.refit:
            fields |= {"refit": refit.id, "target": refit.version}
            if refit.problem is not None:
                fields |= {"member": refit.problem.member, "reason": refit.problem.message[:MESSAGE_LENGTH]}
        logger.info("phase changed", extra=fields)

    def _log_attempt(self, before: Refit | None, refit: Refit) -> None:
        same = before is not None and before.id == refit.id
        if refit.choice is not None and (not same or before is None or before.choice is not refit.choice):
            fields = {"transport": refit.choice.transport.value, "staged": refit.staged}
            logger.info("transport chosen", extra={"refit": refit.id, **fields, "reason": refit.choice.reason})
        for attempt in refit.ended[len(before.ended) if same and before is not None else 0 :]:
            for lost in attempt.lost:
                logger.warning(
                    "member lost",
                    extra={
                        "refit": refit.id,
                        "epoch": attempt.epoch,
                        "attempt": attempt.attempt,
                        "member": lost.pod_name,
                        "phase": lost.phase,
                        "code": lost.code.value,
                        "reason": lost.message[:ENTRY_MESSAGE_LENGTH],
                    },
                )
