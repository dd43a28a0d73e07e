"""Configuration: one immutable object, read from a YAML file, the environment and arguments, that knows its origins.

The keys are those of LMCache's YAML, so that its files work unchanged, and a few of blendstore's own. Later sources
win: default, file, environment, argument; where two of them set a key to different values a warning names the winner.
The file is the argument ``path``, or named by ``BLENDSTORE_CONFIG_FILE`` or ``LMCACHE_CONFIG_FILE``; each key has a
variable ``BLENDSTORE_<KEY>`` and, behind it, ``LMCACHE_<KEY>``.

A key whose feature this version lacks is accepted at its off value and refused by name at any other. Unknown keys, junk
and impossible combinations are errors. Sizes are in GiB (2**30 bytes), as the reference means its "GB". Secrets and
passwords within URLs never leave this object in clear text except as attributes.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml

from blendstore._core import redacted_url
from blendstore.forms import (
    Form,
    Rejected,
    float_list,
    int_list,
    local_path,
    local_paths,
    mapping,
    number,
    one_of,
    optional,
    remote_place,
    scalar_mapping,
    shown,
    switch,
    text,
    text_list,
    whole,
)

__all__ = ["Config", "ConfigError", "redact"]

_log = logging.getLogger("blendstore.config")
_PREFIXES = ("BLENDSTORE_", "LMCACHE_")
_NOT_AVAILABLE = "not available in this version"
T = TypeVar("T")


class ConfigError(ValueError):
    """Keys, values or combinations that can't be; the message names key, value, origin and the accepted form.

    ``faults`` has a message for each of them; they are the lines of the error's own."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def redact(value: str) -> str:
    """``value`` with passwords and tokens within URLs replaced by ``***``.

    What stands alone before an ``@`` is taken for a password: ``redis://secret@host`` is a common mistake, and so is a
    missing slash. Without an ``@``, what stands where a port does and is none is taken for one."""
    value = re.sub(r"(:/+[^:@/\s]*):\S*@", r"\1:***@", value)
    value = re.sub(r"(:/+)[^:@/\s]+@", r"\1:***@", value)
    value = re.sub(r"""(:/+(?!\[)[^:@/\s]*):(?!\d+(?![\w.-]))[^/\s'"?#@]+(?=[/\s'"?#\]]|$)""", r"\1:***", value)
    return re.sub(r"(?i)([?&](?:\w*password|passwd|token|secret|api_?key|auth)=)[^&\s]*", r"\1***", value)


def _key(default: T, form: Form[T], help_text: str, *, secret: bool = False, built: bool = True) -> T:
    """A dataclass field with its form; ``built=False`` marks a feature that this version lacks."""
    about = {"form": form, "help": help_text, "secret": secret, "built": built}
    if isinstance(default, dict):
        return cast(T, field(default_factory=dict, metadata=about))
    described: T = field(default=default, metadata=about)
    return described


