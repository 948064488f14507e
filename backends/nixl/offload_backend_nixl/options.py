"""The options of the ``nixl`` type."""

from __future__ import annotations

import importlib.util
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from offload_core.api import BackendOptions, Bytes, Folder, Seconds, check_folder

Plugin = Literal["POSIX", "GDS", "GDS_MT", "OBJ"]

_SECRET_PARAMS = ("access_key", "secret_key", "session_token")
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


class NixlOptions(BackendOptions):
    """Options of the ``nixl`` type."""

    credentials_cure: ClassVar[str] = (
        "credentials come from the environment, as AWS_… or as OFFLOAD_CORE_<TIER NAME>_ACCESS_KEY and _SECRET_KEY"
    )

    plugin: Plugin = Field(
        description="NIXL's storage plugin: POSIX for files, GDS or GDS_MT for files by GPUDirect Storage, OBJ for a "
        "bucket of an S3-compatible store"
    )
    path: Folder | None = Field(
        None, description="POSIX, GDS, GDS_MT: folder for the objects; created when its parent exists"
    )
    params: dict[str, str] = Field(
        default_factory=dict,
        description="parameters of the plugin, as NIXL documents them, such as bucket and endpoint_override of OBJ; "
        "no credentials",
    )
    prefix: str = Field("", description="OBJ: beginning of all object names, such as engines/kv; none by default")
    access_key: SecretStr | None = Field(
        None, description="OBJ: access key; without it, the usual sources of AWS's libraries are used"
    )
    secret_key: SecretStr | None = Field(None, description="OBJ: secret key of the access key")
    session_token: SecretStr | None = Field(None, description="OBJ: session token of temporary credentials")
    ring: Annotated[
        Bytes,
        Field(
            ge=1024**2,
            le=1024**4,
            description="memory that the engine and the child process share; no object may be larger, and it limits "
            "the transfers through it at the same time; the system gives pages when they are first used",
        ),
    ] = 256 * 1024**2
    transfer_timeout_seconds: Seconds = Field(
        30.0,
        ge=1,
        le=3600,
        description="seconds after which a request without an answer has failed; then the child process is killed, "
        "and the next request starts another",
    )

    @field_validator("params", mode="before")
    @classmethod
    def _params_are_texts(cls, params: Any) -> Any:
        """Accept numbers and booleans of YAML, because NIXL takes texts only."""
        if not isinstance(params, dict):
            return params
        return {name: _text(value) for name, value in params.items()}

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, prefix: str) -> str:
        if prefix and (not _PREFIX.fullmatch(prefix) or len(prefix) > 200):
            raise ValueError(
                f"{prefix!r} is no prefix of object names; use up to 200 of A-Z a-z 0-9 . _ - with single slashes "
                "between the parts, such as engines/kv"
            )
        return prefix

    @model_validator(mode="after")
    def _fit_together(self) -> NixlOptions:
        if self.plugin == "OBJ":
            self._check_bucket()
        else:
            self._check_files()
        return self

    def _check_bucket(self) -> None:
        if self.path is not None:
            raise ValueError(
                f"path: {self.path} is a folder, and the plugin OBJ keeps objects in a bucket; remove path, or use "
                "plugin: POSIX"
            )
        if not self.params.get("bucket"):
            raise ValueError("plugin OBJ needs the name of a bucket; add params: {bucket: NAME}")
        endpoint = self.params.get("endpoint_override", "").rpartition("@")[2]
        if endpoint and "://" not in self.params["endpoint_override"] and "scheme" not in self.params:
            raise ValueError(
                f"params.endpoint_override: {endpoint} has no scheme; write http://{endpoint} or https://{endpoint}"
            )
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("one of access_key and secret_key is missing; give both, or neither")
        if importlib.util.find_spec("botocore") is None:
            raise ValueError(
                "plugin OBJ needs the package botocore, because NIXL cannot delete objects; "
                "pip install 'offload-core[nixl]'"
            )

    def _check_files(self) -> None:
        given = [name for name in ("prefix", *_SECRET_PARAMS) if getattr(self, name)]
        if given:
            raise ValueError(f"{', '.join(given)}: only the plugin OBJ has it; remove it, or use plugin: OBJ")
        if self.path is None:
            raise ValueError(f"plugin {self.plugin} needs a folder; add path: /mnt/kv, for example")
        check_folder(self.path, "create it, or mount the file system that should be there")

    @property
    def keeps_files(self) -> bool:
        """``True`` if the objects are files in a folder."""
        return self.plugin != "OBJ"

    @property
    def moves_in_place(self) -> bool:
        """``True`` if an object may lie in several pieces of memory: content in the engine's, the rest in the ring.

        An object of a bucket must be one piece. GPUDirect Storage wants aligned ones.
        """
        return self.plugin == "POSIX"

    @property
    def place(self) -> str:
        """The place of the objects, for messages."""
        if self.keeps_files:
            return str(self.path)
        endpoint = self.params.get("endpoint_override")
        return f"bucket {self.params['bucket']}" + (f" at {endpoint}" if endpoint else "")

    def child_settings(self) -> dict[str, Any]:
        """The settings of the child process, with the credentials."""
        secrets = {name: getattr(self, name) for name in _SECRET_PARAMS}
        return {
            "plugin": self.plugin,
            "path": None if self.path is None else str(self.path),
            "params": self.params,
            "prefix": self.prefix,
            "credentials": {name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None},
            "deadline_seconds": self.transfer_timeout_seconds,
        }


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value
