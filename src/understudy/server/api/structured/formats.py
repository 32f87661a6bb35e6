r"""Formats of strings: a check of any text, and a pattern of texts that certainly have the format.

The pattern lets a format be combined with `pattern`, `minLength` and `maxLength`. It may miss rare texts (second 60,
for example), which only `enum` and `const` can ask for.
"""

from __future__ import annotations

import re
from datetime import date
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_YEAR = r"(?:20[0-9]{2}|[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    rf"|(?:0[13578]|1[02])-31)|{_LEAP}-02-29)"
)
_HOUR = r"(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*"
_UUID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_BYTE = r"(?:[0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = (
    rf"(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:){{1,7}}:|::(?:{_HEX}:){{0,6}}{_HEX}|::"
    rf"|(?:{_HEX}:){{1,3}}(?::{_HEX}){{1,4}}|::(?:[Ff]{{4}}:)?{_IPV4})"
)
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:[A-Za-z0-9._~-]+(?::[0-9]{{1,5}})?)(?:/{_PATH})?|[A-Za-z0-9]{_PATH})"
    rf"(?:\?{_PATH})?(?:#{_PATH})?"
)
_ANY_URI = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:[A-Za-z0-9._~!$&'()*+,;=:@%-]|\[[0-9A-Fa-f:.]+\])*(?=[/?#]|$)|(?!//))"
    r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
    r"(?:\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?"
    r"(?:#(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)


class Format(NamedTuple):
    """One format."""

    check: Callable[[str], bool]
    pattern: str
    """Matches a whole text."""
    example: str


def _matcher(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


_is_time = _matcher(_TIME)


def _is_date_time(text: str) -> bool:
    return len(text) > 11 and _is_date(text[:10]) and text[10] in "Tt" and _is_time(text[11:])


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        return not IPv6Address(text).scope_id
    except AddressValueError:
        return False


def _is_uri(text: str) -> bool:
    return _ANY_URI.fullmatch(text) is not None


FORMATS = {
    "date-time": Format(_is_date_time, rf"{_DAY}[Tt]{_TIME}", "2000-01-01T00:00:00Z"),
    "date": Format(_is_date, _DAY, "2000-01-01"),
    "time": Format(_is_time, _TIME, "00:00:00Z"),
    "email": Format(_matcher(_EMAIL), _EMAIL, "alpha@example.com"),
    "uuid": Format(_matcher(_UUID), _UUID, "00000000-0000-4000-8000-000000000000"),
    "uri": Format(_is_uri, _URI, "https://example.com/alpha"),
    "ipv4": Format(_is_ipv4, _IPV4, "192.0.2.1"),
    "ipv6": Format(_is_ipv6, _IPV6, "2001:db8::1"),
}
