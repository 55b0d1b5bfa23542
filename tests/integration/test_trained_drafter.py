"""A trained drafter changes no answer; its KV follows each sequence through all that happens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.speculative.drafters import load_drafter
from msgspec import structs
from safetensors.numpy import load_file, save_file

from tests.integration.decisions import Asked, decide, decisions_of
from tests.integration.harness import (
    EngineHarness,
    NewEngine,
    Part,
    ask,
    cached_tokens,
    caches_of,
    conversation,
    load_model,
    new_preparer,
    prepare,
)
from tests.integration.kv_columns import columns_of
from tests.integration.oracle import Oracle
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.integration.schemas import SHAPE, schema_sampling
from tests.integration.test_adapters import adapters_of
from tests.integration.test_compiled_model import compiled
from tests.integration.test_late_grammars import add_slow
from tests.integration.test_speculation import answer_tokens, ask_all
from tests.support.images import random_image
from tests.support.whole_run import few_of
from tests.tiny_models import cached
from tests.tiny_models.draft_heads import (
    CONFIG,
    EAGLE,
    WEIGHTS,
    add_head,
    head_of,
    with_weak_layers,
    write_assistant,
    write_dflash,
    write_eagle,
    write_head,
    write_nemotron_head,
)
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.errors import ModelLoadError
from vlm_server.interfaces import SeqId
from vlm_server.protocol import SamplingParams
from vlm_server.runner.decode import sequence
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.decode.speculation import StepTimes
from vlm_server.runner.kv.layers import new_layers
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.model.lm_head import WantedLogits, embed, logits_of

STRENGTH = 0.03
"""With it, the head is right about four times in ten."""
STRENGTH_OF_GEMMA = 0.4
"""The same of a model whose layers' outputs have a size of their own."""
HEADS = ("mtp", EAGLE, "dflash")
KINDS = few_of(
    [
        *(f"{family}-{kind}" for kind in HEADS for family in ("qwen3_5", "qwen3_vl")),
        "gemma4-assistant",
    ],
    ["qwen3_5-mtp", f"qwen3_vl-{EAGLE}"],
)
"""Models with states, ones whose layers all append, so that their prompts are prefilled together,
and one whose head has no KV."""


class Mute:
    """A drafter of text that never drafts, so that the head does."""

    probability = 0.0

    def __init__(self, *_: object) -> None:
        pass

    def append(self, token_id: int) -> None:
        pass

    def guess(self, count: int) -> list[int]:
        return []

    def probabilities(self, count: int) -> list[float]:
        return [0.0] * count


@dataclass(frozen=True)
class Pair:
    """A model, the same with a head that is often right, and with one that looks at all tokens."""

    plain: LoadedModel
    drafted: LoadedModel
    busy: LoadedModel


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, kind = request.param.split("-")
    folder = tmp_path_factory.mktemp("heads")
    strength = STRENGTH_OF_GEMMA if family == "gemma4" else STRENGTH
    model = with_weak_layers(cached(family), folder / "model", strength)
    write = {
        "mtp": partial(write_head, cached("qwen3_5"), model=model),
        EAGLE: partial(write_eagle, model),
        "dflash": partial(write_dflash, model),
        "assistant": partial(write_assistant, model),
    }[kind]
    heads = [
        write(folder=folder / name, is_idle=is_idle)
        for name, is_idle in (("idle", True), ("busy", False))
    ]
    return Pair(*(load_model(model, drafter=str(drafter)) for drafter in ("off", *heads)))


