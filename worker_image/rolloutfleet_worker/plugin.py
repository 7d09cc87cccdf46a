"""Entry point of the group ``vllm.general_plugins``: makes our transfer engine and our swap known in every vLLM process."""

from rolloutfleet_worker import core_swap

TRANSFER_BACKEND = "rolloutfleet"
ENV_RANK_SOCKET = "ROLLOUTFLEET_RANK_SOCKET"
"""Path of the Unix socket on which the launcher awaits its ranks."""


def register() -> None:
    """Register the transfer engine and the engine core's swap; vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "rolloutfleet_worker.rank.engine", "FleetTransferEngine"
        )
    core_swap.install()
