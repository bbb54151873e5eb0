"""Recent calls: what a call like another skips, and what makes a call unlike it. The CPU passes for
a device with kernels, which start nothing."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

import attngen
from attngen import SpecError
from attngen.frontends.pytorch import routing
from attngen.frontends.pytorch.calls import calls
from attngen.frontends.pytorch.checked_call import CheckedCall
from tests.support import launch_kit
from tests.support.caches import BACKWARD, FORWARD, forget, held

PAGED = "paged_kv_bshd_bshd_bshd"


@pytest.fixture
def seen(monkeypatch):
    """How each call was served: `launch`es with their stream's addresses, and `checked` where its
    arguments were looked at."""
    found = []

    def checked(call):
        found.append("checked")
        return use(call)

    def launch(prepared, addresses, stream):
        found.append(addresses.copy())

    use = routing.use_kernels
    for name, stand_in in launch_kit.stand_ins(launch).items():
        monkeypatch.setattr(name, stand_in)
    monkeypatch.setattr(routing, "use_kernels", checked)
    forget(monkeypatch, *FORWARD, *BACKWARD)
    return found


def plain(**changes):
    """A call of three tensors, new ones each time."""
    q, k, v = (torch.zeros(2, 200, 4, 64, dtype=torch.bfloat16) for _ in "qkv")
    return {"q": q, "k": k, "v": v, "backend": "cuda", **changes}


def paged(**changes):
    k, v = (torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    named = {"page_table": torch.zeros(3, 3).int(), "seqused_kv": torch.zeros(3).int()}
    q = torch.zeros(3, 1, 4, 64, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": v, "layout": PAGED, **named, "backend": "cuda", **changes}


def found_again(make, seen) -> bool:
    """Whether the second of two equal calls is found among the recent ones."""
    attngen.attention(**make())
    hits, find = [], calls.find
    calls.find = lambda *call: hits.append(find(*call)) or hits[-1]
    try:
        attngen.attention(**make())
    finally:
        calls.find = find
    return hits[0] is not None and hits[0].direct is not None


@pytest.mark.parametrize("make", [plain, paged])
def test_call_like_another_is_found_and_gets_its_own_addresses(seen, make):
    assert found_again(make, seen)
    assert seen.count("checked") == 1
    call = make()
    del seen[:]
    out = attngen.attention(**call)
    assert seen and "checked" not in seen
    for addresses in seen:
        tensors = {name: call[name] for name in "qkv"} | {"o": out}
        assert {name: addresses[name] for name in tensors} == {
            name: tensor.data_ptr() for name, tensor in tensors.items()
        }
        assert addresses["lse"] == 1 << 40  # written where nobody reads


@pytest.mark.parametrize("make", [plain, paged])
@pytest.mark.parametrize(
    "changes",
    [{"softmax_scale": 0.5}, {"window": (3, 0)}, {"mask": "causal"}, {"softmax": "off_by_one"}],
    ids=str,
)
def test_call_of_other_arguments_is_looked_at(seen, make, changes):
    assert found_again(make, seen)
    del seen[:]
    attngen.attention(**make(**changes))
    assert seen.count("checked") == 1


def test_call_of_other_tensors_is_looked_at(seen):
    assert found_again(paged, seen)
    call = paged()
    longer = torch.zeros(3, 4).int()
    others = [
        {"q": call["q"][:, :, :2]},
        {"k": torch.zeros(10, 16, 2, 64, dtype=torch.bfloat16)},
        {"page_table": longer},
        {"page_table": longer[:, :3]},  # another stride
        {"page_table": (call["page_table"], longer)},
        {"seqused_q": call["seqused_kv"]},
        {name: call[name].half() for name in "qkv"},
    ]
    for changes in others:
        del seen[:]
        attngen.attention(**{**call, **changes})
        assert seen.count("checked") == 1, changes


@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"sink": True}], ids=str)
def test_call_that_somebody_looks_on_at_is_not_launched_directly(seen, monkeypatch, more):
    def make():
        sink = {"sink": torch.zeros(4), "softmax": "learnable"} if "sink" in more else more
        return plain(**sink)

    assert found_again(make, seen)
    reached = []
    monkeypatch.setattr(CheckedCall, "launch", lambda self, operands: reached.append(operands))

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    attngen.attention(**make())
    assert not reached
    with Mode():
        attngen.attention(**make())
    with torch.autograd.profiler.profile():
        attngen.attention(**make())
    attngen.attention(**{**make(), "q": plain()["q"].requires_grad_()})
    assert len(reached) == 3


def test_default_device_looks_on_at_nothing(seen):
    assert found_again(plain, seen)
    del seen[:]
    with torch.device("cpu"):
        attngen.attention(**plain())
    assert len(seen) == 1 and "checked" not in seen and seen[0]["lse"] == 1 << 40


def test_call_with_gradients_is_remembered_apart(seen):
    def trained():
        call = plain()
        return {**call, "k": call["k"].requires_grad_()}

    assert found_again(plain, seen) and found_again(trained, seen)
    del seen[:]
    for make in (trained, plain, trained):
        call = make()
        out = attngen.attention(**call)
        assert out.requires_grad == (make is trained)
        (addresses,) = seen  # nothing was checked
        assert [addresses[name] for name in "qkv"] == [call[name].data_ptr() for name in "qkv"]
        assert (addresses["lse"] == 1 << 40) == (make is plain)  # gradients read it
        with torch.no_grad():
            assert not attngen.attention(**call).requires_grad
        del seen[:]


def test_call_without_gradients_is_none_of_one_that_has_them(seen):
    """A checkpoint's two passes have equal tensors."""
    leaf = {**plain(), "q": plain()["q"].requires_grad_()}

    def evaluated():
        with torch.no_grad():
            return attngen.attention(**leaf)

    for _ in range(3):
        assert not evaluated().requires_grad
    for _ in range(3):
        assert attngen.attention(**leaf).requires_grad
        assert not evaluated().requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_recent_calls_keep_no_tensor_alive(seen, trained):
    def call():
        given = plain()
        given["q"].requires_grad_(trained)
        out = attngen.attention(**given)
        assert out.requires_grad == trained
        return [weakref.ref(x) for x in (*(given[name] for name in "qkv"), out)]

    for _ in range(3):
        assert all(held() is None for held in call())


