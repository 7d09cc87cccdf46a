"""The Colocated transport's memory between real processes on a CPU. Runs where torch is installed; CUDA's part is tests/gpu/memory.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles.copying import CopyTable  # noqa: E402
from rolloutfleet.transport import sharedfile  # noqa: E402
from rolloutfleet.transport.memory import Exporter, Mapper, spans_in  # noqa: E402
from rolloutfleet.transport.sharedfile import SharedFile, map_file  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, so that fleets on this machine are not disturbed; mapped files behave alike."""
    monkeypatch.setattr(sharedfile, "SHARED_MEMORY", tmp_path)
    return tmp_path


def tensors(seed: int = 0) -> list["torch.Tensor"]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        torch.empty(0, 3),
        torch.rand(3, generator=generator) > 0.5,
        torch.randn(6, 11, generator=generator).t(),
        torch.tensor(float(seed)),
        torch.randn(4097, generator=generator).to(torch.float8_e4m3fn),
    ]


def equal(mapped: tuple["torch.Tensor", ...], given: list["torch.Tensor"]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
        for one, other in zip(mapped, given, strict=True)
    )


def mappings(folder: Path) -> int:
    """How often this process has mapped files of the folder."""
    return sum(f"{folder}/{sharedfile.PREFIX}" in line for line in Path("/proc/self/maps").read_text().splitlines())


def python(folder: Path, script: str, *arguments: str, **options) -> subprocess.Popen:
    opening = (
        "import sys, time, pathlib, torch; from rolloutfleet.transport import sharedfile\n"
        "from rolloutfleet.transport.memory import Exporter, Mapper\n"
        f"sharedfile.SHARED_MEMORY = pathlib.Path({str(folder)!r})\n"
    )
    return subprocess.Popen([sys.executable, "-c", opening + script, *arguments], text=True, **options)


@pytest.mark.row("B18")
def test_another_process_reads_what_the_trainer_shows(shared_memory: Path) -> None:
    trainer, given = Exporter(), tensors()
    message = trainer.export(given)
    script = (
        "mapped = Mapper(torch.device('cpu')).map(sys.argv[1].encode())\n"
        "print([tensor.view(torch.uint8).tolist() for tensor in mapped])"
    )
    reader = python(shared_memory, script, message.decode(), stdout=subprocess.PIPE)
    output, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0
    assert json.loads(output) == [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in given]


@pytest.mark.row("B20")
def test_fifty_refits_take_one_file_and_one_mapping(shared_memory: Path) -> None:
    trainer, worker = Exporter(), Mapper(CPU)
    messages = set()
    for seed in range(50):
        messages.add(message := trainer.export(given := tensors(seed)))
        assert equal(worker.map(message), given)
        assert len(list(shared_memory.iterdir())) == 1
        assert (mappings(shared_memory), worker.segments) == (2, 1)
    assert len(messages) == 1


@pytest.mark.scenario("F57")
def test_a_thousand_tensors_share_one_segment() -> None:
    given = [torch.full((3,), number) for number in range(1000)]
    trainer = Exporter()
    message = trainer.export(given)
    assert len(json.loads(message)["segments"]) == 1
    assert equal(Mapper(CPU).map(message), given)


def test_a_larger_model_gets_a_new_file_and_the_old_one_goes_once_nobody_looks_at_it(shared_memory: Path) -> None:
    trainer, worker = Exporter(), Mapper(CPU)
    small = worker.map(trainer.export([torch.ones(10)]))
    large = worker.map(trainer.export([torch.ones(100_000)]))
    assert len(list(shared_memory.iterdir())) == 1
    assert mappings(shared_memory) == 3
    assert small[0].tolist() == [1.0] * 10
    del small
    assert mappings(shared_memory) == 2
    assert large[0].sum() == 100_000


@pytest.mark.row("B21")
def test_what_a_worker_has_copied_does_not_change_with_the_trainers_next_version() -> None:
    trainer, worker, live = Exporter(), Mapper(CPU), torch.nn.Parameter(torch.zeros(8))
    (shown,) = worker.map(trainer.export([torch.full((8,), 1.0)]))
    whole = Block(0, 1, 8, 8)
    CopyTable.build([(shown, whole, live, whole)]).run()
    trainer.export([torch.full((8,), 2.0)])
    assert shown.tolist() == [2.0] * 8
    assert live.tolist() == [1.0] * 8


def test_writing_to_the_trainers_memory_ends_the_writer_and_changes_nothing(shared_memory: Path) -> None:
    trainer = Exporter()
    message = trainer.export([torch.ones(4)])
    script = "Mapper(torch.device('cpu')).map(sys.argv[1].encode())[0].zero_()"
    writer = python(shared_memory, script, message.decode(), stderr=subprocess.DEVNULL)
    assert writer.wait(60) == -signal.SIGSEGV
    assert Mapper(CPU).map(message)[0].tolist() == [1.0] * 4


@pytest.mark.row("B24")
def test_closing_leaves_no_file_and_no_mapping_while_tensors_over_it_stay_readable(shared_memory: Path) -> None:
    trainer, worker = Exporter(), Mapper(CPU)
    mapped = worker.map(trainer.export([torch.ones(4)]))
    trainer.close()
    worker.close()
    assert list(shared_memory.iterdir()) == []
    assert mapped[0].tolist() == [1.0] * 4
    del mapped
    assert mappings(shared_memory) == 0


