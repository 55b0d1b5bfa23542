"""Code of a checkpoint never runs, even past the libraries' own flags."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import transformers

from tests.support.planted_code import Planted
from vlm_server.errors import ModelLoadError
from vlm_server.runner.loading.checkpoint.view import no_code_of

EVIL = "evil.Evil"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that planted code makes."""
    return tmp_path / "mark"


@pytest.fixture
def checkpoint(tmp_path: Path, mark: Path) -> Path:
    """A folder with a module that leaves the mark when it runs."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n")
    return folder


def test_trust_remote_code_runs_no_checkpoint_code(checkpoint: Path, mark: Path):
    """As some of mlx-vlm's processors do."""
    named = {"auto_map": {"AutoTokenizer": [EVIL, EVIL]}, "tokenizer_class": "Evil"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    with no_code_of(checkpoint), contextlib.suppress(Exception):
        transformers.AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=True)
    assert not mark.exists()


def test_module_of_checkpoint_is_not_imported(checkpoint: Path, mark: Path):
    with no_code_of(checkpoint):
        pass
    spec = importlib.util.spec_from_file_location("evil", checkpoint / "evil.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ModelLoadError, match=r"evil\.py is code"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert not mark.exists()


def test_unpickling_is_refused_while_checkpoint_loads(checkpoint: Path, mark: Path):
    with no_code_of(checkpoint), pytest.raises(ModelLoadError, match="pickle"):
        pickle.loads(pickle.dumps(Planted(mark)))
    assert not mark.exists()
    assert pickle.loads(pickle.dumps(Path("later"))) == Path("later")