def has_kv(pair: Pair) -> bool:
    assert pair.drafted.draft_head is not None
    return pair.drafted.draft_head.num_layers > 0


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay as if wide steps took no longer, however busy the machine is."""
    monkeypatch.setattr(StepTimes, "cost", lambda *_: 1.0)
    monkeypatch.setattr(StepTimes, "needs_plain", lambda *_: False)


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch, often: None) -> None:
    """Nothing is drafted but by the head."""
    monkeypatch.setattr(sequence, "Drafter", Mute)


def engine_of(loaded: LoadedModel, **limits: Any) -> EngineHarness:
    return EngineHarness(loaded, new_preparer(loaded), **limits)


def run_all(engine: EngineHarness, stagger: int = 0) -> dict[SeqId, list[int]]:
    for name in PROMPTS:
        engine.add(prompt_request(name, LONGER))
        engine.step(stagger)
    engine.run()
    return answer_tokens(engine, LONGER)


class Answers(dict[tuple[int, ...], list[list[int]]]):
    """Answers by prompt; none to others."""

    def __missing__(self, key: tuple[int, ...]) -> list[list[int]]:
        return [[]]


def answers_of(engine: EngineHarness) -> Answers:
    return Answers(
        (tuple(engine.prompts[seq.request_id].token_ids.tolist()), [tokens])
        for seq, tokens in engine.seqs.items()
    )


def num_accepted(engine: EngineHarness) -> int:
    """The tokens of answers that the head drafted."""
    return engine.scheduler.stats().spec_trained_accepted_tokens


LIMITS = {
    "chunks": {"chunk_tokens": 16},
    "whole": {},
    "together": {"max_prompts_per_prefill": 8},
}
COMPILED = {
    "compiled": {"chunk_tokens": 16, "mixed_step_tokens": 0},
    "mixed": {"chunk_tokens": 16, "mixed_step_tokens": 64},
}


# ---- answers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("limits", few_of(LIMITS, ["chunks"]))
@pytest.mark.parametrize("stagger", [0, 3])
def test_answers_drafted_by_head_equal_plain_answers(pair: Pair, stagger: int, limits: str):
    engine = engine_of(pair.drafted, num_draft_tokens=7, **LIMITS[limits])
    assert run_all(engine, stagger) == run_all(engine_of(pair.plain))
    assert num_accepted(engine) > 5


@pytest.mark.usefixtures("mute")
def test_head_drafts_less_than_one_step_for_each_token(pair: Pair):
    """The answer takes fewer steps by as many as drafts were accepted."""
    engine = engine_of(pair.drafted, num_draft_tokens=7)
    engine.answer(prompt_request("image", LONGER))
    counts = engine.scheduler.stats()
    assert 0 < counts.spec_trained_accepted_tokens == counts.spec_accepted_tokens
    assert counts.spec_drafts + counts.spec_accepted_tokens <= LONGER.max_tokens + 7


@pytest.mark.usefixtures("mute")
def test_sampled_answers_drafted_by_head_equal_plain_answers(pair: Pair):
    plain = ask_all(engine_of(pair.plain, max_num_seqs=12))
    wide = ask_all(engine_of(pair.drafted, max_num_seqs=12, num_draft_tokens=7))
    assert wide.seq_texts == plain.seq_texts
    assert wide.finish_reasons == plain.finish_reasons
    assert wide.scheduler.stats().spec_trained_draft_tokens > 0
    for one, other in zip(wide.logprobs["scored"], plain.logprobs["scored"], strict=True):
        assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-3)


@pytest.mark.usefixtures("often")
def test_drafts_of_text_and_head_compete(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    plain = engine_of(pair.plain)
    wanted = run_all(plain)
    monkeypatch.setattr(sequence, "Drafter", Oracle(answers_of(plain), 0.5))
    engine = engine_of(pair.drafted, num_draft_tokens=7)
    assert run_all(engine, 2) == wanted
    counts = engine.scheduler.stats()
    assert counts.spec_draft_tokens > counts.spec_trained_draft_tokens


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("mixed_step_tokens", few_of([0, 64], [64]))
def test_compiled_steps_and_head_change_no_answer(pair: Pair, mixed_step_tokens: int):
    wanted = run_all(engine_of(pair.plain))
    served = pair.drafted, new_preparer(pair.drafted)
    engine, model = compiled(served, mixed_step_tokens, chunk_tokens=16)
    assert run_all(engine, 3) == wanted
    assert model.can_compile
    assert model.num_steps > 0
    assert bool(model.piggybacked) == bool(mixed_step_tokens)
    drafting = EngineHarness(engine.loaded, served[1], chunk_tokens=16, num_draft_tokens=3)
    assert run_all(drafting, 3) == wanted
    assert num_accepted(drafting) > 5
    assert model.can_compile


@pytest.mark.usefixtures("mute")
def test_head_that_is_wrong_is_soon_left_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Its guesses have little to do with the model's tokens."""
    monkeypatch.setattr(StepTimes, "cost", lambda _, __, width: 1 + 0.2 * (width - 1))
    engine = engine_of(pair.busy, num_draft_tokens=7)
    long = SamplingParams(max_tokens=400, temperature=1.5, seed=1, min_tokens=400)
    engine.add(ask("a", "say", sampling=long))
    engine.step_until(lambda: len(engine.tokens.get("a", ())) >= 100)
    before = engine.scheduler.stats().spec_trained_draft_tokens
    assert 0 < before < 100
    engine.run()
    assert engine.scheduler.stats().spec_trained_draft_tokens - before < 30


