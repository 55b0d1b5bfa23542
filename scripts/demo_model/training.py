"""The training loop: batches to the device, loss on answers, a schedule in wall time."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.batches import Batch, Workers
from demo_model.network import DemoModel, TextLayer, VisionBlock
from demo_model.optimizer import Optimizer


@dataclass(frozen=True)
class Schedule:
    """Peak rate, and lengths in seconds. `ease_share`: the part in which texts grow hard."""

    seconds: float
    peak: float = 2e-3
    warmup_steps: int = 300
    ease_share: float = 0.12
    first_ease: float = 1.0
    final: float = 0.01

    def rate(self, step: int, elapsed: float) -> float:
        left = max(0.0, 1 - elapsed / self.seconds)
        decay = self.final + (1 - self.final) * min(1.0, left / 0.85)
        return self.peak * decay * min(1.0, (step + 1) / self.warmup_steps)

    def ease(self, elapsed: float) -> float:
        return max(0.0, self.first_ease * (1 - elapsed / (self.ease_share * self.seconds)))


DTYPES = {
    "uint8": torch.uint8, "int64": torch.int64, "int32": torch.int32, "float32": torch.float32,
}  # fmt: skip


@dataclass
class DeviceBatch:
    """A batch's arrays as views of one block of device memory."""

    batch: Batch
    block: Tensor
    arrays: dict[str, Tensor]

    def claim(self) -> None:
        """Tell the allocator that the current stream, too, uses what the loader's made."""
        if self.block.is_cuda:
            self.block.record_stream(torch.cuda.current_stream())

    def each(self, name: str) -> list[Tensor]:
        return [self.arrays[f"{name}{i}"] for i in range(self.batch.pictures)]


def to_device(batch: Batch, buffer: Tensor, device: torch.device) -> DeviceBatch:
    """buffer: the shared memory as a byte tensor; one copy takes all that is used of it."""
    block = buffer[: batch.used_bytes].to(device, copy=True)
    arrays = {}
    for name, dtype, shape, offset in batch.arrays:
        length = math.prod(shape) * DTYPES[dtype].itemsize
        arrays[name] = block[offset : offset + length].view(DTYPES[dtype]).view(shape)
    return DeviceBatch(batch, block, arrays)


