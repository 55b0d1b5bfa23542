"""Records on disk: features and KV as safetensors.

A record's header identifies its subject exactly; the digests in file names only serve look-up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import msgspec
import numpy as np

from vlm_server.cache.block_hash import KVBlock
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.runner.encode.encoder import ImageFeatures
from vlm_server.runner.kv.segments import KVSegment, LayerStates

_HEADER = "vlm_server"
_TYPES = (
    (mx.bool_, "BOOL", "?"),
    (mx.bfloat16, "BF16", "<u2"),  # numpy has none: read as integers of its size
    (mx.float16, "F16", "<f2"),
    (mx.float32, "F32", "<f4"),
    (mx.int8, "I8", "i1"),
    (mx.int32, "I32", "<i4"),
    (mx.int64, "I64", "<i8"),
    (mx.uint8, "U8", "u1"),
    (mx.uint32, "U32", "<u4"),
)
_NAMES = {dtype: name for dtype, name, _ in _TYPES}
_BY_NAME = {name: (dtype, code) for dtype, name, code in _TYPES}
_ALIGNMENT = 8
"""Alignment of the first array in a file, in bytes."""
UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, KeyError, msgspec.MsgspecError)
"""Errors from reading an invalid record."""


class _Layer(msgspec.Struct, frozen=True):
    """A layer of a snapshot: its counters, and flags of its existing arrays."""

    counters: tuple[str, ...]
    arrays: tuple[bool, ...]


class _Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FeaturesHeader(msgspec.Struct, frozen=True, tag="features"):
    """The header of the features of the image `key`."""

    fingerprint: str
    key: str

    def is_of(self, fingerprint: str, subject: str | KVBlock) -> bool:
        return (self.fingerprint, self.key) == (fingerprint, subject)


class PrefixHeader(msgspec.Struct, frozen=True, tag="prefix"):
    """The header of a block of prompts. token_ids: little-endian int32."""

    fingerprint: str
    parent: str
    key: str
    token_ids: bytes
    spans: tuple[MediaSpan, ...]
    layers: tuple[_Layer, ...] | None
    """The layers of the snapshot after the block, if there is one."""

    @property
    def block(self) -> KVBlock:
        token_ids = np.frombuffer(self.token_ids, dtype="<i4").astype(np.int32)
        return KVBlock(self.parent, self.key, PromptKey(token_ids, self.spans))

    def is_of(self, fingerprint: str, subject: str | KVBlock) -> bool:
        if not isinstance(subject, KVBlock):
            return False
        identity = (self.fingerprint, self.parent, self.key, self.token_ids, self.spans)
        part = subject.part
        return identity == (fingerprint, subject.parent, subject.key, _ids(part), part.spans)

    def kv_is_valid(self, fingerprint: str, key: str) -> bool:
        """Whether this is a valid header of `key`, of a block that is not empty."""
        length, odd = divmod(len(self.token_ids), 4)
        ends = [0, *(span.end for span in self.spans)]
        are_ordered = all(end <= s.start < s.end for end, s in zip(ends, self.spans, strict=False))
        is_whole = 0 < length >= ends[-1] and not odd
        return is_whole and are_ordered and (self.fingerprint, self.key) == (fingerprint, key)


Header = FeaturesHeader | PrefixHeader
_decoder: msgspec.json.Decoder[Header] = msgspec.json.Decoder(Header)


class Record:
    """The content of one file."""

    def __init__(self, header: Header, arrays: Mapping[str, mx.array]) -> None:
        self.header = header
        self._arrays = dict(arrays)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the file's size."""
        of_each = sum(array.nbytes + 256 for array in self._arrays.values())
        return of_each + 2 * len(self._encoded) + 256

    def write(self, path: Path) -> None:
        """Write the file. Evaluates the arrays, from any thread. Raises OSError.

        `mx.save_safetensors` is not used: its errors do not identify a full disk.
        """
        arrays = {name: mx.contiguous(array) for name, array in self._arrays.items()}
        mx.eval(arrays)
        header: dict[str, object] = {"__metadata__": {_HEADER: self._encoded}}
        end = 0
        for name, array in arrays.items():
            offsets = [end, end := end + array.nbytes]
            dtype = _NAMES[array.dtype]
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % _ALIGNMENT)
        with path.open("wb", buffering=0) as file:
            _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
            for array in arrays.values():
                _write_all(file, memoryview(array))  # type: ignore[arg-type]  # it is a buffer

    @classmethod
    def read(cls, data: bytes) -> Record:
        """The record in a file's content. Raises one of `UNREADABLE` if `write` did not write it.

        `mx.load` of a file object is not used: MLX would read it lazily, on a thread that needs the
        GIL, while `mx.clear_cache` on another thread holds the GIL and waits for MLX's threads.
        """
        start = 8 + int.from_bytes(data[:8], "little")
        header, tensors = _parse(data[8:start])
        content = memoryview(data)[start:]
        arrays = {name: _array(tensor, content) for name, tensor in tensors.items()}
        mx.eval(arrays)
        return cls(header, arrays)

    @property
    def features(self) -> ImageFeatures:
        arrays = self._arrays
        return ImageFeatures(arrays["rows"], arrays.get("visual_mask"), arrays.get("deepstack"))

    @property
    def segment(self) -> KVSegment:
        count = sum(name.startswith("kv.") for name in self._arrays)
        return KVSegment(tuple(self._arrays[f"kv.{number}"] for number in range(count)))

    @property
    def snapshot(self) -> LayerStates | None:
        assert isinstance(self.header, PrefixHeader)
        if self.header.layers is None:
            return None
        arrays = tuple(
            tuple(
                self._arrays[f"state.{number}.{index}"] if is_there else None
                for index, is_there in enumerate(layer.arrays)
            )
            for number, layer in enumerate(self.header.layers)
        )
        return LayerStates(arrays, tuple(layer.counters for layer in self.header.layers))

    @property
    def _encoded(self) -> str:
        return msgspec.json.encode(self.header).decode()


