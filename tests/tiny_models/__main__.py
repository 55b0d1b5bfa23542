"""Writes one tiny checkpoint, or lists the families there are."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.tiny_models import FAMILIES, SHAPES, TEXT_FAMILIES, make


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make_tiny_model",
        description="Write a random checkpoint of a family of models, to be loaded offline.",
    )
    parser.add_argument("family", nargs="?", choices=FAMILIES + TEXT_FAMILIES)
    parser.add_argument("out", nargs="?", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="mid: 36 M parameters, qwen2_5_vl only"
    )
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize the weights")
    parser.add_argument("--list", action="store_true", help="print the families and end")
    wanted = parser.parse_args()
    if wanted.list:
        print(*FAMILIES, *TEXT_FAMILIES, sep="\n")
        return
    if wanted.family is None or wanted.out is None:
        parser.error("a family and a folder are needed (or --list)")
    try:
        print(make(wanted.family, wanted.out, wanted.seed, wanted.shape, wanted.bits))
    except KeyError:
        parser.error(f"{wanted.family} has no shape {wanted.shape}")


if __name__ == "__main__":
    main()
