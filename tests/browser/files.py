"""Files to drop and paste."""

from __future__ import annotations

import base64
from typing import Any

_SEND = """([how, files]) => {
  const data = new DataTransfer();
  for (const [base64, name, type] of files) {
    const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
    data.items.add(new File([bytes], name, {type}));
  }
  const options = {bubbles: true, cancelable: true};
  const target = document.querySelector("main");
  if (how === "paste") {
    target.dispatchEvent(new ClipboardEvent("paste", {...options, clipboardData: data}));
  } else {
    for (const kind of ["dragenter", "dragover", "drop"])
      target.dispatchEvent(new DragEvent(kind, {...options, dataTransfer: data}));
  }
}"""
TWO_FRAMES = """() => new Promise((resolve) =>
  requestAnimationFrame(() => requestAnimationFrame(resolve)))"""
File = tuple[bytes, str, str]
"""Content, name and MIME type."""


def attach(page: Any, how: str, *files: File) -> None:
    """Drop or paste files (`how`), and wait until the page has them."""
    before = page.locator("#attachments li").count()
    encoded = [[base64.b64encode(data).decode(), name, kind] for data, name, kind in files]
    page.evaluate(_SEND, [how, encoded])
    page.locator("#attachments li").nth(before + len(files) - 1).wait_for()


def ask(page: Any, question: str) -> Any:
    """Send a question; return the element of its complete answer, or of the first of two."""
    number = page.locator(".answer").count()
    page.get_by_role("textbox", name="Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").nth(number)
    answer.wait_for()
    wait_until_answered(page)
    return answer


def wait_until_answered(page: Any) -> None:
    from playwright.sync_api import expect

    expect(page.locator(".answer[aria-busy=true]")).to_have_count(0, timeout=20_000)
