"""The only door to DeepSpeed: layers and a run file in, training steps and checkpoints out.

One stage runs under DeepSpeedEngine, several under PipelineEngine; both see the same layers, seeds, optimizer and
loss, and return the same loss and gradient norm for the same global batch. What DeepSpeed gets wrong in some layout
(gradient norms of ZeRO-0, sums in bf16) is done by `Clipping` or refused by `shared.config`.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from shared.logs import logger
from shared.sections import MeshSection, RunConfig
from trainer import state
from trainer.accumulating import accumulate_in_one_pass
from trainer.clipping import Clipping
from trainer.compiling import compile_blocks, compiles
from trainer.ds_config import deepspeed_config, micro_batches_per_rank
from trainer.expert_stats import collect
from trainer.feed import MicroBatch
from trainer.launch import Ranks
from trainer.layer_times import layer_times_ns
from trainer.loss import WHOLE
from trainer.memory.recompute import recompute, recomputed_modules
from trainer.models import build
from trainer.models.attention import Backend, choose_backend
from trainer.models.cross import joined, parted
from trainer.models.gradients import anchored, cut_gradients
from trainer.models.moe import weigh_losses
from trainer.models.parts import EMBEDDING, freeze, is_tied_copy
from trainer.nonfinite import GradientWatch, LossFunction, StepResult
from trainer.optim import build_optimizer, parameter_groups, set_lr
from trainer.pipeline import bounds_of
from trainer.shard import Entry
from trainer.source import Source
from trainer.stage_table import show_stages, stages
from trainer.weights import load_initial

if TYPE_CHECKING:
    from trainer.parallel.expert_state import ExpertState
    from trainer.parallel.groups import Groups
    from trainer.parallel.tied import Tie

_log = logger("engine")


class Engine:
    """One optimizer step at a time over the micro-batches of this rank."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        engine: Any,
        clipping: Clipping | None,
        loss: LossFunction,
        watch: GradientWatch,
        tie: "Tie | None" = None,
    ) -> None:
        self._ranks, self._engine, self._micro_batches = ranks, engine, micro_batches_per_rank(config)
        self._clipping, self._loss, self._watch, self._tie = clipping, loss, watch, tie
        self._decoder = config.model.decoder

    def train_batch(self, micro_batches: Iterator[MicroBatch], lr: float) -> StepResult:
        """Pull this rank's micro-batches of one global batch (none on a middle stage) and take one step."""
        set_lr(self._engine.optimizer.param_groups, lr)
        whole = self._ranks.mesh.pipe == 1
        loss = self._accumulate(micro_batches) if whole else float(self._engine.train_batch(data_iter=micro_batches))
        if self._tie and self._tie.trained:
            self._tie.spread()
        experts = collect(self.module, self._decoder, self._ranks)
        norm, finite, uncounted_bad = self._grad_norm(), self._loss.take(), self._watch.take()
        if math.isfinite(norm) and not uncounted_bad:
            return StepResult(loss, norm, experts=experts)
        self._forget_gradients()
        suspects = () if finite is None else tuple(torch.nonzero(~finite).flatten().tolist())
        return StepResult(loss, norm, True, suspects)

    @property
    def module(self) -> nn.Module:
        """What this rank trains: the model, or its stage of it."""
        found: nn.Module = self._engine.module
        return found

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of this rank's parameters (its stage, its slices), named as in the whole model; collective.

        A tied head's copy has the embedding's name.
        """
        for name, parameter in self.module.named_parameters():
            if not name.startswith("anchors."):
                with deepspeed.zero.GatheredParameters([parameter]):
                    yield EMBEDDING if is_tied_copy(parameter) else name, parameter.detach().clone()

    def entries(self) -> dict[str, Entry]:
        """This rank's share of weights and optimizer state, as views of the live tensors."""
        return state.entries(self._held(), self._stepper)

    def fill(self, source: Source) -> None:
        """Take weights and optimizer state out of a checkpoint of any layout.

        Raises:
            CheckpointError: it lacks something that this rank holds.
        """
        state.fill(self._held(), self._stepper, source)
        if self._tie:
            self._tie.spread()

    def _held(self) -> Iterator[state.Held]:
        return state.held(self._engine.module, self._engine.optimizer, self._ranks)

    @property
    def _stepper(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        return optimizer

    def _accumulate(self, micro_batches: Iterator[MicroBatch]) -> float:
        total = torch.zeros((), device=self._ranks.device)
        for _ in range(self._micro_batches):
            inputs, targets = next(micro_batches)
            loss = self._loss(self._engine(inputs), targets)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total) / (self._micro_batches * self._ranks.mesh.world)

    def _forget_gradients(self) -> None:
        """After a skipped step: DeepSpeed, in bf16 with offload, would add the next step's gradients to its own."""
        held = getattr(self._engine.optimizer, "averaged_gradients", {})
        held.update(dict.fromkeys(held))

    def _grad_norm(self) -> float:
        return self._clipping.norm if self._clipping else float(self._engine.get_global_grad_norm())


