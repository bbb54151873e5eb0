"""Expected shares of a chip's peak: cycles of a block, what follows from them, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.targets.target import TARGETS
from tests.support.paths import ROOT
from tools import expected_shares
from tools.expected_shares import Block, block_of, kernel_of, row_of, shared_bytes

TURN = [
    *["HMMA.16816.F32.BF16 R4, R8, R2, R4"] * 4,
    "LDSM.16.M88.4 R8, [R2]",
    "LDGSTS.E.BYPASS.128 [R4], [R6.64]",
    "STS.64 [R4], R6",
    "LDS R4, [R6]",
    "MUFU.EX2 R4, R4",
    "FADD R4, R4, R5",
]


@pytest.mark.parametrize(("arch", "cycles"), [("sm_80", 8), ("sm_89", 16)])
def test_cycles_are_those_of_each_unit_of_a_scheduler(arch: str, cycles: int) -> None:
    found = block_of(TURN, TARGETS[arch])
    assert (found.products, found.instructions, found.exponentials) == (4 * cycles, 10, 8)
    assert list(map(shared_bytes, TURN[4:8])) == [512, 512, 256, 128]
    assert found.shared == 4 * (512 + 512 + 256 + 128) / 128


def test_share_grows_with_warps_and_with_products() -> None:
    even, heavy = Block(30, 10, 10, 10), Block(90, 10, 10, 10)
    assert even.share(1) == pytest.approx(1 / 2) and heavy.share(1) == pytest.approx(3 / 4)
    assert even.share(2) == pytest.approx(4 / 5)  # of 1 + 2 + 2 parts one has no warp that does
    assert even.share(2) < heavy.share(2) < heavy.share(3) < 1


def test_page_has_a_kernel_as_it_compiles() -> None:
    found = kernel_of("sm_89", 64, "forward")
    assert found.warps == 8 and found.block.products == 16 * 128
    assert row_of(found) in (ROOT / "docs" / "guide" / "gpus.md").read_text().splitlines()


def test_main_writes_between_the_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_shares, "tables", lambda: iter(["a", "b", ""]))
    page = tmp_path / "page.md"
    page.write_text(f"x\n{expected_shares.MARK}\nold\n{expected_shares.MARK}\ny\n")
    for _ in range(2):
        assert expected_shares.main(["-o", str(page)]) == 0
        mark = expected_shares.MARK
        assert page.read_text() == f"x\n{mark}\n\na\nb\n{mark}\ny\n"
