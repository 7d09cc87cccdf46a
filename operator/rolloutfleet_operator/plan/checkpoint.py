"""What becomes of ``weights.checkpoint``: when its Job runs, whether it has brought the version, and when it is to bring it once more.

Nothing is remembered but in the WeightSync of the checkpoint: that its version came from there, or that its Job has failed for good. Both
outlive the Job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rolloutfleet.contract.history import Standing
from rolloutfleet.contract.policy import LateJoin
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_operator.api.weightsync import CheckpointRun, WeightSyncStatus
from rolloutfleet_operator.plan.observed import Job, Pod, WeightSync

LATE_SECONDS = 60.0
"""How long an engine that lacks the version is left to its peers before the checkpoint is sent again."""
_MESSAGE = 1024
_LACKING = frozenset({Standing.LATE.value, Standing.OVERDUE.value, WorkerState.PAUSED.value, WorkerState.DIRTY.value})
"""States of an engine that lacks the version, could be given it, and does not serve until then."""


class Stage(StrEnum):
    """Where one sending of a checkpoint stands."""

    NONE = ""
    """Nothing is to be sent."""
    WAITING = "Waiting"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """What is known of a Job before it is made."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """All that the plan follows from."""

    version: int | None
    """Of weights.checkpoint, None without one."""
    late_join: LateJoin
    min_ready: int
    engines: int
    """How many there should be; 0 while the fleet is suspended."""
    up: int
    """How many have come up."""
    sync_ready: bool
    committed: int
    """The fleet's version."""
    report: WeightSyncStatus | None
    """Of the sync job, None before its first."""
    behind_since: datetime | None
    """Since when some engine lacks the version; None while none does."""
    now: datetime


@dataclass(frozen=True, slots=True)
class JobStep:
    """What to do about one of the Jobs, and what is to be said of it."""

    stage: Stage = Stage.NONE
    message: str = ""
    create: bool = False
    delete: tuple[Job, ...] = ()

    def run(self, job: RenderedJob) -> CheckpointRun | None:
        """As it stands in the WeightSync; None while nothing is to be sent."""
        if self.stage is Stage.NONE:
            return None
        return CheckpointRun(job=job.name, revision=job.revision, outcome=self.stage.value, message=self.message)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The two Jobs of a checkpoint, its WeightSync, and what is left over of former ones."""

    refit: JobStep = JobStep()
    repair: JobStep = JobStep()
    keep_sync: bool = False
    """Whether the WeightSync of this version should exist."""
    delete_jobs: tuple[Job, ...] = ()
    delete_syncs: tuple[WeightSync, ...] = ()
    retry_after: float | None = None
    """When to look again although nothing will have changed, in seconds."""


def plan_checkpoint(
    facts: CheckpointFacts,
    refit: RenderedJob | None,
    repair: RenderedJob | None,
    jobs: Sequence[Job],
    pods: Sequence[Pod],
    syncs: Sequence[WeightSync],
) -> CheckpointPlan:
    """What to do about a checkpoint now.

    Args:
        facts: of the fleet.
        refit: the Job that sends the checkpoint as a new version, None without a checkpoint.
        repair: the Job that sends it to engines that lack it.
        jobs: the fleet's own Jobs that send checkpoints.
        pods: their pods.
        syncs: the fleet's own WeightSyncs of checkpoints.
    """
    names = {job.name for job in (refit, repair) if job is not None}
    stray_jobs = tuple(job for job in jobs if job.name not in names and not job.terminating)
    stray_syncs = tuple(sync for sync in syncs if sync.checkpoint != facts.version and not sync.terminating)
    if refit is None or repair is None or facts.version is None:
        return CheckpointPlan(delete_jobs=stray_jobs, delete_syncs=stray_syncs)
    stored = next((sync for sync in syncs if sync.checkpoint == facts.version), None)
    known = _run_of(stored, "checkpoint")
    # Only one sends at a time, a former version's Job too.
    others = [job for job in jobs if job.name != refit.name]
    first = _plan_refit(facts, refit, jobs, others, pods, known)
    second, retry_after = JobStep(), None
    if first.stage in {Stage.COMPLETE, Stage.NONE}:
        came_from_it = first.stage is Stage.COMPLETE and facts.committed == facts.version
        second, retry_after = _plan_repair(facts, repair, jobs, pods, came_from_it=came_from_it)
    return CheckpointPlan(
        refit=first,
        repair=second,
        keep_sync=first.stage is not Stage.NONE,
        delete_jobs=stray_jobs,
        delete_syncs=stray_syncs
        + ((stored,) if stored and first.stage is Stage.NONE and not stored.terminating else ()),
        retry_after=retry_after,
    )


def _run_of(sync: WeightSync | None, field: str) -> CheckpointRun:
    stored = sync.status.get(field) if sync is not None else None
    return CheckpointRun.model_validate(stored) if stored else CheckpointRun()


def _plan_refit(
    facts: CheckpointFacts,
    wanted: RenderedJob,
    jobs: Sequence[Job],
    others: Sequence[Job],
    pods: Sequence[Pod],
    known: CheckpointRun,
) -> JobStep:
    job = next((job for job in jobs if job.name == wanted.name), None)
    committed = facts.version is not None and facts.committed >= facts.version
    if committed and (job is not None or known.outcome in {Stage.RUNNING, Stage.COMPLETE}):
        return JobStep(Stage.COMPLETE, f"version {facts.version} came from the checkpoint")
    if committed:
        return JobStep()  # a trainer's version has taken or passed this number
    if job is None and known.outcome == Stage.FAILED and known.revision == wanted.revision:
        return JobStep(Stage.FAILED, known.message)
    return _plan_job(facts, wanted, job, others, pods)


def _plan_job(
    facts: CheckpointFacts, wanted: RenderedJob, job: Job | None, others: Sequence[Job], pods: Sequence[Pod]
) -> JobStep:
    """What to do about a Job that should have run, and what it has come to."""
    if job is not None and (job.terminating or job.revision != wanted.revision or not facts.engines):
        return JobStep(Stage.WAITING, f"waits for Job {job.name} to end", delete=() if job.terminating else (job,))
    if job is not None and job.finished == "Failed":
        return JobStep(Stage.FAILED, _reason(job, pods))
    if job is not None and job.finished:
        return JobStep(Stage.RUNNING, f"Job {job.name} has sent the checkpoint; waits for the sync job to report it")
    if job is not None:
        return JobStep(Stage.RUNNING, _progress(facts, job, pods))
    hindrance = _hindrance(facts, wanted, others)
    if hindrance:
        return JobStep(Stage.WAITING, hindrance)
    return JobStep(Stage.RUNNING, f"Job {wanted.name} is being made", create=True)


def _hindrance(facts: CheckpointFacts, wanted: RenderedJob, others: Sequence[Job]) -> str:
    """What has to come first; empty when nothing does."""
    if not facts.engines:
        return "the fleet has no engines now"
    running = [job.name for job in others if not job.finished]
    if running:
        return f"waits for Job {running[0]} to end"
    if not facts.sync_ready or facts.report is None:
        return "waits for the sync job"
    least = min(facts.min_ready, facts.engines)
    if facts.up < least:
        return f"waits for engines: {facts.up} of {least} that it needs are up"
    session = facts.report.session
    if session is not None and session.trainer != wanted.name:
        return f"trainer {session.trainer or session.id} holds the fleet; waits until it lets go"
    return ""


def _progress(facts: CheckpointFacts, job: Job, pods: Sequence[Pod]) -> str:
    report = facts.report
    if report is not None and report.session is not None and report.session.trainer == job.name:
        if report.refit is not None:
            waits = f", waits for {', '.join(report.refit.waiting_for[:4])}" if report.refit.waiting_for else ""
            return f"Job {job.name} sends: {report.refit.phase}{waits}"
        return f"Job {job.name} holds the fleet"
    last = _last_pod(job, pods)
    if last is None:
        return f"Job {job.name} has no pod yet"
    if last.dead and last.container.exit_message:
        return f"Job {job.name} is tried again: {last.container.exit_message}"
    trouble = last.unschedulable or last.container.waiting_message or last.container.waiting_reason
    if not last.container.started and trouble:
        return f"Job {job.name}, pod {last.name}: {trouble}"
    return f"Job {job.name} reads the checkpoint"


def _reason(job: Job, pods: Sequence[Pod]) -> str:
    """Why a Job failed for good: its last pod's own words, where it left any."""
    last = _last_pod(job, pods)
    words = last.container.exit_message if last is not None else ""
    return f"Job {job.name} failed: {words or job.message or 'no reason was given'}"[:_MESSAGE]


