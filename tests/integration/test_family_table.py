"""The family table agrees with the models; a family is added by its row."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
import pytest
from mlx_vlm.models import qwen2_vl
from mlx_vlm.models.base import install_auto_processor_patch
from mlx_vlm.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers import AutoProcessor

from tests.integration.harness import (
    EngineHarness,
    Served,
    ask,
    encode_works,
    load_model,
    new_preparer,
)
from tests.integration.test_videos import SMALL
from tests.support.images import random_image
from tests.support.mechanisms import ATOMIC
from tests.tiny_models.fixtures import TinyModel
from vlm_server.interfaces.model_spec import ChunkPolicy, MRope
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.families.family import MRopeRule, Spelling
from vlm_server.runner.families.table import FAMILIES, row_of
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import probe


def test_family_row_matches_its_probed_properties(family: str, mlx_vlms: LoadedModel):
    """But for what can't be probed: which rule of M-RoPE, whether videos are taken, what pointing
    takes, what mlx-vlm has wrong, how its files were spelled, whether images can be stacked or
    are cut into tiles, whether rows must be even, whether it is asked for yes or no.
    """
    row = FAMILIES[family]
    model = getattr(mlx_vlms.model, row.part) if row.part else mlx_vlms.model
    found = probe(family, model, mlx_vlms.processor)
    assert row_of({"model_type": family}) is row
    assert (row.mrope is None) == (found.mrope is None)
    assert found.fix in (None, row.fix)
    assert found == replace(
        row,
        is_checked=False,
        is_shardable=False,
        takes_videos=False,
        mrope=found.mrope,
        fix=found.fix,
        grounding_tokens=0,
        coordinates="",
        image_text="",
        frame_tokens=(),
        image_mark="",
        placeholder="",
        image_token="",
        chat_template="",
        part="",
        text_types=(),
        other_texts=(),
        deepstack=found.deepstack,
        stacks_images=False,
        tiling=None,
        needs_even_rows=False,
        aliases=(),
        spelling=Spelling(),
        judges=None,
    )


def test_loaded_model_has_its_family_row(served: Served):
    loaded = served[0]
    assert loaded.family is FAMILIES[loaded.family.name]
    has_grids = loaded.family.mrope not in (None, MRopeRule.IN_ORDER)
    assert isinstance(loaded.spec.mrope, MRope) == has_grids
    assert (loaded.spec.video_token_id is not None) == loaded.family.takes_videos
    assert (loaded.spec.chunk_policy is ChunkPolicy.ANYWHERE) != (loaded.family.name in ATOMIC)


# ---- a new family --------------------------------------------------------------------


@pytest.fixture
def new_family(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of Qwen2-VL under a name that only mlx-vlm knows."""
    own = AutoProcessor.__dict__["from_pretrained"]
    monkeypatch.setattr(AutoProcessor, "from_pretrained", own)  # taken back afterwards
    install_auto_processor_patch("new_vl", Qwen2VLProcessor)
    monkeypatch.setitem(sys.modules, "mlx_vlm.models.new_vl", qwen2_vl)
    folder = shutil.copytree(tiny_model("qwen2_vl"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "new_vl"}))
    return folder


def answers(served: Served) -> list[list[int]]:
    engine = EngineHarness(*served)
    return [
        engine.answer(ask(f"{number}", *parts))
        for number, parts in enumerate(
            [("Hi",), (random_image(1), "what?"), ("so", random_image(2), "?")]
        )
    ]


def test_family_without_row_is_probed_and_warned_about(
    new_family: Path, load_tiny: Callable[[str], Served], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "vlm_server"):
        loaded = load_model(new_family, allow_unchecked=True)
    assert [message.split()[0] for message in caplog.messages] == ["new_vl"]
    assert not loaded.family.is_checked
    assert callable(loaded.spec.mrope), "its model is asked for positions"
    assert loaded.spec.video_token_id is None
    assert answers((loaded, new_preparer(loaded))) == answers(load_tiny("qwen2_vl"))


def test_family_needs_only_its_table_row(
    new_family: Path,
    load_tiny: Callable[[str], Served],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setitem(FAMILIES, "new_vl", replace(FAMILIES["qwen2_vl"], name="new_vl"))
    with caplog.at_level(logging.WARNING, "vlm_server"):
        loaded = load_model(new_family)
    assert not caplog.records
    served = loaded, new_preparer(loaded)
    assert answers(served) == answers(load_tiny("qwen2_vl"))
    video = ask("video", SMALL, "what?")
    assert EngineHarness(*served).answer(video) == EngineHarness(*load_tiny("qwen2_vl")).answer(
        video
    )


# ---- encoding ------------------------------------------------------------------------

WRITTEN_ALIKE = ("_deepstack_target_layers",)
"""What mlx-vlm writes with each image, the same for all, as its row's fix does at load."""


def attributes(model: nn.Module) -> dict[tuple[str, str], object]:
    """Every attribute of every module, arrays and others."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**module, **vars(module)}.items()
    }


def changed(loaded: LoadedModel, preparer: MultimodalPreparer, part: object) -> list[str]:
    """The attributes that encoding a prompt's spans writes."""
    works = encode_works(preparer, ask("a", part, "what?"))  # type: ignore[arg-type]
    before = attributes(loaded.model)
    for work in works:
        ImageEncoder(loaded).encode([work])
    after = attributes(loaded.model)
    written = (key for key in before | after if before.get(key) is not after.get(key))
    return [".".join(key) for key in written if key[1] not in WRITTEN_ALIKE]


def test_encoding_writes_nothing_on_model(served: Served):
    """Another thread runs the language model meanwhile."""
    for part in (random_image(1), SMALL):
        assert changed(*served, part) == []


def test_positions_written_by_mlx_vlm_are_detected_and_cleared(
    load_mlx_vlms: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
):
    """The test above can fail: glm4v's own way to encode leaves positions on the model."""
    loaded = load_mlx_vlms("glm4v")
    preparer = new_preparer(loaded)
    loaded.forget_positions()  # those of other tests
    assert changed(loaded, preparer, random_image(1)) == []
    monkeypatch.setattr(LoadedModel, "forget_positions", lambda _: None)
    names = changed(loaded, preparer, random_image(1))
    monkeypatch.undo()
    loaded.forget_positions()
    assert any("_position_ids" in name for name in names)


def test_position_writing_encode_excludes_language_model(
    tiny_model: TinyModel, load_tiny: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
):
    """As of a family without a row: its `get_input_embeddings` writes on the shared module."""
    monkeypatch.setitem(FAMILIES, "glm4v", replace(FAMILIES["glm4v"], tower=None))
    loaded = load_model(tiny_model("glm4v"))
    calls = set[str]()

    def watch(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            assert cast("threading.Lock", loaded.position_lock).locked()
            assert loaded.language_model._position_ids is None
            calls.add(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(type(loaded.model), "get_input_embeddings")
    watch(type(loaded.language_model), "__call__")
    found = answers((loaded, new_preparer(loaded)))
    assert calls == {"get_input_embeddings", "__call__"}
    monkeypatch.undo()
    assert found == answers(load_tiny("glm4v"))


def test_language_model_is_locked_only_by_position_writing_encodes(served: Served):
    family = served[0].family
    writes = family.tower is None and family.mrope is not None
    assert isinstance(served[0].position_lock, nullcontext) != writes
    assert not writes or family.name in ("glm_ocr", "minicpmo", "paddleocr_vl")
