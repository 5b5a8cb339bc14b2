"""Load the images and audio in messages as bytes, from the request itself or from hosts that the
operator allows. The engine's process decodes the bytes."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx2

from foretoken.errors import InputError, format_value, log_error_kind
from foretoken.media.data_urls import decode_base64, decode_data_url, is_data_url
from foretoken.server.api.errors import BadRequestError
from foretoken.server.process.messages import Prompt, is_chat
from foretoken.text.messages import MEDIA_PART_KEYS, get_parts

MAX_MEDIA_FILES = 32  # images and audio files per request
FETCH_TIMEOUT_SECONDS = 20.0  # per file
MAX_REDIRECTS = 3
LABELS = {"image": "images", "audio": "audio"}
MEDIA_ROLES = ("user", "tool")


def _parse_networks(names: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(name) for name in names.split()]


# IANA's global unicast space without its special-purpose blocks. `is_global` differs between Python
# versions, and is true for IPv4-compatible, translated, site-local and unallocated addresses
UNICAST_NETWORKS = _parse_networks("0.0.0.0/1 128.0.0.0/2 192.0.0.0/3 2000::/3")
SPECIAL_NETWORKS = _parse_networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
    "168.63.129.16/32 "  # host services of Azure's virtual machines
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20"  # with Teredo and 6to4, which embed IPv4
)
ISATAP_MARKER = 0x5EFE  # precedes an embedded IPv4 address; the "universal" bit may also be set


@dataclass(frozen=True, slots=True)
class MediaLoader:
    """Loads the images and audio files of requests.

    Attributes:
        hosts: Names of the hosts from which files may be fetched.
        max_bytes: Maximum bytes per file.
    """

    hosts: tuple[str, ...] = ()
    max_bytes: int = 25_000_000

    async def load(
        self, prompts: Sequence[Prompt], kinds: Sequence[str], field: str | None
    ) -> list[Prompt]:
        """Replace the images and audio in the prompts' messages by bytes, and return the prompts.

        Args:
            prompts: The request's prompts.
            kinds: Kinds of media that the model supports: "image", "audio" or both.
            field: The request's field that holds the prompts, for error messages.

        Raises:
            BadRequestError: The request has too many files, or a file is too large, cannot be
                fetched, is in a message whose role cannot have files, or is of a kind that the
                model does not support.
        """
        chats = [prompt for prompt in prompts if is_chat(prompt)]
        media = [
            (f"message {i}, part {j}", turn, part)
            for chat in chats
            for i, turn in enumerate(chat)
            for j, part in enumerate(cast(list[dict[str, Any]], get_parts(turn)))
            if part["type"] in MEDIA_PART_KEYS
        ]
        if len(media) > MAX_MEDIA_FILES:
            problem = (
                f"the request has {len(media)} images and audio files, at most {MAX_MEDIA_FILES} "
                "are allowed"
            )
            raise BadRequestError(problem, field)
        for place, turn, part in media:
            _require_supported(place, turn, part["type"], kinds, field)
        try:
            files = await asyncio.gather(
                *(self._load_file(place, part) for place, _, part in media)
            )
        except InputError as error:
            raise BadRequestError(str(error), field) from None
        for (_, _, part), file in zip(media, files, strict=True):
            part[part["type"]] = file
        return list(prompts)

    async def _load_file(self, place: str, part: dict[str, Any]) -> bytes:
        """Return the bytes of the image or audio file in a part of a message. `place`: the part's
        location. Raises InputError if the file cannot be loaded or exceeds `max_bytes`."""
        source: str = part[part["type"]]
        if source[:8].lower().startswith(("http://", "https://")):
            return await self._fetch(source, place)
        if is_data_url(source):
            file = decode_data_url(source, place)
        elif part["type"] == "audio":
            file = decode_base64(source, place)
        else:
            raise InputError(f"{place} is {format_value(source)}; give a data URL")
        if len(file) > self.max_bytes:
            raise InputError(
                f"{place} has {len(file)} bytes, at most {self.max_bytes} are allowed; send a "
                "smaller file"
            )
        return file

    async def _fetch(self, url: str, place: str) -> bytes:
        """Return the bytes of the file at a URL, following redirects. Raises InputError if the file
        cannot be fetched."""
        try:
            async with (
                asyncio.timeout(FETCH_TIMEOUT_SECONDS),
                httpx2.AsyncClient(trust_env=False, timeout=FETCH_TIMEOUT_SECONDS) as client,
            ):
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await self._request_file(client, url, place)
                    if isinstance(answer, bytes):
                        return answer
                    url = answer
        except TimeoutError:
            raise InputError(
                f"{place} was not fetched within {FETCH_TIMEOUT_SECONDS:g} s; send the file "
                "itself, as a data URL"
            ) from None
        except InputError:
            raise
        except Exception as error:  # hosts may answer anything
            raise InputError(
                f"{place} cannot be fetched ({log_error_kind(error)}); send the file itself, as a "
                "data URL"
            ) from None
        raise InputError(
            f"{place} is redirected more than {MAX_REDIRECTS} times; send the file itself, as a "
            "data URL"
        )

    async def _request_file(self, client: httpx2.AsyncClient, url: str, place: str) -> bytes | str:
        """Request a URL; return the file's bytes, or the URL to which the host redirects. Raises
        InputError if the host is not allowed or the file is too large."""
        address = httpx2.URL(url)
        if address.host not in self.hosts or address.scheme not in ("http", "https"):
            allowed = f"use {' or '.join(self.hosts)}" if self.hosts else "send a data URL"
            raise InputError(f"{place} is on a host that is not allowed here; {allowed}")
        if address.port is not None and not 0 < address.port < 2**16:
            raise InputError(f"{place} is on port {address.port}; give a port from 1 to 65535")
        # connect to the checked address: a second DNS look-up may return another address
        chosen = address.copy_with(host=await _resolve_public_address(address, place))
        headers = {"Host": address.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        request = client.build_request(
            "GET", chosen, headers=headers, extensions={"sni_hostname": address.host}
        )
        answer = await client.send(request, stream=True)
        try:
            if answer.has_redirect_location:
                return str(address.join(answer.headers["location"]))
            if answer.status_code != 200:
                raise InputError(
                    f"{place} cannot be fetched (status {answer.status_code}); send the file "
                    "itself, as a data URL"
                )
            file = bytearray()
            async for piece in answer.aiter_raw():
                file += piece
                if len(file) > self.max_bytes:
                    raise InputError(
                        f"{place} has more than {self.max_bytes} bytes; send a smaller file"
                    )
            return bytes(file)
        finally:
            await answer.aclose()


def _require_supported(
    place: str, turn: dict[str, Any], kind: str, kinds: Sequence[str], field: str | None
) -> None:
    """Raise BadRequestError if the model does not support an image or audio part, or if the part's
    message has a role other than "user" and "tool". `place`: the part's location."""
    if not kinds:
        problem = f"this model is served for text only; leave {LABELS[kind]} out, or serve a model "
        problem += f"that takes {LABELS[kind]}, with --runtime transformers"
        raise BadRequestError(problem, field)
    if kind not in kinds:
        supported = " and ".join(LABELS[each] for each in kinds)
        problem = f"this model takes text and {supported}, not {LABELS[kind]}"
        raise BadRequestError(f"{problem}; leave {LABELS[kind]} out", field)
    if turn.get("role") not in MEDIA_ROLES:
        problem = f"{place} has the role {format_value(turn.get('role'))}"
        raise BadRequestError(
            f"{problem}; send images and audio in messages of the role 'user' or 'tool'", field
        )


async def _resolve_public_address(address: httpx2.URL, place: str) -> str:
    """Return an IP address of a URL's host. Raises InputError if any address of the host is not
    public."""
    port = address.port or {"http": 80, "https": 443}[address.scheme]
    loop = asyncio.get_running_loop()
    resolved = await loop.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)
    numbers = [str(each[4][0]) for each in resolved]
    if not all(map(is_public, numbers)):
        problem = f"{place} is on a private or reserved network"
        raise InputError(f"{problem}, which is not allowed; send the file itself, as a data URL")
    return numbers[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is global unicast and does not embed an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if int(ip) >> 32 & 0xFDFF_FFFF == ISATAP_MARKER or any(
        ip in network for network in SPECIAL_NETWORKS
    ):
        return False
    return any(ip in network for network in UNICAST_NETWORKS)