_POLICIES = {name: name for name in ("adaptive", "lru", "lfu", "fifo", "s3-fifo", "sieve")} | {
    "s3fifo": "s3-fifo",
    "s3_fifo": "s3-fifo",
}
_DIRECTORIES = optional(local_paths())
_FILE = optional(local_path(what="file"))
_LEAST_MEMORY = 512
_LEAST_DISK = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """The effective configuration. Built by `load`, or directly with the same checks; raises `ConfigError`."""

    # Store
    chunk_size: int = _key(256, whole(1, 65536), "tokens of a chunk, the unit of storage")
    local_cpu: bool = _key(True, switch(), "keep records in memory; false: memory is a buffer above a lower tier")
    max_local_cpu_size: float = _key(5.0, number(0, 2047, above=True), "memory for records, in GiB (2**30 bytes)")
    cache_policy: str = _key("adaptive", one_of(_POLICIES), "eviction policy")
    save_unfull_chunk: bool = _key(False, switch(), "store the last, shorter chunk of a segment; forced by blending")
    pre_caching_hash_algorithm: str = _key(
        "blake3", one_of({"blake3": "blake3", "builtin": "blake3"}), "keys are always BLAKE3; builtin is read as that"
    )
    tenant_share: float = _key(1.0, number(0, 1, above=True), "share of the memory that one tenant may take")
    tenant_salt: str = _key("", text(), "secret that separates tenants and keys every hash", secret=True)

    # Tiers below memory
    local_disk: tuple[Path, ...] | None = _key(None, _DIRECTORIES, "directory of the disk tier, or several")
    max_local_disk_size: float = _key(0.0, number(0, 1_000_000), "disk for records, in GiB, all directories together")
    local_serde: str = _key(
        "naive",
        one_of({s: s for s in ("naive", "cachegen", "lossless")}),
        "how records lie on disk",
    )
    codec_tables: Path | None = _key(None, _FILE, "table file of cachegen, from bench codec")  # noqa: RUF009
    codec_max_kl: float = _key(
        0.05, number(0), "KL in nats that a lossy coding may cost, measured at start where an engine can; else raw"
    )
    remote_url: str | None = _key(None, optional(remote_place()), "where records are shared: URL of the remote tier")
    remote_timeout_ms: int = _key(1000, whole(1, 600_000), "milliseconds that a call of the remote tier takes at most")
    remote_serde: str = _key(
        "naive",
        one_of({s: s for s in ("naive", "cachegen", "lossless")}),
        "how records travel to the remote tier and lie there",
    )
    tier_wait_ms: float = _key(
        200.0,
        number(0, 3_600_000),
        "milliseconds that a prompt waits for its records from lower tiers; later ones find them",
    )
    prefill_tokens_per_s: float = _key(
        10_000.0,
        number(0, 1_000_000_000, above=True),
        "tokens a second that the engine computes early in a prompt: eviction compares loading with it",
    )

    # Blending
    enable_blending: bool = _key(False, switch(), "reuse documents at any position")
    use_layerwise: bool = _key(False, switch(), "load layer i+1 while layer i computes; forced by blending")
    blend_special_str: str = _key(" # # ", text(), "separator between documents")
    segmenter: Literal["auto", "separator", "matcher", "whole"] = _key(
        "auto", one_of({s: s for s in ("auto", "separator", "matcher", "whole")}), "how prompts are cut"
    )
    blend_min_tokens: int = _key(32, whole(1, 2**31 - 1), "shortest run of tokens that is worth reusing")
    blend_selector: str = _key("query", text(), "which reused tokens are recomputed: name of a selector")
    blend_selector_options: Mapping[str, float | int | str] = _key({}, scalar_mapping(), "options of the selector")
    blend_recompute_ratios: tuple[float, ...] = _key((0.15,), float_list(0, 1), "share of reused tokens to recompute")
    blend_check_layers: tuple[int, ...] = _key(
        (1,), int_list(1, 65535), "layers at which tokens are picked; layer 0 has no deviation, its KV is exact"
    )
    blend_thresholds: tuple[float, ...] | None = _key(
        None, optional(float_list(0)), "and only tokens that deviate by more than this many times the mean"
    )
    blend_drift_correction: bool = _key(True, switch(), "carry what recomputing changed over to similar tokens")
    capture: Literal["in_context", "isolated"] = _key(
        "in_context", one_of({s: s for s in ("in_context", "isolated")}), "which computed documents are stored"
    )

    blend_budget_ms: float = _key(
        2000.0, number(0), "milliseconds that one blend may hold a serving engine's scheduler; 0 is no limit"
    )
    require_blending: bool = _key(
        False, switch(), "a serving engine fails to start where blending is refused, instead of going on without"
    )

    system_segments: int = _key(
        1, whole(0, 65535), "leading parts of a prompt that are no documents; 0 when prompts begin with a document"
    )

    local_format: str = _key(
        "raw",
        one_of({s: s for s in ("raw", "int8", "int4")}),
        "how documents are kept in memory: as the engine wrote them, or in half or a third of the bytes",
    )
    local_format_exact: bool = _key(
        False, switch(), "local_format also for records that only serve exact prefixes; these stay raw otherwise"
    )

    # Not built yet
    save_decode_cache: bool = _key(False, switch(), "store generated tokens", built=False)
    enable_p2p: bool = _key(False, switch(), "share with peers", built=False)
    p2p_host: str | None = _key(None, optional(text()), "this peer's address", built=False)
    p2p_init_ports: tuple[int, ...] | None = _key(None, optional(int_list(1, 65535)), "ports, one a rank", built=False)
    p2p_lookup_ports: tuple[int, ...] | None = _key(
        None, optional(int_list(1, 65535)), "ports, one a rank", built=False
    )
    lookup_url: str | None = _key(None, optional(text()), "lookup server of peers", built=False)
    distributed_url: str | None = _key(None, optional(text()), "this peer's transfer address", built=False)
    transfer_channel: str | None = _key(None, optional(text()), "how bytes travel between peers", built=False)
    nixl_backends: tuple[str, ...] | None = _key(None, optional(text_list()), "NIXL backends", built=False)
    enable_pd: bool = _key(False, switch(), "prefill and decode on different machines", built=False)
    pd_role: str | None = _key(
        None, optional(one_of({s: s for s in ("sender", "receiver")})), "side of the separation", built=False
    )
    pd_buffer_size: int | None = _key(None, optional(whole(1)), "transfer buffer, in bytes", built=False)
    pd_buffer_device: str | None = _key(None, optional(text()), "where that buffer lies", built=False)
    numa_mode: str | None = _key(None, optional(one_of({s: s for s in ("auto", "manual")})), "placement", built=False)
    extra_config: Mapping[str, Any] | None = _key(None, optional(mapping()), "further options", built=False)
    internal_api_server_enabled: bool = _key(False, switch(), "HTTP API", built=False)
    internal_api_server_port_start: int = _key(6999, whole(1, 65535), "its port, plus the rank", built=False)

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key → ``default``, ``file PATH``, ``env VARIABLE``, ``argument`` or ``forced by KEY``."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What was also logged: overridden and forced values, variables that look like a misspelt key."""

    def __post_init__(self) -> None:
        origins, warnings = dict(self.origins), list(self.warnings)
        for name, _ in _keys():
            value = _read(name, getattr(self, name), origins.get(name, "argument"))
            object.__setattr__(self, name, value)
            origins.setdefault(name, "default" if value == _default(name) else "argument")
        faults = list(self._impossible())
        for name, about in _keys():
            if not about["built"] and getattr(self, name) != _default(name):
                faults.append(
                    f"{name}: {_shown(name, getattr(self, name))} ({origins[name]}) asks for a feature "
                    f"({about['help']}) that is {_NOT_AVAILABLE}; leave it out or give {_shown(name, _default(name))}"
                )
        if faults:
            raise ConfigError(*faults)
        if self.enable_blending:
            for name in ("use_layerwise", "save_unfull_chunk"):
                if not getattr(self, name):
                    if origins[name] != "default":
                        warnings.append(f"{name}: true, forced by enable_blending, wins over false ({origins[name]})")
                    object.__setattr__(self, name, True)
                    origins[name] = "forced by enable_blending"
        object.__setattr__(self, "origins", origins)
        object.__setattr__(self, "warnings", tuple(warnings))
        for warning in warnings:
            _log.warning(warning)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> "Config":
        """The configuration of this process. ``overrides`` are arguments: key → value, above all else."""
        warnings: list[str] = []
        layers: list[tuple[str, str, object]] = []
        file = _expanded(Path(path)) if path is not None else _file_of(env, warnings)
        if file is not None:
            layers += [(name, f"file {file}", value) for name, value in _read_file(file).items()]
        layers += _read_environment(env, warnings)
        layers += [(name, "argument", value) for name, value in (overrides or {}).items()]

        values: dict[str, object] = {}
        origins: dict[str, str] = {}
        faults: list[str] = []
        faulty: set[str] = set()
        for name, origin, raw in layers:
            try:
                if name in _ELSEWHERE:
                    _refuse_elsewhere(name, raw, origin)
                    continue
                value = _read(name, raw, origin)
            except ConfigError as error:
                faults += error.faults
                faulty.add(name)
                continue
            if name in values and values[name] != value:
                warnings.append(
                    f"{name}: {_shown(name, value)} ({origin}) wins over {_shown(name, values[name])} ({origins[name]})"
                )
            values[name], origins[name] = value, origin
        if not faults:
            return cls(**cast(dict[str, Any], values), origins=origins, warnings=tuple(warnings))
        try:
            # What else is wrong, apart from combinations with keys whose value is not known.
            cls(**cast(dict[str, Any], values), origins=origins)
        except ConfigError as error:
            faults += [fault for fault in error.faults if not any(name in fault for name in faulty)]
        raise ConfigError(*faults)

    @property
    def kept(self) -> str:
        """How records are kept in memory: ``raw``, a format, or a format for exact prefixes too."""
        exact = self.local_format != "raw" and self.local_format_exact
        return f"{self.local_format}, exact prefixes too" if exact else self.local_format

    @property
    def max_local_cpu_bytes(self) -> int:
        """`max_local_cpu_size` in bytes."""
        return int(self.max_local_cpu_size * 2**30)

    @property
    def max_local_disk_bytes(self) -> int:
        """`max_local_disk_size` in bytes."""
        return int(self.max_local_disk_size * 2**30)

    def as_dict(self, redact: bool = True) -> dict[str, Any]:
        """Key → value in the types of JSON and YAML; secrets replaced by ``***`` unless ``redact`` is false."""
        return {name: _plain(name, getattr(self, name), redact) for name, _ in _keys()}

    def describe(self) -> str:
        """A table of key, value and origin, secrets redacted; warnings behind it."""
        rows = [("key", "value", "origin")]
        rows += [(name, _shown(name, getattr(self, name)), self.origins[name]) for name, _ in _keys()]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]}".rstrip() for row in rows]
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])

    def __repr__(self) -> str:
        changed = (name for name, _ in _keys() if self.origins[name] != "default")
        return f"Config({', '.join(f'{name}={_shown(name, getattr(self, name))}' for name in changed)})"

    def _impossible(self) -> Iterator[str]:
        """What is wrong with combinations that no engine could run."""
        layers, ratios, thresholds = self.blend_check_layers, self.blend_recompute_ratios, self.blend_thresholds
        separates = self.segmenter == "separator" or (self.segmenter == "auto" and self.enable_blending)
        for wrong, message in (
            (
                not self.local_cpu and self.local_disk is None and self.remote_url is None,
                "local_cpu: false leaves nowhere to store; give a lower tier (local_disk or remote_url), or, to turn "
                "caching off, start the engine without blendstore",
            ),
            (
                "cachegen" in (self.local_serde, self.remote_serde) and self.codec_tables is None,
                f"{'local_serde' if self.local_serde == 'cachegen' else 'remote_serde'}: cachegen needs codec_tables, "
                "the file that `blendstore bench codec --write-tables` makes for this model",
            ),
            (
                self.max_local_disk_bytes < _LEAST_DISK * len(self.local_disk or ()),
                f"max_local_disk_size: {self.max_local_disk_size} GiB is no room for local_disk "
                f"{', '.join(map(str, self.local_disk or ()))}; give at least 2 MiB (0.002) for each directory",
            ),
            (
                len(set(self.local_disk or ())) < len(self.local_disk or ()),
                f"local_disk: {', '.join(map(str, self.local_disk or ()))} names a directory twice; give each once",
            ),
            (
                self.max_local_cpu_bytes < _LEAST_MEMORY,
                f"max_local_cpu_size: {self.max_local_cpu_size} GiB is {self.max_local_cpu_bytes} bytes, but a record "
                f"takes at least {_LEAST_MEMORY}; give a larger size",
            ),
            (
                list(layers) != sorted(set(layers)),
                f"blend_check_layers: {list(layers)} must ascend, each layer once",
            ),
            (
                len(ratios) not in (1, len(layers)),
                f"blend_recompute_ratios: {list(ratios)} has {len(ratios)} values, but blend_check_layers "
                f"{list(layers)} has {len(layers)}; give one ratio, or one for each check layer",
            ),
            (
                list(ratios) != sorted(ratios, reverse=True),
                f"blend_recompute_ratios: {list(ratios)} grows, but a later check layer can only pick among the "
                "tokens that the earlier ones left; give ratios that do not grow",
            ),
            (
                thresholds is not None and len(thresholds) not in (1, len(layers)),
                f"blend_thresholds: {list(thresholds or ())} has {len(thresholds or ())} values, but "
                f"blend_check_layers {list(layers)} has {len(layers)}; give one threshold, or one for each check layer",
            ),
            (
                separates and not self.blend_special_str.strip(),
                f"blend_special_str: {self.blend_special_str!r} has no visible character to cut at with segmenter: "
                f'{self.segmenter}; give a text like " # # ", or segmenter: matcher',
            ),
            (
                self.segmenter == "whole" and self.enable_blending,
                "segmenter: whole treats a prompt as one piece, so enable_blending: true has nothing to reuse; "
                "give auto, separator or matcher",
            ),
            (
                not self.blend_selector.strip(),
                "blend_selector: '' is no name; give one like query, deviation, stored, head, hybrid, random or none",
            ),
            (
                self.enable_p2p and self.enable_pd,
                "enable_p2p: true and enable_pd: true exclude each other; set one of them to false",
            ),
        ):
            if wrong:
                yield message


