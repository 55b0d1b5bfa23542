"""What is asked about: several pictures, pages, clips, the camera, the screen, and the sample."""

from __future__ import annotations

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.files import ask, attach, wait_until_answered
from tests.browser.test_ask import SQUARE, text_of
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support import pdf, video_files
from tests.support.daemons import Daemon

CLIP = (video_files.encode(video_files.moving("left", 30)), "clip.mp4", "video/mp4")
SAMPLE_ANSWERS = {
    "Describe the picture.": (
        "a purple star on the left, a red circle at the top and two blue squares on the right."
    ),
    "How many blue squares are there?": "2",
    "Where is the circle?": "top",
    "What color is the star?": "purple",
}


def report(*words: str) -> tuple[bytes, str, str]:
    pages = [pdf.Page((300, 300)).text(60, 130, 70, word) for word in words]
    return pdf.write(pages), "report.pdf", "application/pdf"


def test_chosen_pages_of_document_are_asked_about(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    attach(page, "drop", report("CUP", "SUN"))
    field = page.get_by_label("Pages of report.pdf")
    field.fill("two")
    page.get_by_role("textbox", name="Question", exact=True).fill("What does it say?")
    page.keyboard.press("Enter")
    assert page.locator(".answer").count() == 0
    assert field.get_attribute("aria-invalid") == "true"
    field.fill("2")
    with page.expect_request("**/v1/chat/completions") as request:
        answer = ask(page, "What does it say?")
    part = request.value.post_data_json["messages"][0]["content"][0]
    assert part["file"]["pages"] == "2"
    assert text_of(answer) == "sun"
    assert page.locator(".asked .media").inner_text().split() == ["report.pdf", "Pages", "2"]


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_attached_media_make_strip(daemon: Daemon, open_page: Open, device: str) -> None:
    page = open_page(daemon, device=device)
    attach(page, "drop", SQUARE, CLIP, report("CUP"), SQUARE)
    page.locator("#attachments .frames canvas").nth(5).wait_for()
    frames = page.locator("#attachments .frames canvas")
    reds = frames.evaluate_all(
        """canvases => canvases.map((canvas) => {
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let [sum, count] = [0, 0];
          for (let i = 0; i < data.length; i += 4)
            if (data[i] > 150 && data[i + 1] < 100) {
              sum += (i / 4) % canvas.width;
              count++;
            }
          return sum / count;
        })"""
    )
    assert reds == sorted(reds, reverse=True), "it moves to the left"
    assert reds[0] > reds[-1]
    assert accessibility_problems(page) == []
    check_that_it_fits(page)


@pytest.mark.parametrize("source", ["Take a photograph", "Take a picture of the screen"])
def test_picture_is_taken_of_camera_and_screen(
    daemon: Daemon, open_page: Open, source: str
) -> None:
    page = open_page(daemon)
    page.get_by_role("button", name=source).click()
    if "photograph" in source:
        take = page.get_by_role("button", name="Take picture")
        page.locator("dialog video").wait_for()
        take.click()
        page.get_by_role("dialog").wait_for(state="detached")
    image = page.locator("#attachments img")
    image.wait_for()
    assert image.evaluate("async (img) => { await img.decode(); return img.naturalWidth; }") > 300
    assert page.evaluate("[...document.querySelectorAll('video')].length") == 0


@pytest.mark.parametrize("question", SAMPLE_ANSWERS)
def test_sample_picture_gets_true_answers(daemon: Daemon, open_page: Open, question: str) -> None:
    page = open_page(daemon)
    page.get_by_role("button", name=question).click()
    page.locator(".answer").wait_for()
    wait_until_answered(page)
    assert text_of(page.locator(".answer")) == SAMPLE_ANSWERS[question]
    assert page.locator("#sample").is_hidden()
