"""The failures of one step: the requests that end with it, and the device's last error."""

from __future__ import annotations

from collections.abc import Collection

from vlm_server.errors import RequestError
from vlm_server.runner.device.arrays import DeviceErrors


class StepFailures:
    """The failures of one step, while it is launched and finished."""

    def __init__(self, errors: DeviceErrors) -> None:
        self._errors = errors
        self.by_request: dict[str, RequestError] = {}
        """The requests that fail in it."""
        self.last_error: str | None = None
        """The last error of the model or the device."""

    def record(
        self, error: Exception, request_ids: Collection[str] = (), message: str = ""
    ) -> None:
        """Record `error`, with which these requests end.

        `message` describes it to their clients unless it is a usual one.
        """
        self.last_error = f"{type(error).__name__}: {error}"
        failure = self._errors.request_error(error, message)
        self.by_request |= dict.fromkeys(request_ids, failure)
