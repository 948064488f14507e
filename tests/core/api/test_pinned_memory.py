"""Pinning by CUDA, on a torch that only pretends: the calls, and the GPU that they are for. It was not run on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from offload_core.api.memory.pinned_memory import CudaPinning, demand_pinning, pinning_in_use
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_size import ALIGNMENT_BYTES


class FakeCuda:
    """``torch.cuda`` with two GPUs, the second of which is current on the main thread."""

    def __init__(self, *, available: bool = True, initialized: bool = True) -> None:
        self.is_available = lambda: available
        self.is_initialized = lambda: initialized
        self.registered: dict[int, tuple[int, int, int]] = {}
        self.error = 0
        self._thread = threading.local()
        self._thread.device = 1

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._thread.device = self.current_device(), index
        yield
        self._thread.device = before

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        if not self.error:
            self.registered[address] = (nbytes, flags, self.current_device())
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        if not self.error:
            del self.registered[address]
        return self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_memory_is_pinned_for_the_gpu_of_the_thread_that_asked_whichever_thread_pins(cuda: FakeCuda) -> None:
    pinning = pinning_in_use()
    assert pinning is not None
    thread = threading.Thread(target=pinning.register, args=(4096, 8192))
    thread.start()
    thread.join()
    assert cuda.registered == {4096: (8192, 1, 1)}
    pinning.unregister(4096)
    assert cuda.registered == {}


def test_what_cuda_refuses_is_an_error_with_its_number_and_the_cure(cuda: FakeCuda) -> None:
    pinning = demand_pinning()
    cuda.error = 2
    with pytest.raises(OSError, match=r"could not pin 8192 bytes.*error 2; configure a smaller size, or raise"):
        pinning.register(4096, 8192)
    with pytest.raises(OSError, match=r"could not unpin the host memory at 0x1000: .* returned 2"):
        pinning.unregister(4096)


@pytest.mark.parametrize(("available", "initialized"), [(False, False), (True, False)])
def test_a_process_that_does_not_work_on_a_gpu_pins_nothing_by_itself(
    available: bool, initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(cuda=FakeCuda(available=available, initialized=initialized))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert pinning_in_use() is None
    if available:
        assert isinstance(demand_pinning(), CudaPinning)
    else:
        with pytest.raises(OSError, match="torch finds no CUDA GPU"):
            demand_pinning()


def test_torch_is_not_loaded_to_find_out() -> None:
    script = (
        "import sys; from offload_core.api.memory.pinned_memory import demand_pinning, pinning_in_use\n"
        "assert pinning_in_use() is None and 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: demand_pinning()\n"
        "except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "host memory cannot be pinned: torch is not installed\n", done.stderr


def test_staging_is_pinned_until_it_is_closed(cuda: FakeCuda) -> None:
    pool = StagingPool(3 * ALIGNMENT_BYTES, 0.5, pinning_in_use())
    assert cuda.registered == {pool.tensor.data_ptr(): (3 * ALIGNMENT_BYTES, 1, 1)}
    pool.close()
    pool.close()
    assert cuda.registered == {}


def test_staging_that_cannot_be_pinned_is_used_as_it_is(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    pinning = pinning_in_use()
    cuda.error = 2
    pool = StagingPool(ALIGNMENT_BYTES, 0.5, pinning)
    assert "staging memory is not pinned" in caplog.text
    lease = pool.try_acquire(1, for_store=False)
    assert lease is not None
    lease.release()
    pool.close()
