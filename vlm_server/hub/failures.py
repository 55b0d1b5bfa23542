"""Errors of downloads as messages that say what to do."""

from __future__ import annotations

import errno

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vlm_server.hub.download_file import WrongContent
from vlm_server.hub.messages import DownloadRefused
from vlm_server.hub.names import HubName

_MAX_CHARACTERS = 200
_TOO_MANY = 429
_SERVER_ERRORS = 500


class Unusable(Exception):
    """A repository that can't be served or stored; the message says why."""


def download_refused(error: Exception, name: HubName) -> DownloadRefused:
    """The message for `error` in a download of `name`. Shows no token and no signed URL."""
    match error:
        case Unusable() | WrongContent():
            return DownloadRefused(str(error))
        case GatedRepoError():
            return DownloadRefused(_gated_message(name))
        case RevisionNotFoundError():
            return DownloadRefused(f"{name.repo} has no revision {name.revision or 'main'!r}")
        case RepositoryNotFoundError():
            return DownloadRefused(
                f"{constants.ENDPOINT} has no model {name.repo} that anybody may see: check the "
                f"name; if it is private, {_login_advice()}"
            )
        case OfflineModeIsEnabled():
            return DownloadRefused(
                f"HF_HUB_OFFLINE forbids to download {name}: unset it, or give the path of a folder"
            )
        case HfHubHTTPError():
            return _http_error(error, name)
        case LocalEntryNotFoundError():
            return _connection_error(error, name)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DownloadRefused(
                f"the disk is full ({constants.HF_HUB_CACHE}): what is here is kept"
            )
        case OSError(errno=int()):
            where = error.filename or constants.HF_HUB_CACHE
            return DownloadRefused(f"{name} can't be stored in {where}: {error.strerror}")
    if error.__class__.__module__.partition(".")[0] in ("httpx", "httpcore"):
        return _connection_error(error, name)
    if isinstance(error, OSError):  # the hub's library: fewer bytes came than were announced
        return _connection_error(error, name)
    words = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return DownloadRefused(f"{name} can't be downloaded: {type(error).__name__}: {words}")


def search_refused(error: Exception) -> str:
    """Why a search has failed, for people. Shows no token."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to ask the hub: unset it to search"
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {error.response.status_code}: try again later"
    return f"{constants.ENDPOINT} can't be reached ({type(error).__name__}): is there a network?"


def _connection_error(error: Exception, name: HubName) -> DownloadRefused:
    kind = type(error).__name__
    if isinstance(error, LocalEntryNotFoundError) or kind in ("ConnectError", "ConnectTimeout"):
        return DownloadRefused(
            f"{constants.ENDPOINT} can't be reached for {name} ({kind})",
            may_pass=True,
            advice="is there a network? Without one, use the folder of a checkpoint, or a name "
            "that 'vlm-server models list' shows",
        )
    return DownloadRefused(
        f"{constants.ENDPOINT} broke off the download of {name} ({kind})",
        may_pass=True,
        advice="what is here is kept, and the next try goes on from there",
    )


def _http_error(error: HfHubHTTPError, name: HubName) -> DownloadRefused:
    status = error.response.status_code
    if status in (401, 403):
        return DownloadRefused(f"{constants.ENDPOINT} refuses {name} ({status}): {_login_advice()}")
    may_pass = status == _TOO_MANY or status >= _SERVER_ERRORS
    return DownloadRefused(f"{constants.ENDPOINT} answers {status} for {name}", may_pass=may_pass)


def _gated_message(name: HubName) -> str:
    page = f"{constants.ENDPOINT}/{name.repo}"
    if get_token():
        return f"{name.repo} is gated, and your account has no access yet: ask for it at {page}"
    return f"{name.repo} is gated: accept its conditions at {page}, then {_login_advice()}"


def _login_advice() -> str:
    if get_token():
        return "see whether your token (HF_TOKEN, `hf auth login`) may read it"
    return "set HF_TOKEN to a token of yours, or run `uvx --from huggingface_hub hf auth login`"
