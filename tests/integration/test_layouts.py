"""Checkpoints as people have them: names, configurations and files of other programs."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from tests.integration.harness import (
    GREEDY,
    EngineHarness,
    ask,
    load_model,
    new_preparer,
    prompt_of,
)
from tests.support.images import random_image
from tests.tiny_models import FAMILIES
from tests.tiny_models.fixtures import TinyModel
from vlm_server.errors import ModelLoadError
from vlm_server.runner.families.table import FAMILIES as ROWS
from vlm_server.runner.loading.facts import model_facts

pytestmark = pytest.mark.families()

Json = dict[str, Any]

NOT_IN_TRANSFORMERS = (
    "dots_ocr", "fastvlm", "internvl_chat", "jina_vlm", "kimi_vl", "minicpmo", "molmo",
    "nemotron_h_nano_omni"
)  # fmt: skip
"""Families whose configuration transformers does not write."""
HAS_TEMPLATE = "jina_vlm"
"""The family for which mlx-vlm has a template, where a checkpoint has none."""
NOT_READ = ("kimi_k25", "molmo2", "step3p7")
"""Families that mlx-vlm reads only as their publishers write them."""


@pytest.fixture
def copy_of(tiny_model: TinyModel, tmp_path: Path) -> Callable[[str], Path]:
    """A function to a copy of a family's tiny checkpoint, to be changed."""
    return lambda family: shutil.copytree(tiny_model(family), tmp_path / "model")


@pytest.fixture(scope="session")
def answer_of(tiny_model: TinyModel) -> Callable[[str], list[int]]:
    found: dict[str, list[int]] = {}

    def answer(family: str) -> list[int]:
        if family not in found:
            found[family] = answers(tiny_model(family))
        return found[family]

    return answer


def answers(folder: Path) -> list[int]:
    """Greedy tokens of a text long enough for rotations and windows to tell, and of an image."""
    loaded = load_model(folder)
    engine = EngineHarness(loaded, new_preparer(loaded))
    text = "Look at the second button" + ", and read the number" * 12
    first = engine.answer(ask("text", text, sampling=GREEDY))
    return first + engine.answer(
        ask("image", random_image(1), "Describe this image.", sampling=GREEDY)
    )


def read(folder: Path) -> Json:
    found: Json = json.loads((folder / "config.json").read_text())
    return found


def write(folder: Path, config: Json) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- configurations of transformers 5 ------------------------------------------------


def of_transformers_5(config: Json) -> Json:
    written: Json = json.loads(AutoConfig.for_model(**copy.deepcopy(config)).to_json_string())
    return written


def as_transformers_5_saves(config: Json) -> Json:
    """`config` as transformers 5 writes it, without obsolete keys."""
    if config["model_type"] == "pixtral":  # transformers has its parts alone
        parts = {key: of_transformers_5(config[key]) for key in ("text_config", "vision_config")}
        return config | parts
    saved = of_transformers_5(config)
    text = saved.get("text_config", {})
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        text.pop(name, None)
    return saved


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in (*NOT_IN_TRANSFORMERS, *NOT_READ)]
)
def test_transformers_5_config_answers_as_transformers_4_config(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]], family: str
):
    folder = copy_of(family)
    new = as_transformers_5_saves(read(folder))
    assert "rope_parameters" in json.dumps(new)
    write(folder, new)
    assert answers(folder) == answer_of(family)


def test_number_for_boolean_is_read(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]]
):
    """Llama 4 as it was first published."""
    folder = copy_of("llama4")
    config = read(folder)
    config["text_config"]["attn_temperature_tuning"] = 4
    write(folder, config)
    assert answers(folder) == answer_of("llama4")


@pytest.mark.parametrize("family", NOT_READ)
def test_unread_transformers_5_config_is_refused(copy_of: Callable[[str], Path], family: str):
    folder = copy_of(family)
    write(folder, as_transformers_5_saves(read(folder)))
    assert "mlx-vlm can't load this checkpoint" in refusal(folder)


