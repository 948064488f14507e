"""Companion processes: they begin with what the parent gives them, and end with it, or with words for the log."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload_core.runtime.companion_child import GROUP_SIGNALS, ProcessLimits, StartMessage
from offload_core.runtime.companion_process import CompanionProcess, WorkingFolder, describe_end
from tests.support.polling import wait_until
from tests.support.process_state import is_running, process_state

EXAMPLE = "tests.core.runtime.companion_example"
SECONDS = 60
MIB = 1 << 20


class Companion:
    """The example as a child of this process."""

    def __init__(self, **options: Any) -> None:
        self._socket, self._childs_socket = socket.socketpair()
        self._socket.settimeout(SECONDS)
        self.ends: list[str] = []
        self.ended = threading.Event()
        descriptors = {"connection": self._childs_socket.fileno(), **options.pop("descriptors", {})}
        self.process = CompanionProcess(EXAMPLE, descriptors=descriptors, on_end=self._on_end, **options)

    def start(self) -> None:
        self.process.start()
        self._childs_socket.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def report(self) -> Mapping[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            part = self._socket.recv(1 << 20)
            assert part, "the companion ended before its report"
            line += part
        report: dict[str, Any] = json.loads(line)
        return report

    def tell(self, order: str) -> None:
        self._socket.sendall(order.encode())

    def ask(self, order: str) -> bytes:
        self.tell(order)
        return self._socket.recv(4096)

    def end_in_words(self) -> str:
        assert self.ended.wait(SECONDS)
        (words,) = self.ends
        return words

    def close(self) -> None:
        self.process.kill()
        self._socket.close()
        self._childs_socket.close()

    def _on_end(self, description: str) -> None:
        assert not self.process.is_alive
        assert self.process.pid is None
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & GROUP_SIGNALS
        self.ends.append(description)
        self.ended.set()


@contextmanager
def companion(**options: Any) -> Iterator[Companion]:
    made = Companion(**options)
    try:
        made.start()
        yield made
    finally:
        made.close()
        assert made.process.wait_gone(SECONDS)


def test_it_begins_with_what_the_parent_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = tmp_path / "with:colon"
    monkeypatch.syspath_prepend(strange)
    monkeypatch.setenv("OFFLOAD_TEST_VARIABLE", "inherited")
    reading, writing = os.pipe()
    with companion(payload=b"secret\n\x00\xff", descriptors={"pipe": writing}) as child:
        report = child.report()
        os.close(writing)
        assert report["search_path"] == [entry for entry in sys.path if isinstance(entry, str)]
        assert report["search_path"][0] == str(strange)
        assert bytes.fromhex(report["payload"]) == b"secret\n\x00\xff"
        assert report["descriptors"].keys() == {"connection", "pipe"}
        assert report["open"][str(writing)] == str(Path(f"/proc/self/fd/{reading}").readlink())
        assert report["environment"]["OFFLOAD_TEST_VARIABLE"] == "inherited"
        assert (report["session"], report["group"]) == (os.getsid(0), os.getpgid(0))
    os.close(reading)


def test_nothing_but_the_module_is_on_its_command_line_and_nothing_secret_in_its_environment() -> None:
    with companion(payload=b"sesame") as child:
        report = child.report()
    assert report["command_line"] == [sys.executable, "-m", EXAMPLE]
    assert "sesame" not in str(report["first_environment"])
    changed = {name for name, value in report["first_environment"].items() if os.environ.get(name) != value}
    assert changed <= {"PYTHONPATH", "PYTHONSAFEPATH"}


def test_withheld_variables_are_not_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TEST_TOKEN", "sesame")
    monkeypatch.setenv("OFFLOAD_TEST_VARIABLE", "inherited")
    with companion(withheld=["OFFLOAD_TEST_TOKEN", "OFFLOAD_TEST_ABSENT"]) as child:
        report = child.report()
    assert report["first_environment"]["OFFLOAD_TEST_VARIABLE"] == "inherited"
    assert "sesame" not in str(report["first_environment"]) + str(report["environment"])


def test_it_passes_the_parents_environment_to_its_own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/some/folder")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with companion() as child:
        report = child.report()
    assert report["first_environment"]["PYTHONSAFEPATH"] == "1"
    assert report["environment"]["PYTHONPATH"] == "/some/folder"
    assert "PYTHONSAFEPATH" not in report["environment"]


def test_no_module_of_the_working_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is another json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    with companion() as child:
        assert str(tmp_path) not in child.report()["at_first"]["search_path"]


def test_its_working_folder_is_its_parents_or_the_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    in_first = WorkingFolder()
    monkeypatch.chdir(second)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for folder, expected in ((None, second), (WorkingFolder(), second), (in_first, first)):
        with companion(folder=folder) as child:
            report = child.report()
            assert report["folder"] == str(expected)
            assert str(expected) in report["at_first"]["search_path"], "'' stands for the working folder"


def test_its_working_folder_stays_the_same_when_it_or_the_parents_is_moved_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, moved = tmp_path / "first", tmp_path / "second", tmp_path / "moved"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    folder = WorkingFolder()

    def folder_of_child() -> str:
        with companion(folder=folder) as child:
            return str(child.report()["folder"])

    monkeypatch.chdir(second)
    second.rmdir()
    assert folder_of_child() == str(first)
    first.rename(moved)
    assert folder_of_child() == str(moved)
    moved.rmdir()
    assert folder_of_child() == f"{moved} (deleted)"


def test_it_starts_in_a_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for folder in (None, WorkingFolder()):
        with companion(folder=folder) as child:
            assert child.report()["folder"] == f"{tmp_path / 'gone'} (deleted)"


def test_the_descriptor_of_a_folder_is_closed_with_it() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    folder = WorkingFolder()
    assert open_files() == before + 1
    del folder
    assert open_files() == before


def test_it_gets_no_other_descriptors_and_its_standard_input_is_empty() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # by some library's fault
    with companion() as child:
        report = child.report()
        own = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [link for link in own if "offload-companion-start" in link]
    assert report["open"]["0"] == "/dev/null"
    assert str(writing) not in report["open"]
    assert not [link for link in report["open"].values() if "memfd" in link]
    os.close(reading)
    os.close(writing)


def test_it_imports_nothing_that_takes_long() -> None:
    with companion() as child:
        report = child.report()
    assert not {"torch", "vllm", "numpy", "subprocess"} & set(report["modules"])


def test_it_starts_in_half_a_second_beyond_an_empty_interpreter() -> None:
    calls, whole, empty = [], [], []
    for _ in range(3):  # the machine may be busy with others
        begin = time.monotonic()
        with companion() as child:
            calls.append(time.monotonic() - begin)
            child.report()
        reported = time.monotonic()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        whole.append(reported - begin)
        empty.append(time.monotonic() - reported)
    assert min(calls) < 0.1 + min(empty), "the call does not wait for the process"
    assert min(whole) < 0.5 + 6 * min(empty), "an interpreter's start tells how slow the machine is"


def test_limits_are_in_force() -> None:
    cpu = max(os.sched_getaffinity(0))
    with companion(limits=ProcessLimits(niceness=7, cpus=frozenset({cpu}), memory_bytes=256 * MIB)) as child:
        report = child.report()
        assert (report["niceness"], report["cpus"], report["memory_bytes"]) == (7, [cpu], [256 * MIB, 256 * MIB])
        assert child.ask(f"allocate {300 * MIB}") == b"no memory"
        assert child.ask(f"allocate {100 * MIB}") == b"memory"


def test_without_limits_it_is_like_its_parent() -> None:
    with companion() as child:
        report = child.report()
    assert report["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert report["cpus"] == sorted(os.sched_getaffinity(0))
    assert report["memory_bytes"] == list(resource.getrlimit(resource.RLIMIT_DATA))


LIMITED = """
import mmap, os
from offload_core.runtime.companion_child import GROUP_SIGNALS, ProcessLimits, _apply
os.nice(5)
niceness = os.getpriority(os.PRIO_PROCESS, 0)
_apply(ProcessLimits(memory_bytes=256 << 20))
shared = mmap.mmap(-1, 1 << 30)
_apply(ProcessLimits(memory_bytes=1 << 40))
assert os.getpriority(os.PRIO_PROCESS, 0) == niceness
try:
    bytearray(300 << 20)
