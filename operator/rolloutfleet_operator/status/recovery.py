"""What is told of engines that are retired and nodes that are avoided."""

from rolloutfleet_operator import naming
from rolloutfleet_operator.api.conditions import Reason
from rolloutfleet_operator.api.recovery import EngineRecord, QuarantinedNode, RecoverySpec, RecoveryStatus
from rolloutfleet_operator.status.conditions import Event
from rolloutfleet_operator.status.troubles import Trouble

ENGINE_REVIVED = "EngineRevived"
NODE_QUARANTINED = "NodeQuarantined"
NODE_RELEASED = "NodeReleased"
MOST_NAMED = 8


def retirement_trouble(fleet: str, spec: RecoverySpec, status: RecoveryStatus) -> Trouble | None:
    """That engines are retired, and what gives them another chance; None when none is."""
    retired = [record for record in status.engines if record.retired]
    if not retired:
        return None
    numbers = [str(record.engine) for record in retired]
    who = f"engine {numbers[0]} is" if len(numbers) == 1 else f"engines {_some(numbers)} are"
    cause = f": {retired[0].message}" if retired[0].message else ""
    message = (
        f"{who} retired after more than {spec.restart_budget} failures within {spec.window_seconds} s{cause}; "
        f"change the spec, raise recovery.restartBudget, or try again: "
        f"rolloutfleet revive {fleet} {numbers[0]}, or: "
        f"kubectl annotate rolloutfleet {fleet} --overwrite {naming.ANNOTATION_REVIVE}=$(date +%s)"
    )
    return Trouble(Reason.ENGINE_RETIRED, True, message)


def recovery_events(previous: RecoveryStatus | None, current: RecoveryStatus | None) -> tuple[Event, ...]:
    """An event for each engine that was retired or revived, and each node that is avoided from now on, or no longer."""
    before, after = previous or RecoveryStatus(), current or RecoveryStatus()
    events = [
        Event(True, Reason.ENGINE_RETIRED, _retired_message(record))
        for record in after.engines
        if record.retired and record.engine not in before.retired
    ]
    events += [
        Event(False, ENGINE_REVIVED, f"engine {engine} gets another chance")
        for engine in before.retired
        if engine not in after.retired
    ]
    known, now = {n.node for n in before.quarantined_nodes}, {n.node for n in after.quarantined_nodes}
    events += [
        Event(True, NODE_QUARANTINED, _quarantine_message(node))
        for node in after.quarantined_nodes
        if node.node not in known
    ]
    events += [Event(False, NODE_RELEASED, f"node {node} is used again") for node in sorted(known - now)]
    return tuple(events)


def _retired_message(record: EngineRecord) -> str:
    cause = f": {record.message}" if record.message else ""
    return f"engine {record.engine} failed {len(record.failures)} times and is not replaced any more{cause}"


def _quarantine_message(node: QuarantinedNode) -> str:
    return f"engines failed {node.failures} times on node {node.node}: new engine pods avoid it until {node.until}"


def _some(numbers: list[str]) -> str:
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return ", ".join(numbers[:MOST_NAMED]) + more
