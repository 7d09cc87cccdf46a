"""After each refit an engine holds, parameter by parameter, what an engine freshly started from a checkpoint of those weights holds.

For a dense model, one with a tied head and a mixture of experts, all of real width and few layers: three versions go to a fleet's engine
(the first through vLLM's loader, the others in place), the last two over each transport. Two stock engines that were started from
checkpoints of these versions are the oracle: vLLM's own sha256 of every parameter, and greedy tokens. By hand::

    PYTHONPATH=client:operator:worker_image:. python3 tests/gpu/correctness.py
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from benchmarks import rivals
from benchmarks.floors import release
from benchmarks.processes import Engine, Fleet
from benchmarks.record import TINY, Record, say
from benchmarks.refits import measured_refit, next_version
from benchmarks.shapes import Shape, dense, experts, fill, tied
from benchmarks.starting import engine_arguments, parser, run_folder

from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport

NAME = "correctness"
SHAPES = {"dense": lambda: dense(2), "tied": lambda: tied(4), "moe": lambda: experts(2)}
SEEDS = (2, 3)
PROMPTS = ([40, 41, 42, 43], list(range(60, 110)), [7] * 20)
TOKENS = 16
WAYS = (
    (Transport.COLOCATED, Staging.NEVER),
    (Transport.COLOCATED, Staging.AUTO),
    # NCCL takes each GPU once, and here trainer and engine share one.
    *([(Transport.LAYOUT, Staging.AUTO)] if TINY else []),
)


class Comparison:
    """One shape: an engine of a fleet, and a stock engine for each version."""

    def __init__(self, record: Record, shape: Shape, folder: Path, stack: ExitStack) -> None:
        self.record = record
        self.shape = shape
        self.weights = shape.weights(1)
        cache = 1 << 30
        arguments = engine_arguments(shape, kv_cache_bytes=cache)
        self.engine = Engine(folder, shape.write(folder / "model"), arguments, more={"NCCL_HOSTID": "engine"})
        stack.callback(self.engine.stop)
        self.fleet = Fleet(folder, [self.engine])
        stack.callback(self.fleet.stop_sync)
        self.fresh: dict[int, rivals.StockEngine] = {}
        loading = [argument for argument in arguments if not argument.startswith("--load-format")]
        for seed in SEEDS:
            fill(self.weights, seed)
            model = shape.write(folder / f"checkpoint-{seed}", self.weights)
            self.fresh[seed] = rivals.StockEngine(folder, model, loading, backend=None, name=f"fresh-{seed}")
            stack.callback(self.fresh[seed].stop)

    def run(self) -> None:
        expected = {}
        for seed, engine in self.fresh.items():
            engine.await_started()
            expected[seed] = engine.checksums(), _tokens(engine.url)
            engine.stop()
        self.engine.await_started()
        for transport, staging in WAYS:
            with self.record.part(f"{self.shape.name}: {transport}, staging {staging}"):
                self._refit_all(transport, staging, expected)

    def _refit_all(
        self,
        transport: Transport,
        staging: Staging,
        expected: Mapping[int, tuple[Mapping[str, str], list[list[int]]]],
    ) -> None:
        self.fleet.start(RefitPolicy(transport=transport, staging=staging))
        with self.fleet.connect() as trainer:
            for seed in (1, *SEEDS):
                fill(self.weights, seed)
                refit = measured_refit(trainer, self.weights, next_version(trainer))
                if seed not in expected:
                    continue
                checksums, tokens = expected[seed]
                held: Mapping[str, str] = self.engine.call("benchmark_checksums")
                wrong = sorted(name for name in checksums.keys() | held.keys() if checksums.get(name) != held.get(name))
                said = _tokens(self.engine.url)
                self.record.add(
                    **refit.as_run(shape=self.shape.name, seed=seed),
                    parameters=len(checksums),
                    wrong_parameters=wrong,
                    tokens_equal=said == tokens,
                )
                if wrong or said != tokens:
                    raise AssertionError(
                        f"seed {seed}: {len(wrong)} of {len(checksums)} parameters differ from a fresh load, such as {wrong[:5]};"
                        f" tokens {said} instead of {tokens}"
                    )
                say(f"{self.shape.name}, seed {seed}: {len(checksums)} parameters and the tokens equal a fresh load")


def _tokens(url: str) -> list[list[int]]:
    return [rivals.generate(url, prompt, TOKENS) for prompt in PROMPTS]


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--shapes", default=",".join(SHAPES))
    chosen = options.parse_args()
    torch.manual_seed(0)
    record = Record(NAME, chosen.output)
    with run_folder() as folder, ExitStack() as stack:
        comparisons = {}
        for name in chosen.shapes.split(","):
            (folder / name).mkdir()
            comparisons[name] = Comparison(record, SHAPES[name](), folder / name, stack)
        for name, comparison in comparisons.items():
            with record.part(name):
                comparison.run()
            if any(part.startswith(name) for part in record.failures):
                say(comparison.fleet.logs())
            release()
    compared = [run for run in record.runs if "wrong_parameters" in run]
    record.figure("refits_compared", len(compared))
    record.figure("parameters_wrong", sum(len(run["wrong_parameters"]) for run in compared))
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
