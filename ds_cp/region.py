"""The sequence-parallel region of one forward pass.

A region starts before the first layer of a stack and ends after its last one. Inside, every per-token tensor holds this rank's
tokens only, and a :class:`Region` answers what depends on the whole sequence: which keys a query sees, the positions of tokens
in their documents, the values of other ranks. A layer gets the region with its mask, as an argument, so that its recomputation
under gradient checkpointing uses the region of the same forward pass.
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
from ds_cp.attention.ulysses import AllHeads, HeadSharding, HeadSplit, Ulysses
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
    """What attention needs to know about the call of a layer that it is part of.

    Attributes:
        region: Region of the forward pass.
        saved: Where the layer saves its attention outputs for its recomputation; None if it does not.
        chunk: The chunk of tokens that the layer runs on (``offload_kv``); None if it runs on all tokens of this rank.
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
    """State of one forward pass of a stack.

    Attributes:
        plan: The model's plan.
        mesh: The plan's mesh.
        layout: Layout of the batch.
        documents: Documents of the batch.
        dense_mask: [B or 1, H or 1, S, S], a mask that the user passed to the model. It replaces the masks of all layers.
        early_mask: Rule and terms of the mask that the model created, before its decoder ran, for all layers. It is not the mask
            descriptor, which refers to the region: with a reference cycle, dense masks would live until the garbage collector
            runs.
        encoder_mask: [B, keys] bool, which tokens are no padding in a second sequence that is replicated on every rank, such as
            an encoder's.
        last_position: Largest position in the batch, a scalar tensor.
        attended: The attention and recurrent modules that ran in this region, by id, numbered in the order of their first calls.
            The attention function and recurrent layers add themselves; the stack's hook counts them.
        recurrent_calls: Number of calls of each function of the recurrent layers, to notice a layer that bypasses them.
        seed_base: Seed that is equal on ranks whose random number generators were seeded alike; :meth:`seed` depends on it.
        group_seed: ``seed_base`` of the first rank of the context-parallel group; None until :meth:`seed` is called.
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
    recurrent_calls: Counter[str] = field(default_factory=Counter)
    seed_base: int | None = None
    group_seed: int | None = None
    _schedules: dict[tuple[Rule, int | None], tuple[Step, ...]] = field(default_factory=dict)
    _positions: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def shard(self, full: torch.Tensor, dim: int = 1, pad_value: float | None = 0) -> torch.Tensor:
        """This rank's tokens of a replicated tensor; the dim of S tokens becomes one of L. See :meth:`Layout.shard`."""
        return self.layout.shard(full, dim, self.mesh.cp_group.rank, pad_value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not annotate it
    def gather(self, local: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All tokens in order, without padding, on every rank; the dim of L tokens becomes one of S."""
        return gather_sequence(local, self.layout, self.mesh.cp_group, dim)

    @cached_property
    def position_in_document(self) -> torch.Tensor:
        """Number of unmasked tokens of the same document before each token, [B, S] int64; 0 for masked tokens."""
        return self._on_device(self.documents.position_in_document)

    @cached_property
    def origin(self) -> torch.Tensor:
        """Position at which each token's document starts, [B, S] int64."""
        return self._on_device(self.documents.origin)

    @cached_property
    def unmasked(self) -> torch.Tensor:
        """Whether each token is unmasked, [B, S] bool."""
        return self._on_device(self.documents.unmasked)

    @cached_property
    def per_document(self) -> PerDocument:
        """How a function that does not know documents runs on each of them."""
        return PerDocument.of(self.documents, self.layout.seq_len, self._device)

    @cached_property
    def per_document_single_call(self) -> PerDocument:
        """How such a function runs on all documents in one call."""
        return PerDocument.of(self.documents, self.layout.seq_len, self._device, single_call=True)

    @cached_property
    def queries(self) -> tuple[Queries, ...]:
        """This rank's queries, grouped by document."""
        return Queries.of(self.documents, self.layout, self.mesh.cp_group.rank, self._device)

    @property
    def _device(self) -> str:
        name: str = get_accelerator().current_device_name()
        return name

    def _on_device(self, per_token: Callable[[int], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(per_token(self.layout.seq_len)).to(self._device)

    def seed(self, layer: int) -> int:
        """63-bit seed that is equal on all ranks of the context-parallel group and different for each group and layer."""
        if self.group_seed is None:
            own_seed = torch.tensor([self.seed_base or 0], dtype=torch.int64)
            self.group_seed = int(self.mesh.control_group.all_gather(own_seed, "agreement on a dropout seed")[0])
        parts = (self.group_seed, self.mesh.dp_rank, layer)
        digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little") for part in parts), digest_size=8)
        return int.from_bytes(digest.digest(), "little") >> 1

    def schedule(self, rule: Rule, compressed_count: int | None = None) -> tuple[Step, ...]:
        """Schedule of a rule, computed once per batch.

        Args:
            rule: The rule.
            compressed_count: Number of compressed keys, which add a step to the schedule; None if the layer has none.
        """
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
            query: [B, H, L, d]. More channels than d are per-query biases and sinks.
            key: [B, h, L, d].
            value: [B, h, L, dv].
            rule: The layer's mask inside a document.
            score: What is applied to q k^T before the softmax.
            saved: See :class:`LayerCall`.
            chunk: See :class:`LayerCall`. L is the number of its tokens then.

        Returns:
            [B, H, L, dv].
        """
        ulysses = self.mesh.ulysses_group
        heads: HeadSharding = AllHeads()
        if ulysses.size > 1:
            split = head_split(query.size(1), key.size(1), ulysses.size)
            heads = Ulysses(split, ulysses)
            first = sum(split.query_heads[: ulysses.rank])
            score = score.of_heads(first, first + split.query_heads[ulysses.rank])
        compressed_keys = None if score.compressed_kv is None else score.compressed_kv.keys
        steps = self.schedule(rule, None if compressed_keys is None else compressed_keys.size(2))
        kernel = kernels.choose(self.plan.kernel, key, value, score)
        positions = partial(self._global_positions, query.device)
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
        """Run a function that mixes the tokens of each head or channel. See :func:`~ds_cp.recurrent.channels.mix`."""
        return channels.mix(function, arguments, dims, out_dims, self.layout, self.mesh.cp_group, self.per_document)

    def _global_positions(self, device: torch.device, ring_rank: int) -> torch.Tensor:
        """Global positions of a ring shard's tokens, computed once per batch."""
        if (ring_rank, device) not in self._positions:
            self._positions[ring_rank, device] = self.layout.positions(ring_rank, device)
        return self._positions[ring_rank, device]

    def _exchange(self, steps: tuple[Step, ...], compressed_keys: torch.Tensor | None, phase: str) -> Exchange:
        self.mesh.attention_calls[phase] += 1
        if compressed_keys is None:
            return PeerExchange(self.mesh.ring_group, steps, self.plan.prefetch_steps, phase)
        return CompressedKVExchange(
            # the last step is that of the compressed KV, which are not received
            PeerExchange(self.mesh.ring_group, steps[:-1], self.plan.prefetch_steps, phase),
            steps,
            compressed_keys,
        )


@cache
def head_split(query_heads: int, key_heads: int, ranks: int) -> HeadSplit:
    """The heads of each ulysses rank.

    Raises:
        BatchError: There is no split. The planner has checked the heads of the model's config, so the config is wrong then.
    """
    split = HeadSplit.plan(query_heads, key_heads, ranks)
    if split is None:
        raise BatchError(
            f"a layer with {query_heads} query and {key_heads} key/value heads does not split over {ranks} ulysses ranks, "
            'although the model\'s config promised heads that do. Use "method": "ring".'
        )
    return split
