"""Unservable checkpoints are refused before any of their code runs; facts read from the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.integration.checkpoint_files import edit_json
from tests.integration.harness import load_model
from tests.tiny_models import FAMILIES, build
from vlm_server.errors import ModelLoadError
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.loaded import LoadedModel

pytestmark = pytest.mark.families()

EVIL = "evil.Evil"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build("qwen2_5_vl", tmp_path / "model")


@pytest.fixture
def plant(checkpoint: Path, tmp_path: Path) -> Callable[[], Path]:
    """Put code into the checkpoint that leaves a mark when it runs; returns the mark's path."""

    def planted() -> Path:
        mark = tmp_path / "mark"
        code = f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n"
        (checkpoint / "evil.py").write_text(code)
        return mark

    return planted


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, **settings)
    return str(caught.value)


# ---- code ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evil.py", "./evil.py", "", None])
def test_model_file_is_refused_before_it_runs(
    checkpoint: Path, plant: Callable[[], Path], name: str | None
):
    mark = plant()
    edit_json(checkpoint / "config.json", model_file=name)
    assert "model_file" in refusal(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("family", ["got", "GOT", "inkling", "inkling_mm_model", "moondream1"])
def test_family_running_checkpoint_code_is_refused(
    checkpoint: Path, plant: Callable[[], Path], family: str
):
    """mlx-vlm's processors of these families always trust remote code."""
    mark = plant()
    automatic = {"AutoTokenizer": [EVIL, EVIL]}
    edit_json(checkpoint / "config.json", model_type=family, auto_map=automatic)
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Evil", auto_map=automatic)
    assert "runs code" in refusal(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": {"AutoConfig": EVIL, "AutoModel": EVIL}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [EVIL, EVIL]}}),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": [EVIL, EVIL]}, "tokenizer_class": "Evil"},
        ),
        ("processor_config.json", {"auto_map": {"AutoProcessor": EVIL}}),
        (
            "preprocessor_config.json",
            {"auto_map": {"AutoImageProcessor": EVIL}, "image_processor_type": "Evil"},
        ),
    ],
)
def test_auto_map_code_never_runs(tmp_path: Path, family: str, file: str, changes: dict[str, Any]):
    folder, mark = build(family, tmp_path / "model"), tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n")
    edit_json(folder / file, **changes)
    with contextlib.suppress(ModelLoadError):
        load_model(folder)
    assert not mark.exists()


# ---- folders that are no checkpoints -------------------------------------------------


def test_missing_folder_is_refused(tmp_path: Path):
    assert "config.json" in refusal(tmp_path / "nothing")


def test_empty_folder_is_refused(tmp_path: Path):
    assert "config.json" in refusal(tmp_path)


def test_repository_name_is_not_fetched():
    assert "config.json" in refusal(Path("some-owner/some-model"))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"model_type": 3}', "\xff"])
def test_unusable_config_is_refused(checkpoint: Path, content: str):
    (checkpoint / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(checkpoint)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_directory_in_place_of_file_is_refused(checkpoint: Path, file: str):
    (checkpoint / file).unlink()
    (checkpoint / file).mkdir()
    assert file in refusal(checkpoint)


def test_encoder_decoder_model_is_refused(checkpoint: Path):
    edit_json(checkpoint / "config.json", is_encoder_decoder=True)
    assert "encoder-decoder" in refusal(checkpoint)


def test_florence_is_refused_as_encoder_decoder(checkpoint: Path):
    edit_json(checkpoint / "config.json", model_type="florence2")
    assert "encoder-decoder" in refusal(checkpoint)


def test_unknown_family_is_refused(checkpoint: Path):
    edit_json(checkpoint / "config.json", model_type="no_such_family")
    assert "no_such_family" in refusal(checkpoint)


def test_weights_of_other_family_are_refused(checkpoint: Path):
    """A vision-language model's weights under a text family's name."""
    config = json.loads((checkpoint / "config.json").read_text())
    text = {key: value for key, value in config.items() if "vision" not in key}
    for key in ("image_token_id", "video_token_id", "rope_scaling"):
        text.pop(key, None)
    (checkpoint / "config.json").write_text(json.dumps(text | {"model_type": "qwen2"}))
    assert refusal(checkpoint)


def test_missing_weights_are_refused(checkpoint: Path):
    (checkpoint / "model.safetensors").unlink()
    assert refusal(checkpoint).endswith(
        "has no *.safetensors: the checkpoint is not complete; download it again"
    )


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, 20_000, -1])
def test_truncated_weights_are_refused(checkpoint: Path, keep: int):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert f"{weights} is cut short" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b"\x02" + bytes(7) + b"{}" + bytes(9), "mlx-vlm can't load"),
        (b"\x02" + bytes(7) + b"[]", "no safetensors file"),
        (b"\x09" + bytes(7) + b'{"a": {}}', "no safetensors file"),
        (b"<html>not found</html>", "no safetensors file"),
    ],
)
def test_invalid_weights_file_is_refused(checkpoint: Path, content: bytes, reason: str):
    (checkpoint / "model.safetensors").write_bytes(content)
    message = refusal(checkpoint)
    assert reason in message
    assert "\n" not in message