def _keys() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and description of every key, in the order of the class."""
    return ((f.name, f.metadata) for f in fields(Config) if f.metadata)


def _about(name: str) -> Mapping[str, Any]:
    return Config.__dataclass_fields__[name].metadata


def _default(name: str) -> object:
    about = Config.__dataclass_fields__[name]
    return {} if callable(about.default_factory) else about.default


def _read(name: str, raw: object, origin: str) -> object:
    """``raw`` in the key's type. The only way in, whatever the source."""
    names = {known for known, _ in _keys()}
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hidden = _shown(near[0], raw) if near else shown(_redacted(name, raw))
        hint = f"did you mean {near[0]}?" if near else "`blendstore config show` lists the keys"
        raise ConfigError(f"{redact(name)}: {hidden} ({origin}): no such key; {hint}")
    form: Form[object] = _about(name)["form"]
    try:
        return form.read(raw)
    except ValueError as error:
        reason = f" ({error})" if isinstance(error, Rejected) else ""
        raise ConfigError(f"{name}: {_shown(name, raw)} ({origin}) is not {form.accepted}{reason}") from None


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which the plain loader keeps the last, and aliases, with which a few
    lines stand for gigabytes or for themselves."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not accepted", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_file(file: Path) -> dict[str, object]:
    if file.exists() and not file.is_file():
        raise ConfigError(f"configuration file {file}: is no file; give a readable YAML file")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file}: can't be read ({error}); give a readable YAML file") from error
    except yaml.YAMLError as error:
        # The library's own message quotes the line, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"configuration file {file}: {where}{redact(problem)}; give lines of `key: value`") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        # What the library's constructors raise for scalars, keys and nesting that they don't expect.
        raise ConfigError(
            f"configuration file {file}: a value can't be read as YAML ({type(error).__name__}); "
            "give lines of `key: value`"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"configuration file {file}: holds {type(content).__name__}; give lines of `key: value`")
    return content


