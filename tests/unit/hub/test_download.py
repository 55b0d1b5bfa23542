"""Downloads from a hub that breaks off, lies, moves, is slow, or says no.

Each download takes a process of its own, which takes a second to start: tests that do not depend
on a process run in this one (`InProcessDownload`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import re
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.hub.fixtures import NAME, WEIGHTS, contents, model
from tests.hub.server import Hub, Repo, add, commit_of
from tests.support.waiting import until
from vlm_server.errors import ModelLoadError, NotAvailable
from vlm_server.hub import download as downloads
from vlm_server.hub.download import download, look_up
from vlm_server.hub.download_process import Download
from vlm_server.hub.failures import download_refused
from vlm_server.hub.find import find, hub_cache
from vlm_server.hub.messages import DownloadPlan, Message, Progress
from vlm_server.hub.names import HubName

LARGE = 24 << 20
"""More than twice what the hub's library writes at once."""


class DownloadWatcher:
    """The progress that the caller of a download was told."""

    def __init__(self) -> None:
        self.plans: list[DownloadPlan] = []
        self.progress: list[Progress] = []

    async def approve(self, plan: DownloadPlan) -> None:
        self.plans.append(plan)

    async def get(self, name: str = NAME) -> Path:
        wanted = HubName.parse(name)
        assert wanted is not None
        return await download(wanted, self.progress.append, self.approve)


class InProcessDownload(DownloadWatcher):
    """The download in this process: no second try after `DownloadRefused`, which it raises."""

    async def get(self, name: str = NAME) -> Path:
        wanted = HubName.parse(name)
        assert wanted is not None
        may_go = threading.Event()

        def send(message: Message) -> None:
            if isinstance(message, DownloadPlan):
                self.plans.append(message)
                may_go.set()
            elif isinstance(message, Progress):
                self.progress.append(message)

        try:
            return await asyncio.to_thread(Download(wanted, send).run, may_go)
        except Exception as error:
            found = download_refused(error, wanted)
            raise (NotAvailable if found.may_pass else ModelLoadError)(found.reason) from error


