"""Every view in light and dark, on desktops and phones: accessible, within its width, quick.

The photographs lie in pytest's folder of the test, or where `PHOTOGRAPHS` says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.files import TWO_FRAMES, ask, attach
from tests.browser.test_ask import SQUARE
from tests.support.daemons import Daemon

VIEWS = ("ask", "watch", "now", "models", "connect", "settings")
OUTSIDE_OF_CARDS = """() => [...document.querySelectorAll(".card *:not(.hidden)")].filter((one) => {
  const inner = one.getBoundingClientRect();
  const outer = one.closest(".card").getBoundingClientRect();
  const room = 10; // of the card's padding
  return inner.width && (inner.right > outer.right - room || inner.left < outer.left + room);
}).map((one) => one.outerHTML.slice(0, 200))"""
FIRST_PAINT_MS = 200
FIRST_PAINT = """() => new Promise((resolve) => {
  new PerformanceObserver((list) => {
    const paint = list.getEntriesByName("first-contentful-paint")[0];
    if (paint) resolve(paint.startTime);
  }).observe({type: "paint", buffered: true});
})"""


def show(page: Any, view: str) -> None:
    """Open a view with some content."""
    if view == "ask":
        attach(page, "drop", SQUARE)
        page.get_by_role("button", name="Options").click()
        ask(page, "What shape is this?")
        attach(page, "drop", SQUARE)
    else:
        page.locator(f".bar a[href='#{view}']:visible").click()
        page.locator(f"#{view} .card").first.wait_for()


def accessibility_problems(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{problem['id']}: {node['html'][:200]} {node.get('failureSummary', '')}"
        for problem in found
        for node in problem["nodes"]
    ]


def check_shapes(page: Any, path: Path, device: str) -> None:
    """Photograph the page as it is, with text at twice its size, and if it is on a phone sideways;
    assert that it is accessible and fits, and fits the narrowest phones. Photographs lie beside
    `path`."""
    path = Path(os.environ.get("PHOTOGRAPHS", path.parent)) / path.name
    page.screenshot(path=path, full_page=page.locator(".wide:visible").count() > 0)
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    upright = page.viewport_size
    if device == "phone":
        page.set_viewport_size({"width": upright["height"], "height": upright["width"]})
        page.screenshot(path=path.with_stem(f"{path.stem}-sideways"))
        check_that_it_fits(page)
    page.set_viewport_size({"width": 320, "height": 640})
    check_that_it_fits(page)
    page.set_viewport_size(upright)
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    page.screenshot(path=path.with_stem(f"{path.stem}-large"))
    check_that_it_fits(page)


def check_that_it_fits(page: Any) -> None:
    """Assert that nothing scrolls sideways or overflows its card."""
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE_OF_CARDS) == []


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_every_view_is_accessible_and_fits(
    daemon: Daemon, open_page: Open, tmp_path: Path, view: str, scheme: str, device: str
) -> None:
    page = open_page(daemon, device=device, scheme=scheme)
    assert accessibility_problems(page) == []
    show(page, view)
    page.screenshot(path=tmp_path / "shade.png")
    with Image.open(tmp_path / "shade.png") as shot:
        red, green, blue = shot.convert("RGB").getpixel((1, VIEWPORTS[device][1] // 2))
    assert (max(red, green, blue) < 64) == (scheme == "dark")
    assert (min(red, green, blue) > 192) == (scheme == "light")
    check_shapes(page, tmp_path / f"{view}-{scheme}-{device}.png", device)


@pytest.mark.alone
def test_first_paint_of_page_is_quick(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    times = []
    for _ in range(5):
        page.reload()
        times.append(page.evaluate(FIRST_PAINT))
    assert min(times) < FIRST_PAINT_MS, times


def test_content_policy_blocks_inline_code_and_other_hosts(daemon: Daemon, open_page: Open) -> None:
    """Inline scripts and styles, other hosts, and HTML made of text."""
    page = open_page(daemon, is_quiet=False)
    blocked = page.evaluate(
        """async () => {
          const blocked = [];
          document.addEventListener("securitypolicyviolation", (event) => {
            blocked.push(event.effectiveDirective);
          });
          const add = (tag, content) => {
            const element = document.createElement(tag);
            try { element.append(content); document.head.append(element); } catch { /* blocked */ }
          };
          add("script", "window.ran = true");
          add("style", "body { display: none }");
          try { document.body.innerHTML += "<p>"; } catch { /* blocked */ }
          await fetch("http://localhost:1/").catch(() => null);
          await new Promise((resolve) => setTimeout(resolve, 200));
          return [blocked.sort(), window.ran ?? false, getComputedStyle(document.body).display];
        }"""
    )
    directives, ran, display = blocked
    assert (ran, display) == (False, "flex")
    assert {"connect-src", "style-src-elem", "require-trusted-types-for"} <= set(directives)
    assert any(
        directive.startswith("script-src") or directive == "require-trusted-types-for"
        for directive in directives
    )


def test_keyboard_moves_through_navigation(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.title") == "Conversations"
    for name in VIEWS:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.hash") == f"#{name}"
    page.keyboard.press("Enter")
    page.locator("#settings .card").first.wait_for()
    assert page.locator("nav a[aria-current=page]").inner_text() == "Settings"


UNDER_BAR = """() => {
  const bar = document.querySelector("header.bar").getBoundingClientRect();
  const title = [...document.querySelectorAll("h1")].find((one) => one.checkVisibility());
  return title.getBoundingClientRect().top < bar.bottom;
}"""


@pytest.mark.parametrize("shape", ["desktop", "phone", "sideways", "large"])
def test_title_stays_below_bar_when_tab_is_clicked_again(
    daemon: Daemon, open_page: Open, shape: str
) -> None:
    page = open_page(daemon, "#models", device="desktop" if shape == "desktop" else "phone")
    if shape == "sideways":
        page.set_viewport_size({"width": 844, "height": 390})
    if shape == "large":
        page.evaluate("document.documentElement.style.fontSize = '200%'")
    for view in ("models", "settings", "watch"):
        link = page.locator(f".bar a[href='#{view}']:visible")
        link.click()
        page.locator(f"#{view} .card").first.wait_for()
        for _ in range(2):
            page.evaluate("scrollTo(0, 300)")
            link.click()
            page.evaluate(TWO_FRAMES)
            assert not page.evaluate(UNDER_BAR), view
    page.reload()
    page.locator("#watch .card").first.wait_for()
    page.evaluate(TWO_FRAMES)
    assert not page.evaluate(UNDER_BAR), "opened by its address"


def test_skip_link_stays_in_view(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#models")
    page.locator("#models .card").first.wait_for()
    page.locator("a.skip").focus()
    page.keyboard.press("Enter")
    page.evaluate(TWO_FRAMES)
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator("#models .card").first.is_visible()
    assert not page.evaluate(UNDER_BAR)


def test_back_leads_to_first_view(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    page.locator("nav a[href='#settings']").click()
    page.locator("#settings .card").first.wait_for()
    page.go_back()
    page.locator("#question").wait_for()
    assert page.locator("nav a[aria-current=page]").inner_text() == "Ask"


def test_phone_has_five_tabs_and_settings_at_top(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, device="phone")
    tabs = page.locator("nav a:visible")
    assert tabs.all_inner_texts() == ["Ask", "Watch", "Now", "Models", "Connect"]
    widths = [tab.bounding_box()["width"] for tab in tabs.all()]
    assert min(widths) > 64
    page.get_by_role("link", name="Settings").click()
    page.locator("#settings .card").first.wait_for()
    current = page.locator(".bar a[aria-current=page]:visible")
    assert current.get_attribute("title") == "Settings"
    assert accessibility_problems(page) == []


THEME_AT_FIRST_PAINT = """() => new MutationObserver((_, observer) => {
  if (!document.body) return;
  window.first = getComputedStyle(document.documentElement).backgroundColor;
  observer.disconnect();
}).observe(document, {childList: true, subtree: true})"""
BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"
BARS = """() => [...document.querySelectorAll("meta[name=theme-color]")]
  .filter(({media}) => matchMedia(media).matches).map(({content}) => content)"""
LIGHT, DARK = "rgb(245, 245, 247)", "rgb(16, 16, 18)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chosen_appearance_is_kept_and_there_before_first_paint(
    daemon: Daemon, open_page: Open, scheme: str
) -> None:
    page = open_page(daemon, "#settings", scheme=scheme)
    usual, other = (LIGHT, DARK) if scheme == "light" else (DARK, LIGHT)
    assert page.evaluate(BACKGROUND) == usual
    page.add_init_script(f"({THEME_AT_FIRST_PAINT})()")
    page.get_by_label("Appearance").select_option("Dark" if scheme == "light" else "Light")
    assert page.evaluate(BACKGROUND) == other
    assert page.evaluate(BARS) == ["#101012" if scheme == "light" else "#f5f5f7"]
    assert accessibility_problems(page) == []
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    assert page.evaluate("[window.first, " + BACKGROUND + "]") == [other, other]
    tab = page.context.new_page()
    tab.goto(page.url)
    tab.get_by_label("Appearance").select_option("As the system")
    page.wait_for_function(f"{BACKGROUND} === '{usual}'")
    assert page.get_by_label("Appearance").input_value() == ""
    assert len(page.evaluate(BARS)) == 1
    assert page.evaluate("localStorage.length") == 0


def test_appearance_changes_where_browser_keeps_nothing(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no'); }})"
    )
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    page.locator("nav a[href='#settings']").click()
    page.get_by_label("Appearance").select_option("Dark")
    assert page.evaluate(BACKGROUND) == DARK


COLOURS = """() => {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const roots = rules.filter(({selectorText}) => selectorText === ":root");
  const names = roots.flatMap(({style}) => [...style]).filter((name) => name.startsWith("--"));
  const probe = document.body.appendChild(document.createElement("p"));
  const {style} = probe;
  return Object.fromEntries(names.map((name) => {
    Object.assign(style, {color: `var(${name})`, boxShadow: `var(${name})`});
    const {color, boxShadow} = getComputedStyle(probe);
    return [name, [color, boxShadow]];
  }));
}"""
"""What the variables of the style sheets are as colours and as shadows."""


def test_browser_without_light_dark_has_light_colours(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    light = page.evaluate(COLOURS)
    assert {"--bg", "--weights"} <= light.keys()
    page = open_page(daemon, scheme="dark")
    assert page.evaluate(COLOURS) != light

    def make_unknown(route: Any) -> None:
        response = route.fetch()
        headers = {k: v for k, v in response.headers.items() if k != "content-security-policy"}
        route.fulfill(body=response.text().replace("light-dark(", "no-such("), headers=headers)

    page.route(f"{daemon.url}/", make_unknown)
    page.route("**/*.css", make_unknown)
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    assert page.evaluate(COLOURS) == light
