"""A checkpoint as trainer of real engines, by the command that its Job runs: refit, repair, and what it says when it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.hostfleet import TOKEN, HostFleet
from tests.engines.refitting import assert_generates
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet
from rolloutfleet.contract.policy import Staging, Transport, Verify
from rolloutfleet.contract.trainer import TrainerSend
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.delivery import Cargo, LayoutDelivery, Sent


def save(fleet: HostFleet, folder: Path, seed: int) -> Path:
    """The model of a seed, in more than one file."""
    make_model(fleet.model, seed).save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def send(fleet: HostFleet, folder: Path, version: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rolloutfleet", "refit", fleet.address, f"--checkpoint={folder}"]
    command += [f"--version={version}", "--name=by-hand", "--timeout=120", "--wait=20", *options]
    environment = {**os.environ, "ROLLOUTFLEET_TOKEN": TOKEN}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.scenario("F54")
def test_versions_out_of_checkpoints_give_transformers_tokens_and_an_old_one_comes_back_under_a_higher_number(
    fleet: HostFleet, tmp_path: Path
):
    fleet.start_sync(transport=Transport.AUTO, verify=Verify.FULL)
    folders = {seed: save(fleet, tmp_path / str(seed), seed) for seed in (21, 22)}
    for seed in (21, 22, 21):
        version = fleet.next_version()
        done = send(fleet, folders[seed], version)
        assert done.returncode == 0, done.stderr
        assert_generates(fleet, seed)
    assert "Transferring 0.00" in done.stderr
    table = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (table["version"], table["engines"].partition(":")[0]) == (str(version), "2")
    assert table["transport"] == (
        "Layout over Gloo: the tensors of trainer by-hand are not in memory that it can share; "
        "not staged, for refit.verify Full needs engines that stand still"
    )


@pytest.mark.scenario("F48")
@pytest.mark.scenario("F67")
def test_engines_that_a_failed_refit_has_left_dirty_get_the_committed_version_again(
    fleet: HostFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fleet.start_sync(transport=Transport.LAYOUT, staging=Staging.NEVER)
    folder = save(fleet, tmp_path / "model", 23)
    version = fleet.next_version()
    assert send(fleet, folder, version).returncode == 0
    nothing = send(fleet, folder, version, "--repair")
    assert nothing.returncode == 1
    assert f"every engine that answers holds version {version} already" in nothing.stderr

    def sends_and_fails(delivery: LayoutDelivery, order: TrainerSend, cargo: Cargo) -> Sent:
        original(delivery, order, cargo)
        raise ValueError("the optimizer has run on meanwhile")

    original = LayoutDelivery.send
    monkeypatch.setattr(LayoutDelivery, "send", sends_and_fails)
    with fleet.connect() as trainer, pytest.raises(rolloutfleet.RefitFailed, match="has run on meanwhile"):
        trainer.refit(named_tensors(make_model(fleet.model, 99)), version=version + 1, timeout=60)
    for engine in fleet.engines:
        engine.await_state(WorkerState.DIRTY)
    done = send(fleet, folder, version, "--repair")
    assert done.returncode == 0, done.stderr
    assert "engines       2: " in done.stdout
    assert_generates(fleet, 23)


def test_a_checkpoint_that_was_cut_off_or_does_not_fit_changes_nothing_and_says_why(fleet: HostFleet, tmp_path: Path):
    fleet.start_sync(transport=Transport.LAYOUT)
    good = save(fleet, tmp_path / "good", 24)
    assert send(fleet, good, fleet.next_version()).returncode == 0
    shard = next(good.glob("*.safetensors"))
    whole = shard.read_bytes()
    log = tmp_path / "termination-log"
    shard.write_bytes(whole[:-100])
    cut = send(fleet, good, fleet.version + 1, f"--termination-log={log}")
    assert cut.returncode == 4
    assert "the file was cut off" in log.read_text()
    shard.write_bytes(whole)
    other = tmp_path / "other"
    config = make_model(fleet.model, 25)
    config.resize_token_embeddings(300)
    config.save_pretrained(other)
    unfit = send(fleet, other, fleet.version + 1)
    assert unfit.returncode == 4
    assert "model.embed_tokens.weight has shape [300, 128]" in unfit.stderr
    stale = send(fleet, good, fleet.version)
    assert stale.returncode == 1
    assert f"version {fleet.version} is not above the committed version {fleet.version}" in stale.stderr
    assert_generates(fleet, 24)