except MemoryError:
    print("refused")
"""


def test_shared_memory_does_not_count_and_stricter_limits_of_the_parent_stay_in_force() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"niceness": -1}, "niceness -1 is not possible; give 0 to 19"),
        ({"niceness": 20}, "niceness 20 is not possible; give 0 to 19"),
        ({"cpus": frozenset({0, -3})}, r"there are no processors \[-3, 0\]"),
        ({"memory_bytes": 0}, "a memory limit of 0 bytes is not possible"),
    ],
)
def test_impossible_limits_are_refused_in_the_parent(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProcessLimits(**limits)


def test_processors_that_are_not_there_end_the_child_with_words(capfd: pytest.CaptureFixture[str]) -> None:
    with companion(limits=ProcessLimits(cpus=frozenset({1020, 1021}))) as child:
        assert child.end_in_words() == "exited with status 1"
    assert "this process may use none of the processors [1020, 1021]: Invalid argument" in capfd.readouterr().err


# Its end.


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("exit 0", "exited with status 0"),
        ("exit 3", "exited with status 3"),
        (f"kill {signal.SIGSEGV:d}", "was killed by SIGSEGV"),
        (f"kill {signal.SIGKILL:d}", "was killed by SIGKILL"),
        (f"kill {signal.SIGRTMIN + 3:d}", f"was killed by signal {signal.SIGRTMIN + 3:d}"),
    ],
)
def test_its_end_is_told_in_words_and_leaves_no_zombie(order: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with companion() as child:
        child.report()
        pid = child.pid
        assert child.process.is_alive
        assert not child.process.wait_gone(0)
        child.tell(order)
        assert child.end_in_words() == words
        assert child.process.wait_gone(0)
        assert not Path(f"/proc/{pid}").exists()
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", None)  # the number may be another process's by now
            child.process.kill()
    assert child.ends == [words]


def test_the_end_of_a_process_whose_exit_status_something_else_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waitid = threading.Event(), os.waitid
    monkeypatch.setattr(os, "waitid", lambda *arguments: gate.wait(SECONDS) and waitid(*arguments))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects it
    try:
        with companion() as child:
            child.report()
            pid = child.pid
            child.tell("exit 3")
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the kernel did not collect the process")
            child.process.kill()
            gate.set()
            assert child.end_in_words() == describe_end(None)
            assert child.process.wait_gone(0)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert describe_end(None).startswith("ended for an unknown reason, because another part of this process")


def test_a_kill_between_its_end_and_the_collection_does_not_hide_the_exit_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, waitid = threading.Event(), os.waitid
    monkeypatch.setattr(os, "waitid", lambda *arguments: gate.wait(SECONDS) and waitid(*arguments))
    with companion() as child:
        child.report()
        pid = child.pid
        child.tell("exit 3")
        wait_until(lambda: process_state(pid) == "Z", "the process did not end")
        child.process.kill()
        gate.set()
        assert child.end_in_words() == "exited with status 3"


def test_a_stopped_process_is_killed() -> None:
    with companion() as child:
        child.report()
        pid = child.pid
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: process_state(pid) == "T", "the process did not stop")
        assert child.process.is_alive
        begin = time.monotonic()
        assert not child.process.wait_gone(0.05)
        assert time.monotonic() - begin < 5
        child.process.kill()
        assert child.end_in_words() == "was killed by SIGKILL"


def test_a_process_is_not_gone_while_one_of_its_threads_lives() -> None:
    with companion() as child:
        child.report()
        pid = child.pid
        child.tell("end main thread")
        wait_until(lambda: process_state(pid) == "Z", "the main thread did not end")
        assert child.ask("ping") == b"pong"
        assert child.process.is_alive
        assert not child.process.wait_gone(0.05)
        child.process.kill()
        assert child.end_in_words() == "was killed by SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_does_not_end_it_not_even_at_its_start(number: signal.Signals) -> None:
    with companion() as child:
        os.kill(child.pid, number)
        report = child.report()
        assert number in report["at_first"]["blocked"]
        assert report["blocked"] == []
        os.kill(child.pid, number)
        assert child.ask("ping") == b"pong"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_programs_and_forks_of_a_child_end_on_signals_as_usual(number: signal.Signals) -> None:
    with companion() as child:
        child.report()
        assert child.ask(f"end helpers by {number}") == b"%d %d" % (number, number)


def test_it_outlives_the_thread_that_asked_for_it() -> None:
    child = Companion()

    def start() -> None:
        child.start()
        child.report()  # from now on the kernel watches over the thread that started it

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(SECONDS)
    wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the kernel did not end the thread")
    try:
        assert child.ask("ping") == b"pong"
    finally:
        child.close()
    assert child.end_in_words() == "was killed by SIGKILL"


PARENT = f"""
import os, signal, socket, sys, threading
from offload_core.runtime.companion_process import CompanionProcess
ours, its = socket.socketpair()
# Both ends, so that the child is not told of the parent's end by its connection.
process = CompanionProcess({EXAMPLE!r}, descriptors={{"connection": its.fileno(), "other": ours.fileno()}})
process.start()
if sys.argv[1] != "at once":
    ours.recv(1 << 20)
