"""Settings of caches, in memory and on disk, and of device memory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB, AbsolutePath, Auto, Share


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_token_layout_bytes: Annotated[int, Meta(ge=0)] = 16 << 20
    """Maximum host memory for token layouts of images, about 2 kB each; capped at
    `max_pixel_bytes`."""
    max_pixel_bytes: Annotated[Annotated[int, Meta(ge=0)] | None, Auto] = None
    """Maximum host memory for decoded images; 0 caches none, `auto` is 1/32 of the machine's
    memory."""
    max_encoder_bytes: Annotated[Annotated[int, Meta(ge=0)] | None, Auto] = None
    """Maximum device memory for encoder outputs; 0 caches none, `auto` is 1/16 of what is left
    after the weights."""
    max_prefix_bytes: Annotated[Annotated[int, Meta(ge=0)] | None, Auto] = None
    """Maximum device memory for the KV of prompts and answers; 0 caches none, `auto` is 1/4 of what
    is left after the weights, up to 1/2 where that holds no two conversations of 32,768 tokens."""
    kv_bits: Literal[16, 8, 4, "auto"] = 16
    """Bits per number of cached KV, which is what is kept of conversations, in memory and on disk:
    16 is exact; 8 and 4 keep two to four times as many tokens, and may change answers slightly;
    `auto` is 16 if the prefix cache then holds two conversations of 32,768 tokens, else 8. See
    docs/memory.md."""
    quantize_running: bool = False
    """Whether running requests hold KV with `kv_bits`, too: their conversations take half or a
    quarter of the memory, and steps take longer."""
    kv_group_size: Annotated[int, Meta(ge=8, le=1024)] = 64
    """Neighbouring numbers of quantized KV that share a scale, at most."""
    max_vector_bytes: Annotated[Annotated[int, Meta(ge=0)] | None, Auto] = None
    """Maximum host memory for the vectors of a model that makes some (docs/embeddings.md); 0 caches
    none, `auto` is 1/64 of the machine's memory."""
    max_grammar_bytes: Annotated[int, Meta(ge=0)] = 128 * MIB
    """Maximum host memory for compiled JSON schemas, 3 MB each or more; 0 keeps none."""
    max_disk_bytes: Annotated[int, Meta(ge=0)] = 0
    """Maximum disk space for encoder outputs and KV that survive a restart; 0 stores none. The
    files reveal what was asked: see docs/caches.md."""
    disk_folder: Annotated[AbsolutePath, Auto] = ""
    """Absolute path of the folder for these files, which your daemons may share; `auto` is
    `vlm-server` in your cache folder (~/.cache, ~/Library/Caches)."""
    separate_api_keys: bool = True
    """Whether requests with different API keys share no cache entries, so that no client can find
    out by timing what another one asked."""


class MemorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_bytes: Annotated[Annotated[int, Meta(ge=1)] | Share | None, Auto] = None
    """Maximum memory for models, conversations and caches on the device, or a share of what it has,
    such as `75%`; `auto` is half of the machine's memory on a CPU, 90% of a CUDA device's, and on a
    Mac what leaves room for the system. The machine's is what the process may use of it."""
    min_model_room_bytes: Annotated[Annotated[int, Meta(ge=0)] | None, Auto] = None
    """Minimum memory that a model gets besides its weights, where several share the limit; `auto`
    is 1/8 of its weights, at least 256 MiB. Models that do not fit side by side take turns."""
    max_pool_bytes: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum freed memory that MLX keeps for reuse; `auto` is 256 MiB on a CPU, 1/8 of
    `memory.max_bytes` on a GPU."""
    idle_clear_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """Idle time after which freed memory is returned to the system; the next request is slower,
    since it has to allocate it again."""
    prefill_keep_alloc: Literal["auto", "always", "never"] = "auto"
    """Whether freed memory is kept between the chunks of a prompt; `auto` returns it when the next
    chunk might not fit otherwise."""

    @property
    def known_limit_bytes(self) -> int:
        """`max_bytes` where that is known without the device; else 0."""
        return self.max_bytes if isinstance(self.max_bytes, int) else 0

    def limit_on(self, device_bytes: int) -> int:
        """`max_bytes` on a device that has `device_bytes`; 0 is `auto`."""
        share = self.max_bytes
        return share.of(device_bytes) if isinstance(share, Share) else share or 0
