"""Writes docs/configuration.md and docs/limits.md: `python -m tests.docs.configuration`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tests.docs.pages import ROOT
from vlm_server.settings import MODELS, SECTIONS, hints_of, kind_of
from vlm_server.settings.descriptions import descriptions
from vlm_server.settings.quantities import bare, shown
from vlm_server.settings.topics import COMMON, is_fuse

PATH = ROOT / "docs" / "configuration.md"
LIMITS = ROOT / "docs" / "limits.md"
_HEAD = ROOT / "tests/docs/configuration_head.md"
_LIMITS_HEAD = ROOT / "tests/docs/limits_head.md"
_TABLE = "| setting | default | |\n|---|---|---|\n"
_SECTIONS = {
    "server": "Where the daemon listens, who may ask, and how connections are kept.",
    "model": "What is served. See [models](models.md).",
    "models": "More models, a table for each: `[models.NAME]`. See [models](models.md).",
    "limits": "What one request, and all together, may take. See [overload](errors.md#overload).",
    "urls": "Where pictures and videos may be read from, besides the request. See "
    "[other URLs](pictures.md#other-urls).",
    "files": "Uploaded files, which requests name in place of their bytes. See [files](files.md).",
    "watch": "Standing questions about streams of frames. See [watches](watch.md).",
    "batches": "Files of requests that run when nothing else does. See [batches](batches.md).",
    "image": "How pictures are decoded and resized.",
    "deadlines": "When a request is ended. See [deadlines](errors.md#deadlines).",
    "video": "How videos are sampled and decoded. See [videos](videos.md).",
    "document": "How pages of documents are drawn and kept. See [documents](documents.md).",
    "scheduler": "How requests share the device. See [performance](performance.md).",
    "cache": "What is kept for later requests. See [caches](caches.md).",
    "distributed": "One model over several machines. See [distributed](distributed.md).",
    "engine": "The process that holds the model: its libraries, restarts, and limits on schemas.",
    "memory": "How much memory is used, and when it is given back. See [memory](memory.md).",
    "log": "See [the log](operations.md#the-log).",
    "metrics": "See [metrics](operations.md#metrics).",
    "tracing": "See [traces](operations.md#traces).",
}
_ENVIRONMENT = {"tracing.endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}
_LONG = 200
"""Characters past which the first table has a description's first sentence alone."""
_PAGE = re.compile(r"docs/(\w+\.md)")


def render() -> str:
    """The page of what people set: some settings by name, and all that are no fuses by section."""
    common = "".join(_row(full, full, is_short=True) for full in COMMON)
    head = _HEAD.read_text(encoding="utf-8").replace("COMMON\n", f"{_TABLE}{common}")
    return head + _render_sections(are_fuses=False)


def render_limits() -> str:
    """The page of the fuses."""
    return _LIMITS_HEAD.read_text(encoding="utf-8") + _render_sections(are_fuses=True)


def _render_sections(*, are_fuses: bool) -> str:
    tables = dict(_tables(are_fuses=are_fuses))
    contents = ", ".join(f"[`[{name}]`](#{_anchor(name)})" for name in tables)
    return f"{contents}\n" + "".join(tables.values())


def _tables(*, are_fuses: bool) -> Iterator[tuple[str, str]]:
    """Each section's name and part of the page; `models.NAME` stands for tables of any name."""
    for section in SECTIONS:
        name = f"{section}.NAME" if section == MODELS else section
        names = kind_of(section).__struct_fields__
        own = [key for key in names if is_fuse(f"{name}.{key}") == are_fuses]
        rows = "".join(_row(f"{name}.{key}", key) for key in own)
        page = "configuration" if are_fuses else "limits"
        word = "Others" if own else "All"
        link = f" {word}: [{page}]({page}.md#{_anchor(name)})." if own != list(names) else ""
        if rows or not are_fuses:
            table = f"\n{_TABLE}{rows}" if rows else ""
            yield name, f"\n## `[{name}]`\n\n{_SECTIONS[section]}{link}\n{table}"


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


def _row(full: str, label: str, *, is_short: bool = False) -> str:
    """The setting's row in a table, under the name `label`; `is_short`: with one sentence."""
    section, _, key = full.rpartition(".")
    kind = kind_of(section)
    hint, text = hints_of(kind)[key], descriptions(kind)[key]
    default = next(field.default for field in msgspec.structs.fields(kind) if field.name == key)
    value = json.dumps(shown(key, default, hint), ensure_ascii=False)
    is_models_own = section == f"{MODELS}.NAME" and descriptions(kind_of("model")).get(key) == text
    text = _PAGE.sub(r"[\1](\1)", text)
    if is_models_own:
        text = "As in [`[model]`](#model)."
    elif is_short and len(text) > _LONG:
        text = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
    if not is_models_own and (allowed := _allowed(key, hint)):
        text += f" {allowed}"
    if variable := _ENVIRONMENT.get(full):
        text += f" Environment: `{variable}`."
    cells = (f"`{label}`", f"`{value}`", text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _allowed(key: str, hint: Any) -> str:
    kind = _kind(hint)
    if get_origin(kind) is Literal:
        return "One of " + ", ".join(f"`{each}`" for each in get_args(kind)) + "."
    bounds = [
        f"{word} {shown(key, bound, None)}"
        for meta in _metas(hint)
        for word, bound in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le))
        if bound is not None and bound not in (0, 1)
    ]
    text = " and ".join(bounds)
    return f"{text[0].upper()}{text[1:]}." if bounds else ""


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    """The bounds of a number, which may have a word as well."""
    yield from (
        each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)
    )
    for inner in get_args(bare(hint)):
        yield from _metas(inner)


def _kind(hint: Any) -> Any:
    """The type, without its bounds; the number's, if it may be a share or a word as well."""
    if get_origin(hint) in (Annotated, UnionType, Union):
        return _kind(get_args(hint)[0])
    return hint


if __name__ == "__main__":
    for page, text in ((PATH, render()), (LIMITS, render_limits())):
        page.write_text(text, encoding="utf-8")
