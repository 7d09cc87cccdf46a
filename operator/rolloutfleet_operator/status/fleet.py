"""A fleet's status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rolloutfleet.contract import names
from rolloutfleet_operator import naming
from rolloutfleet_operator.api.conditions import FleetCondition, Reason
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.fleetstatus import MAX_ENGINE_ENDPOINTS, Endpoints, RolloutFleetStatus, Weights
from rolloutfleet_operator.api.model import LoadFormat
from rolloutfleet_operator.api.recovery import RecoveryStatus
from rolloutfleet_operator.plan.checkpoint import CheckpointPlan, Stage
from rolloutfleet_operator.plan.engines import EngineGoal
from rolloutfleet_operator.plan.fit import Fit
from rolloutfleet_operator.plan.observed import Pod
from rolloutfleet_operator.render.identity import FleetIdentity
from rolloutfleet_operator.status.checkpoint import judge_checkpoint
from rolloutfleet_operator.status.conditions import Verdict, fold_conditions
from rolloutfleet_operator.status.recovery import retirement_trouble
from rolloutfleet_operator.status.troubles import Trouble, pod_trouble, worst_trouble


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """All that a status is made from."""

    fleet: FleetIdentity
    generation: int
    spec: RolloutFleetSpec
    goal: EngineGoal
    current: Mapping[int, Pod]
    """Engine -> the pod that counts for it."""
    dead: Sequence[Pod]
    """Pods that have ended and await their replacement."""
    fit: Fit
    sync_pods: Sequence[Pod]
    sync_waits: str
    """What must end before the sync Job can begin, empty when nothing."""
    weights: Weights
    reported: bool
    """Whether the sync job has counted the engines."""
    recovery: RecoveryStatus = field(default_factory=RecoveryStatus)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)

    @property
    def wanted(self) -> list[Pod]:
        """The pods that count, by engine."""
        return [pod for engine, pod in sorted(self.current.items()) if engine in self.goal.wanted]

    @property
    def ready(self) -> int:
        """Engines that serve."""
        return sum(pod.ready for pod in self.wanted)

    @property
    def updated(self) -> int:
        """Engines whose pod is of the current revision."""
        return sum(pod.revision == self.goal.revision for pod in self.wanted)

    @property
    def complete(self) -> bool:
        """Whether every engine serves from the current revision."""
        return self.ready == self.updated == self.goal.engines


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a pass could not finish; ``stalled`` means that waiting will not help."""

    reason: Reason
    message: str
    stalled: bool


def summarize_fleet(facts: FleetFacts, previous: RolloutFleetStatus, now: datetime) -> RolloutFleetStatus:
    """The status to write."""
    ready, trouble = _ready(facts)
    stalled = trouble is not None and trouble.stalled
    sending = judge_checkpoint(facts.checkpoint.refit) if facts.goal.engines else None
    verdicts = [
        ready,
        _reconciling(ready, sending, stalled=stalled),
        _stalled(ready, sending, stalled=stalled),
        _placement(facts),
        _weights_current(facts),
    ]
    return RolloutFleetStatus(
        conditions=fold_conditions(previous.conditions, verdicts, facts.generation, now),
        observed_generation=facts.generation,
        replicas=len(facts.wanted),
        ready_replicas=facts.ready,
        updated_replicas=facts.updated,
        label_selector=",".join(f"{k}={v}" for k, v in sorted(facts.fleet.selector(naming.ROLE_LEADER).items())),
        revision=facts.goal.revision,
        weights=facts.weights,
        recovery=facts.recovery if facts.recovery != RecoveryStatus() else None,
        endpoints=_endpoints(facts),
    )


def summarize_fault(
    base: RolloutFleetStatus, previous: RolloutFleetStatus, fault: Fault, generation: int, now: datetime
) -> RolloutFleetStatus:
    """The status after a pass that could not finish: counts are those of ``base``, Ready, Reconciling and Stalled say why."""
    ready = Verdict(FleetCondition.READY, "False", fault.reason, fault.message)
    verdicts = [ready, _reconciling(ready, None, stalled=fault.stalled), _stalled(ready, None, stalled=fault.stalled)]
    own = {verdict.type for verdict in verdicts}
    kept = [condition for condition in base.conditions if condition.type not in own]
    folded = fold_conditions(previous.conditions, verdicts, generation, now)
    conditions = tuple(sorted([*kept, *folded], key=lambda condition: condition.type))
    return base.model_copy(update={"conditions": conditions, "observed_generation": generation})


