"""What keeps a pod from being Ready, in its own words.

A container that ended with an error twice is failing; one that waits for its image or its volumes is starting. The engine's launcher
leaves vLLM's own error in the termination message, so that is what people read.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rolloutfleet_operator.api.conditions import Reason
from rolloutfleet_operator.plan.observed import Pod

FAILING_RESTARTS = 2

_PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)
_MAKE_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod is not Ready; ``stalled`` means that waiting will not help."""

    reason: Reason
    stalled: bool
    message: str


_RANK = (Reason.ENGINE_FAILING, Reason.IMAGE_PULL_FAILING, Reason.UNSCHEDULABLE, Reason.ENGINES_STARTING)


def pod_trouble(pod: Pod) -> Trouble | None:
    """What is wrong with the pod, None when it is Ready or runs and merely has not said so yet."""
    state = pod.container
    if pod.ready:
        return None
    if pod.dead:
        words = _join(state.exit_reason, state.exit_message) or f"phase {pod.phase}"
        return Trouble(Reason.ENGINE_FAILING, False, f"pod {pod.name} ended: {words}; another takes its place")
    if pod.unschedulable:
        return Trouble(Reason.UNSCHEDULABLE, False, f"pod {pod.name}: {pod.unschedulable}")
    if state.waiting_reason in _PULL_FAILURES:
        return Trouble(
            Reason.IMAGE_PULL_FAILING, True, f"pod {pod.name}: {_join(state.waiting_reason, state.waiting_message)}"
        )
    if state.waiting_reason in _MAKE_FAILURES:
        return Trouble(
            Reason.ENGINE_FAILING, True, f"pod {pod.name}: {_join(state.waiting_reason, state.waiting_message)}"
        )
    up = state.started and not state.waiting_reason
    if state.restarts and state.exit_code and not up:
        words = _join(f"exit code {state.exit_code}", state.exit_message or state.exit_reason)
        times = "once" if state.restarts == 1 else f"{state.restarts} times"
        message = f"pod {pod.name} was restarted {times}: {words}"
        return Trouble(Reason.ENGINE_FAILING, state.restarts >= FAILING_RESTARTS, message)
    if not pod.node:
        return Trouble(Reason.ENGINES_STARTING, False, f"pod {pod.name} waits for a node")
    if pod.sandbox_missing:
        hint = (
            f"its volumes or its network are not there yet; it needs {pod.mounts} (see kubectl describe pod {pod.name})"
        )
        return Trouble(Reason.ENGINES_STARTING, False, f"pod {pod.name}: {hint}")
    if not state.started:
        doing = "pulls its image" if state.waiting_reason == "ContainerCreating" else "loads its model"
        return Trouble(Reason.ENGINES_STARTING, False, f"pod {pod.name} {doing}")
    return None


def worst_trouble(pods: Iterable[Pod]) -> Trouble | None:
    """The trouble to report for many pods: the gravest, of the first pod by engine, with a count of the others."""
    found = [(pod, trouble) for pod in pods if (trouble := pod_trouble(pod)) is not None]
    if not found:
        return None
    ordered = sorted(found, key=lambda f: (not f[1].stalled, _RANK.index(f[1].reason), f[0].engine, f[0].name))
    first = ordered[0][1]
    alike = sum(trouble.reason is first.reason for _, trouble in found) - 1
    more = f" (and {alike} more)" if alike else ""
    return Trouble(first.reason, first.stalled, first.message + more)


def _join(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
