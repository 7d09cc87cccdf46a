"""``rolloutfleet refit``: a checkpoint as the trainer of one refit."""

import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from rolloutfleet.cli.refit_arguments import RefitOptions
from rolloutfleet.connecting import connect
from rolloutfleet.contract.trainer import Phase, RefitResult, RefitView
from rolloutfleet.errors import FleetUnreachable, ManifestMismatch, RefitFailed, RolloutFleetError, SessionHeld
from rolloutfleet.fleet import Fleet
from rolloutfleet.sources.checkpoint import Checkpoint, open_checkpoint
from rolloutfleet.sources.safetensors import CheckpointError

DONE: Final = 0
FAILED: Final = 1
LEFT_BEHIND: Final = 3
UNUSABLE: Final = 4

_RETRY_SECONDS: Final = 1.0

Answer = TypeVar("Answer")


def refit_from_checkpoint(options: RefitOptions) -> int:
    """The exit status, after one refit; what happens is told on stderr, a table of the result on stdout."""
    try:
        checkpoint = open_checkpoint(options.checkpoint)
        _say(f"{options.checkpoint}: {checkpoint.tensors} tensors, {checkpoint.nbytes / 1e9:.3f} GB")
        result = _send(options, checkpoint)
    except (CheckpointError, ManifestMismatch) as error:
        return _fail(options, UNUSABLE, str(error))
    except RefitFailed as error:
        return _fail(options, LEFT_BEHIND if error.committed else FAILED, str(error))
    except (RolloutFleetError, ValueError, OSError) as error:
        return _fail(options, FAILED, str(error))
    print(render_result(result))
    return DONE


def _send(options: RefitOptions, checkpoint: Checkpoint) -> RefitResult:
    deadline = time.monotonic() + options.wait
    with _patiently(lambda: _connect(options), deadline) as fleet:
        progress = _Progress(checkpoint.nbytes)
        return _patiently(
            lambda: fleet.refit(
                checkpoint, options.version, timeout=options.timeout, progress=progress, repair=options.repair
            ),
            deadline,
        )


def _connect(options: RefitOptions) -> Fleet:
    return connect(
        options.fleet,
        namespace=options.namespace,
        token_file=options.token_file,
        trainer=options.trainer,
        advertise=options.advertise,
        take_over=options.take_over,
    )


def _patiently(act: Callable[[], Answer], deadline: float) -> Answer:
    """What the act gives; again and again until the deadline where the sync job does not answer or another trainer holds the fleet."""
    told = False
    while True:
        try:
            return act()
        except (FleetUnreachable, SessionHeld) as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise
            if not told:
                _say(f"waiting: {error}")
            told = True
            time.sleep(_RETRY_SECONDS)


class _Progress:
    """Tells each phase once, with the seconds since the refit began."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._began: float | None = None
        self._shown: tuple[Phase, int] | None = None

    def __call__(self, view: RefitView) -> None:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if (view.phase, view.attempt) == self._shown:
            return
        self._shown = view.phase, view.attempt
        what = f" {self._nbytes / 1e9:.3f} GB" if view.phase is Phase.TRANSFERRING else ""
        attempt = f", attempt {view.attempt}" if view.attempt > 1 else ""
        waiting = f", waits for {', '.join(view.waiting_for[:4])}" if view.waiting_for else ""
        _say(f"{now - self._began:8.2f} s  {view.phase}{what}{attempt}{waiting}")


def render_result(result: RefitResult) -> str:
    """The result as lines of two columns."""
    rows = [
        ("version", str(result.version)),
        (
            "engines",
            f"{len(result.members)}: {', '.join(result.members[:8])}{' ...' if len(result.members) > 8 else ''}",
        ),
        ("tensors", f"{result.tensors}, {result.nbytes / 1e9:.3f} GB, {result.gigabytes_per_second:.3f} GB/s"),
        ("transport", f"{result.reason or result.transport}{' (staged)' if result.staged else ''}"),
        ("paused", f"{result.pause_seconds:.3f} s"),
        *((phase, f"{seconds:.3f} s") for phase, seconds in result.seconds.items()),
        ("seconds", f"{sum(result.seconds.values()):.3f} s"),
    ]
    rows += [
        ("lost", f"{member.pod_name} in attempt {attempt.attempt}, {member.phase}: {member.message}")
        for attempt in result.attempts
        for member in attempt.lost
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _fail(options: RefitOptions, status: int, reason: str) -> int:
    _say(reason)
    if options.termination_log is not None:
        options.termination_log.write_text(reason[:4000])
    return status


def _say(line: str) -> None:
    print(f"rolloutfleet: {line}", file=sys.stderr, flush=True)