def _ready(facts: FleetFacts) -> tuple[Verdict, Trouble | None]:
    """Ready, and the trouble behind it; the first reason that holds is the one told."""
    count = f"{facts.ready} of {facts.goal.engines} engines serve"
    if facts.spec.suspend:
        return _not_ready(Reason.SUSPENDED, "spec.suspend is true: engines and sync job are removed"), None
    if facts.fit.fits is False and not facts.complete:
        return _not_ready(Reason.NO_NODE_FITS, f"{facts.fit.message}; {count}"), None
    trouble = worst_trouble([*facts.wanted, *facts.dead])
    if trouble is not None and trouble.reason is not Reason.ENGINES_STARTING:
        return _not_ready(trouble.reason, f"{trouble.message}; {count}"), trouble
    sync = _sync_trouble(facts)
    if sync is not None:
        return _not_ready(sync.reason, f"{sync.message}; {count}"), sync
    retired = retirement_trouble(facts.fleet.name, facts.spec.recovery, facts.recovery)
    if retired is not None:
        return _not_ready(retired.reason, f"{retired.message}; {count}"), retired
    return _progress(facts, trouble, count), None


def _progress(facts: FleetFacts, trouble: Trouble | None, count: str) -> Verdict:
    """Ready, or what is under way; an update keeps its one reason from its first engine to its last, whatever each one does."""
    missing = facts.goal.engines - len(facts.wanted)
    doing = f"{missing} engine pods are being made" if missing else trouble.message if trouble is not None else ""
    old = len(facts.wanted) - facts.updated
    if old and (doing or facts.ready == facts.goal.engines):
        message = f"{old} of {facts.goal.engines} engines still have an older revision"
        return _not_ready(Reason.ENGINES_UPDATING, "; ".join(filter(None, (message, doing, count))))
    if doing:
        return _not_ready(Reason.ENGINES_STARTING, f"{doing}; {count}")
    if facts.ready < facts.goal.engines:
        return _waiting_for_weights(facts, count)
    return Verdict(FleetCondition.READY, "True", Reason.ALL_ENGINES_READY, count)


def _waiting_for_weights(facts: FleetFacts, count: str) -> Verdict:
    """Engines are up and not Ready: they wait for a version that only a refit can bring, or for the sync job's word."""
    version, asleep = facts.weights.version, facts.weights.asleep
    if asleep:
        return _not_ready(Reason.ENGINES_ASLEEP, f"a trainer has put {asleep} engines to sleep; {count}")
    if version > 0:
        message = f"an engine that does not hold version {version} takes it over from a peer, or waits for the next refit; {count}"
        return _not_ready(Reason.AWAITING_NEXT_REFIT, message)
    if facts.spec.model.load_format is LoadFormat.DUMMY:
        message = f"model.loadFormat is Dummy, so the engines serve after the first refit; {count}"
        return _not_ready(Reason.AWAITING_FIRST_REFIT, message)
    return _not_ready(Reason.ENGINES_STARTING, f"engines are up and wait to be admitted by the sync job; {count}")


def _sync_trouble(facts: FleetFacts) -> Trouble | None:
    live = [pod for pod in facts.sync_pods if pod.live]
    if any(pod.ready for pod in live):
        return None
    if not live:
        waiting = f"the sync job waits for {facts.sync_waits}" if facts.sync_waits else "the sync pod is being made"
        return Trouble(Reason.SYNC_NOT_READY, False, waiting)
    pod = live[-1]
    trouble = pod_trouble(pod)
    if trouble is None:
        return Trouble(Reason.SYNC_NOT_READY, False, f"sync pod {pod.name} does not answer yet")
    reason = Reason.SYNC_FAILING if trouble.stalled else Reason.SYNC_NOT_READY
    message = trouble.message.replace("loads its model", "starts").removeprefix("pod ")
    return Trouble(reason, trouble.stalled, f"sync pod {message}")


def _not_ready(reason: Reason, message: str) -> Verdict:
    return Verdict(FleetCondition.READY, "False", reason, message)


