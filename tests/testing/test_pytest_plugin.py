"""The pytest plugin: it costs little until a contract class is collected."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

DISK = """
import pytest
from offload_backend_disk.plugin import offload_register_backends
from offload_core.testing import BackendContract

class TestDisk(BackendContract):
    backend_type = offload_register_backends()[0]

    @pytest.fixture
    def options(self, tmp_path):
        return {"path": str(tmp_path / "objects")}
"""


def test_the_plugin_is_light_to_import() -> None:
    script = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import offload_core.pytest_plugin\n"
        "print(sorted(n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "['offload_core', 'offload_core.pytest_plugin']\n"


def test_a_run_without_a_contract_loads_nothing_of_the_harness(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_light():
            core = {name for name in sys.modules if name.startswith("offload_core.")}
            assert core == {"offload_core.pytest_plugin"}
            assert not {"torch", "pydantic"} & set(sys.modules)
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_asserts_of_the_harness_show_their_values(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest rewrites what belongs to an installed plugin; here it is named by hand, as where autoloading is off.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("""
        import sys
        import offload_core.testing.contract.suite

        def test_rewritten():
            harness = {name: module for name, module in sys.modules.items() if name.startswith("offload_core.testing.")}
            assert len(harness) > 10
            plain = {n for n, m in harness.items() if type(m.__loader__).__name__ != "AssertionRewritingHook"}
            assert not plain
    """)
    plugin = ("-p", "offload_core.pytest_plugin")
    pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=1)


def test_throughput_is_left_out_unless_it_is_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_disk=DISK)
    result = pytester.runpytest_subprocess("-k", "test_throughput", "--strict-markers", "-p", "no:cacheprovider")
    assert result.ret is pytest.ExitCode.NO_TESTS_COLLECTED
    assert "throughput, one object" not in result.stdout.str()


def test_throughput_is_reported_for_each_backend_and_two_sizes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_disk=DISK)
    result = pytester.runpytest_subprocess("-k", "test_throughput", "--offload-throughput", "-p", "no:cacheprovider")
    assert result.ret is pytest.ExitCode.OK
    figures = r"\s+\d+\s+\d+\.\d\d\s+\d+\.\d\d"
    result.stdout.re_match_lines_random(
        [
            r"=+ throughput, one object after the other =+",
            r"backend\s+operation\s+object\s+MiB/s\s+p50 ms\s+p99 ms",
            rf"TestDisk \(disk\)\s+store\s+64 KiB{figures}",
            rf"TestDisk \(disk\)\s+load\s+64 KiB{figures}",
            rf"TestDisk \(disk\)\s+store\s+2048 KiB{figures}",
            rf"TestDisk \(disk\)\s+load\s+2048 KiB{figures}",
        ]
    )


@pytest.mark.parametrize("how", ["@pytest.mark.skip(reason='slow')\n    ", ""], ids=["skipped", "replaced"])
def test_the_state_machine_cannot_be_left_out(pytester: pytest.Pytester, how: str) -> None:
    name = "test_state_machine_finds_no_broken_clause"
    pytester.makepyfile(f"{DISK}\n    {how}def {name}(self):\n        pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret is not pytest.ExitCode.OK
    assert f"TestDisk.{name} is " in result.stdout.str() + result.stderr.str()
