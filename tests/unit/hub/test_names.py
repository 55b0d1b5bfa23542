"""Valid names of models, and the name of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_server.hub.names import HubName, served_name, to_download

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("mlx-community/Qwen3-VL-4B-Instruct-4bit",) * 2 + ("",),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/4", "org/name", "refs/pr/4"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("01-ai/Yi.VL_6B", "01-ai/Yi.VL_6B", ""),
    ],
)
def test_hub_names_are_parsed_with_revision(text: str, repo: str, revision: str) -> None:
    name = HubName.parse(text)
    assert name == HubName(repo, revision)
    assert str(name) == text
    assert name.is_pinned is (revision == COMMIT)
    assert to_download(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *(
            "name",
            "a/b/c",
            "/org/name",
            "./name",
            "../name",
            "~/name",
            "org/",
            "/",
            "",
            "org/na me",
        ),
        *("org/..", "../..", "org/a--b", "org/name@", "org/name@../x", "org/name@-x", "org/.name"),
        *("https://huggingface.co/org/name", "org/name\n", "org/name@a b"),
    ],
)
def test_invalid_hub_name_is_never_downloaded(text: str) -> None:
    assert to_download(text) is None


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (f"/x/hub/models--org--name/snapshots/{COMMIT}", "org/name"),
        ("/x/hub/models--org--name", "org/name"),
        ("/x/hub/models--gpt2", "gpt2"),
        ("/models/Qwen3-VL", "Qwen3-VL"),
        (f"/snapshots/{COMMIT}", COMMIT),
    ],
)
def test_snapshot_folder_is_served_under_repository_name(folder: str, name: str) -> None:
    assert served_name(Path(folder)) == name
