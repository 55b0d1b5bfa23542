"""What is known of the loaded model, in Ollama's words."""

from __future__ import annotations

import hashlib

import msgspec

from vlm_server.protocol import ModelFacts

_CAPABILITIES = ("completion", "vision", "tools", "thinking")
"""Those that Ollama's clients know."""
_OF_ALL = ("completion", "vision")
"""What every model has that is served."""
_QUANTIZATIONS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Details(msgspec.Struct, frozen=True):
    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str
    format: str = "safetensors"
    parent_model: str = ""


def details(facts: ModelFacts) -> Details:
    """Family, size and kind of weights; empty texts for what is not known."""
    return Details(
        family=facts.family,
        families=(facts.family,) if facts.family else (),
        parameter_size=_size(facts.num_parameters),
        quantization_level=_QUANTIZATIONS.get(facts.quantization, facts.quantization),
    )


def capabilities(facts: ModelFacts) -> tuple[str, ...]:
    """What the model can do, of what Ollama's clients know."""
    known = (*_OF_ALL, *facts.capabilities)
    return tuple(name for name in _CAPABILITIES if name in known)


def model_info(facts: ModelFacts) -> dict[str, str | int]:
    """The figures whose names begin with the architecture, and the general ones."""
    if not facts.family:
        return {}
    return {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": facts.context_tokens,
    }


def template(facts: ModelFacts) -> str:
    """What prompts are made of, in the language of Ollama's templates: some clients look there
    whether a model knows tools. Prompts are written by the checkpoint's own template."""
    known = capabilities(facts)
    tools = "{{ .Tools }}" if "tools" in known else ""
    thinking = "{{ .Thinking }}" if "thinking" in known else ""
    return f"{tools}{{{{ range .Messages }}}}{thinking}{{{{ .Content }}}}{{{{ end }}}}"


def digest(facts: ModelFacts, name: str) -> str:
    """64 hex digits: clients cut them without looking. The name's, until the model's is known."""
    return facts.digest or hashlib.sha256(name.encode()).hexdigest()


def _size(num_parameters: int) -> str:
    """A number of parameters as `3.8B` or `15.20M`; empty for none."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    if num_parameters >= 1e6:
        return f"{num_parameters / 1e6:.2f}M"
    return f"{num_parameters / 1e3:.2f}K" if num_parameters else ""
