"""The moments of a training step that can be its fullest, and what is there then, in bytes.

PyTorch's allocator keeps a pool for each CUDA stream and lends no pool's free memory to another stream. FSDP2 gathers
parameters on one stream and reduces gradients on a second, so what these two ever need stays theirs: gradients occupy
their memory during the whole step, and a moment is what the main stream needs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moelab.layout import Layout
from moelab.layout.schedule import in_flight
from moelab.memory.activations import BF16, FP32, Work
from moelab.memory.layer import LayerCosts, Mode, layer_costs
from moelab.memory.sharding import NOTHING, Degrees, Held, StageModules, degrees_of, module_held
from moelab.model import EMBEDDING, HEAD, ModelShape

LOSS_CHUNKS = 8
"""Pieces into which TorchTitan cuts the sequence for the loss (``ChunkedLossWrapper``)."""
LOSS_BYTES = {"eager": 3 * FP32 + BF16, "compiled": FP32 + 2 * BF16}
"""Bytes for each logit of a chunk: the BF16 logits with log-softmax, its gradient and theirs in FP32; compiled, the
logits, a row of intermediate FP32 and the gradient of the logits."""
Parts = dict[str, float]
Moment = tuple[str, Parts]


@dataclass(frozen=True)
class Step:
    """What the moments of all pipeline ranks share."""

    shape: ModelShape
    layout: Layout
    schedule: str
    degrees: Degrees
    work: Work
    mode: Mode
    dense: LayerCosts
    moe: LayerCosts
    embedding: Held
    head: Held

    def moments(self, rank: int, modules: list[StageModules], total: list[Held]) -> Iterator[Moment]:
        """The moments of one pipeline rank on the main stream.

        Args:
            rank: pipeline rank.
            modules: what each of its stages is made of.
            total: elements of each stage's parameters.
        """
        return self._pipeline(rank, modules, total) if self.layout.pp > 1 else self._single(modules[0])

    def gather_pool(self, modules: list[StageModules]) -> float:
        """Bytes of the stream that gathers parameters: two modules in a row, and this rank's shard of one in BF16."""
        chain = [module for stage in modules for module in self._chain(stage)]
        pairs = zip(chain, [*chain[1:], NOTHING], strict=True)
        return max(BF16 * (self.shared(one) + self.shared(two) + self._shard(one)) for one, two in pairs)

    def reduce_pool(self, modules: list[StageModules]) -> float:
        """Bytes of the stream that reduces gradients, beyond the gradients: a copy where a group is a single rank."""
        chain = [module for stage in modules for module in self._chain(stage)]
        return max(FP32 * (module.gathered - self.shared(module)) for module in chain)

    def _chain(self, stage: StageModules) -> list[Held]:
        """The modules of a stage in order, at most two layers of a kind."""
        layers = [self.dense.held] * min(2, stage.dense_layers) + [self.moe.held] * min(2, stage.moe_layers)
        return [self.embedding] * stage.embedding + layers + [self.head] * stage.head

    def _single(self, modules: StageModules) -> Iterator[Moment]:
        """Without a pipeline: activations pile up to the loss and go layer by layer from then on."""
        final_norm = float(BF16 * self.shape.dim * (self.work.residual + self.work.tokens))
        everything = modules.dense_layers * self.dense.saved + modules.moe_layers * self.moe.saved
        last = self.moe if modules.moe_layers else self.dense
        forward = {
            "activations": everything,
            "gathered parameters": float(BF16 * last.held.gathered),
            "working set": last.forward,
            "quantised copies": last.quantised,
        }
        yield "forward pass of the last layer", forward
        yield from self._loss(everything + final_norm)
        yield from self._backward(modules, everything + final_norm)
        end = {"gathered gradients": float((BF16 + FP32) * self.embedding.gathered)}
        yield "gradients of the embedding", end

    def _loss(self, activations: float) -> Iterator[Moment]:
        """The loss of the last chunk of the sequence, and the reduction of the head's gradient after it.

        The head's gradient adds up over the chunks in FP32, as FSDP2 does with whatever it does not reduce at once.
        """
        chunk = self.work.tokens / LOSS_CHUNKS * self.shape.vocab_size / self.work.tp
        hidden = (BF16 + FP32) * self.work.tokens * self.shape.dim
        shared = {"activations": activations, "gathered parameters": float(BF16 * self.head.gathered)}
        per_logit = LOSS_BYTES["compiled" if self.mode.loss_compiled else "eager"]
        inside = {"gathered gradients": float(FP32 * self.head.gathered), "loss": hidden + per_logit * chunk}
        yield "loss", shared | inside
        end = {"gathered gradients": float(2 * FP32 * self.head.gathered), "loss": hidden + BF16 * chunk}
        yield "gradients of the head", shared | end

    def _backward(self, modules: StageModules, everything: float) -> Iterator[Moment]:
        """The first and the last layer of each kind; between them the moments change evenly."""
        alive, after = everything, self.head
        kinds = (("an MoE", self.moe, modules.moe_layers), ("a dense", self.dense, modules.dense_layers))
        for name, layer, count in kinds:
            for done in sorted({0, 1, count - 1} & set(range(count))):
                before = alive - done * layer.saved
                yield from self._backward_layer(name, layer, after=layer.held if done else after, activations=before)
            alive -= count * layer.saved
            after = layer.held if count else after

    def _backward_layer(self, name: str, layer: LayerCosts, *, after: Held, activations: float) -> Iterator[Moment]:
        """A layer's backward pass: at its fullest, when only attention is left, and while its gradients are reduced.

        The FP32 input of the reduction of the layer after it lives until its own gradients are reduced.
        """
        gathered = {"gathered parameters": float(BF16 * layer.held.gathered)}
        fullest = {
            "activations": activations + layer.recomputed,
            "working set": layer.backward,
            "quantised copies": layer.quantised,
            "gathered gradients": float(FP32 * after.gathered),
        }
        yield f"backward pass of {name} layer", gathered | fullest
        rest = activations - layer.saved
        attention = {
            "activations": rest + layer.attention,
            "working set": layer.attention,
            "gathered gradients": float(FP32 * after.gathered + BF16 * layer.held.gathered),
        }
        yield f"backward pass of attention in {name} layer", gathered | attention
        yield f"gradients of {name} layer", {"activations": rest, "gathered gradients": self._reducing(layer.held)}

    def _reducing(self, module: Held) -> float:
        """Gradients in BF16 and the FP32 input of their reduction; with expert parallelism, experts come first."""
        if self.degrees.ep == 1:
            return float((BF16 + FP32) * module.gathered)
        first = BF16 * module.gathered + FP32 * module.experts
        return float(max(first, BF16 * module.dense + FP32 * module.gathered))

    def _pipeline(self, rank: int, modules: list[StageModules], total: list[Held]) -> Iterator[Moment]:
        """With a pipeline: parameters stay gathered, gradients add up whole and in FP32 until the last micro-batch.

        FSDP2 does not reshard between micro-batches and adds up gradients in the precision of their reduction
        (``torch/distributed/pipelining/stage.py`` and ``torch/distributed/fsdp/_fully_shard`` at 2.14).
        """
        kept = [stage.dense_layers * self.dense.saved + stage.moe_layers * self.moe.saved for stage in modules]
        fullest = in_flight(self.schedule, pp=self.layout.pp, microbatches=self.layout.microbatches, rank=rank)
        activations = max(sum(n * size for n, size in zip(moment, kept, strict=True)) for moment in fullest)
        largest = self.moe if any(stage.moe_layers for stage in modules) else self.dense
        gathered = sum(one.gathered for one in total)
        whole = {"gathered parameters": float(BF16 * gathered), "gathered gradients": float(FP32 * gathered)}
        steady = {
            "activations": activations + largest.recomputed,
            "working set": max(largest.forward, largest.backward),
            "quantised copies": largest.quantised,
        }
        yield "steady state of the pipeline", whole | steady
        ends = {"activations": activations, "working set": float((BF16 + FP32) * largest.held.gathered)}
        yield "gradients of a layer of a micro-batch", whole | ends
        has_head = any(stage.head for stage in modules)
        if has_head:
            for name, parts in self._loss(activations):
                extra = parts["gathered gradients"] - FP32 * self.head.gathered
                yield name, whole | {"activations": activations, "loss": parts["loss"], "working set": extra}
        reduced = max(self.head.gathered * has_head, largest.held.gathered)
        yield "reduction of the gradients", whole | {"working set": float(FP32 * reduced)}

    def shared(self, module: Held) -> int:
        """Elements of a module, when gathered, that more than one rank has a shard of."""
        ranks = self.degrees.efsdp if self.degrees.ep > 1 else self.degrees.fsdp
        return module.dense * (self.degrees.fsdp > 1) + module.experts * (ranks > 1)

    def _shard(self, module: Held) -> float:
        """This rank's part of what :meth:`shared` counts."""
        ranks = self.degrees.efsdp if self.degrees.ep > 1 else self.degrees.fsdp
        dense = module.dense / self.degrees.fsdp if self.degrees.fsdp > 1 else 0
        return dense + (module.experts / ranks if ranks > 1 else 0)


def step(shape: ModelShape, layout: Layout, schedule: str, *, work: Work, mode: Mode) -> Step:
    """Gather what the moments need."""
    degrees = degrees_of(layout)
    dense, moe = (layer_costs(shape, moe=kind, degrees=degrees, work=work, mode=mode) for kind in (False, True))
    return Step(
        shape=shape,
        layout=layout,
        schedule=schedule,
        degrees=degrees,
        work=work,
        mode=mode,
        dense=dense,
        moe=moe,
        embedding=module_held(shape, EMBEDDING, degrees),
        head=module_held(shape, HEAD, degrees),
    )
