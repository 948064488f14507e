"""An engine is refused exactly if vLLM itself gives different images the same name after a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer
from vllm.utils.counter import AtomicCounter

from offload_core.api.errors import PlanError
from offload_core.vllm.model.refusals import refuse_unhashed_media


def _engine(cache_gb: float, prefix_caching: bool) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def _name_of_first_image(engine: Any) -> Any:
    """Return the name that vLLM's renderer gives to the first image after a start; ``None`` if it hashes the image."""
    renderer: Any = SimpleNamespace(
        model_config=engine.model_config, config=engine, _validate_mm_uuids=lambda *arguments: None
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    request = f"renderer0-mm-{AtomicCounter().inc(1)}"
    return BaseRenderer._process_mm_uuids(renderer, {}, items, {}, request).get("image")


@pytest.mark.parametrize("cache_gb", [0, 0.5, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_refused_if_vllm_numbers_images(cache_gb: float, prefix_caching: bool) -> None:
    engine = _engine(cache_gb, prefix_caching)
    if _name_of_first_image(engine) is None:
        refuse_unhashed_media(engine)
    else:
        with pytest.raises(PlanError, match="so vLLM numbers images in place of hashing them"):
            refuse_unhashed_media(engine)


def test_a_model_of_text_alone_is_not_refused() -> None:
    engine = _engine(0, prefix_caching=False)
    engine.model_config.multimodal_config = None
    refuse_unhashed_media(engine)