def _array(tensor: _Tensor, content: memoryview) -> mx.array:
    """A tensor, copied out of its file's content."""
    dtype, code = _BY_NAME[tensor.dtype]
    numbers = np.frombuffer(content[slice(*tensor.data_offsets)], code).reshape(tensor.shape)
    return mx.array(numbers).view(dtype)


def _write_all(file: BinaryIO, part: memoryview) -> None:
    """Write all of `part`: one write may be partial, as on a nearly full disk."""
    data = part.cast("B") if part.nbytes else memoryview(b"")
    while data:
        data = data[file.write(data) :]


def read_header(path: Path) -> Header:
    """The header of a record; reads no array. Raises one of `UNREADABLE` as `Record.read` does, and
    for a file of the wrong length.

    `safetensors.safe_open` is not used: it maps the file, and if another machine deletes a file on
    a network file system, reading the map ends the process.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size_bytes:
            raise ValueError("a cache file ends in its header")
        header, tensors = _parse(file.read(length))
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if 8 + length + end != size_bytes:
        raise ValueError("a cache file has another length than its header says")
    return header


def _parse(text: bytes) -> tuple[Header, dict[str, _Tensor]]:
    """Header and tensors of a safetensors header. Raises one of `UNREADABLE`."""
    entries = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    header = _decoder.decode(entries.pop("__metadata__")[_HEADER])
    return header, msgspec.convert(entries, dict[str, _Tensor])


def features_record(fingerprint: str, key: str, features: ImageFeatures) -> Record:
    names = ("rows", "visual_mask", "deepstack")
    arrays = {name: array for name in names if (array := getattr(features, name)) is not None}
    return Record(FeaturesHeader(fingerprint, key), arrays)


def prefix_record(
    fingerprint: str, block: KVBlock, segment: KVSegment, snapshot: LayerStates | None
) -> Record:
    arrays = {f"kv.{number}": array for number, array in enumerate(segment.arrays)}
    layers = None
    if snapshot is not None:
        states = list(enumerate(snapshot.arrays))
        numbered = [(n, i, array) for n, layer in states for i, array in enumerate(layer)]
        arrays |= {f"state.{n}.{i}": array for n, i, array in numbered if array is not None}
        layers = tuple(
            _Layer(tuple(counters), tuple(array is not None for array in layer))
            for layer, counters in zip(snapshot.arrays, snapshot.counters, strict=True)
        )
    part = block.part
    header = PrefixHeader(fingerprint, block.parent, block.key, _ids(part), part.spans, layers)
    return Record(header, arrays)


class StoredPrefix:
    """The `Source` of a stored block of a prompt, from position `start` on."""

    def __init__(
        self, start: int, segment: KVSegment, count: int, snapshot: LayerStates | None
    ) -> None:
        """count: number of matching positions of `segment`. snapshot: the state after these."""
        self._start = start
        self._segment = segment
        self.length = start + count
        self.snapshots = {} if snapshot is None else {self.length: snapshot}

    def size_bytes(self, start: int, end: int) -> int:
        per_token = sum(array.nbytes // array.shape[2] for array in self._segment.arrays)
        return per_token * (end - start)

    def take(self, start: int, end: int) -> KVSegment:
        """Evaluated KV, for use on another thread. Raises ValueError for positions not read."""
        if not self._start <= start <= end <= self.length:
            raise ValueError(f"positions {start} to {end} are not among those that were read")
        first, last = start - self._start, end - self._start
        arrays = self._segment.arrays
        if first == 0 and all(array.shape[2] == last for array in arrays):
            return self._segment
        slices = tuple(mx.contiguous(array[:, :, first:last]) for array in arrays)
        mx.eval(slices)
        return KVSegment(slices)


def _ids(part: PromptKey) -> bytes:
    return part.token_ids.astype("<i4").tobytes()
