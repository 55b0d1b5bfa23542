"""Encodes screenshots of a drawn desktop at once and tile by tile, in turns, and compares.

Two families whose towers have random weights: SmolVLM's and InternVL's geometry, with a tower of
3 layers and 128 numbers. Prints JSON: processor seconds (of all threads) of a first picture and
of each later one, the ratio also of seconds on the clock, and how many of their tiles were encoded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.harness import ask, encode_works, load_model, new_preparer
from tests.support.screenshots import screenshots
from tests.tiny_models import idefics, internvl
from tests.tiny_models.checkpoint import Checkpoint, Family, write
from tests.tiny_models.vocabulary import Vocabulary
from vlm_server.cache.lru import LruCache
from vlm_server.interfaces import EncodeWork
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.loaded import LoadedModel

_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_CACHE_BYTES = 256 << 20


class Seconds(NamedTuple):
    processor: float
    clock: float


Pair = tuple[Seconds, Seconds]


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_tiles", description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, family in (("smolvlm", _smolvlm()), ("internvl_chat", _internvl())):
            loaded = load_model(write(family, Path(folder) / name, seed=0))
            print(json.dumps({"family": name, **_measure(loaded, wanted.turns, wanted.seeds)}))


def _measure(loaded: LoadedModel, turns: int, seeds: int) -> dict[str, Any]:
    preparer, first, later, shares, num_tiles = new_preparer(loaded), [], [], [], 0
    for seed in range(seeds):
        tiles: LruCache[Any] = LruCache("tile", _CACHE_BYTES)
        encoders = [ImageEncoder(loaded), ImageEncoder(loaded, tiles)]
        for turn, shown in enumerate(screenshots(seed, turns)):
            (work,) = encode_works(preparer, ask("a", shown, "what changed?"))
            if turn == seed == 0:
                for encoder in (ImageEncoder(loaded), ImageEncoder(loaded, LruCache("tile", 0))):
                    encoder.encode(work)  # a process's first is slower
            before = tiles.stats()
            seconds = _in_turns(encoders, work, is_swapped=bool(turn % 2))
            after = tiles.stats()
            encoded = after.misses - before.misses
            if turn == 0:
                num_tiles = encoded + after.hits
                first.append(seconds)
            else:
                later.append(seconds)
                shares.append(encoded)
    return {
        "tiles": num_tiles,
        "first": _compared(first),
        "later": _compared(later),
        "tiles encoded later": _spread(shares),
    }


def _in_turns(encoders: list[ImageEncoder], work: EncodeWork, *, is_swapped: bool) -> Pair:
    """At once, and tile by tile."""
    order = [1, 0] if is_swapped else [0, 1]
    taken = {index: _seconds(encoders[index], work) for index in order}
    return taken[0], taken[1]


def _seconds(encoder: ImageEncoder, work: EncodeWork) -> Seconds:
    begun = time.process_time(), time.perf_counter()
    encoder.encode(work)
    return Seconds(time.process_time() - begun[0], time.perf_counter() - begun[1])


def _compared(pairs: list[Pair]) -> dict[str, Any]:
    return {
        "at once": _spread([whole.processor for whole, _ in pairs]),
        "by tiles": _spread([tiles.processor for _, tiles in pairs]),
        "ratio": _spread([tiles.processor / whole.processor for whole, tiles in pairs]),
        "ratio on the clock": _spread([tiles.clock / whole.clock for whole, tiles in pairs]),
    }


def _spread(values: Any) -> dict[str, float]:
    ends = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 3) for name, value in ends.items()}


def _smolvlm() -> Family:
    """Tiles of 384 pixels, 4 by 3 for a wide screen, and a small copy."""
    grid = tuple(f"<row_{row}_col_{column}>" for row, column in product(range(1, 5), repeat=2))
    specials = dict.fromkeys((*idefics.SMOLVLM.specials, *grid))

    def describe(vocabulary: Vocabulary) -> Checkpoint:
        made = idefics.SMOLVLM.describe(vocabulary)
        tower = made.config["vision_config"] | _TOWER | {"image_size": 384, "patch_size": 16}
        files = {name: dict(content) for name, content in made.files.items()}
        files["preprocessor_config.json"] |= {
            "size": {"longest_edge": 1536},
            "max_image_size": {"longest_edge": 384},
        }
        files["processor_config.json"] |= {"image_seq_len": 36}
        return replace(
            made, config=made.config | {"vision_config": tower, "scale_factor": 4}, files=files
        )

    return Family(tuple(specials), describe)


def _internvl() -> Family:
    """Tiles of 448 pixels, 12 at most, and a small copy."""

    def describe(vocabulary: Vocabulary) -> Checkpoint:
        made = internvl.INTERNVL_CHAT.describe(vocabulary)
        tower = made.config["vision_config"] | _TOWER | {"image_size": 448}
        config = made.config | {
            "vision_config": tower,
            "force_image_size": 448,
            "max_dynamic_patch": 12,
        }
        return replace(made, config=config, files={"preprocessor_config.json": {"crop_size": 448}})

    return Family(internvl.SPECIALS, describe)


if __name__ == "__main__":
    main()
