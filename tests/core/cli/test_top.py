"""``offload-core top``: the figures of a running engine, and the live view in a real terminal."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.cli.engine_view import FIGURES as NAMES
from offload_core.cli.engine_view import TierView
from tests.support.metrics_page import MetricsPage, lines, served
from tests.support.polling import wait_until

FIGURES = {
    "queries_total": 10, "query_hits_total": 7, "query_misses_total": 2, "hit_tokens_total": 12345,
    "prefill_seconds_saved_total": 4.25, "load_bytes_total": 3 << 20, "store_bytes_total": 5 << 20,
    "evictions_total": 10, "evictions_unread_total": 4, "pending_loads": 2, "pending_stores": 5,
    "load_seconds_sum": 1.5, "load_seconds_count": 100, "load_queue_seconds_sum": 0.5, "load_queue_seconds_count": 100,
}  # fmt: skip
BUCKET = 'vllm:hybrid_offload_load_seconds_bucket{engine="0",le="0.1",model_name="m",tier="nvme"} 100.0\n'
OF_VLLM = """
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 400.0
"""
PAGE = lines(FIGURES) + BUCKET + lines({"breaker_open": 2}, tier="shared") + lines({"jobs_total": 1}, tier="all")
COMMAND = [sys.executable, "-m", "offload_core.cli", "top"]
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
"""The terminal's words for the screen of a full-screen program: on, off."""


