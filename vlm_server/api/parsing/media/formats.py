"""Guesses of the format of bytes by their beginning."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.api.parsing.media import heif_header

MP4 = "MP4 or MOV"
_BOXES = {b"mif1": "HEIF", b"msf1": "HEIF"}
"""Formats by the brand of an ISO file that is neither HEIC nor AVIF."""
_RIFFS = {b"WEBP": "WebP", b"WAVE": "WAV", b"AVI ": "AVI"}
_EBML = b"\x1a\x45\xdf\xa3"
_EBMLS = {b"webm": "WebM", b"matroska": "Matroska"}
_EBML_BYTES = 64
_TWICE = "base64 again: it was encoded twice"
_BEGINNINGS = {
    b"%PDF": "PDF",
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "BigTIFF",
    b"MM\0+": "BigTIFF",
    b"\0\0\1\0": "ICO",
    b"8BPS": "PSD",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"PK\3\4": "ZIP",
    b"\x1f\x8b": "gzip",
    b"data:": "another data URL",
    b"http": "a URL",
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"<!DOCTYPE": "HTML",
    b"<!doctype": "HTML",
    b"<html": "HTML",
    b"{": "JSON",
    b"iVBORw0KGgo": _TWICE,
    b"/9j/": _TWICE,
    b"UklGR": _TWICE,
    b"R0lGOD": _TWICE,
}


def guess_format(data: bytes) -> str | None:
    """The format that the first bytes of `data` suggest; None if unknown."""
    if data[4:8] == b"ftyp":
        return heif_header.brand(data) or _BOXES.get(data[8:12], MP4)
    if data[:4] == b"RIFF":
        return _RIFFS.get(data[8:12], "RIFF")
    if data[:4] == _EBML:
        start = data[:_EBML_BYTES]
        return next((name for kind, name in _EBMLS.items() if kind in start), "EBML")
    beginning = data[:64].lstrip(b" \t\r\n")
    return next((name for start, name in _BEGINNINGS.items() if beginning.startswith(start)), None)


def unreadable_message(noun: str, readable: Sequence[str], data: bytes) -> str:
    """The message of an error: `data` is no `noun` in a `readable` format, or a damaged one."""
    format_name = guess_format(data) if data else "nothing"
    if format_name in readable:
        why = "it is damaged, cut off or of a rare kind"
        return f"The {noun} begins like {format_name}, but its header can't be read: {why}."
    guess = f" It looks like {format_name}." if format_name else ""
    if format_name == "PDF":
        guess += " Send it as a document: it is read page by page."
    names = f"{', '.join(readable[:-1])} or {readable[-1]}"
    return f"The {noun} is not a readable {names}.{guess}"
