"""Copies and sums in the host's memory: what they give, and that no thread works beside those that were asked for."""

import struct
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.tiles import hostsums  # noqa: E402
from rolloutfleet.tiles.hostsums import HostSums  # noqa: E402
from rolloutfleet.tiles.hostwork import ENV_HOST_THREADS, copy_in_host, host_threads, share_out  # noqa: E402

FORMATS = {torch.int8: "b", torch.int16: "h", torch.int32: "i"}


def reference(words: "torch.Tensor", first: int, step: int) -> list[int]:
    """Plain integers, wrapped at 64 bits."""
    plain = placed = 0
    for number, row in enumerate(words.tolist()):
        plain += sum(row)
        placed += sum(word * (first + number * step + at + 1) for at, word in enumerate(row))
    return [(total + 2**63) % 2**64 - 2**63 for total in (plain, placed)]


def random_words(rows: int, run: int, gap: int, dtype: "torch.dtype") -> "torch.Tensor":
    octets = torch.randint(0, 256, (rows * (run + gap) * dtype.itemsize,), dtype=torch.uint8)
    return octets.view(dtype).view(rows, run + gap)[:, :run]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("rows", "run"),
    [(1, 1), (1, 511), (1, 512), (1, 513), (1, 70_001), (3, 40_000), (50_000, 1), (40_000, 3), (7, 5_000), (300, 129)],
)
@pytest.mark.parametrize("gap", [0, 5])
def test_sums_of_every_shape_are_those_of_plain_integers(rows: int, run: int, gap: int, dtype: "torch.dtype") -> None:
    words = random_words(rows, run, gap, dtype)
    sums = torch.tensor([7, -9])
    HostSums().add(words, 1_000_000_007, run + 11, sums)
    plain, placed = reference(words, 1_000_000_007, run + 11)
    assert sums.tolist() == [plain + 7, placed - 9]


def test_sums_wrap_at_64_bits() -> None:
    words = torch.full((1, 100_000), -(2**31), dtype=torch.int32)
    sums = torch.zeros(2, dtype=torch.int64)
    HostSums().add(words, 2**40, 0, sums)
    assert sums.tolist() == reference(words, 2**40, 0)
    assert struct.pack("<2q", *sums.tolist())


def test_no_operator_is_given_so_much_that_torch_would_start_threads_of_its_own() -> None:
    assert hostsums._BLOCK < hostsums._SERIAL


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_is_worked_on_once_by_no_more_threads_than_asked_for(threads: int) -> None:
    workers: set[int] = set()
    done: list[int] = []

    def work(tasks: "list[int]") -> None:
        workers.add(threading.get_ident())
        done.extend(tasks)

    share_out(range(23), work, threads)
    assert sorted(done) == list(range(23))
    assert len(workers) <= threads


def test_a_failure_in_one_thread_is_raised_when_all_have_ended() -> None:
    done: list[int] = []

    def work(tasks: "list[int]") -> None:
        if 1 in tasks:
            raise ValueError("no word of four bytes")
        done.extend(tasks)

    with pytest.raises(ValueError, match="no word of four bytes"):
        share_out(range(4), work, 2)
    assert done == [0, 2]


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ENV_HOST_THREADS, value)
    with pytest.raises(ValueError, match=rf"{ENV_HOST_THREADS} is '{value}'; it must be a whole number"):
        host_threads()


def test_the_environment_names_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_HOST_THREADS, "6")
    assert host_threads() == 6
    monkeypatch.delenv(ENV_HOST_THREADS)
    assert host_threads() in {1, 2}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.arange(100_000.0), torch.zeros(100_000)),
        (torch.arange(100_000.0), torch.zeros(100_000, dtype=torch.bfloat16)),
        (torch.arange(90_000.0).view(3, 30_000).t(), torch.zeros(30_000, 3)),
        (torch.arange(90_000.0).view(3, 30_000)[:, 1:], torch.zeros(3, 29_999, dtype=torch.float16)),
        (torch.arange(99_999.0).view(1, 99_999)[:, ::3], torch.zeros(1, 33_333)),
        (torch.tensor(1.5), torch.tensor(0.0)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ],
    ids=["run", "cast", "transposed", "columns cast", "one long row", "scalar", "nothing"],
)
def test_copies_give_what_torch_gives(source: "torch.Tensor", target: "torch.Tensor", threads: int) -> None:
    target = target.clone()
    copy_in_host([target, ones := torch.zeros(3)], [source, torch.ones(3)], threads)
    assert torch.equal(target, torch.empty_like(target).copy_(source))
    assert torch.equal(ones, torch.ones(3))
