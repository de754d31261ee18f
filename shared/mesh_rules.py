"""Rules of a run file about degrees of parallelism and what they cut; `shared.config` holds them with the others."""

import math

from shared.errors import require
from shared.sections import RunConfig
from shared.stages import check_stages


def _check_mesh(config: RunConfig) -> None:
    mesh, batch = config.mesh, config.data.batch
    rule = f"must divide data.batch.round, {batch.round}, so that all ranks share one shape"
    fit = [d for d in range(1, batch.round + 1) if batch.round % d == 0]
    require(batch.round % mesh.data == 0, "mesh.data", mesh.data, rule, f"set one of {fit}, or raise round")
    stage = config.train.zero_stage
    rule = "cannot run with pipeline parallelism: ZeRO-2 and 3 shard gradients that a pipeline accumulates"
    require(mesh.pipe == 1 or stage <= 1, "train.zero_stage", stage, rule, "set 0 or 1, or mesh.pipe=1")
    rule = "cannot run with train.precision bf16: without ZeRO the gradients would be summed in bf16"
    require(stage > 0 or config.train.precision == "fp32", "train.zero_stage", stage, rule, "set train.zero_stage=1")


def _check_tensor(config: RunConfig) -> None:
    degree, decoder = config.mesh.tensor, config.model.decoder
    for name in ("heads", "kv_heads", "mlp", "vocab"):
        size = getattr(decoder, name)
        rule = f"must divide model.decoder.{name}, {size}: each tensor-parallel rank takes an equal share"
        require(size % degree == 0, "mesh.tensor", degree, rule, f"lower it, or change model.decoder.{name}")
    if decoder.experts:
        size = decoder.expert_size
        rule = f"must divide the inner width of an expert, {size}: each tensor-parallel rank takes an equal share"
        require(size % degree == 0, "mesh.tensor", degree, rule, "lower it, or change model.decoder.expert_mlp")
    _check_shares(config)
    stage = config.train.zero_stage
    rule = "is not proven with tensor parallelism"
    require(degree == 1 or stage <= 1, "train.zero_stage", stage, rule, "set 0 or 1, or mesh.tensor=1")


def _check_shares(config: RunConfig) -> None:
    degree, tokens = config.mesh.tensor, config.data.batch.tokens
    for name, what in (("sequence_parallel", "places of a pack"), ("encoder_data_parallel", "images and clips")):
        rule = f"needs mesh.tensor of 2 or more: the ranks of a tensor group share out {what}"
        asked = getattr(config.mesh, name)
        require(degree > 1 or not asked, f"mesh.{name}", asked, rule, "set false, or raise mesh.tensor")
    if config.mesh.sequence_parallel:
        rule = f"must divide data.batch.tokens, {tokens}: with mesh.sequence_parallel each rank keeps as many places"
        remedy = f"set data.batch.tokens to a multiple of {math.lcm(64, degree)}, or mesh.sequence_parallel=false"
        require(tokens % degree == 0, "mesh.tensor", degree, rule, remedy)
        crosses, rule = config.model.decoder.cross_every, "is not proven with mesh.sequence_parallel"
        require(not crosses, "model.decoder.cross_every", crosses, rule, "set 0, or mesh.sequence_parallel=false")


def _check_experts(config: RunConfig) -> None:
    decoder = config.model.decoder
    if decoder.experts:
        rule = f"must be at most model.decoder.experts, {decoder.experts}"
        ok = decoder.experts_per_token <= decoder.experts
        require(ok, "model.decoder.experts_per_token", decoder.experts_per_token, rule, "lower it")
        rule = f"must be at most model.decoder.depth, {decoder.depth}, or no block has experts"
        ok = decoder.expert_every <= decoder.depth
        require(ok, "model.decoder.expert_every", decoder.expert_every, rule, "lower it, or set experts to 0")


def _check_expert_mesh(config: RunConfig) -> None:
    mesh, experts, stage = config.mesh, config.model.decoder.experts, config.train.zero_stage
    if mesh.expert == 1:
        return
    rule = "needs experts to share out: model.decoder.experts is 0"
    require(experts > 0, "mesh.expert", mesh.expert, rule, "set 1, or give the decoder experts")
    rule = f"must divide model.decoder.experts, {experts}: each rank of a group holds as many"
    require(experts % mesh.expert == 0, "mesh.expert", mesh.expert, rule, "lower it, or change the experts")
    rule = f"must divide mesh.data, {mesh.data}: an expert group is a part of a data group"
    fit = [d for d in range(1, mesh.data + 1) if mesh.data % d == 0 and experts % d == 0]
    require(mesh.data % mesh.expert == 0, "mesh.expert", mesh.expert, rule, f"set one of {fit}, or raise mesh.data")
    rule = "is not proven with expert parallelism"
    require(stage <= 1, "train.zero_stage", stage, rule, "set 0 or 1, or mesh.expert=1")
    offload = config.train.offload_optimizer
    require(not offload, "train.offload_optimizer", offload, rule, "set false, or mesh.expert=1")


MESH_RULES = (_check_mesh, _check_tensor, _check_experts, _check_expert_mesh, check_stages)