def _last_pod(job: Job, pods: Sequence[Pod]) -> Pod | None:
    own = [pod for pod in pods if pod.owner_uid == job.uid]
    return max(own, key=lambda pod: (pod.created, pod.name), default=None)


def _plan_repair(
    facts: CheckpointFacts, wanted: RenderedJob, jobs: Sequence[Job], pods: Sequence[Pod], *, came_from_it: bool
) -> tuple[JobStep, float | None]:
    """The repair, and when to look again: for engines that are up, lack the version, and have no peer that lends it.

    A Job that has failed stays until its time to live is over, and keeps another one from being made until then.
    """
    job = next((job for job in jobs if job.name == wanted.name), None)
    idle = JobStep(delete=(job,) if job is not None and job.finished and not job.terminating else ())
    report = facts.report
    if not came_from_it or facts.late_join is not LateJoin.CHECKPOINT or report is None or report.members is None:
        return idle, None
    if job is not None and not job.finished:
        return _plan_job(facts, wanted, job, (), pods), None
    lenders = report.members.admitted - report.members.asleep
    # One that is stale serves by leave, and takes its turn at borrowing: that is no reason to hurry while somebody lends.
    wanting = _LACKING if lenders > 0 else _LACKING | {Standing.STALE.value}
    if report.version != facts.version or not any(engine.state in wanting for engine in report.behind):
        return idle, None
    if lenders > 0:
        since = facts.behind_since or facts.now
        left = LATE_SECONDS - (facts.now - since).total_seconds()
        if left > 0:
            return idle, left
    if job is not None and job.finished == "Complete":
        return JobStep(Stage.WAITING, f"waits for Job {job.name} to end", delete=idle.delete), None
    return _plan_job(facts, wanted, job, [other for other in jobs if other.name != wanted.name], pods), None
