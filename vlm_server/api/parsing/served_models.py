"""The served models, and finding one by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from vlm_server.api.parsing.parsed_request import KnownModel
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.protocol import ModelFacts
from vlm_server.supervisor.engine_process.client import EngineStatus, ModelClient

DEFAULT = "default"
_MAX_NAME_CHARS = 256


def known_models(models: ModelClient) -> tuple[KnownModel, ...]:
    """All served models, the default one first."""
    return tuple(_known_model(models, name) for name in models.names)


def model_of(names: str | Sequence[str], known_models: Iterable[KnownModel]) -> KnownModel | None:
    """The first model found by `names`: by its own name, `default`, or an alias."""
    wanted_names = (names,) if isinstance(names, str) else names
    models = tuple(known_models)
    by_name = {model.name: model for model in models}
    for name in wanted_names:
        if name in by_name:
            return by_name[name]
    if DEFAULT in wanted_names:
        return models[0]
    aliases = ((model, alias) for model in models for alias in model.aliases)
    short = [name for name in wanted_names if len(name) <= _MAX_NAME_CHARS]
    matches = (m for m, alias in aliases if any(fnmatchcase(name, alias) for name in short))
    return next(matches, None)


def find_model(name: str, known_models: Sequence[KnownModel]) -> KnownModel:
    """The model that `name` means. Raises ModelNotFound, which lists the served ones."""
    model = model_of(name, known_models)
    if model is None:
        raise ModelNotFound(describe_models(known_models), "model")
    return model


def only_model(known_models: Sequence[KnownModel]) -> KnownModel:
    """The model of a request without a name: the only one. Raises InvalidRequest for several."""
    if len(known_models) > 1:
        raise InvalidRequest(f"`model` is missing. {describe_models(known_models)}", "model")
    return known_models[0]


def describe_models(known_models: Sequence[KnownModel]) -> str:
    """The served models in a sentence, for errors."""
    if len(known_models) == 1:
        return f"This server has one model: `{known_models[0].name}`."
    return (
        f"This server has these models: {', '.join(f'`{model.name}`' for model in known_models)}."
    )


def statuses(models: ModelClient) -> list[EngineStatus]:
    """The status of every model, the default one first."""
    return [models.status(name) for name in models.names]


def progress_of(status: EngineStatus) -> dict[str, str | float] | None:
    """Progress of the model's load, or of its download before that; None if there is neither."""
    if status.progress is None:
        return None
    stage, fraction = status.progress
    if (download := status.download) is None:
        return {"stage": stage, "fraction": fraction}
    return {
        "stage": stage,
        "fraction": fraction,
        "file": download.file,
        "bytes": download.done_bytes,
        "total_bytes": download.total_bytes,
    }


def _known_model(models: ModelClient, name: str) -> KnownModel:
    return KnownModel(
        name=name,
        aliases=models.aliases(name),
        can_reason=_can_reason(models.status(name).model_facts),
        stays_loaded=models.is_pinned(name),
    )


def _can_reason(facts: ModelFacts) -> bool:
    """Whether the model writes reasoning; assumed until it was first ready."""
    return facts == ModelFacts() or "thinking" in facts.capabilities
