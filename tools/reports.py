"""The JSON that the measuring tools write."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attngen.bench.machine import describe_machine
from attngen.io.values import to_data


def write_report(path: Path, schema: int, **fields: Any) -> None:
    """Fields of a run on this machine, today, UTC."""
    date = datetime.now(timezone.utc).date().isoformat()
    report = {"schema": schema, "date": date, "machine": to_data(describe_machine()), **fields}
    path.write_text(json.dumps(report, indent=1) + "\n")
