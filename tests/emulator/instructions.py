"""From inline PTX to calls of the runtime, so that a host compiler takes a kernel's source.

Each `asm` statement of the headers and templates has one entry here: its text, with the operands
%0, %1 …, and the C++ statement that stands for it. A statement without an entry is an error.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

_E = "emulator::"
_NARROW = (("e4m3", "emulator::Format::kE4m3"), ("e5m2", "emulator::Format::kE5m2"))
_F16, _BF16 = "emulator::Format::kFp16", "emulator::Format::kBf16"


def _halves(form: str, expression: str) -> str:
    """Both halves of %0, of halves x(%1), x(%2) … of the operands."""
    return f"%0 = {_E}each_half({form}, [&](auto x) {{ return {expression}; }})"


def _mma(name: str) -> str:
    form = {"bf16": _BF16, "f16": _F16}[name]
    return f"{_E}warp_multiply({form}, {form}, acc, a, b0, b1)"


def _tensor_load(rank: int) -> str:
    places = ", ".join(f"%{3 + i}" for i in range(rank))
    return (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        f".L2::cache_hint [%0], [%1, {{{places}}}], [%2], %{3 + rank};"
    )


def _tensor_load_both(rank: int) -> str:
    places = ", ".join(f"%{3 + i}" for i in range(rank))
    return (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        f".multicast::cluster.L2::cache_hint [%0], [%1, {{{places}}}], [%2], %{3 + rank}, "
        f"%{4 + rank};"
    )


def _tensor_add(rank: int) -> str:
    places = ", ".join(f"%{2 + i}" for i in range(rank))
    return (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group "
        f"[%0, {{{places}}}], [%1];"
    )


def _tensor_store(rank: int) -> str:
    places = ", ".join(f"%{2 + i}" for i in range(rank))
    return f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%0, {{{places}}}], [%1];"


STATEMENTS: dict[str, str] = {
    # Fences of the compiler, and what changes no result.
    "": "",
    "pmevent 1;": "",
    "fence.mbarrier_init.release.cluster;": f"{_E}mbarrier_init_fence()",
    "fence.proxy.async.global;": "",
    "wgmma.fence.sync.aligned;": f"{_E}multiply_fence()",
    "prefetch.tensormap [%0];": "",
    "prefetch.global.L2 [%0];": "",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "",
    "griddepcontrol.launch_dependents;": "",
    "griddepcontrol.wait;": f"{_E}await_kernel_before()",
    "{.reg .pred p;setp.eq.u32 p, %0, 0x9E3779B9;@p griddepcontrol.launch_dependents;}": "",
    # Places.
    "mov.u32 %0, %%laneid;": f"%0 = {_E}lane()",
    "mov.u32 %0, %%nsmid;": f"%0 = {_E}multiprocessors()",
    "mov.u32 %0, %%clock;": f"%0 = {_E}clock()",
    # Barriers.
    "mbarrier.init.shared::cta.b64 [%0], %1;": f"{_E}mbarrier_init(%0, %1)",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": f"{_E}mbarrier_arrive(%0)",
    "mbarrier.arrive.shared::cta.b64 _, [%0], %1;": (
        f"for (u32 left = %1; left > 0; --left) {_E}mbarrier_arrive(%0)"
    ),
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": f"{_E}mbarrier_arrive(%0, %1)",
    "{.reg .pred done;WAIT:mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
    "@done bra DONE;bra WAIT;DONE:}": f"{_E}mbarrier_wait(%0, %1)",
    "{.reg .b32 there;mapa.shared::cluster.u32 there, %0, %1;"
    "mbarrier.arrive.shared::cluster.b64 _, [there];}": f"{_E}mbarrier_arrive_at(%0, %1)",
    "{.reg .b32 there, none;mov.u32 none, %%laneid;and.b32 none, none, %0;"
    "mapa.shared::cluster.u32 there, %1, %2;add.u32 there, there, none;"
    "mbarrier.arrive.shared::cluster.b64 _, [there];}": (
        f"{_E}mbarrier_arrive_at_after(%0, %1, %2)"
    ),
    "mapa.shared::cluster.u32 %0, %1, %2;": f"%0 = {_E}place_of(%1, %2)",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];": (
        f"{_E}send(%0, {{%1, %2, %3, %4}}, %5)"
    ),
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];": (
        f"{_E}send(%0, {{__uint_as_float(%1)}}, %2)"
    ),
    "barrier.cluster.arrive.release;barrier.cluster.wait.acquire;": f"{_E}cluster_sync()",
    "bar.sync %0, %1;": f"{_E}barrier_sync(%0, %1)",
    "bar.arrive %0, %1;": f"{_E}barrier_arrive(%0, %1)",
    "{.reg .pred mine, every;setp.ne.u32 mine, %3, 0;bar.red.and.pred every, %1, %2, mine;"
    "selp.u32 %0, 1, 0, every;}": f"%0 = {_E}barrier_all(%1, %2, (%3) != 0)",
    # Counters in global memory.
    "ld.acquire.gpu.global.s32 %0, [%1];": f"%0 = {_E}load_acquire(%1)",
    "atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;": "%0 = atomicCAS(%1, 0, 1)",
    "red.release.gpu.global.add.s32 [%0], 1;": "atomicAdd(%0, 1)",
    "red.release.gpu.global.add.s32 [%0], %1;": "atomicAdd(%0, %1)",
    "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};": (
        "float* sums = %0; atomicAdd(sums, %1); atomicAdd(sums + 1, %2); "
        "atomicAdd(sums + 2, %3); atomicAdd(sums + 3, %4)"
    ),
    "ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];": (
        "const auto* loaded = static_cast<const uint4*>(%4); "
        "%0 = loaded->x; %1 = loaded->y; %2 = loaded->z; %3 = loaded->w;"
    ),
    # Copies.
    "cp.async.ca.shared.global [%0], [%1], 16, %2;": f"{_E}copy_async(%0, %1, 16, %2)",
    "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;": f"{_E}copy_async(%0, %1, 16, %2)",
    "cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;": f"{_E}copy_async(%0, %1, %2, %3)",
    "cp.async.wait_all;": f"{_E}await_copies()",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];": f"{_E}arrive_after_copies(%0)",
    _tensor_load(4): f"{_E}tensor_load(%0, %1, %2, {{%3, %4, %5, %6}})",
    _tensor_load(5): f"{_E}tensor_load(%0, %1, %2, {{%3, %4, %5, %6, %7}})",
    _tensor_load_both(4): f"{_E}tensor_load_both(%0, %1, %2, {{%3, %4, %5, %6}})",
    _tensor_load_both(5): f"{_E}tensor_load_both(%0, %1, %2, {{%3, %4, %5, %6, %7}})",
    _tensor_store(4): f"{_E}tensor_store(%0, %1, {{%2, %3, %4, %5}})",
    _tensor_add(4): f"{_E}tensor_add(%0, %1, {{%2, %3, %4, %5}})",
    _tensor_store(5): f"{_E}tensor_store(%0, %1, {{%2, %3, %4, %5, %6}})",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        f"{_E}bulk_load(%0, %1, %2, %3)"
    ),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;": (
        f"{_E}bulk_add(%0, %1, %2)"
    ),
    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;": f"{_E}bulk_store(%0, %1, %2)",
    "cp.async.bulk.commit_group;": f"{_E}bulk_commit()",
    "cp.async.bulk.wait_group.read %0;": f"{_E}bulk_wait_read(%0)",
    "cp.async.bulk.wait_group 0;": f"{_E}bulk_wait()",
    "fence.proxy.async.shared::cta;": f"{_E}fence_async()",
    # Shared memory.
    "st.shared.f32 [%0], %1;": f"{_E}store_shared(%0, {{%1}})",
    "st.shared.v4.f32 [%0], {%1, %2, %3, %4};": f"{_E}store_shared(%0, {{%1, %2, %3, %4}})",
    "st.shared.v4.b32 [%0], {%1, %2, %3, %4};": f"{_E}store_shared(%0, {{%1, %2, %3, %4}})",
    "{.reg .b16 x;cvt.u16.u32 x, %1;st.shared.b16 [%0], x;}": (
        f"{_E}store_shared(%0, {{static_cast<unsigned short>(%1)}})"
    ),
    "ld.shared.f32 %0, [%1];": (
        f"float loaded[1]; {_E}load_shared(loaded, %1); %0 = loaded[0]"
    ),
    **{
        f"ld.shared.v{n}.{kind} {{{', '.join(f'%{i}' for i in range(n))}}}, [%{n}];": (
            f"{name} loaded[{n}]; {_E}load_shared(loaded, %{n}); "
            + " ".join(f"%{i} = loaded[{i}];" for i in range(n))
        )
        for n in (2, 4)
        for kind, name in (("f32", "float"), ("b32", "u32"))
    },
    # Matrices of a warp.
    **{
        f"ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{%0, %1, %2, %3}}, [%4];": (
            f"{_E}load_matrices(fragment, %4, {transposed})"
        )
        for way, transposed in (("", "false"), (".trans", "true"))
    },
    **{
        f"stmatrix.sync.aligned.m8n8.x4{way}.shared.b16 [%0], {{%1, %2, %3, %4}};": (
            f"const u32 rows[4] = {{%1, %2, %3, %4}}; {_E}store_matrices(%0, rows, 4, {transposed})"
        )
        for way, transposed in (("", "false"), (".trans", "true"))
    },
    "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};": (
        f"const u32 rows[2] = {{%1, %2}}; {_E}store_matrices(%0, rows, 2, false)"
    ),
    **{
        f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}},"
        " {%8, %9}, {%0, %1, %2, %3};": _mma(t)
        for t in ("bf16", "f16")
    },
    "wgmma.commit_group.sync.aligned;": f"{_E}multiply_commit()",
    "wgmma.wait_group.sync.aligned %0;": f"{_E}multiply_wait(%0)",
    # Arithmetic.
    "ex2.approx.ftz.f32 %0, %1;": f"%0 = {_E}flushed(std::exp2({_E}flushed(%1)))",
    "lg2.approx.ftz.f32 %0, %1;": f"%0 = std::log2({_E}flushed(%1))",
    "rcp.approx.ftz.f32 %0, %1;": f"%0 = {_E}flushed(1.f / {_E}flushed(%1))",
    "mul.wide.u32 %0, %1, %2;": "%0 = static_cast<u64>(%1) * (%2)",
    "prmt.b32 %0, %1, %2, %3;": f"%0 = {_E}permute(%1, %2, %3)",
    "prmt.b32 %0, %1, 0, 0x1404;": f"%0 = {_E}permute(%1, 0, 0x1404)",
    "prmt.b32 %0, %1, 0, 0x3424;": f"%0 = {_E}permute(%1, 0, 0x3424)",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": f"%0 = {_E}pack16({_BF16}, %2, %1)",
    "cvt.rn.f16x2.f32 %0, %1, %2;": f"%0 = {_E}pack16({_F16}, %2, %1)",
    "cvt.rn.relu.bf16x2.f32 %0, %1, %2;": (
        f"%0 = {_E}pack16({_BF16}, {_E}positive(%2), {_E}positive(%1))"
    ),
    "cvt.rn.relu.f16x2.f32 %0, %1, %2;": (
        f"%0 = {_E}pack16({_F16}, {_E}positive(%2), {_E}positive(%1))"
    ),
    "mul.rn.bf16x2 %0, %1, %2;": _halves(_BF16, "x(%1) * x(%2)"),
    "mul.rn.f16x2 %0, %1, %2;": _halves(_F16, "x(%1) * x(%2)"),
    "fma.rn.f16x2 %0, %1, %2, %3;": _halves(_F16, "std::fma(x(%1), x(%2), x(%3))"),
    "sub.rn.sat.f16x2 %0, %1, %2;": _halves(_F16, "std::fmin(std::fmax(x(%1) - x(%2), 0.f), 1.f)"),
    "{.reg .b16 low, high;mov.b32 {low, high}, %2;cvt.f32.f16 %0, low;cvt.f32.f16 %1, high;}": (
        f"%0 = {_E}decode({_F16}, (%2) & 0xffff); %1 = {_E}decode({_F16}, (%2) >> 16)"
    ),
    **{
        f"{{.reg .b16 x;cvt.rn.satfinite.{name}x2.f32 x, %1, %2;cvt.u32.u16 %0, x;}}": (
            f"%0 = {_E}pack8({_E}Format::{form}, %2, %1)"
        )
        for name, form in (("e4m3", "kE4m3"), ("e5m2", "kE5m2"))
    },
    **{
        f"{{.reg .b16 x, y;cvt.rn.satfinite.{name}x2.f32 x, %2, %1;"
        f"cvt.rn.satfinite.{name}x2.f32 y, %4, %3;mov.b32 %0, {{x, y}};}}": (
            f"%0 = {_E}pack8({_E}Format::{form}, %1, %2) | "
            f"{_E}pack8({_E}Format::{form}, %3, %4) << 16"
        )
        for name, form in (("e4m3", "kE4m3"), ("e5m2", "kE5m2"))
    },
    "{.reg .b16 low, high;mov.b32 {low, high}, %2;cvt.rn.f16x2.e4m3x2 %0, low;"
    "cvt.rn.f16x2.e4m3x2 %1, high;}": "; ".join(
        f"%{i} = {_E}pack16({_F16}, {_E}decode({_E}Format::kE4m3, (%2) >> {16 * i} & 0xff), "
        f"{_E}decode({_E}Format::kE4m3, (%2) >> {16 * i + 8} & 0xff))"
        for i in range(2)
    ),
}

# Statements of CUTLASS's wrappers that kernels call; each of its others is an error when it is met.
WRAPPERS: dict[str, str] = {
    **{
        f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{%0,  %1,  %2,  %3}},"
        "{%4,  %5,  %6,  %7},{%8,  %9},{%10, %11, %12, %13};": (
            f"float acc[4] = {{%10, %11, %12, %13}}; const unsigned a[4] = {{%4, %5, %6, %7}}; "
            f"{_E}warp_multiply({form}, {form}, acc, a, %8, %9); "
            + " ".join(f"%{i} = acc[{i}];" for i in range(4))
        )
        for t, form in (("bf16", _BF16), ("f16", _F16))
    },
    **{
        f"mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32 {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, "
        "{%8,%9}, {%10,%11,%12,%13};": (
            "float acc[4] = {%10, %11, %12, %13}; const unsigned a[4] = {%4, %5, %6, %7}; "
            f"{_E}warp_multiply({form_a}, {form_b}, acc, a, %8, %9); "
            + " ".join(f"%{i} = acc[{i}];" for i in range(4))
        )
        for a, form_a in _NARROW
        for b, form_b in _NARROW
    },
    **{
        f"ldmatrix.sync.aligned.x4{way}.m8n8.shared.b16 {{%0, %1, %2, %3}}, [%4];": (
            f"unsigned fragment[4]; {_E}load_matrices(fragment, %4, {transposed}); "
            + " ".join(f"%{i} = fragment[{i}];" for i in range(4))
        )
        for way, transposed in (("", "false"), (".trans", "true"))
    },
    "cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;": f"{_E}copy_async(%0, %1, %2, %3)",
    "cp.async.commit_group;": f"{_E}commit_copies()",
    "cp.async.wait_group %0;": f"{_E}await_copy_groups(%0)",
    "cp.async.wait_all;": f"{_E}await_copies()",
}
_FORMATS = {"bf16": "kBf16", "f16": "kFp16", "e4m3": "kE4m3", "e5m2": "kE5m2"}
_PRODUCT = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?:16|32)\.f32\.(?P<a>\w+)\.(?P<b>\w+) "
    r"\{[^}]*\}, (?P<in_a>a|\{[^}]*\}), b, (?P<add>p|1), 1, 1(?P<across>|, 0|, 1|, 0, 0|, 0, 1);"
)
_STATEMENT = re.compile(r"\basm(?:\s+volatile)?\s*\(")


def rewrite_wrappers(source: str) -> str:
    """CUTLASS's wrappers with every `asm` statement replaced, by a failure where none has been said
    what it does."""
    entries = collections.defaultdict(lambda: f'{_E}fail("an unknown instruction")', WRAPPERS)
    return _replace(source, entries)


def rewrite(source: str) -> str:
    """The source with every `asm` statement replaced. Raises: KeyError for one without an entry."""
    return _replace(source, STATEMENTS)


def _replace(source: str, entries: Mapping[str, str]) -> str:
    parts, end = [], 0
    for match in _STATEMENT.finditer(source):
        if match.start() < end:
            continue
        close = _closing(source, match.end())
        sections = _sections(source[match.end() : close])
        parts += [source[end : match.start()], "{ ", _statement(sections, entries), "; }"]
        end = source.index(";", close) + 1
    return "".join([*parts, source[end:]])


def _statement(sections: list[str], entries: Mapping[str, str]) -> str:
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])).replace("\\n", "")
    operands = [_operand(each) for part in sections[1:3] for each in _split(part, ",") if each]
    if "wgmma.mma_async" in text:
        chain = _PRODUCT.findall(text)
        if len(chain) != text.count("wgmma.mma_async"):
            raise KeyError(text)
        return _product(chain, operands)
    return re.sub(r"%(\d+)", lambda m: f"({operands[int(m[1])]})", entries[text])


def _product(chain: list[tuple[str, ...]], operands: list[str]) -> str:
    """A chain of wgmma, whose operands are acc, a, b, whether to add, and high words."""
    shapes = {(n, a, b, in_a == "a", flags) for n, a, b, in_a, _, flags in chain}
    adds = [add for *_, add, _ in chain]
    if len(shapes) > 1 or adds != ["p"] + ["1"] * (len(chain) - 1):
        raise ValueError(f"a chain of different products: {chain}")
    n, a, b, in_a, _, flags = chain[0]
    registers = in_a != "a"
    product = (
        f"{_E}Product{{{n}, {len(chain)}, {_E}Format::{_FORMATS[a]}, {_E}Format::{_FORMATS[b]}, "
        f"{str(registers).lower()}, {str(flags.endswith('1')).lower()}}}"
    )
    high = operands[-1], operands[-1] if registers else operands[-2]
    return f"{_E}multiply({product}, acc, a, b, accumulate != 0, {high[1]}, {high[0]})"


def _operand(text: str) -> str:
    """The expression of `"constraint"(expression)`."""
    return text[text.index("(") + 1 : text.rindex(")")]


def _closing(source: str, start: int) -> int:
    """Where the parenthesis closes that has been opened before `start`."""
    depth, at, quoted = 1, start, False
    while True:
        character = source[at]
        if character == '"' and source[at - 1] != "\\":
            quoted = not quoted
        elif not quoted and character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return at
        at += 1


def _sections(text: str) -> list[str]:
    """Template, outputs, inputs, clobbers."""
    return _split(text, ":")


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators outside of strings and brackets."""
    parts, depth, quoted, last = [], 0, False, 0
    for at, character in enumerate(text):
        if character == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and not depth:
            parts.append(text[last:at].strip())
            last = at + 1
    return [*parts, text[last:].strip()]
