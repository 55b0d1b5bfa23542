"""Steps of `vlm-server ask`: check the arguments, find or start a daemon, ask, print."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from vlm_server.cli import options
from vlm_server.cli.ask import keys, media, output, parameters, regions
from vlm_server.cli.ask.conversation import ChatSession
from vlm_server.cli.ask.media import Medium
from vlm_server.cli.ask.output import AnswerScreen
from vlm_server.cli.ask.parameters import ParameterValue
from vlm_server.cli.client import own_daemons
from vlm_server.cli.client.daemon import (
    Daemon,
    address_of,
    is_daemon,
    is_local,
    key_for,
    nobody_at,
    running_daemon,
    url_of,
)
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.text import say
from vlm_server.errors import ConfigError
from vlm_server.hub import find
from vlm_server.hub.names import HubName
from vlm_server.nearest import did_you_mean
from vlm_server.settings import Settings
from vlm_server.settings.paths import expand_home

ServedModel = dict[str, Any]
"""One entry of `/v1/models`."""


def run(arguments: argparse.Namespace) -> int:
    """Answer one question, or hold a conversation. Wrong arguments raise before anything starts."""
    settings = options.load_settings_only(arguments)
    files, question = media.split(arguments.words)
    values = parameter_values(arguments)
    if arguments.save_boxes is not None:
        regions.check_target(arguments.save_boxes)
    is_chat = question is None and sys.stdin.isatty()
    if is_chat and (arguments.json or arguments.save_boxes):
        raise ConfigError("--json and --save-boxes need a question on the command line")
    attached = [media.read(word, settings.limits) for word in files]
    if not is_chat:
        question = question_of(files, question)
    kept = keys.kept() if is_chat else nullcontext()
    with kept, ready_daemon(arguments, settings) as (daemon, model):
        conversation = ChatSession(daemon, model, values, arguments.system)
        if question is not None:
            return answer(arguments, conversation, attached, question)
        from vlm_server.cli.ask.session import Session  # slow to import

        options_of_session = {"is_plain": arguments.plain, "keeps_history": arguments.history}
        return Session(conversation, daemon, settings.limits, **options_of_session).run(attached)


def parameter_values(arguments: argparse.Namespace) -> dict[str, ParameterValue]:
    """The values of --parameter and --max-tokens. Raises ConfigError."""
    given = [text.partition("=")[::2] for text in arguments.parameter]
    if arguments.max_tokens is not None:
        given.append(("max_tokens", str(arguments.max_tokens)))
    parsed = {name: parameters.parse(name, value) for name, value in given}
    return {name: value for name, value in parsed.items() if value is not None}


def question_of(files: Sequence[str], question: str | None) -> str:
    """The question of the command line, or of stdin. Raises CommandFailed and ConfigError."""
    if question is not None and question != media.STDIN:
        return question
    if media.STDIN in files:
        raise ConfigError("no question: give it after the pictures")
    try:
        text = sys.stdin.read().strip()
    except (OSError, UnicodeDecodeError):
        raise CommandFailed("can't read the question from standard input: is it text?") from None
    if not text:
        raise ConfigError("no question: give it after the pictures, or in standard input")
    return text


def answer(
    arguments: argparse.Namespace,
    conversation: ChatSession,
    attached: Sequence[Medium],
    question: str,
) -> int:
    """Print one answer as `arguments` say."""
    screen = AnswerScreen(is_plain=arguments.plain, is_hidden=arguments.json)
    screen.wait()
    try:
        reply = asyncio.run(conversation.ask(attached, question, screen))
    finally:
        screen.end()
    if arguments.json:
        print(output.as_json(reply), flush=True)
    output.print_end(reply, arguments.save_boxes, is_quiet=arguments.json, advice="--max-tokens")
    if arguments.stats and not arguments.json:
        say(output.figures(reply))
    return 0


@contextmanager
def ready_daemon(
    arguments: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Daemon, ServedModel]]:
    """Daemon and its loaded model: a running one, or one started here.

    Raises CommandFailed if there is none with this model, ConfigError for an unknown model.
    """
    url, api_key = _address(arguments, settings)
    with Daemon(url, api_key) as daemon:
        models = daemon.list_models() if daemon.is_there() else None
        if models is not None and _choose_model(models, arguments.model, settings) is not None:
            yield daemon, _wait_for(daemon, arguments, settings)
            return
        _check_may_start(arguments, settings, daemon, models)
    if models is None:
        text = f"{nobody_at(url)} that stays. Starting one for now."
        say(text[0].upper() + text[1:])
    else:
        num_daemons = len({url, *own_daemons.running()})
        none = f"None of your {num_daemons} daemons serves"
        none = none if num_daemons > 1 else f"The daemon at {url} does not serve"
        say(f"{none} {arguments.model or settings.model.name}: starting one for now.")
    new_daemon = running_daemon(
        options.settings_arguments(arguments), settings.server.drain_timeout_seconds + 10
    )
    with new_daemon as new_url, Daemon(new_url, api_key) as daemon:
        try:
            daemon.wait_ready(settings.engine.start_timeout_seconds)  # shows its progress
            model = daemon.list_models()[0]
        except CommandFailed as error:
            raise CommandFailed(f"the daemon started for this question: {error}") from None
        yield daemon, model


def _address(arguments: argparse.Namespace, settings: Settings) -> tuple[str, str | None]:
    """`address_of`; with `--model` alone, that of this user's daemon that serves it, if one does.

    Says on stderr which daemon it is, if not that of the settings.
    """
    configured = url_of(settings.server.host, settings.server.port)
    urls = [configured, *own_daemons.running()] if arguments.model and not arguments.url else []
    for url in filter(is_daemon, dict.fromkeys(urls)):
        key = key_for(url, arguments, settings)
        with Daemon(url, key) as daemon:
            try:
                models = daemon.list_models()
            except CommandFailed as error:
                say(f"Your daemon at {url} can't be asked for its models: {error}")
                continue
            if _choose_model(models, arguments.model, settings) is not None:
                if url != configured:
                    say(f"Taking your daemon at {url}, which serves this model.")
                return url, key
    return address_of(arguments, settings)


def _wait_for(daemon: Daemon, arguments: argparse.Namespace, settings: Settings) -> ServedModel:
    """The model of a running daemon, once loaded: `/v1/models` then has all its fields."""
    progress = ProgressLine(sys.stderr)
    try:
        daemon.wait_ready(settings.engine.start_timeout_seconds, progress.show)
    finally:
        progress.clear()
    models = daemon.list_models()
    return _choose_model(models, arguments.model, settings) or models[0]


def _choose_model(
    models: Sequence[ServedModel], name: str | None, settings: Settings
) -> ServedModel | None:
    """The model that is `name`, else that of the settings, else the first."""
    names = {name or settings.model.name}
    if name and (checkpoint := find.find(name, settings.model.search_folders)):
        names.add(checkpoint.name)
    if name and (hub := HubName.parse(name)):
        names.add(hub.repo)
    return next((model for model in models if names == {""} or model["id"] in names), None)


def _check_may_start(
    arguments: argparse.Namespace,
    settings: Settings,
    daemon: Daemon,
    models: Sequence[ServedModel] | None,
) -> None:
    """Raises CommandFailed or ConfigError if starting another than `daemon` would not help."""
    served = [str(model["id"]) for model in models or ()]
    url, name = daemon.url, arguments.model
    if arguments.url or not is_local(url):
        if models is None:
            daemon.readiness()  # raises with what keeps it from answering
            raise CommandFailed(nobody_at(url))
        close = did_you_mean(str(name), served)
        has = f" (it has {', '.join(served)})"
        raise CommandFailed(f"{url} has no model {name!r}{close or has}")
    if not name or HubName.parse(name) or expand_home(name).is_dir():
        return
    if find.find(name, settings.model.search_folders) is None:
        close = did_you_mean(name, [*served, *find.all_names(settings.model.search_folders)])
        raise ConfigError(f"--model {name} is neither a folder nor a model on this machine{close}")
