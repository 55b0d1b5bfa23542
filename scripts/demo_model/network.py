"""A compact PyTorch `qwen3_vl`, with the parameter names and the arithmetic of mlx-vlm's.

Every picture of one `vision` call has the same size, so its attention is one dense call.
Knows tensors; knows nothing of scenes or of training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.shape import MERGE, PATCH, ModelShape, TextShape, VisionShape


def rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class VisionAttention(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, length, hidden))


class VisionMLP(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden, shape.intermediate)
        self.linear_fc2 = nn.Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.attn = VisionAttention(shape)
        self.mlp = VisionMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Four patches become one token of the text model's width."""

    def __init__(self, shape: VisionShape, out: int, norm_after_merge: bool) -> None:
        super().__init__()
        self.merged = shape.hidden * MERGE**2
        self.norm_after_merge = norm_after_merge
        self.norm = nn.LayerNorm(self.merged if norm_after_merge else shape.hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, out)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        if self.norm_after_merge:
            x = self.norm(x.reshape(batch, -1, self.merged))
        else:
            x = self.norm(x).reshape(batch, -1, self.merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


def merge_order(x: Tensor) -> Tensor:
    """(rows, cols, ...) to (rows*cols, ...), the four patches of a merged token together."""
    rows, cols = x.shape[:2]
    x = x.view(rows // MERGE, MERGE, cols // MERGE, MERGE, *x.shape[2:])
    return x.transpose(1, 2).reshape(rows * cols, *x.shape[4:])


class VisionTower(nn.Module):
    def __init__(self, shape: VisionShape, out: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv3d(3, shape.hidden, (2, PATCH, PATCH), (2, PATCH, PATCH))}
        )
        self.pos_embed = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))
        self.merger = PatchMerger(shape, out, norm_after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(shape, out, norm_after_merge=True) for _ in shape.deepstack
        )

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """pixels: (batch, frames 1 or 2, 3, height, width) -> (batch, patches, hidden)."""
        batch, frames, _, height, width = pixels.shape
        rows, cols = height // PATCH, width // PATCH
        x = pixels.view(batch, frames, 3, rows // MERGE, MERGE, PATCH, cols // MERGE, MERGE, PATCH)
        x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(batch, rows * cols, -1)
        conv = self.patch_embed["proj"]
        weight = conv.weight if frames == 2 else conv.weight.sum(dim=2, keepdim=True)
        return F.linear(x, weight.reshape(weight.shape[0], -1), conv.bias)

    def position_embeddings(self, rows: int, cols: int) -> Tensor:
        """Bilinear interpolation of the square table, corners aligned."""
        side = int(self.shape.positions**0.5)
        device = self.pos_embed.weight.device
        axes = []
        for count in (rows, cols):
            at = torch.linspace(0, side - 1, count, device=device)
            low = at.long()
            high = (low + 1).clamp(max=side - 1)
            matrix = torch.zeros(count, side, device=device)
            index = torch.arange(count, device=device)
            matrix.index_put_((index, low), 1 - (at - low), accumulate=True)
            matrix.index_put_((index, high), at - low, accumulate=True)
            axes.append(matrix)
        table = self.pos_embed.weight.view(side, side, -1)
        return merge_order(torch.einsum("rs,ct,sth->rch", axes[0], axes[1], table.float()))

    def rope(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        device = self.pos_embed.weight.device
        dim = self.shape.hidden // self.shape.heads // 2
        inverse = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, device=device).float() / dim))
        row = torch.arange(rows, device=device).float()[:, None].expand(rows, cols)
        col = torch.arange(cols, device=device).float()[None, :].expand(rows, cols)
        angles = merge_order(
            torch.cat((row[..., None] * inverse, col[..., None] * inverse), dim=-1)
        )
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        rows, cols = pixels.shape[-2] // PATCH, pixels.shape[-1] // PATCH
        x = self.embed_patches(pixels) + self.position_embeddings(rows, cols)
        cos, sin = self.rope(rows, cols)
        deep = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in self.shape.deepstack:
                merger = self.deepstack_merger_list[self.shape.deepstack.index(index)]
                deep.append(merger(x))
        return self.merger(x), deep


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class TextAttention(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        s = self.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = apply_rope(q, cos, sin).to(v.dtype), apply_rope(k, cos, sin).to(v.dtype)
        repeat = s.heads // s.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class TextMLP(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.self_attn = TextAttention(shape)
        self.mlp = TextMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextModel(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TextLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)

    def rope(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: (3, batch, length); frequencies interleave time, row and column."""
        s = self.shape
        steps = torch.arange(0, s.head_dim, 2, device=position_ids.device).float() / s.head_dim
        inverse = 1.0 / (s.rope_theta**steps)
        axis = torch.zeros(s.head_dim // 2, dtype=torch.long, device=position_ids.device)
        for offset in (1, 2):
            axis[offset : 3 * s.mrope_section[offset] : 3] = offset
        chosen = position_ids.float()[axis].permute(1, 2, 0)
        angles = chosen * inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


class DemoModel(nn.Module):
    """Pixels and token ids to hidden states; the head is the embedding, transposed."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.vision_tower = VisionTower(shape.vision, shape.text.hidden)
        self.language_model = nn.ModuleDict({"model": TextModel(shape.text)})
        self.apply(_initialise)

    def forward(
        self, ids: Tensor, position_ids: Tensor, pictures: list[Tensor], places: list[Tensor]
    ) -> Tensor:
        """Hidden states (batch, length, hidden) after the last norm.

        pictures[i]: (n, frames, 3, height, width), normalised; places[i]: (n, tokens), the
        flat positions in (batch * length) that its tokens fill.
        """
        text: TextModel = self.language_model["model"]
        x = text.embed_tokens(ids)
        batch, length, hidden = x.shape
        flat = x.view(-1, hidden)
        deep: list[tuple[Tensor, list[Tensor]]] = []
        for pixels, place in zip(pictures, places, strict=True):
            features, stack = self.vision_tower(pixels)
            index = place.reshape(-1)
            flat = flat.index_copy(0, index, features.reshape(-1, hidden).to(flat.dtype))
            deep.append((index, stack))
        x = flat.view(batch, length, hidden)
        cos, sin = text.rope(position_ids)
        for number, layer in enumerate(text.layers):
            x = layer(x, cos, sin)
            for index, stack in deep:
                if number < len(stack):
                    extra = stack[number].reshape(-1, hidden).to(x.dtype)
                    x = x.reshape(-1, hidden).index_add(0, index, extra).view(batch, length, hidden)
        return text.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.language_model["model"].embed_tokens.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv3d):
        nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.04)