def test_missing_weight_shard_is_refused(checkpoint: Path):
    edit_json(
        checkpoint / "model.safetensors.index.json", weight_map={"x": "model-2-of-2.safetensors"}
    )
    load_model(checkpoint)  # the index is old: all the weights are there
    edit_json(checkpoint / "config.json", num_hidden_layers=9)
    assert "no model-2-of-2.safetensors, which its index names" in refusal(checkpoint)


def test_weights_of_another_configuration_are_refused(checkpoint: Path):
    edit_json(checkpoint / "config.json", num_hidden_layers=9)
    message = refusal(checkpoint)
    assert "Missing 60 parameters: language_model.model.layers.4" in message
    assert len(message) < 400


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
def test_missing_config_key_is_refused(checkpoint: Path, key: str):
    content = json.loads((checkpoint / "config.json").read_text())
    del content[key]
    (checkpoint / "config.json").write_text(json.dumps(content))
    assert f"config.json lacks '{key}'" in refusal(checkpoint)


def test_missing_tokenizer_is_refused(checkpoint: Path):
    (checkpoint / "tokenizer.json").unlink()
    assert refusal(checkpoint).endswith(
        "has no tokenizer.json: the checkpoint is not complete; download it again"
    )


def test_invalid_tokenizer_file_is_refused(checkpoint: Path):
    (checkpoint / "tokenizer.json").write_text("{}")
    assert refusal(checkpoint).endswith("'added_tokens' is missing")


@pytest.mark.parametrize("file", ["tokenizer.json", "preprocessor_config.json"])
def test_truncated_json_file_is_refused(checkpoint: Path, file: str):
    (checkpoint / file).write_text((checkpoint / file).read_text()[:50])
    assert f"can't read {checkpoint / file}: " in refusal(checkpoint)


# ---- facts of a loaded model ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "temperature", "top_p"),
    [
        ({"do_sample": False, "temperature": 0.7}, 0.0, 1.0),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8}, 0.7, 0.8),
        ({"do_sample": True}, 1.0, 1.0),
        ({"do_sample": True, "temperature": None, "top_p": None}, 1.0, 1.0),
    ],
)
def test_default_sampling_comes_from_generation_config(
    checkpoint: Path, changes: dict[str, Any], temperature: float, top_p: float
):
    edit_json(checkpoint / "generation_config.json", **changes)
    loaded = load_model(checkpoint)
    default = loaded.default_sampling
    assert (default.temperature, default.top_p) == (temperature, top_p)


def test_rest_of_default_sampling_comes_from_generation_config(checkpoint: Path):
    values: dict[str, Any] = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    edit_json(checkpoint / "generation_config.json", **values)
    default = load_model(checkpoint).default_sampling
    assert {name: getattr(default, name) for name in values} == values
    edit_json(checkpoint / "generation_config.json", **dict.fromkeys(values))
    default = load_model(checkpoint).default_sampling
    assert (default.top_k, default.min_p, default.repetition_penalty) == (0, 0.0, 1.0)


def test_missing_generation_config_defaults_to_plain_sampling(checkpoint: Path):
    (checkpoint / "generation_config.json").unlink()
    loaded = load_model(checkpoint)
    default = loaded.default_sampling
    assert (default.temperature, default.top_p, default.top_k) == (1.0, 1.0, 0)
    assert (default.min_p, default.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(("limit", "expected"), [(None, 8192), (100, 100), (10**9, 8192)])
def test_context_is_smaller_of_model_and_settings(
    checkpoint: Path, limit: int | None, expected: int
):
    loaded = load_model(checkpoint, max_context_tokens=limit)
    assert loaded.spec.context_tokens == expected


@pytest.mark.parametrize(("limit", "expected"), [(None, 600), (100, 100), (7000, 7000)])
def test_context_is_usable_length_unless_set(checkpoint: Path, limit: int | None, expected: int):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | {"usable_context_tokens": 600}
    path.write_text(json.dumps(config))
    assert load_model(checkpoint, max_context_tokens=limit).spec.context_tokens == expected


def test_vocabulary_size_equals_width_of_logits(served: tuple[LoadedModel, MultimodalPreparer]):
    """For any name in the configuration, and without a forward pass."""
    loaded, _ = served
    output = loaded.language_model(mx.array([[1, 2]]))
    loaded.forget_positions()
    assert output.logits.shape[-1] == loaded.spec.vocabulary_size
    if loaded.family.name not in (
        "jina_vlm",
        "molmo",
        "molmo2",
    ):  # whose image tokens have no logits
        assert loaded.spec.backend.get_vocab_size() <= loaded.spec.vocabulary_size


def test_eos_tokens_of_all_config_files_are_used(checkpoint: Path):
    edit_json(checkpoint / "generation_config.json", eos_token_id=[3, 4])
    edit_json(checkpoint / "config.json", eos_token_id=5)
    loaded = load_model(checkpoint)
    assert {3, 4, 5, loaded.spec.tokenizer.eos_token_id} <= loaded.spec.eos_token_ids


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", mx.float32), ("float32", mx.float32), ("bfloat16", mx.bfloat16)],
)
def test_weights_have_requested_dtype(checkpoint: Path, name: str, expected: mx.Dtype):
    loaded = load_model(checkpoint, dtype=name)  # type: ignore[arg-type]
    types = {array.dtype for _, array in tree_flatten(loaded.model.parameters())}
    assert types == {expected}
