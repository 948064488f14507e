"""Recognition of credentials by the names of their keys, in URLs and in HTTP headers.

vLLM logs its whole configuration, and messages quote bad values. So the core refuses a configuration with a credential
before any other check, and takes credentials out of all other messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

MASK = "**********"

_SECRET_WORD = re.compile(
    "apikey|auth|authorization|bearer|cookies?|creds?|credentials?|pass|passphrase|passwd|password|pwd|sas|secrets?|"
    "sig|signature|tokens?"
)
_SECRET_LAST_WORD = re.compile("jwt|keys?|otp|pin|session")
"""Words that mean a credential only at the end: ``account_key``, but not ``key_prefix``."""
_SECRET_PART = re.compile(
    "password|passwd|passphrase|apikey|accesskey|secretkey|privatekey|accountkey|sharedkey|customerkey|authtoken|"
    "accesstoken|sessiontoken|sessionkey|connectionstring|authorization|credential"
)
_HARMLESS_LAST_WORD = re.compile(
    "algorithm|count|dir|endpoint|expiry|file|folder|kwargs|length|limit|method|mode|name|options|path|prefix|"
    "provider|region|seconds|service|size|timeout|ttl|type|url|variable|version"
)
"""Last words of names that tell about a credential, such as ``token_file`` or ``signature_version``."""

_WORD_BORDERS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_PARAMETER = re.compile(r"(?P<before>[?&;#])(?P<name>[^=?&;#\s]+)=(?P<value>[^&;#\s'\"]+)")
_HEADER = re.compile(
    r"\b(?P<name>(?:proxy-)?authorization|cookie|set-cookie|x-[a-z-]{0,40}(?:key|token))\s*[:=]\s*(?P<value>\S.*)",
    re.IGNORECASE,
)
_SCHEME_OF_AUTHORIZATION = re.compile(r"\b(?P<name>Bearer|Basic|AWS4-HMAC-SHA256)\s+(?P<value>[^\s'\"]{8,})")
_UNBROKEN_TEXT = re.compile(r"[^\s'\"]+")


def is_credential_name(name: str) -> bool:
    """Return whether a key, an HTTP header or a query parameter of this name holds a credential.

    The name may be written in any way: ``sessionToken``, ``x-api-key``, ``AWS_SECRET_ACCESS_KEY``.
    """
    words = [word.lower() for word in _WORD_BORDERS.split(unquote(name)) if word]
    if not words or _HARMLESS_LAST_WORD.fullmatch(words[-1]):
        return False
    if _SECRET_LAST_WORD.fullmatch(words[-1]) or any(map(_SECRET_WORD.fullmatch, words)):
        return True
    return bool(_SECRET_PART.search("".join(words)))


def holds_credential(text: str) -> bool:
    """Return whether a value has a credential inside: in a URL's user info or query, or as an HTTP header."""
    if any(is_credential_name(match["name"]) for match in _PARAMETER.finditer(text)):
        return True
    if _HEADER.search(text) or _SCHEME_OF_AUTHORIZATION.match(text):
        return True
    scheme, separator, rest = text.partition("://")
    userinfo, at, _ = rest.rpartition("@")
    if not separator or not at or scheme.lower() == "file":
        return False
    return ":" in userinfo or scheme.lower().endswith(("http", "https"))


def credentials_in(value: object, place: str, harmless_names: Iterable[str] = ()) -> Iterator[str]:
    """Yield the dotted paths under ``value`` that hold credentials, and never a credential itself.

    Args:
        place: the path of ``value``.
        harmless_names: keys of ``value`` that hold no credential in spite of their names.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            below = f"{place}.{without_credentials(str(key))}".lstrip(".")
            if key not in harmless_names and is_credential_name(str(key)) and _is_filled(inner):
                yield below
            elif holds_credential(str(key)):
                yield place or "the configuration"
            else:
                yield from credentials_in(inner, below)
        if "value" in value and any(_names_credential(value.get(key)) for key in ("name", "key", "header")):
            yield f"{place}.value".lstrip(".")
    elif isinstance(value, list | tuple):
        if len(value) == 2 and _names_credential(value[0]) and isinstance(value[1], str):
            yield f"{place}.1".lstrip(".")
        for index, inner in enumerate(value):
            yield from credentials_in(inner, f"{place}.{index}".lstrip("."))
    elif isinstance(value, str) and holds_credential(value):
        yield place


def without_credentials(text: str) -> str:
    """Return a message with a mask in place of each credential in a URL or an HTTP header."""

    def mask_parameter(match: re.Match[str]) -> str:
        value = MASK if is_credential_name(match["name"]) else match["value"]
        return f"{match['before']}{match['name']}={value}"

    def mask_userinfo(match: re.Match[str]) -> str:
        userinfo, _, host = match[0].rpartition("@")
        return f"{MASK}@{host}" if ":" in userinfo and host else match[0]

    text = _PARAMETER.sub(mask_parameter, text)
    text = _SCHEME_OF_AUTHORIZATION.sub(rf"\g<name> {MASK}", text)
    return _UNBROKEN_TEXT.sub(mask_userinfo, text)


def _names_credential(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 64 and is_credential_name(value)


def _is_filled(value: object) -> bool:
    """Return whether there is anything in ``value`` that could be a credential."""
    if isinstance(value, Mapping):
        return any(map(_is_filled, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_filled, value))
    return value not in (None, "", b"") and not isinstance(value, bool)
