"""Answers with reasoning and tool calls, from the runner's tokens to deltas, in the real loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import EOS, SPECIAL, MarkDecoder, deltas, outcome_of, prompt
from tests.unit.engine.output.formats import ANSWER, FORCED, HERMES, MISTRAL, THINK, merged
from vlm_server.engine.output.formats import Formats, tool_format
from vlm_server.engine.output.pieces import Piece, ReasoningPiece
from vlm_server.interfaces import AnswerFormat, Prepared, StepResult, TokenLogprobs
from vlm_server.protocol import Delta, Finished, Stats, Submit

chat_templates = pytest.importorskip("vlm_server.runner.loading.chat_templates")

DECODER = MarkDecoder("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
CALL = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
LOOK = ("call", "look", '{"a": 1}')
FORMATS = Formats(HERMES, THINK)
LIST = '[{"name": "look", "arguments": {"a": 1}}, {"name": "click", "arguments": {}}]'


def engine_saying(
    *answers: str,
    answer: AnswerFormat = ANSWER,
    formats: Formats = FORMATS,
    decoder: MarkDecoder = DECODER,
) -> SteppedEngine:
    """Every request is answered by `answers`, one for each choice, and an end token."""
    engine = SteppedEngine(decoder=decoder, formats=formats, context_tokens=1000)
    engine.runner.answer = lambda _, choice: [*DECODER.encode(answers[choice]), EOS]

    def outcome(submitted: Submit) -> Prepared:
        prepared_outcome = outcome_of(submitted)
        return replace(
            prepared_outcome, prompt=replace(prepared_outcome.prompt, answer_format=answer)
        )

    engine.preparers.outcome = outcome
    return engine


def pieces_in(found: list[Delta]) -> list[Piece]:
    """The pieces of the deltas without empty texts."""
    pieces = list[Piece]()
    for delta in found:
        if delta.tool_call is not None:
            assert not delta.text
            pieces.append(delta.tool_call)
        elif delta.text:
            pieces.append(ReasoningPiece(delta.text) if delta.is_reasoning else delta.text)
    return pieces


def say(engine: SteppedEngine, **sampling: object) -> tuple[list[tuple[str, ...]], str | None]:
    """The pieces of an answer and its finish reason."""
    engine.add("a", **sampling)
    found = deltas(engine.run())
    assert [delta.finish_reason for delta in found[:-1]] == [None] * (len(found) - 1)
    assert engine.is_clean()
    return merged(pieces_in(found)), found[-1].finish_reason


def counts(engine: SteppedEngine) -> tuple[int, int]:
    stats = engine.scheduler.stats()
    return stats.tool_calls, stats.broken_tool_calls


def test_reasoning_text_and_calls_are_separate_deltas():
    engine = engine_saying(f"<think>\nhm</think>\n\nI look.{CALL}\n{CALL}")
    assert say(engine) == ([("thought", "hm"), ("text", "I look."), LOOK, LOOK], "tool_calls")
    assert counts(engine) == (2, 0)
    (end,) = (event for event in engine.events if isinstance(event, Finished))
    assert end.usage.reasoning_tokens == len(DECODER.encode("<think>\nhm</think>"))
    assert end.usage.completion_tokens == len(engine.runner.answer(prompt(), 0))
    engine.scheduler.reset_stats()
    assert counts(engine) == (0, 0)


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>what?</tool_call>",
        '<tool_call>{"name": "jump", "arguments": {}}</tool_call>',
        CALL.removesuffix("</tool_call>"),
    ],
)
def test_broken_call_is_text_and_does_not_end_answer(broken: str):
    engine = engine_saying(f"a{broken}")
    assert say(engine) == ([("text", f"a{broken}")], "stop")
    assert counts(engine) == (0, 1)


def test_call_truncated_by_max_tokens_is_text():
    engine = engine_saying(CALL)
    assert say(engine, max_tokens=9) == ([("text", CALL[: len("<tool_call>") + 8])], "length")
    assert counts(engine) == (0, 1)


def test_finish_reason_length_stays_after_call():
    engine = engine_saying(f"{CALL}more")
    assert say(engine, max_tokens=len(DECODER.encode(CALL)) + 1) == (
        [LOOK, ("text", "m")],
        "length",
    )


def test_stop_string_applies_to_content_and_reasoning_only():
    engine = engine_saying(f"a{CALL}b")
    assert say(engine, stop=("</tool_call>", "look", "}")) == (
        [("text", "a"), LOOK, ("text", "b")],
        "tool_calls",
    )
    assert counts(engine) == (1, 0)
    engine = engine_saying(f"a{CALL}b STOP c")
    assert say(engine, stop=("STOP",)) == ([("text", "a"), LOOK, ("text", "b ")], "tool_calls")
    engine = engine_saying("<think>a STOP")
    assert say(engine, stop=("STOP",)) == ([("thought", "a ")], "stop")


def test_single_call_ends_choice_without_parallel_calls():
    engine = engine_saying(f"a{CALL}{CALL}b", f"{CALL}c", answer=replace(ANSWER, parallel=False))
    engine.add("a", n=2)
    found = deltas(engine.run())
    for choice, wanted in enumerate(([("text", "a"), LOOK], [LOOK])):
        of_choice = [delta for delta in found if delta.choice == choice]
        assert merged(pieces_in(of_choice)) == wanted
        assert of_choice[-1].finish_reason == "tool_calls"
    assert engine.ended == ["a"]
    assert engine.is_clean()
    assert engine.scheduler.stats().generated_tokens == 2 * len(DECODER.encode(CALL)) + 1


def test_required_call_is_streamed_token_by_token():
    engine = engine_saying(LIST, answer=FORCED)
    engine.add("a")
    found = pieces_in(deltas(engine.run()))
    assert merged(found) == [LOOK, ("call", "click", "{}")]
    assert len(found) == len('{"a": 1}') + len("{}") + 2, "a delta for each token of arguments"
    assert counts(engine) == (2, 0)
    ends = [delta.finish_reason for delta in deltas(engine.events) if delta.finish_reason]
    assert ends == ["tool_calls"]


def test_truncated_required_call_keeps_its_sent_delta():
    engine = engine_saying(LIST, answer=FORCED)
    assert say(engine, max_tokens=LIST.index("1")) == ([("call", "look", '{"a": ')], "length")
    assert counts(engine) == (0, 1)


def test_model_without_tool_format_answers_required_calls():
    engine = engine_saying(LIST, answer=replace(FORCED, parallel=False), formats=Formats())
    assert say(engine) == ([LOOK], "tool_calls")


def test_control_tokens_are_hidden_without_tools_and_reasoning():
    engine = engine_saying(f"a<think>{CALL}", answer=AnswerFormat(), formats=Formats(HERMES))
    text = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert say(engine) == ([("text", f"a{text}")], "stop")
    assert counts(engine) == (0, 0)


def test_unknown_control_tokens_are_hidden():
    engine = engine_saying("")
    engine.runner.answer = lambda *_: [SPECIAL, *DECODER.encode("a"), SPECIAL, ord("b"), EOS]
    assert say(engine) == ([("text", "ab")], "stop")


def test_eos_token_may_be_end_mark_of_call():
    end = DECODER.encode("</tool_call>")
    engine = engine_saying("")
    engine.scheduler._output._eos_token_ids = frozenset(end)
    engine.runner.answer = lambda *_: DECODER.encode(CALL)
    assert say(engine) == ([LOOK], "tool_calls")


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>"])
def test_harmony_answer_ends_with_its_call_or_its_text(end: str):
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", end]
    decoder = MarkDecoder(*marks)
    template = "".join(["<|channel|>analysis", *marks])
    reasoning = chat_templates.reasoning_format(template)
    assert reasoning is not None
    assert end in reasoning.end_tokens
    tools = tool_format(chat_templates.tool_parser(None, "harmony"))
    engine = engine_saying("", formats=Formats(tools, reasoning), decoder=decoder)
    engine.scheduler._output._eos_token_ids = frozenset(decoder.encode(end))
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    if end == "<|call|>":
        text += " to=functions.look<|channel|>commentary <|constrain|>json<|message|>"
        wanted, reason = [("thought", "Hm."), LOOK], "tool_calls"
        text += '{"a": 1}'
    else:
        text += "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
        text += "<|channel|>final<|message|>Yes."
        wanted, reason = [("thought", "Hm."), ("text", "Wait.Yes.")], "stop"
    engine.runner.answer = lambda *_: decoder.encode(f"{text}{end}")
    assert say(engine) == (wanted, reason)


def test_mistral_calls_are_complete_at_end_of_answer():
    engine = engine_saying(f"[TOOL_CALLS]{LIST}", formats=Formats(MISTRAL))
    assert say(engine) == ([LOOK, ("call", "click", "{}")], "tool_calls")


def test_logprobs_are_in_tokens_first_delta():
    engine = engine_saying(f"ab{CALL[:-1]}")
    engine.add("a", logprobs=0)
    launch = engine.runner.launch

    def with_scores(plan: object) -> object:
        step = launch(plan)  # type: ignore[arg-type]
        brings = step.brings
        scores = {seq: [TokenLogprobs(-0.5, ())] for seq in brings.tokens}
        step.brings = StepResult(
            brings.tokens,
            brings.failures,
            scores,
            prefill_seconds=brings.prefill_seconds,
            error=brings.error,
        )
        return step

    engine.runner.launch = with_scores  # type: ignore[method-assign,assignment]
    engine.runner.answer = lambda *_: [*DECODER.encode(f"a<b{CALL}"), EOS]
    found = deltas(engine.run())
    assert sum(bool(delta.logprobs) for delta in found) == len(DECODER.encode(f"a<b{CALL}")) + 1
    call = [delta for delta in found if delta.tool_call]
    assert [bool(delta.logprobs) for delta in call] == [True, False]
    assert found[-1].finish_reason == "tool_calls"


def test_empty_deltas_tell_whether_reasoning_continues():
    engine = engine_saying("<think>é</think>b", answer=ANSWER)
    engine.add("a")
    found = [(delta.text, delta.is_reasoning) for delta in deltas(engine.run())]
    assert found == [
        ("", False),
        ("", True),
        ("é", True),
        ("", True),
        ("b", False),
        ("", False),
    ]


def test_request_prepared_again_counts_its_calls_once():
    engine = engine_saying(f"a{CALL}")
    outcome, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add("a")
    engine.step()
    request = engine.request("a")
    assert outcome is not None
    assert request.submit is not None
    engine.scheduler.on_prepared("a", outcome(request.submit))
    request.submit = engine.preparers.works["a"].submit
    request.restart(use_disk=False)
    engine.preparers.outcome = outcome
    engine.run()
    assert merged(pieces_in(deltas(engine.events))) == [("text", "a"), LOOK]
    assert counts(engine) == (1, 0)
    assert engine.is_clean()


def test_stats_count_valid_and_broken_calls():
    engine = engine_saying(f"{CALL}<tool_call>")
    engine.add("a")
    engine.run()
    engine.loop.send_stats()
    stats = engine.events[-1]
    assert isinstance(stats, Stats)
    assert (stats.tool_calls, stats.broken_tool_calls) == (1, 1)


def test_aborted_call_is_neither_valid_nor_broken():
    engine = engine_saying(f"{CALL}{CALL}")
    engine.add("a")
    engine.step_until(lambda: any(delta.tool_call for delta in deltas(engine.events)))
    engine.step()
    engine.abort("a")
    engine.run()
    assert counts(engine) == (1, 0)
