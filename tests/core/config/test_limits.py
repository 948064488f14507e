"""Limits: one table gives the global keys, the keys of a tier, and the values in force."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from offload_core.config.limits import LimitOverrides, Limits
from offload_core.config.model import BackendConfig, OffloadSettings

ENGINE_ONLY = {"lookup_grace_seconds", "shutdown_timeout_seconds"}


def test_every_limit_is_a_global_key_with_the_default_and_text_of_its_row() -> None:
    for name, row in Limits.model_fields.items():
        key = OffloadSettings.model_fields[name]
        assert (key.default, key.description) == (row.default, row.description)
    assert OffloadSettings.model_validate({"backends": [{"name": "a", "type": "b"}]}).limits == Limits()


def test_every_limit_but_the_engines_own_is_a_key_of_a_tier() -> None:
    assert set(LimitOverrides.model_fields) == set(Limits.model_fields) - ENGINE_ONLY
    for name, override in LimitOverrides.model_fields.items():
        assert BackendConfig.model_fields[name].default is None
        assert override.description == Limits.model_fields[name].description


@pytest.mark.parametrize("name", LimitOverrides.model_fields)
def test_a_tiers_own_limit_replaces_the_global_one_and_no_other(name: str) -> None:
    everywhere = Limits.model_validate({name: 7})
    own = BackendConfig.model_validate({"name": "a", "type": "b", name: 3})
    assert everywhere.overridden_by(own) == Limits.model_validate({name: 3})
    assert everywhere.overridden_by(BackendConfig(name="a", type="b")) == everywhere


@pytest.mark.parametrize("name", LimitOverrides.model_fields)
def test_a_tier_has_the_bounds_of_the_global_key(name: str) -> None:
    for value in (0, -1, True, float("inf"), "soon"):
        refused = []
        for model, others in ((Limits, {}), (BackendConfig, {"name": "a", "type": "b"})):
            try:
                model.model_validate({**others, name: value})
            except ValidationError as error:
                refused.append([detail["type"] for detail in error.errors()])
        assert len(refused) in (0, 2)
        assert refused[:1] == refused[1:]


def test_a_load_may_take_its_base_and_a_share_for_each_mib() -> None:
    limits = Limits(load_timeout_seconds=3, load_timeout_seconds_per_mib=0.5)
    assert limits.load_seconds(4 << 20) == 5
    assert Limits(open_timeout_seconds=99).longest_call_seconds == 99
