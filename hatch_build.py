"""Build hook of the wheel: writes down what its templates and headers are, so that a machine from
which they were removed still knows which kernels there are (attngen/io/files.py, `shipped`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedFacts(BuildHookInterface):  # type: ignore[type-arg]
    """Adds attngen/shipped.json to a wheel; an editable install has the files themselves."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        sys.path.insert(0, self.root)
        from attngen.compiler import cutlass, digest
        from attngen.fragments import features
        from attngen.io import files
        from attngen.io.values import to_data, to_json

        facts = {
            "features": features.scan(),
            "cutlass": cutlass.digest_atoms(cutlass.read_atoms()),
            **to_data(digest.read_shipped()),
        }
        path = Path(self.directory) / files.SHIPPED
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(facts, indent=1) + "\n")
        build_data["force_include"][str(path)] = f"attngen/{files.SHIPPED}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            from attngen.io import files

            (Path(self.directory) / files.SHIPPED).unlink()