def top(*words: object, code: int = 0, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, ["top", *map(str, words)], input=text, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def page() -> Iterator[MetricsPage]:
    with served(PAGE + OF_VLLM) as page:
        yield page


def rows(screen: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows, by the names of the rows."""
    cells = [re.split(r"  +", line.strip()) for line in screen.splitlines()]
    return {name: rest for name, *rest in cells if rest}


def test_once_shows_a_column_per_tier(page: MetricsPage) -> None:
    shown = top(page.address, "--once").stdout
    assert shown.splitlines()[0].split() == ["nvme", "shared"]
    assert rows(shown) == {
        "nvme": ["shared"], "use": ["in use", "paused (2)"], "queries": ["10", "0"], "hit rate": ["70%", "-"],
        "tokens served": ["12,345", "0"], "seconds saved": ["4.2", "0.0"], "loaded": ["3.0 MiB", "0 B"],
        "stored": ["5.0 MiB", "0 B"], "ms per load": ["15.00", "-"], "ms in queue": ["5.00", "-"],
        "pending loads": ["2", "0"], "pending stores": ["5", "0"], "evicted": ["10", "0"], "never read": ["40%", "-"],
    }  # fmt: skip


def test_the_document_has_numbers_and_null_for_ratios_of_nothing(page: MetricsPage) -> None:
    document = json.loads(top(page.address, "--once", "--json").stdout)
    assert document["measured"] == {"own_hit_ratio": 0.25, "external_hit_ratio": 0.4}
    nvme, shared = document["tiers"]
    assert nvme == {
        "engine": "0", "tier": "nvme", "queries": 10, "query_hits": 7, "query_misses": 2, "hit_tokens": 12345,
        "load_bytes": 3 << 20, "store_bytes": 5 << 20, "evictions": 10, "evictions_unread": 4, "hit_rate": 0.7,
        "unread_rate": 0.4, "prefill_seconds_saved": 4.25, "pending_loads": 2, "pending_stores": 5, "breaker_open": 0,
        "mean_lookup_seconds": None, "mean_load_seconds": 0.015, "mean_load_queue_seconds": 0.005,
        "mean_store_seconds": None, "mean_store_queue_seconds": None,
    }  # fmt: skip
    assert (shared["breaker_open"], shared["hit_rate"], shared["unread_rate"]) == (2, None, None)


def test_a_file_and_the_standard_input_are_read_and_other_engines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(PAGE + lines(FIGURES, engine="1"))
    assert top(path, "--once").stdout == top("-", text=path.read_text()).stdout
    assert "1/nvme" in top(path, "--once").stdout


def test_wrong_addresses_and_pages_are_refused(page: MetricsPage) -> None:
    for source in ("http://127.0.0.1:1", f"{page.address}/health", "nothing.txt"):
        done = top(source, "--json", code=2)
        assert "cannot be read: " in done.stderr
        assert "give the address of a running vLLM" in json.loads(done.stdout)["problems"][0]
    for text in (OF_VLLM, OF_VLLM + lines({"jobs_total": 1}, tier="all")):
        page.text = text
        done = top(page.address, code=1)
        assert (done.stdout, "there are no metrics of offload-core; a vLLM with" in done.stderr) == ("", True)
        assert json.loads(top(page.address, "--json", code=1).stdout)["tiers"] == []
    assert "the shortest interval is 0.1s" in " ".join(top(page.address, "--interval", "10ms", code=2).stderr.split())


COUNTS = st.dictionaries(st.sampled_from(["queries_total", "query_hits_total", "load_seconds_sum"]), st.floats(0, 1e9))


@given(before=COUNTS, after=COUNTS, pending=st.integers(0, 9))
def test_no_figure_of_an_interval_is_negative(before: dict[str, float], after: dict[str, float], pending: int) -> None:
    view = TierView("0", "nvme", {**after, "pending_loads": pending})
    gone = view.since(TierView("0", "nvme", {**before, "pending_loads": 5}))
    assert all(value >= 0 for value in gone.values.values())
    assert gone.values["pending_loads"] == pending, "a gauge is as it is now"
    if all(after.get(name, 0) >= value for name, value in before.items()):
        assert {**gone.values, "pending_loads": 0} == {
            "pending_loads": 0, **{name: value - before.get(name, 0) for name, value in after.items()}
        }  # fmt: skip
    else:
        assert gone == view, "the engine was started again"


def test_a_pipe_gets_one_reading_below_the_other_until_the_engine_stops() -> None:
    with served(PAGE) as page:
        command = [*COMMAND, page.address, "--interval", "100ms"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            totals = [process.stdout.readline() for _ in range(4)]
            page.text = lines({**FIGURES, "queries_total": 13, "query_hits_total": 8})
            while (line := process.stdout.readline()).split() != ["hit", "rate", "33%"]:
                assert line, "no reading shows the three new queries"
            page.close()
            rest, error = process.communicate(timeout=60)
    assert [line.split() for line in totals][0::3] == [["nvme", "shared"], ["queries", "10", "0"]]
    assert "\x1b" not in "".join(totals) + rest
    assert error.startswith(f"the engine has stopped, or does not answer: 1 problem in {page.address}:")
    assert process.returncode == 1


class Terminal:
    """A command in a terminal of 80 columns and 24 lines."""

    def __init__(self, *command: str) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True
        )
        os.close(side)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while data := os.read(self._main, 65536):
                self.text += decoder.decode(data)

    def shows(self, text: str) -> None:
        wait_until(lambda: text in self.text, f"the terminal does not show {text!r}")

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(60)
        os.close(self._main)
        return code


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_view_in_a_terminal_is_drawn_anew_and_leaves_the_screen_as_it_was(
    page: MetricsPage, sent: signal.Signals
) -> None:
    terminal = Terminal(*COMMAND, page.address, "--interval", "100ms")
    terminal.shows("12,345")
    assert terminal.text.startswith(ENTER)
    assert "vLLM: 25% hits in its own cache, 40% from tiers" in terminal.text
    page.text = lines({**FIGURES, "hit_tokens_total": 12345 + 777})
    for text in ("13,122", "last 0.", " 777 "):
        terminal.shows(text)
    terminal.process.send_signal(sent)
    assert terminal.end() == 130
    assert LEAVE in terminal.text.rpartition("777")[2]
    assert "Traceback" not in terminal.text


def test_an_engine_that_stops_ends_the_view_with_a_line_on_the_usual_screen() -> None:
    with served(PAGE) as page:
        terminal = Terminal(*COMMAND, page.address, "--interval", "100ms")
        terminal.shows("last 0.")
    assert terminal.end() == 1
    assert "the engine has stopped, or does not answer" in terminal.text.rpartition(LEAVE)[2]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_the_view_in_tmux(page: MetricsPage) -> None:
    def tmux(*words: str) -> str:
        command = ["tmux", "-L", name, "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def screen() -> str:
        return tmux("capture-pane", "-p")

    name = f"offload-core-{uuid.uuid4().hex}"
    paths = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    tmux("new-session", "-d", "-x", "80", "-y", "24", shlex.join(["env", paths, *COMMAND, page.address]))
    try:
        wait_until(lambda: "queries" in screen(), "tmux shows no figures")
        assert rows(screen())["queries"][:1] == ["10"]
        page.text = lines({**FIGURES, "queries_total": 13, "query_hits_total": 8})
        wait_until(lambda: rows(screen()).get("hit rate", [])[:1] == ["62%"], "the view is not drawn anew")
        assert rows(screen()).keys() >= set(NAMES), "all figures fit"
        tmux("send-keys", "C-c")
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # it ended with its only command
            tmux("kill-server")
