"""Loaded plans: text, tokens and logits."""

from __future__ import annotations

import atexit
import operator
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, Union, overload

from . import _native
from ._errors import HppError, HppWarning
from ._onnxruntime import package
from ._plan import Plan

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Tokens = Union[Sequence[int], NDArray[numpy.integer[Any]]]

Message = Mapping[str, str]
Reuse = Literal["continuation", "prefix", "nothing"]

# Engines that are open: ended before the interpreter, whose end would find their threads at work.
_open_engines: weakref.WeakSet[Model] = weakref.WeakSet()


@dataclass(frozen=True)
class Timings:
    """Times of a generation in milliseconds, and tokens per second, as `hpp-exec --json` names them."""

    load_ms: float
    time_to_first_token_ms: float | None
    prefill_ms: float
    prefill_tokens_per_second: float | None
    decode_ms: float
    decode_tokens_per_second: float | None


@dataclass(frozen=True)
class Generated:
    """The result of a generation."""

    text: str | None
    """The text without the stop text; None without a tokenizer."""
    tokens: list[int]
    """Every token chosen, the one that ended the text included."""
    finish_reason: Literal["stop", "eos", "length", "cancelled"]
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt whose states were kept from the text before."""
    seed: int | None
    """The seed that reproduces the text; None for greedy choices."""
    timings: Timings
    logits: NDArray[numpy.float32] | None
    """What each token was chosen from, [tokens, vocab], if `logits=True` was given."""

    def __str__(self) -> str:
        return self.text or ""


class TextStream:
    """Pieces of text as they are generated. Leaving it early, by `close` or at the end of `with`, cancels the generation."""

    def __init__(self, model: Model, generation: _native.Generation) -> None:
        self._model = model
        self._generation = generation

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._generation.next_text()
        if piece is None:
            # Raises what the generation failed with.
            self._generation.answer()
            self._model._issue_warnings(stacklevel=3)
            raise StopIteration
        return piece

    @property
    def result(self) -> Generated:
        """Everything at once; waits for the end. The pieces that were not taken are skipped."""
        return self._model._result(self._generation)

    def cancel(self) -> None:
        """Stops the generation, within a pass if one computes for it. What was generated stays in `result`."""
        self._generation.cancel()

    close = cancel

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


class Model:
    """A loaded plan. One request runs at a time; those of other threads wait. Close it, or leave its `with`, to free its memory."""

    plan: Plan

    def __init__(self, plan: Plan, engine: _native.Engine) -> None:
        """Use `hpp.load`."""
        self.plan = plan
        self._engine = engine
        _open_engines.add(self)

    @overload
    def generate(
        self,
        prompt: str | None = None,
        messages: Iterable[Message] | None = None,
        tokens: Tokens | None = None,
        *,
        max_new: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        stream: Literal[False] = False,
        logits: bool = False,
        reuse: Reuse = "continuation",
    ) -> Generated: ...
    @overload
    def generate(
        self,
        prompt: str | None = None,
        messages: Iterable[Message] | None = None,
        tokens: Tokens | None = None,
        *,
        max_new: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        stream: Literal[True],
        logits: bool = False,
        reuse: Reuse = "continuation",
    ) -> TextStream: ...
    def generate(
        self,
        prompt: str | None = None,
        messages: Iterable[Message] | None = None,
        tokens: Tokens | None = None,
        *,
        max_new: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        stream: bool = False,
        logits: bool = False,
        reuse: Reuse = "continuation",
    ) -> Generated | TextStream:
        """Continues a text, answers a conversation, or continues tokens.

        Ctrl-C stops it and raises KeyboardInterrupt; `cancel()` from another thread stops it with the finish reason "cancelled".

        Args:
            prompt: a text to continue, as it is.
            messages: a conversation, which the model's chat template renders: {"role": "user", "content": "..."}.
            tokens: token ids to continue. One of the three must be given.
            max_new: most tokens to generate; by default, and for -1, until the model ends the text or the context is full.
            temperature: flattens (above 1) or sharpens the distribution; 0 takes the most likely token.
            top_k: samples from so many most likely tokens; 0 and -1 are all.
            top_p: samples from the fewest most likely tokens whose probabilities add up to this.
            min_p: samples from tokens at least so many times as likely as the most likely one.
            repetition_penalty: makes tokens that are in the text less likely; 1 changes nothing.
            seed: the same seed gives the same text; -1 is a new one. Settings that are left out are the model's, else greedy.
            stop: texts that end the answer, and are left out of it.
            ignore_eos: whether to go on after a token that ends a text.
            stream: whether to return an iterator over pieces of text instead of the whole.
            logits: whether to keep what each token was chosen from, as numpy [tokens, vocab].
            reuse: which states of the text before to start from: all, if the prompt goes on after it ("continuation"); those of the
                longest common start ("prefix"), whose last bits may differ from those of a prompt computed as a whole; or "nothing".

        Raises:
            HppError: the prompt is empty or too long, a setting is out of range, or the model cannot run.
        """
        generation = self._engine.generate(
            self._prompt(prompt, messages, tokens),
            # As for hpp-exec, -1 is no limit, and no limit of likely tokens is 0.
            max_new=_whole("max_new", max_new, minus_one=None),
            stop=[stop] if isinstance(stop, str) else list(stop),
            ignore_eos=ignore_eos,
            temperature=temperature,
            top_k=_whole("top_k", top_k, minus_one=0),
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=_whole("seed", seed, minus_one=_new_seed()),
            reuse=reuse,
            logits=logits,
        )
        if not stream:
            return self._result(generation)
        if not self._engine.has_tokenizer:
            raise HppError("this plan has no tokenizer, so there is no text to stream", "leave stream out for the tokens")
        return TextStream(self, generation)

    def logits(self, tokens: Tokens, *, last: bool = False) -> NDArray[numpy.float32]:
        """The scores of every token of the vocabulary after each of these tokens, [tokens, vocab]; with `last` after the last, [vocab].

        With `last` they have the bits from which `generate` chooses its first token. Those after every token may differ from them in
        their last bits, because kernels compute another number of rows in another order.

        Raises:
            HppError: there are no tokens, or more than the context holds.
        """
        import numpy

        data, rows, vocab = self._engine.logits(_token_ids(tokens), last)
        self._issue_warnings(stacklevel=3)
        table = numpy.frombuffer(data, dtype=numpy.float32).reshape(rows, vocab)
        return table[0] if last else table

    def tokenize(
        self, text: str | None = None, *, messages: Iterable[Message] | None = None, special: bool = True
    ) -> list[int]:
        """The tokens of a text, with the special tokens that the tokenizer puts around it; or of a conversation.

        Raises:
            HppError: the plan has no tokenizer or, for messages, no chat template.
        """
        if (text is None) == (messages is None):
            raise HppError("give either a text or messages", 'model.tokenize("Once upon a time")')
        if messages is not None:
            return self._engine.encode_messages(_pairs(messages))
        assert text is not None
        return self._engine.encode(text, special)

    def detokenize(self, tokens: Tokens) -> str:
        """The text of tokens. Special tokens have none.

        Raises:
            HppError: the plan has no tokenizer, or the vocabulary has no such token.
        """
        return self._engine.decode(_token_ids(tokens))

    def cancel(self) -> None:
        """Stops what runs, within a pass, and what waits. For other threads and signal handlers."""
        self._engine.cancel()

    def close(self) -> None:
        """Cancels what runs and frees the model's memory. Closing it again does nothing."""
        self._engine.close()
        _open_engines.discard(self)

    @property
    def context(self) -> int:
        """Tokens of a sequence, prompt and answer together."""
        return self._engine.context

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the vocabulary."""
        return self._engine.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text."""
        return self._engine.eos_token_ids

    @property
    def threads(self) -> int:
        """Threads that all models of this process share."""
        return self._engine.threads

    @property
    def onnxruntime(self) -> str:
        """The ONNX Runtime library that runs it."""
        return os.fspath(self._engine.library)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<hpp.Model {self.plan.path}>"

    def _prompt(self, prompt: str | None, messages: Iterable[Message] | None, tokens: Tokens | None) -> list[int]:
        given = [name for name, value in (("prompt", prompt), ("messages", messages), ("tokens", tokens)) if value is not None]
        if len(given) != 1:
            what = "no prompt was given" if not given else f"{' and '.join(given)} were given"
            raise HppError(what, "give one of prompt, messages and tokens")
        if prompt is not None:
            return self._engine.encode(prompt, True)
        if messages is not None:
            return self._engine.encode_messages(_pairs(messages))
        assert tokens is not None
        return _token_ids(tokens)

    def _result(self, generation: _native.Generation) -> Generated:
        answer = generation.answer()
        self._issue_warnings(stacklevel=4)
        logits = answer["logits"]
        if logits is not None:
            import numpy

            data, rows, vocab = logits
            logits = numpy.frombuffer(data, dtype=numpy.float32).reshape(rows, vocab or self.vocab_size or 0)
        first, prefill, decode = answer["first_token_ms"], answer["prefill_ms"], answer["decode_ms"]
        tokens: list[int] = answer["tokens"]
        # Of a prompt that was cancelled, it is not known how many tokens were computed.
        computed = answer["prompt_tokens"] - answer["reused_tokens"] if first is not None else 0
        timings = Timings(
            load_ms=self._engine.load_ms,
            time_to_first_token_ms=first,
            prefill_ms=prefill,
            prefill_tokens_per_second=_rate(computed, prefill),
            decode_ms=decode,
            decode_tokens_per_second=_rate(len(tokens) - 1, decode),
        )
        return Generated(
            text=answer["text"],
            tokens=tokens,
            finish_reason=answer["finish_reason"],
            prompt_tokens=answer["prompt_tokens"],
            reused_tokens=answer["reused_tokens"],
            seed=answer["seed"],
            timings=timings,
            logits=logits,
        )

    def _issue_warnings(self, stacklevel: int) -> None:
        for message in self._engine.take_warnings():
            warnings.warn(message, HppWarning, stacklevel=stacklevel)


