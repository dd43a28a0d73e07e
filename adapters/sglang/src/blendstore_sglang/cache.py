"""The engine's radix tree with the store behind it: what `Serving` finds is put into the tree before a prompt is
computed, and a computed prompt is kept afterwards.

Where nothing is reused from another context the tree is the engine's own. A prompt that is blended goes under an extra
key of its kind (selector, ratio and all that changes the KV), so that prompts that ask for the same find it and no
others do. Its leading tokens that the engine holds bit for bit are copied there.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from torch import Tensor

from blendstore.options import OptionError, RequestOptions
from blendstore.pipeline import Prepared
from blendstore.serving import Served, read_options, salted, signature

from .serve import Outlook, Serving, Tenant, Tokens
from .versions import Version

log = logging.getLogger("blendstore.sglang")


@dataclass(slots=True)
class Progress:
    """What is known of one request; kept on it, so that it goes when the request goes. Holds no pins."""

    tenant: Tenant
    exact_key: str | None
    blend_key: str | None
    """None when this request isn't blended."""
    tokens: Tokens
    passive: bool = False
    """The prompt is more than its tokens, or its options are wrong: leave it alone."""
    seen: tuple[int, ...] = ()
    """What the outlook was made from."""
    outlook: Outlook | None = None
    looked: Prepared | None = None
    """What that outlook found, also if it is nothing."""
    done: Prepared | None = None
    """What the prompt's KV is made of; None until it is known."""
    settled: bool = False
    """The prompt has been computed once: a retracted request goes on under the same key."""
    kept: bool = False