def _reconciling(ready: Verdict, sending: Verdict | None, *, stalled: bool) -> Verdict:
    """``sending`` is what is said of a checkpoint on its way, or of one that could not be sent."""
    at_work = ready.status == "False" and not stalled and ready.reason is not Reason.SUSPENDED
    if at_work and not _given_up(ready, sending):
        return Verdict(FleetCondition.RECONCILING, "True", ready.reason, ready.message)
    if sending is not None and sending.reason is Reason.CHECKPOINT_REFIT and not stalled:
        return Verdict(FleetCondition.RECONCILING, "True", sending.reason, sending.message)
    return Verdict(FleetCondition.RECONCILING, "False", Reason.SETTLED, "nothing is under way")


def _stalled(ready: Verdict, sending: Verdict | None, *, stalled: bool) -> Verdict:
    if stalled:
        return Verdict(FleetCondition.STALLED, "True", ready.reason, ready.message)
    if sending is not None and _given_up(ready, sending):
        return Verdict(FleetCondition.STALLED, "True", sending.reason, sending.message)
    return Verdict(FleetCondition.STALLED, "False", Reason.SETTLED, "nothing needs anyone's help")


def _given_up(ready: Verdict, sending: Verdict | None) -> bool:
    """Whether nothing but a checkpoint that could not be sent is amiss."""
    only_that = ready.status == "True" or ready.reason in {Reason.AWAITING_FIRST_REFIT, Reason.AWAITING_NEXT_REFIT}
    return only_that and sending is not None and sending.reason is Reason.CHECKPOINT_FAILED


def _placement(facts: FleetFacts) -> Verdict:
    kind = FleetCondition.PLACEMENT_SATISFIED
    if not facts.goal.engines:
        return Verdict(kind, "Unknown", Reason.NOTHING_RUNS, "the fleet has no engines now")
    if facts.fit.fits is False:
        return Verdict(kind, "False", Reason.NO_NODE_FITS, facts.fit.message)
    placed, expected = sum(bool(pod.node) for pod in facts.wanted), len(facts.goal.wanted)
    count = f"{placed} of {expected} engines have a node"
    refused = [pod for pod in facts.wanted if pod.unschedulable]
    if refused:
        return Verdict(
            kind, "False", Reason.UNSCHEDULABLE, f"pod {refused[0].name}: {refused[0].unschedulable}; {count}"
        )
    if placed < expected:
        return Verdict(kind, "False", Reason.PLACING, count)
    return Verdict(kind, "True", Reason.PLACED, count)


def _weights_current(facts: FleetFacts) -> Verdict:
    kind, weights = FleetCondition.WEIGHTS_CURRENT, facts.weights
    if not facts.goal.engines:
        return Verdict(kind, "Unknown", Reason.NOTHING_RUNS, "the fleet has no engines now")
    checkpoint = judge_checkpoint(facts.checkpoint.refit)
    if checkpoint is not None:
        return checkpoint
    if not facts.reported:
        return Verdict(kind, "Unknown", Reason.NO_REPORT, "the sync job has not counted the engines yet")
    if facts.spec.model.load_format is LoadFormat.DUMMY and weights.version == 0:
        message = "model.loadFormat is Dummy, so the engines hold no usable weights before the first refit"
        return Verdict(kind, "False", Reason.AWAITING_FIRST_REFIT, message)
    if weights.skew:
        message = f"{weights.skew} of {facts.goal.engines} engines do not hold version {weights.version}"
        if weights.stale:
            message += f", {weights.stale} of which serve an older one by leave"
        if facts.checkpoint.repair.stage is not Stage.NONE:
            message += f"; the checkpoint is sent again: {facts.checkpoint.repair.message}"
        return Verdict(kind, "False", Reason.ENGINES_BEHIND, message)
    return Verdict(kind, "True", Reason.CURRENT, f"every engine holds version {weights.version}")


def _endpoints(facts: FleetFacts) -> Endpoints:
    fleet = facts.fleet
    domain = f"{fleet.namespace}.svc"
    headless = naming.engines_service_name(fleet.name)
    serving = [pod.name for pod in facts.wanted if pod.ready]
    return Endpoints(
        generation=f"http://{naming.generation_service_name(fleet.name)}.{domain}:{names.GENERATION_PORT}",
        sync=f"http://{naming.sync_name(fleet.name)}.{domain}:{names.SYNC_PORT}",
        engines=tuple(
            f"http://{name}.{headless}.{domain}:{names.GENERATION_PORT}" for name in serving[:MAX_ENGINE_ENDPOINTS]
        ),
    )
