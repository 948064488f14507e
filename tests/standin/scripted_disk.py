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
    """What happens to the calls of one backend; all chances are drawn from the seed and the call's keys.

    Args:
        hold_steps: the most further steps that a call of a kind (``contains``, ``load_into``, ``store``) is held; every
            call is held until the step in which it came has ended, so that nothing depends on threads.
        fail: chance that a call of a kind raises ``OSError``.
        damage: chance that a loaded object has a wrong byte.
        miss: chance that an object is not found after all when it is loaded.
        reject: chance that an object is not taken.
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
        self._seen: Counter[str] = Counter()
        self._held: list[tuple[float, float, str, asyncio.Future[None]]] = []

    @property
    def held(self) -> Counter[str]:
        """Calls that are held at the moment, by kind."""
        return Counter(kind for _, _, kind, _ in self._held)

    def advance(self, settle: Callable[[], None]) -> None:
        """Begin the next step: let go of the calls that are due, one by one in an order drawn from the seed."""
        self.step += 1
        self._release(self.step, settle)

    def open(self, settle: Callable[[], None], *kinds: str) -> None:
        """Hold no calls of these kinds any more (all kinds when none is named) and let go of those that are held."""
        for kind in kinds or CALLS:
            self.hold_steps[kind] = -1
            self.shut.discard(kind)
        while self._release(float("inf"), settle, kinds):
            pass

    def chance(self, what: str, key: ObjectKey) -> float:
        """Return a number in [0, 1) that only depends on the seed, the key and how often this was asked."""
        name = f"{self.seed}/{what}/{key.pack}/{key.chunk_hash.hex()}"
        self._seen[name] += 1
        return random.Random(f"{name}/{self._seen[name]}").random()

    async def enter(self, kind: str, keys: Sequence[ObjectKey]) -> None:
        """Hold the call as long as the script says.

        Raises:
            OSError: the script wants this call to fail.
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
        """Let go of the calls that are due; returns how many there were."""
        due = [item for item in self._held if item[0] <= step and (not kinds or item[2] in kinds)]
        self._held = [item for item in self._held if item not in due]
        for _, _, _, future in sorted(due, key=lambda item: item[:2]):
            future.get_loop().call_soon_threadsafe(_let_go, future)
            settle()
        return len(due)


def _let_go(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ScriptedOptions(DiskOptions):
    """A folder, and the name under which the test has left the script."""

    script: str


class ScriptedDisk(DiskBackend):
    """Does what a disk does, when and if its script says so."""

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
