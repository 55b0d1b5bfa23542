"""Does what a plan says with one loaded model. Knows requests only by their ids.

The `Runner` of the engine. A unit of work that fails ends its own request alone; a decode
step that fails ends the rows that shared it.
"""

from __future__ import annotations

import logging

from vlm_server.errors import InternalError, RequestError
from vlm_server.ports import EncodeWork, PrefillWork, SchedulerOutput, StepResult
from vlm_server.runner.batch import DecodeBatch
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.prefill import Prefill

logger = logging.getLogger(__name__)


class ModelRunner:
    """Holds every array of every request: prompts being prefilled, and the rows that decode."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._prefills: dict[str, Prefill] = {}
        self._batch = DecodeBatch(loaded.language_model)

    @property
    def num_tracked(self) -> int:
        """Requests that hold device memory."""
        return len(self._prefills) + len(self._batch.request_ids)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """One step. Never raises for a request's fault: see `StepResult.failures`."""
        self._forget(plan.released)
        for request in plan.new:
            self._prefills[request.request_id] = Prefill(self._model, request)
        failures: dict[str, RequestError] = {}
        tokens = self._decode(plan, failures)
        unit = plan.encode or plan.prefill
        if unit is not None:
            self._do_unit(unit, failures)
        return StepResult(tokens, failures)

    def _forget(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._prefills.pop(request_id, None)
        self._batch.leave(request_ids)

    def _decode(self, plan: SchedulerOutput, failures: dict[str, RequestError]) -> dict[str, int]:
        assert set(plan.decode) == set(self._batch.request_ids)
        try:
            return self._batch.step()
        except Exception:
            logger.exception("a decode step of %d rows failed", len(plan.decode))
            error = InternalError("the model failed while decoding")
            failures.update(dict.fromkeys(plan.decode, error))
            self._batch.leave(plan.decode)
            return {}

    def _do_unit(self, unit: EncodeWork | PrefillWork, failures: dict[str, RequestError]) -> None:
        try:
            if isinstance(unit, EncodeWork):
                self._prefills[unit.request_id].encode(unit.image_index)
            else:
                self._prefill(unit)
        except Exception:
            logger.exception("%s failed", type(unit).__name__)
            what = "encoding a picture" if isinstance(unit, EncodeWork) else "reading the prompt"
            failures[unit.request_id] = InternalError(f"the model failed while {what}")

    def _prefill(self, unit: PrefillWork) -> None:
        prefill = self._prefills[unit.request_id]
        logits = prefill.run(unit.start, unit.end)
        if unit.is_last:
            self._batch.join(unit.request_id, prefill, logits)
            del self._prefills[unit.request_id]
