"""XLA's foreign function interface from Python: a callback that reads the call frame itself.

The frame is the C struct XLA_FFI_CallFrame of version 0 of the API (xla/ffi/api/c_api.h) on a
64-bit machine, read as words of eight bytes. No compiler is needed, and nothing of jaxlib but its
registration of handlers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from threading import get_ident, main_thread
from typing import Any

import jax

from .callback import Answer, Callback

# Words of a call frame.
EXTENSION, API, CONTEXT = 1, 2, 3
OPERAND_COUNT, OPERANDS, RESULT_COUNT, RESULTS, ATTRIBUTE_COUNT, ATTRIBUTES = 7, 9, 12, 14, 17, 20
FRAME_WORDS = 22
ADDRESS_OFFSET = 24  # bytes from the beginning of a buffer to its address
# Words of the table of functions.
CREATE_ERROR, GET_MESSAGE, DESTROY_ERROR, GET_STREAM, GET_DEVICE = 6, 7, 8, 10, 23
METADATA = 1  # kind of the extension by which a handler is asked who it is
METADATA_WORD, VERSION_OFFSET = 3, 24
VERSION = (0, 1)  # of the API, which every runtime since jax 0.5 accepts
CAPTURED = 1  # trait: calls may be captured into command buffers
INVALID_ARGUMENT, INTERNAL = 3, 13
_INTERRUPTED = KeyboardInterrupt("or what else was raised as XLA called attngen")
_API_VERSION = 1  # of jax.ffi, whose handlers take such frames

Word = ctypes.c_uint64
_POINTER = ctypes.c_void_p
_HANDLER = ctypes.CFUNCTYPE(Word, _POINTER)
_FUNCTION = ctypes.PYFUNCTYPE(_POINTER, _POINTER)  # keeps the GIL: none of them waits
# Readers of memory, which cost a call less than what ctypes has for strings.
_word_at, _pair_at = Word.from_address, (Word * 2).from_address
_frame_at = (ctypes.c_char * (8 * FRAME_WORDS)).from_address
_words_of = struct.Struct(f"<{FRAME_WORDS}Q").unpack

Words = tuple[int, ...]  # of a frame
Stage = Callable[[Words], None]
_kept: list[object] = []  # XLA never forgets a handler
_functions: dict[int, Callable[[int], int | None]] = {}  # by where XLA's table has them


@lru_cache(256)
def _bytes_at(size: int) -> Callable[[int], Any]:
    """The reader of so many bytes."""
    return (ctypes.c_char * size).from_address


@lru_cache(256)
def _array_at(size: int) -> Callable[[int], Any]:
    """The reader of so many words."""
    return (Word * size).from_address


class _Asked(ctypes.Structure):
    """Arguments of the functions that tell a stream or a device."""

    _fields_ = [
        *(("size", ctypes.c_size_t), ("extension", _POINTER), ("context", _POINTER)),
        ("found", Word),
    ]


class _Error(ctypes.Structure):
    """Arguments of the function that makes an error."""

    _fields_ = [
        *(("size", ctypes.c_size_t), ("extension", _POINTER), ("message", ctypes.c_char_p)),
        ("code", ctypes.c_int),
    ]


class _Reason(ctypes.Structure):
    """Arguments of the functions that read an error, and end it."""

    _fields_ = [
        *(("size", ctypes.c_size_t), ("extension", _POINTER), ("error", _POINTER)),
        *(("message", ctypes.c_char_p), ("code", ctypes.c_int)),
    ]


_ASKED_BYTES, _ERROR_BYTES, _REASON_BYTES, _ENDED_BYTES = 32, 28, 36, 24


def text_of(words: Words) -> bytes:
    """The attribute of a call that has one, a string."""
    address, size = _pair_at(_word_at(words[ATTRIBUTES]).value)
    return bytes(_bytes_at(size)(address).raw)


def addresses_of(words: Words) -> list[int]:
    """Addresses of the operands, then of the results, of a call."""
    found: list[int] = []
    if size := words[OPERAND_COUNT]:
        buffers = _array_at(size)(words[OPERANDS])
        found = [_word_at(buffer + ADDRESS_OFFSET).value for buffer in buffers]
    if size := words[RESULT_COUNT]:
        buffers = _array_at(size)(words[RESULTS])
        found += [_word_at(buffer + ADDRESS_OFFSET).value for buffer in buffers]
    return found


def stream_of(words: Words) -> int:
    """The stream on which XLA wants a call launched. Raises: RuntimeError with XLA's reason."""
    return _told(words, GET_STREAM)


