"""Settings have names, defaults, bounds and help; unknown or invalid ones are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from vlm_server.cli.check_config import describe, render_defaults
from vlm_server.errors import ConfigError
from vlm_server.protocol import MESSAGE_HEADER, Start, decode_command, encode_message
from vlm_server.settings import (
    RENAMED,
    ListedModel,
    Settings,
    all_names,
    bare,
    describe_settings,
    descriptions,
    hints_of,
    is_loopback,
    kind_of,
    load,
    load_with_sources,
    unit_of,
    variable_of,
    word_of,
)
from vlm_server.settings.paths import is_unmounted
from vlm_server.settings.quantities import shown
from vlm_server.supervisor.engine_process.start import start_of

DEFAULT_TOML = Path(__file__).parents[2] / "configs" / "default.toml"
KEY = "a-long-enough-key"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_without_file_are_defaults() -> None:
    assert load() == Settings()


def test_default_toml_is_up_to_date() -> None:
    assert DEFAULT_TOML.read_text(encoding="utf-8") == render_defaults()


def test_default_toml_loads_as_defaults() -> None:
    assert load(DEFAULT_TOML) == Settings()


def test_setting_descriptions_end_with_full_stop() -> None:
    settings = Settings(models={"a": ListedModel(path="a")})
    for name, section in settings.sections():
        for field in msgspec.structs.fields(section):
            assert describe(type(section), field.name).endswith("."), f"{name}.{field.name}"


def test_settings_file_changes_only_named_settings(tmp_path: Path) -> None:
    settings = load(write(tmp_path, "[server]\nport = 9000\n"))
    assert settings.server.port == 9000
    assert settings.server.host == Settings().server.host
    assert settings.limits == Settings().limits


def test_override_wins_over_settings_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 9000\n")
    assert load(path, ("server.port=9001",)).server.port == 9001


def test_last_override_wins() -> None:
    assert load(None, ("log.level=debug", "log.level=error")).log.level == "error"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.path=/models/a b", "/models/a b"),
        ('model.path="/models/a b"', "/models/a b"),
        ("model.path=demo", ""),
        ("model.path='demo'", ""),
        ('model.path="a=b"', "a=b"),
    ],
)
def test_override_string_needs_no_quotes(override: str, value: str) -> None:
    assert load(None, (override,)).model.path == value


@pytest.mark.parametrize("text", [f'["{KEY}", "another-key"]', f"{KEY}, another-key"])
def test_override_list_is_toml_or_divided_by_commas(text: str) -> None:
    settings = load(None, (f"server.api_keys={text}",))
    assert settings.server.api_keys == (KEY, "another-key")
    assert load(None, ("urls.https_hosts=*.example.org",)).urls.https_hosts == ("*.example.org",)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("server.prot=1", "`server.prot`: did you mean `server.port`"),
        ("sever.port=1", "`sever`: did you mean `server`"),
        ("server.max_num_seqs=1", "did you mean `scheduler.max_num_seqs`"),
        ("models.a.pth=1", "did you mean `models.a.path`"),
        ("server.port=65536", "server.port"),
        ("server.port=-1", "server.port"),
        ("server.port=many", "server.port"),
        ("server.port=80.5", "server.port"),
        ("server.drain_timeout_seconds=-1", "server.drain_timeout_seconds"),
        ("limits.max_body_bytes=0", "limits.max_body_bytes"),
        ("limits.max_requests=0", "limits.max_requests"),
        ("scheduler.max_num_seqs=-1", "scheduler.max_num_seqs"),
        ("log.level=loud", "log.level"),
        ("model.dtype=int4", "model.dtype"),
    ],
)
def test_unknown_or_out_of_bounds_setting_is_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(None, (override,))


@pytest.mark.parametrize(
    "override",
    [
        *("port=1", "server.port", "server=1", "=1", ".port=1", ""),
        *("models.path=x", "models=x", "models..path=x/y"),
    ],
)
def test_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(None, (override,))


def test_unknown_setting_in_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        load(write(tmp_path, "[server]\nnothing = 1\n"))


@pytest.mark.parametrize("text", ["[server", "server = 1", "[[server]]\nport = 1"])
def test_settings_file_of_wrong_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(write(tmp_path, text))


def test_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")


def test_settings_file_not_in_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('[model]\nname = "é"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_host_needs_no_api_key(host: str) -> None:
    assert is_loopback(host)
    assert load(None, (f"server.host={host}",)).server.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.evil"])
def test_non_loopback_host_needs_api_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys"):
        load(None, (f'server.host="{host}"',))
    settings = load(None, (f'server.host="{host}"', f'server.api_keys=["{KEY}"]'))
    assert settings.server.host == host


@pytest.mark.parametrize("keys", ['[""]', '["short"]', f'["{KEY}", ""]'])
def test_short_api_keys_are_refused(keys: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys"):
        load(None, (f"server.api_keys={keys}",))


@pytest.mark.parametrize("key", ["          ", "a long key", "long-enough\\u0000", "x" * 8 + "\\n"])
def test_api_keys_with_blanks_are_refused_unshown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"`server\.api_keys\[1\]` has a blank") as caught:
        load(None, (f'server.api_keys=["{KEY}", "{key}"]',))
    assert key not in str(caught.value)


def test_key_file_counts_as_api_key() -> None:
    assert load(None, ("server.host=::", "server.api_key_file=/etc/keys")).server.needs_key


def test_relative_path_of_key_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`server\.api_key_file` 'keys' is not absolute"):
        load(None, ("server.api_key_file=keys",))


NUMBERS = [
    f"{name}.{field.name}"
    for name, section in Settings().sections()
    for field in msgspec.structs.fields(section)
    if isinstance(getattr(section, field.name), int | float)
]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300", "1" + "0" * 30, "1" + "0" * 400])
def test_settings_refuse_infinite_and_absurd_numbers(value: str, tmp_path: Path) -> None:
    for name in NUMBERS:
        section, key = name.split(".")
        path = write(tmp_path, f"[{section}]\n{key} = {value}\n")
        for sources in ((None, (f"{name}={value}",)), (path, ())):
            with pytest.raises(ConfigError, match=rf"`{name}`"):
                load(*sources)


@pytest.mark.parametrize(
    "override",
    ['urls.https_hosts=[""]', 'urls.https_hosts=["https://a.b"]', 'urls.https_hosts=["*.*.b"]',
     'urls.https_hosts=["a.b:443"]', 'urls.https_hosts=["*a.b"]', 'urls.file_folders=[""]',
     'urls.file_folders=["pictures"]', "urls.timeout_seconds=0"],
)  # fmt: skip
def test_malformed_url_hosts_and_file_roots_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load(None, (override,))


@pytest.mark.parametrize(
    "origin",
    ["app.example", "https://app.example/", "https://*", "https://*.example", "https://u@h", "",
     "*://*"],
)  # fmt: skip
def test_malformed_cors_origins_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        load(None, (f'server.cors_origins=["{origin}"]',))


def test_wildcard_cors_origin_is_refused_with_api_keys() -> None:
    every = 'server.cors_origins=["*"]'
    assert load(None, (every,)).server.cors_origins == ("*",)
    with pytest.raises(ConfigError, match="name the origins"):
        load(None, (every, 'server.api_keys=["correct-horse"]'))


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().server.port = 1  # type: ignore[misc]


def test_relative_cache_disk_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`cache\.disk_folder` 'here/there' is not absolute"):
        load(None, ("cache.disk_folder=here/there",))
    assert load(None, ("cache.disk_folder=~/there",)).cache.disk_folder == "~/there"


def test_relative_search_path_is_refused() -> None:
    assert load(None, ('model.search_folders=["/models", "~/models"]',)).model.search_folders
    with pytest.raises(ConfigError, match="search_folders` 'models' is not absolute"):
        load(None, ('model.search_folders=["models"]',))


def test_model_tables_resolve_paths_from_settings_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path = write(
        tmp_path,
        """
        [models."org/big"]
        path = "org/big"
        pinned = true
        [models.small]
        path = "here"
        keep_alive_seconds = 60
        [models.red]
        base = "small"
        adapter = "adapters/red"
        """,
    )
    settings, sources = load_with_sources(path, ("models.small.keep_alive_seconds=5",))
    assert settings.models["org/big"] == ListedModel(path="org/big", pinned=True)
    assert settings.models["small"] == ListedModel(
        path=str(tmp_path / "here"), keep_alive_seconds=5
    )
    assert settings.adapters_of("small") == {"red": str(tmp_path / "adapters" / "red")}
    assert settings.adapters_of("org/big") == settings.adapters_of("") == {}
    assert sources["models.small.path"] == str(path)
    assert sources["models.small.keep_alive_seconds"] == "command line"
    names = [section["name"] for section in describe_settings(settings, sources)]
    assert names[names.index("model") + 1 :][:2] == ["models.org/big", "models.small"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]", "`models.a.path` is missing"),
        ('[models.a]\nbase = "b"', "`models.a.adapter` is missing"),
        ('[models.a]\nadapter = "b"', "`models.a.base` is missing"),
        ('[models.a]\nbase = "b"\nadapter = "c"\npath = "d"', "`models.a.path` has no effect"),
        ('[models.a]\nbase = "b"\nadapter = "c"\npinned = true', "`models.a.pinned` has no effect"),
        (
            '[models.a]\nbase = "b"\nadapter = "c"\n[models.b]\nbase = "a"\nadapter = "c"',
            "b is an adapter itself",
        ),
        ('[models.default]\npath = "x/y"', "'default' can't be the name"),
        ('[models.""]\npath = "x/y"', "'' can't be the name"),
        ('[models.a]\npath = "x/y"\nkeep_alive_seconds = -2', "keep_alive_seconds"),
        ('[models.a]\npath = "x/y"\nname = "b"', "no setting `models.a.name`"),
        ('[models]\na = "x/y"', "models"),
        ('models = ["x/y"]', "models"),
    ],
)
def test_invalid_model_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


def test_unmounted_disk_is_detected_from_place_or_fstab(tmp_path: Path) -> None:
    """By an empty place in a folder of disks, or a mount point of fstab without a mount."""
    disks, point = tmp_path / "disks", tmp_path / "mount point"
    for folder in (disks / "plain", point, tmp_path / "other"):
        folder.mkdir(parents=True)
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# a comment\n/dev/sda1 {tmp_path}/mount\\040point ext4 defaults 0 2\nnone\n")

    def is_absent(path: Path) -> bool:
        return is_unmounted(path, disks=[disks], fstab=fstab)

    link = tmp_path / "link"
    link.symlink_to(disks / "absent/model")
    assert all(map(is_absent, (disks / "absent", disks / "plain/model", point / "a/b", link)))
    assert not any(map(is_absent, (tmp_path / "absent", tmp_path / "other/model", fstab / "x")))
    assert is_absent(Path("/nowhere/model")) is False
    mounted = next(path for path in (Path("/proc"), Path("/dev")) if path.is_mount())
    assert not is_unmounted(mounted / "absent", disks=[Path("/")], fstab=tmp_path / "absent")
    fstab.write_text(f"dev {mounted} devfs\n")
    assert not is_absent(mounted / "absent")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("30GiB", 30 << 30),
        ("512MB", 512_000_000),
        ("1.5 kib", 1536),
        (".5kB", 500),
        ("7B", 7),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_are_parsed_with_units(text: str, size: int, tmp_path: Path) -> None:
    assert load(None, (f"cache.max_disk_bytes={text}",)).cache.max_disk_bytes == size
    path = write(tmp_path, f'[cache]\nmax_disk_bytes = "{text}"\n')
    assert load(path).cache.max_disk_bytes == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("250ms", 0.25),
        ("2d", 172800),
    ],
)
def test_times_are_parsed_with_units(text: str, seconds: float, tmp_path: Path) -> None:
    path = write(tmp_path, f'[models.x]\npath = "org/x"\nkeep_alive_seconds = "{text}"\n')
    assert load(path).models["x"].keep_alive_seconds == seconds
    assert (
        load(None, (f"deadlines.total_timeout_seconds={text}",)).deadlines.total_timeout_seconds
        == seconds
    )


def test_all_settings_with_unit_accept_it() -> None:
    """A number without a unit means the one with which the setting's name ends."""
    texts = {
        "bytes": (("1GiB", 1 << 30), ("2000000000", 2 * 10**9)),
        "seconds": (("2m", 120), ("130", 130)),
        "pixels": (("0.5 MP", 500_000), ("70000 px", 70_000), ("80000", 80_000)),
        "tokens": (("14 tokens", 14), ("15", 15)),
        "dpi": (("100 dpi", 100), ("90", 90)),
        "fps": (("4 fps", 4), ("0.5fps", 0.5), ("3", 3)),
    }
    for full, hint in hints():
        section, name = full.split(".")
        for text, wanted in texts[unit_of(name)] if _is_number(hint) and unit_of(name) else ():
            settings = load(None, (f"{full}={text}", "model.pinned=false"))
            assert getattr(getattr(settings, section), name) == wanted, full


