"""Secrets come from the environment only, and nothing that is printed ever shows one."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, Secret, SecretBytes, SecretStr, model_validator
from typing_extensions import TypedDict

from offload_core.api.backend import BackendType
from offload_core.api.errors import ConfigError
from offload_core.api.options import BackendOptions
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadConfig
from offload_core.config.secrets import variable_name
from offload_core.plugins.registry import PluginRegistry
from tests.support.memory_backend import MemoryBackend
from tests.support.random_examples import examples

CANARY = "hunter2-canary"


class Limits(BackendOptions):
    reads: Annotated[int, Field(ge=1, description="at once")] = 1


class VaultOptions(BackendOptions):
    url: str = Field("here", description="where; 'echo' makes the check below tell all it knows")
    limits: Limits = Field(Limits(), description="nested")
    token: Annotated[SecretStr, Field(min_length=8, description="what opens it")]
    password: SecretStr | None = Field(None, description="another way to open it")
    certificate: SecretBytes | None = Field(None, description="what it shows", alias="cert")

    @model_validator(mode="after")
    def _tell_tale(self) -> VaultOptions:
        if self.url == "echo":
            raise ValueError(f"{self.token.get_secret_value()} does not open {self.url!r}")
        if self.url == "quote":
            raise ValueError(f"{self.token.get_secret_value()!r} does not open {self.url!r}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _tell_all(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("url") == "dump":
            raise ValueError(json.dumps(data, default=str))
        return data


class PlainOptions(BackendOptions):
    size: int = Field(1, description="boxes")


REGISTRY = PluginRegistry(
    [BackendType("vault", MemoryBackend, VaultOptions), BackendType("plain", MemoryBackend, PlainOptions)], []
)
VAULT = {"name": "s3-west", "type": "vault"}
SET = {"OFFLOAD_CORE_S3_WEST_TOKEN": CANARY}


def load(*backends: object, environ: Mapping[str, str] = SET, **keys: object) -> OffloadConfig:
    return load_config({"backends": list(backends), **keys}, REGISTRY, environ)


def problems(*backends: object, environ: Mapping[str, str] = SET, **keys: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*backends, environ=environ, **keys)
    assert CANARY not in told(caught.value)
    return list(caught.value.problems)


def told(error: ConfigError) -> str:
    """Everything that a log could show of the error."""
    return "".join([str(error), repr(error), repr(error.problems), error.source, *traceback.format_exception(error)])


def test_secrets_are_read_from_the_environment() -> None:
    environ = {**SET, "OFFLOAD_CORE_S3_WEST_CERTIFICATE": "abc é", "OFFLOAD_CORE_S3_WEST_URL": "not a secret"}
    options = load(VAULT, environ=environ).tiers[0].options
    assert isinstance(options, VaultOptions)
    assert options.token.get_secret_value() == CANARY
    assert options.certificate is not None
    assert options.certificate.get_secret_value() == "abc é".encode()
    assert (options.password, options.url) == (None, "here")


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_CORE_S3_WEST_TOKEN", CANARY)
    assert load_config({"backends": [VAULT]}, REGISTRY).tiers


def test_a_valid_configuration_does_not_show_its_secrets() -> None:
    config = load(VAULT)
    assert CANARY not in repr(config) + str(config) + repr(config.tiers[0].options.model_dump())


@pytest.mark.parametrize("environ", [{}, {"OFFLOAD_CORE_S3_WEST_TOKEN": ""}], ids=["not set", "empty"])
def test_a_missing_secret_names_its_variable(environ: dict[str, str]) -> None:
    assert problems(VAULT, environ=environ) == [
        "backends.0.token: missing; set the environment variable OFFLOAD_CORE_S3_WEST_TOKEN"
    ]


@pytest.mark.parametrize("environ", [{}, SET], ids=["not set", "set"])
@pytest.mark.parametrize("value", [CANARY, 12345, [CANARY], {CANARY: CANARY}, None, SecretStr(CANARY)], ids=repr)
def test_a_secret_in_the_configuration_is_refused_with_its_variable(environ: dict[str, str], value: object) -> None:
    (problem,) = problems({**VAULT, "token": value}, environ=environ)
    assert problem == (
        "backends.0.token: a secret must not be in the configuration, which vLLM logs; remove it and set the "
        "environment variable OFFLOAD_CORE_S3_WEST_TOKEN"
    )


@pytest.mark.parametrize("key", ["cert", "certificate"])
def test_a_secret_is_refused_under_its_alias_as_well(key: str) -> None:
    (problem,) = problems({**VAULT, key: CANARY})
    assert problem.startswith(f"backends.0.{key}: a secret must not be in the configuration")
    assert problem.endswith("OFFLOAD_CORE_S3_WEST_CERTIFICATE")


def test_a_bad_secret_is_reported_without_its_value() -> None:
    assert problems(VAULT, environ={"OFFLOAD_CORE_S3_WEST_TOKEN": "short-7"}) == [
        "backends.0.token: the value of the environment variable OFFLOAD_CORE_S3_WEST_TOKEN is not valid: Value should "
        "have at least 8 items after validation, not 7"
    ]


def test_a_message_of_a_plugin_is_shown_without_the_secrets() -> None:
    assert problems({**VAULT, "url": "echo"}) == ["backends.0: ********** does not open 'echo'"]
    odd = {"OFFLOAD_CORE_S3_WEST_TOKEN": "hunter2-\\ é \n"}
    assert problems({**VAULT, "url": "quote"}, environ=odd) == ["backends.0: '**********' does not open 'quote'"]
    assert problems({**VAULT, "url": "dump"}, environ=odd) == ['backends.0: {"url": "dump", "token": "**********"}']


def test_a_tier_without_a_name_is_the_only_problem_of_its_secrets() -> None:
    assert problems({"type": "vault"}) == ["backends.0.name: missing; add it"]
    named, refused = problems({"type": "vault", "token": CANARY, "name": 5})
    assert named == "backends.0.name: 5 is not valid: Input should be a valid string"
    assert refused.endswith("set the environment variable OFFLOAD_CORE_<TIER NAME>_TOKEN")


def test_an_unknown_key_within_an_option_is_named_beside_those_of_the_option() -> None:
    assert problems({**VAULT, "limits": {"raeds": [CANARY], "reads": 0}}) == [
        "backends.0.limits.reads: 0 is not valid: Input should be greater than or equal to 1",
        "backends.0.limits.raeds: unknown key (did you mean 'reads'?); valid keys: reads",
    ]


def test_a_misspelt_secret_is_sent_to_the_environment() -> None:
    (problem,) = problems({**VAULT, "tokn": CANARY})
    assert problem == (
        "backends.0.tokn: unknown key (did you mean the secret 'token'? set the environment variable "
        "OFFLOAD_CORE_S3_WEST_TOKEN); valid keys: " + ", ".join(sorted({*BackendConfig.model_fields, "limits", "url"}))
    )


def test_variables_are_upper_case_with_underscores() -> None:
    assert variable_name("s3.west-1 é", "access_key") == "OFFLOAD_CORE_S3_WEST_1___ACCESS_KEY"


def test_two_tiers_with_one_variable_are_refused() -> None:
    assert problems(VAULT, {**VAULT, "name": "S3_west"}, {"name": "s3.west", "type": "plain"}) == [
        f"backends.1.name: 'S3_west' would read its secret {field!r} from OFFLOAD_CORE_S3_WEST_{field.upper()}, as "
        f"'s3-west' does its {field!r}; rename one of the two"
        for field in ("token", "password", "certificate")
    ]


def test_two_tiers_of_one_name_are_one_problem_each() -> None:
    assert [problem.split(":")[0] for problem in problems(VAULT, VAULT)] == ["backends.0.name", "backends.1.name"]


class Account(BaseModel):
    key: SecretStr


class Place(TypedDict):
    key: SecretStr


@pytest.mark.parametrize(
    "hidden",
    [
        Account,
        list[SecretStr],
        dict[str, Account] | None,
        Place,
        Secret[str],
        SecretStr | int,
        Annotated[list[Annotated[Account, "x"]], "y"],
    ],
    ids=str,
)
def test_a_type_with_a_secret_inside_an_option_is_refused(hidden: Any) -> None:
    options = type("Hiding", (BackendOptions,), {"__annotations__": {"account": hidden}})
    registry = PluginRegistry([BackendType("hiding", MemoryBackend, options)], [])
    backend = {"name": "a", "type": "hiding", "account": {"key": CANARY, CANARY: [CANARY]}}
    with pytest.raises(ConfigError) as caught:
        load_config({"backends": [backend]}, registry, {})
    assert CANARY not in told(caught.value)
    (problem,) = caught.value.problems
    assert problem.startswith("backends.0.type: 'hiding' cannot be used: its option 'account' has a secret inside")


# Every kind of problem, with the canary where no message may show it: in a secret field, under an unknown key, or
# somewhere within a list or a mapping that stands in a wrong place. Not with a plugin that itself prints all its input
# ("dump"): the core knows its secrets, and takes these out, but not what stands under unknown keys.
CANARIES = st.recursive(
    st.just(CANARY),
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.fixed_dictionaries({"key": inner}),
    max_leaves=3,
)
NESTED = CANARIES.filter(lambda value: not isinstance(value, str))
WRONG = st.sampled_from([None, True, -1, 0.5, "wrong", "", "echo", "quote"]) | NESTED
NAMES = st.sampled_from(["s3-west", "S3.west", "other", "", None, 7])
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES | NESTED,
        "type": st.sampled_from(["vault", "vault", "plain", "vlt", "", None]) | NESTED,
        "load_weight": WRONG,
        "io_threads": WRONG,
        "load_timeout_seconds": WRONG,
        "url": WRONG,
        "limits": WRONG | st.fixed_dictionaries({}, optional={"reads": WRONG, "unknown": CANARIES}),
        "size": WRONG,
        "token": CANARIES,
        "tokn": CANARIES,
        "password": CANARIES,
        "cert": CANARIES,
    },
)
BACKENDS = st.lists(ENTRY | CANARIES, max_size=3) | st.fixed_dictionaries({"west": ENTRY}) | CANARIES
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "backends": BACKENDS,
        "hybrid_chunk_size": WRONG,
        "offload_prompt_only": WRONG,
        "staging_bytes": WRONG,
        "load_timeout_seconds": WRONG,
        "tokens": CANARIES,
        "backend": BACKENDS,
    },
)
ENVIRON = st.fixed_dictionaries(
    {}, optional={f"OFFLOAD_CORE_{name}_TOKEN": st.just(CANARY) for name in ("S3_WEST", "OTHER")}
)


@examples(600, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(keys=KEYS, from_file=st.none() | KEYS, environ=ENVIRON)
def test_no_problem_shows_a_secret(
    tmp_path: Path, keys: dict[str, Any], from_file: dict[str, Any] | None, environ: dict[str, str]
) -> None:
    if from_file is not None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(from_file))
        keys = {**keys, "config_file": str(path)}
    assert CANARY not in shown(keys, environ)


def shown(keys: dict[str, Any], environ: Mapping[str, str]) -> str:
    try:
        return repr(load_config(keys, REGISTRY, environ))
    except ConfigError as error:
        return told(error)