if sys.argv[1] == "stopped":
    os.kill(process.pid, signal.SIGSTOP)
print(process.pid, flush=True)
if sys.stdin.readline() == "exit":
    sys.exit()
threading.Event().wait()
"""


@pytest.mark.parametrize("moment", ["with report", "at once", "stopped"])
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGSEGV", "exit"])
def test_it_ends_with_its_parent(moment: str, end: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, moment], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        try:
            assert is_running(pid)
            if end == "exit":
                parent.stdin.write("exit")
                parent.stdin.close()
            else:
                parent.send_signal(signal.Signals[end])
            parent.wait(SECONDS)
            wait_until(lambda: not is_running(pid), "the companion did not end with its parent")
        finally:
            parent.kill()
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_has_ended_before_it_could_know_ends_itself() -> None:
    message = StartMessage(parent_pid=1 << 22, search_path=sys.path).write()
    done = subprocess.run(
        [sys.executable, "-m", EXAMPLE], stdin=message, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    os.close(message)
    assert (done.returncode, done.stderr) == (1, "the process that started this one has ended\n")


@pytest.mark.parametrize("given", ["", "words\n", "[1]\n", '{"kind": "another"}\n'])
def test_a_person_who_starts_it_is_told_so(given: str) -> None:
    reading, writing = os.pipe()
    file = os.memfd_create("other")
    for descriptor in (writing, file):
        os.write(descriptor, given.encode())
    for descriptor in (reading, file):
        done = subprocess.run(
            [sys.executable, "-m", EXAMPLE],
            stdin=descriptor,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert (done.returncode, done.stderr) == (
            1,
            "this program is a part of offload-core, which starts it when it is needed\n",
        )
    for descriptor in (reading, writing, file):
        os.close(descriptor)


# Starts that fail.


def test_a_start_that_fails_raises_and_calls_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    child = Companion()
    with pytest.raises(FileNotFoundError, match="/no/such/interpreter"):
        child.start()
    assert (child.process.is_alive, child.process.pid, child.ends) == (False, None, [])
    assert child.process.wait_gone(0)
    child.close()


def test_a_start_on_a_file_system_that_hangs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class SlowPopen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            assert gate.wait(SECONDS)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", SlowPopen)
    child = Companion()
    with pytest.raises(TimeoutError, match=f"the interpreter for {EXAMPLE} did not begin within 0.01 s"):
        child.process.start(0.01)
    assert not child.process.wait_gone(0)
    gate.set()
    assert child.end_in_words() == "was killed by SIGKILL"
    child.close()


@pytest.mark.parametrize("descriptor", [-1, 0, 2])
def test_standard_streams_cannot_be_passed(descriptor: int) -> None:
    with pytest.raises(ValueError, match="the descriptors of pipe are not above 2; those are the child's own"):
        CompanionProcess(EXAMPLE, descriptors={"pipe": descriptor, "other": 3})


def test_an_error_of_the_handler_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(description: str) -> None:
        raise LookupError(description)

    process = CompanionProcess("offload_core.runtime.restart_pause", on_end=fail)  # a module without a main function
    process.start()
    assert process.wait_gone(SECONDS)
    wait_until(lambda: bool(caplog.records), "no line in the log")
    (record,) = caplog.records
    assert record.getMessage().startswith("the end of the process offload_core.runtime.restart_pause was not handled")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "exited with status 0"