def test_call_under_autocast_is_remembered_apart(seen):
    assert found_again(plain, seen)
    wide = {name: plain()[name].float() for name in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        assert found_again(plain, seen)  # nothing is cast
        for _ in range(3):
            assert attngen.attention(**wide, backend="cuda").dtype == torch.bfloat16
    assert seen.count("checked") == 1
    assert attngen.attention(**plain()).dtype == torch.bfloat16


def shifted(tensor):
    """Copy a tensor to where it begins two bytes further on."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape).copy_(tensor)


def test_call_like_another_whose_tensors_begin_anywhere_reaches_other_kernels(seen):
    assert found_again(plain, seen)
    del seen[:]
    k = shifted(plain()["k"])
    out = attngen.attention(**plain(k=k))
    assert "checked" not in seen and out.shape == k.shape
    assert seen[-1]["k"] == k.data_ptr() and seen[-1]["k"] % 16 == 2
    assert found_again(paged, seen)
    with pytest.raises(SpecError, match="16 bytes"):
        attngen.attention(**paged(k=shifted(paged()["k"])))


def test_tensor_given_twice_is_remembered_apart_from_two_tensors(seen):
    def same():
        call = plain()
        return {**call, "v": call["k"]}

    assert found_again(same, seen)
    assert all(x["k"] == x["v"] for x in seen if x != "checked")
    for make in (plain, same, plain):  # the others' formats are the same
        del seen[:]
        call = make()
        attngen.attention(**call)
        assert [(x["k"], x["v"]) for x in seen] == [tuple(call[name].data_ptr() for name in "kv")]


def test_recent_calls_of_many_shapes_are_few(seen):
    for length in [*range(1, 20)] * 2:
        q, k, v = (torch.zeros(1, length, 2, 64, dtype=torch.bfloat16) for _ in "qkv")
        attngen.attention(q, k, v, backend="cuda")
    assert seen.count("checked") == 19
    assert all(len(kept) <= 4 for kept in calls.recent.values())


def packed(longest=200, **changes):
    q, k, v = (torch.zeros(300, 4, 64, dtype=torch.bfloat16) for _ in "qkv")
    ends = torch.tensor([0, 100, 300], dtype=torch.int32)
    named = {"layout": "thd", "mask": "padding_causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return {"q": q, "k": k, "v": v, **named, "max_seqlen_q": longest, **changes, "backend": "cuda"}


class Unread(torch.Tensor):
    """A number whose device would have to be waited for."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = ("__bool__", "__int__", "__index__", "__float__", "item", "tolist", "__ge__")
        assert function.__name__ not in names
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("by_products", [{}, {"return_lse": True}], ids=["bare", "lse"])
def test_fresh_tensor_of_the_longest_length_is_like_any_other(seen, by_products, subclass):
    def fresh():
        number = torch.tensor(200, dtype=torch.int32)
        return number.as_subclass(Unread) if subclass else number

    for _ in range(2):  # its arguments are known, and it is remembered
        attngen.attention(**packed(fresh(), max_seqlen_kv=fresh(), **by_products))
    sizes = [len(each) for each in held(*FORWARD)]
    del seen[:]
    for _ in range(3):
        attngen.attention(**packed(fresh(), max_seqlen_kv=fresh(), **by_products))
    assert seen and "checked" not in seen
    assert [len(each) for each in held(*FORWARD)] == sizes
    attngen.attention(**packed(None, **by_products))  # as if none were given
    assert "checked" not in seen


def test_longest_length_of_more_than_one_number_is_refused(seen):
    with pytest.raises(SpecError, match="max_seqlen_q needs a number"):
        attngen.attention(**packed(torch.tensor([200, 100])))
