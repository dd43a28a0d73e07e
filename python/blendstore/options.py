"""What one request may ask for: another ratio or selector, no reuse, no storing, another tenant.

Engines hand these over as a mapping (an extra field of the request's body, or a keyword); what is not given comes from
the configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from blendstore.config import Config
from blendstore.forms import Form, number, scalar_mapping, shown, switch, text

__all__ = ["OptionError", "RequestOptions"]


class OptionError(ValueError):
    """A field of a request's options that can't be; the message names the field, the value and the accepted form."""


_FORMS: Mapping[str, Form[Any]] = {
    "ratio": number(0, 1),
    "selector": text(),
    "selector_options": scalar_mapping(),
    "reuse": switch(),
    "store": switch(),
    "tenant_salt": text(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request. None means the configuration's value; direct construction is checked like `parse`."""

    ratio: float | None = None
    """Share of reused tokens to recompute, from 0 to 1, at every check layer."""
    selector: str | None = None
    selector_options: Mapping[str, float | int | str] | None = None
    """Options of the selector. Without ``selector`` they are laid over the configured ones."""
    reuse: bool = True
    """False: compute everything, restore nothing."""
    store: bool = True
    """False: keep nothing of this prompt."""
    tenant_salt: str | None = field(default=None, repr=False)
    """Secret of the tenant whose records may be used and to whom new ones belong."""

    def __post_init__(self) -> None:
        for name, form in _FORMS.items():
            raw = getattr(self, name)
            if raw is None and name not in ("reuse", "store"):
                continue
            try:
                value = form.read(raw)
            except ValueError:
                told = "***" if name == "tenant_salt" else shown(raw)
                raise OptionError(f"{name}: {told} is not {form.accepted}") from None
            object.__setattr__(self, name, value)
        if self.selector is not None and not self.selector.strip():
            raise OptionError("selector: '' is no name; leave it out or give the name of a registered selector")
        if self.tenant_salt == "":
            raise OptionError("tenant_salt: '' would share with everybody; leave it out or give the tenant's secret")

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> "RequestOptions":
        """From the mapping that came with a request. Raises `OptionError`, also for fields that do not exist and for
        what is no mapping."""
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options: {shown(given)} is not a mapping from names to values")
        known = [f.name for f in fields(cls)]
        unknown = sorted(name if isinstance(name, str) else shown(name) for name in given or {} if name not in known)
        if unknown:
            raise OptionError(f"{unknown[0][:40]}: no such option; the options are {', '.join(known)}")
        arguments: dict[str, Any] = dict(given or {})
        return cls(**arguments)

    def resolved(self, config: Config) -> "RequestOptions":
        """With every None replaced by the configuration's value, but for ``ratio``: see `ratios`."""
        configured = config.blend_selector_options if self.selector in (None, config.blend_selector) else {}
        return replace(
            self,
            selector=self.selector or config.blend_selector,
            selector_options={**configured, **(self.selector_options or {})},
            tenant_salt=self.tenant_salt or config.tenant_salt or None,
        )

    def ratios(self, config: Config) -> tuple[float, ...]:
        """The recompute ratios: one for every check layer, or one for each of the configuration's."""
        return config.blend_recompute_ratios if self.ratio is None else (self.ratio,)
