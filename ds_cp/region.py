"""One forward's shared part: what layers may ask of the whole sequence while they hold this rank's tokens only.

A region opens before the text decoder and closes behind it. Between, every tensor that is per token holds this rank's
tokens only, and a :class:`Region` answers the questions that need the whole sequence: which keys a query sees, where a
token stands, what the other ranks have. Attention gets it through the mask descriptor, so that a recomputed layer
(gradient checkpointing) finds the region of *its* forward, whatever ran since.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Callable, Mapping

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from ds_cp.agreement import BatchError
from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.compressed_kv import CompressedKVExchange
from ds_cp.attention.exchange import Exchange, PeerExchange
from ds_cp.attention.host_kv import HostKV
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.attention.score import Score, Term
from ds_cp.attention.ulysses import AllHeads, HeadSplit, Ulysses
from ds_cp.chunked.layer import LayerChunk
from ds_cp.collectives import gather_sequence
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.queries import Queries
from ds_cp.mask.rules import Rule
from ds_cp.mask.schedule import Step, schedule, with_compressed_kv
from ds_cp.mesh import Mesh
from ds_cp.planner import Plan
from ds_cp.recurrent import channels
from ds_cp.recurrent.per_document import PerDocument


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, as its attention needs to know it.

    Attributes:
        region: of the running forward.
        saved: where a checkpointed layer keeps its attention; None if it is not kept.
        chunk: the tokens that the layer runs on, if it does not run on all of this rank's ("offload_kv").
    """

    region: "Region"
    saved: SavedAttention | None = None
    chunk: LayerChunk | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, score: Score
    ) -> torch.Tensor:
        """See :meth:`Region.attend`."""
        return self.region.attend(query, key, value, rule, score, self.saved, self.chunk)


