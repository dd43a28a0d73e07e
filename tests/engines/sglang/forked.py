"""Runs a function inside a real scheduler process of SGLang, where its radix cache is made.

The scheduler is forked from the test's process, which has imported the engine once: it starts in seconds.
"""

import inspect
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

NAME = "blendstore-test"
ENGINE: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "max_total_tokens": 4096,
    "grammar_backend": "none", "disable_cuda_graph": True, "skip_tokenizer_init": True, "log_level": "warning",
    "sleep_on_idle": True,  # or each idle scheduler keeps a core busy
}  # fmt: skip


def in_scheduler(look: Callable[[Any], Any], model: str, *, ranks: int = 1, **flags: Any) -> list[Any]:
    """What ``look(context)`` returns on each rank; raises what it raised, as text."""
    from sglang.srt.managers import scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(model_path=model, **{**ENGINE, **flags}, radix_cache_backend=NAME, tp_size=ranks)
    ports = PortArgs.init_new(arguments)
    context = multiprocessing.get_context("fork")
    old = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # what a failing scheduler sends to its parent
    try:
        pipes, processes = [], []
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(scheduler, arguments, ports, rank, look, writer), daemon=True)
            process.start()
            writer.close()
            pipes.append(reader)
            processes.append(process)
        out = []
        for reader in pipes:
            try:
                out.append(reader.recv() if reader.poll(240) else ("error", "no answer within 240 s"))
            except EOFError:
                out.append(("error", "the scheduler ended before its radix cache was made"))
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    finally:
        signal.signal(signal.SIGQUIT, old)
    errors = [value for kind, value in out if kind == "error"]
    if errors:
        raise AssertionError("\n".join(errors))
    return [value for _, value in out]


def _run(scheduler: Any, arguments: Any, ports: Any, rank: int, look: Callable[[Any], Any], writer: Any) -> None:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    def make(context: Any) -> Any:
        try:
            writer.send(("value", look(context)))
        except BaseException:
            writer.send(("error", traceback.format_exc()))
        finally:
            writer.close()
            sys.stdout.flush()
            os._exit(0)

    register_radix_cache_backend(NAME, make)
    if arguments.tp_size > 1:
        os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # as where torch is built for CPUs
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"0|{(os.cpu_count() or 1) - 1}"
    known = inspect.signature(scheduler.run_scheduler_process).parameters
    given = {
        "server_args": arguments, "port_args": ports, "gpu_id": 0, "tp_rank": rank, "attn_cp_rank": 0, "moe_dp_rank": 0,
        "moe_ep_rank": 0, "pp_rank": 0, "dp_rank": None, "pipe_writer": writer,
    }  # fmt: skip
    scheduler.run_scheduler_process(**{name: value for name, value in given.items() if name in known})
