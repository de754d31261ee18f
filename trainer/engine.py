"""The only door to DeepSpeed: layers and a run file in, training steps and checkpoints out.

One stage runs under DeepSpeedEngine, several under PipelineEngine; both see the same layers, seeds, optimizer and
loss, and return the same loss and gradient norm for the same global batch. What DeepSpeed gets wrong in some layout
(gradient norms of ZeRO-0, sums in bf16) is done here or refused.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import msgspec
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from shared.errors import CheckpointError, ConfigError
from shared.sections import RunConfig
from shared.telemetry import logger
from trainer.expert_stats import ExpertStats, collect
from trainer.feed import MicroBatch
from trainer.launch import Ranks
from trainer.loss import WHOLE, Vocabulary, token_loss
from trainer.models import build
from trainer.models.attention import Backend, choose_backend
from trainer.models.moe import weigh_losses
from trainer.optim import build_optimizer, clip_gradients, set_lr
from trainer.pipeline import cuts
from trainer.weights import load_initial

if TYPE_CHECKING:
    from trainer.parallel.expert_state import ExpertState
    from trainer.parallel.groups import Groups

_log = logger("engine")


class StepResult(msgspec.Struct, frozen=True):
    """Mean loss per label token of the global batch, and the gradient's 2-norm before clipping; what experts did."""

    loss: float
    grad_norm: float
    experts: ExpertStats | None = None


class Engine:
    """One optimizer step at a time over the micro-batches of this rank."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        engine: Any,
        clipping: "Clipping | None",
        vocabulary: Vocabulary,
        experts: "ExpertState | None",
    ) -> None:
        self._ranks, self._engine, self._micro_batches = ranks, engine, micro_batches_per_rank(config)
        self._clipping, self._vocabulary = clipping, vocabulary
        self._decoder, self._experts = config.model.decoder, experts

    def train_batch(self, micro_batches: Iterator[MicroBatch], lr: float) -> StepResult:
        """Pull this rank's micro-batches of one global batch (none on a middle stage) and take one step."""
        set_lr(self._engine.optimizer.param_groups, lr)
        whole = self._ranks.mesh.pipe == 1
        loss = self._accumulate(micro_batches) if whole else float(self._engine.train_batch(data_iter=micro_batches))
        return StepResult(loss, self._grad_norm(), collect(self._engine.module, self._decoder, self._ranks))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters (its stage, its slices), named as in the whole model."""
        return iter(self._engine.module.named_parameters())

    def save(self, folder: Path, tag: str) -> None:
        """Write this rank's share of weights and optimizer state into `folder / tag`."""
        with self._experts.hidden(self._engine) if self._experts else contextlib.nullcontext():
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        if self._experts:
            self._experts.save(self._engine, folder / tag)

    def load(self, folder: Path, tag: str) -> None:
        """Read what `save` wrote, in the same layout.

        Raises:
            CheckpointError: DeepSpeed finds nothing to load there.
        """
        with self._experts.hidden(self._engine) if self._experts else contextlib.nullcontext():
            found, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if found is None:
            raise CheckpointError(f"DeepSpeed cannot load checkpoint {folder / tag}")
        if self._experts:
            self._experts.load(self._engine, folder / tag)

    def _accumulate(self, micro_batches: Iterator[MicroBatch]) -> float:
        total = torch.zeros((), device=self._ranks.device)
        for _ in range(self._micro_batches):
            inputs, targets = next(micro_batches)
            loss = token_loss(self._engine(inputs), *targets, self._vocabulary)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total) / (self._micro_batches * self._ranks.mesh.world)

    def _grad_norm(self) -> float:
        return self._clipping.norm if self._clipping else float(self._engine.get_global_grad_norm())


