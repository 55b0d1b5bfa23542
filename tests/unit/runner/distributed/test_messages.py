"""Plans survive encoding with everything that a follower's runner needs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.interfaces import NewRequest, PrefillWork, PreparedPrompt, SchedulerOutput, SeqId
from vlm_server.protocol import SamplingParams
from vlm_server.runner.distributed import messages
from vlm_server.runner.distributed.messages import RankPlan, Stored, Taken
from vlm_server.runner.distributed.prefixes import FollowerPrefixes, HeldPrefix
from vlm_server.runner.encode.encoder import ImageFeatures

FEATURES = ImageFeatures(
    rows=mx.random.normal((4, 8)).astype(mx.bfloat16),
    visual_mask=mx.array([True, False, True, True]),
    deepstack=mx.random.normal((2, 3, 8)),
)
PROMPT = PreparedPrompt(
    token_ids=np.array([1, 7, 7, 7, 7, 2], dtype=np.int32),
    spans=(MediaSpan(1, 5, "abc"),),
    positions=np.arange(18, dtype=np.int32).reshape(3, 6),
    rope_delta=-2,
    snapshot_points=(3,),
    atomic_prefill_tokens=5,
    token_types=np.array([0, 1, 1, 1, 1, 0], dtype=np.int32),
)


def arrived(
    plan: SchedulerOutput, dropped: tuple[int, ...] = ()
) -> tuple[RankPlan, SchedulerOutput]:
    message = messages.decode_message(messages.encode(RankPlan.of(plan, dropped)))
    assert isinstance(message, RankPlan)
    following = FollowerPrefixes(lambda: Stored(()))
    return message, following.plan_of(message)


def test_plan_with_new_image_request_survives_encoding():
    sampling = SamplingParams(n=3, temperature=0.7, seed=5)
    request = NewRequest("a", PROMPT, sampling, HeldPrefix(), (FEATURES,))
    plan = SchedulerOutput(
        finished_seqs=(SeqId("b", 1),),
        stored_prompts=("f",),
        stored_answers=(SeqId("b", 1),),
        new=(request,),
        decode=(SeqId("c"), SeqId("d", 2)),
        prefills=(PrefillWork("a", 0, 6, is_last=True), PrefillWork("e", 0, 4, is_last=True)),
    )
    message, got = arrived(plan, (4, 5))
    assert message.dropped == (4, 5)
    assert (got.finished_seqs, got.decode) == (plan.finished_seqs, plan.decode)
    assert (got.stored_prompts, got.stored_answers) == (("f",), plan.stored_answers)
    assert got.prefills == plan.prefills
    (new,) = got.new
    assert new.sampling.n == 3
    assert new.prompt.spans == PROMPT.spans
    for name in ("token_ids", "positions", "token_types"):
        assert np.array_equal(getattr(new.prompt, name), getattr(PROMPT, name))
    for name in ("rope_delta", "snapshot_points", "atomic_prefill_tokens", "is_atomic"):
        assert getattr(new.prompt, name) == getattr(PROMPT, name)
    (made,) = new.features
    assert isinstance(made, ImageFeatures)
    assert all(mx.array_equal(a, b) for a, b in zip(made.arrays, FEATURES.arrays, strict=True))


def test_text_only_plan_survives_encoding():
    plan = SchedulerOutput(decode=(SeqId("a"),))
    _, got = arrived(plan)
    assert got == SchedulerOutput(decode=(SeqId("a"),))


def test_stored_message_keeps_its_order():
    stored = Stored((Taken(1, 0, 5), messages.Split(1, 2, 3, 4)))
    assert messages.decode_message(messages.encode(stored)) == stored


# ---- arrays ------------------------------------------------------------------------------

TYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_)


def sent(features: mx.array, token_ids: np.ndarray = PROMPT.token_ids) -> NewRequest:
    prompt = PreparedPrompt(token_ids=token_ids)
    made = (ImageFeatures(features, None, None),)
    request = NewRequest("a", prompt, SamplingParams(), HeldPrefix(), made)
    (got,) = arrived(SchedulerOutput(new=(request,)))[1].new
    return got


def features_sent(array: mx.array) -> mx.array:
    (got,) = sent(array).features
    assert isinstance(got, ImageFeatures)
    return got.rows


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 5), (), (2, 1, 3)], ids=str)
def test_mlx_arrays_survive_encoding(dtype: mx.Dtype, shape: tuple[int, ...]):
    array = (mx.random.normal(shape) * 3).astype(dtype)
    got = features_sent(array)
    assert got.dtype == dtype
    assert got.shape == shape
    assert mx.array_equal(got, array)


def test_transposed_array_slice_survives_encoding():
    part = mx.arange(24).reshape(4, 6)[1:3, ::2].T
    assert mx.array_equal(features_sent(part), part)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_numpy_arrays_survive_encoding(dtype: str):
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    got = sent(mx.zeros((1, 1)), array).prompt.token_ids
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
