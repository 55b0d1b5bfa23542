"""Markers, selection, workers and order of all tests.

Every test is marked by the folder it lies in: tests/unit is `unit`, and so on. What is marked
`alone` measures: nothing else runs meanwhile.
"""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.whole_run import draw_examples
from tests.support.worker_turns import turn
from vlm_server.settings import default_file, settings_in, variable_of

pytest_plugins = ["tests.support.daemons"]

LONGEST_ID = 100


def pytest_configure(config: pytest.Config) -> None:
    _leave_out_own_settings()
    draw_examples(is_whole=is_whole(config))


def _leave_out_own_settings() -> None:
    """Daemons in tests do not read the default file and the variables of whoever runs them, nor
    do they name themselves where that person's commands look for daemons."""
    for name in settings_in(os.environ):
        del os.environ[variable_of(name)]
    if default_file(os.environ).exists():
        os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="all families, the documents' commands, browser, clients, measured tests, ...",
    )
    parser.addoption(
        "--part",
        metavar="PART",
        help="only this part of --all: K/6, or one of " + ", ".join(selection.PARTS),
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail tests/browser where there is no Chromium, instead of skipping it",
    )


def pytest_report_header(config: pytest.Config) -> str:
    if is_whole(config):
        return f"tests: {wanted_part(config) or 'all'}"
    rotating = selection.rotating(selection.head())
    return f"tests: without --all; core families and {rotating}, which rotates by commit"


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests run that were collected: by --all, or because one was named."""
    named_one = config.args_source is pytest.Config.ArgsSource.ARGS and any(
        "::" in argument for argument in config.args
    )
    return bool(config.getoption("all") or config.getoption("part") or named_one)


def wanted_part(config: pytest.Config) -> str | None:
    """The part that --part asks for."""
    wanted: str | None = config.getoption("part")
    if wanted is None or wanted in selection.PARTS:
        return wanted
    numbers = {f"{n}/{len(selection.PARTS)}": part for n, part in enumerate(selection.PARTS, 1)}
    if wanted not in numbers:
        raise pytest.UsageError(f"--part {wanted}: there are {', '.join(numbers)}, or names")
    return numbers[wanted]


def pytest_make_parametrize_id(val: object) -> str | None:
    """A short name for what is long: workers send the names of all tests, and each report one."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{len(val)} from {val[:20]!a}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before the workers, which go by the groups, and before -m, which goes by the folders."""
    for item in items:
        folder = selection.folder_of(item)
        if folder in selection.FOLDERS or folder == "soak":
            item.add_marker(folder)
        item.add_marker(pytest.mark.xdist_group(selection.group_of(item)))
        item.user_properties.append(("part", selection.part_of(item)))
    if not is_whole(config):
        named = {folder for folder in selection.WHOLE_FOLDERS if _is_named(config, folder)}
        chosen, others = selection.split(items, named)
    elif part := wanted_part(config):
        chosen = [item for item in items if selection.part_of(item) == part]
        others = [item for item in items if selection.part_of(item) != part]
    else:
        chosen, others = items[:], []
    config.hook.pytest_deselected(items=others)
    items[:] = sorted(chosen, key=selection.place_of)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was run of each part, so that parts which ran apart can be added up."""
    outcomes: dict[str, Counter[str]] = {part: Counter() for part in selection.PARTS}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if part := dict(getattr(report, "user_properties", ())).get("part"):
                outcomes[str(part)][outcome] += 1
    terminalreporter.section("parts")
    for part, counts in outcomes.items():
        if counts:
            terminalreporter.line(
                f"{part}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders whose libraries are not there, unless they are wanted."""
    for folder in selection.WHOLE_FOLDERS:
        is_inside = collection_path.is_relative_to(selection.ROOT / "tests" / folder)
        if is_inside and not (is_whole(config) or _is_named(config, folder)):
            return True
    return None


def _is_named(config: pytest.Config, folder: str) -> bool:
    inside = selection.ROOT / "tests" / folder
    return any(Path(argument).resolve().is_relative_to(inside) for argument in config.args)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if the workers would not keep groups together, as with pytest 9.2 and xdist 3.8."""
    is_grouped = getattr(session.config.option, "loadgroup", False)
    if is_grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not know the groups of tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of items live until the end: no collection of garbage need go through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    folder = Path(tempfile.gettempdir(), f"vlm-server-tests-{run}")
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)
