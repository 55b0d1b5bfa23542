"""The shapes of compiled steps, and the order in which they are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlm_server.runner.backends.interface import MAX_DRAFTING_ROWS

CHUNKS = (1, 32, 128, *range(256, 2049, 256))
"""Numbers of tokens of compiled prefill chunks."""
MAX_SHARE_OF_ROWS = 0.25
"""Maximum rows of a mixed step, as a share of its tokens: more would leave chunks no room."""
_MAX_ROWS = 32
"""Maximum rows of a step that is precompiled."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a compiled step: `rows` of `width` tokens, or of one beside `prompt_tokens`."""

    rows: int
    width: int = 1
    prompt_tokens: int = 0
    is_adapted: bool = False
    """Whether some row has an adapter; steps without one skip their products."""
    num_points: int = 0
    """The number of points inside the prompt's chunk after which states are kept."""


def all_shapes(
    draft_widths: Sequence[int],
    mixed_step_tokens: int,
    *,
    has_adapters: bool,
    max_inner_points: int = 0,
) -> list[StepShape]:
    """The likeliest first: those of one request, then of some at the same time.

    draft_widths, mixed_step_tokens, max_inner_points: see `Backend`; none, and 0, without such.
    """
    rows = range(1, _MAX_ROWS + 1)
    drafting = range(1, MAX_DRAFTING_ROWS + 1)
    wide = [StepShape(number, width) for number in drafting for width in draft_widths]
    chunks = [StepShape(0, prompt_tokens=count) for count in CHUNKS]
    row_counts = [number for number in rows if number <= MAX_SHARE_OF_ROWS * mixed_step_tokens]
    mixed = [StepShape(number, prompt_tokens=mixed_step_tokens - number) for number in row_counts]
    shapes = [*(StepShape(number) for number in rows), *chunks, *wide, *mixed]
    prompts = [shape for shape in shapes if shape.prompt_tokens > 1]
    for number in range(1, max_inner_points + 1):
        shapes += [replace(shape, num_points=number) for shape in prompts]
    if has_adapters:
        shapes += [replace(shape, is_adapted=True) for shape in shapes if shape.rows]
    return sorted(shapes, key=_compilation_order)


def _compilation_order(shape: StepShape) -> tuple[bool, bool]:
    return shape.rows > 1, shape.rows > MAX_DRAFTING_ROWS
