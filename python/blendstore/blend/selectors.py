"""Selectors choose the reused tokens whose KV is recomputed. One class each, behind a registry that others can extend.

A selector gets a `SelectionRun`: the candidates, and two ways to learn about them that cost compute: the attention that
the question pays to them (`attention`), and how far their fresh keys are from the cached ones (`deviation`). It returns
indices into ``run.candidates``. The budget is a share of the plan's context (exact and reused tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..forms import Form, number, one_of, shown, whole

T = TypeVar("T")
_MOST = 2**31 - 1
OptionValue = float | int | str
Reduce = Literal["max", "mean"]
Combine = Literal["rms", "mean"]


class SelectorError(ValueError):
    """An unknown selector or option; names it and the accepted ones."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Reused tokens that may be recomputed; all tensors are [c] on the model's device, in prompt order.

    ``positions`` int64; ``distance`` int64 from the start of the document; ``group`` int64 document number;
    ``stored`` float32 scores kept with the records (NaN where a record has none), or None when no record has any."""

    positions: Tensor
    distance: Tensor
    group: Tensor
    stored: Tensor | None

    def __len__(self) -> int:
        return self.positions.shape[0]

    def subset(self, index: Tensor) -> Candidates:
        """The candidates at ``index`` [m]."""
        stored = None if self.stored is None else self.stored[index]
        return Candidates(self.positions[index], self.distance[index], self.group[index], stored)


class SelectionRun(Protocol):
    """One prompt's run, as selectors see it."""

    @property
    def candidates(self) -> Candidates: ...

    @property
    def layers(self) -> int: ...

    def budget(self, ratio: float) -> int:
        """Tokens that ``ratio`` of the context allows, at most the candidates."""

    def attention(self, *, rows: int, reduce: Reduce, combine: Combine, first_layer: int) -> Tensor:
        """Attention of the prompt's last ``rows`` fresh tokens to each candidate, over the cached keys: [c] float32.

        The maximum or mean over the rows, then the root of the mean square, or the mean, over heads and layers from
        ``first_layer`` on. Runs those rows through every layer."""

    def deviation(self, layer: int) -> Tensor:
        """Squared difference of fresh and cached K at ``layer``, summed over heads and dims: [c] float32 (CacheBlend,
        arXiv 2405.16444). Runs all current candidates through the layers below ``layer``."""

    def keep(self, index: Tensor) -> None:
        """Narrow the candidates to ``index`` before going on to a later check layer."""


class Selector(Protocol):
    """Returns indices [m] int64 into ``run.candidates`` (as they are after any `keep`), each at most once."""

    def select(self, run: SelectionRun, ratio: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SelectorSettings:
    """What a selector is made from. ``ratios`` has one value, or one for each check layer."""

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    thresholds: tuple[float, ...] | None = None
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    seed: int = 0
    layers: int | None = None
    """Of the model, where it is known."""

    def option(self, name: str, form: Form[T], default: T) -> T:
        """The option ``name``, read by ``form``. Raises `SelectorError`."""
        if name not in self.options:
            return default
        try:
            return form.read(self.options[name])
        except ValueError:
            given = shown(self.options[name])
            raise SelectorError(f"selector option {name} = {given}: use {form.accepted}") from None

    def checked(self) -> tuple[int, ...]:
        """The check layers. Raises `SelectorError` where the model hasn't got one."""
        for layer in self.check_layers:
            if self.layers is not None and not 1 <= layer < self.layers:
                raise SelectorError(f"check layer {layer}: use 1..{self.layers - 1}, the model's layers")
        return self.check_layers


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores; ties go to the earlier token on every device."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count]


class NoSelector:
    """Full reuse: nothing is recomputed."""

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=run.candidates.positions.device)


class RandomSelector:
    """Uniformly random tokens: what any other selector has to beat."""

    def __init__(self, settings: SelectorSettings) -> None:
        self._seed = settings.seed

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.randperm(len(run.candidates), generator=generator)
        return order[: run.budget(ratio)].to(run.candidates.positions.device)


class HeadSelector:
    """The first tokens of each document: they saw the least of their own document when they were captured."""

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        return top(-run.candidates.distance.float(), run.budget(ratio))


class DeviationSelector:
    """CacheBlend: at each check layer the tokens with the largest K deviation go on.

    With several check layers each has its ratio (or the last one is used for all), so that the set narrows. A threshold
    also drops tokens whose deviation is not above it times the mean deviation of the layer's candidates."""

    def __init__(self, settings: SelectorSettings) -> None:
        self._layers, self._ratios, self._thresholds = settings.checked(), settings.ratios, settings.thresholds

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        chosen = torch.arange(len(run.candidates), device=run.candidates.positions.device)
        for at, layer in enumerate(self._layers):
            if at:
                run.keep(chosen)
            last = at == len(self._layers) - 1
            share = ratio if last or len(self._ratios) == 1 else self._ratios[at]
            scores = run.deviation(layer)
            chosen = top(scores, run.budget(share))
            if self._thresholds is not None and share < 1.0:
                threshold = self._thresholds[min(at, len(self._thresholds) - 1)]
                chosen = chosen[scores[chosen] > threshold * scores.mean()]
        return chosen


