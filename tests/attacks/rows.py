"""The table of attacks; `python tests/make_attacks.py` writes it into benchmarks/attacks.md."""

from __future__ import annotations

import file_rows
import host_rows
import network_rows
import signal_rows
from scene import Row

ROWS: list[Row] = [*signal_rows.rows(), *network_rows.rows(), *host_rows.rows(), *file_rows.rows()]
