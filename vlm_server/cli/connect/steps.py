"""The clients that keep their settings where no edit of a file reaches them: what to enter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vlm_server.cli.client.daemon import is_local
from vlm_server.cli.connect.masking import masked_key
from vlm_server.cli.connect.service import Service

_ELSEWHERE = (
    "Where {title} runs in a container or on another machine, 127.0.0.1 is not this machine: use "
    "this machine's address, for the daemon too (server.host, server.api_keys: docs/api.md)."
)


class EnteredClient(NamedTuple):
    """A client whose user enters the settings, by `steps`."""

    title: str
    steps: Callable[[Service], Iterator[str]]
    often_elsewhere: bool = False

    def all_steps(self, service: Service) -> Iterator[str]:
        """What to do, in order."""
        yield from self.steps(service)
        if self.often_elsewhere and is_local(service.url):
            yield _ELSEWHERE.format(title=self.title)


def _key(service: Service) -> str:
    return f"the daemon's, {masked_key(service.key)}" if service.key else "none"


def _cline(service: Service) -> Iterator[str]:
    """https://docs.cline.bot/provider-config/openai-compatible"""
    model = service.model
    yield "In Cline's panel in VS Code, open its settings (the gear)."
    yield "API Provider: OpenAI Compatible"
    yield f"Base URL: {service.url}"
    yield f"API Key: {_key(service)}"
    yield f"Model ID: {model.name}"
    limits = f", Context Window Size: {model.context_tokens}" if model.context_tokens else ""
    yield f"Model Configuration: Supports Images: {'on' if model.reads_images else 'off'}{limits}"


def _open_webui(service: Service) -> Iterator[str]:
    """https://docs.openwebui.com/getting-started/quick-start/connect-a-provider"""
    yield "As an administrator, open Admin Settings, Connections, OpenAI."
    yield "Add a connection (+)."
    yield f"URL: {service.url}"
    yield f"API Key: {_key(service)}"
    yield f"Save it, and choose {service.model.name} in a new chat."


def _home_assistant(service: Service) -> Iterator[str]:
    """https://www.home-assistant.io/integrations/ollama"""
    yield "Open Settings, Devices & services, Add integration, Ollama."
    yield f"URL: {service.root}"
    yield f"API key, if the form has a field for it: {_key(service)}"
    yield f"Model: {service.model.name}"
    if service.model.context_tokens:
        yield f"Context window size: {service.model.context_tokens}"


ENTERED_CLIENTS = {
    "cline": EnteredClient("Cline", _cline),
    "open-webui": EnteredClient("Open WebUI", _open_webui, often_elsewhere=True),
    "home-assistant": EnteredClient("Home Assistant", _home_assistant, often_elsewhere=True),
}