@pytest.fixture(autouse=True)
def _hub_environment(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's settings for `InProcessDownload`, whose library has read the environment before."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)


def partial_bytes() -> int:
    total = 0
    for path in hub_cache().rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # it is complete now
            total += path.stat().st_size
    return total


def read_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files that the loader reads."""
    kinds = (".json", ".jinja", ".safetensors")
    return {path: data for path, data in files.items() if path.endswith(kinds) and "/" not in path}


async def test_download_contains_exactly_files_of_loader(hub: Hub) -> None:
    files = model()
    commit = add(hub, NAME, files)
    watcher = DownloadWatcher()
    folder = await watcher.get()
    assert folder == hub_cache() / f"models--org--model/snapshots/{commit}"
    assert contents(folder) == read_files(files)
    (plan,) = watcher.plans
    assert (plan.repo, plan.commit) == (NAME, commit)
    assert set(plan.files) == set(read_files(files))
    assert plan.total_bytes == sum(map(len, read_files(files).values()))
    found = find(NAME)
    assert found is not None
    assert (found.folder, found.name) == (folder, NAME)
    requested_paths = {path for _, path in hub.requests}
    assert not any("README" in path or ".py" in path or "agent" in path for path in requested_paths)


async def test_unchanged_files_are_not_downloaded_again(hub: Hub) -> None:
    files = model()
    add(hub, NAME, files)
    await InProcessDownload().get()
    hub.sent_bytes.clear()
    changed = files | {"tokenizer.json": b"[]"}
    hub.repos[NAME].commits["c" * 40] = changed
    hub.repos[NAME].refs["main"] = "c" * 40
    watcher = InProcessDownload()
    assert contents(await watcher.get()) == read_files(changed)
    assert set(hub.sent_bytes) == {"tokenizer.json"}
    assert watcher.plans[0].missing_bytes == 2


async def test_weights_are_not_downloaded_before_plan_approval(hub: Hub) -> None:
    add(hub, NAME, model())

    async def refuse(plan: DownloadPlan) -> None:
        raise ModelLoadError("too large")

    with pytest.raises(ModelLoadError, match="too large"):
        await download(HubName(NAME), lambda _: None, refuse)
    assert set(hub.sent_bytes) <= {"config.json"}
    plan = await look_up(HubName(NAME))
    assert plan.config["model_type"] == "qwen3_vl"
    assert set(hub.sent_bytes) <= {"config.json"}
    assert find(NAME) is None


async def test_weights_outside_index_are_not_downloaded(hub: Hub) -> None:
    index = b'{"weight_map": {"a": "model.safetensors"}}'
    extra = {"model.safetensors.index.json": index, "other.safetensors": b"x" * 1000}
    add(hub, NAME, model() | extra)
    watcher = InProcessDownload()
    assert "other.safetensors" not in contents(await watcher.get())
    assert watcher.plans[0].weight_bytes == 1 << 20


async def test_download_resumes_after_broken_connection(hub: Hub) -> None:
    files = model(LARGE)
    add(hub, NAME, files)
    hub.cut_after[WEIGHTS] = [11 << 20, 11 << 20]
    assert contents(await InProcessDownload().get()) == read_files(files)
    assert hub.sent_bytes[WEIGHTS] < LARGE + (3 << 20)


async def test_download_waits_for_unavailable_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own tries are used up, and other processes take it up again."""
    monkeypatch.setattr(downloads, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(downloads, "_FEW_TRIES", 2)
    files = model(1 << 20)
    add(hub, NAME, files)
    hub.failing[WEIGHTS] = 2  # as often as a hub that never answered is tried
    assert contents(await DownloadWatcher().get()) == read_files(files)
    assert hub.failing[WEIGHTS] == 0
    hub.failing["config.json"] = 100
    hub.repos[NAME].commits["d" * 40] = files | {"config.json": b'{"model_type": "x"}'}
    hub.repos[NAME].refs["main"] = "d" * 40
    with pytest.raises(NotAvailable, match="answers 500"):
        await DownloadWatcher().get()


async def test_download_resumes_after_its_process_is_killed(hub: Hub) -> None:
    """Cancelled, as when the front stops: its process is killed, and leaves what it has."""
    files = model(LARGE)
    add(hub, NAME, files)
    hub.seconds_per_mib = 0.1
    task = asyncio.create_task(DownloadWatcher().get())
    await until(lambda: partial_bytes() >= 10 << 20)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    kept = partial_bytes()
    assert kept >= 10 << 20
    assert find(NAME) is None
    await asyncio.sleep(0.3)  # the server notices
    assert partial_bytes() == kept
    hub.seconds_per_mib = 0.0
    hub.sent_bytes.clear()
    watcher = DownloadWatcher()
    assert contents(await watcher.get()) == read_files(files)
    assert hub.sent_bytes[WEIGHTS] == LARGE - kept
    assert watcher.plans[0].missing_bytes < LARGE - kept + 10_000
    assert partial_bytes() == 0


async def test_download_process_ends_when_its_parent_dies(hub: Hub) -> None:
    add(hub, NAME, model(LARGE))
    hub.seconds_per_mib = 0.1
    process = await asyncio.create_subprocess_exec(
        *downloads.launch.command("vlm_server.hub.download_process", NAME, ""),
        env={**downloads.launch.environment(), **downloads.library_environment()},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(downloads.GO)
    await until(lambda: hub.sent_bytes[WEIGHTS])
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5) == 1


async def test_weights_with_wrong_hash_are_refused(hub: Hub) -> None:
    files = model()
    add(hub, NAME, files)
    wrong = b"y" * len(files[WEIGHTS])
    hub.wrong[WEIGHTS] = [wrong, wrong]
    with pytest.raises(ModelLoadError, match=r"model\.safetensors has not the hash"):
        await InProcessDownload().get()
    assert find(NAME) is None
    assert not any(path.read_bytes() == wrong for path in hub_cache().rglob("blobs/*"))
    hub.wrong[WEIGHTS] = [wrong]  # it is right the second time
    assert contents(await InProcessDownload().get()) == read_files(files)


async def test_text_file_with_wrong_hash_is_refused(hub: Hub) -> None:
    files = model()
    add(hub, NAME, files)
    wrong = files["tokenizer.json"].replace(b"{}", b"[]")
    hub.wrong["tokenizer.json"] = [wrong, wrong]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json has not the hash"):
        await InProcessDownload().get()


async def test_wrong_partial_file_is_detected_and_replaced(hub: Hub) -> None:
    files = model(2 << 20)
    add(hub, NAME, files)
    blobs = hub_cache() / "models--org--model/blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(files[WEIGHTS]).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(b"z" * (1 << 20))
    assert contents(await InProcessDownload().get()) == read_files(files)


async def test_branch_moving_during_download_gives_one_commit(hub: Hub) -> None:
    old, new = model(seed=1), model(seed=2, more=1) | {"tokenizer.json": b"[]"}
    commits = {commit_of(old): old, commit_of(new): new}
    hub.repos[NAME] = Repo(commits, {"main": commit_of(old)}, moves_to=commit_of(new))
    folder = await InProcessDownload().get()
    assert folder.name == commit_of(old)
    assert contents(folder) == read_files(old)
    assert hub.repos[NAME].refs["main"] == commit_of(new)


async def test_revision_may_be_branch_tag_or_commit(hub: Hub) -> None:
    old, new = model(seed=1), model(seed=2)
    commits = {commit_of(old): old, commit_of(new): new}
    hub.repos[NAME] = Repo(commits, {"main": commit_of(new), "v1": commit_of(old)})
    for revision in ("v1", commit_of(old)):
        folder = await InProcessDownload().get(f"{NAME}@{revision}")
        assert contents(folder) == read_files(old)
        found = find(f"{NAME}@{revision}")
        assert found is not None
        assert found.folder == folder
    with pytest.raises(ModelLoadError, match="no revision 'v2'"):
        await InProcessDownload().get(f"{NAME}@v2")


async def test_gated_model_error_names_conditions_and_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = model()
    add(hub, NAME, files, gated=True, members=frozenset({"hf_member"}))
    with pytest.raises(
        ModelLoadError, match=f"accept its conditions at {hub.url}/{NAME}.*HF_TOKEN"
    ):
        await InProcessDownload().get()
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(ModelLoadError, match="your account has no access yet") as refusal:
        await InProcessDownload().get()
    assert "hf_stranger" not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert contents(await InProcessDownload().get()) == read_files(files)


async def test_missing_model_error_names_model(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="has no model org/model that anybody may see"):
        await InProcessDownload().get()


async def test_offline_mode_sends_no_request_to_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(hub, NAME, model())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids"):
        await DownloadWatcher().get()
    assert not hub.requests


async def test_download_without_symbolic_links_stores_each_file_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = model()
    add(hub, NAME, files)
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    folder = await DownloadWatcher().get()
    assert contents(folder) == read_files(files)
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert not any(hub_cache().rglob("blobs/*"))
    hub.sent_bytes.clear()
    watcher = DownloadWatcher()
    assert await watcher.get() == folder
    assert watcher.plans[0].missing_bytes == 0
    assert not hub.sent_bytes


@pytest.mark.parametrize(
    ("error", "words", "may_pass"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full", False),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "can't be stored in /x", False),
        (OSError("Consistency check failed: file should be of size 2"), "broke off", True),
        (LocalEntryNotFoundError("no connection"), f"can't be reached for {NAME}", True),
        (RuntimeError("some\nthing"), "RuntimeError: some thing", False),
    ],
)
def test_hub_errors_have_reasons_and_know_if_temporary(
    error: Exception, words: str, *, may_pass: bool
) -> None:
    found = download_refused(error, HubName(NAME))
    assert words in found.reason
    assert found.may_pass is may_pass


async def test_unreachable_hub_raises_not_available(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(downloads, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(downloads, "_FEW_TRIES", 2)
    with pytest.raises(NotAvailable, match=f"can't be reached for {NAME} .* the folder of a check"):
        await DownloadWatcher().get()


async def test_full_disk_error_names_free_and_needed_bytes(hub: Hub) -> None:
    add(hub, NAME, model(), declared={WEIGHTS: 1 << 50})
    with pytest.raises(ModelLoadError, match=r"has .* free, and org/model needs 1126 TB"):
        await InProcessDownload().get()
    assert set(hub.sent_bytes) <= {"config.json"}


async def test_simultaneous_downloads_fetch_each_byte_once(hub: Hub) -> None:
    files = model(4 << 20)
    add(hub, NAME, files)
    hub.seconds_per_mib = 0.3
    first, second = DownloadWatcher(), DownloadWatcher()
    folders = await asyncio.gather(first.get(), second.get())
    assert folders[0] == folders[1]
    assert contents(folders[0]) == read_files(files)
    assert hub.sent_bytes[WEIGHTS] == len(files[WEIGHTS])
    assert any(progress.is_waiting for progress in first.progress + second.progress)


async def test_download_progress_counts_bytes_and_names_file(hub: Hub) -> None:
    files = model(LARGE)
    add(hub, NAME, files)
    hub.seconds_per_mib = 0.05
    watcher = InProcessDownload()
    await watcher.get()
    counts = [progress.done_bytes for progress in watcher.progress]
    assert counts == sorted(counts)
    assert any(0 < progress.done_bytes < progress.total_bytes for progress in watcher.progress)
    assert {progress.total_bytes for progress in watcher.progress} == {watcher.plans[0].total_bytes}
    assert WEIGHTS in {progress.file for progress in watcher.progress}
    assert re.fullmatch(
        r"downloading model.safetensors: \d+ MB of 25 MB", str(watcher.progress[-1])
    )


@pytest.mark.parametrize("files", [{"config.json": b"{}", "model.gguf": b"GGUF"}])
async def test_repository_of_gguf_files_is_not_downloaded(
    hub: Hub, files: dict[str, bytes]
) -> None:
    add(hub, NAME, files)
    with pytest.raises(ModelLoadError, match="GGUF"):
        await InProcessDownload().get()
    assert not hub.sent_bytes


async def test_oversized_configuration_is_not_read(hub: Hub) -> None:
    add(hub, NAME, model(), declared={"config.json": 1 << 30})
    with pytest.raises(ModelLoadError, match=r"config\.json of org/model has 1\.07 GB"):
        await InProcessDownload().get()
    assert not hub.sent_bytes


async def test_repository_paths_never_lead_outside_cache(hub: Hub, tmp_path: Path) -> None:
    files = model() | {"../../../../evil.json": b"{}", "sub/../../evil.json": b"{}"}
    add(hub, NAME, files)
    assert contents(await InProcessDownload().get()) == read_files(model())
    assert not evil_files(tmp_path)


async def test_hash_with_path_separators_is_refused(hub: Hub, tmp_path: Path) -> None:
    add(hub, NAME, model(), oids={WEIGHTS: "../../../../evil"})
    with pytest.raises(ModelLoadError, match="as the hash of"):
        await InProcessDownload().get()
    assert not evil_files(tmp_path)


def evil_files(folder: Path) -> list[Path]:
    return [*folder.parent.glob("evil*"), *folder.rglob("evil*")]
