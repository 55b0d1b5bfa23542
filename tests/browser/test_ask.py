"""Questions on the page to the embedded model: images in, true answers out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ModelsDaemon, Open
from tests.browser.files import TWO_FRAMES, ask, attach
from tests.support import pdf, video_files
from tests.support.daemons import Daemon
from tests.support.images import canvas, draw_shape, encoded, one_shape

SQUARE = (encoded(one_shape("square", "blue")), "square.png", "image/png")


def text_of(answer: Any) -> str:
    return str(answer.locator(".text").inner_text()).strip().lower()


def figures_of(answer: Any) -> dict[str, str]:
    return {
        pair.locator("dt").inner_text(): pair.locator("dd").inner_text()
        for pair in answer.locator(".figures > div").all()
    }


@pytest.mark.parametrize("how", ["drop", "paste"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_image_question_streams_true_answer_and_follow_up(
    daemon: Daemon, open_page: Open, how: str, device: str
) -> None:
    page = open_page(daemon, device=device)
    attach(page, how, SQUARE)
    with page.expect_response("**/v1/chat/completions") as response:
        answer = ask(page, "What shape is this?")
    assert response.value.headers["content-type"].startswith("text/event-stream")
    assert text_of(answer) == "square"
    figures = figures_of(answer)
    assert re.fullmatch(r"[\d.]+ m?s", figures["First token"])
    assert re.fullmatch(r"\d+ \S \d+", figures["Seen as"])
    follow_up = ask(page, "And what colour is it?")
    assert text_of(follow_up) == "blue"
    assert "Seen as" not in figures_of(follow_up), "it has no picture of its own"
    cached = re.match(r"(\d+) of (\d+) tokens", figures_of(follow_up)["From cache"])
    assert cached
    assert 0 < int(cached[1]) < int(cached[2])
    page.get_by_role("button", name="New", exact=True).click()
    assert page.locator(".answer").count() == 0
    assert page.get_by_role("heading", name="Ask about a picture").is_visible()


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_document_question_gets_true_answer(daemon: Daemon, open_page: Open, how: str) -> None:
    page = open_page(daemon)
    data = pdf.write([pdf.Page((300, 300)).text(60, 130, 70, "CUP")])
    attach(page, how, (data, "report.pdf", "application/pdf"))
    assert "report.pdf" in page.locator("#attachments").inner_text()
    with page.expect_request("**/v1/chat/completions") as request:
        answer = ask(page, "What does it say?")
    part = request.value.post_data_json["messages"][0]["content"][0]
    assert part == {
        "type": "file",
        "file": {"filename": "report.pdf", "file_data": pdf.data_url(data)},
    }
    assert text_of(answer) == "cup"
    assert "report.pdf" in page.locator(".asked .media").inner_text()
    assert page.locator(".asked .said").inner_text() == "What does it say?"


def test_page_sends_images_in_their_order(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    star = (encoded(one_shape("star", "red")), "star.png", "image/png")
    attach(page, "drop", SQUARE, star, SQUARE)
    page.get_by_role("button", name="Remove square.png").last.click()
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "Which colour is in the second picture?")
    (message,) = request.value.post_data_json["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    first, second = (part["image_url"]["url"] for part in message["content"][:2])
    assert first != second


def test_page_sends_chosen_file(daemon: Daemon, open_page: Open, tmp_path: Path) -> None:
    page = open_page(daemon)
    file = tmp_path / "square.png"
    file.write_bytes(SQUARE[0])
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a picture").click()
    chooser.value.set_files(file)
    page.locator("#attachments img").wait_for()
    assert text_of(ask(page, "What shape is this?")) == "square"


def test_page_converts_unsupported_image_formats(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    bitmap = (encoded(one_shape("square", "blue"), "BMP"), "square.bmp", "image/bmp")
    attach(page, "drop", bitmap)
    assert text_of(ask(page, "What shape is this?")) == "square"


def test_page_refuses_files_that_are_no_images(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    attach(page, "drop", (b"text", "notes.txt", "text/plain"), (b"x", "bad.png", "image/png"))
    alerts = page.get_by_role("alert").all_inner_texts()
    assert any("notes.txt is no picture" in text for text in alerts)
    assert any("bad.png can" in text for text in alerts)


def test_page_answers_question_about_video(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    attach(
        page, "drop", (video_files.encode(video_files.moving("left", 30)), "clip.mp4", "video/mp4")
    )
    assert text_of(ask(page, "Which way does it move?")) == "left"


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_tool_call_is_shown_and_marked_on_image(
    daemon: Daemon, open_page: Open, device: str
) -> None:
    image = draw_shape(canvas((640, 400)), "circle", "red", (180, 210), 90)
    image = draw_shape(image, "star", "green", (460, 190), 100)
    page = open_page(daemon, device=device)
    attach(page, "drop", (encoded(image), "two.png", "image/png"))
    page.get_by_role("button", name="Options").click()
    page.get_by_role("button", name="Add one that clicks").click()
    answer = ask(page, "Click on the red circle.")
    assert answer.locator(".call code").first.inner_text() == "click"
    assert re.search(r'"x": \d+', answer.locator(".call pre").inner_text())
    image_box, mark = (
        answer.locator(".marked img").bounding_box(),
        answer.locator(".mark").bounding_box(),
    )
    x = (mark["x"] + mark["width"] / 2 - image_box["x"]) / image_box["width"] * 640
    y = (mark["y"] + mark["height"] / 2 - image_box["y"]) / image_box["height"] * 400
    assert (x - 180) ** 2 + (y - 210) ** 2 < 90**2
    answer.get_by_label("Result of click").fill("clicked")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "What now?")
    roles = [message["role"] for message in request.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]
    assert request.value.post_data_json["messages"][2]["content"] == "clicked"


@pytest.mark.parametrize(
    ("text", "coordinates", "expected"),
    [
        ('[{"bbox_2d": [100, 200, 300, 400], "label": "cup"}]', None, ["box .1 .2 .2 .2 cup"]),
        ('{"bbox_2d": [80, 60, 160, 120]}', "pixels", ["box .1 .1 .1 .1 "]),
        ('[{"box_2d": [200, 100, 400, 300], "label": "a"}]', None, ["box .1 .2 .2 .2 a"]),
        ("<|box_start|>(100,200),(300,400)<|box_end|>", None, ["box .1 .2 .2 .2 "]),
        ('{"point_2d": [500, 250], "label": "x"}', None, ["point .5 .25 0 0 x"]),
        ('{"x": 500, "y": 250}', None, ["point .5 .25 0 0 "]),
        ('{"action": "click", "coordinate": [80, 60]}', "pixels", ["point .1 .1 0 0 "]),
        ('<point x="50.0" y="25.0" alt="cup">cup</point>', None, ["point .5 .25 0 0 "]),
        ("(500, 250)", None, ["point .5 .25 0 0 "]),
        ("[100, 200, 300, 400]", None, ["box .1 .2 .2 .2 "]),
        ("There are 3, 4 or 5 cups (in 2024, 2025).", None, []),
        ('{"bbox_2d": [100, 200, 3000, 400]}', None, []),
        ("[1, 2, 3, 4, 5]", None, []),
    ],
)
def test_regions_are_found_in_answers(
    daemon: Daemon, open_page: Open, text: str, coordinates: str | None, expected: list[str]
) -> None:
    found = open_page(daemon).evaluate(
        """async ([text, coordinates]) => {
          const {findRegions} = await import("/page/regions.js");
          return findRegions(text, {width: 800, height: 600}, coordinates);
        }""",
        [text, coordinates],
    )
    fields = ("x", "y", "width", "height")
    shown = [
        (region["kind"], *(region[name] for name in fields), region["label"]) for region in found
    ]
    wanted = []
    for line in expected:
        kind, *numbers, label = line.split(" ")
        wanted.append((kind, *(pytest.approx(float(number)) for number in numbers), label))
    assert shown == wanted


@pytest.mark.parametrize("name", ["curl", "Python"])
def test_copied_request_gives_pages_answer(
    daemon: Daemon, open_page: Open, tmp_path: Path, name: str
) -> None:
    page = open_page(daemon)
    attach(page, "drop", (SQUARE[0], "my $HOME `square`.png", "image/png"))
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Instructions").fill('Never say "$HOME", `id` or \\n.')
    answer = ask(page, "What shape is this?")
    answer.get_by_role("button", name=f"Copy as {name}").click()
    answer.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    (tmp_path / "my $HOME `square`.png").write_bytes(SQUARE[0])
    program = ["bash", "-c"] if name == "curl" else [sys.executable, "-c"]
    ran = subprocess.run(
        [*program, copied], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    pieces = re.findall(r'"content":"(\w*)"', ran.stdout)
    assert text_of(answer) == "square"
    assert ("".join(pieces) if name == "curl" else ran.stdout.strip()) == "square"


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_toy_model_is_said_to_be_one_until_hint_is_dismissed(
    daemon: Daemon, open_page: Open, device: str
) -> None:
    page = open_page(daemon, device=device)
    hint = page.get_by_text("This is a small toy model")
    hint.wait_for()
    page.get_by_role("link", name="Get a larger one").click()
    card = page.locator("#catalog", has_text="Suggestions")
    card.wait_for()
    page.evaluate(TWO_FRAMES)
    bar = page.locator("header.bar").bounding_box()
    assert bar["height"] <= card.bounding_box()["y"] < page.viewport_size["height"] / 2
    page.locator("nav a[href='#ask']").click()
    page.get_by_role("button", name="Do not show this hint again").click()
    page.reload()
    page.locator("#model-name", has_text="demo").wait_for()
    assert hint.is_hidden()


def test_toy_hint_is_not_shown_beside_other_models(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    page = open_page(models_daemon.daemon)
    page.locator("#model-name", has_text="4 models").wait_for()
    assert page.locator("#toy").is_hidden()
