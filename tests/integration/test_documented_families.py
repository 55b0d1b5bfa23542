"""The table of families, the list that loading knows, and the tiny checkpoints name the same."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from tests.integration.harness import load_model
from tests.tiny_models import FAMILIES, build
from vlm_server.errors import ModelLoadError
from vlm_server.runner.families.table import FAMILIES as ROWS
from vlm_server.runner.families.table import WRONG, row_of
from vlm_server.runner.loading.facts import model_facts

WRITING = [family for family in ROWS.values() if family.embeds is None]
VISION_LANGUAGE = [family for family in WRITING if family.reads_images]
EMBEDDINGS = Path(__file__).parents[2] / "docs" / "embeddings.md"
TABLE = Path(__file__).parents[2] / "docs" / "families.md"
_TEXT = {"afm7", "hy_v4", "llada2_moe", "phi3small"}
"""Families of `WRONG` that read texts alone."""


def test_documented_families_are_checked_families():
    checked = TABLE.read_text().partition("## Text models")[0]
    names = {family.name for family in VISION_LANGUAGE}
    assert set(re.findall(r"^\| `(\w+)`", checked, re.MULTILINE)) == names
    with_video = {family.name for family in VISION_LANGUAGE if family.takes_videos}
    assert set(re.findall(r"^\| `(\w+)` .* whole \|", checked, re.MULTILINE)) == with_video
    assert set(FAMILIES) == names
    assert all(family.is_checked for family in ROWS.values())
    for family in VISION_LANGUAGE:
        for alias in family.aliases:
            assert f"`{family.name}` (`{alias}`)" in checked


def test_documented_capabilities_match_family_table():
    table = TABLE.read_text().partition("## What each family supports")[2].partition("## ")[0]
    seen = set[str]()
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        families, _, _, video, coordinates = (cell.strip() for cell in line.split("|")[1:-1])
        for name in re.findall(r"`(\w+)`", families):
            seen.add(name)
            assert ROWS[name].takes_videos == (video == "whole"), name
            assert ROWS[name].coordinates in ("", coordinates), name
    assert seen == {family.name for family in VISION_LANGUAGE}


def test_documented_text_families_are_those_of_family_table():
    section = TABLE.read_text().partition("## Text models")[2]
    section = section.partition("## Models that make vectors")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row))}
    assert named == {family.name for family in WRITING if not family.reads_images}
    aliases = {
        name
        for row in rows
        for names in re.findall(r"\((.*?)\)", row)
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert all(row_of({"model_type": alias}) is not None for alias in aliases)


def test_documented_embedding_families_are_those_of_family_table():
    section = EMBEDDINGS.read_text().partition("## Families")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", section, re.MULTILINE)
    reads = {
        name: (media, made)
        for names, media, made in rows
        for name in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", names))
    }
    families = {family.name: family for family in ROWS.values() if family.embeds is not None}
    assert reads.keys() == families.keys()
    for name, (media, made) in reads.items():
        family = families[name]
        assert family.embeds is not None
        assert ("images" in media) == family.reads_images
        assert ("videos" in media) == family.takes_videos
        assert ("each token" in made) == family.embeds.is_multi
        assert ("score" in made) == family.embeds.of_pairs


@pytest.mark.parametrize("family", ["qwen3_vl", "pixtral"])
def test_checked_family_loads_without_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
):
    with caplog.at_level(logging.WARNING, "vlm_server"):
        load_model(build(family, tmp_path))
    assert not caplog.records


def test_unchecked_family_loads_with_warning_only_if_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    folder = build("pixtral", tmp_path)
    monkeypatch.delitem(ROWS, "pixtral")
    with pytest.raises(ModelLoadError, match=r"pixtral is not one of .*--allow-unchecked"):
        load_model(folder)
    with caplog.at_level(logging.WARNING, "vlm_server"):
        loaded = load_model(folder, allow_unchecked=True)
    assert loaded.family.name == "pixtral"
    (record,) = caplog.records
    assert "pixtral is not one of the families" in record.getMessage()
    assert model_facts(loaded, folder).warnings == (record.getMessage(),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "mlx-vlm has no family 't5'"),
        ("gemma3n_text", "mlx-vlm has no family 'gemma3n_text'"),
        ("qwen3_5_mtp", "no language model"),
        ("sam3d_body", "no language model"),
        ("yolo11", "no language model"),
    ],
)
def test_family_that_writes_no_text_is_refused_whatever_is_allowed(
    tmp_path: Path, name: str, reason: str
):
    folder = build("llava", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": name}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        load_model(folder, allow_unchecked=True)


@pytest.mark.parametrize("family", sorted({*WRONG, "llava-qwen2"} - {"llava_bunny"}))
def test_known_wrong_family_is_refused_with_reason(tmp_path: Path, family: str):
    folder = build("llama" if family in _TEXT else "llava", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": family}
    (folder / "config.json").write_text(json.dumps(config))
    reason = WRONG["llava_bunny" if family == "llava-qwen2" else family]
    with pytest.raises(ModelLoadError, match=re.escape(f"{family} is not served: {reason}")):
        load_model(folder, allow_unchecked=True)


def test_known_wrong_families_are_documented():
    others = TABLE.read_text().partition("## Others")[2]
    assert set(WRONG) <= set(re.findall(r"`(\w+)`", others))
