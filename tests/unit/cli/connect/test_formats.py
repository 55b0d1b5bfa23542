"""An edit changes nothing but its value, and its reversal leaves what else was edited since."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_server.cli.connect import tree
from vlm_server.cli.connect.change import Edit, Format, edit, undo
from vlm_server.cli.connect.formats import jsonc, toml, yaml
from vlm_server.cli.connect.settings_file import Record
from vlm_server.cli.connect.tree import MISSING, Unusable

OURS = {"name": "ours", "url": "http://127.0.0.1:8000/v1", "list": ["a", {"b": 1}], "on": True}

JSON_TEXTS = [
    "{}",
    "{ // empty\n}\n",
    '{"a": 1}',
    '{"env": {"A": "1"}, "b": [1, 2]}\n',
    '// head\n{\n\t"a": 1, // one\n\t/* two */ "env": {\n\t\t"A": "1", // A\n\t},\n}\n// tail\n',
    '{\n    "a": "// no comment", // one\n    "env": {}\n    // end\n}\n',
    '\ufeff{\n  "a": 1 /* one\n  */\n}\n',
    '{\r\n  "a": 1,\r\n  "env": {"A": "\\u00e9"}\r\n}\r\n',
]
TOML_TEXTS = [
    "",
    "# mine\n",
    '# mine\nmodel = "x" # best\n\n# of servers\n[servers.a]\ncommand = "y"\n',
    '[providers.z]\nname = "z"\n\n[projects."/w"]\ntrust = "t"',
    'providers = { z = { name = "z" } } # inline\n',
    'a = """\nmodel = 1\n[x]\n"""\n[[list]]\nb = 1979-05-27\n',
]
YAML_TEXTS = [
    "",
    "# mine\nname: x # y\n",
    "models:\n  # mine\n  - name: a\n    prompt: |\n      hi\n\n      ho\n\n# rules\nrules: [q]\n",
    "models:\n- uses: x/y # c\n-\n  name: b",
    "models: []\nx: '1'\n",
    "models:\nx: 1\n",
    "models: [{name: a}] # flow\n",
]
JSON_EDITS = [Edit(("env", "B"), "2"), Edit(("deep", "er", "ours"), OURS), Edit(("a",), "new")]
TOML_EDITS = [Edit(("model",), "ours"), Edit(("size",), 8192), Edit(("providers", "ours"), OURS)]
YAML_EDITS = [Edit(("models", "ours"), OURS)]
CASES = [
    *((jsonc, text, JSON_EDITS) for text in JSON_TEXTS),
    *((toml, text, TOML_EDITS) for text in TOML_TEXTS),
    *((yaml, text, YAML_EDITS) for text in YAML_TEXTS),
]
SINCE = Edit(("other",), 1)
"""What a user adds since."""


def record_of(form: Format, text: str, edits: list[Edit]) -> Record:
    return Record("", text, edit(form, text, edits), tuple(path for path, _ in edits))


@pytest.mark.parametrize(("form", "text", "edits"), CASES)
def test_edits_keep_comments_and_all_other_lines(
    form: Format, text: str, edits: list[Edit]
) -> None:
    edited = edit(form, text, edits)
    for path, value in edits:
        assert tree.get(form.parse(edited), path) == value
    for comment in ("// head", "// one", "/* two */", "// A", "// tail", "// end", "// empty"):
        assert (comment in text) == (comment in edited)
    for comment in ("# mine", "# best", "# of servers\n[servers.a]", "# inline", "# rules", "# c"):
        assert (comment in text) == (comment in edited)
    assert edited.count("\r\n") == (edited.count("\n") if "\r" in text else 0)


@pytest.mark.parametrize(("form", "text", "edits"), CASES)
def test_undo_of_unchanged_file_gives_its_text_back(
    form: Format, text: str, edits: list[Edit]
) -> None:
    record = record_of(form, text, edits)
    assert undo(form, record.written, record).text == text


@pytest.mark.parametrize(("form", "text", "edits"), CASES)
def test_undo_keeps_later_edits(form: Format, text: str, edits: list[Edit]) -> None:
    record = record_of(form, text, edits)
    since = edit(form, record.written, [SINCE])
    undone = undo(form, since, record)
    assert undone.text is not None
    assert undone.kept == ()
    values = form.parse(undone.text)
    assert values.pop("other") == 1
    before = form.parse(text)
    if before.get("models", ...) is None:
        before["models"] = []  # an emptied list is one
    assert values == before


@pytest.mark.parametrize(("form", "text", "edits"), CASES)
def test_values_of_ours_that_were_changed_since_stay(
    form: Format, text: str, edits: list[Edit]
) -> None:
    record = record_of(form, text, edits)
    path, value = edits[-1]
    new = {**value, "url": "elsewhere"} if isinstance(value, dict) else "elsewhere"
    undone = undo(form, edit(form, record.written, [Edit(path, new)]), record)
    assert undone.kept == (path,)
    assert undone.text is not None
    assert tree.get(form.parse(undone.text), path) == new
    for other, _ in edits[:-1]:
        assert tree.get(form.parse(undone.text), other) == tree.get(form.parse(text), other)


def test_replaced_object_keeps_comments_on_its_members() -> None:
    text = '{\n  "a": {\n    "b": 1, // b\n    "c": 2,\n    "d": 3 // d\n  }\n}\n'
    edits = [Edit(("a",), {"b": 9, "d": 3, "e": 4})]
    record = record_of(jsonc, text, edits)
    assert '"b": 9, // b' in record.written
    assert '"d": 3, // d' in record.written
    undone = undo(jsonc, f"{record.written} // since", record)
    assert jsonc.parse(undone.text or "") == jsonc.parse(text)
    assert '"b": 1, // b' in (undone.text or "")


def test_undo_of_new_file_leaves_none_unless_something_was_added() -> None:
    for form, edits in ((jsonc, JSON_EDITS), (toml, TOML_EDITS), (yaml, YAML_EDITS)):
        written = edit(form, form.EMPTY, edits)
        record = Record("", None, written, tuple(path for path, _ in edits))
        assert undo(form, written, record).text is None
        assert undo(form, f"{written}\n", record).text is None
        since = edit(form, written, [SINCE])
        assert form.parse(undo(form, since, record).text or "") == {"other": 1}


_NAMES = st.sampled_from(["a", "b", "env", "c d", "é", '"'])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", "// y", "}", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)
_GAPS = st.sampled_from(["", " ", "\n", "\n\t", " // ¶\n", "/* ¶, } */", "\n  /* ¶\n */ "])


@st.composite
def _json_texts(draw: st.DrawFn) -> str:
    """Texts of an object, with comments, trailing commas and any indentation."""

    def gap() -> str:
        return str(draw(_GAPS))

    def rendered(value: Any) -> str:
        if not isinstance(value, dict | list):
            return json.dumps(value)
        if isinstance(value, dict):
            parts = [f"{json.dumps(k)}{gap()}:{gap()}{rendered(v)}" for k, v in value.items()]
        else:
            parts = [rendered(item) for item in value]
        comma = "," if parts and draw(st.booleans()) else ""
        inside = ",".join(f"{gap()}{part}{gap()}" for part in parts) + comma + gap()
        return f"{{{inside}}}" if isinstance(value, dict) else f"[{inside}]"

    value = draw(st.dictionaries(_NAMES, _VALUES, max_size=4))
    return gap() + rendered(value) + gap()


@given(_json_texts(), st.dictionaries(_NAMES, _VALUES, min_size=1, max_size=3))
def test_any_commented_json_survives_edit_and_undo(text: str, others: dict[str, Any]) -> None:
    before = jsonc.parse(text)
    new_names = [name for name in others if name not in before]
    edits = [Edit((name,), others[name]) for name in new_names]
    record = record_of(jsonc, text, edits)
    assert jsonc.parse(record.written) == before | {name: others[name] for name in new_names}
    since = edit(jsonc, record.written, [Edit(("added since",), 1)])
    assert since.count("¶") == text.count("¶")
    undone = undo(jsonc, since, record)
    assert undone.text is not None
    assert undone.text.count("¶") == text.count("¶")
    assert jsonc.parse(undone.text) == before | {"added since": 1}
    assert undo(jsonc, record.written, record).text == text


@pytest.mark.parametrize(
    ("form", "text", "line"),
    [
        (jsonc, "", 1),
        (jsonc, '{"a" 1}', 1),
        (jsonc, '{\n"a": 1,\n,}', 3),
        (jsonc, '{\n"a": 1\n"b": 2}', 3),
        (jsonc, '{"a": "x\ny"}', 1),
        (jsonc, '{\n"a": [1, 2\n}', 3),
        (jsonc, '{"a": 1', 1),
        (jsonc, "{}\n{}", 2),
        (jsonc, "\n[]", 2),
        (jsonc, "{" + '"a": {' * 200, 1),
        (jsonc, '{"a": /* open', 1),
        (jsonc, '{\n"a": ' + "1" * 5000 + "}", 2),
        (toml, "a = 1\nb =\n", 2),
        (toml, 'a = 1\nb = "x', 2),
        (yaml, "a: 1\nb: [1\nc: 2\n", 3),
        (yaml, "a: 1\n\tb: 2\n", 2),
        (yaml, "- a\n", 1),
    ],
)
def test_broken_text_is_refused_with_line(form: Format, text: str, line: int) -> None:
    with pytest.raises(Unusable) as caught:
        form.parse(text)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("form", "text", "change"),
    [
        (jsonc, '{"env": "text"}', Edit(("env", "A"), "1")),
        (jsonc, '{"a": 1, "a": 2}', Edit(("a",), MISSING)),
        (toml, "providers = 1", Edit(("providers", "ours"), OURS)),
        (yaml, "a: &x [1]\nb: *x\n", Edit(("a",), MISSING)),
    ],
)
def test_edits_that_would_change_more_are_refused(form: Format, text: str, change: Edit) -> None:
    with pytest.raises(Unusable):
        edit(form, text, [change])


@pytest.mark.parametrize(
    ("form", "text", "edits"),
    [
        (toml, '# a\n[providers.ours]\n# b\nname = "me" # c\nlist = { x = 1 }\n', TOML_EDITS),
        (toml, "model = '''mine''' # a\n\n[x]\ny=1\n", TOML_EDITS),
        (jsonc, '{\n  // a\n  "a": { "x": 1 /* b */ }, // c\n  "env": {}\n}\n', JSON_EDITS),
        (jsonc, '{\r\n  "a": 1, // a\r\n  "env": {"A": "1"}\r\n}\r\n', JSON_EDITS),
        (yaml, "models:\n  - name: ours # a\n    # b\n    url: x\n  - name: z\n", YAML_EDITS),
        (yaml, "models: [{name: 'a'}]\nx: 1\n", YAML_EDITS),
    ],
)
@pytest.mark.parametrize("place", ["above", "below"])
def test_undo_beside_later_edits_gives_replaced_lines_and_comments_back(
    form: Format, text: str, edits: list[Edit], place: str
) -> None:
    record = record_of(form, text, edits)
    since = "# since\n" if form is not jsonc else "// since\r\n" if "\r" in text else "// since\n"
    above, below = (since, "") if place == "above" else ("", since)
    undone = undo(form, above + record.written + below, record)
    assert undone == (above + text + below, ())


@pytest.mark.parametrize("null", ["null", "~ # none", "\n  null"])
def test_null_becomes_list(null: str) -> None:
    edited = edit(
        yaml, f"models: {null}\nx: 1\n", [Edit(("models", "b"), {"name": "b"}), *YAML_EDITS]
    )
    assert yaml.parse(edited) == {"models": [OURS, {"name": "b"}], "x": 1}
    assert ("# none" in edited) == ("# none" in null)


def test_item_is_replaced_after_unusual_ends_of_lines() -> None:
    text = 'name: "x\u2028y"\nmodels:\n  # mine\n  - name: ours\n  # others\n  - name: z\n'
    edited = edit(yaml, text, YAML_EDITS)
    assert "# mine" in edited
    assert yaml.parse(edited)["models"] == [OURS, {"name": "z"}]


@pytest.mark.parametrize(
    "text",
    [
        "models: {a: b}\n",
        "models: &m\n  - name: a\nother: *m\n",
        "x: &m\n  - name: a\nmodels: *m\n",
        "? models\n: - name: a\n",
        "name: x\n...\n",
        "models: text\n",
    ],
)
def test_unusual_yaml_is_refused(text: str) -> None:
    with pytest.raises(Unusable):
        edit(yaml, text, [*YAML_EDITS, Edit(("models", "b"), {"name": "b"})])
