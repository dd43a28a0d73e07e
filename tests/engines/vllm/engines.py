"""Real engines for the tests, each in a process of its own (vLLM keeps one engine's state per process)."""

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIG = {"CHUNK_SIZE": "32", "BLEND_MIN_TOKENS": "16", "MAX_LOCAL_CPU_SIZE": "0.1", "BLEND_BUDGET_MS": "0"}
TRANSFER = {"kv_connector": "BlendStoreConnector", "kv_connector_module_path": "blendstore_vllm", "kv_role": "kv_both"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.2,  # of this machine's memory, which others use too
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and how many prompt tokens the engine didn't compute."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    prompt_logprobs: list[float] | None = None


@dataclass(frozen=True)
class Job:
    """Prompts with blendstore's options; those in ``doomed`` are aborted after so many steps of the engine."""

    asked: list[tuple[list[int], dict[str, Any]]]
    tokens: int
    doomed: dict[int, int]
    salts: list[str | None]
    prompt_logprobs: bool


class Engine:
    """vLLM's `LLM`, asked by token ids; up to eight prompts are under way at once. It starts in the background."""

    def __init__(self, folder: str, *, blending: bool, config: dict[str, str] | None = None, **flags: Any) -> None:
        given = {**ENGINE, **flags, "model": folder}
        if blending:
            given["kv_transfer_config"] = TRANSFER
        own = {f"BLENDSTORE_{key}": value for key, value in {**CONFIG, **(config or {})}.items()}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, given, own), daemon=True)
        self._process.start()
        self._ready = False

    def ask(self, prompt: Sequence[int], tokens: int = 8, *, salt: str | None = None, **options: Any) -> Answer:
        """One prompt; ``options`` are blendstore's."""
        return self.ask_all([(list(prompt), options)], tokens, salts=[salt])[0]

    def ask_all(
        self,
        asked: Sequence[tuple[list[int], dict[str, Any]]],
        tokens: int = 8,
        *,
        doomed: dict[int, int] | None = None,
        salts: Sequence[str | None] | None = None,
        prompt_logprobs: bool = False,
    ) -> dict[int, Answer]:
        """Answers by number; without those of the doomed."""
        job = Job(list(asked), tokens, doomed or {}, list(salts or [None] * len(asked)), prompt_logprobs)
        answers: dict[int, Answer] = self._told(job)
        return answers

    def ready(self) -> None:
        """Wait until it is there. Raises what kept it from starting."""
        if not self._ready:
            self._receive()
            self._ready = True

    def tell(self, what: str, *arguments: Any) -> Any:
        """One of the questions that `_questions` answers."""
        return self._told((what, arguments))

    def case(self, name: str, *arguments: Any) -> Any:
        """What that function of `cases` returns in the engine's process. No request may be under way."""
        return self.tell("case", name, *arguments)

    def close(self) -> None:
        """Stop it."""
        if not self._ready:
            self._process.kill()
            return
        self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()

    def _told(self, job: object) -> Any:
        self.ready()
        self._pipe.send(job)
        return self._receive()

    def _receive(self) -> Any:
        while not self._pipe.poll(1):
            if not self._process.is_alive():
                raise AssertionError(f"the engine's process ended with {self._process.exitcode}")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found


def _serve(pipe: Any, flags: dict[str, Any], config: dict[str, str]) -> None:
    """What the engine's process runs."""
    os.environ.update(config, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    try:
        from vllm import LLM

        engine = LLM(**flags).llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        preempted = _counted(scheduler)
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        return
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(_run(engine, job) if isinstance(job, Job) else _questions(scheduler, preempted, job[0], *job[1]))
        except Exception as error:
            traceback.print_exc()
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(0)  # the engine's threads would be waited for


def _run(engine: Any, job: Job) -> dict[int, Answer]:
    from vllm import SamplingParams

    for number, ((prompt, options), salt) in enumerate(zip(job.asked, job.salts, strict=True)):
        extra = {"kv_transfer_params": {"blendstore": options}} if options else None
        sampling = SamplingParams(
            temperature=0, max_tokens=job.tokens, ignore_eos=True, logprobs=0, extra_args=extra,
            prompt_logprobs=0 if job.prompt_logprobs else None,
        )  # fmt: skip
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        engine.add_request(str(number), given, sampling)
    out: dict[int, Answer] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for done in engine.step():
            if done.finished and int(done.request_id) not in job.doomed:
                out[int(done.request_id)] = _answer(done)
        steps += 1
        going = [str(number) for number, after in job.doomed.items() if after == steps]
        if going:
            engine.abort_request(going)
    return out


def _answer(done: Any) -> Answer:
    best = done.outputs[0]
    if best.finish_reason != "length":
        raise RuntimeError(f"request {done.request_id} ended with {best.finish_reason!r}")
    logprobs = [step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)]
    asked = None
    if done.prompt_logprobs is not None:
        pairs = zip(done.prompt_token_ids[1:], done.prompt_logprobs[1:], strict=True)
        asked = [step[token].logprob for token, step in pairs]
    return Answer(list(best.token_ids), logprobs, done.num_cached_tokens or 0, asked)


def _counted(scheduler: Any) -> list[str]:
    """Requests that the scheduler preempts, from now on."""
    out: list[str] = []
    plain = scheduler._preempt_request

    def counted(request: Any, *args: Any, **named: Any) -> Any:
        out.append(request.request_id)
        return plain(request, *args, **named)

    scheduler._preempt_request = counted
    return out


def _questions(scheduler: Any, preempted: list[str], what: str, *arguments: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    serving = get_kv_transfer_group()._serving
    if what == "case":
        from tests.engines.vllm import cases

        return getattr(cases, arguments[0])(*arguments[1:])
    if what == "link":
        from tests.engines.vllm import links

        return links.put(scheduler.connector._scheduling, *arguments)
    if what == "unanswered":
        return scheduler.connector._recorder.counts["unanswered"]
    if what == "preemptions":
        return len(preempted)
    if what == "counts":
        return dict(serving.metrics.counts)
    if what == "pinned":
        return serving.store.stats()["bytes_pinned"]
    if what == "break":
        (kind, times), cls = arguments, type(serving)
        plain, left = getattr(cls, kind), [times]

        def broken(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError("the reader failed")
            return plain(*args, **named)

        setattr(cls, kind, broken)
        return None
    raise ValueError(what)
