"""Problem: what a kernel must compute, compile-time facts only, nothing left to choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..fragments.program import MASK_PREFIX, learns

Direction = Literal["fwd", "bwd", "append", "cast", "bwd_cast", "mask"]
LISTED = "listed"  # the iteration of kernels that visit the blocks that a mask made before shows
BITS = "bits"  # of those that visit others, too, and read its bits
DType = Literal["fp16", "bf16", "fp32", "e4m3", "e5m2"]
Sequence = Literal["dense", "used", "packed"]
CAST_HEAD_DIM = 16  # in the name of a cast, which has rows of any length, and of a mask
BIASED_HEAD_DIM = 128  # the largest of a backward of 8 bits beside a bias
MIXED_HEAD_DIM = 128  # the largest of a mixed backward
MIXED_BIASED_HEAD_DIM = 64  # and beside a bias
BIASES = ("pre_scale_bias", "post_scale_bias")  # scores that read a tensor of their own
TOKEN_SCALES = "token_scales"  # the score of products whose operands have scales a token
DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1}


@dataclass(frozen=True)
class Problem:
    """One attention kernel family member, independent of architecture, shape and layout.

    Batch, lengths, head counts, strides, window sizes, scale and pointers are run-time
    arguments and therefore absent, as is the probability of a `dropout`. `masks` and `scores` name
    fragments in the order in which they apply, `attn_mask` adds a mask of bits; `q_seq`, `kv_seq`,
    `kv_fetch` and `kv_iter` name the fragments that say where data comes from. `dtype_o` is fp32
    for the partial outputs that are combined later. A backward that is `deterministic` adds up dQ
    in an order that does not change from run to run. A forward with `max_logit` also gives the
    largest score of each head. Of rows that the copy engine cannot read (`kv_fetch` gather) head
    dims are those of tiles, whole steps of 16; how many columns there are is a run-time argument.
    With `positions` the diagonal's place, and those of the first row and column of dropout, are
    run-time arguments. A forward that `continues` joins the output and LSE that it finds. `decode`
    is for few queries a sequence: keys are split over CTAs, query heads of a group share a tile. A
    backward in 8 bits has output gradients of `dtype_d_o`, which is what dS is stored as, and makes
    gradients of `dtype_grad`; its `dtype_o` is the output's that it reads. Of one in 16 bits
    `dtype_grad` is fp32 where gradients are parts of sums. Elsewhere both are None. A `mixed`
    backward in 8 bits has weights and dS in bfloat16, for products with operands that are widened
    to it. An append writes new keys and values, of `dtype_q`, to a cache of `dtype_kv`, a cast
    stores numbers of the one in the other; both ask of all else for nothing, as does the making of
    a mask, but for the traced one that it names. `fragment_digests` tell the texts of masks and
    scores that are not among attngen's templates from others of their names; that of a callable's
    is its program, which is all that its kernels need of it.
    """

    direction: Direction
    dtype_q: DType
    dtype_kv: DType
    dtype_o: DType
    head_dim_qk: int
    head_dim_v: int
    masks: tuple[str, ...]
    scores: tuple[str, ...]
    softmax: str
    q_seq: Sequence
    kv_seq: Sequence
    kv_fetch: str
    kv_iter: str
    deterministic: bool = False
    max_logit: bool = False
    dropout: bool = False
    attn_mask: bool = False
    decode: bool = False
    fragment_digests: tuple[str, ...] = ()
    dtype_d_o: DType | None = None
    dtype_grad: DType | None = None
    positions: bool = False
    continues: bool = False
    mixed: bool = False

    @property
    def bias(self) -> bool:
        """Whether a score reads a bias."""
        return any(name in BIASES for name in self.scores)

    @property
    def token_scales(self) -> bool:
        """Whether each token of Q, K and V has a scale of its own, a head at a time."""
        return TOKEN_SCALES in self.scores

    @property
    def dtype_bias(self) -> DType:
        """The dtype of a bias: Q's, and bf16 beside FP8, which would leave it 2 or 3 bits."""
        return "bf16" if self.eight_bit else self.dtype_q

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.kv_fetch == "page_tma"

    @property
    def listed(self) -> bool:
        """Whether kernels visit the blocks that a mask made before shows."""
        return self.kv_iter == LISTED

    @property
    def made(self) -> bool:
        """Whether the bits of its `attn_mask`, and which blocks these show, were made before."""
        return self.kv_iter in (LISTED, BITS)

    @property
    def asks_mask(self) -> bool:
        """Whether kernels ask the program of a mask made before where its map shows a part of a
        block, and there are no bits."""
        traced = any(name.startswith(MASK_PREFIX) for name in self.masks)
        return traced and self.direction != "mask"

    @property
    def packs_mask(self) -> bool:
        """Whether its `attn_mask` is booleans, which a kernel before the others packs."""
        return self.attn_mask and not self.made

    @property
    def gather(self) -> bool:
        """Whether threads copy the rows of all operands and store those of results."""
        return self.kv_fetch == "gather"

    @property
    def eight_bit(self) -> bool:
        """Whether Q, and with it K and V, are FP8."""
        return DTYPE_BYTES[self.dtype_q] == 1

    def dtype_of(self, tensor: str) -> DType:
        """The dtype of an operand, the output or a gradient, by the name of its parameter."""
        if tensor in ("k", "v"):
            return self.dtype_kv
        if tensor == "o":
            return self.dtype_o
        if tensor == "d_o":
            return self.dtype_d_o or self.dtype_q
        gradient = tensor in ("dq", "dk", "dv")
        return (self.dtype_grad or self.dtype_q) if gradient else self.dtype_q

    @property
    def wide_gradients(self) -> bool:
        """Whether gradients of 16-bit operands are float32."""
        return self.dtype_grad == "fp32"

    @property
    def widens(self) -> bool:
        """Whether K and V have 8 bits beside a Q of 16, to which the kernel widens them."""
        return DTYPE_BYTES[self.dtype_kv] == 1 and not self.eight_bit

    def backward(self, deterministic: bool = False) -> Problem:
        """The backward of this forward. The LSE is all that it needs of the softmax, sinks and
        all, and a largest score has no gradient."""
        return replace(
            self, direction="bwd", deterministic=deterministic, softmax="vanilla", max_logit=False
        )

    def append(self, head_dim_qk: int, head_dim_v: int) -> Problem:
        """The append of new keys and values, of these head dims, to a cache that this forward
        reads."""
        return self._of_no_scores("append", head_dim_qk, head_dim_v, self.dtype_q)

    def mask(self) -> Problem:
        """The making of a mask, which a callable says: of its program alone."""
        made = self._of_no_scores("mask", CAST_HEAD_DIM, CAST_HEAD_DIM, self.dtype_q)
        return replace(made, masks=self.masks, fragment_digests=self.fragment_digests)

    def cast(self, direction: Direction) -> Problem:
        """The cast of this forward's queries' dtype to its keys', before a forward or, with the
        scales of its gradients, a backward; of scales a token where it asks for these."""
        made = self._of_no_scores(direction, CAST_HEAD_DIM, CAST_HEAD_DIM, self.dtype_kv)
        return replace(made, scores=(TOKEN_SCALES,)) if self.token_scales else made

    def _of_no_scores(
        self, direction: Direction, head_dim_qk: int, head_dim_v: int, dtype_o: DType
    ) -> Problem:
        """A problem of these dtypes alone."""
        return replace(
            self,
            direction=direction,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_v,
            dtype_o=dtype_o,
            masks=(),
            scores=(),
            softmax="vanilla",
            q_seq="dense",
            kv_seq="dense",
            kv_fetch="tma",
            kv_iter="range",
            max_logit=False,
            dropout=False,
            attn_mask=False,
            decode=False,
            fragment_digests=(),
            continues=False,
        )

    @property
    def fragments(self) -> tuple[tuple[str, str], ...]:
        """Axis and name of each fragment of its kernels."""
        named = {
            "mask": self.masks,
            "score": self.scores,
            "softmax": (self.softmax,),
            "sequence": (self.q_seq, self.kv_seq),
            "fetch": ("gather" if self.gather else "tma", self.kv_fetch),
            "iteration": (self.kv_iter,),
        }
        pairs = ((axis, name) for axis, names in named.items() for name in names)
        return tuple(dict.fromkeys(pairs))

    @property
    def varlen(self) -> bool:
        """Whether lengths are told on the device, a sequence at a time."""
        return (self.q_seq, self.kv_seq) != ("dense", "dense")

    @property
    def narrow(self) -> bool:
        """Whether a window may leave each row few keys, nearly those of its neighbours, and nothing
        but blocks of keys, which the copy engine brings as they are, is fetched or drawn beside
        them."""
        steady = set(self.masks) <= {"causal", "window"}
        plain = self.kv_fetch == "tma" and not (self.eight_bit or self.widens)
        beside = self.bias or self.attn_mask or self.dropout
        return "window" in self.masks and steady and plain and not beside

    def orders(self) -> tuple[Problem, ...]:
        """The problem, and of a backward whose windows may be narrow or wide the one in whose order
        calls under narrow ones add up dQ, though they ask for none: where one kernel makes all
        gradients, and nothing is read or drawn beside the scores. Scores that learn have none, as
        an order makes their sums exact, in another format than other calls have room for."""
        largest = max(self.head_dim_qk, self.head_dim_v)
        one_kernel = self.head_dim_qk > 64 or (largest <= 64 and "softcap" not in self.scores)
        backward = self.direction == "bwd" and not (self.deterministic or self.wide_gradients)
        backward = backward and not learns(self.scores)
        if not (backward and self.narrow and one_kernel and largest <= 128):
            return (self,)
        return self, replace(self, deterministic=True)

    @property
    def label(self) -> str:
        """Short readable name, part of the kernel's entry symbol: `causal_d128_bf16`."""
        dims = f"d{self.head_dim_qk}"
        if self.head_dim_v != self.head_dim_qk:
            dims += f"v{self.head_dim_v}"
        softmax = () if self.softmax == "vanilla" else (self.softmax,)
        lengths = (self.q_seq, *((self.kv_seq,) if self.kv_seq != self.q_seq else ()))
        masks = (*self.masks, *(("arbitrary",) if self.attn_mask else ()))
        features = (*masks, *self.scores, *softmax) or ("full",)
        features += lengths if self.varlen else ()
        features += ("dropout",) if self.dropout else ()
        features += ("positions",) if self.positions else ()
        kv = () if self.dtype_kv == self.dtype_q else (f"kv_{self.dtype_kv}",)
        partial = ("partial",) if self.dtype_o == "fp32" else ()
        out = () if partial or self.dtype_o == self.dtype_q else (f"to_{self.dtype_o}",)
        pairs = (("do", self.dtype_d_o), ("grad", self.dtype_grad))
        given = tuple(f"{name}_{dtype}" for name, dtype in pairs if dtype)
        given += ("mixed",) if self.mixed else ()
        order = ("deterministic",) if self.deterministic else ()
        more = ("max_logit",) if self.max_logit else ()
        joins = ("continues",) if self.continues else ()
        fetch = {"page_tma": ("paged",), "gather": ("gather",)}.get(self.kv_fetch, ())
        parts = (*kv, *fetch, *partial, *out, *given, *order, *more, *joins)
        return "_".join((*features, dims, self.dtype_q, *parts))


Variant = tuple[Problem, str]  # a problem and the architecture whose kernels compute it
