"""Several models on the page: load, unload, download, ask, figures."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.browser.conftest import LONG_NAME, VIEWPORTS, ModelsDaemon, Open
from tests.browser.files import ask, attach
from tests.browser.test_ask import SQUARE, text_of
from tests.browser.test_operate import enter_key
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.hub.fixtures import demo_files
from tests.hub.server import add
from tests.support.daemons import Daemon

LOAD_MS = 60_000
TOO_LARGE = re.compile(r"too large: needs about 2\.\d\d GiB")


def model_card(page: Any, name: str) -> Any:
    return page.locator(f".model[data-name='{name}']")


def wait_for_state(page: Any, name: str, state: str) -> None:
    model_card(page, name).locator(".state", has_text=state).wait_for(timeout=LOAD_MS)


def press(page: Any, label: str, name: str) -> None:
    page.get_by_role("button", name=f"{label}: {name}", exact=True).click()


def list_row(page: Any, where: str, name: str) -> Any:
    return page.locator(f"#{where} li", has=page.locator(f"b[title='{name}']"))


# ---- load and unload -------------------------------------------------------------------


def test_page_loads_and_unloads_model(models_daemon: ModelsDaemon, open_page: Open) -> None:
    models_daemon.post("unload", "second")
    page = open_page(models_daemon.daemon, "#models")
    wait_for_state(page, "second", "Not loaded")
    press(page, "Load", "second")
    model_card(page, "second").locator(".progress").wait_for()
    wait_for_state(page, "second", "Ready")
    figures = re.compile(r"[\d.]+ MiB of [\d.]+ MiB · unloads in \d+ \w+ if unused")
    model_card(page, "second").get_by_text(figures).wait_for()
    assert page.evaluate("document.activeElement.dataset.id") == "toggle second", "the focus stays"
    page.locator("#models-held", has_text=re.compile(r"of \d+ MiB held")).wait_for()
    model_card(page, "second").get_by_text("Details").click()
    model_card(page, "second").get_by_text("qwen3_vl").wait_for()
    model_card(page, "second").get_by_text("32-bit", exact=True).wait_for()
    press(page, "Clear caches", "second")
    page.get_by_role("button", name="Clear caches: second", disabled=False).wait_for()
    press(page, "Keep loaded", "second")
    model_card(page, "second").get_by_text("stays until you unload it").wait_for()
    press(page, "Let go when unused", "second")
    model_card(page, "second").get_by_text(figures).wait_for()
    press(page, "Unload", "second")
    wait_for_state(page, "second", "Not loaded")
    assert models_daemon.daemon.status()["models"][1]["state"] == "unloaded"


def test_unload_button_of_pinned_model_is_disabled(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    page = open_page(models_daemon.daemon, "#models")
    button = page.get_by_role("button", name="Unload: shapes")
    button.wait_for()
    assert button.is_disabled()
    reason = page.locator(f"[id='{button.get_attribute('aria-describedby')}']")
    assert reason.inner_text() == "Pinned: always loaded."


def test_failed_model_shows_its_error_and_retry(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    page = open_page(models_daemon.daemon, "#models")
    page.get_by_role("button", name=re.compile("(Load|Try again): broken")).click()
    wait_for_state(page, "broken", "Failed")
    model_card(page, "broken").get_by_text("tokenizer.json").wait_for()
    page.get_by_role("button", name="Try again: broken", disabled=False).wait_for()


def test_user_key_sees_models_and_has_no_buttons(tiny_daemon: Daemon, open_page: Open) -> None:
    page = open_page(tiny_daemon, "#models")
    enter_key(page, "laptop-key")
    wait_for_state(page, "model", "Ready")
    page.get_by_text("use a key with admin = true").wait_for()
    assert page.locator("#models button").count() == 0
    assert accessibility_problems(page) == []


# ---- models on this machine, and downloads ----------------------------------------------


def test_page_serves_local_checkpoint(models_daemon: ModelsDaemon, open_page: Open) -> None:
    models_daemon.copy_of_model("spare")
    page = open_page(models_daemon.daemon, "#models")
    list_row(page, "local", "spare").get_by_text("15 MB · in a folder of yours · fits").wait_for()
    press(page, "Serve", "spare")
    wait_for_state(page, "spare", "Ready")
    list_row(page, "local", "spare").wait_for(state="detached")
    page.locator("nav a[href='#ask']").click()
    page.locator("#ask-model option", has_text="spare").wait_for(state="attached")
    page.locator("#ask-model").select_option("spare")
    attach(page, "drop", SQUARE)
    assert text_of(ask(page, "What shape is this?")) == "square"


def test_checkpoint_that_fails_to_load_says_why_and_is_tried_again(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    name = f"org/{'very' * 12}damaged"
    tokenizer = models_daemon.copy_of_model(name) / "tokenizer.json"
    whole = tokenizer.read_text()
    tokenizer.write_text("{")
    page = open_page(models_daemon.daemon, "#models", device="phone")
    press(page, "Serve", name)
    wait_for_state(page, name, "Failed")
    model_card(page, name).locator(".error", has_text="tokenizer.json").wait_for()
    check_that_it_fits(page)
    tokenizer.write_text(whole)
    press(page, "Try again", name)
    wait_for_state(page, name, "Ready")
    press(page, "Unload", name)


def test_checkpoint_over_memory_is_shown_as_too_large(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    folder = models_daemon.copy_of_model("org/giant")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2_000_000_000)
    page = open_page(models_daemon.daemon, "#models")
    list_row(page, "local", "org/giant").get_by_text(TOO_LARGE).wait_for()


def test_download_survives_reload_and_can_be_cancelled(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    add(models_daemon.hub, "org/one", demo_files())
    models_daemon.hub.seconds_per_mib = 3.0
    page = open_page(models_daemon.daemon, "#models")
    page.get_by_label("Search Hugging Face").fill("org/one")
    page.get_by_role("button", name="Download", exact=True).click()
    list_row(page, "pulls", "org/one").get_by_text(" of 15 MB").wait_for(timeout=LOAD_MS)
    assert accessibility_problems(page) == []
    page.reload()
    list_row(page, "pulls", "org/one").get_by_text(" of 15 MB").wait_for()
    press(page, "Cancel", "org/one")
    page.locator("#pulls li").wait_for(state="detached")
    models_daemon.hub.seconds_per_mib = 0.0
    page.get_by_label("Search Hugging Face").fill("org/one")
    page.get_by_role("button", name="Download", exact=True).click()
    list_row(page, "local", "org/one").get_by_text("downloaded · fits").wait_for(timeout=LOAD_MS)
    assert page.locator("#pulls li").count() == 0


def test_failed_download_shows_its_error(models_daemon: ModelsDaemon, open_page: Open) -> None:
    page = open_page(models_daemon.daemon, "#models")
    page.get_by_label("Search Hugging Face").fill("no name of the hub")
    assert page.get_by_role("button", name="Download", exact=True).count() == 0
    page.get_by_label("Search Hugging Face").fill("org/later")
    page.get_by_role("button", name="Download", exact=True).click()
    alert = list_row(page, "pulls", "org/later").get_by_role("alert")
    alert.filter(has_text="org/later").wait_for()
    press(page, "Close", "org/later")
    page.locator("#pulls li").wait_for(state="detached")


def test_failed_download_is_tried_again(models_daemon: ModelsDaemon, open_page: Open) -> None:
    page = open_page(models_daemon.daemon, "#models", device="phone")
    page.get_by_label("Search Hugging Face").fill("org/late")
    page.get_by_role("button", name="Download", exact=True).click()
    list_row(page, "pulls", "org/late").get_by_role("alert").wait_for()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    add(models_daemon.hub, "org/late", demo_files())
    press(page, "Try again", "org/late")
    list_row(page, "local", "org/late").get_by_text("downloaded · fits").wait_for(timeout=LOAD_MS)
    assert page.locator("#pulls li").count() == 0


def test_failed_download_shows_kept_bytes(models_daemon: ModelsDaemon, open_page: Open) -> None:
    page = open_page(models_daemon.daemon, "#models")
    lines = (
        {"state": "downloading", "bytes": 1_500_000_000, "total_bytes": 3_110_000_000},
        {"state": "failed", "error": "the disk is full"},
    )
    body = "".join(f"{json.dumps(line)}\n" for line in lines)
    page.route("**/v1/models/pull", lambda route: route.fulfill(body=body))
    page.get_by_label("Search Hugging Face").fill("org/cut")
    page.get_by_role("button", name="Download", exact=True).click()
    row = list_row(page, "pulls", "org/cut")
    row.get_by_role("alert").filter(has_text="the disk is full").wait_for()
    row.get_by_text("1.50 GB of 3.11 GB are here, and are kept").wait_for()


def test_search_finds_models_of_hub_and_downloads_one(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    hub = models_daemon.hub
    add(hub, "org/wanted-small", demo_files(), parameters={"F16": 7_000_000}, downloads=1200)
    add(hub, "org/wanted-huge", demo_files(), parameters={"BF16": 5 * 10**9}, gated=True)
    page = open_page(models_daemon.daemon, "#models")
    page.get_by_label("Search Hugging Face").fill("wanted")
    page.keyboard.press("Enter")
    small = list_row(page, "found", "org/wanted-small")
    small.get_by_text("14 MB · fits · 1.2 k downloads · qwen3_vl").wait_for()
    huge = list_row(page, "found", "org/wanted-huge")
    assert "too large for this machine" in huge.inner_text()
    assert "first accept its terms" in huge.inner_text()
    assert accessibility_problems(page) == []
    press(page, "Download", "org/wanted-small")
    small.get_by_text("On this machine").wait_for(timeout=LOAD_MS)
    list_row(page, "local", "org/wanted-small").wait_for()
    page.get_by_role("button", name="Back to the suggestions").click()
    page.get_by_text("Suggestions, the smallest first").wait_for()
    hub.search_status = 503
    page.get_by_label("Search Hugging Face").fill("wanted")
    page.keyboard.press("Enter")
    page.get_by_text("answers 503: try again later").wait_for()
    hub.search_status = 200


def test_suggestions_that_do_not_fit_are_shown_on_request(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    page = open_page(models_daemon.daemon, "#models")
    page.get_by_text("None of them fits into the memory that is left.").wait_for()
    page.get_by_role("button", name="larger ones").click()
    row = list_row(page, "found", "mlx-community/Qwen3-VL-4B-Instruct-4bit")
    row.get_by_text("about 3.1 GB · 4.4 B parameters · too large for this machine").wait_for()
    assert row.get_by_role("button").get_attribute("aria-disabled") == "true"
    page.get_by_role("button", name="Only what fits").click()
    row.wait_for(state="detached")


# ---- ask, and watch ----------------------------------------------------------------------


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_question_goes_to_picked_model_and_shows_its_load(
    models_daemon: ModelsDaemon, open_page: Open, device: str
) -> None:
    models_daemon.post("unload", LONG_NAME)
    page = open_page(models_daemon.daemon, device=device)
    page.locator("#ask-model option").nth(2).wait_for(state="attached")
    page.get_by_label("Model", exact=True).select_option(LONG_NAME)
    attach(page, "drop", SQUARE)
    page.get_by_role("textbox", name="Question", exact=True).fill("What shape is this?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    assert request.value.post_data_json["model"] == LONG_NAME
    page.locator(".waiting", has_text=f"Waiting for {LONG_NAME}").wait_for()
    page.locator(".waiting .progress .meter").wait_for()
    answer = page.locator(".answer")
    answer.locator(".figures").wait_for(timeout=LOAD_MS)
    assert text_of(answer) == "square"
    assert page.locator(".waiting").count() == 0
    answer.get_by_text(LONG_NAME, exact=True).wait_for()
    check_that_it_fits(page)


def test_figures_belong_to_picked_model(models_daemon: ModelsDaemon, open_page: Open) -> None:
    models_daemon.post("load", "second")
    page = open_page(models_daemon.daemon, "#now")
    picked = page.get_by_label("Figures of")
    picked.wait_for()
    process = page.locator(".engine .grid div", has_text="Process").locator("dd")
    pinned_pid = process.inner_text()
    picked.select_option("second")
    page.locator(".engine dd").filter(has_not_text=pinned_pid).first.wait_for()
    _, status = models_daemon.daemon.get("/v1/status?model=second")
    page.locator(".engine dd", has_text=str(status["engine"]["pid"])).first.wait_for()


def test_request_list_names_each_requests_model(
    models_daemon: ModelsDaemon, open_page: Open
) -> None:
    models_daemon.post("load", "second")
    page = open_page(models_daemon.daemon, "#now")
    page.get_by_text("Nothing is running").wait_for()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(
            models_daemon.daemon.client().chat.completions.create,
            model="second",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5000,
            extra_body={"ignore_eos": True},
        )
        page.locator(".requests li").get_by_text("second · /v1/chat/completions").wait_for()
        page.get_by_text("of at most 5,000 tokens").first.wait_for()
        page.get_by_role("button", name="Cancel the request").click()
        with pytest.raises(openai.APIStatusError):
            pending.result(20)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_views_of_many_models_are_accessible_and_fit(
    models_daemon: ModelsDaemon, open_page: Open, scheme: str, device: str
) -> None:
    models_daemon.copy_of_model(f"org/Of-{scheme}-{device}-{'long-' * 12}name")
    models_daemon.post("load", "broken")
    page = open_page(models_daemon.daemon, "#models", device=device, scheme=scheme)
    page.locator("#local li").first.wait_for()
    wait_for_state(page, "broken", "Failed")
    for details in page.locator("#served summary:visible").all():
        details.click()
    for width in (VIEWPORTS[device][0], 320):
        page.set_viewport_size({"width": width, "height": 800})
        assert accessibility_problems(page) == []
        check_that_it_fits(page)
    page.locator("nav a[href='#now']").click()
    page.get_by_label("Figures of").select_option(LONG_NAME)
    page.locator(".card.engine h2").wait_for()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.locator("nav a[href='#ask']").click()
    page.get_by_label("Model", exact=True).select_option(LONG_NAME)
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    sizes = [page.locator(f"#{name}").bounding_box() for name in ("send", "choose")]
    assert all(abs(size["width"] - size["height"]) < 1 for size in sizes), "still round"