def _file_of(env: Mapping[str, str], warnings: list[str]) -> Path | None:
    named = [
        (prefix + "CONFIG_FILE", env[prefix + "CONFIG_FILE"]) for prefix in _PREFIXES if env.get(prefix + "CONFIG_FILE")
    ]
    if not named:
        return None
    if named[-1][1] != named[0][1]:
        warnings.append(f"CONFIG_FILE: {named[0][1]} (env {named[0][0]}) wins over {named[-1][1]} (env {named[-1][0]})")
    return _expanded(Path(named[0][1]))


def _expanded(file: Path) -> Path:
    try:
        return file.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"configuration file {file}: {error}; give a path without ~") from None


def _read_environment(env: Mapping[str, str], warnings: list[str]) -> list[tuple[str, str, object]]:
    """Values from variables, LMCache's before blendstore's, so that the latter win."""
    names = [name for name, _ in _keys()] + list(_ELSEWHERE)
    found: list[tuple[str, str, object]] = []
    for prefix in reversed(_PREFIXES):
        for name in names:
            variable = prefix + name.upper()
            if variable in env:
                found.append((name, f"env {variable}", env[variable]))
    known = {"BLENDSTORE_" + name.upper(): name for name in names}
    for variable in sorted(env):
        if variable.startswith("BLENDSTORE_") and variable not in known and variable != "BLENDSTORE_CONFIG_FILE":
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if near:
                warnings.append(f"variable {variable} names no key and is ignored; did you mean {near[0]}?")
    return found


