"""A tensor over memory that it does not own."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.tiles.aliases import alias_of  # noqa: E402

DTYPES = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_reads_and_writes_the_same_memory_and_does_not_keep_it(dtype: "torch.dtype") -> None:
    tensor = torch.zeros(3, 7, dtype=dtype)[1:]
    alias = alias_of(tensor)
    assert (alias.data_ptr(), alias.shape, alias.dtype) == (tensor.data_ptr(), (14,), dtype)
    tensor[0, 2] = 1
    alias[3] = 1
    assert alias.view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    gone = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()
    assert gone() is None


def test_one_of_nothing_is_nothing() -> None:
    assert alias_of(torch.zeros(0, 4, dtype=torch.bfloat16)).shape == (0,)
