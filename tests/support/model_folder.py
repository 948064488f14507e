"""Write a model folder in the Hugging Face layout from a config and parameters, all at once or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
FIRST_WORD_ID = len(SPECIAL_TOKENS)
MATRIX_STD = 0.15
NORM_STD = 0.05
DTYPES = ("float32", "bfloat16")

_MARKER = "tiny-model.json"
_FORMAT = 3


@dataclass(frozen=True)
class Parameter:
    """One stored tensor: its name, its shape and how it is drawn.

    Kinds: ``matrix`` normal(0, 0.15); ``tied`` an embedding that is also the output head, small enough that
    the head does not just repeat the last token; ``norm`` normal(0, 0.05) for norms that add 1; ``strong`` the
    same around 2; ``ones``; ``decay`` the log of a gated delta net's small decay rate.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"


def draw(parameter: Parameter, seed: int, dtype: str) -> torch.Tensor:
    """Draw a parameter's values; the same arguments give the same values."""
    import torch

    digest = hashlib.sha256(f"{seed}:{parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    values = torch.empty(parameter.shape, dtype=torch.float32)
    draw: dict[str, Callable[[], torch.Tensor]] = {
        "matrix": lambda: values.normal_(0.0, MATRIX_STD, generator=generator),
        "tied": lambda: values.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]), generator=generator),
        "strong": lambda: values.normal_(2.0, NORM_STD, generator=generator),
        "norm": lambda: values.normal_(0.0, NORM_STD, generator=generator),
        "ones": lambda: values.fill_(1.0),
        "decay": lambda: values.uniform_(math.log(0.001), math.log(0.02), generator=generator),
    }
    result: torch.Tensor = draw[parameter.kind]().to(getattr(torch, dtype))
    return result


def write_model_folder(
    folder: Path, config: dict[str, Any], parameters: list[Parameter], seed: int, dtype: str, vocab_size: int
) -> Path:
    """Write config, weights and tokenizer to ``folder`` unless its marker names the same arguments.

    Everything is written to a folder beside it, which then takes its place.  Raises ValueError for an unknown
    dtype or a vocabulary without words, FileExistsError for a non-empty folder without marker.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {DTYPES}")
    if vocab_size <= FIRST_WORD_ID:
        raise ValueError("the vocabulary must exceed the special tokens")
    marker = _dump({"format": _FORMAT, "seed": seed, "config": config})
    found = folder / _MARKER
    if found.is_file() and found.read_text() == marker:
        return folder
    if folder.exists() and not found.is_file() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and was not written by this module")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_files(staging, config, parameters, seed, dtype, vocab_size)
        (staging / _MARKER).write_text(marker)
        staging.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def _write_files(
    folder: Path, config: dict[str, Any], parameters: list[Parameter], seed: int, dtype: str, vocab_size: int
) -> None:
    from safetensors.torch import save_file

    tensors = {parameter.name: draw(parameter, seed, dtype) for parameter in parameters}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(_dump(config))
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(_dump({"do_sample": False, **ids}))
    _write_tokenizer(folder, vocab_size, int(config["max_position_embeddings"]))


def _write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(FIRST_WORD_ID, vocab_size))]
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL_TOKENS])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        **{f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")},
    }
    (folder / "tokenizer_config.json").write_text(_dump(settings))


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
