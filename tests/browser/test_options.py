"""Options: checked in words, sent as fields, kept in the browser; and two answers side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.conftest import VIEWPORTS, ModelsDaemon, Open
from tests.browser.files import ask, attach, wait_until_answered
from tests.browser.test_ask import SQUARE, text_of
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon
from tests.support.images import canvas, draw_shape, encoded, one_shape

LOAD_MS = 90_000
WIDE = draw_shape(canvas((1024, 256)), "square", "blue", (512, 128), 150)
PICTURES = {
    "square": one_shape("square", "blue"),
    "wide": WIDE,
    "small": WIDE.resize((200, 100)),
    "tall": WIDE.resize((90, 1800)),
}
LARGE = (encoded(WIDE), "wide.png", "image/png")
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"type": "string"}, "color": {"type": "string"}},
    "required": ["shape", "color"],
    "additionalProperties": False,
}


def open_options(page: Any) -> Any:
    page.get_by_role("button", name="Options").click()
    return page


@pytest.mark.parametrize(
    ("label", "value", "problem"),
    [
        ("Longest answer", "0", "A whole number of tokens, 1 or more."),
        ("Longest answer", "1.5", "A whole number of tokens, 1 or more."),
        ("Longest answer", "999999", "The model has room for 8,192 tokens"),
        ("Temperature", "3", "A number from 0"),
        ("Answer as JSON", '{"type": }', "This is not valid JSON in line 1, column 10"),
        ("Answer as JSON", "[]", "The schema must be an object in braces."),
        ("Answer as JSON", '{"type": "objekt"}', "Is “object” meant?"),
        (
            "Answer as JSON",
            '{"propertys": {}}',
            "The schema has “propertys”. Is “properties” meant?",
        ),
        (
            "Answer as JSON",
            '{"type": "object", "properties": {"a": {"type": "text"}}, "required": ["a"]}',
            "“a” has the type “text”. A type is one of: object,",
        ),
        (
            "Answer as JSON",
            '{"type": "object", "properties": {"a": {}}, "required": ["b"]}',
            "names “b”, which is not in its “properties”.",
        ),
        ("Tools, as JSON", "{}", "The tools must be a list in square brackets."),
        ("Tools, as JSON", '[{"name": "x"}]', "Tool 1 must have the form"),
    ],
)
def test_wrong_option_is_said_in_words_and_not_sent(
    daemon: Daemon, open_page: Open, label: str, value: str, problem: str
) -> None:
    page = open_options(open_page(daemon))
    field = page.get_by_label(label)
    field.fill(value)
    page.locator(".options .problem", has_text=problem).wait_for()
    assert field.get_attribute("aria-invalid") == "true"
    page.get_by_role("textbox", name="Question", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    assert page.locator(".answer").count() == 0
    assert field.evaluate("field => document.activeElement === field")
    field.fill("")
    page.get_by_role("textbox", name="Question", exact=True).press("Enter")
    page.locator(".answer .figures").wait_for()


def test_options_are_sent_and_kept_in_browser(daemon: Daemon, open_page: Open) -> None:
    page = open_options(open_page(daemon))
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Instructions").fill("Be brief.")
    page.get_by_label("Size of pictures").select_option("low")
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    attach(page, "drop", SQUARE)
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "What shape is this?")
    body = request.value.post_data_json
    assert body["temperature"] == 0.5
    system, question = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert question["content"][0]["image_url"]["detail"] == "low"
    open_options(page)
    page.get_by_role("button", name="Reset").click()
    assert page.get_by_label("Temperature").input_value() == ""
    assert page.evaluate("localStorage.length") == 0


def test_options_make_room_for_answer(daemon: Daemon, open_page: Open) -> None:
    page = open_options(open_page(daemon))
    attach(page, "drop", SQUARE)
    ask(page, "What shape is this?")
    assert page.locator("#options").is_hidden()
    assert page.evaluate("document.activeElement.id") == "question"


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_schema_is_built_from_fields(daemon: Daemon, open_page: Open, device: str) -> None:
    page = open_options(open_page(daemon, device=device))
    add = page.get_by_role("button", name="Add a field")
    for number, (name, kind) in enumerate([("shape", "text"), ("color", "choice")], 1):
        add.click()
        page.keyboard.type(name)  # what is added is selected
        page.get_by_label(f"Kind of field {number}").select_option(kind)
    page.keyboard.type("red, blue")
    add.click()
    page.get_by_label("Whether field 3 is required").uncheck()
    name = page.get_by_label("Name of field 3")
    name.fill("color")
    assert name.get_attribute("aria-invalid") == "true", "two fields of one name"
    page.get_by_label("Kind of field 3").select_option("boolean")
    assert name.input_value() == "field"
    assert json.loads(page.get_by_label("Answer as JSON").input_value()) == {
        "type": "object",
        "properties": {
            "shape": {"type": "string"},
            "color": {"type": "string", "enum": ["red", "blue"]},
            "field": {"type": "boolean"},
        },
        "required": ["shape", "color"],
        "additionalProperties": False,
    }
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.get_by_role("button", name="Remove field 3").click()
    attach(page, "drop", SQUARE)
    answer = ask(page, "The square as JSON.")
    shown = json.loads(answer.locator(".text code").inner_text())
    assert shown == {"shape": "square", "color": "blue"}


def test_schema_fields_show_text_and_keep_unknown_parts(daemon: Daemon, open_page: Open) -> None:
    page = open_options(open_page(daemon))
    schema = page.get_by_label("Answer as JSON")
    point = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    written = {
        "title": "Place",
        "type": "object",
        "properties": {"at": point, "n": {"type": "integer"}},
    }
    schema.fill(json.dumps(written))
    kind = page.get_by_label("Kind of field 1").locator("option:checked")
    assert kind.inner_text() == "As written"
    page.get_by_label("Whether field 2 is required").check()
    assert json.loads(schema.input_value()) == written | {"required": ["n"]}
    for other in ("[1]", '{"type": "string"}', '{"type": '):
        schema.fill(other)
        assert page.locator("#schema-fields li").count() == 0
        assert page.get_by_role("button", name="Add a field").is_disabled(), other
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Example").click()
    assert page.locator("#schema-fields li").count() == 3


@pytest.mark.parametrize("value", ["Paris, France", " red", "red ", "", "two\nlines"])
def test_choice_that_commas_cannot_separate_stays_as_written(
    daemon: Daemon, open_page: Open, value: str
) -> None:
    page = open_options(open_page(daemon))
    schema = page.get_by_label("Answer as JSON")
    properties = {"at": {"type": "string", "enum": ["Rome", value]}}
    schema.fill(json.dumps({"type": "object", "properties": properties}))
    kind = page.get_by_label("Kind of field 1").locator("option:checked")
    assert kind.inner_text() == "As written"
    assert page.locator(".choices").count() == 0
    page.get_by_label("Name of field 1").fill("place")
    assert json.loads(schema.input_value())["properties"] == {"place": properties["at"]}


def test_required_names_without_field_are_kept(daemon: Daemon, open_page: Open) -> None:
    page = open_options(open_page(daemon))
    schema = page.get_by_label("Answer as JSON")

    def required() -> list[str]:
        names: list[str] = json.loads(schema.input_value())["required"]
        return names

    written = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b", "a"]}
    schema.fill(json.dumps(written))
    name = page.get_by_label("Name of field 1")
    name.fill("b")
    assert required() == ["b"]
    name.fill("bc")
    assert required() == ["bc", "b"]
    name.fill("b")
    page.get_by_label("Whether field 1 is required").uncheck()
    assert required() == []


def test_answer_follows_schema(daemon: Daemon, open_page: Open) -> None:
    page = open_options(open_page(daemon))
    attach(page, "drop", SQUARE)
    page.get_by_label("Answer as JSON").fill(json.dumps(SCHEMA))
    answer = ask(page, "The square as JSON.")
    shown = json.loads(answer.locator(".text code").inner_text())
    assert shown == {"shape": "square", "color": "blue"}


@pytest.mark.parametrize("detail", ["", "low", "high"])
@pytest.mark.parametrize("name", list(PICTURES))
def test_cost_of_pictures_equals_server_count(
    daemon: Daemon, open_page: Open, detail: str, name: str
) -> None:
    page = open_options(open_page(daemon))
    page.get_by_label("Size of pictures").select_option(detail)
    attach(page, "drop", SQUARE, (encoded(PICTURES[name]), f"{name}.png", "image/png"))
    cost = page.locator("#cost").inner_text()
    with page.expect_response("**/v1/chat/completions") as response:
        ask(page, "Which picture has a square?")
    usage = next(
        event["usage"]
        for line in response.value.text().splitlines()
        if line.startswith("data: {") and (event := json.loads(line[6:])).get("usage")
    )
    tokens = sum(image["tokens"] for image in usage["images"])
    assert cost == f"About {tokens} tokens"


def test_compare_offers_sizes_that_differ(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    page.get_by_role("button", name="Compare two answers").click()
    page.get_by_text("Nothing to compare yet: add a picture").wait_for()
    attach(page, "drop", SQUARE)
    page.get_by_text("sees these pictures at one size, and no other").wait_for()
    assert page.get_by_label("Answer twice").is_hidden()
    assert accessibility_problems(page) == []
    ask(page, "What shape is this?")
    assert page.locator(".answer").count() == 1, "two equal answers are no comparison"
    attach(page, "drop", LARGE)
    offered = page.get_by_label("Answer twice").locator("option")
    assert offered.all_inner_texts() == ["Small pictures"]
    page.get_by_role("button", name="New", exact=True).click()
    attach(page, "drop", LARGE)
    assert offered.all_inner_texts() == ["Small pictures, 512 \N{MULTIPLICATION SIGN} 128"]
    open_options(page).get_by_label("Size of pictures").select_option("low")
    assert offered.all_inner_texts() == ["Pictures as usual, 832 \N{MULTIPLICATION SIGN} 192"]


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_two_sizes_of_picture_are_compared(daemon: Daemon, open_page: Open, device: str) -> None:
    page = open_page(daemon, device=device)
    attach(page, "drop", LARGE)
    page.get_by_role("button", name="Compare two answers").click()
    page.get_by_label("Answer twice").select_option("detail low")
    bodies = []
    page.on(
        "request",
        lambda one: bodies.append(one.post_data_json) if "completions" in one.url else None,
    )
    ask(page, "What shape is this?")
    answers = page.locator(".answer")
    assert [text_of(answer) for answer in answers.all()] == ["square", "square"]
    assert all(label.bounding_box()["width"] > 30 for label in page.locator(".answer .label").all())
    assert page.locator(".answer .label").all_inner_texts() == [
        "Pictures as usual",
        "Small pictures",
    ]
    details = [body["messages"][0]["content"][0]["image_url"].get("detail") for body in bodies]
    assert sorted(details, key=str) == [None, "low"]
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    answers.last.get_by_role("button", name="Go on with this one").click()
    assert answers.count() == 1
    page.get_by_role("button", name="Compare two answers").click()
    assert text_of(ask(page, "And what colour is it?")) == "blue"


def test_two_models_are_compared(models_daemon: ModelsDaemon, open_page: Open) -> None:
    page = open_page(models_daemon.daemon)
    page.locator("#ask-model option").nth(1).wait_for(state="attached")
    attach(page, "drop", SQUARE)
    page.get_by_role("button", name="Compare two answers").click()
    page.get_by_label("Answer twice").select_option("model second")
    page.get_by_role("textbox", name="Question", exact=True).fill("What shape is this?")
    page.keyboard.press("Enter")
    page.locator(".answer .figures").nth(1).wait_for(timeout=LOAD_MS)
    wait_until_answered(page)
    answers = page.locator(".answer")
    assert all(label.bounding_box()["width"] > 30 for label in page.locator(".answer .label").all())
    assert page.locator(".answer .label").all_inner_texts() == ["shapes", "second"]
    assert [text_of(answer) for answer in answers.all()] == ["square", "square"]