# ---- the head's KV ---------------------------------------------------------------------------


def engines_of(loaded: LoadedModel, **limits: Any) -> NewEngine:
    """A function to engines with these limits, and compiled ones with `mixed_step_tokens`."""
    tokens = limits.pop("mixed_step_tokens", None)
    if tokens is None:
        return partial(engine_of, loaded, **limits)

    def new_compiled(**further: Any) -> EngineHarness:
        engine, model = compiled((loaded, new_preparer(loaded)), tokens, **limits, **further)
        assert model.can_compile
        return engine

    return new_compiled


def one_by_one(engine: EngineHarness) -> None:
    for name in PROMPTS:
        engine.answer(prompt_request(name, LONGER))


def in_all_ways(engine: EngineHarness) -> None:
    """Sequences join and leave, drafts are right and wrong, and plain steps come in between."""
    for number, name in enumerate(PROMPTS):
        engine.add(prompt_request(name, LONGER))
        engine.step(number)
        engine.add(ask(f"aborted {number}", "say", sampling=LONGER))
        engine.step(2)
        engine.abort(f"aborted {number}")


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("drafts", few_of(["head", "text", "none"], ["head"]))
@pytest.mark.parametrize("limits", few_of(LIMITS | COMPILED, ["whole", "mixed"]))
def test_kv_of_head_follows_each_sequence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, drafts: str, limits: str
):
    plain = engine_of(pair.busy)
    run_all(plain)
    oracle = Oracle(answers_of(plain), 0.3)
    wanted = columns_of(engines_of(pair.busy), one_by_one)
    monkeypatch.setattr(sequence, "Drafter", oracle if drafts == "text" else Mute)
    further = (LIMITS | COMPILED)[limits] | {"num_draft_tokens": 0 if drafts == "none" else 7}
    found = columns_of(engines_of(pair.busy, **further), in_all_ways)
    for name in PROMPTS:
        found[name].check_equal(wanted[name])


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("num_draft_tokens", [0, 7])
def test_kv_of_head_after_steps_equals_kv_of_prefill(pair: Pair, num_draft_tokens: int):
    engines = engines_of(pair.busy, num_draft_tokens=num_draft_tokens)
    answers = list[int]()

    def stepped(engine: EngineHarness) -> None:
        answers.extend(engine.answer(prompt_request("text", LONGER))[:24])

    found = columns_of(engines, stepped)["text"]

    def prefilled(engine: EngineHarness) -> None:
        request = prompt_request("text", LONGER)
        prepared = prepare(engine.preparer, request)
        ids = np.concatenate([prepared.prompt.token_ids, np.array(answers, np.int32)])
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        prompt = replace(prepared.prompt, token_ids=ids, positions=positions)
        engine.preparers.outcomes["text"] = replace(prepared, prompt=prompt)
        engine.answer(request)

    wanted = columns_of(engines, prefilled)["text"]
    assert wanted.num_prompt == found.num_prompt + 24
    replace(wanted, num_prompt=found.num_prompt).check_equal(found)


