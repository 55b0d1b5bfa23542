"""The order of work of `vlm-server ask`: look at what was given, find a daemon, ask, show."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from vlm_server.cli import options
from vlm_server.cli.asking import chat, drawing, media, shown, words
from vlm_server.cli.asking.conversation import Conversation
from vlm_server.cli.asking.daemons import ready_daemon
from vlm_server.cli.asking.media import Medium
from vlm_server.cli.failure import CommandFailed
from vlm_server.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """See `ask.run`. All that can be wrong with the arguments is said before anything starts."""
    settings = options.load_settings(argparse.Namespace(**vars(arguments) | {"model": None}))
    given = words.split(arguments.words)
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ConfigError("--max-tokens must be at least 1")
    if arguments.save_boxes is not None:
        drawing.check_target(arguments.save_boxes)
    is_chat = given.question is None and sys.stdin.isatty()
    if is_chat and (arguments.json or arguments.save_boxes):
        raise ConfigError("--json and --save-boxes need a question on the command line")
    attached = [media.read(word, settings.limits) for word in given.files]
    question = None if is_chat else question_of(given)
    with ready_daemon(arguments, settings) as (daemon, model):
        conversation = Conversation(daemon, model, arguments.max_tokens, arguments.system)
        if question is None:
            return chat.run(conversation, attached, settings.limits)
        return answer(arguments, conversation, attached, question)


def question_of(given: words.Words) -> str:
    """The question of the command line, or of standard input. Raises CommandFailed."""
    if given.question not in (None, words.STDIN):
        return str(given.question)
    if words.STDIN in given.files:
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
    conversation: Conversation,
    attached: Sequence[Medium],
    question: str,
) -> int:
    """Print one answer as `arguments` say."""
    screen = shown.Screen()
    screen.wait()
    try:
        show = screen.clear if arguments.json else screen.write
        reply = asyncio.run(conversation.ask(attached, question, show))
    finally:
        screen.end()
    if arguments.json:
        print(shown.as_json(reply), flush=True)
    shown.after(reply, arguments.save_boxes, is_quiet=arguments.json)
    return 0
