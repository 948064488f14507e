"""Clause C22: loads in one call. They answer as the separate steps do, and tell their checks of final bytes."""

from __future__ import annotations

from offload_core.api.backend import LoadOutcome
from offload_core.api.checked_loads import CHECK_BYTES
from offload_core.testing.contract.checks import contract_test, expect, expect_bytes, expect_results
from offload_core.testing.rig.clients import Rig, content
from offload_core.testing.rig.recording_check import RecordingCheck

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
CANARY = 0xA5
SIZES = (1, 4096, 70_001, CHECK_BYTES - 1, CHECK_BYTES, 3 * CHECK_BYTES + 1)


class OneCallContract:
    """Loads in one call, for a backend that declares them."""

    @contract_test
    async def test_c22_a_load_in_one_call_answers_as_its_steps_do(self, one_call_rig: Rig) -> None:
        client = await one_call_rig.client()
        small, large, absent = one_call_rig.keys(3)
        await client.put({small: content(100), large: content(9000)})
        keys = [large, absent, small, large, small, large, small]
        sizes = [9000, 50, 100, 9000, 99, 9001, 100]
        for count in (len(keys), 1, 0):
            by_steps, by_one_call = ([bytearray([CANARY]) * size for size in sizes[:count]] for _ in range(2))
            try:
                wanted = await client.load(keys[:count], [memoryview(buffer) for buffer in by_steps])
            except Exception:  # the tests of C2 tell that the steps fail
                continue
            if len(wanted) != count:
                continue
            views = [memoryview(buffer) for buffer in by_one_call]
            outcomes = await client.load_and_check(keys[:count], views, list(map(RecordingCheck, views)))
            expect_results("C22", "load_and_check", outcomes, wanted)
            for outcome, one, two in zip(outcomes, by_one_call, by_steps, strict=True):
                if outcome is not CORRUPT:
                    name = f"a buffer of {len(one)} bytes after {outcome.name} in one call, as by the steps,"
                    expect_bytes("C22", name, one, bytes(two))

    @contract_test
    async def test_c22_checks_are_told_of_final_bytes_in_order(self, one_call_rig: Rig) -> None:
        client = await one_call_rig.client()
        objects = {one_call_rig.key(): content(size) for size in SIZES}
        await client.put(objects)
        buffers = [bytearray([CANARY]) * len(wanted) for wanted in objects.values()]
        views = [memoryview(buffer) for buffer in buffers]
        checks = [RecordingCheck(view) for view in views]
        outcomes = await client.load_and_check(list(objects), views, checks)
        for outcome, check, buffer in zip(outcomes, checks, buffers, strict=True):
            expect(check.problem is None, f"C22: the check of an object of {len(buffer)} bytes got {check.problem}")
            if outcome is HIT:
                told = bytes(check.told)
                expect_bytes(
                    "C22",
                    f"an object of {len(buffer)} bytes, when its check was told,",
                    told,
                    bytes(buffer[: len(told)]),
                )
