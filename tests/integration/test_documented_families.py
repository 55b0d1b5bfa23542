"""The table of families, the list that loading knows, and the tiny checkpoints name the same."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.harness import load_model
from tests.tiny_models import FAMILIES, build
from vlm_server.runner.model.families import FAMILIES as ROWS

TABLE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_table_is_what_is_checked():
    checked = TABLE.read_text().partition("## Others")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", checked, re.MULTILINE)) == set(ROWS)
    with_video = {name for name, family in ROWS.items() if family.takes_videos}
    assert set(re.findall(r"^\| `(\w+)` .* whole \|", checked, re.MULTILINE)) == with_video
    assert set(FAMILIES) == set(ROWS)
    assert all(family.is_checked for family in ROWS.values())


@pytest.mark.parametrize("family", ["qwen3_vl", "pixtral"])
def test_a_checked_family_loads_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
):
    with caplog.at_level(logging.WARNING, "vlm_server"):
        load_model(build(family, tmp_path))
    assert not caplog.records


def test_another_family_loads_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LLaVA-NeXT: LLaVA's modules and one more vector."""
    folder = build("llava", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llava_next"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    newline = np.zeros(config["text_config"]["hidden_size"], np.float32)
    save_file(weights | {"image_newline": newline}, folder / "model.safetensors", {"format": "mlx"})
    with caplog.at_level(logging.WARNING, "vlm_server"):
        assert load_model(folder).family.name == "llava_next"
    (record,) = caplog.records
    assert "llava_next is not one of the families" in record.getMessage()
