"""The watchdog's connections: one from every rank to rank 0, a line of JSON a message.

On one host they stay on the loopback interface; between hosts a random token, passed on by MPI, keeps strangers out.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

CONNECT_SECONDS = 5.0
_LONGEST = 1 << 16  # bytes of messages read at once
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Offer:
    """Where rank 0 listens."""

    addresses: tuple[str, ...]
    port: int
    token: str


class Connection:
    """A connected socket that sends and receives small dictionaries without ever waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._pending = b""
        self.closed = False  # by the other side

    def send(self, message: dict[str, Any]) -> None:
        """Send `message`, or drop it where the other side does not read."""
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What came since the last call; whatever is no dictionary is left out."""
        with suppress(BlockingIOError):
            try:
                data = self._socket.recv(_LONGEST)
            except BlockingIOError:
                raise
            except OSError:
                data = b""
            self.closed = not data
            self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        self._pending = self._pending[-_LONGEST:]
        messages = []
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()


class Hub:
    """Rank 0's connections to the ranks that have reached it."""

    def __init__(self, one_host: bool) -> None:
        self._server = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        self._server.setblocking(False)
        addresses = ("127.0.0.1",) if one_host else own_addresses()
        self.offer = Offer(addresses, self._server.getsockname()[1], secrets.token_hex(16))
        self._strangers: list[Connection] = []
        self._links: dict[int, Connection] = {}

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rank, message) of all that came since the last call."""
        yield from self._admit()
        for rank, link in self._links.items():
            for message in link.receive():
                yield rank, message

    def lost(self) -> list[int]:
        """Ranks whose connection is gone."""
        return [rank for rank, link in self._links.items() if link.closed]

    def broadcast(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)

    def close(self) -> None:
        for link in (*self._links.values(), *self._strangers):
            link.close()
        self._server.close()

    def _admit(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with suppress(OSError):
            while True:
                self._strangers.append(Connection(self._server.accept()[0]))
        for stranger in list(self._strangers):
            if not (messages := stranger.receive()):
                continue
            first, *later = messages
            self._strangers.remove(stranger)
            if not hmac.compare_digest(str(first.get("token")), self.offer.token):
                stranger.close()
                continue
            rank = int(first["rank"])
            self._links[rank] = stranger
            for message in later:
                yield rank, message


def connect(offer: Offer, rank: int) -> Connection | None:
    """Another rank's end, or None where rank 0 cannot be reached at any of its addresses."""
    for address in offer.addresses:
        with suppress(OSError):
            link = Connection(socket.create_connection((address, offer.port), CONNECT_SECONDS / len(offer.addresses)))
            link.send({"token": offer.token, "rank": rank})
            return link
    return None


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses of this host's interfaces, the host name's own first, loopback left out."""
    found: list[str] = []
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(address for address in dict.fromkeys(found) if not address.startswith("127."))
