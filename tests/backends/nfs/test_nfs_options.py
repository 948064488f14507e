"""The messages of the nfs backend about its options, as an operator sees them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsOptions

from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config


def options(**given: Any) -> NfsOptions:
    config = load_config({"backends": [{"name": "shared", "type": "nfs", **given}]})
    found = config.tiers[0].options
    assert isinstance(found, NfsOptions)
    return found


def problem(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    (only,) = caught.value.problems
    return only


def test_a_share_that_exists_or_whose_parent_does(tmp_path: Path) -> None:
    assert options(url=f"file://{tmp_path}").folder == tmp_path
    assert options(url=f"file://{tmp_path}/new/").folder == tmp_path / "new"
    assert not (tmp_path / "new").exists(), "validation makes nothing"


def test_a_missing_mount_is_named_with_the_cure(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/missing/kv"
    assert problem(url=url) == (
        f"backends.0.url: {url!r} is not valid: the parent folder {tmp_path}/missing does not exist; "
        "mount the share that should be there"
    )


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert problem(url=f"file://{tmp_path}/file").endswith("is a file; name a folder")


@pytest.mark.parametrize("url", ["file://", "file:// ", "file:///", "file:////", "file:///mnt/.."])
def test_a_url_without_a_folder_is_refused(url: str) -> None:
    found = problem(url=url)
    assert found.startswith(f"backends.0.url: {url!r} is not valid: ")
    assert found.endswith(("write its path, such as file:///mnt/kv", "name a folder for the objects alone"))


def test_a_path_is_refused_with_its_url_as_the_cure() -> None:
    assert "write file:///mnt/kv for a folder" in problem(url="/mnt/kv")


@pytest.mark.parametrize("url", ["http://host/kv", "zip://kv", "simplecache::s3://bucket"])
def test_other_protocols_are_refused_and_the_supported_ones_listed(url: str) -> None:
    assert "use one of file, s3, s3a, gs," in problem(url=url)


def test_a_bucket_must_be_named() -> None:
    assert "add a bucket, such as s3://bucket/prefix" in problem(url="s3://")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert problem(url="s3a://bucket").endswith("does not load: pip install 'offload-core[s3]'")


@pytest.mark.parametrize(
    ("storage_options", "place"),
    [
        ({"key": "hunter2"}, "key"),
        ({"secret": "hunter2"}, "secret"),
        ({"token": "hunter2"}, "token"),
        ({"password": "hunter2"}, "password"),
        ({"account_key": "hunter2"}, "account_key"),
        ({"connection_string": "hunter2"}, "connection_string"),
        ({"client_kwargs": {"aws_secret_access_key": "hunter2"}}, "client_kwargs.aws_secret_access_key"),
        ({"client_kwargs": {"aws_access_key_id": "hunter2"}}, "client_kwargs.aws_access_key_id"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "hunter2"}}, "s3_additional_kwargs.SSECustomerKey"),
        ({"list": [{"sas_token": "hunter2"}]}, "list.0.sas_token"),
        ({"endpoint_url": "https://user:hunter2@host"}, "endpoint_url"),
    ],
)
def test_credentials_are_refused_and_not_shown(storage_options: dict[str, Any], place: str) -> None:
    found = problem(url="s3://bucket", storage_options=storage_options)
    assert found.startswith(
        f"backends.0.storage_options.{place}: holds a credential; remove it from the configuration, which vLLM logs: "
    )
    assert "FSSPEC_S3_KEY" in found
    assert "hunter2" not in found


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    for url in ("sftp://user:hunter2@host/kv", "nonsense://user:hunter2@host"):
        found = problem(url=url)
        assert found.startswith("backends.0.url: holds a credential")
        assert "hunter2" not in found


def test_options_without_credentials_reach_fsspec() -> None:
    given = {
        "endpoint_url": "http://host:9000",
        "anon": True,
        "profile": "kv",
        "s3_additional_kwargs": {"SSEKMSKeyId": "an id", "ServerSideEncryption": "aws:kms"},
        "config_kwargs": {"read_timeout": 3},
    }
    assert options(url="s3://bucket/prefix/", storage_options=given).storage_options == given
    assert options(url="s3://bucket/prefix/").url == "s3://bucket/prefix"


def test_sizes_and_durations_have_units_and_limits() -> None:
    found = options(url="s3://bucket", part_size="64MiB", retry_seconds="500ms", lookup_cache_seconds=0)
    assert (found.part_size, found.retry_seconds, found.lookup_cache_seconds) == (64 * 1024**2, 0.5, 0)
    assert "part_size" in problem(url="s3://bucket", part_size="1MiB")
    assert "lookup_cache_seconds" in problem(url="s3://bucket", lookup_cache_seconds="2m")
