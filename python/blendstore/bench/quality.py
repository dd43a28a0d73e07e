"""``blendstore bench quality``: what each way of reusing KV costs in quality, on the fixed prompt set.

Every method (selector, recompute ratio, provenance of the reused KV) answers the same prompts, teacher-forced, and is
compared with full prefill. Results are appended to a JSON-lines file as they come (``--resume``): an interrupted run
goes on where it stopped and a later run can add methods. The leak of case b12 is measured on prompts of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from blendstore.bench import corpus, models, prompts, report
from blendstore.bench.answering import Answer, Answering, Options
from blendstore.bench.metrics import log_probability, says
from blendstore.bench.progress import Progress
from blendstore.bench.results import Key, Results
from blendstore.bench.rows import method_columns, record
from blendstore.bench.stats import Bootstrap, Estimate

DEFAULT_SELECTOR = "query"
DEFAULT_SELECTORS = "none,random,head,deviation,query"
DEFAULT_RATIOS = "0.05,0.10,0.15"
DTYPES = ("float32", "bfloat16", "float16")
INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended


@dataclass(frozen=True, slots=True)
class Method:
    """A way of answering. ``selector`` is as on the command line: a name, then ``:option=value`` for each option."""

    selector: str
    ratio: float
    provenance: str

    @property
    def key(self) -> Key:
        """Identifies the method in result files."""
        return (self.selector, self.ratio, self.provenance)


FULL = Method("full", 1.0, "")
FULL_REUSE = Method("none", 0.0, "lead_in")
COLUMNS = {
    "selector": "selector",
    "ratio": "ratio",
    "provenance": "captured",
    "kl": "KL",
    "kl_share_left": "share left",
    "kl_share_left_ci": "95 %",
    "suffix_kl_share_left": "with question",
    "against": "− baseline",
    "top1": "top-1",
    "exact_match": "exact",
    "ttft_ms_median": "TTFT ms",
    "speedup": "speed-up",
    "recomputed": "recomputed",
    "leak_nats": "leak, nats",
    "leak_nats_ci": "95 % of leak",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``blendstore bench quality``."""
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a folder (default: smollm2)")
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts (default: 100)")
    parser.add_argument("--selectors", default=DEFAULT_SELECTORS, help="names, each with :option=value appended if any")
    parser.add_argument("--ratios", default=DEFAULT_RATIOS, help="shares of the documents' tokens that are recomputed")
    parser.add_argument("--provenances", default="lead_in", help=f"any of {','.join(prompts.PROVENANCES)}")
    parser.add_argument("--kinds", default=",".join(prompts.KINDS), help="kinds of prompt, in equal parts")
    parser.add_argument("--corpus", choices=get_args(corpus.CorpusName), default="auto", help="texts of the documents")
    parser.add_argument("--leak-prompts", type=int, default=20, help="prompts of case b12 (default: 20; 0: none)")
    parser.add_argument(
        "--baseline", default="deviation@0.15", help="selector@ratio others are compared with, in pairs"
    )
    parser.add_argument("--device", default="cpu", help="of torch: cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of model and KV (default: float32)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot TTFT against quality, and FILE-rates.png")
    parser.add_argument("--resume", type=Path, metavar="FILE.jsonl", help="keep results here and go on from them")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status: 0, 2 on wrong use, 130 when it was interrupted."""
    try:
        methods, settings = _checked(args)
        results = Results.open(args.resume, settings)
        models.check(args.model)
        models.check_device(args.device)
        from blendstore.bench.inprocess import open_answering

        engine, tokenizer = open_answering(args.model, dtype=args.dtype, device=args.device)
    except (LookupError, OSError, ValueError) as error:
        print(f"blendstore bench quality: {report.one_line(error)}", file=sys.stderr)
        return 2
    first = 1_000 * args.seed
    todo = list(
        prompts.quality_prompts(
            tokenizer, args.prompts, first_seed=first, kinds=args.kinds.split(","), corpus_name=args.corpus
        )
    )
    leaks = [prompts.leak_case(tokenizer, first + index, args.corpus) for index in range(args.leak_prompts)]
    status = 0
    with results:
        try:
            measure_all(engine, todo, leaks, methods, results)
        except KeyboardInterrupt:
            asked = len(todo)
            todo = [p for p in todo if all(results.has(p.kind, p.seed, m.key) for m in (FULL, *methods))]
            kept = f"all results are kept in {args.resume}, the same command goes on" if args.resume else "use --resume"
            done = f"{len(todo)} of {asked} prompts were answered by every method"
            print(f"blendstore bench quality: interrupted; {done}; {kept}", file=sys.stderr)
            status = INTERRUPTED
    if not todo:
        return status
    rows = summarise(results, todo, leaks, methods, model=args.model, record_format=args.dtype)
    print_rows(rows, results, todo, methods, args.baseline)
    if args.json:
        report.write_json(args.json, rows, corpus=settings["corpus"], seed=args.seed)
    if args.plot:
        plot(args.plot, rows, f"{args.model}, {len(todo)} prompts, {args.device}, {args.dtype}")
    return status


def _checked(args: argparse.Namespace) -> tuple[list[Method], dict[str, Any]]:
    """What the flags ask for, and the settings that results depend on. Raises ``ValueError``, ``LookupError`` or
    ``OSError`` for flags that would fail later, perhaps at the end of hours."""
    methods = methods_of(args.selectors, args.ratios, args.provenances)
    unknown = sorted(set(args.kinds.split(",")) - set(prompts.KINDS))
    if unknown:
        raise ValueError(f"--kinds {args.kinds}: {unknown[0]!r} is none of {', '.join(prompts.KINDS)}")
    if args.prompts < 1 or args.leak_prompts < 0:
        raise ValueError("--prompts must be at least 1 and --leak-prompts at least 0")
    _, at, ratio = args.baseline.partition("@")
    if at:
        _share(ratio, "--baseline", args.baseline)
    if args.corpus == "news":
        corpus.documents(args.corpus)
    for path in (args.json, args.resume):
        report.check_target(path)
    report.check_target(args.plot, plot=True)
    settings = {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "corpus": corpus.corpus_in_use(args.corpus),
        "seed": args.seed,
        "kinds": args.kinds,
    }
    return methods, settings


def methods_of(selectors: str, ratios: str, provenances: str) -> list[Method]:
    """All combinations, full reuse of lead-in documents first: it is the measure of every share."""
    shares = [_share(ratio, "--ratios", ratios) for ratio in ratios.split(",")]
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"--ratios {ratios}: {share} is not above 0 and at most 1 (selector none stands for 0)")
    methods = [FULL_REUSE]
    for provenance in provenances.split(","):
        if not prompts.is_provenance(provenance):
            raise ValueError(f"--provenances {provenances}: {provenance!r} is none of {', '.join(prompts.PROVENANCES)}")
        for selector in selectors.split(","):
            check_selector(selector)
            methods += [Method(selector, r, provenance) for r in ([0.0] if selector == "none" else shares)]
    return list(dict.fromkeys(methods))


def check_selector(text: str) -> None:
    """Raises ``ValueError`` for a selector or an option that no engine would take; makes the selector, as it does."""
    from blendstore.blend.drift import DriftSettings
    from blendstore.blend.selectors import SelectorError, SelectorSettings, make_selector

    name, options = parse_selector(text)
    drift = {f"drift_{field.name}" for field in fields(DriftSettings)}
    for option in options.keys() & (drift | {"seed"}):
        if not isinstance(options[option], int | float) or isinstance(options[option], bool):
            raise ValueError(f"--selectors {text}: {option}={options[option]} is no number")
    if not isinstance(options["drift_correction"], bool):
        raise ValueError(f"--selectors {text}: drift_correction={options['drift_correction']} is not true or false")
    rest: dict[str, float | int | str] = {
        option: str(value).lower() if isinstance(value, bool) else value
        for option, value in options.items()
        if option not in drift | {"seed", "drift_correction"}
    }
    try:
        make_selector(name, SelectorSettings(options=rest)).select  # noqa: B018 - a factory may give anything
    except (SelectorError, AttributeError, ImportError) as error:
        raise ValueError(f"--selectors {text}: {error}") from None


def _share(text: str, flag: str, given: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise ValueError(f"{flag} {given}: {text!r} is no number")
    return share


def parse_selector(text: str) -> tuple[str, dict[str, bool | int | float | str]]:
    """Name and options of ``name:option=value:…``; drift correction is off unless said or the default selector."""
    name, *given = text.split(":")
    options: dict[str, bool | int | float | str] = {"drift_correction": name == DEFAULT_SELECTOR}
    for item in given:
        option, equals, value = item.partition("=")
        if not (name and option and equals and value):
            raise ValueError(f"selector {text!r}: write name:option=value, for example query:drift_correction=false")
        options[option] = _value(value)
    return name, options


def measure_all(
    engine: Answering[Any],
    todo: Sequence[prompts.Prompt],
    leaks: Sequence[prompts.LeakCase],
    methods: Sequence[Method],
    results: Results,
) -> None:
    """Run what ``results`` does not hold yet, and show how far it is."""
    with Progress() as progress:
        progress.start("quality", len(todo) * (1 + len(methods)))
        warm = False
        for prompt in todo:
            missing = [m for m in (FULL, *methods) if not results.has(prompt.kind, prompt.seed, m.key)]
            progress.advance(1 + len(methods) - len(missing))
            if missing and not warm:  # the first call of each pays for lazy set-up; its times are not kept
                for _ in answer_all(engine, prompts.shortened(prompt, 2), (FULL, *methods)):
                    pass
                warm = True
            for method, result in answer_all(engine, prompt, missing):
                results.add(prompt.kind, prompt.seed, method.key, result)
                progress.advance()
        leaking = [method for method in methods if method.provenance.startswith("in_context")]
        if not (leaks and leaking):
            return
        progress.start("leak (b12)", len(leaks) * len(leaking))
        for case in leaks:
            missing = [m for m in (FULL, *leaking) if not results.has("leak", case.prompt.seed, m.key)]
            progress.advance(len(leaking) - sum(m is not FULL for m in missing))
            for method, result in leak_all(engine, case, missing):
                results.add("leak", case.prompt.seed, method.key, result)
                progress.advance(int(method is not FULL))


def answer_all(
    engine: Answering[Any], prompt: prompts.Prompt, methods: Iterable[Method]
) -> Iterator[tuple[Method, dict[str, Any]]]:
    """Each method's answer of one prompt, compared with full prefill; each provenance is captured once."""
    by_provenance: dict[str, list[Method]] = {}
    for method in methods:
        by_provenance.setdefault(method.provenance, []).append(method)
    if not by_provenance:
        return
    full = engine.full(prompt.ids, prompt.answer, len(prompt.question))
    for provenance, members in by_provenance.items():
        if provenance == FULL.provenance:
            yield FULL, record(full, full, prompt)
            continue
        captured = engine.capture(prompt, prompt.provenance(provenance))
        for method in members:
            name, options = _options(method, prompt.seed)
            answer = engine.blended(prompt, captured, name, method.ratio, options)
            yield method, record(answer, full, prompt)


