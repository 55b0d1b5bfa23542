"""Makes the pictures of README.md from a running daemon with the embedded model."""

from __future__ import annotations

import argparse
import base64
import html
import json
import random
import statistics
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
AGENT, PAGE = IMAGES / "works.png", IMAGES / "page.png"
AGENT_SIZE, PAGE_SIZE = (1200, 560), (960, 756)
QUESTION = "Describe the picture."
ROUNDS = 3
WHITE = (238, 240, 246)
Color = tuple[int, int, int]
TASKS = ("Click on the red circle.", "Click on the blue square.", "Click on the green star.")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
CLICK = {"type": "function", "function": {"name": "click", "parameters": POINT}}
STYLE = """
body { margin: 0; width: 1200px; height: 560px; display: flex; background: #14161c; color: #e8eaf0;
  font: 16px/1.45 "DejaVu Sans", sans-serif; }
figure { margin: 40px 0 0 40px; position: relative; width: 480px; height: 480px; }
figure img { width: 480px; height: 480px; border-radius: 12px; }
figure b { position: absolute; width: 30px; height: 30px; margin: -15px; border-radius: 50%;
  background: #14161c; color: #fff; border: 2px solid #fff;
  text-align: center; line-height: 30px; font-size: 15px; }
main { margin: 36px 40px 0 44px; flex: 1; }
h1 { font-size: 21px; margin: 0 0 14px; font-weight: 600; }
section { background: #1f232d; border-radius: 12px; padding: 9px 16px; margin-bottom: 10px; }
section p { margin: 0 0 6px; } i { font-style: normal; color: #8fd3ff; }
code { font: 16px "DejaVu Sans Mono", monospace; color: #ffd479; }
.track { height: 8px; border-radius: 4px; background: #ff9f5a;
  overflow: hidden; margin: 8px 0 5px; }
.track span { display: block; height: 8px; background: #4fc08d; }
small { color: #aab0bf; font-size: 14px; } small b { color: #4fc08d; }
"""


def screenshot(clicked: int, shade: Color) -> bytes:
    """A PNG of a screen with three shapes, of which the first `clicked` have a ring."""
    image = Image.new("RGB", (448, 448), shade)
    draw = ImageDraw.Draw(image)
    draw.ellipse((50, 60, 170, 180), (214, 39, 40))
    draw.rectangle((270, 110, 380, 220), (31, 80, 200))
    spikes = [(200, 265), (216, 318), (272, 318), (227, 350), (244, 404), (200, 371)]
    spikes += [(156, 404), (173, 350), (128, 318), (184, 318)]
    draw.polygon(spikes, (20, 150, 60))
    for left, top, right, bottom in ((44, 54, 176, 186), (264, 104, 386, 226))[:clicked]:
        draw.rounded_rectangle((left, top, right, bottom), 10, outline=(70, 70, 80), width=2)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def ask(client: openai.OpenAI, shade: Color) -> list[dict[str, Any]]:
    """One conversation about screens that were not seen before, and its last request again.

    Returns for each request its task, point, tokens, cached tokens and seconds.
    """
    messages: list[Any] = []
    turns = []
    for number, task in enumerate((*TASKS, TASKS[-1])):
        if number == len(TASKS):  # asked again
            del messages[-2:]
        else:
            data = base64.b64encode(screenshot(number, shade)).decode()
            picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            messages.append({"role": "user", "content": [picture, {"type": "text", "text": task}]})
        start = time.perf_counter()
        create: Any = client.chat.completions.create
        answer = create(
            model="demo", messages=messages, tools=[CLICK], tool_choice="required", temperature=0
        )
        seconds = time.perf_counter() - start
        message, usage = answer.choices[0].message, answer.usage
        [call] = message.tool_calls
        cached = usage.prompt_tokens_details.cached_tokens
        point = json.loads(call.function.arguments)
        turns.append(
            {**point, "task": task, "tokens": usage.prompt_tokens, "cached": cached, "s": seconds}
        )
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Done."}]
    return turns


def agent_html(turns: list[dict[str, Any]]) -> str:
    """The conversation beside its first screen."""
    image = base64.b64encode(screenshot(0, WHITE)).decode()
    marks = "".join(
        f'<b style="left:{turn["x"] / 10}%;top:{turn["y"] / 10}%">{number}</b>'
        for number, turn in enumerate(turns[: len(TASKS)], 1)
    )
    sections = "".join(_section(number, turn) for number, turn in enumerate(turns, 1))
    return (
        f"<meta charset=utf-8><style>{STYLE}</style>"
        f'<figure><img src="data:image/png;base64,{image}">{marks}</figure>'
        f"<main><h1>An agent, a new screenshot each turn</h1>{sections}"
        "<small>Real answers of the embedded model on two CPU cores; times are medians of "
        "three conversations</small></main>"
    )


def _section(number: int, turn: dict[str, Any]) -> str:
    name = f"{number}." if number <= len(TASKS) else "Again:"
    share = 100 * turn["cached"] / turn["tokens"]
    return (
        f"<section><p><i>{name}</i> {html.escape(turn['task'])} "
        f"<code>click(x={turn['x']}, y={turn['y']})</code></p>"
        f'<div class="track"><span style="width:{share}%"></span></div>'
        f"<small>{turn['tokens']} tokens, <b>{turn['cached']} from the cache</b>, "
        f"{1000 * turn['s']:.0f} ms</small></section>"
    )


def _new_shade() -> Color:
    """Nearly white, so that no screen is in a cache from an earlier run."""
    red, green, blue = (part - random.randrange(12) for part in WHITE)
    return red, green, blue


def measure(client: openai.OpenAI) -> list[dict[str, Any]]:
    """The turns of the last of several conversations, with their median times."""
    ask(client, _new_shade())  # the first pictures after a start are slower
    rounds = [ask(client, _new_shade()) for _ in range(ROUNDS)]
    turns = rounds[-1]
    for turn, *others in zip(turns, *rounds[:-1], strict=True):
        turn["s"] = statistics.median([turn["s"], *(other["s"] for other in others)])
    return turns


def open_view(browser: Browser, size: tuple[int, int]) -> Page:
    """An empty tab of `size`, in pixels of CSS, each drawn as two by two."""
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    return browser.new_page(viewport=viewport, device_scale_factor=2, color_scheme="dark")


def ask_on_page(view: Page, url: str) -> None:
    """Open the daemon's page and ask about its sample picture, until the answer is complete."""
    view.goto(url)
    view.locator("#state[data-state=ready]").wait_for()
    view.get_by_role("button", name=QUESTION).click()
    view.locator(".answer[aria-busy=false] .figures").wait_for()
    view.mouse.move(0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the daemon's address")
    url = parser.parse_args().url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    turns = measure(client)
    client.post("/caches/clear", cast_to=object, body={})  # nobody has asked on the page yet
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        view = open_view(browser, AGENT_SIZE)
        view.set_content(agent_html(turns))
        view.screenshot(path=AGENT)
        view = open_view(browser, PAGE_SIZE)
        ask_on_page(view, url)
        view.screenshot(path=PAGE)
        browser.close()
    print(AGENT, PAGE)


if __name__ == "__main__":
    main()