def test_numbers_are_shown_without_loss() -> None:
    assert shown("max_pixels", 12_845_056, None) == "12845056 px"
    assert shown("max_pixels", 1_234_000, None) == "1.234 MP"
    assert shown("max_pixels", 2**53, None) == f"{2**53} px"
    assert shown("x_seconds", 600_000_060, None) == "10000001 min"


OTHER_TIMES = {
    "server.stream_keepalive_seconds",
    "model.keep_alive_seconds",
    "watch.yield_seconds",
    "engine.quarantine_seconds",
    "memory.idle_clear_seconds",
}


def test_names_follow_rules() -> None:
    """Units end names; upper and lower bounds, time limits and retention have one word each."""
    words = {"Maximum": "max_", "Minimum": "min_"}
    for full, hint in hints():
        name = full.partition(".")[2]
        text = descriptions(kind_of(full))[name]
        word = text.partition(" ")[0]
        if _is_number(hint) and word in words:
            assert name.startswith(words[word]), full
        if name.startswith(("max_", "min_")):
            assert word in words or text.startswith("The same for each"), full
        if name.endswith("_seconds"):
            assert re.search(r"^(max|min)_|(^|_)(timeout|keep)_", name) or full in OTHER_TIMES
        assert not re.search(r"limit|_age|_wait(?!ing)|store", name), full


