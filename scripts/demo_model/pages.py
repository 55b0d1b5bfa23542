"""Pages of documents: a heading and a table, with questions about its cells."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from itertools import pairwise

import cv2
import numpy as np

from demo_model.conversations import finish, system_prompt, with_picture
from demo_model.drawing import Picture, blend
from demo_model.encode import Conversation, Turn
from demo_model.fonts import text_mask
from demo_model.palette import Color
from demo_model.phrases import dress, expand
from demo_model.scenes import SMALLEST_TEXT, Artist

LABELS = (
    "Tax", "Net", "Sum", "Due", "Fee", "Rent", "Cost", "Paid", "Price", "Hours", "Units", "Stock",
    "Water", "Heat", "Power", "Gas", "Food", "Fuel", "Tolls", "Hotel", "Train", "Bread", "Milk",
    "North", "South", "East", "West", "Monday", "Friday", "Open", "Sold", "Left", "Low", "High",
)  # fmt: skip
HEADINGS = ("Invoice", "Report", "Sales", "Costs", "Stock", "Bill", "Order", "Totals", "Budget",
            "Receipt", "Table", "Prices", "Plan", "Results", "Summary")  # fmt: skip
COLUMNS = ("2023", "2024", "2025", "Q1", "Q2", "Q3", "Q4", "Net", "Tax", "Sum", "In", "Out",
           "May", "June", "Min", "Max", "Qty", "EUR", "USD", "Old", "New")  # fmt: skip
NTH = ("first", "second", "third", "fourth", "fifth", "sixth")

CELL = ["What is [the |]{row}", "How much is [the |]{row}", "What is the value of {row}",
        "[Which|What] number [is|stands] beside {row}", "{row}", "Read the value of {row}",
        "What does the table say for {row}"]  # fmt: skip
CELL_OF_COLUMN = ["What is the {column} of {row}", "What is {row} in {column}",
                  "{row}, {column}", "What is in row {row}, column {column}",
                  "Read the cell of {row} and {column}"]  # fmt: skip
LABEL_OF = ["[Which|What] [row|line] [has|says] {value}", "What does {value} belong to"]
HEADING = ["What is the [heading|title]", "Read the [heading|title]",
           "What is the [heading|title] of [the|this] [page|document|table]"]  # fmt: skip
TOTAL = ["What is the total", "How much is the total", "What is the total of the [table|page]",
         "Read the total", "What does it add up to"]  # fmt: skip
ROW = ["Read the {nth} [line|row]", "What does the {nth} [line|row] say"]


@dataclass
class Table:
    """Rows of a label and numbers, of which the last may be the total; `columns` if headed."""

    rows: list[list[str]]
    columns: list[str] = field(default_factory=list)
    heading: str = ""
    has_total: bool = False

    @property
    def lines(self) -> list[list[str]]:
        """All that is printed, but the heading."""
        return ([["", *self.columns]] if self.columns else []) + self.rows


def on_page(rng: random.Random, artist: Artist, size: tuple[int, int]) -> Conversation:
    """Several questions on one page."""
    table = any_table(rng, artist, size)
    picture = finish(rng, draw(rng, artist, table, size), size)
    turns: list[Turn] = []
    for _ in range(rng.choice((2, 3, 4, 6))):
        turn = question(rng, table)
        if all(turn.question != other.question for other in turns):
            turns.append(turn)
    turns[0].question = with_picture(rng, turns[0].question)
    return Conversation(turns, system_prompt(rng), [picture])


def any_table(rng: random.Random, artist: Artist, size: tuple[int, int]) -> Table:
    height, width = size
    most = min(6, height // 44)
    num_columns = 1 if width < 300 or rng.random() < 0.6 else 2
    labels = [_label(rng, artist) for _ in range(rng.randint(2, max(2, most - 1)))]
    labels = list(dict.fromkeys(labels))
    numbers = [[rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4))) for _ in range(num_columns)]
               for _ in labels]  # fmt: skip
    cents = rng.random() < 0.2 and num_columns == 1

    def shown(value: int) -> str:
        return f"{value / 100:.2f}" if cents else str(value)

    rows = [[label, *map(shown, each)] for label, each in zip(labels, numbers, strict=True)]
    has_total = len(rows) < most and rng.random() < 0.4
    if has_total:
        sums = [sum(each) for each in zip(*numbers, strict=True)]
        rows.append([rng.choice(("Total", "TOTAL", "total")), *map(shown, sums)])
    columns = rng.sample(COLUMNS, num_columns) if num_columns > 1 else []
    heading = ""
    if len(rows) + bool(columns) < most and rng.random() < 0.5:
        heading = rng.choice(HEADINGS) if rng.random() < 0.7 else artist.words.pick(rng)
        heading = heading.upper() if rng.random() < 0.3 else heading
    return Table(rows, columns, heading, has_total)


def _label(rng: random.Random, artist: Artist) -> str:
    word = rng.choice(LABELS if rng.random() < 0.5 else artist.words.common)
    if rng.random() < 0.1:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))
    return rng.choice((word.upper(), word.upper(), word.capitalize(), word.lower()))


def question(rng: random.Random, table: Table) -> Turn:
    cells = table.rows[:-1] if table.has_total else table.rows
    kind, row = rng.random(), rng.choice(cells)
    at = rng.randrange(1, len(row))
    if table.has_total and not table.columns and kind < 0.2:
        return _turn(rng, "page_total", TOTAL, table.rows[-1][1])
    if table.heading and kind < 0.35:
        return _turn(rng, "page_heading", HEADING, table.heading)
    if kind < 0.45 and [each[at] for each in table.rows].count(row[at]) == 1:
        unique = sum(cell == row[at] for each in table.lines for cell in each) == 1
        if unique:
            return _turn(rng, "page_label", LABEL_OF, row[0], value=row[at])
    if kind < 0.65 and not table.heading and not table.columns:
        number = rng.randrange(len(table.rows))
        nth = ["last", "bottom"] if number == len(table.rows) - 1 else [NTH[number]]
        return _turn(
            rng, "page_row", ROW, " ".join(table.rows[number]), nth=rng.choice([*nth, NTH[number]])
        )
    if table.columns:
        return _turn(
            rng, "page_cell", CELL_OF_COLUMN, row[at], row=row[0], column=table.columns[at - 1]
        )
    return _turn(rng, "page_cell", CELL, row[1], row=row[0])


def _turn(rng: random.Random, task: str, wordings: list[str], answer: str, **slots: str) -> Turn:
    return Turn(dress(rng, expand(rng, rng.choice(wordings), **slots), None), answer, task)


# ---- drawing -----------------------------------------------------------------------------


def draw(rng: random.Random, artist: Artist, table: Table, size: tuple[int, int]) -> Picture:
    height, width = size
    paper = rng.randint(235, 255) if rng.random() < 0.9 else rng.randint(210, 235)
    picture = np.full((height, width, 3), paper, np.uint8)
    ink: Color = (rng.randint(0, 70),) * 3 if rng.random() < 0.8 else (20, 30, rng.randint(60, 160))
    lines = table.lines
    num_lines = len(lines) + bool(table.heading)
    path = artist.fonts.pick(rng)
    pitch = rng.uniform(0.75, 0.95) * height / num_lines
    pitch = min(pitch, height * rng.uniform(0.16, 0.4))
    top = rng.uniform(0.02, 1.0) * (height - pitch * num_lines) * 0.98
    margin = rng.uniform(0.03, 0.09) * width
    edges = _edges(rng, table, margin, width)
    room = min(right - left for left, right in pairwise(edges))
    longest = max((len(cell) for line in lines for cell in line[1:]), default=1)
    label = max(len(line[0]) for line in lines)
    longest = max(longest, round(label * room / (edges[1] - edges[0])))
    font = int(min(pitch * rng.uniform(0.5, 0.72), 1.45 * room / max(3, longest)))
    font = max(SMALLEST_TEXT, font)
    if table.heading:
        mask = _mask(rng, path, int(font * rng.uniform(1.0, 1.3)), table.heading, width - margin)
        left = margin if rng.random() < 0.6 else (width - mask.shape[1]) / 2
        blend(picture, mask, int(left), int(top + (pitch - mask.shape[0]) / 2), ink)
        top += pitch
    _rule(rng, picture, table, edges, top, pitch, ink)
    to_right = rng.random() < 0.5
    for number, line in enumerate(lines):
        for column, cell in enumerate(line):
            left, right = edges[column], edges[column + 1]
            pad = 0.06 * (right - left)
            mask = _mask(rng, path, font, cell, right - left - 2 * pad)
            x = right - pad - mask.shape[1] if column and to_right else left + pad
            y = top + pitch * number + (pitch - mask.shape[0]) / 2
            if cell:
                blend(picture, mask, int(x), int(y), ink)
    return picture


def _edges(rng: random.Random, table: Table, margin: float, width: int) -> list[float]:
    """The columns' edges, in pixels."""
    num_columns = len(table.rows[0])
    right = width - margin
    if num_columns == 2 and rng.random() < 0.4:
        right = margin + (width - 2 * margin) * rng.uniform(0.75, 1.0)
    shares = [rng.uniform(1.0, 1.5), *[rng.uniform(0.9, 1.1)] * (num_columns - 1)]
    total, edges = sum(shares), [margin]
    for share in shares:
        edges.append(edges[-1] + share / total * (right - margin))
    return edges


def _mask(rng: random.Random, path: str, font: int, text: str, room: float) -> np.ndarray:
    mask = text_mask(path, font, text or " ", smooth=True)
    if mask.shape[1] > room:
        size = (max(1, int(room)), max(1, round(mask.shape[0] * room / mask.shape[1])))
        mask = cv2.resize(mask, size, interpolation=cv2.INTER_AREA)
    return mask


def _rule(
    rng: random.Random,
    picture: Picture,
    table: Table,
    edges: list[float],
    top: float,
    pitch: float,
    ink: Color,
) -> None:
    """Lines around cells, or between rows, or under the first row, or none."""
    kind = rng.choice(("none", "grid", "grid", "rows", "head"))
    thickness, num_lines = rng.choice((1, 1, 2)), len(table.lines)
    ys = [round(top + pitch * number) for number in range(num_lines + 1)]
    if kind == "head":
        ys = ys[1:2]
    for y in ys if kind != "none" else ():
        cv2.line(picture, (round(edges[0]), y), (round(edges[-1]), y), ink, thickness)
    for x in map(round, edges) if kind == "grid" else ():
        cv2.line(picture, (x, round(top)), (x, ys[-1]), ink, thickness)
