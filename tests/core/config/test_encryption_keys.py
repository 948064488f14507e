"""Keys for encryption come from the environment, are checked at the start, and are never shown."""

from __future__ import annotations

import base64
import os
import sys
import traceback
from collections.abc import Mapping

import pytest

from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig

SECRETS = [bytes([number]) * 31 + b"\xfe" for number in range(3)]
BASE64 = [base64.b64encode(secret).decode() for secret in SECRETS]
DISK = {"name": "s3-west", "type": "cpu", "capacity": "1GiB", "encryption": "aes-256-gcm"}
VARIABLE = "OFFLOAD_CORE_S3_WEST_ENCRYPTION_KEYS"
ENV_OF = "the environment variable OFFLOAD_CORE_S3_WEST_ENCRYPTION_KEYS"


def load(keys: str | None, *entries: Mapping[str, object]) -> OffloadConfig:
    environ = {} if keys is None else {VARIABLE: keys}
    return load_config({"backends": list(entries or [DISK])}, environ=environ)


def problem(keys: str | None, *entries: Mapping[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(keys, *entries)
    told = "".join([repr(caught.value), *traceback.format_exception(caught.value)])
    for part in [*BASE64, *(secret.hex() for secret in SECRETS)]:
        assert part[:20] not in told
    (only,) = caught.value.problems
    return str(only)


@pytest.mark.parametrize(
    "text",
    [
        f"2026-11:{BASE64[0]},2026-05:{BASE64[1]}",
        f" 2026-11:{SECRETS[0].hex()} , 2026-05:{SECRETS[1].hex().upper()}\n",
    ],
    ids=["base64", "hexadecimal, with spaces"],
)
def test_keys_are_read_in_their_order_and_not_shown(text: str) -> None:
    config = load(text)
    ring = config.tiers[0].encryption_keys
    assert ring is not None
    assert [(key.id, key.secret) for key in ring.keys] == [("2026-11", SECRETS[0]), ("2026-05", SECRETS[1])]
    for shown in (repr(config), str(config.tiers[0]), repr(ring), repr(config.settings.model_dump())):
        assert BASE64[0][:20] not in shown
        assert repr(SECRETS[0])[2:20] not in shown


def test_a_tier_without_encryption_has_no_keys() -> None:
    assert load(None, {**DISK, "encryption": "none"}).tiers[0].encryption_keys is None


def test_a_missing_key_names_its_variable_and_a_way_to_make_one() -> None:
    for text in (None, ""):
        assert problem(text) == (
            f"backends.0.encryption: there is no key; set {ENV_OF} to ID:KEY, for example "
            '"2026-11:$(openssl rand -base64 32)"'
        )


def test_keys_without_encryption_are_refused_rather_than_plain_objects_stored() -> None:
    plain = {key: value for key, value in DISK.items() if key != "encryption"}
    for entry in (plain, {**plain, "encryption": "none"}):
        assert problem(f"a:{BASE64[0]}", entry) == (
            f"backends.0.encryption: {ENV_OF} holds keys, but objects would be stored without encryption; set "
            "encryption to aes-256-gcm, or remove the variable"
        )


def test_keys_in_the_configuration_are_refused() -> None:
    assert problem(f"a:{BASE64[0]}", {**DISK, "encryption_keys": f"a:{BASE64[0]}"}) == (
        "backends.0.encryption_keys: a secret must not be in the configuration, which vLLM logs; remove it and set "
        f"{ENV_OF}"
    )


def test_an_unknown_cipher_is_refused() -> None:
    assert "'none' or 'aes-256-gcm'" in problem(f"a:{BASE64[0]}", {**DISK, "encryption": "aes"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BASE64[0], "entry 1 has no colon; write ID:KEY"),
        (f"a:{BASE64[0]},", "entry 2 has no colon"),
        (f"May_26:{BASE64[0]}", "the id of entry 1 is not valid; use 1 to 16 characters of a-z, 0-9 and -"),
        (f"{'a' * 17}:{BASE64[0]}", "the id of entry 1 is not valid"),
        (f":{BASE64[0]}", "the id of entry 1 is not valid"),
        (f"a:{BASE64[0]},a:{BASE64[1]}", "the id 'a' stands there twice; give each key an id of its own"),
        (f"a:{BASE64[0]},b:{BASE64[0]}", "the key 'b' stands there twice, under two ids; remove one"),
        (
            f"a:{base64.b64encode(SECRETS[0][:31]).decode()}",
            "the key 'a' has 31 bytes in place of 32; a key is 32 random bytes in base64",
        ),
        (f"a:{BASE64[0][:-2]}", "the key 'a' is neither base64 nor hexadecimal digits"),
        (f"a:{SECRETS[0].hex()[:-2]}", "the key 'a' "),
        ("a:correct horse battery staple", "the key 'a' is neither base64 nor hexadecimal digits"),
        ("a:", "the key 'a' has 0 bytes in place of 32"),
    ],
)
def test_bad_keys_are_refused_with_the_cure_and_without_the_key(text: str, reason: str) -> None:
    found = problem(text)
    assert found.startswith(f"backends.0.encryption: {ENV_OF} is not valid: {reason}")


def test_two_tiers_of_one_variable_are_refused_only_if_both_encrypt() -> None:
    other = {**DISK, "name": "s3.west"}
    found = problem(f"a:{BASE64[0]}", DISK, other)
    assert found.startswith("backends.1.name: 's3.west' would read its secret 'encryption_keys' from")


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "offload_core.objects.encryption", None)
    found = problem(f"a:{BASE64[0]}")
    assert "`cryptography` is not installed; install offload-core with its extra" in found
    assert "offload-core[encryption]" in found
    assert load(None, {**DISK, "encryption": "none"}).tiers, "the package is not needed without encryption"


def test_a_random_key_from_openssl_is_a_key() -> None:
    assert load(f"2026-11:{base64.b64encode(os.urandom(32)).decode()}\n").tiers[0].encryption_keys is not None
