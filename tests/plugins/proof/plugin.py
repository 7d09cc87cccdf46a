"""pytest plugin: checks the ids in ``row`` and ``scenario`` marks and reports what the run has proved."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from proof.ledger import KINDS, Catalogue, Outcomes, list_unproved, summarize_proof

_MARKS = pytest.StashKey[list[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proof", "rows and scenarios proved by tests")
    group.addoption("--rows", action="store_true", help="after the run, list rows and scenarios without a passing test")
    group.addoption(
        "--proof-tier",
        metavar="NAME",
        help="keep what this run proved in build/proof/NAME.json, so that several tiers can be reported together",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProofReporter(config), "proof-reporter")


class ProofReporter:
    """Collects the outcome of every marked test of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._catalogue = Catalogue.load(config.rootpath / "docs")
        self._outcomes = Outcomes()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        faults = []
        for item in items:
            item.stash[_MARKS] = list(_marks_of(item))
            faults += [
                f"{item.nodeid}: {kind} {key!r} is not in docs/proof/{kind}s.json"
                for kind, key in item.stash[_MARKS]
                if key not in self._catalogue.titles[kind]
            ]
        if faults:
            raise pytest.UsageError("\n".join(sorted(faults)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marks = item.stash.get(_MARKS, [])
        expected_failure = hasattr(report, "wasxfail")
        if report.failed:
            self._outcomes.record(marks, passed=False)
        elif report.passed and call.when == "call" and not expected_failure:
            self._outcomes.record(marks, passed=True)
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.option.collectonly:
            return
        tier = self._config.getoption("proof_tier")
        if tier:
            self._outcomes.save(proof_directory(self._config.rootpath) / f"{tier}.json")
        if self._config.getoption("rows"):
            for line in list_unproved(self._catalogue, self._outcomes):
                terminalreporter.write_line(line)
        terminalreporter.write_line(summarize_proof(self._catalogue, self._outcomes))


def proof_directory(root: Path) -> Path:
    """Where the outcomes of each tier are kept between runs."""
    return root / "build" / "proof"


def _marks_of(item: pytest.Item) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        for mark in item.iter_markers(kind):
            if not mark.args or mark.kwargs or not all(isinstance(arg, str) for arg in mark.args):
                raise pytest.UsageError(f'{item.nodeid}: write @pytest.mark.{kind}("<id>", ...) with ids as strings')
            yield from ((kind, key) for key in mark.args)
