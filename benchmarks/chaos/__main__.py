"""Faults in real parties, run after run, judged from outside.

By hand: ``make bench-chaos RUNS=200 VLLM_RUNS=12 SEED=1``, or ``make bench-chaos-cluster RUNS=30``; one run again:
``python3 -m benchmarks.chaos --seed 1 --run 17 -v``.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.faults import parse_card
from benchmarks.chaos.network import enter, refused
from rolloutfleet.contract.policy import PauseMode, Staging


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.chaos", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=200, help="runs with engines that hold weights (default: %(default)s)"
    )
    parser.add_argument("--vllm-runs", type=int, default=0, help="runs with real vLLM on CPUs (default: %(default)s)")
    parser.add_argument(
        "--cluster-runs", type=int, default=0, help="instead, runs in the local cluster, which is brought up for it"
    )
    parser.add_argument("--seed", type=int, default=1, help="deals the faults (default: %(default)s)")
    parser.add_argument("--run", type=int, help="this run alone, by its number")
    parser.add_argument("--vllm-run", type=int, help="this run with real vLLM alone, by its number")
    parser.add_argument(
        "--fault",
        type=parse_card,
        action="append",
        default=[],
        metavar="KIND,WHO,PHASE",
        help="this fault; once or often",
    )
    parser.add_argument("--staging", type=Staging, choices=list(Staging), help="how engines refit, instead of in turn")
    parser.add_argument(
        "--pause", type=PauseMode, choices=list(PauseMode), default=PauseMode.KEEP, help="with --staging"
    )
    parser.add_argument("--engines", type=int, default=3, help="engines of a fleet (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for chaos.json and chaos.svg (default: nowhere)")
    parser.add_argument(
        "--keep", type=Path, help="folder in which the logs of every fleet stay (default: of bad runs alone)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say each run's errors and phases")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no run ended badly, 1 when one did, 77 where namespaces are not permitted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if not options.cluster_runs and (why := refused()):
        print(f"chaos: skipped, {why}; run it as root of the machine or of a privileged container", file=sys.stderr)
        return 77
    if not options.cluster_runs:
        enter("benchmarks.chaos", given)
    # The first process of a namespace hears of no signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.keep or Path(tempfile.mkdtemp(prefix="rolloutfleet-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(options.seed, options.engines, folder, verbose=options.verbose, output=options.output)
    way = (options.staging, options.pause) if options.staging is not None else None
    try:
        if options.cluster_runs:
            campaign.run_cluster(range(options.cluster_runs), options.fault)
        elif options.vllm_run is not None:
            campaign.run_vllm([options.vllm_run])
        elif options.run is not None:
            campaign.run_held([options.run], options.fault, way)
        else:
            campaign.run_held(range(len(options.fault) or options.runs), options.fault, way)
            campaign.run_vllm(range(options.vllm_runs))
    finally:
        campaign.say_summary()
    bad = campaign.bad_end_states
    if not bad and options.keep is None:
        shutil.rmtree(folder)
    elif bad:
        print(f"chaos: logs are kept in {folder}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