@dataclass(eq=False)
class Region:
    """One forward's shared part.

    Attributes:
        plan, mesh: how the sequence is shared, and with whom.
        layout: which token is where.
        documents: which tokens belong together.
        dense_mask: a mask [B or 1, H or 1, S, S] that the user gave whole; it then stands for every layer's.
        early_mask: rule and terms of the mask that the model made for all layers before its decoder ran. Not the
            descriptor, which holds the region: a cycle would keep whole masks until Python looks for cycles.
        encoder_mask: [B, keys] bool, which tokens of a second sequence exist that every rank holds whole (an encoder's).
        last_position: the largest position of the whole batch, a tensor without dims.
        attended: the attention modules that came through here, by id: their order.
        mixed: how often each function of recurrent layers did.
        seed_base: equal on ranks that were seeded alike; what :meth:`seed` starts from.
        group_seed: that of the group's first rank, once some layer has asked for a seed.
    """

    plan: Plan
    mesh: Mesh
    layout: Layout
    documents: Documents
    dense_mask: torch.Tensor | None = None
    early_mask: "tuple[Rule, tuple[Term, ...]] | None" = None
    encoder_mask: torch.Tensor | None = None
    last_position: torch.Tensor | None = None
    attended: dict[int, int] = field(default_factory=dict)
    mixed: Counter[str] = field(default_factory=Counter)
    seed_base: int | None = None
    group_seed: int | None = None
    _schedules: dict[tuple[Rule, int | None], tuple[Step, ...]] = field(default_factory=dict)
    _positions: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def shard(self, full: torch.Tensor, dim: int = 1, pad_value: float | None = 0) -> torch.Tensor:
        """This rank's tokens of a tensor that every rank holds whole; S becomes L."""
        return self.layout.shard(full, dim, self.mesh.cp_group.rank, pad_value)

    @torch.compiler.disable
    def gather(self, local: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All tokens, in order and without padding, on every rank; L becomes S."""
        return gather_sequence(local, self.layout, self.mesh.cp_group, dim)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where each token stands inside its document, [B, S] int64."""
        return self._on_device(self.documents.position_in_document)

    @cached_property
    def origin(self) -> torch.Tensor:
        """Where each token's document starts, [B, S] int64."""
        return self._on_device(self.documents.origin)

    @cached_property
    def unmasked(self) -> torch.Tensor:
        """Which tokens are no padding, [B, S] bool."""
        return self._on_device(self.documents.unmasked)

    @cached_property
    def per_document(self) -> PerDocument:
        """How a function that knows no documents runs on each of them by itself."""
        return PerDocument.of(self.documents, self.layout.seq_len, get_accelerator().current_device_name())

    @cached_property
    def per_document_single_call(self) -> PerDocument:
        """The same in one call, whatever the number of documents."""
        return PerDocument.of(
            self.documents, self.layout.seq_len, get_accelerator().current_device_name(), single_call=True
        )

    @cached_property
    def queries(self) -> tuple[Queries, ...]:
        """This rank's queries by the document that they stand in."""
        return Queries.of(self.documents, self.layout, self.mesh.cp_group.rank, get_accelerator().current_device_name())

    def _on_device(self, per_token: Callable[[int], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(per_token(self.layout.seq_len)).to(get_accelerator().current_device_name())

    def seed(self, layer: int) -> int:
        """For random numbers that all ranks of the group must draw alike, 63 bits; other groups draw others."""
        if self.group_seed is None:
            mine = torch.tensor([self.seed_base or 0], dtype=torch.int64)
            self.group_seed = int(self.mesh.control_group.all_gather(mine, "agreement on a dropout seed")[0])
        words = (self.group_seed, self.mesh.dp_rank, layer)
        digest = hashlib.blake2b(b"".join(phase.to_bytes(8, "little") for phase in words), digest_size=8)
        return int.from_bytes(digest.digest(), "little") >> 1

    def schedule(self, rule: Rule, compressed_count: int | None = None) -> tuple[Step, ...]:
        """Rows and tiles of a rule, computed once per batch; with one more step for entries, if there are any."""
        if (rule, compressed_count) not in self._schedules:
            if compressed_count is None:
                steps = schedule(self.documents.segments(rule), self.layout, self.mesh.ring_group.rank)
            else:
                steps = with_compressed_kv(self.schedule(rule), len(self.documents.ranges), compressed_count)
            self._schedules[rule, compressed_count] = steps
        return self._schedules[rule, compressed_count]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: Rule,
        score: Score,
        saved: SavedAttention | None = None,
        chunk: LayerChunk | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: [B, H, L, d], or more channels for terms and sinks that read them.
            key: [B, h, L, d].
            value: [B, h, L, dv].
            rule: the layer's mask inside a document.
            score: what happens to q k^T before the softmax.
            saved, chunk: see :class:`LayerCall`.

        Returns:
            [B, H, L, dv].
        """
        ulysses, heads = self.mesh.ulysses_group, AllHeads()
        if ulysses.size > 1:
            split = head_split(query.size(1), key.size(1), ulysses.size)
            heads = Ulysses(split, ulysses)
            first = sum(split.query_heads[: ulysses.rank])
            score = score.of_heads(first, first + split.query_heads[ulysses.rank])
        compressed_keys = None if score.compressed_kv is None else score.compressed_kv.keys
        steps = self.schedule(rule, None if compressed_keys is None else compressed_keys.size(2))
        kernel = kernels.choose(self.plan.kernel, key, value, score)
        positions = partial(self._ring_positions, query.device)
        if chunk is not None:
            make_host_kv = partial(
                HostKV, steps, self.mesh.ring_group, heads, self.layout.local_len, self.mesh.attention_calls
            )
            return chunk.attend(query, key, value, make_host_kv, kernel, score, positions, saved)
        make_exchange = partial(self._exchange, steps, compressed_keys)
        return attend(query, key, value, make_exchange, kernel, score, positions, heads, saved)

    def mix(
        self,
        function: Callable[..., torch.Tensor],
        arguments: Mapping[str, Any],
        dims: Mapping[str, str],
        out_dims: str,
    ) -> torch.Tensor:
        """A function that mixes tokens inside of heads or channels, over the whole sequence: :func:`~ds_cp.recurrent.channels.mix`."""
        return channels.mix(function, arguments, dims, out_dims, self.layout, self.mesh.cp_group, self.per_document)

    def _ring_positions(self, device: torch.device, ring_rank: int) -> torch.Tensor:
        """Global positions of a ring shard's tokens, made once per batch."""
        if (ring_rank, device) not in self._positions:
            self._positions[ring_rank, device] = self.layout.positions(ring_rank, device)
        return self._positions[ring_rank, device]

    def _exchange(self, steps: tuple[Step, ...], compressed_keys: torch.Tensor | None, phase: str) -> Exchange:
        self.mesh.attention_calls[phase] += 1
        if compressed_keys is None:
            return PeerExchange(self.mesh.ring_group, steps, self.plan.prefetch_steps, phase)
        return CompressedKVExchange(
            PeerExchange(self.mesh.ring_group, steps[:-1], self.plan.prefetch_steps, phase), steps, compressed_keys
        )


@cache
def head_split(query_heads: int, key_heads: int, ranks: int) -> HeadSplit:
    """The heads of each ulysses rank; the planner has made sure that a split exists."""
    split = HeadSplit.plan(query_heads, key_heads, ranks)
    if split is None:
        raise BatchError(
            f"a layer with {query_heads} query and {key_heads} key/value heads does not split over {ranks} ulysses ranks, "
            'although the model\'s config promised heads that do. Use "method": "ring".'
        )
    return split
