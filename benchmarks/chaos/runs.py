"""One run: a refit, a fault in it, what the trainer makes of it, everybody whole again, a clean refit, and the judge's verdict."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.chaos.faults import BEFORE_DECISION, FATAL, Fault, Kind, Who
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.injecting import AnyFleet, Injection, Observer
from benchmarks.chaos.judge import Answer, judge_answers, seconds_to_serving
from benchmarks.chaos.parties import await_that
from rolloutfleet.contract.trainer import Phase

CALL_SECONDS: Final = 90.0
"""A trainer's ``refit`` must have ended by then, whatever was done to whom."""
TRIES: Final = 40

Expected = Callable[[int], str]
"""What an engine says while it serves a version."""


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    number: int
    seed: int
    shape: str
    fault: str
    kind: str
    who: str
    phase: str
    """Where the fault was aimed at."""
    hit: str = ""
    """Where it met the refit."""
    end: str = ""
    bad: list[str] = field(default_factory=list)
    tries: int = 0
    """Calls of ``refit`` until one succeeded."""
    errors: list[str] = field(default_factory=list)
    seconds_to_serving: float | None = None
    """From the fault until every engine that it did not befall served the new version."""
    seconds_to_whole: float | None = None
    """From the fault until every engine served the fleet's version, or where none can lend it waited for the next refit."""
    clean_refit_seconds: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase of the refit that succeeded, by its own word."""
    reformed: dict[str, float] = field(default_factory=dict)
    """Of a refit that re-formed, in seconds: to notice the loss, to free all others, to be ready again, to send and serve."""
    answers: int = 0
    refusals: int = 0
    crossings: int = 0
    wall_seconds: float = 0.0

    def as_run(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    """Drives one run over a fleet that is whole."""

    def __init__(self, fleet: AnyFleet, fault: Fault, number: int, seed: int, expected: Expected) -> None:
        self._fleet = fleet
        self._fault = fault
        self._expected = expected
        self._versions = {expected(version): version for version in range(fleet.version + 1)}
        self._held = {pod.engine: fleet.version for pod in fleet.engines}
        self._skip = (fleet.folder / "answers.jsonl").stat().st_size
        self._hurt = {fault.engine} if fault.who in {Who.RANK, Who.LAUNCHER, Who.ENGINE} else set()
        self._restarts = {pod.engine: pod.party.restarts for pod in fleet.engines}
        self._observer: Observer | None = None
        self._result: dict[str, Any] = {}
        self._outcome = Outcome(
            number, seed, str(fleet.shape), str(fault), fault.kind.value, fault.who.value, fault.phase.value
        )

    def run(self) -> Outcome:
        """The outcome; what went wrong stands in it, so that nothing is raised but for faults of this program."""
        began = time.monotonic()
        outcome = self._outcome
        try:
            self._drive()
        except TimeoutError as error:
            outcome.bad.append(f"stuck: {error}\n{self._fleet.stands()}")
        finally:
            if self._observer is not None:
                self._observer.close()
        self._judge()
        outcome.wall_seconds = time.monotonic() - began
        return outcome

    def _drive(self) -> None:
        fleet, fault, outcome = self._fleet, self._fault, self._outcome
        started_anew = self._watch_victim()
        if fault.new_group:
            fleet.trainer.tell(fresh=True)
        target = fleet.version + 1
        if fault.phase is not Phase.READY:
            self._ask(target)
            refit = fleet.trainer.await_event(lambda event: event["event"] == "phase", CALL_SECONDS)["refit"]
            self._observer = Observer(fleet, refit)
            outcome.hit = self._observer.await_phase(fault.phase, CALL_SECONDS)
        time.sleep(fault.after_seconds)
        if self._observer is not None:
            outcome.hit = self._observer.phase
        else:
            outcome.hit = Phase.READY
        injection = Injection(fleet, fault)
        if fault.who is Who.TRAINER and self._observer is not None:
            self._observer.close()
        if fault.phase is Phase.READY and fault.who is not Who.TRAINER:
            self._ask(target)
        self._finish(target, injection)
        injection.settle()
        await_that(f"{fault.who} is started anew", started_anew, fleet.kind.start_seconds)
        await_that("every engine is up", fleet.all_up, fleet.kind.start_seconds)
        outcome.seconds_to_whole = time.monotonic() - injection.seconds
        outcome.seconds_to_serving = self._serving_since(injection.seconds, target)
        self._name_bystanders()
        self._clean_refit()

    def _watch_victim(self) -> Callable[[], bool]:
        """Tells, after the fault, whether the supervisor has started anew what does not live on: until then all may look well."""
        fleet, fault = self._fleet, self._fault
        if fault.who is Who.TRAINER or fault.kind not in FATAL:
            return lambda: True
        if fault.who in {Who.SYNC, Who.OPERATOR}:
            job = fleet.sync if fault.who is Who.SYNC or isinstance(fleet, Fleet) else fleet.operator
            restarts = job.restarts
            return lambda: job.restarts > restarts
        before = fleet.engines[fault.engine].report()

        def anew() -> bool:
            report = fleet.engines[fault.engine].report()
            return report is not None and (before is None or report.instance != before.instance)

        return anew

    def _name_bystanders(self) -> None:
        """An engine that nothing befell must live on: whoever was started anew has lost its weights, and its users an engine."""
        for pod in self._fleet.engines:
            if pod.engine not in self._hurt and pod.party.restarts > self._restarts[pod.engine]:
                self._outcome.bad.append(f"{pod.name} was started anew, although nothing had befallen it")

    def _ask(self, version: int) -> None:
        self._outcome.tries += 1
        self._versions.setdefault(self._expected(version), version)
        self._fleet.version = max(version, self._fleet.version)
        self._fleet.trainer.tell(refit=version, seconds=CALL_SECONDS)

    def _finish(self, target: int, injection: Injection) -> None:
        """Follow the call that was under way, and ask again until a version is there."""
        fleet, fault, outcome = self._fleet, self._fault, self._outcome
        asked_by_another = fault.who is Who.TRAINER and fault.kind in FATAL
        if asked_by_another:
            if fault.kind is not Kind.KILL:
                time.sleep(fleet.lease_seconds)
            injection.settle()
            fleet.next_trainer()
            self._ask(target)
        elif fault.who is Who.TRAINER and fault.phase is Phase.READY:
            self._ask(target)
        while True:
            event = fleet.trainer.await_event(lambda event: event["event"] in {"done", "failed"}, CALL_SECONDS + 10)
            if event["event"] == "done":
                break
            outcome.errors.append(f"{event['error']}: {event['message'][:400]}")
            if outcome.tries >= TRIES:
                raise TimeoutError(f"no refit succeeded in {TRIES} calls, the last one: {event['message'][:400]}")
            if event["committed"] or fleet.view().get("version", 0) >= target:
                break
            time.sleep(fleet.retry_seconds)
            self._ask(target)
        self._result = event.get("result", {})
        outcome.parts = dict(self._result.get("seconds", {}))
        outcome.reformed = self._parts_of_reforming(injection.seconds)
        outcome.end = self._end(event, asked_by_another=asked_by_another)

    def _parts_of_reforming(self, since: float) -> dict[str, float]:
        """The refit's own seconds, but for when the loss was noticed, which only who inflicted it can tell."""
        attempts = self._result.get("attempts") or []
        if not attempts or self._observer is None:
            return {}
        noticed = [moment for moment, phase in self._observer.seen if phase is Phase.ABORTING and moment > since]
        last = dict(self._outcome.parts)
        for attempt in attempts:
            for phase, seconds in attempt["seconds"].items():
                last[phase] = last.get(phase, 0.0) - seconds
        getting_ready = (Phase.REFORMING, Phase.FORMING, Phase.PREPARING, Phase.PAUSING)
        sending = (Phase.TRANSFERRING, Phase.VERIFYING, Phase.COMMITTING, Phase.RESUMING)
        parts = {
            "abort": self._outcome.parts.get(Phase.ABORTING, 0.0),
            "re-form": sum(last.get(phase, 0.0) for phase in getting_ready),
            "resend": sum(last.get(phase, 0.0) for phase in sending),
        }
        return {"detect": noticed[0] - since, **parts} if noticed else parts

    def _end(self, event: dict[str, Any], *, asked_by_another: bool) -> str:
        if event["event"] == "failed":
            return "committed all the same"
        if asked_by_another:
            return "next trainer"
        if self._outcome.tries > 1:
            return "failed, asked again"
        return "re-formed" if self._result.get("attempts") else "completed"

    def _serving_since(self, since: float, target: int) -> float | None:
        engines = [pod.engine for pod in self._fleet.engines if pod.engine not in self._hurt]
        answers: list[Answer] = []

        def served() -> bool:
            answers[:] = self._answers()
            return seconds_to_serving(answers, self._versions, engines, target, since) is not None

        await_that("every engine is seen to serve", served, 10.0)
        return seconds_to_serving(answers, self._versions, engines, target, since)

    def _clean_refit(self) -> None:
        """A refit without a fault, by whoever is the trainer now."""
        fleet, outcome = self._fleet, self._outcome
        version = max(fleet.version, int(fleet.view()["version"])) + 1
        tries, until = outcome.tries, time.monotonic() + fleet.lease_seconds + 2 * fleet.retry_seconds
        while True:
            began = time.monotonic()
            self._ask(version)
            event = fleet.trainer.await_event(lambda event: event["event"] in {"done", "failed"}, CALL_SECONDS + 10)
            if event["event"] == "done":
                break
            # The lease of a trainer that was killed may still run; a session that was lost with its sync job is opened anew.
            if event["error"] not in {"SessionHeld", "SessionLost"} or time.monotonic() > until:
                outcome.bad.append(f"the clean refit failed: {event['error']}: {event['message'][:600]}")
                break
            time.sleep(fleet.retry_seconds)
        outcome.tries = tries
        outcome.clean_refit_seconds = time.monotonic() - began
        engines = [pod.engine for pod in fleet.engines]
        since = time.monotonic()
        await_that(
            "every engine serves the clean refit's version",
            lambda: seconds_to_serving(self._answers(), self._versions, engines, version, since) is not None,
            10.0,
        )
        await_that("every engine is whole", fleet.all_whole, fleet.kind.start_seconds)

    def _answers(self) -> list[Answer]:
        with (self._fleet.folder / "answers.jsonl").open("rb") as lines:
            lines.seek(self._skip)
            content = lines.read()
        whole = content[: content.rfind(b"\n") + 1].decode().splitlines()
        return [Answer(*json.loads(line)) for line in whole]

    def _judge(self) -> None:
        notes = (self._fleet.folder / "published.jsonl").read_text().splitlines()
        published = {note["version"]: note["seconds"] for note in map(json.loads, notes)}
        verdict = judge_answers(self._answers(), self._versions, published, self._held)
        outcome = self._outcome
        outcome.answers, outcome.refusals, outcome.crossings = verdict.answers, verdict.refusals, verdict.crossings
        outcome.bad += verdict.faults[:5]
        more = len(verdict.faults) - 5
        outcome.bad += [f"and {more} answers more"] if more > 0 else []


def killed_before_decision(outcome: Outcome) -> bool:
    """Whether the run is one of those that the figures of kills are made of."""
    workers = {Who.RANK, Who.LAUNCHER, Who.ENGINE}
    return outcome.kind == Kind.KILL and outcome.who in workers and outcome.hit in BEFORE_DECISION
