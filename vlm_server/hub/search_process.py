"""The process that searches the hub: `python -m vlm_server.hub.search_process QUERY`.

It writes one `SearchResult` as JSON, and ends. The hub's library, its time and its mistakes stay in
this process.
"""

from __future__ import annotations

import os
import sys

import msgspec
from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo

from vlm_server.hub.failures import search_refused
from vlm_server.hub.messages import FoundModel, SearchResult
from vlm_server.hub.names import HubName

MAX_FOUND = 20
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_BYTES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}


def search(query: str) -> SearchResult:
    """The most popular checkpoints in safetensors whose names have `query`."""
    try:
        infos = HfApi().list_models(
            search=query,
            filter="safetensors",
            sort="downloads",
            limit=MAX_FOUND,
            expand=["downloads", "gated", "safetensors", "config"],
        )
        found = [_found(info) for info in infos if HubName.parse(info.id) is not None]
        return SearchResult(tuple(found[:MAX_FOUND]))
    except Exception as error:  # noqa: BLE001  the hub's library raises many kinds
        return SearchResult((), search_refused(error))


def _found(info: ModelInfo) -> FoundModel:
    types = dict(info.safetensors.parameters) if info.safetensors else {}
    model_type = (info.config or {}).get("model_type", "")
    return FoundModel(
        name=info.id,
        model_type=model_type if isinstance(model_type, str) else "",
        weight_bytes=sum(count * _BYTES.get(name, 2) for name, count in types.items()),
        downloads=int(info.downloads or 0),
        is_gated=bool(info.gated),
    )


def main() -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(search(sys.argv[1])))


if __name__ == "__main__":
    main()
