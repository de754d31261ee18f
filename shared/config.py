"""Load a run file: read (`run_file`), relative paths placed, and every rule held, before anything starts.

`load` is the only way in. Each field's own range stands in its section; the rules here hold several against each
other. Relative paths in the file are relative to the file. `digest` of the data section is what daemon and trainer
compare.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from shared.batch import batch_spec, groups
from shared.errors import require
from shared.mesh_rules import MESH_RULES
from shared.run_file import read
from shared.sections import DataSection, ModelPart, RunConfig
from shared.wire import MAX_PAYLOAD_BYTES


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, place relative paths, convert and check a run file.

    Raises:
        ConfigError: anything at all is wrong with it; the text names the key, its value, the rule and a remedy.
    """
    config = read(Path(path), overrides)
    return check(_place(config, Path(path).resolve().parent))


def portable(data: DataSection) -> DataSection:
    """The section without the folders that its files lie in."""
    replace = msgspec.structs.replace
    datasets = tuple(replace(d, shards=tuple(s.rsplit("/", 1)[-1] for s in d.shards)) for d in data.datasets)
    text = replace(data.text, tokenizer=data.text.tokenizer.rsplit("/", 1)[-1])
    return replace(data, datasets=datasets, text=text)


def digest(data: DataSection) -> str:
    """Sixteen hex digits that two equal data sections share, wherever the files lie."""
    return hashlib.sha256(msgspec.json.encode(portable(data))).hexdigest()[:16]


def endpoint(config: RunConfig) -> str:
    """The daemon's address with `{uid}` and `{job}` filled in."""
    return _filled(config.loader.endpoint, config)


def served(config: RunConfig) -> tuple[str, ...]:
    """Every address that the daemon serves, `endpoint` first."""
    return tuple(_filled(address, config) for address in (config.loader.endpoint, config.loader.listen) if address)


def endpoints(config: RunConfig) -> tuple[str, ...]:
    """Every daemon that a trainer may read from."""
    return tuple(_filled(address, config) for address in config.loader.endpoints) or (endpoint(config),)


def _filled(text: str, config: RunConfig) -> str:
    return text.replace("{uid}", str(os.getuid())).replace("{job}", config.job)


def run_dir(config: RunConfig) -> Path:
    """Where the trainer keeps logs and checkpoints."""
    return Path(_filled(config.train.run_dir, config))


def index_dir(config: RunConfig) -> Path | None:
    """The index cache folder, or None to keep each index beside its shard."""
    return Path(config.loader.index_dir) if config.loader.index_dir else None


def _place(config: RunConfig, base: Path) -> RunConfig:
    replace = msgspec.structs.replace
    datasets = tuple(replace(d, shards=tuple(_based(s, base) for s in d.shards)) for d in config.data.datasets)
    tokenizer = config.data.text.tokenizer
    text = replace(config.data.text, tokenizer=tokenizer if tokenizer == "bytes" else _based(tokenizer, base))
    folders = {name: getattr(config.loader, name) for name in ("index_dir", "cache_dir", "keys_dir")}
    loader = replace(config.loader, **{name: path and _based(path, base) for name, path in folders.items()})
    init_from = config.train.init_from and _based(config.train.init_from, base)
    train = replace(config.train, run_dir=_based(config.train.run_dir, base), init_from=init_from)
    return replace(config, data=replace(config.data, datasets=datasets, text=text), loader=loader, train=train)


def _based(path: str, base: Path) -> str:
    mark, rest = ("@", path[1:]) if path.startswith("@") else ("", path)
    return path if "://" in rest else mark + str(base / Path(rest).expanduser())


def check(config: RunConfig) -> RunConfig:
    """Hold every rule that needs no data and no devices; return `config` itself.

    Raises:
        ConfigError: the first rule broken.
    """
    for rule in RULES:
        rule(config)
    return config


JOB_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


def _check_job(config: RunConfig) -> None:
    fits = bool(JOB_NAME.fullmatch(config.job))
    require(fits, "job", config.job, "must be 1 to 40 letters, digits, - or _", "rename it")
    require(bool(config.data.datasets), "data.datasets", "[]", "must name at least one dataset", "add one")
    names = [d.name for d in config.data.datasets]
    require(len(set(names)) == len(names), "data.datasets", names, "must have different names", "rename one")


def _check_placeholders(config: RunConfig) -> None:
    loader = config.loader
    texts = [("train.run_dir", config.train.run_dir), ("loader.endpoint", loader.endpoint)]
    texts += [("loader.listen", loader.listen), *(("loader.endpoints", address) for address in loader.endpoints)]
    for name, text in texts:
        unknown = set(re.findall(r"\{.*?\}", text)) - {"{uid}", "{job}"}
        rule = f"has {', '.join(sorted(unknown))} in it, which nothing stands for"
        require(not unknown, name, text, rule, "{uid} and {job} are filled in")