@pytest.mark.usefixtures("mute")
def test_kv_of_head_follows_detached_sequence(pair: Pair):
    """A request whose grammar is late decodes apart for some steps, and joins the others again."""
    held = ask("late", "say", sampling=schema_sampling(SHAPE))
    long = ask("long", "say more", sampling=structs.replace(LONGER, max_tokens=300))
    num_apart = list[int]()

    def alone(engine: EngineHarness) -> None:
        engine.answer(held)
        engine.answer(long)

    def late(engine: EngineHarness) -> None:
        engine.add(long)
        delay = add_slow(engine, held)
        engine.step_until(lambda: bool(engine.tokens.get("late")))
        groups: DecodeGroups = engine.runner._groups
        delay.is_late = True
        engine.step(4)
        num_apart.append(len(groups._detached))
        delay.is_late = False
        engine.step_until(lambda: not groups._detached)
        engine.answer(prompt_request("image", LONGER))

    wanted = columns_of(engines_of(pair.busy), alone)
    found = columns_of(engines_of(pair.busy), late)
    assert num_apart == [1]
    for name in ("late", "long"):
        found[name].check_equal(wanted[name])


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("storage", [EXACT, KVStorage(8, 32)], ids=["exact", "8 bits"])
def test_next_turn_of_drafted_answer_equals_plain_one(pair: Pair, storage: KVStorage):
    parts: tuple[Part, ...] = (random_image(1), "Describe this image.")

    def new_engine(loaded: LoadedModel, **limits: int) -> EngineHarness:
        caches = caches_of((loaded, new_preparer(loaded)), storage)
        return engine_of(loaded, caches=caches, **limits)

    plain, drafted = new_engine(pair.plain), new_engine(pair.drafted, num_draft_tokens=7)
    plain.answer(ask("first", *parts, sampling=LONGER))
    second = ask("second", *parts, plain.texts["first"], "and then?", sampling=LONGER)
    plain.answer(second)
    for request in (ask("first", *parts, sampling=LONGER), second):
        before = num_accepted(drafted)
        assert drafted.answer(request)[:24] == plain.tokens[request.request_id][:24]
        assert num_accepted(drafted) > before
    assert cached_tokens(drafted, "second") == cached_tokens(plain, "second") > 0


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("chunk_tokens", [512, 16])
def test_prompt_after_hit_has_kv_of_head(pair: Pair, chunk_tokens: int):
    """All but the column after the hit, for which no hidden state is stored."""
    text = "count" + ", and count on" * 20
    turns = ("user", (text,)), ("assistant", ("yes",)), ("user", ("and then?",))
    hits = list[int]()

    def two_turns(engine: EngineHarness) -> None:
        engine.answer(conversation("first", *turns[:1], sampling=LONGER))
        engine.answer(conversation("second", *turns, sampling=LONGER))
        hits.append(cached_tokens(engine, "second"))

    engines = engines_of(pair.busy, chunk_tokens=chunk_tokens)
    wanted = columns_of(engines, two_turns)["second"]
    found = columns_of(engines, two_turns, stores=True)["second"]
    assert hits[0] == 0
    assert hits[1] > 50
    for columns in (wanted, found):
        columns.arrays[:] = [np.delete(array, hits[1], axis=2) for array in columns.arrays]
    found.check_equal(wanted)


def test_decisions_of_drafted_model_equal_plain_ones(pair: Pair):
    """Their options are branches of the model's layers alone."""
    submit = decide("a", ("Look at this:", random_image(1)), Asked("Which colour is it?"))
    (plain,), (drafted,) = (
        decisions_of(engine_of(loaded, chunk_tokens=16, num_draft_tokens=7), submit)
        for loaded in (pair.plain, pair.busy)
    )
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, rtol=1e-5)
    assert drafted.greedy == plain.greedy


@pytest.mark.usefixtures("mute")
def test_answers_by_adapters_drafted_by_head_equal_plain_answers(tmp_path: Path):
    model, folders = cached("qwen3_5"), adapters_of("qwen3_5", tmp_path)
    head = str(write_head(model, tmp_path / "head", model))
    answers = []
    for drafter in ("off", head):
        loaded = load_model(model, drafter=drafter, adapters=folders)
        engine = engine_of(loaded, num_draft_tokens=3)
        for name in ("", *folders):
            request = ask(f"by {name}", "say something", sampling=LONGER)
            engine.add(structs.replace(request, adapter=name))
        engine.run()
        answers.append(answer_tokens(engine, LONGER))
    assert engine.scheduler.stats().spec_trained_draft_tokens > 0
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 3


def test_sequence_of_drafted_model_takes_planned_bytes(pair: Pair):
    engine = engine_of(pair.drafted)
    engine.answer(prompt_request("image", LONGER))
    sizes = [
        planned_state_size(loaded.language_model, loaded.drafter)
        for loaded in (pair.drafted, pair.plain)
    ]
    for count in (1, 100, 5000):
        assert sizes[0].bytes_for(count) == engine.runner.kv_bytes(count)
        more = sizes[0].bytes_for(count) - sizes[1].bytes_for(count)
        assert (more > 0) == has_kv(pair)


