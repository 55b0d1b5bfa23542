"""Muon for the matrices, AdamW for the rest; one learning rate for both.

Muon (Jordan 2024): the momentum of a matrix, orthogonalised by five Newton-Schulz steps; scaled
by 0.2 * sqrt(max(rows, columns)) so that its size is AdamW's (Liu et al. 2025). Matrices of one
size are done together, which keeps the number of kernels small.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> each matrix with its singular values near 1."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    flip = x.shape[1] > x.shape[2]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if flip else x


class Muon:
    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float, decay: float) -> None:
        self.momentum = momentum
        self.decay = decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            shape = (parameter.shape[0], parameter[0].numel())
            self.groups.setdefault(shape, []).append(parameter)
        self.buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            # A batch of text alone gives the vision tower no gradient.
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            gradient = torch.stack([g.reshape(shape) for g in grads])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = 0.2 * max(shape) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            updates = [u.view_as(p).to(p.dtype) for u, p in zip(update, group, strict=True)]
            torch._foreach_add_(group, updates, alpha=-rate * scale)


class Optimizer:
    """Steps both optimizers at one rate and clears the gradients."""

    def __init__(self, model: nn.Module, use_muon: bool, decay: float = 0.02) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if use_muon and p.ndim >= 2 and "embed" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        heavy = [p for p in rest if p.ndim >= 2]
        light = [p for p in rest if p.ndim < 2]
        self.muon = Muon(matrices, 0.95, decay) if matrices else None
        self.adamw = torch.optim.AdamW(
            [{"params": heavy, "weight_decay": decay}, {"params": light, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.98), fused=heavy[0].is_cuda,
        )  # fmt: skip

    def step(self, rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(rate)
        self.adamw.zero_grad(set_to_none=True)
        for group_ in self.muon.groups.values() if self.muon else ():
            for parameter in group_:
                parameter.grad = None