class Pipeline(PipelineModule):
    """PipelineModule with our own cuts instead of its partition methods, and stages that may train nothing.

    DeepSpeed needs an optimizer on every stage, an output to go backward from, and as many parameter groups as on the
    other stages (ZeRO sums a norm for each over the stages). Where freezing leaves a group of this stage empty,
    `add_anchors` gives it a parameter that is zero, changes nothing and gets zero gradients. No file of weights has it.
    """

    def __init__(self, layers: list[LayerSpec], bounds: list[int], **settings: Any) -> None:
        self.bounds = bounds
        super().__init__(layers, **settings)
        self.anchors = nn.ParameterList()

    def add_anchors(self) -> None:
        """One for each empty group: a matrix for the one that decays, a vector for the other."""
        device = next(self.parameters()).device
        for group, shape in zip(parameter_groups(self, 0.0), ((1, 1), (1,)), strict=True):
            if not group["params"]:
                self.anchors.append(nn.Parameter(torch.zeros(shape, device=device)))

    def forward(self, forward_input: Any) -> Any:
        """The stage's output: logits, or a state whose first tensor carries the gradient."""
        out = super().forward(parted(forward_input) if self.stage_id else forward_input)
        for anchor in self.anchors:
            out = (anchored(out[0], anchor), *out[1:]) if isinstance(out, tuple) else anchored(out, anchor)
        return joined(out) if isinstance(out, tuple) else out

    def _partition_layers(self, method: str = "own") -> None:
        self.parts = self.bounds
        self._set_bounds(start=self.bounds[self.stage_id], stop=self.bounds[self.stage_id + 1])


def build_engine(config: RunConfig, ranks: Ranks) -> Engine:
    """The engine for this rank of the run.

    Raises:
        ConfigError: the model cannot be laid out like this.
    """
    backend = _backend(config, ranks)
    with quiet_deepspeed():
        groups, experts = _groups(ranks), _experts(config.mesh, ranks)
        loss = LossFunction(groups.tensor if groups else WHOLE, compiles(config.train, ranks.device))
        model = _model(config, ranks, backend, loss, _bounds(config, ranks, backend, groups, experts))
        load_initial(model, config)
        _apply_tables(config, model, groups, experts)
        tie = _tie(config, ranks, model)
        if isinstance(model, Pipeline):
            model.add_anchors()
        compiled = compile_blocks(model, config.train, ranks.device)
        optimizer = build_optimizer(model, config.train.optim)
        watch = GradientWatch(p for p in model.parameters() if p.requires_grad and not _counts(ranks, p))
        clipping = None if config.train.zero_stage else _clipping(config, ranks, model).attach(optimizer)
        mpu = None if isinstance(model, Pipeline) else groups
        settings = deepspeed_config(config, ranks.device)
        with experts.shown(model, optimizer) if experts else contextlib.nullcontext():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
        if isinstance(engine.optimizer, BF16_Optimizer):
            accumulate_in_one_pass(engine.optimizer, compiles(config.train, ranks.device))
        if experts and not clipping:
            experts.own_norm(engine.optimizer)
        if tie:
            engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceTiedGrads: lambda _: tie.reduce()}
            tie.spread()
    if ranks.is_main:
        kinds = type(engine).__name__, type(engine.optimizer).__name__
        _log.info("%s, %s, attention by %s, %d blocks compiled", *kinds, backend, compiled)
    return Engine(config, ranks, engine, clipping, loss, watch, tie)


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Start DeepSpeed's communication without compiling anything; keep its prints and deprecations to itself."""
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
        yield


def _backend(config: RunConfig, ranks: Ranks) -> Backend:
    if config.train.deterministic and config.train.attention == "auto":
        return "sdpa"
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    return choose_backend(ranks.device, dtype, build.head_sizes(config), config.train.attention)


