"""What processes that run models get beside our own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_server.supervisor.environment import for_models
from vlm_server.supervisor.private_folder import PrivateFolder

PLANS = "MLX_CUDA_SDPA_CACHE_SIZE"


@pytest.mark.parametrize(("told", "number"), [(None, "1024"), ("300", "300")])
def test_mlx_keeps_plans_for_long_prompts_unless_told_otherwise(
    told: str | None, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PLANS, raising=False)
    if told is not None:
        monkeypatch.setenv(PLANS, told)
    private = PrivateFolder()
    try:
        assert for_models(private, with_openblas=False)[PLANS] == number
    finally:
        private.close()