# Keys of the reference product that this project has no use for yet, with the value that switches nothing on.
_ELSEWHERE: Mapping[str, object] = {
    **dict.fromkeys(
        (
            "enable_controller", "enable_xpyd", "enable_nixl", "enable_async_loading", "enable_lazy_memory_allocator",
            "enable_chunk_statistics", "enable_kv_events", "enable_scheduler_bypass_lookup",
            "enable_hidden_state_cache", "local_cpu_use_hugepages", "pd_bidirectional",
            "pd_skip_proxy_notification", "use_gpu_connector_v3", "chunk_statistics_auto_start_statistics",
            "nixl_enable_gc",
        ),
        False,
    ),
    **dict.fromkeys(
        (
            "lmcache_instance_id", "controller_pull_url", "controller_reply_url", "controller_url",
            "lmcache_worker_ports", "lmcache_worker_port", "lmcache_worker_ids", "lmcache_worker_heartbeat_time",
            "pd_peer_host", "pd_peer_init_port", "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host",
            "pd_proxy_port", "nixl_buffer_size", "nixl_buffer_device", "nixl_role", "nixl_peer_host", "nixl_peer_port",
            "nixl_peer_init_port", "nixl_peer_alloc_port", "nixl_proxy_host", "nixl_proxy_port", "nixl_receiver_host",
            "nixl_receiver_port", "gds_path", "gds_buffer_size", "cufile_buffer_size", "weka_path", "maru_path",
            "audit_actual_remote_url", "external_lookup_client", "priority_limit", "hit_miss_ratio",
            "internal_api_server_include_index_list", "internal_api_server_socket_path_prefix", "plugin_locations",
            "runtime_plugin_locations", "external_backends", "storage_plugins", "remote_storage_plugins",
            "retrieve_locations", "store_location", "lookup_server_worker_ids", "script_allowed_imports",
            "remote_config_url", "app_id", "mp_host", "hidden_state_layers",
        )
    ),
    "use_gds": True, "py_enable_gc": True, "mp_port": 5555, "min_retrieve_tokens": 0, "reserve_local_cpu_size": 0.0,
    "lookup_timeout_ms": 3000, "blocking_timeout_secs": 10, "pin_timeout_sec": 300, "pin_check_interval_sec": 30,
    "local_disk_path_sharding": "by_gpu", "gds_path_sharding": "by_gpu", "gds_backend": "cufile",
    "internal_api_server_host": "0.0.0.0",  # noqa: S104 - a name to compare with, nothing binds it
}  # fmt: skip


