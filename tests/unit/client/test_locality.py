"""The words that tell whether two processes share memory."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolloutfleet import locality as locality_module
from rolloutfleet.contract.worker import Locality
from rolloutfleet.locality import device_name, locality


def test_two_processes_side_by_side_have_equal_words() -> None:
    script = "from rolloutfleet.locality import locality; print(locality().model_dump_json())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == locality().model_dump_json()
    assert locality().host
    assert locality().memory


@pytest.mark.parametrize(
    ("name", "differs"),
    [("_BOOT_ID", {"host", "memory"}), ("_IPC_NAMESPACE", {"host"}), ("SHARED_MEMORY", {"memory"})],
)
def test_another_machine_another_namespace_and_another_mount_have_other_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, differs: set[str]
) -> None:
    here = locality()
    other = tmp_path / "other"
    other.write_text("another boot\n")
    monkeypatch.setattr(locality_module, name, Path("/proc") if name == "SHARED_MEMORY" else other)
    there = locality()
    assert {word for word in ("host", "memory") if getattr(here, word) != getattr(there, word)} == differs


@pytest.mark.parametrize(
    ("name", "empty"),
    [("_BOOT_ID", {"host", "memory"}), ("_IPC_NAMESPACE", {"host"}), ("SHARED_MEMORY", {"memory"})],
)
def test_where_the_system_does_not_tell_the_words_are_empty(
    monkeypatch: pytest.MonkeyPatch, name: str, empty: set[str]
) -> None:
    monkeypatch.setattr(locality_module, name, Path("/nowhere/at/all"))
    assert {word for word in ("host", "memory") if not getattr(locality(), word)} == empty


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare makes the namespace")
def test_two_containers_that_mount_one_file_system_share_memory_in_spite_of_their_namespaces() -> None:
    script = "from rolloutfleet.locality import locality; print(locality().model_dump_json())"
    command = ["unshare", "--ipc", sys.executable, "-c", script]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    if other.returncode:
        pytest.skip(f"this machine makes no IPC namespace: {other.stderr.strip()}")
    there = Locality.model_validate_json(other.stdout)
    assert there.host != locality().host
    assert there.memory == locality().memory


def test_a_cpu_is_a_cpu_and_other_devices_are_refused() -> None:
    assert device_name(SimpleNamespace(type="cpu")) == "cpu"
    with pytest.raises(ValueError, match="CUDA devices and CPUs only"):
        device_name(SimpleNamespace(type="mps"))


def test_asking_loads_no_torch() -> None:
    script = "import sys; from rolloutfleet.locality import locality; locality(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
