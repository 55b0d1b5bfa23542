"""Text at twice its size, as people set it in their browsers: nothing is cut off or overlaps."""

from __future__ import annotations

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.test_now import ask_some
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon

READY = {"now": "li.ended", "models": "#found li", "settings": "#settings dt"}


@pytest.mark.parametrize("device", list(VIEWPORTS))
@pytest.mark.parametrize("view", list(READY))
def test_view_fits_with_text_at_twice_its_size(
    daemon: Daemon, open_page: Open, view: str, device: str
) -> None:
    ask_some(daemon)
    page = open_page(daemon, f"#{view}", device=device)
    page.locator(READY[view]).first.wait_for()
    heading = page.locator("h1:visible").bounding_box()["height"]
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    assert page.locator("h1:visible").bounding_box()["height"] > 1.5 * heading
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
