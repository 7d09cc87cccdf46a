"""What each engine is, in one word: the same one in status, metrics and on the command line."""

from collections import Counter

from rolloutfleet.contract.history import Standing
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.members import is_admitted
from rolloutfleet_sync.protocol.model import MemberRecord, State


def judge_standing(state: State, record: MemberRecord) -> str:
    """The state that the engine tells of itself, or a :class:`Standing` where that does not say all."""
    report = record.report
    if record.failure is not None or report is None:
        return Standing.SILENT.value
    if report.state is not WorkerState.SERVING or is_admitted(record, state.version):
        return report.state.value
    if report.stale_seconds is None:
        return Standing.LATE.value
    return Standing.STALE.value if report.stale_seconds else Standing.OVERDUE.value


def count_states(state: State) -> Counter[str]:
    """Engines by what they are."""
    counts = Counter(judge_standing(state, record) for record in state.members.values())
    if state.roster is not None:
        counts[Standing.ABSENT.value] += max(state.roster.engines - len(state.members), 0)
    return counts
