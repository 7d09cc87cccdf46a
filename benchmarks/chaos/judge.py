"""Judges a run from outside: by what every engine answered at every moment, and by when each version was published. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

CROSSING_SECONDS: Final = 3.0
"""A request in flight while its engine changes over may be answered with the new version's header and the old one's weights."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the load's output."""

    asked: float
    answered: float
    engine: int
    version: int
    """What the engine's header named; -1 for a refusal."""
    said: str
    """What it computed from the weights that it serves."""
    refusal: str

    @property
    def given(self) -> bool:
        return self.version >= 0


@dataclass(slots=True)
class Verdict:
    """What is wrong with the answers, and when each engine served again."""

    faults: list[str] = field(default_factory=list)
    answers: int = 0
    refusals: int = 0
    crossings: int = 0
    """Answers that were under way while their engine changed over."""


def judge_answers(
    answers: Iterable[Answer],
    versions: Mapping[str, int],
    published: Mapping[int, float],
    held: Mapping[int, int] | None = None,
) -> Verdict:
    """The verdict on a run's answers.

    ``versions`` names the version of everything that an engine may say; ``published`` has the moment of each version's durable record;
    ``held`` gives by engine the version that it served before, below which it must never fall.
    """
    verdict = Verdict()
    served = dict(held or {})
    for answer in answers:
        if not answer.given:
            verdict.refusals += 1
            continue
        verdict.answers += 1
        where = f"engine {answer.engine} at {answer.answered:.3f}"
        version = versions.get(answer.said)
        if version is None:
            verdict.faults.append(
                f"{where} answered from no whole version ({answer.said[:60]}, header {answer.version})"
            )
            continue
        if version and published.get(version, float("inf")) > answer.answered:
            verdict.faults.append(f"{where} served version {version} before it was published")
        if version < served.get(answer.engine, 0):
            verdict.faults.append(f"{where} served version {version} after version {served[answer.engine]}")
        served[answer.engine] = max(version, served.get(answer.engine, 0))
        if answer.version != version:
            verdict.crossings += 1
            moment = published.get(answer.version, float("-inf"))
            if not moment <= answer.answered <= moment + CROSSING_SECONDS:
                verdict.faults.append(f"{where} named version {answer.version}, its weights are version {version}")
    return verdict


def first_served(
    answers: Iterable[Answer], versions: Mapping[str, int], engine: int, version: int, since: float
) -> float | None:
    """When an engine first answered with this version or a newer one to what was asked since a moment; None if it never did."""
    for answer in answers:
        if answer.engine == engine and answer.asked >= since and versions.get(answer.said, -1) >= version:
            return answer.answered
    return None


def seconds_to_serving(
    answers: Sequence[Answer], versions: Mapping[str, int], engines: Iterable[int], version: int, since: float
) -> float | None:
    """From a moment until the last of these engines served the version; None while one has not."""
    moments = [first_served(answers, versions, engine, version, since) for engine in engines]
    served = [moment for moment in moments if moment is not None]
    return max(served) - since if served and len(served) == len(moments) else None
