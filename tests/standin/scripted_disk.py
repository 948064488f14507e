"""A disk backend that follows a script: calls are held for some steps, in random order, and some fail."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendContext, BackendType, LoadOutcome, StoreOutcome
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey

OFFLOAD_API_VERSION = 1

CALLS = ("contains", "load_into", "store")
SCRIPTS: dict[str, Script] = {}


@dataclass
class Script:
    """A script for the calls of one backend; all chances are drawn from the seed and the call's keys.

    Every call is held until the step in which it came has ended, so that no result depends on threads.

    Args:
        seed: the seed of all choices.
        hold_steps: by kind of call (``contains``, ``load_into``, ``store``), the most further steps that a call is
            held.
        fail: by kind of call, the chance that a call raises ``OSError``.
        damage: chance that a loaded object has a wrong byte.
        miss: chance that a stored object is missing when it is loaded.
        reject: chance that an object is rejected.
        shut: see the attribute.
    """

    seed: int
    hold_steps: dict[str, int] = field(default_factory=dict)
    fail: dict[str, float] = field(default_factory=dict)
    damage: float = 0.0
    miss: float = 0.0
    reject: float = 0.0
    shut: set[str] = field(default_factory=set)
    """Kinds of calls that are held until :meth:`open`."""

    def __post_init__(self) -> None:
        self.step = 0
        self.calls: Counter[str] = Counter()
        self._draws: Counter[str] = Counter()
        self._held: list[tuple[float, float, str, asyncio.Future[None]]] = []

    @property
    def held(self) -> Counter[str]:
        """Number of calls that are held now, by kind."""
        return Counter(kind for _, _, kind, _ in self._held)

    def advance(self, settle: Callable[[], None]) -> None:
        """Begin the next step: release the calls that are due, one by one in an order drawn from the seed."""
        self.step += 1
        self._release(self.step, settle)

    def open(self, settle: Callable[[], None], *kinds: str) -> None:
        """Stop holding calls of these kinds, by default of all kinds, and release the held calls."""
        for kind in kinds or CALLS:
            self.hold_steps[kind] = -1
            self.shut.discard(kind)
        while self._release(float("inf"), settle, kinds):
            pass

    def chance(self, event: str, key: ObjectKey) -> float:
        """Return a number in [0, 1) that depends only on the seed, the event, the key and the number of calls."""
        name = f"{self.seed}/{event}/{key.pack}/{key.chunk_hash.hex()}"
        self._draws[name] += 1
        return random.Random(f"{name}/{self._draws[name]}").random()

    async def enter(self, kind: str, keys: Sequence[ObjectKey]) -> None:
        """Hold the call for the steps that the script says.

        Raises:
            OSError: the script lets this call fail.
        """
        self.calls[kind] += 1
        if not keys:
            return
        steps = int(self.chance(f"hold {kind}", keys[0]) * (self.hold_steps.get(kind, 0) + 1))
        if self.hold_steps.get(kind) != -1:
            due = float("inf") if kind in self.shut else self.step + 1 + steps
            future = asyncio.get_running_loop().create_future()
            self._held.append((due, self.chance("order", keys[0]), kind, future))
            await future
        if self.chance(f"fail {kind}", keys[0]) < self.fail.get(kind, 0.0):
            raise OSError(f"scripted failure of {kind}")

    def _release(self, step: float, settle: Callable[[], None], kinds: Sequence[str] = ()) -> int:
        """Release the calls that are due; returns their number."""
        due = [item for item in self._held if item[0] <= step and (not kinds or item[2] in kinds)]
        self._held = [item for item in self._held if item not in due]
        for _, _, _, future in sorted(due, key=lambda item: item[:2]):
            future.get_loop().call_soon_threadsafe(_resolve, future)
            settle()
        return len(due)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ScriptedOptions(DiskOptions):
    """A folder, and the name under which the test has left the script."""

    script: str


class ScriptedDisk(DiskBackend):
    """A disk whose calls are held, fail or lose bytes as its script says."""

    options: ScriptedOptions

    def __init__(self, options: ScriptedOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._script = SCRIPTS[options.script]

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        await self._script.enter("contains", keys)
        return await super().contains(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        await self._script.enter("load_into", keys)
        outcomes = list(await super().load_into(keys, buffers))
        for index, key in enumerate(keys):
            if self._script.chance("miss", key) < self._script.miss:
                outcomes[index] = LoadOutcome.MISS
            elif self._script.chance("damage", key) < self._script.damage:
                buffers[index][len(buffers[index]) // 2] ^= 0x10
        return outcomes

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await self._script.enter("store", keys)
        rejected = [self._script.chance("reject", key) < self._script.reject for key in keys]
        wanted = [index for index, no in enumerate(rejected) if not no]
        stored = iter(await super().store([keys[i] for i in wanted], [buffers[i] for i in wanted]) if wanted else ())
        return [StoreOutcome.REJECTED if no else next(stored) for no in rejected]


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("scripted-disk", ScriptedDisk, ScriptedOptions)]
