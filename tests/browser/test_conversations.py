"""Conversations kept in the browser: found, renamed, exported, deleted; and what is not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.files import ask, attach
from tests.browser.test_ask import SQUARE
from tests.browser.test_views import accessibility_problems
from tests.support.daemons import Daemon


@pytest.fixture
def page(scripted_daemon: Daemon, open_page: Open) -> Any:
    return open_page(scripted_daemon)


def titles(page: Any) -> list[str]:
    return list(page.locator("#history-list .name").all_inner_texts())


def choose(page: Any, title: str, action: str) -> None:
    """An action of the menu of a conversation."""
    page.get_by_label(f"More about {title}").click()
    page.locator("#history-list details[open]").get_by_role("button", name=action).click()


def ask_anew(page: Any, question: str) -> None:
    if page.get_by_role("button", name="New", exact=True).is_visible():
        page.get_by_role("button", name="New", exact=True).click()
    ask(page, question)
    page.locator("#history-list .name", has_text=question).wait_for()


def is_shown(page: Any) -> bool:
    """Whether the picture of a question can be seen."""
    return bool(
        page.locator(".asked img").evaluate(
            "async (img) => { await img.decode(); return img.naturalWidth > 0; }"
        )
    )


def test_long_conversation_opens_at_its_end(page: Any) -> None:
    from playwright.sync_api import expect

    for number in range(9):
        ask(page, f"say 0 answer {number}")
    page.locator("#history-list .name").wait_for()
    page.reload()
    last = page.locator(".answer").nth(8)
    last.get_by_role("button", name="Again").wait_for()
    expect(last.locator("footer")).to_be_in_viewport()


def test_conversation_with_picture_is_there_after_reload(page: Any) -> None:
    attach(page, "drop", SQUARE)
    ask(page, "say 0 a blue square")
    page.locator("#history-list .name").wait_for()
    page.reload()
    page.locator(".answer .text p", has_text="a blue square").wait_for()
    assert is_shown(page)
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "say 0 more")
    first, answered, _ = request.value.post_data_json["messages"]
    assert first["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert answered["content"] == "a blue square"


def test_new_tab_begins_empty_and_opens_kept_conversation(page: Any) -> None:
    attach(page, "drop", SQUARE)
    ask(page, "say 0 kept text")
    page.locator("#history-list .name").wait_for()
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("heading", name="Ask about a picture").wait_for()
    other.locator("#history-list .name", has_text="kept text").click()
    other.locator(".answer .text p", has_text="kept text").wait_for()
    assert is_shown(other)


def test_search_finds_words_of_questions_and_answers(page: Any) -> None:
    ask_anew(page, "say 0 pears are green")
    ask_anew(page, "say 0 apples are red")
    page.get_by_label("Search conversations").fill("green PEARS")
    page.locator("#history-list .name").nth(1).wait_for(state="detached")
    assert titles(page) == ["say 0 pears are green"]
    page.get_by_label("Search conversations").fill("plums")
    page.get_by_text("Nothing found.").wait_for()


def test_conversation_is_renamed_and_deleted(page: Any) -> None:
    ask_anew(page, "say 0 first")
    ask_anew(page, "say 0 second")
    choose(page, "say 0 first", "Rename")
    page.get_by_label("New name").fill("Fruit")
    page.keyboard.press("Enter")
    page.locator("#history-list .name", has_text="Fruit").wait_for()
    page.reload()
    page.locator("#history-list .name", has_text="Fruit").wait_for()
    assert accessibility_problems(page) == []
    choose(page, "say 0 second", "Delete")
    assert accessibility_problems(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.locator("#history-list .name", has_text="second").wait_for(state="detached")
    page.get_by_role("heading", name="Ask about a picture").wait_for()
    page.reload()
    page.locator("#history-list .name", has_text="Fruit").wait_for()
    assert titles(page) == ["Fruit"]


def test_conversation_is_exported_as_json_and_markdown(page: Any) -> None:
    attach(page, "drop", SQUARE)
    ask_anew(page, "say 0 **blue**")
    with page.expect_download() as download:
        choose(page, "say 0 **blue**", "Save as JSON")
    kept = json.loads(Path(download.value.path()).read_text())
    (turn,) = kept["conversations"][0]["turns"]
    assert turn["text"] == "say 0 **blue**"
    assert turn["answers"][0]["text"] == "**blue**"
    assert turn["media"][0]["url"].startswith("data:image/png;base64,iVBOR")
    with page.expect_download() as download:
        choose(page, "say 0 **blue**", "Save as Markdown")
    assert download.value.suggested_filename == "say-0-blue.md"
    text = Path(download.value.path()).read_text()
    assert "## Question\n\n*square.png*\n\nsay 0 **blue**" in text
    assert text.endswith("## Answer\n\n**blue**\n")


def test_page_says_that_browser_has_no_room(page: Any) -> None:
    page.evaluate(
        """() => {
          IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
          };
        }"""
    )
    answer = ask(page, "say 0 still answered")
    page.get_by_text("The browser has no room left for this conversation.").wait_for()
    assert answer.locator(".text").inner_text() == "still answered"


def test_page_bounds_bytes_of_conversations(page: Any) -> None:
    told = page.evaluate(
        """async () => {
          const store = await import("/page/store.js");
          const turn = {text: "", answers: [], media: [{id: "a", bytes: store.MAX_BYTES + 1}]};
          const kept = {id: "x", title: "", created: 0, updated: 0, turns: [turn]};
          return store.keep(kept, () => false).then(() => "kept", (error) => error.message);
        }"""
    )
    assert told.startswith("Conversations take up all of the 500 MiB")
    assert titles(page) == []


KEEP_ONE = """async (delayed) => {
  const store = await import("/page/store.js");
  let read;
  const blob = new Blob(["x"], {type: "image/png"});
  blob.arrayBuffer = () => new Promise((resolve) => (read = () => resolve(new ArrayBuffer(1))));
  const turn = {text: "", answers: [], media: [{id: "a", bytes: 1, blob}]};
  const kept = store.keep({id: "x", title: "", created: 0, updated: 0, turns: [turn]}, () => true);
  while (!read) await new Promise((resolve) => setTimeout(resolve, 5));
  if (delayed) await store.forget("x");
  read();
  await kept;
  return [(await store.summaries()).length, (await store.files("x")).size];
}"""
"""Keeps a conversation with a picture; deletes it while the picture is read, if so asked."""


def test_conversation_deleted_while_it_is_kept_stays_deleted(page: Any) -> None:
    assert page.evaluate(KEEP_ONE, True) == [0, 0]


def test_conversation_is_kept_once_its_pictures_are_read(page: Any) -> None:
    assert page.evaluate(KEEP_ONE, False) == [1, 1]


def test_pictures_kept_by_earlier_version_are_read(page: Any) -> None:
    text = page.evaluate(
        """async () => {
          const store = await import("/page/store.js");
          await store.summaries(); // makes the database
          const database = await new Promise((resolve) => {
            indexedDB.open("vlm_server").onsuccess = ({target}) => resolve(target.result);
          });
          const files = database.transaction("files", "readwrite").objectStore("files");
          files.put({id: "a", conversation: "x", blob: new Blob(["as it was"])});
          return (await store.files("x")).get("a").text();
        }"""
    )
    assert text == "as it was"


def test_emptied_question_stays_empty_when_page_is_loaded_again(page: Any) -> None:
    question = page.get_by_role("textbox", name="Question", exact=True)
    question.fill("And its col")
    page.evaluate("dispatchEvent(new Event('pagehide'))")  # left, and come back to by Back
    question.fill("")
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    assert question.input_value() == ""


def test_answer_goes_on_while_another_conversation_is_open(page: Any) -> None:
    box = page.get_by_role("textbox", name="Question", exact=True)
    box.fill("say 0.1 a b c d e f g h i j k l m n")
    page.keyboard.press("Enter")
    page.locator(".answer .text p").wait_for()
    page.get_by_role("button", name="New", exact=True).click()
    ask(page, "say 0 meanwhile")
    page.locator("#history-list .name", has_text="a b c d").click()
    page.locator(".answer .figures").wait_for()
    assert page.locator(".answer .text").inner_text() == "a b c d e f g h i j k l m n"


def test_conversations_open_over_page_on_phone(scripted_daemon: Daemon, open_page: Open) -> None:
    page = open_page(scripted_daemon, device="phone")
    ask(page, "say 0 on a phone")
    assert page.locator("#history").is_hidden()
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.locator("#history-list .name", has_text="on a phone").wait_for()
    assert accessibility_problems(page) == []
    page.keyboard.press("Escape")
    assert page.locator("#history").is_hidden()
