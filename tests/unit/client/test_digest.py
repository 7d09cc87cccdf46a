"""The digest against a reference in plain Python, and what it must tell apart. Runs where torch is installed."""

import hashlib
import struct

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.digest import StreamDigest, fold  # noqa: E402
from rolloutfleet.tiles import hostsums  # noqa: E402
from rolloutfleet.tiles.hostwork import ENV_HOST_THREADS  # noqa: E402


def reference(tensors: list[tuple[str, "torch.Tensor"]]) -> str:
    lines = hashlib.sha256()
    for name, tensor in tensors:
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        data += b"\0" * (-len(data) % 4)
        words = struct.unpack(f"<{len(data) // 4}i", data)
        sums = [wrap(sum(words)), wrap(sum(word * place for place, word in enumerate(words, 1)))]
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.update(f"{name} {dtype} {list(tensor.shape)} {sums[0]} {sums[1]}\n".encode())
    return lines.hexdigest()


def wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def digest_of(tensors: list[tuple[str, "torch.Tensor"]]) -> str:
    digest = StreamDigest()
    for name, tensor in tensors:
        digest.update(name, tensor)
    return digest.hexdigest()


def sample(seed: int = 0) -> list[tuple[str, "torch.Tensor"]]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (777,), generator=generator, dtype=torch.int64).to(torch.int32)
    return [
        ("bfloat16.odd", torch.randn(5, 7, generator=generator).to(torch.bfloat16)),
        ("float32", torch.randn(33, 3, generator=generator)),
        ("transposed", torch.randn(6, 11, generator=generator).t()),
        ("float8", torch.randn(13, generator=generator).to(torch.float8_e4m3fn)),
        ("bool", torch.rand(10, generator=generator) > 0.5),
        ("scalar", torch.tensor(1.5)),
        ("empty", torch.empty(0, 4)),
        ("int32.extremes", bits),
        ("view.unaligned", torch.arange(9, dtype=torch.int16)[1:7]),
    ]


@pytest.mark.parametrize("piece", [1, 2, 5, 64, 1 << 20])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_digest_is_the_reference_however_threads_share_the_words(
    monkeypatch: pytest.MonkeyPatch, piece: int, threads: str
) -> None:
    monkeypatch.setattr(hostsums, "_PIECE", piece)
    monkeypatch.setenv(ENV_HOST_THREADS, threads)
    assert digest_of(sample()) == reference(sample())


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 4 << 20])
def test_what_a_gpu_folds_is_what_the_host_sums_whatever_the_chunk(chunk: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (777,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    assert fold(words, torch.arange(1, chunk + 1)).tolist() == hostsums.sums_of_run(words).tolist()


def test_sums_wrap_as_the_reference_says() -> None:
    largest = torch.full((300_000,), 2**31 - 1, dtype=torch.int32)
    assert digest_of([("w", largest)]) == reference([("w", largest)])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors[::-1],
        lambda tensors: tensors[:-1],
        lambda tensors: [("renamed", tensors[0][1]), *tensors[1:]],
        lambda tensors: [(tensors[0][0], tensors[0][1].reshape(7, 5)), *tensors[1:]],
        lambda tensors: [(tensors[1][0], tensors[1][1].flip(0)), *tensors[1:]],
        lambda tensors: [(tensors[0][0], tensors[0][1].view(torch.float16)), *tensors[1:]],
    ],
    ids=["order", "lost tensor", "name", "shape", "swapped elements", "dtype"],
)
def test_a_change_is_seen(change) -> None:
    assert digest_of(change(sample())) != digest_of(sample())


def test_asking_does_not_end_the_stream() -> None:
    digest = StreamDigest()
    first, *others = sample()
    digest.update(*first)
    digest.hexdigest()
    for name, tensor in others:
        digest.update(name, tensor)
    assert digest.hexdigest() == reference(sample())
    assert digest.tensors == len(sample())
    assert digest.nbytes == sum(tensor.nbytes for _, tensor in sample())
