"""The transfer engine that vLLM builds in each rank's process, which is how our control thread gets hold of the model."""

import os
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rolloutfleet_worker.plugin import ENV_RANK_SOCKET
from rolloutfleet_worker.rank.link import RankLink
from rolloutfleet_worker.rank.receiver import Receiver


class NativeRouteError(RuntimeError):
    """vLLM's own weight-transfer routes were called on an engine that the fleet's sync job refits."""


@dataclass
class FleetInitInfo(WeightTransferInitInfo):
    """Never used: groups are formed by the sync job."""


@dataclass
class FleetUpdateInfo(WeightTransferUpdateInfo):
    """Never used: weights are announced by the sync job."""


class FleetTransferEngine(WeightTransferEngine[FleetInitInfo, FleetUpdateInfo]):
    """Starts the control thread of this rank; vLLM's own refit routes are refused, since two drivers would mix versions."""

    init_info_cls = FleetInitInfo
    update_info_cls = FleetUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._link = RankLink(os.environ[ENV_RANK_SOCKET], Receiver(model, vllm_config, device, rank))
        self._link.start()

    def init_transfer_engine(self, _: FleetInitInfo) -> None:
        raise _refusal()

    def start_weight_update(self) -> None:
        raise _refusal()

    def finish_weight_update(self) -> None:
        raise _refusal()

    def receive_weights(self, _: FleetUpdateInfo) -> None:
        raise _refusal()

    def shutdown(self) -> None:
        self._link.stop()


def _refusal() -> NativeRouteError:
    return NativeRouteError("this engine belongs to a fleet: refit it through the fleet's sync job")
