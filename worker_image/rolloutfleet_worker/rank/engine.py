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
from rolloutfleet_worker.rank.place import find_place, rank_in_engine
from rolloutfleet_worker.rank.receiver import Receiver


class NativeRouteError(RuntimeError):
    """vLLM's own weight-transfer routes were called on an engine that the fleet's sync job refits."""


@dataclass
class FleetInitInfo(WeightTransferInitInfo):
    """Never used: groups are formed by the sync job."""


@dataclass
class FleetUpdateInfo(WeightTransferUpdateInfo):
    """A swap: which staged version is to be copied into the live weights. Weights themselves are announced by the sync job."""

    version: int


class FleetTransferEngine(WeightTransferEngine[FleetInitInfo, FleetUpdateInfo]):
    """Starts the control thread of this rank, and swaps in what that has staged, on vLLM's own thread between two steps of the model.

    vLLM's routes carry no weights here: an update names the version that the sync job has had staged, anything else is refused, since
    two drivers would mix versions.
    """

    init_info_cls = FleetInitInfo
    update_info_cls = FleetUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        rank = rank_in_engine(parallel, find_place(parallel))
        self._receiver = Receiver(model, vllm_config, device, rank)
        self._link = RankLink(os.environ[ENV_RANK_SOCKET], self._receiver)
        self._link.start()

    def init_transfer_engine(self, _: FleetInitInfo) -> None:
        raise NativeRouteError("this engine belongs to a fleet: refit it through the fleet's sync job")

    def start_weight_update(self) -> None:
        """Nothing to begin: the version lies beside the live weights."""

    def finish_weight_update(self) -> None:
        """Nothing to end: the version was whole before it was copied."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Copy the staged version; vLLM's own method would synchronize an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FleetUpdateInfo) -> None:
        self._receiver.swap(update_info.version)

    def shutdown(self) -> None:
        self._link.stop()
