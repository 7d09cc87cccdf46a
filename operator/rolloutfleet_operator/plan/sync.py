"""Which WeightSync is active, and which sync Job serves it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolloutfleet_operator.plan.observed import Job, Pod, WeightSync


@dataclass(frozen=True, slots=True)
class JobPlan:
    """``waiting_for`` names what must end before a new Job may begin: two sync jobs of one fleet never run at once."""

    create: bool = False
    delete: tuple[Job, ...] = ()
    waiting_for: str = ""


def plan_active(weightsyncs: Iterable[WeightSync]) -> WeightSync | None:
    """The WeightSync whose turn it is: the oldest that is not being deleted, of those that trainers are to use.

    Of those made in one second, the one that has the turn already keeps it.
    """
    candidates = [sync for sync in weightsyncs if not sync.terminating and sync.checkpoint is None]
    return min(candidates, key=lambda sync: (sync.created, not _has_turn(sync), sync.name), default=None)


def _has_turn(sync: WeightSync) -> bool:
    conditions = sync.status.get("conditions") or ()
    return any(c.get("type") == "Active" and c.get("status") == "True" for c in conditions)


def plan_sync_job(wanted: str, fleet_uid: str, jobs: Sequence[Job], sync_pods: Sequence[Pod]) -> JobPlan:
    """What to do about the fleet's sync Jobs so that one of the wanted name runs; an empty name wants none.

    A Job of another name, or one that has ended, goes first; the wanted one is made when no other is left, and no other's pod lives.
    """
    own = sorted((job for job in jobs if job.owner_uid == fleet_uid), key=lambda job: job.name)
    keep = {job.uid for job in own if job.name == wanted and not job.finished and not job.terminating}
    delete = tuple(job for job in own if job.uid not in keep and not job.terminating)
    if keep or not wanted:
        return JobPlan(delete=delete)
    if own:
        return JobPlan(delete=delete, waiting_for=f"Job {own[0].name} to end")
    alive = sorted(pod.name for pod in sync_pods if pod.live)
    if alive:
        return JobPlan(waiting_for=f"sync pod {alive[0]} of a former Job to end")
    return JobPlan(create=True)


def plan_floor(active: WeightSync, epoch: int, version: int) -> tuple[int, int] | None:
    """The (epoch, version) that the WeightSync must start from, None when it knows as much: it takes over from an older one."""
    known_epoch = max(active.floor_epoch, int(active.status.get("epoch", 0)))
    known_version = max(active.floor_version, int(active.status.get("version", 0)))
    if known_epoch >= epoch and known_version >= version:
        return None
    return max(known_epoch, epoch), max(known_version, version)