def test_internvl_llm_config_is_read_as_text_config(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]]
):
    folder = copy_of("internvl_chat")
    config = read(folder)
    del config["text_config"]
    write(folder, config)
    assert answers(folder) == answer_of("internvl_chat")
    config["llm_config"]["model_type"] = "internlm2"
    write(folder, config)
    with pytest.raises(ModelLoadError, match="over internlm2 is not served"):
        load_model(folder)


def test_local_and_global_rope_bases_are_both_read(copy_of: Callable[[str], Path]):
    folder = copy_of("gemma3")
    config = read(folder)
    text = config["text_config"]
    old = {"rope_local_base_freq": 500.0, "rope_global_base_freq": 70_000.0}
    scaling = {"rope_type": "linear", "factor": 4.0}
    write(folder, config | {"text_config": text | old | {"rope_scaling": scaling}})
    expected = answers(folder)
    text.pop("sliding_window_pattern")
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": scaling | {"rope_theta": 70_000.0},
    }
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    text |= {"rope_parameters": parameters, "layer_types": kinds}
    write(folder, config | {"text_config": text})
    assert answers(folder) == expected
    write(folder, config | {"text_config": text | {"layer_types": kinds[::-1]}})
    assert "layer_types" in refusal(folder)


def test_rope_scaling_ignored_by_mlx_vlm_is_warned_about(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    folder = copy_of("smolvlm")
    config = read(folder)
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": config["text_config"]["rope_theta"]}
    config["text_config"].pop("rope_theta")
    config["text_config"]["rope_parameters"] = rope
    write(folder, config)
    load_model(folder)
    assert [each for each in caplog.messages if "rope is scaled (llama3)" in each]


# ---- names of tokens and of weights --------------------------------------------------


@pytest.mark.parametrize("family", ["glm4v", "llava", "gemma3", "internvl", "qwen2_vl"])
@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_image_token_is_read_under_either_config_key(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]], family: str, name: str
):
    folder = copy_of(family)
    config = read(folder)
    ids = [config.pop(key, None) for key in ("image_token_id", "image_token_index")]
    token = next(each for each in ids if each is not None)
    for key in ("video_token_index", "video_token_id"):
        config.pop(key, None)
    write(folder, config | {name: token})
    assert load_model(folder).spec.image_token_id == token
    assert answers(folder) == answer_of(family)


SINCE_4_52 = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
QWENS = (("vision_tower.", "model.visual."), *SINCE_4_52)
IDEFICS = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model.text_model."),
    ("vision_model.", "model.vision_model."),
    ("connector.", "model.connector."),
)
RENAMED = {
    "gemma3": SINCE_4_52,
    "internvl": SINCE_4_52,
    "llava": SINCE_4_52,
    "mistral3": (("vision_tower.vision_model.", "model.vision_tower."), *SINCE_4_52),
    "pixtral": (("vision_tower.vision_model.", "model.vision_tower."), *SINCE_4_52),
    "qwen2_vl": QWENS,
    "qwen2_5_vl": QWENS,
    "qwen3_vl": QWENS,
    "glm4v": QWENS,
    "gemma4": (*SINCE_4_52, ("embed_vision.", "model.embed_vision.")),
    "smolvlm": IDEFICS,
    "idefics3": IDEFICS,
}


@pytest.mark.parametrize("family", RENAMED)
def test_weights_with_transformers_4_52_names_give_equal_answer(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]], family: str
):
    folder = copy_of(family)
    weights = load_file(folder / "model.safetensors")

    def renamed(name: str) -> str:
        new = next(((a, b) for a, b in RENAMED[family] if name.startswith(a)), ("", ""))
        return new[1] + name[len(new[0]) :]

    saved = {renamed(name): array for name, array in weights.items()}
    assert len(saved) == len(weights)
    assert saved.keys() != weights.keys()
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    assert answers(folder) == answer_of(family)


# ---- files that are none of the model's ----------------------------------------------