def _check_mixture(config: RunConfig) -> None:
    sets = config.data.datasets
    for dataset in sets:
        name, weight, limit = f"data.datasets.{dataset.name}", dataset.weight, dataset.repeat_limit
        rule = "has no effect without a weight: each sample then comes once an epoch"
        require(weight is not None or limit is None, f"{name}.repeat_limit", limit, rule, "set a weight or remove it")
    total = sum(dataset.weight or 0.0 for dataset in sets)
    ok = total < 1 or all(dataset.weight is not None for dataset in sets)
    rule = "must be below 1 in all, because the datasets without a weight share the rest"
    require(ok, "data.datasets.weight", f"{total:g}", rule, "lower them, or give every dataset a weight")


def _check_image(config: RunConfig) -> None:
    image = config.data.image
    unit = image.multiple
    rule = f"must be at least {unit * unit}, one square of side {unit} (LCM of patch x merge and align)"
    require(image.pixel_budget >= unit * unit, "data.image.pixel_budget", image.pixel_budget, rule, "raise it")
    for height, width in image.buckets:
        for side in (height, width):
            low = max(unit, side // unit * unit)
            rule = f"has side {side}, which must be a multiple of {unit} (LCM of patch x merge and align)"
            ok = side > 0 and side % unit == 0
            require(ok, "data.image.buckets", f"{height}x{width}", rule, f"nearest are {low} and {low + unit}")


def _check_audio(config: RunConfig) -> None:
    audio, model = config.data.audio, config.model.audio
    stride = 2 * model.hop
    rule = f"must be a multiple of {stride} (two mel hops of model.audio.hop {model.hop})"
    low = max(stride, audio.samples_per_token // stride * stride)
    ok = audio.samples_per_token > 0 and audio.samples_per_token % stride == 0
    remedy = f"nearest are {low} and {low + stride}"
    require(ok, "data.audio.samples_per_token", audio.samples_per_token, rule, remedy)
    for seconds in audio.classes_s:
        unit = audio.samples_per_token / audio.rate_hz
        low_s = max(unit, seconds // unit * unit)
        ok = seconds > 0 and round(seconds * audio.rate_hz) % audio.samples_per_token == 0
        rule = f"must be a multiple of {unit:g} s (samples_per_token / rate_hz)"
        require(ok, "data.audio.classes_s", seconds, rule, f"nearest are {low_s:g} and {low_s + unit:g}")
        rule = f"must be at most model.audio.max_s, {model.max_s:g}"
        require(seconds <= model.max_s, "data.audio.classes_s", seconds, rule, "raise model.audio.max_s")


def _check_batch(config: RunConfig) -> None:
    batch, text = config.data.batch, config.data.text
    ok = batch.micro_batches % batch.round == 0
    rule = f"must be a multiple of data.batch.round, {batch.round}"
    low = max(1, batch.micro_batches // batch.round) * batch.round
    remedy = f"nearest are {low} and {low + batch.round}"
    require(ok, "data.batch.micro_batches", batch.micro_batches, rule, remedy)
    low = max(64, batch.tokens // 64 * 64)
    ok = batch.tokens >= 64 and batch.tokens % 64 == 0
    remedy = f"nearest are {low} and {low + 64}"
    require(ok, "data.batch.tokens", batch.tokens, "must be a multiple of 64", remedy)
    largest = max(groups(config.data), key=lambda g: g.image_tokens + g.clip_tokens)
    need = largest.image_tokens + largest.clip_tokens + text.max_tokens + 2
    rule = f"must hold the largest sample: {need} tokens (group {largest.name} and a caption of {text.max_tokens})"
    require(need <= batch.tokens, "data.batch.tokens", batch.tokens, rule, "raise it, or lower the budgets")


def _check_cost(config: RunConfig) -> None:
    cost = config.data.batch.cost
    require(cost.token > 0, "data.batch.cost.token", cost.token, "must be above 0: the others count in it", "set 1")


def _check_skips(config: RunConfig) -> None:
    for first, end in config.data.skip_steps:
        rule = "must be ranges [first, end) of steps with 0 <= first < end"
        require(0 <= first < end, "data.skip_steps", f"[{first}, {end}]", rule, "[[100, 120]] skips steps 100 to 119")


WAITS = (("heartbeat_s", "lease_s"), ("heartbeat_s", "drain_s"), ("drain_s", "grace_s"), ("read_s", "worker_s"))


def _check_waits(config: RunConfig) -> None:
    loader = config.loader
    for low, high in WAITS:
        rule = f"must be below loader.{high}, {getattr(loader, high):g}"
        ok = 0 < getattr(loader, low) < getattr(loader, high)
        require(ok, f"loader.{low}", getattr(loader, low), rule, f"lower it or raise loader.{high}")
    rule = f"must be above two heartbeats, {2 * loader.heartbeat_s:g}"
    require(config.train.wait_s > 2 * loader.heartbeat_s, "train.wait_s", config.train.wait_s, rule, "raise it")


def _check_jobs(config: RunConfig) -> None:
    names = [config.job, *(job.name for job in config.loader.jobs)]
    bad = [name for name in names[1:] if not JOB_NAME.fullmatch(name)]
    require(not bad, "loader.jobs", bad, "must be named by 1 to 40 letters, digits, - or _", "rename them")
    require(len(set(names)) == len(names), "loader.jobs", names, "must differ from job and each other", "rename one")


def _check_lanes(config: RunConfig) -> None:
    loader = config.loader
    for name, values in (("listen", (loader.listen,)), ("endpoints", loader.endpoints)):
        for value in filter(None, values):
            schemes = ("tcp://",) if name == "listen" else ("tcp://", "ipc://")
            rule = f"must begin with {' or '.join(schemes)}"
            require(value.startswith(schemes), f"loader.{name}", value, rule, "for example tcp://node7:9200")
    rule = "must differ from each other: a daemon is tried once a round"
    require(len(set(loader.endpoints)) == len(loader.endpoints), "loader.endpoints", "given", rule, "remove one")
    ok = loader.device == "gpu" or loader.lane != "cuda"
    rule = "needs loader.device: gpu: pixels that are decoded on a CPU lie in slots"
    require(ok, "loader.lane", loader.lane, rule, "set loader.device=gpu or loader.lane=auto")
    largest = max(batch_spec(group).size_bytes for group in groups(config.data))
    ok = largest <= MAX_PAYLOAD_BYTES or not (loader.listen or loader.lane == "tcp")
    rule = f"makes a micro-batch of {largest} bytes, and the tcp lane takes at most {MAX_PAYLOAD_BYTES}"
    require(ok, "data.batch.tokens", config.data.batch.tokens, rule, "lower it")


def _check_training(config: RunConfig) -> None:
    optim = config.train.optim
    ok = optim.momentum == 0 or optim.name == "sgd"
    require(ok, "train.optim.momentum", optim.momentum, "is for sgd alone: adamw has betas", "set 0")
    attention = config.train.attention
    ok = not (config.train.deterministic and attention in ("flash4", "flash2"))
    rule = "is not deterministic, which train.deterministic asks for"
    require(ok, "train.attention", attention, rule, "set sdpa or auto")


def _check_model(config: RunConfig) -> None:
    model = config.model
    for name in ("vision", "audio", "decoder"):
        part = getattr(model, name)
        even = part.dim % part.heads == 0 and (part.dim // part.heads) % 2 == 0
        rule = f"must be heads x an even head size (heads = {part.heads})"
        near = 2 * part.heads * max(1, part.dim // part.heads // 2)
        require(even, f"model.{name}.dim", part.dim, rule, f"set {near}")
    decoder = model.decoder
    rule = "must be even: rotary positions turn pairs"
    require(decoder.head_size % 2 == 0, "model.decoder.head_dim", decoder.head_dim, rule, "set 0 for dim / heads")
    rule = f"must be from 0 to model.decoder.depth, {decoder.depth}"
    ok = decoder.cross_every <= decoder.depth
    require(ok, "model.decoder.cross_every", decoder.cross_every, rule, "set 0 for none, 1 for every block")
    ok = decoder.heads % decoder.kv_heads == 0
    rule = f"must divide model.decoder.heads, {decoder.heads}"
    require(ok, "model.decoder.kv_heads", decoder.kv_heads, rule, f"set {decoder.heads} or a divisor")


def _check_memory(config: RunConfig) -> None:
    train, model = config.train, config.model
    rule = "needs train.zero_stage 1, 2 or 3: without ZeRO no part of the optimizer leaves the device"
    remedy = "set train.zero_stage=1 or train.offload_optimizer=false"
    require(train.zero_stage > 0 or not train.offload_optimizer, "train.offload_optimizer", True, rule, remedy)
    for name in ("vision", "audio", "decoder"):
        blocks, depth = getattr(train.recompute, name), getattr(model, name).depth
        rule = f"must be all, or from {-depth} to {depth}: the first n, or the last n for -n, of model.{name}.depth"
        ok = blocks == "all" or abs(blocks) <= depth
        require(ok, f"train.recompute.{name}", blocks, rule, "set all")


def _check_gradients(config: RunConfig) -> None:
    train, decoder = config.train, config.model.decoder
    absent = set() if decoder.cross_blocks else {"cross_attention"}
    left = set(get_args(ModelPart)) - absent - set(train.freeze)
    require(bool(left), "train.freeze", "every part", "must leave something to train", "take a part out")
    rule = "must hold both or neither of embedding and head, which share one weight (model.decoder.tied)"
    one = len({"embedding", "head"} & set(train.freeze)) == 1
    require(not (decoder.tied and one), "train.freeze", ", ".join(train.freeze), rule, "add or remove one")
    for layer in config.model.gradient_cuts:
        rule = f"must be a decoder layer, 0 to {decoder.depth - 1}"
        require(0 <= layer < decoder.depth, "model.gradient_cuts", layer, rule, "change it or model.decoder.depth")


RULES: tuple[Callable[[RunConfig], None], ...] = (
    _check_job,
    _check_placeholders,
    _check_mixture,
    _check_image,
    _check_audio,
    _check_batch,
    _check_cost,
    _check_skips,
    *MESH_RULES,
    _check_waits,
    _check_jobs,
    _check_lanes,
    _check_training,
    _check_model,
    _check_memory,
    _check_gradients,
)
