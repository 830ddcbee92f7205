# SPDX-License-Identifier: Apache-2.0
"""The engine in Python: a checkpoint that generates, chats and scores, without transformers.

    engine = twell.Engine("runs/first/checkpoint")
    print(engine.generate("Once upon a time", max_tokens=64).text)
    for piece in engine.stream("Once upon a time"):
        print(piece.text, end="", flush=True)

Wrong values and files are a ValueError, wrong types a TypeError, other errors a RuntimeError, each
with the engine's message.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from . import _engine


@dataclasses.dataclass
class LogProbs:
    """Natural logarithms of probabilities, at temperature 1 and before top_k, top_p and min_p."""

    log_prob: float  # of the token itself
    top: list[tuple[int, float]]  # (id, log-probability) of the most likely ones, most likely first


@dataclasses.dataclass
class Piece:
    """What one more token, or the end of the request, added to a text."""

    text: str  # empty while the token's bytes are no whole character or may begin a stop string
    token: int | None  # None in a piece that only ends the text
    log_probs: LogProbs | None
    stop: str | None  # in the last piece: "end of text", "stop string", "token limit",
    # "context full" or "cancelled"


@dataclasses.dataclass
class Generation:
    text: str  # without the prompt
    tokens: list[int]
    log_probs: list[LogProbs]  # of each of the tokens; empty where they were not asked for
    stop: str  # why it ended, as in Piece
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float


# Types of the options of a request.
_OPTIONS: dict[str, Any] = {
    "max_tokens": numbers.Integral,
    "temperature": numbers.Real,
    "top_k": numbers.Integral,
    "top_p": numbers.Real,
    "min_p": numbers.Real,
    "presence_penalty": numbers.Real,
    "frequency_penalty": numbers.Real,
    "repetition_penalty": numbers.Real,
    "logit_bias": Mapping,
    "seed": numbers.Integral,
    "stop": (str, Sequence),
    "logprobs": (numbers.Integral, type(None)),
    "begin_token": bool,
    "json_schema": (dict, str, type(None)),
    "grammar": (str, type(None)),
}


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"there is no option {name}; the options are {', '.join(_OPTIONS)}")
        if not isinstance(value, _OPTIONS[name]):
            raise TypeError(f"{name}: unexpected {type(value).__name__} {value!r}")


class Engine:
    """A model on one device. Requests, also of several threads, are computed together: a thread that
    waits for its next token computes the next token of every request.

    checkpoint: folder of a checkpoint in Hugging Face's layout with its tokenizer.json, or of a
        training run, of which it takes the newest checkpoint.
    device: "auto" (the GPU where it can run the model), "cpu", "cuda" or "cuda:N".
    threads: of the CPU; 0: all.
    slots: sequences that are computed at once; others wait.
    context: most tokens of a sequence, its prompt included; 0: the model's, at most 16384.
    ffn: execution of the feed-forward layers: "auto", "dense", "sparse", "screened",
        "screened-strict", or the name of one (`twell doctor --executions`).
    speculate: guess up to so many tokens from a sequence's own text and check them in one step:
        faster where texts repeat their prompt or themselves, the same texts but for ties.
    cache_8bit: keep keys and values in 8 bits, less exact: about half of a GPU's memory for them, a
        quarter of the CPU's.
    weights: the layers' projections: "stored", as the checkpoint has them, "fp8" (on a Hopper GPU) or
        "int8" (on the CPU), rounded when they are loaded, less exact.
    head: the output head: "stored", or "8bit" (with projections in fp8 or int8).
    compute: how the CPU multiplies prompts: "f32", or "bf16", faster and less exact, where the
        processor has AVX512_BF16 or AMX.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        device: str = "auto",
        threads: int = 0,
        slots: int = 16,
        context: int = 0,
        ffn: str = "auto",
        cache_8bit: bool = False,
        speculate: int = 0,
        weights: str = "stored",
        head: str = "stored",
        compute: str = "f32",
    ) -> None:
        self._checkpoint = str(checkpoint)
        self._loaded = _engine.load(
            self._checkpoint,
            device,
            threads,
            slots,
            context,
            ffn,
            cache_8bit,
            speculate,
            weights,
            head,
            compute,
        )

    def __repr__(self) -> str:
        return f"Engine({self._checkpoint!r}) on {self.device}"

    @property
    def device(self) -> str:
        """Its name, like "CPU (8 threads)" or "NVIDIA H200"."""
        return self._loaded.device

    @property
    def context(self) -> int:
        """Most tokens of a sequence, its prompt included."""
        return self._loaded.context

    @property
    def slots(self) -> int:
        """Sequences that are computed at once."""
        return self._loaded.slots

    @property
    def config(self) -> dict[str, Any]:
        """As in config.json."""
        return json.loads(self._loaded.config_json())

    @property
    def eos_token(self) -> int | None:
        """Id of the end-of-text token of the tokenizer or, if it has none, of config.json."""
        if self._loaded.eos_token >= 0:
            return self._loaded.eos_token
        named = self.config.get("eos_token_id")
        return named[0] if isinstance(named, list) else named

    def encode(self, text: str, begin_token: bool = True) -> list[int]:
        """Token ids of a prompt, with the begin token of the tokenizer's template, if it has one,
        unless begin_token is False. An empty text becomes the end-of-text token."""
        return self._loaded.encode(text, begin_token)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._loaded.decode(list(tokens))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Piece]:
        """The text that follows one prompt, piece by piece as it is computed. Options are those of
        `generate`. Closing the iterator cancels the request."""
        _check_options(options)
        return self._pieces(self._submit(prompt, **options))

    @overload
    def generate(
        self, prompts: str | Sequence[int], *, logprobs: int | None = None, **options: Any
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        **options: Any,
    ) -> list[Generation]: ...
    def generate(
        self, prompts: Any, *, logprobs: int | None = None, **options: Any
    ) -> Generation | list[Generation]:
        """The texts that follow one prompt or a list of prompts, which are computed together. A
        prompt is a text, or a list (tensor, array) of token ids.

        max_tokens: most new tokens (256).
        temperature: 0 takes the most likely token every time (1.0).
        top_k, top_p, min_p: filters of the sampler (0, 1.0, 0.0: none).
        presence_penalty: taken once from the logits of tokens that the new text has (0.0).
        frequency_penalty: taken from a token's logit for each time that the new text has it (0.0).
        repetition_penalty: divides positive logits of tokens that the prompt or the new text has,
            and multiplies negative ones (1.0).
        logit_bias: {token id: number from -100 to 100}, added to logits behind penalties.
        seed: of the random numbers (0); prompt i of a list has seed + i.
        stop: a text, or several; the generation ends before the first that appears.
        logprobs: N: also the log-probabilities of each new token and of the N most likely ones.
        begin_token: see `encode` (True).
        json_schema: a JSON schema, as a dict or a text; the generation is JSON that validates.
        grammar: rules "name ::= ..." that the generation is drawn by, of which "root" is the text.
        """
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        if not isinstance(prompts, Sequence):
            raise TypeError(f"a prompt is a text or a list of token ids, got {prompts!r:.80}")
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        seed = options.pop("seed", 0)
        asked = [prompts] if alone else prompts
        results = self.generate_each(
            asked, [{**options, "logprobs": logprobs, "seed": seed + i} for i in range(len(asked))]
        )
        return results[0] if alone else results

    def generate_each(
        self, prompts: Sequence[str | Sequence[int]], options: Sequence[Mapping[str, Any]]
    ) -> list[Generation]:
        """As `generate`, with a dict of options for each prompt."""
        requests = []
        try:
            for prompt, chosen in zip(prompts, options):
                _check_options(chosen)
                requests.append(self._submit(prompt, **chosen))
            return [self._collect(request) for request in requests]
        finally:
            for request in requests:  # no effect on those that have ended
                request.cancel()

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        stream: Literal[False] = False,
        **options: Any,
    ) -> Generation: ...
    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: Literal[True], **options: Any
    ) -> Iterator[Piece]: ...
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: bool = False, **options: Any
    ) -> Generation | Iterator[Piece]:
        """The answer to a conversation, [{"role": "user", "content": "..."}, ...], rendered with
        the checkpoint's chat template. stream: an iterator of pieces instead. Options are those of
        `generate`."""
        _check_options(options)
        # The template writes the begin token itself.
        prompt = self._loaded.render(json.dumps(list(messages)))
        request = self._submit(prompt, begin_token=False, chat=True, **options)
        return self._pieces(request) if stream else self._collect(request)

    def loglikelihood(
        self, pairs: Sequence[tuple[str | Sequence[int], str | Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log-probability of the continuation's tokens after
        the context, and whether each of them is the most likely one. Texts are split between the
        two as one text is, if the context's tokens begin it; token ids are taken as they are."""
        requests = [self._score(*self._split(*pair)) for pair in pairs]
        results = []
        for (context, continuation), request in requests:
            found = self._prompt_log_probs(request)[len(context) - 1 :]
            greedy = all(one.top[0][0] == token for one, token in zip(found, continuation))
            results.append((sum(one.log_prob for one in found), greedy))
        return results

    def prompt_logprobs(self, prompt: str | Sequence[int], top: int = 0) -> list[LogProbs]:
        """Of each token of a prompt from its second on, given those before it."""
        tokens = self._tokens(prompt, True)
        return self._prompt_log_probs(
            self._submit(tokens, max_tokens=0, prompt_logprobs=top)
        )

    def logits(self, tokens: Sequence[int]) -> Any:
        """float32 [n, V] on the CPU, through DLPack (torch.from_dlpack, numpy.from_dlpack): the
        logits after each of the tokens."""
        return self._loaded.logits(list(tokens))

    def weights(self) -> dict[str, Any]:
        """The parameters of a model on the CPU by name, through DLPack: views of the engine's
        memory in the checkpoint's dtype, read-only."""
        return self._loaded.weights()

    def active_neurons(self) -> list[float]:
        """Active feed-forward neurons per token, a mean for each layer, as last counted."""
        return self._loaded.active_neurons()

    def _tokens(self, prompt: Any, begin_token: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt, begin_token)
        tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor or an array
        if not isinstance(tokens, Sequence) or not all(
            isinstance(token, numbers.Integral) for token in tokens
        ):
            raise TypeError(f"a prompt is a text or a list of token ids, got {prompt!r:.80}")
        return [int(token) for token in tokens]

    def _split(self, context: Any, continuation: Any) -> tuple[list[int], list[int]]:
        if not isinstance(context, str):
            return list(context), list(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces and context.strip():  # a token rarely ends with a space
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole = self.encode(context + continuation)
        before = self.encode(context)
        if not context and whole[: len(before)] != before:
            whole = before + whole
        return whole[: len(before)], whole[len(before) :]

    def _score(
        self, context: list[int], continuation: list[int]
    ) -> tuple[tuple[list[int], list[int]], Any]:
        if not context or not continuation:
            raise ValueError("a context and a continuation have at least one token each")
        tokens = context + continuation
        return (context, continuation), self._submit(tokens, max_tokens=0, prompt_logprobs=1)

    def _submit(
        self,
        prompt: Any,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        begin_token: bool = True,
        chat: bool = False,
        json_schema: dict[str, Any] | str | None = None,
        grammar: str | None = None,
    ) -> Any:
        if isinstance(json_schema, dict):
            json_schema = json.dumps(json_schema)
        stops = [stop] if isinstance(stop, str) else list(stop)
        return self._loaded.submit(
            self._tokens(prompt, begin_token), max_tokens, temperature, top_k, top_p, min_p,
            presence_penalty, frequency_penalty, repetition_penalty,
            list((logit_bias or {}).items()), seed, stops, logprobs, prompt_logprobs, chat,
            json_schema, grammar,
        )

    @staticmethod
    def _events(request: Any) -> Iterator[Any]:
        while (event := request.next()) is not None:
            if event[4] == "failed":
                raise RuntimeError("the engine failed while it computed another request")
            if event[4] == "no token fits":
                raise ValueError("no token of the vocabulary continues the text by its grammar")
            yield event

    def _pieces(self, request: Any) -> Iterator[Piece]:
        try:
            for text, token, log_probs, _, stop, *_ in self._events(request):
                yield Piece(text, token if token >= 0 else None,
                            LogProbs(*log_probs) if log_probs else None, stop)
        finally:
            request.cancel()

    def _collect(self, request: Any) -> Generation:
        result = Generation("", [], [], "", 0, 0.0, 0.0)
        for text, token, log_probs, _, stop, prompt_tokens, prefill, decode in self._events(request):
            result.text += text
            if token >= 0:
                result.tokens.append(token)
                if log_probs:
                    result.log_probs.append(LogProbs(*log_probs))
            result.stop = stop or ""
            result.prompt_tokens = prompt_tokens
            result.prefill_seconds, result.decode_seconds = prefill, decode
        return result

    def _prompt_log_probs(self, request: Any) -> list[LogProbs]:
        found = []
        for event in self._events(request):
            found += [LogProbs(*one) for one in event[3]]
        return found