def hints() -> list[tuple[str, Any]]:
    """All settings of tables with a fixed name, and their types."""
    return [
        (f"{name}.{key}", hint)
        for name, section in Settings().sections()
        for key, hint in hints_of(type(section)).items()
    ]


def _is_number(hint: Any) -> bool:
    kind = bare(hint)
    return kind in (int, float) or any(map(_is_number, get_args(kind)))


WITH_WORDS = {full: word for full, hint in hints() if (word := word_of(hint))}


@pytest.mark.parametrize("full", WITH_WORDS)
def test_words_stand_for_empty_values(full: str, tmp_path: Path) -> None:
    word, (section, name) = WITH_WORDS[full], full.split(".")
    unpinned = "model.pinned=false"
    settings = load(None, (f"{full}={word}", unpinned))
    empty = getattr(getattr(settings, section), name)
    assert empty in (None, "", ())
    path = write(tmp_path, f'[{section}]\n{name} = "{word}"\n')
    assert load(path, (unpinned,)) == settings
    shown = {
        f"{each['name']}.{setting['name']}": setting["value"]
        for each in describe_settings(settings, {})
        for setting in each["settings"]
    }
    assert shown[full] == word
    if empty is not None:
        for text in ('""', "[]"):
            path = write(tmp_path, f"[{section}]\n{name} = {text}\n")
            with pytest.raises(ConfigError, match=f"line 2: `{full}`: .*`{word}`|has to be"):
                load(path)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("scheduler.max_num_seqs=0", "auto"),
        ("cache.max_prefix_bytes=-1", "auto"),
        ("memory.max_bytes=0", "auto"),
        ("image.max_pixels=0", "auto"),
        ("model.max_context_tokens=0", "auto"),
        ("deadlines.total_timeout_seconds=0", "off"),
        ("limits.default_max_tokens=0", "off"),
        ("model.keep_alive_seconds=-1", "forever"),
        ("server.port=auto", ""),
    ],
)
def test_numbers_do_not_stand_for_words(override: str, word: str) -> None:
    name = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"`{name}`: it has to be .*{word and f', or `{word}`'}"):
        load(None, (override,))


