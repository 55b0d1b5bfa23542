"""An HTTPS server on loopback with its own certificate and arbitrary answers."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CERTIFICATE = "certificate.pem"
Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer."""


@dataclass
class TlsServer:
    """`pages` maps paths to answers; `asked` holds the heads of received requests."""

    port: int
    trusting: ssl.SSLContext
    certificate: Path
    pages: dict[str, bytes | Serve] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    connections: int = 0
    server_names: list[str | None] = field(default_factory=list)


def page(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """A whole HTTP response; `length` is its declared Content-Length."""
    size = len(body) if length is None else length
    head = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return page(b"", f"Location: {location}", status=status)


@asynccontextmanager
async def tls_server(folder: Path, *names: str) -> AsyncIterator[TlsServer]:
    """A server with a certificate for `names`; its files go to `folder`."""
    chain, trusting = _certificates(folder, names)
    offering = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    offering.load_cert_chain(chain)
    tls = TlsServer(0, trusting, folder / CERTIFICATE)

    def note_name(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        tls.server_names.append(name)

    offering.sni_callback = note_name

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            tls.asked.append(head)
            found = tls.pages.get(head.split()[1], page(b"", status="404 Not Found"))
            if isinstance(found, bytes):
                writer.write(found)
                await writer.drain()
            else:
                await found(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=offering)
    tls.port = server.sockets[0].getsockname()[1]
    try:
        yield tls
    finally:
        server.close()


def _certificates(folder: Path, names: Sequence[str]) -> tuple[Path, ssl.SSLContext]:
    """The file of a key and its certificate for `names`, and a context that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of tests")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / CERTIFICATE).write_bytes(pem)
    chain = folder / "server.pem"
    chain.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + pem
    )
    return chain, ssl.create_default_context(cadata=pem.decode())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
