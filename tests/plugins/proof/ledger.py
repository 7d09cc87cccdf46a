"""The list of what is to be proved, and what a set of test runs has proved of it."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

KINDS = ("row", "scenario")
_REFUSAL = re.compile(r"^\| (?P<id>[A-Z](?:-[A-Z])?\d+) \| (?P<reason>[^|]+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Titles by id for each kind, and the reason for every id that is refused on purpose."""

    titles: Mapping[str, Mapping[str, str]]
    refused: Mapping[str, str]

    @classmethod
    def load(cls, docs: Path) -> Self:
        """The catalogue kept in ``docs/proof/*.json`` and ``docs/refused.md``.

        Raises:
            ValueError: a refusal names an id that is not in the catalogue.
        """
        titles = {kind: json.loads((docs / "proof" / f"{kind}s.json").read_text()) for kind in KINDS}
        whole_entries = (docs / "refused.md").read_text().split("\n## ", maxsplit=1)[0]
        refused = {match["id"]: match["reason"].strip() for match in _REFUSAL.finditer(whole_entries)}
        unknown = sorted(set(refused) - {key for ids in titles.values() for key in ids})
        if unknown:
            raise ValueError(f"docs/refused.md refuses {', '.join(unknown)}, which docs/proof does not list")
        return cls(titles=titles, refused=refused)


@dataclass(slots=True)
class Outcomes:
    """Ids by kind that tests carried, parted by whether such a test passed or failed."""

    passed: dict[str, set[str]] = field(default_factory=lambda: {kind: set() for kind in KINDS})
    failed: dict[str, set[str]] = field(default_factory=lambda: {kind: set() for kind in KINDS})

    def record(self, marks: Iterable[tuple[str, str]], *, passed: bool) -> None:
        into = self.passed if passed else self.failed
        for kind, key in marks:
            into[kind].add(key)

    def proved(self, kind: str) -> set[str]:
        """Ids of which a test passed and none failed."""
        return self.passed[kind] - self.failed[kind]

    def merge(self, other: Self) -> None:
        for kind in KINDS:
            self.passed[kind] |= other.passed[kind]
            self.failed[kind] |= other.failed[kind]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            outcome: {kind: sorted(ids) for kind, ids in table.items()}
            for outcome, table in (("passed", self.passed), ("failed", self.failed))
        }
        path.write_text(json.dumps(document, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        document = json.loads(path.read_text())
        return cls(
            passed={kind: set(document["passed"][kind]) for kind in KINDS},
            failed={kind: set(document["failed"][kind]) for kind in KINDS},
        )


def summarize_proof(catalogue: Catalogue, outcomes: Outcomes) -> str:
    """The closing line: how much of each kind is proved, with the ids."""
    parts = []
    for kind in KINDS:
        proved = [key for key in catalogue.titles[kind] if key in outcomes.proved(kind)]
        listed = f" ({' '.join(proved)})" if proved else ""
        parts.append(f"{kind}s proved: {len(proved)} of {len(catalogue.titles[kind])}{listed}")
    return "; ".join(parts)


def list_unproved(catalogue: Catalogue, outcomes: Outcomes) -> list[str]:
    """One line for each id without proof and without a refusal, then one for each refusal."""
    lines = []
    for kind in KINDS:
        titles = catalogue.titles[kind]
        open_ids = [key for key in titles if key not in outcomes.proved(kind) and key not in catalogue.refused]
        lines.append(f"{kind}s without a passing test: {len(open_ids)}")
        lines += [f"  {key:<6} {titles[key]}" for key in open_ids]
    lines.append(f"refused on purpose (docs/refused.md): {len(catalogue.refused)}")
    lines += [f"  {key:<6} {reason}" for key, reason in sorted(catalogue.refused.items())]
    return lines