def _groups(ranks: Ranks) -> "Groups | None":
    if ranks.mesh.tensor == 1:
        return None
    from trainer.parallel.groups import make_groups

    return make_groups(ranks.mesh, ranks.rank)


def _experts(mesh: MeshSection, ranks: Ranks) -> "ExpertState | None":
    if mesh.expert == 1:
        return None
    from trainer.parallel.expert import make_expert_group
    from trainer.parallel.expert_state import ExpertState

    backend = None if mesh.expert_backend == "auto" else mesh.expert_backend
    return ExpertState(make_expert_group(ranks.mesh, ranks.rank, backend))


def _apply_tables(config: RunConfig, model: nn.Module, groups: "Groups | None", experts: "ExpertState | None") -> None:
    """All that is done to layers written for one device and whole training, in the order in which it must be."""
    freeze(model, config.train.freeze, config.model.decoder.depth)
    _split(config.mesh, model, groups, experts)
    weigh_losses(model, 1 / micro_batches_per_rank(config))
    cut_gradients(model, config.model.gradient_cuts)
    recompute(model, recomputed_modules(config))


def _tie(config: RunConfig, ranks: Ranks, model: nn.Module) -> "Tie | None":
    """Make a tied head one weight with the embedding: on one rank one parameter, else what `Tie` keeps equal."""
    if not config.model.decoder.tied:
        return None
    if config.mesh.pipe == 1:
        build.tie(model)
        return None
    from trainer.parallel.tied import tie_stages

    return tie_stages(model, ranks.mesh, ranks.rank)


def _split(mesh: MeshSection, model: nn.Module, groups: "Groups | None", experts: "ExpertState | None") -> None:
    if groups:
        from trainer.parallel.encoders import share_encoders
        from trainer.parallel.tensor import split

        split(model, groups.tensor, mesh.sequence_parallel)
        if mesh.encoder_data_parallel:
            share_encoders(model, groups.tensor)
    if experts:
        experts.split(model)


def _bounds(
    config: RunConfig, ranks: Ranks, backend: Backend, groups: "Groups | None", experts: "ExpertState | None"
) -> list[int]:
    """Where the pipeline is cut, which rank 0 tells."""
    if config.mesh.pipe == 1:
        return []
    parameters = costs = build.parameter_counts(config)
    if config.mesh.balance == "measured":

        def prepare(layer: nn.Module) -> None:
            _apply_tables(config, layer, groups, experts)
            compile_blocks(layer, config.train, ranks.device)

        layers, vocabulary = build.layers(config, backend), groups.tensor if groups else WHOLE
        costs = layer_times_ns(config, ranks, layers, prepare, vocabulary)
    bounds = bounds_of(config, costs)
    if ranks.is_main:
        rows = stages(config, bounds, parameters, costs)
        show_stages(rows, "parameters" if costs is parameters else "time")
    return bounds


def _model(config: RunConfig, ranks: Ranks, backend: Backend, loss: LossFunction, bounds: list[int]) -> nn.Module:
    """The model, or this rank's stage, its weights drawn on the device: billions of them take a CPU a minute."""
    mesh = ranks.mesh
    with ranks.device:
        if mesh.pipe == 1:
            return build.build(config, backend)
        return Pipeline(
            [LayerSpec(layer.kind, *layer.args) for layer in build.layers(config, backend)],
            bounds=bounds,
            topology=PipeModelDataParallelTopology(num_pp=mesh.pipe, num_mp=mesh.tensor, num_dp=mesh.data),
            loss_fn=loss,
            seed_layers=True,
            seed_fn=torch.manual_seed,
            base_seed=config.train.seed,
        )


def _clipping(config: RunConfig, ranks: Ranks, model: nn.Module) -> Clipping:
    def over_ranks(squares: Tensor) -> Tensor:
        dist.all_reduce(squares)
        return squares

    return Clipping(list(model.parameters()), config.train.optim.clip, over_ranks, partial(_counts_once, ranks))


def _counts(ranks: Ranks, parameter: Tensor) -> bool:
    """Whether a stage's norm counts the parameter on this tensor rank: every one has it whole, or its own slice."""
    return ranks.coords.tensor == 0 or getattr(parameter, "tensor_model_parallel", False)


def _counts_once(ranks: Ranks, parameter: Tensor) -> bool:
    """Whether a sum over all ranks counts the parameter here: on data rank 0, an expert on its first holder."""
    holders = 1 if getattr(parameter, "allreduce", True) else ranks.mesh.expert
    return ranks.coords.data < holders and _counts(ranks, parameter)
