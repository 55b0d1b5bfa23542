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
    "What colour is the star?": "purple",
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


def test_document_shows_its_pages_before_and_after_it_is_asked_about(
    daemon: Daemon, open_page: Open
) -> None:
    page = open_page(daemon)
    attach(page, "drop", report(*("CUP", "SUN", "BOX", "KEY", "CAT", "DOG", "HAT", "PEN")))
    sheets = page.locator("#attachments .sheets img")
    sheets.nth(5).wait_for()
    assert sheets.evaluate_all("images => images.map((image) => image.alt)") == [
        f"Page {number}" for number in range(1, 7)
    ]
    page.locator("#attachments").get_by_text("8 pages").wait_for()
    page.locator("#attachments").get_by_text("and 2 more").wait_for()
    page.get_by_label("Pages of report.pdf").fill("2, 7")
    ask(page, "What does it say?")
    sheets = page.locator(".asked .sheets img")
    sheets.nth(1).wait_for()
    assert [sheet.get_attribute("alt") for sheet in sheets.all()] == ["Page 2", "Page 7"]
    page.reload()
    sheets.nth(1).wait_for()
    assert accessibility_problems(page) == []
    assert "/v1/documents/pages" not in daemon.log.read_text()


def test_broken_document_is_shown_with_its_fault(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    with page.expect_response("**/v1/documents/pages?*") as response:
        attach(page, "drop", (b"no PDF", "broken.pdf", "application/pdf"))
    assert response.value.status == 400
    page.locator("#attachments .paper", has_text="not a readable PDF").wait_for()
    answer = ask(page, "What does it say?")
    assert "not a readable PDF" in answer.get_by_role("alert").inner_text()


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
    assert page.locator("video:not(#watch-picture)").count() == 0


@pytest.mark.parametrize("question", SAMPLE_ANSWERS)
def test_sample_picture_gets_true_answers(daemon: Daemon, open_page: Open, question: str) -> None:
    page = open_page(daemon)
    page.get_by_role("button", name=question).click()
    page.locator(".answer").wait_for()
    wait_until_answered(page)
    assert text_of(page.locator(".answer")) == SAMPLE_ANSWERS[question]
    assert page.locator("#sample").is_hidden()
