"""Which settings people change, and which are fuses: bounds that only mistakes and attacks meet."""

from __future__ import annotations

COMMON = (
    "model.path",
    "model.aliases",
    "model.keep_alive_seconds",
    "model.max_context_tokens",
    "server.host",
    "server.port",
    "server.api_key_file",
    "memory.max_bytes",
    "scheduler.max_num_seqs",
    "cache.max_disk_bytes",
    "cache.kv_bits",
    "image.max_pixels",
    "limits.max_requests",
    "urls.https_hosts",
    "log.level",
)
"""The settings that matter to most people, in the order of their questions."""

_FULL_OF_FUSES = {
    "limits": ("default_max_tokens",),
    "deadlines": (),
    "engine": ("openblas", "mimalloc"),
    "watch": ("max_window",),
}
"""Sections of fuses, with those of their settings that are none."""
_FUSES = {
    "server": (
        *("max_connections", "header_timeout_seconds", "idle_timeout_seconds"),
        *("max_responses_bytes", "responses_keep_seconds", "stream_resume_keep_seconds"),
        *("max_stream_resume_bytes", "max_stream_resume_bytes_per_key"),
    ),
    "urls": ("timeout_seconds",),
    "files": ("max_file_bytes", "upload_timeout_seconds"),
    "batches": ("max_batches_per_key", "max_lines", "max_line_bytes", "max_output_bytes"),
    "image": ("max_decoded_pixels", "decode_timeout_seconds", "max_decode_memory_bytes"),
    "video": (
        *("max_frame_pixels", "max_seconds"),
        *("decode_timeout_seconds", "max_decode_memory_bytes"),
    ),
    "document": ("draw_timeout_seconds", "max_draw_memory_bytes", "max_processes"),
}
"""The fuses of the other sections."""


def is_fuse(full: str) -> bool:
    """Whether the setting `section.name` is a bound that ordinary requests do not meet."""
    section, _, name = full.rpartition(".")
    if section in _FULL_OF_FUSES:
        return full not in COMMON and name not in _FULL_OF_FUSES[section]
    return name in _FUSES.get(section, ())
