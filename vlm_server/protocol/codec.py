"""Messages on the socket: a 4-byte big-endian length, and that many bytes of msgpack."""

from __future__ import annotations

import struct

import msgspec

from vlm_server.protocol.commands import Command
from vlm_server.protocol.events import Event
from vlm_server.protocol.request import EncodedSubmit, Submit

MESSAGE_HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 1 << 30


_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_submit_decoder = msgspec.msgpack.Decoder(EncodedSubmit)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_submit(submit: Submit) -> EncodedSubmit:
    """`submit` with its large parts encoded."""
    return decode_encoded_submit(_encoder.encode(submit))


def decode_encoded_submit(body: bytes | memoryview) -> EncodedSubmit:
    """The `Submit` in a message's body; its large parts are views of `body`."""
    return _submit_decoder.decode(body)


def encode_message(message: Command | EncodedSubmit | Event) -> bytearray:
    """`message` with its header."""
    frame = bytearray(MESSAGE_HEADER.size)
    _encoder.encode_into(message, frame, MESSAGE_HEADER.size)
    MESSAGE_HEADER.pack_into(frame, 0, len(frame) - MESSAGE_HEADER.size)
    return frame


def decode_command(body: bytes | bytearray) -> Command:
    """The command in a message's body. Raises msgspec.DecodeError on anything else."""
    try:
        return _command_decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_event(body: bytes) -> Event:
    """The event in a message's body. Raises msgspec.DecodeError on anything else."""
    try:
        return _event_decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
