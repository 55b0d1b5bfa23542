"""Operators on the page: stop, cancel, figures, settings, keys."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.browser.conftest import Open
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon
from vlm_server.settings.topics import COMMON

MANY_TOKENS = 4000


@pytest.fixture
def key_page(tiny_daemon: Daemon, open_page: Open) -> Iterator[Any]:
    """The page with an operator's key."""
    page = open_page(tiny_daemon)
    enter_key(page, "operator-key")
    page.locator("#model-name", has_text="model").wait_for()
    yield page
    tiny_daemon.wait_idle()


def enter_key(page: Any, key: str) -> None:
    page.get_by_role("dialog").wait_for()
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_page_asks_for_key_and_keeps_it_in_tab(tiny_daemon: Daemon, open_page: Open) -> None:
    page = open_page(tiny_daemon)
    page.get_by_role("dialog").wait_for()
    assert accessibility_problems(page) == []
    enter_key(page, "not-a-key")
    page.get_by_text("That key was not accepted").wait_for()
    enter_key(page, "laptop-key")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.locator("#model-name", has_text="model").wait_for()
    kept = "[localStorage.length, sessionStorage.length, document.cookie]"
    assert page.evaluate(kept) == [0, 1, ""]
    for view in ("now", "settings"):
        page.locator(f"nav a[href='#{view}']").click()
        page.locator(f"#{view}").get_by_text("Use one with admin = true").wait_for()
    assert "operator-key" not in page.content()


def test_stop_button_ends_answer_in_engine(tiny_daemon: Daemon, key_page: Any) -> None:
    page = key_page
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill(str(MANY_TOKENS))
    page.get_by_role("textbox", name="Question", exact=True).fill("Tell me something long.")
    page.keyboard.press("Enter")
    page.locator(".answer .text p").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    tiny_daemon.wait_idle()
    assert tiny_daemon.status()["engine"]["stats"]["generated_tokens"] < MANY_TOKENS
    page.get_by_role("button", name="Send").wait_for()


def test_operator_cancels_another_clients_request(tiny_daemon: Daemon, key_page: Any) -> None:
    page = key_page
    page.locator("nav a[href='#now']").click()
    page.get_by_text("Nothing is running").wait_for()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            tiny_daemon.client().chat.completions.create,
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=MANY_TOKENS,
            extra_body={"ignore_eos": True},
        )
        page.get_by_text("of at most 4,000 tokens").first.wait_for()
        assert accessibility_problems(page) == []
        page.get_by_role("button", name="Cancel the request").click()
        with pytest.raises(openai.APIStatusError) as caught:
            waiting.result(20)
    assert (caught.value.status_code, caught.value.code) == (410, "request_cancelled")
    page.get_by_text("Nothing is running").wait_for()
    page.locator(".delays table").wait_for()
    ended = page.locator("li.ended").first
    ended.get_by_text("request cancelled").wait_for()
    assert "operator" in ended.inner_text(), "who asked is shown by the name of the key"
    page.locator(".log p", has_text="request cancelled").first.wait_for()
    assert "operator-key" not in page.content()
    assert accessibility_problems(page) == []


def test_page_waits_for_engine_that_died_and_goes_on(tiny_daemon: Daemon, key_page: Any) -> None:
    page = key_page
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill("1000")
    page.get_by_role("textbox", name="Question", exact=True).fill("Are you there?")
    page.keyboard.press("Enter")
    answer = page.locator(".answer .text")
    answer.locator("p").first.wait_for()
    begun = answer.inner_text()[:20]
    os.kill(tiny_daemon.engine_pid(), signal.SIGKILL)
    page.locator(".answer .waiting").wait_for()
    page.locator("nav a[href='#now']").click()
    page.locator(".engine").get_by_text("was ended by SIGKILL").wait_for()
    tiny_daemon.wait_ready()
    page.locator("nav a[href='#ask']").click()
    page.locator(".answer .figures").wait_for()
    assert answer.inner_text().startswith(begun)
    assert page.get_by_role("alert").count() == 0


