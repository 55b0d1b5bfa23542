"""The gated delta rule of hybrid models in chunks of tokens: matrix products instead of a loop.

The rule updates a state S, (value size, key size), once per token, with a decay g, a strength beta,
a key k, a value v and a query q:

    S = g S + beta (v - g S k) k^T        y = S q

Within a chunk, the updates u of all tokens solve one triangular system, since each depends on the
keys before it (the WY form of "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", Yang et al. 2024, with the decays of "Gated Delta Networks", Yang et al. 2025). Only the
state goes from chunk to chunk.
"""

from __future__ import annotations

import mlx.core as mx

_CHUNK = 64
"""Tokens of a chunk: more make the triangular systems dearer than the products that they save."""


def gated_delta_in_chunks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The outputs y, (rows, tokens, heads, value size), in the type of `q`, and the last state.

    q, k: (rows, tokens, key heads, key size); heads share these in turn. v: (rows, tokens, heads,
    value size). g, beta: (rows, tokens, heads), g in [0, 1]. state: (rows, heads, value size, key
    size) float32.
    """
    rows, count, heads, _ = v.shape
    dtype, sharing = q.dtype, heads // q.shape[2]
    q, k = mx.repeat(q, sharing, axis=2), mx.repeat(k, sharing, axis=2)
    q, k, v = _split_chunks(q), _split_chunks(k), _split_chunks(v)
    g, beta = _split_chunks(g[..., None], padding=1), _split_chunks(beta[..., None])
    size = g.shape[-2]
    lower = mx.tril(mx.ones((size, size), mx.bool_))
    strictly_lower = mx.tril(lower, -1)
    decay = mx.where(lower, mx.cumprod(mx.where(strictly_lower, g, 1), axis=-2), 0)
    since_start = mx.cumprod(g, axis=-2)
    to_end = decay[..., -1, :, None]

    keys = k.swapaxes(-1, -2)
    system = mx.where(strictly_lower, beta * decay * (k @ keys), 0) + mx.eye(size)
    inverse = mx.linalg.tri_inv(system, stream=mx.cpu)
    values_of_chunk = inverse @ (beta * v)
    of_state = inverse @ (beta * since_start * k)
    scores = decay * (q @ keys)
    from_state = since_start * q

    outputs = []  # decay[i, j]: of what token j wrote, when token i reads
    for chunk in range(q.shape[2]):
        here = (slice(None), slice(None), chunk)
        old_state = state.swapaxes(-1, -2)
        updates = values_of_chunk[here] - of_state[here] @ old_state
        outputs.append(from_state[here] @ old_state + scores[here] @ updates)
        grown = (to_end[here] * updates).swapaxes(-1, -2) @ k[here]
        state = since_start[here][..., -1:, :] * state + grown
    outputs_by_token = mx.stack(outputs, axis=2).reshape(rows, heads, -1, v.shape[-1])[:, :, :count]
    return outputs_by_token.swapaxes(1, 2).astype(dtype), state


def _split_chunks(x: mx.array, padding: float = 0) -> mx.array:
    """(rows, tokens, heads, size) as (rows, heads, chunks, tokens of a chunk, size) float32.

    The last chunk is filled up with `padding`: tokens that update nothing and decay nothing.
    """
    rows, count, heads, size = x.shape
    tokens = min(count, _CHUNK)
    widths = [(0, 0), (0, -count % tokens), (0, 0), (0, 0)]
    x = mx.pad(x.astype(mx.float32), widths, constant_values=padding)
    return x.reshape(rows, -1, tokens, heads, size).transpose(0, 3, 1, 2, 4)