class BlendingCache:
    """Goes in front of the engine's tree class; ``serving`` and ``version`` are set when the tree is made."""

    serving: Serving
    version: Version

    def match_prefix(self, params: Any) -> Any:
        """The engine's match; with a request, the KV that can be put behind it counts as hits on the host."""
        request = params.req
        if request is None or self.disable or not len(params.key):  # type: ignore[attr-defined]
            return super().match_prefix(params)  # type: ignore[misc]
        self.serving.settle()
        progress = self._progress(request)
        if progress.passive:
            return super().match_prefix(params)  # type: ignore[misc]
        exact = self._match(params, progress.exact_key)
        blended = None if progress.blend_key is None else self._match(params, progress.blend_key)
        chosen = self._choose(request, progress, params.key, exact, blended)
        if progress.outlook is None:
            return chosen
        return chosen._replace(host_hit_length=progress.outlook.target - self.version.held(chosen))

    def init_load_back(self, params: Any) -> Any:
        """Put the KV that `match_prefix` promised into the tree: all of it, or none."""
        request = params.req
        progress = getattr(request, "_blendstore", None)
        if progress is None or progress.outlook is None:
            return self.version.loaded(self._no_slots()), request.last_node
        promised, progress.outlook = progress.outlook, None
        try:
            found = self._fill(request, progress, promised)
        except Exception as error:
            self.serving.metrics.event("fallback")
            log.warning("reuse failed, the engine computes the prompt: %s", f"{type(error).__name__}: {error}")
            found = None
        if found is None:
            progress.done = None
            return self.version.loaded(self._no_slots()), request.last_node
        return found

    def prompt_complete(self, request: Any) -> None:
        """The tree holds the whole prompt of this request: keep what the store lacks."""
        progress = getattr(request, "_blendstore", None)
        if progress is None or progress.passive or progress.kept:
            return
        progress.kept = progress.settled = True
        self.serving.peek()
        self.serving.metrics.store(self.serving.store)
        done, tenant = progress.done or self._computed(request, progress), progress.tenant
        progress.done = progress.outlook = progress.looked = None
        if not tenant.options.store:
            return
        key = self.version.radix_key_of(request, progress.tokens)
        match = super().match_prefix(MatchPrefixParams(key=key))  # type: ignore[misc]
        if not self.version.held(match):
            return
        slots = self.version.slots(self, match)
        if not self.serving.streams.asynchronous:
            self.serving.keep(done, tenant, slots, lambda: None)
            return
        lock = self.inc_lock_ref(match.last_device_node)  # type: ignore[attr-defined]
        node, root = match.last_device_node, self._epoch_of_tree()

        def unlock() -> None:
            if root == self._epoch_of_tree():
                self.dec_lock_ref(node, lock.to_dec_params())  # type: ignore[attr-defined]

        self.serving.keep(done, tenant, slots, unlock)

    def evict(self, params: Any) -> Any:
        """The engine's; slots that are being copied out are waited for when others are not enough."""
        serving = getattr(self, "serving", None)
        if serving is not None:
            serving.settle(wait=params.num_tokens > self.evictable_size())
        return super().evict(params)  # type: ignore[misc]

    def evictable_size(self) -> int:
        """The engine's, which asks when it plans and, again and again, when it is idle."""
        serving = getattr(self, "serving", None)
        if serving is not None:
            serving.peek()
        size: int = super().evictable_size()  # type: ignore[misc]
        return size

    def reset(self) -> None:
        """The engine's (/flush_cache): the tree is emptied. The store keeps its records, but those of other weights are
        not found any more: the engine flushes when it has loaded new ones."""
        serving = getattr(self, "serving", None)
        if serving is not None:
            serving.settle(wait=True)
            serving.renew()
        super().reset()  # type: ignore[misc]
        self._tree_epoch = self._epoch_of_tree() + 1

    # What follows is this class's own.

    def _epoch_of_tree(self) -> int:
        return getattr(self, "_tree_epoch", 0)

    def _no_slots(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)  # type: ignore[attr-defined]

    def _match(self, params: Any, extra_key: str | None) -> Any:
        return super().match_prefix(replace(params, key=self.version.radix_key(params.key, extra_key)))  # type: ignore[misc]

    def _progress(self, request: Any) -> Progress:
        progress: Progress | None = getattr(request, "_blendstore", None)
        if progress is None:
            progress = request._blendstore = self._first_sight(request)
        return progress

    def _first_sight(self, request: Any) -> Progress:
        serving, key = self.serving, request.extra_key
        tokens = np.asarray(request.origin_input_ids, dtype=np.int64).astype(np.uint32)
        passive = request.multimodal_inputs is not None or request.input_embeds is not None
        passive = passive or request.positional_embed_overrides is not None
        try:
            options = read_options(request.sampling_params.custom_params)
        except OptionError as error:
            serving.metrics.event("wrong_options")
            log.warning("blendstore: request %s is served without blendstore: %s", request.rid, error)
            return Progress(Tenant(request.rid, RequestOptions(reuse=False, store=False)), key, None, tokens, True)
        if options.tenant_salt is not None:
            # The engine's tree must separate these tenants too.
            told = hashlib.blake2b(options.tenant_salt.encode(), digest_size=16).hexdigest()
            key = f"{key or ''}\x1ftenant:{told}"
        options = salted(serving.config, options, *self.version.salts(request), request.extra_key or "")
        tenant = Tenant(request.rid, options, request.lora_id or "")
        blend_key = None
        if serving.blends(tenant):
            blend_key = f"{key or ''}\x1fblend:{signature(serving.settings(tenant))}"
        return Progress(tenant, key, blend_key, tokens, passive)

    def _choose(self, request: Any, progress: Progress, key: Any, exact: Any, blended: Any) -> Any:
        """The match to go on from, its key put on the request; sets the outlook when there is something to fill."""
        serving, version = self.serving, self.version
        held = version.held(exact)
        held_blended = -1 if blended is None else version.held(blended)
        size = self.page_size  # type: ignore[attr-defined]
        limit = min(len(key), len(progress.tokens) - 1) // size * size
        if progress.settled:  # retracted: go on under the key that it was computed under
            if request.extra_key == progress.blend_key:
                held = -1
            else:
                held_blended, blended = -1, None
        elif held_blended - held < serving.config.blend_min_tokens:
            # What is computed behind blended KV counts as blended: so short a lead isn't worth that.
            held_blended = min(held_blended, held)
        seen = (held, held_blended, limit, serving.epoch)
        if progress.seen != seen:
            progress.outlook = progress.looked = progress.done = None
            progress.seen = seen
            if max(held, held_blended) < limit and progress.tenant.options.reuse:
                self._look(progress, held, held_blended, limit, blend=blended is not None)
        outlook = progress.outlook
        blend = held_blended > held or (outlook is not None and outlook.blended)
        request.extra_key = progress.blend_key if blend else progress.exact_key
        return blended if blend else exact

    def _look(self, progress: Progress, held: int, held_blended: int, limit: int, *, blend: bool) -> None:
        serving, tenant, tokens = self.serving, progress.tenant, progress.tokens
        prefix, exact = max(held, held_blended, 0), held >= held_blended
        outlook = serving.look(tokens, tenant, held=prefix, exact=exact, limit=limit, blend=blend)
        if outlook is None:
            return
        outlook.prepared.release()
        progress.looked = replace(outlook.prepared, where=[], leases=[])
        if outlook.target > max(held_blended if outlook.blended or not exact else held, 0):
            progress.outlook = outlook
        elif outlook.cut:
            serving.metrics.event("over_budget")
            log.info("blendstore: request %s: nothing is blended, it would take longer than the budget", tenant.name)

    def _fill(self, request: Any, progress: Progress, promised: Outlook) -> Any:
        """Returns what `init_load_back` returns, or None when the engine has to compute the prompt."""
        serving, version, tenant = self.serving, self.version, progress.tenant
        outlook: Outlook | None = promised
        target = promised.target
        key = version.radix_key_of(request, progress.tokens[:target])
        marked = request.extra_key == progress.blend_key
        own = super().match_prefix(MatchPrefixParams(key=key))  # type: ignore[misc]
        start = version.held(own)
        slots = self._take(target - start)
        if slots is None:
            serving.metrics.event("no_slots")
            return None
        try:
            # Evicting may have taken what was held before.
            own = super().match_prefix(MatchPrefixParams(key=key))  # type: ignore[misc]
            prefix = mine = version.slots(self, own)
            if request.extra_key != progress.exact_key:
                exact_key = version.radix_key(key, progress.exact_key)
                exact = super().match_prefix(MatchPrefixParams(key=exact_key))  # type: ignore[misc]
                prefix = torch.cat([mine, version.slots(self, exact)[len(mine) :]])
            prefix = prefix[: min(len(prefix), target)].long()
            clean = request.extra_key == progress.exact_key or not len(mine)
            if not serving.again(promised, tenant, held=len(prefix), exact=clean):
                outlook = serving.look(
                    progress.tokens,
                    tenant,
                    held=len(prefix),
                    exact=clean,
                    limit=target,
                    blend=progress.blend_key is not None,
                )
            if outlook is None or len(mine) != start or outlook.target != target or (outlook.blended and not marked):
                serving.metrics.event("gone")
                if outlook is not None:
                    outlook.prepared.release()
                self._give(slots)
                return None
            slots = slots.long()
            serving.fill(outlook, tenant, prefix, slots, start)
        except BaseException:
            self._give(slots)
            raise
        value = torch.cat([mine.long(), slots])
        self.insert(InsertParams(key=key, value=value, prev_prefix_len=start))  # type: ignore[attr-defined]
        node = super().match_prefix(MatchPrefixParams(key=key)).last_device_node  # type: ignore[misc]
        progress.done = replace(outlook.prepared, where=[], leases=[])
        return version.loaded(slots), node

    def _take(self, count: int) -> Tensor | None:
        """Slots for ``count`` tokens, evicting when there are too few."""
        allocator = self.token_to_kv_pool_allocator  # type: ignore[attr-defined]
        short = count - allocator.available_size()
        if short > 0:
            self.evict(EvictParams(num_tokens=short))
        slots: Tensor | None = allocator.alloc(count)
        return slots

    def _give(self, slots: Tensor) -> None:
        self.token_to_kv_pool_allocator.free(slots)  # type: ignore[attr-defined]

    def _computed(self, request: Any, progress: Progress) -> Prepared:
        """A prompt that the engine computed behind whatever it held."""
        serving, tenant = self.serving, progress.tenant
        options = replace(tenant.options, reuse=False)
        held = min(int(request.cached_tokens), len(progress.tokens) - 1)
        exact = request.extra_key == progress.exact_key
        done, n = progress.looked, len(progress.tokens)
        if done is None or done.plan.context or done.plan.prefix != held or done.prefix_exact != exact:
            done = serving.pipeline(tenant.lora).prepare(
                progress.tokens, options, engine_prefix=held, prefix_exact=exact
            )
        serving.metrics.served(Served(tenant.name, n, held, 0, 0, 0, n - held, 0.0))
        return done
