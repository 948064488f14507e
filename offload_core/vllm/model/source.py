"""The identity of the model itself: its files by their content, or the name that the operator gives it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from offload_core.api.errors import ConfigError
from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import Json, files_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def model_source(vllm_config: VllmConfig, given_name: str | None) -> dict[str, Json]:
    """Return the facts that tell one model from another.

    Args:
        given_name: the operator's ``model_identity``. It stands for all files, so none is read.

    Raises:
        ConfigError: a file of the model cannot be read.
    """
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    identity: dict[str, Json] = {"load_format": load_format}
    if load_format == "dummy":
        identity["dummy_seed"] = model.seed
    if given_name is not None:
        return {**identity, "model_identity": given_name}
    if address := getattr(model, "model_weights", ""):
        identity["weights_address"] = address
        _warn_unread(address)
    try:
        return {**identity, **_Sources(vllm_config).of_all()}
    except OSError as error:
        raise ConfigError(
            [
                f"the model cannot be identified by its files: {error}; let the engine's user read it, or take it out "
                "of the model's folder, or set model_identity, which stands for all files"
            ]
        ) from error


class _Sources:
    """The folders from which an engine loads its model."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._digests = FileDigests.of_user()
        download_folder = getattr(vllm_config.load_config, "download_dir", None)
        self._hub_caches = {Path(constants.HF_HUB_CACHE), Path(download_folder or constants.HF_HUB_CACHE)}

    def of_all(self) -> dict[str, Json]:
        """Return the identity of the model, and of all others that take part.

        These are a draft model, repositories with the model's code, and the tokenizer of a multimodal model. Some
        of these models tokenize texts on their own.
        """
        model: Any = self._vllm_config.model_config
        identity = self._of(model.model, model.revision, getattr(model.hf_config, "_commit_hash", None))
        draft = getattr(getattr(self._vllm_config, "speculative_config", None), "draft_model_config", None)
        if draft is not None and draft.model != model.model:
            identity["draft"] = self._of(draft.model, draft.revision)
        if model.is_multimodal_model and model.tokenizer != model.model:
            identity["tokenizer"] = self._of(model.tokenizer, model.tokenizer_revision)
        for repository in sorted(set(_code_repositories(model.hf_config))):
            identity[f"code of {repository}"] = self._of(repository, model.code_revision)
        return identity

    def _of(self, name: str, revision: str | None, commit: str | None = None) -> dict[str, Json]:
        path = Path(name)
        if path.is_dir():
            return {"files": files_identity(path, self._digests)}
        if path.is_file():
            return {"file": path.name, "files": files_identity(path.parent, self._digests)}
        snapshots = [_snapshot(cache, name, commit or revision or "main") for cache in sorted(self._hub_caches)]
        files: list[Json] = [files_identity(folder, self._digests) for folder in snapshots if folder.is_dir()]
        if not files:
            _warn_unread(name)
        return {"name": name, "revision": revision, "commit": commit, "snapshots": files}


def _snapshot(hub_cache: Path, name: str, version: str) -> Path:
    """Return the folder of a version, a commit or a branch, in a cache of the hub's client."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    branch = repository / "refs" / version
    return repository / "snapshots" / (branch.read_text().strip() if branch.is_file() else version)


def _code_repositories(hf_config: Any) -> Iterator[str]:
    """Yield the other repositories in ``auto_map``; an entry is ``repository--module.Class``."""
    for entry in (getattr(hf_config, "auto_map", None) or {}).values():
        for target in entry if isinstance(entry, list | tuple) else [entry]:
            if isinstance(target, str) and "--" in target:
                yield target.split("--")[0]


def _warn_unread(name: str) -> None:
    logger.warning(
        "the files of %r are not on this host, so only the name identifies them; if they change under this name, the "
        "cache serves wrong text; set model_identity to a text that changes with them",
        name,
    )