class Clipping:
    """Gradient norm and clipping before a plain optimizer's step.

    DeepSpeed's own, without ZeRO, counts stage 0 alone and does not report.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        clip: float,
        add_up: Callable[[Tensor], Tensor],
        counts: Callable[[Tensor], bool],
    ) -> None:
        self._parameters, self._clip, self._add_up, self._counts = parameters, clip, add_up, counts
        self.norm = 0.0

    def __call__(self, *step: Any) -> None:
        """Before the step: clip, and remember the norm."""
        self.norm = clip_gradients(self._parameters, self._clip, self._add_up, self._counts)


class Pipeline(PipelineModule):
    """PipelineModule with our own cuts instead of its partition methods."""

    def __init__(self, layers: list[LayerSpec], bounds: list[int], **settings: Any) -> None:
        self.bounds = bounds
        super().__init__(layers, **settings)

    def _partition_layers(self, method: str = "own") -> None:
        self.parts = self.bounds
        self._set_bounds(start=self.bounds[self.stage_id], stop=self.bounds[self.stage_id + 1])


def build_engine(config: RunConfig, ranks: Ranks) -> Engine:
    """The engine for this rank of the run.

    Raises:
        ConfigError: the layout is not known to give right results.
    """
    check_layout(config)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    backend = choose_backend(ranks.device, dtype, build.head_sizes(config))
    with quiet_deepspeed():
        groups, experts = _groups(ranks), _experts(ranks)
        vocabulary: Vocabulary = groups.tensor if groups else WHOLE
        model = _model(config, ranks, backend, vocabulary)
        load_initial(model, config)
        _split(model, groups, experts)
        weigh_losses(model, 1 / micro_batches_per_rank(config))
        optimizer = build_optimizer(model, config.train.optim)
        clipping = _clipping(config, ranks, model, optimizer) if config.train.zero_stage == 0 else None
        mpu = None if isinstance(model, Pipeline) else groups
        settings = deepspeed_config(config)
        with experts.shown(model, optimizer) if experts else contextlib.nullcontext():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
        if experts and not clipping:
            experts.own_norm(engine.optimizer)
    if ranks.is_main:
        _log.info("%s, %s, attention by %s", type(engine).__name__, type(engine.optimizer).__name__, backend)
    return Engine(config, ranks, engine, clipping, vocabulary, experts)


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Start DeepSpeed's communication without compiling anything; keep its prints and deprecations to itself."""
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
        yield


def micro_batches_per_rank(config: RunConfig) -> int:
    """How many micro-batches a data-parallel rank takes of each global batch."""
    return config.data.batch.micro_batches // config.mesh.data


def check_layout(config: RunConfig) -> None:
    """Refuse what DeepSpeed would run wrongly or not at all."""
    train = config.train
    if train.precision == "bf16" and train.zero_stage == 0:
        rule = "cannot run with train.precision bf16: without ZeRO the gradients would be summed in bf16"
        raise ConfigError("train.zero_stage", 0, rule, "set train.zero_stage=1")
    if config.mesh.pipe > 1 and train.zero_stage > 1:
        rule = "cannot run with pipeline parallelism: ZeRO-2 and 3 shard gradients that a pipeline accumulates"
        raise ConfigError("train.zero_stage", train.zero_stage, rule, "set 0 or 1, or mesh.pipe=1")
    cuts(build.parameter_counts(config), config.mesh.pipe)


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """What DeepSpeed is told; users are never asked for it."""
    train = config.train
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches_per_rank(config),
        "steps_per_print": None,
        "gradient_clipping": train.optim.clip if train.zero_stage else 0.0,
        "zero_optimization": {"stage": train.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": train.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


def _groups(ranks: Ranks) -> "Groups | None":
    if ranks.mesh.tensor == 1:
        return None
    from trainer.parallel.groups import make_groups

    return make_groups(ranks.mesh, ranks.rank)


def _experts(ranks: Ranks) -> "ExpertState | None":
    if ranks.mesh.expert == 1:
        return None
    from trainer.parallel.expert import make_expert_group
    from trainer.parallel.expert_state import ExpertState

    return ExpertState(make_expert_group(ranks.mesh, ranks.rank))


def _split(model: nn.Module, groups: "Groups | None", experts: "ExpertState | None") -> None:
    if groups:
        from trainer.parallel.tensor import split

        split(model, groups.tensor)
    if experts:
        experts.split(model)


def _model(config: RunConfig, ranks: Ranks, backend: Backend, vocabulary: Vocabulary) -> nn.Module:
    if config.mesh.pipe == 1:
        return build.build(config, backend).to(ranks.device)
    mesh = ranks.mesh
    return Pipeline(
        [LayerSpec(layer.kind, *layer.args) for layer in build.layers(config, backend)],
        bounds=cuts(build.parameter_counts(config), mesh.pipe),
        topology=PipeModelDataParallelTopology(num_pp=mesh.pipe, num_mp=mesh.tensor, num_dp=mesh.data),
        loss_fn=lambda logits, targets: token_loss(logits, targets[0], targets[1], vocabulary),
        seed_layers=True,
        seed_fn=torch.manual_seed,
        base_seed=config.train.seed,
    )


def _clipping(config: RunConfig, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> Clipping:
    mesh, coords = ranks.mesh, ranks.coords

    def over_ranks(squares: Tensor) -> Tensor:
        dist.all_reduce(squares)
        return squares

    def counts(parameter: Tensor) -> bool:
        first = coords.data < (1 if getattr(parameter, "allreduce", True) else mesh.expert)
        return first and (coords.tensor == 0 or getattr(parameter, "tensor_model_parallel", False))

    clipping = Clipping(list(model.parameters()), config.train.optim.clip, over_ranks, counts)
    optimizer.register_step_pre_hook(clipping)
    return clipping