class HybridSelector:
    """Half of the budget for first tokens, half by K deviation at the first check layer."""

    def __init__(self, settings: SelectorSettings) -> None:
        self._layer = settings.checked()[0]

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        count = run.budget(ratio)
        scores = run.deviation(self._layer)
        heads = top(-run.candidates.distance.float(), count // 2)
        scores[heads] = torch.inf
        return top(scores, count)


class QuerySelector:
    """Two passes: the question's rows run over the reused KV first, and the tokens that they attend to are recomputed.

    Score: root mean square over heads and layers of the maximum over the question's rows of the softmax attention (few
    heads look anything up; squares let them be heard), divided by ``(1 + distance from the document's start) **
    power``: error concentrates at the start of a document. The share ``first_share`` of the budget goes to the first
    tokens of all documents, evenly: they bind to what stood in front when they were captured. Options: ``rows`` (32),
    ``reduce`` (max), ``combine`` (rms), ``power`` (0.5), ``first_share`` (0.33), ``first_layer`` (a quarter of the
    layers: earlier ones look at what is near, and at sinks), ``stored_power`` (0): exponent of the score kept with the
    record, where there is one."""

    def __init__(self, settings: SelectorSettings) -> None:
        last = _MOST if settings.layers is None else settings.layers - 1
        self._rows = settings.option("rows", whole(1, _MOST), 32)
        self._reduce: Reduce = settings.option("reduce", one_of({"max": "max", "mean": "mean"}), "max")
        self._combine: Combine = settings.option("combine", one_of({"rms": "rms", "mean": "mean"}), "rms")
        self._power = settings.option("power", number(-16, 16), 0.5)
        self._first_share = settings.option("first_share", number(0, 1), 0.33)
        self._first_layer = settings.option("first_layer", whole(0, last), -1)
        self._stored_power = settings.option("stored_power", number(0, 16), 0.0)

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        count = run.budget(ratio)
        if count == len(run.candidates):
            return torch.arange(count, device=run.candidates.positions.device)
        first_layer = self._first_layer if self._first_layer >= 0 else run.layers // 4
        scores = run.attention(rows=self._rows, reduce=self._reduce, combine=self._combine, first_layer=first_layer)
        distance = run.candidates.distance
        scores = scores / (1.0 + distance.float()) ** self._power
        stored = run.candidates.stored
        if self._stored_power and stored is not None:
            scores = scores * torch.where(stored.isnan(), stored.nanmean(), stored) ** self._stored_power
        # Of equally early ones those with the larger score; a score's share of the largest is below the next distance.
        early = scores / scores.amax().clamp(min=torch.finfo(torch.float32).tiny) - 2.0 * distance
        ahead = top(early, int(self._first_share * count))
        return top(scores.index_fill(0, ahead, torch.inf), count)


class StoredSelector:
    """The score kept with the record: how much V moved between two captures in different contexts. No compute at all.

    Tokens of records without a score are ranked by their distance from the document's start, behind the median."""

    def select(self, run: SelectionRun, ratio: float) -> Tensor:
        candidates = run.candidates
        fallback = 1.0 / (2.0 + candidates.distance.float())
        stored = candidates.stored
        if stored is None:
            return top(fallback, run.budget(ratio))
        known = torch.nan_to_num(stored, nan=-1.0)
        middle = stored.nanmedian()
        return top(torch.where(stored.isnan(), middle * fallback, known), run.budget(ratio))


Factory = Callable[[SelectorSettings], Selector]

_OPTIONS: dict[str, frozenset[str]] = {
    "query": frozenset({"rows", "reduce", "combine", "power", "first_share", "first_layer", "stored_power"})
}
_REGISTRY: dict[str, Factory] = {
    "none": lambda settings: NoSelector(),
    "random": RandomSelector,
    "head": lambda settings: HeadSelector(),
    "deviation": DeviationSelector,
    "hybrid": HybridSelector,
    "query": QuerySelector,
    "stored": lambda settings: StoredSelector(),
}
ENTRY_POINT_GROUP = "blendstore.selectors"


def register_selector(name: str, factory: Factory, *, options: frozenset[str] = frozenset()) -> None:
    """Add a selector under a new name; ``options`` are the option keys it understands.

    Packages can instead expose ``factory`` as an entry point of group ``blendstore.selectors``."""
    if name in _REGISTRY:
        raise SelectorError(f"selector {name!r} is already registered: pick another name")
    _REGISTRY[name] = factory
    _OPTIONS[name] = options


def selector_names() -> tuple[str, ...]:
    """Names that `make_selector` accepts, entry points included."""
    return tuple(sorted({*_REGISTRY, *entry_points(group=ENTRY_POINT_GROUP).names}))


def make_selector(name: str, settings: SelectorSettings) -> Selector:
    """The selector of that name. Raises `SelectorError` for an unknown name or option."""
    factory = _REGISTRY.get(name)
    if factory is None:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            loaded: Factory = point.load()
            return loaded(settings)
        raise SelectorError(f"selector {name!r} is unknown: use one of {', '.join(selector_names())}")
    unknown = set(settings.options) - _OPTIONS.get(name, frozenset())
    if unknown:
        accepted = ", ".join(sorted(_OPTIONS.get(name, frozenset()))) or "none"
        raise SelectorError(f"selector {name!r} has no option {sorted(unknown)[0]!r}: accepted are {accepted}")
    return factory(settings)