def test_all_wrong_names_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nprot = 1\n[cache]\ndisk_bytes = 1\n[modle]\nname = 1\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value) == (
        f"{path}, line 2: there is no setting `server.prot`: did you mean `server.port`?; "
        f"{path}, line 4: there is no setting `cache.disk_bytes`: "
        "did you mean `cache.max_disk_bytes`?; "
        f"{path}, line 5: there is no section `modle`: did you mean `model`?"
    )


@pytest.mark.parametrize(
    "text",
    [
        '[server]\nhost = "::"\napi_keys = 3\n',
        '[server]\nhost = "::"\napi_key_file = 3\n',
        "[model]\npinned = 3\nkeep_alive_seconds = 9\n",
        "[models.a]\npath = 3\n",
        "[models.a]\nbase = 3\n",
        "[models]\na = 3\n",
        '[server]\nport = ""\n',
    ],
)
def test_wrong_setting_gives_one_fault_of_its_type(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, text))
    (fault,) = refused.value.args
    assert "has to be" in fault
    assert "not a list" not in fault


def test_faults_have_order_of_sections() -> None:
    wrong = ["server.port=x", "limits.max_images=x", "image.max_pixels=x", "cache.kv_bits=x"]
    with pytest.raises(ConfigError) as refused:
        load(None, (*wrong, "log.level=x", "scheduler.max_num_seqs=x", "files.keep_seconds=x"))
    named = [fault.split("`")[1].partition(".")[0] for fault in refused.value.args]
    assert named == [section for section in Settings.__struct_fields__ if section in named]
    assert len(named) == 7


