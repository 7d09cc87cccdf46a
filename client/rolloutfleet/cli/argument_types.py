"""What several commands take as an argument, and what is said of a value that is none."""

import argparse
import re

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def namespace(text: str) -> str:
    """The name of a namespace; argparse tells what is wrong with another text."""
    if len(text) > 63 or not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no namespace; its name has lower-case letters, digits and '-', and at most 63 of them"
        )
    return text
