"""In which order vLLM's own sleep goes about, on which ours relies; that weights leave and come back needs a GPU (docs/proof/gpu.md)."""

from unittest import mock

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore


class Core(EngineCore):
    """vLLM's core without a model; writes down what it asks of scheduler and executor."""

    def __init__(self) -> None:
        self.order = mock.Mock()
        self.order.scheduler.reset_prefix_cache.return_value = True
        self.scheduler = self.order.scheduler
        self.model_executor = self.order.executor
        self.mm_receiver_cache = self.order.multimodal

    def __del__(self) -> None:
        """Nothing was started."""


@pytest.mark.row("A-U5")
@pytest.mark.parametrize("level", [1, 2])
def test_requests_end_and_caches_are_empty_before_the_weights_leave(level: int):
    core = Core()
    core.scheduler.has_requests.return_value = False
    core.sleep(level, "abort")
    names = [name for name, _, _ in core.order.mock_calls]
    steps = ["scheduler.finish_requests", "scheduler.reset_prefix_cache", "multimodal.clear_cache", "executor.sleep"]
    assert [name for name in names if name in steps] == steps
    assert names[-1] == "executor.sleep"


@pytest.mark.row("A-U5")
async def test_the_servers_own_multimodal_cache_is_emptied_before_the_engine_is_asked():
    server = mock.AsyncMock()
    server.logger_manager = None
    await AsyncLLM.sleep(server, 1, "abort")
    assert [name for name, _, _ in server.mock_calls] == ["renderer.clear_mm_cache_async", "engine_core.sleep_async"]
