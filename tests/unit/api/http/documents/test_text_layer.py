"""Texts of pages, in the order in which a person reads them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import pytest

from tests.support import pdf
from vlm_server.api.http.documents.readers import DocumentError, PdfReader
from vlm_server.api.http.documents.reading_order import Word, ordered_text

SENTENCE = "quick brown foxes jump over a lazy dog and run into deep woods where nobody looks"
WORDS = SENTENCE.split()
TITLE = "On the habits of foxes"
WIDE = "This line is set over the whole width of the page, as abstracts and captions mostly are"
LEADING = 12.0


def text_of(*pages: pdf.Page) -> str:
    return PdfReader(pdf.write(pages)).text(1)


def prose(seed: int, count: int = 8, width: int = 36) -> list[str]:
    """Lines of about `width` characters."""
    order = random.Random(seed)
    lines = []
    for _ in range(count):
        line = order.choice(WORDS)
        while len(line) < width - 4:
            line += " " + order.choice(WORDS)
        lines.append(line)
    return lines


def set_column(
    page: pdf.Page, x: float, y: float, lines: Sequence[str], leading: float = LEADING
) -> None:
    for number, line in enumerate(lines):
        page.text(x, y - number * leading, 10, line)


def set_rows(page: pdf.Page, y: float, columns: Mapping[float, Sequence[str]]) -> None:
    """Write one row after the other, as programs do that place lines of columns side by side."""
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        for x, text in zip(columns, row, strict=True):
            page.text(x, y - number * LEADING, 10, text)


def test_single_column_is_read_from_its_top() -> None:
    lines, page = prose(1, width=80), pdf.Page()
    for number in random.Random(2).sample(range(8), 8):  # the file's order is another one
        page.text(50, 700 - 12 * number, 10, lines[number])
    assert text_of(page).split("\n") == lines


@pytest.mark.parametrize("num_columns", [2, 3])
def test_columns_are_read_in_turn(num_columns: int) -> None:
    columns = {50 + 250.0 * at: prose(at) for at in range(num_columns)}
    page = pdf.Page((50 + 250 * num_columns, 842))
    set_rows(page, 700, columns)
    assert text_of(page).split("\n") == [*chain(*columns.values())]


def test_columns_of_different_lines_are_read_in_turn() -> None:
    left, right, page = prose(1, 10), prose(2, 6), pdf.Page()
    for number, line in enumerate(left):
        page.text(50, 700 - 12 * number, 10, line)
        if number < len(right):
            page.text(310, 704 - 13 * number, 10, right[number])
    assert text_of(page).split("\n") == left + right


def test_short_lines_written_column_by_column_stay_columns() -> None:
    """An index: its lines are as short as the cells of a table."""
    left, right = ([f"{word} fox hunt, {n}" for n, word in enumerate(w)] for w in ("ABC", "DEF"))
    apart, rows = pdf.Page(), pdf.Page()
    set_column(apart, 50, 700, left)
    set_column(apart, 310, 700, right)
    assert text_of(apart).split("\n") == left + right
    set_rows(rows, 700, {50: left, 310: right})
    assert text_of(rows).split("\n") == [f"{a}\t{b}" for a, b in zip(left, right, strict=True)]


def test_lines_across_columns_are_read_where_they_stand() -> None:
    page, parts = pdf.Page(), [prose(seed) for seed in range(4)]
    page.text(180, 800, 20, TITLE).text(50, 770, 10, WIDE)
    set_rows(page, 740, {50: parts[0], 310: parts[1]})
    page.text(50, 620, 10, WIDE)
    set_rows(page, 590, {50: parts[2], 310: parts[3]})
    expected = [TITLE, WIDE, *parts[0], *parts[1], WIDE, *parts[2], *parts[3]]
    assert text_of(page).split("\n") == expected


TABLE = [
    ["Item", "Number", "Price"],
    ["Red apples", "4", "1.20"],
    ["A much longer name of something else", "12", "13.00"],
    ["Pears", "", "0.90"],
]


def test_rows_of_tables_are_lines_with_separate_cells() -> None:
    page = pdf.Page().text(50, 740, 10, WIDE)
    for number, row in enumerate(TABLE):
        for x, cell in zip((50, 300, 420), row, strict=True):
            page.text(x, 700 - 14 * number, 10, cell)
    rows = ["\t".join(filter(None, row)) for row in TABLE]
    assert text_of(page).split("\n") == [WIDE, *rows]


def test_options_and_their_long_descriptions_are_rows() -> None:
    options = ["-b, --benchmark", "-s, --strict", "-t, --no-time-strict", "-h, --help"]
    described = [f"{line} and end" for line in prose(3, 4)]
    page = pdf.Page()
    set_rows(page, 700, {60: options, 200: described})
    expected = [f"{a}\t{b}" for a, b in zip(options, described, strict=True)]
    assert text_of(page).split("\n") == expected


def test_figures_of_full_width_are_rows() -> None:
    figures = [" ".join(f"{n * k % 97:02d}" for n in range(1, 15)) for k in (11, 23, 35, 47)]
    page = pdf.Page()
    set_rows(page, 700, {50: figures, 310: figures[::-1]})
    expected = [f"{a}\t{b}" for a, b in zip(figures, figures[::-1], strict=True)]
    assert text_of(page).split("\n") == expected


@pytest.mark.parametrize(
    ("matrix", "size"),
    [("0 1 -1 0 842 0", (842, 595)), ("-1 0 0 -1 595 842", pdf.A4), ("0 -1 1 0 0 595", (842, 595))],
    ids=["upwards", "upside down", "downwards"],
)
def test_turned_pages_are_read_like_upright_ones(matrix: str, size: tuple[float, float]) -> None:
    page, parts = pdf.Page(size, [f"{matrix} cm"]), [prose(1), prose(2)]
    page.text(50, 770, 10, WIDE)
    set_rows(page, 740, {50: parts[0], 310: parts[1]})
    assert text_of(page).split("\n") == [WIDE, *parts[0], *parts[1]]


@pytest.mark.parametrize(
    "operators",
    [
        "BT /F1 -12 Tf -1 0 0 -1 300 300 Tm",
        "BT /F1 -12 Tf 0 -1 1 0 300 300 Tm",
        "BT /F1 -12 Tf 300 300 Td",
        "1 0 0 -1 0 792 cm BT /F1 -12 Tf -1 0 0 1 300 300 Tm",
        "1 0 0 -1 0 792 cm BT -100 Tz /F1 -12 Tf 100 300 Td",
    ],
    ids=["upright", "upwards", "upside down", "flipped page", "flipped page and glyphs"],
)
def test_texts_of_negative_font_size_are_read_from_their_start(operators: str) -> None:
    page = pdf.Page(content=[f"{operators} (Abc def ghi) Tj 0 15 Td (second) Tj ET"])
    assert text_of(page).split("\n") == ["Abc def ghi", "second"]


def test_turned_and_skewed_texts_do_not_mix_with_others() -> None:
    page, lines = pdf.Page(), prose(1, width=60)
    page.content.append("BT /F1 10 Tf 0 1 -1 0 30 640 Tm (arXiv 4711) Tj ET")
    page.content.append("BT /F1 60 Tf 0.7 0.7 -0.7 0.7 90 600 Tm (DRAFT) Tj ET")
    set_column(page, 50, 700, lines)
    assert text_of(page).split("\n") == [*lines, "arXiv 4711", "DRAFT"]


def test_words_that_lines_divide_are_joined_within_their_column() -> None:
    left, right, page = prose(1), prose(2), pdf.Page()
    set_column(page, 50, 700, [*left, "and at last a mani-", "fold end"])
    set_column(page, 310, 700, right)
    assert text_of(page).split("\n") == [*left, "and at last a manifold end", *right]


def test_texts_outside_of_page_are_left_out() -> None:
    page = pdf.Page().text(50, 700, 10, "within").text(700, 700, 10, "beyond").text(50, 900, 9, "o")
    assert text_of(page) == "within"


def test_initials_and_small_raised_letters_stay_with_their_lines() -> None:
    page = pdf.Page().text(50, 676, 40, "T").text(80, 700, 10, "he fox").text(80, 688, 10, "is")
    page.text(80, 676, 10, "quick").text(113, 680, 6, "2")
    assert text_of(page).split("\n") == ["he fox", "is", "T quick 2"]


def test_leftward_scripts_are_read_from_their_side() -> None:
    letters = ["\u05d0\u05d1", "\u05d2\u05d3", "12"]
    words = [Word(text, n, 200 - 30 * n, 220 - 30 * n, 10, 10) for n, text in enumerate(letters)]
    assert ordered_text(words) == "\u05d0\u05d1\t\u05d2\u05d3\t12"
    assert ordered_text([]) == ""


def test_texts_of_too_many_characters_are_refused_not_cut() -> None:
    strings = f"({'x' * 30_000})" * 10  # PDFium reads 32,767 characters of a string
    most, more = (f"BT /F1 10 Tf 9 700 Td [{each}] TJ ET" for each in (strings, f"{strings}(x)"))
    assert text_of(pdf.Page((2e6, 842), [most])) == "x" * 300_000
    with pytest.raises(DocumentError, match="more than 300000 characters: leave out"):
        text_of(pdf.Page((2e6, 842), [more]))


def rows_of_numbers(order: random.Random) -> pdf.Page:
    page = pdf.Page()
    for number in range(900):
        numbers = " ".join(str(order.randrange(10_000)) for _ in range(25))
        page.text(1, 1 + 0.9 * number, 1, numbers)
    return page


def scattered(order: random.Random) -> pdf.Page:
    page = pdf.Page()
    for _ in range(100_000):
        x, y = order.uniform(9, 580), order.uniform(9, 830)
        page.text(round(x, 2), round(y, 2), order.choice((1, 5, 9)), order.choice("abc"))
    return page


def stairs(_: random.Random) -> pdf.Page:
    page = pdf.Page()
    for number in range(50_000):
        page.text(round(1 + 0.0118 * number, 3), round(1 + 0.0167 * number, 3), 0.05, "ab")
    return page


@pytest.mark.parametrize("draw", [rows_of_numbers, scattered, stairs])
def test_texts_of_many_glyphs_are_complete_in_time(
    draw: Callable[[random.Random], pdf.Page],
) -> None:
    page = draw(random.Random(1))
    started = time.process_time()
    text = text_of(page)
    assert time.process_time() - started < 20
    reader = PdfReader(pdf.write([page]))
    in_file = reader._page(1).get_textpage().get_text_bounded()
    assert Counter("".join(text.split())) == Counter("".join(in_file.split()))