def _refuse_elsewhere(name: str, raw: object, origin: str) -> None:
    off = _ELSEWHERE[name]
    accepted = {"", "none", "null", str(off).lower(), *(("no", "off", "0") if off is False else ())}
    accepted |= {"yes", "on", "1"} if off is True else set()
    word = raw if isinstance(raw, str) else shown(raw)
    if raw != off and word.strip().lower() not in accepted:
        raise ConfigError(
            f"{name}: {shown(_redacted(name, raw))} ({origin}) is a key of LMCache whose feature is {_NOT_AVAILABLE}; "
            f"leave it out or give {'null' if off is None else str(off).lower()}"
        )


def _redacted(name: str, value: object) -> object:
    """``value`` with every string in it redacted; that of a key for a URL as one, however it is mistyped."""
    if isinstance(value, Mapping):
        return {_redacted(name, key): _redacted(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if "url" not in name:
        return redact(value)
    return redacted_url(value.encode(errors="backslashreplace").decode())


def _plain(name: str, value: object, hide: bool) -> object:
    if hide and _about(name)["secret"] and value:
        return "***"
    if isinstance(value, tuple):
        value = [str(item) if isinstance(item, Path) else item for item in value]
    return _redacted(name, value) if hide else value


def _shown(name: str, value: object) -> str:
    """One line for people: what `describe`, warnings and errors print."""
    try:
        value = _plain(name, value, True)
    except RecursionError:
        return f"<{type(value).__name__}>"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)
