"""Names, aliases and spellings of served models."""

from __future__ import annotations

import pytest

from vlm_server.api.dialects.ollama.model_fields import model_wanted
from vlm_server.api.parsing.parsed_request import KnownModel
from vlm_server.api.parsing.served_models import model_of
from vlm_server.errors import ModelNotFound


def known(name: str, *aliases: str) -> KnownModel:
    return KnownModel(name=name, aliases=aliases, can_reason=False, stays_loaded=False)


MODELS = (known("a:latest", "gpt-*"), known("a", "*b*"), known("org/c", "b"))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("a", "a"),
        ("a:latest", "a:latest"),
        ("default", "a:latest"),
        ("default:latest", "a:latest"),
        ("org/c:latest", "org/c"),
        ("gpt-4", "a:latest"),
        ("b", "a"),
    ],
)
def test_ollama_spellings_name_served_model(name: str, model: str) -> None:
    assert model_wanted(name, MODELS).name == model


@pytest.mark.parametrize("name", ["A", "[!x]", "*", "org", "org/c/", "../a", "\0", "x" * 10**6])
def test_unknown_names_match_no_model(name: str) -> None:
    assert model_of(name, MODELS) is None
    with pytest.raises(ModelNotFound):
        model_wanted(name, MODELS)
