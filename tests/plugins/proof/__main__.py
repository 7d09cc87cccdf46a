"""``python -m proof``: what the tiers of the last ``make test`` have proved together."""

import argparse
from pathlib import Path

from proof.ledger import Catalogue, Outcomes, list_unproved, summarize_proof


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    parser.add_argument("--rows", action="store_true", help="list rows and scenarios without a passing test")
    arguments = parser.parse_args()
    outcomes = Outcomes()
    tiers = sorted((arguments.root / "build" / "proof").glob("*.json"))
    for path in tiers:
        outcomes.merge(Outcomes.read(path))
    catalogue = Catalogue.load(arguments.root / "docs")
    if arguments.rows:
        print("\n".join(list_unproved(catalogue, outcomes)))
    print(f"tiers: {', '.join(path.stem for path in tiers) or 'none has run yet'}")
    print(summarize_proof(catalogue, outcomes))


if __name__ == "__main__":
    main()
