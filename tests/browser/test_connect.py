"""*Connect* on the page: addresses, commands and settings to copy, with and without API keys."""

from __future__ import annotations

from typing import Any

from tests.browser.conftest import ModelsDaemon, Open
from tests.browser.files import TWO_FRAMES
from tests.browser.test_operate import enter_key
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon
from vlm_server.cli.connect.clients import CLIENTS
from vlm_server.cli.connect.command import ENTERED, WRITTEN
from vlm_server.cli.connect.run import ENTERED_CLIENTS
from vlm_server.cli.connect.service import ServedModel, Service


def copied(page: Any, label: str) -> str:
    """What the button of the row `label` copies."""
    button = page.get_by_role("button", name=f"Copy {label}: ")
    button.click()
    button.filter(has_text="Copied").wait_for()
    page.get_by_role("status").get_by_text("Copied", exact=True).wait_for()
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_connect_copies_addresses_model_and_commands(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    page.locator("nav a[href='#connect']").click()
    assert copied(page, "Base URL") == f"{daemon.url}/v1"
    assert copied(page, "Without /v1") == daemon.url
    assert copied(page, "Model") == "demo"
    assert copied(page, "API key") == "none"
    command = f"vlm-server connect claude-code --url {daemon.url}/v1"
    assert copied(page, "Claude Code") == command
    assert copied(page, "Home Assistant") == daemon.url
    page.get_by_text("This address is for programs on this machine").wait_for()
    assert f"OPENAI_BASE_URL={daemon.url}/v1" in page.locator("#connect pre").inner_text()


def test_connect_needs_no_address_at_usual_port(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, is_quiet=False)
    page.route("http://127.0.0.1:8000/**", lambda route: _from(daemon, route))
    page.goto("http://127.0.0.1:8000/#connect")
    assert copied(page, "Codex") == "vlm-server connect codex"


def test_connect_leaves_out_user_of_address(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, is_quiet=False)
    page.goto(f"{daemon.url.replace('://', '://me:$(id)@')}/#connect")
    assert copied(page, "Base URL") == f"{daemon.url}/v1"


def _from(daemon: Daemon, route: Any) -> None:
    """Answer a request to another address with what `daemon` answers."""
    url = route.request.url.replace("http://127.0.0.1:8000", daemon.url)
    headers = {k: value for k, value in route.request.headers.items() if k != "origin"}
    route.fulfill(response=route.fetch(url=url, headers=headers))


def test_connect_names_key_and_never_shows_it(tiny_daemon: Daemon, open_page: Open) -> None:
    page = open_page(tiny_daemon, "#connect", device="phone")
    enter_key(page, "laptop-key")
    page.get_by_text("--api-key-file FILE").wait_for()
    assert "$VLM_SERVER_API_KEY" in page.locator("#connect pre").inner_text()
    assert "laptop-key" not in page.content()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)


def test_connect_names_every_model(models_daemon: ModelsDaemon, open_page: Open) -> None:
    page = open_page(models_daemon.daemon, "#connect", device="phone")
    buttons = page.get_by_role("button", name="Copy Model: ")
    buttons.nth(3).wait_for()
    check_that_it_fits(page)
    names = buttons.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert len(set(names)) == len(names), "each says what it copies"
    buttons.nth(3).focus()
    with page.expect_response("**/v1/models"):
        page.evaluate("dispatchEvent(new Event('trouble'))")
    page.evaluate(TWO_FRAMES)
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == names[3], "looks for news leave what is read as it is"


def test_connect_lists_programs_of_command(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    written, entered = page.evaluate(
        "import('/page/connect.js').then(({WRITTEN, ENTERED}) => [WRITTEN, ENTERED])"
    )
    assert written == {name: CLIENTS[name].title for name in WRITTEN}
    assert set(entered) == set(ENTERED)
    model = ServedModel("demo", 4096, reads_images=True, calls_tools=True)
    service = Service(f"{daemon.url}/v1", None, model, (model,))
    for name, (title, where, is_openai) in entered.items():
        client = ENTERED_CLIENTS[name]
        steps = " ".join(client.steps(service))
        assert (title, where in steps) == (client.title, True), steps
        assert (f"{daemon.url}/v1" in steps) == is_openai
