"""Programs: one launch of a forward or of its gradients as XLA's programs hold it, by its text.

The text is canonical JSON, and says all that a launch depends on but addresses and the device. It
knows no array of JAX, so that a handler reads it without any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...call.fp8_checks import BACKWARD_SCALES
from ...call.kernel_choice import Device
from ...call.numbers import Arguments
from ...call.operands import boxed
from ...call.prepare.backward import PreparedBackward, prepare_backward
from ...call.prepare.forward import prepare_forward
from ...call.prepared import PreparedCall, refuse_addresses
from ...call.table import CARRIERS, INPUTS, WantedGradients
from ...call.tensors import TensorDesc
from ...errors import LaunchError
from ...fragments.features import program_named, register_programs

TARGET = "attngen"  # XLA's name of the handler
COUNTER_BYTES = 256  # before the workspace, of which the tile counter takes four
_ORDER = ("d_o", "o", "lse", *INPUTS, "dlse", *BACKWARD_SCALES)
Described = Mapping[str, "TensorDesc | None"]


@dataclass(frozen=True)
class Program:
    """A launch, but for addresses and the device.

    operands: those that there are, by their names, in the order in which the handler gets them.
    wanted: gradients of a backward, None of a forward. alone: whether nobody reads the LSE. arch:
    the architecture of its kernels; scratch: bytes of its last result, 0 for none.
    """

    operands: tuple[tuple[str, TensorDesc], ...]
    arguments: Arguments
    wanted: WantedGradients | None
    alone: bool
    arch: str
    scratch: int = 0

    @property
    def text(self) -> str:
        """The program as its attribute holds it."""
        plain = Arguments()._asdict()
        fields = self.arguments._asdict()
        data: dict[str, Any] = {
            "arguments": {name: x for name, x in fields.items() if x != plain[name]},
            "arch": self.arch,
            "operands": [[name, x.dtype, list(x.shape)] for name, x in self.operands],
            "scratch": self.scratch,
        }
        named = map(program_named, self.arguments.score_mod.split("+"))
        if traced := [each.text for each in named if each is not None]:
            data["functions"] = traced
        if self.alone:
            data["alone"] = True
        if self.wanted is not None:
            data["wanted"] = [name for name, asked in self.wanted._asdict().items() if asked]
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: bytes) -> Program:
        """The program of a text, whose functions of positions this process knows from now on.

        Raises: LaunchError where it is none that this version wrote.
        """
        try:
            data = json.loads(text)
            register_programs(data["functions"] if "functions" in data else ())
            wanted = None
            if "wanted" in data:
                asked = {name: name in data["wanted"] for name in WantedGradients._fields}
                wanted = WantedGradients(**asked)
            return cls(
                operands=tuple(
                    (name, TensorDesc.contiguous(shape, dtype))
                    for name, dtype, shape in data["operands"]
                    if name in _ORDER
                ),
                arguments=Arguments(**data["arguments"]),
                wanted=wanted,
                alone=data.get("alone", False),
                arch=data["arch"],
                scratch=data["scratch"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"no program of this version of attngen: {error!r}") from error

    def prepared(self, device: Device) -> PreparedCall | PreparedBackward:
        """Its launch on a device. Raises: SpecError, CompileError, LaunchError, CacheError."""
        given: Described = {**dict.fromkeys(_ORDER), **dict(self.operands)}
        if self.wanted is not None:
            named = {name: given[name] for name in ordered(given)}
            return prepare_backward(named, self.arguments, self.wanted, self._gathers, device)
        operands = [given[name] for name in INPUTS]
        found = prepare_forward(operands, self.arguments, device, refuse_addresses)
        return found.first_alone(lambda _: None) if self.alone else found

    @property
    def _gathers(self) -> bool:
        """Whether threads copy what a backward reads, since the copy engine could not."""
        named = dict(self.operands)
        odd = any(named[name].shape[-1] % 8 for name in ("q", "o"))
        return odd or not all(boxed(named[name]) for name in CARRIERS if name in named)


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """These names in the order in which programs take arrays."""
    there = {*names}
    return tuple(name for name in _ORDER if name in there)


def scratch_of(prepared: PreparedCall | PreparedBackward) -> int:
    """Bytes of the scratch that launches need, 0 for none: a counter of their own in graphs, whose
    nodes may run at once, then the workspace."""
    if not (prepared.workspace_bytes or prepared.counts_tiles):
        return 0
    return COUNTER_BYTES + -(-prepared.workspace_bytes // COUNTER_BYTES) * COUNTER_BYTES
