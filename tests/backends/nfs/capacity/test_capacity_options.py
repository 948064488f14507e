"""The capacity options that are refused at start."""

from __future__ import annotations

import pydantic
import pytest
from offload_backend_nfs import NfsOptions


def test_no_capacity_where_files_cannot_be_created_exclusively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda protocol: object)  # as if its package were installed
    with pytest.raises(pydantic.ValidationError, match=r"no capacity can be kept on oci://.*use one of file, s3"):
        NfsOptions.model_validate({"url": "oci://bucket/kv", "capacity": "1GiB"})


def test_the_low_watermark_is_not_above_the_high_one() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"low_watermark 0\.95 is above high_watermark 0\.9; lower it"):
        NfsOptions.model_validate({"url": "memory://kv", "capacity": "1GiB", "low_watermark": 0.95})


def test_a_capacity_makes_the_backend_declare_a_limit() -> None:
    options = NfsOptions.model_validate({"url": "memory://kv", "capacity": "1GiB"})
    assert options.capacity == 1024**3
    assert (options.high_watermark, options.low_watermark) == (0.9, 0.8)
