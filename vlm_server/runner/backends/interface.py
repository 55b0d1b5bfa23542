"""The interface of a backend: the code that depends on the kind of device.

`backends.backend_of` chooses one; no other code asks which device it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.backends.rope import Rope

FUSED_HEAD_SIZES = (64, 72, 80, 96, 128)
"""Head sizes at which MLX fuses attention of many queries on Metal."""
MAX_DRAFTING_ROWS = 8
"""Maximum rows of a step that verifies drafts: more keep a device busy without."""
_ALIGNED = 64
"""Matrices with a multiple of so many columns are fast on GPUs."""

Mask = mx.array | str | None
"""`causal`, or the allowed keys, (rows or 1, 1, queries, keys) bool; None for all."""


Rotate = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
"""RoPE of queries and keys, given their angles' cosines and sines: see `rotate_heads`."""


class RowsLayer:
    """Marks a layer of a backend that stands for one of MLX's, and multiplies as it does."""


class Attention(ABC):
    """Computes `softmax(queries @ keys.T * scale) @ values`, (rows, heads, tokens, head size).

    There may be fewer heads of keys and values than of queries, which then share them in turn.
    By default, layers of compiled steps use MLX's own attention with a mask.
    """

    padding_tokens = 1
    """Long chunks alone attend as if padded to multiples of this."""
    appends_in_place = False
    """Whether `attend_bounded` writes new keys and values into the existing buffers."""

    @abstractmethod
    def supports(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        """Whether it computes these shapes, and faster than mlx-vlm's attention."""

    @abstractmethod
    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array: ...

    def attend_bounded(self, queries: mx.array, layer: BoundedLayer, scale: float) -> mx.array:
        """Attention to each row's keys in `layer`.

        The last query attends to all of them, and each other one to one less than the next.
        """
        count, columns = queries.shape[2], mx.arange(layer.keys.shape[2])
        starts, first_new = layer.bounds[:, :1], layer.bounds[:, 1:2] - layer.bounds[:, 2:]
        last = (first_new + mx.arange(count))[:, None, :, None]
        mask = (columns <= last) & (columns >= starts[:, None, None])
        if layer.window is not None:
            mask &= columns > last - layer.window
        return mx.fast.scaled_dot_product_attention(
            queries, layer.keys, layer.values, scale=scale, mask=mask
        )

    def attend_mixed(self, queries: mx.array, layer: MixedLayer, scale: float) -> mx.array:
        """Attention of all tokens of a mixed step, (tokens, heads, 1, head size), to their keys."""
        assert layer.new is not None
        (decode_queries, prompt_queries), (keys, prompt_keys), (values, prompt_values) = (
            layer.split(array) for array in (queries, *layer.new)
        )
        layer.prompt.update_and_fetch(prompt_keys, prompt_values)
        of_prompt = self.attend_bounded(prompt_queries, layer.prompt, scale).transpose(2, 1, 0, 3)
        if layer.rows is None:
            return of_prompt
        layer.rows.update_and_fetch(keys, values)
        return mx.concatenate([self.attend_bounded(decode_queries, layer.rows, scale), of_prompt])

    def is_precompiled(self, num_queries: int, num_keys: int, head_size: int) -> bool:
        """Whether a prompt's last queries can attend to `num_keys` without planning first.

        If not, `precompile_next` will plan it.
        """
        return True

    def precompile_next(self) -> bool:
        """Plan attention for one more shape; False if none is left."""
        return False


class Backend(ABC):
    """The operations and properties of one kind of device; defaults are those of GPUs.

    No call waits for a GPU.
    """

    draft_widths: tuple[int, ...]
    """The numbers of tokens of a sequence that a step may take to verify drafts."""
    default_dtype = "auto"
    """The type that floating-point weights are cast to if no setting says so; `auto`: their own."""
    compiles_kernels = True
    """Whether work of a new shape takes longer the first time."""
    compiles_towers = False
    """Whether vision towers are compiled, for each size of images."""
    encodes_in_turns = True
    """Whether media are encoded by the thread that decodes, in parts between its steps.

    Otherwise another thread encodes them concurrently, as suits a CPU. On a GPU, a decode step
    would take as long as the encode.
    """
    is_filled_by_a_tile = True
    """Whether encoding an image's tiles one by one takes no longer than in one call."""
    prefill_padding_tokens = 1
    """Long prefill chunks are padded to multiples of this; 1 for no padding."""
    mixed_step_tokens = 0
    """The number of tokens of a mixed step; 0 where chunks run after the decode step."""
    max_inner_points = 0
    """Maximum points inside a prefill chunk after which it keeps the states of its layers.

    The tokens after each are computed apart in such layers, padded to `MAX_INNER_TOKENS`; 0 where
    passes are not compiled, and parts would be as many calls as chunks are.
    """
    errors_are_late = False
    """Whether a computation can fail after it was launched; see `device.arrays`."""
    uses_blas = False
    """Whether matrix products are slow without a BLAS library."""
    shares_memory = False
    """Whether the device is a GPU whose memory is the machine's."""
    trims_own_pool = True
    """Whether MLX's allocator frees its pool before it exceeds its limit."""

    def pool_bytes(self, limit_bytes: int) -> int:
        """The allocator's maximum pool, of `limit_bytes`: a GPU's memory is MLX's own."""
        return limit_bytes // 8

    def used_bytes(self) -> int:
        """The GPU memory of all programs, by the driver; 0 if it is the machine's."""
        return 0

    def is_short_of_memory(self, memory_bytes: int) -> bool:
        """Whether other programs need some of the device's `memory_bytes`. Takes time."""
        return False

    @abstractmethod
    def attention(self, context_tokens: int) -> Attention:
        """New attention for a language model of `context_tokens` at most."""

    def use_kernels(self, model: Any, free_bytes: int) -> Rotate | None:
        """Replace layers of a loaded model by ones that suit the device.

        They may use part of `free_bytes`. Returns the kernel of RoPE; None for operations of MLX.
        """
        return None

    def use_kernels_of_head(self, module: Any, free_bytes: int) -> None:  # noqa: B027
        """The same for the layers of a draft head."""

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """`softmax(q @ k.T * scale) @ v`, all (rows, heads, patches, head size), of a tower.

        By MLX's fused attention, for which heads are padded with zeros.
        """
        size = q.shape[-1]
        fused = next((fused for fused in FUSED_HEAD_SIZES if size <= fused), size)
        if fused != size:
            zeros = [(0, 0)] * 3 + [(0, fused - size)]
            q, k, v = mx.pad(q, zeros), mx.pad(k, zeros), mx.pad(v, zeros)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)[..., :size]

    def segment_blocks(
        self, runs: Iterable[tuple[int, int]], head_size: int, dtype: mx.Dtype
    ) -> mx.array | None:
        """The `blocks` of `attend_to_segments` for (count, patches of each) of segments; None if
        such heads are left to `attend`."""
        return None

    def attend_to_segments(
        self, q: mx.array, k: mx.array, v: mx.array, blocks: mx.array, scale: float
    ) -> mx.array:
        """Attention of patches, (frames, patches, heads, head size), each within its segment."""
        raise NotImplementedError

    def rotate(self, rope: Rope, x: mx.array) -> mx.array:
        """RoPE of `x`, (..., head size), of a tower."""
        return rope.in_one_kernel(x)

    def prepare_mlp(self, mlp: Any) -> None:
        """Pad the hidden layer of a tower's MLP with zeros to a multiple of `_ALIGNED`.

        Qwen2.5-VL's has 3,420 numbers of two bytes: GPUs have no fast product for such rows.
        """
        num_padding = -mlp.down_proj.weight.shape[1] % _ALIGNED
        is_quantized = "scales" in mlp.down_proj
        if not num_padding or is_quantized:
            return
        for proj in (mlp.gate_proj, mlp.up_proj):
            proj.weight = mx.pad(proj.weight, [(0, num_padding), (0, 0)])
            if "bias" in proj:
                proj.bias = mx.pad(proj.bias, (0, num_padding))
        mlp.down_proj.weight = mx.pad(mlp.down_proj.weight, [(0, 0), (0, num_padding)])

    def gated_mlp(self, mlp: Any, x: mx.array) -> mx.array:
        """A tower's SwiGLU of `x`, (..., hidden)."""
        return mlp(x)  # type: ignore[no-any-return]

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        """The gated delta rule (`backends.gated_delta`); None to leave it to mlx-vlm.

        Heads of `v` share those of `q` and `k`, of which there may be fewer, in turn.
        """
        return None