def load(
    plan: Plan | str | os.PathLike[str],
    threads: int | None = None,
    *,
    context: int | None = None,
    providers: str | Sequence[str] = (),
    ep_lib: Mapping[str, str | os.PathLike[str]] | None = None,
    ep_option: Mapping[str, str | int | float] | None = None,
    strict: bool = False,
    weights: Literal["prefetch", "on-demand", "mapped"] = "prefetch",
    pinned: int | None = None,
    verify_weights: bool = False,
    speculate: Literal["off", "ngram"] = "off",
    ort_lib: str | os.PathLike[str] | None = None,
) -> Model:
    """Loads a plan.

    Args:
        plan: what `hpp.split` returned, a plan.yaml or its directory.
        threads: threads that all models of this process share; the first load decides. By default one for each physical core.
        context: tokens of a sequence, if not the plan's.
        providers: execution providers to try, best first, instead of the plan's list, as a list or as `--providers` takes them: `cuda`, `webgpu`, `openvino`, `cpu` or another
            that `hpp-exec devices` lists.
        ep_lib: libraries of plug-in providers, as `--ep-lib`: {"npu": "/opt/npu/libonnxruntime_providers_npu.so"}. All models of this
            process share them.
        ep_option: options of providers for this model, as `--ep-option`: {"openvino.device_type": "GPU"}. They replace the plan's.
        strict: whether to fail if a partition cannot run on the provider that the plan prefers.
        weights: how to read weights that the plan does not keep in memory: "prefetch" is fastest.
        pinned: bytes of host memory that may be pinned for weights streamed to GPUs; by default as much as they need.
        verify_weights: whether to compare every byte of the plan's files with the recorded hashes.
        speculate: "ngram" drafts tokens that followed the last time the text ended as it does now, and verifies several in one pass.
        ort_lib: the ONNX Runtime library, which all models of this process share: another than that of the first load is refused. By
            default ORT_DYLIB_PATH, else the package onnxruntime of this Python, else what hpp-exec finds (README.md).

    Raises:
        HppError: the plan or a file of it is missing or damaged, there is no ONNX Runtime, or memory is short.
    """
    for name, number, least in (("threads", threads, 1), ("context", context, 1), ("pinned", pinned, 0)):
        if number is not None and number < least:
            raise HppError(f"{name} cannot be {number}", f"give a number from {least} up, or leave it out")
    if isinstance(providers, str):
        providers = [name.strip() for name in providers.split(",") if name.strip()]
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    engine = _native.Engine.load(
        os.fspath(plan),
        package=package(),
        library=None if ort_lib is None else os.fspath(ort_lib),
        threads=threads,
        context=context,
        strict=strict,
        providers=list(providers),
        ep_lib=[f"{name}={os.fspath(path)}" for name, path in (ep_lib or {}).items()],
        ep_option=[f"{key}={value}" for key, value in (ep_option or {}).items()],
        weights=weights,
        pinned=pinned,
        verify_weights=verify_weights,
        ngram_drafts=_is_ngram(speculate),
    )
    model = Model(plan, engine)
    model._issue_warnings(stacklevel=3)
    return model