@pytest.mark.parametrize("cleaner", ["worker", "next trainer"])
def test_a_killed_trainers_file_goes_when_a_worker_lets_go_or_another_trainer_comes(
    shared_memory: Path, cleaner: str
) -> None:
    script = "e = Exporter(); print(e.export([torch.ones(4)]).decode(), flush=True); time.sleep(600)"
    trainer = python(shared_memory, script, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    with trainer.stdout:
        worker = Mapper(CPU)
        (shown,) = worker.map(trainer.stdout.readline().encode())
        sharedfile.remove_orphans()
        (file,) = shared_memory.iterdir()
        trainer.kill()
        trainer.wait(60)
    assert file.exists()
    if cleaner == "worker":
        worker.close()
    else:
        other = Exporter()
        other.export([torch.zeros(4)])
    assert not file.exists()
    assert shown.tolist() == [1.0] * 4


def test_a_trainer_that_ends_without_closing_leaves_no_file(shared_memory: Path) -> None:
    assert python(shared_memory, "e = Exporter(); e.export([torch.ones(4)])").wait(60) == 0
    assert list(shared_memory.iterdir()) == []


def test_a_forked_child_that_ends_leaves_its_parents_file(shared_memory: Path) -> None:
    script = "import os; e = Exporter(); m = e.export([torch.ones(4)]); child = os.fork()\nif child == 0: sys.exit()\n"
    script += "os.waitpid(child, 0); print(Mapper(torch.device('cpu')).map(m)[0].tolist())"
    trainer = python(shared_memory, script, stdout=subprocess.PIPE)
    output, _ = trainer.communicate(timeout=60)
    assert (trainer.returncode, output) == (0, "[1.0, 1.0, 1.0, 1.0]\n")


def test_a_file_whose_trainer_lives_survives_another_trainer(shared_memory: Path) -> None:
    first, second = Exporter(), Exporter()
    message = first.export([torch.ones(4)])
    second.export([torch.zeros(4)])
    assert len(list(shared_memory.iterdir())) == 2
    assert Mapper(CPU).map(message)[0].tolist() == [1.0] * 4


def test_too_little_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharedfile, "SHARED_MEMORY", Path("/dev/shm"))
    room = os.statvfs("/dev/shm")
    wanted = (room.f_blocks + 1) * room.f_frsize
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(
        OSError, match=rf"/dev/shm has \d+ bytes left and the tensors take {wanted}: give the trainer's pod"
    ):
        SharedFile(wanted)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_memory_that_its_owner_has_given_up_cannot_be_mapped() -> None:
    trainer = Exporter()
    message = trainer.export([torch.ones(4)])
    trainer.close()
    with pytest.raises(FileNotFoundError):
        Mapper(CPU).map(message)


@pytest.mark.parametrize("name", ["../passwd", "rolloutfleet-", "rolloutfleet-" + "0" * 31 + "/", "sem.x"])
def test_only_files_of_trainers_are_mapped(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of shared memory"):
        map_file(name, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 9}, "format 9, not 1: releases differ"),
        ({"segments": [["cpu", "rolloutfleet-x"]]}, "cannot be read"),
        ({"tensors": [[0, 0, 4, "float33"]]}, "'float33' is no type of a tensor's elements"),
        ({"tensors": [[0, 0, 4, "nn"]]}, "'nn' is no type of a tensor's elements"),
        ({"tensors": [[1, 0, 4, "float32"]]}, "tensor 0 .* lies in none of 1 segments"),
        ({"tensors": [[0, -4, 4, "float32"]]}, "tensor 0 .* lies in none of 1 segments"),
        ({"tensors": [[0, 60, 4, "float32"]]}, "tensor 0 .* leaves Segment"),
    ],
)
def test_a_message_that_names_other_memory_is_refused(change: dict, text: str) -> None:
    message = json.loads(Exporter().export([torch.ones(4)])) | change
    with pytest.raises(ValueError, match=text):
        Mapper(CPU).map(json.dumps(message).encode())


@pytest.mark.parametrize("message", [b"", b"[]", b"{}", b"\xff"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Mapper(CPU).map(message)


def test_a_gpu_that_this_process_does_not_see_is_named() -> None:
    message = {"format": 1, "segments": [["GPU-1234", "aGFuZGxl", 64]], "tensors": []}
    with pytest.raises(ValueError, match="lie on GPU-1234, which this process does not see"):
        Mapper(CPU).map(json.dumps(message).encode())


def test_no_tensors_are_no_memory(shared_memory: Path) -> None:
    assert Mapper(CPU).map(Exporter().export([])) == ()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.scenario("F57")
def test_each_allocation_is_asked_for_once_however_many_tensors_it_holds() -> None:
    asked = []

    def allocation_of(address: int) -> tuple[int, int]:
        asked.append(address)
        return address // 1000 * 1000, 1000

    places = [(1500, 400), (3000, 1000), (1000, 500), (0, 0), (1900, 100), (3999, 1)]
    allocations, spans = spans_in(places, allocation_of)
    assert allocations == [(1000, 1000), (3000, 1000)]
    assert spans == [(0, 500), (1, 0), (0, 0), (0, 0), (0, 900), (1, 999)]
    assert asked == [1000, 3000]
    with pytest.raises(ValueError, match="leave their allocation of 1000 bytes"):
        spans_in([(1500, 501)], allocation_of)
