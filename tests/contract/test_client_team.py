"""Trainers of two and three FSDP2 ranks refit small engines through the real sync job, without gathering a tensor."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fakes.layout_engine import LayoutEngine  # noqa: E402 - only where torch is
from fakes.served_fleet import TOKEN, ServedFleet  # noqa: E402
from fakes.wires import GlooWire  # noqa: E402
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport  # noqa: E402
from rolloutfleet.contract.trainer import RefitResult  # noqa: E402

TESTS = Path(__file__).parents[1]


@pytest.fixture(params=[Transport.LAYOUT, Transport.COLOCATED])
def setup(request: pytest.FixtureRequest) -> Iterator[ServedFleet]:
    running = ServedFleet(GlooWire(), LayoutEngine)
    running.policy = RefitPolicy(transport=request.param, staging=Staging.NEVER)
    running.start_sync()
    yield running
    running.close()


def run_team(setup: ServedFleet, ranks: int, folder: Path) -> None:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fakes.team_trainer", f"http://127.0.0.1:{setup.port}", TOKEN]
    members = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [member.communicate(timeout=240)[1] for member in members]
    assert [member.returncode for member in members] == [0] * ranks, "\n".join(errors)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_ranks_send_their_parts_and_engines_hold_the_whole_in_their_own_types(
    setup: ServedFleet, ranks: int, tmp_path: Path
) -> None:
    run_team(setup, ranks, tmp_path)
    for version in (1, 2):
        results = {(tmp_path / f"{version}-{rank}.json").read_text() for rank in range(ranks)}
        assert len(results) == 1
        result = RefitResult.model_validate_json(results.pop())
        assert (result.version, result.transport) == (version, setup.policy.transport)
    expected = torch.load(tmp_path / "2.pt")
    for engine in setup.engines:
        assert torch.equal(engine.flat, expected.to(engine.flat.dtype))
        assert engine.calls.count("join") == engine.calls.count("prepare") == 1


@pytest.mark.scenario("F60")
def test_a_team_goes_on_without_an_engine_that_fails_in_the_transfer(setup: ServedFleet, tmp_path: Path) -> None:
    setup.engines[1].refuse |= {"receive": "out of memory", "lend": "no"}
    run_team(setup, 2, tmp_path)
    results = [RefitResult.model_validate_json((tmp_path / f"1-{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    assert results[0].members == (setup.engines[0].pod,)
    assert [lost.pod_name for attempt in results[0].attempts for lost in attempt.lost] == [setup.engines[1].pod]
    expected = torch.load(tmp_path / "2.pt")
    assert torch.equal(setup.engines[0].flat, expected.to(setup.engines[0].flat.dtype))
