"""``open_backend`` opens and closes one backend as the core does; importing the harness names a missing library."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from offload_backend_disk.plugin import offload_register_backends
from pydantic import Field, ValidationError

from offload_core.api import (
    Backend,
    BackendOptions,
    BackendType,
    BackendWrapper,
    Bytes,
    Capabilities,
    LoadOutcome,
    ObjectKey,
    StoreOutcome,
)
from offload_core.testing import open_backend

(DISK,) = offload_register_backends()
KEY = ObjectKey("0" * 64, "full-u16", b"\1")
THREADS_END_SECONDS = 30


class Options(BackendOptions):
    size: Bytes = Field(default=0, description="an option that operators write with a unit")
    fails_to_open: bool = Field(default=False, description="make open raise an OSError")


class Recording(Backend[Options]):
    """Records the calls of ``open`` and ``close``; instances are in :attr:`made`."""

    capabilities = Capabilities(medium="host", persistent=False, shared=False)
    made: list[Recording]

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.calls: list[str] = []
        self.made.append(self)

    async def open(self) -> None:
        self.calls.append("open")
        if self.options.fails_to_open:
            raise OSError("no medium")

    async def close(self) -> None:
        self.calls.append("close")

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [False for _ in keys]

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return [LoadOutcome.MISS for _ in keys]

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        return [StoreOutcome.REJECTED for _ in keys]

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        pass


@pytest.fixture
def backend_type() -> BackendType:
    Recording.made = []
    return BackendType("recording", Recording, Options)


def test_objects_of_one_block_are_found_in_the_next(tmp_path: Path) -> None:
    async def main() -> list[bool]:
        async with open_backend(DISK, {"path": str(tmp_path)}) as backend:
            assert await backend.store([KEY], [memoryview(b"abc")]) == [StoreOutcome.STORED]
        async with open_backend(DISK, {"path": str(tmp_path)}) as backend:
            return list(await backend.contains([KEY]))

    assert asyncio.run(main()) == [True]


def test_the_backend_is_open_in_the_block_and_closed_after_it(backend_type: BackendType) -> None:
    async def main() -> None:
        async with open_backend(backend_type) as backend:
            assert Recording.made == [backend]
            assert Recording.made[0].calls == ["open"]
        assert Recording.made[0].calls == ["open", "close"]

    asyncio.run(main())


def test_an_error_in_the_block_comes_through_after_the_backend_is_closed(backend_type: BackendType) -> None:
    async def main() -> None:
        async with open_backend(backend_type):
            raise LookupError("of the test")

    with pytest.raises(LookupError, match="of the test"):
        asyncio.run(main())
    assert Recording.made[0].calls == ["open", "close"]


def test_a_backend_that_does_not_open_is_not_closed(backend_type: BackendType) -> None:
    async def main() -> None:
        async with open_backend(backend_type, {"fails_to_open": True}):
            pytest.fail("the block was entered")

    with pytest.raises(OSError, match="no medium"):
        asyncio.run(main())
    assert Recording.made[0].calls == ["open"]


def test_options_are_those_of_an_operator(backend_type: BackendType) -> None:
    async def main() -> None:
        async with open_backend(backend_type, {"size": "2MiB"}, name="nvme"):
            assert Recording.made[0].options == Options(size=2 * 1024 * 1024)
            assert Recording.made[0].context.name == "nvme"

    asyncio.run(main())


@pytest.mark.parametrize(("options", "place"), [({"size": "much"}, "size"), ({"sizes": 1}, "sizes")])
def test_wrong_options_are_refused_before_a_backend_is_made(
    backend_type: BackendType, options: dict[str, object], place: str
) -> None:
    async def main() -> None:
        async with open_backend(backend_type, options):
            pytest.fail("the block was entered")

    with pytest.raises(ValidationError) as caught:
        asyncio.run(main())
    assert [problem["loc"] for problem in caught.value.errors()] == [(place,)]
    assert Recording.made == []


def test_a_wrapper_is_opened_and_closed_around_the_backend(backend_type: BackendType) -> None:
    class Wrapper(BackendWrapper):
        async def open(self) -> None:
            await super().open()
            Recording.made[0].calls.append("wrapper open")

        async def close(self) -> None:
            Recording.made[0].calls.append("wrapper close")
            await super().close()

    async def main() -> None:
        async with open_backend(backend_type, wrap=Wrapper) as backend:
            assert isinstance(backend, Wrapper)
            assert backend.inner is Recording.made[0]

    asyncio.run(main())
    assert Recording.made[0].calls == ["open", "wrapper open", "wrapper close", "close"]


@pytest.mark.parametrize("fails", [False, True], ids=["success", "error in the block"])
def test_threads_end_after_the_block(backend_type: BackendType, fails: bool) -> None:
    threads: set[threading.Thread] = set()

    async def main() -> None:
        async with open_backend(backend_type, threads=2) as backend:
            together = threading.Barrier(2)

            def note_thread() -> None:
                threads.add(threading.current_thread())
                together.wait(THREADS_END_SECONDS)

            await asyncio.gather(*(backend.run_blocking(note_thread) for _ in range(2)))
            if fails:
                raise LookupError

    if fails:
        with pytest.raises(LookupError):
            asyncio.run(main())
    else:
        asyncio.run(main())
    assert len(threads) == 2
    for thread in threads:
        thread.join(THREADS_END_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_importing_the_harness_without_its_libraries_says_the_cure(missing: str) -> None:
    hide = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else found(name, *rest)\n"
        f"sys.modules[{missing!r}] = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}import offload_core.testing"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: offload_core.testing needs {missing}, which is not installed; "
        "run: pip install 'offload-core[testing]'"
    )
