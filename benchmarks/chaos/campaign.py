"""Many runs: fleets for blocks of them, the table, the figures."""

import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, draw_bars
from benchmarks.chaos.cluster import CLUSTER_MODEL, ENGINES, ClusterFleet, cluster_kind
from benchmarks.chaos.faults import BLOCK, Card, Fault, deal, deal_cluster, draw_fault, policy_of
from benchmarks.chaos.fleet import EngineKind, Fleet, Shape
from benchmarks.chaos.injecting import AnyFleet
from benchmarks.chaos.runs import Expected, Outcome, Run, killed_before_decision
from benchmarks.chaos.weights import expected_checksum
from benchmarks.load import percentile
from benchmarks.record import Record, median, say
from rolloutfleet.contract.policy import PauseMode, Staging

_WARM_REFITS = 2
"""The first version is loaded by the engines' own loader; from the second on it is written in place, or staged."""


class Campaign:
    """The runs of one seed."""

    def __init__(self, seed: int, engines: int, folder: Path, *, verbose: bool, output: Path | None) -> None:
        self._seed = seed
        self._engines = engines
        self._folder = folder
        self._verbose = verbose
        self._output = output
        self._fleet: AnyFleet | None = None
        self._fleets = 0
        self.held: list[Outcome] = []
        self.vllm: list[Outcome] = []
        self.cluster: list[Outcome] = []

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return (*self.held, *self.vllm, *self.cluster)

    @property
    def bad_end_states(self) -> int:
        return sum(1 for outcome in self.outcomes if outcome.bad)

    def run_held(
        self, numbers: Iterable[int], cards: Sequence[Card] = (), way: tuple[Staging, PauseMode] | None = None
    ) -> None:
        """Runs with engines that hold weights; ``cards`` are the faults, and ``way`` is how engines refit, instead of what is dealt."""
        say(f"chaos: seed {self._seed}")

        def shape_of(number: int) -> Shape:
            staging, pause = way or policy_of(self._seed, number)
            return Shape(engines=self._engines, staging=staging, pause=pause)

        def fault_of(number: int) -> Fault:
            if cards:
                return draw_fault(self._seed, number, cards[number % len(cards)], self._engines)
            return deal(self._seed, number, self._engines)

        @cache
        def expected(version: int) -> str:
            return expected_checksum(version, 1)

        def start(number: int) -> Fleet:
            return Fleet(self._next_folder(), shape_of(number), EngineKind())

        self._run(numbers, start, fault_of, expected, self.held)

    def run_vllm(self, numbers: Iterable[int]) -> None:
        """Runs with real vLLM: two engines of a tiny model."""
        numbers = list(numbers)
        if not numbers:
            return
        from benchmarks.chaos.tiny import TinyOracle, vllm_kind

        model = self._folder / "model"
        oracle = TinyOracle(model)

        def start(number: int) -> Fleet:
            # Answers of several steps: with Keep they would rightly go on with new weights, and be of no one version.
            staging, _ = policy_of(self._seed, number)
            shape = Shape(engines=2, staging=staging, pause=PauseMode.WAIT)
            return Fleet(self._next_folder(), shape, vllm_kind(model))

        self._run(numbers, start, lambda number: deal(self._seed, number, 2, simple=True), oracle.expected, self.vllm)

    def run_cluster(self, numbers: Iterable[int], cards: Sequence[Card] = ()) -> None:
        """Runs in the local cluster: everything is what users have there; ``cards`` are the faults, instead of what is dealt."""
        from benchmarks.chaos.tiny import TinyOracle
        from demo.stage import Stage

        stage = Stage.here()
        stage.install()
        shutil.rmtree(CLUSTER_MODEL, ignore_errors=True)
        oracle = TinyOracle(CLUSTER_MODEL)
        for file in CLUSTER_MODEL.iterdir():
            file.chmod(0o644)  # engines have a user of their own
        kind = cluster_kind(CLUSTER_MODEL)

        def start(number: int) -> ClusterFleet:
            # Not Keep, as above; in place and staged in turn.
            policy = {"pause": "Wait", "staging": ("Never", "Auto")[number // BLOCK % 2]}
            return ClusterFleet(stage, self._next_folder(), kind, policy)

        def fault_of(number: int) -> Fault:
            return deal_cluster(self._seed, number, ENGINES, cards[number % len(cards)] if cards else None)

        self._run(numbers, start, fault_of, oracle.expected, self.cluster)

    def _next_folder(self) -> Path:
        self._fleets += 1
        return self._folder / f"fleet-{self._fleets}"

    def _run(
        self,
        numbers: Iterable[int],
        start: Callable[[int], AnyFleet],
        fault_of: Callable[[int], Fault],
        expected: Expected,
        outcomes: list[Outcome],
    ) -> None:
        block = -1
        try:
            for number in numbers:
                if self._fleet is None or number // BLOCK != block:
                    self._end_fleet()
                    block = number // BLOCK
                    began = time.monotonic()
                    self._fleet = _warmed(start(number))
                    say(f"fleet {self._fleets}: {self._fleet.shape}, up in {time.monotonic() - began:.1f} s")
                outcome = Run(self._fleet, fault_of(number), number, self._seed, expected).run()
                outcomes.append(outcome)
                self._tell(outcome)
                self._write()
                if outcome.bad:
                    self._end_fleet()
        finally:
            self._end_fleet()

    def _end_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    def _tell(self, outcome: Outcome) -> None:
        served = _seconds(outcome.seconds_to_serving)
        verdict = "BAD" if outcome.bad else "ok"
        say(
            f"{outcome.number:4d} {verdict:3} {outcome.fault} (met {outcome.hit}): {outcome.end or 'no end'}, serving again "
            f"{served}, whole {_seconds(outcome.seconds_to_whole)}, {outcome.wall_seconds:.1f} s"
        )
        if self._verbose or outcome.bad:
            for line in (
                *outcome.errors,
                *outcome.bad,
                *([f"{outcome.parts} {outcome.reformed}"] if self._verbose else []),
            ):
                say(f"       {line}")

    def say_summary(self) -> None:
        """The table by fault, party and phase."""
        sys.stdout.write(table_of(self.outcomes))
        for name, value in self._figures().items():
            say(f"chaos: {name} = {value:g}")
        say(f"chaos: seed {self._seed}")

    def _figures(self) -> dict[str, float]:
        kills = sorted(
            each.seconds_to_serving
            for each in (*self.held, *self.cluster)
            if killed_before_decision(each) and each.seconds_to_serving is not None
        )
        figures: dict[str, float] = {
            "runs": len(self.held),
            "runs_vllm": len(self.vllm) + len(self.cluster),
            "bad_end_states": self.bad_end_states,
        }
        if kills:
            figures["median_seconds_kill_to_serving"] = median(kills)
            figures["p95_seconds_kill_to_serving"] = percentile(kills, 95)
        reformed = [
            each.reformed for each in (*self.held, *self.cluster) if killed_before_decision(each) and each.reformed
        ]
        for part in ("detect", "abort", "re-form", "resend"):
            if seconds := [parts[part] for parts in reformed if part in parts]:
                figures[f"median_seconds_{part.replace('-', '_')}"] = median(seconds)
        return figures

    def _write(self) -> None:
        if self._output is None:
            return
        name = "chaos_cluster" if self.cluster else "chaos"
        record = Record(name, self._output / f"{name}.json")
        record.runs = [{"engines": "held weights", **each.as_run()} for each in self.held]
        record.runs += [{"engines": "vLLM", **each.as_run()} for each in (*self.vllm, *self.cluster)]
        record.figures = dict(self._figures())
        record.write()
        (self._output / f"{name}.md").write_text(table_of(self.outcomes))
        bars = self._bars()
        if bars:
            (self._output / f"{name}.svg").write_text(draw_bars("Fault to serving the new version, median", "s", bars))

    def _bars(self) -> list[Bar]:
        groups: dict[str, list[float]] = defaultdict(list)
        for outcome in (*self.held, *self.cluster):
            if outcome.seconds_to_serving is not None:
                groups[f"{outcome.kind}: {outcome.who}"].append(outcome.seconds_to_serving)
        return [Bar(label, median(values), ours=label.startswith("kill")) for label, values in sorted(groups.items())]


def table_of(outcomes: Iterable[Outcome]) -> str:
    """What came of each fault in each party and phase, as a table in Markdown."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kind, outcome.who, outcome.hit].append(outcome)
    lines = [
        "| fault | party | met in | runs | bad | ends | seconds to serving again: median, most |",
        "|---" * 7 + "|",
    ]
    for (kind, who, hit), group in sorted(groups.items()):
        served = sorted(each.seconds_to_serving for each in group if each.seconds_to_serving is not None)
        ends = ", ".join(sorted({each.end or "none" for each in group}))
        times = f"{median(served):.2f}, {served[-1]:.2f}" if served else "-"
        bad = sum(1 for each in group if each.bad)
        lines.append(f"| {kind} | {who} | {hit} | {len(group)} | {bad} | {ends} | {times} |")
    return "\n".join(lines) + "\n"


def _warmed(fleet: AnyFleet) -> AnyFleet:
    """The fleet after its first refits; closed, with a word on how it stands, when it does not come to that."""
    try:
        fleet.await_started()
        for _ in range(_WARM_REFITS):
            fleet.version += 1
            fleet.trainer.tell(refit=fleet.version, seconds=60.0)
            event = fleet.trainer.await_event(lambda event: event["event"] in {"done", "failed"}, 70.0)
            _require_done(event)
    except BaseException:
        say(fleet.stands())
        fleet.close()
        raise
    return fleet


def _require_done(event: Mapping[str, Any]) -> None:
    if event["event"] != "done":
        raise TimeoutError(f"a fleet's first refits failed: {event['error']}: {event['message']}")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
