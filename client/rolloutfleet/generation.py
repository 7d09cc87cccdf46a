"""Generation over all engines of a fleet: prompts are dealt out evenly, answers come back in the order of the prompts."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

import httpx

from rolloutfleet.contract.names import HEADER_ENGINE, HEADER_WEIGHT_VERSION
from rolloutfleet.errors import DeadlineExceeded, GenerationFailed

_CONNECT_SECONDS = 10.0


class GeneratedText(TypedDict):
    """Generated texts and where they came from; every list has one element per prompt, in the order of the prompts."""

    texts: list[str]
    finish_reasons: list[str]
    engines: list[str]
    """Name of the engine's pod."""
    weight_versions: list[int]


class GeneratedTokens(TypedDict):
    """Generated token ids and where they came from; every list has one element per prompt, in the order of the prompts."""

    output_ids: list[list[int]]
    """Prompt and generated tokens, padded at the right with ``pad_token_id`` to the longest of the batch."""
    generation_lengths: list[int]
    unpadded_sequence_lengths: list[int]
    """Prompt length plus generated length."""
    logprobs: list[list[float]]
    """Log probability of each generated token at its place in ``output_ids``; 0.0 for prompt and padding."""
    finish_reasons: list[str]
    engines: list[str]
    weight_versions: list[int]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that may be asked to generate."""

    name: str
    """Its pod's name."""
    url: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One engine's answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    engine: str
    weight_version: int


def plan_shards(prompts: int, engines: int) -> tuple[range, ...]:
    """Which prompts each engine takes: contiguous, sizes differ by at most one, engines without prompts are left out."""
    size, extra = divmod(prompts, engines)
    starts = [engine * size + min(engine, extra) for engine in range(engines + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts) if end > start)


def read_prompts(input_ids: Any, input_lengths: Any) -> list[list[int]]:
    """Unpadded prompts from right-padded rows and their lengths; both may be lists, arrays or tensors.

    Raises ValueError naming the row and the rule.
    """
    rows, lengths = _as_list(input_ids), _as_list(input_lengths)
    if len(rows) != len(lengths):
        raise ValueError(f"input_ids has {len(rows)} rows and input_lengths {len(lengths)}; each row needs one length")
    prompts = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if not 1 <= length <= len(row):
            raise ValueError(f"input_lengths[{index}] is {length}; it must be from 1 to the row's {len(row)} tokens")
        prompts.append([int(token) for token in row[:length]])
    return prompts


def merge_tokens(prompts: Sequence[Sequence[int]], choices: Sequence[Choice], pad_token_id: int) -> GeneratedTokens:
    """One batch out of all engines' answers."""
    lengths = [len(prompt) + len(choice.token_ids) for prompt, choice in zip(prompts, choices, strict=True)]
    width = max(lengths, default=0)
    return GeneratedTokens(
        output_ids=[
            [*prompt, *choice.token_ids, *[pad_token_id] * (width - length)]
            for prompt, choice, length in zip(prompts, choices, lengths, strict=True)
        ],
        generation_lengths=[len(choice.token_ids) for choice in choices],
        unpadded_sequence_lengths=lengths,
        logprobs=[
            [*[0.0] * len(prompt), *choice.logprobs, *[0.0] * (width - length)]
            for prompt, choice, length in zip(prompts, choices, lengths, strict=True)
        ],
        finish_reasons=[choice.finish_reason for choice in choices],
        engines=[choice.engine for choice in choices],
        weight_versions=[choice.weight_version for choice in choices],
    )


def merge_texts(choices: Sequence[Choice]) -> GeneratedText:
    """Texts of all engines' answers."""
    return GeneratedText(
        texts=[choice.text for choice in choices],
        finish_reasons=[choice.finish_reason for choice in choices],
        engines=[choice.engine for choice in choices],
        weight_versions=[choice.weight_version for choice in choices],
    )


def complete(
    client: httpx.Client, engines: Sequence[Engine], prompts: Sequence[Any], fields: dict[str, Any], timeout: float
) -> list[Choice]:
    """One choice per prompt, from all engines at the same time.

    Raises GenerationFailed naming the engine that refused or failed, DeadlineExceeded naming the one that did not answer in time; the
    answers of the others are then dropped.
    """
    shards = plan_shards(len(prompts), len(engines))
    if not shards:
        return []
    deadline = time.monotonic() + timeout
    pool = ThreadPoolExecutor(max_workers=len(shards), thread_name_prefix="rolloutfleet-generate")
    try:
        answers = [
            pool.submit(_complete_on, client, engine, [prompts[index] for index in shard], fields, deadline)
            for engine, shard in zip(engines, shards, strict=False)
        ]
        for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
            answer.result()
        return [choice for answer in answers for choice in answer.result()]
    finally:
        # Threads that still wait for an engine end by its deadline; a caller who has an error already need not wait for them.
        pool.shutdown(wait=False, cancel_futures=True)


def _complete_on(
    client: httpx.Client, engine: Engine, prompts: list[Any], fields: dict[str, Any], deadline: float
) -> list[Choice]:
    left = max(deadline - time.monotonic(), 0.001)
    timeouts = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
    request = {**fields, "prompt": prompts}
    try:
        with client.stream("POST", f"{engine.url}/v1/completions", json=request, timeout=timeouts) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer was still coming")
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(
            f"engine {engine.name} at {engine.url} did not answer {len(prompts)} prompts in time ({type(error).__name__}); "
            "pass a longer timeout=, or ask for fewer tokens"
        ) from error
    except httpx.HTTPError as error:
        raise GenerationFailed(
            f"engine {engine.name} at {engine.url} cannot be asked to generate: {error or type(error).__name__}. "
            "See `rolloutfleet status`; a refit or a replacement may be under way"
        ) from error
    return _read_answer(engine, response, bytes(body), len(prompts))


def _read_answer(engine: Engine, response: httpx.Response, body: bytes, prompts: int) -> list[Choice]:
    if not response.is_success:
        raise GenerationFailed(f"engine {engine.name} at {engine.url} answered {response.status_code}: {_reason(body)}")
    try:
        name, version = response.headers[HEADER_ENGINE], int(response.headers[HEADER_WEIGHT_VERSION])
        choices = sorted(json.loads(body)["choices"], key=lambda choice: int(choice["index"]))
        answers = [_read_choice(choice, name, version) for choice in choices]
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationFailed(
            f"engine {engine.name} at {engine.url} did not answer as an engine of this fleet does: {type(error).__name__}: {error}"
        ) from error
    if len(answers) != prompts:
        raise GenerationFailed(f"engine {engine.name} at {engine.url} answered {len(answers)} of {prompts} prompts")
    return answers


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return body[:500].decode(errors="replace")


def _read_choice(choice: dict[str, Any], engine: str, version: int) -> Choice:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} log probabilities")
    return Choice(
        text=choice["text"],
        token_ids=tuple(map(int, tokens)),
        logprobs=tuple(map(float, logprobs)),
        finish_reason=str(choice["finish_reason"]),
        engine=engine,
        weight_version=version,
    )


def _as_list(values: Any) -> list[Any]:
    to_list = getattr(values, "tolist", None)
    return list(to_list() if callable(to_list) else values)
