"""A trainer in a process of its own, on the public client: it refits when told to on stdin, and tells on stdout how that went.

A line in is ``{"refit": VERSION, "seconds": TIMEOUT}``, or ``{"fresh": true}``: give the session back, so that the next refit forms a new
group. A line out is an event with its time by the monotonic clock.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

import rolloutfleet
from benchmarks.chaos.weights import named_weights
from rolloutfleet.contract.trainer import RefitView


def _say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "seconds": time.monotonic(), **fields}), flush=True)


class Trainer:
    """One connection at a time, made when it is needed."""

    def __init__(self, address: str, token: str, model: str) -> None:
        self._address, self._token, self._model = address, token, model
        self._fleet: rolloutfleet.Fleet | None = None

    def fresh(self) -> None:
        """Leave the group and give the session back."""
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    def refit(self, version: int, seconds: float) -> None:
        """One call of the client, told as ``done`` or ``failed``."""
        try:
            if self._fleet is None:
                self._fleet = rolloutfleet.connect(self._address, token=self._token)
            result = self._fleet.refit(self._weights(version), version, timeout=seconds, progress=self._progress)
        except rolloutfleet.RolloutFleetError as error:
            _say(
                "failed",
                version=version,
                error=type(error).__name__,
                message=str(error)[:2000],
                phase=error.phase,
                committed=bool(getattr(error, "committed", False)),
            )
        else:
            _say("done", version=version, result=result.model_dump(mode="json"))

    def _progress(self, view: RefitView) -> None:
        _say("phase", refit=view.refit, phase=view.phase, epoch=view.epoch, attempt=getattr(view, "attempt", 1))

    def _weights(self, version: int) -> dict[str, torch.Tensor]:
        if not self._model:
            return {name: torch.from_numpy(array) for name, array in named_weights(version)}
        from benchmarks.chaos.tiny import tiny_weights

        return tiny_weights(version)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--model", default="", help="folder of a real model; by default weights tell their version")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.address, options.token, options.model)
    _say("up")
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("fresh"):
            trainer.fresh()
        if "refit" in order:
            trainer.refit(order["refit"], order["seconds"])


if __name__ == "__main__":
    main()