def leak_all(
    engine: Answering[Any], case: prompts.LeakCase, methods: Iterable[Method]
) -> Iterator[tuple[Method, dict[str, Any]]]:
    """How far a secret in front of a captured document moves that secret's log-probability, in nats (case b12).

    For `FULL`, the secret's document stands in the prompt itself: what there is to leak.
    """
    by_provenance: dict[str, list[Method]] = {}
    for method in methods:
        by_provenance.setdefault(method.provenance, []).append(method)
    prompt = case.prompt
    for provenance, members in by_provenance.items():
        if provenance == FULL.provenance:
            behind = len(prompt.ids) - len(prompt.documents[-1]) - len(prompt.question)
            secret, control = (
                engine.full([*prompt.ids[:behind], *document, *prompt.ids[behind:]], prompt.answer)
                for document in (case.secret, case.control)
            )
            yield FULL, _leak(secret, control, prompt)
            continue
        answers: list[list[Answer]] = []
        for source in case.provenances(provenance):
            captured = engine.capture(prompt, source)
            answers.append([])
            for method in members:
                name, options = _options(method, prompt.seed)
                answers[-1].append(engine.blended(prompt, captured, name, method.ratio, options))
        for method, secret, control in zip(members, *answers, strict=True):
            yield method, _leak(secret, control, prompt)


