"""Boxes and points are found in every family's notation, and drawn at their coordinates."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from vlm_server.cli.ask import regions
from vlm_server.cli.ask.regions import Region, find_regions
from vlm_server.cli.exit_codes import CommandFailed

HALF_BOX = Region("box", 0.1, 0.2, 0.4, 0.3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"bbox_2d": [100, 200, 500, 500], "label": "cat"}]', [("box", "cat")]),
        ('```json\n{"label": "a dog", "bbox": [100,200,500,500]}\n```', [("box", "a dog")]),
        ('{"box_2d": [200, 100, 500, 500], "label": "y first"}', [("box", "y first")]),
        ("<|box_start|>(100,200),(500,500)<|box_end|>", [("box", "")]),
        ("<box> (100, 200),(500, 500)", [("box", "")]),
        ("[100, 200, 500, 500]", [("box", "")]),
        ("(100, 200, 500, 500).", [("box", "")]),
        ("[500, 500, 100, 200]", [("box", "")]),
    ],
)
def test_boxes_are_found_in_formats_of_model_families(
    text: str, found: list[tuple[str, str]]
) -> None:
    regions = find_regions(text)
    assert [(region.kind, region.label) for region in regions] == found
    (box,) = regions
    assert (box.x, box.y) == (0.1, 0.2)
    assert (box.width, box.height) == pytest.approx((0.4, 0.3))


@pytest.mark.parametrize(
    "text",
    [
        '{"point_2d": [250, 500], "label": "it"}',
        '{"coordinate": [250, 500]}',
        '{"x": 250, "y": 500}',
        "(250, 500)",
        '<point x="25.0" y="50.0" alt="it">it</point>',
        '<points x1="25.0" y1="50.0">it</points>',
    ],
)
def test_points_are_found_in_formats_of_model_families(text: str) -> None:
    (point,) = find_regions(text)
    assert (point.kind, point.x, point.y) == ("point", 0.25, 0.5)


def test_box_pixels_are_scaled_by_model_input_size() -> None:
    (box,) = find_regions('{"bbox_2d": [56, 112, 280, 280]}', (560, 560))
    assert box.x == 0.1
    assert box.height == pytest.approx(0.3)


@pytest.mark.parametrize(
    "text", ["", "3", "There are 3, 4 or 5.", "[1, 2, 3]", "[2000, 1, 3000, 2]", "[-5, 1]"]
)
def test_text_without_coordinates_has_no_regions(text: str) -> None:
    assert find_regions(text) == []


def png(size: tuple[int, int], orientation: int = 1) -> bytes:
    stored = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", size, "white").save(stored, "PNG", exif=exif)
    return stored.getvalue()


def changed(image: Image.Image) -> tuple[int, int, int, int] | None:
    """The bounding box of all pixels that are not white."""
    return image.convert("L").point(lambda value: 255 * (value < 250)).getbbox()


def test_box_outline_is_drawn_at_its_coordinates() -> None:
    image = regions.draw_regions(png((200, 100)), [HALF_BOX])
    assert changed(image) == (20, 20, 101, 51)
    assert image.getpixel((60, 35)) == (255, 255, 255)  # its inside can still be seen


def test_marked_image_follows_exif_orientation() -> None:
    turned = png((200, 100), orientation=6)
    assert regions.upright_size(turned) == (100, 200)
    assert regions.draw_regions(turned, [HALF_BOX]).size == (100, 200)


def test_labels_and_points_are_drawn_within_image() -> None:
    marked = [Region("point", 0.5, 0.5, label="Ünï"), Region("box", 0, 0, 1, 1, "at the edge")]
    assert changed(regions.draw_regions(png((300, 300)), marked)) == (0, 0, 300, 300)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".JPEG"])
def test_marked_image_format_follows_file_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"found{suffix}"
    regions.check_target(path)
    regions.save(regions.draw_regions(png((40, 40)), [HALF_BOX]), path)
    with Image.open(path) as saved:
        assert saved.size == (40, 40)


def test_saving_marked_image_reports_unwritable_path() -> None:
    path = Path("/dev/full.png")
    image = Image.new("RGB", (4, 4))
    with pytest.raises(CommandFailed, match="can't write"):
        regions.save(image, path / "x.png")


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, None),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "dumb", "TERM_PROGRAM": "iTerm.app"}, None),
        ({"TERM_PROGRAM": "iTerm.app"}, None),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "iTerm.app"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
    ],
)
def test_graphics_protocol_is_detected_from_environment(
    environment: dict[str, str], protocol: str | None
) -> None:
    assert regions.protocol_of(environment) == protocol


def test_iterm2_image_is_one_escape_sequence() -> None:
    text = regions.sequence(Image.new("RGB", (300, 200), "red"), "iterm2", 80)
    head, _, rest = text.partition(":")
    assert head.startswith("\x1b]1337;File=inline=1;size=")
    assert rest.endswith("\x07\n")
    data = base64.b64decode(rest[:-2])
    assert f"size={len(data)};" in head
    assert Image.open(io.BytesIO(data)).size == (300, 200)


def test_kitty_image_is_sent_in_chunks() -> None:
    noisy = Image.effect_noise((3000, 1500), 100)
    text = regions.sequence(noisy, "kitty", 20)
    *chunks, end = text.split("\x1b\\")
    assert end == "\n"
    assert len(chunks) > 1
    payload = ""
    for number, chunk in enumerate(chunks):
        keys, _, data = chunk.removeprefix("\x1b_G").partition(";")
        assert len(data) <= 4096
        assert f"m={int(number < len(chunks) - 1)}" in keys.split(",")
        assert ("c=20" in keys) is (number == 0)
        payload += data
    assert Image.open(io.BytesIO(base64.b64decode(payload))).size == (1024, 512)