_LARGEST_NUMBER = 0xFFFFFFFFFFFFFFFF


def _whole(name: str, value: int | None, *, minus_one: int | None) -> int | None:
    """A whole number from 0 up, or what -1 stands for."""
    # What is no number, the engine refuses by name.
    if not isinstance(value, SupportsIndex):
        return value
    number = operator.index(value)
    if not -1 <= number <= _LARGEST_NUMBER:
        raise HppError(f"{name} cannot be {number}", f"give -1 or a whole number from 0 to {_LARGEST_NUMBER}, or leave it out")
    return minus_one if number == -1 else number


def _new_seed() -> int:
    """A random seed that JSON readers keep exact: 53 bits."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def _is_ngram(speculate: str) -> bool:
    if speculate not in ("off", "ngram"):
        raise HppError(f"speculate cannot be {speculate!r}", "it is one of off, ngram; hpp-exec --draft drafts with a model")
    return speculate == "ngram"


_LARGEST_TOKEN_ID = 0xFFFFFFFF


def _token_ids(tokens: Tokens) -> list[int]:
    """Token ids as plain numbers. Accepts lists and one-dimensional arrays of any integer type."""
    # Importing NumPy takes longer than some tokens do: a list of numbers does without.
    if isinstance(tokens, list) and all(type(token) is int and 0 <= token <= _LARGEST_TOKEN_ID for token in tokens):
        return tokens
    import numpy

    array = numpy.asarray(tokens)
    if array.ndim != 1:
        raise HppError(f"tokens have {array.ndim} dimensions", "give a list or a one-dimensional array of token ids")
    if array.size == 0:
        return []
    if not numpy.issubdtype(array.dtype, numpy.integer):
        raise HppError(f"tokens are {array.dtype}, not integers", "give token ids, as model.tokenize returns them")
    if array.min() < 0 or array.max() > _LARGEST_TOKEN_ID:
        raise HppError("a token id is out of range", "token ids are whole numbers from 0 to 4294967295")
    ids: list[int] = array.tolist()
    return ids


def _pairs(messages: Iterable[Message]) -> list[tuple[str, str]]:
    pairs = []
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise HppError(f"a message has no role or no content: {message!r}", 'write {"role": "user", "content": "..."}')
        if not isinstance(message["content"], str):
            raise HppError("the content of a message is not a text", "give text; this module reads no images and no tools")
        pairs.append((message["role"], message["content"]))
    return pairs


def _rate(count: int, ms: float) -> float | None:
    return count / ms * 1e3 if count > 0 and ms > 0 else None


@atexit.register
def _close_all() -> None:
    for model in list(_open_engines):
        model.close()