def test_settings_view_shows_changes_and_their_sources(key_page: Any) -> None:
    page = key_page
    page.locator("nav a[href='#settings']").click()
    page.locator("#settings .changed", has_text="api_key_file").wait_for()
    assert page.locator("#settings .changed", has_text="Set on the command line").count() >= 2
    cards = page.locator("#settings .card h2").all_inner_texts()
    assert cards == ["Most used", "Changed"]
    most_used = page.locator("#settings .card", has_text="Most used")
    names = [
        name.replace("\u200b", "") for name in most_used.locator(".when code").all_inner_texts()
    ]
    assert tuple(names) == COMMON
    labels = page.evaluate("import('/page/settings.js').then(({LABELS}) => LABELS)")
    assert tuple(labels) == COMMON
    assert most_used.locator("dt b").all_inner_texts() == list(labels.values())
    assert most_used.get_by_text("needs a restart").count() == len(COMMON) - 1
    most_used.get_by_text("log.level · changes at once").wait_for()
    room = most_used.locator(".settings > div", has_text="memory.max_bytes").locator(".value")
    assert re.fullmatch(r"[\d.]+ (M|G)iB\s*Change\s*from auto", room.inner_text())
    assert page.locator("dt", has_text="body_timeout_seconds").count() == 0, "it has its default"
    page.locator("summary", has_text="Limits and deadlines").click()
    page.locator("dt", has_text="limits.body_timeout_seconds").wait_for()
    groups = page.locator("#settings summary h3").all_inner_texts()
    assert groups[:2] == ["Model", "Memory and caches"]
    assert "Others" not in groups, "a section of settings belongs to no group"
    page.get_by_role("button", name="Fold all", exact=True).click()
    page.get_by_role("button", name="Unfold all").click()
    assert accessibility_problems(page) == []
    page.get_by_role("button", name="Copy as TOML").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = tomllib.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["server"]["api_key_file"].endswith(".toml")
    assert "operator-key" not in page.locator("#settings").inner_text()
    page.get_by_label("Find a setting").fill("no such setting")
    page.get_by_text("No setting is called that.").wait_for()


def test_setting_that_needs_restart_is_copied_for_settings_file(
    tiny_daemon: Daemon, key_page: Any
) -> None:
    page = key_page
    page.locator("nav a[href='#settings']").click()
    file = tiny_daemon.get("/v1/settings")[1]["file"]
    assert file.endswith("vlm-server/config.toml")
    page.get_by_text(f"All else goes into {file}, and holds").wait_for()
    page.get_by_role("button", name="Change cache.max_disk_bytes").first.click()
    page.get_by_label("New value of cache.max_disk_bytes").fill("20")
    page.get_by_text("change while the server runs: put this into").wait_for()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    assert copied_settings(page) == {"cache": {"max_disk_bytes": "20 GiB"}}
    page.get_by_role("button", name="Change urls.https_hosts").first.click()
    page.get_by_label("New value of cache.max_disk_bytes").wait_for(state="detached")
    page.get_by_label("New value of urls.https_hosts").fill("example.org, *.example.com")
    hosts = {"urls": {"https_hosts": ["example.org", "*.example.com"]}}
    assert copied_settings(page) == hosts
    page.get_by_role("button", name="Change limits.max_requests").first.click()
    page.get_by_label("New value of limits.max_requests").fill("8")
    assert copied_settings(page) == {"limits": {"max_requests": 8}}
    page.get_by_text("If the file has [limits] already, put only the second line").wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == "Change limits.max_requests"
    page.get_by_role("button", name="Change model.path").first.click()
    page.get_by_text("What the command line says wins over the file").wait_for()


def test_settings_of_server_of_another_version_are_shown(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)

    def leave_out(route: Any) -> None:
        told = route.fetch().json()
        route.fulfill(json={"sections": told["sections"]})

    page.route("**/v1/settings", leave_out)
    page.locator("nav a[href='#settings']").click()
    page.locator("summary", has_text="Limits and deadlines").wait_for()
    page.get_by_text("All else goes into the settings file, and holds").wait_for()
    assert page.locator("#settings-found").inner_text() == "", "only what changes is spoken"


