"""The files of a LoRA adapter, in mlx-vlm's layout or PEFT's. Knows no model.

An adapter adds `scale * x @ a @ b` to some linear layers. mlx-vlm writes `adapters.safetensors`
with `NAME.lora_a` and `NAME.lora_b` (formerly `NAME.A` and `NAME.B`); PEFT
`adapter_model.safetensors` with `base_model.model.NAME.lora_A.weight`, which are transposed. What
an adapter may do besides is refused: nothing of it may be ignored silently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import ADAPTER_CONFIG as CONFIG
from vlm_server.runner.loading.checkpoint.files import read_json

Json = dict[str, Any]

_MLX_WEIGHTS = ("adapters.safetensors", "weights.safetensors")
_PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_SIDES = {".lora_a": "a", ".lora_b": "b", ".A": "a", ".B": "b"}
_PEFT_SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_MAX_NUMBER = 1e6
_MAX_SHOWN = 80
_DTYPES = frozenset({"F32", "F16", "BF16"})
_NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha",
        "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
        "revision", "target_modules", "task_type", "use_rslora"
    }
)  # fmt: skip
"""PEFT's fields that are read here, or have no effect on answers. Others must be unset."""
_PEFT_VALUES = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva")}
"""Further fields, and the values with which they change nothing but what is trained."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a linear layer, `scale * x @ a @ b`; lazy.

    a: (inputs, rank). b: (rank, outputs).
    """

    a: mx.array
    b: mx.array
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its files have it."""

    digest: str
    """SHA-256 in hex of both files."""
    layers: Mapping[str, LowRank]
    """By the name of the linear layer, as the adapter's trainer has it."""
    base_quantization: Mapping[str, Json]
    """Bits, group size and mode of the layers that were quantized in training, by name."""


def read_adapter(folder: Path) -> AdapterFiles:
    """The adapter in `folder`. Raises ModelLoadError if it is damaged or can't be served."""
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} is no adapter: it has no {CONFIG}")
    config = read_json(folder / CONFIG)
    is_pefts = "peft_type" in config
    weights = _weights_in(folder, (_PEFT_WEIGHTS,) if is_pefts else _MLX_WEIGHTS)
    scale = _peft_scale(config) if is_pefts else _mlx_scale(config)
    tensors = _read_tensors(weights)
    layers = _layers(tensors, _PEFT_SIDES if is_pefts else _SIDES, scale, is_pefts=is_pefts)
    rank = config["r"] if is_pefts else _mlx_parameters(config)["rank"]
    if wrong := [name for name, layer in layers.items() if layer.a.shape[1] != rank]:
        raise ModelLoadError(f"{CONFIG} says rank {rank}, and {wrong[0]} has another")
    quantization = config.get("base_quantization", {})
    if not isinstance(quantization, dict):
        raise ModelLoadError(f"{CONFIG}: base_quantization is no object")
    digest = hashlib.sha256()
    for path in (folder / CONFIG, weights):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return AdapterFiles(digest.hexdigest(), layers, quantization)


def _weights_in(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ModelLoadError(f"{folder} has no {names[0]}")


# ---- configurations ----------------------------------------------------------------------


def _mlx_parameters(config: Json) -> Json:
    """The table with rank and scale; the former layout has it at the top."""
    parameters = config.get("lora_parameters", config)
    return parameters if isinstance(parameters, dict) else {}


def _mlx_scale(config: Json) -> float:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ModelLoadError(f"its fine_tune_type is {_shown(kind)}: only 'lora' can be served")
    parameters = _mlx_parameters(config)
    rank = _number(parameters, "rank", minimum=1, whole=True)
    if "lora_parameters" in config:
        return _number(parameters, "scale")
    return _number({"alpha": 0.1} | parameters, "alpha") / rank


def _peft_scale(config: Json) -> float:
    if config["peft_type"] != "LORA":
        raise ModelLoadError(
            f"its peft_type is {_shown(config['peft_type'])}: only 'LORA' can be served"
        )
    for name, value in config.items():
        is_known = name in _NEUTRAL or value in _PEFT_VALUES.get(name, ())
        if value and not is_known:
            raise ModelLoadError(f"its {name[:60]} is {_shown(value)}, which can't be served")
    rank = _number(config, "r", minimum=1, whole=True)
    alpha = _number({"lora_alpha": 8} | config, "lora_alpha")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _number(table: Json, name: str, minimum: float = -_MAX_NUMBER, *, whole: bool = False) -> float:
    value: Any = table.get(name)
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not minimum <= value <= _MAX_NUMBER:
        raise ModelLoadError(f"{CONFIG}: {name} is {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN]


# ---- tensors -----------------------------------------------------------------------------


def _read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a file, lazy. Raises ModelLoadError if it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:  # which checks the header
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is no safetensors file: {error}") from None
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ModelLoadError(f"{name[:200]!r} holds numbers of type {dtype}")
    tensors: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    return tensors


def _layers(
    tensors: Mapping[str, mx.array], sides: Mapping[str, str], scale: float, *, is_pefts: bool
) -> dict[str, LowRank]:
    """The tensors of `a` and `b` by layer. Raises ModelLoadError for any other tensor."""
    pairs = dict[str, dict[str, mx.array]]()
    for key, tensor in tensors.items():
        ending = next((ending for ending in sides if key.endswith(ending)), None)
        if ending is None:
            is_dora = key.endswith((".m", ".lora_magnitude_vector"))
            why = "DoRA" if is_dora else "weights of its own, not only LoRA"
            raise ModelLoadError(f"it has {key[:200]!r}: {why}, which can't be served")
        if tensor.ndim != 2:
            raise ModelLoadError(f"{key[:200]!r} is no matrix")
        name = key.removesuffix(ending).removeprefix(_PEFT_PREFIX if is_pefts else "")
        pairs.setdefault(name, {})[sides[ending]] = tensor.T if is_pefts else tensor
    if not pairs:
        raise ModelLoadError("it has no tensors")
    for name, pair in pairs.items():
        if len(pair) != 2 or pair["a"].shape[1] != pair["b"].shape[0]:
            raise ModelLoadError(f"the two matrices of {name[:200]!r} do not fit each other")
    return {name: LowRank(pair["a"], pair["b"], scale) for name, pair in pairs.items()}