def test_empty_list_of_environment_is_no_fault() -> None:
    assert load(None, (), {"VLM_SERVER_SERVER_API_KEYS": ""}).server.api_keys == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("server.keepalive", "server.stream_keepalive"),
        ("limits.intake_processes", "limits.max_parsing_processes"),
        ("urls.file_roots", "urls.file_folders"),
        ("files.max_age_seconds", "files.keep_seconds"),
        ("image.decode_seconds", "image.decode_timeout_seconds"),
        ("memory.limit_bytes", "memory.max_bytes"),
        ("distributed.hosts", "distributed.hostfile"),
    ],
)
def test_former_name_is_nearest_to_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean `{new}`"):
        load(None, (f"{old}=1",))
    with pytest.raises(ConfigError, match=f"did you mean `{variable_of(new)}`"):
        load(None, (), {variable_of(old): "1"})


@pytest.mark.parametrize("old", RENAMED)
def test_former_names_are_refused_with_new_ones(old: str, tmp_path: Path) -> None:
    section, name = old.split(".")
    path = write(tmp_path, f"[{section}]\n{name} = 1\n")
    message = f"`{old}` is called `{RENAMED[old]}` now"
    for sources in ((path, (), {}), (None, (f"{old}=1",), {})):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(*sources)
    with pytest.raises(ConfigError, match=f"{variable_of(old)} .* {variable_of(RENAMED[old])} now"):
        load(None, (), {variable_of(old): "1"})
    assert RENAMED[old] in all_names()
    assert old not in all_names()


def test_memory_limit_may_be_percentage_of_device() -> None:
    memory = load(None, ("memory.max_bytes=75%",)).memory
    assert memory.limit_on(1000) == 750
    assert memory.known_limit_bytes == 0
    assert load(None, ("memory.max_bytes=8GB",)).memory.known_limit_bytes == 8 * 10**9


def test_memory_limit_as_percentage_reaches_engine_and_status_unchanged() -> None:
    memory = load(None, ("memory.max_bytes=75%",)).memory
    started = decode_command(
        encode_message(start_of(Settings(memory=memory)))[MESSAGE_HEADER.size :]
    )
    assert isinstance(started, Start)
    assert started.memory == memory
    shown = describe_settings(Settings(memory=memory), {})
    values = {
        setting["name"]: setting["value"] for section in shown for setting in section["settings"]
    }
    assert values["max_bytes"] == "75%"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("memory.max_bytes=30G", "`memory.max_bytes`: '30G' is no size, as 30GiB"),
        ("memory.max_bytes=-1GiB", "is no size"),
        ("memory.max_bytes=5m", "is no size"),
        ("memory.max_bytes=0%", "`memory.max_bytes`: it has to be above 0%"),
        ("memory.max_bytes=175%", "at most 100%, not 175%"),
        ("cache.max_disk_bytes=75%", "`cache.max_disk_bytes`: it has to be a size"),
        (
            "server.drain_timeout_seconds=5x",
            "`server.drain_timeout_seconds`: '5x' is no time, as 90s",
        ),
        ("server.drain_timeout_seconds=5m oops", "is no time"),
        ("server.drain_timeout_seconds=5MB", "is no time"),
        (
            "limits.max_body_bytes=1kB",
            "`limits.max_body_bytes`: it has to be a whole number of at least 1 KiB",
        ),
        ("server.port=80B", "`server.port`: it has to be a whole number, not a text"),
        ("models.a.keep_alive_seconds=x", "`models.a.keep_alive_seconds`: 'x' is no time"),
    ],
)
def test_invalid_size_or_time_is_refused_with_example(override: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, (override,))
    assert reason in str(refused.value)


def test_invalid_size_in_file_is_reported_with_line(tmp_path: Path) -> None:
    path = write(tmp_path, '[memory]\nmax_bytes = "30 gigs"\n')
    with pytest.raises(ConfigError, match=r"line 2: `memory.max_bytes`: '30 gigs' is no size"):
        load(path)