def test_changed_setting_has_type_of_setting(key_page: Any) -> None:
    page = key_page
    page.locator("nav a[href='#settings']").click()
    changes: list[tuple[str, str, object]] = [
        ("server.allowed_hosts", "my.example, other.example", ["my.example", "other.example"]),
        ("server.allowed_hosts", "auto", "auto"),
        ("server.allowed_hosts", "", "auto"),
        ("urls.https_hosts", "", []),
        ("model.name", "007", "007"),
        ("tracing.endpoint", "", "auto"),
        ("limits.max_requests", "08", 8),
        ("video.fps", "0.5", 0.5),
        ("model.max_context_tokens", "4096 tokens", 4096),
        ("cache.max_disk_bytes", "20 GiB", "20 GiB"),
        ("memory.max_bytes", "% 60", "60%"),
        ("memory.max_bytes", "%", "75%"),
        ("memory.max_bytes", "auto", "auto"),
        ("image.max_pixels", "2 MP", "2 MP"),
        ("files.keep_seconds", "90 min", "90 min"),
        ("batches.on_battery", "Yes", True),
        ("cache.kv_bits", "8", 8),
        ("cache.kv_bits", "auto", "auto"),
    ]
    for name, typed, value in changes:
        page.get_by_label("Find a setting").fill(name)
        page.get_by_role("button", name=f"Change {name}", exact=True).click()
        enter_value(page, name, typed)
        section, key = name.split(".")
        assert copied_settings(page) == {section: {key: value}}


def enter_value(page: Any, name: str, typed: str) -> None:
    """Fill the open form: one of few choices, a text, or a number with its unit."""
    field = page.get_by_label(f"New value of {name}")
    unit = page.get_by_label(f"Unit of {name}")
    if unit.count():
        number, _, chosen = typed.rpartition(" ")
        number, chosen = (chosen, number) if number == "%" else (number, chosen)
        unit.select_option(chosen)
        if number:
            field.fill(number)
        return
    assert field.evaluate("field => document.activeElement === field")
    if field.evaluate("field => field.localName") == "select":
        field.select_option(typed)
        return
    assert field.input_value() != "none", "an empty value is edited as such"
    field.fill(typed)


@pytest.mark.parametrize(
    ("name", "typed", "problem"),
    [
        ("server.port", "99999", "It has to be a whole number of at most 65535"),
        ("model.keep_alive_seconds", "10 min", "has no effect on a pinned model"),
        ("server.api_key_file", "keys.toml", "'keys.toml' is not absolute"),
        ("model.path", "/no/such/folder", "No checkpoint is at /no/such/folder"),
        ("limits.max_requests", "0", "of at least 1"),
        ("urls.https_hosts", "not a host", "'not a host' is not a host"),
    ],
)
def test_wrong_value_is_said_in_place_and_not_copied(
    key_page: Any, name: str, typed: str, problem: str
) -> None:
    page = key_page
    page.evaluate("navigator.clipboard.writeText('before')")
    page.locator("nav a[href='#settings']").click()
    page.get_by_role("button", name=f"Change {name}", exact=True).first.click()
    enter_value(page, name, typed)
    page.locator(".edit .problem", has_text=problem).wait_for()
    assert "`" not in page.locator(".edit .problem").inner_text(), "names are shown as code"
    field = page.get_by_label(f"New value of {name}")
    assert field.get_attribute("aria-invalid") == "true"
    assert accessibility_problems(page) == []
    page.locator("#settings form").get_by_role("button", name="Copy as TOML").click()
    page.locator(".edit input:focus").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "before"


def copied_settings(page: Any) -> Any:
    """What the open form copies, as the daemon reads it."""
    page.locator("#settings form").get_by_role("button", name="Copy as TOML").click()
    page.locator("#settings form").get_by_text("Copied").wait_for()
    return tomllib.loads(page.evaluate("navigator.clipboard.readText()"))


def test_setting_is_changed_while_daemon_runs(tiny_daemon: Daemon, key_page: Any) -> None:
    page = key_page
    page.locator("nav a[href='#settings']").click()
    page.get_by_label("Find a setting").fill("deadlines.total")
    page.get_by_role("button", name="Change deadlines.total_timeout_seconds").click()
    field = page.get_by_label("New value of deadlines.total_timeout_seconds")
    field.fill("0")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="It has to be a number above 0").wait_for()
    assert accessibility_problems(page) == []
    field.fill("50")
    page.get_by_label("Unit of deadlines.total_timeout_seconds").select_option("min")
    field.press("Enter")
    page.locator(".changed", has_text="Changed while running; default 1 h").wait_for()
    settings = tiny_daemon.get("/v1/settings")[1]["sections"]
    (deadlines,) = (one["settings"] for one in settings if one["name"] == "deadlines")
    assert {one["name"]: one["value"] for one in deadlines}["total_timeout_seconds"] == 3000
    page.get_by_role("button", name="Change deadlines.total_timeout_seconds").click()
    page.get_by_label("New value of deadlines.total_timeout_seconds").fill("60")
    page.keyboard.press("Enter")
    field.wait_for(state="detached")
