"""`file:` URLs read files below the root folders only, and reveal nothing of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlm_server.api.http.urls import media_url_child
from vlm_server.api.http.urls.fetch import TooLarge
from vlm_server.api.http.urls.media_url_child import NotReadable, read

IMAGE = b"picture"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an image, next to a secret file."""
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "a.png").write_bytes(IMAGE)
    (root / "inner" / "b c.png").write_bytes(IMAGE)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root-twin").mkdir()
    (tmp_path / "root-twin" / "a.png").write_bytes(b"secret")
    return root


def ask(root: Path, url: str, max_bytes: int = 100) -> bytes:
    return read(url.format(root=root), [root], max_bytes)


@pytest.mark.parametrize(
    "url",
    ["file://{root}/a.png", "file:{root}/a.png", "FILE://localhost{root}/a.png",
     "file://{root}/inner/b%20c.png", "file://{root}/inner/b c.png", "file://{root}//a.png",
     "file://{root}/%61.png", "file://{root}/./a.png"],
)  # fmt: skip
def test_file_below_root_is_read(root: Path, url: str) -> None:
    assert ask(root, url) == IMAGE


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "file://{root}/../secret", "file://{root}/%2e%2e/secret",
     "file://{root}/inner/../a.png", "file://{root}/..%2fsecret", "file://{root}-twin/a.png",
     "file://{root}/absent.png", "file://{root}/absent/a.png", "file://{root}/a.png/a.png",
     "file://{root}", "file://{root}/", "file://{root}/inner", "file://elsewhere{root}/a.png",
     "file://user@localhost{root}/a.png", "file://localhost:80{root}/a.png", "file:a.png",
     "file:./a.png", "file:", "file://", "file:///", "file://{root}/a.png?x", "file://{root}/a.png#x",
     "file://{root}/a.png%00", "file://{root}/a.png%00.jpg", "{root}/a.png", "a.png", "",
     "file://[{root}/a.png", "https://{root}/a.png", "file:////etc/passwd", "file:~/a.png",
     "file:///proc/self/environ", "file:///dev/zero", "file://{root}/" + "a" * 5000],
)  # fmt: skip
def test_unreadable_file_urls_have_one_error(root: Path, url: str) -> None:
    with pytest.raises(NotReadable) as caught:
        ask(root, url)
    assert str(caught.value) == ""


def test_links_out_of_root_are_not_followed(root: Path) -> None:
    (root / "near.png").symlink_to("a.png")
    (root / "inner-too").symlink_to(root / "inner")
    (root / "far.png").symlink_to(root.parent / "secret")
    (root / "up").symlink_to("..")
    (root / "circle").symlink_to("circle")
    assert ask(root, "file://{root}/near.png") == IMAGE
    assert ask(root, "file://{root}/inner-too/b%20c.png") == IMAGE
    for name in ("far.png", "up/secret", "up/root/../secret", "circle"):
        with pytest.raises(NotReadable):
            ask(root, f"file://{root}/{name}")


def test_root_folder_may_be_link(root: Path) -> None:
    link = root.with_name("link")
    link.symlink_to(root)
    assert ask(link, "file://{root}/a.png") == IMAGE
    with pytest.raises(NotReadable):
        read(f"file://{root}/a.png", [link], 100)


def test_files_below_any_root_are_read(root: Path) -> None:
    roots = [root.parent / "absent", root / "inner", root]
    assert read(f"file://{root}/a.png", roots, 100) == IMAGE
    with pytest.raises(NotReadable):
        read(f"file://{root}/a.png", [], 100)


def test_pipes_and_devices_are_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(NotReadable):
        ask(root, "file://{root}/pipe")
    with pytest.raises(NotReadable):
        read("file:///dev/zero", [Path("/")], 100)


def test_file_over_limit_is_refused(root: Path) -> None:
    assert ask(root, "file://{root}/a.png", len(IMAGE)) == IMAGE
    with pytest.raises(TooLarge):
        ask(root, "file://{root}/a.png", len(IMAGE) - 1)
    assert (
        read("file:///proc/self/status", [Path("/proc")], 1 << 20)
        if Path("/proc").is_dir()
        else True
    )


def test_folder_replaced_by_link_is_not_followed(root: Path) -> None:
    """The folder is replaced between the check and the opening."""
    (root / "inner").rename(root / "moved")
    (root / "inner").symlink_to(root.parent)
    with pytest.raises(OSError, match=r"directory|links"):
        media_url_child._open_below(root, ("inner", "secret"))