def device_of(words: Words) -> int:
    """The driver's number of the device of a call. Raises: RuntimeError with XLA's reason."""
    return _told(words, GET_DEVICE) & 0xFFFFFFFF


_questions: list[tuple[_Asked, int]] = []  # that no thread is asking, with their addresses


def _told(words: Words, function: int) -> int:
    try:
        question = _questions.pop()
    except IndexError:
        made = _Asked(_ASKED_BYTES, None, None, 0)
        question = made, ctypes.addressof(made)
    asked, address = question
    asked.context = words[CONTEXT]
    error = _function(words[API], function)(address)
    found = asked.found
    _questions.append(question)
    if error:
        raise RuntimeError(_message_of(words[API], error))
    return int(found)


def _function(api: int, place: int) -> Callable[[int], int | None]:
    """A function of XLA's table."""
    at = api + 8 * place
    found = _functions.get(at)
    if found is None:
        found = _functions[at] = _FUNCTION(_word_at(at).value)
    return found


def _message_of(api: int, error: int) -> str:
    """The text of XLA's error, which is ended."""
    reason = _Reason(_REASON_BYTES, None, error, None, 0)
    _function(api, GET_MESSAGE)(ctypes.addressof(reason))
    text = reason.message.decode(errors="replace") if reason.message else "no reason given"
    ended = _Reason(_ENDED_BYTES, None, error)
    _function(api, DESTROY_ERROR)(ctypes.addressof(ended))
    return text


def _error_of(api: int, error: BaseException) -> int:
    """XLA's error for an exception: a ValueError is the fault of who called."""
    text = f"{type(error).__name__}: {error}".replace("\0", "?")
    code = INVALID_ARGUMENT if isinstance(error, ValueError) else INTERNAL
    wanted = _Error(_ERROR_BYTES, None, text.encode(), code)  # named: it lives until the return
    return int(_function(api, CREATE_ERROR)(ctypes.addressof(wanted)) or 0)


def _answer(function: Stage, traits: int) -> Answer:
    """A handler that calls a function of a frame; what that raises becomes an error of XLA's."""

    def called(address: int) -> int:
        words = _words_of(_frame_at(address))
        try:
            extension = words[EXTENSION]
            if extension and ctypes.c_int.from_address(extension + 8).value == METADATA:
                metadata = _word_at(extension + 8 * METADATA_WORD).value
                said = struct.pack("<iiI", *VERSION, traits)
                ctypes.memmove(metadata + VERSION_OFFSET, said, len(said))
                return 0
            function(words)
            return 0
        except BaseException as error:  # nothing may leave through C
            return _error_of(words[API], error)

    return called


def _callbacks(stages: dict[str, Stage], traits: int) -> dict[str, Callback]:
    """The handlers of stages, of which each call on the main thread guards them all."""
    answers = {stage: _answer(function, traits) for stage, function in stages.items()}

    def guard(api: int) -> None:
        for stage, each in made.items():
            if not each.is_guarded:
                each.guard(answers[stage], _error_of(api, _INTERRUPTED))

    def first(function: Stage) -> Stage:
        def call(words: Words) -> None:
            if get_ident() == main_thread().ident:
                guard(words[API])
            function(words)

        return call

    made = {stage: Callback(_answer(first(each), traits)) for stage, each in stages.items()}
    return made


def register(name: str, platform: str, stages: dict[str, Stage], traits: int = 0) -> None:
    """Tell XLA of a handler on one of its platforms, once a process.

    stages: a function of a frame for each stage, `instantiate` and `execute`.
    """
    capsules = {}
    for stage, each in _callbacks(stages, traits).items():
        made = _HANDLER(each)
        _kept.append(made)
        capsules[stage] = jax.ffi.pycapsule(int(ctypes.cast(made, _POINTER).value or 0))
    jax.ffi.register_ffi_target(name, capsules, platform=platform, api_version=_API_VERSION)
