"""What each metric says, as Prometheus and Grafana show it: `# HELP`."""

from __future__ import annotations

HELP = {
    "build": "Versions of vlm_server, Python, MLX and mlx-vlm.",
    "process_cpu_seconds": "Seconds of processor time of a process, in user and system mode.",
    "process_resident_memory_bytes": "Bytes of resident memory of a process.",
    "process_open_fds": "Open files and sockets of a process.",
    "process_max_fds": "Most files and sockets that a process may open.",
    "process_start_time_seconds": "Start of a process in seconds since 1970.",
    "requests_in_flight": "Requests being answered or waiting, each with a queue slot.",
    "requests_limit": "Queue slots; past them requests get 429 (limits.max_requests).",
    "requests_waiting_bytes": "Bytes of request bodies that wait for the device.",
    "requests_waiting_bytes_limit": (
        "Most bytes of waiting request bodies (limits.max_waiting_bytes)."
    ),
    "requests": "HTTP requests that ended, by route and status; 499 if the client left.",
    "key_prompt_tokens": "Tokens of prompts, cached ones too, by name of the API key.",
    "key_generation_tokens": "Tokens generated, by name of the API key.",
    "stored_files": "Uploaded files that are kept.",
    "stored_files_size_bytes": "Bytes of uploaded files.",
    "stored_files_limit_bytes": "Most bytes of uploaded files (files.max_bytes).",
    "stored_files_evictions": "Uploaded files dropped to make room.",
    "batches_active": "Batches of requests that have not ended.",
    "batch_lines_running": "Lines of batches that run now.",
    "batch_lines": "Lines of batches that ended: completed, failed, or interrupted to run again.",
    "batches_paused": "1 for the reason why no line of a batch is begun, 0 for other reasons.",
    "stored_responses": "Stored responses, which clients can continue.",
    "stored_responses_size_bytes": "Bytes of stored responses.",
    "stored_responses_limit_bytes": "Most bytes of stored responses (server.max_responses_bytes).",
    "stored_responses_evictions": "Stored responses dropped to make room.",
    "resumable_streams": "Streams that clients can resume.",
    "resumable_streams_size_bytes": "Bytes of events kept for resumable streams.",
    "resumable_streams_limit_bytes": "Most bytes of events kept (server.max_stream_resume_bytes).",
    "resumed_streams": "Streams that clients resumed.",
    "abandoned_streams": "Resumable streams ended because no client came back.",
    "documents": "Documents in requests.",
    "document_pages": "Pages of documents that were read.",
    "cached_document_pages": "Pages of documents drawn for an earlier request and read again.",
    "document_draw_seconds": "Seconds spent drawing pages of documents.",
    "document_cache_size_bytes": "Bytes of drawn pages that are kept.",
    "document_cache_limit_bytes": "Most bytes of drawn pages (document.max_cache_bytes).",
    "watches": "Open watches.",
    "watches_size_bytes": "Bytes of frames that watches keep.",
    "watch_frames": (
        "Frames given to watches: asked, unchanged, skipped for a newer one, or failed."
    ),
    "watch_answers": "Answers that watches reported: first ones, and changes.",
    "watch_device_seconds": (
        "Seconds of watches' questions on the device, waits in between included."
    ),
    "time_to_first_token_seconds": (
        "Seconds from a request's headers to the first text of its answer."
    ),
    "inter_token_latency_seconds": "Seconds between two pieces of text of one answer.",
    "stream_longest_silence_seconds": "Longest seconds of each stream without new text.",
    "e2e_request_latency_seconds": (
        "Seconds from a request's headers to the last byte of its complete answer."
    ),
    "request_inference_time_seconds": (
        "Seconds from when the device begins with a request to its last token."
    ),
    "request_prompt_tokens": "Tokens of each prompt, cached ones and those of pictures too.",
    "request_generation_tokens": "Tokens of each answer, over all its choices.",
    "request_image_tokens": "Tokens of the pictures of each prompt that has some.",
    "num_requests_running": "Unfinished requests that the device has begun with.",
    "num_requests_waiting": "Requests that wait for the device.",
    "request_success": (
        "Requests that ended: stop, length, tool_calls, abort (the client left) or error."
    ),
    "request_queue_time_seconds": (
        "Seconds in the engine's queue until the device begins, without preparation."
    ),
    "request_prepare_time_seconds": (
        "Seconds of preparation: template, tokenizer, decoding of pictures and videos."
    ),
    "request_encode_time_seconds": (
        "Seconds from the start of the first picture's encoding to the end of the last."
    ),
    "request_prefill_time_seconds": (
        "Seconds from the end of encoding, or the first chunk, to the first token."
    ),
    "request_decode_time_seconds": "Seconds from the first token to the last.",
    "engine_up": "1 while the model has an engine process, else 0.",
    "engine_ready": "1 while the model accepts requests, else 0.",
    "model_load_failed": "1 if the last load of the model failed, but for restarts after a crash.",
    "quarantined_shapes": "Request sizes that are refused because engines crashed on them.",
    "engine_restarts": "Restarts of the engine process, after crashes and hangs.",
    "quarantine_refusals": "Requests refused because engines crashed on their size.",
    "engine_tracked_requests": "Requests that the engine tracks.",
    "generation_tokens": "Tokens generated.",
    "prompt_tokens": "Tokens of prompts, cached ones too.",
    "prefix_cache_queries": "Tokens of prompts looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts found in the prefix cache.",
    "mm_cache_queries": "Pictures and parts of videos in prompts, looked up in the encoder cache.",
    "mm_cache_hits": "Pictures and parts of videos that needed no encoding.",
    "tool_calls": "Tool calls that were complete.",
    "broken_tool_calls": "Tool calls sent as text, or cut off.",
    "spec_decode_num_drafts": "Drafts verified: one for each sequence and step with a draft.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became part of answers.",
    "spec_decode_num_trained_draft_tokens": "Draft tokens verified that a trained drafter guessed.",
    "spec_decode_num_trained_accepted_tokens": (
        "Draft tokens of a trained drafter that became part of answers."
    ),
    "engine_requests": "Requests in the engine, by state from waiting to decode.",
    "engine_tracked": "Requests that each part of the engine keeps state for; 0 when idle.",
    "memory_active_bytes": "Bytes of device memory held by arrays.",
    "memory_pool_bytes": "Bytes of freed device memory kept for reuse.",
    "memory_peak_bytes": "Most bytes of device memory ever held by arrays.",
    "memory_limit_bytes": "Most bytes of device memory that the engine may use.",
    "memory_baseline_bytes": "Bytes of device memory held without requests: the weights.",
    "memory_footprint_bytes": "Bytes of the engine process, as the operating system counts them.",
    "kv_cache_usage_perc": (
        "Share of the memory besides the weights in use by requests, 0 to 1 (all)."
    ),
    "memory_clear_seconds": "Seconds spent releasing the pool.",
    "memory_device_used_bytes": "Bytes of a CUDA device in use by all programs, by its driver.",
    "memory_decisions": "Decisions about memory: clear, evict, wait, refuse, failure.",
    "cache_size_bytes": "Bytes of all entries of a cache.",
    "cache_pinned_bytes": "Bytes of a cache that requests use now.",
    "cache_limit_bytes": "Most bytes of a cache.",
    "cache_entries": "Entries of a cache.",
    "cache_hits": "Look-ups in a cache that found an entry.",
    "cache_misses": "Look-ups in a cache that found none.",
    "cache_evictions": "Entries of a cache dropped to make room.",
    "cache_damaged": "Corrupt files of the disk cache, which were deleted.",
}
"""By name without prefix and `_total`: what it counts, in its unit."""
