"""What adapters of serving engines share: options out of a request, settings of a blend, and the report of a request.

Needs torch (the blend core), and knows no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from .blend import BlendSettings
from .blend.drift import DriftSettings
from .config import Config
from .forms import shown
from .options import OptionError, RequestOptions

OPTIONS_FIELD = "blendstore"


@dataclass(frozen=True, slots=True)
class Served:
    """Where one prompt's KV came from, in tokens, and what it took until it was in place."""

    request: str
    prompt: int
    prefix: int
    """Held by the engine."""
    exact: int
    reused: int
    """Restored from another context and left as they are."""
    recomputed: int
    """Restored from another context and computed again."""
    fresh: int
    """Computed because nothing was known of them; what the engine computes itself is counted here."""
    milliseconds: float
    how: str = ""
    """Selector and ratio."""
    cut: int = 0
    """Tokens whose reuse was given up to stay within the budget."""

    def line(self) -> str:
        """One line for the log."""
        how = f" ({self.how})" if self.how else ""
        cut = f", {self.cut} behind the budget" if self.cut else ""
        return (
            f"request {self.request}: prompt {self.prompt}, device prefix {self.prefix}, exact {self.exact}, "
            f"reused {self.reused}, recomputed {self.recomputed}, fresh {self.fresh}{cut}, "
            f"{self.milliseconds:.1f} ms{how}"
        )


def read_options(given: Mapping[str, object] | None) -> RequestOptions:
    """Options of a request from the mapping that the engine lets through, under the key ``blendstore``.

    Raises `OptionError` also when what stands there is no mapping."""
    raw = (given or {}).get(OPTIONS_FIELD)
    if raw is None:
        return RequestOptions()
    if not isinstance(raw, Mapping):
        raise OptionError(f"{OPTIONS_FIELD}: {shown(raw)} is not a mapping of options")
    return RequestOptions.parse(raw)


def settings(config: Config, options: RequestOptions) -> BlendSettings:
    """How a request with these options is blended."""
    wanted = options.resolved(config)
    return BlendSettings(
        selector=wanted.selector or config.blend_selector,
        ratios=options.ratios(config),
        check_layers=config.blend_check_layers,
        thresholds=config.blend_thresholds,
        options=dict(wanted.selector_options or {}),
        drift=DriftSettings() if config.blend_drift_correction else None,
        layerwise=config.use_layerwise,
    )


def whole_layers(how: BlendSettings, layers: int) -> float:
    """Share of the ``layers`` that all reused tokens go through."""
    return max(how.check_layers) / layers if how.selector in ("deviation", "hybrid") else 0.0


def without_question(how: BlendSettings) -> BlendSettings:
    """The same where what is blended ends before the question."""
    return replace(how, selector="deviation", options={}) if how.selector == "query" else how


def signature(how: BlendSettings) -> str:
    """32 hexadecimal digits: equal for settings that give a prompt the same KV."""
    # Layer-wise loading changes when bytes come, not which.
    told = json.dumps(asdict(replace(how, layerwise=True)), sort_keys=True, default=str)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def salted(config: Config, options: RequestOptions, *engine: str) -> RequestOptions:
    """``options`` whose tenant salt also covers what the engine separates tenants by, if anything.

    Different parts give different salts: a salt that reads like several parts is framed as the single one that it is,
    so that no request's own salt leads to the records of another tenant or adapter."""
    salt = options.tenant_salt or config.tenant_salt
    if not any(engine) and not salt.startswith("["):
        return options
    return replace(options, tenant_salt=json.dumps([salt, *engine] if any(engine) else [salt]))


def describe(how: BlendSettings) -> str:
    """Selector and ratios in a few characters."""
    return f"{how.selector} {', '.join(f'{ratio:g}' for ratio in how.ratios)}"
