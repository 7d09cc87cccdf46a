"""Fences in the states that tests begin with."""

from rolloutfleet.contract.worker import Admit, SleepLevel, WorkerState
from rolloutfleet_worker.fence import Fence, Identity

IDENTITY = Identity(fleet="f", fleet_uid="fleet-uid", pod_name="f-0-0-0", pod_uid="pod-uid", instance="one")


def serving(version: int = 0) -> Fence:
    return Fence(identity=IDENTITY, state=WorkerState.SERVING, version=version, admitted=version, message="")


def call(epoch: int = 0, fleet: str = "fleet-uid", pod: str = "pod-uid", instance: str = "one") -> Admit:
    return Admit(fleet_uid=fleet, pod_uid=pod, instance=instance, epoch=epoch, version=0)


def commit(fence: Fence, version: int) -> Fence:
    return fence.commit_begins(version).committed(version)


def received(version: int) -> Fence:
    return serving().join_done().paused().receive_begins(version).receive_done()


def staged(version: int, holds: int = 0) -> Fence:
    return serving(holds).join_done().receive_begins(version, staged=True).receive_done()


def slept(level: SleepLevel, fence: Fence | None = None) -> Fence:
    return (fence or serving(3)).sleep_begins(level).slept(level)