@pytest.mark.usefixtures("mute")
def test_pending_states_are_bounded(pair: Pair):
    """While nothing is drafted, the head catches up from time to time."""
    engine = engine_of(pair.drafted)
    for number in range(3):
        submit = ask(f"{number}", "say", sampling=structs.replace(LONGER, max_tokens=150))
        engine.add(submit)
    most = 0
    engine.step_until(lambda: len(engine.tokens) == 3)
    for _ in range(140):
        engine.step()
        states = engine.runner._groups._batch._head.arrays
        most = max(most, sum(array.size for array in states) // states[0].shape[-1])
    assert 64 < most <= 128 + 3 if has_kv(pair) else most == 3
    engine.run()
    assert not engine.runner._groups._batch._head.arrays


@pytest.mark.parametrize("kind", ["mtp", EAGLE, "nemotron"])
def test_guesses_equal_those_of_mlx_vlms_drafter(tmp_path: Path, kind: str):
    """But for the effect of a prompt's first column, which mlx-vlm's layers do not have."""
    family = "nemotron_h" if kind == "nemotron" else "qwen3_5"
    model = with_weak_layers(cached(family), tmp_path / "model", 0.3)
    folder = tmp_path / "head"
    if kind == "nemotron":
        write_nemotron_head(model, folder, is_idle=False)
    elif kind == EAGLE:
        write_eagle(model, folder, is_idle=False)
    else:
        write_head(model, folder, model, is_idle=False)
    loaded, drafter = load_model(model, drafter=str(folder)), load_drafter(str(folder))[0]
    head = loaded.draft_head
    assert head is not None
    rng, pairs = np.random.default_rng(0), list[tuple[int, int]]()
    for _ in range(12):
        token_ids = mx.array(rng.integers(3, 340, size=(1, 40)))
        layers = loaded.head_layers(loaded.new_layers())
        with logits_of(loaded.language_model, WantedLogits(1)) as seen:
            cache = new_layers(loaded.language_model)
            logits = loaded.language_model(token_ids, cache=cache).logits
        loaded.forget_positions()
        assert seen.all is not None
        first = int(mx.argmax(logits[0, -1]).item())
        drafter.reset(loaded.model)
        drafter.prefill_from_target_hidden(token_ids, seen.all, first, None, greedy=True)
        last = seen.all[:, -1:]
        wanted = drafter.draft_block(first, last, None, 4, None, greedy=True)[0].tolist()
        inputs = {"inputs_embeds": embed(loaded.language_model, token_ids)}
        head.append_chunk(token_ids, inputs, seen.all, None, layers)
        state, token = last, mx.array([[first]])
        for number in range(3):
            state = head.append_text(token, state, layers, [40 + number])
            token = head.guess(state)
            pairs.append((int(token.item()), wanted[number]))
    assert sum(own == other for own, other in pairs) > 0.8 * len(pairs)
    assert len({own for own, _ in pairs}) > 10


# ---- finding and loading ---------------------------------------------------------------------


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_drafter_is_found_within_checkpoint_and_beside_it(tmp_path: Path, family: str):
    qwen = cached(family)
    within = add_head(with_weak_layers(qwen, tmp_path / "within", STRENGTH))
    model = with_weak_layers(qwen, tmp_path / "model", STRENGTH)
    plain = load_model(model)
    assert plain.draft_head is None
    write_head(qwen, tmp_path / "model-mtp", model)
    inner = shutil.copytree(within, tmp_path / "inner")
    for folder, drafter in ((within, "auto"), (model, "auto"), (model, str(inner))):
        drafted = load_model(folder, drafter=drafter)
        assert drafted.draft_head is not None
        assert drafted.draft_head.name == "qwen3_5_mtp"
        assert drafted.size_bytes > plain.size_bytes
        engine = engine_of(drafted, num_draft_tokens=7)
        assert run_all(engine) == run_all(engine_of(plain))
        assert num_accepted(engine) > 5
    assert load_model(within, drafter="off").draft_head is None


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "nemotron_h"])
def test_text_model_finds_its_drafter(tmp_path: Path, family: str):
    """Within it; in the whole checkpoint beside it; or alone, beside it."""
    model = with_weak_layers(cached(family), tmp_path / "text", STRENGTH)
    if family == "nemotron_h":
        write_nemotron_head(model, tmp_path / "text-mtp")
    elif family == "qwen3_next":  # mlx-vlm refuses converted weights with a head among them
        add_head(Path(shutil.copytree(model, tmp_path / "text-mtp")))
    else:
        head = {f"mtp.{name}": array for name, array in head_of(cached("qwen3_5")).items()}
        save_file(load_file(model / WEIGHTS) | head, model / WEIGHTS, {"format": "mlx"})
    drafted = load_model(model)
    engine = engine_of(drafted, num_draft_tokens=7)
    plain = engine_of(load_model(model, drafter="off"))
    for name in ("text", "long"):
        plain.answer(prompt_request(name, LONGER))
        engine.add(prompt_request(name, LONGER))
        engine.step(2)
    engine.run()
    assert answer_tokens(engine, LONGER) == answer_tokens(plain, LONGER)
    assert num_accepted(engine) > 5


