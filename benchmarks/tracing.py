"""Where the time of one refit goes: profiles of both processes and the trainer's own view of the phases, as one table."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import Fleet
from benchmarks.record import say
from benchmarks.refits import measured_refit, next_version
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.contract.trainer import Phase

_DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_MERGE_SECONDS = 0.0002
_SHOWN_GAP_MS = 0.5

WAITS_FOR: Mapping[Phase, str] = {
    Phase.PENDING: "the sync job takes the request up",
    Phase.FORMING: "engines compare the manifest with their models, which they remember from the refit before",
    Phase.PREPARING: "both sides derive the program; nothing when it is the one of the refit before",
    Phase.READY: "the intent is written down before anything changes",
    Phase.PAUSING: "the engine ends the step it is in, and the pause travels there and back",
    Phase.TRANSFERRING: "orders travel to trainer and ranks, the trainer shows its memory, and reports travel back",
    Phase.VERIFYING: "digests are compared: a few numbers in the sync job",
    Phase.COMMITTING: "the version is written down durably, then every engine is told and resets its cache",
    Phase.RESUMING: "the resume travels to the engine and back",
    Phase.COMPLETE: "the result travels to the trainer",
}
"""What a gap inside a phase is, where no device works."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time; milliseconds from the beginning of the refit."""

    what: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a span, the idle time before it, and why."""

    what: str
    start_ms: float
    end_ms: float
    gap_ms: float
    gap_is: str


def bursts(events: Iterable[Mapping[str, Any]], origin: float, base: float, who: str) -> list[Span]:
    """Device work of a Chrome trace, neighbours of one name merged; ``origin`` and ``base`` are wall clocks in seconds.

    A trace's times are microseconds after ``base``, which the trace names in nanoseconds.
    """
    spans: list[Span] = []
    for event in sorted(
        (event for event in events if event.get("cat") in _DEVICE_KINDS), key=lambda event: event["ts"]
    ):
        begin = base + event["ts"] / 1e6 - origin
        end = begin + event.get("dur", 0.0) / 1e6
        what = f"{who}: {str(event['name'])[:60]}"
        if spans and spans[-1].what == what and begin - spans[-1].end_ms / 1e3 < _MERGE_SECONDS:
            spans[-1] = Span(what, spans[-1].start_ms, end * 1e3)
        else:
            spans.append(Span(what, begin * 1e3, end * 1e3))
    return spans


def tabulate(spans: Sequence[Span], phases: Mapping[Phase, float], total_ms: float) -> list[Row]:
    """All spans by their start, each with the time since anything before it ended, named by the phase in which that time lies.

    ``phases`` gives milliseconds at which each phase began. A last row stands for the end of the refit.
    """
    rows: list[Row] = []
    busy = 0.0
    inside = [span for span in spans if span.end_ms > 0 and span.start_ms < total_ms]
    for span in [*sorted(inside, key=lambda span: span.start_ms), Span("refit() returns", total_ms, total_ms)]:
        gap = max(0.0, span.start_ms - busy)
        rows.append(Row(span.what, span.start_ms, span.end_ms, gap, _reason(phases, busy, span.start_ms, gap)))
        busy = max(busy, span.end_ms)
    return rows


def _reason(phases: Mapping[Phase, float], begin: float, end: float, gap: float) -> str:
    if gap < _SHOWN_GAP_MS:
        return ""
    ordered = sorted(phases.items(), key=lambda item: item[1])
    reasons = []
    for index, (phase, start) in enumerate(ordered):
        stop = ordered[index + 1][1] if index + 1 < len(ordered) else float("inf")
        overlap = min(end, stop) - max(begin, start)
        if overlap >= _SHOWN_GAP_MS and phase in WAITS_FOR:
            reasons.append(f"{phase} {overlap:.1f} ms: {WAITS_FOR[phase]}")
    return "; ".join(reasons)


def trace_refit(fleet: Fleet, weights: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """One Colocated refit under the profiler, after two without; the table's rows, and each phase's milliseconds."""
    fleet.start(RefitPolicy(transport=Transport.COLOCATED, staging=Staging.NEVER))
    engine = fleet.engines[0]
    with fleet.connect() as trainer:
        for _ in range(2):
            measured_refit(trainer, weights, next_version(trainer))
        version = next_version(trainer)
        engine.call("benchmark_profile_begin")
        with torch.profiler.profile() as profile:
            refit = measured_refit(trainer, weights, version)
        engine.call("benchmark_profile_end", str(folder / "engine-trace.json"))
    profile.export_chrome_trace(str(folder / "trainer-trace.json"))
    spans = [span for who in ("engine", "trainer") for span in _spans_of(folder / f"{who}-trace.json", refit.wall, who)]
    phases = {phase: (at - refit.began) * 1e3 for phase, at in refit.phases.items()}
    rows = tabulate(spans, phases, refit.seconds * 1e3)
    for row in rows:
        say(f"{row.start_ms:9.2f} {row.end_ms:9.2f} ms, gap {row.gap_ms:7.2f} ms  {row.what}  {row.gap_is}")
    return {"rows": [asdict(row) for row in rows], "phases_ms": phases, "refit_seconds": refit.seconds}


def _spans_of(path: Path, origin: float, who: str) -> list[Span]:
    trace = json.loads(path.read_text())
    return bursts(trace["traceEvents"], origin, trace.get("baseTimeNanoseconds", 0) / 1e9, who)