def summarise(
    results: Results,
    todo: Sequence[prompts.Prompt],
    leaks: Sequence[prompts.LeakCase],
    methods: Sequence[Method],
    *,
    model: str,
    record_format: str,
) -> list[dict[str, Any]]:
    """One row a method, full prefill first."""
    boot = Bootstrap(len(todo))
    reuse = _records(results, todo, FULL_REUSE)
    full_ttft = statistics.median(result["ttft_ms"] for result in _records(results, todo, FULL))
    rows = []
    for method in (FULL, *methods):
        reusing = method is not FULL
        rows.append(
            {
                "model": model,
                "selector": method.selector,
                "ratio": method.ratio if reusing else None,
                "provenance": method.provenance if reusing else None,
                "format": record_format if reusing else None,
                **method_columns(
                    _records(results, todo, method), [prompt.kind for prompt in todo], reuse, full_ttft, boot
                ),
                **_leak_columns(results, leaks, method),
            }
        )
    return rows


def compare(results: Results, todo: Sequence[prompts.Prompt], method: Method, baseline: Method) -> Estimate:
    """Difference of the two methods' shares, paired by prompt; negative when ``method`` is the better one."""
    first, second, reuse = (
        [result["kl"] for result in _records(results, todo, m)] for m in (method, baseline, FULL_REUSE)
    )
    return Bootstrap(len(todo)).difference(first, second, reuse)


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    results: Results,
    todo: Sequence[prompts.Prompt],
    methods: Sequence[Method],
    baseline: str,
) -> None:
    """The table, with the paired difference to the baseline where that was measured."""
    name, _, ratio = baseline.partition("@")
    wanted = [m for m in methods if m.selector == name and f"{m.ratio:g}" == f"{float(ratio or 0):g}"]
    printed = []
    for row, method in zip(rows, (FULL, *methods), strict=True):
        against = None
        if wanted and method not in (FULL, wanted[0]):
            difference = compare(results, todo, method, wanted[0])
            against = f"{difference.value:+.3f} ({difference.low:+.3f} … {difference.high:+.3f})"
        printed.append({**row, "against": against})
    note = f"; − baseline: difference to {baseline} of {wanted[0].provenance}, paired" if wanted else ""
    report.print_table(f"Quality, {len(todo)} prompts; share left: of the KL of full reuse{note}", printed, COLUMNS)


