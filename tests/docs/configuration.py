"""Writes docs/configuration.md from the settings: `python -m tests.docs.configuration`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tests.docs.pages import ROOT
from vlm_server.settings import Settings
from vlm_server.settings.descriptions import descriptions
from vlm_server.settings.quantities import shown, unit_of

PATH = ROOT / "docs" / "configuration.md"
_HEAD = ROOT / "tests/docs/configuration_head.md"
_SECTIONS = {
    "server": "Where the daemon listens, who may ask, and how connections are kept.",
    "model": "What is served. See [models](models.md).",
    "models": "More models, a table for each: `[models.NAME]`. See [models](models.md).",
    "limits": "What one request, and all together, may take. See [overload](api.md#overload).",
    "urls": "Where pictures and videos may be read from, besides the request. See "
    "[other URLs](api.md#other-urls).",
    "files": "Uploaded files, which requests name in place of their bytes. See [files](files.md).",
    "watch": "Standing questions about streams of frames. See [watches](watch.md).",
    "batches": "Files of requests that run when nothing else does. See [batches](batches.md).",
    "image": "How pictures are decoded and resized.",
    "deadlines": "When a request is ended. See [deadlines](api.md#deadlines).",
    "video": "How videos are sampled and decoded. See [videos](api.md#videos).",
    "document": "How pages of documents are drawn and kept. See [documents](documents.md).",
    "scheduler": "How requests share the device. See [performance](performance.md).",
    "cache": "What is kept for later requests. See [caches](caches.md).",
    "distributed": "One model over several machines. See [distributed](distributed.md).",
    "engine": "The process that holds the model: when it is restarted, and limits on JSON schemas.",
    "memory": "How much memory is used, and when it is given back. See [memory](memory.md).",
    "log": "See [the log](operations.md#the-log).",
    "metrics": "See [metrics](operations.md#metrics).",
    "tracing": "See [traces](operations.md#traces).",
}
_ENVIRONMENT = {"tracing.endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}
_PAGE = re.compile(r"docs/(\w+\.md)")


def render() -> str:
    """The whole page."""
    sections = list(_sections())
    contents = "".join(
        f"- [`[{name}]`](#{name.lower().replace('.', '')})\n" for name, _, _ in sections
    )
    return f"{_HEAD.read_text(encoding='utf-8')}\n{contents}" + "".join(
        _render(*each) for each in sections
    )


def _sections() -> Iterator[tuple[str, type[msgspec.Struct], msgspec.Struct | None]]:
    """Name, type and defaults of each section; `models.NAME` stands for tables of any name."""
    hints = get_type_hints(Settings)
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.default, msgspec.Struct):
            yield field.name, type(field.default), field.default
            continue
        inner = get_args(hints[field.name])
        structs = [
            kind for kind in inner if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        ]
        if structs:
            yield f"{field.name}.NAME", structs[0], None


def _render(name: str, kind: type[msgspec.Struct], _: msgspec.Struct | None) -> str:
    intro = _SECTIONS[name.partition(".")[0]]
    head = f"\n## `[{name}]`\n\n{intro}\n\n| setting | default | unit | |\n|---|---|---|---|\n"
    hints, texts = get_type_hints(kind, include_extras=True), descriptions(kind)
    return head + "".join(
        _row(name, field, hints[field.name], texts[field.name])
        for field in msgspec.structs.fields(kind)
    )


def _row(section: str, field: msgspec.structs.FieldInfo, hint: Any, text: str) -> str:
    value = shown(field.name, field.default, hint)
    default = f"`{json.dumps(value, ensure_ascii=False)}`"
    text = _PAGE.sub(r"[\1](\1)", text)
    if allowed := _allowed(hint):
        text += f" {allowed}"
    if variable := _ENVIRONMENT.get(f"{section}.{field.name}"):
        text += f" Environment: `{variable}`."
    cells = (f"`{field.name}`", default, unit(field.name, hint), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def unit(name: str, hint: Any) -> str:
    """The unit of a number, by the setting's name."""
    if _kind(hint) not in (int, float):
        return ""
    return unit_of(name)


def _allowed(hint: Any) -> str:
    kind = _kind(hint)
    if get_origin(kind) is Literal:
        return "One of " + ", ".join(f"`{each}`" for each in get_args(kind)) + "."
    metas = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)]
    bounds = [
        f"{word} {bound}"
        for meta in metas
        for word, bound in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le))
        if bound is not None and bound not in (0, -1)
    ]
    return f"{' and '.join(bounds).capitalize()}." if bounds else ""


def _kind(hint: Any) -> Any:
    """The type, without its bounds; the number's, if it may be a share or a word as well."""
    if get_origin(hint) in (Annotated, UnionType, Union):
        return _kind(get_args(hint)[0])
    return hint


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
