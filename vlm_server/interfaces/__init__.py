"""The interfaces between engine, prompt and runner: token ids, numpy arrays and plans.

`engine` decides, `runner` executes, `prompt` makes prompts; they import each other only by these
interfaces. No mlx, no HTTP.
"""

from __future__ import annotations

from vlm_server.interfaces.executors import (
    EncodeCall,
    EncodeExecutor,
    Encoder,
    Preparer,
    Runner,
    Step,
)
from vlm_server.interfaces.grammar import AnswerMatcher, Grammar
from vlm_server.interfaces.memory import DeviceMemory, MemoryReading, ProcessMemory
from vlm_server.interfaces.prompts import AnswerFormat, MediaInputs, Prepared, PreparedPrompt
from vlm_server.interfaces.step import (
    DiskReadWork,
    DraftCounts,
    EncodeWork,
    NewRequest,
    PrefillWork,
    PrefixState,
    PrepareWork,
    SchedulerOutput,
    SeqId,
    StepResult,
    TokenLogprobs,
)

__all__ = [
    "AnswerFormat",
    "AnswerMatcher",
    "DeviceMemory",
    "DiskReadWork",
    "DraftCounts",
    "EncodeCall",
    "EncodeExecutor",
    "EncodeWork",
    "Encoder",
    "Grammar",
    "MediaInputs",
    "MemoryReading",
    "NewRequest",
    "PrefillWork",
    "PrefixState",
    "PrepareWork",
    "Prepared",
    "PreparedPrompt",
    "Preparer",
    "ProcessMemory",
    "Runner",
    "SchedulerOutput",
    "SeqId",
    "Step",
    "StepResult",
    "TokenLogprobs",
]