class Loader(threading.Thread):
    """Copies batches to the device, a few ahead."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.workers = workers
        self.device = device
        self.ready: queue.Queue[DeviceBatch] = queue.Queue(maxsize=4)
        self.buffers = {
            number: torch.frombuffer(memory, dtype=torch.uint8)
            for number, memory in workers.memories.items()
        }
        if device.type == "cuda":
            for tensor in self.buffers.values():
                torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)

    def run(self) -> None:
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        while True:
            number, worker, batch = self.workers.get()
            if stream is None:
                sent = to_device(batch, self.buffers[number], self.device)
            else:
                with torch.cuda.stream(stream):
                    sent = to_device(batch, self.buffers[number], self.device)
                stream.synchronize()
            self.workers.release(number, worker)
            self.ready.put(sent)


def spoil(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """(n, frames, height, width, 3) bytes to normalised (n, frames, 3, height, width).

    A share of the pictures gets a little brightness, contrast, blur or noise.
    """
    x = pixels.permute(0, 1, 4, 2, 3).float() / 127.5 - 1
    count, device = x.shape[0], x.device
    amount = torch.rand(2, count, 1, 1, 1, 1, device=device, generator=generator)
    chosen = torch.rand(2, count, 1, 1, 1, 1, device=device, generator=generator) < 0.3
    contrast, light = 1 - 0.12 * amount[0] * chosen[0], 0.16 * (amount[1] - 0.5) * chosen[1]
    x = x * contrast + light
    # Which samples come first in a batch is chance, so a fixed share of it serves.
    soft, rough = x[: count // 8], x[count // 10 : count // 3]
    if len(soft):
        blurred = F.avg_pool2d(soft.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(soft)
        soft.lerp_(blurred, 0.95 * float(torch.rand(1)))
    if len(rough):
        noise = torch.randn(rough.shape, device=device, generator=generator)
        rough += 0.10 * noise * amount[0, : len(rough)]
    return x.clamp(-1, 1)


class Scores:
    """Exact answers by task, since the last report."""

    def __init__(self) -> None:
        self.right: dict[str, float] = defaultdict(float)
        self.seen: dict[str, int] = defaultdict(int)
        self.loss: dict[str, list[float]] = defaultdict(list)

    def add(self, batch: Batch, correct: np.ndarray, loss: float) -> None:
        at = 0
        self.loss[batch.kind].append(loss)
        for task, length in batch.turns:
            self.right[task] += bool(correct[at : at + length].all())
            self.seen[task] += 1
            at += length

    def report(self) -> dict[str, float]:
        exact = {t: round(100 * self.right[t] / self.seen[t], 1) for t in sorted(self.seen)}
        losses = {f"loss_{k}": round(sum(v) / len(v), 4) for k, v in self.loss.items()}
        self.__init__()  # type: ignore[misc]
        return losses | exact


def compile_layers(model: DemoModel) -> None:
    torch._dynamo.config.cache_size_limit = 64
    for module in model.modules():
        if isinstance(module, VisionBlock | TextLayer):
            module.compile(dynamic=True)


def averaged(parameters: list[nn.Parameter], elapsed: float) -> Tensor:
    """Average the gradients over all processes, and `elapsed`, so that all end at one step."""
    if not dist.is_initialized():
        return torch.tensor(elapsed)
    for parameter in parameters:
        if parameter.grad is None:  # a batch of text alone gives the vision tower none
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([*(g.flatten() for g in grads), grads[0].new_tensor([elapsed])])
    dist.all_reduce(flat, dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    torch._foreach_copy_(grads, [s.view_as(g) for s, g in zip(
        flat[:-1].split([g.numel() for g in grads]), grads, strict=True)])  # fmt: skip
    return flat[-1]


def train(
    model: DemoModel,
    workers: Workers,
    schedule: Schedule,
    publish: Callable[[], None],
    *,
    muon: bool,
    report: int,
) -> None:
    """Train until the schedule ends; `publish` is called every two minutes and at the end.

    In a process group, gradients are averaged, and only the first process reports and publishes.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention plans anew for every shape, and here every batch has another.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if cuda:
        compile_layers(model)
    optimizer = Optimizer(model, use_muon=muon)
    loader = Loader(workers, device)
    generator = torch.Generator(device).manual_seed(1)
    workers.ease.value = schedule.first_ease
    loader.start()
    scores, samples, step = Scores(), 0, 0
    began = saved = reported = time.monotonic()
    clocks = [torch.zeros(()) for _ in range(4)]
    while (elapsed := float(clocks.pop(0))) < schedule.seconds:  # one that waits for no step
        item = loader.ready.get()
        item.claim()
        arrays = item.arrays
        rate = schedule.rate(step, elapsed)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            pictures = [spoil(p, generator) for p in item.each("pixels")]
            hidden = model(arrays["ids"], arrays["positions"], pictures, item.each("places"))
            logits = model.head(hidden.flatten(0, 1)[arrays["target_at"]])
        losses = F.cross_entropy(logits.float(), arrays["targets"], reduction="none")
        loss = (losses * arrays["weights"]).sum() / arrays["weights"].sum()
        loss.backward()
        clock = averaged(parameters, time.monotonic() - began)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step(rate)
        clocks.append(clock)
        step += 1
        samples += len(arrays["ids"])
        if first and step % min(16, report) == 0:
            correct = (logits.argmax(-1) == arrays["targets"]).cpu().numpy()
            scores.add(item.batch, correct, loss.item())
        if step % 16 == 0:
            workers.ease.value = schedule.ease(elapsed)
        if first and step % report == 0:
            now = time.monotonic()
            speed = {
                "step": step, "seconds": round(elapsed), "samples": samples, "rate": round(rate, 6),
                "step_ms": round(1000 * (now - reported) / report, 1),
                "waiting": loader.ready.qsize(), "norm": round(float(norm), 3),
            }  # fmt: skip
            print(json.dumps(speed | scores.report()), flush=True)
            reported = now
        if first and time.monotonic() - saved > 120:
            publish()
            saved = time.monotonic()
    if first:
        publish()