def test_macos_metadata_files_in_checkpoint_are_ignored(
    copy_of: Callable[[str], Path], answer_of: Callable[[str], list[int]]
):
    folder = copy_of("qwen2_5_vl")
    apple_double = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        "
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(apple_double)
    (folder / ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1")
    (folder / "._model-00001-of-00002.safetensors").write_bytes(apple_double)
    assert answers(folder) == answer_of("qwen2_5_vl")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "hqq"])
def test_unsupported_quantization_is_refused(copy_of: Callable[[str], Path], method: str):
    folder = copy_of("qwen2_5_vl")
    write(folder, read(folder) | {"quantization_config": {"quant_method": method, "bits": 4}})
    reason = refusal(folder)
    assert "mlx-vlm does not read" in reason
    assert "mlx-community" in reason


def test_old_bitsandbytes_config_is_refused(copy_of: Callable[[str], Path]):
    folder = copy_of("gemma3")
    config = read(folder)
    config["text_config"]["quantization_config"] = {"load_in_4bit": True}
    write(folder, config)
    assert "bitsandbytes" in refusal(folder)


def test_mlx_quantization_config_is_accepted(
    tiny_model: TinyModel, tmp_path: Path, copy_of: Callable[[str], Path]
):
    folder = copy_of("qwen2_5_vl")
    table = {"group_size": 32, "bits": 4, "quant_method": "awq"}
    write(folder, read(folder) | {"quantization": table, "quantization_config": table})
    load_model(folder)  # mlx_vlm's own AWQ: whatever found the scales, MLX has packed them


# ---- chat templates ------------------------------------------------------------------


def without_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink()
    return folder


def prompt_text(folder: Path, *parts: Any, **settings: Any) -> str:
    loaded = load_model(folder, **settings)
    prompt = prompt_of(new_preparer(loaded), ask("a", *parts))
    text: str = loaded.spec.backend.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
    return text


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if not ROWS[f].chat_template and f != HAS_TEMPLATE]
)
def test_missing_chat_template_gets_turn_marks_and_warning(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture, family: str
):
    folder = without_template(copy_of(family))
    text = prompt_text(folder, random_image(1), "What is this?")
    (told,) = [each for each in caplog.messages if "has no chat template" in each]
    assert "--chat-template" in told
    marks = {"<|im_start|>": "user\n", "<start_of_turn>": "user\n", "USER:": " "}
    (mark,) = [each for each in marks if each in told]
    assert mark + marks[mark] in text
    assert text.count("What is this?") == 1
    assert text.rstrip().endswith(("assistant", "model", "ASSISTANT:"))
    loaded = load_model(folder)
    assert model_facts(loaded, folder).warnings == (told,)
    engine = EngineHarness(loaded, new_preparer(loaded))
    first, second = (engine.answer(ask(str(n), random_image(n), "What?")) for n in (1, 2))
    assert first != second, "the image is seen"


def test_end_of_turn_of_fallback_template_ends_answer(copy_of: Callable[[str], Path]):
    folder = without_template(copy_of("qwen2_5_vl"))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text()) | {"eos_token_id": 3}
        (folder / name).write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    host = load_model(folder).spec
    assert host.tokenizer.convert_tokens_to_ids("<|im_end|>") in host.eos_token_ids


def test_chat_template_setting_replaces_checkpoints_template(
    copy_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}"
        "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}!"
    )
    for folder in (copy_of("qwen2_5_vl"), tmp_path / "model"):
        text = prompt_text(folder, "What is this?", chat_template=str(file))
        assert text == "[user] What is this?!"
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert not caplog.messages
    with pytest.raises(
        ModelLoadError, match=r"chat_template: can't read .*missing\.jinja: No such"
    ):
        load_model(folder, chat_template=str(tmp_path / "missing.jinja"))
    file.write_text("{% for")
    with pytest.raises(ModelLoadError):
        new_preparer(load_model(folder, chat_template=str(file)))
