"""The same command as ``offload-core``, for ``python -m offload_core.cli``."""

from __future__ import annotations

from offload_core.cli import app

if __name__ == "__main__":
    app(prog_name="offload-core")