def plot(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """TTFT against quality for the first provenance, and the rates of all in ``<name>-rates.png``."""
    provenances = [row["provenance"] for row in rows if row["provenance"]]
    first = [row for row in rows if row["provenance"] in (None, provenances[0])]
    report.plot_quality(path, first, title=f"{title}, captured {provenances[0]}")
    rates = [row for row in rows if row["ratio"]]
    report.plot_rates(path.with_name(f"{path.stem}-rates.png"), rates, title=title)


def _options(method: Method, seed: int) -> tuple[str, Options]:
    name, options = parse_selector(method.selector)
    if name == "random":
        options.setdefault("seed", seed)  # other tokens in other prompts, the same ones on every run
    return name, options


def _leak(secret: Answer, control: Answer, prompt: prompts.Prompt) -> dict[str, Any]:
    shift = log_probability(secret.logits, prompt.answer) - log_probability(control.logits, prompt.answer)
    return {"shift": shift, "said": says(secret.logits, prompt.answer)}


def _leak_columns(results: Results, leaks: Sequence[prompts.LeakCase], method: Method) -> dict[str, Any]:
    """Mean shift of the secret's log-probability with its interval, how often the secret was said, and of how many.

    For `FULL` the secret stands in the prompt: what there is to leak. Captures that never stood behind the secret can't
    depend on it: their shift is 0 without a measurement.
    """
    columns: dict[str, Any] = {"leak_nats": None, "leak_nats_ci": None, "leak_said": None, "leak_n": 0}
    if leaks and method is not FULL and not method.provenance.startswith("in_context"):
        return {**columns, "leak_nats": 0.0, "leak_nats_ci": [0.0, 0.0], "leak_said": 0}
    seeds = [case.prompt.seed for case in leaks if results.has("leak", case.prompt.seed, method.key)]
    if not seeds:
        return columns
    found = [results.get("leak", seed, method.key) for seed in seeds]
    shift = Bootstrap(len(found)).mean([result["shift"] for result in found])
    said = sum(result["said"] for result in found)
    return {"leak_nats": shift.value, "leak_nats_ci": shift.ci, "leak_said": said, "leak_n": len(found)}


def _records(results: Results, todo: Sequence[prompts.Prompt], method: Method) -> list[dict[str, Any]]:
    return [results.get(prompt.kind, prompt.seed, method.key) for prompt in todo]


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
