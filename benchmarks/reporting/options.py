"""Options that several benchmarks have."""

from __future__ import annotations

import argparse


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``, the type of the model's numbers."""
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="float32 is faster on processors without bfloat16, and doubles the bytes",
    )  # fmt: skip