def test_drafter_of_quantized_weights_is_loaded(tmp_path: Path):
    model = cached("qwen3_5", bits=4)
    head = write_head(cached("qwen3_5"), tmp_path / "head", model)
    drafted, plain = load_model(model, drafter=str(head)), load_model(model, drafter="off")
    engine = engine_of(drafted, num_draft_tokens=3)
    assert run_all(engine) == run_all(engine_of(plain))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 32}, "another model: its hidden_size is 32, and the model's 64"),
        ({"vocab_size": 7}, "another model: its vocab_size is 7"),
        ({"mtp_use_dedicated_embeddings": True}, "embeddings of its own"),
    ],
)
def test_drafter_that_does_not_fit_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
):
    """One that was found by itself is left out, and the log says why."""
    model = shutil.copytree(cached("qwen3_5"), tmp_path / "model")
    head = write_head(model, tmp_path / "model-mtp", model)
    config = json.loads((head / "config.json").read_text())
    config["text_config"] |= change
    (head / "config.json").write_text(json.dumps(config))
    if "hidden_size" in change:
        narrow(head / "model.safetensors")
    with pytest.raises(ModelLoadError, match=reason):
        load_model(model, drafter=str(head))
    assert load_model(model).draft_head is None
    assert reason in caplog.text


def narrow(path: Path) -> None:
    """Halve every dimension of the hidden states' size."""
    weights = load_file(path)
    for name, array in weights.items():
        halves = tuple(slice(side // 2 if side in (64, 128) else side) for side in array.shape)
        is_inner = any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate", "up_proj"))
        halves = (slice(None), slice(32)) if is_inner else halves
        halves = (slice(32), slice(None)) if "down_proj" in name or "o_proj" in name else halves
        weights[name] = np.ascontiguousarray(array[halves[: array.ndim]])
    save_file(weights, path, {"format": "mlx"})


@pytest.mark.usefixtures("mute")
def test_eagle_head_is_found_beside_checkpoint(tmp_path: Path):
    model = with_weak_layers(cached("qwen3_vl"), tmp_path / "model", STRENGTH)
    wanted = run_all(engine_of(load_model(model)))
    write_eagle(model, tmp_path / "model-eagle3")
    drafted = load_model(model)
    assert drafted.draft_head is not None
    assert drafted.draft_head.name == EAGLE
    engine = engine_of(drafted, num_draft_tokens=7)
    assert run_all(engine) == wanted
    assert num_accepted(engine) > 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target_hidden_size": 32}, "its hidden_size is 32, and the model's 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"asks for layers \[1, 2, 9\] of 4"),
    ],
)
def test_eagle_head_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
):
    model = cached("qwen3_vl")
    head = write_eagle(model, tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | change
    (head / "config.json").write_text(json.dumps(config))
    if "target_hidden_size" in change:
        weights = load_file(head / WEIGHTS)
        weights["fc.weight"] = np.ascontiguousarray(weights["fc.weight"][:, :96])
        save_file(weights, head / WEIGHTS, {"format": "mlx"})
    with pytest.raises(ModelLoadError, match=reason):
        load_model(model, drafter=str(head))


def test_folder_without_drafter_is_refused(tmp_path: Path):
    model = cached("qwen3_5")
    with pytest.raises(ModelLoadError, match="is no drafter"):
        load_model(model, drafter=str(tmp_path / "missing"))
    with pytest.raises(ModelLoadError, match="names gemma3"):
        load_model(model, drafter=str(cached("gemma3")))
    head = write_head(model, tmp_path / "head", model)
    (tmp_path / CONFIG).write_text('{"model_type": ["qwen3"], "dflash_config": 7}')
    with pytest.raises(ModelLoadError, match="names no model_type"):
        load_model(model, drafter=str(tmp_path))
    (head / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelLoadError, match="can't load the drafter"):
        load_model(model, drafter=str(head))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_vl_embedding", "no drafts are verified for qwen3_vl_embedding"),
        ("molmo", "its embeddings are not in one table"),
    ],
)
def test_model_that_can_have_no_drafter_says_why(tmp_path: Path, family: str, reason: str):
    head = write_head(cached("qwen3_5"), tmp_path / "head", cached("qwen3_vl"))
    with pytest.raises(ModelLoadError, match=reason):
        load_model(cached(family), drafter=str(head))
