"""Whether the daemon is installed as a service, runs, and is this version."""

from __future__ import annotations

import os
from pathlib import Path

from vlm_server import __version__
from vlm_server.cli.doctor.finding import Finding, ok, problem, warning
from vlm_server.cli.doctor.runner import output_of
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.service.manager import ServiceManager

_AGAIN = "install it again: vlm-server service install"


def look(situation: Situation) -> list[Finding]:
    """One finding."""
    return [service(situation.service)]


def service(manager: ServiceManager) -> Finding:
    """What its file says, then what the system does."""
    check = "service"
    try:
        words = manager.read_words()
    except FileNotFoundError:
        return ok(check, "not installed (`vlm-server service install` does that)")
    except (OSError, ValueError, KeyError) as error:
        return problem(check, f"{manager.path} can't be read: {error}", _AGAIN)
    if not words:
        return problem(check, f"{manager.path} starts nothing", _AGAIN)
    program = Path(words[0])
    if not os.access(program, os.X_OK):
        return problem(check, f"it starts {program}, which is not there", _AGAIN)
    version = version_of(program)
    if version != __version__:
        text = f"it starts {program}, version {version or 'unknown'}; this is {__version__}"
        return warning(check, text, _AGAIN)
    if not manager.is_running():
        advice = "see its log (docs/service.md), then `vlm-server service install` starts it anew"
        return problem(check, f"installed, and not running: {manager.path}", advice)
    return ok(check, f"installed and running, version {version}")


def version_of(program: Path) -> str | None:
    """What `program --version` says; None if it does not."""
    words = (output_of((str(program), "--version"), 20.0) or "").split()
    return words[-1] if words else None
